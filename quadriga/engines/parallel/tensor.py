# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism, arXiv:1909.08053, with the tokens parted between the layers, arXiv:2205.05198.

    norm      n tokens            every rank its own
    gather    N tokens            before attention and MLP
    colwise   rows of a weight    each rank computes some heads, some of the MLP's width
    rowwise   columns of it       each has a part of every token's sum
    scatter   n tokens            added up, and parted again

Parameters become plain tensors that hold this rank's part; those that all ranks have alike (norms, the bias of a
rowwise projection) see only some of the tokens or heads, so their gradients are added up before a step. Which
projection is shared how is what transformers declares for the architecture: where several projections stand in one
matrix (`gate_up_proj`), or a norm reads all heads, the outputs of a colwise one are gathered, and the rowwise one
behind takes its part of them. An adapter is cut where its projection is: B of a colwise one, and A of a rowwise one,
whose r numbers of a token are added up and parted before B.

Legend: n tokens of this rank, N = n x tp, D hidden size, V' entries of the vocabulary in this rank, r rank of an
adapter.
"""

import re
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
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
# A projection by its name, or a part of one with an adapter.
_PROJECTION = re.compile(
    rf"(?P<name>.+?)(?:\.(?:base_layer|lora_(?P<factor>[AB])\.{ADAPTER_NAME}))?"
)
_WHOLE_FACTOR = "AB"  # of an adapter, by the dimension in which its projection is cut


def share_layers(model: PreTrainedModel, group: dist.ProcessGroup) -> dict[str, int]:
    """Cut a model's projections, embedding and head, and join their modules by collectives. A column-wise projection
    [out, in] becomes [out / tp, in], a row-wise one [out, in / tp]; the vocabulary [V', D]. Parameters may be on
    "meta". Returns by name the dimension in which a parameter is cut; every rank has the others whole."""
    found: dict[str, int] = {}
    base = backbone(model)
    prefix = "".join(
        f"{name}." for name, module in model.named_modules() if module is base and name
    )
    plan = tensor_plan(model.config.get_text_config()) or {}
    patterns = [
        (re.compile(re.escape(name).replace(r"\*", r"\d+")), style) for name, style in plan.items()
    ]
    parents: dict[str, nn.Module] = {}
    for name, module in base.named_modules():
        if not isinstance(module, nn.Linear) or (match := _PROJECTION.fullmatch(name)) is None:
            continue
        styles = (
            style
            for pattern, style in patterns
            if style in _SPLIT_DIMENSION and pattern.fullmatch(match["name"])
        )
        style = next(styles, None)
        if style is None or match["factor"] == _WHOLE_FACTOR[dimension := _SPLIT_DIMENSION[style]]:
            continue
        if dimension == 0:
            parent = match["name"].rpartition(".")[0]
            parents[parent] = base.get_submodule(parent)
            if style != "colwise":
                if module.out_features % dist.get_world_size(group):
                    continue  # whole on every rank: what is gathered are equal parts
                module.forward = partial(_gathered, module, group)
        else:
            # Before a part of the outputs of others, or all of them, of which it takes its own.
            start, size = part_of(
                module.in_features, dist.get_world_size(group), dist.get_rank(group)
            )
            own = slice(None) if style == "rowwise" else slice(start, start + size)
            module.forward = partial(_rowwise, module, group, own)
        for kind, parameter in list(module.named_parameters(recurse=False)):
            if dimension < parameter.dim():
                cut(module, kind, dimension, group)
                found[f"{prefix}{name}.{kind}"] = dimension
    for parent in parents.values():
        parent.register_forward_pre_hook(partial(_gather_tokens, group), with_kwargs=True)
    _share_vocabulary(model, group, found)
    return found


def _share_vocabulary(
    model: PreTrainedModel, group: dist.ProcessGroup, found: dict[str, int]
) -> None:
    table, head = cast(nn.Embedding, model.get_input_embeddings()), model.get_output_embeddings()
    if type(table).forward is not nn.Embedding.forward and not hasattr(table, "embed_scale"):
        where, got = (
            f"tensor parallelism of {type(model).__name__}",
            f"an embedding of its own, {type(table).__name__}",
        )
        raise EngineError(
            where, got, "rows of a table, which may be scaled", "Set tensor_model_parallel_size=1."
        )
    is_tied = isinstance(head, nn.Linear) and head.weight is table.weight
    start, _ = part_of(table.weight.shape[0], dist.get_world_size(group), dist.get_rank(group))
    names = {id(module): name for name, module in model.named_modules()}
    cut(table, "weight", 0, group)
    found[f"{names[id(table)]}.weight"] = 0
    forward: Any = partial(_embed, table, start, group)
    table.forward = forward
    if not isinstance(head, nn.Linear):
        return
    if is_tied:
        head.weight = cast(nn.Parameter, table.weight)
    for kind in dict(head.named_parameters(recurse=False)):
        if not (is_tied and kind == "weight"):
            cut(head, kind, 0, group)
        found[f"{names[id(head)]}.{kind}"] = 0


def cut(module: nn.Module, kind: str, dimension: int, group: dist.ProcessGroup) -> None:
    """Let a parameter of a module be this rank's part of it: [V, D] -> [V', D] where the dimension is 0."""
    whole = getattr(module, kind)
    start, size = part_of(whole.shape[dimension], dist.get_world_size(group), dist.get_rank(group))
    part = whole.detach().narrow(dimension, start, size)
    setattr(module, kind, nn.Parameter(part.clone(), whole.requires_grad))


def _gather_tokens(
    group: dist.ProcessGroup, module: nn.Module, args: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Hook of a module whose projections are cut by rows: it reads all tokens, [1, n, D] -> [1, N, D]."""
    own = args[0] if args else kwargs["hidden_states"]
    whole = Collective.apply(own[0], group, all_gather)[None]
    if args:
        return (whole, *args[1:]), kwargs
    return args, kwargs | {"hidden_states": whole}


def _gathered(module: Any, group: dist.ProcessGroup, inputs: torch.Tensor) -> torch.Tensor:
    """Forward of a linear layer cut by rows, whose outputs all ranks need: [1, N, D] -> [1, N, all outputs]."""
    own = linear(inputs[0], module.weight, module.bias)
    return Collective.apply(own.t(), group, all_gather).t()[None].contiguous()


def _rowwise(
    module: Any, group: dist.ProcessGroup, own: slice, inputs: torch.Tensor
) -> torch.Tensor:
    """Forward of a linear layer cut by columns: [1, N, its inputs at `own`] -> [1, n, D]."""
    outputs = Collective.apply(linear(inputs[0, :, own], module.weight), group, reduce_scatter)[
        None
    ]
    if module.bias is None:
        return outputs
    return outputs + module.bias


def _embed(
    module: nn.Embedding, start: int, group: dist.ProcessGroup, input_ids: torch.Tensor
) -> torch.Tensor:
    """Forward of an embedding that has some of the vocabulary: [1, N] -> [1, n, D]."""
    table, local = module.weight, input_ids[0] - start
    here = (local >= 0) & (local < table.shape[0])
    if table.shape[0] == 0:
        rows = table.sum() + torch.zeros(
            len(local), table.shape[1], dtype=table.dtype, device=table.device
        )
    else:
        # The entry that architectures give no gradient, if it is here.
        padding = None if module.padding_idx is None else module.padding_idx - start
        padding = padding if padding is not None and 0 <= padding < table.shape[0] else None
        rows = embedding(torch.where(here, local, 0), table, padding) * here[:, None]
    scale = getattr(module, "embed_scale", None)
    rows = rows if scale is None else rows * scale.to(table.dtype)
    return Collective.apply(rows, group, reduce_scatter)[None]
