# SPDX-License-Identifier: Apache-2.0
"""The jsonl backend: `metrics.jsonl` and `samples.jsonl` in the run's directory.

Each line is a JSON object. The files survive a kill at any moment: every line is handed to the
system at once, and when the run continues, a half-written last line is dropped. Numbers are exact.
JSON cannot express NaN and the infinities; they are written as the strings "NaN", "Infinity" and
"-Infinity", which `float` reads.
"""

import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from quadriga.errors import DataError, QuadrigaError
from quadriga.observe.tracking.base import Metrics, RunFacts, Sample, TrackingBackend

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JsonlBackend(TrackingBackend):
    """Appends to the two files.

    A continued run first removes the lines of steps that it computes again. A new run in the
    directory of an earlier one first renames the files of the earlier one.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._metrics = _LineFile(facts.directory / METRICS_FILE, facts)
        self._samples = _LineFile(facts.directory / SAMPLES_FILE, facts)

    def log(self, metrics: Metrics, step: int) -> None:
        values = {name: float(value) for name, value in metrics.items()}
        self._metrics.append({"step": step, **values})

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        for sample in samples:
            self._samples.append({"step": step, **sample})

    def close(self, *, has_failed: bool = False) -> None:
        self._metrics.close()
        self._samples.close()


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """Read the metrics of each step, in the order of the steps.

    Lines of the same step are merged; a later value replaces an earlier one. A last line that was
    cut by a kill is left out.

    Raises:
        DataError: a line is not one that the backend writes.
    """
    steps = {}
    for _, record in complete_lines(Path(path)):
        step = int(record.pop("step"))
        metrics = steps.setdefault(step, {})
        for name, value in record.items():
            metrics[name] = float(value)
    return dict(sorted(steps.items()))


class _LineFile:
    """File to which each line is appended completely or not at all. The first line opens it.

    Args:
        path: the file. If this run is continued, lines of steps that it computes again are removed
            from the file. The file of another run is renamed.
        facts: facts about the run.
    """

    def __init__(self, path: Path, facts: RunFacts) -> None:
        self._path = path
        self._descriptor: int | None = None
        if not path.exists():
            return
        if facts.is_continued:
            # Keep the lines of earlier steps, byte for byte. Write them to another file and rename
            # it, so that a kill at any moment loses nothing.
            earlier_lines = []
            for line, record in complete_lines(path):
                if int(record["step"]) < facts.first_step:
                    earlier_lines.append(line)
            temporary = path.with_name(f"{path.name}.tmp")
            with temporary.open("wb") as file:
                file.writelines(earlier_lines)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        elif path.stat().st_size:
            # metrics.jsonl of an earlier run becomes metrics.1.jsonl, or the next number.
            places = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
            path.rename(next(place for place in places if not place.exists()))

    def append(self, record: Mapping[str, Any]) -> None:
        """Append a record as a line.

        Raises:
            QuadrigaError: the line cannot be written; the file is as before.
        """
        text = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n"
        # A lone surrogate, which UTF-8 cannot express, becomes its escape in JSON.
        line = text.encode(errors="backslashreplace")
        size = None
        try:
            if self._descriptor is None:
                flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
                self._descriptor = os.open(self._path, flags, 0o644)
            size = os.fstat(self._descriptor).st_size
            while line:
                num_written = os.write(self._descriptor, line)
                line = line[num_written:]
        except OSError as error:
            if self._descriptor is not None and size is not None:
                # Remove the part of the line that was written.
                os.ftruncate(self._descriptor, size)
            raise QuadrigaError(
                str(self._path),
                got=str(error.strerror or error),
                expected="to append a line",
                fix="Free space on the disk, or permit writing, and continue the run. The lines "
                "before this one are complete.",
            ) from error

    def close(self) -> None:
        """Close the file. Later calls do nothing."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Iterate over the lines of a file, without a last line that was cut by a kill.

    Yields:
        Each line as bytes, and the record that it holds.

    Raises:
        DataError: a line is not one that the backend writes.
    """
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(
                    where, got=f"no JSON ({error})", expected="one JSON object per line"
                ) from error
            if not isinstance(record, dict) or "step" not in record:
                raise DataError(
                    where, got=line.decode()[:80].strip(), expected='an object with "step"'
                )
            yield line, record


def jsonable(value: Any, convert: Callable[[Any], Any] = str) -> Any:
    """Convert a value to one that JSON can express.

    Args:
        value: any value. NaN and the infinities become "NaN", "Infinity" and "-Infinity".
        convert: converts an object without a JSON form; the result is converted again. By default
            it is the object's text.

    Returns:
        The value as plain dicts, lists, texts, numbers and None.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        if math.isnan(value):
            return "NaN"
        return "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry, convert) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry, convert) for entry in value]
    return jsonable(convert(value), convert)
