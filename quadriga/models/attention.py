# SPDX-License-Identifier: Apache-2.0
"""Attention of every Hugging Face model, and exact attention over packed sequences with shared prompts.

A model whose attention implementation is `ATTENTION_NAME` passes query, key and value of each layer to
the `AttentionPlan` that travels with the call: `model(..., attention_plan=plan)`. Training passes a plan over
packed sequences, decoding one over a KV cache; the model code in between is Hugging Face's, untouched.

Packed tokens are cut into *segments*. A segment is causal in itself and may continue a prefix, another segment that it
sees in full: the samples of one prompt are segments with the prompt as their prefix, so it is computed once. Segments
of similar length are padded into one call of flash attention. What layers add to plain causal attention comes as
`AttentionOptions`: a sliding window hides the keys that are too far back, soft-capping bends the scores, a sink takes a
share of the attention and gives nothing for it.

Legend: B rows, H query heads, K key-value heads, D head size, N packed tokens, M predicted tokens, T response
positions, b rows of a block, L the longest of them, S keys that they see.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from operator import attrgetter
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quadriga.errors import EngineError
from quadriga.models.experts import Routing
from quadriga.models.flash import (
    Rows,
    Scores,
    Segment,
    Sums,
    flash_backward,
    flash_forward,
    has_cuda_kernel,
)
from quadriga.models.varlen import PackedRuns, VarlenAttention
from quadriga.models.vision import PackedImages

ATTENTION_NAME = "quadriga"
HIDDEN = -1e30  # added to the score of a key that is not seen. Infinity would leave a query without any key with NaN


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer adds to plain causal attention."""

    window: int | None = None  # a token sees this many keys, its own included; None: all before it
    softcap: float | None = None  # c of c * tanh(score / c); None: scores are not capped
    sinks: Tensor | None = (
        None  # [H] scores of a further key of each head, whose value is zero (arXiv:2309.17453)
    )


PLAIN = AttentionOptions()


class AttentionPlan(Protocol):
    """Knows which tokens of a call may see which keys."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Attention of layer `layer`: query [B, H, N, D], key and value [B, K, N, D], rotated -> [B, N, H, D]."""
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_plan: AttentionPlan | None = None,
    **given: Any,
) -> tuple[Tensor, None]:
    if attention_plan is None:
        fix = "Pass attention_plan=..., or load the model with another attention implementation."
        raise EngineError("attention", got="a call of the model without attention_plan", fix=fix)
    if given.get("position_bias") is not None:
        got, expected = (
            "a bias for each pair of positions",
            "scores in a window, capped or with sinks",
        )
        raise EngineError(f"attention of {type(module).__name__}", got=got, expected=expected)
    scale, width = query.shape[-1] ** -0.5 if scaling is None else scaling, value.shape[-1]
    if missing := query.shape[-1] - width:
        # Kernels and caches take heads of one size: zeros change neither scores nor results.
        if missing > 0:
            value = pad(value, (0, missing))
        else:
            query, key = pad(query, (0, -missing)), pad(key, (0, -missing))
    options = AttentionOptions(
        given.get("sliding_window"), given.get("softcap"), given.get("s_aux")
    )
    mixed = attention_plan.attend(module.layer_idx, query, key, value, scale, options)
    return mixed[..., :width], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
# The plan knows the mask; the model need not build one.
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, lambda *args, **kwargs: None)


_BLOCK_TOKENS = {"cpu": 1024}  # by the device
_BLOCK_TOKENS_ELSEWHERE = 4096
_WIDE_TOKENS = (
    8192  # up to here results for the backward pass are kept in float32, where the kernel's are
)


@dataclass(frozen=True)
class PackedBatch:
    """Rows of a batch as one run of tokens: what a scorer reads, and the way back to rows."""

    input_ids: Tensor  # [1, N]
    position_ids: Tensor  # [1, N], or [3, 1, N] along time, height and width
    segments: tuple[Segment, ...]  # which packed token sees which
    predictors: Tensor  # [M] packed index of the token whose state predicts each target
    host_predictors: np.ndarray  # the same on the host
    targets: Tensor  # [M] token ids; or [M, K], of which the first is the row's own
    rows: Tensor  # [M] where each target stands in the padded [b, T] responses
    columns: Tensor
    shape: tuple[int, int]  # (b, T)
    sum_of_squared_lengths: int  # the cost of causal attention over the packed tokens
    images: PackedImages | None = None  # of the prompts
    # Packed tokens of each row with targets: its prompt, and what follows up to the last predictor.
    places: Mapping[int, Any] = field(default_factory=dict)
    routing: Routing | None = (
        None  # through a mixture of experts; None: as its routers choose, uncounted
    )

    @classmethod
    def filler(cls, device: torch.device) -> "PackedBatch":
        """A micro-batch for a rank that has no rows left while others have: tokens [1, 1] and targets [1]."""
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        on_host = np.zeros(1, dtype=np.int64)
        return cls(
            nothing[None],
            nothing[None],
            (Segment(0, 1),),
            nothing,
            on_host,
            *(nothing,) * 3,
            (1, 1),
            1,
        )

    @cached_property
    def plan(self) -> "PackedAttention":
        """How its tokens [1, N] attend."""
        return PackedAttention(self.segments, self.input_ids.device)

    def extended(self, num_tokens: int) -> "PackedBatch":
        """The same with tokens [1, num_tokens] instead of [1, N], by a segment that nothing is predicted from."""
        missing = num_tokens - self.num_tokens
        if missing == 0:
            return self
        ids, positions = (pad(one, (0, missing)) for one in (self.input_ids, self.position_ids))
        segments = (*self.segments, Segment(self.num_tokens, missing))
        return replace(self, input_ids=ids, position_ids=positions, segments=segments)

    @cached_property
    def num_predicted(self) -> Tensor:
        """[b] targets of each row."""
        return self.rows.bincount(minlength=self.shape[0])

    @property
    def num_tokens(self) -> int:
        """N of [1, N]."""
        return self.input_ids.shape[1]

    def unpack(self, values: Tensor) -> Tensor:
        """[M, ...] -> [b, T, ...], zero where nothing was predicted."""
        return values.new_zeros(*self.shape, *values.shape[1:]).index_put(
            (self.rows, self.columns), values
        )


class PackedAttention:
    """Attention plan of one packed micro-batch.

    Tokens are computed in blocks. A block sees its own keys causally, then a prefix or earlier tokens of a long segment
    in full; the log-sum-exps merge these results, and the backward pass of each takes the merged one. Masks there are
    only at the edge of a sliding window; beside arguments, results and gradients there is the memory of a block.
    On CUDA in half precision `VarlenAttention` needs no blocks, but for capped scores and windows beside prefixes.

    `segments`: in order of `start`; each packed token belongs to exactly one. A prefix has none itself.
    `max_padding`: how many padded tokens a block may hold for each real one.
    `block_tokens`: the most tokens of a block, padding included; longer segments are cut. None: what fits the device.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        max_padding: float = 0.25,
        block_tokens: int | None = None,
    ) -> None:
        self.device, self.segments, self.max_padding = device, segments, max_padding
        self.block_tokens = block_tokens or _BLOCK_TOKENS.get(device.type, _BLOCK_TOKENS_ELSEWHERE)
        self.masks: dict[tuple[int, ...], Tensor] = {}
        self._pieces: dict[Segment, list[Rows]] = {}

    @cached_property
    def runs(self) -> PackedRuns:
        """For kernels that take runs of any lengths."""
        return PackedRuns(self.segments, self.device)

    @cached_property
    def blocks(self) -> list["_Block"]:
        """For all others."""
        blocks: list[_Block] = []
        for members in _buckets(self.segments, self.max_padding, self.block_tokens):
            blocks += self._cut(members[0]) if len(members) == 1 else [self._side_by_side(members)]
        return blocks

    def _pieces_of(self, segment: Segment) -> list["Rows"]:
        """Rows [1, block_tokens] of a segment, the last perhaps shorter; the same ones each time."""
        if segment not in self._pieces:
            stop, size = segment.start + segment.length, self.block_tokens
            cuts = [(start, min(size, stop - start)) for start in range(segment.start, stop, size)]
            self._pieces[segment] = [Rows([cut], self.device) for cut in cuts]
        return self._pieces[segment]

    def _cut(self, segment: Segment) -> list["_Block"]:
        """Each piece of a segment sees itself causally, and the prefix and the pieces before it in full."""
        blocks, before = [], list(self._pieces_of(segment.prefix)) if segment.prefix else []
        end = sum(one.shape[1] for one in before)
        for piece in self._pieces_of(segment):
            parts = [_Part(piece, slice(None), is_causal=True), *_in_full(before, slice(None), end)]
            blocks.append(_Block(piece, parts, [piece]))
            before.append(piece)
            end += piece.shape[1]
        return blocks

    def _side_by_side(self, members: list[Segment]) -> "_Block":
        """Segments of similar length, those with the same prefix next to each other."""
        members = sorted(
            members, key=lambda one: (one.prefix.start, one.start) if one.prefix else (0, 0)
        )
        queries = Rows([(one.start, one.length) for one in members], self.device)
        parts, start = [_Part(queries, slice(None), is_causal=True)], 0
        for prefix, same in groupby(members, attrgetter("prefix")):
            stop = start + len(list(same))
            parts += (
                _in_full(self._pieces_of(prefix), slice(start, stop), prefix.length)
                if prefix
                else []
            )
            start = stop
        return _Block(
            queries, parts, [self._pieces_of(one)[0] for one in members if one.prefix is None]
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """[1, H, N, D], [1, K, N, D] twice -> [1, N, H, D]."""
        query, key, value = (
            part.squeeze(0).transpose(0, 1) for part in (query, key, value)
        )  # [N, heads, D]
        if has_cuda_kernel(query) and options.softcap is None:
            window = (
                options.window
                if (options.window or self.runs.longest) < self.runs.longest
                else None
            )
            if window is None or not self.runs.has_prefixes:
                return VarlenAttention.apply(
                    query, key, value, options.sinks, self.runs, scale, window
                )[None]
        how = _How(scale, options.window, options.softcap, self.masks)
        return _Attention.apply(query, key, value, options.sinks, self.blocks, how)[None]


class _Attention(torch.autograd.Function):
    """Attention of all blocks: [N, H, D], [N, K, D] twice, perhaps sinks [H] -> [N, H, D]."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, blocks, how):
        # Rounded to half precision they would cost gradients as much as their own rounding does: beyond, they are
        # computed again.
        is_wide = query.device.type == "cpu" and len(query) <= _WIDE_TOKENS
        out = query.new_empty(query.shape, dtype=torch.float32 if is_wide else query.dtype)
        log_sums = query.new_empty(
            query.shape[:2], dtype=torch.float32
        )  # [N, H] of the exponentials
        for block in blocks:
            found = block.results(block.queries.take(query), (query, key, value), sinks, how)
            for one, whole in zip(found, (out, log_sums), strict=True):
                block.queries.put(one, whole)
        ctx.save_for_backward(query, key, value, sinks, out, log_sums)
        ctx.blocks, ctx.how = blocks, how
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx, grad):
        *inputs, sinks, out, log_sums = ctx.saved_tensors
        grad = (
            grad if grad.stride(-1) == 1 else grad.contiguous()
        )  # kernels take heads without gaps
        sums, grads = Sums.with_gradients(inputs, shares_memory=len(out) > _WIDE_TOKENS)
        # In float32 blocks add to what the block of a key has written, else that one is the last, and adds the sums.
        for block in ctx.blocks if grads[0].dtype == torch.float32 else reversed(ctx.blocks):
            block.backward(inputs, sinks, ctx.how, (grad, out, log_sums), grads, sums)
        grad_sinks = None
        if sinks is not None:
            # Their value is zero: a share of the attention that is taken from the result.
            shares = (sinks.float() - log_sums).exp()
            grad_sinks = -(shares * (grad.float() * out.float()).sum(-1)).sum(0).to(sinks.dtype)
        return *grads, grad_sinks, None, None


@dataclass(frozen=True)
class _How:
    """Scale, window and cap of a layer's scores; `masks` [L, S] of windows, which layers and blocks share."""

    scale: float
    window: int | None
    softcap: float | None
    masks: dict[tuple[int, ...], Tensor]


@dataclass(frozen=True)
class _Part:
    """Keys that rows of a block see: their own [b, L] causally, or a run of others [1, S] in full."""

    keys: Rows
    rows: slice
    is_causal: bool = False
    distance: int = 0  # of the first query of each row from the first key

    def scores(self, queries: Tensor, how: _How) -> Scores | None:
        """How queries [b, L, H, D] of a block see these keys; None: all are outside of their window."""
        (_, size), (num_rows, length) = self.keys.shape, queries[self.rows].shape[:2]
        if how.window is None or self.distance + length <= how.window:
            return Scores(how.scale, self.is_causal, how.softcap)
        if self.distance - size + 1 >= how.window:
            return None
        key = (how.window, self.distance, 1 if self.is_causal else num_rows, length, size)
        if key not in how.masks:
            places = torch.arange(length, device=queries.device)[:, None] + self.distance
            behind = places - torch.arange(
                size, device=queries.device
            )  # how far each key is behind each query
            is_hidden = (behind >= how.window) | ((behind < 0) if self.is_causal else False)
            mask = torch.zeros(length, size, device=queries.device).masked_fill_(is_hidden, HIDDEN)
            how.masks[key] = mask.repeat(key[2], 1)
        return Scores(how.scale, False, how.softcap, how.masks[key])

    def inputs(self, queries: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Queries, key and value of a call of attention, out of the block's queries and the packed inputs."""
        return [self.of_rows(queries), *(self.keys.take(one) for one in inputs[1:])]

    def of_rows(self, block: Tensor) -> Tensor:
        """[b, L, ...] -> its rows; those that see the same keys are one longer row."""
        rows = block[self.rows]
        return rows if self.is_causal else rows.flatten(0, 1)[None]

    def put(self, taken: Sequence[Tensor], grads: Sequence[Tensor], sums: Sums) -> None:
        """Adds the gradients of its key and value to those of the packed ones, or to `sums`."""
        if grads[0].dtype == torch.float32 or (self.is_causal and self.keys not in sums):
            for one, whole in zip(taken, grads, strict=True):
                self.keys.put(one, whole, add=not self.is_causal)
        else:
            sums.add(self.keys, taken)


@dataclass(frozen=True)
class _Block:
    """Queries [b, L] that are computed together, their own keys first; `runs`: those that other blocks may see."""

    queries: Rows
    parts: Sequence[_Part]
    runs: Sequence[Rows]

    def seen(self, queries: Tensor, how: _How) -> Iterator[tuple[_Part, Scores]]:
        """The parts that its queries [b, L, H, D] see, and how."""
        for part in self.parts:
            if (scores := part.scores(queries, how)) is not None:
                yield part, scores

    def results(
        self, queries: Tensor, inputs: Sequence[Tensor], sinks: Tensor | None, how: _How
    ) -> tuple[Tensor, Tensor]:
        """The results [b, L, H, D] and log-sum-exps [b, L, H] of its queries [b, L, H, D]; sinks are [H]."""
        (own, scores), *others = self.seen(queries, how)
        mixed, total = flash_forward(own.inputs(queries, inputs), scores)
        mixed = mixed.float() if others or sinks is not None else mixed
        for part, scores in others:
            found, logs = flash_forward(part.inputs(queries, inputs), scores)
            rows, sums = mixed[part.rows], total[part.rows]
            logs = logs.reshape(sums.shape)
            rows.lerp_(found.reshape(rows.shape).float(), (logs - sums).sigmoid_()[..., None])
            sums.copy_(torch.logaddexp(sums, logs))
        if sinks is not None:
            with_sinks = torch.logaddexp(total, sinks.float())
            mixed, total = mixed * (total - with_sinks).exp_()[..., None], with_sinks
        return mixed, total

    def backward(
        self,
        inputs: Sequence[Tensor],
        sinks: Tensor | None,
        how: _How,
        results: Sequence[Tensor],
        grads: Sequence[Tensor],
        sums: Sums,
    ) -> None:
        """Writes the gradients of its queries, and of its own key and value; adds those of other keys: `grads` of the
        inputs query [N, H, D], key and value [N, K, D]; sinks are [H] or None. `results`: gradient and value of the
        result [N, H, D], and its log-sum-exps [N, H]."""
        queries, grad = self.queries.take(inputs[0]), self.queries.take(results[0])
        if queries.dtype == results[1].dtype:
            out, total = (self.queries.take(one) for one in results[1:])
        else:
            out, total = self.results(queries, inputs, sinks, how)
        if self.queries.padding is not None:
            total = total.masked_fill(self.queries.padding[..., None], torch.inf)
        asked, added = (
            torch.empty(0),
            sums.taken([one for one in self.runs if one is not self.queries]),
        )
        for part, scores in self.seen(queries, how):
            merged = [part.of_rows(one) for one in (grad, out, total)]
            found, *taken = flash_backward(merged, part.inputs(queries, inputs), scores)
            part.put(taken, grads[1:], sums)
            if part.is_causal:
                asked = found if len(self.parts) == 1 else found.float()
            else:
                asked[part.rows] += found.reshape(asked[part.rows].shape)
            del found, taken  # before the next call makes its own
        added += sums.taken([self.queries])
        self.queries.put(asked, grads[0])
        for keys, ones in added:
            for one, into in zip(ones, grads[1:], strict=True):
                keys.put(one, into, add=keys is not self.queries)


def _in_full(keys: Sequence[Rows], rows: slice, position: int) -> list[_Part]:
    """The runs [1, S] of a sequence, one after the other, that rows see whose first token is at this position of it."""
    starts = accumulate((one.shape[1] for one in keys), initial=0)
    return [
        _Part(one, rows, distance=position - start)
        for one, start in zip(keys, starts, strict=False)
    ]


def _buckets(
    segments: Sequence[Segment], max_padding: float, block_tokens: int, min_tokens: int = 2048
) -> list[list[Segment]]:
    """Segments of similar length and prefix together, in order: those without a prefix write their gradients first,
    the others add to them. What is longer than `block_tokens` is alone."""
    buckets: list[list[Segment]] = []
    keys = [
        (one.prefix is None, one.length, one.prefix.length if one.prefix else 0) for one in segments
    ]
    for number in sorted(range(len(segments)), key=keys.__getitem__, reverse=True):
        segment = segments[number]
        current = buckets[-1] if buckets else []
        if current and (current[0].prefix is None) == (segment.prefix is None):
            total = sum(member.length for member in current) + segment.length
            if current[0].length * (len(current) + 1) <= min(
                block_tokens, (1 + max_padding) * total
            ):
                current.append(segment)
                continue
        buckets.append([segment])
    # A call costs as much as some hundred tokens, so neighbours that are small together share one.
    joined: list[list[Segment]] = []
    for bucket in buckets:
        last = joined[-1] if joined else []
        is_alike = last and (last[0].prefix is None) == (bucket[0].prefix is None)
        if is_alike and last[0].length * (len(last) + len(bucket)) <= min(block_tokens, min_tokens):
            last.extend(bucket)
        else:
            joined.append(bucket)
    return joined
