# SPDX-License-Identifier: Apache-2.0
"""What travels as bytes, and what Ray has to carry: the user's own classes, Ray's references, large memory."""

import datetime
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import ray
import torch

from quadriga.protocol import DataProto, deep_equal
from quadriga.single_controller import Dispatch
from quadriga.single_controller.ray.letters import INLINE_BYTES, seal, unseal


class Ours:
    """A class of this file, which a worker's process cannot import."""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ours)

    __hash__ = None


PLAIN = [
    None,
    b"bytes of a worker's own",
    ("actor", "update", {"lr": 1e-6, "names": ["a", "b"], "when": datetime.date(2026, 1, 2)}),
    (Dispatch.ONE_TO_ALL, PurePosixPath("/tmp/x"), len, torch.bfloat16, np.float32(2.5)),
    np.arange(6).reshape(2, 3),
    np.array(["a", None, {"x": 1}], dtype=object),
    DataProto.from_dict({"x": torch.ones(3)}, {"uid": ["a", "b", "c"]}, {"step": 1}),
]
FOR_RAY = [
    Ours(),
    {"deep": [1, (Ours, 2)]},
    lambda: 1,
    DataProto.from_dict({"x": torch.ones(1)}, {"mine": [Ours()]}),
    ray.ObjectRef.nil(),
    (1, [ray.ObjectRef.nil()]),
    np.zeros(INLINE_BYTES + 1, dtype=np.uint8),
    [np.zeros(INLINE_BYTES // 2 + 1, dtype=np.uint8) for _ in range(2)],
    (part for part in "a generator"),
]


def same(left: Any, right: Any) -> bool:
    if isinstance(left, DataProto):
        return same(
            [dict(left.batch.items()), left.non_tensor_batch], [dict(right.batch.items()), right.non_tensor_batch]
        )
    return deep_equal(left, right)


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_values_become_bytes(value: Any) -> None:
    sealed = seal(value)
    assert type(sealed) is bytes and same(unseal(sealed), value)


@pytest.mark.parametrize("value", FOR_RAY, ids=lambda value: type(value).__name__)
def test_ray_carries_the_rest(value: Any) -> None:
    assert seal(value) is value and unseal(value) is value


def test_what_comes_out_may_be_written_to() -> None:
    array = unseal(seal(np.zeros(4)))
    array += 1
    assert array.sum() == 4
