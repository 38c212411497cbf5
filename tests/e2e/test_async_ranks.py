# SPDX-License-Identifier: Apache-2.0
"""Generation beside training with rollout ranks of their own, all in this process: the way of the calls is that of a
run on Ray, which `tests/e2e/ray/test_async_training.py` makes."""

import json
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.cli.main import main
from quadriga.errors import WorkerLostError
from quadriga.protocol import DataProtoFuture
from quadriga.rollout.native.generation import Generation
from quadriga.single_controller import LocalWorkerGroup, ResourcePool, WorkerGroups
from quadriga.trainer import build, launch
from quadriga.trainer.asynchronous.batches import AsyncBatches
from quadriga.trainer.asynchronous.record import RECORD
from quadriga.trainer.asynchronous.streams import RemoteStream
from quadriga.workers.stream import ServedStream
from tests.limits import ENGINE_RESTARTS_S

Lines = list[dict[str, Any]]
ROLLOUT = "actor_rollout_ref.rollout"
ON = ("async_training.enable=True", "data.max_response_length=24", "trainer.total_training_steps=6")
APART = (
    "trainer.backend=ray",
    "trainer.placement={actor: training, rollout: generation}",
    "trainer.resource_pools.generation=[2]",
)
ALIKE = ("async_training.preset=one_step_off", "async_training.deterministic=True")
BY_TIME = (
    "async/depth",
    "async/wait_s",
    "async/rollout_wait_s",
    "training/epoch",
    "rollout/engine_restarts",
)
BY_TIME += (
    "async/dropped_equal",
    "async/dropped_surplus",
    "async/discarded_tokens",
)  # in which step they are counted


class Here(WorkerGroups):
    """The groups of a run on Ray in this process."""

    def __init__(
        self,
        classes: Mapping[str, Any],
        roles: Mapping[str, str],
        pools: Mapping[str, Any],
        *_: Any,
    ) -> None:
        self.groups = {
            role: LocalWorkerGroup(entry, ResourcePool(pools[roles[role]]), role)
            for role, entry in classes.items()
        }


@contextmanager
def no_cluster(*_: Any) -> Iterator[None]:
    yield


@pytest.fixture(autouse=True)
def _here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(build.TEAMS, "ray", f"{__name__}:Here")
    monkeypatch.setattr(launch, "CLUSTER", f"{__name__}:no_cluster")


@pytest.fixture
def _ahead_only_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines take their time except while the trainer waits for a batch: what they generate ahead is under way when a
    checkpoint is written, on a machine of any speed."""
    advance, take, is_waiting = Generation.advance, AsyncBatches.take, threading.Event()

    def advance_slowly(*step: Any) -> Any:
        is_waiting.wait(0.2)
        return advance(*step)

    def take_at_once(batches: AsyncBatches, step: int) -> Any:
        is_waiting.set()
        try:
            return take(batches, step)
        finally:
            is_waiting.clear()

    monkeypatch.setattr(Generation, "advance", advance_slowly)
    monkeypatch.setattr(AsyncBatches, "take", take_at_once)


@pytest.fixture
def lost() -> Iterator[list[ServedStream]]:
    """Streams of ranks that a test declares lost. A run does not close them, so their threads would keep this process
    from ending."""
    streams: list[ServedStream] = []
    yield streams
    for stream in streams:
        stream.close()


def test_a_rank_that_is_lost_changes_no_number(
    train: Callable[..., Path],
    metric_lines: Callable[[Path], Lines],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    lost: list[ServedStream],
) -> None:
    """Of two ranks one is lost while it generates; its groups start on the other, and it comes back. The metrics are
    those of one process, which a run with both ranks has as well."""
    expected = metric_lines(train(*ON, *ALIKE, run="alone"))
    tell, take = ServedStream._report, AsyncBatches.take

    def dies(stream: ServedStream, kind: str, group: int, output: Any) -> None:
        if (kind, group) == ("ended", 9) and not lost:
            lost.append(stream)
        if stream in lost:
            error = WorkerLostError("rollout[rank 1/2] died in stream_events", got="SIGKILL")
            stream._queued_events.put((kind, group, lambda: (_ for _ in ()).throw(error)))
        else:
            tell(stream, kind, group, output)

    def late(batches: AsyncBatches, step: int) -> Any:
        if step == 5 and batches._workers.pool is not None:
            batches._workers.pool._restarts.wait(ENGINE_RESTARTS_S)
        return take(batches, step)

    for name in ("both", "one lost"):
        if name == "one lost":
            monkeypatch.setattr(ServedStream, "_report", dies)
            monkeypatch.setattr(AsyncBatches, "take", late)
        lines = metric_lines(train(*ON, *ALIKE, *APART, run=name))
        assert len(lines) == len(expected) == 6
        restarted = sum(line.pop("async/restarted_groups", 0) for line in lines)
        assert restarted >= 1 if name == "one lost" else restarted == 0
        for ours, theirs in zip(lines, expected, strict=True):
            for metric in theirs.keys() - set(BY_TIME):
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=2e-6), (
                    metric,
                    name,
                    ours["step"],
                )
    assert "rollout engine 1 is started again" in caplog.text


@pytest.mark.parametrize("keys", [(), ("algorithm.filter_groups.enable=True",)])
def test_a_record_replays_on_several_ranks(
    keys: tuple[str, ...], train: Callable[..., Path], metric_lines: Callable[[Path], Lines]
) -> None:
    """Whatever takes how long: to float32 rounding, with the same groups in each step, each of the same weights. On
    other ranks, too, and a record of one process."""
    options = (*ON, "async_training.preset=one_step_off", "async_training.max_staleness=2", *keys)
    other = "trainer.resource_pools.generation=[3]"
    placements = {"apart": APART} if keys else {"apart": APART, "one process": ()}
    for name, own in placements.items():
        first = train(*options, *own, run=name)
        expected, steps = metric_lines(first), steps_of(first)
        again = train(
            *options, *APART, other, f"async_training.replay={first}/{RECORD}", run=f"{name} again"
        )
        assert steps_of(again) == steps and len(steps) == 6
        for ours, theirs in zip(metric_lines(again), expected, strict=True):
            for metric in theirs.keys() - set(BY_TIME):
                assert ours[metric] == pytest.approx(theirs[metric], rel=1e-4, abs=2e-6), (
                    metric,
                    name,
                    ours["step"],
                )


VARIED = (f"{ROLLOUT}.stop_token_ids=[5,6]", "trainer.save_freq=1")
"""Responses of all lengths."""
CONTINUES = {
    "bounded": (),
    "keep": ("async_training.kv_on_update=keep",),
    "streaming": (
        "async_training.by_mini_batch=True",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    ),
}


@pytest.mark.parametrize("side", CONTINUES)
def test_a_deterministic_run_saves_what_is_under_way(
    side: str,
    train: Callable[..., Path],
    metric_lines: Callable[[Path], Lines],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one rank of its own: it has the numbers of one process, bit for bit, and so has the run that goes on from one
    of its checkpoints, in either placement. The driver is slow to decide."""
    options = (
        *ON,
        "async_training.max_staleness=2",
        "async_training.deterministic=True",
        *CONTINUES[side],
    )
    options = (*options, *VARIED, f"{ROLLOUT}.max_num_seqs=12")
    apart, take = (*APART, "trainer.resource_pools.generation=[1]"), RemoteStream._handle_event
    monkeypatch.setattr(
        RemoteStream, "_handle_event", lambda *event: (time.sleep(0.01), take(*event))
    )
    expected, unfinished = metric_lines(train(*options, run="one process")), 0
    first = train(*options, *apart, run="apart")
    for step, own in {0: apart, 2: (), 4: apart}.items():
        run = go_on(first, step, train, *options, *own) if step else first
        unfinished += sum(len(one[2]) for one in unfinished_in(first, step)) if step else 0
        lines = metric_lines(run)
        assert [line["step"] for line in lines] == list(range(step + 1, 7))
        for ours, theirs in zip(lines, expected[step:], strict=True):
            differ = {name for name in theirs.keys() - set(BY_TIME) if ours[name] != theirs[name]}
            assert differ == set(), (step, ours["step"])
    assert unfinished


@pytest.mark.usefixtures("_ahead_only_slowly")
def test_what_several_ranks_have_under_way_goes_on_on_others(
    train: Callable[..., Path], metric_lines: Callable[[Path], Lines]
) -> None:
    """With weights that stay as they are responses do not depend on the time: each step learns from those of a run in
    one process, and those that a checkpoint has begun keep their tokens, by other ranks, more or fewer."""
    still = ("actor_rollout_ref.actor.optim.lr=0", f"{ROLLOUT}.max_num_seqs=3")
    options = (*ON, *VARIED, *still, "async_training.max_staleness=2")
    expected, kept = metric_lines(train(*options, run="one process")), 0
    first = train(*options, *APART, run="apart")
    many = (*APART, "trainer.resource_pools.generation=[3]")
    for step, own in {0: (), 2: many, 4: ()}.items():
        run = go_on(first, step, train, *options, *own) if step else first
        lines = metric_lines(run)
        assert [line["step"] for line in lines] == list(range(step + 1, 7))
        require_alike(lines, expected[step:])
        kept += num_kept(run, first, step) if step else 0
    assert kept


@pytest.mark.usefixtures("_ahead_only_slowly")
def test_a_rank_that_is_lost_in_a_save_holds_up_nothing(
    train: Callable[..., Path],
    metric_lines: Callable[[Path], Lines],
    monkeypatch: pytest.MonkeyPatch,
    lost: list[ServedStream],
) -> None:
    """What it had under way starts anew, in the run that goes on and in the one that resumes."""
    hand_out = ServedStream.hand_out

    def dies(stream: ServedStream) -> None:
        if len(stream._open) > 1 and not lost:
            lost.append(stream)
            error = WorkerLostError("rollout[rank 1/2] died in stream_events", got="SIGKILL")
            stream._queued_events.put(("saved", 0, lambda: (_ for _ in ()).throw(error)))
        else:
            hand_out(stream)

    still = (
        "actor_rollout_ref.actor.optim.lr=0",
        f"{ROLLOUT}.max_num_seqs=2",
        "async_training.max_staleness=2",
    )
    options = (*ON, *VARIED, *still)
    expected = metric_lines(train(*options, run="one process"))
    monkeypatch.setattr(ServedStream, "hand_out", dies)
    first = train(*options, *APART, run="apart")
    lines = metric_lines(first)
    assert lost and sum(line.get("async/restarted_groups", 0) for line in lines) >= 1
    require_alike(lines, expected)
    for step in (1, 2):
        require_alike(metric_lines(go_on(first, step, train, *options, *APART)), expected[step:])


def go_on(first: Path, step: int, train: Callable[..., Path], *options: str) -> Path:
    """A run from a checkpoint of another."""
    run = first.parent / f"from step {step}"
    shutil.copytree(first / f"global_step_{step}", run / f"global_step_{step}")
    return train(*options, "trainer.resume_mode=auto", run=run.name)


def unfinished_in(run: Path, step: int) -> list[Any]:
    """Responses of a checkpoint that are under way."""
    state = torch.load(run / f"global_step_{step}" / "trainer" / "state.pt", weights_only=True)[
        "asynchronous"
    ]
    return [one for one in state["under_way"] if one[4] == "abort" and len(one[2])]


def num_kept(run: Path, first: Path, step: int) -> int:
    """Checks that what a checkpoint has begun went on in a run from it: each of its tokens has its version. Returns how
    many are older than the checkpoint's weights."""
    record = (
        (run / f"async_schedule_from_step_{step + 1}.jsonl")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    learned = {
        int(group): own
        for line in record
        for group, own in json.loads(line).get("groups", {}).items()
    }
    num_older = 0
    for group, row, *_, versions in unfinished_in(first, step):
        if group in learned:  # else it was left out
            spans = learned[group][row]
            ours = [
                max(start for start in spans if start[1] <= place)[0]
                for place in range(len(versions))
            ]
            assert ours == versions.tolist(), (step, group, row)
            num_older += sum(version < step for version in ours)
    return num_older


def require_alike(lines: Lines, expected: Lines) -> None:
    """Metrics to float32 rounding, but what depends on the time."""
    for ours, theirs in zip(lines, expected, strict=True):
        for name in theirs.keys() - set(BY_TIME):
            if not name.startswith(("async/", "rollout/")):
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (
                    name,
                    ours["step"],
                )


def steps_of(run: Path) -> list[str]:
    """What each step learned from, as the record of a run has it."""
    return [
        line for line in (run / RECORD).read_text(encoding="utf-8").splitlines() if '"step"' in line
    ]


def test_the_bound_holds_with_several_ranks(
    train: Callable[..., Path], metric_lines: Callable[[Path], Lines]
) -> None:
    lines = metric_lines(
        train(*ON, *APART, "async_training.max_staleness=2", f"{ROLLOUT}.max_num_seqs=3")
    )
    assert [line["step"] for line in lines] == list(range(1, 7))
    assert 1 <= max(line["async/staleness_max"] for line in lines) <= 2


def test_what_fails_in_a_rank_ends_the_run(
    arguments: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Weights that change on their way are refused by the engine."""
    call = RemoteStream._call

    def spoiled(stream: RemoteStream, method: str, *args: Any, **kwargs: Any) -> None:
        if method == "give_weights" and args[0] == 1:
            copied = args[1].get()
            next(iter(copied[0].weights.values()))[0] += 1
            args = (args[0], DataProtoFuture(list, copied, resolve=list))
        call(stream, method, *args, **kwargs)

    monkeypatch.setattr(RemoteStream, "_call", spoiled)
    assert main(["train", *arguments(*ON, *APART)]) == 1
    told = capsys.readouterr().err
    assert "weights that differ" in told
