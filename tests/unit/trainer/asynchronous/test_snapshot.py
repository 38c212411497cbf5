# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint of an asynchronous run has of generation."""

import tempfile
from pathlib import Path

import pytest
import torch

from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.trainer.asynchronous.snapshot import Snapshot, as_tensor, from_tensor


def test_rows_pass_through_no_file_that_a_killed_process_would_leave(
    answers: DataProto, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    load, seen = DataProto.load_from_disk, list[Path]()

    def load_and_look(path: str) -> DataProto:
        seen.extend(tmp_path.iterdir())
        return load(path)

    monkeypatch.setattr(DataProto, "load_from_disk", load_and_look)
    answers.meta_info["metrics"] = {"rollout/turns": Metric(2.0, "mean", 3)}
    rows = from_tensor(as_tensor(answers))
    assert seen == [] and list(tmp_path.iterdir()) == []
    assert rows.meta_info["metrics"] == {"rollout/turns": [Metric(2.0, "mean", 3)]}
    # Times of another run mean nothing in this one, so they are unknown.
    assert rows.batch.keys() == answers.batch.keys() | {"rollout_times"}
    assert rows.batch["rollout_times"].isnan().all()
    assert all(torch.equal(rows.batch[name], answers.batch[name]) for name in answers.batch.keys())
    assert rows.non_tensor_batch["uid"].tolist() == ["p", "p", "q"]
    # Older checkpoints have responses without the name of their rollout.
    assert "rollout_id" not in answers.non_tensor_batch
    assert rows.non_tensor_batch["rollout_id"].tolist() == ["p/0", "p/1", "q/0"]


def test_reports_are_complete_once_every_worker_has_reported_or_is_lost() -> None:
    snapshot = Snapshot()
    snapshot.reports |= {0: None, 1: None, 2: None}
    snapshot.reports[2] = [(7, 0)]
    snapshot.reports[0] = [(5, 1)]
    assert snapshot.pop_reports() is None
    snapshot.reports[1] = ()  # it was lost
    assert snapshot.pop_reports() == [(5, 1), (7, 0)]
    assert snapshot.reports == {}
