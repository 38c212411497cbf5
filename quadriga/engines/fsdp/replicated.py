# SPDX-License-Identifier: Apache-2.0
"""Parameters that every rank has whole, and float32 masters behind those that compute in another dtype.

With bfloat16 compute weights an update of 1e-5 is lost in a weight of 1: the optimizer works on float32 masters,
and gradients are added up in float32 over micro-batches. With float32 compute weights both are the same tensors.

Legend: [...] is the shape of a parameter, and of its master, gradient and moments.
"""

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import nn

from quadriga.engines.process_group import ProcessGroup
from quadriga.models.weight_names import weight_buffers


class ReplicatedWeights:
    """Masters [...] and gradient sums of a module's trained parameters, by name.

    Args:
        module: a part of it; its parameters become the compute weights, in `dtype`; the float32 values of those that
            are trained become the masters.
        replicas: ranks with the same weights and other rows.
        steps_on_host: whether the masters are kept on the host, so that the optimizer steps there.
    """

    def __init__(
        self,
        root: nn.Module,
        module: nn.Module,
        dtype: torch.dtype,
        replicas: ProcessGroup,
        *,
        steps_on_host: bool = False,
    ) -> None:
        self.root, self.replicas = root, replicas
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.buffers = weight_buffers(module)
        self.names = {name: name for name in self.parameters}
        self.trained = [
            name for name, parameter in self.parameters.items() if parameter.requires_grad
        ]
        self.masters: dict[str, torch.Tensor] = {}
        self.sums: dict[
            str, torch.Tensor
        ] = {}  # gradients in float32, of those that are no masters themselves
        self._apart: dict[str, nn.Parameter] = {}  # those whose masters are other tensors
        for name, parameter in self.parameters.items():
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
                self.masters[name] = parameter
            elif dtype == torch.float32 and not steps_on_host:
                self.masters[name] = parameter
            else:
                self._apart[name] = parameter
                master = parameter.detach().to(
                    "cpu" if steps_on_host else parameter.device, torch.float32, copy=True
                )
                self.masters[name] = (
                    master.pin_memory() if steps_on_host and parameter.is_cuda else master
                )
                parameter.data = parameter.data.to(dtype)
                parameter.register_post_accumulate_grad_hook(partial(_add_to, self.sums, name))

    def attach_gradients(self) -> None:
        """Give the gradients [...] of all ranks, added up, to the masters, where the optimizer looks for them.

        A parameter without a gradient gets zeros, so that a mini-batch from which nothing can be learned is a
        step with a zero gradient, whether or not its sequences were computed.
        """
        totals = []
        for name in self.trained:
            parameter = self.parameters[name]
            total = self.sums.get(name) if name in self._apart else parameter.grad
            totals.append(
                torch.zeros_like(parameter, dtype=torch.float32) if total is None else total
            )
            if name in self._apart:
                self.sums[name] = totals[-1]
        # Summed before anything is decided by them, so that every replica decides alike, also about broken ones.
        self.replicas.add_up(totals)
        for name, total in zip(self.trained, totals, strict=True):
            self.masters[name].grad = total.to(self.masters[name].device)

    def grad_norm(self) -> torch.Tensor:
        """The norm [] of the whole gradient, float32."""
        return torch.nn.utils.get_total_norm([self.masters[name].grad for name in self.trained])

    def clear_gradients(self) -> None:
        """Forget all gradients; the buffers of the sums are kept for the next mini-batch."""
        for total in self.sums.values():
            total.zero_()
        for name, parameter in self.parameters.items():
            parameter.grad = self.masters[name].grad = None

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Round the masters [...] into the compute weights [...], in place."""
        if self._apart:
            torch._foreach_copy_(
                list(self._apart.values()), [self.masters[name] for name in self._apart]
            )
        else:
            # The fused optimizer does not count its writes, by which a rollout on these weights knows of changes.
            torch.autograd.graph.increment_version([self.parameters[name] for name in self.trained])

    def resting(self) -> dict[str, list[torch.Tensor]]:
        """The tensors [...] that may rest, by kind: `weights` that compute, and `masters` that are other tensors."""
        return {
            "weights": list(self.parameters.values()),
            "masters": [self.masters[name] for name in self._apart],
        }

    def distributed(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A master, or a moment of it, as the tensor that it is a part of: [...], itself."""
        return local

    def pieces(self) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """The parameters [...] in the compute dtype, each from its start."""
        return ((name, (0,) * tensor.dim(), tensor) for name, tensor in self.whole())

    def whole(
        self, wanted: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """The parameters [...] in the compute dtype, and the buffers; those whose names are `wanted`."""
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            if wanted(name):
                yield name, tensor.detach()


def _add_to(sums: dict[str, torch.Tensor], name: str, parameter: torch.Tensor) -> None:
    """Hook of one parameter: move its gradient into the float32 sum as soon as it is complete."""
    gradient, parameter.grad = parameter.grad, None
    if name in sums:
        sums[name].add_(gradient)
    else:
        sums[name] = gradient.float()
