# SPDX-License-Identifier: Apache-2.0
"""A DataProto in a file that cannot name code; what is read equals what was written, bit for bit.

The file is one of safetensors, and any reader of these can open it:

    0, 1, ...    the memory of tensors and numpy arrays; one that occurs several times stands there once
    layout       JSON: columns, entries and facts by name, and what in the other parts they are; a column of objects has
                 its distinct entries, and the number of one of them for each row

Entries may be None, numbers, texts, bytes, dates, lists, tuples, sets, dictionaries, tensors, arrays and images, in one
another. Objects of any other class are refused, and so is a value that contains itself.
"""

import datetime
import json
import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from decimal import Decimal
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import safe_open

from quadriga.errors import ProtocolError
from quadriga.protocol.columns import object_array
from quadriga.protocol.memory import bytes_of
from quadriga.protocol.wire import rebuild_proto

_KEY, _VERSION = "quadriga_proto", "3"
_PICKLED = b"quadriga.DataProto.1\n"
# What every version of safetensors knows; other dtypes lie there as bytes.
_NATIVE = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip
_PLAIN = frozenset({type(None), bool, int, float, str})
_COLLECTIONS = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
_TEXTS: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    datetime.datetime: ("$datetime", datetime.datetime.isoformat, datetime.datetime.fromisoformat),
    datetime.date: ("$date", datetime.date.isoformat, datetime.date.fromisoformat),
    datetime.time: ("$time", datetime.time.isoformat, datetime.time.fromisoformat),
    Decimal: ("$decimal", str, Decimal),
    complex: ("$complex", repr, complex),
}


def save_to_disk(data: Any, filepath: str | os.PathLike[str]) -> None:
    """Write a DataProto into a file that its owner alone can read: aside, then renamed, so it is whole or not there.
    Raises ProtocolError: an entry is of a class that a file cannot hold (module docstring); the error names both.
    Raises OSError: there is no room or permission."""
    path = Path(filepath)
    parts = _Writer(f"save_to_disk({str(filepath)!r})").parts(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".partial", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def load_from_disk(cls: type, filepath: str | os.PathLike[str]) -> Any:
    """Read what `save_to_disk` wrote. Nothing that a file names is called; the pickles of older versions are refused.
    Raises ProtocolError: there is no such file, it is not one of ours, or it is damaged."""
    where, fix = f"load_from_disk({str(filepath)!r})", "Write the file with DataProto.save_to_disk."
    try:
        with open(filepath, "rb") as file:
            if file.read(len(_PICKLED)) == _PICKLED:
                got = "a pickle of an older version, which may run any code"
                fix = "Delete it and have it written again."
                raise ProtocolError(
                    where, got=got, expected="a DataProto as it is saved today", fix=fix
                )
        with safe_open(filepath, framework="pt") as opened:
            if (found := (opened.metadata() or {}).get(_KEY)) != _VERSION:
                got = (
                    "another kind of file"
                    if found is None
                    else f"one of the format {found}, not {_VERSION}"
                )
                raise ProtocolError(where, got=got, expected="a saved DataProto", fix=fix)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        rows, batch, arrays, facts = _Reader(tensors).from_json(tensors["layout"].numpy().tobytes())
        return rebuild_proto(cls, rows, batch, dict(arrays), dict(facts))
    except ProtocolError:
        raise
    # Damaged bytes may be anything at all: a name that is missing, a shape that does not fit, a list for a number.
    except Exception as error:
        found = (
            str(error)
            if isinstance(error, OSError)
            else f"another kind of file, or a damaged one ({error})"
        )
        raise ProtocolError(where, got=found, expected="a saved DataProto", fix=fix) from error


class _Writer:
    """Takes a DataProto apart into the memory of tensors and what JSON can hold."""

    def __init__(self, where: str) -> None:
        self._where, self._at = where, ""
        self._memory: list[tuple[str, torch.dtype, list[int], Any]] = []
        # The values are kept: an id is only unique among living objects.
        self._met: dict[int, tuple[Any, Any]] = {}

    def parts(self, data: Any) -> list[Any]:
        """What stands in the file, in order."""
        arrays, facts = {}, {}
        try:
            for key, array in data.non_tensor_batch.items():
                self._at = f"non_tensor_batch[{key!r}]"
                is_column = array.dtype == object and array.ndim == 1
                arrays[key] = self._column(array) if is_column else self._encode(array)
            self._at = "batch"
            batch = None if data.batch is None else self._encode(data.batch.to_dict())
            for key, value in data.meta_info.items():
                self._at = f"meta_info[{key!r}]"
                facts[key] = self._encode(value)
            rows = 0 if data.batch is None else len(data)
            layout = [rows, batch, list(arrays.items()), list(facts.items())]
            # UTF-8 that keeps a lone surrogate, and two of them apart, as escapes would not.
            text = json.dumps(layout, ensure_ascii=False, separators=(",", ":")).encode(
                "utf-8", "surrogatepass"
            )
            self._add("layout", text)
        except (RecursionError, ValueError) as error:
            # Too deep or in itself, or an integer of more digits than Python reads.
            raise self._refusal(str(error)) from error
        # As the format asks for: without gaps, and each dtype at a multiple of its size.
        self._memory.sort(key=lambda part: -part[1].itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt", _KEY: _VERSION}}
        end = 0
        for name, dtype, shape, memory in self._memory:
            start, end = end, end + len(memory)
            header[name] = {"dtype": _NATIVE[dtype], "shape": shape, "data_offsets": [start, end]}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        return [struct.pack("<Q", len(text)), text, *(memory for *_, memory in self._memory)]

    def _column(self, array: np.ndarray) -> dict[str, Any]:
        """Rows that share an object, as repeated ones do, share it again when they are read. Lists of whole numbers,
        such as token ids, are one array and the length of each."""
        distinct = {id(value): value for value in array}
        numbers, values = {key: number for number, key in enumerate(distinct)}, [*distinct.values()]
        rows = [numbers[id(value)] for value in array]
        if set(map(type, values)) == {list} and {int}.issuperset(
            map(type, chain.from_iterable(values))
        ):
            with suppress(OverflowError):  # one has over 64 bits
                flat = np.fromiter(chain.from_iterable(values), np.int64)
                return {"$column": [rows, {"$lists": [self._encode(flat), list(map(len, values))]}]}
        column, entries = self._at, []
        for number, value in enumerate(values):
            self._at = f"{column}, distinct entry {number}"
            entries.append(self._encode(value))
        return {"$column": [rows, entries]}

    def _encode(self, value: Any) -> Any:
        """The value in JSON's types; what has no such form is a dictionary of one key that begins with a $."""
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            return (
                value
                if _PLAIN.issuperset(map(type, value))
                else [self._encode(entry) for entry in value]
            )
        if kind is dict:
            if {str}.issuperset(map(type, value)) and not (
                len(value) == 1 and next(iter(value)).startswith("$")
            ):
                return {key: self._encode(entry) for key, entry in value.items()}
            return {
                "$dict": [[self._encode(key), self._encode(entry)] for key, entry in value.items()]
            }
        if kind in _COLLECTIONS:
            return {_COLLECTIONS[kind]: [self._encode(entry) for entry in value]}
        if kind in _TEXTS:
            return {_TEXTS[kind][0]: _TEXTS[kind][1](value)}
        if isinstance(value, np.generic) and value.dtype.kind in "biufcSUmM":
            return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
        if id(value) not in self._met:
            self._met[id(value)] = (value, self._stored(value))
        return self._met[id(value)][1]

    def _stored(self, value: Any) -> dict[str, Any]:
        """A value whose memory stands in the file by itself."""
        kind, name = type(value), str(len(self._memory))
        if kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
            tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            memory, shape = bytes_of(tensor), list(tensor.shape)
            is_native = tensor.dtype in _NATIVE
            self._add(name, memory, *((tensor.dtype, shape) if is_native else ()))
            return {"$tensor": [name, str(tensor.dtype).removeprefix("torch."), shape]}
        if kind is np.ndarray and value.dtype == object:
            return {"$objects": [list(value.shape), [self._encode(entry) for entry in value.flat]]}
        if kind is np.ndarray and value.dtype.kind in "biufcSUmM":
            self._add(name, value.tobytes())
            return {"$array": [name, value.dtype.str, list(value.shape)]}
        if kind is bytes:
            self._add(name, value)
            return {"$bytes": name}
        if kind.__module__.startswith("PIL.") and getattr(value, "palette", self) is None:
            self._add(name, value.tobytes())
            return {"$image": [name, value.mode, list(value.size), self._encode(value.info)]}
        raise self._refusal(f"an object of the class {kind.__module__}.{kind.__qualname__}")

    def _add(
        self,
        name: str,
        memory: Any,
        dtype: torch.dtype = torch.uint8,
        shape: list[int] | None = None,
    ) -> None:
        self._memory.append((name, dtype, [len(memory)] if shape is None else shape, memory))

    def _refusal(self, got: str) -> ProtocolError:
        expected = "None, numbers, texts, bytes, dates, tensors, arrays, images, and lists and dictionaries of these"
        fix = "Turn it into these, or leave it out (DataProto.select)."
        return ProtocolError(f"{self._where}: {self._at}", got=got, expected=expected, fix=fix)


class _Reader:
    """Puts together what a `_Writer` took apart."""

    def __init__(self, tensors: dict[str, torch.Tensor]) -> None:
        self._tensors = tensors
        self._kinds: dict[str, Callable[[Any], Any]] = {
            **{name: kind for kind, name in _COLLECTIONS.items()},
            **{name: read for name, _, read in _TEXTS.values()},
            "$dict": dict,
            "$scalar": lambda found: np.frombuffer(bytes.fromhex(found[1]), found[0])[0],
            "$tensor": self._tensor,
            "$column": lambda found: object_array(found[1])[np.array(found[0], np.int64)],
            "$lists": lambda found: [
                part.tolist() for part in np.split(found[0], np.cumsum(found[1]))[:-1]
            ],
            "$objects": lambda found: object_array(found[1]).reshape(found[0]),
            "$array": lambda found: (
                np.frombuffer(self._bytes(found[0]), found[1]).reshape(found[2]).copy()
            ),
            "$bytes": self._bytes,
            "$image": self._image,
        }

    def from_json(self, text: bytes) -> Any:
        """The value that `_Writer` made this of."""

        def decoded(found: dict[str, Any]) -> Any:
            name = next(iter(found), "") if len(found) == 1 else ""
            return self._kinds[name](found[name]) if name.startswith("$") else found

        return json.loads(text.decode("utf-8", "surrogatepass"), object_hook=decoded)

    def _bytes(self, name: str) -> bytes:
        return self._tensors[name].numpy().tobytes()

    def _tensor(self, found: list[Any]) -> torch.Tensor:
        name, dtype, shape = found
        # What lies there as bytes is copied to where its dtype may begin.
        tensor, dtype = self._tensors[name], getattr(torch, dtype)
        return (tensor if tensor.dtype == dtype else tensor.clone().view(dtype)).view(shape)

    def _image(self, found: list[Any]) -> Any:
        from PIL import Image

        name, mode, size, info = found
        image = Image.frombytes(mode, tuple(size), self._bytes(name))
        image.info = info
        return image
