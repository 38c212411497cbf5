# SPDX-License-Identifier: Apache-2.0
"""Which steps may be skipped, and what a later start of the run knows of them."""

import json
from pathlib import Path

import pytest

from quadriga.config import TrainerConfig
from quadriga.errors import DataError
from quadriga.trainer.quarantine import Quarantine


def quarantine(directory: Path, **settings: object) -> Quarantine:
    """The steps that a start of the run in a directory skips."""
    return Quarantine(TrainerConfig(default_local_dir=str(directory), **settings))


@pytest.mark.parametrize(
    ("skipped", "limit", "step", "reason"),
    [
        ([], 1, 3, ""),
        ([], 0, 3, "trainer.max_skipped_steps=0"),
        ([3], 1, 7, "1 steps are skipped already"),
        ([3], 2, 7, ""),
        ([3], 2, 4, "step 3 is skipped, and no two"),
        ([4], 2, 3, "step 4 is skipped, and no two"),
        ([3], 2, 3, "it has been skipped"),
        ([], 1, 0, "it is no training step"),
    ],
)
def test_which_steps_may_be_skipped(
    tmp_path: Path, skipped: list[int], limit: int, step: int, reason: str
) -> None:
    steps = quarantine(tmp_path, max_skipped_steps=limit)
    for number in skipped:
        steps.num_rows[number] = 4
    refusal = steps.refusal(step)
    assert refusal.startswith(reason) or reason in refusal
    assert bool(refusal) == bool(reason)


def test_a_resumed_run_skips_the_same_steps_and_a_new_one_does_not(tmp_path: Path) -> None:
    """The rows are the record: it tells how many the step takes."""
    path = quarantine(tmp_path).write(3, [{"prompt": "a"}, {"prompt": "b", "score": float("nan")}])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 3, "prompt": "a"}, {"step": 3, "prompt": "b", "score": "NaN"}]
    assert quarantine(tmp_path).num_rows == {3: 2}
    assert quarantine(tmp_path, resume_mode="disable").num_rows == {}


def test_rows_that_cannot_be_written_skip_nothing(tmp_path: Path) -> None:
    (tmp_path / "quarantine").write_text("a file where a folder belongs")
    with pytest.raises(DataError, match=r"trainer\.default_local_dir: got .*quarantine"):
        quarantine(tmp_path).write(3, [{"prompt": "a"}])
    assert quarantine(tmp_path).num_rows == {}
