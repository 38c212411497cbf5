# SPDX-License-Identifier: Apache-2.0
"""Cutting a mini-batch: every row once, budgets kept, prompts together."""

from hypothesis import given
from hypothesis import strategies as st

from quadriga.engines.micro_batches import MicroBatching, RowLength, micro_batches

ROWS = st.lists(
    st.builds(lambda key, answer: RowLength(key, 3 + key, answer), key=st.integers(0, 4), answer=st.integers(0, 9)),
    max_size=25,
)


def packed_tokens(rows: list[RowLength], share_prompts: bool) -> int:
    prompts = {row.prompt_key: row.num_prompt_tokens for row in rows}
    total = sum(prompts.values()) if share_prompts else sum(row.num_prompt_tokens for row in rows)
    return total + sum(row.num_response_tokens for row in rows)


@given(rows=ROWS, max_tokens=st.integers(1, 60), share_prompts=st.booleans())
def test_by_tokens(rows: list[RowLength], max_tokens: int, share_prompts: bool) -> None:
    """Only a row that is larger than the budget by itself exceeds it."""
    batches = micro_batches(rows, MicroBatching(None, max_tokens, share_prompts))
    assert sorted(index for batch in batches for index in batch) == list(range(len(rows)))
    for batch in batches:
        assert len(batch) == 1 or packed_tokens([rows[index] for index in batch], share_prompts) <= max_tokens


@given(num_rows=st.integers(0, 20), size=st.integers(1, 25))
def test_by_count(num_rows: int, size: int) -> None:
    rows = [RowLength(0, 1, 1)] * num_rows
    batches = micro_batches(rows, MicroBatching(size, 1))
    assert [index for batch in batches for index in batch] == list(range(num_rows))
    assert all(len(batch) == size for batch in batches[:-1])


def test_the_answers_to_a_prompt_stay_together() -> None:
    """Rows of two prompts in turn: one prompt's rows come together, so that its computation is shared."""
    rows = [RowLength(index % 2, 10, 2) for index in range(6)]
    assert micro_batches(rows, MicroBatching(None, 16)) == [[0, 2, 4], [1, 3, 5]]
    assert micro_batches(rows, MicroBatching(None, 32)) == [[0, 2, 4, 1, 3, 5]]


def test_a_group_above_the_budget_is_cut() -> None:
    rows = [RowLength("p", 10, 4)] * 5
    assert micro_batches(rows, MicroBatching(None, 18)) == [[0, 1], [2, 3], [4]]
