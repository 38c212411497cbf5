# SPDX-License-Identifier: Apache-2.0
"""From a whole model, or the skeleton of one, to the part of it that a process holds.

whole model      float32 parameters, or none yet ("meta")
  parts          tensor parallelism cuts projections and vocabulary     parallel/tensor.py
  stage          pipeline parallelism takes out other stages' layers    parallel/pipeline.py
  shards         fully_shard cuts what is left                          sharded_weights.py
  values         each parameter is read whole, and its part is kept: no process has two whole ones at a time
"""

import re
from collections.abc import Mapping

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.engines.fsdp.memory import Memory
from quadriga.engines.fsdp.sharded_weights import Part, ReadWeight, ShardedWeights, WholeParameter
from quadriga.engines.fsdp.whole_weights import WholeWeights
from quadriga.engines.parallel.pipeline import Stage, keep_stage, layers_of_stage
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.parallel.sharing import SharedTokens
from quadriga.engines.parallel.tensor import share_layers
from quadriga.models.load import backbone
from quadriga.models.scorers import Scorer

_LAYER = re.compile(r"(?:.*\.)?layers\.(\d+)\..*")


def build_weights(
    scorer: Scorer,
    *,
    dtype: torch.dtype,
    processes: Processes,
    read: ReadWeight | None,
    memory: Memory,
) -> WholeWeights | ShardedWeights:
    """The parameters of a scorer's model as its processes hold them; the scorer computes with them afterwards.

    Args:
        scorer: see `FSDPEngine`.
        dtype: of the compute weights.
        processes: that hold the model.
        read: gives the values of sharded parameters; None: the model has them.
        memory: what is given up to save some.
    """
    model = scorer.model
    if processes.layout.is_whole:
        return WholeWeights(scorer, model, dtype, processes.replicas)
    if read is None:
        values = {name: parameter.detach() for name, parameter in model.named_parameters()}
        read = values.__getitem__
    _forget_values(model, dtype)
    whole = _describe(model, processes)
    vocabulary = model.get_input_embeddings().num_embeddings
    layout = processes.layout
    cut = share_layers(model, processes.group("tp")) if layout.tp > 1 else {}
    copies = keep_stage(model, processes) if layout.pp > 1 else {}
    parts = {name: Part(copies.get(name, name), cut.get(name), name in copies) for name, _ in model.named_parameters()}
    scorer.sharing = SharedTokens(processes, vocabulary)
    return ShardedWeights(
        Stage(scorer, model.config.get_text_config().hidden_size) if layout.pp > 1 else scorer,
        model,
        parts,
        read,
        dtype=dtype,
        processes=processes,
        whole=whole,
        memory=memory,
    )


def _forget_values(model: PreTrainedModel, dtype: torch.dtype) -> None:
    """Put parameters on "meta", ties kept: float32 where they are trained, else in the compute dtype."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            kind = torch.float32 if parameter.requires_grad else dtype
            empty = torch.empty_like(parameter, device="meta", dtype=kind)
            moved.setdefault(id(parameter), nn.Parameter(empty, parameter.requires_grad))
            setattr(module, name, moved[id(parameter)])


def _describe(model: PreTrainedModel, processes: Processes) -> Mapping[str, WholeParameter]:
    """The parameters of the whole model, and the stage of each."""
    num_stages = processes.layout.pp
    table, head = model.get_input_embeddings(), model.get_output_embeddings()
    is_tied = isinstance(head, nn.Linear) and head.weight is table.weight
    of_table = {id(parameter) for parameter in table.parameters()}
    stages = {}
    if num_stages > 1:
        num_layers = len(backbone(model).layers)
        stages = {
            number: stage for stage in range(num_stages) for number in layers_of_stage(num_layers, stage, num_stages)
        }

    def stage_of(name: str, parameter: nn.Parameter) -> int:
        if id(parameter) in of_table:
            return 0
        layer = _LAYER.fullmatch(name)
        return stages.get(int(layer[1]), 0) if layer else num_stages - 1

    return {
        name: WholeParameter(
            parameter.shape,
            stage_of(name, parameter),
            is_shared=num_stages > 1 and is_tied and id(parameter) in of_table,
        )
        for name, parameter in model.named_parameters()
    }
