# SPDX-License-Identifier: Apache-2.0
"""The two attention plans of generation: over packed contexts, and over one new token of each row.

A row sees its context, whose keys and values it shares with the other rows of that context, and the tokens of its own
answer. Attention over either is computed apart, with the logarithm of its sum of exponentials, by which the two are put
together. For the context the queries of all its rows are folded into one matrix, so its keys are read once for all
of them and never copied. `CompiledPlan` goes through both in one pass, row by row.

Legend: P contexts, S longest context, R rows, n rows of the largest group, t answer tokens so far, H query heads,
K key-value heads, G = H / K, D head size, N packed tokens.
"""

from collections.abc import Sequence

import torch

from quadriga.models.packed_attention import PackedAttention, Segment
from quadriga.rollout.native.cache import AnswerCache, ContextCache
from quadriga.rollout.native.kernels import Kernels, KeysAndValues, RowPlaces, kernels

_HIDDEN = torch.finfo(torch.float32).min


class PrefillPlan:
    """Causal attention over packed contexts; their keys and values go into a cache on the way.

    Args:
        cache: takes the keys and values.
        places: of the contexts in the cache, in the order in which they are packed.
    """

    def __init__(self, cache: ContextCache, places: slice, device: torch.device) -> None:
        self.cache, self.places = cache, places
        starts, segments = 0, []
        for length in cache.lengths[places]:
            segments.append(Segment(starts, length))
            starts += length
        self.packed = PackedAttention(segments, device)
        columns = torch.arange(cache.width)
        rows = [segment.start + columns.clamp(max=segment.length - 1) for segment in segments]
        self.padded = torch.stack(rows).to(device)  # [p, S] packed token in each place, the last one repeated
        self.last = torch.tensor([segment.start + segment.length - 1 for segment in segments], device=device)

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`; here B is 1."""
        self.cache.write(layer, self.places, self._pad(key), self._pad(value))
        return self.packed.attend(layer, query, key, value, scale)

    def _pad(self, states: torch.Tensor) -> torch.Tensor:
        """[1, K, N, D] -> [p, K, S, D]"""
        return states[0].index_select(1, self.padded.flatten()).unflatten(1, self.padded.shape).transpose(0, 1)


class Groups:
    """Rows by the context that they share.

    Args:
        places: of each row's context in the context cache.
        num_contexts: P; one without a row is computed with row 0 and not looked at.
    """

    def __init__(self, places: Sequence[int], num_contexts: int, device: torch.device) -> None:
        members: list[list[int]] = [[] for _ in range(num_contexts)]
        for row, place in enumerate(places):
            members[place].append(row)
        self.num_contexts, self.width = num_contexts, max(len(group) for group in members)
        grid = [row for group in members for row in group + (group[:1] or [0]) * (self.width - len(group))]
        self.is_even = grid == list(range(len(places)))
        cells = [0] * len(places)
        for place, group in enumerate(members):
            for number, row in enumerate(group):
                cells[row] = place * self.width + number
        self.row_of_cell = torch.tensor(grid, device=device)
        self.cell_of_row = torch.tensor(cells, device=device)

    def fold(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, K, G, X] -> [P, K, n * G, X]; a cell without a row repeats another one."""
        cells = rows if self.is_even else rows.index_select(0, self.row_of_cell)
        return cells.unflatten(0, (self.num_contexts, self.width)).transpose(1, 2).flatten(2, 3)

    def unfold(self, folded: torch.Tensor) -> torch.Tensor:
        """[P, K, n * G, ...] -> [R, K, G, ...]"""
        cells = folded.unflatten(2, (self.width, -1)).transpose(1, 2).flatten(0, 1)
        return cells if self.is_even else cells.index_select(0, self.cell_of_row)


class DecodePlan:
    """Attention of one new token per row. It lasts as long as the rows of the batch stay what they are.

    Args:
        contexts, answers: the caches; the answers' is written to.
        places: of each row's context in the context cache.
    """

    def __init__(
        self, contexts: ContextCache, answers: AnswerCache, places: Sequence[int], device: torch.device
    ) -> None:
        self.contexts, self.answers, self.device = contexts, answers, device
        self.groups = Groups(places, len(contexts.contexts), device)
        self.first_positions = [contexts.next_positions[place] for place in places]
        self.context_mask = self._mask(contexts.lengths, contexts.width)
        self.mask: torch.Tensor | None = None

    def start_step(self, written: Sequence[int]) -> torch.Tensor:
        """Prepares a step in which row r writes its answer token number `written[r]`; returns positions [R, 1]."""
        self.answers.start_step(written, self.device)
        self.mask = self._mask([count + 1 for count in written], max(written) + 1)
        positions = [first + count for first, count in zip(self.first_positions, written, strict=True)]
        return torch.tensor(positions, device=self.device)[:, None]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`; here B is R and N is 1."""
        num_rows, num_heads, _, head_size = query.shape
        own_keys, own_values = self.answers.write(layer, key, value)
        context_keys, context_values = self.contexts.keys[layer], self.contexts.values[layer]
        query = query.to(own_keys.dtype).reshape(num_rows, key.shape[1], -1, head_size)
        before, before_sum = attend_part(
            self.groups.fold(query), context_keys, context_values, self.context_mask, scale
        )
        own, own_sum = attend_part(query, own_keys, own_values, self.mask, scale)
        share = torch.sigmoid(own_sum - self.groups.unfold(before_sum)).unsqueeze(-1)  # of the answer's own tokens
        mixed = torch.lerp(self.groups.unfold(before), own, share.to(own.dtype))
        return mixed.reshape(num_rows, 1, num_heads, head_size).to(value.dtype)

    def _mask(self, lengths: Sequence[int], width: int) -> torch.Tensor | None:
        """[A, 1, 1, width] float32: 0 for the first tokens of each, as many as it has, then as good as -inf."""
        if min(lengths) == width:
            return None
        is_hidden = torch.arange(width, device=self.device) >= torch.tensor(lengths, device=self.device)[:, None]
        return torch.zeros(is_hidden.shape, device=self.device).masked_fill_(is_hidden, _HIDDEN)[:, None, None]


class CompiledPlan:
    """What `DecodePlan` computes, by the loop that was compiled on this machine.

    Args:
        loops: that has it.
        contexts, answers, places: see `DecodePlan`.
    """

    def __init__(self, loops: Kernels, contexts: ContextCache, answers: AnswerCache, places: Sequence[int]) -> None:
        self.loops, self.contexts, self.answers = loops, contexts, answers
        self.first_positions = torch.tensor([contexts.next_positions[place] for place in places])
        lengths = [contexts.lengths[place] for place in places]
        assert max(contexts.lengths) == contexts.keys[0].shape[2] and len(contexts.lengths) == len(contexts.keys[0])
        self.places = RowPlaces(torch.tensor(places), torch.tensor(lengths), torch.zeros(len(places), dtype=torch.long))

    def start_step(self, written: Sequence[int]) -> torch.Tensor:
        """See `DecodePlan.start_step`."""
        assert len(written) <= self.answers.capacity and 0 <= min(written) <= max(written) < self.answers.room
        self.places = self.places._replace(num_written=torch.tensor(written))
        return (self.first_positions + self.places.num_written)[:, None]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`; here B is R and N is 1."""
        own = KeysAndValues(*self.answers.of_layer(layer, value))
        contexts = KeysAndValues(self.contexts.keys[layer], self.contexts.values[layer])
        is_half = {query.dtype, key.dtype, value.dtype} == {torch.bfloat16}
        dtype = torch.bfloat16 if is_half else torch.float32
        token = [states.squeeze(2).to(dtype) for states in (query, key, value)]
        mixed = self.loops.attend(token[0], token[1], token[2], scale, own, contexts, self.places)
        return mixed.unsqueeze(1).to(value.dtype)


def plan_decoding(
    contexts: ContextCache, answers: AnswerCache, places: Sequence[int], device: torch.device
) -> DecodePlan | CompiledPlan:
    """The fastest plan for these rows; see `DecodePlan`."""
    loops = kernels() if device.type == "cpu" else None
    if loops is not None and loops.can_attend(contexts.keys[0].shape[-1]):
        return CompiledPlan(loops, contexts, answers, places)
    return DecodePlan(contexts, answers, places, device)


def attend_part(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention over a part of the keys.

    Args:
        query: [A, K, Q, D]
        keys, values: [A, K, X, D]
        mask: [A, 1, 1, X] float32, added to the scores.
        scale: factor on the scores.

    Returns:
        [A, K, Q, D], and the logarithms of the sums of exponentials [A, K, Q] float32.
    """
    if query.device.type == "cpu" and query.dtype == torch.float32:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    scores = _scores(query, keys).mul_(scale)
    if mask is not None:
        scores += mask
    sums = scores.logsumexp(-1)
    return (scores - sums.unsqueeze(-1)).exp_().to(values.dtype) @ values, sums


def _scores(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[A, K, Q, D] and [A, K, X, D] -> [A, K, Q, X] float32"""
    if query.dtype == torch.float32:
        return query @ keys.transpose(-1, -2)
    if query.is_cuda:
        flat = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).transpose(-1, -2), out_dtype=torch.float32)
        return flat.unflatten(0, query.shape[:2])
    return (query @ keys.transpose(-1, -2)).float()
