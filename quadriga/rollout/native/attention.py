# SPDX-License-Identifier: Apache-2.0
"""The two attention plans of generation: over packed prompts, and over one new token of each row.

A row sees its prompt, whose keys and values it shares with the other rows of that prompt, and the tokens of its own
answer. Scores against both are put side by side under one softmax. For the prompt the queries of all its rows are
folded into one matrix, so its keys are read once for all of them and never copied.

Legend: P prompts, S longest prompt, R rows, n rows of the largest group, t answer tokens so far, H query heads,
K key-value heads, G = H / K, D head size, N packed tokens.
"""

from collections.abc import Sequence

import torch

from quadriga.models.packed_attention import PackedAttention, Segment
from quadriga.rollout.native.cache import AnswerCache, PromptCache

_HIDDEN = torch.finfo(torch.float32).min


class PrefillPlan:
    """Causal attention over packed prompts; their keys and values go into a cache on the way.

    Args:
        cache: takes the keys and values.
        places: of the prompts in the cache, in the order in which they are packed.
    """

    def __init__(self, cache: PromptCache, places: slice, device: torch.device) -> None:
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
    """Rows by the prompt that they share.

    Args:
        places: of each row's prompt in the prompt cache; every one of `num_prompts` has a row.
    """

    def __init__(self, places: Sequence[int], num_prompts: int, device: torch.device) -> None:
        members: list[list[int]] = [[] for _ in range(num_prompts)]
        for row, place in enumerate(places):
            members[place].append(row)
        self.num_prompts, self.width = num_prompts, max(len(group) for group in members)
        grid = [row for group in members for row in group + group[:1] * (self.width - len(group))]
        self.is_even = grid == list(range(len(places)))
        cells: dict[int, int] = {}
        for cell, row in enumerate(grid):
            cells.setdefault(row, cell)
        self.row_of_cell = torch.tensor(grid, device=device)
        self.cell_of_row = torch.tensor([cells[row] for row in range(len(places))], device=device)

    def fold(self, rows: torch.Tensor) -> torch.Tensor:
        """[R, K, G, X] -> [P, K, n * G, X]; a cell without a row repeats another one."""
        cells = rows if self.is_even else rows.index_select(0, self.row_of_cell)
        return cells.unflatten(0, (self.num_prompts, self.width)).transpose(1, 2).flatten(2, 3)

    def unfold(self, folded: torch.Tensor) -> torch.Tensor:
        """[P, K, n * G, X] -> [R, K, G, X]"""
        cells = folded.unflatten(2, (self.width, -1)).transpose(1, 2).flatten(0, 1)
        return cells if self.is_even else cells.index_select(0, self.cell_of_row)


class DecodePlan:
    """Attention of one new token per row. It lasts as long as the rows of the batch stay what they are.

    Args:
        prompts, answers: the caches; the answers' is written to.
        places: of each row's prompt in the prompt cache.
    """

    def __init__(self, prompts: PromptCache, answers: AnswerCache, places: Sequence[int], device: torch.device) -> None:
        self.prompts, self.answers, self.device = prompts, answers, device
        self.groups = Groups(places, len(prompts.prompts), device)
        self.prompt_lengths = [prompts.lengths[place] for place in places]
        self.prompt_mask: torch.Tensor | None = None
        if min(prompts.lengths) < prompts.width:
            self.prompt_mask = self._mask(self.prompt_lengths, prompts.width)
        self.mask: torch.Tensor | None = None

    def start_step(self, written: Sequence[int], limit: int) -> torch.Tensor:
        """Prepares a step in which row r writes its answer token number `written[r]`; returns positions [R, 1]."""
        self.answers.start_step(written, limit, self.device)
        width = self.prompts.width
        is_level = min(written) == max(written)
        if is_level and self.prompt_mask is None:
            self.mask = None
        else:
            own = self._mask([length + 1 for length in written], max(written) + 1)
            before = own.new_zeros(len(written), 1, 1, width) if self.prompt_mask is None else self.prompt_mask
            self.mask = torch.cat((before, own), -1)  # [R, 1, 1, S + t] added to the scores
        positions = [length + count for length, count in zip(self.prompt_lengths, written, strict=True)]
        return torch.tensor(positions, device=self.device)[:, None]

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """See `AttentionPlan.attend`; here B is R and N is 1."""
        num_rows, num_heads, _, head_size = query.shape
        own_keys, own_values = self.answers.write(layer, key, value)
        prompt_keys, prompt_values = self.prompts.keys[layer], self.prompts.values[layer]
        query = query.to(own_keys.dtype).view(num_rows, key.shape[1], -1, head_size)
        before = self.groups.unfold(_scores(self.groups.fold(query), prompt_keys))
        scores = torch.cat((before, _scores(query, own_keys)), -1).mul_(scale)  # [R, K, G, S + t]
        if self.mask is not None:
            scores += self.mask
        weights = scores.softmax(-1).to(own_values.dtype)
        width = self.prompts.width
        mixed = self.groups.unfold(self.groups.fold(weights[..., :width]) @ prompt_values)
        mixed = mixed + weights[..., width:] @ own_values
        return mixed.reshape(num_rows, 1, num_heads, head_size).to(value.dtype)

    def _mask(self, lengths: Sequence[int], width: int) -> torch.Tensor:
        """[R, 1, 1, width] float32: 0 for the first tokens of each row, as many as it has, then as good as -inf."""
        is_hidden = torch.arange(width, device=self.device) >= torch.tensor(lengths, device=self.device)[:, None]
        return torch.zeros(is_hidden.shape, device=self.device).masked_fill_(is_hidden, _HIDDEN)[:, None, None]


def _scores(query: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """[A, K, Q, D] and [A, K, X, D] -> [A, K, Q, X] float32"""
    if query.dtype == torch.float32:
        return query @ keys.transpose(-1, -2)
    if query.is_cuda:
        flat = torch.bmm(query.flatten(0, 1), keys.flatten(0, 1).transpose(-1, -2), out_dtype=torch.float32)
        return flat.unflatten(0, query.shape[:2])
    return (query @ keys.transpose(-1, -2)).float()
