# SPDX-License-Identifier: Apache-2.0
"""One model, its float32 masters and AdamW, in one process or spread over many.

    whole weights     every process computes its own rows; gradients are added up     whole_weights.py
    sharded weights   FSDP2, with tensor, sequence and pipeline parallelism inside    sharded_weights.py, building.py

What is done with them is the same: gradients are clipped by the norm of all of them, and a step moves the masters.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.config import OptimConfig
from quadriga.engines.base import LossFunction, OptimizerStep, Outputs
from quadriga.engines.fsdp.building import build_weights
from quadriga.engines.fsdp.memory import Memory
from quadriga.engines.fsdp.sharded_weights import ReadWeight, ShardedWeights
from quadriga.engines.fsdp.whole_weights import WholeWeights
from quadriga.engines.packing import PackedBatch, filler
from quadriga.engines.parallel.pipeline import Pipeline, Stage
from quadriga.engines.parallel.processes import ONE_PROCESS, Processes
from quadriga.errors import EngineError
from quadriga.models.adapter_files import base_name, is_factor, merged
from quadriga.models.flops import model_cost
from quadriga.models.lora import adapter_of
from quadriga.models.scorers import Question, Scorer
from quadriga.models.vision import is_vision, unseen_image


@dataclass(frozen=True)
class Training:
    """How a model is taught: the optimizer, the largest gradient norm, and the patience with broken gradients."""

    optim: OptimConfig
    grad_clip: float
    max_nonfinite_steps: int


class FSDPEngine:
    """See `engines.base.TrainEngine`.

    Args:
        scorer: the model and its head. Its parameters are float32 on arrival, whole, or on "meta" with `read`.
        dtype: of the compute weights.
        device: where the model computes.
        training: None for a model that is only asked.
        memory: what is given up to save some.
        name: of the role, for errors.
        processes: that hold this model.
        read: gives the parameters' values, where the scorer has none.

    Raises:
        EngineError: another process has a model with other weights.
    """

    def __init__(
        self,
        scorer: Scorer,
        *,
        dtype: torch.dtype,
        device: torch.device,
        training: Training | None = None,
        memory: Memory | None = None,
        name: str = "actor",
        processes: Processes = ONE_PROCESS,
        read: ReadWeight | None = None,
    ) -> None:
        self.scorer, self.dtype, self.name = scorer, dtype, name
        self.device: torch.device = device
        self.processes, self.replicas, self.world = processes, processes.replicas, processes.world
        self.training, self.memory = training, memory or Memory()
        self.model: PreTrainedModel = scorer.model
        model = self.model
        self.has_whole_weights = processes.layout.is_whole
        self.cost = model_cost(model)
        self.num_nonfinite_steps = torch.zeros((), dtype=torch.int64)
        _without_dropout(model)
        if training is None:
            model.requires_grad_(False)
        self.parameters: WholeWeights | ShardedWeights = build_weights(
            scorer,
            dtype=dtype,
            processes=processes,
            read=read,
            memory=self.memory,
        )
        self._require_equal_replicas()
        root = self.parameters.root
        self.pipeline = Pipeline(root, processes, dtype) if isinstance(root, Stage) else None
        if training is None:
            return
        self.optimizer = torch.optim.AdamW(
            self._masters(),
            lr=training.optim.lr,
            betas=training.optim.betas,
            eps=training.optim.eps,
            weight_decay=training.optim.weight_decay,
            fused=True,
        )
        if self.memory.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    # ---- asking and teaching --------------------------------------------------------------------------

    def output_names(self, question: Question) -> tuple[str, ...]:
        """See `TrainEngine.output_names`."""
        return self.scorer.output_names(question)

    @torch.no_grad()
    def forward(self, batches: Sequence[PackedBatch], question: Question) -> list[Outputs]:
        """See `TrainEngine.forward`."""
        work = [batch for batch, _ in self._in_step([(batch, _nothing) for batch in batches])]
        if self.pipeline is not None:
            outputs = self.pipeline.forward(work, question) if work else []
        else:
            outputs = [self.scorer(batch, question) for batch in work]
        self.parameters.rest()
        return outputs[: len(batches)]

    def backward(
        self, batches: Sequence[PackedBatch], losses: Sequence[LossFunction], *, temperature: float = 1.0
    ) -> None:
        """See `TrainEngine.backward`."""
        model, question = self.scorer.model, Question(temperature, with_entropy=True)
        work = self._in_step(list(zip(batches, losses, strict=True)))
        model.train(self.memory.gradient_checkpointing)  # Hugging Face checkpoints layers in training mode only
        with self._activations():
            if self.pipeline is not None and work:
                self.pipeline.backward(work, question)
            elif self.pipeline is None:
                for batch, loss in work:
                    loss(self.scorer(batch, question)).backward()
        model.eval()

    def _in_step(self, work: list[tuple[PackedBatch, LossFunction]]) -> list[tuple[PackedBatch, LossFunction]]:
        """Micro-batches as all processes need them: as many everywhere, tokens in multiples, fillers at the end."""
        layout = self.processes.layout
        if layout.is_whole:
            return work
        number = max(self.replicas.gather(len(work)))
        if number and self.pipeline is not None:
            number = max(number, self.pipeline.min_batches)
        multiple = self.processes.token_multiple
        fillers = [(filler(self.device), _nothing)] * (number - len(work))
        all_work = [
            (batch.extended(-(-batch.num_tokens // multiple) * multiple), loss) for batch, loss in work + fillers
        ]
        if not is_vision(self.model.config):
            return all_work
        # The processes gather the weights of the tower together, whoever has images.
        return [
            (batch if batch.images else replace(batch, images=unseen_image(self.model, self.device)), loss)
            for batch, loss in all_work
        ]

    def _activations(self) -> AbstractContextManager[Any]:
        if self.memory.activation_offload and self.device.type == "cuda":
            return torch.autograd.graph.save_on_cpu(pin_memory=True)
        return nullcontext()

    def optimizer_step(self, lr: float) -> OptimizerStep:
        """See `TrainEngine.optimizer_step`. A gradient that is not finite is dropped, and counted.

        Raises:
            EngineError: for the last of `max_nonfinite_steps` such gradients in a row.
        """
        weights = self.parameters
        weights.attach_gradients()
        norm = weights.grad_norm()
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            self.num_nonfinite_steps.zero_()
            torch.nn.utils.clip_grads_with_norm_(self._masters(), self.training.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            weights.refresh_compute()
        else:
            self._count_nonfinite()
        weights.clear_gradients()
        return OptimizerStep(float(norm), is_finite)

    def _masters(self) -> list[torch.Tensor]:
        return [self.parameters.masters[name] for name in self.parameters.trained()]

    def _count_nonfinite(self) -> None:
        self.num_nonfinite_steps += 1
        if self.num_nonfinite_steps < self.training.max_nonfinite_steps:
            return
        trained = self.parameters.trained()
        broken = [name for name in trained if not torch.isfinite(self.parameters.masters[name].grad).all()]
        raise EngineError(
            f"optimizer of the {self.name}",
            got=f"{int(self.num_nonfinite_steps)} gradients in a row that are not finite, in {len(broken)} of "
            f"{len(trained)} parameters, first in {next(iter(broken), 'those of another process')}",
            expected="finite gradients",
            fix="Lower the learning rate, look for NaN in rewards, or resume from an earlier checkpoint; "
            "max_nonfinite_steps is the patience.",
        )

    # ---- weights and state ----------------------------------------------------------------------------

    def weights(self, *, is_merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainEngine.weights`."""
        adapter = adapter_of(self.scorer.model)
        weights = self.parameters.whole()
        return merged(weights, adapter.scale) if adapter and is_merged else weights

    def adapter_weights(self, *, with_frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainEngine.adapter_weights`."""
        weights = self.parameters.whole() if with_frozen else self.parameters.whole(is_factor)
        return ((base_name(name), tensor) for name, tensor in weights)

    def sleep(self) -> None:
        """Give the gradient sums back; they are zero between optimizer steps."""
        self.parameters.release_gradients()

    def wake(self) -> None:
        """Nothing to take back: gradient sums are made when the first gradient arrives."""

    def state(self, contents: frozenset[str]) -> dict[str, torch.Tensor]:
        """See `TrainEngine.state`."""
        weights, state = self.parameters, {}
        if "model" in contents:
            for name in weights.trained() if adapter_of(self.scorer.model) else weights.masters:
                state[f"model.{weights.name_of(name)}"] = weights.distributed(name, weights.masters[name].detach())
        if "frozen" in contents:
            trained = set(weights.trained())
            for name in (name for name in weights.masters if name not in trained):
                state[f"frozen.{base_name(weights.name_of(name))}"] = weights.distributed(name, weights.masters[name])
        if "optimizer" in contents:
            for name in weights.trained():
                moments = self._optimizer_state(weights.masters[name])
                whole = weights.name_of(name)
                for kind in ("exp_avg", "exp_avg_sq"):
                    state[f"optimizer.{kind}.{whole}"] = weights.distributed(name, moments[kind])
                state[f"optimizer.step.{whole}"] = moments["step"]
            state["optimizer.nonfinite_steps"] = self.num_nonfinite_steps
        return state

    def state_was_loaded(self, contents: frozenset[str]) -> None:
        """See `TrainEngine.state_was_loaded`."""
        if "model" in contents:
            self.parameters.refresh_compute()
            self._require_equal_replicas()

    def _optimizer_state(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """AdamW's own state of a parameter, made where there was no step yet."""
        return self.optimizer.state.setdefault(
            master,
            {
                "step": torch.zeros((), dtype=torch.float32, device=master.device if master.is_cuda else None),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            },
        )

    def _require_equal_replicas(self) -> None:
        if self.processes.layout.is_whole:
            self.replicas.require_alike(f"weights of the {self.name}", list(self.scorer.model.parameters()))

    def describe(self) -> dict[str, Any]:
        """See `TrainEngine.describe`."""
        kind = "trained" if self.training is not None else "frozen"
        return {
            "parameters": self.parameters.num_parameters(),
            "weights": f"{self.dtype}".removeprefix("torch.") + f", {kind}",
            "device": str(self.device),
            "processes": self.processes.layout.describe(),
        }


def _nothing(outputs: Outputs) -> torch.Tensor:
    """The loss of a filler: zero, with a zero gradient for whatever was computed."""
    return torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0


def _without_dropout(model: nn.Module) -> None:
    """A policy is what it samples: with dropout the log-probabilities of its own tokens would not be its own."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
