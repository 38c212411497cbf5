# SPDX-License-Identifier: Apache-2.0
"""The KV cache, and attention over it: prefill of packed prefixes, and decode of one new token per slot.

The KV cache has two parts: prefixes, each stored once for all slots that share it, and responses, written in place.
Attention over each part is computed separately; the log-sum-exps combine the two results. The queries of all slots of a
prefix form one matrix, so its keys are read once and never copied. `CompiledPlan` does both parts in one pass, by the
loops of `Kernels` on a CPU and by `TritonKernels` in half precision on CUDA.

On a CPU the KV cache is float32 for every model: attention is then as exact as in training, and no slower than in
bfloat16. Elsewhere it has the model's dtype.

Legend: P prefixes, S longest prefix, R slots in use, C slots that there is memory for, n slots of the largest group,
T tokens of a response that there is room for, t tokens of the longest response, H query heads, K key-value heads,
G = H / K, D head size, N packed tokens.
"""

from collections.abc import Iterable, Sequence
from copy import copy
from typing import Any, TypeAlias

import torch
from torch import Tensor

from quadriga.models.attention import HIDDEN, PLAIN, AttentionOptions, PackedAttention, Segment
from quadriga.models.heads import HALF_DTYPES, HAS_TRITON, launches_triton
from quadriga.rollout.native.kernels import Kernels, KeysAndValues, SlotPlaces, kernels

if HAS_TRITON:
    from quadriga.rollout.native.kernels_triton import TritonKernels


def cache_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype of the KV cache of a model in `dtype`."""
    return torch.float32 if device.type == "cpu" else dtype


class PrefixCache:
    """[P, K, S, D] key and value for each layer, padded on the right, and the last hidden state of each prefix.

    A prefix is anything with a length in tokens; it has a `next_position` if that differs from its length.
    """

    def __init__(self, prefixes: Iterable[Any] = ()) -> None:
        self.prefixes = list(prefixes)
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self.last_hidden: Tensor | None = None  # [P, hidden size]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prefix; S is the largest."""
        return [len(prefix) for prefix in self.prefixes]

    @property
    def next_positions(self) -> list[int]:
        """Of the token that follows each prefix."""
        return [getattr(prefix, "next_position", len(prefix)) for prefix in self.prefixes]

    def write(self, layer: int, places: slice, key: Tensor, value: Tensor) -> None:
        """`key` and `value` [p, K, S, D] of the prefixes in these places."""
        if layer == len(self.keys):
            shape, dtype = (
                (len(self.prefixes), *key.shape[1:]),
                cache_dtype(value.dtype, value.device),
            )
            self.keys.append(key.new_empty(shape, dtype=dtype))
            self.values.append(key.new_empty(shape, dtype=dtype))
        self.keys[layer][places] = key
        self.values[layer][places] = value

    def keep(self, places: Sequence[int]) -> None:
        """Drops all prefixes but those in these places."""
        if list(places) == list(range(len(self.prefixes))):
            return
        self.prefixes = [self.prefixes[place] for place in places]
        if self.last_hidden is None:
            return
        index = torch.tensor(places, dtype=torch.long, device=self.last_hidden.device)
        width = max(self.lengths, default=0)
        self.last_hidden = self.last_hidden.index_select(0, index)
        for states in (self.keys, self.values):
            for layer, old in enumerate(states):
                states[layer] = old[:, :, :width].index_select(0, index)

    def extend(self, other: "PrefixCache") -> None:
        """Takes over the prefixes of `other`, which is empty afterwards."""
        if not self.prefixes:
            self.prefixes, self.last_hidden = other.prefixes, other.last_hidden
            self.keys, self.values = other.keys, other.values
            return
        width = max(self.lengths + other.lengths)
        for mine, theirs in ((self.keys, other.keys), (self.values, other.values)):
            for layer, added in enumerate(theirs):
                first, num_first = mine[layer], mine[layer].shape[0]
                joined = first.new_zeros(
                    num_first + added.shape[0], first.shape[1], width, first.shape[3]
                )
                joined[:num_first, :, : first.shape[2]] = first
                joined[num_first:, :, : added.shape[2]] = added
                mine[layer], theirs[layer] = joined, added[:0]
        self.prefixes = self.prefixes + other.prefixes
        self.last_hidden = torch.cat((self.last_hidden, other.last_hidden))


class ResponseCache:
    """[C, K, T, D] key and value for each layer; the first R slots are in use.

    What was never written is zero, so that a weight of zero makes nothing of it.
    """

    def __init__(self) -> None:
        self.capacity = 0
        self.room = 0
        self.keys: list[Tensor] = []
        self.values: list[Tensor] = []
        self._places: Tensor | None = None
        self._shape = (0, 0)

    def resize(self, capacity: int, room: int, num_slots: int, length: int) -> None:
        """Moves to memory for C slots of T tokens; the first `num_slots` keep what they hold, up to `length` tokens."""
        if (capacity, room) == (self.capacity, self.room):
            return
        self.capacity, self.room = capacity, room
        for states in (self.keys, self.values):
            for layer, old in enumerate(states):
                new = old.new_zeros(capacity, old.shape[1], room, old.shape[3])
                new[:num_slots, :, :length] = old[:num_slots, :, :length]
                states[layer] = new

    def move(self, source: int, target: int, length: int) -> None:
        """Slot `target` takes over the first `length` tokens of slot `source`."""
        for states in (*self.keys, *self.values):
            states[target, :, :length] = states[source, :, :length]

    def start_step(self, written: Tensor, length: int) -> None:
        """Begins a step that reads `length` tokens of each slot, which holds `written` [R] before the one it writes."""
        self._shape, self._written, self._places = (len(written), length), written, None

    def of_layer(self, layer: int, like: Tensor) -> tuple[Tensor, Tensor]:
        """The whole memory of one layer; what is to be written to it next is `like`, [R, K, ..., D]."""
        if layer == len(self.keys):
            shape = (self.capacity, like.shape[1], self.room, like.shape[-1])
            for states in (self.keys, self.values):
                states.append(like.new_zeros(shape, dtype=cache_dtype(like.dtype, like.device)))
        return self.keys[layer], self.values[layer]

    def write(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Writes one token per slot, [R, K, 1, D]; returns all tokens so far, [R, K, t, D] views."""
        num_heads, head_size = key.shape[1], key.shape[3]
        keys, values = self.of_layer(layer, value)
        num_slots, length = self._shape
        if self._places is None:  # the line of each slot and head, once for all layers
            lines = torch.arange(num_slots * num_heads, device=key.device).view(
                num_slots, num_heads
            )
            self._places = (lines * self.room + self._written[:, None]).flatten()
        keys.view(-1, head_size).index_copy_(
            0, self._places, key.reshape(-1, head_size).to(keys.dtype)
        )
        values.view(-1, head_size).index_copy_(
            0, self._places, value.reshape(-1, head_size).to(values.dtype)
        )
        return keys[:num_slots, :, :length], values[:num_slots, :, :length]


class PrefillPlan:
    """Causal attention over packed prefixes, which fills their places in the KV cache on the way."""

    def __init__(self, cache: PrefixCache, places: slice, device: torch.device) -> None:
        self.cache, self.places = cache, places
        starts, segments = 0, []
        for length in cache.lengths[places]:
            segments.append(Segment(starts, length))
            starts += length
        self.packed = PackedAttention(segments, device)
        columns = torch.arange(max(cache.lengths))
        rows = [segment.start + columns.clamp(max=segment.length - 1) for segment in segments]
        self.padded = torch.stack(rows).to(
            device
        )  # [p, S] packed token in each place, the last one repeated
        self.last = torch.tensor(
            [segment.start + segment.length - 1 for segment in segments], device=device
        )

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """[1, H, N, D] and [1, K, N, D] -> [1, N, H, D]"""
        # [1, K, N, D] -> [p, K, S, D]
        keys, values = (
            states[0]
            .index_select(1, self.padded.flatten())
            .unflatten(1, self.padded.shape)
            .transpose(0, 1)
            for states in (key, value)
        )
        self.cache.write(layer, self.places, keys, values)
        return self.packed.attend(layer, query, key, value, scale, options)


class DecodePlan:
    """Attention of one new token per slot. It lasts as long as the slots of the batch stay what they are.

    `places` are those of each slot's prefix in the prefix cache. Slots of one prefix are side by side in cells, [P, n];
    a cell without a slot repeats another one, and its result is not used.
    """

    def __init__(
        self,
        prefixes: PrefixCache,
        responses: ResponseCache,
        places: Sequence[int],
        device: torch.device,
    ) -> None:
        self.prefixes, self.responses, self.device = prefixes, responses, device
        lengths, next_positions = prefixes.lengths, prefixes.next_positions
        self.first_positions = [next_positions[place] for place in places]
        self.lengths, self.places = lengths, places
        self.prefix_mask = self._mask(lengths, max(lengths))
        self.mask: Tensor | None = None
        self.members: list[list[int]] = [[] for _ in lengths]  # the slots of each prefix
        self.written: Sequence[int] = ()
        self.windows: dict[int, tuple[Tensor, Tensor]] = {}  # masks of a step, by the width
        for slot, place in enumerate(places):
            self.members[place].append(slot)
        self.group_size = max(map(len, self.members))
        grid, cells = self.cells(self.group_size)
        self.is_even = grid == list(range(len(places)))
        self.slot_of_cell = torch.tensor(grid, device=device)
        self.cell_of_slot = torch.tensor(cells, device=device)

    def cells(self, group_size: int) -> tuple[list[int], list[int]]:
        """The slot of each cell, and the cell of each slot, with so many cells for each prefix."""
        grid = [
            slot
            for group in self.members
            for slot in group + (group[:1] or [0]) * (group_size - len(group))
        ]
        cells = [
            (slot, place * group_size + number)
            for place, group in enumerate(self.members)
            for number, slot in enumerate(group)
        ]
        return grid, [cell for _, cell in sorted(cells)]

    def start_step(self, written: Sequence[int]) -> Tensor:
        """Begins a step in which slot r writes its response token number `written[r]`; returns positions [R, 1]."""
        self.responses.start_step(torch.tensor(written, device=self.device), max(written) + 1)
        self.written, self.windows = written, {}
        self.mask = self._mask([count + 1 for count in written], max(written) + 1)
        positions = [
            first + count for first, count in zip(self.first_positions, written, strict=True)
        ]
        return torch.tensor(positions, device=self.device)[:, None]

    def on_buffers(self, state: Tensor) -> "DecodePlan":
        """For a graph, on its `state` [5, R]: a copy with buffers of its own; groups may double in size at most."""
        plan = copy(self)
        plan.is_even, plan.group_size = False, 1 << (self.group_size - 1).bit_length()
        plan.slot_of_cell = state.new_zeros(len(self.members) * plan.group_size)
        plan.cell_of_slot = state.new_zeros(state.shape[1])
        return plan

    def arrange(self, plan: "DecodePlan", state: Tensor) -> None:
        """Fill the buffers with the slots of `plan`."""
        slots, cells = plan.cells(self.group_size)
        self.slot_of_cell.copy_(torch.tensor(slots))
        self.cell_of_slot[: len(cells)].copy_(torch.tensor(cells))

    def start_captured(self, written: Tensor) -> None:
        """Begins the step that a graph records: over all the room of the responses, behind a mask."""
        self.responses.start_step(written, self.responses.room)
        self.mask = hidden_mask(written + 1, self.responses.room)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """[R, H, 1, D] and [R, K, 1, D] -> [R, 1, H, D]"""
        num_slots, num_heads, _, head_size = query.shape
        own_keys, own_values = self.responses.write(layer, key, value)
        shared_keys, shared_values = self.prefixes.keys[layer], self.prefixes.values[layer]
        query = query.to(own_keys.dtype).reshape(num_slots, key.shape[1], -1, head_size)
        cells = query if self.is_even else query.index_select(0, self.slot_of_cell)
        folded = (
            cells.unflatten(0, (-1, self.group_size)).transpose(1, 2).flatten(2, 3)
        )  # [P, K, n * G, D]
        prefix_mask, mask = self._masks(options.window, query.shape[2])
        shared, shared_sum = (  # back to [P * n, K, G, ...], and to slots
            part.unflatten(2, (self.group_size, -1)).transpose(1, 2).flatten(0, 1)
            for part in attend_part(
                folded, shared_keys, shared_values, prefix_mask, scale, options.softcap
            )
        )
        if not self.is_even:
            shared, shared_sum = (
                part.index_select(0, self.cell_of_slot) for part in (shared, shared_sum)
            )
        own, own_sum = attend_part(query, own_keys, own_values, mask, scale, options.softcap)
        share = torch.sigmoid(own_sum - shared_sum).unsqueeze(-1)  # of the response's own tokens
        mixed = torch.lerp(shared, own, share.to(own.dtype))
        if options.sinks is not None:
            sums = torch.logaddexp(own_sum, shared_sum)
            sinks = options.sinks.float().view(key.shape[1], -1)
            mixed = mixed * (sums - torch.logaddexp(sums, sinks)).exp()[..., None].to(mixed.dtype)
        return mixed.reshape(num_slots, 1, num_heads, head_size).to(value.dtype)

    def _masks(self, window: int | None, group: int) -> tuple[Tensor | None, Tensor | None]:
        """For the keys of prefixes and of responses: [P, 1, 1, S] and [R, 1, 1, t], or None where all are seen; where
        the window hides some, [P, 1, n * group, S] and [R, 1, 1, t]. `group` is G."""
        if window is None:
            return self.prefix_mask, self.mask
        places = [
            self.lengths[place] + count
            for place, count in zip(self.places, self.written, strict=True)
        ]
        if max(places) < window:
            return self.prefix_mask, self.mask
        if window not in self.windows:
            numbers = (torch.tensor(one, device=self.device) for one in (places, self.written))
            widths = (max(self.lengths), max(self.written) + 1)
            of_prefix, of_response = (
                torch.zeros(len(one), width, device=self.device).masked_fill_(
                    one[:, None] - torch.arange(width, device=self.device) >= window, HIDDEN
                )
                for one, width in zip(numbers, widths, strict=True)
            )
            of_prefix = (
                of_prefix[self.slot_of_cell]
                .unflatten(0, (-1, self.group_size))
                .repeat_interleave(group, 1)
            )
            masks = of_prefix[:, None], of_response[:, None, None]
            self.windows[window] = tuple(
                one if other is None else one + other
                for one, other in zip(masks, (self.prefix_mask, self.mask), strict=True)
            )
        return self.windows[window]

    def _mask(self, lengths: Sequence[int], width: int) -> Tensor | None:
        """[A, 1, 1, width] float32: 0 for the first tokens of each, as many as it has, then as good as -inf."""
        return (
            None
            if min(lengths) == width
            else hidden_mask(torch.tensor(lengths, device=self.device), width)
        )


def hidden_mask(lengths: Tensor, width: int) -> Tensor:
    """[A, 1, 1, width] float32 from [A]: 0 for the first tokens of each, as many as it has, then as good as -inf."""
    is_hidden = torch.arange(width, device=lengths.device) >= lengths[:, None]
    return torch.zeros(is_hidden.shape, device=lengths.device).masked_fill_(is_hidden, HIDDEN)[
        :, None, None
    ]


class CompiledPlan:
    """What `DecodePlan` computes, by loops or kernels that were compiled on this machine."""

    group_size = 1  # no matter how many slots have one prefix

    def __init__(
        self,
        loops: "Kernels | TritonKernels",
        prefixes: PrefixCache,
        responses: ResponseCache,
        places: Sequence[int],
        device: torch.device,
    ) -> None:
        self.loops, self.prefixes, self.responses, self.device = loops, prefixes, responses, device
        lengths, next_positions = prefixes.lengths, prefixes.next_positions
        assert max(lengths) == prefixes.keys[0].shape[2] and len(lengths) == len(prefixes.keys[0])
        self.first_positions = [next_positions[place] for place in places]
        rows = [places, [lengths[place] for place in places], [0] * len(places)]
        self.places = SlotPlaces(*torch.tensor(rows, device=device))

    def start_step(self, written: Sequence[int]) -> Tensor:
        """Begins a step in which slot r writes its response token number `written[r]`; returns positions [R, 1]."""
        assert (
            len(written) <= self.responses.capacity
            and 0 <= min(written) <= max(written) < self.responses.room
        )
        positions, num_written = torch.tensor([self.first_positions, written], device=self.device)
        self.places = self.places._replace(num_written=num_written)
        return (positions + num_written)[:, None]

    def on_buffers(self, state: Tensor) -> "CompiledPlan":
        """For a graph, on its `state` [5, R]: a copy that finds its places there."""
        plan = copy(self)
        plan.places = SlotPlaces(state[3], state[4], state[2])
        return plan

    def arrange(self, plan: "CompiledPlan", state: Tensor) -> None:
        """Fill the buffers with the slots of `plan`."""
        state[3:, : len(plan.first_positions)] = torch.stack(plan.places[:2])

    def start_captured(self, written: Tensor) -> None:
        """Begins the step that a graph records; it reads where each row ends."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scale: float,
        options: AttentionOptions = PLAIN,
    ) -> Tensor:
        """[R, H, 1, D] and [R, K, 1, D] -> [R, 1, H, D]"""
        own = KeysAndValues(*self.responses.of_layer(layer, value))
        shared = KeysAndValues(self.prefixes.keys[layer], self.prefixes.values[layer])
        is_half = {query.dtype, key.dtype, value.dtype} == {torch.bfloat16}
        dtype = (
            own.keys.dtype
            if self.device.type == "cuda"
            else torch.bfloat16
            if is_half
            else torch.float32
        )
        token = [states.squeeze(2).to(dtype) for states in (query, key, value)]
        mixed = self.loops.attend(
            token[0], token[1], token[2], scale, own, shared, self.places, options
        )
        return mixed.unsqueeze(1).to(value.dtype)


AnyDecodePlan: TypeAlias = DecodePlan | CompiledPlan


def plan_decoding(
    prefixes: PrefixCache, responses: ResponseCache, places: Sequence[int], device: torch.device
) -> AnyDecodePlan:
    """The fastest plan for these slots; see `DecodePlan`."""
    *_, head_size = prefixes.keys[0].shape
    if (loops := compiled_attention(device, prefixes.keys[0].dtype, head_size)) is not None:
        return CompiledPlan(loops, prefixes, responses, places, device)
    return DecodePlan(prefixes, responses, places, device)


def compiled_attention(
    device: torch.device, dtype: torch.dtype, head_size: int
) -> "Kernels | TritonKernels | None":
    """What computes decode attention on a cache of this dtype; None: torch's operators do."""
    found = kernels() if device.type == "cpu" else None
    if dtype in HALF_DTYPES and launches_triton(device):
        found = TritonKernels()
    return found if found is not None and found.can_attend(head_size) else None


def attend_part(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    mask: Tensor | None,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention of `query` [A, K, Q, D] over a part of the keys, with `keys` and `values` [A, K, X, D].

    `mask` [A, 1, 1 or Q, X] float32 is added to the scores, which `softcap` caps before. Returns [A, K, Q, D], and
    log-sum-exps [A, K, Q] float32.
    """
    if query.device.type == "cpu" and query.dtype == torch.float32 and softcap is None:
        flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return flash(query, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    if query.is_cuda and query.dtype != torch.float32:  # sums of half-precision factors in float32
        flat = torch.bmm(
            query.flatten(0, 1), keys.flatten(0, 1).transpose(-1, -2), out_dtype=torch.float32
        )
        scores = flat.unflatten(0, query.shape[:2])
    else:
        scores = (query @ keys.transpose(-1, -2)).float()
    scores.mul_(scale)
    if softcap is not None:
        scores = (scores / softcap).tanh_().mul_(softcap)
    if mask is not None:
        scores += mask
    sums = scores.logsumexp(-1)
    return (scores - sums.unsqueeze(-1)).exp_().to(values.dtype) @ values, sums
