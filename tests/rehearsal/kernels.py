# SPDX-License-Identifier: Apache-2.0
"""Stands in for Triton's kernels: results of the same shapes, dtypes and devices, computed by plain torch.

Without it the stand-in takes the paths of a machine without Triton, which hold other tensors for the backward pass.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn.functional import silu
from torch.utils._python_dispatch import _disable_current_modes

from quadriga.models import fused, heads

_ROWS_OF_PART = 8192  # of heads_triton.py


class Kernels:
    """The functions of fused_triton.py and heads_triton.py."""

    @staticmethod
    def rms_norm(hidden: Any, weight: Any, epsilon: float) -> Any:
        scales = hidden.new_empty(hidden.shape[:-1], dtype=torch.float32)
        result = torch.empty_like(hidden)
        with _disable_current_modes():
            scales.copy_(fused.rms_scale(hidden.detach().float(), epsilon)[..., 0])
            result.copy_((hidden.float() * scales[..., None]).to(hidden.dtype) * weight)
        return result, scales.flatten()

    @staticmethod
    def rms_norm_gradients(grad: Any, hidden: Any, weight: Any, scales: Any) -> Any:
        result = torch.empty_like(hidden)
        sums = hidden.new_zeros(weight.shape, dtype=torch.float32)
        with _disable_current_modes():
            scale = scales.view(*hidden.shape[:-1], 1)
            normed = hidden.float() * scale
            outer = grad.float()
            sums.copy_((outer * normed).flatten(0, -2).sum(0))
            inner = outer * weight.float()
            result.copy_((inner - normed * (inner * normed).mean(-1, keepdim=True)) * scale)
        return result, sums

    @staticmethod
    def gated_silu(gate: Any, up: Any) -> Any:
        result = torch.empty_like(gate)
        with _disable_current_modes():
            result.copy_(silu(gate) * up)
        return result

    @staticmethod
    def gated_silu_gradients(grad: Any, gate: Any, up: Any) -> Any:
        grad_gate = torch.empty_like(gate)
        grad_up = torch.empty_like(up)
        with _disable_current_modes():
            grad_gate.copy_(torch.ops.aten.silu_backward(grad * up, gate))
            grad_up.copy_(silu(gate) * grad)
        return grad_gate, grad_up

    @staticmethod
    def statistics(
        hidden: Any, weight: Any, bias: Any, target_rows: Any, temperature: float, *_: bool
    ) -> Any:
        num_parts = -(-len(weight) // _ROWS_OF_PART)
        result = hidden.new_empty(num_parts, 4, len(hidden), dtype=torch.float32)
        with _disable_current_modes():
            log_probs = (hidden.float() @ weight.float().t() / temperature).log_softmax(-1)
            # Each part has the statistics of the whole, less what combining the parts adds.
            result[:, 0] = -torch.inf
            result[:, 1:] = 0
            result[0, 0] = 0
            result[0, 1] = torch.special.entr(log_probs.exp()).sum(-1)
            result[:, 2] = log_probs.gather(-1, target_rows[:, None])[:, 0]
        return result

    @staticmethod
    def logit_gradients(
        temperature: float, hidden: Any, weight: Any, bias: Any, target_rows: Any, token_inputs: Any
    ) -> Any:
        result = hidden.new_empty(len(hidden), len(weight))
        with _disable_current_modes():
            probabilities = (hidden.float() @ weight.float().t() / temperature).softmax(-1)
            grad_log_probs = token_inputs[0][:, None]
            grad = -probabilities * grad_log_probs
            grad.scatter_add_(1, target_rows[:, None], grad_log_probs)
            result.copy_(grad / temperature)
        return result


@contextmanager
def installed() -> Iterator[None]:
    """Context manager: the package computes as with Triton."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in ((heads, "heads_triton"), (fused, "fused_triton")):
            patch.setattr(module, name, Kernels, raising=False)
            patch.setattr(module, "can_launch_triton", lambda device: device.type == "cuda")
        yield
