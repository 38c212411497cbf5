# SPDX-License-Identifier: Apache-2.0
"""Attention of Hugging Face models: exact, over packed sequences with shared prompts.

A model whose attention implementation is `ATTENTION_NAME` passes query, key and value of each layer
to the `AttentionPlan` of the call: `model(..., attention_plan=plan)`. Training passes a plan for
packed sequences, decoding one for a KV cache. The model code in between is Hugging Face's.

Packed tokens consist of *segments*. A segment is causal in itself and may continue a prefix, which
is another segment that it sees in full. The samples of a prompt are segments with the prompt as
their prefix, so the prompt is computed once. Segments of similar length are padded into one call of
flash attention.

`AttentionOptions` are what layers add to plain causal attention: a sliding window hides keys that
are too far back, soft-capping bounds the scores, and a sink takes a share of the attention without
contributing a value.

Legend: B rows, H query heads, K key-value heads, D head size, N packed tokens, M predicted tokens,
T response positions, b rows of a block, L length of the longest of them, S keys that they see.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
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
    PaddedRows,
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
# Added to the score of a hidden key. With infinity, a query without any key would give NaN.
HIDDEN = -1e30


@dataclass(frozen=True)
class AttentionOptions:
    """A layer's additions to plain causal attention.

    Attributes:
        window: number of keys that a token sees, its own included. None: all keys before it.
        softcap: c of c * tanh(score / c). None: scores are not capped.
        sinks: [H] scores of a further key of each head, whose value is zero (arXiv:2309.17453).
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = AttentionOptions()


class AttentionPlan(Protocol):
    """Computes attention for the tokens of a call; knows which tokens see which keys."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Attention of one layer.

        Args:
            layer: index of the layer.
            query: [B, H, N, D], rotated.
            key: [B, K, N, D], rotated.
            value: [B, K, N, D].
            scale: factor of the scores.
            options: window, cap and sinks.

        Returns:
            [B, N, H, D].
        """
        ...


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    attention_plan: AttentionPlan | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention function of transformers' interface, by the plan of the call."""
    if attention_plan is None:
        raise EngineError(
            "attention",
            got="a call of the model without attention_plan",
            fix="Pass attention_plan=..., or load the model with another attention implementation.",
        )
    if kwargs.get("position_bias") is not None:
        raise EngineError(
            f"attention of {type(module).__name__}",
            got="a bias for each pair of positions",
            expected="scores in a window, capped or with sinks",
        )
    head_size = query.shape[-1]
    value_size = value.shape[-1]
    scale = head_size**-0.5 if scaling is None else scaling
    # Kernels and caches take heads of one size. Zeros change neither scores nor results.
    if value_size < head_size:
        value = pad(value, (0, head_size - value_size))
    elif value_size > head_size:
        query = pad(query, (0, value_size - head_size))
        key = pad(key, (0, value_size - head_size))
    options = AttentionOptions(
        window=kwargs.get("sliding_window"),
        softcap=kwargs.get("softcap"),
        sinks=kwargs.get("s_aux"),
    )
    out = attention_plan.attend(module.layer_idx, query, key, value, scale, options)
    return out[..., :value_size], None


ALL_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, _attention)
# The plan knows the mask, so the model need not build one.
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, lambda *args, **kwargs: None)


_BLOCK_TOKENS = {"cpu": 1024}  # by device type
_BLOCK_TOKENS_ELSEWHERE = 4096
# Up to this many tokens, results for the backward pass are stored in float32 if the kernel's are.
_WIDE_TOKENS = 8192


@dataclass(frozen=True)
class PackedBatch:
    """Rows of a batch as one run of tokens, which a scorer reads, and the way back to rows.

    Attributes:
        input_ids: [1, N].
        position_ids: [1, N], or [3, 1, N] along time, height and width.
        segments: which packed token sees which.
        predictors: [M] packed indices of the tokens whose hidden states predict the targets.
        host_predictors: the same on the host.
        targets: [M] token ids, or [M, K] of which the first is the row's own.
        rows: [M] row of each target in the padded responses [b, T].
        columns: [M] column of each target in the padded responses.
        shape: (b, T).
        sum_of_squared_lengths: cost of causal attention over the packed tokens.
        images: images of the prompts.
        places: for each row with targets, the packed indices of its prompt and of what follows, up
            to the last predictor.
        routing: how tokens go through a mixture of experts. None: as the routers choose, and not
            counted.
    """

    input_ids: Tensor
    position_ids: Tensor
    segments: tuple[Segment, ...]
    predictors: Tensor
    host_predictors: np.ndarray
    targets: Tensor
    rows: Tensor
    columns: Tensor
    shape: tuple[int, int]
    sum_of_squared_lengths: int
    images: PackedImages | None = None
    places: Mapping[int, Any] = field(default_factory=dict)
    routing: Routing | None = None

    @classmethod
    def filler(cls, device: torch.device) -> "PackedBatch":
        """A batch of one token and one target, for ranks that run out of rows before others."""
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        return cls(
            input_ids=zero[None],
            position_ids=zero[None],
            segments=(Segment(0, 1),),
            predictors=zero,
            host_predictors=np.zeros(1, dtype=np.int64),
            targets=zero,
            rows=zero,
            columns=zero,
            shape=(1, 1),
            sum_of_squared_lengths=1,
        )

    @cached_property
    def plan(self) -> "PackedAttention":
        """Attention plan of the tokens [1, N]."""
        return PackedAttention(self.segments, self.input_ids.device)

    def extended(self, num_tokens: int) -> "PackedBatch":
        """The batch with a segment appended that predicts nothing: tokens [1, num_tokens]."""
        num_added = num_tokens - self.num_tokens
        if num_added == 0:
            return self
        return replace(
            self,
            input_ids=pad(self.input_ids, (0, num_added)),
            position_ids=pad(self.position_ids, (0, num_added)),
            segments=(*self.segments, Segment(self.num_tokens, num_added)),
        )

    @cached_property
    def num_predicted(self) -> Tensor:
        """[b] number of targets of each row."""
        return self.rows.bincount(minlength=self.shape[0])

    @property
    def num_tokens(self) -> int:
        """N of [1, N]."""
        return self.input_ids.shape[1]

    def unpack(self, values: Tensor) -> Tensor:
        """Values [M, ...] of targets as [b, T, ...], with zeros elsewhere."""
        padded = values.new_zeros(*self.shape, *values.shape[1:])
        return padded.index_put((self.rows, self.columns), values)


class PackedAttention:
    """Attention plan of one packed micro-batch.

    Tokens are computed in blocks. A block sees its own keys causally, then a prefix or the earlier
    tokens of a long segment in full. Log-sum-exps merge these results, and the backward pass of
    each takes the merged one. Masks are needed only at the edge of a sliding window. Beside inputs,
    results and gradients, only one block is in memory.

    On CUDA in half precision `VarlenAttention` needs no blocks, except for capped scores and for
    windows beside prefixes.

    Args:
        segments: in order of `start`; each packed token is in exactly one. A prefix has no prefix.
        device: device of the tokens.
        max_padding: how many padded tokens a block may have per real one.
        block_tokens: upper limit of a block's tokens, padding included. Longer segments are cut.
            None: chosen by the device.
    """

    def __init__(
        self,
        segments: Sequence[Segment],
        device: torch.device,
        max_padding: float = 0.25,
        block_tokens: int | None = None,
    ) -> None:
        default_tokens = _BLOCK_TOKENS.get(device.type, _BLOCK_TOKENS_ELSEWHERE)
        self.device = device
        self.segments = segments
        self.max_padding = max_padding
        self.block_tokens = block_tokens or default_tokens
        self.masks: dict[tuple[int, ...], Tensor] = {}
        self._pieces: dict[Segment, list[PaddedRows]] = {}

    @cached_property
    def runs(self) -> PackedRuns:
        """Runs for kernels that take runs of any lengths."""
        return PackedRuns(self.segments, self.device)

    @cached_property
    def blocks(self) -> list["_QueryBlock"]:
        """Blocks for all other kernels."""
        blocks = []
        for members in _buckets(self.segments, self.max_padding, self.block_tokens):
            if len(members) == 1:
                blocks += self._cut(members[0])
            else:
                blocks.append(self._side_by_side(members))
        return blocks

    def _pieces_of(self, segment: Segment) -> list[PaddedRows]:
        """Rows [1, block_tokens] of a segment, the last perhaps shorter; the same in each call."""
        if segment not in self._pieces:
            stop = segment.start + segment.length
            pieces = []
            for start in range(segment.start, stop, self.block_tokens):
                length = min(self.block_tokens, stop - start)
                pieces.append(PaddedRows([(start, length)], self.device))
            self._pieces[segment] = pieces
        return self._pieces[segment]

    def _cut(self, segment: Segment) -> list["_QueryBlock"]:
        """Blocks of one segment. A piece sees itself causally, all that is before it in full."""
        blocks = []
        earlier = []
        if segment.prefix is not None:
            earlier += self._pieces_of(segment.prefix)
        for piece in self._pieces_of(segment):
            position = sum(keys.shape[1] for keys in earlier)
            key_runs = [_KeyRun(piece, slice(None), is_causal=True)]
            key_runs += _in_full(earlier, slice(None), position)
            blocks.append(_QueryBlock(piece, key_runs, [piece]))
            earlier.append(piece)
        return blocks

    def _side_by_side(self, members: list[Segment]) -> "_QueryBlock":
        """Block of segments of similar length, all with a prefix or all without."""
        if members[0].prefix is not None:
            # Those with the same prefix become neighbours.
            members = sorted(members, key=lambda member: (member.prefix.start, member.start))
        queries = PaddedRows([(member.start, member.length) for member in members], self.device)
        key_runs = [_KeyRun(queries, slice(None), is_causal=True)]
        row = 0
        for prefix, continuations in groupby(members, attrgetter("prefix")):
            # Rows [row, stop) see the same prefix.
            stop = row + len(list(continuations))
            if prefix is not None:
                key_runs += _in_full(self._pieces_of(prefix), slice(row, stop), prefix.length)
            row = stop
        own_keys = [self._pieces_of(member)[0] for member in members if member.prefix is None]
        return _QueryBlock(queries, key_runs, own_keys)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Attention of one layer; see `AttentionPlan.attend`.

        Args:
            layer: not read; all layers attend alike.
            query: [1, H, N, D].
            key: [1, K, N, D].
            value: [1, K, N, D].
            scale: factor of the scores.
            options: window, cap and sinks.

        Returns:
            [1, N, H, D].
        """
        # [1, heads, N, D] -> [N, heads, D], as the kernels take packed tokens.
        query, key, value = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
        if has_cuda_kernel(query) and options.softcap is None:
            # A window as long as the longest sequence hides nothing.
            window = options.window
            if not window or window >= self.runs.longest:
                window = None
            if window is None or not self.runs.has_prefixes:
                out = VarlenAttention.apply(
                    query, key, value, options.sinks, self.runs, scale, window
                )
                return out[None]
        rule = _ScoreRule(scale, options.window, options.softcap, self.masks)
        return _BlockwiseAttention.apply(query, key, value, options.sinks, self.blocks, rule)[None]


class _BlockwiseAttention(torch.autograd.Function):
    """Attention of all blocks: [N, H, D], [N, K, D] twice, perhaps sinks [H] -> [N, H, D]."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, blocks, rule):
        # The backward pass needs results in float32: rounded to half precision they would add an
        # error as large as that of rounded gradients. For long batches it computes them again.
        is_wide = query.device.type == "cpu" and len(query) <= _WIDE_TOKENS
        out = query.new_empty(query.shape, dtype=torch.float32 if is_wide else query.dtype)
        log_sums = query.new_empty(query.shape[:2], dtype=torch.float32)  # [N, H]
        for block in blocks:
            block_out, block_sums = block.results(
                block.queries.take(query), (query, key, value), sinks, rule
            )
            block.queries.put(block_out, out)
            block.queries.put(block_sums, log_sums)
        ctx.save_for_backward(query, key, value, sinks, out, log_sums)
        ctx.blocks = blocks
        ctx.rule = rule
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx, grad):
        *inputs, sinks, out, log_sums = ctx.saved_tensors
        if grad.stride(-1) != 1:
            grad = grad.contiguous()  # kernels take heads without gaps
        sums, grads = Sums.with_gradients(inputs, shares_memory=len(out) > _WIDE_TOKENS)
        # In float32 a block writes the gradients of its own keys, and later blocks add to them. In
        # half precision a block's own keys come last, and it adds the sums of the others.
        blocks = ctx.blocks
        if grads[0].dtype != torch.float32:
            blocks = reversed(blocks)
        for block in blocks:
            block.backward(inputs, sinks, ctx.rule, (grad, out, log_sums), grads, sums)
        grad_sinks = None
        if sinks is not None:
            # A sink's value is zero, so it takes its share of the attention from the result.
            shares = (sinks.float() - log_sums).exp()
            projections = (grad.float() * out.float()).sum(-1)  # [N, H]
            grad_sinks = -(shares * projections).sum(0).to(sinks.dtype)
        return *grads, grad_sinks, None, None


@dataclass(frozen=True)
class _ScoreRule:
    """Scale, window and cap of a layer's scores; masks [L, S] that layers and blocks share."""

    scale: float
    window: int | None
    softcap: float | None
    masks: dict[tuple[int, ...], Tensor]


@dataclass(frozen=True)
class _KeyRun:
    """Keys that rows of a block see: their own [b, L] causally, or a run of others [1, S] in full.

    Attributes:
        keys: the keys.
        rows: which rows of the block see them.
        is_causal: whether the keys are the block's own.
        distance: position of a row's first query minus that of the first key.
    """

    keys: PaddedRows
    rows: slice
    is_causal: bool = False
    distance: int = 0

    def scores(self, queries: Tensor, rule: _ScoreRule) -> Scores | None:
        """Scores of queries [b, L, H, D] and these keys, or None if all are outside the window."""
        num_rows, length = queries[self.rows].shape[:2]
        num_keys = self.keys.shape[1]
        # The last query and the first key are the farthest apart.
        if rule.window is None or self.distance + length <= rule.window:
            return Scores(rule.scale, self.is_causal, rule.softcap)
        # The first query and the last key are the nearest.
        if self.distance - num_keys + 1 >= rule.window:
            return None
        # Rows that see the same keys are one longer row; see `of_rows`.
        num_repeats = 1 if self.is_causal else num_rows
        mask_key = (rule.window, self.distance, num_repeats, length, num_keys)
        if mask_key not in rule.masks:
            mask = self._window_mask(rule.window, length, queries.device)
            rule.masks[mask_key] = mask.repeat(num_repeats, 1)
        return Scores(rule.scale, False, rule.softcap, rule.masks[mask_key])

    def _window_mask(self, window: int, length: int, device: torch.device) -> Tensor:
        """Bias [L, S] that hides keys outside the window."""
        num_keys = self.keys.shape[1]
        positions = torch.arange(length, device=device)[:, None] + self.distance
        num_behind = positions - torch.arange(num_keys, device=device)
        is_hidden = num_behind >= window
        if self.is_causal:
            is_hidden |= num_behind < 0
        return torch.zeros(length, num_keys, device=device).masked_fill_(is_hidden, HIDDEN)

    def inputs(self, queries: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Query, key and value of a flash call, from a block's queries and the packed inputs."""
        _, key, value = inputs
        return [self.of_rows(queries), self.keys.take(key), self.keys.take(value)]

    def of_rows(self, block: Tensor) -> Tensor:
        """The rows [b, L, ...] that see the keys; as one longer row if they see the same keys."""
        rows = block[self.rows]
        return rows if self.is_causal else rows.flatten(0, 1)[None]

    def put(self, key_grads: Sequence[Tensor], totals: Sequence[Tensor], sums: Sums) -> None:
        """Add gradients of key and value to the packed gradients `totals`, or to `sums`."""
        # In half precision, sums are rounded once: when the block of the keys comes.
        is_float32 = totals[0].dtype == torch.float32
        if is_float32 or (self.is_causal and self.keys not in sums):
            for grad, total in zip(key_grads, totals, strict=True):
                self.keys.put(grad, total, add=not self.is_causal)
        else:
            sums.add(self.keys, key_grads)


@dataclass(frozen=True)
class _QueryBlock:
    """Queries [b, L] that are computed together.

    Attributes:
        queries: the queries.
        parts: runs of keys that they see, their own first.
        runs: those of their own keys that other blocks may see.
    """

    queries: PaddedRows
    parts: Sequence[_KeyRun]
    runs: Sequence[PaddedRows]

    def seen(self, queries: Tensor, rule: _ScoreRule) -> Iterator[tuple[_KeyRun, Scores]]:
        """Runs of keys inside the window of queries [b, L, H, D], with their scores."""
        for part in self.parts:
            scores = part.scores(queries, rule)
            if scores is not None:
                yield part, scores

    def results(
        self, queries: Tensor, inputs: Sequence[Tensor], sinks: Tensor | None, rule: _ScoreRule
    ) -> tuple[Tensor, Tensor]:
        """Results [b, L, H, D] and log-sum-exps [b, L, H] of queries [b, L, H, D]."""
        (causal, scores), *other_runs = self.seen(queries, rule)
        out, log_sums = flash_forward(causal.inputs(queries, inputs), scores)
        # Results are merged in float32, and rounded once.
        if other_runs or sinks is not None:
            out = out.float()
        for part, scores in other_runs:
            part_out, part_sums = flash_forward(part.inputs(queries, inputs), scores)
            # Views, which the merged results are written to.
            row_out = out[part.rows]  # [rows, L, H, D]
            row_sums = log_sums[part.rows]  # [rows, L, H]
            part_sums = part_sums.reshape(row_sums.shape)
            # exp(a) / (exp(a) + exp(b)) = sigmoid(a - b), with a and b the log-sum-exps.
            share = (part_sums - row_sums).sigmoid_()[..., None]
            row_out.lerp_(part_out.reshape(row_out.shape).float(), share)
            row_sums.copy_(torch.logaddexp(row_sums, part_sums))
        if sinks is not None:
            # The sink takes a share of the attention and adds nothing to the result.
            with_sinks = torch.logaddexp(log_sums, sinks.float())
            out = out * (log_sums - with_sinks).exp_()[..., None]
            log_sums = with_sinks
        return out, log_sums

    def backward(
        self,
        inputs: Sequence[Tensor],
        sinks: Tensor | None,
        rule: _ScoreRule,
        results: Sequence[Tensor],
        grads: Sequence[Tensor],
        sums: Sums,
    ) -> None:
        """Write the gradients of the block's queries and own keys, and add those of other keys.

        Args:
            inputs: packed query [N, H, D], key and value [N, K, D].
            sinks: [H] or None.
            rule: how scores are computed.
            results: gradient and value of the packed result [N, H, D], and its log-sum-exps [N, H].
            grads: gradients of the inputs, changed in place.
            sums: gradients of keys that have not been written yet, changed in place.
        """
        grad, out, log_sums = results
        queries = self.queries.take(inputs[0])
        grad = self.queries.take(grad)
        # Saved results are read if they are as precise as the kernel's, else computed again.
        if queries.dtype == out.dtype:
            out = self.queries.take(out)
            log_sums = self.queries.take(log_sums)
        else:
            out, log_sums = self.results(queries, inputs, sinks, rule)
        if self.queries.padding is not None:
            # The weights exp(score - inf) of padded queries are zero.
            log_sums = log_sums.masked_fill(self.queries.padding[..., None], torch.inf)
        # The gradients of the block's own keys are about to be written: what later blocks added to
        # them moves out of the shared memory.
        finished = sums.taken([keys for keys in self.runs if keys is not self.queries])
        grad_queries = torch.empty(0)
        for part, scores in self.seen(queries, rule):
            merged = [part.of_rows(tensor) for tensor in (grad, out, log_sums)]
            part_inputs = part.inputs(queries, inputs)
            part_grad, *key_grads = flash_backward(merged, part_inputs, scores)
            part.put(key_grads, grads[1:], sums)
            if part.is_causal:
                grad_queries = part_grad if len(self.parts) == 1 else part_grad.float()
            else:
                row_grads = grad_queries[part.rows]
                row_grads += part_grad.reshape(row_grads.shape)
            # Free the gradients before the next call allocates its own.
            del part_grad, key_grads, part_inputs, merged
        finished += sums.taken([self.queries])
        self.queries.put(grad_queries, grads[0])
        for keys, totals in finished:
            for total, packed in zip(totals, grads[1:], strict=True):
                keys.put(total, packed, add=keys is not self.queries)


def _in_full(pieces: Sequence[PaddedRows], rows: slice, position: int) -> list[_KeyRun]:
    """Runs of consecutive keys [1, S] of a sequence, which rows from `position` on see in full."""
    key_runs = []
    start = 0
    for keys in pieces:
        key_runs.append(_KeyRun(keys, rows, distance=position - start))
        start += keys.shape[1]
    return key_runs


def _buckets(
    segments: Sequence[Segment], max_padding: float, block_tokens: int, min_tokens: int = 2048
) -> list[list[Segment]]:
    """Group segments of similar length, separately with and without a prefix.

    Segments without a prefix come first: they write the gradients that the others add to. A segment
    longer than `block_tokens` is alone.
    """
    ordered = sorted(
        segments,
        key=lambda segment: (
            segment.prefix is None,
            segment.length,
            segment.prefix.length if segment.prefix else 0,
        ),
        reverse=True,
    )
    buckets = []
    for segment in ordered:
        current = buckets[-1] if buckets else []
        if current and (current[0].prefix is None) == (segment.prefix is None):
            num_tokens = sum(member.length for member in current) + segment.length
            # The first segment is the longest: its length is that of the block's rows.
            max_tokens = min(block_tokens, (1 + max_padding) * num_tokens)
            if current[0].length * (len(current) + 1) <= max_tokens:
                current.append(segment)
                continue
        buckets.append([segment])

    # A call costs as much as some hundred tokens, so small neighbours share one.
    joined = []
    for bucket in buckets:
        last = joined[-1] if joined else []
        if last and (last[0].prefix is None) == (bucket[0].prefix is None):
            num_tokens = last[0].length * (len(last) + len(bucket))
            if num_tokens <= min(block_tokens, min_tokens):
                last.extend(bucket)
                continue
        joined.append(bucket)
    return joined
