# SPDX-License-Identifier: Apache-2.0
"""Parameters of which each rank has a shard: split by pipeline and tensor parallelism first, then by FSDP2.

    whole      [V, D]           as it stands in files; on "meta" here, no rank has two whole ones at a time
    pp, tp     [V/tp, D]        a plain tensor: what the modules compute with (`parallel/tensor.py`)
    fsdp       [V/tp/fsdp, D]   float32, at rest: what the optimizer works on (`fully_shard`)
    ep, edp    of experts [E, ...], with expert parallelism, in the places of tp and fsdp

`fully_shard` gathers a layer's parts in the compute dtype before it computes, and adds their gradients up in float32
afterwards, each rank receiving the sum of its part. The masters are these parts as plain tensors, so the optimizer is
that of replicated weights; what they are parts of is said once, for checkpoints and rollouts.

Legend: [V, D] an embedding, as one parameter for all; tp, fsdp the ranks that share it.

arXiv:2304.11277
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from quadriga.engines.parallel.experts import share_experts
from quadriga.engines.parallel.pipeline import Stage, keep_stage, layers_of_stage
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.parallel.sharing import SharedTokens
from quadriga.engines.parallel.tensor import share_layers
from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import EngineError
from quadriga.models.architecture import backbone
from quadriga.models.experts import mixtures
from quadriga.models.heads import all_gather_single
from quadriga.models.scorers import Scorer
from quadriga.models.vision import is_vision, vision_encoder
from quadriga.models.weight_names import weight_buffers
from quadriga.partition import part_of

_GLOO_BYTES = 16 << 20
_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
ReadWeight = Callable[[str], torch.Tensor]
"""From a parameter's name in the whole model to its whole value, on any device and of any dtype."""


@dataclass(frozen=True)
class Memory:
    """What an engine gives up to need less memory."""

    gradient_checkpointing: bool = (
        False  # keep a layer's inputs only, and compute the layer again for its gradient
    )
    activation_offload: bool = (
        False  # keep what the backward pass needs in the memory of the CPU; with CUDA only
    )
    # Drop a layer's gathered weights between its forward and backward pass; sharded ones only.
    reshard_after_forward: bool = True
    # Masters and optimizer rest, and step, in the memory of the CPU; with CUDA, sharded ones only.
    offload_weights: bool = False


@dataclass(frozen=True)
class WholeParameter:
    """A parameter of the whole model: its shape, its stage, and whether the first and the last stage both have it; or a
    buffer, with its dtype, which is whole on every rank of its stage."""

    shape: torch.Size
    stage: int
    is_shared: bool = False
    dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Part:
    """What a master is a part of."""

    name: str  # in the whole model
    tensor_dimension: (
        int | None
    )  # cut by tensor parallelism; None: whole on every rank of a tp group
    is_copy: bool  # the first stage has the same parameter
    is_divided: bool = False  # experts, cut in the first dimension by expert parallelism


class PartialWeights:
    """The parameters of the whole model that this rank has parts of, by this rank's names, whatever computes with them.

    Args:
        parts: what each is a part of.
        whole: all parameters of the whole model, in its order.
    """

    parameters: Mapping[Any, nn.Parameter]  # what computes, under names of a subclass's own
    masters: dict[str, torch.Tensor]  # float32 [V/tp/fsdp, D]
    trained: list[str]

    def __init__(
        self,
        processes: Processes,
        dtype: torch.dtype,
        parts: Mapping[str, Part],
        whole: Mapping[str, WholeParameter],
    ) -> None:
        assert processes.storage is not None, "one rank has replicated weights"
        self.processes, self.dtype, self.all, self.parts = processes, dtype, whole, dict(parts)
        self.names = {name: part.name for name, part in parts.items()}
        self.sums: dict[str, torch.Tensor] = {}  # gradients in float32, beside a narrower parameter
        self.buffers: dict[str, torch.Tensor] = {}
        # By whether it is of experts: the ranks that cut a parameter, those that cut its parts, and both with all
        # copies. A mesh takes long to give its axes.
        meshes = {False: (processes.storage, "tp", "fsdp"), True: (processes.experts, "ep", "edp")}
        self.cuts = {
            is_divided: (mesh[outer], mesh[inner], mesh["dp_replicate", outer, inner])
            for is_divided, (mesh, outer, inner) in meshes.items()
            if mesh is not None
        }

    def part(self, name: str) -> torch.Tensor:
        """What this rank has [V/tp/fsdp, D] of a parameter."""
        return self.masters[name]

    def clear_gradients(self) -> None:
        """Forget all gradients; the buffers of the sums are kept for the next mini-batch."""
        for total in self.sums.values():
            total.zero_()
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def grad_norm(self) -> torch.Tensor:
        """The norm [] of the whole gradient, float32, the same on all ranks."""
        layout = self.processes.layout
        total = torch.zeros((), dtype=torch.float64, device=self.processes.world.device)
        for name in self.trained:
            part = self.parts[name]
            square = torch.linalg.vector_norm(self.masters[name].grad, dtype=torch.float64).square()
            copies: float = layout.tp if part.tensor_dimension is None else 1
            if part.is_divided:
                copies = self.cuts[True][2].size(0) / layout.dp_replicate
            if not part.is_copy:
                total += square.to(total.device) / copies
        dist.all_reduce(total)
        # Each copy of the weights has counted once.
        return (total / layout.dp_replicate).sqrt().float()

    def _axes(self, part: Part) -> tuple[int | None, DeviceMesh, DeviceMesh]:
        """The dimension in which ranks cut a parameter, these ranks, and those that cut its parts in the first one."""
        outer, inner, _ = self.cuts[part.is_divided]
        return 0 if part.is_divided else part.tensor_dimension, outer, inner

    def _part_shape(self, name: str) -> list[int]:
        """[V/tp, D]."""
        part = self.parts[name]
        (dimension, outer, _), shape = self._axes(part), list(self.all[part.name].shape)
        if dimension is not None:
            shape[dimension] = part_of(shape[dimension], outer.size(), outer.get_local_rank())[1]
        return shape

    def _join_copies(self, alike: Sequence[str]) -> None:
        """Add up the masters' gradients of what the ranks of a tp group hold `alike` and have each seen a part of, and
        of what the first and the last stage both have."""
        layout, processes, device = (
            self.processes.layout,
            self.processes,
            self.processes.world.device,
        )
        if layout.tp > 1:
            gradients = [self.masters[name].grad for name in alike]
            # Those of masters on the host travel by the device.
            sums = [gradient.to(device) for gradient in gradients]
            ProcessGroup(processes.place.tp, layout.tp, device, processes.group("tp")).add_up(sums)
            for gradient, total in zip(gradients, sums, strict=True):
                gradient.copy_(total)
        shared = (
            [name for name in self.trained if self.all[self.names[name]].is_shared]
            if layout.pp > 1
            else []
        )
        for gradient in (self.masters[name].grad for name in shared):
            # The first and the last stage each send their own to the other.
            group = processes.group("pp")
            peer = dist.get_global_rank(group, layout.pp - 1 if processes.is_first_stage else 0)
            other = torch.empty_like(gradient, device=device)
            sent = dist.P2POp(dist.isend, gradient.to(device).contiguous(), peer, group)
            for work in dist.batch_isend_irecv([sent, dist.P2POp(dist.irecv, other, peer, group)]):
                work.wait()
            gradient.add_(other.to(gradient.device))

    def distributed(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """A part [V/tp/fsdp, D] of this rank, a master or a moment, as the DTensor [V, D] that it is a part of."""
        part, shape = self.parts[name], self.all[self.parts[name].name].shape
        dimension, _, _ = self._axes(part)
        places = [Replicate(), Replicate() if dimension is None else Shard(dimension), Shard(0)]
        mesh, stride = self.cuts[part.is_divided][2], torch.empty(shape, device="meta").stride()
        described = DTensor.from_local(
            local.to("meta"), mesh, places, run_check=False, shape=shape, stride=stride
        )
        # Not `from_local`, which copies to the mesh's device what is kept on the host: writes would go to the copy.
        return DTensor(local, described._spec, requires_grad=False)

    def whole(
        self, wanted: Callable[[str], bool] = lambda name: True
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Parameters [V, D] of the whole model in the compute dtype, one after the other, on every rank; then buffers.

        No more than one of them and its parts are held here at a time; those whose names are not `wanted` are not
        gathered.
        """
        here = {part.name: name for name, part in self.parts.items() if not part.is_copy}
        device = self.processes.world.device
        for name, whole in ((name, whole) for name, whole in self.all.items() if wanted(name)):
            if name in here:
                tensor = self.part(here[name]).to(device, self.dtype)
                dimension, outer, inner = self._axes(self.parts[here[name]])
                tensor = _joined(tensor, inner, 0, self._part_shape(here[name]))
                if dimension is not None:
                    tensor = _joined(tensor, outer, dimension, whole.shape)
            elif name in self.buffers:
                tensor = self.buffers[name].clone()
            else:
                tensor = torch.empty(whole.shape, dtype=whole.dtype or self.dtype, device=device)
            if self.processes.layout.pp > 1:
                dist.broadcast(tensor, group=self.processes.group("pp"), group_src=whole.stage)
            yield name, tensor
            del tensor  # before the next one is there

    def pieces(self) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """Where each of this rank's parts starts in the whole [V, D], and its memory; and its buffers."""
        for name, part in self.parts.items():
            if not part.is_copy:
                yield part.name, self._box(name)[0], self.part(name)
        for name, buffer in self.buffers.items():
            yield name, (0,) * buffer.dim(), buffer

    def _box(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Where this rank's part of a parameter starts in the whole, and its shape."""
        part = self.parts[name]
        (dimension, outer, inner), shape = self._axes(part), list(self.all[part.name].shape)
        start = [0] * len(shape)
        if dimension is not None:
            start[dimension], shape[dimension] = part_of(
                shape[dimension], outer.size(), outer.get_local_rank()
            )
        inside, shape[0] = part_of(shape[0], inner.size(), inner.get_local_rank())
        start[0] += inside
        return tuple(start), tuple(shape)

    def _piece(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        expected, where = self.all[self.parts[name].name].shape, f"weight {self.parts[name].name}"
        if whole.shape != expected:
            raise EngineError(
                where, got=f"shape {tuple(whole.shape)}", expected=f"{tuple(expected)}"
            )
        for dim, (start, size) in enumerate(zip(*self._box(name), strict=True)):
            whole = whole.narrow(dim, start, size)
        return whole


class ShardedWeights(PartialWeights):
    """The parameters of this rank's layers, sharded by FSDP2.

    Args:
        root: the module that computes, the scorer or a pipeline's stage; sharded here.
        model: a part of it; its parameters have their tensor-parallel shapes, on "meta".
        parts: by the names of its parameters.
        whole: all parameters of the whole model, in its order.
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
        super().__init__(processes, dtype, parts, whole)
        self.root, device = root, processes.world.device
        # On a CPU weights are where they would be offloaded to.
        offloads = memory.offload_weights and device.type == "cuda"
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._shard(model, device, offloads=offloads, reshards=memory.reshard_after_forward)
        self.root.to_empty(device="cpu" if offloads else device)
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
            # Buffers compute: they follow the activations, whatever rests on the CPU.
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, model.get_buffer(name).to(device))
        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.buffers = weight_buffers(model)
        self.trained = [
            name for name, parameter in self.parameters.items() if parameter.requires_grad
        ]
        self.masters = {
            name: parameter.to_local().detach() for name, parameter in self.parameters.items()
        }
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(self._piece(name, read(self.names[name])))

    def _shard(
        self, model: PreTrainedModel, device: torch.device, *, offloads: bool, reshards: bool
    ) -> None:
        storage, is_replicated = self.processes.storage, self.processes.layout.dp_replicate > 1
        # A hidden state that a layer returns is in the compute dtype already; the outputs of the root stay float32.
        policy = MixedPrecisionPolicy(
            param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
        )
        options: dict[str, Any] = {
            "mesh": storage["dp_replicate", "fsdp"] if is_replicated else storage["fsdp"],
            "mp_policy": policy,
            "reshard_after_forward": reshards,
            "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
        }
        if self.processes.layout.ep > 1:
            divided = self.processes.experts
            mesh = divided["dp_replicate", "edp"] if is_replicated else divided["edp"]
            for mixture in mixtures(model):
                fully_shard(mixture.experts, **options | {"mesh": mesh})
        blocks = set(model._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in blocks:
                fully_shard(module, **options)
        fully_shard(self.root, **options)
        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                # Losses are normalised over all rows beforehand, so gradients are added up and never averaged.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if device.type == "cpu":
                    # Gloo gathers nothing while others compute: the layer to come would only take memory earlier.
                    module.set_modules_to_backward_prefetch([module])

    def attach_gradients(self) -> None:
        """Hand the gradients [V/tp/fsdp, D] to the masters; zeros where there are none."""
        for name in self.trained:
            parameter, master = self.parameters[name], self.masters[name]
            local = parameter.to_local()
            if local.data_ptr() != master.data_ptr():
                raise EngineError(
                    f"parameter {name}",
                    got="other memory than when it was sharded",
                    expected="the same",
                )
            master.grad = (
                torch.zeros_like(master) if parameter.grad is None else parameter.grad.to_local()
            )
        # Those of what several ranks hold alike have each seen a part of the tokens or heads.
        self._join_copies(
            [name for name in self.trained if self.parts[name].tensor_dimension is None]
        )

    def refresh_compute(self) -> None:
        """Nothing: FSDP gathers what computes from the masters [V/tp/fsdp, D] itself."""

    def resting(self) -> dict[str, list[torch.Tensor]]:
        """The tensors [V/tp/fsdp, D] that may rest: `weights`, which are the masters."""
        return {
            "weights": [parameter.to_local().detach() for parameter in self.parameters.values()]
        }

    def use_memory(self, windows: Sequence[torch.Tensor]) -> None:
        """Let these tensors [V/tp/fsdp, D], in the order of `parameters`, be the memory of the parts. A part that
        FSDP pads, of a tensor that its ranks do not divide, keeps its own."""
        of_parameter = dict(zip(map(id, self.parameters.values()), windows, strict=True))

        def moved(tensor: torch.Tensor) -> torch.Tensor:
            if (window := of_parameter.get(id(tensor))) is None:
                return tensor
            return DTensor(window, tensor._spec, requires_grad=tensor.requires_grad)

        self.root._apply(moved)
        for name, parameter in self.parameters.items():
            self.masters[name].data = parameter.to_local().detach()


def _joined(
    part: torch.Tensor, mesh: DeviceMesh, dimension: int, shape: Sequence[int]
) -> torch.Tensor:
    """A tensor from the parts that the ranks of a mesh have, sent to where they belong in it."""
    group, number = mesh.get_group(), mesh.get_local_rank()
    if mesh.size() == 1:
        return part
    whole = torch.empty(shape, dtype=part.dtype, device=part.device)
    sizes = [part_of(shape[dimension], mesh.size(), sender)[1] for sender in range(mesh.size())]
    # Gloo takes as much memory again for what it gathers at once.
    is_small = whole.nbytes <= _GLOO_BYTES or part.device.type != "cpu"
    if dimension == 0 and len(set(sizes)) == 1 and is_small:
        all_gather_single(whole, part.contiguous(), group=group)
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


def shard(
    scorer: Scorer,
    read: ReadWeight | None,
    dtype: torch.dtype,
    processes: Processes,
    memory: Memory,
) -> ShardedWeights:
    """The parameters of a scorer's model as its ranks hold them: [V/tp/fsdp, D] of [V, D].

    Args:
        scorer: the model and its head, whole, with float32 values or on "meta"; computes with the shards afterwards.
        read: gives the values; None: the model has them.
    """
    model, layout = scorer.model, processes.layout
    if read is None:
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        read = values.__getitem__
    # Parameters go to "meta", ties kept: float32 where they are trained, else in the compute dtype.
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kind = torch.float32 if parameter.requires_grad else dtype
            empty = torch.empty_like(parameter, device="meta", dtype=kind)
            moved.setdefault(id(parameter), nn.Parameter(empty, parameter.requires_grad))
            setattr(module, name, moved[id(parameter)])
    whole = _describe(model, processes)
    vocabulary = model.get_input_embeddings().num_embeddings
    cut = share_layers(model, processes.group("tp")) if layout.tp > 1 else {}
    divided = (
        share_experts(model, processes.experts.get_group("ep"))
        if processes.experts is not None
        else set()
    )
    copies = keep_stage(model, processes) if layout.pp > 1 else {}
    parts = {
        name: Part(copies.get(name, name), cut.get(name), name in copies, name in divided)
        for name, _ in model.named_parameters()
    }
    scorer.sharing = SharedTokens(processes, vocabulary)
    root = Stage(scorer, processes, dtype) if layout.pp > 1 else scorer
    return ShardedWeights(
        root, model, parts, read, dtype=dtype, processes=processes, whole=whole, memory=memory
    )


def _describe(model: PreTrainedModel, processes: Processes) -> Mapping[str, WholeParameter]:
    num_stages = processes.layout.pp
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = isinstance(head, nn.Linear) and head.weight is table.weight
    of_table = {id(parameter) for parameter in table.parameters()}
    of_first = of_table | {
        id(one) for one in (vision_encoder(model).parameters() if is_vision(model.config) else ())
    }
    stages = {}
    if num_stages > 1:
        num_layers = len(backbone(model).layers)
        stages = {
            number: stage
            for stage in range(num_stages)
            for number in layers_of_stage(num_layers, stage, num_stages)
        }
    described = {}
    for name, parameter in model.named_parameters():
        is_table, layer = id(parameter) in of_table, _LAYER.fullmatch(name)
        stage = (
            0
            if id(parameter) in of_first
            else stages.get(int(layer[1]), 0)
            if layer
            else num_stages - 1
        )
        described[name] = WholeParameter(
            parameter.shape, stage, num_stages > 1 and is_tied and is_table
        )
    for name, buffer in weight_buffers(model).items():
        layer = _LAYER.fullmatch(name)
        stage = stages.get(int(layer[1]), 0) if layer else num_stages - 1
        described[name] = WholeParameter(buffer.shape, stage, dtype=buffer.dtype)
    return described
