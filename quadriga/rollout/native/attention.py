# SPDX-License-Identifier: Apache-2.0
"""The KV cache, and attention over it: prefill of packed prefixes, decode of one token per slot.

The KV cache has two parts: prefixes, each stored once for all slots that share it, and responses,
written in place. `DecodePlan` computes attention over each part separately, and combines the two
results by their log-sum-exps. The queries of all slots of a prefix form one matrix, so the prefix's
keys are read once and never copied. `CompiledPlan` does both parts in one pass, by the loops of
`Kernels` on a CPU and by `TritonKernels` in half precision on CUDA.

On a CPU the KV cache is float32 for every model: attention is then as exact as in training, and no
slower than in bfloat16. Elsewhere it has the model's dtype.

Legend: P prefixes, S longest prefix, R slots in use, C slots that there is memory for, n slots of
the largest group, T tokens of a response that there is room for, t tokens of the longest response,
H query heads, K key-value heads, G = H / K, D head size, N packed tokens.
"""

from collections.abc import Collection, Iterable, Sequence
from copy import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quadriga.models.attention import HIDDEN, PLAIN, AttentionOptions, PackedAttention, Segment
from quadriga.models.heads import HALF_DTYPES, HAS_TRITON, can_launch_triton
from quadriga.rollout.native.kernels import Kernels, KeysAndValues, SlotPlaces, kernels

if HAS_TRITON:
    from quadriga.rollout.native.kernels_triton import TritonKernels


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the KV cache.

    Args:
        dtype: dtype of the model.
        device: device of the cache.

    Returns:
        float32 on a CPU, else `dtype`.
    """
    return torch.float32 if device.type == "cpu" else dtype


class PrefixCache:
    """KV cache of prefixes: [P, K, S, D] for each layer, padded on the right.

    Args:
        prefixes: objects with a length in tokens, and with a `next_position` if that differs from
            the length.

    Attributes:
        keys: [P, K, S, D] of each layer; empty before the first prefill.
        values: [P, K, S, D] of each layer; empty before the first prefill.
        last_hidden: [P, hidden size], hidden state of the last token of each prefix; None before
            the first prefill.
    """

    def __init__(self, prefixes: Iterable[Any] = ()) -> None:
        self.prefixes = list(prefixes)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.last_hidden: Tensor | None = None

    @property
    def lengths(self) -> list[int]:
        """Number of tokens of each prefix; S is the largest."""
        return [len(prefix) for prefix in self.prefixes]

    @property
    def next_positions(self) -> list[int]:
        """Position of the token that follows each prefix."""
        return [getattr(prefix, "next_position", len(prefix)) for prefix in self.prefixes]

    def write(self, layer: int, places: slice, key: Tensor, value: Tensor) -> None:
        """Store a layer's KV cache of some prefixes.

        Args:
            layer: number of the layer. The first write to a layer allocates its memory.
            places: indices of the prefixes.
            key: [p, K, S, D].
            value: [p, K, S, D].
        """
        # Layers are written in order, so this one is new if it is the next of the lists.
        if layer == len(self.keys):
            shape = (len(self.prefixes), *key.shape[1:])
            dtype = cache_dtype(value.dtype, value.device)
            self.keys.append(key.new_empty(shape, dtype=dtype))
            self.values.append(key.new_empty(shape, dtype=dtype))
        self.keys[layer][places] = key
        self.values[layer][places] = value

    def keep(self, needed: Collection[Any]) -> None:
        """Drop all prefixes that are not in `needed`, which changes the indices of the others."""
        places = [place for place, prefix in enumerate(self.prefixes) if prefix in needed]
        # Usually all prefixes stay, and nothing has to be copied.
        if len(places) == len(self.prefixes):
            return
        self.prefixes = [self.prefixes[place] for place in places]
        if self.last_hidden is None:
            return
        index = torch.tensor(places, dtype=torch.long, device=self.last_hidden.device)
        self.last_hidden = self.last_hidden.index_select(0, index)
        # The longest prefix may be among the dropped ones.
        width = max(self.lengths, default=0)
        for states in (self.keys, self.values):
            for layer, old in enumerate(states):
                states[layer] = old[:, :, :width].index_select(0, index)

    def extend(self, other: "PrefixCache") -> None:
        """Append the prefixes of `other`, which loses its memory and must not be used again."""
        if not self.prefixes:
            self.prefixes = other.prefixes
            self.last_hidden = other.last_hidden
            self.keys = other.keys
            self.values = other.values
            return
        # All prefixes are padded to the longest one of both.
        width = max(self.lengths + other.lengths)
        _append_prefixes(self.keys, other.keys, width)
        _append_prefixes(self.values, other.values, width)
        self.prefixes = self.prefixes + other.prefixes
        self.last_hidden = torch.cat((self.last_hidden, other.last_hidden))


def _append_prefixes(states: list[Tensor], other_states: list[Tensor], width: int) -> None:
    """Append the keys, or the values, of a second prefix cache to those of a first one.

    Args:
        states: keys or values of the first cache, [P, K, S, D] for each layer. Each is replaced by
            the joined tensor, [P + p, K, width, D].
        other_states: the same of the second cache, [p, K, s, D] for each layer. They are emptied.
        width: length of the longest prefix of both caches.
    """
    for layer, added in enumerate(other_states):
        first = states[layer]
        num_first, num_heads, first_width, head_size = first.shape
        joined = first.new_zeros(num_first + len(added), num_heads, width, head_size)
        joined[:num_first, :, :first_width] = first
        joined[num_first:, :, : added.shape[2]] = added
        states[layer] = joined
        # Free the memory of this layer before the next layer is copied.
        other_states[layer] = added[:0]


class ResponseCache:
    """KV cache of responses: [C, K, T, D] for each layer.

    The first R slots are in use. Memory that was never written is zero and not NaN, because
    attention multiplies it with a weight of zero.

    Attributes:
        capacity: C.
        room: T.
        keys: [C, K, T, D] of each layer; empty before the first decode step.
        values: [C, K, T, D] of each layer; empty before the first decode step.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.room = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        # State of the current step.
        self._length = 0  # tokens of each slot that attention reads
        self._written = torch.empty(0)  # [R], tokens that each slot holds
        self._rows: Tensor | None = None  # where the new tokens go; computed by the first `write`

    def resize(self, capacity: int, room: int, num_slots: int, length: int) -> None:
        """Move the responses to memory of another size.

        Args:
            capacity: C, number of slots.
            room: T, tokens of each slot.
            num_slots: slots whose content is kept, counted from the first.
            length: tokens of each slot that are kept.
        """
        if (capacity, room) == (self.capacity, self.room):
            return
        self.capacity = capacity
        self.room = room
        # One layer at a time, so that only one layer needs both old and new memory.
        for states in (self.keys, self.values):
            for layer, old in enumerate(states):
                new = old.new_zeros(capacity, old.shape[1], room, old.shape[3])
                new[:num_slots, :, :length] = old[:num_slots, :, :length]
                states[layer] = new

    def move(self, source: int, target: int, length: int) -> None:
        """Copy the first tokens of one slot to another.

        Args:
            source: slot to copy from.
            target: slot to copy to.
            length: number of tokens.
        """
        for states in (*self.keys, *self.values):
            states[target, :, :length] = states[source, :, :length]

    def start_step(self, written: Tensor, length: int) -> None:
        """Begin a decode step.

        Args:
            written: [R] int64, tokens that each slot holds before the step.
            length: tokens of each slot that attention reads, the new one included.
        """
        self._length = length
        self._written = written
        self._rows = None

    def layer_memory(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """Return the memory of a layer, allocated on first use.

        Args:
            layer: number of the layer.
            like: [R, K, ..., D], a tensor that will be written to the memory, with its K, D, dtype
                and device.

        Returns:
            The keys and the values, [C, K, T, D] each.
        """
        if layer == len(self.keys):
            shape = (self.capacity, like.shape[1], self.room, like.shape[-1])
            dtype = cache_dtype(like.dtype, like.device)
            self.keys.append(like.new_zeros(shape, dtype=dtype))
            self.values.append(like.new_zeros(shape, dtype=dtype))
        return self.keys[layer], self.values[layer]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store one new token of each slot.

        Args:
            layer: number of the layer.
            key: [R, K, 1, D].
            value: [R, K, 1, D].

        Returns:
            The keys and the values of all tokens so far, views [R, K, t, D].
        """
        num_slots, num_heads, _, head_size = key.shape
        keys, values = self.layer_memory(layer, value)
        if self._rows is None:
            # Row of each slot's and head's new token in [C * K * T, D]. It is the same in all
            # layers of a step.
            heads = torch.arange(num_slots * num_heads, device=key.device)
            starts = heads.view(num_slots, num_heads) * self.room
            self._rows = (starts + self._written[:, None]).flatten()
        for states, new in ((keys, key), (values, value)):
            new_rows = new.reshape(-1, head_size).to(states.dtype)
            states.view(-1, head_size).index_copy_(0, self._rows, new_rows)
        return keys[:num_slots, :, : self._length], values[:num_slots, :, : self._length]


class PrefillPlan:
    """Causal attention over packed prefixes, which also fills the prefix cache.

    Args:
        cache: the prefix cache.
        places: indices of the prefixes that are packed, in order.
        device: device of the tokens.

    Attributes:
        padded_index: [p, S], packed index of the token in each place of the cache.
        last: [p], packed index of the last token of each prefix.
    """

    def __init__(self, cache: PrefixCache, places: slice, device: torch.device) -> None:
        self.cache = cache
        self.places = places
        segments = []
        start = 0
        for length in cache.lengths[places]:
            segments.append(Segment(start, length))
            start += length
        self.packed = PackedAttention(segments, device)

        columns = torch.arange(max(cache.lengths))
        # Padding repeats the last token of a prefix.
        rows = [segment.start + columns.clamp(max=segment.length - 1) for segment in segments]
        self.padded_index = torch.stack(rows).to(device)
        ends = [segment.start + segment.length - 1 for segment in segments]
        self.last = torch.tensor(ends, device=device)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Attention of the packed prefixes.

        Args:
            layer: number of the layer.
            query: [1, H, N, D].
            key: [1, K, N, D].
            value: [1, K, N, D].
            scale: factor of the scores.
            options: window, softcap and sinks of the layer.

        Returns:
            [1, N, H, D].
        """
        self.cache.write(layer, self.places, self._pad(key), self._pad(value))
        return self.packed.attend(layer, query, key, value, scale, options)

    def _pad(self, states: Tensor) -> Tensor:
        """Unpack tokens to one row per prefix: [1, K, N, D] -> [p, K, S, D]."""
        rows = states[0].index_select(1, self.padded_index.flatten())
        return rows.unflatten(1, self.padded_index.shape).transpose(0, 1)


class DecodePlan:
    """Attention of one new token per slot, by torch's operators.

    A plan is valid until a slot of the batch starts or ends. For attention over the prefixes, slots
    are arranged in a grid of cells [P, n], with a row for each prefix and a cell for each of its
    slots. A cell that is left over repeats another slot, and its result is not used.

    For graphs, see `copy_for_graph`, `fill_buffers` and `start_captured_step`.

    Args:
        prefixes: KV cache of the prefixes.
        responses: KV cache of the responses.
        places: index of each slot's prefix in `prefixes`.
        device: device of both caches.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        responses: ResponseCache,
        places: Sequence[int],
        device: torch.device,
    ) -> None:
        self.prefixes = prefixes
        self.responses = responses
        self.device = device
        self.places = places
        self.lengths = prefixes.lengths
        next_positions = prefixes.next_positions
        self.first_positions = [next_positions[place] for place in places]
        # Hides the padding of prefixes; None: there is none.
        self.prefix_mask = self._padding_mask(self.lengths, max(self.lengths))

        # State of the current step: mask that hides the padding of responses, response tokens of
        # each slot before the step, and masks of layers with a window, by its width.
        self.mask: Tensor | None = None
        self.written: Sequence[int] = ()
        self.window_masks: dict[int, tuple[Tensor, Tensor]] = {}

        self.slots_of_prefix: list[list[int]] = [[] for _ in self.lengths]
        for slot, place in enumerate(places):
            self.slots_of_prefix[place].append(slot)
        self.group_size = max(map(len, self.slots_of_prefix))
        slot_of_cell, cell_of_slot = self.cell_indices(self.group_size)
        # Whether the queries need not be copied, as with groups of equal size.
        self.is_in_cell_order = slot_of_cell == list(range(len(places)))
        self.slot_of_cell = torch.tensor(slot_of_cell, device=device)
        self.cell_of_slot = torch.tensor(cell_of_slot, device=device)

    def cell_indices(self, group_size: int) -> tuple[list[int], list[int]]:
        """Map cells to slots, and slots to cells.

        Args:
            group_size: n, cells per prefix.

        Returns:
            The slot of each cell, [P * n], and the cell of each slot, [R].
        """
        slot_of_cell = []
        cell_of_slot = [0] * len(self.places)
        for place, group in enumerate(self.slots_of_prefix):
            for number, slot in enumerate(group):
                cell_of_slot[slot] = place * group_size + number
            # The slot in cells that are left over.
            filler = group[0] if group else 0
            slot_of_cell += group + [filler] * (group_size - len(group))
        return slot_of_cell, cell_of_slot

    def start_step(self, written: Sequence[int]) -> Tensor:
        """Begin a decode step.

        Args:
            written: response tokens that each slot holds, the new token not included.

        Returns:
            Position of each new token, [R, 1].
        """
        length = max(written) + 1
        self.responses.start_step(torch.tensor(written, device=self.device), length)
        self.written = written
        self.window_masks = {}
        self.mask = self._padding_mask([count + 1 for count in written], length)
        starts = zip(self.first_positions, written, strict=True)
        positions = [first + count for first, count in starts]
        return torch.tensor(positions, device=self.device)[:, None]

    def copy_for_graph(self, state: Tensor) -> "DecodePlan":
        """Copy the plan for a graph, with buffers in place of the tensors that change.

        `fill_buffers` of the copy fills the buffers. The group size is rounded up to a power of
        two, so that the graph also serves somewhat larger groups.

        Args:
            state: [5, R], the graph's inputs; see `graphs.Graph`.
        """
        plan = copy(self)
        plan.is_in_cell_order = False
        plan.group_size = 1 << (self.group_size - 1).bit_length()
        plan.slot_of_cell = state.new_zeros(len(self.slots_of_prefix) * plan.group_size)
        plan.cell_of_slot = state.new_zeros(state.shape[1])
        return plan

    def fill_buffers(self, plan: "DecodePlan", state: Tensor) -> None:
        """Fill the buffers of this plan, which `copy_for_graph` made, for the current slots.

        Args:
            plan: the plan of the current slots.
            state: [5, R], the graph's inputs; not used by this kind of plan.
        """
        slot_of_cell, cell_of_slot = plan.cell_indices(self.group_size)
        self.slot_of_cell.copy_(torch.tensor(slot_of_cell))
        self.cell_of_slot[: len(cell_of_slot)].copy_(torch.tensor(cell_of_slot))

    def start_captured_step(self, written: Tensor) -> None:
        """Begin the step that a graph records.

        Its attention reads all the room of the responses under a mask, because the length of the
        longest response changes from replay to replay.

        Args:
            written: [R] int64, buffer with the tokens that each slot holds before the step.
        """
        room = self.responses.room
        self.responses.start_step(written, room)
        self.mask = hidden_mask(written + 1, room)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Attention of the new tokens, which are written to the KV cache first.

        Args:
            layer: number of the layer.
            query: [R, H, 1, D].
            key: [R, K, 1, D].
            value: [R, K, 1, D].
            scale: factor of the scores.
            options: window, softcap and sinks of the layer.

        Returns:
            [R, 1, H, D].
        """
        num_slots, num_heads, _, head_size = query.shape
        keys, values = self.responses.write(layer, key, value)
        query = query.to(keys.dtype).reshape(num_slots, key.shape[1], -1, head_size)  # [R, K, G, D]
        prefix_mask, mask = self._masks_for_window(options.window, query.shape[2])

        # Attention over the prefixes: the queries of all slots of a prefix are rows of one matrix.
        cells = query if self.is_in_cell_order else query.index_select(0, self.slot_of_cell)
        grouped = cells.unflatten(0, (-1, self.group_size))
        prefix_queries = grouped.transpose(1, 2).flatten(2, 3)  # [P, K, n * G, D]
        prefix_keys = self.prefixes.keys[layer]
        prefix_values = self.prefixes.values[layer]
        by_prefix, sums_by_prefix = attend_part(
            prefix_queries, prefix_keys, prefix_values, prefix_mask, scale, options.softcap
        )
        prefix_output = self._split_by_slot(by_prefix)
        prefix_sums = self._split_by_slot(sums_by_prefix)

        # Attention over the responses. The softmax of both log-sum-exps weights the two outputs;
        # for two numbers it is a sigmoid of their difference.
        response_output, response_sums = attend_part(
            query, keys, values, mask, scale, options.softcap
        )
        response_weight = torch.sigmoid(response_sums - prefix_sums).unsqueeze(-1)
        weight = response_weight.to(response_output.dtype)
        mixed = torch.lerp(prefix_output, response_output, weight)
        if options.sinks is not None:
            # A sink takes its share of the attention, but has no value.
            sums = torch.logaddexp(response_sums, prefix_sums)
            sinks = options.sinks.float().view(key.shape[1], -1)
            token_share = (sums - torch.logaddexp(sums, sinks)).exp()
            mixed = mixed * token_share[..., None].to(mixed.dtype)
        return mixed.reshape(num_slots, 1, num_heads, head_size).to(value.dtype)

    def _split_by_slot(self, states: Tensor) -> Tensor:
        """Split results by prefix into results by slot: [P, K, n * G, ...] -> [R, K, G, ...]."""
        grouped = states.unflatten(2, (self.group_size, -1))
        cells = grouped.transpose(1, 2).flatten(0, 1)
        return cells if self.is_in_cell_order else cells.index_select(0, self.cell_of_slot)

    def _masks_for_window(
        self, window: int | None, num_queries: int
    ) -> tuple[Tensor | None, Tensor | None]:
        """Masks for the keys of prefixes and of responses, in a layer with a window or without.

        Args:
            window: how many tokens the layer sees, the new one included; None: all of them.
            num_queries: G, query heads of a key-value head.

        Returns:
            [P, 1, 1, S] and [R, 1, 1, t], or None where nothing is hidden; if the window hides some
            keys, [P, 1, n * G, S] and [R, 1, 1, t].
        """
        if window is None:
            return self.prefix_mask, self.mask
        # Positions of the new tokens in their sequences.
        lengths = [self.lengths[place] for place in self.places]
        positions = [length + count for length, count in zip(lengths, self.written, strict=True)]
        # Nothing is hidden while all sequences are shorter than the window.
        if max(positions) < window:
            return self.prefix_mask, self.mask
        if window not in self.window_masks:
            tokens = torch.tensor([lengths, positions, self.written], device=self.device)
            prefix_lengths, _, written = tokens
            # First key in the window of each slot, [R], counted once from the start of the prefix
            # (the new token is at `positions`) and once from the start of the response (the new
            # token is at `written`). These are the last two rows of `tokens`.
            prefix_starts, response_starts = tokens[1:] - window + 1
            by_slot = hidden_mask(prefix_lengths, max(self.lengths), prefix_starts)  # [R, 1, 1, S]
            # From a row per slot to a row per cell and query head, as `attend` arranges queries:
            # [R, 1, 1, S] -> [P, n, 1, S] -> [P, 1, n * G, S].
            by_cell = by_slot[self.slot_of_cell, :, 0].unflatten(0, (-1, self.group_size))
            prefix_mask = by_cell.repeat_interleave(num_queries, 1).transpose(1, 2)
            mask = hidden_mask(written + 1, max(self.written) + 1, response_starts)
            self.window_masks[window] = (prefix_mask, mask)
        return self.window_masks[window]

    def _padding_mask(self, lengths: Sequence[int], width: int) -> Tensor | None:
        """`hidden_mask` of these lengths; None if there is no padding to hide."""
        if min(lengths) == width:
            return None
        return hidden_mask(torch.tensor(lengths, device=self.device), width)


def hidden_mask(lengths: Tensor, width: int, starts: Tensor | None = None) -> Tensor:
    """Make an additive mask that hides the padding of rows, and perhaps their first tokens.

    Args:
        lengths: [A], number of tokens of each row.
        width: padded length.
        starts: [A], first token of each row that is not hidden. None: only padding is hidden.

    Returns:
        [A, 1, 1, width] float32: `HIDDEN` (in effect -inf) for hidden tokens and padding, else 0.
    """
    columns = torch.arange(width, device=lengths.device)
    is_hidden = columns >= lengths[:, None]
    if starts is not None:
        is_hidden |= columns < starts[:, None]
    mask = torch.zeros(is_hidden.shape, device=lengths.device)
    return mask.masked_fill_(is_hidden, HIDDEN)[:, None, None]


class CompiledPlan:
    """Attention of one new token per slot, by kernels that were compiled on this machine.

    Args:
        loops: the compiled kernels.
        prefixes: KV cache of the prefixes.
        responses: KV cache of the responses.
        places: index of each slot's prefix in `prefixes`.
        device: device of both caches.
    """

    group_size = 1  # does not depend on how many slots share a prefix

    def __init__(
        self,
        loops: "Kernels | TritonKernels",
        prefixes: PrefixCache,
        responses: ResponseCache,
        places: Sequence[int],
        device: torch.device,
    ) -> None:
        self.loops = loops
        self.prefixes = prefixes
        self.responses = responses
        self.device = device
        lengths = prefixes.lengths
        # The kernels get addresses without sizes, so the memory must agree with the lengths.
        assert len(lengths) == len(prefixes.keys[0])
        assert max(lengths) == prefixes.keys[0].shape[2]
        next_positions = prefixes.next_positions
        self.first_positions = [next_positions[place] for place in places]
        # One row for each field of `SlotPlaces`; the last one, `num_written`, is set at each step.
        rows = [places, [lengths[place] for place in places], [0] * len(places)]
        self.places = SlotPlaces(*torch.tensor(rows, device=device))

    def start_step(self, written: Sequence[int]) -> Tensor:
        """Begin a decode step.

        Args:
            written: response tokens that each slot holds, the new token not included.

        Returns:
            Position of each new token, [R, 1].
        """
        assert len(written) <= self.responses.capacity
        assert 0 <= min(written) <= max(written) < self.responses.room
        # Both in a single transfer to the device.
        first_positions, num_written = torch.tensor(
            [self.first_positions, written], device=self.device
        )
        self.places = self.places._replace(num_written=num_written)
        return (first_positions + num_written)[:, None]

    def copy_for_graph(self, state: Tensor) -> "CompiledPlan":
        """Copy the plan for a graph.

        Args:
            state: [5, R], the graph's inputs, which the copy reads; see `graphs.Graph`.
        """
        plan = copy(self)
        plan.places = SlotPlaces(prefix_of=state[3], prefix_length=state[4], num_written=state[2])
        return plan

    def fill_buffers(self, plan: "CompiledPlan", state: Tensor) -> None:
        """Fill the graph's inputs that stay the same until a slot starts or ends.

        Args:
            plan: the plan of the current slots.
            state: [5, R], the graph's inputs.
        """
        # `copy_for_graph` reads these two rows as places and lengths of the prefixes.
        num_slots = len(plan.first_positions)
        state[3:, :num_slots] = torch.stack((plan.places.prefix_of, plan.places.prefix_length))

    def start_captured_step(self, written: Tensor) -> None:
        """Do nothing: the kernels read the lengths from the graph's inputs."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """Attention of the new tokens, which are written to the KV cache first.

        Args:
            layer: number of the layer.
            query: [R, H, 1, D].
            key: [R, K, 1, D].
            value: [R, K, 1, D].
            scale: factor of the scores.
            options: window, softcap and sinks of the layer.

        Returns:
            [R, 1, H, D].
        """
        responses = KeysAndValues(*self.responses.layer_memory(layer, value))
        prefixes = KeysAndValues(self.prefixes.keys[layer], self.prefixes.values[layer])
        # On CUDA all tensors have the cache's dtype. On a CPU, where the cache is float32, the loops
        # also take bfloat16 if all three inputs have it.
        if self.device.type == "cuda":
            dtype = responses.keys.dtype
        elif {query.dtype, key.dtype, value.dtype} == {torch.bfloat16}:
            dtype = torch.bfloat16
        else:
            dtype = torch.float32
        mixed = self.loops.attend(
            query.squeeze(2).to(dtype),
            key.squeeze(2).to(dtype),
            value.squeeze(2).to(dtype),
            scale,
            responses,
            prefixes,
            self.places,
            options,
        )
        return mixed.unsqueeze(1).to(value.dtype)


AnyDecodePlan: TypeAlias = DecodePlan | CompiledPlan


def plan_decoding(
    prefixes: PrefixCache, responses: ResponseCache, places: Sequence[int], device: torch.device
) -> AnyDecodePlan:
    """Make the plan of a batch that is fastest on this device.

    Args:
        prefixes: KV cache of the prefixes.
        responses: KV cache of the responses.
        places: index of each slot's prefix in `prefixes`.
        device: device of both caches.
    """
    first_keys = prefixes.keys[0]
    loops = compiled_attention(device, first_keys.dtype, first_keys.shape[-1])
    if loops is None:
        return DecodePlan(prefixes, responses, places, device)
    return CompiledPlan(loops, prefixes, responses, places, device)


def compiled_attention(
    device: torch.device, dtype: torch.dtype, head_size: int
) -> "Kernels | TritonKernels | None":
    """Return the compiled kernels for decode attention.

    Args:
        device: device of the KV cache.
        dtype: dtype of the KV cache.
        head_size: D.

    Returns:
        The kernels; None if there are none for this device, dtype and head size, so that torch's
        operators compute.
    """
    loops: Kernels | TritonKernels | None = kernels() if device.type == "cpu" else None
    if dtype in HALF_DTYPES and can_launch_triton(device):
        loops = TritonKernels()
    return loops if loops is not None and loops.can_attend(head_size) else None


def attend_part(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute attention over a part of the keys, to be combined with attention over other parts.

    Args:
        query: [A, K, Q, D].
        keys: [A, K, X, D].
        values: [A, K, X, D].
        mask: [A, 1, 1 or Q, X] float32, added to the scores.
        scale: factor of the scores.
        softcap: bound of the scores before the mask; see `AttentionOptions`.

    Returns:
        The attention output, [A, K, Q, D], and the log-sum-exps of the scores, [A, K, Q] float32.
    """
    if query.device.type == "cpu" and query.dtype == torch.float32 and softcap is None:
        # The operator behind scaled_dot_product_attention. Unlike that function, it also returns
        # the log-sum-exps.
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        # Without dropout (0.0) and without a causal mask (False).
        return flash(query, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    if query.is_cuda and query.dtype != torch.float32:
        # The factors stay in half precision, but the scores are not rounded to it.
        left = query.flatten(0, 1)
        right = keys.flatten(0, 1).transpose(-1, -2)
        products = torch.bmm(left, right, out_dtype=torch.float32)
        scores = products.unflatten(0, query.shape[:2])
    else:
        scores = (query @ keys.transpose(-1, -2)).float()
    scores.mul_(scale)
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    sums = scores.logsumexp(-1)
    weights = (scores - sums.unsqueeze(-1)).exp_().to(values.dtype)
    return weights @ values, sums
