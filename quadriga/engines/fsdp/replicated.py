# SPDX-License-Identifier: Apache-2.0
"""Parameters that every rank has whole, and float32 masters behind those that compute in another dtype.

With bfloat16 compute weights an update of 1e-5 is lost in a weight of 1: the optimizer works on float32 masters,
and gradients are added up in float32 over micro-batches. With float32 compute weights both are the same tensors.

Legend: [...] is the shape of a parameter, and of its master, gradient and moments.
"""

from collections.abc import Callable, Iterator

import torch
from torch import nn

from quadriga.engines.process_group import ProcessGroup


class ReplicatedWeights:
    """Masters and gradient sums of a module's trained parameters.

    Args:
        root: what computes.
        module: inside of it; its parameters become the compute weights, in `dtype`; the float32 values of those that
            are trained become the masters.
        dtype: of the compute weights.
        replicas: ranks that have the same weights, and learn from other rows.
    """

    def __init__(self, root: nn.Module, module: nn.Module, dtype: torch.dtype, replicas: ProcessGroup) -> None:
        self.root = root
        self.compute: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.replicas = replicas
        self.masters: dict[str, torch.Tensor] = {}
        self._sums: dict[str, torch.Tensor] = {}
        for name, parameter in self.compute.items():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
                self.masters[name] = parameter.detach()
            elif dtype == torch.float32:
                self.masters[name] = parameter
            else:
                self.masters[name] = parameter.detach().float().clone()
                parameter.data = parameter.data.to(dtype)
                parameter.register_post_accumulate_grad_hook(_AddTo(self._sums, name))

    def trained(self) -> list[str]:
        """Names of the parameters that learn."""
        return [name for name, parameter in self.compute.items() if parameter.requires_grad]

    def attach_gradients(self) -> None:
        """Give the gradients [...] of all ranks, added up, to the masters, where the optimizer looks for them.

        A parameter without a gradient gets zeros, so that a mini-batch from which nothing can be learned is a
        step with a zero gradient, whether or not its sequences were computed.
        """
        for name in self.trained():
            master = self.masters[name]
            if not self._is_shared(name):
                master.grad = self._sums.get(name)
            if master.grad is None:
                master.grad = torch.zeros_like(master)
                if not self._is_shared(name):
                    self._sums[name] = master.grad
        # Summed before anything is decided by them, so that every replica decides alike, also about broken ones.
        self.replicas.add_up([self.masters[name].grad for name in self.trained()])

    def grad_norm(self) -> torch.Tensor:
        """The norm [] of the whole gradient, float32."""
        return torch.nn.utils.get_total_norm([self.masters[name].grad for name in self.trained()])

    def clear_gradients(self) -> None:
        """Forget all gradients; the buffers of the sums are kept for the next mini-batch."""
        for total in self._sums.values():
            total.zero_()
        for name, parameter in self.compute.items():
            parameter.grad = self.masters[name].grad = None

    def release_gradients(self) -> None:
        """Free the memory of the gradient sums."""
        self._sums.clear()
        self.clear_gradients()

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Round the masters [...] into the compute weights [...], in place."""
        # The fused optimizer does not count its writes, by which a rollout on these weights knows that they changed.
        torch.autograd.graph.increment_version([self.compute[name] for name in self.trained() if self._is_shared(name)])
        apart = [name for name in self.trained() if not self._is_shared(name)]
        if apart:
            torch._foreach_copy_([self.compute[name] for name in apart], [self.masters[name] for name in apart])

    def rest(self) -> None:
        """Nothing to do after a pass without gradients."""

    def num_parameters(self) -> int:
        """Numbers in all parameters of the whole model."""
        return sum(parameter.numel() for parameter in self.compute.values())

    def name_of(self, name: str) -> str:
        """The name of a parameter in the whole model: its own."""
        return name

    def distributed(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A master, or a moment of it, as the tensor that it is a part of: [...], itself."""
        return local

    def whole(self, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters [...] in the compute dtype; those whose names are `wanted`."""
        for name, parameter in self.compute.items():
            if wanted(name):
                yield name, parameter.detach()

    def _is_shared(self, name: str) -> bool:
        return self.masters[name] is self.compute[name]


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
