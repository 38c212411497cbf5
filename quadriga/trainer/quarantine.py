# SPDX-License-Identifier: Apache-2.0
"""Quarantine of the steps that a run skips because they have lost workers twice.

    DIRECTORY/quarantine/step_7.jsonl     the rows of step 7, one per line

The files are also the list of these steps: a run that resumes from an earlier step skips them again.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quadriga.config.trainer import TrainerConfig
from quadriga.trainer.checkpoint import quarantined_files
from quadriga.trainer.responses import write_rows


class Quarantine:
    """The steps that a run skips.

    Attributes:
        num_rows: for each step to skip, the least number of rows that it takes from the data. A
            step that has been skipped stays here.
    """

    def __init__(self, settings: TrainerConfig) -> None:
        self._directory = settings.directory
        self._limit = settings.max_skipped_steps
        self.num_rows: dict[int, int] = {}
        # With any other mode the files belong to another run, which this one does not continue.
        if settings.resume_mode == "auto":
            for step, path in quarantined_files(self._directory).items():
                self.num_rows[step] = path.read_bytes().count(b"\n")

    def refusal(self, step: int) -> str:
        """Why a step may not be skipped; "" if it may."""
        if step < 1:
            return "it is no training step"
        if step in self.num_rows:
            return "it has been skipped"
        neighbours = {step - 1, step + 1} & self.num_rows.keys()
        if neighbours:
            return f"step {min(neighbours)} is skipped, and no two steps in succession are"
        num_skipped = len(self.num_rows)
        if num_skipped >= self._limit:
            return (
                f"{num_skipped} steps are skipped already, trainer.max_skipped_steps={self._limit}"
            )
        return ""

    def write(self, step: int, rows: Iterable[Mapping[str, Any]]) -> Path:
        """Write the rows of a skipped step, completely or not at all.

        Raises:
            DataError: the file cannot be written.
        """
        path = self._directory / "quarantine" / f"step_{step}.jsonl"
        write_rows(path, ({"step": step, **row} for row in rows), where="trainer.default_local_dir")
        return path
