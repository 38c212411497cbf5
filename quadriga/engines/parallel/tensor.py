# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism (arXiv:1909.08053), with tokens divided between layers (arXiv:2205.05198).

    norm      n tokens              each rank normalises its own tokens
    gather    N tokens              before attention and MLP
    colwise   rows of a weight      each rank computes some heads, or some of the MLP's width
    rowwise   columns of a weight   each rank computes a summand of every token's output
    scatter   n tokens              summands are summed, and the tokens divided again

Parameters become plain tensors with this rank's shard. Parameters that all ranks hold (norms, the
bias of a rowwise projection) see only some of the tokens or heads, so their gradients are summed
before a step. transformers declares how each projection of an architecture is sharded. If a matrix
has several projections (`gate_up_proj`), or a norm reads all heads, the outputs of the colwise
projection are gathered, and the rowwise projection after it takes its part of them. An adapter is
sharded like its projection: B of a colwise one; A of a rowwise one, whose r outputs per token
are summed and divided before B.

Legend: n tokens of this rank, N = n x tp, D hidden size, V' vocabulary entries of this rank, r rank
of an adapter.
"""

import re
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from quadriga.engines.parallel.sharing import Collective, all_gather, reduce_scatter
from quadriga.errors import EngineError
from quadriga.models.adapter_files import ADAPTER_NAME
from quadriga.models.architecture import backbone, tensor_plan
from quadriga.partition import part_of

_SPLIT_DIMENSION = {
    "colwise": 0,
    "colwise_gather_output": 0,
    "rowwise": 1,
    "rowwise_split_input": 1,
}
# Path of a projection. With an adapter, a projection consists of three modules: `base_layer` and
# the two factors. Group `name` is the path of the projection, `factor` is A or B.
_PROJECTION = re.compile(
    rf"(?P<name>.+?)(?:\.(?:base_layer|lora_(?P<factor>[AB])\.{ADAPTER_NAME}))?"
)
# Index: the sharded dimension of a projection. Entry: the factor of an adapter of this projection
# that is not sharded.
_UNSHARDED_FACTOR = ("A", "B")


def shard_layers(model: PreTrainedModel, group: dist.ProcessGroup) -> dict[str, int]:
    """Shard projections, embedding and head over a group, and add collectives to their modules.

    A colwise projection [out, in] becomes [out / tp, in], a rowwise one [out, in / tp], the
    vocabulary [V', D].

    Args:
        model: the model, with values or on "meta"; changed in place.
        group: the tensor-parallel ranks.

    Returns:
        The sharded dimension of each sharded parameter, by name. Every rank has all other
        parameters in full.

    Raises:
        EngineError: the embedding does more than look up rows of a table and scale them.
    """
    dimensions = {}
    size = dist.get_world_size(group)
    base = backbone(model)
    base_path = next(name for name, module in model.named_modules() if module is base)
    prefix = f"{base_path}." if base_path else ""
    styles = _declared_styles(model)
    colwise_parents = {}
    for name, module in base.named_modules():
        # Find the declared style of a projection. Modules without a style stay as they are.
        match = _PROJECTION.fullmatch(name)
        if match is None or not isinstance(module, nn.Linear):
            continue
        matching = (style for pattern, style in styles if pattern.fullmatch(match["name"]))
        style = next(matching, None)
        if style is None:
            continue
        dimension = _SPLIT_DIMENSION[style]
        if match["factor"] == _UNSHARDED_FACTOR[dimension]:
            continue

        # Choose the forward pass that works with this rank's shard.
        if dimension == 0:
            # A colwise projection needs the tokens of all ranks, whether it is sharded or not.
            parent, _, _ = match["name"].rpartition(".")
            colwise_parents[parent] = base.get_submodule(parent)
            # Plain "colwise" keeps the module's own forward; the other style gathers outputs.
            if style != "colwise":
                if module.out_features % size:
                    # Only equal shards can be gathered, so this projection is not sharded.
                    continue
                module.forward = partial(_colwise_gathered_forward, module, group)
        else:
            columns = slice(None)
            if style != "rowwise":
                # The input is complete, because the projection before this one gathers its outputs.
                # Take this rank's part.
                start, length = part_of(module.in_features, size, dist.get_rank(group))
                columns = slice(start, start + length)
            module.forward = partial(_rowwise_forward, module, group, columns)

        # Shard the weight. A bias has only dimension 0, which a colwise projection shards.
        for kind, parameter in list(module.named_parameters(recurse=False)):
            if dimension < parameter.dim():
                shard_parameter(module, kind, dimension, group)
                dimensions[f"{prefix}{name}.{kind}"] = dimension

    # One gather of the tokens serves all colwise projections of an attention or MLP module.
    for parent in colwise_parents.values():
        parent.register_forward_pre_hook(partial(_gather_tokens, group), with_kwargs=True)
    return dimensions | _shard_vocabulary(model, group)


def _declared_styles(model: PreTrainedModel) -> list[tuple[re.Pattern[str], str]]:
    """List patterns of projections' names in the backbone, each with the style of its sharding."""
    plan = tensor_plan(model.config.get_text_config()) or {}
    styles = []
    for name, style in plan.items():
        if style in _SPLIT_DIMENSION:
            # A star in a declared name stands for the number of a layer.
            pattern = re.escape(name).replace(r"\*", r"\d+")
            styles.append((re.compile(pattern), style))
    return styles


def _shard_vocabulary(model: PreTrainedModel, group: dist.ProcessGroup) -> dict[str, int]:
    """Shard embedding and head by the vocabulary.

    Args:
        model: the model, changed in place.
        group: the tensor-parallel ranks.

    Returns:
        The sharded dimension of each sharded parameter, by name.

    Raises:
        EngineError: the embedding does more than look up rows of a table and scale them.
    """
    table = cast(nn.Embedding, model.get_input_embeddings())
    head = model.get_output_embeddings()
    has_own_forward = type(table).forward is not nn.Embedding.forward
    if has_own_forward and not hasattr(table, "embed_scale"):
        raise EngineError(
            f"tensor parallelism of {type(model).__name__}",
            got=f"a custom embedding class, {type(table).__name__}",
            expected="an embedding that looks up rows of a table, and may scale them",
            fix="Set tensor_model_parallel_size=1.",
        )
    # Compare before the table is sharded, which replaces the table's weight.
    is_tied = isinstance(head, nn.Linear) and head.weight is table.weight
    paths = {id(module): name for name, module in model.named_modules()}
    start, _ = part_of(table.weight.shape[0], dist.get_world_size(group), dist.get_rank(group))
    shard_parameter(table, "weight", 0, group)
    dimensions = {f"{paths[id(table)]}.weight": 0}
    forward: Any = partial(_embedding_forward, table, start, group)
    table.forward = forward

    if not isinstance(head, nn.Linear):
        return dimensions
    if is_tied:
        # The head computes with the shard of the table.
        head.weight = cast(nn.Parameter, table.weight)
    for kind in dict(head.named_parameters(recurse=False)):
        if not (is_tied and kind == "weight"):
            shard_parameter(head, kind, 0, group)
        dimensions[f"{paths[id(head)]}.{kind}"] = 0
    return dimensions


def shard_parameter(module: nn.Module, kind: str, dimension: int, group: dist.ProcessGroup) -> None:
    """Replace a parameter of a module by this rank's shard: [V, D] by [V', D] for dimension 0.

    Args:
        module: the module.
        kind: name of the parameter in it.
        dimension: the dimension to shard.
        group: the ranks.
    """
    full = getattr(module, kind)
    start, size = part_of(full.shape[dimension], dist.get_world_size(group), dist.get_rank(group))
    # A copy, so that the full parameter can be freed.
    shard = full.detach().narrow(dimension, start, size)
    setattr(module, kind, nn.Parameter(shard.clone(), full.requires_grad))


def _gather_tokens(
    group: dist.ProcessGroup, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Hook of a module with colwise projections: gather the tokens, [1, n, D] -> [1, N, D]."""
    # Architectures pass hidden states by position or by name.
    local = args[0] if args else kwargs["hidden_states"]
    gathered = Collective.apply(local[0], group, all_gather)[None]
    if args:
        return (gathered, *args[1:]), kwargs
    return args, kwargs | {"hidden_states": gathered}


def _colwise_gathered_forward(module: Any, group: dist.ProcessGroup, inputs: Tensor) -> Tensor:
    """Forward pass of a colwise projection with gathered outputs: [1, N, D] -> [1, N, out]."""
    local = linear(inputs[0], module.weight, module.bias)  # [N, out / tp]
    # Transposed, because `all_gather` concatenates along the first dimension.
    return Collective.apply(local.t(), group, all_gather).t()[None].contiguous()


def _rowwise_forward(
    module: Any, group: dist.ProcessGroup, columns: slice, inputs: Tensor
) -> Tensor:
    """Forward pass of a rowwise projection: [1, N, inputs] -> [1, n, D].

    Args:
        module: the projection.
        group: the tensor-parallel ranks.
        columns: this rank's part of the last dimension of `inputs`; everything if the projection
            before has computed only this part.
        inputs: [1, N, ...].

    Returns:
        [1, n, D].
    """
    partial_sums = linear(inputs[0, :, columns], module.weight)
    outputs = Collective.apply(partial_sums, group, reduce_scatter)[None]
    # The bias is added once, to the sum.
    if module.bias is None:
        return outputs
    return outputs + module.bias


def _embedding_forward(
    module: nn.Embedding, start: int, group: dist.ProcessGroup, input_ids: Tensor
) -> Tensor:
    """Forward pass of an embedding with a sharded vocabulary: [1, N] -> [1, n, D].

    Args:
        module: the embedding.
        start: first vocabulary entry of this rank.
        group: the tensor-parallel ranks.
        input_ids: [1, N].

    Returns:
        [1, n, D].
    """
    table = module.weight
    local_ids = input_ids[0] - start
    is_local = (local_ids >= 0) & (local_ids < table.shape[0])
    if table.shape[0] == 0:
        # This rank has no entries, but its weight must take part in the backward pass.
        shape = (len(local_ids), table.shape[1])
        rows = table.sum() + torch.zeros(shape, dtype=table.dtype, device=table.device)
    else:
        # The padding token's entry gets no gradient. It may be on another rank.
        padding = None
        if module.padding_idx is not None and 0 <= module.padding_idx - start < table.shape[0]:
            padding = module.padding_idx - start
        rows = embedding(torch.where(is_local, local_ids, 0), table, padding) * is_local[:, None]
    scale = getattr(module, "embed_scale", None)
    if scale is not None:
        rows = rows * scale.to(table.dtype)
    return Collective.apply(rows, group, reduce_scatter)[None]
