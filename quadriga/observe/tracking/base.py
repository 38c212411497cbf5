# SPDX-License-Identifier: Apache-2.0
"""Base class of tracking backends, facts about a run, and the steps that a service has recorded."""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from pathlib import Path
from typing import Any, TypeAlias

# The usual columns of a validation sample. A sample may lack some of them and have others.
SAMPLE_COLUMNS = ("data_source", "input", "output", "ground_truth", "score")
Sample = Mapping[str, Any]
Metrics: TypeAlias = Mapping[str, float]


class TrackingBackend:
    """Base class of tracking backends.

    Steps arrive in order. In a resumed run they go on after `RunFacts.resume_step`.
    """

    def log(self, metrics: Metrics, step: int) -> None:
        """Write the metrics of a step."""
        raise NotImplementedError

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Write validation samples, at least one."""
        raise NotImplementedError

    def close(self, *, has_failed: bool = False) -> None:
        """Write everything out. With `has_failed` mark the run as failed, if the backend can."""


@dataclass(frozen=True, slots=True)
class RunFacts:
    """Facts about a run that backends record or need.

    Attributes:
        project_name: group of the experiment at tracking services.
        experiment_name: name of the experiment.
        config: the resolved configuration.
        directory: the run's directory, in which backends write files. `Tracking` creates it.
        resume_step: the step that this run continues from; 0 for a new run. Later steps that were
            recorded before the run was interrupted are computed again.
        is_restart: whether the run began in this process, and continues from `resume_step` after
            the loss of a worker. `resume_step` may then be 0.
    """

    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    directory: Path
    resume_step: int = 0
    is_restart: bool = False

    @property
    def is_continued(self) -> bool:
        """Whether this run was begun before, so that records in the directory belong to it."""
        return self.resume_step > 0 or self.is_restart

    @property
    def first_step(self) -> int:
        """The first step that this process records; 0 is the validation before step 1."""
        return self.resume_step + 1 if self.resume_step > 0 else 0

    def load_id(self, backend: str) -> str | None:
        """Identity of the run at a tracking service, as saved; None for a run that is new there."""
        path = self.directory / f".{backend}_run_id"
        if self.is_continued and path.exists():
            return path.read_text(encoding="utf-8").strip()
        return None

    def save_id(self, backend: str, identity: str) -> None:
        """Save the identity of the run at a service, for a process that continues the run."""
        (self.directory / f".{backend}_run_id").write_text(f"{identity}\n", encoding="utf-8")


class RecordedSteps:
    """Steps of a run that a service has recorded.

    A service cannot delete records, so steps that are computed again are not sent again. The number
    of the last step of each kind of record is stored in a file of the run's directory, which
    survives a kill. A kind is the name of a method, such as `log`.

    Args:
        facts: facts about the run.
        backend: name of the backend.
        identity: identity of the run at the service. None: the run is new there.
    """

    def __init__(self, facts: RunFacts, backend: str, identity: str | None) -> None:
        self._path = facts.directory / f".{backend}_recorded"
        self._first_step = facts.first_step
        self._last_steps: dict[str, int] = {}  # last recorded step by kind
        if identity is not None and self._path.is_file():
            self._last_steps = json.loads(self._path.read_text(encoding="utf-8"))
        self._earlier_last_steps = dict(self._last_steps)  # `_last_steps` of earlier processes
        last = max(self._earlier_last_steps.values(), default=-1)
        if last >= self._first_step:
            file = self._path.with_name(f".{backend}_run_id")
            print(
                f"{backend} has the run up to step {last}: steps from {self._first_step} on are not"
                f" recorded a second time. Without {file} they go to a new run there."
            )

    def has(self, kind: str, step: int) -> bool:
        """Whether an earlier process has sent a kind of record of a step to the service."""
        return self._first_step <= step <= self._earlier_last_steps.get(kind, -1)

    def add(self, kind: str, step: int) -> None:
        """Store that the service has a kind of record of a step."""
        self._last_steps[kind] = max(step, self._last_steps.get(kind, step))
        # A rename is atomic: a kill leaves the old or the new file.
        temporary = self._path.with_name(f"{self._path.name}.tmp")
        temporary.write_text(json.dumps(self._last_steps), encoding="utf-8")
        os.replace(temporary, self._path)


def skip_recorded(record: Callable[[Any, Any, int], None]) -> Callable[[Any, Any, int], None]:
    """Decorator that makes a backend's method skip steps that its service has recorded already.

    The backend has an attribute `steps` of the class `RecordedSteps`. The name of the method is the
    kind of record.
    """

    @wraps(record)
    def recording(backend: Any, content: Any, step: int) -> None:
        if not backend.steps.has(record.__name__, step):
            record(backend, content, step)
            backend.steps.add(record.__name__, step)

    return recording


def sample_columns(samples: Sequence[Sample]) -> list[str]:
    """All columns of the samples: the usual ones first, then the others in order of appearance."""
    names = dict.fromkeys(chain.from_iterable(samples))
    columns = [name for name in SAMPLE_COLUMNS if name in names]
    return list(dict.fromkeys([*columns, *names]))
