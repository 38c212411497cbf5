# SPDX-License-Identifier: Apache-2.0
"""Parameters that every rank holds in full, with float32 masters if they compute in another dtype.

In bfloat16, adding an update of 1e-5 to a weight of 1 changes nothing. The optimizer therefore
works on float32 masters, and gradients of micro-batches are summed in float32. Parameters that
compute in float32 are their own masters.

Legend: [...] is the shape of a parameter, and of its master, gradient and moments.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import torch
from torch import nn

from quadriga.engines.process_group import ProcessGroup
from quadriga.models.weight_names import weight_buffers

NamedTensors: TypeAlias = Iterator[tuple[str, torch.Tensor]]


class ReplicatedWeights:
    """Parameters [...] of a module, with masters and gradient sums of those that are trained.

    Args:
        root: the module that computes.
        module: the model, a submodule of `root` or `root` itself. Its parameters are converted to
            `dtype`; the float32 values of trained ones become masters.
        dtype: compute dtype.
        replicas: ranks with the same weights and other rows.
        steps_on_host: whether masters are in host memory, so that the optimizer steps there.

    Attributes:
        parameters: compute parameters, by name.
        buffers: buffers that belong to the weights, by name.
        names: the name of each parameter in the full model, which here is the same.
        trained: names of the trained parameters.
        masters: tensors that the optimizer updates, by name; frozen parameters are their own
            masters.
        sums: float32 gradients of parameters that have a separate master, by name, summed over the
            micro-batches since the last step.
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
        self.root = root
        self.stage = None  # every rank computes the whole model
        self.replicas = replicas
        self.parameters: dict[str, nn.Parameter] = dict(module.named_parameters())
        self.buffers = weight_buffers(module)
        self.names = {name: name for name in self.parameters}
        self.trained: list[str] = []
        self.masters: dict[str, torch.Tensor] = {}
        self.sums: dict[str, torch.Tensor] = {}
        # Parameters whose masters are separate tensors.
        self._with_master: dict[str, nn.Parameter] = {}
        for name, parameter in self.parameters.items():
            self.masters[name] = parameter
            if not parameter.requires_grad:
                parameter.data = parameter.data.to(dtype)
                continue
            self.trained.append(name)
            if dtype != torch.float32 or steps_on_host:
                # The master is the exact float32 value; the parameter is rounded.
                self._with_master[name] = parameter
                device = torch.device("cpu") if steps_on_host else parameter.device
                master = parameter.detach().to(device, torch.float32, copy=True)
                if steps_on_host and parameter.is_cuda:
                    master = master.pin_memory()
                self.masters[name] = master
                parameter.data = parameter.data.to(dtype)
                parameter.register_post_accumulate_grad_hook(partial(_add_to, self.sums, name))

    def attach_gradients(self) -> None:
        """Sum the gradients [...] over all replicas, and attach them to the masters.

        A parameter without a gradient gets zeros: a mini-batch without a learning signal makes a
        step with a zero gradient, whether or not its sequences were computed.
        """
        totals = {}
        for name in self.trained:
            parameter = self.parameters[name]
            # A hook has moved the gradient of a parameter with a separate master to a float32 sum.
            has_master = name in self._with_master
            total = self.sums.get(name) if has_master else parameter.grad
            if total is None:
                total = torch.zeros_like(parameter, dtype=torch.float32)
            if has_master:
                # Also if these are new zeros: later mini-batches add to the same memory.
                self.sums[name] = total
            totals[name] = total
        # Sum before the check for finite values, so that all replicas skip the same steps.
        self.replicas.add_up(list(totals.values()))
        for name, total in totals.items():
            self.masters[name].grad = total.to(self.masters[name].device)

    def grad_norm(self) -> torch.Tensor:
        """Norm [] of the full gradient, float32."""
        return torch.nn.utils.get_total_norm([self.masters[name].grad for name in self.trained])

    def clear_gradients(self) -> None:
        """Drop all gradients. The memory of the sums stays for the next mini-batch."""
        for total in self.sums.values():
            total.zero_()
        for name, parameter in self.parameters.items():
            parameter.grad = None
            self.masters[name].grad = None

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Copy the masters [...] into the compute parameters [...], rounded to their dtype.

        Without separate masters there is nothing to copy. Then only tell rollouts that share the
        parameters that these have changed.
        """
        if self._with_master:
            masters = [self.masters[name] for name in self._with_master]
            torch._foreach_copy_(list(self._with_master.values()), masters)
        else:
            # Rollouts detect updates by the version counters of tensors, which the fused optimizer
            # does not increment.
            trained = [self.parameters[name] for name in self.trained]
            torch.autograd.graph.increment_version(trained)

    def offloadable_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Offloadable tensors [...]: the compute `weights`, and `masters` that are separate."""
        return {
            "weights": list(self.parameters.values()),
            "masters": [self.masters[name] for name in self._with_master],
        }

    def as_dtensor(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Return a master or a moment as it is: it is not sharded, so it needs no DTensor.

        Args:
            name: name of the parameter.
            local: [...], its master or a moment.

        Returns:
            [...], the same tensor.
        """
        return local

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """Yield name, start and tensor [...] of this rank's shards: here full parameters."""
        for name, tensor in self.full_parameters():
            yield name, (0,) * tensor.dim(), tensor

    def full_parameters(self, is_wanted: Callable[[str], bool] = lambda name: True) -> NamedTensors:
        """Yield wanted parameters [...] in the compute dtype, then wanted buffers, with names."""
        for name, tensor in (*self.parameters.items(), *self.buffers.items()):
            if is_wanted(name):
                yield name, tensor.detach()


def _add_to(sums: dict[str, torch.Tensor], name: str, parameter: torch.Tensor) -> None:
    """Hook of a parameter: move its complete gradient into the float32 sum."""
    gradient = parameter.grad
    parameter.grad = None
    if name in sums:
        sums[name].add_(gradient)
    else:
        sums[name] = gradient.float()
