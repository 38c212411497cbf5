# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a batch: those of each context once, those of each answer in rows that are written in place.

A *context* is what a row begins with: its prompt, or, after it had to give way to others, its prompt with the answer
so far. Rows with the same context share its keys and values.

On a CPU they are kept in float32 whatever the model computes in: the products of attention are then as exact as in
training, and no slower than in bfloat16. Elsewhere they are kept in the model's dtype.

Legend: P contexts, S longest context, R rows, C rows that there is memory for, T tokens of an answer that there is room
for, t tokens of the longest answer, K key-value heads, D head size.
"""

from collections.abc import Hashable, Sequence

import torch


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype in which the keys and values of a model in `dtype` are kept."""
    return torch.float32 if device.type == "cpu" else dtype


class ContextCache:
    """[P, K, S, D] keys and values for each layer, padded on the right, and the last hidden state of each context.

    Args:
        contexts: what stands for the context in each place.
        lengths: tokens of each context.
        next_positions: of the tokens that follow them; None: as many as there are tokens.
    """

    def __init__(
        self,
        contexts: Sequence[Hashable] = (),
        lengths: Sequence[int] = (),
        next_positions: Sequence[int] | None = None,
    ) -> None:
        self.contexts = list(contexts)
        self.lengths = list(lengths)
        self.next_positions = list(lengths if next_positions is None else next_positions)
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self.last_hidden: torch.Tensor | None = None  # [P, hidden size]

    @property
    def width(self) -> int:
        """S"""
        return max(self.lengths, default=0)

    def write(self, layer: int, places: slice, key: torch.Tensor, value: torch.Tensor) -> None:
        """`key` and `value` [p, K, S, D] of the contexts in these places."""
        if layer == len(self.keys):
            shape, dtype = (len(self.contexts), *key.shape[1:]), cache_dtype(value.dtype, value.device)
            self.keys.append(key.new_empty(shape, dtype=dtype))
            self.values.append(key.new_empty(shape, dtype=dtype))
        self.keys[layer][places] = key
        self.values[layer][places] = value

    def keep(self, places: Sequence[int]) -> None:
        """Drops all contexts but those in these places."""
        if list(places) == list(range(len(self.contexts))):
            return
        old_width = self.width
        self.contexts = [self.contexts[place] for place in places]
        self.lengths = [self.lengths[place] for place in places]
        self.next_positions = [self.next_positions[place] for place in places]
        if self.last_hidden is None:
            return
        index = torch.tensor(places, dtype=torch.long, device=self.last_hidden.device)
        self.last_hidden = self.last_hidden.index_select(0, index)
        for states in (self.keys, self.values):
            for layer, old in enumerate(states):
                kept = old if self.width == old_width else old[:, :, : self.width]
                states[layer] = kept.index_select(0, index)

    def extend(self, other: "ContextCache") -> None:
        """Takes over the contexts of `other`, which is empty afterwards."""
        if not self.contexts:
            self.contexts, self.lengths, self.next_positions = other.contexts, other.lengths, other.next_positions
            self.keys, self.values, self.last_hidden = other.keys, other.values, other.last_hidden
            return
        width = max(self.width, other.width)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, added in enumerate(theirs):
                mine[layer], theirs[layer] = _stack(mine[layer], added, width), added[:0]
        self.contexts, self.lengths = self.contexts + other.contexts, self.lengths + other.lengths
        self.next_positions = self.next_positions + other.next_positions
        self.last_hidden = torch.cat((self.last_hidden, other.last_hidden))


def _stack(first: torch.Tensor, second: torch.Tensor, width: int) -> torch.Tensor:
    """[P, K, S, D] and [Q, K, S', D] -> [P + Q, K, width, D]; the room on the right is zero."""
    joined = first.new_zeros(first.shape[0] + second.shape[0], first.shape[1], width, first.shape[3])
    joined[: first.shape[0], :, : first.shape[2]] = first
    joined[first.shape[0] :, :, : second.shape[2]] = second
    return joined


class AnswerCache:
    """[C, K, T, D] keys and values for each layer; the first R rows are in use.

    What was never written is zero, so that a weight of zero makes nothing of it.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.room = 0
        self.keys: list[torch.Tensor] = []
        self.values: list[torch.Tensor] = []
        self._places: torch.Tensor | None = None
        self._shape = (0, 0)

    def resize(self, capacity: int, room: int, num_rows: int, length: int) -> None:
        """Moves to memory for `capacity` rows of `room` tokens.

        Args:
            capacity: C, from here on.
            room: T, from here on.
            num_rows: rows in use, which keep what they hold.
            length: tokens of the longest of these.
        """
        if (capacity, room) == (self.capacity, self.room):
            return
        self.capacity, self.room = capacity, room
        for states in (self.keys, self.values):
            for layer, old in enumerate(states):
                new = old.new_zeros(capacity, old.shape[1], room, old.shape[3])
                new[:num_rows, :, :length] = old[:num_rows, :, :length]
                states[layer] = new

    def move(self, source: int, target: int, length: int) -> None:
        """Row `target` takes over the first `length` tokens of row `source`."""
        for states in (*self.keys, *self.values):
            states[target, :, :length] = states[source, :, :length]

    def start_step(self, written: Sequence[int], device: torch.device) -> None:
        """Says how many tokens each row holds, before the one that is written in this step."""
        self._shape = len(written), max(written) + 1
        self._written = torch.tensor(written, device=device)
        self._places = None

    def of_layer(self, layer: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole memory of one layer; what is to be written to it next is `like`, [R, K, ..., D]."""
        if layer == len(self.keys):
            shape = (self.capacity, like.shape[1], self.room, like.shape[-1])
            for states in (self.keys, self.values):
                states.append(like.new_zeros(shape, dtype=cache_dtype(like.dtype, like.device)))
        return self.keys[layer], self.values[layer]

    def write(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes one token per row, [R, K, 1, D]; returns all tokens so far, [R, K, t, D] views."""
        num_heads, head_size = key.shape[1], key.shape[3]
        keys, values = self.of_layer(layer, value)
        num_rows, length = self._shape
        if self._places is None:  # the line of each row and head, once for all layers
            lines = torch.arange(num_rows * num_heads, device=key.device).view(num_rows, num_heads)
            self._places = (lines * self.room + self._written[:, None]).flatten()
        keys.view(-1, head_size).index_copy_(0, self._places, key.reshape(-1, head_size).to(keys.dtype))
        values.view(-1, head_size).index_copy_(0, self._places, value.reshape(-1, head_size).to(values.dtype))
        return keys[:num_rows, :, :length], values[:num_rows, :, :length]
