# SPDX-License-Identifier: Apache-2.0
"""A run that was killed and resumed equals, bit for bit, the run that was left alone.

The numbers compared are every line of metrics.jsonl except times, speeds and memory, and at the end the weights.
What it does not prove: that a machine that loses power keeps what the system had not yet put on the disk.
"""

import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.cli.main import main
from quadriga.models.weight_files import open_weights
from quadriga.trainer.checkpoint import Checkpoints
from tests.limits import COMMAND_S

NUM_STEPS = 6

# 10 rows in batches of 4 are 2 steps an epoch: every run crosses two ends of an epoch.
COMMON = (
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.test_freq=2",
    "trainer.log_val_generations=2",
)
GRPO = ("data.shuffle=True", "actor_rollout_ref.actor.optim.lr_scheduler_type=cosine")
GENERATED = (
    f"data.datagen.path={Path(__file__).with_name('more_rows.py')}",
    "data.datagen.name=MoreRows",
    "data.sampler.class_path=pkg://quadriga.data.curriculum",
    "data.sampler.class_name=SuccessRateSampler",
)
SEVERAL_UPDATES = (
    "actor_rollout_ref.actor.ppo_epochs=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.shuffle=True",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "algorithm.use_kl_in_reward=True",
    "algorithm.kl_ctrl.type=adaptive",
    "algorithm.kl_ctrl.horizon=100",
    "algorithm.kl_ctrl.target_kl=0.01",
)
CRITIC = (
    "algorithm.adv_estimator=gae",
    "critic.ppo_epochs=2",
    "critic.ppo_mini_batch_size=2",
    "critic.shuffle=True",
)


Lines = Callable[[Path], list[dict[str, Any]]]


def weights(run: Path, role: str = "actor") -> dict[str, torch.Tensor]:
    """The weights of a run's last checkpoint."""
    files = open_weights(run / f"global_step_{NUM_STEPS}" / role)
    return {name: files.read(name) for name in files.shapes}


def assert_same_weights(one: Path, other: Path, role: str = "actor") -> None:
    """Equal to the last bit."""
    left, right = weights(one, role), weights(other, role)
    assert left.keys() == right.keys()
    assert [name for name in left if not torch.equal(left[name], right[name])] == []


# With this file the checkpoint of step 4 never ends.
WRITES_FOREVER = """
import time
from torch.distributed.checkpoint import FileSystemWriter

write_data = FileSystemWriter.write_data

def write_some(writer, plan, planner):
    results = write_data(writer, plan, planner)
    if ".unfinished_4_" in str(writer.path):
        time.sleep(600)
    return results

FileSystemWriter.write_data = write_some
"""


def kill_after(process: subprocess.Popen[str], metrics: Path, num_lines: int) -> None:
    """Send SIGKILL once so many lines are written."""
    deadline = time.monotonic() + COMMAND_S
    while _num_lines(metrics) < num_lines:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f"no line {num_lines} in {metrics}"
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=COMMAND_S)


def assert_none_left(session: int, members: Callable[[int], list[int]]) -> None:
    """What a killed run has started, such as its graders, ends by itself."""
    deadline = time.monotonic() + COMMAND_S
    while members(session):
        assert time.monotonic() < deadline, (
            f"processes {members(session)} of session {session} are still there"
        )
        time.sleep(0.01)


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_run_equals_the_run_left_alone(
    train: Callable[..., Path],
    start: Callable[..., subprocess.Popen[str]],
    session_members: Callable[[int], list[int]],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    tmp_path: Path,
) -> None:
    """The same command, started again after SIGKILL while a checkpoint is written, writes the same file.

    Training goes on meanwhile; half of a checkpoint is never taken for one. With a critic, rows that are generated and
    a curriculum, and every other step saved in the place of the one before.
    """
    overrides = (
        *CRITIC,
        *GENERATED,
        "data.shuffle=True",
        "trainer.save_freq=2",
        "trainer.max_ckpt_to_keep=1",
    )
    alone = train(*COMMON, *overrides, run="alone")
    killed = tmp_path / "killed"
    library = tmp_path / "writes_forever.py"
    library.write_text(WRITES_FOREVER)
    forever = f"actor_rollout_ref.model.external_lib={library}"
    process = start(*COMMON, *overrides, forever, run="killed")
    kill_after(process, killed / "metrics.jsonl", 5)
    assert_none_left(process.pid, session_members)
    (half,) = killed.glob(".unfinished_4_*")
    assert list((half / "actor" / "model").glob("*.distcp"))
    checkpoints = Checkpoints(killed)
    assert checkpoints.steps() == [2] == [checkpoints.newest()]
    train(*COMMON, *overrides, run="killed")
    assert checkpoints.steps() == [6] and not list(killed.glob(".unfinished*"))
    assert metric_lines(killed) == metric_lines(alone)
    assert (killed / "samples.jsonl").read_bytes() == (alone / "samples.jsonl").read_bytes()
    for role in ("actor", "critic"):
        assert_same_weights(killed, alone, role)


STREAMED = (*SEVERAL_UPDATES, "data.streaming=3")


@pytest.mark.parametrize(
    "overrides",
    [GRPO, STREAMED, CRITIC],
    ids=["grpo", "several updates a batch, rows that are read as they are needed", "critic"],
)
def test_every_checkpoint_is_a_place_to_go_on_from(
    overrides: tuple[str, ...],
    alone: Callable[..., Path],
    train: Callable[..., Path],
    metric_lines: Lines,
) -> None:
    """Mid-epoch and at the end of one: a second run that starts from a checkpoint of the first writes its end."""
    saved = (*COMMON, *overrides, "trainer.save_freq=1")
    first = alone(*saved)
    for step in (1, 2):
        source = (
            "trainer.resume_mode=resume_path",
            f"trainer.resume_from_path={first / f'global_step_{step}'}",
        )
        resumed = train(*saved, *source, run=f"from {step}")
        assert metric_lines(resumed) == metric_lines(first)[step:]
        for role in {"actor", "critic"} & {
            path.name for path in (first / "global_step_6").iterdir()
        }:
            assert_same_weights(resumed, first, role)


def test_float16_goes_on_with_its_loss_scale(
    train: Callable[..., Path], metric_lines: Callable[[Path], list[dict[str, Any]]]
) -> None:
    """Bit for bit; and what is generated has the trainer's log-probabilities to within the dtype's rounding."""
    saved = (
        *COMMON,
        "actor_rollout_ref.actor.fsdp_config.model_dtype=float16",
        "trainer.save_freq=3",
    )
    alone = train(*saved, run="alone")
    source = (
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={alone / 'global_step_3'}",
    )
    resumed = train(*saved, *source, run="resumed")
    assert metric_lines(resumed) == metric_lines(alone)[3:]
    assert_same_weights(resumed, alone)
    assert {
        (line["actor/loss_scale"], line["actor/nonfinite_steps"]) for line in metric_lines(alone)
    } == {(65536, 0)}
    assert all(0 < line["rollout/log_prob_diff_max"] < 1e-2 for line in metric_lines(alone))


@pytest.mark.parametrize(
    ("overrides", "name"), [(GRPO, "trainer/state.pt"), (CRITIC, "critic/optimizer/.metadata")]
)
def test_run_whose_newest_checkpoint_is_damaged_goes_on_from_the_one_before(
    overrides: tuple[str, ...],
    name: str,
    alone: Callable[..., Path],
    train: Callable[..., Path],
    metric_lines: Lines,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """It takes the steps in between again, each stands once in its files, and it ends with the same numbers."""
    saved = (*COMMON, *overrides, "trainer.save_freq=1")
    run = tmp_path / "run"
    shutil.copytree(alone(*saved), run)
    shutil.rmtree(run / "global_step_5")
    before = metric_lines(run), (run / "samples.jsonl").read_bytes(), weights(run)
    damaged = run / f"global_step_{NUM_STEPS}" / name
    damaged.write_bytes(content := damaged.read_bytes()[:-1])
    train(*saved)
    assert f"DAMAGED: {damaged}: got {len(content)} bytes" in capsys.readouterr().out
    assert (run / f"damaged_global_step_{NUM_STEPS}" / name).read_bytes() == content
    lines, samples, tensors = before
    assert metric_lines(run) == lines and (run / "samples.jsonl").read_bytes() == samples
    assert [
        key for key, value in weights(run).items() if not torch.equal(value, tensors[key])
    ] == []


def test_finished_run_stays_as_it_is(train: Callable[..., Path]) -> None:
    """The same command once more finds nothing to do, and takes nothing away."""
    run = train(*COMMON, "trainer.save_freq=3")
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    train(*COMMON, "trainer.save_freq=3")
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize("saving", ["trainer.save_freq=1", "trainer.save_minutes=60"])
def test_finished_run_that_was_killed_while_it_deleted_old_checkpoints(
    saving: str, train: Callable[..., Path]
) -> None:
    """By steps and by the clock: the same command once more deletes what the save has left."""
    words = ("trainer.total_training_steps=2", "trainer.max_ckpt_to_keep=1", saving)
    run = train(*words)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    shutil.copytree(run / "global_step_2", run / "global_step_1")
    shutil.copytree(run / "global_step_2", run / ".unfinished_global_step_0_123")
    train(*words)
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


@pytest.mark.parametrize(
    "total", ["trainer.total_training_steps=2", "trainer.total_training_steps=null"]
)
def test_finished_run_is_no_place_for_another(
    total: str,
    train: Callable[..., Path],
    arguments: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """By a number of steps and by epochs (10 rows in batches of 4 are 2 steps): refused by what differs; untouched."""
    run = train("trainer.save_freq=2", total)
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    assert main(["train", *arguments("trainer.save_freq=2", total)]) == 0
    assert (
        f"nothing to do: 2 of 2 steps are done in {run}; raise trainer.total_"
        in capsys.readouterr().out
    )
    assert main(["train", *arguments("trainer.save_freq=2", total, "data.seed=3")]) == 2
    error = capsys.readouterr().err
    assert "2 of 2 steps are done" in error and "\n  data.seed: 1 -> 3\n" in error
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before


def test_run_that_goes_on_with_other_settings_says_which_and_keeps_both(
    train: Callable[..., Path],
    arguments: Callable[..., list[str]],
    write: Callable,
    make_rows: Callable,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = train("trainer.save_freq=2")
    first = (run / "config.yaml").read_bytes()
    train(
        "trainer.save_freq=2",
        "trainer.total_training_steps=3",
        "actor_rollout_ref.actor.optim.lr=1e-4",
    )
    assert (
        "The run goes on from step 2 with other settings than before:\n" in capsys.readouterr().out
    )
    assert (run / "config_from_step_1.yaml").read_bytes() == first
    assert "\n# steps 3 to 3\n" in (second := (run / "config.yaml").read_text())
    # Fewer rows than the sampler has drawn: no step follows.
    few = write(tmp_path / "few.parquet", make_rows(4))
    assert (
        main(["train", *arguments("trainer.total_training_steps=5", f"data.train_files={few}")])
        == 1
    )
    assert "got 4 rows that are not the 10 rows of the checkpoint" in capsys.readouterr().err
    assert (run / "config.yaml").read_text() == second


def test_longer_run_goes_on(
    train: Callable[..., Path], metric_lines: Callable[[Path], list[dict[str, Any]]]
) -> None:
    """A finished run that is given more steps equals one that had them from the start."""
    train("trainer.save_freq=2", "trainer.total_training_steps=2", run="longer")
    longer = train("trainer.save_freq=2", "trainer.total_training_steps=4", run="longer")
    alone = train("trainer.save_freq=2", "trainer.total_training_steps=4", run="alone")
    assert metric_lines(longer) == metric_lines(alone)
