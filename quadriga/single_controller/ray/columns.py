# SPDX-License-Identifier: Apache-2.0
"""How the columns of one call get into the store: each once, and not at all if it is there already.

    want(tensor, rank)    every rank asks for its views of the columns; chunks are views of one *root*
    send(put)             puts what is missing, in as few objects as is good
    view.placed           where the rank finds its rows: object, item, dtype, shape, stride, offset

What is put of a column:

- Nothing, if its bytes are in the store (`Kept`): the same tensor, not written to since.
- The whole root, if the ranks together use at least half of it. It stays in the store as long as the
  root lives, so the next role that gets the batch finds it there.
- Otherwise contiguous copies of the views. They are gone when the call is over.
- All of it beside the header, without the store, if the whole call needs no more than 64 KiB.

"Not written to" is what torch counts in `Tensor._version`. A tensor whose memory may change without
a trace there (`has_other_writers`: numpy knows the memory, or other processes do) is put on every call.
Left are writes through `Tensor.data` and through DLPack: after one of them, call `Outbox.forget`.

Objects in the store are lists of byte arrays. A large array is alone in its object, so that its pages are
free as soon as its column is gone; small ones share an object, for a put costs a millisecond whatever its
size. Only what the same ranks read shares one, so that no node fetches what its ranks do not use.
"""

import ctypes
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from quadriga.protocol.memory import bytes_of, has_other_writers, root_of, tensor_over
from quadriga.single_controller.ray.objects import PickledArrays

INLINE_BELOW_BYTES = 64 << 10
ALONE_FROM_BYTES = 1 << 20
COPIED_UP_TO_BYTES = 4 << 10

Put = Callable[[list[np.ndarray]], Any]


@dataclass(frozen=True, slots=True)
class Location:
    """A byte array in the store: the object, and which of its arrays."""

    ref: Any
    item: int


@dataclass(frozen=True, slots=True)
class _Entry:
    owner: weakref.ref[Any]
    stamp: Any
    locations: tuple[Location, ...]


class Keepable(Protocol):
    """Something whose bytes may be in the store."""

    def key(self) -> Hashable:
        """What it is found by."""

    def owner(self) -> Any:
        """The object whose life bounds that of the bytes in the store."""

    def stamp(self) -> Any:
        """Equal as long as the bytes are; None: nobody can tell."""


class Kept:
    """What is in the store, kept there as long as its owner lives."""

    def __init__(self) -> None:
        self._entries: dict[Hashable, _Entry] = {}

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, what: Keepable) -> tuple[Location, ...] | None:
        """Where the bytes are, if they are those of this very owner in its present state."""
        entry = self._entries.get(what.key())
        if entry is None or entry.owner() is not what.owner() or entry.stamp != what.stamp():
            return None
        return entry.locations

    def keep(self, what: Keepable, stamp: Any, locations: Iterable[Location]) -> None:
        """Keep bytes until their owner dies, unless `stamp` is None; those of an earlier state are let go.

        Args:
            what: whose they are.
            stamp: what its stamp was before the bytes were read.
            locations: where they are.
        """
        if stamp is not None:
            key = what.key()
            reference = weakref.ref(what.owner(), lambda dead: self._drop(key, dead))
            self._entries[key] = _Entry(reference, stamp, tuple(locations))

    def clear(self) -> None:
        """Let go of everything."""
        self._entries.clear()

    def _drop(self, key: Hashable, dead: weakref.ref[Any]) -> None:
        # The key may belong to another owner by now: an id is used again when its object is gone.
        entry = self._entries.get(key)
        if entry is not None and entry.owner is dead:
            del self._entries[key]


class Placed(NamedTuple):
    """Where a tensor's bytes lie, and how they are to be read.

    Attributes:
        source: the bytes themselves, or (number of the object among those of the call, item in it). Few bytes are a
            copy as `bytes`, which costs pickle nothing.
        dtype, shape: the tensor's.
        stride, offset: in elements of the source; None: the source is the tensor's own memory, contiguous.
    """

    source: bytes | np.ndarray | tuple[int, int]
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...] | None = None
    offset: int = 0

    def open(self, objects: dict[int, Sequence[np.ndarray]]) -> torch.Tensor:
        """The tensor, over the memory as it lies, which may be read-only, or over a copy (`is_copy`)."""
        source = self.source
        if isinstance(source, bytes):
            return torch.frombuffer(bytearray(source), dtype=self.dtype).view(self.shape)
        memory = source if isinstance(source, np.ndarray) else objects[source[0]][source[1]]
        return tensor_over(memory, self.dtype, self.shape, self.stride, self.offset)

    @property
    def is_copy(self) -> bool:
        """Whether what `open` gives has memory of its own."""
        return isinstance(self.source, bytes)


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def placed_here(tensor: torch.Tensor) -> Placed:
    """A tensor's own bytes, of whatever device and layout; many are not copied where they lie contiguous on the CPU."""
    plain = _plain(tensor)
    if 0 < plain.nbytes <= COPIED_UP_TO_BYTES:
        return Placed(ctypes.string_at(plain.data_ptr(), plain.nbytes), plain.dtype, tuple(plain.shape))
    return Placed(bytes_of(plain), plain.dtype, tuple(plain.shape))


@dataclass(slots=True)
class View:
    """A tensor that some ranks ask for. `placed` is there once the shipment has been sent."""

    tensor: torch.Tensor
    ranks: set[int] = field(default_factory=set)
    placed: Placed | None = None


@dataclass(slots=True)
class Blob:
    """The pickled arrays of a DataProto that some ranks ask for.

    Attributes:
        pickled: the bytes.
        arrays: the arrays themselves, which say how long it is worth keeping the bytes.
        views: of the tensors among the buffers; None for the others.
        ranks: who asks.
        sources: where `memories()` are; there once the shipment has been sent.
    """

    pickled: PickledArrays
    arrays: dict[str, np.ndarray]
    views: tuple[View | None, ...]
    ranks: set[int]
    sources: Sequence[np.ndarray | tuple[int, int]] = ()
    _digest: bytes = b""

    def memories(self) -> list[np.ndarray]:
        """The stream and the bytes of arrays."""
        stream = np.frombuffer(self.pickled.stream, dtype=np.uint8)
        return [stream, *(part for part in self.pickled.buffers if isinstance(part, np.ndarray))]

    def key(self) -> Hashable:
        """Which arrays, and which rows of them."""
        return tuple(
            (name, id(_array_root(array)), array.ctypes.data, array.shape, array.strides)
            for name, array in self.arrays.items()
        )

    def stamp(self) -> bytes:
        """Fingerprint of the bytes; asked for twice, made once."""
        self._digest = self._digest or self.pickled.digest()
        return self._digest

    def owner(self) -> np.ndarray:
        """The array whose life bounds that of the bytes in the store."""
        return _array_root(next(iter(self.arrays.values())))

    def placed(self) -> tuple[Placed, ...]:
        """The stream, then the buffers in their order."""
        sizes = [memory.nbytes for memory in self.memories()]
        stream, *own = (Placed(at, torch.uint8, (size,)) for at, size in zip(self.sources, sizes, strict=True))
        rest = iter(own)
        return (stream, *(next(rest) if view is None else _ready(view) for view in self.views))


def _array_root(array: np.ndarray) -> np.ndarray:
    while isinstance(array.base, np.ndarray):
        array = array.base
    return array


def _ready(view: View) -> Placed:
    assert view.placed is not None, "the shipment has been sent"
    return view.placed


@dataclass(slots=True)
class _Root:
    tensor: torch.Tensor
    views: dict[Hashable, View] = field(default_factory=dict)

    def key(self) -> int:
        return id(self.tensor)

    def owner(self) -> torch.Tensor:
        return self.tensor

    def stamp(self) -> tuple[int, int, int] | None:
        if has_other_writers(self.tensor):
            return None
        storage = self.tensor.untyped_storage()
        return self.tensor._version, storage.data_ptr(), storage.nbytes()

    def ranks(self) -> set[int]:
        return set().union(*(view.ranks for view in self.views.values()))

    def bytes_wanted(self) -> int:
        return sum(view.tensor.nbytes for view in self.views.values())

    def bytes_to_send(self) -> int:
        return sum(view.tensor.nbytes * len(view.ranks) for view in self.views.values())

    def is_mostly_wanted(self) -> bool:
        return 2 * self.bytes_wanted() >= self.tensor.untyped_storage().nbytes()

    def memory(self) -> np.ndarray:
        storage = self.tensor.untyped_storage()
        whole = torch.empty(0, dtype=torch.uint8, device=self.tensor.device).set_(storage)
        return bytes_of(whole.cpu())


@dataclass(slots=True)
class _Item:
    """An array on its way into the store, and what to do when it is there."""

    memory: np.ndarray
    ranks: set[int]
    arrived: Callable[[Location], None]


class Shipment:
    """What the ranks of one call ask for.

    Args:
        columns, blobs: what earlier calls have left in the store.
    """

    def __init__(self, columns: Kept, blobs: Kept) -> None:
        self._columns, self._blobs = columns, blobs
        self._roots: dict[int, _Root] = {}
        self._wanted_blobs: list[Blob] = []
        self._numbers: dict[Any, int] = {}
        self._refs: list[Any] = []
        self._read_by: dict[int, set[int]] = {}

    def want(self, tensor: torch.Tensor, ranks: Iterable[int]) -> View:
        """Ask for a tensor; the same view asked for twice is one."""
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            tensor = tensor.detach().as_subclass(torch.Tensor)
        tensor = tensor.resolve_conj().resolve_neg()
        root = root_of(tensor)
        entry = self._roots.setdefault(id(root), _Root(root))
        key = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        view = entry.views.setdefault(key, View(tensor))
        view.ranks.update(ranks)
        return view

    def want_arrays(self, pickled: PickledArrays, arrays: dict[str, np.ndarray], ranks: set[int]) -> Blob:
        """Ask for pickled arrays, and for the tensors inside them."""
        views = tuple(self.want(part, ranks) if isinstance(part, torch.Tensor) else None for part in pickled.buffers)
        blob = Blob(pickled, arrays, views, set(ranks))
        self._wanted_blobs.append(blob)
        return blob

    def send(self, put: Put) -> None:
        """Put what is not in the store, and say of everything where it is."""
        missing = [root for root in self._roots.values() if not self._place_kept(root)]
        small = sum(root.bytes_to_send() for root in missing)
        small += sum(blob.pickled.nbytes() * len(blob.ranks) for blob in self._wanted_blobs)
        if small <= INLINE_BELOW_BYTES:
            for root in missing:
                for view in root.views.values():
                    view.placed = placed_here(view.tensor)
            for blob in self._wanted_blobs:
                blob.sources = blob.memories()
            return
        items = [item for root in missing for item in self._items_of(root)]
        blobs = [blob for blob in self._wanted_blobs if not self._place_kept_blob(blob)]
        items += [item for blob in blobs for item in self._items_of_blob(blob)]
        _put_all(items, put)

    def refs_of(self, rank: int) -> dict[int, Any]:
        """Number and ref of each object that the rank reads."""
        return {number: ref for number, ref in enumerate(self._refs) if rank in self._read_by[number]}

    def _source(self, location: Location, ranks: set[int]) -> tuple[int, int]:
        number = self._numbers.setdefault(location.ref, len(self._refs))
        if number == len(self._refs):
            self._refs.append(location.ref)
        self._read_by.setdefault(number, set()).update(ranks)
        return number, location.item

    def _place_kept(self, root: _Root) -> bool:
        locations = self._columns.find(root)
        if locations is not None:
            self._place_whole(root, locations[0])
        return locations is not None

    def _place_whole(self, root: _Root, location: Location) -> None:
        for view in root.views.values():
            tensor = view.tensor
            source = self._source(location, view.ranks)
            view.placed = Placed(source, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.storage_offset())

    def _place_kept_blob(self, blob: Blob) -> bool:
        locations = self._blobs.find(blob)
        if locations is not None:
            blob.sources = [self._source(location, blob.ranks) for location in locations]
        return locations is not None

    def _items_of(self, root: _Root) -> list[_Item]:
        if not root.is_mostly_wanted():
            return [self._piece(view) for view in root.views.values()]
        stamp = root.stamp()

        def arrived(location: Location) -> None:
            self._place_whole(root, location)
            self._columns.keep(root, stamp, [location])

        return [_Item(root.memory(), root.ranks(), arrived)]

    def _piece(self, view: View) -> _Item:
        piece = _plain(view.tensor)

        def arrived(location: Location) -> None:
            view.placed = Placed(self._source(location, view.ranks), piece.dtype, tuple(piece.shape))

        return _Item(bytes_of(piece), view.ranks, arrived)

    def _items_of_blob(self, blob: Blob) -> list[_Item]:
        memories = blob.memories()
        found: dict[int, Location] = {}

        def arrived(position: int, location: Location) -> None:
            # Large ones arrive before small ones, whatever their order in the stream.
            found[position] = location
            if len(found) == len(memories):
                locations = [found[each] for each in range(len(memories))]
                blob.sources = [self._source(each, blob.ranks) for each in locations]
                self._blobs.keep(blob, blob.stamp(), locations)

        return [_Item(memory, blob.ranks, partial(arrived, number)) for number, memory in enumerate(memories)]


def _put_all(items: Sequence[_Item], put: Put) -> None:
    """Put large arrays one by one, and small ones together if the same ranks read them."""
    shared: dict[frozenset[int], list[_Item]] = {}
    objects: list[list[_Item]] = []
    for item in items:
        if item.memory.nbytes >= ALONE_FROM_BYTES:
            objects.append([item])
        else:
            shared.setdefault(frozenset(item.ranks), []).append(item)
    for together in [*objects, *shared.values()]:
        ref = put([item.memory for item in together])
        for number, item in enumerate(together):
            item.arrived(Location(ref, number))
