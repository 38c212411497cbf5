# SPDX-License-Identifier: Apache-2.0
"""Mini-batches and micro-batches: which rows, in which order, of which size."""

import math
import random
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quadriga.engines.batches import MicroBatching, Passes, RowLength, micro_batches, mini_batches
from quadriga.engines.process_group import ALONE, ProcessGroup
from quadriga.errors import EngineError
from quadriga.protocol import DataProto


class BesideOthers(ProcessGroup):
    """The first of two ranks, of which the other holds so many rows."""

    def __init__(self, num_rows: int) -> None:
        super().__init__(0, 2)
        self.num_rows = num_rows

    def gather(self, value: int) -> list[int]:
        return [value, self.num_rows]


def numbers_of(held: Sequence[int], num_all: int, size: int, seed: int | None) -> list[list[int]]:
    """For each mini-batch the numbers, in the whole batch, of the rows taken."""
    numbers = torch.tensor(held, dtype=torch.int64)
    data, passes = (
        DataProto.from_dict({"row_index": numbers}),
        Passes(size, 1, MicroBatching(None, 1), seed),
    )
    minis = mini_batches(data, BesideOthers(num_all - len(held)), passes)
    taken = [(numbers[rows].tolist(), places.tolist()) for rows, places in minis]
    for step, (_, places) in enumerate(taken):
        assert places == sorted(places) and all(
            step * size <= place < (step + 1) * size for place in places
        )
    return [taken_numbers for taken_numbers, _ in taken]


def test_one_process_takes_the_order_or_a_shuffle_of_it() -> None:
    assert numbers_of(range(5), 5, 2, None) == [[0, 1], [2, 3], [4]]
    order = torch.randperm(5, generator=torch.Generator().manual_seed(3)).tolist()
    assert numbers_of(range(5), 5, 2, 3) == [order[:2], order[2:4], order[4:]]


@given(
    st.permutations(range(11)),
    st.integers(0, 11),
    st.integers(1, 12),
    st.none() | st.integers(0, 99),
)
def test_what_two_processes_take_is_what_one_takes(order, cut: int, size: int, seed) -> None:
    """However the rows are spread, one process without any included: the same sets, in the same order."""
    parts = [numbers_of(held, 11, size, seed) for held in (order[:cut], order[cut:])]
    alone = numbers_of(range(11), 11, size, seed)
    assert [sorted(one + other) for one, other in zip(*parts, strict=True)] == [
        sorted(step) for step in alone
    ]
    for part in parts:
        assert all(
            [number for number in step if number in own] == own
            for own, step in zip(part, alone, strict=True)
        )


def test_rows_are_numbered_by_their_column() -> None:
    data = DataProto.from_dict({"x": torch.zeros(3), "row_index": torch.tensor([2, 0, 1])})
    passes = Passes(3, 2, MicroBatching(None, 1))
    for rows, places in mini_batches(data, ALONE, passes):
        assert (rows.tolist(), places.tolist()) == ([1, 2, 0], [0, 1, 2])
    (rows, _), _ = mini_batches(data.select(batch_keys=["x"]), ALONE, passes)
    assert rows.tolist() == [0, 1, 2]


@pytest.mark.parametrize("seed", [None, 3])
def test_rows_of_a_rollout_share_their_mini_batch(seed: int | None) -> None:
    """The size counts rollouts, and a shuffle moves them as a whole, however rows are arranged."""
    rollouts = torch.tensor([0, 1, 1, 1, 2, 3, 3])
    order = torch.tensor([5, 1, 0, 6, 2, 4, 3])
    data = DataProto.from_dict({"row_index": order, "rollout_index": rollouts[order]})
    minis = []
    for rows, places in mini_batches(data, ALONE, Passes(2, 1, MicroBatching(None, 1), seed)):
        assert len(set(places.tolist())) == len(rows)
        minis.append(order[rows].tolist())
    shuffled = list(range(4))
    if seed is not None:
        shuffled = torch.randperm(4, generator=torch.Generator().manual_seed(seed)).tolist()
    rows_of = [[0], [1, 2, 3], [4], [5, 6]]
    expected = [[*rows_of[a], *rows_of[b]] for a, b in (shuffled[:2], shuffled[2:])]
    assert minis == expected


def test_numbers_of_another_batch_are_refused() -> None:
    """Say of one from which rows were taken afterwards."""
    data = DataProto.from_dict({"row_index": torch.tensor([0, 3])})
    with pytest.raises(EngineError, match=r"numbers from 0 to 3 in a batch of 2 rows"):
        next(mini_batches(data, ALONE, Passes(1, 1, MicroBatching(None, 1))))


ROWS = st.lists(
    st.builds(
        lambda key, answer: RowLength(key, 3 + key, answer),
        key=st.integers(0, 4),
        answer=st.integers(0, 9),
    ),
    max_size=25,
)
BUDGETS, NUMBERS, ATTENTION = (
    st.integers(1, 60),
    st.integers(0, 30),
    st.sampled_from([math.inf, 20.0]),
)


def packed_tokens(rows: list[RowLength], share_prompts: bool) -> int:
    prompts = {row.prompt_key: row.num_prompt_tokens for row in rows}
    total = sum(prompts.values()) if share_prompts else sum(row.num_prompt_tokens for row in rows)
    return total + sum(row.num_response_tokens for row in rows)


def cost(rows: list[RowLength], attention_tokens: float) -> float:
    """Of a micro-batch with shared prompts."""
    prompts = {row.prompt_key: row.num_prompt_tokens for row in rows}
    sequences = [
        (row.num_prompt_tokens + row.num_response_tokens, row.num_prompt_tokens) for row in rows
    ]
    pairs = sum(prompt**2 for prompt in prompts.values())
    pairs += sum(total**2 - prompt**2 for total, prompt in sequences)
    return packed_tokens(rows, True) + pairs / attention_tokens


@given(
    rows=ROWS,
    max_tokens=BUDGETS,
    share_prompts=st.booleans(),
    min_batches=NUMBERS,
    attention=ATTENTION,
)
def test_by_tokens(
    rows: list[RowLength], max_tokens: int, share_prompts: bool, min_batches: int, attention: float
) -> None:
    """Every row once; only a row that is larger than the budget by itself exceeds it; as many as are asked for, or one
    for each row; always the same."""
    how = MicroBatching(None, max_tokens, share_prompts)
    batches = micro_batches(rows, how, min_batches=min_batches, attention_tokens=attention)
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    for batch in batches:
        assert batch
        assert (
            len(batch) == 1
            or packed_tokens([rows[index] for index in batch], share_prompts) <= max_tokens
        )
    assert len(batches) >= min(min_batches, len(rows))
    assert batches == micro_batches(rows, how, min_batches=min_batches, attention_tokens=attention)


@given(rows=ROWS, max_tokens=st.integers(16, 60), share_prompts=st.booleans())
def test_few(rows: list[RowLength], max_tokens: int, share_prompts: bool) -> None:
    """Fewer than twice as many as the tokens would fill, and one. Says nothing of prompts whose answers do not fit
    together: these are left out."""
    if share_prompts:
        groups = [[row for row in rows if row.prompt_key == key] for key in range(5)]
        rows = [
            row for group in groups if packed_tokens(group, True) <= max_tokens for row in group
        ]
    batches = micro_batches(rows, MicroBatching(None, max_tokens, share_prompts))
    assert len(batches) < 2 * packed_tokens(rows, share_prompts) / max_tokens + 1


@given(
    answers=st.lists(st.integers(1, 50), min_size=1, max_size=60),
    num=st.integers(1, 10),
    attention_tokens=ATTENTION,
)
def test_even(answers: list[int], num: int, attention_tokens: float) -> None:
    """With room enough no micro-batch is costlier than the cheapest by more than one row."""
    rows = [RowLength(number, 5, answer) for number, answer in enumerate(answers)]
    batches = micro_batches(
        rows, MicroBatching(None, 10_000), min_batches=num, attention_tokens=attention_tokens
    )
    assert len(batches) == min(num, len(rows))
    costs = [cost([rows[index] for index in batch], attention_tokens) for batch in batches]
    assert costs == sorted(costs, reverse=True)
    assert costs[0] - costs[-1] <= max(cost([row], attention_tokens) for row in rows) + 1e-9


@given(
    rows=ROWS,
    max_tokens=BUDGETS,
    min_batches=NUMBERS,
    attention=ATTENTION,
    seed=st.integers(0, 99),
)
def test_order_of_the_rows_does_not_matter(
    rows: list[RowLength], max_tokens: int, min_batches: int, attention: float, seed: int
) -> None:
    """The same rows in another order make micro-batches of the same rows, up to rows that are alike."""
    how = MicroBatching(None, max_tokens)
    other = random.Random(seed).sample(rows, len(rows))

    def contents(ordered: list[RowLength]) -> list[list[tuple]]:
        batches = micro_batches(ordered, how, min_batches=min_batches, attention_tokens=attention)
        return sorted(
            sorted((ordered[i].num_response_tokens, ordered[i].prompt_key) for i in batch)
            for batch in batches
        )

    assert contents(rows) == contents(other)


@given(num_rows=st.integers(0, 20), size=st.integers(1, 25))
def test_by_count(num_rows: int, size: int) -> None:
    rows = [RowLength(0, 1, 1)] * num_rows
    batches = micro_batches(rows, MicroBatching(size, 1))
    assert [index for batch in batches for index in batch] == list(range(num_rows))
    assert all(len(batch) == size for batch in batches[:-1])


@given(num_rows=st.integers(0, 20), size=st.integers(1, 25), min_batches=NUMBERS)
def test_by_count_with_a_number(num_rows: int, size: int, min_batches: int) -> None:
    """More micro-batches than rows demand are equally large but for one row."""
    batches = micro_batches(
        [RowLength(0, 1, 1)] * num_rows, MicroBatching(size, 1), min_batches=min_batches
    )
    assert [index for batch in batches for index in batch] == list(range(num_rows))
    assert len(batches) == max(-(-num_rows // size), min(min_batches, num_rows))
    sizes = [len(batch) for batch in batches]
    assert max(sizes, default=1) <= size
    if len(batches) > -(-num_rows // size):
        assert max(sizes) - min(sizes) <= 1


def test_the_answers_to_a_prompt_stay_together() -> None:
    """Rows of two prompts in turn: one prompt's rows come together, so that its computation is shared."""
    rows = [RowLength(index % 2, 10, 2) for index in range(6)]
    assert micro_batches(rows, MicroBatching(None, 16)) == [[0, 2, 4], [1, 3, 5]]
    assert micro_batches(rows, MicroBatching(None, 32)) == [[0, 2, 4, 1, 3, 5]]


def test_a_group_above_the_budget_is_cut() -> None:
    rows = [RowLength("p", 10, 4)] * 5
    assert micro_batches(rows, MicroBatching(None, 18)) == [[0, 1], [2, 3], [4]]


def test_rows_are_parted_where_micro_batches_must_be_more() -> None:
    """One prompt with a long and three short answers, in two: the long one goes with a short one at most."""
    rows = [RowLength("p", 10, answer) for answer in (90, 10, 20, 30)]
    batches = micro_batches(rows, MicroBatching(None, 1000), min_batches=2)
    assert batches == [[0, 2], [1, 3]]  # 90 and 20, 30 and 10


@pytest.mark.parametrize("share_prompts", [True, False])
def test_evenly_filled(share_prompts: bool) -> None:
    """Two long rows and many short ones: the two go apart, and the short ones fill up. As few as tokens demand."""
    rows = [RowLength(number, 8, answer) for number, answer in enumerate([500, 500, *[42] * 20])]
    batches = micro_batches(rows, MicroBatching(None, 1100, share_prompts))
    totals = [packed_tokens([rows[index] for index in batch], share_prompts) for batch in batches]
    assert len(batches) == 2
    assert totals == [1008, 1008]
