# SPDX-License-Identifier: Apache-2.0
"""Saves a DataProto to a file that cannot run code when it is read, bit for bit.

The file is a safetensors file, which any reader of that format can open. Its tensors are:

    0, 1, ...    memory of tensors, numpy arrays and bytes; an object that occurs several times is
                 written once
    layout       JSON: the number of rows, columns and entries by name, with references to the
                 other tensors. A column of objects has its distinct entries, and for each row the
                 number of its entry.

Entries may be None, numbers, strings, bytes, dates, lists, tuples, sets, dictionaries, tensors,
arrays and images, nested in any way. A value that JSON cannot express is a dictionary whose single
key begins with a $ (`{"$tuple": [1, 2]}`). Objects of any other class are refused, and so are
values that contain themselves.
"""

import json
import os
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from datetime import date, datetime, time
from decimal import Decimal
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors.torch import safe_open

from quadriga.errors import ProtocolError
from quadriga.protocol.columns import object_array
from quadriga.protocol.memory import bytes_of
from quadriga.protocol.wire import rebuild_proto

_VERSION_KEY = "quadriga_proto"
_VERSION = "3"
# Beginning of the files of versions that used pickle.
_PICKLE_HEADER = b"quadriga.DataProto.1\n"
# Dtypes that every version of safetensors knows. Tensors of other dtypes are stored as bytes.
_SAFETENSORS_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_PLAIN_TYPES = frozenset({type(None), bool, int, float, str})
# numpy dtypes without objects: bool, int, uint, float, complex, bytes, str, timedelta, datetime.
_NUMPY_KINDS = "biufcSUmM"
_COLLECTIONS = {tuple: "$tuple", set: "$set", frozenset: "$frozenset"}
# Types that are written as strings. For each: name in the file, function to write, function to
# read.
_TEXT_TYPES: dict[type, tuple[str, Callable[[Any], str], Callable[[str], Any]]] = {
    datetime: ("$datetime", datetime.isoformat, datetime.fromisoformat),
    date: ("$date", date.isoformat, date.fromisoformat),
    time: ("$time", time.isoformat, time.fromisoformat),
    Decimal: ("$decimal", str, Decimal),
    complex: ("$complex", repr, complex),
}
# Functions that rebuild a value from its entries or its string, by name in the file.
_READ_FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "$dict": dict,
    **{name: kind for kind, name in _COLLECTIONS.items()},
    **{name: read for name, _, read in _TEXT_TYPES.values()},
}


def save_to_disk(data: Any, filepath: str | os.PathLike[str]) -> None:
    """Write a DataProto into a file that only its owner can read.

    The file is written under a temporary name and then renamed, so it is complete or absent.

    Args:
        data: the DataProto.
        filepath: file to write; missing folders are created.

    Raises:
        ProtocolError: a file cannot hold an entry of this class, or an entry contains itself; the
            error names the entry and the class.
        OSError: there is no space or permission.
    """
    path = Path(filepath)
    parts = _Writer(f"save_to_disk({str(filepath)!r})").parts(data)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(
        prefix=f".{path.name}.", suffix=".partial", dir=path.parent
    )
    try:
        with os.fdopen(handle, "wb") as file:
            file.writelines(parts)
            file.flush()
            # A power failure after the rename must not leave an empty file.
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def to_bytes(data: Any) -> bytearray:
    """Return the content of the file that `save_to_disk` would write; raises the same errors."""
    return bytearray().join(_Writer("to_bytes").parts(data))


def load_from_disk(cls: type, filepath: str | os.PathLike[str]) -> Any:
    """Read a file that `save_to_disk` wrote.

    No code in the file is run: pickles of older versions are refused.

    Args:
        cls: `DataProto`.
        filepath: file to read.

    Returns:
        The DataProto, on the CPU.

    Raises:
        ProtocolError: the file does not exist, is of another kind, or is damaged.
    """
    where = f"load_from_disk({str(filepath)!r})"
    expected = "a saved DataProto"
    fix = "Write the file with DataProto.save_to_disk."
    try:
        # safetensors would only say that the header is wrong.
        with open(filepath, "rb") as file:
            if file.read(len(_PICKLE_HEADER)) == _PICKLE_HEADER:
                raise ProtocolError(
                    where,
                    got="a pickle of an older version, which may run any code",
                    expected="a DataProto as it is saved today",
                    fix="Delete the file and save the data again.",
                )
        with safe_open(filepath, framework="pt") as opened:
            version = (opened.metadata() or {}).get(_VERSION_KEY)
            if version != _VERSION:
                got = "another kind of file"
                if version is not None:
                    got = f"format {version} instead of {_VERSION}"
                raise ProtocolError(where, got=got, expected=expected, fix=fix)
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}

        text = _read_bytes(tensors, "layout").decode("utf-8", "surrogatepass")
        # The hook rebuilds inner dictionaries before the outer ones that contain them.
        layout = json.loads(text, object_hook=partial(_rebuild, tensors))
        rows, batch, arrays, facts = layout
        return rebuild_proto(cls, rows, batch, dict(arrays), dict(facts))
    except ProtocolError:
        raise
    # A damaged file may cause any error: a name may be missing, or a value have another type.
    except Exception as error:
        got = str(error)
        if not isinstance(error, OSError):
            got = f"another kind of file, or a damaged one ({error})"
        raise ProtocolError(where, got=got, expected=expected, fix=fix) from error


class _FileTensor(NamedTuple):
    """A tensor of the file."""

    name: str
    dtype: torch.dtype
    shape: list[int]
    memory: Any  # content of the tensor, as an object of bytes


class _Writer:
    """Converts a DataProto to the parts of a file: memory of tensors, and JSON.

    Args:
        where: the called function, for errors.
    """

    def __init__(self, where: str) -> None:
        self._where = where
        # The column or entry that is being converted, for errors.
        self._place = ""
        self._tensors: list[_FileTensor] = []
        # Values that have been stored, each with the form that refers to it in the layout, by id.
        # The entry keeps the value alive, because an id is unique only among living objects.
        self._stored_values: dict[int, tuple[Any, Any]] = {}

    def parts(self, data: Any) -> list[Any]:
        """Convert a DataProto. Return the content of the file as blocks of bytes, in order.

        Raises:
            ProtocolError: as for `save_to_disk`.
        """
        try:
            self._add_layout(data)
        except (RecursionError, ValueError) as error:
            # A value contains itself or is nested too deeply, or an integer has too many digits for
            # Python to convert.
            raise self._refusal(str(error)) from error

        # The format allows no gaps, and a tensor must begin at a multiple of its item size. With
        # the largest dtypes first, this is always so.
        self._tensors.sort(key=lambda tensor: -tensor.dtype.itemsize)
        header: dict[str, Any] = {"__metadata__": {"format": "pt", _VERSION_KEY: _VERSION}}
        end = 0
        for tensor in self._tensors:
            start = end
            end += len(tensor.memory)
            header[tensor.name] = {
                "dtype": _SAFETENSORS_DTYPES[tensor.dtype],
                "shape": tensor.shape,
                "data_offsets": [start, end],
            }
        text = json.dumps(header).encode()
        # Spaces after the JSON make the memory begin at a multiple of 8 bytes.
        text += b" " * (-len(text) % 8)
        blocks = [tensor.memory for tensor in self._tensors]
        return [struct.pack("<Q", len(text)), text, *blocks]

    def _add_layout(self, data: Any) -> None:
        """Add a tensor for each column or entry that needs memory, then the layout."""
        arrays = []
        for key, array in data.non_tensor_batch.items():
            self._place = f"non_tensor_batch[{key!r}]"
            is_object_column = array.dtype == object and array.ndim == 1
            encode = self._column if is_object_column else self._encode
            arrays.append((key, encode(array)))

        self._place = "batch"
        rows = 0
        batch = None
        if data.batch is not None:
            rows = len(data)
            batch = self._encode(data.batch.to_dict())

        facts = []
        for key, value in data.meta_info.items():
            self._place = f"meta_info[{key!r}]"
            facts.append((key, self._encode(value)))

        layout = [rows, batch, arrays, facts]
        text = json.dumps(layout, ensure_ascii=False, separators=(",", ":"))
        # `surrogatepass` keeps lone surrogates. Written as escapes, two in a row would be read as
        # one character.
        self._add("layout", text.encode("utf-8", "surrogatepass"))

    def _column(self, array: np.ndarray) -> dict[str, Any]:
        """Convert a column of objects.

        Rows that share an object, as repeated rows do, share it again when they are read. Lists of
        integers, such as token ids, become one array and the length of each list.
        """
        # Number the distinct objects. `rows` has the number of each row's object.
        value_of_id = {id(value): value for value in array}
        number_of_id = {key: number for number, key in enumerate(value_of_id)}
        values = list(value_of_id.values())
        rows = [number_of_id[id(value)] for value in array]

        are_lists = set(map(type, values)) == {list}
        if are_lists and {int}.issuperset(map(type, chain.from_iterable(values))):
            # If an integer does not fit in 64 bits, the lists are converted one by one below.
            with suppress(OverflowError):
                flat = np.fromiter(chain.from_iterable(values), np.int64)
                lengths = list(map(len, values))
                # When read, "$lists" becomes the list of entries of the column.
                return {"$column": [rows, {"$lists": [self._encode(flat), lengths]}]}

        column_place = self._place
        entries = []
        for number, value in enumerate(values):
            self._place = f"{column_place}, distinct entry {number}"
            entries.append(self._encode(value))
        return {"$column": [rows, entries]}

    def _encode(self, value: Any) -> Any:
        """Convert a value to types of JSON. Tensors, arrays, bytes and images are stored apart."""
        kind = type(value)
        if kind in _PLAIN_TYPES:
            return value
        if kind is list:
            # A list of plain values may be long, and is returned as it is.
            if _PLAIN_TYPES.issuperset(map(type, value)):
                return value
            return list(map(self._encode, value))
        if kind is dict:
            return self._encode_dict(value)
        if kind in _COLLECTIONS:
            return {_COLLECTIONS[kind]: list(map(self._encode, value))}
        if kind in _TEXT_TYPES:
            name, write, _ = _TEXT_TYPES[kind]
            return {name: write(value)}
        if isinstance(value, np.generic) and value.dtype.kind in _NUMPY_KINDS:
            return {"$scalar": [value.dtype.str, value.tobytes().hex()]}
        if id(value) not in self._stored_values:
            self._stored_values[id(value)] = (value, self._store(value))
        return self._stored_values[id(value)][1]

    def _encode_dict(self, value: dict[Any, Any]) -> dict[str, Any]:
        """Convert a dictionary: to one of JSON if its keys allow it, else to a list of pairs."""
        has_text_keys = {str}.issuperset(map(type, value))
        # A single key that begins with a $ would be read as the name of a type.
        is_ambiguous = has_text_keys and len(value) == 1 and next(iter(value)).startswith("$")
        if has_text_keys and not is_ambiguous:
            return {key: self._encode(entry) for key, entry in value.items()}
        pairs = [[self._encode(key), self._encode(entry)] for key, entry in value.items()]
        return {"$dict": pairs}

    def _store(self, value: Any) -> dict[str, Any]:
        """Add a tensor with the memory of a value to the file; return its form in the layout.

        Raises:
            ProtocolError: a file cannot hold an object of this class.
        """
        kind = type(value)
        name = str(len(self._tensors))
        if kind is torch.Tensor and value.layout is torch.strided and not value.is_quantized:
            tensor = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
            shape = list(tensor.shape)
            if tensor.dtype in _SAFETENSORS_DTYPES:
                self._add(name, bytes_of(tensor), tensor.dtype, shape)
            else:
                self._add(name, bytes_of(tensor))
            return {"$tensor": [name, str(tensor.dtype).removeprefix("torch."), shape]}
        if kind is np.ndarray and value.dtype == object:
            entries = list(map(self._encode, value.flat))
            return {"$objects": [list(value.shape), entries]}
        if kind is np.ndarray and value.dtype.kind in _NUMPY_KINDS:
            self._add(name, value.tobytes())
            return {"$array": [name, value.dtype.str, list(value.shape)]}
        if kind is bytes:
            self._add(name, value)
            return {"$bytes": name}
        # An image with a palette is refused, because its bytes do not include the palette. So are
        # objects of PIL that are no images, and have no attribute `palette`.
        if kind.__module__.startswith("PIL.") and getattr(value, "palette", "absent") is None:
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
        """Add a tensor to the file.

        Args:
            name: name of the tensor in the file.
            memory: content of the tensor, as an object of bytes.
            dtype: dtype of the tensor; by default that of bytes.
            shape: shape of the tensor; None: one dimension of bytes.
        """
        if shape is None:
            shape = [len(memory)]
        self._tensors.append(_FileTensor(name, dtype, shape, memory))

    def _refusal(self, got: str) -> ProtocolError:
        """Make the error for a value that a file cannot hold.

        Args:
            got: description of the value, or of the problem.
        """
        return ProtocolError(
            f"{self._where}: {self._place}",
            got=got,
            expected="None, numbers, strings, bytes, dates, tensors, arrays, images, and lists and "
            "dictionaries of these",
            fix="Convert it to one of these, or leave it out (DataProto.select).",
        )


def _rebuild(tensors: dict[str, torch.Tensor], value: dict[str, Any]) -> Any:
    """Rebuild the value that a dictionary `{"$type": form}` of the layout stands for.

    Args:
        tensors: the tensors of the file by name.
        value: a dictionary of the layout, with its entries rebuilt. Without a single key that
            begins with a $, it is a dictionary of the user, and is returned as it is.

    Raises:
        ValueError: the type is unknown.
    """
    name = next(iter(value), "")
    if len(value) != 1 or not name.startswith("$"):
        return value
    form = value[name]
    if name in _READ_FUNCTIONS:
        return _READ_FUNCTIONS[name](form)
    if name == "$bytes":
        return _read_bytes(tensors, form)
    if name == "$tensor":
        tensor_name, dtype_name, shape = form
        tensor = tensors[tensor_name]
        dtype = getattr(torch, dtype_name)
        if tensor.dtype != dtype:
            # A tensor stored as bytes. They may begin at any address; a copy is aligned.
            tensor = tensor.clone().view(dtype)
        return tensor.view(shape)
    if name == "$image":
        from PIL import Image

        tensor_name, mode, size, info = form
        image = Image.frombytes(mode, tuple(size), _read_bytes(tensors, tensor_name))
        image.info = info
        return image
    if name == "$array":
        tensor_name, dtype, shape = form
        # A copy, because an array over bytes is read-only.
        return np.frombuffer(_read_bytes(tensors, tensor_name), dtype).reshape(shape).copy()
    if name == "$scalar":
        dtype, digits = form
        return np.frombuffer(bytes.fromhex(digits), dtype)[0]
    if name == "$column":
        rows, entries = form
        return object_array(entries)[np.array(rows, np.int64)]
    if name == "$lists":
        flat, lengths = form
        # The part behind the last list is empty, and dropped.
        parts = np.split(flat, np.cumsum(lengths))[:-1]
        return [part.tolist() for part in parts]
    if name == "$objects":
        shape, entries = form
        return object_array(entries).reshape(shape)
    raise ValueError(f"unknown type {name!r}")


def _read_bytes(tensors: dict[str, torch.Tensor], name: str) -> bytes:
    """Bytes of a tensor of the file.

    Args:
        tensors: the tensors of the file by name.
        name: name of the tensor.
    """
    return tensors[name].numpy().tobytes()
