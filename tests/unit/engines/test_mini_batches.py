# SPDX-License-Identifier: Apache-2.0
"""Which rows an optimizer step takes, wherever they are held."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quadriga.engines.batches import mini_batches, row_numbers
from quadriga.engines.process_group import ALONE
from quadriga.errors import EngineError
from quadriga.protocol import DataProto


def numbers_of(held: Sequence[int], num_all: int, size: int, seed: int | None) -> list[list[int]]:
    """For each mini-batch the numbers, in the whole batch, of the rows taken."""
    numbers = torch.tensor(held, dtype=torch.int64)
    taken = [(numbers[rows].tolist(), places.tolist()) for rows, places in mini_batches(numbers, num_all, size, seed)]
    for step, (_, places) in enumerate(taken):
        assert places == sorted(places) and all(step * size <= place < (step + 1) * size for place in places)
    return [taken_numbers for taken_numbers, _ in taken]


def test_one_process_takes_the_order_or_a_shuffle_of_it() -> None:
    assert numbers_of(range(5), 5, 2, None) == [[0, 1], [2, 3], [4]]
    order = torch.randperm(5, generator=torch.Generator().manual_seed(3)).tolist()
    assert numbers_of(range(5), 5, 2, 3) == [order[:2], order[2:4], order[4:]]


@given(st.permutations(range(11)), st.integers(0, 11), st.integers(1, 12), st.none() | st.integers(0, 99))
def test_what_two_processes_take_is_what_one_takes(order, cut: int, size: int, seed) -> None:
    """However the rows are spread, one process without any included: the same sets, in the same order."""
    parts = [numbers_of(held, 11, size, seed) for held in (order[:cut], order[cut:])]
    alone = numbers_of(range(11), 11, size, seed)
    assert [sorted(one + other) for one, other in zip(*parts, strict=True)] == [sorted(step) for step in alone]
    for part in parts:
        assert all([number for number in step if number in own] == own for own, step in zip(part, alone, strict=True))


def test_rows_are_numbered_by_their_column() -> None:
    data = DataProto.from_dict({"x": torch.zeros(3), "row_index": torch.tensor([2, 0, 1])})
    assert row_numbers(data, ALONE)[0].tolist() == [2, 0, 1]
    assert row_numbers(data.select(batch_keys=["x"]), ALONE)[0].tolist() == [0, 1, 2]


def test_numbers_of_another_batch_are_refused() -> None:
    """Say of one from which rows were taken afterwards."""
    data = DataProto.from_dict({"row_index": torch.tensor([0, 3])})
    with pytest.raises(EngineError, match=r"numbers from 0 to 3 in a batch of 2 rows"):
        row_numbers(data, ALONE)
