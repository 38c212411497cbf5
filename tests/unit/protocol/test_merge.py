# SPDX-License-Identifier: Apache-2.0
"""Equality and union: NaN, nesting, cycles, and what an error says."""

import re
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from PIL import Image
from tensordict import TensorDict

from quadriga.errors import ProtocolError
from quadriga.protocol import deep_equal, object_array, union_numpy_dict, union_tensor_dict

NAN = float("nan")


@dataclass
class Box:
    """Compares field by field, with a truth value that tensors refuse."""

    value: torch.Tensor


def without_address(value: object) -> str:
    """The name of a case that is the same in each process of pytest-xdist."""
    return re.sub(r" at 0x\w+", "", str(value), flags=re.IGNORECASE)


class Plain:
    """Compares by identity."""

    def __init__(self, value: int) -> None:
        self.value = value


def cycle(end: int) -> list:
    loop: list = [1, {"end": end}]
    loop.append(loop)
    return loop


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (NAN, NAN),
        ([1, (2.0, NAN)], [1, (2.0, NAN)]),
        ({"a": torch.tensor([1.0, NAN])}, {"a": torch.tensor([1.0, NAN])}),
        (np.array([1.0, NAN]), np.array([1.0, NAN])),
        (np.array([1, "x"], dtype=object), np.array([1, "x"], dtype=object)),
        (np.array(["a", "b"]), np.array(["a", "b"])),
        (Box(torch.ones(2)), Box(torch.ones(2))),
        (Plain(1), Plain(1)),
        (cycle(1), cycle(1)),
        (Image.new("RGB", (2, 2), 5), Image.new("RGB", (2, 2), 5)),
        (None, None),
        (torch.float32, torch.float32),
    ],
    ids=without_address,
)
def test_equal(left, right) -> None:
    assert deep_equal(left, right)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        (NAN, 1.0),
        ([1, 2], [1, 3]),
        ([1, 2], [1]),
        ([1], {"a": 1}),
        ({"a": 1}, {"b": 1}),
        (torch.ones(2), torch.ones(2, dtype=torch.int64)),
        (torch.ones(2), torch.ones(3)),
        (torch.ones(2), [1.0, 1.0]),
        ([1.0, 1.0], torch.ones(2)),
        (torch.tensor([NAN]), torch.tensor([1.0])),
        (np.ones(2), np.zeros(2)),
        (1, np.ones(1)),
        (np.array([1, "x"], dtype=object), np.array([1, "y"], dtype=object)),
        (Box(torch.ones(2)), Box(torch.zeros(2))),
        (Plain(1), Plain(2)),
        (cycle(1), cycle(2)),
        (Image.new("RGB", (2, 2), 5), Image.new("RGB", (2, 2), 6)),
        ("a", None),
        (None, "a"),
    ],
    ids=without_address,
)
def test_different(left, right) -> None:
    assert not deep_equal(left, right)


def test_deep_nesting_needs_no_stack() -> None:
    left: list = []
    right: list = []
    for _ in range(20_000):
        left, right = [left], [right]
    assert deep_equal(left, right)


def test_union_tensor_dict_takes_nan_as_equal_and_works_in_place() -> None:
    left = TensorDict({"a": torch.tensor([1.0, NAN])}, batch_size=[2])
    right = TensorDict({"a": torch.tensor([1.0, NAN]), "b": torch.zeros(2)}, batch_size=[2])
    assert union_tensor_dict(left, right) is left and sorted(left.keys()) == ["a", "b"]


def test_union_tensor_dict_of_nested_columns() -> None:
    def nested(value: float) -> TensorDict:
        inner = TensorDict({"p": torch.tensor([0.0, value])}, batch_size=[2])
        return TensorDict({"image": inner}, batch_size=[2])

    union_tensor_dict(nested(1.0), nested(1.0))
    with pytest.raises(ProtocolError, match=r"'image'\['p'\].*row 1"):
        union_tensor_dict(nested(1.0), nested(2.0))


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (torch.tensor([1.0, 3.0, NAN]), r"'a'.*differ in 2 row\(s\), the first being row 1"),
        (torch.ones(3, 1), r"\(3, 1\)"),
        (torch.ones(3, dtype=torch.int64), "torch.int64"),
    ],
)
def test_union_tensor_dict_names_the_difference(value: torch.Tensor, words: str) -> None:
    left = TensorDict({"a": torch.tensor([1.0, 2.0, 3.0])}, batch_size=[3])
    with pytest.raises(ProtocolError, match=words):
        union_tensor_dict(left, TensorDict({"new": torch.ones(3), "a": value}, batch_size=[3]))
    assert list(left.keys()) == ["a"]


def test_union_tensor_dict_needs_the_same_rows() -> None:
    with pytest.raises(ProtocolError, match="batch size"):
        union_tensor_dict(TensorDict({}, batch_size=[2]), TensorDict({}, batch_size=[3]))


def test_union_numpy_dict_compares_objects_row_by_row() -> None:
    left = {"info": object_array([{"a": [1, NAN]}, cycle(1)])}
    assert (
        union_numpy_dict(left, {"info": object_array([{"a": [1, NAN]}, cycle(1)]), "x": np.ones(2)})
        is left
    )
    assert sorted(left) == ["info", "x"]
    with pytest.raises(ProtocolError, match=r"'info'.*row 1"):
        union_numpy_dict(left, {"info": object_array([{"a": [1, NAN]}, cycle(2)])})
    with pytest.raises(ProtocolError, match=r"'x'.*\(2,\) and \(3,\)"):
        union_numpy_dict(left, {"x": np.ones(3)})
