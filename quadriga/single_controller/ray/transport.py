# SPDX-License-Identifier: Apache-2.0
"""Transport of arguments to a worker's process, and of outputs back to the driver.

    driver    Outbox.pack(calls)     one Message per rank: pickled arguments, refs of stored objects
    worker    unpack(body, values)   the arguments, over copies of this rank's bytes
              pack_result(output)    the output, pickled; Ray writes large memory to its store
    driver    unpack_result(value)   the output; its columns are copied, or lent to a concatenation

Arguments are pickled by protocol 5. The memory of tensors and large arrays stays out of the pickle
stream. Chunks of a batch are views of its columns. Therefore the whole storage of a column is put
into the store, once for all ranks, and the message of a rank says which of its bytes the rank gets:

- If the bytes of a storage are already in the store, nothing is put. They stay there as long as the
  tensor lives, so that the next role that gets the batch finds them. A tensor whose memory may
  change unnoticed (`stamp_of`) is put on every call. After a write through `Tensor.data` or DLPack,
  call `Outbox.forget`.
- If the ranks together use less than half of a storage, only copies of the used bytes are put, for
  this call.
- If the whole call needs no more than 64 KiB, the bytes travel inside the messages.

Objects in the store are lists of byte arrays. A large array is alone in its object, so that its
memory is freed as soon as its column is gone. Small arrays share an object, because each put costs
a millisecond, however small. Only arrays for the same ranks share an object, so that no node
fetches bytes that its ranks do not use.

Tensors arrive on the CPU, contiguous, without autograd graphs. Arguments with references to Ray's
objects (such as a DataProtoFuture) are pickled by Ray, which counts the references. Everything here
except `Outbox.put`, `Outbox.session` and `release_pages` works without a cluster.
"""

import io
import mmap
import os
import pickle
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import ray
import torch
from ray import cloudpickle
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from quadriga.protocol import DataProto
from quadriga.protocol.memory import advise, bytes_of, copy_of, lend, root_of, tensor_over
from quadriga.protocol.proto import map_columns
from quadriga.protocol.wire import rebuild_proto, unpack_tensor

INLINE_UP_TO_BYTES = 64 << 10  # a call or an output of at most this size does not use the store
ALONE_FROM_BYTES = 1 << 20  # an array of at least this size is alone in its object
# A separate buffer costs an entry in several tables; smaller memory stays in the stream.
BUFFER_FROM_BYTES = 4096
Location = tuple[Any, int]
"""Reference of an object in the store, and the index of an array in the object."""

# ---- pickling -----------------------------------------------------------------------------------


class _NeedsRayError(Exception):
    """The value contains references to Ray's objects."""


class _BatchColumn(NamedTuple):
    """A column of a DataProto. Unlike other tensors, columns of an output may be lent."""

    tensor: Tensor


@dataclass(slots=True)
class _OutOfBandBuffer:
    """Bytes of a pickled value: the pickle stream itself, or memory outside the stream."""

    memory: np.ndarray
    # Tensor whose storage contains the bytes; None: the bytes are a copy, or not those of a tensor.
    root: Tensor | None = None
    is_column: bool = False  # whether it is the memory of a column of a DataProto

    @property
    def key(self) -> tuple[int, int]:
        """Address and size in bytes, which identify the memory during a call."""
        return self.memory.__array_interface__["data"][0], self.memory.nbytes


class _Pickler(cloudpickle.Pickler):
    """Pickler that leaves large memory out of the stream.

    Attributes:
        parts: the memory outside the stream, in the order in which unpickling needs it.
    """

    def __init__(self, file: io.BytesIO) -> None:
        self.parts: list[_OutOfBandBuffer] = []
        # By id of the buffer. The entry keeps the buffer alive, so that its id stays unique.
        self._tensor_parts: dict[int, tuple[pickle.PickleBuffer, _OutOfBandBuffer]] = {}
        # Not a bound method, whose reference cycle with the pickler would keep the pickled objects
        # alive until the next garbage collection.
        super().__init__(
            file,
            protocol=5,
            buffer_callback=partial(_add_large_buffer, self.parts, self._tensor_parts),
        )

    def reducer_override(self, obj: Any) -> Any:
        """Reduce tensors, columns and batches to functions that rebuild them.

        Raises:
            _NeedsRayError: the object is a reference to an object or an actor of Ray.
        """
        # Subclasses of tensors, and other layouts, are pickled in their own ways.
        if type(obj) is Tensor and obj.layout is torch.strided and not obj.is_quantized:
            return self._reduce_tensor(obj, is_column=False)
        if type(obj) is _BatchColumn:
            return self._reduce_tensor(obj.tensor, is_column=True)
        if isinstance(obj, DataProto):
            # The pickler calls this method again for each column, which is marked as one.
            columns = None if obj.batch is None else map_columns(obj.batch, _BatchColumn)
            rows = 0 if obj.batch is None else obj.batch.batch_size[0]
            return rebuild_proto, (type(obj), rows, columns, obj.non_tensor_batch, obj.meta_info)
        if isinstance(obj, (ray.ObjectRef, ray.actor.ActorHandle)):
            raise _NeedsRayError
        return super().reducer_override(obj)

    def _reduce_tensor(self, tensor: Tensor, *, is_column: bool) -> Any:
        """Reduce a tensor to a function that rebuilds it, and the function's arguments.

        Args:
            tensor: the tensor.
            is_column: whether it is a column of a DataProto.
        """
        plain = tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()
        memory = bytes_of(plain)
        buffer = pickle.PickleBuffer(memory)
        if memory.nbytes >= BUFFER_FROM_BYTES:
            # Whether the bytes of `plain` are in the tensor's storage. Otherwise it is a copy.
            is_view = plain.untyped_storage().data_ptr() == tensor.untyped_storage().data_ptr()
            part = _OutOfBandBuffer(memory, root_of(tensor) if is_view else None, is_column)
            self._tensor_parts[id(buffer)] = (buffer, part)
        arguments = (str(plain.dtype).removeprefix("torch."), tuple(plain.shape), buffer)
        return open_column if is_column else unpack_tensor, arguments


def _add_large_buffer(
    parts: list[_OutOfBandBuffer],
    tensor_parts: dict[int, tuple[pickle.PickleBuffer, _OutOfBandBuffer]],
    buffer: pickle.PickleBuffer,
) -> bool:
    """Callback of the pickler for each buffer: add a large buffer to `parts`.

    Args:
        parts: the memory outside the stream.
        tensor_parts: by id of a tensor's buffer: the buffer, and its part.
        buffer: the buffer, of a tensor or of an object with another buffer, such as an array.

    Returns:
        Whether the buffer is small: pickle then keeps it in the stream.
    """
    memory = buffer.raw()
    if id(buffer) in tensor_parts:
        parts.append(tensor_parts[id(buffer)][1])
    elif memory.nbytes >= BUFFER_FROM_BYTES:
        parts.append(_OutOfBandBuffer(np.frombuffer(memory, dtype=np.uint8)))
    return memory.nbytes < BUFFER_FROM_BYTES


def open_column(dtype_name: str, shape: tuple[int, ...], buffer: Any) -> Tensor:
    """Rebuild a column over the memory of a buffer.

    If the memory is read-only, it is Ray's store, and the column is only lent: `DataProto.concat`
    copies it.

    Args:
        dtype_name: name of the dtype in torch.
        shape: shape of the column.
        buffer: bytes of the column.
    """
    memory = np.frombuffer(buffer, dtype=np.uint8)
    if memory.flags.writeable:
        return unpack_tensor(dtype_name, shape, buffer)
    column = tensor_over(memory, getattr(torch, dtype_name), shape)
    # For large columns, `release_pages` is called when the column has been copied.
    return lend(column, release_pages if memory.nbytes >= ALONE_FROM_BYTES else None)


def _pickle_parts(value: Any) -> list[_OutOfBandBuffer]:
    """Pickle a value.

    Returns:
        The stream, and then the memory outside it.

    Raises:
        _NeedsRayError: Ray has to pickle the value.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.dump(value)
    # Not `clear_memo`: a garbage collection in another thread could follow the memo to objects that
    # are being freed, and crash.
    return [_OutOfBandBuffer(np.frombuffer(file.getbuffer(), dtype=np.uint8)), *pickler.parts]


def _writable_copy(memory: Any) -> Any:
    """Copy bytes or a byte array, so that unpickled tensors may be written to."""
    if isinstance(memory, bytes):
        return bytearray(memory)
    return bytes_of(copy_of(tensor_over(memory, torch.uint8, (len(memory),))))


# ---- arguments ----------------------------------------------------------------------------------


class Message(NamedTuple):
    """Packed arguments of one rank."""

    # Sent with the call: bytes, or `(args, kwargs)` that Ray has to pickle.
    body: Any
    # References of objects in Ray's store. They are top-level arguments, which Ray fetches
    # before the call begins.
    refs: tuple[Any, ...] = ()


@dataclass(slots=True, eq=False)
class _PickledArguments:
    """Pickled arguments, and the ranks that get them: all ranks of a model-parallel group."""

    parts: list[_OutOfBandBuffer]
    ranks: set[int] = field(default_factory=set)


@dataclass(slots=True)
class _ArrayToPut:
    """An array to put into the store."""

    memory: np.ndarray
    root: Tensor | None = None  # the tensor whose whole storage the array is; None: a single part
    stamp: Any = None  # `stamp_of(root)`; None: do not remember the location for later calls
    ranks: set[int] = field(default_factory=set)  # the ranks that read it


def stamp_of(root: Tensor) -> Any:
    """Compute a stamp of a tensor's storage, which changes whenever torch writes to the storage.

    Writes through `Tensor.data` and DLPack are not noticed.

    Args:
        root: the tensor.

    Returns:
        The stamp; None if bytes may change unnoticed: in memory that is shared with numpy (torch
        may not resize it) or with other processes, and in inference tensors, which have no version
        counter.
    """
    storage = root.untyped_storage()
    is_shared = root.device.type == "cpu" and root.is_shared()
    if root.is_inference() or is_shared or not storage.resizable():
        return None
    return root._version, storage.data_ptr(), storage.nbytes()


class Outbox:
    """Packs the arguments of calls, and remembers which columns are in the store."""

    def __init__(self) -> None:
        self._session = ""
        # Stamp and location of each stored tensor. Entries go when their tensors are freed.
        self._stored: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def put(self, arrays: list[np.ndarray]) -> Any:
        """Put byte arrays into Ray's store as one object, which lives as long as the result."""
        ref = ray.put(arrays)
        if sum(array.nbytes for array in arrays) >= ALONE_FROM_BYTES:
            release_pages()
        return ref

    def session(self) -> str:
        """Name of this process in this cluster. It changes when earlier refs become invalid."""
        return ray.get_runtime_context().get_worker_id()

    def forget(self) -> None:
        """Send every column again the next time, for example after a write through DLPack."""
        self._stored.clear()

    def pack(self, calls: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]) -> list[Message]:
        """Pack `(args, kwargs)` of each rank into a message, and put missing bytes into the store.

        Args:
            calls: arguments of each rank.

        Returns:
            The message of each rank. Ranks whose arguments are the same objects share a message.
        """
        drafts = {}
        messages = {}
        # The ids of all arguments, and the names of named ones.
        keys = [(*map(id, args), *kwargs, *map(id, kwargs.values())) for args, kwargs in calls]
        for rank, (key, call) in enumerate(zip(keys, calls, strict=True)):
            if key not in drafts and key not in messages:
                try:
                    drafts[key] = _PickledArguments(_pickle_parts(call))
                except _NeedsRayError:
                    # Ray pickles the arguments itself.
                    messages[key] = Message(call)
            if key in drafts:
                drafts[key].ranks.add(rank)

        locations = self._locations(list(drafts.values()))
        for key, draft in drafts.items():
            messages[key] = _make_message(draft.parts, locations)
        return [messages[key] for key in keys]

    def _locations(self, drafts: Sequence[_PickledArguments]) -> dict[Any, Location]:
        """Find the bytes of messages in the store, and put missing bytes there.

        Args:
            drafts: the pickled arguments.

        Returns:
            Locations by the id of a root if its whole storage is in the store, and by the key of a
            part that is there alone. Parts without a location travel in the messages.
        """
        locations = {}
        # Pairs of the pickled arguments and one of their parts.
        pairs = [(draft, part) for draft in drafts for part in draft.parts]
        # Look up stored tensors, unless there are only the streams.
        if len(pairs) > len(drafts):
            session = self.session()
            if self._session != session:
                self._stored.clear()
                self._session = session
            roots = {id(part.root): part.root for _, part in pairs if part.root is not None}
            for key, root in roots.items():
                entry = self._stored.get(root)
                # The bytes in the store are valid if the tensor has not changed.
                if entry and entry[0] == stamp_of(root):
                    locations[key] = entry[1]

        missing = [(draft, part) for draft, part in pairs if id(part.root) not in locations]
        # Without the store, every rank would get its own copy of a part in its message.
        num_bytes = sum(len(draft.ranks) * part.memory.nbytes for draft, part in missing)
        if num_bytes <= INLINE_UP_TO_BYTES:
            return locations
        # A put costs more than a few kilobytes inside a message, so short streams stay there.
        parts_to_put = []
        for draft, part in missing:
            is_stream = part is draft.parts[0]
            if not is_stream or part.memory.nbytes > INLINE_UP_TO_BYTES:
                parts_to_put.append((draft, part))
        return locations | self._put(parts_to_put)

    def _put(
        self, missing: Sequence[tuple[_PickledArguments, _OutOfBandBuffer]]
    ) -> dict[Any, Location]:
        """Put parts into the store: the whole storage if at least half of its bytes are used.

        Args:
            missing: pairs of pickled arguments and one of their parts that is not in the store.

        Returns:
            Locations of the parts, as for `_locations`.
        """
        # Bytes of each root that the ranks use together; equal parts count once. Parts without a
        # root are counted under the id of None, which is not looked up.
        used_bytes = Counter[int]()
        for root_id, (_, size) in {(id(part.root), part.key) for _, part in missing}:
            used_bytes[root_id] += size

        # By key of a location: the id of a root, or the key of a part.
        arrays = {}
        for draft, part in missing:
            root = part.root
            key = part.key
            if root is not None and 2 * used_bytes[id(root)] >= root.untyped_storage().nbytes():
                key = id(root)
                if key not in arrays:
                    content = torch.empty(0, dtype=torch.uint8).set_(root.untyped_storage())
                    arrays[key] = _ArrayToPut(bytes_of(content), root, stamp_of(root))
            elif key not in arrays:
                arrays[key] = _ArrayToPut(part.memory)
            arrays[key].ranks |= draft.ranks

        # A large array is alone in its object. Small arrays for the same ranks share an object.
        objects = {}
        for key, array in arrays.items():
            is_alone = array.memory.nbytes >= ALONE_FROM_BYTES
            objects.setdefault(key if is_alone else frozenset(array.ranks), []).append(key)

        locations = {}
        for keys in objects.values():
            ref = self.put([arrays[key].memory for key in keys])
            for number, key in enumerate(keys):
                location = (ref, number)
                locations[key] = location
                # Later calls find the storage by its tensor.
                if arrays[key].stamp is not None:
                    self._stored[arrays[key].root] = (arrays[key].stamp, location)
        return locations


def _make_message(parts: Sequence[_OutOfBandBuffer], locations: Mapping[Any, Location]) -> Message:
    """Make the message of pickled arguments.

    Args:
        parts: the pickle stream, and the memory outside it.
        locations: what is in the store; see `Outbox._locations`.
    """
    refs = {}  # index of each reference in the message
    # For each part its bytes, or where they are: index of the reference, index of the array in the
    # object, first byte and end.
    places = []
    for part in parts:
        address, size = part.key
        start = 0
        location = locations.get(part.key)
        if part.root is not None and id(part.root) in locations:
            # The whole storage is in the store, and the part is somewhere in it.
            start = address - part.root.untyped_storage().data_ptr()
            location = locations[id(part.root)]
        if location is None:
            places.append(part.memory.tobytes())
            continue
        ref, array = location
        places.append((refs.setdefault(ref, len(refs)), array, start, start + size))
    return Message(pickle.dumps(places, protocol=5), tuple(refs))


OUTBOX = Outbox()


def unpack(body: Any, values: Sequence[Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
    """Unpack a message. Tensors and arrays get newly allocated memory, which may be written to.

    Args:
        body: body of the message.
        values: values of the message's refs.

    Returns:
        `(args, kwargs)`.
    """
    if not isinstance(body, bytes):
        return body
    parts = []
    for place in pickle.loads(body):
        if not isinstance(place, bytes):
            ref, array, start, stop = place
            place = values[ref][array][start:stop]
        parts.append(place)
    # The first part is the pickle stream.
    return pickle.loads(parts[0], buffers=map(_writable_copy, parts[1:]))


# ---- outputs ------------------------------------------------------------------------------------


class PackedResult(NamedTuple):
    """A large output, which Ray writes to its store."""

    stream: np.ndarray
    memories: list[np.ndarray]  # memory outside the stream
    are_columns: list[bool]  # whether each is the memory of a column


def pack_result(value: Any) -> Any:
    """Pack the output of a worker's method, without copying large tensors.

    Returns:
        Bytes for a small output, and a `PackedResult` for a large one. The output itself if it
        contains references to Ray's objects, so that Ray has to pickle it.
    """
    try:
        stream, *parts = _pickle_parts(value)
    except _NeedsRayError:
        return value
    memories = [part.memory for part in parts]
    if stream.memory.nbytes + sum(memory.nbytes for memory in memories) <= INLINE_UP_TO_BYTES:
        contents = [memory.tobytes() for memory in memories]
        return pickle.dumps((stream.memory.tobytes(), contents), protocol=5)
    return PackedResult(stream.memory, memories, [part.is_column for part in parts])


def unpack_result(value: Any, borrow: bool = False) -> Any:
    """Inverse of `pack_result`, after `ray.get`.

    Args:
        value: a packed output.
        borrow: whether columns may be views of read-only shared memory. The caller must pass them
            only to `DataProto.concat`, which copies even a single part.
    """
    if isinstance(value, bytes):
        stream, memories = pickle.loads(value)
        return pickle.loads(stream, buffers=map(_writable_copy, memories))
    if not isinstance(value, PackedResult):
        return value
    buffers = []
    for memory, is_column in zip(value.memories, value.are_columns, strict=True):
        buffers.append(memory if borrow and is_column else _writable_copy(memory))
    return pickle.loads(value.stream, buffers=buffers)


# ---- pages --------------------------------------------------------------------------------------

_STORE = "/plasma"  # part of the name of the store's file
_mappings: list[tuple[int, int]] = []  # first address and end of the store's mappings, if known


def release_pages() -> None:
    """Drop this process's page-table entries of Ray's store. Does nothing without /proc.

    The store is one shared mapping. Each page that a process has written (`ray.put`) or read stays
    in its page table and counts as its memory: a driver that sends a batch and collects the outputs
    would seem to hold all of them. The bytes themselves stay in the store. Private memory, however,
    would be wiped by the same advice, so a mapping must be shared and belong to the store, which is
    checked before each release.
    """
    if sys.platform != "linux":
        return
    # Find the mappings of the store, unless those that were found earlier are still there.
    if not _mappings or not all(_is_store(start, end) for start, end in _mappings):
        mappings = []
        with open("/proc/self/maps", encoding="utf-8") as lines:
            for line in lines:
                # 7f8f7c000000-7f8fbc000000 rw-s 00000000 00:1b 34 /dev/shm/plasmaIbiKHf (deleted)
                fields = line.split(maxsplit=5)
                if fields[1].endswith("s") and _STORE in fields[-1]:
                    start, end = fields[0].split("-")
                    mappings.append((int(start, 16), int(end, 16)))
        _mappings[:] = mappings
    for start, end in _mappings:
        advise(start, end - start, mmap.MADV_DONTNEED)


def _is_store(start: int, end: int) -> bool:
    """Whether a mapping of this process, by its addresses, belongs to the store."""
    try:
        return _STORE in os.readlink(f"/proc/self/map_files/{start:x}-{end:x}")
    except OSError:
        return False
