# SPDX-License-Identifier: Apache-2.0
"""The scheduler hands out every place once, keeps samples of a prompt together, and changes the batch when it pays."""

from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.rollout.native.scheduler import Change, Scheduler


def test_samples_of_a_prompt_start_together() -> None:
    """Requests come interleaved; the first batch holds the first prompt's samples side by side."""
    scheduler = Scheduler(["a", "b", "a", "c", "b"], max_num_seqs=3)
    assert scheduler.change() == Change(kept=(), admitted=(0, 2, 1))
    assert scheduler.waiting == [4, 3]


def test_rows_stay_until_a_change_pays() -> None:
    """Ten rows shrink when seven are left, not at eight."""
    scheduler = Scheduler(range(10), max_num_seqs=10)
    scheduler.change()
    scheduler.finish(0)
    scheduler.finish(4)
    assert scheduler.change() is None
    scheduler.finish(9)
    assert scheduler.change() == Change(kept=(1, 2, 3, 5, 6, 7, 8), admitted=())
    assert scheduler.rows == [1, 2, 3, 5, 6, 7, 8]


def test_free_places_are_filled() -> None:
    """A waiting request starts as soon as there is room for all that wait."""
    scheduler = Scheduler(range(5), max_num_seqs=4)
    scheduler.change()
    scheduler.finish(2)
    assert scheduler.change() == Change(kept=(0, 1, 3), admitted=(4,))
    assert scheduler.rows == [0, 1, 3, 4]


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=25), st.integers(1, 8), st.floats(0.1, 1.0))
def test_every_request_runs_once(requests: list[tuple[int, int]], max_num_seqs: int, kept_share: float) -> None:
    """Each request gets exactly the steps that it needs, within the places that there are."""
    scheduler = Scheduler([prompt for prompt, _ in requests], max_num_seqs, kept_share)
    left = [steps for _, steps in requests]
    for _ in range(sum(left) + 1):
        scheduler.change()
        if scheduler.is_done:
            break
        assert 0 < scheduler.num_running <= len(scheduler.rows) <= max_num_seqs
        for row, request in enumerate(scheduler.rows):
            if scheduler.running[row]:
                left[request] -= 1
                if left[request] == 0:
                    scheduler.finish(row)
    assert scheduler.is_done
    assert not any(left)
