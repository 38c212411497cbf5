# SPDX-License-Identifier: Apache-2.0
"""A DataProto in a file: what is read is what was written, to the type and the bit, and no file can name code."""

import datetime
import math
import pickle
import struct
import tempfile
from collections import namedtuple
from decimal import Decimal
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy
from PIL import Image
from safetensors.torch import load_file, save_file
from tensordict import TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol import DataProto, object_array

DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.bool, torch.uint8, torch.int8, torch.int16,
    torch.int32, torch.int64, torch.uint16, torch.uint64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2,
]  # fmt: skip
texts = st.text(st.characters(), max_size=4) | st.sampled_from(
    ["\ud83d", "\ud83d\ude00", "😀", "$dict", "\0"]
)
arrays = st_numpy.arrays(
    st_numpy.scalar_dtypes(), st_numpy.array_shapes(min_dims=0, max_dims=2, min_side=0, max_side=3)
)
tensors = st.sampled_from(DTYPES).map(
    lambda dtype: torch.tensor([[0.0, 1.0], [2.0, 3.0]]).to(dtype)
)
plain = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), texts, st.binary(max_size=3), st.complex_numbers(),
    st.dates(), st.datetimes(), st.times(), st.decimals(allow_nan=False),
)  # fmt: skip
hashable = st.none() | st.booleans() | st.integers() | texts | st.tuples(st.integers(), texts)
values = st.recursive(
    plain
    | arrays
    | arrays.map(lambda array: array.ravel()[:1]).filter(len).map(lambda array: array[0])
    | tensors,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=2).map(tuple)
        | st.dictionaries(texts, inner, max_size=2)
        | st.dictionaries(hashable, inner, max_size=2)
        | st.sets(hashable, max_size=2)
        | st.lists(inner, max_size=2).map(object_array)
    ),
    max_leaves=6,
)


def identical(left: Any, right: Any) -> bool:
    """The same type and the same bits, all the way down; of a number that is NaN, that it is one."""
    if type(left) is not type(right):
        return False
    if isinstance(left, TensorDict):
        return left.batch_size == right.batch_size and identical(
            dict(left.items()), dict(right.items())
        )
    if isinstance(left, torch.Tensor):
        same_bits = left.dtype == right.dtype and left.shape == right.shape
        flat = [one.contiguous().view(-1).view(torch.uint8) for one in (left, right)]
        return same_bits and torch.equal(*flat)
    if isinstance(left, np.ndarray) and left.dtype == object:
        return left.shape == right.shape and identical(list(left.flat), list(right.flat))
    if isinstance(left, np.ndarray | np.generic):
        return (
            left.dtype == right.dtype
            and left.shape == right.shape
            and left.tobytes() == right.tobytes()
        )
    if isinstance(left, dict):
        return identical(list(left.items()), list(right.items()))
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(identical, left, right))
    if isinstance(left, float):
        return struct.pack("d", left) == struct.pack("d", right) or (
            math.isnan(left) and math.isnan(right)
        )
    if isinstance(left, complex):
        return identical([left.real, left.imag], [right.real, right.imag])
    return left == right


def read_back(data: DataProto) -> DataProto:
    with tempfile.TemporaryDirectory() as folder:
        data.save_to_disk(Path(folder) / "batch")
        return DataProto.load_from_disk(Path(folder) / "batch")


def same(left: DataProto, right: DataProto) -> bool:
    return identical(
        [left.batch, left.non_tensor_batch, left.meta_info],
        [right.batch, right.non_tensor_batch, right.meta_info],
    )


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_what_is_read_is_what_was_written(draw: st.DataObject) -> None:
    rows = draw.draw(st.integers(0, 4))
    of_objects = {
        f"{name}{number}": object_array(draw.draw(st.lists(kind, min_size=rows, max_size=rows)))
        for name, kind in (
            ("any", values),
            ("text", texts),
            ("ids", st.lists(st.integers(), max_size=3)),
        )
        for number in range(draw.draw(st.integers(0, 2)))
    }
    of_numbers = draw.draw(
        st.dictionaries(texts, st_numpy.arrays(st_numpy.scalar_dtypes(), (rows, 2)), max_size=2)
    )
    columns = {
        str(dtype): torch.ones(rows, 2).to(dtype)
        for dtype in draw.draw(st.sets(st.sampled_from(DTYPES)))
    }
    facts = draw.draw(st.dictionaries(texts, values, max_size=3))
    data = DataProto.from_dict(columns, of_numbers | of_objects, facts)
    assert same(read_back(data), data)


def test_awkward_columns() -> None:
    """Views, memory that columns share, nested columns, images, and a batch of no columns."""
    base = torch.arange(24.0).view(4, 6)
    nested = TensorDict({"deep": TensorDict({"x": base[:, 1:3]}, [4])}, batch_size=[4])
    batch = TensorDict(
        {"all": base, "part": base[:, ::2], "one": torch.ones(1, 3).expand(4, 3), "in": nested}, [4]
    )
    grid = object_array([None] * 8).reshape(4, 2)
    image = Image.effect_noise((5, 3), 9).convert("RGB")
    data = DataProto(
        batch,
        {"grid": grid, "seen": object_array([{"images": [image]}, {}, {}, {}])},
        {"none": None},
    )
    loaded = read_back(data)
    assert identical(loaded.batch, data.batch) and identical(loaded.non_tensor_batch["grid"], grid)
    assert loaded.non_tensor_batch["seen"][0]["images"] == [image]
    loaded.batch["all"][0, 0] = -1.0
    assert base[0, 0] == 0.0
    empty = DataProto(TensorDict({}, batch_size=[3]))
    assert len(read_back(empty)) == 3 and read_back(DataProto()).batch is None


def test_repeated_objects_are_one_object_and_stand_there_once(tmp_path: Path) -> None:
    row, pixels = {"pixels": torch.ones(1000)}, torch.zeros(1000)
    rows = [row, row, {"pixels": pixels}, {"pixels": pixels}]
    DataProto.from_dict(non_tensors={"image": object_array(rows)}).save_to_disk(tmp_path / "batch")
    column = DataProto.load_from_disk(tmp_path / "batch").non_tensor_batch["image"]
    assert (
        column[0] is column[1]
        and column[0] is not column[2]
        and torch.equal(column[3]["pixels"], pixels)
    )
    assert (tmp_path / "batch").stat().st_size < 3 * 4000


def test_a_file_is_whole_its_owners_and_any_reader_of_safetensors_opens_it(tmp_path: Path) -> None:
    path = tmp_path / "new" / "batch"
    DataProto.from_dict({"x": torch.arange(3)}).save_to_disk(path)
    assert [file.name for file in path.parent.iterdir()] == [
        "batch"
    ] and path.stat().st_mode & 0o777 == 0o600
    assert load_file(path)["0"].tolist() == [0, 1, 2]


class Tool:
    """A class of a user."""


class Level(IntEnum):
    """A number to Python, an object of a class all the same."""

    LOW = 1


Point = namedtuple("Point", "x y")


@pytest.mark.parametrize(
    "value",
    [Tool(), Level.LOW, Point(1, 2), Tool, torch.nn.Parameter(torch.ones(1)), 10**5000],
    ids=type,
)
def test_objects_of_other_classes_are_refused_by_name(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "batch"
    DataProto(meta_info={"step": 1}).save_to_disk(path)
    kind = type(value)
    said = (
        "integer"
        if kind is int
        else f"an object of the class {kind.__module__}.{kind.__qualname__}"
    )
    places = {
        r"meta_info\['tool'\]": DataProto(meta_info={"tool": {"a": [value]}}),
        r"non_tensor_batch\['info'\], distinct entry 1": DataProto.from_dict(
            non_tensors={"info": [{}, (value,)]}
        ),
    }
    for place, data in places.items():
        with pytest.raises(
            ProtocolError, match=rf"batch'\): .*{said}.*expected None, numbers"
        ) as caught:
            data.save_to_disk(path)
        assert kind is int or caught.match(place)
    assert DataProto.load_from_disk(path).meta_info == {"step": 1}
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]


def test_a_value_in_itself_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = [{}]
    loop[0]["loop"] = loop
    with pytest.raises(ProtocolError, match=r"meta_info\['loop'\]: got maximum recursion depth"):
        DataProto(meta_info={"loop": loop}).save_to_disk(tmp_path / "batch")


class Bomb:
    """A pickle that would call something."""

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (Path("exploded"),)


def test_files_that_are_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pickle is not read, that of an older version by name."""
    monkeypatch.chdir(tmp_path)
    whole = tmp_path / "whole"
    DataProto.from_dict({"x": torch.ones(100)}, {"o": [{"a": 1}] * 100}).save_to_disk(whole)
    bomb = pickle.dumps(Bomb())
    save_file({"x": torch.ones(1)}, tmp_path / "weights")
    cases = {"text": b"hello", "empty": b"", "bomb": bomb, "cut": whole.read_bytes()[:-50]}
    cases |= {
        "another": (tmp_path / "weights").read_bytes(),
        "old": b"quadriga.DataProto.1\n" + bomb,
    }
    for name, content in cases.items():
        (tmp_path / name).write_bytes(content)
        with pytest.raises(
            ProtocolError, match=rf"{name}'\): got .*expected a (saved )?DataProto"
        ) as caught:
            DataProto.load_from_disk(tmp_path / name)
        assert ("a pickle of an older version" in str(caught.value)) == (name == "old")
    with pytest.raises(ProtocolError, match="No such file"):
        DataProto.load_from_disk(tmp_path / "nowhere")
    assert not (tmp_path / "exploded").exists()


@pytest.mark.parametrize("seed", range(60))
def test_damaged_files_raise_our_error_or_are_read(seed: int, tmp_path: Path) -> None:
    """A file has no checksum: a flipped bit of a number is another number. It is never anything but data."""
    path, generator = tmp_path / "batch", np.random.default_rng(seed)
    objects = {
        "ids": [[1, 2], [3]],
        "text": ["a", "b"],
        "any": [{"t": torch.ones(2)}, (np.ones(2), b"x")],
    }
    DataProto.from_dict(
        {"x": torch.arange(2)}, objects, {"when": datetime.date(2024, 1, 1), "d": Decimal(1)}
    ).save_to_disk(path)
    content = bytearray(path.read_bytes())
    for place in generator.integers(0, len(content), size=1 + seed % 3):
        content[place] ^= 1 << generator.integers(8)
    path.write_bytes(content)
    try:
        assert isinstance(DataProto.load_from_disk(path), DataProto)
    except ProtocolError as error:
        assert "expected a saved DataProto" in str(error)
