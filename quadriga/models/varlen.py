# SPDX-License-Identifier: Apache-2.0
"""Packed attention on CUDA in two calls a layer, however many segments there are: the flash kernels take runs of any
lengths one after the other. One call lets all segments see themselves causally, the other lets those that continue a
prefix see it in full; their log-sum-exps merge the results, and the backward pass of each takes the merged one.

Legend: N packed tokens, R of them continue a prefix, P are in such a prefix, H query heads, K key heads, D head size.
"""

from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from quadriga.models.flash import Segment

_aten = torch.ops.aten


class Runs:
    """Lengths of runs that stand one after the other, as the kernels take them."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.offsets = torch.from_numpy(np.cumsum([0, *lengths], dtype=np.int32)).to(device)
        self.longest = max(lengths)


class PackedRuns:
    """Which packed tokens see which, for the kernels. `segments`: in order of `start`, each token in one of them."""

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.own = Runs([one.length for one in segments], device)
        self.longest = max(
            one.length + (one.prefix.length if one.prefix else 0) for one in segments
        )
        groups: dict[Segment, list[Segment]] = {}
        for one in segments:
            if one.prefix is not None:
                groups.setdefault(one.prefix, []).append(one)
        self.has_prefixes = bool(groups)
        if groups:  # [R] and [P], places in the packed tokens
            self.rows, self.keys = _places(chain(*groups.values()), device), _places(groups, device)
            self.continued = Runs(
                [sum(one.length for one in group) for group in groups.values()], device
            )
            self.prefixes = Runs([one.length for one in groups], device)

    def continuing(self, query: Tensor, *keys: Tensor) -> list[Tensor]:
        """[N, H, D] and perhaps [N, K, D] twice -> those of the tokens that see a prefix, and of the prefixes."""
        return [query.index_select(0, self.rows), *(one.index_select(0, self.keys) for one in keys)]


def _places(segments: Iterable[Segment], device: torch.device) -> Tensor:
    found = [np.arange(one.start, one.start + one.length) for one in segments]
    return torch.from_numpy(np.concatenate(found)).to(device)


class VarlenAttention(torch.autograd.Function):
    """[N, H, D], [N, K, D] twice in half precision, perhaps sinks [H] -> [N, H, D]; a window hides keys of a segment
    only where no segment has a prefix."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, runs: PackedRuns, scale: float, window: int | None):
        left = None if window is None else window - 1
        out, sums = _forward((query, key, value), runs.own, runs.own, True, scale, left)
        if runs.has_prefixes:
            inputs = runs.continuing(query, key, value)
            found, logs = _forward(inputs, runs.continued, runs.prefixes, False, scale)
            own, own_sums = out.index_select(0, runs.rows), sums.index_select(1, runs.rows)
            share = (logs - own_sums).sigmoid_().t()[..., None]
            out.index_copy_(0, runs.rows, own.float().lerp_(found.float(), share).to(out.dtype))
            sums.index_copy_(1, runs.rows, torch.logaddexp(logs, own_sums))
        if sinks is not None:
            with_sinks = torch.logaddexp(sums, sinks.float()[:, None])
            out, sums = (out * (sums - with_sinks).exp_().t()[..., None]).to(out.dtype), with_sinks
        ctx.save_for_backward(query, key, value, sinks, out, sums)
        ctx.runs, ctx.scale, ctx.left = runs, scale, left
        return out

    @staticmethod
    def backward(ctx, grad):
        *inputs, sinks, out, sums = ctx.saved_tensors
        runs, scale = ctx.runs, ctx.scale
        grad = (
            grad if grad.stride(-1) == 1 else grad.contiguous()
        )  # kernels take heads without gaps
        grads = _backward((grad, out, sums), inputs, runs.own, runs.own, True, scale, ctx.left)
        if runs.has_prefixes:
            merged = [
                *runs.continuing(grad),
                *runs.continuing(out),
                sums.index_select(1, runs.rows),
            ]
            more = _backward(
                merged, runs.continuing(*inputs), runs.continued, runs.prefixes, False, scale
            )
            for whole, one, places in zip(
                grads, more, (runs.rows, runs.keys, runs.keys), strict=True
            ):
                whole.index_copy_(0, places, one.add_(whole.index_select(0, places)))
        grad_sinks = None
        if sinks is not None:
            # Their value is zero: a share of the attention that is taken from the result.
            shares = (sinks.float()[:, None] - sums).exp_()
            grad_sinks = -(shares * (grad.float() * out.float()).sum(-1).t()).sum(1).to(sinks.dtype)
        return *grads, grad_sinks, None, None, None


def _forward(
    inputs: Sequence[Tensor],
    queries: Runs,
    keys: Runs,
    is_causal: bool,
    scale: float,
    left: int | None = None,
) -> tuple[Tensor, Tensor]:
    """The result, and log-sum-exps [H, tokens]; `left`: how many keys before its own a query sees."""
    call = (
        *inputs,
        queries.offsets,
        keys.offsets,
        queries.longest,
        keys.longest,
        0.0,
        is_causal,
        False,
    )
    window = {} if left is None else {"window_size_left": left, "window_size_right": 0}
    out, sums, *_ = _aten._flash_attention_forward(*call, scale=scale, **window)
    return out, sums


def _backward(
    results: Sequence[Tensor], inputs: Sequence[Tensor], queries: Runs, keys: Runs, is_causal: bool, scale: float,
    left: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """Gradients of the inputs from those of the merged result, itself, and its log-sum-exps [H, tokens]."""
    grad, out, sums = results
    rng = (
        out.new_empty(2, dtype=torch.uint64),
        out.new_empty((), dtype=torch.uint64),
    )  # without dropout unread
    call = (
        grad,
        *inputs,
        out,
        sums,
        queries.offsets,
        keys.offsets,
        queries.longest,
        keys.longest,
        0.0,
        is_causal,
    )
    window = {} if left is None else {"window_size_left": left, "window_size_right": 0}
    return list(_aten._flash_attention_backward(*call, *rng, scale=scale, **window))
