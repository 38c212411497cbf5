# SPDX-License-Identifier: Apache-2.0
"""Generation and training at the same time, in one process: lockstep bit for bit where nothing may be stale, a bound
that holds where it may, the same numbers twice where the schedule is deterministic."""

import gzip
import json
import os
import random
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.cli.main import main
from quadriga.errors import WeightSyncError
from quadriga.protocol import DataProto
from quadriga.rollout.native.engine import NativeEngine
from quadriga.rollout.native.generation import Generation
from quadriga.rollout.native.inbox import Inbox
from quadriga.trainer.asynchronous.batches import AsyncBatches
from quadriga.trainer.asynchronous.schedule import Decision, HandOver, Schedule
from quadriga.trainer.ray_trainer import RayPPOTrainer
from quadriga.trainer.saving import RUN_STATE
from tests.limits import SOON_S

ON = "async_training.enable=True"
# How far ahead the rollout is, is a matter of time.
BY_TIME = ("async/depth", "async/wait_s", "async/rollout_wait_s", "training/epoch")
BY_TIME += ("async/dropped_equal", "async/discarded_tokens")  # in which step they are counted
STEPS = "trainer.total_training_steps=6"
Lines = list[dict[str, Any]]


def without_own(lines: Lines) -> Lines:
    """The metrics that lockstep has too."""
    own = ("async/", "rollout_corr/", "rollout/replayed")
    return [
        {name: value for name, value in line.items() if not name.startswith(own)} for line in lines
    ]


@pytest.mark.parametrize(
    "extra", [(), ("algorithm.filter_groups.enable=True", "data.shuffle=True")]
)
def test_without_staleness_it_is_lockstep_bit_for_bit(
    train: Callable[..., Path],
    metric_lines: Callable[..., Lines],
    extra: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Every metric of every step is the same number, the gradient's norm among them; validation too."""
    options = (STEPS, "trainer.test_freq=3", *extra)
    lockstep = metric_lines(train(*options, run="lockstep"))
    take = Inbox.take

    def late(self: Inbox, scheduler: Any) -> Any:
        """As on a busy machine: the next round is there before the engine has seen that it is idle."""
        time.sleep(0.1 * scheduler.is_done)
        return take(self, scheduler)

    monkeypatch.setattr(Inbox, "take", late)
    lines = metric_lines(train(*options, ON, "async_training.max_staleness=0", run="async"))
    assert without_own(lines) == lockstep
    assert all(line["async/staleness_max"] == 0 for line in lines)


@pytest.fixture
def delays(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """`delays(seed)`: from here on steps of the engine and of the trainer take a random time.

    Unless the trainer waits for it, the engine makes few steps, of a random number after each batch: what it generates
    ahead is under way when weights change and checkpoints are written. No clock decides this, for a trainer that a busy
    machine slows down would find an engine that has done all that it may.
    """
    dice = random.Random()
    changed = threading.Condition()
    # Calls of the trainer that wait for the engine, and steps that it may make while there is none.
    num_waiting = num_left = 0
    advance = Generation.advance

    def advance_late(*step: Any) -> Any:
        nonlocal num_left
        with changed:
            changed.wait_for(lambda: num_waiting or num_left, SOON_S)
            num_left = max(num_left - 1, 0)
        return advance(*step)

    def awaited(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            nonlocal num_waiting, num_left
            with changed:
                num_waiting += 1
                changed.notify_all()
            try:
                return method(*args)
            finally:
                with changed:
                    num_waiting -= 1
                    num_left = 1 + int(MOST_STEPS * dice.random() ** 2)
                    changed.notify_all()

        return call

    def slow(function: Callable[..., Any], most_s: float) -> Callable[..., Any]:
        def slowed(*args: Any, **kwargs: Any) -> Any:
            time.sleep(dice.random() ** 3 * most_s)
            return function(*args, **kwargs)

        return slowed

    monkeypatch.setattr(Generation, "advance", slow(advance_late, 0.006))
    for name in ("take", "state_dict", "stop"):
        monkeypatch.setattr(AsyncBatches, name, awaited(getattr(AsyncBatches, name)))
    monkeypatch.setattr(
        RayPPOTrainer, "compute_advantages", slow(RayPPOTrainer.compute_advantages, 0.1)
    )
    return dice.seed


MOST_STEPS = 60
"""Of the engine, ahead of a trainer that does not wait for it. A batch takes about 35."""
LONG = ("data.max_response_length=24", "trainer.total_training_steps=6")
FEW = "actor_rollout_ref.rollout.max_num_seqs=6"
BY_TWO = "actor_rollout_ref.actor.ppo_mini_batch_size=2"


def require_bound(lines: Lines, bound: int) -> None:
    """Every step has its batch, with tokens within the bound, some of which are stale."""
    assert [line["training/global_step"] for line in lines] == list(range(1, 7))
    assert 1 <= max(line["async/staleness_max"] for line in lines) <= bound
    for line in lines:
        shares = [line[f"async/lag_{lag}_share"] for lag in range(bound + 1)]
        assert sum(shares) == pytest.approx(1)
        assert line["rollout_corr/rollout_is_mean"] > 0
    assert lines[0]["async/staleness_max"] == 0


def require_same(lines: Lines, expected: Lines) -> None:
    """The same numbers, bit for bit, but for what depends on the time."""
    assert [line["step"] for line in lines] == [line["step"] for line in expected] != []
    for line, first in zip(lines, expected, strict=True):
        assert {
            name: (value, line[name]) for name, value in first.items() if differs(name, value, line)
        } == {}


SIDES = {
    "drop": ("async_training.on_stale=drop", "async_training.max_staleness=2"),
    "conversations": ("actor_rollout_ref.rollout.mode=async",),
}


@pytest.mark.parametrize("side", SIDES)
def test_the_bound_holds_in_a_run(
    side: str,
    train: Callable[..., Path],
    metric_lines: Callable[..., Lines],
    delays: Callable[[int], None],
) -> None:
    """Whatever is slow. Other sides: the next tests, whose runs are compared with others."""
    delays(3)
    require_bound(metric_lines(train(*LONG, ON, *SIDES[side])), 2 if side == "drop" else 1)


BOUNDED = ("async_training.max_staleness=2", "async_training.deterministic=True")
RESUMED = {
    "lockstep": ("async_training.max_staleness=0",),
    "one step off": ("async_training.preset=one_step_off", "async_training.deterministic=True"),
    "bounded": BOUNDED,
    "finish": (*BOUNDED, "async_training.in_flight=finish"),
    "keep": (*BOUNDED, "async_training.kv_on_update=keep"),
    "every other step": (*BOUNDED, "async_training.max_staleness=1", "async_training.sync_every=2"),
    "by mini-batch": (*BOUNDED, "async_training.by_mini_batch=True", BY_TWO),
    "dynamic sampling": (*BOUNDED, "algorithm.filter_groups.enable=True"),
    "rounds that end": (
        *("async_training.preset=one_step_off", "algorithm.filter_groups.enable=True"),
        *("async_training.deterministic=True", "data.gen_batch_size=3"),
    ),
}


BOUND_ONE = ("one step off", "every other step", "rounds that end")


@pytest.mark.parametrize("side", RESUMED)
def test_a_deterministic_run_is_the_same_on_any_timing_and_from_each_checkpoint(
    side: str,
    train: Callable[..., Path],
    metric_lines: Callable[..., Lines],
    delays: Callable[[int], None],
) -> None:
    """With responses that were generated ahead in a checkpoint and those under way, whatever is slow; within the bound.

    The whole run again, in other time, for the sides whose weights change while they generate.
    """
    options = (*LONG, ON, *RESUMED[side], FEW, "trainer.save_freq=1")
    delays(1)
    whole = train(*options, run="whole")
    expected = metric_lines(whole)
    if side == "lockstep":
        assert len(expected) == 6
    else:
        require_bound(expected, 1 if side in BOUND_ONE else 2)
    under_way = [state_of(whole, step)["under_way"] for step in range(1, 6)]
    lengths = [
        len(tokens)
        for responses in under_way
        for _, _, tokens, _, reason, *_ in responses
        if reason == "abort"
    ]
    assert any(lengths) == (side not in ("lockstep", "one step off", "finish", "rounds that end"))
    if side in ("bounded", "finish", "by mini-batch"):
        assert sum(line.get("async/interruptions", 0) for line in expected) > 0 or side == "finish"
        delays(2)
        require_same(metric_lines(train(*options, "trainer.save_freq=-1", run="again")), expected)
    # Early and late in a run for one side; the others have one checkpoint to go on from.
    for step in (1, 4) if side == "bounded" else (3,):
        resumed = whole.parent / f"from step {step}"
        resumed.mkdir()
        shutil.copytree(whole / f"global_step_{step}", resumed / f"global_step_{step}")
        delays(step + 10)
        require_same(
            metric_lines(train(*options, "trainer.resume_mode=auto", run=resumed.name)),
            expected[step:],
        )


def state_of(run: Path, step: int) -> dict[str, Any]:
    """What a checkpoint has of generation."""
    state = torch.load(run / f"global_step_{step}" / "trainer" / "state.pt", weights_only=True)[
        "asynchronous"
    ]
    return state or {"under_way": []}


def differs(name: str, value: float, line: dict[str, Any]) -> bool:
    return name not in BY_TIME and line[name] != value


REPLAYED = {
    "bounded": (2, ("async_training.max_staleness=2", FEW)),
    "keep": (
        3,
        (
            "async_training.max_staleness=3",
            "async_training.sync_every=2",
            "async_training.kv_on_update=keep",
            FEW,
        ),
    ),
    "finish": (2, ("async_training.max_staleness=2", "async_training.in_flight=finish", FEW)),
    "streaming": (
        1,
        ("async_training.preset=streaming", "actor_rollout_ref.actor.ppo_mini_batch_size=1"),
    ),
}


@pytest.mark.parametrize("side", REPLAYED)
def test_a_record_replays_on_any_timing(
    side: str,
    train: Callable[..., Path],
    metric_lines: Callable[..., Lines],
    delays: Callable[[int], None],
) -> None:
    """In random time, within the bound. The record, which says which token of which sequence was drawn by which
    weights, repeats the run bit for bit, from its start and from its checkpoints: what is under way in one has the same
    next tokens in the run that goes on."""
    bound, keys = REPLAYED[side]
    options = (*LONG, ON, *keys)
    delays(1)
    first = train(*options, "trainer.save_freq=1", run="first")
    expected = metric_lines(first)
    require_bound(expected, bound)
    assert (
        side in ("streaming", "finish")
        or sum(line.get("async/interruptions", 0) for line in expected) > 0
    )
    record = first / "async_schedule.jsonl"
    delays(2)
    again = train(*options, f"async_training.replay={record}", run="again")
    require_same(metric_lines(again), expected)
    steps, same_steps = (
        [line for line in run.read_text().splitlines() if "step" in line]
        for run in (record, again / record.name)
    )
    assert same_steps == steps and len(steps) == (24 if side == "streaming" else 6)
    had_tokens = 0
    # Responses that are under way are in those of two sides.
    for step in (4,) if side in ("finish", "streaming") else (2, 4):
        delays(step + 20)
        had_tokens += sum(len(tokens) for _, _, tokens, *_ in state_of(first, step)["under_way"])
        source = (
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={first / f'global_step_{step}'}",
        )
        replay = f"async_training.replay={record}"
        require_same(
            metric_lines(train(*options, replay, *source, run=f"from {step}")), expected[step:]
        )
    assert had_tokens or side in ("finish", "streaming")


def test_a_resumed_run_is_repeated_from_its_record(
    train: Callable[..., Path], metric_lines: Callable[..., Lines], delays: Callable[[int], None]
) -> None:
    """And from the checkpoint that it began with; in random time, which decides what begins and loads when."""
    options = (*LONG, ON, "async_training.max_staleness=2")
    delays(1)
    first = train(*options, "trainer.save_freq=2", run="first")
    resumed, again = (first.parent / name for name in ("resumed", "again"))
    for run in (resumed, again):
        shutil.copytree(first / "global_step_4", run / "global_step_4")
    delays(2)
    expected = metric_lines(
        train(*options, "trainer.save_freq=2", "trainer.resume_mode=auto", run=resumed.name)
    )
    delays(3)
    record = f"async_training.replay={resumed}/async_schedule_from_step_5.jsonl"
    lines = metric_lines(train(*options, record, "trainer.resume_mode=auto", run=again.name))
    assert [line["step"] for line in lines] == [5, 6]
    require_same(lines, expected)


def test_a_disk_that_fills_while_the_state_is_written_leaves_the_earlier_checkpoint(
    arguments: Callable[..., list[str]],
    train: Callable[..., Path],
    metric_lines: Callable[..., Lines],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one sentence; with room again the run goes on from there."""
    options = (*LONG, ON, "async_training.max_staleness=2", "trainer.save_freq=1")

    write_bytes = Path.write_bytes
    states: list[Path] = []

    def write_until_step_3(path: Path, content: bytes) -> int:
        if path.name == RUN_STATE:
            states.append(path)
            if len(states) == 3:
                raise OSError(28, "No space left on device", str(path))
        return write_bytes(path, content)

    monkeypatch.setattr(Path, "write_bytes", write_until_step_3)
    assert main(["train", *arguments(*options)]) == 1
    told = capsys.readouterr().err
    assert (
        "checkpoint of step 3" in told
        and "Step 2 is still there" in told
        and "Traceback" not in told
    )
    monkeypatch.undo()
    assert [line["step"] for line in metric_lines(train(*options))][-4:] == list(range(3, 7))


@pytest.mark.usefixtures("sigint_raises")
def test_a_run_that_is_ended_goes_on_as_if_it_was_not(
    train: Callable[..., Path],
    arguments: Callable[..., list[str]],
    metric_lines: Callable[..., Lines],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """One run, ended twice with responses under way; what it has saved is whole.

    By SIGTERM and by SIGINT in this process, where no thread of it goes on. By SIGKILL: tests/e2e/ray.
    """
    options = (
        *LONG,
        ON,
        *RESUMED["bounded"],
        "trainer.total_training_steps=8",
        "trainer.save_freq=1",
    )
    take, threads = AsyncBatches.take, threading.active_count()
    for step, end in {3: signal.SIGTERM, 6: signal.SIGINT}.items():

        def end_it(
            batches: AsyncBatches, number: int, last: int = step, sent: signal.Signals = end
        ) -> Any:
            if number == last:
                os.kill(os.getpid(), sent)
            return take(batches, number)

        monkeypatch.setattr(AsyncBatches, "take", end_it)
        assert main(["train", *arguments(*options)]) == 130
        assert "Traceback" not in capsys.readouterr().err
        assert threading.active_count() == threads
    monkeypatch.undo()
    lines = {line["step"]: line for line in metric_lines(train(*options))}
    expected = metric_lines(train(*options, run="whole"))
    require_same([lines[line["step"]] for line in expected], expected)


def test_an_update_starts_with_each_mini_batch(
    train: Callable[..., Path], metric_lines: Callable[..., Lines], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first one before the others are complete, of its rows alone; a step's metrics are those of all rows."""
    learned, left = [], []
    learn, decide = RayPPOTrainer.learn, Schedule.decide

    def decided(self: Schedule) -> list[Decision]:
        decisions = decide(self)
        for one in decisions:
            if isinstance(one, HandOver):
                left.append(
                    sum(
                        group.batch == one.step and not group.is_complete
                        for group in self.groups.values()
                    )
                )
        return decisions

    def noted(self: RayPPOTrainer, batch: DataProto) -> DataProto:
        learned.append(learn(self, batch))
        return learned[-1]

    monkeypatch.setattr(Schedule, "decide", decided)
    monkeypatch.setattr(RayPPOTrainer, "learn", noted)
    one_by_one = (
        "actor_rollout_ref.rollout.max_num_seqs=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=3",
    )
    lines = metric_lines(train(*LONG, *one_by_one, ON, "async_training.preset=streaming"))
    assert [len(part) for part in learned] == [6, 2] * 6
    assert left[0] == 1 and not any(left[1::2]) and len(left) == 12
    for step, line in enumerate(lines):
        masks = [part.batch["response_mask"] for part in learned[2 * step : 2 * step + 2]]
        assert line["rollout/num_response_tokens"] == sum(int(mask.sum()) for mask in masks)
        assert sum(line[f"async/lag_{lag}_share"] for lag in (0, 1)) == pytest.approx(1)
        # Of the first part alone: the others are no more of the weights that the actor has.
        assert line.get("rollout/log_prob_diff_max", 0) < 1e-5
    assert "rollout/log_prob_diff_max" in lines[0]


def test_a_profile_shows_which_weights_generate(train: Callable[..., Path], tmp_path: Path) -> None:
    """In the lane of the engine's thread, beside the trainer's."""
    keys = ("tool=torch", "steps=[2]", f"save_path={tmp_path}/profiles")
    train(
        *LONG[1:], ON, "async_training.max_staleness=0", *(f"global_profiler.{key}" for key in keys)
    )
    with gzip.open(tmp_path / "profiles" / "step_2.json.gz") as file:
        events = [
            event
            for event in json.load(file)["traceEvents"]
            if event.get("cat") == "user_annotation"
        ]
    lanes = {name: {event["tid"] for event in events if event["name"] == name} for name in LANES}
    assert lanes["step of version 1"] == lanes["new weights"] and len(lanes["new weights"]) == 1
    assert not lanes["step of version 0"] and lanes["update_actor"].isdisjoint(lanes["new weights"])


LANES = ("step of version 0", "step of version 1", "new weights", "update_actor")


def test_explain_simulates_a_recorded_run(
    train: Callable[..., Path],
    arguments: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The seconds and the lengths of one in lockstep; another run has none."""
    steps = "trainer.total_training_steps=4"
    lockstep, stale = train(steps, run="lockstep"), train(steps, ON, run="stale")
    explain = ["config", "explain", *arguments(steps, ON), "--recorded"]
    assert main([*explain, str(lockstep)]) == 0
    told = capsys.readouterr().out
    assert (
        f"by lengths and seconds of 4 steps of {lockstep}" in told
        and "recommended: max_staleness=" in told
    )
    assert main([*explain, str(stale)]) == 2
    assert (
        "expected metrics and responses (trainer.rollout_record) of a run in lockstep"
        in capsys.readouterr().out
    )


def test_losses_and_estimators_get_the_staleness_of_tokens_by_name(
    train: Callable[..., Path], metric_lines: Callable[..., Lines], tmp_path: Path
) -> None:
    """In the loss as the share of tokens that are stale, which is that of the batch; the estimator leaves those out."""
    (tmp_path / "own.py").write_text(
        "def halved(token_level_rewards, response_mask, token_staleness):\n"
        "    rewards = token_level_rewards.sum(-1, keepdim=True) * response_mask\n"
        "    return rewards * (token_staleness == 0), rewards\n"
        "def told(log_prob, advantages, response_mask, token_staleness):\n"
        "    stale = (token_staleness > 0).to(log_prob.dtype)\n"
        "    return -log_prob * advantages, {'stale': stale}\n"
    )
    own = (
        f"algorithm.adv_estimator={tmp_path}/own.py:halved",
        "actor_rollout_ref.actor.policy_loss.loss_mode=",
    )
    options = (own[0], f"{own[1]}{tmp_path}/own.py:told", "trainer.total_training_steps=4")
    lines = metric_lines(train(*options, ON, "async_training.preset=one_step_off"))
    for line in lines:
        assert line["actor/stale"] == pytest.approx(line["async/lag_1_share"])
        assert (line["critic/advantages/max"] == 0) == (line["async/lag_1_share"] == 1)
    assert lines[-1]["async/lag_1_share"] == 1


def test_an_engine_that_refuses_weights_under_way_ends_the_run(
    arguments: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = NativeEngine.load_weights

    def refuse(self: NativeEngine, weights: Any, version: int) -> None:
        if version == 2 and not self.shares_weights:
            raise WeightSyncError("the engine", got="weights that it does not take")
        load(self, weights, version)

    monkeypatch.setattr(NativeEngine, "load_weights", refuse)
    assert main(["train", *arguments(*LONG, ON)]) == 1
    assert "the engine: got weights that it does not take" in capsys.readouterr().err


def test_every_step_checks_the_bound_on_its_tokens(
    arguments: Callable[..., list[str]],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    delays: Callable[[int], None],
) -> None:
    """Of a schedule without its gate the run notices, whatever the schedule itself says."""
    delays(1)
    monkeypatch.setattr(Schedule, "may_start", lambda self, version, batch: True)
    monkeypatch.setattr(Schedule, "_check_bound", lambda self, step, numbers: None)
    assert main(["train", *arguments(*LONG, ON)]) == 1
    assert "async_training: got step" in capsys.readouterr().err
