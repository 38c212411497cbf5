# SPDX-License-Identifier: Apache-2.0
"""Triton kernels for the steps between matrix products of a decode step, in half precision.

A layer then takes about twelve kernels, where torch's operators take seventy: products, a norm with
the sum before it (twice), rotary positions, attention, a gate. They round to half precision where
torch's operators do.

Attention runs one program for each row, key-value head and part of the keys: first over the keys of
the row's prefix, then over those of its response (online softmax, arXiv:1805.02867). The lengths
are read from the device, so a replayed CUDA graph reads only the keys that each row has by then. If
there are few rows, their keys are cut into parts, which a second kernel combines (flash-decoding).

Sampling draws the same tokens as `quadriga.rollout.sampler`, from the same uniform numbers by the
same halvings. One pass over the logits stores the maximum of each chunk and the sum of each block;
then one program for each row descends among the blocks, and inside one of them.

Legend: R rows, D hidden size, F width of the MLP, H query heads, K key-value heads, G = H / K,
d head size, S parts, V vocabulary.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

from quadriga.models.attention import PLAIN, AttentionOptions
from quadriga.rollout.native.kernels import KeysAndValues, SlotPlaces, with_contiguous_rows

# In place of -inf: below every score, but finite, so that a difference of two is 0 and not NaN.
_NOTHING = tl.constexpr(-1e30)
_TOKENS = 64  # tokens in one tile of keys
_NUM_PROGRAMS = 512  # with fewer attention programs, the keys of a row are cut into parts
_MAX_PARTS = 64
_MAX_HEAD_SIZE = 256
_HEADS = 8  # heads that one program rotates
_WIDTH = 1024  # columns of an MLP that one program gates
_BLOCK = 256  # tokens of a block, as in `quadriga.rollout.sampler`
_BLOCKS = 16  # blocks of a chunk


@triton.jit
def _load(addresses, mask, other=0.0):
    """Load numbers as float32; where the mask is false, `other`."""
    return tl.load(addresses, mask=mask, other=other).to(tl.float32)


@triton.jit
def _round(numbers, half: tl.constexpr):
    """Round float32 numbers to half precision, and return them as float32.

    Used wherever torch's operators would round.
    """
    return numbers.to(half).to(tl.float32)


@triton.jit
def _normalize_kernel(
    states,
    added,
    weight,
    result,
    epsilon,
    SIZE: tl.constexpr,
    HAS_ADDED: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Compute the root-mean-square norm of one row. If HAS_ADDED, first add a row of `added`.

    Args:
        states: [R, D].
        added: [R, D], overwritten by the sum; None without HAS_ADDED.
        weight: [D], factors of the norm.
        result: [R, D], the norm.
        epsilon: added to the mean square.
        SIZE: D.
        HAS_ADDED: whether there is a tensor to add.
        COLUMNS: D, rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    exists = columns < SIZE
    half: tl.constexpr = result.dtype.element_ty
    offsets = row * SIZE + columns
    x = _load(states + offsets, exists)
    if HAS_ADDED:
        x += _load(added + offsets, exists)
        tl.store(added + offsets, x.to(half), mask=exists)
        x = _round(x, half)
    mean_square = tl.sum(x * x, 0) / SIZE
    normed = _round(x * tl.rsqrt(mean_square + epsilon), half)
    factors = _load(weight + columns, exists)
    tl.store(result + offsets, (normed * factors).to(half), mask=exists)


@triton.jit
def _rotate_kernel(
    states,
    cos,
    sin,
    num_rotated,
    stride,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Apply rotary positions to HEADS heads of one row, in place.

    The halves x, y of a head become x * cos - y * sin and y * cos + x * sin.

    Args:
        states: [R, H, d].
        cos: [R, d].
        sin: [R, d].
        num_rotated: number of heads to rotate, from the first on.
        stride: distance between two rows of `states`, in elements.
        SIZE: d.
        HEADS: heads of one program.
        COLUMNS: d / 2, rounded up to a power of two.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    middle: tl.constexpr = SIZE // 2
    half: tl.constexpr = states.dtype.element_ty
    is_column = columns < middle

    # Both halves of each head: [HEADS, COLUMNS].
    first_half = states + row * stride + heads[:, None] * SIZE + columns[None, :]
    second_half = first_half + middle
    exists = (heads[:, None] < num_rotated) & is_column[None, :]
    first = _load(first_half, exists)
    second = _load(second_half, exists)

    offsets = row * SIZE + columns
    first_cos = _load(cos + offsets, is_column)[None, :]
    second_cos = _load(cos + offsets + middle, is_column)[None, :]
    first_sin = _load(sin + offsets, is_column)[None, :]
    second_sin = _load(sin + offsets + middle, is_column)[None, :]

    # Each product is rounded before the sum, as torch's operators do.
    cos_part = _round(first * first_cos, half)
    sin_part = _round(second * first_sin, half)
    tl.store(first_half, (cos_part - sin_part).to(half), mask=exists)
    cos_part = _round(second * second_cos, half)
    sin_part = _round(first * second_sin, half)
    tl.store(second_half, (cos_part + sin_part).to(half), mask=exists)


@triton.jit
def _gate_kernel(states, result, width, COLUMNS: tl.constexpr):
    """Compute silu(gate) * up for COLUMNS columns of one row.

    Args:
        states: [R, 2 * F]: gate, then up.
        result: [R, F].
        width: F.
        COLUMNS: columns of one program.
    """
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < width
    half: tl.constexpr = result.dtype.element_ty
    gates = states + row * 2 * width + columns
    gate = _load(gates, exists)
    up = _load(gates + width, exists)
    silu = _round(gate / (1 + tl.exp(-gate)), half)
    tl.store(result + row * width + columns, (silu * up).to(half), mask=exists)


@triton.jit
def _attend_to_keys(
    query,
    keys,
    values,
    peak,
    total,
    mixed,
    start,
    stop,
    scale,
    softcap,
    SIZE: tl.constexpr,
    HAS_CAP: tl.constexpr,
    COLUMNS: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Continue an online softmax over the keys in [start, stop), one tile of TOKENS at a time.

    Args:
        query: queries of a group of heads, [G, d].
        keys: address of the first key, [tokens, d].
        values: address of the first value, [tokens, d].
        peak: [G], maximum of the scores so far.
        total: [G], sum of exp(score - peak) over the keys so far.
        mixed: [G, d], sum of exp(score - peak) * value over the keys so far.
        start: first key.
        stop: end of the keys, exclusive.
        scale: factor of the scores.
        softcap: bound of the scores, if HAS_CAP.
        SIZE: d.
        HAS_CAP: whether scores have a bound.
        COLUMNS: d, rounded up to a power of two.
        TOKENS: keys of a tile.

    Returns:
        `peak`, `total` and `mixed` with these keys.
    """
    columns = tl.arange(0, COLUMNS)
    for first in range(start, stop, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        exists = tokens < stop
        offsets = tokens[:, None] * SIZE + columns[None, :]
        inside = exists[:, None] & (columns[None, :] < SIZE)
        key = tl.load(keys + offsets, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key)) * scale
        if HAS_CAP:
            # softcap * tanh(scores / softcap)
            scores = (2 * tl.sigmoid(2 * scores / softcap) - 1) * softcap
        scores = tl.where(exists[None, :], scores, -float("inf"))
        # The sums so far are relative to the old maximum, and are rescaled to the new one.
        new_peak = tl.maximum(peak, tl.max(scores, 1))
        rescale = tl.exp(peak - new_peak)
        odds = tl.exp(scores - new_peak[:, None])
        total = rescale * total + tl.sum(odds, 1)
        value = tl.load(values + offsets, mask=inside, other=0.0)
        mixed = tl.dot(odds.to(value.dtype), value, rescale[:, None] * mixed)
        peak = new_peak
    return peak, total, mixed


@triton.jit(do_not_specialize=("prefix_room", "own_room", "window"))
def _attention_kernel(
    query, key, value, own_keys, own_values, shared_keys, shared_values,
    prefix_of, prefix_length, num_written, sinks,
    result, sums,
    query_stride, key_stride, value_stride, prefix_room, own_room, window, scale, softcap,
    NUM_KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    HAS_WINDOW: tl.constexpr, HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr,
    QUERIES: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Compute attention of one row and key-value head over one of PARTS parts of the keys.

    Keys before the new token are numbered from 0 to `end`: those of the prefix, then those of the
    response. Those in the window are [begin, end), of which a part has [start, stop), in whole
    tiles. Only the first part has the new token: it also writes the token's key and value to the
    response cache. A part may have no keys. `_combine_kernel` weights the parts by their
    log-sum-exps, and adds the sinks.

    Args:
        query: [R, H, d].
        key: [R, K, d], of the new token.
        value: [R, K, d], of the new token.
        own_keys: [slots, K, own_room, d], cache of the responses.
        own_values: [slots, K, own_room, d].
        shared_keys: [prefixes, K, prefix_room, d], cache of the prefixes.
        shared_values: [prefixes, K, prefix_room, d].
        prefix_of: [R], index of each row's prefix.
        prefix_length: [R], tokens of each row's prefix.
        num_written: [R], tokens of each row's response in the cache.
        sinks: [H], score of each head's sink, if HAS_SINKS.
        result: [R, H, d], or with several parts [R, H, S, d] in float32.
        sums: [R, H, S], log-sum-exps of the parts; not written if there is one part.
        query_stride: elements between two rows of `query`.
        key_stride: elements between two rows of `key`.
        value_stride: elements between two rows of `value`.
        prefix_room: most tokens of a prefix in the cache.
        own_room: most tokens of a response in the cache.
        window: tokens that a query sees, itself included, if HAS_WINDOW.
        scale: factor of the scores.
        softcap: bound of the scores, if HAS_CAP.
        NUM_KEYS: K.
        GROUP: G.
        SIZE: d.
        PARTS: S.
        HAS_WINDOW: whether a query sees only `window` tokens.
        HAS_CAP: whether scores have a bound.
        HAS_SINKS: whether heads have sinks.
        QUERIES: G, rounded up to a power of two.
        COLUMNS: d, rounded up to a power of two.
        TOKENS: keys of a tile.
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    part = tl.program_id(2)
    queries = tl.arange(0, QUERIES)
    columns = tl.arange(0, COLUMNS)
    heads = head * GROUP + queries
    is_query = queries < GROUP
    is_column = columns < SIZE
    inside = is_query[:, None] & is_column[None, :]
    query_rows = query + row * query_stride + heads[:, None] * SIZE
    q = tl.load(query_rows + columns[None, :], mask=inside, other=0.0)

    written = tl.load(num_written + row)
    length = tl.load(prefix_length + row)
    end = length + written
    begin = end * 0  # a zero of the type that the other branch has
    if HAS_WINDOW:
        begin = tl.maximum(end + 1 - window, 0)
    tiles_per_part = (end - begin + PARTS * TOKENS - 1) // (PARTS * TOKENS)
    start = begin + part * tiles_per_part * TOKENS
    stop = tl.minimum(start + tiles_per_part * TOKENS, end)

    own_start = (row * NUM_KEYS + head) * own_room * SIZE
    keys = own_keys + own_start
    values = own_values + own_start
    peak = tl.full((QUERIES,), _NOTHING, dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    mixed = tl.zeros((QUERIES, COLUMNS), dtype=tl.float32)
    if part == 0:
        # The new token comes first: its score is the maximum so far, its share exp(score - peak) 1.
        new_key_at = key + row * key_stride + head * SIZE + columns
        new_key = tl.load(new_key_at, mask=is_column, other=0.0)
        new_value_at = value + row * value_stride + head * SIZE + columns
        new_value = tl.load(new_value_at, mask=is_column, other=0.0)
        new_offsets = written * SIZE + columns
        tl.store(keys + new_offsets, new_key, mask=is_column)
        tl.store(values + new_offsets, new_value, mask=is_column)
        peak = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        if HAS_CAP:
            peak = (2 * tl.sigmoid(2 * peak / softcap) - 1) * softcap
        total += 1.0
        mixed += new_value.to(tl.float32)[None, :]

    # Keys of the prefix up to `length`, then of the response from `length` on.
    shared_start = (tl.load(prefix_of + row) * NUM_KEYS + head) * prefix_room * SIZE
    peak, total, mixed = _attend_to_keys(
        q,
        shared_keys + shared_start,
        shared_values + shared_start,
        peak,
        total,
        mixed,
        start,
        tl.minimum(stop, length),
        scale,
        softcap,
        SIZE,
        HAS_CAP,
        COLUMNS,
        TOKENS,
    )
    peak, total, mixed = _attend_to_keys(
        q,
        keys,
        values,
        peak,
        total,
        mixed,
        tl.maximum(start - length, 0),  # the cache of the response begins at key `length`
        stop - length,
        scale,
        softcap,
        SIZE,
        HAS_CAP,
        COLUMNS,
        TOKENS,
    )

    if PARTS == 1:
        if HAS_SINKS:
            total += tl.exp(_load(sinks + heads, is_query) - peak)
        lines = row * NUM_KEYS * GROUP + heads[:, None]
        normalized = (mixed / total[:, None]).to(result.dtype.element_ty)
        tl.store(result + lines * SIZE + columns[None, :], normalized, mask=inside)
    else:
        line = (row * NUM_KEYS * GROUP + heads) * PARTS + part
        normalized = mixed / tl.maximum(total, 1e-30)[:, None]
        tl.store(result + line[:, None] * SIZE + columns[None, :], normalized, inside)
        log_sum = tl.where(total > 0, peak + tl.log(total), _NOTHING)
        tl.store(sums + line, log_sum, mask=is_query)


@triton.jit
def _combine_kernel(
    parts,
    sums,
    sinks,
    result,
    NUM_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Combine the attention of all parts, for one row and query head (together: a line).

    Args:
        parts: [R, H, S, d] float32, attention over each part.
        sums: [R, H, S], log-sum-exps of the parts.
        sinks: [H], score of each head's sink, if HAS_SINKS.
        result: [R, H, d].
        NUM_HEADS: H.
        SIZE: d.
        PARTS: S.
        HAS_SINKS: whether heads have sinks.
        COLUMNS: d, rounded up to a power of two.
    """
    line = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    part_lines = line * PARTS + tl.arange(0, PARTS)
    # A part without keys has the log-sum-exp _NOTHING, and so no share.
    logs = tl.load(sums + part_lines)
    peak = tl.max(logs, 0)
    if HAS_SINKS:
        peak = tl.maximum(peak, tl.load(sinks + line % NUM_HEADS))
    shares = tl.exp(logs - peak)
    total = tl.sum(shares, 0)
    if HAS_SINKS:
        # A sink takes its share of the attention, but has no value.
        total += tl.exp(tl.load(sinks + line % NUM_HEADS) - peak)
    is_column = columns < SIZE
    offsets = part_lines[:, None] * SIZE + columns[None, :]
    mixed = _load(parts + offsets, is_column[None, :])
    combined = tl.sum(mixed * shares[:, None], 0) / total
    tl.store(result + line * SIZE + columns, combined.to(result.dtype.element_ty), mask=is_column)


@triton.jit
def _summarize_kernel(
    logits,
    temperature,
    peaks,
    likeliest,
    sums,
    num_tokens,
    num_blocks,
    HAS_TEMPERATURE: tl.constexpr,
    BLOCKS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Summarize one chunk of a row of logits: its maximum, its likeliest token, sums of its blocks.

    Args:
        logits: [R, V] float32.
        temperature: [R], if HAS_TEMPERATURE.
        peaks: [R, chunks], gets the maximum of the logits divided by the temperature.
        likeliest: [R, chunks], gets the first token with the highest logit.
        sums: [R, blocks], gets the sum of exp(logit / temperature - peak) of each block.
        num_tokens: V.
        num_blocks: number of blocks of a row.
        HAS_TEMPERATURE: whether logits are divided by a temperature.
        BLOCKS: blocks of a chunk.
        BLOCK: tokens of a block.
    """
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    blocks = chunk * BLOCKS + tl.arange(0, BLOCKS)
    tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    z = _load(logits + row * num_tokens + tokens, tokens < num_tokens, -float("inf"))
    highest = tl.max(tl.max(z, 1), 0)
    # Of several likeliest tokens the first one counts, as with argmax.
    candidates = tl.where(z == highest, tokens, num_tokens)
    first = tl.min(tl.min(candidates, 1), 0)
    if HAS_TEMPERATURE:
        row_temperature = tl.load(temperature + row)
        z = z / row_temperature
        highest = highest / row_temperature
    block_sums = tl.sum(tl.exp(z - highest), 1)
    tl.store(sums + row * num_blocks + blocks, block_sums, mask=blocks < num_blocks)
    # The sums are relative to the maximum of the chunk; `_draw_kernel` knows that of the row.
    line = row * tl.num_programs(1) + chunk
    tl.store(peaks + line, highest)
    tl.store(likeliest + line, first)


@triton.jit
def _choose(masses, entries, uniforms, DEPTH: tl.constexpr):
    """Draw an entry with a probability in proportion to its mass, by DEPTH halvings.

    After i halvings, the i lowest bits of the entry are known. The next halving compares the masses
    of all entries with these bits whose next bit is 0, and of those whose next bit is 1.

    Args:
        masses: [2**DEPTH] float64.
        entries: [2**DEPTH], 0, 1, 2, ...
        uniforms: address of the uniform number of the first halving.
        DEPTH: number of halvings.

    Returns:
        Index of the entry.
    """
    entry = tl.sum(entries * 0, 0)  # a zero of the type of `entries`
    for step in tl.static_range(DEPTH):
        # The bits chosen so far and the next bit of each entry. `entry` has 0 as its next bit.
        low_bits = entries % (2 * 2**step)
        lower = tl.sum(tl.where(low_bits == entry, masses, 0.0), 0)
        both = lower + tl.sum(tl.where(low_bits == entry + 2**step, masses, 0.0), 0)
        entry += tl.where(tl.load(uniforms + step) * both >= lower, 2**step, 0)
    return entry


@triton.jit
def _draw_kernel(
    logits,
    temperature,
    peaks,
    likeliest,
    sums,
    uniforms,
    is_greedy,
    result,
    num_tokens,
    num_blocks,
    num_chunks,
    uniforms_stride,
    HAS_TEMPERATURE: tl.constexpr,
    HAS_GREEDY: tl.constexpr,
    DEPTH: tl.constexpr,
    DEPTH_INSIDE: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCKS: tl.constexpr,
):
    """Draw the token of one row from the summaries of its chunks.

    Args:
        logits: [R, V] float32.
        temperature: [R], if HAS_TEMPERATURE.
        peaks: [R, chunks], from `_summarize_kernel`.
        likeliest: [R, chunks], from `_summarize_kernel`.
        sums: [R, blocks], from `_summarize_kernel`.
        uniforms: [R, `uniforms_stride`] float64.
        is_greedy: [R] bool, whether a row takes its likeliest token, if HAS_GREEDY.
        result: [R, 3] float64: token, log-probability, and log-probability among the tokens that
            could be drawn.
        num_tokens: V.
        num_blocks: number of blocks of a row.
        num_chunks: number of chunks of a row.
        uniforms_stride: uniform numbers of a row.
        HAS_TEMPERATURE: whether logits are divided by a temperature.
        HAS_GREEDY: whether some rows take their likeliest tokens.
        DEPTH: halvings among the blocks.
        DEPTH_INSIDE: halvings inside a block.
        CHUNKS: number of chunks, rounded up to a power of two.
        BLOCKS: blocks of a chunk.
    """
    row = tl.program_id(0).to(tl.int64)
    row_logits = logits + row * num_tokens
    row_peaks = peaks + row * num_chunks
    row_uniforms = uniforms + row * uniforms_stride
    row_temperature = 1.0
    if HAS_TEMPERATURE:
        row_temperature = tl.load(temperature + row)

    # Probability mass of each block, relative to the row's maximum.
    chunks = tl.arange(0, CHUNKS)
    peak = _load(row_peaks + chunks, chunks < num_chunks, -float("inf"))
    highest = tl.max(peak, 0)
    blocks = tl.arange(0, 2**DEPTH)
    is_block = blocks < num_blocks
    chunk_peak = _load(row_peaks + blocks // BLOCKS, is_block, -float("inf"))
    block_sum = tl.load(sums + row * num_blocks + blocks, mask=is_block, other=0.0)
    masses = (block_sum * tl.exp(chunk_peak - highest)).to(tl.float64)
    total = tl.sum(masses, 0)

    # Draw a block, then a token inside the block. `first` is the block's first token.
    first = _choose(masses, blocks, row_uniforms, DEPTH) * 2**DEPTH_INSIDE
    inside = tl.arange(0, 2**DEPTH_INSIDE)
    is_token = first + inside < num_tokens
    z = _load(row_logits + first + inside, is_token, -float("inf"))
    odds = tl.exp(z / row_temperature - highest).to(tl.float64)
    token = first + _choose(odds, inside, row_uniforms + DEPTH, DEPTH_INSIDE)
    # Rounding, or logits that are not finite, must not lead to an address behind the logits.
    token = tl.minimum(token, num_tokens - 1)

    if HAS_GREEDY:
        is_likeliest = (chunks < num_chunks) & (peak == highest)
        line = row * num_chunks + chunks
        at_peak = tl.load(likeliest + line, mask=is_likeliest, other=num_tokens)
        greedy_token = tl.minimum(tl.min(at_peak, 0), num_tokens - 1)
        token = tl.where(tl.load(is_greedy + row), greedy_token, token)
    chosen = tl.exp(tl.load(row_logits + token) / row_temperature - highest).to(tl.float64)
    # Round to float32 as the sampler does. The result is float64 to hold the token exactly, too.
    log_prob = tl.log(chosen / total).to(tl.float32).to(tl.float64)
    tl.store(result + row * 3, token.to(tl.float64))
    tl.store(result + row * 3 + 1, log_prob)
    if HAS_GREEDY:
        # In a greedy row no other token could be drawn: the probability is 1.
        log_prob = tl.where(tl.load(is_greedy + row), 0.0, log_prob)
    tl.store(result + row * 3 + 2, log_prob)


class TritonKernels:
    """Norms, rotary positions, gates and attention on CUDA in half precision.

    The methods are those of `Kernels`, except for matrix products.
    """

    @staticmethod
    def can_attend(head_size: int) -> bool:
        """Whether `attend` accepts heads of this size."""
        return head_size % 2 == 0 and head_size <= _MAX_HEAD_SIZE

    def normalize(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Compute the root-mean-square norm over the last dimension, times `weight`.

        Args:
            states: [..., D].
            weight: [D].
            epsilon: added to the mean square.

        Returns:
            [..., D].
        """
        return self._normalize(states.contiguous(), None, weight, epsilon)

    def add_and_normalize(
        self, states: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """Add two tensors, and compute the root-mean-square norm of the sum, times `weight`.

        Args:
            states: [..., D].
            added: [..., D]. The sum overwrites it if it is contiguous.
            weight: [D].
            epsilon: added to the mean square.

        Returns:
            The sum and its norm, [..., D] each.
        """
        added = added.contiguous()
        return added, self._normalize(states.contiguous(), added, weight, epsilon)

    def _normalize(
        self, states: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
    ) -> Tensor:
        """Compute the norm of `states`, or of the sum of `states` and `added`.

        The sum overwrites `added`.

        Args:
            states: [..., D], contiguous.
            added: [..., D], contiguous; None: there is nothing to add.
            weight: [D].
            epsilon: added to the mean square.
        """
        result = torch.empty_like(states)
        size = states.shape[-1]
        columns = triton.next_power_of_2(size)
        _normalize_kernel[(states.numel() // size,)](
            states,
            added,
            weight,
            result,
            epsilon,
            SIZE=size,
            HAS_ADDED=added is not None,
            COLUMNS=columns,
            # About 16 columns for each thread.
            num_warps=min(max(columns // 512, 1), 16),
        )
        return result

    def rotate(self, states: Tensor, num_rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Apply rotary positions to the first heads, in place.

        Args:
            states: [..., H, d], contiguous.
            num_rotated: number of heads to rotate.
            cos: [..., d], contiguous.
            sin: [..., d], contiguous.

        Returns:
            `states`.
        """
        assert states.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        num_heads, size = states.shape[-2:]
        num_rows = states.numel() // (num_heads * size)
        _rotate_kernel[(num_rows, triton.cdiv(num_rotated, _HEADS))](
            states,
            cos,
            sin,
            num_rotated,
            num_heads * size,
            SIZE=size,
            HEADS=_HEADS,
            COLUMNS=triton.next_power_of_2(size // 2),
            num_warps=4,
        )
        return states

    def gate(self, states: Tensor) -> Tensor:
        """silu(gate) * up: [..., 2 * F], gate first -> [..., F]."""
        states = states.contiguous()
        width = states.shape[-1] // 2
        result = states.new_empty(*states.shape[:-1], width)
        grid = (result.numel() // width, triton.cdiv(width, _WIDTH))
        _gate_kernel[grid](states, result, width, COLUMNS=_WIDTH, num_warps=4)
        return result

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        responses: KeysAndValues,
        prefixes: KeysAndValues,
        places: SlotPlaces,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Compute attention of one new token per row over the row's prefix and response.

        The new token's key and value are also written to `responses`, where row r is slot r. All tensors
        have the dtype of the cache.

        Args:
            query: [R, H, d].
            key: [R, K, d].
            value: [R, K, d].
            scale: factor of the scores.
            responses: KV cache of the responses.
            prefixes: KV cache of the prefixes.
            places: where the tokens of each row are.
            options: window, softcap and sinks of the layer.

        Returns:
            [R, H, d].
        """
        num_rows, num_heads, size = query.shape
        num_keys = key.shape[1]
        # The kernel takes a stride between rows, so views of a joint projection need no copy.
        query = with_contiguous_rows(query)
        key = with_contiguous_rows(key)
        value = with_contiguous_rows(value)

        # With few rows, cut the keys of each row into parts, so that enough programs occupy the
        # GPU. Tensors in Triton need a power of two, so the number is rounded up to one.
        prefix_room = prefixes.keys.shape[2]
        own_room = responses.keys.shape[2]
        num_tiles = triton.cdiv(prefix_room + own_room, _TOKENS)
        num_parts = min(_NUM_PROGRAMS // (num_rows * num_keys), num_tiles, _MAX_PARTS)
        parts = triton.next_power_of_2(max(num_parts, 1))
        result = query.new_empty(num_rows, num_heads, size)
        sums = query.new_empty(num_rows, num_heads, parts, dtype=torch.float32)
        # Parts are combined in float32.
        mixed = result
        if parts > 1:
            mixed = sums.new_empty(num_rows, num_heads, parts, size)

        sinks = options.sinks
        if sinks is not None:
            sinks = sinks.detach().float().contiguous()
        group = num_heads // num_keys
        shape = {
            "SIZE": size,
            "PARTS": parts,
            "HAS_SINKS": sinks is not None,
            "COLUMNS": max(triton.next_power_of_2(size), 16),
        }
        _attention_kernel[(num_rows, num_keys, parts)](
            query,
            key,
            value,
            *responses,
            *prefixes,
            *places,
            sinks,
            mixed,
            sums,
            query.stride(0),
            key.stride(0),
            value.stride(0),
            prefix_room,
            own_room,
            options.window or 0,
            scale,
            options.softcap or 1.0,
            NUM_KEYS=num_keys,
            GROUP=group,
            HAS_WINDOW=options.window is not None,
            HAS_CAP=options.softcap is not None,
            QUERIES=max(triton.next_power_of_2(group), 16),
            TOKENS=_TOKENS,
            **shape,
            num_warps=4,
            num_stages=2,
        )
        if parts > 1:
            grid = (num_rows * num_heads,)
            _combine_kernel[grid](mixed, sums, sinks, result, NUM_HEADS=num_heads, **shape)
        return result


def draw(
    logits: Tensor, temperature: Tensor | None, is_greedy: Tensor | None, uniforms: Tensor
) -> Tensor:
    """Sample a token per row, as `quadriga.rollout.sampler.sample` without top-k, top-p and min-p.

    Args:
        logits: [R, V] float32; not overwritten.
        temperature: [R, 1] float32; None: 1.
        is_greedy: [R] bool, whether a row takes its likeliest token; None: no row does.
        uniforms: [R, NUM_DRAWS] float64 in [0, 1).

    Returns:
        [R, 3] float64: the token, its log-probability, and its log-probability among the tokens
        that could be drawn.
    """
    logits = logits.contiguous()
    uniforms = uniforms.contiguous()
    num_rows, num_tokens = logits.shape
    num_blocks = triton.cdiv(num_tokens, _BLOCK)
    num_chunks = triton.cdiv(num_tokens, _BLOCK * _BLOCKS)
    peaks = logits.new_empty(num_rows, num_chunks)
    sums = logits.new_empty(num_rows, num_blocks)
    likeliest = logits.new_empty(num_rows, num_chunks, dtype=torch.int32)
    result = logits.new_empty(num_rows, 3, dtype=torch.float64)
    has_temperature = temperature is not None
    _summarize_kernel[(num_rows, num_chunks)](
        logits,
        temperature,
        peaks,
        likeliest,
        sums,
        num_tokens,
        num_blocks,
        HAS_TEMPERATURE=has_temperature,
        BLOCKS=_BLOCKS,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _draw_kernel[(num_rows,)](
        logits,
        temperature,
        peaks,
        likeliest,
        sums,
        uniforms,
        is_greedy,
        result,
        num_tokens,
        num_blocks,
        num_chunks,
        uniforms.shape[1],
        HAS_TEMPERATURE=has_temperature,
        HAS_GREEDY=is_greedy is not None,
        DEPTH=(num_blocks - 1).bit_length(),
        DEPTH_INSIDE=_BLOCK.bit_length() - 1,
        CHUNKS=triton.next_power_of_2(num_chunks),
        BLOCKS=_BLOCKS,
        num_warps=4,
    )
    return result
