# SPDX-License-Identifier: Apache-2.0
"""Parameters of Megatron's modules, with float32 masters under the names of the Hugging Face model.

    Megatron's parameter   [H + 2K, D]      modules compute with it, in the compute dtype
    model shards           [V/tp, D]        views of it, one for each Hugging Face parameter
    masters                [V/tp/fsdp, D]   float32 shards, which the optimizer updates

fsdp is 1, or the number of data-parallel ranks with the distributed optimizer (ZeRO-1,
arXiv:1910.02054). Checkpoints, exports, weight sync and the optimizer are those of the FSDP engine.

Legend: [V, D] the shape of the embedding, as an example for all parameters; tp and fsdp also stand
for the sizes of these groups; H, K rows of queries and keys.
"""

from collections.abc import Mapping, Sequence
from functools import partial

import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer import TransformerConfig
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from quadriga.engines.fsdp.replicated import _add_to
from quadriga.engines.fsdp.sharded import (
    ParameterSpec,
    PartialWeights,
    ReadWeight,
    ShardSpec,
    _gather_shards,
    _local_part,
)
from quadriga.engines.megatron.model import has_tied_head
from quadriga.engines.megatron.names import HeadSizes, ParameterPlace, place_of, view_of
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.models.scorers import Scorer
from quadriga.partition import part_of

_EMBEDDING = "model.embed_tokens.weight"
_HEAD = "lm_head.weight"


class MegatronWeights(PartialWeights):
    """The parameters of this rank's chunks of a model.

    Args:
        scorer: the full model, on "meta" or with values. A head of one output stays the module of
            the Hugging Face model, and its memory is allocated here.
        chunks: Megatron's modules of this rank, without values.
        config: Megatron's configuration.
        read: reads full parameters.
        dtype: compute dtype.
        processes: the ranks of the engine.
        steps_on_host: whether masters are in host memory, so that the optimizer steps there.

    Attributes:
        places: by Hugging Face name, the place in Megatron's modules, and Megatron's parameter
            there.
        config: Megatron's configuration.
        head_sizes: attention heads of this rank.
    """

    def __init__(
        self,
        scorer: Scorer,
        chunks: Sequence[GPTModel],
        config: TransformerConfig,
        read: ReadWeight,
        *,
        dtype: torch.dtype,
        processes: Processes,
        steps_on_host: bool = False,
    ) -> None:
        layout = processes.layout
        device = processes.world.device
        model = scorer.model
        self.config = config
        self.head_sizes = HeadSizes(
            num_groups=config.num_query_groups // layout.tp,
            num_queries=config.num_attention_heads // config.num_query_groups,
            head_size=config.kv_channels,
        )
        local_parameters = self._local_parameters(scorer, chunks, device, dtype)
        self.places: dict[str, tuple[ParameterPlace, nn.Parameter]] = {}
        shard_specs = self._place_shards(model, local_parameters, processes)
        super().__init__(
            processes, dtype, shard_specs, _describe_parameters(model, shard_specs, processes)
        )

        # By id, because several Hugging Face parameters may be views of one parameter.
        self.parameters = {id(parameter): parameter for _, parameter in self.places.values()}
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.trained = [name for name, spec in shard_specs.items() if spec.name in trained]
        # All parameters are trained or none, because adapters are not supported.
        for key, parameter in self.parameters.items():
            parameter.requires_grad_(bool(self.trained))
            if self.trained and dtype != torch.float32:
                # Sum the gradients of micro-batches in float32.
                parameter.register_post_accumulate_grad_hook(partial(_add_to, self.sums, key))
        self.masters = {}
        with torch.no_grad():
            for parameter in self.parameters.values():
                # Rows that pad the vocabulary are never written to and stay 0.
                parameter.zero_()
            for name in shard_specs:
                full = read(self.names[name])
                shard = self._narrow_to_shard(name, full).to(device, torch.float32, copy=True)
                self._write_compute(name, shard)
                if self.trained:
                    self.masters[name] = shard.to("cpu").pin_memory() if steps_on_host else shard

    def _place_shards(
        self,
        model: PreTrainedModel,
        local_parameters: Mapping[tuple[int | None, str], nn.Parameter],
        processes: Processes,
    ) -> dict[str, ShardSpec]:
        """Fill `places` with the parameters of this rank, and describe its shards of them.

        Args:
            model: the full Hugging Face model.
            local_parameters: this rank's Megatron parameters, by layer and name; see
                `_local_parameters`.
            processes: the ranks of the engine.

        Returns:
            Positions of the shards in the full parameters, by Hugging Face name.
        """
        layout = processes.layout
        full_names = {name: name for name, _ in model.named_parameters()}
        # The last stage has a copy of the tied embedding as its head.
        if has_tied_head(model) and layout.pp > 1 and processes.is_last_stage:
            full_names[_HEAD] = _EMBEDDING
        specs = {}
        for name, full_name in full_names.items():
            layer, place = place_of(name, model.config)
            parameter = local_parameters.get((layer, place.name))
            if parameter is None:
                # Another stage has it.
                continue
            self.places[name] = place, parameter
            if place.is_expert and layout.ep > 1:
                specs[name] = ShardSpec(full_name, None, is_copy=False, is_expert=True)
            else:
                dimension = place.sharded_dimension if layout.tp > 1 else None
                specs[name] = ShardSpec(full_name, dimension, is_copy=name != full_name)
        return specs

    def _local_parameters(
        self,
        scorer: Scorer,
        chunks: Sequence[GPTModel],
        device: torch.device,
        dtype: torch.dtype,
    ) -> Mapping[tuple[int | None, str], nn.Parameter]:
        """Find Megatron's parameters on this rank.

        Args:
            scorer: the full model.
            chunks: Megatron's modules of this rank.
            device: device for a head of one output.
            dtype: dtype for such a head.

        Returns:
            Parameters by layer of the full model and name within the layer. Outside of layers, by
            None and name in Megatron's model.
        """
        parameters = {}
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                for name, parameter in layer.named_parameters():
                    parameters[layer.layer_number - 1, name] = parameter
            # Embedding, last norm and head, which belong to no layer.
            for name, parameter in chunk.named_parameters():
                if not name.startswith("decoder.layers."):
                    parameters[None, name] = parameter
        head_name = getattr(scorer, "head", None)
        if scorer.sharing.has_head and head_name:
            # A head of one output is Hugging Face's module; see `place_of`.
            head = scorer.model.get_submodule(head_name).to_empty(device=device).to(dtype)
            for name, parameter in head.named_parameters():
                parameters[None, f"{head_name}.{name}"] = parameter
        return parameters

    def _view(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """View a model shard within Megatron's parameter, or within its gradient."""
        place, _ = self.places[name]
        # Only the view of the embedding or the head needs a number of rows, to leave out padding.
        num_rows = self.parameter_specs[self.names[name]].shape[0]
        _, num_local_rows = part_of(num_rows, self.processes.layout.tp, self.processes.place.tp)
        return view_of(place, tensor, self.head_sizes, num_local_rows)

    def head(self) -> tuple[nn.Parameter, int]:
        """Megatron's weight [V/tp, D] of the head, and its number of rows without padding."""
        name = _HEAD if _HEAD in self.places else _EMBEDDING
        _, parameter = self.places[name]
        return parameter, self._model_shard_shape(name)[0]

    def attach_gradients(self) -> None:
        """Sum the gradients over data-parallel ranks; attach shards [V/tp/fsdp, D] to masters."""
        # Take the gradient [V/tp, D] of each Hugging Face parameter out of Megatron's.
        gradients = {}
        expert_gradients = []
        other_gradients = []
        for name in self.trained:
            _, parameter = self.places[name]
            # In float32, autograd sums the gradients of micro-batches itself, without a hook.
            is_float32 = self.dtype == torch.float32
            total = parameter.grad if is_float32 else self.sums.get(id(parameter))
            shape = self._model_shard_shape(name)
            if total is None:
                gradient = torch.zeros(shape, device=parameter.device)
            else:
                gradient = self._view(name, total).reshape(shape)
            gradients[name] = gradient
            if self.shard_specs[name].is_expert:
                expert_gradients.append(gradient)
            else:
                other_gradients.append(gradient)

        # Sum them over the ranks that computed other tokens.
        self.processes.replicas.add_up(other_gradients)
        # The ranks of an sp group have different tokens of the same rows.
        if self.processes.layout.sp > 1:
            _group_along(self.processes.work, "sp").add_up(other_gradients)
        # Not over ep: experts have already computed the tokens of all ep ranks.
        if expert_gradients:
            for axis in ("dp_replicate", "edp"):
                _group_along(self.processes.experts, axis).add_up(expert_gradients)

        # Attach the shards of the gradients to the masters. Then sum the gradients of parameters
        # that tensor parallelism does not shard.
        replicated = []
        for name, gradient in gradients.items():
            master = self.masters[name]
            master.grad = self._fsdp_shard(name, gradient).to(master.device)
            spec = self.shard_specs[name]
            place, _ = self.places[name]
            # Without sequence parallelism, all ranks of a tp group compute all tokens, so gradients
            # are partial only where a rank uses the parameter for some heads.
            is_partial = place.is_partial or self.config.sequence_parallel
            if spec.tensor_dimension is None and not spec.is_expert and is_partial:
                replicated.append(name)
        self._sum_gradients_of_copies(replicated)

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Gather the masters [V/tp/fsdp, D] into the compute parameters."""
        for name, master in self.masters.items():
            self._write_compute(name, master)

    def _write_compute(self, name: str, shard: torch.Tensor) -> None:
        """Gather a model shard [V/tp, D] over fsdp and write it into the compute parameter.

        Args:
            name: name of the parameter.
            shard: [V/tp/fsdp, D], this rank's shard.
        """
        _, parameter = self.places[name]
        view = self._view(name, parameter.detach())
        mesh = self._meshes[self.shard_specs[name].is_expert].fsdp
        local = shard.to(view.device, self.dtype)
        model_shard = _gather_shards(local, mesh, 0, self._model_shard_shape(name))
        # A view of queries, keys or values has more dimensions: groups, heads, rows of a head.
        view.copy_(model_shard.view(view.shape))

    def shard(self, name: str) -> torch.Tensor:
        """This rank's shard [V/tp/fsdp, D] of a parameter: its master if the model is trained."""
        if self.trained:
            return self.masters[name]
        _, parameter = self.places[name]
        shape = self._model_shard_shape(name)
        return self._fsdp_shard(name, self._view(name, parameter.detach()).reshape(shape))

    def _fsdp_shard(self, name: str, model_shard: torch.Tensor) -> torch.Tensor:
        """View this rank's shard [V/tp/fsdp, D] of a model shard [V/tp, D]."""
        mesh = self._meshes[self.shard_specs[name].is_expert].fsdp
        return model_shard.narrow(0, *_local_part(len(model_shard), mesh))

    def offloadable_tensors(self) -> dict[str, list[torch.Tensor]]:
        """Offloadable tensors, by kind: the compute `weights`, and the `masters`."""
        return {
            "weights": list(self.parameters.values()),
            "masters": list(self.masters.values()),
        }


def _describe_parameters(
    model: PreTrainedModel, shard_specs: Mapping[str, ShardSpec], processes: Processes
) -> dict[str, ParameterSpec]:
    """Describe all parameters of a full model, with the pipeline stage that holds each.

    Args:
        model: the full model.
        shard_specs: shards of this rank.
        processes: the ranks of the engine, which call this together.
    """
    layout = processes.layout
    stages = ProcessGroup(
        processes.place.pp, layout.pp, processes.world.device, processes.group("pp")
    )
    local_names = [spec.name for spec in shard_specs.values() if not spec.is_copy]
    stage_of = {}
    for stage, names in enumerate(stages.gather(local_names)):
        stage_of |= dict.fromkeys(names, stage)
    has_shared_embedding = has_tied_head(model) and layout.pp > 1
    specs = {}
    for name, parameter in model.named_parameters():
        is_shared = has_shared_embedding and name == _EMBEDDING
        specs[name] = ParameterSpec(parameter.shape, stage_of[name], is_shared)
    return specs


def _group_along(mesh: DeviceMesh | None, axis: str) -> ProcessGroup:
    """The process group of this rank along one axis of a mesh."""
    assert mesh is not None, "one rank has no meshes"
    return ProcessGroup(
        mesh.get_local_rank(axis),
        mesh[axis].size(),
        torch.device(mesh.device_type),
        mesh.get_group(axis),
    )
