# SPDX-License-Identifier: Apache-2.0
"""AdamW on a role's masters, with clipping and, in float16, a scale of the losses.

    unscaled_norm   undoes the loss scale, and returns the norm of the gradients
    apply           clips and applies them, or skips and counts those that are not finite

Legend: [...] is the shape of a parameter, or of a rank's shard of it.
"""

import logging
from dataclasses import dataclass

import torch

from quadriga.config import OptimConfig
from quadriga.engines.fsdp.replicated import ReplicatedWeights
from quadriga.engines.fsdp.sharded import PartialWeights
from quadriga.errors import EngineError

logger = logging.getLogger(__name__)
MOMENTS = ("exp_avg", "exp_avg_sq")
"""AdamW's names of its moments."""
# Factors of the losses in float16.
_FIRST_SCALE = 2.0**16
_LARGEST_SCALE = 2.0**24
_STEPS_TO_DOUBLE = 400  # finite gradients in a row after which the factor doubles


@dataclass(frozen=True)
class Training:
    """Settings of training."""

    optim: OptimConfig
    grad_clip: float  # the largest norm of a gradient
    max_nonfinite_steps: int  # consecutive gradients that are not finite, before an error


class MasterOptimizer:
    """AdamW on the masters of a role.

    Args:
        weights: parameters of the role, with their masters and gradients.
        training: settings of training.
        dtype: dtype in which gradients are computed.
        name: role of the model, for messages.
        is_first_rank: whether this rank logs warnings.

    Attributes:
        adam: torch's optimizer.
        masters: the trained masters [...].
        loss_scale: [2] float64: the factor of losses (arXiv:1710.03740), a power of two, and the
            number of finite gradients since it changed. The factor is 1 except in float16, where
            gradients below 6e-8 would become 0.
        num_nonfinite_steps: [] int64, number of consecutive gradients that were not finite.
    """

    def __init__(
        self,
        weights: ReplicatedWeights | PartialWeights,
        training: Training,
        dtype: torch.dtype,
        *,
        name: str,
        is_first_rank: bool,
    ) -> None:
        self._weights = weights
        self._training = training
        self._is_float16 = dtype == torch.float16
        self._name = name
        self._is_first_rank = is_first_rank
        # Tensors, which a checkpoint restores in place.
        self.num_nonfinite_steps = torch.zeros((), dtype=torch.int64)
        scale = _FIRST_SCALE if self._is_float16 else 1.0
        self.loss_scale = torch.tensor([scale, 0.0], dtype=torch.float64)
        self.masters = [weights.masters[parameter] for parameter in weights.trained]
        self.adam = torch.optim.AdamW(
            self.masters,
            lr=training.optim.lr,
            betas=training.optim.betas,
            eps=training.optim.eps,
            weight_decay=training.optim.weight_decay,
            fused=True,
        )

    def moments(self, master: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return AdamW's state of a master: moments [...], and number of steps [] as `step`.

        AdamW itself would create the state in its first step. Before that, zeros are created here.
        """
        moments = self.adam.state[master]
        if not moments:
            # The fused step reads the number of steps on the device of the master.
            device = master.device if master.is_cuda else None
            moments["step"] = torch.zeros((), dtype=torch.float32, device=device)
            for kind in MOMENTS:
                moments[kind] = torch.zeros_like(master)
        return moments

    def all_moments(self) -> list[torch.Tensor]:
        """The moments [...] of all masters."""
        tensors = []
        for master in self.masters:
            moments = self.moments(master)
            tensors += [moments[kind] for kind in MOMENTS]
        return tensors

    def unscaled_norm(self) -> torch.Tensor:
        """Undo the loss scale in all gradients, and return their global norm []."""
        scale = float(self.loss_scale[0])
        if scale != 1.0:
            gradients = [master.grad for master in self.masters if master.grad is not None]
            torch._foreach_mul_(gradients, 1.0 / scale)
        return self._weights.grad_norm()

    def apply(self, norm: torch.Tensor, lr: float) -> bool:
        """Clip and apply the gradients, unless one of them is not finite.

        Args:
            norm: [], global norm of the gradients.
            lr: learning rate.

        Returns:
            Whether the gradients were finite.

        Raises:
            EngineError: the last `max_nonfinite_steps` gradients were not finite.
        """
        training = self._training
        is_finite = bool(torch.isfinite(norm))
        if is_finite:
            self.num_nonfinite_steps.zero_()
            torch.nn.utils.clip_grads_with_norm_(self.masters, training.grad_clip, norm)
            for group in self.adam.param_groups:
                group["lr"] = lr
            self.adam.step()
            if training.optim.master_dtype == "bfloat16":
                self._round_to_bfloat16()
            self._weights.refresh_compute()
        elif float(self.loss_scale[0]) == 1.0:
            # With a larger scale, the scale itself may be why float16 overflows. Then the step does
            # not count, and the scale is halved below.
            self.num_nonfinite_steps += 1
        if self._is_float16:
            self._adapt_loss_scale(is_finite=is_finite)
        if not is_finite and self.num_nonfinite_steps >= training.max_nonfinite_steps:
            raise self._nonfinite_error()
        return is_finite

    def _nonfinite_error(self) -> EngineError:
        """Error that says how many gradients are not finite, and of which parameters."""
        weights = self._weights
        broken = []
        for name in weights.trained:
            if not torch.isfinite(weights.masters[name].grad).all():
                broken.append(name)
        where = f"in none of the {len(weights.trained)} parameters of this process"
        if broken:
            where = f"in {len(broken)} of {len(weights.trained)} parameters, first in {broken[0]}"
        return EngineError(
            f"optimizer of the {self._name}",
            got=f"{int(self.num_nonfinite_steps)} gradients in a row that are not finite, {where}",
            expected="finite gradients",
            fix="Lower the learning rate, look for NaN in rewards, or resume from an earlier "
            "checkpoint. max_nonfinite_steps sets how many such gradients are skipped.",
        )

    def _adapt_loss_scale(self, *, is_finite: bool) -> None:
        """Halve the scale after a gradient that is not finite; double it after many finite ones."""
        scale, num_finite = self.loss_scale.tolist()
        if is_finite:
            num_finite += 1
            if num_finite == _STEPS_TO_DOUBLE:
                scale = min(scale * 2, _LARGEST_SCALE)
                num_finite = 0
        else:
            new_scale = max(scale / 2, 1.0)
            if self._is_first_rank:
                logger.warning(
                    "optimizer of the %s: got a float16 gradient that is not finite, with losses "
                    "scaled by %g. The step is skipped; losses are now scaled by %g.",
                    self._name,
                    scale,
                    new_scale,
                )
            scale = new_scale
            num_finite = 0
        self.loss_scale.copy_(torch.tensor([scale, num_finite]))

    @torch.no_grad()
    def _round_to_bfloat16(self) -> None:
        """Round masters and moments to bfloat16, as a step in bfloat16 would."""
        for master in self.masters:
            moments = self.adam.state[master]
            for tensor in (master, moments["exp_avg"], moments["exp_avg_sq"]):
                tensor.copy_(tensor.bfloat16())
