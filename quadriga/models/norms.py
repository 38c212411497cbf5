# SPDX-License-Identifier: Apache-2.0
"""RMS norms with one pass forward and one pass backward.

Written out in eager mode an RMS norm is six kernels over the activations, each of which keeps a float32 copy for
the backward pass. The function here computes the same values in float32 and keeps only its input and the
reciprocal root mean square.

Legend: N tokens, D hidden size.
"""

import torch
from torch import nn
from transformers import PreTrainedModel


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
        wide = hidden.float()
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(hidden.shape[-1])
        scale = scale.add_(epsilon).rsqrt_()
        ctx.save_for_backward(hidden, weight, scale)
        return (wide * scale).to(hidden.dtype) * weight

    @staticmethod
    def backward(ctx, grad: torch.Tensor):
        hidden, weight, scale = ctx.saved_tensors
        normed = hidden.float().mul_(scale)
        grad_weight = None
        if ctx.needs_input_grad[1]:
            grad_weight = (grad.float() * normed).flatten(0, -2).sum(0).to(weight.dtype)
        grad_normed = grad.float() * weight.float()
        projection = (grad_normed * normed).mean(-1, keepdim=True)
        grad_hidden = grad_normed.sub_(normed.mul_(projection)).mul_(scale)
        return grad_hidden.to(hidden.dtype), grad_weight, None


def rms_norm(hidden: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Root-mean-square norm, arXiv:1910.07467.

    Args:
        hidden: [..., D]
        weight: [D]
        epsilon: added to the mean square.

    Returns:
        [..., D] in the dtype of `hidden`; the mean and the division are in float32.
    """
    return _RMSNorm.apply(hidden, weight, epsilon)


def fuse_norms(model: PreTrainedModel) -> int:
    """Let every plain RMS norm of a model use `rms_norm`; other norms are left as they are. Returns how many."""
    fused = [module for module in model.modules() if _is_plain_rms_norm(module)]
    for module in fused:
        module.forward = _FusedForward(module)
    return len(fused)


class _FusedForward:
    """Bound replacement of a norm's forward that reads the module's parameter at call time."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        return rms_norm(hidden, self.module.weight, self.module.variance_epsilon)


def _is_plain_rms_norm(module: nn.Module) -> bool:
    """Norms of the Llama family multiply by `weight` itself; Gemma's, say, by one plus it, under the name `eps`."""
    parameters = dict(module.named_parameters(recurse=False))
    return (
        type(module).__name__.endswith("RMSNorm")
        and set(parameters) == {"weight"}
        and hasattr(module, "variance_epsilon")
        and not any(module.named_children())
    )
