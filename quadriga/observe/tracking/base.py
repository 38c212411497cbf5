# SPDX-License-Identifier: Apache-2.0
"""What a tracking backend is, and the facts about a run that it gets."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
    """The facts about the run that a backend records.

    Attributes:
        project_name: groups experiments at the tracking services.
        config: the resolved configuration.
        directory: where file-based backends write; `Tracking` creates it.
        resume_step: the step of the checkpoint that this run continues from, 0 if it starts anew. What was recorded
            behind it by a process that died is recorded again.
    """

    project_name: str
    experiment_name: str
    config: Mapping[str, Any]
    directory: Path
    resume_step: int = 0

    def load_id(self, backend: str) -> str | None:
        """The identity this run has at a tracking service, if it is a continued one."""
        path = self.directory / f".{backend}_run_id"
        return path.read_text().strip() if self.resume_step > 0 and path.exists() else None

    def save_id(self, backend: str, identity: str) -> None:
        """Remember the identity for the process that may continue this run."""
        (self.directory / f".{backend}_run_id").write_text(f"{identity}\n")


def sample_columns(samples: Sequence[Sample]) -> list[str]:
    """All columns of these samples: the conventional ones first, then others as they come."""
    found = dict.fromkeys(name for sample in samples for name in sample)
    return [name for name in SAMPLE_COLUMNS if name in found] + [name for name in found if name not in SAMPLE_COLUMNS]
