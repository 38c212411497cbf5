# SPDX-License-Identifier: Apache-2.0
"""RMS norms and gated MLPs that save less for their backward pass, and access memory less often.

In eager mode, an RMS norm consists of six kernels, each of which saves a float32 copy of the
activations, and a gated MLP saves four wide tensors. The functions here compute the same values,
and save only their inputs. On CUDA in half precision, each pass is a single Triton kernel.

Legend: D hidden size, F width of the MLP.
"""

from types import MethodType

import torch
from torch import Tensor, nn
from torch.nn.functional import silu
from transformers import PreTrainedModel

from quadriga.models.heads import HALF_DTYPES, HAS_TRITON, can_launch_triton

if HAS_TRITON:
    from quadriga.models import fused_triton

_MLP_PARTS = {"gate_proj", "up_proj", "down_proj", "act_fn"}


def supports_triton(tensor: Tensor) -> bool:
    """Whether the Triton kernels support a tensor: half precision, on a GPU with Triton."""
    return tensor.dtype in HALF_DTYPES and can_launch_triton(tensor.device)


class RMSNorm(torch.autograd.Function):
    """Root-mean-square norm (arXiv:1910.07467) of hidden [..., D] with weight [D] and an epsilon.

    The mean and the division are in float32, the result [..., D] in the dtype of `hidden`.
    """

    @staticmethod
    def forward(ctx, hidden: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        ctx.by_triton = supports_triton(hidden) and weight.dtype == hidden.dtype
        if ctx.by_triton:
            result, scale = fused_triton.rms_norm(hidden, weight, epsilon)
            ctx.save_for_backward(hidden, weight, scale)
            return result
        wide = hidden.float()
        scale = rms_scale(wide, epsilon)  # [..., 1]
        ctx.save_for_backward(hidden, weight, scale)
        return (wide * scale).to(hidden.dtype) * weight

    @staticmethod
    def backward(ctx, grad: Tensor):
        hidden, weight, scale = ctx.saved_tensors
        grad_weight = None
        if ctx.by_triton:
            grad_hidden, weight_sums = fused_triton.rms_norm_gradients(grad, hidden, weight, scale)
            if ctx.needs_input_grad[1]:
                grad_weight = weight_sums.to(weight.dtype)
            return grad_hidden, grad_weight, None
        # With n = hidden * scale: d hidden = scale * (g w - n * mean(g w n)), d weight = sum g n.
        normed = hidden.float().mul_(scale)
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normed = grad.float() * weight.float()
        projection = (grad_normed * normed).mean(-1, keepdim=True)
        grad_hidden = grad_normed.sub_(normed.mul_(projection)).mul_(scale)
        return grad_hidden.to(hidden.dtype), grad_weight, None


def rms_scale(wide: Tensor, epsilon: float) -> Tensor:
    """Compute the reciprocal root mean square, by which a norm multiplies.

    Args:
        wide: [..., D] float32.
        epsilon: added to the mean of squares.

    Returns:
        [..., 1] float32.
    """
    # `vector_norm` reads `wide` once, without a copy of its squares.
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return length.square_().div_(wide.shape[-1]).add_(epsilon).rsqrt_()


class GatedSiLU(torch.autograd.Function):
    """silu(gate) * up (arXiv:2002.05202) of tensors [..., F]."""

    @staticmethod
    def forward(ctx, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if supports_triton(gate):
            return fused_triton.gated_silu(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, up = ctx.saved_tensors
        if supports_triton(gate):
            return fused_triton.gated_silu_gradients(grad, gate, up)
        # Compute silu(gate) again: saving it would take a third wide tensor.
        grad_gate = torch.ops.aten.silu_backward(grad * up, gate)
        return grad_gate, silu(gate).mul_(grad)


def fuse(model: PreTrainedModel) -> dict[str, int]:
    """Make a model's plain RMS norms and SiLU-gated MLPs use the functions of this file.

    Returns:
        Number of changed modules, under `norms` and `mlps`.
    """
    # The new forwards look up parameters at each call, because FSDP replaces the parameters.
    counts = {"norms": 0, "mlps": 0}
    for module in model.modules():
        if is_plain_norm(module):
            module.forward = MethodType(
                lambda norm, x: RMSNorm.apply(x, norm.weight, norm.variance_epsilon), module
            )
            counts["norms"] += 1
        elif is_gated_mlp(module):
            module.forward = MethodType(
                lambda mlp, x: mlp.down_proj(GatedSiLU.apply(mlp.gate_proj(x), mlp.up_proj(x))),
                module,
            )
            counts["mlps"] += 1
    return counts


def is_plain_norm(module: nn.Module) -> bool:
    """Whether a norm multiplies by `weight` itself, as in the Llama family.

    Gemma's norms multiply by 1 + weight, and call the epsilon `eps`.
    """
    if not type(module).__name__.endswith("RMSNorm") or any(module.named_children()):
        return False
    parameter_names = {name for name, _ in module.named_parameters(recurse=False)}
    return parameter_names == {"weight"} and hasattr(module, "variance_epsilon")


def is_gated_mlp(module: nn.Module) -> bool:
    """Whether a module is down(silu(gate(x)) * up(x)) and nothing else, as in the Llama family."""
    if {name for name, _ in module.named_children()} != _MLP_PARTS:
        return False
    return type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
