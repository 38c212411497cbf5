# SPDX-License-Identifier: Apache-2.0
"""Expert parallelism, arXiv:2006.16668: each rank has some of the experts of a layer, and tokens travel to them.

    rank 0    tokens a b c ─┐           ┌─ experts 0-3 compute what came to them ─┐           ┌─ sums of a b c
                            ├ all-to-all ┤                                         ├ all-to-all ┤
    rank 1    tokens d e   ─┘           └─ experts 4-7                            ─┘           └─ sums of d e

A token goes once to each expert that it chose, and nowhere else. Its gradient comes back the way it went, so an
expert's gradient is whole on its rank but for the ranks that hold the same experts, which FSDP adds up.

Legend: n tokens of this rank, k experts for each, S ranks, E experts of a layer of which this rank has E/S, m pairs of
token and expert that came here, D hidden size.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from quadriga.engines.parallel.tensor import cut
from quadriga.models.experts import is_mixture


def share_experts(model: nn.Module, group: dist.ProcessGroup) -> set[str]:
    """Cut the experts [E, ...] of a model, also on "meta", to this rank's; tokens travel. Returns their names."""
    names = set()
    for place, module in list(model.named_modules()):
        if not is_mixture(module):
            continue
        experts: Any = module.experts
        for kind, _ in list(experts.named_parameters()):
            cut(experts, kind, 0, group)
            names.add(f"{place}.experts.{kind}")
        experts.num_experts //= dist.get_world_size(group)
        experts.forward = partial(_computed_elsewhere, experts.forward, experts.num_experts, group)
    return names


def _computed_elsewhere(
    compute: Callable[..., Tensor],
    num_own: int,
    group: dist.ProcessGroup,
    hidden: Tensor,
    chosen: Tensor,
    scores: Tensor,
) -> Tensor:
    """Forward of experts: [n, D], [n, k] and [n, k] -> [n, D]."""
    size = dist.get_world_size(group)
    by_expert = chosen.flatten().argsort(stable=True)
    sent = chosen.flatten().bincount(minlength=size * num_own).view(size, num_own)
    came = torch.empty_like(sent)
    dist.all_to_all_single(came, sent, group=group)
    there, here = sent.sum(1).tolist(), came.sum(1).tolist()
    states = _Travel.apply(hidden[by_expert // chosen.shape[1]], there, here, group)
    own = torch.arange(num_own, device=chosen.device).repeat(size).repeat_interleave(came.flatten())
    if len(own) == 0:
        # The weights take part, for the ranks that have the same ones add up gradients with this one.
        states, own = states.new_zeros(1, states.shape[1]) + states.sum(), own.new_zeros(1)
    outputs = compute(states, own[:, None], scores.new_ones(len(own), 1))[: sum(here)]
    back = _Travel.apply(outputs, here, there, group)
    inverse = torch.empty_like(by_expert)
    inverse[by_expert] = torch.arange(len(by_expert), device=by_expert.device)
    return (back[inverse].view(*chosen.shape, -1) * scores[..., None]).sum(1).to(hidden.dtype)


class _Travel(torch.autograd.Function):
    """Rows [sum(there), D], the first `there[0]` for rank 0 and so on -> [sum(here), D], which came from each."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, there: list[int], here: list[int], group: dist.ProcessGroup
    ) -> Tensor:
        ctx.ways = there, here, group
        return _sent(rows, there, here, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        there, here, group = ctx.ways
        return _sent(gradient, here, there, group), None, None, None


def _sent(rows: Tensor, there: list[int], here: list[int], group: dist.ProcessGroup) -> Tensor:
    came = rows.new_empty(sum(here), rows.shape[1])
    dist.all_to_all_single(came, rows.contiguous(), here, there, group=group)
    return came
