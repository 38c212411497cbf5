# SPDX-License-Identifier: Apache-2.0
"""Float32 truth behind weights that compute in another dtype.

With bfloat16 compute weights an update of 1e-5 is lost in a weight of 1: the optimizer works on float32 masters,
and gradients are added up in float32 over micro-batches. With float32 compute weights both are the same tensors.
"""

from collections.abc import Mapping

import torch
from torch import nn


class MasterWeights:
    """Masters and gradient sums of a module's trainable parameters.

    Args:
        module: its parameters become the compute weights, in `dtype`; their float32 values become the masters.
        dtype: of the compute weights.
    """

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self.compute: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.is_shared = dtype == torch.float32
        self.masters: dict[str, torch.Tensor] = {}
        self.sums: dict[str, torch.Tensor] = {}
        for name, parameter in self.compute.items():
            if self.is_shared:
                self.masters[name] = parameter
                continue
            self.masters[name] = parameter.detach().float().clone()
            parameter.data = parameter.data.to(dtype)
            parameter.register_post_accumulate_grad_hook(_AddTo(self.sums, name))

    def gradients(self) -> dict[str, torch.Tensor]:
        """Float32 gradient sums by name; those of parameters that no loss reached are absent."""
        if not self.is_shared:
            return self.sums
        return {name: parameter.grad for name, parameter in self.compute.items() if parameter.grad is not None}

    def attach_gradients(self) -> None:
        """Hand the gradient sums to the masters, where the optimizer looks for them.

        A parameter without a gradient gets zeros, so that a mini-batch from which nothing can be learned is a
        step with a zero gradient, whether or not its sequences were computed.
        """
        for name, master in self.masters.items():
            if not self.is_shared:
                master.grad = self.sums.get(name)
            if master.grad is None:
                master.grad = torch.zeros_like(master)
                if not self.is_shared:
                    self.sums[name] = master.grad

    def clear_gradients(self) -> None:
        """Forget all gradients; the buffers of the sums are kept for the next mini-batch."""
        for total in self.sums.values():
            total.zero_()
        for name, parameter in self.compute.items():
            parameter.grad = None
            self.masters[name].grad = None

    def release_gradients(self) -> None:
        """Give the memory of the gradient sums back."""
        self.sums.clear()
        self.clear_gradients()

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Round the masters into the compute weights, in place."""
        if not self.is_shared:
            torch._foreach_copy_(list(self.compute.values()), list(self.masters.values()))

    @torch.no_grad()
    def load(self, values: Mapping[str, torch.Tensor]) -> None:
        """Copy float32 values into the masters, and round them into the compute weights."""
        for name, master in self.masters.items():
            master.copy_(values[name])
        self.refresh_compute()


class _AddTo:
    """Hook of one parameter: move its gradient into the float32 sum as soon as it is complete."""

    def __init__(self, sums: dict[str, torch.Tensor], name: str) -> None:
        self.sums, self.name = sums, name

    def __call__(self, parameter: torch.Tensor) -> None:
        gradient, parameter.grad = parameter.grad, None
        if self.name in self.sums:
            self.sums[self.name].add_(gradient)
        else:
            self.sums[self.name] = gradient.float()
