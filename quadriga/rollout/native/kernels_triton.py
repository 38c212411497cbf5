# SPDX-License-Identifier: Apache-2.0
"""What a decode step on CUDA computes beside products, in half precision: Triton kernels.

A layer is then about twelve kernels, where torch's operators are seventy: products, a norm with the sum before it
(twice), rotary positions, attention, a gate. They round to half precision where torch's operators do.

Attention is computed by a program for each row, key-value head and part of the keys: first over the keys of its
prefix, then over its own (online softmax, arXiv:1805.02867). How many there are is read from the device, so a CUDA
graph goes as far as each row does. Few rows are cut into parts, which a second kernel puts together (flash-decoding).

A token is drawn as by `quadriga.rollout.sampler`, whose numbers and halvings these are: one pass over the logits
leaves a maximum of each chunk and a sum of each block; then a program for each row descends among the blocks, and in
one of them.

Legend: R rows, D hidden size, F width of the MLP, H query heads, K key-value heads, G = H / K, d head size, S parts,
V vocabulary.
"""

import torch
import triton  # pyrefly: ignore[missing-import]
import triton.language as tl  # pyrefly: ignore[missing-import]
from torch import Tensor

from quadriga.models.attention import PLAIN, AttentionOptions
from quadriga.rollout.native.kernels import KeysAndValues, SlotPlaces

_NOTHING = tl.constexpr(-1e30)  # a maximum before the first number: finite, so that differences are
_TOKENS = 64  # of a tile of keys
_NUM_PROGRAMS = 512  # of attention, or the keys of a row are cut into parts
_MAX_PARTS = 64
_MAX_HEAD_SIZE = 256
_HEADS = 8  # that one program turns
_WIDTH = 1024  # of an MLP, for one program
_BLOCK = 256  # tokens of a block, as in `quadriga.rollout.sampler`
_BLOCKS = 16  # of a chunk


@triton.jit
def _normalize_kernel(
    states, added, weight, result, epsilon, SIZE: tl.constexpr, HAS_ADDED: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    exists = columns < SIZE
    narrow: tl.constexpr = result.dtype.element_ty
    x = tl.load(states + row * SIZE + columns, mask=exists, other=0.0).to(tl.float32)
    if HAS_ADDED:
        x += tl.load(added + row * SIZE + columns, mask=exists, other=0.0).to(tl.float32)
        tl.store(added + row * SIZE + columns, x.to(narrow), mask=exists)
        x = x.to(narrow).to(tl.float32)
    normed = (x * tl.rsqrt(tl.sum(x * x, 0) / SIZE + epsilon)).to(narrow).to(tl.float32)
    factors = tl.load(weight + columns, mask=exists, other=0.0).to(tl.float32)
    tl.store(result + row * SIZE + columns, (normed * factors).to(narrow), mask=exists)


@triton.jit
def _rotate_kernel(
    states, cos, sin, num_turned, stride, SIZE: tl.constexpr, HEADS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    row, columns = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    heads = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    half: tl.constexpr = SIZE // 2
    narrow: tl.constexpr = states.dtype.element_ty
    at = states + row * stride + heads[:, None] * SIZE + columns[None, :]
    is_column = columns < half
    exists = (heads[:, None] < num_turned) & is_column[None, :]
    first = tl.load(at, mask=exists, other=0.0).to(tl.float32)
    second = tl.load(at + half, mask=exists, other=0.0).to(tl.float32)
    here = row * SIZE + columns
    first_cos = tl.load(cos + here, mask=is_column, other=0.0).to(tl.float32)[None, :]
    second_cos = tl.load(cos + here + half, mask=is_column, other=0.0).to(tl.float32)[None, :]
    first_sin = tl.load(sin + here, mask=is_column, other=0.0).to(tl.float32)[None, :]
    second_sin = tl.load(sin + here + half, mask=is_column, other=0.0).to(tl.float32)[None, :]
    left = (first * first_cos).to(narrow).to(tl.float32) - (second * first_sin).to(narrow).to(
        tl.float32
    )
    right = (second * second_cos).to(narrow).to(tl.float32) + (first * second_sin).to(narrow).to(
        tl.float32
    )
    tl.store(at, left.to(narrow), mask=exists)
    tl.store(at + half, right.to(narrow), mask=exists)


@triton.jit
def _gate_kernel(states, result, width, COLUMNS: tl.constexpr):
    row, columns = tl.program_id(0).to(tl.int64), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    exists = columns < width
    narrow: tl.constexpr = result.dtype.element_ty
    gate = tl.load(states + row * 2 * width + columns, mask=exists, other=0.0).to(tl.float32)
    up = tl.load(states + row * 2 * width + width + columns, mask=exists, other=0.0).to(tl.float32)
    opened = (gate / (1 + tl.exp(-gate))).to(narrow).to(tl.float32)
    tl.store(result + row * width + columns, (opened * up).to(narrow), mask=exists)


@triton.jit
def _attend(
    query, keys, values, peak, total, mixed, start, stop, scale, softcap,
    SIZE: tl.constexpr, HAS_CAP: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    """Online softmax goes on over the keys from `start` up to `stop`: maxima and sums [G], and what they mix [G, d]."""
    columns = tl.arange(0, COLUMNS)
    for first in range(start, stop, TOKENS):
        tokens = first + tl.arange(0, TOKENS)
        exists = tokens < stop
        at, inside = (
            tokens[:, None] * SIZE + columns[None, :],
            exists[:, None] & (columns[None, :] < SIZE),
        )
        key = tl.load(keys + at, mask=inside, other=0.0)
        scores = tl.dot(query, tl.trans(key)) * scale
        if HAS_CAP:
            scores = (2 * tl.sigmoid(2 * scores / softcap) - 1) * softcap
        scores = tl.where(exists[None, :], scores, -float("inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        shrink = tl.exp(peak - higher)
        odds = tl.exp(scores - higher[:, None])
        total = shrink * total + tl.sum(odds, 1)
        value = tl.load(values + at, mask=inside, other=0.0)
        mixed = tl.dot(odds.to(value.dtype), value, shrink[:, None] * mixed)
        peak = higher
    return peak, total, mixed


@triton.jit(do_not_specialize=("prefix_room", "own_room", "window"))
def _attention_kernel(
    query, key, value, own_keys, own_values, shared_keys, shared_values, prefix_of, prefix_length, num_written, sinks,
    result, sums, query_stride, key_stride, value_stride, prefix_room, own_room, window, scale, softcap,
    NUM_KEYS: tl.constexpr, GROUP: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr, HAS_WINDOW: tl.constexpr,
    HAS_CAP: tl.constexpr, HAS_SINKS: tl.constexpr, QUERIES: tl.constexpr, COLUMNS: tl.constexpr, TOKENS: tl.constexpr,
):  # fmt: skip
    row, head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    queries, columns = tl.arange(0, QUERIES), tl.arange(0, COLUMNS)
    heads, is_column = head * GROUP + queries, columns < SIZE
    inside = (queries < GROUP)[:, None] & is_column[None, :]
    q = tl.load(
        query + row * query_stride + heads[:, None] * SIZE + columns[None, :],
        mask=inside,
        other=0.0,
    )
    written, length = tl.load(num_written + row), tl.load(prefix_length + row)
    end = length + written  # tokens before the new one
    begin = end * 0
    if HAS_WINDOW:
        begin = tl.maximum(end + 1 - window, 0)
    share = (end - begin + PARTS * TOKENS - 1) // (PARTS * TOKENS) * TOKENS
    start = begin + part * share
    stop = tl.minimum(start + share, end)

    own = (row * NUM_KEYS + head) * own_room * SIZE
    peak = tl.full((QUERIES,), _NOTHING, dtype=tl.float32)
    total = tl.zeros((QUERIES,), dtype=tl.float32)
    mixed = tl.zeros((QUERIES, COLUMNS), dtype=tl.float32)
    if part == 0:  # the new token, which no program reads from the cache
        new_key = tl.load(key + row * key_stride + head * SIZE + columns, mask=is_column, other=0.0)
        new_value = tl.load(
            value + row * value_stride + head * SIZE + columns, mask=is_column, other=0.0
        )
        tl.store(own_keys + own + written * SIZE + columns, new_key, mask=is_column)
        tl.store(own_values + own + written * SIZE + columns, new_value, mask=is_column)
        peak = tl.sum(q.to(tl.float32) * new_key.to(tl.float32)[None, :], 1) * scale
        if HAS_CAP:
            peak = (2 * tl.sigmoid(2 * peak / softcap) - 1) * softcap
        total += 1.0
        mixed += new_value.to(tl.float32)[None, :]
    shared = (tl.load(prefix_of + row) * NUM_KEYS + head) * prefix_room * SIZE
    peak, total, mixed = _attend(
        q, shared_keys + shared, shared_values + shared, peak, total, mixed, start, tl.minimum(stop, length), scale,
        softcap, SIZE, HAS_CAP, COLUMNS, TOKENS,
    )  # fmt: skip
    peak, total, mixed = _attend(
        q, own_keys + own, own_values + own, peak, total, mixed, tl.maximum(start - length, 0), stop - length, scale,
        softcap, SIZE, HAS_CAP, COLUMNS, TOKENS,
    )  # fmt: skip

    if PARTS == 1:
        if HAS_SINKS:
            total += tl.exp(tl.load(sinks + heads, mask=queries < GROUP, other=0.0) - peak)
        to = result + (row * NUM_KEYS * GROUP + heads[:, None]) * SIZE + columns[None, :]
        tl.store(to, (mixed / total[:, None]).to(result.dtype.element_ty), mask=inside)
    else:
        line = (row * NUM_KEYS * GROUP + heads) * PARTS + part
        tl.store(
            result + line[:, None] * SIZE + columns[None, :],
            mixed / tl.maximum(total, 1e-30)[:, None],
            inside,
        )
        tl.store(
            sums + line, tl.where(total > 0, peak + tl.log(total), _NOTHING), mask=queries < GROUP
        )


@triton.jit
def _combine_kernel(
    parts, sums, sinks, result, NUM_HEADS: tl.constexpr, SIZE: tl.constexpr, PARTS: tl.constexpr,
    HAS_SINKS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    line, columns = tl.program_id(0).to(tl.int64), tl.arange(0, COLUMNS)
    of_part = line * PARTS + tl.arange(0, PARTS)
    logs = tl.load(sums + of_part)
    peak = tl.max(logs, 0)
    if HAS_SINKS:
        peak = tl.maximum(peak, tl.load(sinks + line % NUM_HEADS))
    shares = tl.exp(logs - peak)
    total = tl.sum(shares, 0)
    if HAS_SINKS:
        total += tl.exp(tl.load(sinks + line % NUM_HEADS) - peak)
    is_column = columns < SIZE
    mixed = tl.load(
        parts + of_part[:, None] * SIZE + columns[None, :], mask=is_column[None, :], other=0.0
    )
    found = tl.sum(mixed * shares[:, None], 0) / total
    tl.store(result + line * SIZE + columns, found.to(result.dtype.element_ty), mask=is_column)


@triton.jit
def _weigh_kernel(
    logits, temperature, peaks, likeliest, sums, num_tokens, num_blocks, HAS_TEMPERATURE: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)
    blocks = chunk * BLOCKS + tl.arange(0, BLOCKS)
    tokens = blocks[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    z = tl.load(logits + row * num_tokens + tokens, mask=tokens < num_tokens, other=-float("inf"))
    highest = tl.max(tl.max(z, 1), 0)
    first = tl.min(tl.min(tl.where(z == highest, tokens, num_tokens), 1), 0)
    if HAS_TEMPERATURE:
        heat = tl.load(temperature + row)
        z, highest = z / heat, highest / heat
    total = tl.sum(tl.exp(z - highest), 1)
    tl.store(sums + row * num_blocks + blocks, total, mask=blocks < num_blocks)
    line = row * tl.num_programs(1) + chunk
    tl.store(peaks + line, highest)
    tl.store(likeliest + line, first)


@triton.jit
def _choose(masses, entries, uniforms, DEPTH: tl.constexpr):
    """The entry of `masses` [2**DEPTH] float64 that so many halvings lead to."""
    entry = tl.sum(entries * 0, 0)
    for step in tl.static_range(DEPTH):
        here = entries % (2 * 2**step)
        lower = tl.sum(tl.where(here == entry, masses, 0.0), 0)
        both = lower + tl.sum(tl.where(here == entry + 2**step, masses, 0.0), 0)
        entry += tl.where(tl.load(uniforms + step) * both >= lower, 2**step, 0)
    return entry


@triton.jit
def _draw_kernel(
    logits, temperature, peaks, likeliest, sums, uniforms, is_greedy, result, num_tokens, num_blocks, num_chunks,
    uniforms_stride, HAS_TEMPERATURE: tl.constexpr, HAS_GREEDY: tl.constexpr, DEPTH: tl.constexpr,
    DEPTH_INSIDE: tl.constexpr, CHUNKS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    chunks, blocks, inside = (
        tl.arange(0, CHUNKS),
        tl.arange(0, 2**DEPTH),
        tl.arange(0, 2**DEPTH_INSIDE),
    )
    peak = tl.load(peaks + row * num_chunks + chunks, mask=chunks < num_chunks, other=-float("inf"))
    highest = tl.max(peak, 0)
    is_block = blocks < num_blocks
    of_chunk = tl.load(
        peaks + row * num_chunks + blocks // BLOCKS, mask=is_block, other=-float("inf")
    )
    mass = tl.load(sums + row * num_blocks + blocks, mask=is_block, other=0.0) * tl.exp(
        of_chunk - highest
    )
    masses = mass.to(tl.float64)
    total = tl.sum(masses, 0)
    own_uniforms = uniforms + row * uniforms_stride
    first = _choose(masses, blocks, own_uniforms, DEPTH) * 2**DEPTH_INSIDE
    heat = 1.0
    if HAS_TEMPERATURE:
        heat = tl.load(temperature + row)
    z = tl.load(
        logits + row * num_tokens + first + inside,
        mask=first + inside < num_tokens,
        other=-float("inf"),
    )
    odds = tl.exp(z / heat - highest).to(tl.float64)
    token = tl.minimum(
        first + _choose(odds, inside, own_uniforms + DEPTH, DEPTH_INSIDE), num_tokens - 1
    )
    if HAS_GREEDY:
        is_likeliest = (chunks < num_chunks) & (peak == highest)
        at_peak = tl.load(
            likeliest + row * num_chunks + chunks, mask=is_likeliest, other=num_tokens
        )
        token = tl.where(
            tl.load(is_greedy + row), tl.minimum(tl.min(at_peak, 0), num_tokens - 1), token
        )
    chosen = tl.exp(tl.load(logits + row * num_tokens + token) / heat - highest).to(tl.float64)
    log_prob = tl.log(chosen / total).to(tl.float32).to(tl.float64)
    tl.store(result + row * 3, token.to(tl.float64))
    tl.store(result + row * 3 + 1, log_prob)
    if HAS_GREEDY:
        log_prob = tl.where(tl.load(is_greedy + row), 0.0, log_prob)
    tl.store(result + row * 3 + 2, log_prob)


class TritonKernels:
    """Norms, rotary positions, gates and attention in half precision on CUDA; the methods are those of `Kernels`."""

    @staticmethod
    def can_attend(head_size: int) -> bool:
        """Whether `attend` takes heads of this size."""
        return head_size % 2 == 0 and head_size <= _MAX_HEAD_SIZE

    def normalize(self, states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        """Root-mean-square norm of [..., D] over the last dim, times `weight` [D]."""
        return self._normalize(states.contiguous(), None, weight, epsilon)

    def add_and_normalize(
        self, states: Tensor, added: Tensor, weight: Tensor, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """The sum of [..., D] and [..., D], which takes the memory of the second, and its norm."""
        added = added.contiguous()
        return added, self._normalize(states.contiguous(), added, weight, epsilon)

    def _normalize(
        self, states: Tensor, added: Tensor | None, weight: Tensor, epsilon: float
    ) -> Tensor:
        result, size = torch.empty_like(states), states.shape[-1]
        columns = triton.next_power_of_2(size)
        _normalize_kernel[(states.numel() // size,)](
            states, added, weight, result, epsilon, SIZE=size, HAS_ADDED=added is not None, COLUMNS=columns,
            num_warps=min(max(columns // 512, 1), 16),
        )  # fmt: skip
        return result

    def rotate(self, states: Tensor, num_turned: int, cos: Tensor, sin: Tensor) -> Tensor:
        """Rotary positions of the first `num_turned` heads of [..., H, d], contiguous, in place; returns the whole.
        `cos` and `sin` are [..., d]."""
        num_heads, size = states.shape[-2:]
        assert states.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()
        _rotate_kernel[(states.numel() // (num_heads * size), triton.cdiv(num_turned, _HEADS))](
            states, cos, sin, num_turned, num_heads * size, SIZE=size, HEADS=_HEADS,
            COLUMNS=triton.next_power_of_2(size // 2), num_warps=4,
        )  # fmt: skip
        return states

    def gate(self, states: Tensor) -> Tensor:
        """silu(gate) * up: [..., 2 * F], the gate first -> [..., F]."""
        states, width = states.contiguous(), states.shape[-1] // 2
        result = states.new_empty(*states.shape[:-1], width)
        _gate_kernel[(result.numel() // width, triton.cdiv(width, _WIDTH))](
            states, result, width, COLUMNS=_WIDTH, num_warps=4
        )
        return result

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        own: KeysAndValues,
        prefixes: KeysAndValues,
        places: SlotPlaces,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Attention of one token per row: `query` [R, H, d] -> the same shape. `key` and `value` [R, K, d] are first
        written to `own`, in which row r is in place r; all have the dtype of the cache."""
        query, key, value = (  # only their rows may lie apart
            states if states.stride()[1:] == (states.shape[2], 1) else states.contiguous()
            for states in (query, key, value)
        )
        (num_rows, num_heads, size), num_keys = query.shape, key.shape[1]
        room = prefixes.keys.shape[2] + own.keys.shape[2]
        wanted = min(_NUM_PROGRAMS // (num_rows * num_keys), triton.cdiv(room, _TOKENS), _MAX_PARTS)
        parts = triton.next_power_of_2(max(wanted, 1))
        result = query.new_empty(num_rows, num_heads, size)
        sums = query.new_empty(num_rows, num_heads, parts, dtype=torch.float32)
        mixed = result if parts == 1 else sums.new_empty(num_rows, num_heads, parts, size)
        sinks = None if options.sinks is None else options.sinks.detach().float().contiguous()
        columns = max(triton.next_power_of_2(size), 16)
        shape = {"SIZE": size, "PARTS": parts, "HAS_SINKS": sinks is not None, "COLUMNS": columns}
        _attention_kernel[(num_rows, num_keys, parts)](
            query, key, value, *own, *prefixes, *places, sinks, mixed, sums, query.stride(0), key.stride(0),
            value.stride(0), prefixes.keys.shape[2], own.keys.shape[2], options.window or 0, scale,
            options.softcap or 1.0, NUM_KEYS=num_keys, GROUP=num_heads // num_keys,
            HAS_WINDOW=options.window is not None, HAS_CAP=options.softcap is not None,
            QUERIES=max(triton.next_power_of_2(num_heads // num_keys), 16), TOKENS=_TOKENS, **shape, num_warps=4,
            num_stages=2,
        )  # fmt: skip
        if parts > 1:
            _combine_kernel[(num_rows * num_heads,)](
                mixed, sums, sinks, result, NUM_HEADS=num_heads, **shape
            )
        return result


def draw(
    logits: Tensor, temperature: Tensor | None, is_greedy: Tensor | None, uniforms: Tensor
) -> Tensor:
    """What `quadriga.rollout.sampler.sample` computes without top-k, top-p and min-p, [R, 3] float64: tokens, their
    log-probabilities, and those among what could come. `logits` [R, V] float32 are not overwritten; temperatures are
    [R, 1] float32, `is_greedy` [R] bool, `uniforms` [R, .] float64."""
    logits, uniforms = logits.contiguous(), uniforms.contiguous()
    num_rows, num_tokens = logits.shape
    num_blocks, num_chunks = (
        triton.cdiv(num_tokens, _BLOCK),
        triton.cdiv(num_tokens, _BLOCK * _BLOCKS),
    )
    peaks, sums = logits.new_empty(num_rows, num_chunks), logits.new_empty(num_rows, num_blocks)
    likeliest = logits.new_empty(num_rows, num_chunks, dtype=torch.int32)
    result = logits.new_empty(num_rows, 3, dtype=torch.float64)
    weighed = (logits, temperature, peaks, likeliest, sums)
    has_temperature = temperature is not None
    _weigh_kernel[(num_rows, num_chunks)](
        *weighed,
        num_tokens,
        num_blocks,
        HAS_TEMPERATURE=has_temperature,
        BLOCKS=_BLOCKS,
        BLOCK=_BLOCK,
        num_warps=8,
    )
    _draw_kernel[(num_rows,)](
        *weighed, uniforms, is_greedy, result, num_tokens, num_blocks, num_chunks, uniforms.shape[1],
        HAS_TEMPERATURE=has_temperature, HAS_GREEDY=is_greedy is not None, DEPTH=(num_blocks - 1).bit_length(),
        DEPTH_INSIDE=_BLOCK.bit_length() - 1, CHUNKS=triton.next_power_of_2(num_chunks), BLOCKS=_BLOCKS, num_warps=4,
    )  # fmt: skip
    return result
