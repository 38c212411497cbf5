# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a batch: those of each prompt once, those of each answer in rows that are written in place.

On a CPU they are kept in float32 whatever the model computes in: the products of attention are then as exact as in
training, and faster than in bfloat16. Elsewhere they are kept in the model's dtype.

Legend: P prompts, S longest prompt, R rows, T tokens of an answer that there is room for, K key-value heads, D head
size.
"""

from collections.abc import Hashable, Sequence

import torch

_FIRST_ROOM = 64


def cache_dtype(value: torch.Tensor) -> torch.dtype:
    """The dtype in which values such as `value`, and the keys that belong to them, are kept."""
    return torch.float32 if value.device.type == "cpu" else value.dtype


class PromptCache:
    """[P, K, S, D] keys and values for each layer, padded on the right, and the last hidden state of each prompt.

    Args:
        prompts: what stands for the prompt in each place.
        lengths: tokens of each prompt.
    """

    def __init__(self, prompts: Sequence[Hashable], lengths: Sequence[int]) -> None:
        self.prompts = list(prompts)
        self.lengths = list(lengths)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.last_hidden: torch.Tensor | None = None  # [P, hidden size]

    @property
    def width(self) -> int:
        """S"""
        return max(self.lengths, default=0)

    def write(self, layer: int, places: slice, key: torch.Tensor, value: torch.Tensor) -> None:
        """`key` and `value` [p, K, S, D] of the prompts in these places."""
        if layer == len(self.keys):
            shape, dtype = (len(self.prompts), *key.shape[1:]), cache_dtype(value)
            self.keys.append(key.new_empty(shape, dtype=dtype))
            self.values.append(key.new_empty(shape, dtype=dtype))
        self.keys[layer][places] = key
        self.values[layer][places] = value

    def keep(self, places: Sequence[int]) -> None:
        """Drops all prompts but those in these places."""
        if list(places) == list(range(len(self.prompts))):
            return
        old_width = self.width
        self.prompts = [self.prompts[place] for place in places]
        self.lengths = [self.lengths[place] for place in places]
        if self.last_hidden is None:
            return
        index = torch.tensor(places, dtype=torch.long, device=self.last_hidden.device)
        self.last_hidden = self.last_hidden.index_select(0, index)
        for states in (self.keys, self.values):
            for layer, old in enumerate(states):
                kept = old if self.width == old_width else old[:, :, : self.width]
                states[layer] = kept.index_select(0, index)

    def extend(self, other: "PromptCache") -> None:
        """Takes over the prompts of `other`, which is empty afterwards."""
        if not self.prompts:
            self.prompts, self.lengths = other.prompts, other.lengths
            self.keys, self.values, self.last_hidden = other.keys, other.values, other.last_hidden
            return
        width = max(self.width, other.width)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, added in enumerate(theirs):
                mine[layer], theirs[layer] = _stack(mine[layer], added, width), added[:0]
        self.prompts, self.lengths = self.prompts + other.prompts, self.lengths + other.lengths
        self.last_hidden = torch.cat((self.last_hidden, other.last_hidden))


def _stack(first: torch.Tensor, second: torch.Tensor, width: int) -> torch.Tensor:
    """[P, K, S, D] and [Q, K, S', D] -> [P + Q, K, width, D]; the room on the right is zero."""
    joined = first.new_zeros(first.shape[0] + second.shape[0], first.shape[1], width, first.shape[3])
    joined[: first.shape[0], :, : first.shape[2]] = first
    joined[first.shape[0] :, :, : second.shape[2]] = second
    return joined


class AnswerCache:
    """[R, K, T, D] keys and values for each layer. The room T grows by doubling, up to a limit.

    Room that was not written is zero, so that a weight of zero makes nothing of it.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self.room = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._at: int | tuple[torch.Tensor, torch.Tensor] = 0
        self._length = 0

    def rearrange(self, kept: Sequence[int], num_rows: int, length: int, limit: int) -> None:
        """A batch of `num_rows` that begins with the rows `kept`.

        Args:
            kept: rows whose keys and values go on.
            num_rows: R, from here on.
            length: tokens of the longest of the kept rows.
            limit: tokens that a row can come to hold.
        """
        self.num_rows = num_rows
        self.room = min(limit, max(_FIRST_ROOM, 2 * length))
        for states in (self.keys, self.values):
            for layer, old in enumerate(states):
                new = old.new_zeros(num_rows, old.shape[1], self.room, old.shape[3])
                if kept:
                    index = torch.tensor(kept, device=old.device)
                    new[: len(kept), :, :length] = old[:, :, :length].index_select(0, index)
                states[layer] = new

    def start_step(self, written: Sequence[int], limit: int, device: torch.device) -> None:
        """Says how many tokens each row holds, before the one that is written in this step."""
        longest = max(written)
        self._length = longest + 1
        if self._length > self.room:
            self.rearrange(range(self.num_rows), self.num_rows, longest, limit)
        if min(written) == longest:
            self._at = longest
        else:
            self._at = (torch.arange(self.num_rows, device=device), torch.tensor(written, device=device))

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one token per row, [R, K, 1, D]; returns all tokens so far, [R, K, t, D] views."""
        if layer == len(self.keys):
            shape, dtype = (self.num_rows, key.shape[1], self.room, key.shape[3]), cache_dtype(value)
            self.keys.append(key.new_zeros(shape, dtype=dtype))
            self.values.append(key.new_zeros(shape, dtype=dtype))
        keys, values = self.keys[layer], self.values[layer]
        if isinstance(self._at, int):
            keys[:, :, self._at] = key[:, :, 0]
            values[:, :, self._at] = value[:, :, 0]
        else:
            rows, places = self._at
            keys[rows, :, places] = key[:, :, 0].to(keys.dtype)
            values[rows, :, places] = value[:, :, 0].to(values.dtype)
        return keys[:, :, : self._length], values[:, :, : self._length]
