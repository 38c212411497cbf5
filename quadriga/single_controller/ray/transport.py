# SPDX-License-Identifier: Apache-2.0
"""How arguments reach a worker's process, and how outputs come back.

    driver    Outbox.pack(calls)     one Message per rank: pickled arguments, and refs of objects in Ray's store
    worker    unpack(body, values)   the arguments, over copies of this rank's bytes
              pack_result(output)    the output, pickled; Ray writes large memory to its store
    driver    unpack_result(value)   the output, its columns copied, or lent for a concatenation to copy

Arguments are pickled by protocol 5, and the memory of tensors and of large arrays stays out of the stream. Chunks of a
batch are views of its columns, so what is put into the store is a column's whole storage, once for all ranks; a rank's
message says which bytes are its own. Of each storage:

- Nothing is put if its bytes are in the store already, where it stays as long as the tensor lives: so the next role
that gets the batch finds it. A tensor whose memory may change without a trace (`stamp_of`) is put on every call; after
a write through `Tensor.data` or DLPack, call `Outbox.forget`. - If the ranks together use less than half of it, copies
of what they use are put instead, for this call. - If the whole call needs no more than 64 KiB, the bytes travel inside
the messages, without the store.

Objects in the store are lists of byte arrays. A large array is alone in its object, so that its memory is free as soon
as its column is gone; small ones share an object, for a put costs a millisecond whatever its size. Only what the same
ranks read shares one, so that no node fetches what its ranks do not use.

Tensors arrive on the CPU, contiguous, without their autograd graphs. Arguments with references to Ray's objects (a
DataProtoFuture holds some), which Ray's own serialization counts, are Ray's to pickle.
Everything here but `Outbox.put`, `Outbox.session` and `release_pages` works without a cluster.
"""

import io
import os
import pickle
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray import cloudpickle
from torch.utils.weak import WeakIdKeyDictionary

from quadriga.protocol import DataProto
from quadriga.protocol.memory import advise, bytes_of, copy_of, lend, root_of, tensor_over
from quadriga.protocol.proto import map_columns
from quadriga.protocol.wire import rebuild_proto, unpack_tensor

INLINE_UP_TO_BYTES = 64 << 10
ALONE_FROM_BYTES = 1 << 20
# A buffer of its own costs an entry in every table on the way; below this size the bytes go with the stream.
BUFFER_FROM_BYTES = 4096
Location = tuple[Any, int]  # ref of an object in the store, and which of its arrays

# ---- pickling -----------------------------------------------------------------------------------


class _NeedsRayError(Exception):
    """The value holds references to Ray's objects."""


class _Column(NamedTuple):
    """A column of a DataProto, as opposed to any other tensor: an output's columns may be lent."""

    tensor: torch.Tensor


@dataclass(slots=True)
class _Part:
    """Bytes that stay out of the stream; `root` is the tensor whose storage they lie in, None if they are a copy."""

    memory: np.ndarray
    root: torch.Tensor | None = None
    is_column: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """Address and size."""
        return self.memory.__array_interface__["data"][0], self.memory.nbytes


class _Pickler(cloudpickle.Pickler):
    """Leaves memory out of the stream; `parts` has it, in the order in which unpickling needs it."""

    def __init__(self, file: io.BytesIO) -> None:
        self.parts: list[_Part] = []
        self._of_tensors: dict[int, tuple[pickle.PickleBuffer, _Part]] = {}
        # Not a method: a cycle with the pickler would keep the objects until the next garbage collection.
        super().__init__(
            file, protocol=5, buffer_callback=partial(_take, self.parts, self._of_tensors)
        )

    def reducer_override(self, obj: Any) -> Any:
        """How an object is pickled that is no built-in."""
        is_column = type(obj) is _Column
        if is_column or (
            type(obj) is torch.Tensor and obj.layout is torch.strided and not obj.is_quantized
        ):
            tensor = obj.tensor if is_column else obj
            plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
            memory = bytes_of(plain)
            buffer = pickle.PickleBuffer(memory)
            if memory.nbytes >= BUFFER_FROM_BYTES:
                is_view = plain.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
                part = _Part(memory, root_of(tensor) if is_view else None, is_column)
                self._of_tensors[id(buffer)] = (buffer, part)
            arguments = str(plain.dtype).removeprefix("torch."), tuple(plain.shape), buffer
            return open_column if is_column else unpack_tensor, arguments
        if isinstance(obj, DataProto):
            columns = None if obj.batch is None else map_columns(obj.batch, _Column)
            rows = 0 if obj.batch is None else obj.batch.batch_size[0]
            return rebuild_proto, (type(obj), rows, columns, obj.non_tensor_batch, obj.meta_info)
        if isinstance(obj, (ray.ObjectRef, ray.actor.ActorHandle)):
            raise _NeedsRayError
        return super().reducer_override(obj)


def _take(
    parts: list[_Part],
    of_tensors: dict[int, tuple[pickle.PickleBuffer, _Part]],
    buffer: pickle.PickleBuffer,
) -> bool:
    memory = buffer.raw()
    if id(buffer) in of_tensors:
        parts.append(of_tensors[id(buffer)][1])
    elif memory.nbytes >= BUFFER_FROM_BYTES:
        parts.append(_Part(np.frombuffer(memory, dtype=np.uint8)))
    return memory.nbytes < BUFFER_FROM_BYTES


def open_column(dtype_name: str, shape: tuple[int, ...], buffer: Any) -> torch.Tensor:
    """A column over the bytes of a buffer; lent if they may not be written to."""
    memory = np.frombuffer(buffer, dtype=np.uint8)
    if memory.flags.writeable:
        return unpack_tensor(dtype_name, shape, buffer)
    column = tensor_over(memory, getattr(torch, dtype_name), shape)
    return lend(column, release_pages if memory.nbytes >= ALONE_FROM_BYTES else None)


def _pickled(value: Any) -> list[_Part]:
    """The stream of a pickled value, and what stays out of it; a _NeedsRayError if it is Ray's to pickle."""
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    # Not `clear_memo`: a garbage collection in another thread may follow the memo to what is freed there, and crash.
    return [_Part(np.frombuffer(file.getbuffer(), dtype=np.uint8)), *pickler.parts]


def _own(memory: Any) -> Any:
    """A writable copy of bytes."""
    if isinstance(memory, bytes):
        return bytearray(memory)
    return bytes_of(copy_of(tensor_over(memory, torch.uint8, (len(memory),))))


# ---- arguments ----------------------------------------------------------------------------------


class Message(NamedTuple):
    """One rank's arguments."""

    body: Any  # what travels with the call: bytes; or `(args, kwargs)` themselves, which are Ray's to pickle
    # Objects in Ray's store; to be passed as top-level arguments, so that Ray fetches them first.
    refs: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class _Draft:
    """Pickled arguments, and the ranks that get them: the ranks of a model-parallel group get the same ones."""

    parts: list[_Part]
    ranks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _Item:
    """An array to be put, for some ranks; with the state of its tensor, if it is a whole storage."""

    memory: np.ndarray
    root: torch.Tensor | None = None
    stamp: Any = None
    ranks: set[int] = field(default_factory=set)


def stamp_of(root: torch.Tensor) -> Any:
    """Equal as long as the bytes of a tensor's storage are; None where they may change without a trace: in memory that
    numpy has lent or was lent (torch may not resize it) or that other processes share, and in inference tensors, which
    count no versions. What cannot be seen are writes through `Tensor.data` and through DLPack."""
    storage = root.untyped_storage()
    is_shared = root.device.type == "cpu" and root.is_shared()
    if root.is_inference() or is_shared or not storage.resizable():
        return None
    return root._version, storage.data_ptr(), storage.nbytes()


class Outbox:
    """Packs the arguments of a process's calls; remembers which columns are in the store."""

    def __init__(self) -> None:
        self._session = ""
        self._kept: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def put(self, arrays: list[np.ndarray]) -> Any:
        """Write byte arrays to Ray's store as one object, which lives as long as the handle that is returned."""
        ref = ray.put(arrays)
        if sum(array.nbytes for array in arrays) >= ALONE_FROM_BYTES:
            release_pages()
        return ref

    def session(self) -> str:
        """This process in this cluster: a name that changes when earlier handles are no longer valid."""
        return ray.get_runtime_context().get_worker_id()

    def forget(self) -> None:
        """Send every column again the next time, for instance after a write through `Tensor.data`."""
        self._kept.clear()

    def pack(self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Message]:
        """One message for each rank's `(args, kwargs)`."""
        drafts: dict[Any, _Draft] = {}
        messages: dict[Any, Message] = {}
        keys = [(*map(id, args), *kwargs, *map(id, kwargs.values())) for args, kwargs in calls]
        for rank, (key, call) in enumerate(zip(keys, calls, strict=True)):
            if key not in drafts and key not in messages:
                try:
                    drafts[key] = _Draft(_pickled(call))
                except _NeedsRayError:
                    messages[key] = Message(call)
            if key in drafts:
                drafts[key].ranks.add(rank)
        locations = self._locations(list(drafts.values()))
        for key, draft in drafts.items():
            # Where each part lies: in one of the refs, or, without a location, in the message itself.
            refs: dict[Any, int] = {}
            places: list[Any] = []
            for part in draft.parts:
                address, size = part.key if locations else (0, 0)
                start, location = 0, locations.get((address, size))
                if part.root is not None and id(part.root) in locations:
                    start, location = (
                        address - part.root.untyped_storage().data_ptr(),
                        locations[id(part.root)],
                    )
                if location is None:
                    places.append(part.memory.tobytes())
                else:
                    ref, item = location
                    places.append((refs.setdefault(ref, len(refs)), item, start, start + size))
            messages[key] = Message(pickle.dumps(places, protocol=5), tuple(refs))
        return [messages[key] for key in keys]

    def _locations(self, drafts: Sequence[_Draft]) -> dict[Any, Location]:
        """Where bytes are in the store, by the id of their root or by their key; what is missing there is put."""
        kept: dict[Any, Location] = {}
        if any(len(draft.parts) > 1 for draft in drafts):
            if self._session != (session := self.session()):
                self._kept.clear()
                self._session = session
            roots = {
                id(part.root): part.root
                for draft in drafts
                for part in draft.parts
                if part.root is not None
            }
            entries = {key: self._kept.get(root) for key, root in roots.items()}
            kept = {
                key: entry[1]
                for key, entry in entries.items()
                if entry and entry[0] == stamp_of(roots[key])
            }
        missing = [
            (draft, part) for draft in drafts for part in draft.parts if id(part.root) not in kept
        ]
        if (
            sum(len(draft.ranks) * part.memory.nbytes for draft, part in missing)
            <= INLINE_UP_TO_BYTES
        ):
            return kept
        # A put costs more than a few kilobytes inside a message.
        streams = {
            id(draft.parts[0])
            for draft in drafts
            if draft.parts[0].memory.nbytes <= INLINE_UP_TO_BYTES
        }
        return kept | self._put([each for each in missing if id(each[1]) not in streams])

    def _put(self, missing: Sequence[tuple[_Draft, _Part]]) -> dict[Any, Location]:
        """Put what is missing: whole storages where half of them is used, else the parts."""
        used: dict[int, set[tuple[int, int]]] = {}
        for _, part in missing:
            used.setdefault(id(part.root), set()).add(part.key)
        items: dict[Any, _Item] = {}
        for draft, part in missing:
            storage = None if part.root is None else part.root.untyped_storage()
            is_whole = (
                storage is not None
                and 2 * sum(size for _, size in used[id(part.root)]) >= storage.nbytes()
            )
            key = id(part.root) if is_whole else part.key
            if key not in items and is_whole and part.root is not None:
                memory = bytes_of(torch.empty(0, dtype=torch.uint8).set_(storage))
                items[key] = _Item(memory, part.root, stamp_of(part.root))
            elif key not in items:
                items[key] = _Item(part.memory)
            items[key].ranks |= draft.ranks
        objects: dict[Any, list[Any]] = {}
        for key, item in items.items():
            is_alone = item.memory.nbytes >= ALONE_FROM_BYTES
            objects.setdefault(key if is_alone else frozenset(item.ranks), []).append(key)
        locations = {}
        for keys in objects.values():
            ref = self.put([items[key].memory for key in keys])
            for number, key in enumerate(keys):
                locations[key] = (ref, number)
                if items[key].stamp is not None:
                    self._kept[items[key].root] = (items[key].stamp, locations[key])
        return locations


OUTBOX = Outbox()


def unpack(body: Any, values: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """`(args, kwargs)` of a message, given its body and the values of its refs; in memory of the caller's own."""
    if not isinstance(body, bytes):
        return body
    stream, *parts = (
        place if isinstance(place, bytes) else values[place[0]][place[1]][place[2] : place[3]]
        for place in pickle.loads(body)
    )
    return pickle.loads(stream, buffers=map(_own, parts))


# ---- outputs ------------------------------------------------------------------------------------


class PackedResult(NamedTuple):
    """A large output: the pickle stream, the memory that stays out of it, and which of that are columns."""

    stream: np.ndarray
    memories: list[np.ndarray]
    are_columns: list[bool]


def pack_result(value: Any) -> Any:
    """What a worker's method returned, in the form that Ray stores; large tensors are not copied."""
    try:
        stream, *parts = _pickled(value)
    except _NeedsRayError:
        return value
    if stream.memory.nbytes + sum(part.memory.nbytes for part in parts) <= INLINE_UP_TO_BYTES:
        return pickle.dumps(
            (stream.memory.tobytes(), [part.memory.tobytes() for part in parts]), protocol=5
        )
    return PackedResult(
        stream.memory, [part.memory for part in parts], [part.is_column for part in parts]
    )


def unpack_result(value: Any, borrow: bool = False) -> Any:
    """Inverse of `pack_result`, after `ray.get`. With `borrow`, columns may lie in read-only shared memory: they must
    reach nothing but `DataProto.concat`, which copies them, even those of a single part."""
    if isinstance(value, bytes):
        stream, memories = pickle.loads(value)
        return pickle.loads(stream, buffers=map(_own, memories))
    if not isinstance(value, PackedResult):
        return value
    buffers = [
        memory if borrow and is_column else _own(memory)
        for memory, is_column in zip(value.memories, value.are_columns, strict=True)
    ]
    return pickle.loads(value.stream, buffers=buffers)


# ---- pages --------------------------------------------------------------------------------------

_MADV_DONTNEED = 4
_STORE = "/plasma"
_mappings: list[tuple[int, int]] = []


def release_pages() -> None:
    """Drop this process's page-table entries of Ray's store; does nothing where there is no /proc.

    The store is one shared mapping. Each page that a process has written (`ray.put`) or read stays in its page table
    and counts as its memory: a driver that sends a batch and collects the outputs would seem to hold all of them. The
    bytes stay in the store. The same advice given to private memory would wipe it: so a mapping qualifies only if it
    is shared and belongs to the store, and before each release it is checked that the mapping is still there.
    """
    if sys.platform != "linux":
        return
    if not _mappings or not all(_is_store(start, end) for start, end in _mappings):
        with open("/proc/self/maps", encoding="utf-8") as lines:
            # 7f8f7c000000-7f8fbc000000 rw-s 00000000 00:1b 34    /dev/shm/plasmaIbiKHf (deleted)
            fields = [line.split(maxsplit=5) for line in lines]
        found = [
            each[0].split("-") for each in fields if each[1].endswith("s") and _STORE in each[-1]
        ]
        _mappings[:] = [(int(start, 16), int(end, 16)) for start, end in found]
    for start, end in _mappings:
        advise(start, end - start, _MADV_DONTNEED)


def _is_store(start: int, end: int) -> bool:
    try:
        return _STORE in os.readlink(f"/proc/self/map_files/{start:x}-{end:x}")
    except OSError:
        return False
