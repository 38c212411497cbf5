# SPDX-License-Identifier: Apache-2.0
"""Attention of every Hugging Face model, and exact attention over packed sequences with shared prompts.

A model whose attention implementation is `ATTENTION_NAME` passes query, key and value of each layer to
the `AttentionPlan` that travels with the call: `model(..., attention_plan=plan)`. Training passes a plan over
packed sequences, decoding one over a KV cache; the model code in between is Hugging Face's, untouched.

Packed tokens are cut into *segments*. A segment is causal in itself and may continue a prefix, another segment
that it sees in full: the samples of one prompt are segments with the prompt as their prefix, so the prompt is
computed once. Segments of similar length are padded into one call of scaled dot-product attention.

Legend: B rows, H query heads, K key-value heads, D head size, N packed tokens, M predicted tokens, T response
positions, b rows of a bucket, L their longest segment, p different prefixes among them, S the longest prefix.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from quadriga.errors import EngineError
from quadriga.models.vision import PackedImages

ATTENTION_NAME = "quadriga"
_UNSUPPORTED = ("softcap", "sliding_window", "s_aux")


class AttentionPlan(Protocol):
    """Knows which tokens of a call may see which keys."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """Attention of layer `layer`: query [B, H, N, D], key and value [B, K, N, D], rotated -> [B, N, H, D]."""
        ...


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    attention_plan: AttentionPlan | None = None,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    if attention_plan is None:
        fix = "Pass attention_plan=..., or load the model with another attention implementation."
        raise EngineError("attention", got="a call of the model without attention_plan", fix=fix)
    for name in _UNSUPPORTED:
        if options.get(name) is not None:
            where, got = f"attention of {type(module).__name__}", f"the option {name}={options[name]!r}"
            fix = "Use rollout.name=hf and a model without this option: exact packing of it is not available."
            raise EngineError(where, got=got, expected="plain causal attention", fix=fix)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return attention_plan.attend(module.layer_idx, query, key, value, scale), None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
# The plan knows the mask; the model need not build one.
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, lambda *args, **kwargs: None)


# Up to here a causal mask costs less than copies of the keys for each query head; beyond, it would grow as its square.
MAX_MASKED_LENGTH = 256


@dataclass(frozen=True)
class Segment:
    """A run of packed tokens: [start, start + length), seeing itself causally and all of `prefix`."""

    start: int
    length: int
    prefix: "Segment | None" = None


@dataclass(frozen=True)
class PackedBatch:
    """Rows of a batch as one run of tokens: what a scorer reads, and the way back to rows.

    Attributes:
        input_ids: [1, N]
        position_ids: [1, N], or [3, 1, N] along time, height and width.
        segments: which packed token sees which.
        predictors: [M] packed index of the token whose state predicts each target.
        targets: [M] token ids.
        rows, columns: [M] where each target stands in the padded [b, T] responses.
        shape: (b, T)
        sum_of_squared_lengths: the cost of causal attention over the packed tokens.
        images: of the prompts.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    segments: tuple[Segment, ...]
    predictors: torch.Tensor
    targets: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    shape: tuple[int, int]
    sum_of_squared_lengths: int
    images: PackedImages | None = None

    @classmethod
    def filler(cls, device: torch.device) -> "PackedBatch":
        """A micro-batch for a rank that has no rows left while others have: tokens [1, 1] and targets [1]."""
        nothing = torch.zeros(1, dtype=torch.int64, device=device)
        return cls(nothing[None], nothing[None], (Segment(0, 1),), nothing, nothing, nothing, nothing, (1, 1), 1)

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

    @property
    def num_tokens(self) -> int:
        """N of [1, N]."""
        return self.input_ids.shape[1]

    def unpack(self, values: torch.Tensor) -> torch.Tensor:
        """[M] -> [b, T], zero where nothing was predicted."""
        return values.new_zeros(self.shape).index_put((self.rows, self.columns), values)


class PackedAttention:
    """Attention plan of one packed micro-batch.

    Args:
        segments: in order of `start`; each packed token belongs to exactly one.
        device: of the packed tokens.
        max_padding: how many padded tokens a bucket may hold for each real one.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device, max_padding: float = 0.25) -> None:
        self.buckets = [_Bucket(members, device) for members in _buckets(segments, max_padding)]
        order = torch.cat([bucket.queries.tokens for bucket in self.buckets])
        self.inverse = torch.empty_like(order).index_copy_(0, order, torch.arange(len(order), device=device))

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """[1, H, N, D], [1, K, N, D] twice -> [1, N, H, D]."""
        heads, head_size = query.shape[1], query.shape[3]
        query, key, value = (part[0].transpose(0, 1) for part in (query, key, value))  # [N, heads, D]
        parts = [bucket.attend(query, key, value, scale) for bucket in self.buckets]
        packed = torch.cat(parts) if len(parts) > 1 else parts[0]
        return _Copy.apply(packed, self.inverse, self.inverse, None).view(1, -1, heads, head_size)


class _Bucket:
    """Segments of similar length, computed in one call."""

    def __init__(self, members: Sequence[Segment], device: torch.device) -> None:
        self.queries = _Padding(members, device)
        self.prefixes: _Padding | None = None
        self.mask: torch.Tensor | None = None  # True where a query sees a key; None: causal
        width = self.queries.width
        causal = torch.ones(width, width, dtype=torch.bool).tril()
        if members[0].prefix is not None:
            prefixes = list(dict.fromkeys(segment.prefix for segment in members if segment.prefix is not None))
            numbers = {prefix: number for number, prefix in enumerate(prefixes)}
            self.prefixes = _Padding(prefixes, device)
            self.prefix_of_row = torch.tensor([numbers[segment.prefix] for segment in members], device=device)
            before = self.prefixes.width
            mask = torch.zeros(len(members), 1, width, before + width, dtype=torch.bool)  # [b, 1, L, S + L]
            mask[..., before:] = causal
            for row, segment in enumerate(members):
                mask[row, ..., : segment.prefix.length] = True
            self.mask = mask.to(device)
        elif width <= MAX_MASKED_LENGTH:
            self.mask = causal[None, None].to(device)

    def attend(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> torch.Tensor:
        """[N, heads, D] each -> [tokens of the bucket, H * D], in the order of its rows."""
        rows, *keys = (self.queries.pad(part) for part in (query, key, value))
        if self.prefixes is not None:
            before = (self.prefixes.pad(part).index_select(0, self.prefix_of_row) for part in (key, value))
            keys = [torch.cat(parts, dim=1) for parts in zip(before, keys, strict=True)]
        rows, seen, read = (part.transpose(1, 2) for part in (rows, *keys))  # [b, H, L, D], [b, K, S + L, D] twice
        groups = rows.shape[1] // seen.shape[1]
        if self.mask is None:
            seen, read = seen.repeat_interleave(groups, 1), read.repeat_interleave(groups, 1)
            mixed = scaled_dot_product_attention(rows, seen, read, is_causal=True, scale=scale)
        else:
            # The query heads that share a key head stand below each other, as one longer query: no key is copied.
            folded = rows.unflatten(1, (-1, groups)).flatten(2, 3)
            mask = self.mask.repeat(1, 1, groups, 1) if groups > 1 else self.mask
            mixed = scaled_dot_product_attention(folded, seen, read, attn_mask=mask, scale=scale)
            mixed = mixed.unflatten(2, (groups, -1)).flatten(1, 2)
        padded = mixed.transpose(1, 2).flatten(2).to(query.dtype).flatten(0, 1)  # [b L, H D]
        return _Copy.apply(padded, self.queries.slots, self.queries.slots, None)


class _Padding:
    """Where the tokens of some segments stand when each segment is a row, padded on the right.

    The padding repeats a row's first token: no real query sees it, and its gradient is dropped.
    """

    def __init__(self, segments: Sequence[Segment], device: torch.device) -> None:
        self.width = max(segment.length for segment in segments)
        indices = torch.tensor([segment.start for segment in segments])[:, None].repeat(1, self.width)
        real = torch.zeros(indices.shape, dtype=torch.bool)
        for row, segment in enumerate(segments):
            indices[row, : segment.length] += torch.arange(segment.length)
            real[row, : segment.length] = True
        self.indices = indices.to(device)  # [b, L] into the packed tokens
        self.tokens = indices[real].to(device)  # the packed tokens of all rows, one after the other
        self.slots = real.flatten().nonzero()[:, 0].to(device)  # where these stand in the padded rows

    def pad(self, tokens: torch.Tensor) -> torch.Tensor:
        """[N, heads, D] -> [b, L, heads, D]. Attention on CPUs is twice as fast backward in float32 as in bfloat16."""
        rows = _Copy.apply(tokens, self.indices.flatten(), self.tokens, self.slots).unflatten(0, self.indices.shape)
        return rows.float() if rows.device.type == "cpu" else rows


class _Copy(torch.autograd.Function):
    """Rows in other places: [X, ...] -> values[sources]. The rows `targets` get a gradient, from `places` of the result
    (None: in their order), the others zeros. Autograd's own adds, atomically or serially: ten times as slow."""

    @staticmethod
    def forward(ctx, values, sources, targets, places):
        ctx.targets, ctx.places, ctx.num_rows = targets, places, len(values)
        return values.index_select(0, sources)

    @staticmethod
    def backward(ctx, grad):
        grad = grad if ctx.places is None else grad.index_select(0, ctx.places)
        out = grad.new_empty if len(ctx.targets) == ctx.num_rows else grad.new_zeros
        return out(ctx.num_rows, *grad.shape[1:]).index_copy_(0, ctx.targets, grad), None, None, None


def _buckets(segments: Sequence[Segment], max_padding: float, min_tokens: int = 2048) -> list[list[Segment]]:
    """Segments of similar length and prefix together; those with a prefix apart from those without."""
    buckets: list[list[Segment]] = []
    keys = [(one.prefix is not None, one.length, one.prefix.length if one.prefix else 0) for one in segments]
    for number in sorted(range(len(segments)), key=keys.__getitem__, reverse=True):
        segment = segments[number]
        current = buckets[-1] if buckets else []
        if current and (current[0].prefix is None) == (segment.prefix is None):
            total = sum(member.length for member in current) + segment.length
            if current[0].length * (len(current) + 1) <= (1 + max_padding) * total:
                current.append(segment)
                continue
        buckets.append([segment])
    # A call costs as much as some hundred tokens, so neighbours that are small together share one.
    joined: list[list[Segment]] = []
    for bucket in buckets:
        last = joined[-1] if joined else []
        is_alike = last and (last[0].prefix is None) == (bucket[0].prefix is None)
        if is_alike and last[0].length * (len(last) + len(bucket)) <= min_tokens:
            last.extend(bucket)
        else:
            joined.append(bucket)
    return joined
