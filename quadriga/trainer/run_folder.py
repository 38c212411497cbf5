# SPDX-License-Identifier: Apache-2.0
"""Reads the files of a run's directory, while the run is going on or later.

    config.yaml      configuration, names of other files, and the last step      settings.py
    metrics.jsonl    metrics of each step, if `jsonl` is in trainer.logger
    responses        the first of these that exists:
                       of training     files in trainer.rollout_data_dir
                                       the record in rollouts/
                       of validation   files in trainer.validation_data_dir
                                       the record in rollouts/
                                       samples.jsonl, with trainer.log_val_generations

While a run is going on, its files are complete up to the last step: an unfinished line or file is
not read.
"""

import math
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from quadriga.errors import DataError
from quadriga.observe.records import STEP, VALIDATION, RecordFolder, samples_of
from quadriga.observe.tracking.jsonl import (
    METRICS_FILE,
    SAMPLES_FILE,
    complete_lines,
    read_metrics,
)
from quadriga.trainer.checkpoint import Checkpoints, numbered_paths
from quadriga.trainer.run_lock import LOCK, is_held
from quadriga.trainer.settings import CONFIGURATION, RunSettings

Sample = dict[str, Any]
"""A response in the form of `responses.sample_rows`. Those of samples.jsonl have fewer entries."""


class RunFolder:
    """The directory of a run.

    Args:
        directory: the directory.

    Attributes:
        directory: the directory.
        settings: settings of the newest steps; None if the run has not written them yet.
        record: the rollout record.

    Raises:
        DataError: the path is not the directory of a run.
    """

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(directory).expanduser()
        files = [self.directory / name for name in (CONFIGURATION, METRICS_FILE, LOCK)]
        if not any(file.is_file() for file in files):
            raise self._not_a_run()
        self.record = RecordFolder(self.directory)
        self.settings = RunSettings.read(self.directory / CONFIGURATION, "rl")

    def _not_a_run(self) -> DataError:
        """The error for a path that is not the directory of a run."""
        got = "no such folder"
        if self.directory.is_dir():
            got = f"a folder without {CONFIGURATION}"
        elif self.directory.exists():
            got = "a file"
        fix = "Give trainer.default_local_dir of the run, by default outputs/PROJECT/EXPERIMENT."
        # The path may be that of a checkpoint.
        parent = self.directory.resolve().parent
        if (parent / CONFIGURATION).is_file():
            fix = f"Give the run's directory, {parent}."
        return DataError(str(self.directory), got=got, expected="the directory of a run", fix=fix)

    def value(self, key: str) -> Any:
        """Value of a configuration key; None if it is not known."""
        return self.settings.values.get(key) if self.settings else None

    @property
    def is_going_on(self) -> bool:
        """Whether a process is training in the directory."""
        return is_held(self.directory)

    @property
    def last_step(self) -> int:
        """Number of the run's last step; 0 if it is not known."""
        return self.settings.last if self.settings else 0

    @property
    def done_steps(self) -> int:
        """Number of steps that are done, as far as the files show."""
        return max([0, Checkpoints(self.directory).newest() or 0, *self.metrics, *self.responses])

    @property
    def has_metrics(self) -> bool:
        """Whether the run writes metrics. If not, an existing file is that of an earlier run."""
        return self.settings is None or "jsonl" in (self.value("trainer.logger") or ())

    @cached_property
    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics by step; step 0 is the validation before the first. Empty if none are written."""
        path = self.directory / METRICS_FILE
        return read_metrics(path) if self.has_metrics and path.is_file() else {}

    @cached_property
    def responses(self) -> dict[int, Callable[[], list[Sample]]]:
        """Functions that read the recorded responses of a step, by step.

        Only one source is used, the first that has anything: text files of training, the record of
        training, text files of validation, the record of validation, samples.jsonl. The result is
        empty if no source has anything.
        """
        last_step = self.last_step or math.inf  # 0: not known
        for name, kind in (("rollout_data_dir", STEP), ("validation_data_dir", VALIDATION)):
            folder = self._folder_of_key(name)
            readers = {}
            files = numbered_paths(folder, "", ".jsonl") if folder else {}
            for step, path in files.items():
                # A file of a later step was left by another run.
                if step <= last_step:
                    readers[step] = partial(_read_samples, path)
            if not readers:
                steps = self.record.steps(kind)
                readers = {step: partial(samples_of, self.record, step, kind) for step in steps}
            if readers:
                return readers

        path = self.directory / SAMPLES_FILE
        samples = {}
        # `trainer.logger=jsonl` writes both metrics and samples. Without metrics, the file was left
        # by another run.
        if path.is_file() and self.metrics:
            for sample in _read_samples(path):
                samples.setdefault(int(sample["step"]), []).append(sample)
        return {step: partial(list, rows) for step, rows in samples.items()}

    @property
    def has_training_responses(self) -> bool:
        """Whether `responses` are those of training rather than of validation."""
        folder = self._folder_of_key("rollout_data_dir")
        has_files = folder is not None and any(folder.glob("*.jsonl"))
        return has_files or bool(self.record.steps())

    def _folder_of_key(self, name: str) -> Path | None:
        """Folder that a key of `trainer` names; None without a value.

        If that folder does not exist, the run was probably moved: then this is the folder of the same
        name in the run's directory.
        """
        value = self.value(f"trainer.{name}")
        if not value:
            return None
        folder = Path(value).expanduser()
        return folder if folder.is_dir() else self.directory / folder.name


def _read_samples(path: Path) -> list[Sample]:
    """Read the samples of a JSONL file."""
    return [sample for _, sample in complete_lines(path)]
