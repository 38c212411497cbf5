# SPDX-License-Identifier: Apache-2.0
"""Where a replay starts, and the sentences for what it cannot start from."""

from pathlib import Path

import pyarrow as pa
import pytest

from quadriga.cli.main import main
from quadriga.config import load_config, show
from quadriga.errors import DataError
from quadriga.observe.records import SCHEMA, STEP, RecordFolder
from quadriga.replay.start import find_start
from quadriga.trainer.checkpoint import Checkpoints


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The folder of a run of five steps with a checkpoint of step 2, without rows."""
    config = load_config(["data.train_files=rows.parquet"]).config
    (tmp_path / "config.yaml").write_text(f"{show(config)}# steps 1 to 5\n")
    record = RecordFolder(tmp_path)
    record.begin(0, is_continued=True)
    for step in range(1, 6):
        metrics = {"timing_s/step": 200.0, "timing_s/gen": 80.0}
        facts = {"metrics": metrics, "widths": [4, 4]}
        record.write(step, STEP, pa.Table.from_pylist([], schema=SCHEMA), facts)
    checkpoints = Checkpoints(tmp_path)
    (checkpoints.begin(2) / "state").write_text("state")
    checkpoints.complete(2)
    return tmp_path


def test_the_newest_checkpoint_before_the_step(run: Path) -> None:
    start = find_start(run, 5)
    assert (start.checkpoint, start.after_step) == (run / "global_step_2", 2)
    assert start.recorded_s == 360.0
    start = find_start(run, 2)
    assert (start.checkpoint, start.after_step) == (None, 0)


def test_a_long_replay_is_confirmed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["replay", str(run), "--step", "5"]) == 1
    output = capsys.readouterr()
    assert "steps 3 to 5" in output.out
    assert "--yes" in output.err


def test_missing_steps_are_named(run: Path) -> None:
    record = RecordFolder(run)
    record.path(3).unlink()
    with pytest.raises(DataError, match=r"no record of step 3.*checkpoint of step 2"):
        find_start(run, 4)
    with pytest.raises(DataError, match="no record of step 9"):
        find_start(run, 9)
    record.path(5).write_bytes(b"PAR1")
    with pytest.raises(DataError, match="damaged"):
        find_start(run, 5)


def test_a_step_that_the_run_skipped(run: Path) -> None:
    RecordFolder(run).path(3).unlink()
    (run / "quarantine").mkdir()
    (run / "quarantine" / "step_3.jsonl").write_text("{}\n{}\n")
    assert find_start(run, 4).skipped == {3: 2}


def test_settings_that_changed_between(run: Path) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config_from_step_1.yaml").write_text(text.replace("# steps 1", "# steps 1"))
    (run / "config.yaml").write_text(text.replace("# steps 1", "# steps 4"))
    assert find_start(run, 3).configuration.name == "config_from_step_1.yaml"
    with pytest.raises(DataError, match="changed with step 4"):
        find_start(run, 5)


def test_runs_that_cannot_be_replayed(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (run / "config.yaml").read_text()
    (run / "config.yaml").write_text(
        text.replace("async_training:\n  enable: false", "async_training:\n  enable: true")
    )
    assert main(["replay", str(run), "--step", "1"]) == 1
    assert "lockstep" in capsys.readouterr().err
    for path in (run / "rollouts").glob("*.parquet"):
        path.unlink()
    with pytest.raises(DataError, match="earlier versions"):
        find_start(run, 1)
