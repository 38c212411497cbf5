# SPDX-License-Identifier: Apache-2.0
"""Times of the calls of ranks: what counts as waiting, and which calls belong to a step."""

import time

import pytest

from quadriga.observe.call_times import RANK_WAITS, CallTime, count_waits, step_calls


@pytest.mark.parametrize(
    ("num_ranks", "device_type", "counts"),
    [(2, "cpu", True), (1, "cpu", False), (2, "cuda", False)],
)
def test_a_thread_that_sleeps_waits_for_other_ranks(
    num_ranks: int, device_type: str, counts: bool
) -> None:
    """Only ranks on CPUs that have others to wait for: a thread also sleeps while a GPU computes."""
    before = RANK_WAITS.seconds
    with count_waits(num_ranks, device_type):
        time.sleep(0.02)
    assert (RANK_WAITS.seconds - before > 0.0) == counts


def test_calls_of_a_step_are_relative_to_its_begin() -> None:
    """A call that began before the step is in it; one that ended before it is not."""
    calls = [
        CallTime("actor", 0, "update_actor", 104.0, 2.0, 0.0),
        CallTime("actor", 1, "update_actor", 104.0, 2.0, 0.5),
        CallTime("actor", 0, "save_checkpoint", 98.0, 1.0, 0.0),
        CallTime("rollout", 0, "receive_weights", 99.5, 1.0, 0.0),
    ]
    assert step_calls(calls, step_s=10.0, end_s=110.0) == {
        "rollout.receive_weights": [[0, -0.5, 1.0, 0.0]],
        "actor.update_actor": [[0, 4.0, 2.0, 0.0], [1, 4.0, 2.0, 0.5]],
    }
