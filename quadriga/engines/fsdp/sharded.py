# SPDX-License-Identifier: Apache-2.0
"""Parameters sharded over ranks: by pipeline and tensor parallelism first, then by FSDP2.

    full       [V, D]           as in files; no rank holds more than one full parameter at a time
    pp, tp     [V/tp, D]        the model shard: a plain tensor that modules compute with
    fsdp       [V/tp/fsdp, D]   the shard: float32 between steps, what the optimizer updates
    ep, edp    for experts [E, ...] with expert parallelism, instead of tp and fsdp

`parallel/tensor.py` makes the model shards, and `fully_shard` (arXiv:2304.11277) the shards. FSDP
gathers a layer's model shards in the compute dtype before the layer computes. Afterwards it sums
their gradients in float32 over the ranks, each of which receives the sum for its shard. The masters
are the shards as plain tensors, so the optimizer is the same as for replicated weights. `ShardSpec`
describes the position of a shard in its parameter, for checkpoints and rollouts.

Legend: [V, D] the shape of the embedding, as an example for all parameters; tp and fsdp also stand
for the sizes of these groups.
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

from quadriga.engines.fsdp.replicated import NamedTensors
from quadriga.engines.parallel.experts import shard_experts
from quadriga.engines.parallel.pipeline import Stage, keep_stage, layers_of_stage
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.parallel.sharing import SharedTokens
from quadriga.engines.parallel.tensor import shard_layers
from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import EngineError
from quadriga.models.architecture import backbone
from quadriga.models.experts import mixtures
from quadriga.models.heads import all_gather_single
from quadriga.models.scorers import Scorer
from quadriga.models.vision import is_vision, vision_encoder
from quadriga.models.weight_names import weight_buffers
from quadriga.partition import part_of

# Largest tensor that Gloo gathers in one collective, for which it needs twice the memory.
_MAX_GLOO_BYTES = 16 << 20
_LAYER_NAME = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")
ReadWeight = Callable[[str], torch.Tensor]
"""Reads a full parameter by its name in the full model, on any device and of any dtype."""


@dataclass(frozen=True)
class Memory:
    """Ways in which an engine saves memory, at the cost of time."""

    gradient_checkpointing: bool = False  # save only a layer's inputs; recompute it for gradients
    activation_offload: bool = False  # save activations in host memory; only with CUDA
    reshard_after_forward: bool = True  # free gathered weights before backward; only if sharded
    # Keep masters and moments in host memory, where the optimizer then steps; only with CUDA.
    offload_weights: bool = False


@dataclass(frozen=True)
class ParameterSpec:
    """A parameter or a buffer of the full model. Buffers are not sharded within their stage."""

    shape: torch.Size
    stage: int  # pipeline stage that holds it
    is_shared: bool = False  # whether the first and the last stage both hold it
    dtype: torch.dtype | None = None  # dtype of a buffer; None for a parameter


@dataclass(frozen=True)
class ShardSpec:
    """Position of a rank's shard in the full parameter."""

    name: str  # in the full model
    tensor_dimension: int | None  # dimension that tensor parallelism shards; None: not sharded
    is_copy: bool  # whether it is the last stage's copy of a parameter of the first stage
    is_expert: bool = False  # whether expert parallelism shards it

    @property
    def model_dimension(self) -> int | None:
        """Dimension that tensor or expert parallelism shards; None if neither does."""
        return 0 if self.is_expert else self.tensor_dimension


@dataclass(frozen=True)
class _Meshes:
    """Meshes over which parameters are sharded: one set for experts, one for all others."""

    model: DeviceMesh  # tp or ep: one model shard for each rank
    fsdp: DeviceMesh  # fsdp or edp: shards the model shards by their first dimension
    replicated: DeviceMesh  # (dp_replicate, model, fsdp): all ranks with shards of a parameter

    @classmethod
    def of(cls, mesh: DeviceMesh, model_axis: str, fsdp_axis: str) -> "_Meshes":
        """Slice a mesh by the names of its axes."""
        return cls(mesh[model_axis], mesh[fsdp_axis], mesh["dp_replicate", model_axis, fsdp_axis])


class PartialWeights:
    """Parameters of which this rank holds shards. The base of FSDP's and Megatron's weights.

    Args:
        processes: the ranks of the engine.
        dtype: compute dtype.
        shard_specs: where each shard sits in its parameter, by this rank's names.
        parameter_specs: all parameters and buffers of the full model, in its order.

    Attributes:
        names: names in the full model.
        sums: float32 gradients of parameters in a narrower dtype, if autograd does not sum them.
        stage: object that runs micro-batches in place of the scorer, such as a pipeline stage.
        parameters: compute parameters.
        buffers: buffers of this rank's stage that belong to the weights, by name.
        masters: tensors that the optimizer updates, by this rank's names.
        trained: this rank's names of the trained parameters.
    """

    stage: Any = None
    parameters: Mapping[Any, nn.Parameter]  # compute parameters; a subclass chooses the keys
    masters: dict[str, torch.Tensor]  # float32 [V/tp/fsdp, D]
    trained: list[str]

    def __init__(
        self,
        processes: Processes,
        dtype: torch.dtype,
        shard_specs: Mapping[str, ShardSpec],
        parameter_specs: Mapping[str, ParameterSpec],
    ) -> None:
        assert processes.storage is not None, "one rank has replicated weights"
        self.processes = processes
        self.dtype = dtype
        self.parameter_specs = parameter_specs
        self.shard_specs = dict(shard_specs)
        self.names = {name: spec.name for name, spec in shard_specs.items()}
        self.sums: dict[str, torch.Tensor] = {}
        self.buffers: dict[str, torch.Tensor] = {}
        # By `ShardSpec.is_expert`. Made once, since slicing a mesh is slow.
        self._meshes = {False: _Meshes.of(processes.storage, "tp", "fsdp")}
        if processes.experts is not None:
            self._meshes[True] = _Meshes.of(processes.experts, "ep", "edp")

    def shard(self, name: str) -> torch.Tensor:
        """This rank's shard [V/tp/fsdp, D] of a parameter."""
        return self.masters[name]

    def clear_gradients(self) -> None:
        """Drop all gradients. The memory of the sums stays for the next mini-batch."""
        for total in self.sums.values():
            total.zero_()
        for tensor in (*self.parameters.values(), *self.masters.values()):
            tensor.grad = None

    def grad_norm(self) -> torch.Tensor:
        """Norm [] of the full gradient, float32, the same on all ranks."""
        layout = self.processes.layout
        total = torch.zeros((), dtype=torch.float64, device=self.processes.world.device)
        for name in self.trained:
            spec = self.shard_specs[name]
            if spec.is_copy:
                # The first stage counts this parameter.
                continue
            gradient = self.masters[name].grad
            square = torch.linalg.vector_norm(gradient, dtype=torch.float64).square()
            # Number of ranks in a replica of the weights that add the same square. Each adds an
            # equal part of it, so that the sum over these ranks has the square once.
            num_copies: float = 1
            if spec.is_expert:
                # Experts may have more replicas than other weights. The last line below divides by
                # the number for other weights, so divide by the rest here.
                num_copies = self._meshes[True].replicated.size(0) / layout.dp_replicate
            elif spec.tensor_dimension is None:
                num_copies = layout.tp
            total += square.to(total.device) / num_copies
        dist.all_reduce(total)
        # All replicas have added the same sum.
        return (total / layout.dp_replicate).sqrt().float()

    def _model_shard_shape(self, name: str) -> list[int]:
        """Shape of the model shard, [V/tp, D], which FSDP shards further."""
        spec = self.shard_specs[name]
        shape = list(self.parameter_specs[spec.name].shape)
        dimension = spec.model_dimension
        if dimension is not None:
            mesh = self._meshes[spec.is_expert].model
            _, shape[dimension] = _local_part(shape[dimension], mesh)
        return shape

    def _sum_gradients_of_copies(self, replicated: Sequence[str]) -> None:
        """Sum the masters' gradients over ranks that hold the same parameter.

        These are parameters that tensor parallelism does not shard, and a tied embedding, which the
        first and the last pipeline stage hold.

        Args:
            replicated: parameters that all ranks of a tp group hold in full. The gradient of each
                rank covers only some of the tokens or heads.
        """
        layout = self.processes.layout
        device = self.processes.world.device
        if layout.tp > 1:
            gradients = [self.masters[name].grad for name in replicated]
            # Masters on the host are summed on the device.
            sums = [gradient.to(device) for gradient in gradients]
            group = self.processes.group("tp")
            ProcessGroup(self.processes.place.tp, layout.tp, device, group).add_up(sums)
            for gradient, total in zip(gradients, sums, strict=True):
                gradient.copy_(total)
        if layout.pp == 1:
            return

        # The first and the last stage send each other their gradients of a tied embedding.
        group = self.processes.group("pp")
        peer_stage = layout.pp - 1 if self.processes.is_first_stage else 0
        for name in self.trained:
            if not self.parameter_specs[self.names[name]].is_shared:
                continue
            gradient = self.masters[name].grad
            peer = dist.get_global_rank(group, peer_stage)
            peer_gradient = torch.empty_like(gradient, device=device)
            sending = dist.P2POp(dist.isend, gradient.to(device).contiguous(), peer, group)
            receiving = dist.P2POp(dist.irecv, peer_gradient, peer, group)
            for work in dist.batch_isend_irecv([sending, receiving]):
                work.wait()
            gradient.add_(peer_gradient.to(gradient.device))

    def as_dtensor(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """Wrap a shard as a DTensor of the full parameter, without a copy.

        Args:
            name: name of the parameter.
            local: [V/tp/fsdp, D], its master or a moment.

        Returns:
            DTensor [V, D], whose local memory is `local`.
        """
        spec = self.shard_specs[name]
        shape = self.parameter_specs[spec.name].shape
        model_placement = Replicate()
        if spec.model_dimension is not None:
            model_placement = Shard(spec.model_dimension)
        described = DTensor.from_local(
            local.to("meta"),
            self._meshes[spec.is_expert].replicated,
            [Replicate(), model_placement, Shard(0)],
            run_check=False,
            shape=shape,
            stride=torch.empty(shape, device="meta").stride(),
        )
        # `from_local` only makes the description, of a tensor without memory. Given a tensor on the
        # host, it would copy it to the mesh's device, and writes would not reach the original.
        return DTensor(local, described._spec, requires_grad=False)

    def full_parameters(self, is_wanted: Callable[[str], bool] = lambda name: True) -> NamedTensors:
        """Gather the parameters [V, D] of the full model, then buffers, in the compute dtype.

        Every rank yields all of them, one after the other, and holds no more than one full
        parameter and its shards at a time.

        Args:
            is_wanted: called with a name; parameters for which it returns False are not gathered.

        Returns:
            An iterator over names and tensors.
        """
        # The last stage's copies of parameters of the first stage are left out: the first stage
        # broadcasts them.
        specs = self.shard_specs.items()
        local_names = {spec.name: name for name, spec in specs if not spec.is_copy}
        device = self.processes.world.device
        for full_name in filter(is_wanted, self.parameter_specs):
            parameter = self.parameter_specs[full_name]
            if full_name in local_names:
                tensor = self._gather(local_names[full_name])
            elif full_name in self.buffers:
                tensor = self.buffers[full_name].clone()
            else:
                # Its stage broadcasts it below.
                dtype = parameter.dtype or self.dtype
                tensor = torch.empty(parameter.shape, dtype=dtype, device=device)
            if self.processes.layout.pp > 1:
                dist.broadcast(tensor, group=self.processes.group("pp"), group_src=parameter.stage)
            yield full_name, tensor
            # Free it before the next one is gathered.
            del tensor

    def _gather(self, name: str) -> torch.Tensor:
        """Gather a full parameter [V, D] of this stage from the shards [V/tp/fsdp, D]."""
        spec = self.shard_specs[name]
        meshes = self._meshes[spec.is_expert]
        # One variable for all intermediate tensors, so each is freed when the next is complete.
        tensor = self.shard(name).to(self.processes.world.device, self.dtype)
        tensor = _gather_shards(tensor, meshes.fsdp, 0, self._model_shard_shape(name))
        if spec.model_dimension is not None:
            shape = self.parameter_specs[spec.name].shape
            tensor = _gather_shards(tensor, meshes.model, spec.model_dimension, shape)
        return tensor

    def shards(self) -> Iterator[tuple[str, tuple[int, ...], torch.Tensor]]:
        """Yield full name, start in the full parameter, and tensor of each shard and buffer."""
        for name, spec in self.shard_specs.items():
            if not spec.is_copy:
                start, _ = self._start_and_shape(name)
                yield spec.name, start, self.shard(name)
        for name, buffer in self.buffers.items():
            yield name, (0,) * buffer.dim(), buffer

    def _start_and_shape(self, name: str) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Find the start of this rank's shard in the full parameter, and the shape of the shard."""
        spec = self.shard_specs[name]
        meshes = self._meshes[spec.is_expert]
        dimension = spec.model_dimension
        shape = list(self.parameter_specs[spec.name].shape)
        start = [0] * len(shape)
        if dimension is not None:
            start[dimension], shape[dimension] = _local_part(shape[dimension], meshes.model)
        # FSDP shards the rows of the model shard, which start at row `start[0]` of the parameter.
        first_row, shape[0] = _local_part(shape[0], meshes.fsdp)
        start[0] += first_row
        return tuple(start), tuple(shape)

    def _narrow_to_shard(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """View this rank's shard of a full parameter [V, D]; EngineError if the shape differs."""
        full_name = self.names[name]
        expected = self.parameter_specs[full_name].shape
        if full.shape != expected:
            raise EngineError(
                f"weight {full_name}",
                got=f"shape {tuple(full.shape)}",
                expected=f"{tuple(expected)}",
            )
        shard = full
        for dim, (start, size) in enumerate(zip(*self._start_and_shape(name), strict=True)):
            shard = shard.narrow(dim, start, size)
        return shard


class ShardedWeights(PartialWeights):
    """The parameters of this rank's layers, sharded by FSDP2.

    Args:
        root: the module that computes, a scorer or a pipeline stage; sharded here.
        model: the model in it; its parameters have their shapes [V/tp, D], on "meta".
        shard_specs: where each shard sits in its parameter, by the model's names.
        read: reads full parameters.
        dtype: compute dtype.
        processes: the ranks of the engine.
        parameter_specs: all parameters and buffers of the full model, in its order.
        memory: ways to save memory.
    """

    def __init__(
        self,
        root: nn.Module,
        model: PreTrainedModel,
        shard_specs: Mapping[str, ShardSpec],
        read: ReadWeight,
        *,
        dtype: torch.dtype,
        processes: Processes,
        parameter_specs: Mapping[str, ParameterSpec],
        memory: Memory,
    ) -> None:
        super().__init__(processes, dtype, shard_specs, parameter_specs)
        self.root = root
        if isinstance(root, Stage):
            self.stage = root
        device = processes.world.device
        # On a CPU, the shards are in host memory anyway.
        offloads = memory.offload_weights and device.type == "cuda"
        # `to_empty` below discards the values of parameters and buffers. Parameters are read later.
        buffers = {name: buffer.clone() for name, buffer in model.named_buffers()}
        self._fully_shard(model, device, offloads=offloads, reshards=memory.reshard_after_forward)
        self.root.to_empty(device="cpu" if offloads else device)
        for name, buffer in buffers.items():
            model.get_buffer(name).copy_(buffer)
            # Buffers are on the device of the activations, even where shards are on the host.
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, model.get_buffer(name).to(device))

        self.parameters: dict[str, nn.Parameter] = dict(model.named_parameters())
        self.buffers = weight_buffers(model)
        self.trained: list[str] = []
        self.masters = {}
        for name, parameter in self.parameters.items():
            self.masters[name] = parameter.to_local().detach()
            if parameter.requires_grad:
                self.trained.append(name)
        with torch.no_grad():
            for name, master in self.masters.items():
                master.copy_(self._narrow_to_shard(name, read(self.names[name])))

    def _fully_shard(
        self, model: PreTrainedModel, device: torch.device, *, offloads: bool, reshards: bool
    ) -> None:
        """Apply `fully_shard` to experts, layers, an untied embedding and the root, in this order.

        Args:
            model: the model in the root.
            device: device that computes.
            offloads: whether shards are kept in host memory.
            reshards: whether gathered weights are freed after the forward pass.
        """
        storage = self.processes.storage
        is_replicated = self.processes.layout.dp_replicate > 1
        options: dict[str, Any] = {
            # Over a mesh with two axes, FSDP shards along the second and sums gradients over both.
            "mesh": storage["dp_replicate", "fsdp"] if is_replicated else storage["fsdp"],
            # Inputs need no cast: hidden states are in the compute dtype already.
            "mp_policy": MixedPrecisionPolicy(
                param_dtype=self.dtype, reduce_dtype=torch.float32, cast_forward_inputs=False
            ),
            "reshard_after_forward": reshards,
            "offload_policy": CPUOffloadPolicy() if offloads else OffloadPolicy(),
        }
        if self.processes.layout.ep > 1:
            experts = self.processes.experts
            mesh = experts["dp_replicate", "edp"] if is_replicated else experts["edp"]
            for mixture in mixtures(model):
                fully_shard(mixture.experts, **options | {"mesh": mesh})
        # The names of the architecture's layer classes.
        layer_types = set(model._no_split_modules or ())
        for module in model.modules():
            if type(module).__name__ in layer_types:
                fully_shard(module, **options)
        table = model.get_input_embeddings()
        head_weight = getattr(model.get_output_embeddings(), "weight", None)
        # Stages after the first have no embedding.
        if isinstance(table, nn.Embedding) and table.weight is not head_weight:
            # As a part of the root, the table would stay gathered for the whole pass.
            fully_shard(table, **options)
        fully_shard(self.root, **options)

        for module in self.root.modules():
            if isinstance(module, FSDPModule):
                # Losses are normalised over all rows beforehand: sum gradients, never average.
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
                if device.type == "cpu":
                    # Gloo does not gather during computation, so prefetching only takes memory.
                    module.set_modules_to_backward_prefetch([module])

    def attach_gradients(self) -> None:
        """Attach the gradients [V/tp/fsdp, D] to the masters; zeros where a parameter has none."""
        replicated = []
        for name in self.trained:
            parameter = self.parameters[name]
            master = self.masters[name]
            # The master is a view of FSDP's shard. If FSDP had replaced the shard, steps on the
            # master would have no effect.
            if parameter.to_local().data_ptr() != master.data_ptr():
                raise EngineError(
                    f"parameter {name}",
                    got="other memory than when it was sharded",
                    expected="the same memory",
                )
            if parameter.grad is None:
                master.grad = torch.zeros_like(master)
            else:
                master.grad = parameter.grad.to_local()
            # Experts are no exception: with expert parallelism tp is 1, and nothing is summed.
            if self.shard_specs[name].tensor_dimension is None:
                replicated.append(name)
        self._sum_gradients_of_copies(replicated)

    def refresh_compute(self) -> None:
        """Do nothing: masters are the shards from which FSDP gathers the compute parameters."""

    def offloadable_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Offloadable tensors [V/tp/fsdp, D]: `weights`, which are also the masters."""
        return {"weights": [shard.to_local().detach() for shard in self.parameters.values()]}

    def replace_memory(self, copies: Sequence[torch.Tensor]) -> None:
        """Replace the memory of the parameters by copies of their shards.

        If the ranks do not divide a parameter evenly, FSDP pads its shards. A padded shard keeps
        FSDP's memory, and its master remains a view of this memory.

        Args:
            copies: [V/tp/fsdp, D] each, in the order of `parameters`.
        """
        ids = map(id, self.parameters.values())
        copy_by_id = dict(zip(ids, copies, strict=True))

        def replace_parameter(tensor: torch.Tensor) -> torch.Tensor:
            """Return a DTensor on the copy in place of a parameter."""
            copy = copy_by_id.get(id(tensor))
            if copy is None:
                return tensor
            return DTensor(copy, tensor._spec, requires_grad=tensor.requires_grad)

        # FSDP overrides `_apply` to take new parameters over into its own records.
        self.root._apply(replace_parameter)
        for name, parameter in self.parameters.items():
            self.masters[name].data = parameter.to_local().detach()


def _local_part(total: int, mesh: DeviceMesh) -> tuple[int, int]:
    """Start and size of this rank's part of `total` rows or columns that a mesh shards."""
    return part_of(total, mesh.size(), mesh.get_local_rank())


def _gather_shards(
    shard: torch.Tensor, mesh: DeviceMesh, dimension: int, shape: Sequence[int]
) -> torch.Tensor:
    """Gather a tensor from the shards of the ranks of a mesh.

    The last ranks may hold empty shards, whose broadcast all ranks skip.

    Args:
        shard: this rank's shard.
        mesh: one-dimensional mesh.
        dimension: the sharded dimension, which `part_of` has divided.
        shape: shape of the result.

    Returns:
        A tensor of `shape`; the shard itself on a mesh of one rank.
    """
    if mesh.size() == 1:
        return shard
    group = mesh.get_group()
    full = torch.empty(shape, dtype=shard.dtype, device=shard.device)
    sizes = [part_of(shape[dimension], mesh.size(), rank)[1] for rank in range(mesh.size())]
    is_small_enough = full.nbytes <= _MAX_GLOO_BYTES or shard.device.type != "cpu"
    if dimension == 0 and len(set(sizes)) == 1 and is_small_enough:
        all_gather_single(full, shard.contiguous(), group=group)
        return full

    # Otherwise each rank broadcasts its shard.
    for sender, window in enumerate(full.split(sizes, dimension)):
        if window.numel() == 0:
            continue
        if sender == mesh.get_local_rank():
            window.copy_(shard)
        # A window is contiguous only if it is a block of rows. Otherwise broadcast a copy.
        buffer = window.contiguous()
        dist.broadcast(buffer, group=group, group_src=sender)
        if buffer is not window:
            window.copy_(buffer)
    return full


def shard(
    scorer: Scorer,
    read: ReadWeight | None,
    dtype: torch.dtype,
    processes: Processes,
    memory: Memory,
) -> ShardedWeights:
    """Shard the parameters of a scorer's model: [V, D] to [V/tp/fsdp, D].

    Args:
        scorer: the full model and its head, with float32 values or on "meta". Changed in place: it
            computes with the shards afterwards.
        read: reads full parameters; None if the model has values.
        dtype: compute dtype.
        processes: the ranks of the engine.
        memory: ways to save memory.

    Returns:
        The shards of this rank.
    """
    model = scorer.model
    layout = processes.layout
    read = read or reader_of(model)
    _move_to_meta(model, dtype)
    parameter_specs = _describe_parameters(model, processes)
    num_vocabulary = model.get_input_embeddings().num_embeddings

    # Reduce the model to this rank's layers, heads, vocabulary and experts.
    tensor_dimensions = shard_layers(model, processes.group("tp")) if layout.tp > 1 else {}
    expert_names = set()
    if processes.experts is not None:
        expert_names = shard_experts(model, processes.experts.get_group("ep"))
    # In the last stage: name of its copy of a tied embedding, with the embedding's name.
    copies = keep_stage(model, processes) if layout.pp > 1 else {}

    shard_specs = {}
    for name, _ in model.named_parameters():
        shard_specs[name] = ShardSpec(
            name=copies.get(name, name),
            tensor_dimension=tensor_dimensions.get(name),
            is_copy=name in copies,
            is_expert=name in expert_names,
        )

    scorer.sharing = SharedTokens(processes, num_vocabulary)
    root = Stage(scorer, processes, dtype) if layout.pp > 1 else scorer
    return ShardedWeights(
        root,
        model,
        shard_specs,
        read,
        dtype=dtype,
        processes=processes,
        parameter_specs=parameter_specs,
        memory=memory,
    )


def reader_of(model: nn.Module) -> ReadWeight:
    """Create a reader of a model's present values, which also works after the model is sharded."""
    values = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return values.__getitem__


def _move_to_meta(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Replace parameters by empty ones on "meta", in float32 if they are trained, else in `dtype`.

    Parameters that were tied stay tied.
    """
    moved = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            key = id(parameter)
            if key not in moved:
                meta_dtype = torch.float32 if parameter.requires_grad else dtype
                empty = torch.empty_like(parameter, device="meta", dtype=meta_dtype)
                moved[key] = nn.Parameter(empty, parameter.requires_grad)
            setattr(module, name, moved[key])


def _describe_parameters(
    model: PreTrainedModel, processes: Processes
) -> Mapping[str, ParameterSpec]:
    """Describe all parameters and buffers of a full model, with their pipeline stages."""
    num_stages = processes.layout.pp
    table = model.get_input_embeddings()
    head = model.get_output_embeddings()
    # A tied head computes with the table of the embedding, so the last stage needs the table too.
    is_tied = isinstance(head, nn.Linear) and head.weight is table.weight
    table_ids = set(map(id, table.parameters()))

    # Embeddings of tokens and images are computed in the first stage.
    first_stage_ids = set(table_ids)
    if is_vision(model.config):
        first_stage_ids.update(map(id, vision_encoder(model).parameters()))

    stage_of_layer = {}
    if num_stages > 1:
        num_layers = len(backbone(model).layers)
        for stage in range(num_stages):
            layers = layers_of_stage(num_layers, stage, num_stages)
            stage_of_layer |= dict.fromkeys(layers, stage)

    def stage_by_name(name: str) -> int:
        """Stage of a parameter by its layer; norm and head, outside of layers, are in the last."""
        match = _LAYER_NAME.fullmatch(name)
        if match is None:
            return num_stages - 1
        return stage_of_layer.get(int(match[1]), 0)  # 0: without a pipeline there is one stage

    specs = {}
    for name, parameter in model.named_parameters():
        stage = 0 if id(parameter) in first_stage_ids else stage_by_name(name)
        is_shared = num_stages > 1 and is_tied and id(parameter) in table_ids
        specs[name] = ParameterSpec(parameter.shape, stage, is_shared)
    for name, buffer in weight_buffers(model).items():
        specs[name] = ParameterSpec(buffer.shape, stage_by_name(name), dtype=buffer.dtype)
    return specs
