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

from quadriga.trainer.asynchronous.batches import AsyncBatches
from quadriga.trainer.asynchronous.streams import RemoteStream
from tests.e2e.test_async_ranks import num_kept, require_alike, unfinished_in
from tests.limits import ENGINE_RESTARTS_S
from watching import assert_nothing_left

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


def test_a_deterministic_group_has_the_numbers_of_one_process(
    ray_cluster: str,
    train: Callable[..., Path],
    metric_lines: Callable[[Path], Lines],
    teacher: Path,
) -> None:
    """Two ranks with a shard of the weights each, which get new weights while they generate, and a teacher beside the
    actor: the numbers of one process to float32 rounding, validation too. The run goes on from a checkpoint of one
    process, with what was generated ahead and what is under way. A teacher in a process of its own: test_runs.py.
    """
    options = (
        *ON,
        "async_training.max_staleness=2",
        "async_training.deterministic=True",
        *SMALL,
        *(f"distillation.{key}" for key in TEACHER),
        f"distillation.path={teacher}",
        "trainer.save_freq=2",
        "trainer.test_freq=3",
    )
    alone = train(*options, run="alone")
    pools = ("trainer.resource_pools.generation=[2]", "trainer.placement.teacher=training")
    source = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={alone / 'global_step_2'}",
    )
    lines = metric_lines(train(*options, *APART, IN_GROUPS, *pools, *source, run="apart"))
    expected = metric_lines(alone)[2:]
    assert [line["step"] for line in lines] == [3, 4, 5, 6]
    assert "val-core/letters/reward/mean@1" in lines[-1]
    for ours, theirs in zip(lines, expected, strict=True):
        assert ours.keys() - set(BY_TIME) == theirs.keys() - set(BY_TIME)
        assert "actor/distillation_loss" in ours
        for name in theirs.keys() - set(BY_TIME):
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=2e-6), (
                name,
                theirs["step"],
            )


def test_a_driver_that_is_killed_leaves_what_was_under_way(
    ray_cluster: str,
    start_on: Callable[..., subprocess.Popen[str]],
    train: Callable[..., Path],
    metric_lines: Callable[[Path], Lines],
    tmp_path: Path,
) -> None:
    """By SIGKILL: nothing of it stays on the cluster, and a run in one process goes on from its checkpoint.

    With weights that stay as they are each step learns from the responses of one process, to float32 rounding, whenever
    it was; those that the checkpoint has begun keep their tokens.
    """
    still = (
        *ON,
        "async_training.max_staleness=2",
        "actor_rollout_ref.actor.optim.lr=0",
        f"{ROLLOUT}.max_num_seqs=2",
    )
    long = (
        "data.max_response_length=128",
        f"{ROLLOUT}.ignore_eos=True",
        "trainer.total_epochs=100",
        "trainer.save_freq=1",
    )
    options = (*still, *long, "trainer.total_training_steps=200")
    process = start_on(ray_cluster, *options, *APART, "trainer.resource_pools.generation=[1]")
    last, step = tmp_path / "run" / "latest_checkpointed_iteration.txt", 0
    while not step or not any(one[-1][0] < step for one in unfinished_in(tmp_path / "run", step)):
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
        step = int(last.read_text()) if last.exists() else 0
    process.kill()
    process.wait()
    assert_nothing_left()
    options = (*still, *long, f"trainer.total_training_steps={step + 3}")
    expected = metric_lines(train(*options, "trainer.save_freq=-1", run="one process"))
    source = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={tmp_path / 'run' / f'global_step_{step}'}",
    )
    run = train(*options, *source, run="resumed")
    lines = metric_lines(run)
    assert [line["step"] for line in lines] == [step + 1, step + 2, step + 3]
    require_alike(lines, expected[step:])
    assert num_kept(run, tmp_path / "run", step)


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
    keys = (
        *ON,
        *APART,
        "trainer.resource_pools.generation=[2]",
        "async_training.preset=one_step_off",
    )
    keys = (
        *keys,
        "async_training.deterministic=True",
        "data.max_response_length=96",
        f"{ROLLOUT}.ignore_eos=True",
    )
    alone = train(*keys, f"trainer.rollout_data_dir={tmp_path / 'alone_rows'}", run="alone")
    take, start, killed = AsyncBatches.take, RemoteStream.start, list[int]()

    def begun(stream: RemoteStream, groups: Any, *others: Any) -> None:
        start(stream, groups, *others)
        if (
            stream.rank == 1
            and not killed
            and any(rows.meta_info["global_steps"] == 3 for rows in groups.values())
        ):
            killed.append(stream._group.processes.addresses[1].pid)
            threading.Timer(0.05, os.kill, (killed[0], signal.SIGKILL)).start()

    def late(batches: AsyncBatches, step: int) -> Any:
        if step == 5:
            batches._workers.pool._restarts.wait(ENGINE_RESTARTS_S)
        return take(batches, step)

    monkeypatch.setattr(RemoteStream, "start", begun)
    monkeypatch.setattr(AsyncBatches, "take", late)
    lines = metric_lines(
        train(*keys, f"trainer.rollout_data_dir={tmp_path / 'rows'}", run="disturbed")
    )
    assert killed and "rollout engine 1 is lost, 1 are left" in caplog.text
    counts = {name: sum(line.get(name, 0.0) for line in lines) for name in RESTARTED}
    assert counts["async/restarted_groups"] >= 1 and counts["rollout/engine_restarts"] == 1
    for step in range(1, 7):
        ours, theirs = (
            (tmp_path / f / f"{step}.jsonl").read_text().splitlines()
            for f in ("rows", "alone_rows")
        )
        assert [json.loads(line)["output"] for line in ours] == [
            json.loads(line)["output"] for line in theirs
        ]
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
    expected, call, killed = (
        metric_lines(train(*options, run="alone")),
        RemoteStream._call,
        list[int](),
    )

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
