# SPDX-License-Identifier: Apache-2.0
"""The jsonl backend: `metrics.jsonl` and `samples.jsonl` in the run's directory, one JSON object per line.

The files are the record of the run: they survive a kill at any moment (every line is handed to the system at once, a
half-written last line is dropped when the run continues) and hold each number exactly. JSON has no word for NaN
and the infinities; they are written as the strings "NaN", "Infinity" and "-Infinity", which `float` reads.
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
from quadriga.observe.tracking.base import RunFacts, Sample, TrackingBackend

METRICS_FILE = "metrics.jsonl"
SAMPLES_FILE = "samples.jsonl"


class JsonlBackend(TrackingBackend):
    """Appends to the two files, after removing what a process that died wrote behind the last checkpoint.

    A run that starts anew in a directory with files of another keeps those under a numbered name."""

    def __init__(self, facts: RunFacts) -> None:
        self._metrics = _LineFile(facts.directory / METRICS_FILE, facts)
        self._samples = _LineFile(facts.directory / SAMPLES_FILE, facts)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._metrics.append(
            {"step": step, **{name: float(value) for name, value in metrics.items()}}
        )

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        for sample in samples:
            self._samples.append({"step": step, **sample})

    def close(self, *, has_failed: bool = False) -> None:
        self._metrics.close()
        self._samples.close()


def read_metrics(path: Path) -> dict[int, dict[str, float]]:
    """The metrics of each step, in order; lines of the same step are united, the later value counts.
    Raises DataError: a line is not one that the backend writes. A last line cut short by a kill is left out."""
    steps: dict[int, dict[str, float]] = {}
    for _, record in _complete_lines(Path(path)):
        step = int(record.pop("step"))
        steps.setdefault(step, {}).update({name: float(value) for name, value in record.items()})
    return dict(sorted(steps.items()))


class _LineFile:
    """Lines that are there as a whole or not at all, opened when the first one comes."""

    def __init__(self, path: Path, facts: RunFacts) -> None:
        self._path = path
        self._descriptor: int | None = None
        if not path.exists():
            return
        if facts.is_continued:
            # Byte for byte; written aside and renamed, so that a kill here loses nothing.
            kept = [
                line
                for line, record in _complete_lines(path)
                if int(record["step"]) < facts.first_step
            ]
            aside = path.with_name(f"{path.name}.tmp")
            with aside.open("wb") as file:
                file.writelines(kept)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
        elif path.stat().st_size:
            others = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
            path.rename(next(other for other in others if not other.exists()))

    def append(self, record: Mapping[str, Any]) -> None:
        # Half of a character (a lone surrogate), which UTF-8 cannot hold, becomes its escape in JSON.
        text = json.dumps(jsonable(record), ensure_ascii=False, allow_nan=False) + "\n"
        line = text.encode(errors="backslashreplace")
        size = None
        try:
            if self._descriptor is None:
                self._descriptor = os.open(
                    self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644
                )
            size = os.fstat(self._descriptor).st_size
            while line:
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            if self._descriptor is not None and size is not None:
                # Part of the line may be in the file; the next one must not be glued to it.
                os.ftruncate(self._descriptor, size)
            fix = "The lines before it are whole; free the disk or the permission and continue the run."
            raise QuadrigaError(
                str(self._path), str(error.strerror or error), "to append a line", fix
            ) from error

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _complete_lines(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Each line and the record in it; a last line cut short by a kill is left out."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                return
            where = f"{path}, line {number}"
            try:
                record = json.loads(line)
            except ValueError as error:
                raise DataError(
                    f"{where}: got no JSON ({error}), expected one JSON object per line"
                ) from error
            if not isinstance(record, dict) or "step" not in record:
                raise DataError(
                    where, got=line.decode()[:80].strip(), expected='an object with "step"'
                )
            yield line, record


def jsonable(value: Any, convert: Callable[[Any], Any] = str) -> Any:
    """Plain JSON values, with the texts "NaN", "Infinity" and "-Infinity" for numbers that JSON cannot hold.

    `convert` makes a plainer value of what has no JSON form (a tensor, an object of the user's): its text by default.
    """
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    if value is None or isinstance(value, str | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): jsonable(entry, convert) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [jsonable(entry, convert) for entry in value]
    return jsonable(convert(value), convert)
