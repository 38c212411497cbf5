# SPDX-License-Identifier: Apache-2.0
"""Attention of Hugging Face models: exact, over packed sequences with shared prompts.

A model whose attention implementation is `ATTENTION_NAME` passes query, key and value of each layer
to the `AttentionPlan` of the call: `model(..., attention_plan=plan)`. Training passes a plan for
packed sequences, decoding one for a KV cache. All other code of the model is Hugging Face's.

Packed tokens consist of *segments*. A segment attends to itself causally, and may continue a
prefix: another segment, which it sees in full. The samples of a prompt are segments with the prompt
as their prefix, so that the prompt is computed once. Segments of similar length are padded into one
call of flash attention.

`AttentionOptions` describe what a layer adds to plain causal attention: a sliding window hides keys
that are too far back, soft-capping bounds the scores, and a sink takes a share of the attention
without contributing a value.

Legend: B rows, H query heads, K key-value heads, D head size, N packed tokens, M predicted tokens,
T response positions, b rows of a block, L length of the longest of them, S keys that they see.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
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
    KeyGradientSums,
    PaddedRows,
    ScoreRule,
    Segment,
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
        window: number of keys that a token sees, including its own. None: all earlier keys.
        softcap: c of c * tanh(score / c). None: scores are not capped.
        sinks: [H] scores of a further key of each head, whose value is zero (arXiv:2309.17453).
    """

    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None


PLAIN = AttentionOptions()


class AttentionPlan(Protocol):
    """Computes attention for the tokens of a call. It defines which keys each token sees."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Compute the attention of one layer.

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
    """Attention function in transformers' interface, which calls the plan of the model's call.

    Raises:
        EngineError: the model was called without a plan, or the layer adds a bias to its scores.
    """
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
    # Kernels and caches need queries, keys and values of one size. Padding with zeros changes
    # neither scores nor results.
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
# The plan defines the mask, so the model does not build one.
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION_NAME, lambda *args, **kwargs: None)


# Default upper limits of a block.
_BLOCK_TOKENS = 1024  # on a CPU
_BLOCK_TOKENS_GPU = 4096
# On a CPU, results of at most this many tokens are stored in float32 for the backward pass.
_MAX_FLOAT32_TOKENS = 8192


@dataclass(frozen=True)
class PackedBatch:
    """Rows of a batch as one sequence of tokens for a scorer, and the mapping back to rows.

    Attributes:
        input_ids: [1, N].
        position_ids: [1, N], or [3, 1, N] along time, height and width.
        segments: the segments, which define the tokens that each token sees.
        predictors: [M] packed indices of the tokens whose hidden states predict the targets.
        host_predictors: a copy of `predictors` on the host.
        targets: [M] token ids; or [M, K], of which the first is the row's token.
        rows: [M] row of each target in the padded responses [b, T].
        columns: [M] column of each target in the padded responses.
        shape: (b, T).
        sum_of_squared_lengths: about twice the pairs of tokens that attention computes.
        images: images of the rows.
        token_indices: for each row with targets, the packed indices of its tokens up to the last
            predictor. A row's later tokens are not packed.
        routing: replay and statistics of the routers of a mixture of experts. None: the routers
            choose, and are not observed.
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
    token_indices: Mapping[int, Any] = field(default_factory=dict)
    routing: Routing | None = None

    @classmethod
    def filler(cls, device: torch.device) -> "PackedBatch":
        """Create a batch of one token and one target, for a rank with fewer batches than others."""
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

    def pad_to(self, num_tokens: int) -> "PackedBatch":
        """Return a batch of tokens [1, num_tokens], whose last segment predicts nothing."""
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
        """Number of targets of each row, [b]."""
        return self.rows.bincount(minlength=self.shape[0])

    @property
    def num_tokens(self) -> int:
        """Number of packed tokens, N."""
        return self.input_ids.shape[1]

    def unpack(self, values: Tensor) -> Tensor:
        """Scatter values [M, ...] of targets to [b, T, ...], with zeros elsewhere."""
        padded = values.new_zeros(*self.shape, *values.shape[1:])
        return padded.index_put((self.rows, self.columns), values)


class PackedAttention:
    """Attention plan of one packed micro-batch.

    Tokens are computed in blocks. A block sees its own keys causally, and a prefix or the earlier
    tokens of a long segment in full. These partial results are merged by their log-sum-exps, and
    the backward pass of each uses the merged result. Masks are needed only at the edge of a sliding
    window. Besides inputs, results and gradients, only one block is in memory.

    On CUDA in half precision, `VarlenAttention` computes all tokens without blocks, unless scores
    are capped, or there are both windows and prefixes.

    Args:
        segments: in order of `start`; each packed token is in exactly one. A prefix has no prefix.
        device: device of the tokens.
        max_padding: number of padded tokens that a block may have per real token.
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
        default_tokens = _BLOCK_TOKENS if device.type == "cpu" else _BLOCK_TOKENS_GPU
        self.device = device
        self.segments = segments
        self.max_padding = max_padding
        self.block_tokens = block_tokens or default_tokens
        self.masks: dict[tuple[int, ...], Tensor] = {}  # of sliding windows; see `_LayerRule`
        self._pieces: dict[Segment, list[PaddedRows]] = {}

    @cached_property
    def runs(self) -> PackedRuns:
        """The segments as `VarlenAttention` takes them."""
        return PackedRuns(self.segments, self.device)

    @cached_property
    def blocks(self) -> list["_QueryBlock"]:
        """The blocks for all other kernels."""
        blocks = []
        for members in _group_segments(self.segments, self.max_padding, self.block_tokens):
            if len(members) == 1:
                blocks += self._blocks_of_segment(members[0])
            else:
                blocks.append(self._block_of_segments(members))
        return blocks

    def _pieces_of(self, segment: Segment) -> list[PaddedRows]:
        """Cut a segment into rows [1, block_tokens], of which the last may be shorter.

        Cached, because `KeyGradientSums` finds the gradients of the same keys by the identity of
        their rows.
        """
        if segment not in self._pieces:
            stop = segment.start + segment.length
            pieces = []
            for start in range(segment.start, stop, self.block_tokens):
                length = min(self.block_tokens, stop - start)
                pieces.append(PaddedRows([(start, length)], self.device))
            self._pieces[segment] = pieces
        return self._pieces[segment]

    def _blocks_of_segment(self, segment: Segment) -> list["_QueryBlock"]:
        """Make the blocks of one segment. A piece sees itself causally, earlier keys in full."""
        blocks = []
        earlier_pieces = []
        if segment.prefix is not None:
            earlier_pieces += self._pieces_of(segment.prefix)
        for piece in self._pieces_of(segment):
            # Position of the piece's first token in the sequence, prefix included.
            position = sum(keys.shape[1] for keys in earlier_pieces)
            key_runs = [_KeyRun(piece, slice(None), is_causal=True)]
            key_runs += _full_key_runs(earlier_pieces, slice(None), position)
            blocks.append(_QueryBlock(piece, key_runs, [piece]))
            earlier_pieces.append(piece)
        return blocks

    def _block_of_segments(self, members: list[Segment]) -> "_QueryBlock":
        """Make a block of segments of similar length, either all with a prefix or all without."""
        if members[0].prefix is not None:
            # Make segments with the same prefix neighbours.
            members = sorted(members, key=lambda member: (member.prefix.start, member.start))
        queries = PaddedRows([(member.start, member.length) for member in members], self.device)
        key_runs = [_KeyRun(queries, slice(None), is_causal=True)]
        row = 0
        for prefix, continuations in groupby(members, attrgetter("prefix")):
            # Rows [row, stop) see the same prefix.
            stop = row + len(list(continuations))
            if prefix is not None:
                key_runs += _full_key_runs(self._pieces_of(prefix), slice(row, stop), prefix.length)
            row = stop
        # Segments without a prefix may be prefixes of others, which see them as pieces. A segment
        # that shares a block fits into one piece.
        own_pieces = [self._pieces_of(member)[0] for member in members if member.prefix is None]
        return _QueryBlock(queries, key_runs, own_pieces)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Compute the attention of one layer; see `AttentionPlan.attend`.

        Args:
            layer: not used.
            query: [1, H, N, D].
            key: [1, K, N, D].
            value: [1, K, N, D].
            scale: factor of the scores.
            options: window, cap and sinks.

        Returns:
            [1, N, H, D].
        """
        # [1, heads, N, D] -> [N, heads, D], the kernels' layout of packed tokens.
        query, key, value = (part.squeeze(0).transpose(0, 1) for part in (query, key, value))
        if has_cuda_kernel(query) and options.softcap is None:
            window = options.window
            if not window or window >= self.runs.longest:
                window = None  # a window as long as the longest sequence hides nothing
            # `VarlenAttention` supports a window only if no segment has a prefix.
            if window is None or not self.runs.has_prefixes:
                out = VarlenAttention.apply(
                    query, key, value, options.sinks, self.runs, scale, window
                )
                return out[None]
        rule = _LayerRule(scale, options.window, options.softcap, self.masks)
        return _BlockwiseAttention.apply(query, key, value, options.sinks, self.blocks, rule)[None]


class _BlockwiseAttention(torch.autograd.Function):
    """Attention of all blocks: [N, H, D], [N, K, D] twice, perhaps sinks [H] -> [N, H, D]."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, blocks, rule):
        # The backward pass needs results in float32: rounded to half precision, they would add an
        # error as large as that of rounded gradients. In long batches, float32 results would need
        # too much memory, so the backward pass computes them again.
        is_wide = query.device.type == "cpu" and len(query) <= _MAX_FLOAT32_TOKENS
        out = query.new_empty(query.shape, dtype=torch.float32 if is_wide else query.dtype)
        log_sums = query.new_empty(query.shape[:2], dtype=torch.float32)  # [N, H]
        for block in blocks:
            block_out, block_log_sums = block.forward(
                block.queries.gather(query), (query, key, value), sinks, rule
            )
            block.queries.scatter(block_out, out)
            block.queries.scatter(block_log_sums, log_sums)
        ctx.save_for_backward(query, key, value, sinks, out, log_sums)
        ctx.blocks = blocks
        ctx.rule = rule
        return out.to(query.dtype)

    @staticmethod
    def backward(ctx, grad):
        *inputs, sinks, out, log_sums = ctx.saved_tensors
        if grad.stride(-1) != 1:
            grad = grad.contiguous()  # kernels take heads without gaps
        sums, grads = KeyGradientSums.with_gradients(
            inputs, shares_memory=len(out) > _MAX_FLOAT32_TOKENS
        )
        # In float32, a block writes the gradients of its own keys, and later blocks add to them.
        # Half precision would round each addition, so there the blocks run in reverse order: later
        # blocks sum their gradients of a block's keys in float32, and the block writes the total.
        blocks = ctx.blocks
        if grads[0].dtype != torch.float32:
            blocks = reversed(blocks)
        for block in blocks:
            block.backward(inputs, sinks, ctx.rule, (grad, out, log_sums), grads, sums)
        grad_sinks = None
        if sinks is not None:
            # A sink has no value, so a larger share of it shrinks the result.
            shares = (sinks.float() - log_sums).exp()
            projections = (grad.float() * out.float()).sum(-1)  # [N, H]
            grad_sinks = -(shares * projections).sum(0).to(sinks.dtype)
        return *grads, grad_sinks, None, None


@dataclass(frozen=True)
class _LayerRule:
    """Scale, window and cap of the scores of a layer, and a cache of masks for the window."""

    scale: float
    window: int | None
    softcap: float | None
    masks: dict[tuple[int, ...], Tensor]  # cache of masks [L, S], for all layers and blocks


@dataclass(frozen=True)
class _KeyRun:
    """Keys that rows of a block see: the block's own [b, L] causally, or other keys [1, S] in full.

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

    def score_rule(self, queries: Tensor, rule: _LayerRule) -> ScoreRule | None:
        """Rule for scores of queries [b, L, H, D] and these keys; None if no query sees a key."""
        num_rows, length = queries[self.rows].shape[:2]
        num_keys = self.keys.shape[1]
        # The last query and the first key are the farthest apart. If the window does not hide this
        # key, it hides none.
        if rule.window is None or self.distance + length <= rule.window:
            return ScoreRule(rule.scale, self.is_causal, rule.softcap)
        # The first query and the last key are the nearest. If the window hides this key, it hides
        # all.
        if self.distance - num_keys + 1 >= rule.window:
            return None
        # Rows that see the same keys are computed as one longer row; see `select_rows`.
        num_repeats = 1 if self.is_causal else num_rows
        mask_key = (rule.window, self.distance, num_repeats, length, num_keys)
        if mask_key not in rule.masks:
            mask = self._window_mask(rule.window, length, queries.device)
            rule.masks[mask_key] = mask.repeat(num_repeats, 1)
        return ScoreRule(rule.scale, False, rule.softcap, rule.masks[mask_key])

    def _window_mask(self, window: int, length: int, device: torch.device) -> Tensor:
        """Bias [L, S] that hides keys outside the window."""
        num_keys = self.keys.shape[1]
        positions = torch.arange(length, device=device)[:, None] + self.distance
        num_behind = positions - torch.arange(num_keys, device=device)
        is_hidden = num_behind >= window
        if self.is_causal:
            is_hidden |= num_behind < 0
        return torch.zeros(length, num_keys, device=device).masked_fill_(is_hidden, HIDDEN)

    def flash_inputs(self, queries: Tensor, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Query, key and value of a flash call for these keys.

        Args:
            queries: [b, L, H, D] of the block.
            inputs: packed query [N, H, D], key and value [N, K, D].
        """
        _, key, value = inputs
        return [self.select_rows(queries), self.keys.gather(key), self.keys.gather(value)]

    def select_rows(self, block: Tensor) -> Tensor:
        """Select the rows of a block [b, L, ...] that see the keys.

        Rows that see other keys than their own see the same keys, so they become one longer row.
        """
        rows = block[self.rows]
        return rows if self.is_causal else rows.flatten(0, 1)[None]

    def add_gradients(
        self, key_grads: Sequence[Tensor], totals: Sequence[Tensor], sums: KeyGradientSums
    ) -> None:
        """Add gradients of key and value to the packed gradients `totals`, or to `sums`."""
        # In half precision, gradients from several blocks are summed in float32 and rounded once,
        # when the block of the keys is computed. A block's own keys that no other block has seen
        # need no sum.
        is_float32 = totals[0].dtype == torch.float32
        if is_float32 or (self.is_causal and self.keys not in sums):
            for grad, total in zip(key_grads, totals, strict=True):
                self.keys.scatter(grad, total, add=not self.is_causal)
        else:
            sums.add(self.keys, key_grads)


@dataclass(frozen=True)
class _QueryBlock:
    """Queries [b, L] that are computed together.

    Attributes:
        queries: the queries.
        key_runs: runs of keys that the queries see, their own keys first.
        own_pieces: pieces of the queries' own keys, under which other blocks may see them.
    """

    queries: PaddedRows
    key_runs: Sequence[_KeyRun]
    own_pieces: Sequence[PaddedRows]

    def visible_runs(
        self, queries: Tensor, rule: _LayerRule
    ) -> Iterator[tuple[_KeyRun, ScoreRule]]:
        """Yield the runs of keys within the window of queries [b, L, H, D], with their rules."""
        for run in self.key_runs:
            run_rule = run.score_rule(queries, rule)
            if run_rule is not None:
                yield run, run_rule

    def forward(
        self, queries: Tensor, inputs: Sequence[Tensor], sinks: Tensor | None, rule: _LayerRule
    ) -> tuple[Tensor, Tensor]:
        """Compute results [b, L, H, D] and log-sum-exps [b, L, H].

        Args:
            queries: [b, L, H, D].
            inputs: packed query [N, H, D], key and value [N, K, D].
            sinks: [H] or None.
            rule: how scores are computed.
        """
        (own_run, own_rule), *other_runs = self.visible_runs(queries, rule)
        out, log_sums = flash_forward(own_run.flash_inputs(queries, inputs), own_rule)
        # Results are merged in float32, and rounded once.
        if other_runs or sinks is not None:
            out = out.float()
        for run, run_rule in other_runs:
            run_out, run_log_sums = flash_forward(run.flash_inputs(queries, inputs), run_rule)
            # Views of the block's rows, updated in place.
            row_out = out[run.rows]  # [rows, L, H, D]
            row_log_sums = log_sums[run.rows]  # [rows, L, H]
            run_log_sums = run_log_sums.reshape(row_log_sums.shape)
            # exp(a) / (exp(a) + exp(b)) = sigmoid(a - b), with a and b the log-sum-exps.
            share = (run_log_sums - row_log_sums).sigmoid_()[..., None]
            row_out.lerp_(run_out.reshape(row_out.shape).float(), share)
            row_log_sums.copy_(torch.logaddexp(row_log_sums, run_log_sums))
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
        rule: _LayerRule,
        results: Sequence[Tensor],
        grads: Sequence[Tensor],
        sums: KeyGradientSums,
    ) -> None:
        """Write the gradients of the block's queries and own keys, and add gradients of other keys.

        Args:
            inputs: packed query [N, H, D], key and value [N, K, D].
            sinks: [H] or None.
            rule: how scores are computed.
            results: gradient and value of the packed result [N, H, D], and its log-sum-exps [N, H].
            grads: gradients of the inputs, changed in place.
            sums: float32 sums of gradients of keys whose block comes later, changed in place.
        """
        grad, out, log_sums = results
        queries = self.queries.gather(inputs[0])
        grad = self.queries.gather(grad)

        # Use the saved results if they are as precise as the kernel's, else compute them again.
        if queries.dtype == out.dtype:
            out = self.queries.gather(out)
            log_sums = self.queries.gather(log_sums)
        else:
            out, log_sums = self.forward(queries, inputs, sinks, rule)
        if self.queries.padding is not None:
            # The weights exp(score - inf) of padded queries are zero.
            log_sums = log_sums.masked_fill(self.queries.padding[..., None], torch.inf)

        # The gradients of the block's own keys are about to be written. Take the sums of other
        # blocks for these keys, which may lie in the same memory.
        finished = sums.pop_copies([keys for keys in self.own_pieces if keys is not self.queries])
        grad_queries = torch.empty(0)  # replaced by the first run, which is the block's own keys
        for run, run_rule in self.visible_runs(queries, rule):
            run_results = [run.select_rows(tensor) for tensor in (grad, out, log_sums)]
            run_inputs = run.flash_inputs(queries, inputs)
            run_grad, *key_grads = flash_backward(run_results, run_inputs, run_rule)
            run.add_gradients(key_grads, grads[1:], sums)
            if run.is_causal:
                grad_queries = run_grad if len(self.key_runs) == 1 else run_grad.float()
            else:
                row_grads = grad_queries[run.rows]
                row_grads += run_grad.reshape(row_grads.shape)
            # Free the gradients before the next call allocates its own.
            del run_grad, key_grads, run_inputs, run_results

        finished += sums.pop_copies([self.queries])
        self.queries.scatter(grad_queries, grads[0])
        for keys, totals in finished:
            # The sum for `self.queries` includes this block's own gradients, so it replaces them.
            # The sums for other pieces do not, so they are added.
            for total, packed in zip(totals, grads[1:], strict=True):
                keys.scatter(total, packed, add=keys is not self.queries)


def _full_key_runs(pieces: Sequence[PaddedRows], rows: slice, position: int) -> list[_KeyRun]:
    """Describe consecutive keys of a sequence that rows of a block see in full.

    Args:
        pieces: the keys, [1, S] each, from the sequence's first token on.
        rows: which rows of the block see them.
        position: position of the rows' first query in the sequence.
    """
    key_runs = []
    start = 0
    for keys in pieces:
        key_runs.append(_KeyRun(keys, rows, distance=position - start))
        start += keys.shape[1]
    return key_runs


def _group_segments(
    segments: Sequence[Segment], max_padding: float, block_tokens: int, min_tokens: int = 2048
) -> list[list[Segment]]:
    """Group segments of similar length. Segments with and without a prefix are not mixed.

    Segments without a prefix come first, because they write the gradients that the others add to. A
    segment longer than `block_tokens` is alone.

    Args:
        segments: the segments.
        max_padding: number of padded tokens that a group may have per real token.
        block_tokens: upper limit of a group's tokens, padding included.
        min_tokens: smaller groups are joined up to this size, whatever their padding.
    """
    # Segments without a prefix come first, then the longest, so that neighbours are similar.
    ordered = sorted(
        segments,
        key=lambda segment: (
            segment.prefix is None,
            segment.length,
            segment.prefix.length if segment.prefix else 0,
        ),
        reverse=True,
    )

    def max_padded_tokens(group: Sequence[Segment]) -> float:
        """Limit of a group's tokens, padding included."""
        return min(block_tokens, (1 + max_padding) * sum(segment.length for segment in group))

    groups = _join_neighbours([[segment] for segment in ordered], max_padded_tokens)
    # A call costs as much as some hundred tokens, so join small neighbours.
    return _join_neighbours(groups, lambda _: min(block_tokens, min_tokens))


def _join_neighbours(
    groups: Sequence[list[Segment]], limit: Callable[[list[Segment]], float]
) -> list[list[Segment]]:
    """Join neighbours of the same kind while a group has at most `limit(group)` padded tokens."""
    joined = []
    for group in groups:
        if joined and (joined[-1][0].prefix is None) == (group[0].prefix is None):
            both = joined[-1] + group
            # The first segment is the longest, so all rows are padded to its length.
            if both[0].length * len(both) <= limit(both):
                joined[-1] = both
                continue
        joined.append(group)
    return joined
