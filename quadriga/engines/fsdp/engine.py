# SPDX-License-Identifier: Apache-2.0
"""One model, its float32 masters and AdamW, on one rank or on many.

    replicated weights   every rank computes its own rows; gradients are added up        replicated.py
    sharded weights      FSDP2, with tensor, sequence and pipeline parallelism inside    sharded.py

What is done with them is the same: gradients are clipped by the norm of all of them, and a step moves the masters.
The loop over epochs, mini-batches and micro-batches stands above it, once, in `engines/step.py`.

Legend: M predicted tokens of a packed micro-batch; [out, in] a projection, [V, D] the embedding and the head, r the
rank of an adapter.
"""

import logging
import math
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule
from transformers import PreTrainedModel

from quadriga.config import OptimConfig
from quadriga.engines.fsdp.offload import ActivationsOnHost, MappedFile, PinnedCopy
from quadriga.engines.fsdp.replicated import ReplicatedWeights
from quadriga.engines.fsdp.sharded import Memory, PartialWeights, ReadWeight, ShardedWeights, shard
from quadriga.engines.packing import LossFunction, Outputs
from quadriga.engines.parallel.pipeline import Stage
from quadriga.engines.parallel.processes import ONE_PROCESS, Processes
from quadriga.errors import EngineError
from quadriga.models.adapter_files import base_name, is_factor, merged
from quadriga.models.architecture import is_packed, length_limit
from quadriga.models.attention import PackedBatch
from quadriga.models.flops import model_cost
from quadriga.models.lora import adapter_of, describe_adapter
from quadriga.models.scorers import Question, Scorer
from quadriga.models.vision import ImageTokens, unseen_image
from quadriga.observe.machine import is_in_memory, release_free_memory

logger = logging.getLogger(__name__)
_MOMENTS = ("exp_avg", "exp_avg_sq")
_FIRST_SCALE, _LARGEST_SCALE = 2.0**16, 2.0**24
_STEPS_TO_DOUBLE = 400
_LONG_TOKENS = 8192
"""A micro-batch of as many leaves holes on a CPU that the next does not fit in; giving them back takes milliseconds."""
ALL_KINDS = ("weights", "masters", "optimizer")  # all that can rest


@dataclass(frozen=True)
class Training:
    """The optimizer, the largest gradient norm, and how many gradients in a row may be not finite."""

    optim: OptimConfig
    grad_clip: float
    max_nonfinite_steps: int


@dataclass(frozen=True)
class OptimizerStep:
    """The outcome of an optimizer step: `grad_norm` before clipping, and whether it was finite and so applied."""

    grad_norm: float
    is_applied: bool


class FSDPEngine:
    """A model and its optimizer, replicated or sharded over ranks; all ranks call each method collectively.
    Raises EngineError: another rank has a model with other weights.

    Args:
        scorer: the model and its head. Its parameters are float32 on arrival, whole, or on "meta" with `read`.
        training: None for a model that is used for inference only.
        read: gives the parameters' values, where the scorer has none.

    Attributes:
        replicas: the ranks that hold the model with other rows; those with the same rows are one of them.
        has_replicated_weights: whether `model` has all weights on this rank, so that other roles compute with it, too.
        packs_up_to: rows of at most so many tokens are computed together, longer ones alone.
        loss_scale: [2] float64: what losses are multiplied with, and gradients divided by, a power of two
            (arXiv:1710.03740); and finite gradients since it was set. 1 but in float16, where 6e-8 is the least number.
        copying: work that reads the tensors of `state`; an optimizer step waits for it.
        resting: what leaves the device between phases, by kind; those that have left it are `asleep`.
    """

    virtual: int | None = (
        None  # chunks of layers in each stage of a pipeline, where there are several
    )

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
        self.has_replicated_weights = processes.layout.is_whole
        self.cost, self.image_tokens = model_cost(model), ImageTokens.of(model.config)
        self.output_names = scorer.output_names
        self.num_parameters = sum(parameter.numel() for parameter in model.parameters())
        self.adapter = describe_adapter(model) if adapter_of(model) else ""
        self.num_nonfinite_steps = torch.zeros((), dtype=torch.int64)
        scale = _FIRST_SCALE if dtype == torch.float16 else 1.0
        self.loss_scale = torch.tensor([scale, 0.0], dtype=torch.float64)
        self.copying: Future[None] | None = None
        self.resting: dict[str, MappedFile | PinnedCopy] = {}
        self.asleep: set[str] = set()
        self.frees_gradients = self._is_changed = False
        self.packs_up_to = (length_limit(model.config) or math.inf) if is_packed(model) else 0
        for module in model.modules():
            # With dropout the log-probs of a policy's own tokens would not be its own.
            names = [
                name
                for name, value in vars(module).items()
                if "dropout" in name and isinstance(value, float)
            ]
            for name in ["p"] if isinstance(module, nn.Dropout) else names:
                setattr(module, name, 0.0)
        if training is None:
            model.requires_grad_(False)
        self.stage: Any = None
        self.parameters: ReplicatedWeights | PartialWeights = self._arranged(read)
        self._require_equal_replicas()
        if training is None:
            return
        self._masters = [self.parameters.masters[name] for name in self.parameters.trained]
        self.optimizer = torch.optim.AdamW(
            self._masters,
            lr=training.optim.lr,
            betas=training.optim.betas,
            eps=training.optim.eps,
            weight_decay=training.optim.weight_decay,
            fused=True,
        )
        offloads = self.memory.activation_offload and device.type == "cuda"
        self.activations = ActivationsOnHost(scorer) if offloads else None
        if self.memory.gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def _arranged(self, read: ReadWeight | None) -> "ReplicatedWeights | PartialWeights":
        if not self.has_replicated_weights:
            weights = shard(self.scorer, read, self.dtype, self.processes, self.memory)
            self.stage = weights.root if isinstance(weights.root, Stage) else None
            return weights
        offloads = self.memory.offload_weights and self.device.type == "cuda"
        return ReplicatedWeights(
            self.scorer, self.model, self.dtype, self.replicas, steps_on_host=offloads
        )

    @torch.no_grad()
    def forward(self, batches: Sequence[PackedBatch], question: Question) -> list[Outputs]:
        """Outputs [M] of micro-batches without gradients, in order; none from a pipeline stage without the head."""
        self._require_awake("weights")
        work = list(batches)
        if not self.has_replicated_weights:
            work = [batch for batch, _ in self._in_step([(batch, _nothing) for batch in batches])]
        if self.stage is not None:
            outputs = self.stage.run([(batch, None) for batch in work], question) if work else []
        else:
            outputs = [self.scorer(batch, question) for batch in work]
        if isinstance(self.parameters.root, FSDPModule):
            # Drop what was gathered, as a backward pass would.
            self.parameters.root.reshard()
        return outputs[: len(batches)]

    def backward(
        self,
        batches: Sequence[PackedBatch],
        losses: Sequence[LossFunction],
        *,
        temperature: float = 1.0,
    ) -> None:
        """Outputs [M] with gradients, the loss of each micro-batch, and its gradients added to those already there."""
        self._require_awake("weights")
        model, question = self.scorer.model, Question(temperature, with_entropy=True)
        if (scale := float(self.loss_scale[0])) != 1.0:
            losses = [lambda outputs, loss=loss: loss(outputs) * scale for loss in losses]
        work = list(zip(batches, losses, strict=True))
        if not self.has_replicated_weights:
            work = self._in_step(work)
        model.train(
            self.memory.gradient_checkpointing
        )  # Hugging Face checkpoints layers in training mode only
        with self.activations or nullcontext():
            if self.stage is not None and work:
                self.stage.run(work, question, is_training=True)
            elif self.stage is None:
                for batch, loss in work:
                    loss(self.scorer(batch, question)).backward()
                    if self.device.type == "cpu" and batch.num_tokens >= _LONG_TOKENS:
                        release_free_memory()
        model.eval()

    def _in_step(
        self, work: list[tuple[PackedBatch, LossFunction]]
    ) -> list[tuple[PackedBatch, LossFunction]]:
        """Micro-batches as all ranks need them: as many everywhere, tokens in multiples, fillers at the end."""
        number, layout = max(self.replicas.gather(len(work))), self.processes.layout
        if number and self.stage is not None:
            # Interleaved schedules take multiples of the stages.
            number = (
                max(number, layout.pp)
                if self.virtual is None
                else -(-number // layout.pp) * layout.pp
            )
        multiple = layout.sp * layout.tp
        fillers = [(PackedBatch.filler(self.device), _nothing)] * (number - len(work))
        all_work = [
            (batch.extended(-(-batch.num_tokens // multiple) * multiple), loss)
            for batch, loss in work + fillers
        ]
        if self.image_tokens is None:
            return all_work
        # The ranks gather the weights of the vision encoder together, whichever of them has images.
        return [
            (
                batch
                if batch.images
                else replace(batch, images=unseen_image(self.model, self.device)),
                loss,
            )
            for batch, loss in all_work
        ]

    @property
    def moment_bytes(self) -> int:
        """Memory of the optimizer's moments on the engine's device, which they take from the first step on and keep."""
        if self.training is None or "optimizer" in self.resting:
            return 0
        return sum(
            2 * master.nbytes for master in self._masters if master.device.type == self.device.type
        )

    def optimizer_step(self, lr: float) -> OptimizerStep:
        """The gradients of all replicas added up, clipped and applied; one that is not finite is dropped and counted.
        Raises EngineError: for the last of `max_nonfinite_steps` such gradients in a row."""
        weights, training = self.parameters, self.training
        self._require_awake("weights", "masters", "optimizer")
        self._is_changed = True
        weights.attach_gradients()
        if (scale := float(self.loss_scale[0])) != 1.0:
            torch._foreach_mul_(
                [master.grad for master in self._masters if master.grad is not None], 1.0 / scale
            )
        norm = weights.grad_norm()
        if self.copying is not None:
            self.copying.result()
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            self.num_nonfinite_steps.zero_()
            torch.nn.utils.clip_grads_with_norm_(self._masters, training.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            if training.optim.master_dtype == "bfloat16":
                self._round_masters()
            weights.refresh_compute()
        elif scale == 1.0:
            self.num_nonfinite_steps += 1
        if self.dtype == torch.float16:
            self._set_loss_scale(is_finite=is_finite)
        if not is_finite and self.num_nonfinite_steps >= training.max_nonfinite_steps:
            broken = [
                name
                for name in weights.trained
                if not torch.isfinite(weights.masters[name].grad).all()
            ]
            got = f"{int(self.num_nonfinite_steps)} gradients in a row that are not finite, in {len(broken)} of "
            got += f"{len(weights.trained)} parameters, first in {next(iter(broken), 'those of another process')}"
            fix = "Lower the learning rate, look for NaN in rewards, or resume from an earlier checkpoint; "
            fix += "max_nonfinite_steps is the patience."
            raise EngineError(
                f"optimizer of the {self.name}", got=got, expected="finite gradients", fix=fix
            )
        weights.clear_gradients()
        return OptimizerStep(float(norm), is_finite)

    def _set_loss_scale(self, *, is_finite: bool) -> None:
        """Halve the factor of losses after a gradient that is not finite; double it after many that are."""
        scale, num_finite = before, _ = self.loss_scale.tolist()
        if not is_finite:
            scale, num_finite = max(scale / 2, 1.0), 0
            if self.world.is_first:
                logger.warning(
                    "optimizer of the %s: got a gradient in float16 that is not finite, with losses times %g. The step "
                    "is skipped; from here on they are times %g.",
                    *(self.name, before, scale),
                )
        elif (num_finite := num_finite + 1) == _STEPS_TO_DOUBLE:
            scale, num_finite = min(scale * 2, _LARGEST_SCALE), 0
        self.loss_scale.copy_(torch.tensor([scale, num_finite]))

    @torch.no_grad()
    def _round_masters(self) -> None:
        """Weights and moments as a step in bfloat16 leaves them; float32 holds them exactly."""
        for master in self._masters:
            moments = self.optimizer.state[master]
            for tensor in (master, moments["exp_avg"], moments["exp_avg_sq"]):
                tensor.copy_(tensor.bfloat16())

    def weights(self, *, is_merged: bool = True) -> Iterator[tuple[str, torch.Tensor]]:
        """Full tensors ([out, in], [V, D] ...) under the model's own names, in the compute dtype; an adapter is merged
        into the weights beside it, unless all are wanted as the engine holds them.
        """
        self._require_awake("weights")
        adapter = adapter_of(self.scorer.model)
        weights = self.parameters.whole()
        return merged(weights, adapter.scale) if adapter and is_merged else weights

    def adapter_weights(self, *, with_frozen: bool) -> Iterator[tuple[str, torch.Tensor]]:
        """An adapter's matrices A [r, in] and B [out, r], in the compute dtype; and the weights below, by own names."""
        self._require_awake("weights")
        weights = self.parameters.whole() if with_frozen else self.parameters.whole(is_factor)
        return ((base_name(name), tensor) for name, tensor in weights)

    def state(self, contents: frozenset[str]) -> dict[str, torch.Tensor]:
        """The tensors of a checkpoint, in the engine's own memory; DTensors where several ranks hold a tensor.

        Masters and moments have the shape of the whole parameter ([out, in], [V, D] ...), numbers of steps are scalars.
        `contents`: `model` (`model.NAME`, float32), `optimizer` (`optimizer.exp_avg.NAME`, `optimizer.exp_avg_sq.NAME`,
        `optimizer.step.NAME`, `optimizer.nonfinite_steps`, and in float16 `optimizer.loss_scale`), or both. Of a model
        with an adapter `model` is the adapter alone, and `frozen` (`frozen.NAME`, in the compute dtype) the rest, under
        the names that it has without one.
        """
        self._require_awake("weights", "masters", "optimizer")
        weights, state, trained = self.parameters, {}, set(self.parameters.trained)
        has_adapter = adapter_of(self.scorer.model) is not None
        for name, master in weights.masters.items():
            whole, is_trained = weights.names[name], name in trained
            if "model" in contents and (is_trained or not has_adapter):
                state[f"model.{whole}"] = weights.distributed(name, master.detach())
            if "frozen" in contents and not is_trained:
                state[f"frozen.{base_name(whole)}"] = weights.distributed(name, master)
            if "optimizer" in contents and is_trained:
                moments = self._moments(master)
                for kind in _MOMENTS:
                    state[f"optimizer.{kind}.{whole}"] = weights.distributed(name, moments[kind])
                state[f"optimizer.step.{whole}"] = moments["step"]
        part = "frozen" if has_adapter else "model"
        if part in contents:
            state |= {f"{part}.{name}": buffer for name, buffer in weights.buffers.items()}
        if "optimizer" in contents:
            state["optimizer.nonfinite_steps"] = self.num_nonfinite_steps
            if self.dtype == torch.float16:
                state["optimizer.loss_scale"] = self.loss_scale
        return state

    def state_was_loaded(self, contents: frozenset[str]) -> None:
        """The tensors of `state` were written to."""
        self._is_changed = True
        if "model" in contents:
            self.parameters.refresh_compute()
            self._require_equal_replicas()

    def _moments(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """AdamW's own state of a master [...], made here where there was no step yet."""
        if not (found := self.optimizer.state[master]):
            found["step"] = torch.zeros(
                (), dtype=torch.float32, device=master.device if master.is_cuda else None
            )
            for kind in _MOMENTS:
                found[kind] = torch.zeros_like(master)
        return found

    def rest_between_phases(
        self, kinds: Collection[str], folder: Path, *, frees_gradients: bool = False
    ) -> str:
        """From here on these kinds of tensors rest, but inside of `awake`. To be called once, before a step.

        Args:
            kinds: of `weights` (those that compute), `masters` (where they are other tensors) and `optimizer`.
            folder: for memory-mapped files, where the device is a CPU.
            frees_gradients: whether the sums of gradients are freed at rest, too.

        Returns what rests, how much and where, to be printed behind other things. Raises ConfigError: there is no room.
        """
        tensors = self.parameters.resting()
        if self.training is not None and "optimizer" in kinds:
            tensors["optimizer"] = [
                self._moments(one)[kind] for one in self._masters for kind in _MOMENTS
            ]
        is_cuda, self.frees_gradients, self._is_changed = (
            self.device.type == "cuda",
            frees_gradients,
            True,
        )
        stream = torch.cuda.Stream(self.device) if is_cuda else None
        for kind, all_of_kind in tensors.items():
            what = f"{kind} of the {self.name}"
            # With `offload_policy` they are on the host already.
            found = [one for one in all_of_kind if one.device.type == self.device.type]
            if kind not in kinds or not found:
                continue
            if stream is not None:
                self.resting[kind] = PinnedCopy(found, stream, what)
                continue
            self.resting[kind] = file = MappedFile(found, folder, what)
            if isinstance(self.parameters, ShardedWeights) and kind == "weights":
                self.parameters.use_memory(file.windows)
                continue
            for tensor, window in zip(found, file.windows, strict=True):
                tensor.data = window
        self.sleep()
        where = "pinned memory of the host" if is_cuda else f"memory-mapped files in {folder}"
        if not is_cuda and is_in_memory(folder):
            where += (
                ", which is in memory itself: nothing is gained; set trainer.offload_dir to a disk"
            )
        sizes = [
            f"{kind} ({memory.num_bytes / 1e6:.0f} MB)" for kind, memory in self.resting.items()
        ]
        return f"; {', '.join(sizes)} rest between phases, in {where}" if sizes else ""

    def sleep(self) -> None:
        """Let all rest that may."""
        if self.frees_gradients:
            self.parameters.sums.clear()
        if not self.resting:
            return
        if self.copying is not None:
            self.copying.result()
        for kind in self.resting.keys() - self.asleep:
            self.resting[kind].sleep(is_changed=self._is_changed)
        self._is_changed, self.asleep = False, set(self.resting)
        release_free_memory()

    @contextmanager
    def awake(self, *kinds: str) -> Iterator[None]:
        """Inside, these kinds of tensors are on the device; the others rest, if they may, as these do afterwards."""
        for kind in (kind for kind in self.resting if kind in kinds):
            self.resting[kind].wake()
            self.asleep.discard(kind)
        try:
            yield
        finally:
            self.sleep()

    def _require_awake(self, *kinds: str) -> None:
        if asleep := self.asleep.intersection(kinds):
            got = f"a call while {' and '.join(sorted(asleep))} rest on the host"
            raise EngineError(
                f"the {self.name}",
                got=got,
                expected="a call inside of `awake`, which brings them back",
            )
        for kind in self.resting.keys() & kinds:
            self.resting[kind].wait()

    def _require_equal_replicas(self) -> None:
        if self.processes.layout.is_whole:
            self.replicas.require_alike(
                f"weights of the {self.name}", list(self.scorer.model.parameters())
            )

    def describe(self) -> dict[str, Any]:
        """The engine's automatic choices, each with its reason, for people to read."""
        kind = "trained" if self.training is not None else "frozen"
        if self.training is not None and self.dtype == torch.float16:
            kind += f", losses times {float(self.loss_scale[0]):g}"
        if self.scorer.routers.count and not self.processes.layout.has_own_modules:
            kind += f", experts by transformers' {self.model.config.get_text_config()._experts_implementation}"
        return {
            "parameters": self.num_parameters,
            "weights": f"{self.dtype}".removeprefix("torch.") + f", {kind}",
            "device": str(self.device),
            "processes": self.processes.layout.describe(),
        }


def _nothing(outputs: Outputs) -> torch.Tensor:
    """The loss of a filler: zero, with a zero gradient for whatever was computed."""
    return torch.stack([values.sum() for values in outputs.values()]).sum() * 0.0
