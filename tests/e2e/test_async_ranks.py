# SPDX-License-Identifier: Apache-2.0
"""Generation beside training with rollout ranks of their own, all in this process: the way of the calls is that of a
run on Ray, which `tests/e2e/ray/test_async_training.py` makes."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from quadriga.errors import WorkerLostError
from quadriga.single_controller import LocalWorkerGroup, ResourcePool, WorkerGroups
from quadriga.trainer import build, launch
from quadriga.trainer.async_batches import AsyncBatches
from quadriga.trainer.async_record import RECORD
from quadriga.workers.stream import ServedStream

Lines = list[dict[str, Any]]
ON = ("async_training.enable=True", "data.max_response_length=24", "trainer.total_training_steps=6")
APART = (
    "trainer.backend=ray",
    "trainer.placement={actor: training, rollout: generation}",
    "trainer.resource_pools.generation=[2]",
)
ALIKE = ("async_training.preset=one_step_off", "async_training.deterministic=True")
BY_TIME = ("async/depth", "async/wait_s", "async/rollout_wait_s", "training/epoch", "rollout/engine_restarts")
BY_TIME += ("async/dropped_equal", "async/dropped_surplus", "async/discarded_tokens")  # in which step they are counted


class Here(WorkerGroups):
    """The groups of a run on Ray in this process."""

    def __init__(self, classes: Mapping[str, Any], roles: Mapping[str, str], pools: Mapping[str, Any], *_: Any) -> None:
        self.groups = {
            role: LocalWorkerGroup(entry, ResourcePool(pools[roles[role]]), role) for role, entry in classes.items()
        }


@contextmanager
def no_cluster(*_: Any) -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build.TEAMS, "ray", f"{__name__}:Here")
    monkeypatch.setattr(launch, "CLUSTER", f"{__name__}:no_cluster")


def test_a_rank_that_is_lost_changes_no_number(
    train: Callable[..., Path],
    metric_lines: Callable[[Path], Lines],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Of two ranks one is lost while it generates; its groups start on the other, and it comes back. The metrics are
    those of one process, which a run with both ranks has as well."""
    expected = metric_lines(train(*ON, *ALIKE, run="alone"))
    tell, take, lost = ServedStream._tell, AsyncBatches.take, list[ServedStream]()

    def dies(stream: ServedStream, group: int, output: Any) -> None:
        if group == 9 and not lost:
            lost.append(stream)
        if stream in lost:
            error = WorkerLostError("rollout[rank 1/2] died in stream_events", got="SIGKILL")
            stream._happened.put(("ended", group, lambda: (_ for _ in ()).throw(error)))
        else:
            tell(stream, group, output)

    def late(batches: AsyncBatches, step: int) -> Any:
        if step == 5 and batches._pool is not None:
            batches._pool._restarts.wait(60)
        return take(batches, step)

    for name in ("both", "one lost"):
        if name == "one lost":
            monkeypatch.setattr(ServedStream, "_tell", dies)
            monkeypatch.setattr(AsyncBatches, "take", late)
        lines = metric_lines(train(*ON, *ALIKE, *APART, run=name))
        assert len(lines) == len(expected) == 6
        restarted = sum(line.pop("async/restarted_groups", 0) for line in lines)
        assert restarted >= 1 if name == "one lost" else restarted == 0
        for ours, theirs in zip(lines, expected, strict=True):
            for metric in theirs.keys() - set(BY_TIME):
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=2e-6), (metric, name, ours["step"])
    assert "rollout engine 1 is started again" in caplog.text


@pytest.mark.parametrize("keys", [(), ("algorithm.filter_groups.enable=True",)])
def test_a_record_replays_on_several_ranks(
    keys: tuple[str, ...], train: Callable[..., Path], metric_lines: Callable[[Path], Lines]
) -> None:
    """Whatever takes how long: to float32 rounding, with the same groups in each step, each of the same weights. On
    other ranks, too, and a record of one process."""
    options = (*ON, "async_training.preset=one_step_off", "async_training.max_staleness=2", *keys)
    for name, own in {"apart": APART, "one process": ()}.items():
        first = train(*options, *own, run=name)
        expected, steps = metric_lines(first), steps_of(first)
        again = train(*options, *APART, f"async_training.replay={first}/{RECORD}", run=f"{name} again")
        assert steps_of(again) == steps and len(steps) == 6
        for ours, theirs in zip(metric_lines(again), expected, strict=True):
            for metric in theirs.keys() - set(BY_TIME):
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=2e-6), (metric, name, ours["step"])


def steps_of(run: Path) -> list[str]:
    """What each step learned from, as the record of a run has it."""
    return [line for line in (run / RECORD).read_text(encoding="utf-8").splitlines() if '"step"' in line]


def test_the_bound_holds_with_several_ranks(train: Callable[..., Path], metric_lines: Callable[[Path], Lines]) -> None:
    lines = metric_lines(train(*ON, *APART, "async_training.max_staleness=2", f"{ROLLOUT}.max_num_seqs=3"))
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert 1 <= max(line["async/staleness_max"] for line in lines) <= 2


ROLLOUT = "actor_rollout_ref.rollout"
