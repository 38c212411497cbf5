# SPDX-License-Identifier: Apache-2.0
"""Generation beside training with rollout ranks of their own: the numbers of one process, ranks that are lost.

What it does not prove: several nodes, GPUs, nor that anything is faster (`benchmarks/async.py`).
"""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.cli.main import main
from quadriga.protocol import DataProtoFuture
from quadriga.trainer.async_batches import AsyncBatches
from quadriga.trainer.async_record import RECORD
from quadriga.trainer.stream_pool import RemoteStream
from tests.e2e.test_async_ranks import num_kept, require_alike, steps_of, unfinished_in

Lines = list[dict[str, Any]]
ON = ("async_training.enable=True", "data.max_response_length=24", "trainer.total_training_steps=6")
APART = (
    "trainer.backend=ray",
    "trainer.placement={actor: training, ref: training, rollout: generation}",
)
ROLLOUT = "actor_rollout_ref.rollout"
RESTARTED = ("async/restarted_groups", "rollout/engine_restarts")
BY_TIME = ("async/depth", "async/wait_s", "async/rollout_wait_s", "training/epoch")
SMALL = (f"{ROLLOUT}.max_num_seqs=6", "actor_rollout_ref.actor.ppo_mini_batch_size=2")
TEACHER = (
    "enable=True",
    "loss_mode=forward_kl_topk",
    "topk=4",
    "use_task_rewards=False",
    "fsdp_config.model_dtype=float32",
)
IN_GROUPS = f"{ROLLOUT}.tensor_model_parallel_size=2"
SIDES = {
    "one step off": (2, ("async_training.preset=one_step_off",)),
    "distillation": (2, ("async_training.preset=one_step_off", *(f"distillation.{key}" for key in TEACHER))),
    "streaming": (1, ("async_training.preset=streaming", "async_training.max_staleness=2", *SMALL)),
    "two groups": (4, ("async_training.preset=one_step_off",)),
    "a group": (2, ("async_training.max_staleness=2", *SMALL)),
}


@pytest.mark.parametrize("side", SIDES)
def test_a_deterministic_run_has_the_numbers_of_one_process(
    side: str, ray_cluster: str, train: Callable[..., Path], metric_lines: Callable[[Path], Lines], teacher: Path
) -> None:
    """To float32 rounding: an engine with half of the groups adds up in another order. Validation and checkpoints, too;
    the run on Ray goes on from one of the run in one process, with what was generated ahead and what is under way. A
    teacher has a process of its own; rollout groups of two ranks have a shard of the weights on each."""
    num_ranks, keys = SIDES[side]
    keys = (*keys, f"distillation.path={teacher}") if side == "distillation" else keys
    options = (*ON, *keys, "async_training.deterministic=True", "trainer.save_freq=2", "trainer.test_freq=3")
    alone = train(*options, run="alone")
    own = (*APART, f"trainer.resource_pools.generation=[{num_ranks}]", *((IN_GROUPS,) if "group" in side else ()))
    if side == "distillation":
        own = (*own, "trainer.placement.teacher=scoring", "trainer.resource_pools.scoring=[1]")
    source = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={alone / 'global_step_2'}")
    expected, lines = metric_lines(alone), metric_lines(train(*options, *own, *source, run="apart"))
    assert [line["step"] for line in lines] == [3, 4, 5, 6]
    assert "val-core/letters/reward/mean@1" in lines[-1]
    for ours, theirs in zip(lines, expected[2:], strict=True):
        assert ours.keys() - set(BY_TIME) == theirs.keys() - set(BY_TIME)
        assert ("actor/distillation_loss" in ours) == (side == "distillation")
        for name in theirs.keys() - set(BY_TIME):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (name, theirs["step"])


def test_a_driver_that_is_killed_leaves_what_was_under_way(
    ray_cluster: str,
    start_on: Callable[..., subprocess.Popen[str]],
    train: Callable[..., Path],
    metric_lines: Callable[[Path], Lines],
    tmp_path: Path,
) -> None:
    """By SIGKILL; a run with three ranks instead of two goes on from its checkpoint. With weights that stay as they are
    each step learns from the responses of one process, to float32 rounding, whenever it was; those that the checkpoint
    has begun keep their tokens."""
    still = (*ON, "async_training.max_staleness=2", "actor_rollout_ref.actor.optim.lr=0", f"{ROLLOUT}.max_num_seqs=2")
    long = ("data.max_response_length=128", f"{ROLLOUT}.ignore_eos=True", "trainer.total_training_steps=12")
    options = (*still, *long, "trainer.save_freq=1")
    expected = metric_lines(train(*options, "trainer.save_freq=-1", run="one process"))
    process = start_on(ray_cluster, *options, *APART, "trainer.resource_pools.generation=[2]")
    last, step = tmp_path / "run" / "latest_checkpointed_iteration.txt", 0
    while not step or not any(one[-1][0] < step for one in unfinished_in(tmp_path / "run", step)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
        step = int(last.read_text()) if last.exists() else 0
    process.kill()
    process.wait()
    source = ("trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path / 'run' / f'global_step_{step}'}")
    run = train(*options, *APART, *source, "trainer.resource_pools.generation=[3]", run="resumed")
    lines = metric_lines(run)
    assert [line["step"] for line in lines] == list(range(step + 1, 13))
    require_alike(lines, expected[step:])
    assert num_kept(run, tmp_path / "run", step)


def test_a_record_replays_on_other_ranks(
    ray_cluster: str, train: Callable[..., Path], metric_lines: Callable[[Path], Lines]
) -> None:
    """With the same groups in each step, each of the same weights, to float32 rounding: by three ranks what two did."""
    options = (*ON, *APART, "async_training.preset=one_step_off", "async_training.max_staleness=2")
    first = train(*options, "trainer.resource_pools.generation=[2]", run="first")
    replay = (f"async_training.replay={first}/{RECORD}", "trainer.resource_pools.generation=[3]")
    again = train(*options, *replay, run="again")
    assert steps_of(again) == steps_of(first) and len(steps_of(first)) == 6
    for ours, theirs in zip(metric_lines(again), metric_lines(first), strict=True):
        for name in theirs.keys() - set(BY_TIME):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (name, theirs["step"])


@pytest.mark.slow
def test_a_lost_rank_costs_no_prompt_and_comes_back(
    ray_cluster: str,
    train: Callable[..., Path],
    metric_lines: Callable[[Path], Lines],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    tmp_path: Path,
) -> None:
    """Killed while it generates, in a run whose schedule is deterministic: the responses are those of the run left
    alone, each once."""
    keys = (*ON, *APART, "trainer.resource_pools.generation=[2]", "async_training.preset=one_step_off")
    keys = (*keys, "async_training.deterministic=True", "data.max_response_length=96", f"{ROLLOUT}.ignore_eos=True")
    alone = train(*keys, f"trainer.rollout_data_dir={tmp_path / 'alone_rows'}", run="alone")
    take, start, killed = AsyncBatches.take, RemoteStream.start, list[int]()

    def begun(stream: RemoteStream, groups: Any, *others: Any) -> None:
        start(stream, groups, *others)
        if stream.rank == 1 and not killed and any(rows.meta_info["global_steps"] == 3 for rows in groups.values()):
            killed.append(stream._group.processes.addresses[1].pid)
            threading.Timer(0.05, os.kill, (killed[0], signal.SIGKILL)).start()

    def late(batches: AsyncBatches, step: int) -> Any:
        if step == 5:
            batches._pool._restarts.wait(120)
        return take(batches, step)

    monkeypatch.setattr(RemoteStream, "start", begun)
    monkeypatch.setattr(AsyncBatches, "take", late)
    lines = metric_lines(train(*keys, f"trainer.rollout_data_dir={tmp_path / 'rows'}", run="disturbed"))
    assert killed and "rollout engine 1 is lost, 1 are left" in caplog.text
    counts = {name: sum(line.get(name, 0.0) for line in lines) for name in RESTARTED}
    assert counts["async/restarted_groups"] >= 1 and counts["rollout/engine_restarts"] == 1
    for step in range(1, 7):
        ours, theirs = ((tmp_path / f / f"{step}.jsonl").read_text().splitlines() for f in ("rows", "alone_rows"))
        assert [json.loads(line)["output"] for line in ours] == [json.loads(line)["output"] for line in theirs]
    assert len(lines) == len(metric_lines(alone)) == 6


@pytest.mark.slow
def test_a_group_that_loses_a_rank_restarts_the_run(
    ray_cluster: str,
    train: Callable[..., Path],
    metric_lines: Callable[[Path], Lines],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """From its checkpoint, with what was under way there, to the numbers of one process."""
    options = (*ON, "async_training.max_staleness=2", "async_training.deterministic=True", *SMALL)
    options = (*options, "trainer.save_freq=1")
    expected, call, killed = metric_lines(train(*options, run="alone")), RemoteStream._call, list[int]()

    def dies(stream: RemoteStream, method: str, *args: Any, **kwargs: Any) -> None:
        call(stream, method, *args, **kwargs)
        if method == "give_weights" and args[0] == 3 and not killed:
            killed.append(stream._group.processes.addresses[1].pid)
            os.kill(killed[0], signal.SIGKILL)

    monkeypatch.setattr(RemoteStream, "_call", dies)
    own = (*APART, IN_GROUPS, "trainer.resource_pools.generation=[2]")
    lines = {line["step"]: line for line in metric_lines(train(*options, *own))}
    assert killed and capfd.readouterr().out.count("Recovery: ") == 1
    require_alike([lines[line["step"]] for line in expected], expected)


def test_what_fails_in_a_rank_ends_the_run(
    ray_cluster: str, arguments: Callable[..., list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    """Weights that change on their way are refused by the engine, with its place in front."""
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
    assert "rollout[rank 0/1" in told and "weights that differ" in told
