# SPDX-License-Identifier: Apache-2.0
"""RMS norms and gated MLPs that keep less for their backward pass, and make fewer passes over memory.

Written out in eager mode an RMS norm is six kernels, each of which keeps a float32 copy of the activations, and a
gated MLP keeps four wide tensors. The functions here compute the same values and keep their inputs; on CUDA in half
precision a pass of theirs is one kernel of Triton's.

Legend: N tokens, D hidden size, F width of the MLP.
"""

from types import MethodType

import torch
from torch.nn.functional import silu
from transformers import PreTrainedModel

from quadriga.models.heads import HALF_DTYPES, HAS_TRITON, launches_triton

if HAS_TRITON:
    from quadriga.models import fused_triton


def takes_triton(tensor: torch.Tensor) -> bool:
    """Whether Triton's kernels compute with it."""
    return tensor.dtype in HALF_DTYPES and launches_triton(tensor.device)


class RMSNorm(torch.autograd.Function):
    """Root-mean-square norm, arXiv:1910.07467: hidden [..., D], weight [D], epsilon -> [..., D] in the dtype of
    `hidden`; the mean and the division are in float32."""

    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        ctx.by_triton = takes_triton(hidden) and weight.dtype == hidden.dtype
        if ctx.by_triton:
            result, scale = fused_triton.norm(hidden, weight, epsilon)
            ctx.save_for_backward(hidden, weight, scale)
            return result
        wide = hidden.float()
        scale = rms_scale(wide, epsilon)
        ctx.save_for_backward(hidden, weight, scale)
        return (wide * scale).to(hidden.dtype) * weight

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        hidden, weight, scale = ctx.saved_tensors
        if ctx.by_triton:
            grad_hidden, grad_weight = fused_triton.norm_gradients(grad, hidden, weight, scale)
            return (
                grad_hidden,
                grad_weight.to(weight.dtype) if ctx.needs_input_grad[1] else None,
                None,
            )
        normed = hidden.float().mul_(scale)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normed = grad.float() * weight.float()
        projection = (grad_normed * normed).mean(-1, keepdim=True)
        grad_hidden = grad_normed.sub_(normed.mul_(projection)).mul_(scale)
        return grad_hidden.to(hidden.dtype), grad_weight, None


def rms_scale(wide: torch.Tensor, epsilon: float) -> torch.Tensor:
    """What the norm multiplies with: [..., D] float32 -> [..., 1]."""
    length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
    return length.square_().div_(wide.shape[-1]).add_(epsilon).rsqrt_()


class GatedSiLU(torch.autograd.Function):
    """silu(gate) * up, arXiv:2002.05202: [..., F] each."""

    @staticmethod
    def forward(ctx, gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate, up)
        if takes_triton(gate):
            return fused_triton.gated(gate, up)
        return silu(gate).mul_(up)

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        gate, up = ctx.saved_tensors
        if takes_triton(gate):
            return fused_triton.gated_gradients(grad, gate, up)
        return torch.ops.aten.silu_backward(grad * up, gate), silu(gate).mul_(grad)


def fuse(model: PreTrainedModel) -> dict[str, int]:
    """Let a model's plain RMS norms and SiLU-gated MLPs ([..., D] -> [..., D]) use the functions above; counts both."""
    # Norms of the Llama family multiply by `weight` itself; Gemma's, say, by one plus it, under the name `eps`.
    norms = [
        module
        for module in model.modules()
        if type(module).__name__.endswith("RMSNorm")
        and {name for name, _ in module.named_parameters(recurse=False)} == {"weight"}
        and hasattr(module, "variance_epsilon")
        and not any(module.named_children())
    ]
    # Their forward reads the module's parameters when it is called: FSDP replaces them.
    for module in norms:
        module.forward = MethodType(
            lambda norm, x: RMSNorm.apply(x, norm.weight, norm.variance_epsilon), module
        )
    # down(silu(gate(x)) * up(x)) and nothing else, as in the Llama family.
    parts = {"gate_proj", "up_proj", "down_proj", "act_fn"}
    mlps = [
        module
        for module in model.modules()
        if {name for name, _ in module.named_children()} == parts
        and type(module.act_fn).__name__ in ("SiLU", "SiLUActivation")
    ]
    for module in mlps:
        module.forward = MethodType(
            lambda m, x: m.down_proj(GatedSiLU.apply(m.gate_proj(x), m.up_proj(x))), module
        )
    return {"norms": len(norms), "mlps": len(mlps)}
