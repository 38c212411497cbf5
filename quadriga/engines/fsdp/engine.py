# SPDX-License-Identifier: Apache-2.0
"""One model, its float32 masters and AdamW: whole in every process, each of which learns from other rows.

The gradients are added up over the processes before the step, so that replicas stay equal to the last bit.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quadriga.config import OptimConfig
from quadriga.engines.base import LossFunction, OptimizerStep, Outputs
from quadriga.engines.fsdp import state_files
from quadriga.engines.fsdp.master_weights import MasterWeights
from quadriga.engines.packing import PackedBatch
from quadriga.engines.process_group import ALONE, ProcessGroup
from quadriga.errors import EngineError
from quadriga.models.flops import model_cost
from quadriga.models.scorers import Scorer


@dataclass(frozen=True)
class Training:
    """How a model is taught: the optimizer, the largest gradient norm, and the patience with broken gradients."""

    optim: OptimConfig
    grad_clip: float
    max_nonfinite_steps: int


class FSDPEngine:
    """See `engines.base.TrainEngine`.

    Args:
        scorer: the model and its head; its parameters are float32 on arrival.
        dtype: of the compute weights.
        device: where everything lives.
        training: None for a model that is only asked.
        use_gradient_checkpointing: keep a layer's inputs only, and compute the layer again for its gradient.
        name: of the role, for errors.
        replicas: the processes that hold this model.

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
        use_gradient_checkpointing: bool = False,
        name: str = "actor",
        replicas: ProcessGroup = ALONE,
    ) -> None:
        self.scorer, self.dtype, self.device, self.name = scorer, dtype, device, name
        self.replicas = replicas
        self.training = training
        self.cost = model_cost(scorer.model)
        self.use_gradient_checkpointing = use_gradient_checkpointing
        self.num_nonfinite_steps = 0
        model = scorer.model
        _without_dropout(model)
        self._require_equal_replicas()
        if training is None:
            model.requires_grad_(False).to(dtype)
            self.master = None
            return
        self.master = MasterWeights(model, dtype)
        self.optimizer = torch.optim.AdamW(
            list(self.master.masters.values()),
            lr=training.optim.lr,
            betas=training.optim.betas,
            eps=training.optim.eps,
            weight_decay=training.optim.weight_decay,
            fused=True,
        )
        if use_gradient_checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})

    def output_names(self, with_entropy: bool) -> tuple[str, ...]:
        """See `TrainEngine.output_names`."""
        return self.scorer.output_names(with_entropy)

    @torch.no_grad()
    def forward(self, batch: PackedBatch, *, temperature: float = 1.0, with_entropy: bool = False) -> Outputs:
        """See `TrainEngine.forward`."""
        return self.scorer(batch, temperature=temperature, with_entropy=with_entropy)

    def backward(self, batch: PackedBatch, loss: LossFunction, *, temperature: float = 1.0) -> None:
        """See `TrainEngine.backward`."""
        model = self.scorer.model
        model.train(self.use_gradient_checkpointing)  # Hugging Face checkpoints layers in training mode only
        loss(self.scorer(batch, temperature=temperature, with_entropy=True)).backward()
        model.eval()

    def optimizer_step(self, lr: float) -> OptimizerStep:
        """See `TrainEngine.optimizer_step`. A gradient that is not finite is dropped, and counted.

        Raises:
            EngineError: for the last of `max_nonfinite_steps` such gradients in a row.
        """
        self.master.attach_gradients()
        masters = list(self.master.masters.values())
        # Summed before anything is asked of them, so that every replica decides alike, also about broken ones.
        self.replicas.add_up([master.grad for master in masters])
        norm = torch.nn.utils.get_total_norm([master.grad for master in masters])
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            self.num_nonfinite_steps = 0
            torch.nn.utils.clip_grads_with_norm_(masters, self.training.grad_clip, norm)
            for group in self.optimizer.param_groups:
                group["lr"] = lr
            self.optimizer.step()
            self.master.refresh_compute()
        else:
            self._count_nonfinite()
        self.master.clear_gradients()
        return OptimizerStep(float(norm), is_finite)

    def _count_nonfinite(self) -> None:
        self.num_nonfinite_steps += 1
        if self.num_nonfinite_steps < self.training.max_nonfinite_steps:
            return
        broken = [name for name, grad in self.master.gradients().items() if not torch.isfinite(grad).all()]
        raise EngineError(
            f"optimizer of the {self.name}",
            got=f"{self.num_nonfinite_steps} gradients in a row that are not finite, in {len(broken)} of "
            f"{len(self.master.masters)} parameters, first in {broken[0]}",
            expected="finite gradients",
            fix="Lower the learning rate, look for NaN in rewards, or resume from an earlier checkpoint; "
            "max_nonfinite_steps is the patience.",
        )

    def weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `TrainEngine.weights`."""
        for name, parameter in self.scorer.model.named_parameters():
            yield name, parameter.detach()

    def sleep(self) -> None:
        """Give the gradient sums back; they are zero between optimizer steps."""
        if self.master is not None:
            self.master.release_gradients()

    def wake(self) -> None:
        """Nothing to take back: gradient sums are made when the first gradient arrives."""

    def save(self, directory: Path, contents: frozenset[str]) -> None:
        """See `TrainEngine.save`: float32 masters under Hugging Face names, and the optimizer's two moments."""
        if "model" in contents:
            state_files.write_tensors(directory, "model", self._float_state())
            self.scorer.model.config.save_pretrained(directory)
            # Without the checks of save_pretrained, which refuses files that models on the hub come with.
            self.scorer.model.generation_config.to_json_file(directory / "generation_config.json")
        if "optimizer" in contents:
            moments, steps = self._moments()
            state_files.write_tensors(directory, "optimizer", moments)
            state_files.write_json(
                directory / "optimizer.json", {"steps": steps, "nonfinite": self.num_nonfinite_steps}
            )

    def load(self, directory: Path, contents: frozenset[str]) -> None:
        """See `TrainEngine.load`."""
        if "model" in contents:
            self.master.load(state_files.read_tensors(directory, "model", expected=self._float_state()))
            self._require_equal_replicas()
        if "optimizer" in contents:
            saved = state_files.read_json(directory / "optimizer.json")
            moments = state_files.read_tensors(directory, "optimizer", expected=self._empty_moments())
            self.num_nonfinite_steps = saved["nonfinite"]
            for name, master in self.master.masters.items():
                if name in saved["steps"]:
                    self.optimizer.state[master] = {
                        "step": torch.tensor(saved["steps"][name], dtype=torch.float32),
                        "exp_avg": moments[f"{name}.exp_avg"].to(self.device),
                        "exp_avg_sq": moments[f"{name}.exp_avg_sq"].to(self.device),
                    }

    def _require_equal_replicas(self) -> None:
        self.replicas.require_alike(f"weights of the {self.name}", list(self.scorer.model.parameters()))

    def _float_state(self) -> dict[str, torch.Tensor]:
        if self.master is None:
            return dict(self.weights())
        return {name: master.detach() for name, master in self.master.masters.items()}

    def _moments(self) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
        moments: dict[str, torch.Tensor] = {}
        steps: dict[str, float] = {}
        for name, master in self.master.masters.items():
            state = self.optimizer.state.get(master)
            if state:
                moments[f"{name}.exp_avg"], moments[f"{name}.exp_avg_sq"] = state["exp_avg"], state["exp_avg_sq"]
                steps[name] = float(state["step"])
        return moments, steps

    def _empty_moments(self) -> dict[str, torch.Tensor]:
        """Names and shapes of the moments, without memory behind them."""
        return {
            f"{name}.{moment}": torch.empty_like(master, device="meta")
            for name, master in self.master.masters.items()
            for moment in ("exp_avg", "exp_avg_sq")
        }

    def describe(self) -> dict[str, Any]:
        """See `TrainEngine.describe`."""
        kind = "trained" if self.master is not None else "frozen"
        return {
            "parameters": sum(parameter.numel() for parameter in self.scorer.model.parameters()),
            "weights": f"{self.dtype}".removeprefix("torch.") + f", {kind}",
            "device": str(self.device),
        }


def _without_dropout(model: nn.Module) -> None:
    """A policy is what it samples: with dropout the log-probabilities of its own tokens would not be its own."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
