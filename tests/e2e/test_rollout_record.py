# SPDX-License-Identifier: Apache-2.0
"""The record of rollouts of a run: what it holds, which numbers of the run it changes (none), and how it ends."""

import errno
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import quadriga
from quadriga.cli.main import main
from quadriga.errors import DataError
from quadriga.observe.records import VALIDATION, RecordFolder

Lines = Callable[[Path], list[dict[str, Any]]]


def test_the_record_of_a_run(
    train: Callable[..., Path], metric_lines: Lines, tmp_path: Path
) -> None:
    """It agrees with the files that a user asked for and with the metrics. Without it, the run is the same."""
    files = f"trainer.rollout_data_dir={tmp_path / 'rows'}"
    run = quadriga.Run(train(files, "trainer.val_before_train=True"))
    off = train("trainer.rollout_record=off", "trainer.val_before_train=True", run="off")
    assert metric_lines(run.directory) == metric_lines(off)
    assert not (off / "rollouts").exists()

    record = RecordFolder(run.directory)
    assert record.steps() == [1, 2]
    assert record.steps(VALIDATION) == [0]
    assert len(run.rollouts(0, validation=True)) > 0
    lines = [json.loads(line) for line in (tmp_path / "rows" / "2.jsonl").read_text().splitlines()]
    shutil.rmtree(tmp_path / "rows")
    assert run.samples(2).to_dict("records") == lines

    metrics = run.metrics.loc[2]
    table = run.rollouts(2)
    assert table["score"].mean() == pytest.approx(metrics["critic/score/mean"])
    assert [len(ids) for ids in table["response_ids"]] == table["length"].tolist()
    assert table["length"].mean() == pytest.approx(metrics["response_length/mean"])
    computed = table[table["not_computed"].isna()]
    assert len(computed) == metrics["actor/computed_sequences"]
    for row in table.itertuples():
        assert pd.isna(row.not_computed) == bool(np.any(row.advantages))
    times = table[["queued_at", "admitted_at", "generated_at", "graded_at"]].to_numpy()
    assert np.all(np.diff(times, axis=1) >= 0)
    assert "calls" not in record.read(2, columns=[]).facts
    log_probs = np.concatenate(computed["log_probs"].tolist())
    assert np.concatenate(computed["rollout_log_probs"].tolist()) == pytest.approx(
        log_probs, abs=1e-4
    )
    entropies = np.concatenate(computed["entropies"].tolist())
    assert entropies.mean() == pytest.approx(metrics["actor/entropy"])
    with pytest.raises(DataError, match="one of 2 recorded steps, 1 to 2"):
        run.rollouts(3)


def test_the_record_of_a_resumed_run(train: Callable[..., Path]) -> None:
    """Steps behind the checkpoint are recorded again; a run that begins anew moves the record aside."""
    three = "trainer.total_training_steps=3"
    run = train(three, "trainer.save_freq=2")
    shutil.rmtree(run / "global_step_3")
    (run / "LATEST").write_text("2\n")
    damaged = RecordFolder(run).path(3)
    damaged.write_bytes(damaged.read_bytes()[:100])
    train("trainer.total_training_steps=4", "trainer.save_freq=2")
    assert [RecordFolder(run).read(step).facts["step"] for step in RecordFolder(run).steps()] == [
        1,
        2,
        3,
        4,
    ]
    train("trainer.resume_mode=disable", "trainer.total_training_steps=1")
    assert RecordFolder(run).steps() == [1]
    assert len([*(run / "rollouts" / "superseded_1").glob("step_*")]) == 4


def test_a_run_without_files_of_its_own(
    train: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """`quadriga show` reads the record."""
    run = train()
    assert "best of step 2" in capsys.readouterr().out
    assert main(["show", str(run), "--step", "1"]) == 0
    output = capsys.readouterr().out
    assert "Responses of step 1: 8" in output
    assert "ground truth: a" in output


def test_full_disk(
    train: Callable[..., Path],
    metric_lines: Lines,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The record ends, which is said once; the run does not."""
    is_full = False
    write = pq.write_table

    def write_until_full(table: pa.Table, draft: Path, **options: Any) -> None:
        write(table, draft, **options)
        if is_full and draft.name.endswith("2.parquet"):
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(pq, "write_table", write_until_full)
    three = "trainer.total_training_steps=3"
    expected = metric_lines(train(three))
    is_full = True
    run = train(three, run="full")
    assert metric_lines(run) == expected
    assert [path.name for path in (run / "rollouts").glob("*step*")] == ["step_000001.parquet"]
    warnings = [
        record.getMessage() for record in caplog.records if "ends here" in record.getMessage()
    ]
    assert len(warnings) == 1 and "No space left on device" in warnings[0]
