# SPDX-License-Identifier: Apache-2.0
"""How arguments reach a worker's process, and how outputs come back.

    driver    Outbox.pack(calls)     one Message per rank: a header, and refs of objects in the store
                                     columns are written to the store once per call, or are there already
    worker    unpack(header, values) copies this rank's rows into memory of its own
              pack_result(output)    the output's columns as byte arrays, which Ray writes to the store
    driver    unpack_result(value)   opens them: copied, or lent for a concatenation to copy

A DataProto that is an argument or an output itself takes this road. One inside another container is
pickled by its own wire format (`protocol/wire.py`), everything else by Ray; a DataProtoFuture as well, whose
refs Ray keeps count of. Tensors arrive on the CPU, contiguous, without their autograd graphs.

Everything here but `RayStore` is free of Ray: what is packed can be unpacked in the same process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import ray
import torch
from tensordict import TensorDict

from quadriga.protocol import DataProto
from quadriga.protocol.memory import bytes_of, copy_of, lend
from quadriga.protocol.wire import pack as pack_value
from quadriga.single_controller.ray import pages
from quadriga.single_controller.ray.columns import (
    ALONE_FROM_BYTES,
    Blob,
    Kept,
    Placed,
    Shipment,
    placed_here,
)
from quadriga.single_controller.ray.letters import seal, unseal
from quadriga.single_controller.ray.objects import NeedsRayError, pickle_arrays, unpickle_arrays

Call = tuple[Sequence[Any], Mapping[str, Any]]
Objects = dict[int, Sequence[np.ndarray]]


class Store(Protocol):
    """Where an outbox leaves its objects."""

    def put(self, arrays: list[np.ndarray]) -> Any:
        """Write byte arrays as one object and return a hashable handle; the object lives as long as the handle."""

    def session(self) -> str:
        """A name that changes when handles of before are worth nothing any more."""


class RayStore:
    """Ray's object store."""

    def put(self, arrays: list[np.ndarray]) -> Any:
        """Write byte arrays as one object."""
        ref = ray.put(arrays)
        if sum(array.nbytes for array in arrays) >= ALONE_FROM_BYTES:
            pages.release()
        return ref

    def session(self) -> str:
        """This process in this cluster."""
        return ray.get_runtime_context().get_worker_id()


@dataclass(frozen=True)
class Message:
    """One rank's arguments.

    Attributes:
        header: what is pickled with the call.
        refs: objects in Ray's store; to be passed as top-level arguments, so that Ray fetches them first.
    """

    header: Any
    refs: tuple[Any, ...] = ()


# Named tuples, because pickle takes them apart without a call into Python.


class PackedArrays(NamedTuple):
    """Arrays that were pickled: where the stream and its buffers are."""

    stream: Placed
    buffers: tuple[Placed, ...]


class PackedProto(NamedTuple):
    """Stands for a DataProto on the way.

    Attributes:
        rows: the batch size; None: there is no TensorDict.
        columns: where each tensor is, nested TensorDicts as dictionaries.
        arrays: where the pickled arrays are, or the arrays themselves.
        meta_info: what is true of the whole batch.
    """

    rows: int | None
    columns: dict[str, Any]
    arrays: PackedArrays | dict[str, np.ndarray]
    meta_info: dict[str, Any]


class Header(NamedTuple):
    """One rank's arguments, DataProtos packed, and which objects of the call its refs are."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    numbers: tuple[int, ...]


@dataclass(slots=True)
class _Draft:
    """A DataProto of a call, and the ranks that get it."""

    proto: DataProto
    ranks: set[int] = field(default_factory=set)
    columns: dict[str, Any] = field(default_factory=dict)
    arrays: Blob | dict[str, np.ndarray] = field(default_factory=dict)

    def order(self, shipment: Shipment) -> None:
        """Ask for everything that is in it."""
        self.columns = _map_leaves(self.proto.batch, lambda tensor: shipment.want(tensor, self.ranks))
        arrays = self.proto.non_tensor_batch
        try:
            self.arrays = shipment.want_arrays(pickle_arrays(arrays), arrays, self.ranks) if arrays else {}
        except NeedsRayError:
            self.arrays = arrays

    def packed(self) -> PackedProto:
        """What takes its place, once the shipment has been sent."""
        arrays = self.arrays
        if isinstance(arrays, Blob):
            stream, *buffers = arrays.placed()
            arrays = PackedArrays(stream, tuple(buffers))
        return _packed(self.proto, _map_leaves(self.columns, lambda view: view.placed), arrays)


def _map_leaves(columns: Any, function: Any) -> dict[str, Any]:
    """A nested mapping of columns as dictionaries, with `function` applied to every leaf."""
    return {
        key: _map_leaves(value, function) if isinstance(value, (TensorDict, dict)) else function(value)
        for key, value in (() if columns is None else columns.items())
    }


def _packed(proto: DataProto, columns: dict[str, Any], arrays: PackedArrays | dict[str, np.ndarray]) -> PackedProto:
    rows = None if proto.batch is None else proto.batch.batch_size[0]
    return PackedProto(rows, columns, arrays, pack_value(proto.meta_info, {}))


class Outbox:
    """Where the arguments of a process's calls leave from; remembers what is in the store.

    Args:
        store: where objects go.
    """

    def __init__(self, store: Store | None = None) -> None:
        self._store: Store = store or RayStore()
        self._session = ""
        self._columns, self._blobs = Kept(), Kept()

    def pack(self, calls: Sequence[Call]) -> list[Message]:
        """One message for each rank's `(args, kwargs)`."""
        if not any(type(value) is DataProto for args, kwargs in calls for value in (*args, *kwargs.values())):
            return [self._message(call, {}, {}) for call in calls]
        if self._session != (session := self._store.session()):
            self.forget()
            self._session = session
        drafts: dict[int, _Draft] = {}
        for rank, (args, kwargs) in enumerate(calls):
            for value in (*args, *kwargs.values()):
                if type(value) is DataProto:
                    drafts.setdefault(id(value), _Draft(value)).ranks.add(rank)
        shipment = Shipment(self._columns, self._blobs)
        for draft in drafts.values():
            draft.order(shipment)
        shipment.send(self._store.put)
        packed = {identity: draft.packed() for identity, draft in drafts.items()}
        return [self._message(call, packed, shipment.refs_of(rank)) for rank, call in enumerate(calls)]

    def forget(self) -> None:
        """Send every column again the next time, for instance after a write through `Tensor.data`."""
        self._columns.clear()
        self._blobs.clear()

    def _message(self, call: Call, packed: dict[int, PackedProto], refs: dict[int, Any]) -> Message:
        args, kwargs = call
        memo: dict[int, Any] = {}

        def prepare(value: Any) -> Any:
            return packed[id(value)] if type(value) is DataProto else pack_value(value, memo)

        named = {key: prepare(value) for key, value in kwargs.items()}
        return Message(Header(tuple(map(prepare, args)), named, tuple(refs)), tuple(refs.values()))


OUTBOX = Outbox()


def unpack(header: Header, values: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """`(args, kwargs)` of a message, given its header and the values of its refs; memory of the caller's own."""
    objects: Objects = dict(zip(header.numbers, values, strict=True))

    def restore(value: Any) -> Any:
        return _open(value, objects, borrow=False) if isinstance(value, PackedProto) else value

    return tuple(map(restore, header.args)), {key: restore(value) for key, value in header.kwargs.items()}


def pack_result(value: Any) -> Any:
    """What a worker's method returned, in the form that Ray stores; large tensors are not copied."""
    return seal(_pack_output(value))


def _pack_output(value: Any) -> Any:
    if type(value) is not DataProto:
        return pack_value(value, {})
    columns, arrays = _map_leaves(value.batch, placed_here), value.non_tensor_batch
    try:
        pickled = pickle_arrays(arrays) if arrays else None
    except NeedsRayError:
        pickled = None
    if pickled is None:
        return _packed(value, columns, arrays)
    buffers = (part if isinstance(part, np.ndarray) else bytes_of(part) for part in pickled.buffers)
    stream, *beside = (
        Placed(memory, torch.uint8, (memory.nbytes,))
        for memory in (np.frombuffer(pickled.stream, dtype=np.uint8), *buffers)
    )
    return _packed(value, columns, PackedArrays(stream, tuple(beside)))


def unpack_result(value: Any, borrow: bool = False) -> Any:
    """Inverse of `pack_result`, after `ray.get`.

    Args:
        value: what `ray.get` gave.
        borrow: columns may lie in read-only shared memory. `DataProto.concat` copies them, even those
            of a single part; they must reach nobody else.
    """
    value = unseal(value)
    return _open(value, {}, borrow) if isinstance(value, PackedProto) else value


def _open(packed: PackedProto, objects: Objects, borrow: bool) -> DataProto:
    def column(placed: Placed) -> torch.Tensor:
        tensor = placed.open(objects)
        if placed.is_copy:
            return tensor
        if not borrow:
            return copy_of(tensor)
        return lend(tensor, pages.release if tensor.nbytes >= ALONE_FROM_BYTES else None)

    arrays = packed.arrays
    if isinstance(arrays, PackedArrays):
        # Objects are not copied when rows are joined, so what they hold is never lent.
        buffers = [bytes_of(copy_of(placed.open(objects))) for placed in arrays.buffers]
        arrays = unpickle_arrays(bytes_of(arrays.stream.open(objects)), buffers)
    else:
        arrays = {key: array if array.flags.writeable else array.copy() for key, array in arrays.items()}
    batch = None if packed.rows is None else _open_batch(packed.columns, packed.rows, column)
    return DataProto(batch=batch, non_tensor_batch=arrays, meta_info=packed.meta_info)


def _open_batch(columns: dict[str, Any], rows: int, column: Any) -> TensorDict:
    opened = {
        key: _open_batch(value, rows, column) if isinstance(value, dict) else column(value)
        for key, value in columns.items()
    }
    return TensorDict(opened, batch_size=[rows])
