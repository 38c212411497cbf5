# SPDX-License-Identifier: Apache-2.0
"""Parameters of which each process has a part: cut by tensor parallelism first, then by FSDP2.

    whole      [V, D]           as it stands in files
    tp         [V/tp, D]        a plain tensor: what the modules compute with (`parallel/tensor.py`)
    fsdp       [V/tp/fsdp, D]   float32, at rest: what the optimizer works on (`fully_shard`)

`fully_shard` gathers a layer's parts in the compute dtype before it computes, and adds their gradients up in float32
afterwards, each process receiving the sum of its part. The masters here are these parts as plain tensors, so the
optimizer is the same as for whole weights; what they are parts of is said once, for checkpoints and rollouts.

arXiv:2304.11277
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from quadriga.engines.fsdp.memory import Memory
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.parallel.sharing import part_sizes
from quadriga.errors import EngineError

ReadWeight = Callable[[str], torch.Tensor]
"""From a parameter's name in the whole model to its whole value, on any device and of any dtype."""


@dataclass(frozen=True)
class WholeParameter:
    """A parameter of the whole model: its shape, its stage, and whether the first and the last stage both have it."""

    shape: torch.Size
    stage: int
    is_shared: bool


@dataclass(frozen=True)
class Part:
    """What a master is a part of.

    Attributes:
        name: in the whole model.
        tensor_dimension: cut by tensor parallelism; None: whole in every process of a tp group.
        is_copy: the first stage has the same parameter.
    """

    name: str
    tensor_dimension: int | None
    is_copy: bool


class ShardedWeights:
    """The parameters of this process's layers. Its methods are those of `WholeWeights`.

    Args:
        root: what computes: the scorer, or a pipeline's stage; sharded here.
        model: inside of it; its parameters have their tensor-parallel shapes, real or on "meta".
        parts: of each of its parameters, by the name it has here.
        read: gives the whole values.
        dtype: of the compute weights.
        processes: of the engine.
        whole: all parameters of the whole model, in its order.
        memory: what is given up to save some.
    """

    def __init__(
        self,
        root: nn.Module,
        model: PreTrainedModel,
        parts: Mapping[str, Part],
        read: ReadWeight,
        *,
        dtype: torch.dtype,
        processes: Processes,
        whole: Mapping[str, WholeParameter],
        memory: Memory,
    ) -> None:
        assert processes.storage is not None, "one process has whole weights"
        self.processes, self.dtype, self.all, self.parts = processes, dtype, whole, dict(parts)
        self.model = model
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self.root = _shard(root, model, dtype, processes, memory)
        self.root.to_empty(device="cpu" if _is_offloaded(memory, processes) else processes.world.device)
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
            # Buffers compute: they follow the activations, whatever rests on the CPU.
            _set_buffer(model, name, model.get_buffer(name).to(processes.world.device))
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.masters = {name: parameter.to_local().detach() for name, parameter in self.parameters.items()}
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(self._piece(name, read(self.parts[name].name)))

    # ---- gradients ------------------------------------------------------------------------------------

    def trained(self) -> list[str]:
        """Names of the parameters that learn."""
        return [name for name, parameter in self.parameters.items() if parameter.requires_grad]

    def attach_gradients(self) -> None:
        """Hand the gradients to the masters; zeros where there are none."""
        for name in self.trained():
            parameter, master = self.parameters[name], self.masters[name]
            local = parameter.to_local()
            if local.data_ptr() != master.data_ptr():
                raise EngineError(f"parameter {name}", got="other memory than when it was sharded", expected="the same")
            master.grad = torch.zeros_like(master) if parameter.grad is None else parameter.grad.to_local()
        self._add_up_copies()

    def _add_up_copies(self) -> None:
        """Add up the gradients of what several processes hold alike, and have each seen a part of."""
        layout = self.processes.layout
        if layout.tp > 1:
            alike = [self.masters[name].grad for name in self.trained() if self.parts[name].tensor_dimension is None]
            _add_up(alike, self.processes.group("tp"))
        if layout.pp > 1:
            shared = [name for name in self.trained() if self.all[self.parts[name].name].is_shared]
            for name in shared:
                _add_up_of_two(self.masters[name].grad, self.processes)

    def grad_norm(self) -> torch.Tensor:
        """The norm of the whole gradient, the same in all processes."""
        layout = self.processes.layout
        total = torch.zeros((), dtype=torch.float64, device=self.processes.world.device)
        for name in self.trained():
            part = self.parts[name]
            square = torch.linalg.vector_norm(self.masters[name].grad, dtype=torch.float64).square()
            if not part.is_copy:
                total += square.to(total.device) / (layout.tp if part.tensor_dimension is None else 1)
        dist.all_reduce(total)
        # Each copy of the weights has counted once.
        return (total / layout.dp_replicate).sqrt().float()

    def clear_gradients(self) -> None:
        """Forget all gradients."""
        for name, parameter in self.parameters.items():
            parameter.grad = self.masters[name].grad = None

    release_gradients = clear_gradients

    def refresh_compute(self) -> None:
        """Nothing to do: compute weights are gathered from the masters when a layer computes."""

    def rest(self) -> None:
        """Drop what a pass without gradients has gathered and a backward pass would have dropped."""
        if isinstance(self.root, FSDPModule):
            self.root.reshard()

    # ---- whole tensors --------------------------------------------------------------------------------

    def num_parameters(self) -> int:
        """Numbers in all parameters of the whole model."""
        return sum(parameter.shape.numel() for parameter in self.all.values())

    def name_of(self, name: str) -> str:
        """The name of a parameter in the whole model."""
        return self.parts[name].name

    def distributed(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A part of this process, a master or a moment of it, as the tensor that it is a part of."""
        part, shape = self.parts[name], self.all[self.parts[name].name].shape
        tensor = Replicate() if part.tensor_dimension is None else Shard(part.tensor_dimension)
        stride = torch.empty(shape, device="meta").stride()
        mesh = self.processes.storage["dp_replicate", "tp", "fsdp"]
        return DTensor.from_local(
            local, mesh, [Replicate(), tensor, Shard(0)], run_check=False, shape=shape, stride=stride
        )

    def whole(self, wanted: Callable[[str], bool] = lambda name: True) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters of the whole model in the compute dtype, one after the other, in every process.

        No more than one of them and its parts are held here at a time; those whose names are not `wanted` are not
        gathered.
        """
        here = {part.name: name for name, part in self.parts.items() if not part.is_copy}
        device = self.processes.world.device
        for name, whole in ((name, whole) for name, whole in self.all.items() if wanted(name)):
            if name in here:
                tensor = self._gather(here[name], self.masters[here[name]].to(device, self.dtype))
            else:
                tensor = torch.empty(whole.shape, dtype=self.dtype, device=device)
            if self.processes.layout.pp > 1:
                dist.broadcast(tensor, group=self.processes.group("pp"), group_src=whole.stage)
            yield name, tensor
            del tensor  # before the next one is there

    def _gather(self, name: str, local: torch.Tensor) -> torch.Tensor:
        dimension, shape = self.parts[name].tensor_dimension, self.all[self.parts[name].name].shape
        cut = list(shape)
        if dimension is not None:
            cut[dimension] = part_sizes(shape[dimension], self.processes.layout.tp)[self.processes.place.tp]
        tensor = _joined(local, self.processes.storage["fsdp"], 0, cut)
        return tensor if dimension is None else _joined(tensor, self.processes.storage["tp"], dimension, shape)

    def _piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        part, place, layout = self.parts[name], self.processes.place, self.processes.layout
        expected = self.all[part.name].shape
        if whole.shape != expected:
            raise EngineError(f"weight {part.name}", got=f"shape {tuple(whole.shape)}", expected=f"{tuple(expected)}")
        if part.tensor_dimension is not None:
            whole = _cut(whole, part.tensor_dimension, layout.tp, place.tp)
        return _cut(whole, 0, layout.fsdp, place.dp_shard * layout.sp + place.sp)


def _is_offloaded(memory: Memory, processes: Processes) -> bool:
    # On a CPU weights are where they would be offloaded to.
    return memory.offload_weights and processes.world.device.type == "cuda"


def _shard(
    root: nn.Module, model: PreTrainedModel, dtype: torch.dtype, processes: Processes, memory: Memory
) -> nn.Module:
    mesh = processes.storage["dp_replicate", "fsdp"] if processes.layout.dp_replicate > 1 else processes.storage["fsdp"]
    # A hidden state that a layer returns is in the compute dtype already; the outputs of the root stay float32.
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32, cast_forward_inputs=False)
    options = {
        "mesh": mesh,
        "mp_policy": policy,
        "reshard_after_forward": memory.reshard_after_forward,
        "offload_policy": CPUOffloadPolicy() if _is_offloaded(memory, processes) else OffloadPolicy(),
    }
    blocks = set(model._no_split_modules or ())
    for module in model.modules():
        if type(module).__name__ in blocks:
            fully_shard(module, **options)
    fully_shard(root, **options)
    for module in root.modules():
        if isinstance(module, FSDPModule):
            # Losses are normalised over all rows beforehand, so gradients are added up and never averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return root


def _cut(whole: torch.Tensor, dimension: int, parts: int, number: int) -> torch.Tensor:
    sizes = part_sizes(whole.shape[dimension], parts)
    return whole.narrow(dimension, sum(sizes[:number]), sizes[number])


def _joined(part: torch.Tensor, mesh: DeviceMesh, dimension: int, shape: Sequence[int]) -> torch.Tensor:
    """A tensor from the parts that the processes of a mesh have, sent to where they belong in it."""
    group, number = mesh.get_group(), mesh.get_local_rank()
    if mesh.size() == 1:
        return part
    whole = torch.empty(shape, dtype=part.dtype, device=part.device)
    sizes = part_sizes(shape[dimension], mesh.size())
    if dimension == 0 and len(set(sizes)) == 1:
        dist.all_gather_into_tensor(whole, part.contiguous(), group=group)
        return whole
    for sender, place in enumerate(whole.split(sizes, dimension)):
        if place.numel() == 0:
            continue
        if sender == number:
            place.copy_(part)
        # Only the rows of a tensor lie together.
        sent = place if place.is_contiguous() else place.contiguous()
        dist.broadcast(sent, group=group, group_src=sender)
        if sent is not place:
            place.copy_(sent)
    return whole


def _add_up(tensors: Sequence[torch.Tensor], group: dist.ProcessGroup) -> None:
    if not tensors:
        return
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
    dist.all_reduce(flat, group=group)
    for tensor, total in zip(tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True):
        tensor.copy_(total.view(tensor.shape))


def _add_up_of_two(tensor: torch.Tensor, processes: Processes) -> None:
    """Replace a tensor of the first and the last stage by the sum of both: each sends its own to the other."""
    group = processes.group("pp")
    peer = dist.get_global_rank(group, processes.layout.pp - 1 if processes.is_first_stage else 0)
    other = torch.empty_like(tensor)
    sent = [
        dist.P2POp(dist.isend, tensor.contiguous(), peer, group),
        dist.P2POp(dist.irecv, other, peer, group),
    ]
    for work in dist.batch_isend_irecv(sent):
        work.wait()
    tensor.add_(other)


def _set_buffer(model: nn.Module, name: str, value: torch.Tensor) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, value)
