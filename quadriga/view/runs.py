# SPDX-License-Identifier: Apache-2.0
"""State, configuration and metrics of runs, from their files."""

import math
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import yaml

from quadriga.config.yaml_text import parse_yaml
from quadriga.errors import DataError
from quadriga.observe.records import STEP, VALIDATION, RecordFolder, TokenTable
from quadriga.observe.tracking.jsonl import METRICS_FILE, read_metrics
from quadriga.trainer.run_lock import LOCK, is_held
from quadriga.trainer.settings import CONFIGURATION, earlier_configurations

HEADLINES = ("critic/score/mean", "critic/rewards/mean", "train/loss", "actor/pg_loss")
"""Metrics that sum up a run; the first that it has is shown."""
_STEPS = re.compile(r"^# steps (\d+) to (\d+)$", re.MULTILINE)
"""Line of a configuration file with the steps that it holds for."""
Answer = dict[str, Any]
"""A JSON object for the page."""
_MAX_DEPTH = 4
"""Depth at which runs are looked for below a folder."""
_NUM_POINTS = 60
"""Points of the small curves in the table of runs."""
_SIGNS = (CONFIGURATION, METRICS_FILE, LOCK, "rollouts")
"""Names of which the directory of a run has at least one."""


class ViewedRun:
    """A run that is only read.

    Args:
        directory: the run's directory.
        name: name that the page shows.
    """

    def __init__(self, directory: Path, name: str) -> None:
        self.directory = directory
        self.name = name
        self.record = RecordFolder(directory)
        self._metrics: dict[int, dict[str, float]] = {}
        self._metrics_stamp: tuple[int, int] | None = None
        self._metrics_problem = ""  # why the newest metrics cannot be read

    def metrics(self) -> dict[int, dict[str, float]]:
        """Metrics by step, read again if the file has changed.

        If the file cannot be read, `problems` says why, and the metrics that were read before are
        returned; without a file there are none.
        """
        path = self.directory / METRICS_FILE
        try:
            stamp = stamp_of(path)
            if stamp != self._metrics_stamp:
                self._metrics = read_metrics(path)
                self._metrics_problem = ""
            self._metrics_stamp = stamp
        except FileNotFoundError:
            self._metrics = {}
            self._metrics_problem = (
                f"There is no {METRICS_FILE}: trainer.logger is without jsonl, or no step is done."
            )
        except (OSError, DataError, TypeError, ValueError) as error:
            self._metrics_problem = describe_error(error)
        return self._metrics

    def configuration(self, path: Path | None = None) -> tuple[Answer, int]:
        """Read one of the run's configurations.

        Args:
            path: the file. None: the one for the newest steps.

        Returns:
            Values by dotted key, none if there is no file; and the last step of the run by this
            configuration, or 0 if that is not known.

        Raises:
            DataError: the file cannot be read.
        """
        path = path or self.directory / CONFIGURATION
        try:
            text = path.read_text(encoding="utf-8")
            sections = parse_yaml(text)
        except FileNotFoundError:
            return {}, 0
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise DataError(
                str(path), got=describe_error(error), expected="a configuration"
            ) from error
        steps = _STEPS.search(text)
        return dict(nested_values(sections)), int(steps[2]) if steps else 0

    def tokens(self) -> TokenTable | None:
        """Texts of the tokens; None if the run has none, or their file is damaged."""
        try:
            return self.record.tokens
        except DataError:
            return None

    def response_limit(self) -> int:
        """Longest response that the newest configuration allows, in tokens; 0 if not known."""
        try:
            return int(self.configuration()[0].get("data.max_response_length") or 0)
        except (DataError, TypeError, ValueError):
            return 0

    def problems(self) -> list[str]:
        """Sentences on what is missing or unusual in the run's files."""
        problems = []
        try:
            # `glob`, which is used below, finds nothing in a folder that cannot be read. Listing it
            # raises the error.
            list(self.directory.iterdir())
            if self.record.folder.is_dir():
                list(self.record.folder.iterdir())
        except OSError as error:
            return [f"{describe_error(error)} The run may belong to another user."]
        self.metrics()
        if self._metrics_problem:
            problems.append(self._metrics_problem)
        try:
            self.configuration()
        except DataError as error:
            problems.append(describe_error(error))
        has_rollouts = bool(self.record.steps() or self.record.steps(VALIDATION))
        if not has_rollouts:
            problems.append(
                "No rollouts are recorded: the run is of an older version, has done no step, or "
                "has trainer.rollout_record=off. `quadriga show` prints responses it wrote itself."
            )
        elif not (self.record.folder / "tokens.parquet").is_file():
            problems.append("rollouts/tokens.parquet is missing: tokens are shown as their ids.")
        superseded = [*self.record.folder.glob("superseded_*")]
        superseded += self.directory.glob("metrics.*.jsonl")
        if superseded:
            names = ", ".join(sorted(path.name for path in superseded))
            problems.append(f"Another run stood in this folder before; its files are in {names}.")
        steps = list(map(str, earlier_configurations(self.directory)))
        if steps:
            problems.append(
                "The run was resumed with another configuration; earlier ones began at step "
                f"{', '.join(steps)}."
            )
        return problems

    def summary(self) -> Answer:
        """The run's row in the table of runs."""
        metrics = self.metrics()
        values = {}
        last_step = 0
        # `problems` has the error of a file that cannot be read.
        with suppress(DataError):
            values, last_step = self.configuration()
        done_step = max([0, *metrics, *self.record.steps()])
        state = "stopped"
        if is_held(self.directory):
            state = "running"
        elif last_step and done_step >= last_step:
            state = "finished"
        headline, curve = headline_curve(metrics)
        return {
            "run": self.name,
            "state": state,
            "step": done_step,
            "last_step": last_step,
            "headline": headline,
            "curve": curve,
            "seconds": sum(numbers.get("timing_s/step", 0.0) for numbers in metrics.values()),
            "changed": self._changed_at(),
            "model": values.get("actor_rollout_ref.model.path"),
            "estimator": values.get("algorithm.adv_estimator"),
            "problems": self.problems(),
        }

    def _changed_at(self) -> float:
        """Time of the newest metrics or rollouts, in seconds since 1970; 0 without them."""
        # Not the time of the folder, which any command that looks at the run changes.
        paths = [self.directory / METRICS_FILE]
        for kind in (STEP, VALIDATION):
            paths += [self.record.path(step, kind) for step in self.record.steps(kind)[-1:]]
        return max((path.stat().st_mtime for path in paths if path.exists()), default=0.0)


def headline_curve(metrics: dict[int, dict[str, float]]) -> tuple[str, list[float]]:
    """Choose the metric that sums up a run.

    Args:
        metrics: metrics by step.

    Returns:
        Its name, and about `_NUM_POINTS` of its values, the last one included. Both are empty if
        the run has none of `HEADLINES`.
    """
    for name in HEADLINES:
        values = [numbers.get(name, math.nan) for numbers in metrics.values()]
        values = [value for value in values if math.isfinite(value)]
        if values:
            stride = math.ceil(len(values) / _NUM_POINTS)
            return name, [*values[:-1:stride], values[-1]]
    return "", []


class Runs:
    """The runs in some folders. New runs may appear while the page is open.

    Args:
        roots: directories of runs, or folders that hold such directories.

    Raises:
        DataError: a folder does not exist, or none of them holds a run.
    """

    def __init__(self, roots: Sequence[Path]) -> None:
        self._roots = list(roots)
        self._runs: dict[Path, ViewedRun] = {}
        for root in roots:
            if not root.is_dir():
                got = "a file" if root.exists() else "no such folder"
                raise DataError(str(root), got=got, expected="a run, or a folder of runs")
        if not self.find():
            raise DataError(
                ", ".join(map(str, roots)),
                got="a folder without a run",
                expected=f"folders with {CONFIGURATION} or {METRICS_FILE}",
                fix="Give trainer.default_local_dir of a run, or a folder above several.",
            )

    def find(self) -> dict[str, ViewedRun]:
        """Look for runs, and return them by name.

        The name is the path below the root, or the root's own name. If two runs would have the same
        name, the second one is named by its whole path.
        """
        names = {}
        for root in self._roots:
            for directory in _run_folders(root, _MAX_DEPTH):
                run = self._runs.get(directory)
                if run is None:
                    inner = directory.relative_to(root).as_posix()
                    name = inner if inner != "." else root.resolve().name
                    run = ViewedRun(directory, name)
                    self._runs[directory] = run
                # Another run may have the name.
                if names.get(run.name, run) is not run:
                    run.name = str(directory)
                names[run.name] = run
        return names

    def run(self, name: str) -> ViewedRun:
        """A run by its name.

        Raises:
            DataError: there is none.
        """
        for run in list(self._runs.values()):
            if run.name == name:
                return run
        raise DataError("run", got=name, expected="the name of a run", fix="Reload the page.")


def _run_folders(folder: Path, depth: int) -> Iterator[Path]:
    """Find directories of runs, the folder itself included.

    The folders inside a run are not searched. A folder that cannot be read counts as a run.

    Args:
        folder: the folder.
        depth: levels below the folder to look at.
    """
    try:
        if any((folder / name).exists() for name in _SIGNS):
            yield folder
            return
        inner_folders = sorted(path for path in folder.iterdir() if path.is_dir())
    except PermissionError:
        # It may be a run of another user. `ViewedRun.problems` says that it cannot be read.
        yield folder
        return
    for inner in inner_folders if depth else ():
        if not inner.name.startswith("."):
            yield from _run_folders(inner, depth - 1)


def nested_values(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Values of nested sections, with their dotted keys."""
    if not isinstance(value, dict) or not value:
        yield prefix, value
        return
    for name, inner in value.items():
        yield from nested_values(inner, f"{prefix}.{name}" if prefix else str(name))


def stamp_of(path: Path) -> tuple[int, int]:
    """Size of a file, and modification time in nanoseconds. If one differs, the file was written again."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns


def describe_error(error: Exception) -> str:
    """Describe an error in a sentence for the page."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}."
    return str(error).strip() or type(error).__name__
