# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a run go: a console, files, tracking services; one call for all of them."""

from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from types import TracebackType
from typing import Any

from quadriga.errors import ConfigError
from quadriga.observe.progress import Progress
from quadriga.observe.tracking.base import Run, Sample, TrackingBackend
from quadriga.observe.tracking.console import ConsoleBackend
from quadriga.observe.tracking.jsonl import JsonlBackend
from quadriga.observe.tracking.services import MlflowBackend, SwanlabBackend, TensorboardBackend, WandbBackend

BACKENDS: dict[str, Callable[..., TrackingBackend]] = {
    "console": ConsoleBackend,
    "jsonl": JsonlBackend,
    "tensorboard": TensorboardBackend,
    "wandb": WandbBackend,
    "mlflow": MlflowBackend,
    "swanlab": SwanlabBackend,
}
"""By their names in `trainer.logger`. A service's package is imported when its class is made."""


class Tracking:
    """Sends what is logged to every backend in `trainer.logger`.

    When one backend fails, the others still record the step; then the first error is raised.

    Args:
        backends: names from `BACKENDS`.
        project_name: groups experiments at the tracking services.
        experiment_name: names this run.
        config: the resolved configuration, stored with the run.
        directory: where file-based backends write; created if missing.
        resume_step: the step of the checkpoint this run continues from, 0 if it starts anew.
        progress: the bar or line printer of this run, if it has one; see `quadriga.observe.progress`.
    """

    def __init__(
        self,
        backends: Sequence[str],
        *,
        project_name: str,
        experiment_name: str,
        config: Mapping[str, Any],
        directory: Path,
        resume_step: int = 0,
        progress: Progress | None = None,
    ) -> None:
        for name in backends:
            if name not in BACKENDS:
                near = get_close_matches(name, BACKENDS, n=1)
                found = f"trainer.logger: got {name!r}, expected names from {', '.join(BACKENDS)}"
                raise ConfigError(found, fix=f"Did you mean {near[0]}?" if near else "")
        run = Run(project_name, experiment_name, config, Path(directory), resume_step)
        try:
            run.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            found = f"got {run.directory}, which cannot be created ({error.strerror})"
            raise ConfigError(
                f"trainer.default_local_dir: {found}, expected a directory that can be written",
                fix="Set trainer.default_local_dir to another place.",
            ) from error
        self._backends: list[TrackingBackend] = []
        try:
            for name in dict.fromkeys(backends):
                self._backends.append(ConsoleBackend(progress) if name == "console" else BACKENDS[name](run))
        except BaseException:
            self.close(has_failed=True)
            raise

    def __enter__(self) -> "Tracking":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(has_failed=error is not None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Record the reduced metrics of a step."""
        self._each(lambda backend: backend.log(metrics, step))

    def log_samples(self, rows: Sequence[Sample], step: int) -> None:
        """Record validation samples (`trainer.log_val_generations` of them)."""
        self._each(lambda backend: backend.log_samples(rows, step))

    def close(self, *, has_failed: bool = False) -> None:
        """Close every backend. May be called twice."""
        try:
            self._each(lambda backend: backend.close(has_failed=has_failed))
        finally:
            self._backends = []

    def _each(self, call: Callable[[TrackingBackend], None]) -> None:
        errors: list[Exception] = []
        for backend in self._backends:
            try:
                call(backend)
            except Exception as error:
                error.add_note(f"while {type(backend).__name__} was recording the run")
                errors.append(error)
        if errors:
            raise errors[0]
