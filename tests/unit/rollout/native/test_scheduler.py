# SPDX-License-Identifier: Apache-2.0
"""The scheduler hands out every place once, keeps samples of a prompt together, and stays within its limits."""

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.rollout.native.scheduler import Scheduler


@dataclass(eq=False)
class Request:
    """A request that needs some steps."""

    prefix: tuple[int, ...]
    num_left: int = 1


def _requests(prefixes: str) -> list[Request]:
    return [Request((ord(letter),)) for letter in prefixes]


def _names(requests: list[Request]) -> str:
    return "".join(chr(request.prefix[0]) for request in requests)


def test_samples_of_a_prompt_start_together() -> None:
    """Requests come interleaved; the first batch holds the first prompt's samples side by side, those that join too."""
    scheduler: Scheduler[Request] = Scheduler(3, 100)
    scheduler.add(_requests("abacb"))
    assert _names(scheduler.admit(room=1)) == "aab"
    scheduler.add(_requests("cbd"))
    assert _names(scheduler.waiting) == "bbccd"


def test_the_last_row_fills_the_gap() -> None:
    """Rows have no gaps, and the scheduler says who moved."""
    scheduler: Scheduler[Request] = Scheduler(4, 100)
    scheduler.add(_requests("abcd"))
    scheduler.admit(room=1)
    assert scheduler.finish(1) == 3
    assert _names(scheduler.running) == "adc"
    assert scheduler.finish(2) == 2
    assert _names(scheduler.running) == "ad"


def test_places_are_refilled_when_it_pays() -> None:
    """Of ten places three must be free, unless all that wait find room."""
    scheduler: Scheduler[Request] = Scheduler(10, 100)
    scheduler.add(_requests("abcdefghijklmno"))
    scheduler.admit(room=1)
    for _ in range(2):
        scheduler.finish(0)
        assert scheduler.admit(room=1) == []
    scheduler.finish(0)
    assert len(scheduler.admit(room=1)) == 3
    del scheduler.waiting[1:]
    scheduler.finish(0)
    assert len(scheduler.admit(room=1)) == 1


def test_tokens_of_a_round() -> None:
    """Prefixes that are computed in one round stay within its tokens; one that is larger alone starts alone."""
    scheduler: Scheduler[Request] = Scheduler(10, 5)
    scheduler.add(
        [Request((1,) * 9), Request((2,) * 3), Request((2,) * 3), Request((3,) * 2), Request((4,))]
    )
    assert len(scheduler.admit(room=1)) == 1
    assert [len(request.prefix) for request in scheduler.admit(room=1)] == [3, 3, 2]


def test_a_full_cache() -> None:
    """Rows start while prefixes and room fit; the last one gives way and comes before all others."""
    scheduler: Scheduler[Request] = Scheduler(10, 100, max_cache_tokens=20)
    first, second, third = Request((1, 1)), Request((1, 1)), Request((2, 2, 2))
    scheduler.add([first, second, third])
    assert scheduler.admit(room=8) == [first, second]  # 2 + 2 * 8; with the third 2 * 3 + 3 * 8
    assert scheduler.fits(9)
    assert not scheduler.fits(10)
    assert scheduler.preempt() is second
    assert scheduler.waiting == [second, third]
    assert scheduler.fits(18)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 9)), max_size=25),
    st.integers(1, 8),
    st.floats(0.1, 1.0),
    st.one_of(st.none(), st.integers(12, 60)),
)
def test_every_request_runs_once(
    requests: list[tuple[int, int]],
    max_num_seqs: int,
    refill_share: float,
    max_cache_tokens: int | None,
) -> None:
    """Each request gets exactly the steps that it needs, within the places and the cache that there are."""
    scheduler: Scheduler[Request] = Scheduler(max_num_seqs, 10, max_cache_tokens, refill_share)
    sequences = [Request((prompt,) * (prompt + 1), steps) for prompt, steps in requests]
    scheduler.add(sequences)
    for _ in range(sum(steps for _, steps in requests) + 1):
        scheduler.admit(room=2)
        if scheduler.is_done:
            break
        assert 0 < len(scheduler.running) <= max_num_seqs
        if max_cache_tokens is not None:
            lengths = [len(prefix) for prefix in {one.prefix for one in scheduler.running}]
            assert len(lengths) * max(lengths) + len(scheduler.running) * 2 <= max_cache_tokens
        for row in reversed(range(len(scheduler.running))):
            scheduler.running[row].num_left -= 1
            if scheduler.running[row].num_left == 0:
                scheduler.finish(row)
    assert scheduler.is_done
    assert all(one.num_left == 0 for one in sequences)
