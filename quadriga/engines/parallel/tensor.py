# SPDX-License-Identifier: Apache-2.0
"""Tensor parallelism, arXiv:1909.08053, with the tokens parted between the layers, arXiv:2205.05198.

    norm      n tokens            every rank its own
    gather    N tokens            before attention and MLP
    colwise   rows of a weight    each rank computes some heads, some of the MLP's width
    rowwise   columns of it       each has a part of every token's sum
    scatter   n tokens            added up, and parted again

Parameters become plain tensors that hold this rank's part; those that all ranks have alike (norms, the bias of
a rowwise projection) see only some of the tokens or heads, so their gradients are added up before a step
(`ShardedWeights.attach_gradients`). Which projection is shared how is what transformers declares for the architecture.

Legend: n tokens of this rank, N = n x tp, D hidden size, V' entries of the vocabulary in this rank.
"""

import re
from collections.abc import Iterator
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import embedding, linear
from transformers import PreTrainedModel

from quadriga.engines.parallel.sharing import gather, part_sizes, scatter_sum
from quadriga.models.load import backbone

_SPLIT_DIMENSION = {"colwise": 0, "rowwise": 1}


def share_layers(model: PreTrainedModel, group: dist.ProcessGroup) -> dict[str, int]:
    """Cut a model's projections, embedding and head, and join their modules by collectives.

    A column-wise projection [out, in] becomes [out / tp, in], a row-wise one [out, in / tp]; the vocabulary [V', D].
    Parameters may be on "meta".

    Args:
        model: whole; it computes with the tokens of this rank afterwards.
        group: the ranks.

    Returns:
        by name, the dimension in which a parameter is cut; every rank has the others whole.
    """
    cut: dict[str, int] = {}
    base = backbone(model)
    prefix = f"{model.base_model_prefix}." if base is not model else ""
    parents: dict[str, nn.Module] = {}
    for name, style in _styles(base, model.config.base_model_tp_plan):
        module = base.get_submodule(name)
        if style == "colwise":
            parents[name.rpartition(".")[0]] = base.get_submodule(name.rpartition(".")[0])
        else:
            module.forward = _RowwiseProjection(module, group)
        for kind, parameter in list(module.named_parameters(recurse=False)):
            dimension = _SPLIT_DIMENSION[style]
            if dimension < parameter.dim():
                _cut(module, kind, dimension, group)
                cut[f"{prefix}{name}.{kind}"] = dimension
    for parent in parents.values():
        parent.register_forward_pre_hook(_GatherTokens(group), with_kwargs=True)
    _share_vocabulary(model, group, cut)
    return cut


def _styles(base: nn.Module, plan: dict[str, str]) -> Iterator[tuple[str, str]]:
    """Name and style of each module of a backbone that a plan cuts."""
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")): style for name, style in plan.items()}
    for name, module in base.named_modules():
        for pattern, style in patterns.items():
            if style in _SPLIT_DIMENSION and isinstance(module, nn.Linear) and pattern.fullmatch(name):
                yield name, style


def _share_vocabulary(model: PreTrainedModel, group: dist.ProcessGroup, cut: dict[str, int]) -> None:
    table, head = cast(nn.Embedding, model.get_input_embeddings()), model.get_output_embeddings()
    is_tied = isinstance(head, nn.Linear) and head.weight is table.weight
    start = sum(part_sizes(table.weight.shape[0], dist.get_world_size(group))[: dist.get_rank(group)])
    names = {id(module): name for name, module in model.named_modules()}
    _cut(table, "weight", 0, group)
    cut[f"{names[id(table)]}.weight"] = 0
    forward: Any = _VocabularyEmbedding(table, start, group)
    table.forward = forward
    if not isinstance(head, nn.Linear):
        return
    if is_tied:
        head.weight = cast(nn.Parameter, table.weight)
    for kind in dict(head.named_parameters(recurse=False)):
        if not (is_tied and kind == "weight"):
            _cut(head, kind, 0, group)
        cut[f"{names[id(head)]}.{kind}"] = 0


def _cut(module: nn.Module, kind: str, dimension: int, group: dist.ProcessGroup) -> None:
    whole = getattr(module, kind)
    sizes = part_sizes(whole.shape[dimension], dist.get_world_size(group))
    part = whole.detach().narrow(dimension, sum(sizes[: (rank := dist.get_rank(group))]), sizes[rank])
    setattr(module, kind, nn.Parameter(part.clone(), whole.requires_grad))


class _GatherTokens:
    """Hook of a module whose projections are cut by rows: it reads all tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        if args:
            return (gather(args[0][0], self.group)[None], *args[1:]), kwargs
        return args, kwargs | {"hidden_states": gather(kwargs["hidden_states"][0], self.group)[None]}


class _RowwiseProjection:
    """Forward of a linear layer cut by columns: [1, N, its inputs] -> [1, n, D]."""

    def __init__(self, module: nn.Module, group: dist.ProcessGroup) -> None:
        self.module, self.group = module, group

    def __call__(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs = scatter_sum(linear(inputs[0], self.module.weight), self.group)[None]
        return outputs if self.module.bias is None else outputs + self.module.bias


class _VocabularyEmbedding:
    """Forward of an embedding that has some of the vocabulary: [1, N] -> [1, n, D]."""

    def __init__(self, module: nn.Embedding, start: int, group: dist.ProcessGroup) -> None:
        self.module, self.start, self.group = module, start, group

    def __call__(self, input_ids: torch.Tensor) -> torch.Tensor:
        table, local = self.module.weight, input_ids[0] - self.start
        here = (local >= 0) & (local < table.shape[0])
        if table.shape[0] == 0:
            rows = table.sum() + torch.zeros(len(local), table.shape[1], dtype=table.dtype, device=table.device)
        else:
            # The entry that architectures give no gradient, if it is here.
            padding = None if self.module.padding_idx is None else self.module.padding_idx - self.start
            padding = padding if padding is not None and 0 <= padding < table.shape[0] else None
            rows = embedding(torch.where(here, local, 0), table, padding) * here[:, None]
        return scatter_sum(rows, self.group)[None]
