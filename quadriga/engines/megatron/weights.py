# SPDX-License-Identifier: Apache-2.0
"""Parameters of Megatron's modules, with float32 masters behind them under the names of the Hugging Face model.

    Megatron's parameter  [H + 2K, D]   what the modules compute with, in the compute dtype
    its parts             [V/tp, D]     views of it, each a parameter of the Hugging Face model on this rank
    masters               [V/tp/fsdp, D]  float32: what the optimizer works on. fsdp is 1, or with the distributed
                                        optimizer (ZeRO-1, arXiv:1910.02054) the data-parallel ranks

So a checkpoint, an export and a weight sync are those of any other engine, and so is the optimizer.

Legend: [V, D] an embedding, as one parameter for all; tp, fsdp the ranks that share it; H, K rows of queries and keys.
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
from quadriga.engines.fsdp.sharded import Part, PartialWeights, ReadWeight, WholeParameter, _joined
from quadriga.engines.megatron.model import is_tied_policy
from quadriga.engines.megatron.names import Place, Sizes, place_of, view_of
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.models.scorers import Scorer
from quadriga.partition import part_of


class MegatronWeights(PartialWeights):
    """The parameters of this rank's chunks of a model: Megatron's modules, without values. A head of single numbers, of
    the whole model on "meta", gets its memory here. `steps_on_host`: the masters, and the optimizer's steps, are there.
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
        self.config, device, layout = config, processes.world.device, processes.layout
        self.sizes = Sizes(
            config.num_query_groups // layout.tp,
            config.num_attention_heads // config.num_query_groups,
            config.kv_channels,
        )
        model = scorer.model
        self.places: dict[str, tuple[Place, nn.Parameter]] = {}
        parts = self._parts(model, self._parameters_here(scorer, chunks, device, dtype), processes)
        shared = "model.embed_tokens.weight" if is_tied_policy(model) and layout.pp > 1 else None
        pipeline = ProcessGroup(processes.place.pp, layout.pp, device, processes.group("pp"))
        of_stages = enumerate(
            pipeline.gather([part.name for part in parts.values() if not part.is_copy])
        )
        stages = {name: stage for stage, names in of_stages for name in names}
        whole = {
            name: WholeParameter(parameter.shape, stages[name], name == shared)
            for name, parameter in model.named_parameters()
        }
        super().__init__(processes, dtype, parts, whole)
        self.parameters = {id(parameter): parameter for _, parameter in self.places.values()}
        trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self.trained = [name for name, part in parts.items() if part.name in trained]
        for number, parameter in self.parameters.items():
            parameter.requires_grad_(bool(self.trained))
            if self.trained and dtype != torch.float32:
                parameter.register_post_accumulate_grad_hook(partial(_add_to, self.sums, number))
        self.masters = {}
        with torch.no_grad():
            for parameter in self.parameters.values():
                parameter.zero_()  # also the rows that were added to the vocabulary
            for name in parts:
                piece = self._piece(name, read(self.names[name])).to(
                    device, torch.float32, copy=True
                )
                self._compute(name, piece)
                if self.trained:
                    self.masters[name] = piece.to("cpu").pin_memory() if steps_on_host else piece

    def _parts(
        self,
        model: PreTrainedModel,
        here: Mapping[tuple[int | None, str], nn.Parameter],
        processes: Processes,
    ) -> dict[str, Part]:
        parts, is_cut = {}, processes.layout.tp > 1
        names = {name: name for name, _ in model.named_parameters()}
        if is_tied_policy(model) and processes.layout.pp > 1 and processes.is_last_stage:
            names["lm_head.weight"] = "model.embed_tokens.weight"
        for name, in_whole in names.items():
            layer, place = place_of(name, model.config)
            if (parameter := here.get((layer, place.name))) is not None:
                self.places[name] = place, parameter
                if place.is_expert and processes.layout.ep > 1:
                    parts[name] = Part(in_whole, None, is_copy=False, is_divided=True)
                else:
                    parts[name] = Part(
                        in_whole, place.cut if is_cut else None, is_copy=name != in_whole
                    )
        return parts

    def _parameters_here(
        self, scorer: Scorer, chunks: Sequence[GPTModel], device: torch.device, dtype: torch.dtype
    ) -> Mapping[tuple[int | None, str], nn.Parameter]:
        """Megatron's parameters of this rank by their layer in the whole model and their name in it."""
        found: dict[tuple[int | None, str], nn.Parameter] = {}
        for chunk in chunks:
            for layer in chunk.decoder.layers:
                found.update(
                    {(layer.layer_number - 1, name): one for name, one in layer.named_parameters()}
                )
            for name, one in chunk.named_parameters():
                if not name.startswith("decoder.layers."):
                    found[None, name] = one
        if scorer.sharing.has_head and (path := getattr(scorer, "head", None)):
            head = scorer.model.get_submodule(path).to_empty(device=device).to(dtype)
            for name, one in head.named_parameters():
                found[None, f"{path}.{name}"] = one
        return found

    def _view(self, name: str, of: torch.Tensor) -> torch.Tensor:
        """The part of a Megatron parameter, or of its gradient, that is this one's."""
        place, _ = self.places[name]
        rows = part_of(
            self.all[self.names[name]].shape[0], self.processes.layout.tp, self.processes.place.tp
        )[1]
        return view_of(place, of, self.sizes, rows)

    def head(self) -> tuple[nn.Parameter, int]:
        """Megatron's weight [V/tp, D] of the head, and how many of its rows are of the vocabulary."""
        name = next(
            one for one in ("lm_head.weight", "model.embed_tokens.weight") if one in self.places
        )
        return self.places[name][1], self._part_shape(name)[0]

    def attach_gradients(self) -> None:
        """Give the gradients [V/tp/fsdp, D] of all data-parallel ranks, added up, to the masters."""
        gradients = {}
        for name in self.trained:
            _, parameter = self.places[name]
            total = parameter.grad if self.dtype == torch.float32 else self.sums.get(id(parameter))
            shape = self._part_shape(name)
            if total is None:
                gradients[name] = torch.zeros(shape, device=parameter.device)
            else:
                gradients[name] = self._view(name, total).reshape(shape)
        of_experts = [one for name, one in gradients.items() if self.parts[name].is_divided]
        others = [one for name, one in gradients.items() if not self.parts[name].is_divided]
        self.processes.replicas.add_up(others)
        if self.processes.layout.sp > 1:
            _along(self.processes.work, "sp").add_up(others)
        for axis in ("dp_replicate", "edp") if of_experts else ():
            _along(self.processes.experts, axis).add_up(of_experts)
        for name, gradient in gradients.items():
            self.masters[name].grad = self._own_rows(name, gradient).to(self.masters[name].device)
        whole_tokens = not self.config.sequence_parallel
        parts = self.parts
        alike = [
            name
            for name in self.trained
            if parts[name].tensor_dimension is None and not parts[name].is_divided
        ]
        self._join_copies(
            [name for name in alike if self.places[name][0].is_partial or not whole_tokens]
        )

    @torch.no_grad()
    def refresh_compute(self) -> None:
        """Gather the masters [V/tp/fsdp, D] into the parameters that compute."""
        for name, master in self.masters.items():
            self._compute(name, master)

    def _compute(self, name: str, piece: torch.Tensor) -> None:
        """Write a part [V/tp, D], of which this rank has a piece [V/tp/fsdp, D], into the parameter that computes."""
        _, _, inner = self._axes(self.parts[name])
        view = self._view(name, self.places[name][1].detach())
        part = _joined(piece.to(view.device, self.dtype), inner, 0, self._part_shape(name))
        view.copy_(part.view(view.shape))

    def part(self, name: str) -> torch.Tensor:
        """What this rank has [V/tp/fsdp, D] of a parameter; weights that are not trained have no masters."""
        if self.trained:
            return self.masters[name]
        shape = self._part_shape(name)
        whole = self._view(name, self.places[name][1].detach()).reshape(shape)
        return self._own_rows(name, whole)

    def _own_rows(self, name: str, part: torch.Tensor) -> torch.Tensor:
        """[V/tp/fsdp, D] of [V/tp, D]."""
        _, _, inner = self._axes(self.parts[name])
        return part.narrow(0, *part_of(len(part), inner.size(), inner.get_local_rank()))

    def resting(self) -> dict[str, list[torch.Tensor]]:
        """The tensors that may rest, by kind: `weights` that compute, and `masters`."""
        return {"weights": list(self.parameters.values()), "masters": list(self.masters.values())}


def _along(mesh: DeviceMesh | None, axis: str) -> ProcessGroup:
    assert mesh is not None, "one rank has no meshes"
    return ProcessGroup(
        mesh.get_local_rank(axis),
        mesh[axis].size(),
        torch.device(mesh.device_type),
        mesh.get_group(axis),
    )
