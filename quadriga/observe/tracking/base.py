# SPDX-License-Identifier: Apache-2.0
"""What a tracking backend is, and the facts about a run that it gets."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

# Columns of a validation sample by convention; a sample may hold others and need not hold all of these.
SAMPLE_COLUMNS = ("data_source", "input", "output", "ground_truth", "score")
Sample = Mapping[str, Any]


class TrackingBackend:
    """One place where metrics go. Steps arrive in order; after a resume they start again behind `resume_step`."""

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Write the metrics of a step."""
        raise NotImplementedError

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Write validation samples, at least one; their columns are those of `SAMPLE_COLUMNS` or others."""
        raise NotImplementedError

    def close(self, *, has_failed: bool = False) -> None:
        """Write everything out; a run that ended in an error is marked as failed where the backend can say so."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """The facts about the run that a backend records."""

    project_name: str  # groups experiments at the tracking services
    experiment_name: str
    config: Mapping[str, Any]  # the resolved configuration
    directory: Path  # where file-based backends write; `Tracking` creates it
    # The step that this run continues from, 0 if it starts at its beginning. What was recorded behind it before the run
    # was cut short is computed again.
    resume_step: int = 0
    # Whether the run has begun in this process before, and goes on from this step after a loss.
    is_restart: bool = False

    @property
    def is_continued(self) -> bool:
        """Whether what is recorded already is of this run."""
        return self.resume_step > 0 or self.is_restart

    @property
    def first_step(self) -> int:
        """The first step that is recorded from here on; 0 is the validation before the first."""
        return self.resume_step + 1 if self.resume_step > 0 else 0

    def load_id(self, backend: str) -> str | None:
        """The identity this run has at a tracking service, if it is a continued one."""
        path = self.directory / f".{backend}_run_id"
        return (
            path.read_text(encoding="utf-8").strip()
            if self.is_continued and path.exists()
            else None
        )

    def save_id(self, backend: str, identity: str) -> None:
        """Remember the identity for the process that may continue this run."""
        (self.directory / f".{backend}_run_id").write_text(f"{identity}\n", encoding="utf-8")


class RecordedSteps:
    """Up to which step a service has a run. It takes nothing back: steps that are computed again stay away from it.
    `facts`: of the run; the steps stand in a file of its directory, and survive a kill.
    `identity`: of the run at the service; None: it is a new one there."""

    def __init__(self, facts: RunFacts, backend: str, identity: str | None) -> None:
        self._path, self._first = facts.directory / f".{backend}_recorded", facts.first_step
        is_known = identity is not None and self._path.is_file()
        self._last: dict[str, int] = (
            json.loads(self._path.read_text(encoding="utf-8")) if is_known else {}
        )
        self._before = dict(self._last)
        if (last := max(self._before.values(), default=-1)) >= self._first:
            file = self._path.with_name(f".{backend}_run_id")
            told = f"steps from {self._first} on are not recorded a second time. Without {file} they go to a new run"
            print(f"{backend} has the run up to step {last}: {told} there.")

    def has(self, kind: str, step: int) -> bool:
        """Whether the service has what is to be recorded of a step."""
        return self._first <= step <= self._before.get(kind, -1)

    def add(self, kind: str, step: int) -> None:
        """The service has it."""
        self._last[kind] = max(step, self._last.get(kind, step))
        aside = self._path.with_name(f"{self._path.name}.tmp")
        aside.write_text(json.dumps(self._last), encoding="utf-8")
        os.replace(aside, self._path)


def once(record: Callable[[Any, Any, int], None]) -> Callable[[Any, Any, int], None]:
    """A method of a backend with `steps: RecordedSteps` that records nothing twice."""

    @wraps(record)
    def recording(backend: Any, content: Any, step: int) -> None:
        if not backend.steps.has(record.__name__, step):
            record(backend, content, step)
            backend.steps.add(record.__name__, step)

    return recording


def sample_columns(samples: Sequence[Sample]) -> list[str]:
    """All columns of these samples: the conventional ones first, then others as they come."""
    found = dict.fromkeys(name for sample in samples for name in sample)
    return [name for name in SAMPLE_COLUMNS if name in found] + [
        name for name in found if name not in SAMPLE_COLUMNS
    ]
