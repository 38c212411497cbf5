# SPDX-License-Identifier: Apache-2.0
"""What a run does after a loss: which it gets over, which end it, and what it says. Losses of real processes: ray/."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.cli.main import main
from quadriga.errors import WorkerLostError
from quadriga.models.weight_files import open_weights
from quadriga.protocol import DataProto
from quadriga.trainer import task_runner
from quadriga.trainer.ray_trainer import RayPPOTrainer

COMMON = (
    "trainer.total_training_steps=6",
    "data.shuffle=True",
    "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine",
)
# Raises in the midst of the loop, after the optimizer's step: once after each step that is named, or each time.
ROWS = """
from pathlib import Path
from quadriga import errors
from quadriga.data import RLHFDataset

class Rows(RLHFDataset):
    def on_batch_end(self, batch):
        step = batch.meta_info["global_steps"]
        mark = Path(__file__).with_name("lost_after_" + str(step))
        if step in {steps} and not ({is_once} and mark.exists()):
            mark.touch()
            raise {error}
"""
LOST = 'errors.WorkerLostError("actor[rank 1/2] died in update_actor", got="SIGSEGV", fix="Look at its log.")'


@pytest.fixture
def losing(tmp_path: Path) -> Callable[..., tuple[str, ...]]:
    """`losing(error, steps, is_once)`: overrides of a run that raises there."""

    def make(error: str, *steps: int, is_once: bool = True) -> tuple[str, ...]:
        text = (
            ROWS.replace("{steps}", str(steps))
            .replace("{error}", error)
            .replace("{is_once}", str(is_once))
        )
        (tmp_path / "rows.py").write_text(text)
        return *COMMON, f"data.custom_cls.path={tmp_path / 'rows.py'}", "data.custom_cls.name=Rows"

    return make


def test_each_completed_checkpoint_gives_the_restarts_back(
    train: Callable[..., Path],
    losing: Callable[..., tuple[str, ...]],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Four losses with two restarts; the numbers are those of the run left alone, and the losses stand beside them. A
    collective that a peer has left, with no sign of that peer, is a loss too."""
    peer = f'{LOST} if step < 5 else errors.PeerLostError("actor[rank 0/2] failed in update_actor")'
    overrides = losing(peer, 2, 3, 4, 5)
    alone = train(*COMMON, "trainer.save_freq=1", run="alone")
    lost = train(*overrides, "trainer.save_freq=1", "trainer.max_worker_restarts=2")
    output = capsys.readouterr().out
    assert metric_lines(lost) == metric_lines(alone)
    fields = [
        line
        for line in (lost / "metrics.jsonl").read_text().splitlines()
        if '"recovery/restarts"' in line
    ]
    assert len(fields) == 4
    assert '"recovery/restarts": 4.0, "recovery/seconds": ' in fields[-1]
    assert "recovery/" not in (alone / "metrics.jsonl").read_text()
    told = [line for line in output.splitlines() if line.startswith("Recovery: ")]
    assert len(told) == 4
    key = "restarts are left (trainer.max_worker_restarts)."
    assert told[0].endswith(f"the run goes on from the checkpoint of step 1; 1 of 2 {key}")
    assert "  in step 4: actor[rank 1/2] died in update_actor" in output.splitlines()


def test_a_run_begun_anew_goes_on_from_its_own_checkpoints(
    train: Callable[..., Path],
    losing: Callable[..., tuple[str, ...]],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """From the start where it has none yet, from step 3 later, bit for bit; what an earlier run has left in the same
    directory is left alone."""
    train(
        *COMMON, "trainer.total_training_steps=1", "trainer.save_freq=1", "data.seed=7", run="lost"
    )
    options = ("trainer.save_freq=3", "trainer.test_freq=2", "trainer.log_val_generations=2")
    alone = train(*COMMON, *options, run="alone")
    capsys.readouterr()
    lost = train(*losing(LOST, 2, 5), *options, "trainer.resume_mode=disable", run="lost")
    output = capsys.readouterr().out
    assert [
        line.partition("goes on ")[2]
        for line in output.splitlines()
        if line.startswith("Recovery: ")
    ] == [
        "from where it began, for it has written no checkpoint yet; 2 of 3 restarts are left "
        "(trainer.max_worker_restarts).",
        "from the checkpoint of step 3; 2 of 3 restarts are left (trainer.max_worker_restarts).",
    ]
    assert [line for line in output.splitlines() if line.startswith("resumed from ")] == [
        f"resumed from {lost / 'global_step_3'}"
    ]
    assert metric_lines(lost) == metric_lines(alone)
    assert (lost / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
    left, right = (open_weights(run / "global_step_6" / "actor") for run in (lost, alone))
    assert left.shapes == right.shapes
    assert [
        name for name in left.shapes if not torch.equal(left.read(name), right.read(name))
    ] == []


def test_a_budget_that_is_spent(
    arguments: Callable[..., list[str]],
    losing: Callable[..., tuple[str, ...]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The error says which key, what stands on the disk and how to go on; and so it does."""
    command = [
        "train",
        *arguments(*losing(LOST, 4, 5, 6), "trainer.save_freq=3", "trainer.max_worker_restarts=2"),
    ]
    assert main(command) == 1
    assert (
        "actor[rank 1/2] died in update_actor: got SIGSEGV. Look at its log. The workers are not started again: 2 "
        "restarts within an hour and since the last checkpoint, trainer.max_worker_restarts=2. The same command goes "
        "on from the checkpoint of step 3."
    ) in " ".join(capsys.readouterr().err.split())
    assert main(command) == 0


@pytest.fixture
def dying(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """`dying(*steps)`: from here on the update of these steps loses a worker, each time."""

    def make(*steps: int) -> None:
        learn = RayPPOTrainer.learn

        def disturbed(trainer: RayPPOTrainer, batch: DataProto) -> DataProto:
            if trainer.global_steps in steps:
                raise WorkerLostError("actor[rank 1/2] died in update_actor", got="SIGSEGV")
            return learn(trainer, batch)

        monkeypatch.setattr(RayPPOTrainer, "learn", disturbed)

    return make


def untimed(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Metrics without those that tell how far generation beside training was ahead."""
    return [
        {name: value for name, value in line.items() if not name.startswith("async/")}
        for line in lines
    ]


ASYNC = ("async_training.enable=True", "async_training.preset=one_step_off")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        pytest.param(
            ("algorithm.filter_groups.enable=True", "data.gen_batch_size=3"), marks=pytest.mark.slow
        ),
        pytest.param((*ASYNC, "async_training.deterministic=True"), marks=pytest.mark.slow),
    ],
    ids=["one batch", "several batches", "beside training"],
)
def test_a_step_that_loses_workers_twice_is_skipped(
    overrides: tuple[str, ...],
    train: Callable[..., Path],
    dying: Callable[..., None],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Its rows are kept, and the run goes on; so does one that resumes from an earlier step, without a loss."""
    dying(3)
    options = (*COMMON, *overrides, "trainer.save_freq=1", "trainer.logger=[console,jsonl]")
    run = train(*options)
    output = capsys.readouterr().out
    assert output.count("Recovery: ") == 2
    assert "(trainer.max_worker_restarts). Step 3 has lost workers twice, and is skipped." in output
    file = run / "quarantine" / "step_3.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert (
        f"step 3 is skipped, for it has lost workers twice. Its {len(rows)} rows: {file}"
        in " ".join(output.split())
    )
    assert len(rows) == 4 if not overrides else len(rows) >= 4
    for row in rows:
        assert "train.parquet row " in row["source_row"]
        assert row["prompt"].startswith("<user>say a ") and row["data_source"] == "letters"
    lines = untimed(metric_lines(run))
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5, 6]
    assert "actor/grad_norm" in lines[1] and "actor/grad_norm" not in lines[2]
    assert '"recovery/skipped_steps": 1' in (run / "metrics.jsonl").read_text().splitlines()[2]
    again = tmp_path / "again"
    shutil.copytree(run, again)
    for step in range(3, 7):
        shutil.rmtree(again / f"global_step_{step}")
    (again / "latest_checkpointed_iteration.txt").write_text("2\n")
    assert untimed(metric_lines(train(*options, run="again"))) == lines
    output = capsys.readouterr().out
    assert "resumed from" in output and "Recovery: " not in output
    left, right = (open_weights(one / "global_step_6" / "actor") for one in (run, again))
    assert [
        name for name in left.shapes if not torch.equal(left.read(name), right.read(name))
    ] == []


def test_no_two_steps_in_succession_are_skipped(
    arguments: Callable[..., list[str]],
    dying: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
) -> None:
    dying(2, 3)
    assert (
        main(["train", *arguments(*COMMON, "trainer.save_freq=1", "trainer.max_skipped_steps=2")])
        == 1
    )
    error = " ".join(capsys.readouterr().err.split())
    assert (
        "step 3 has lost a worker before, so the cause may be in it, and step 2 is skipped, and no two"
        in error
    )
    assert "The same command goes on from the checkpoint of step 2." in error


def test_a_full_disk_skips_nothing(
    arguments: Callable[..., list[str]],
    dying: Callable[..., None],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """Where the rows cannot be written the run ends, and says so; with room again it goes on."""
    dying(2)
    command = ["train", *arguments("trainer.total_training_steps=3", "trainer.save_freq=1")]
    place = tmp_path / "run" / "quarantine"
    place.parent.mkdir()
    place.write_text("a file where a folder belongs")
    assert main(command) == 1
    assert "quarantine" in capsys.readouterr().err
    place.unlink()
    assert main(command) == 0
    assert (place / "step_2.jsonl").is_file()


@pytest.mark.parametrize(
    "error",
    [
        'errors.WorkerError("actor[rank 0/2] failed in update_actor", got="TypeError: in a loss")',
        'errors.EngineError("actor[rank 0/2] failed in update_actor: out of memory")',
    ],
)
def test_what_a_worker_raises_ends_the_run_at_once(
    error: str,
    arguments: Callable[..., list[str]],
    losing: Callable[..., tuple[str, ...]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["train", *arguments(*losing(error, 2), "trainer.save_freq=1")]) == 1
    assert "Recovery: " not in capsys.readouterr().out


def test_restarts_are_counted_for_an_hour(
    train: Callable[..., Path],
    losing: Callable[..., tuple[str, ...]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With an hour of no length, one restart is enough for any number of losses."""
    monkeypatch.setattr(task_runner, "RESTART_WINDOW_S", 0.0)
    train(*losing(LOST, 2, 3, 4), "trainer.save_freq=-1", "trainer.max_worker_restarts=1")
