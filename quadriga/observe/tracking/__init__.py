# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a run go: a console, files, tracking services; one call for all of them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from quadriga.errors import ConfigError
from quadriga.observe.progress import Progress
from quadriga.observe.tracking.base import RunFacts, Sample, TrackingBackend
from quadriga.observe.tracking.console import ConsoleBackend
from quadriga.observe.tracking.jsonl import JsonlBackend
from quadriga.observe.tracking.services import MlflowBackend, SwanlabBackend, TensorboardBackend, WandbBackend
from quadriga.observe.watchdog import waiting

BACKENDS: dict[str, Callable[..., TrackingBackend]] = {
    "console": ConsoleBackend,
    "jsonl": JsonlBackend,
    "tensorboard": TensorboardBackend,
    "wandb": WandbBackend,
    "mlflow": MlflowBackend,
    "swanlab": SwanlabBackend,
}
"""By their names in `trainer.logger`. A service's package is imported when its class is made."""


class Tracking(AbstractContextManager["Tracking"]):
    """Sends what is logged to every backend in `trainer.logger`. The directory of the run is created if missing; steps
    are left to the `progress` of this run, if it has one.

    When one backend fails, the others still record the step; then the first error is raised. Raises ConfigError: the
    directory cannot be made, or the package of a backend is missing."""

    def __init__(self, backends: Sequence[str], facts: RunFacts, progress: Progress | None = None) -> None:
        try:
            facts.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            got = f"{facts.directory}, which cannot be created ({error.strerror})"
            expected, fix = "a directory that can be written", "Set trainer.default_local_dir to another place."
            raise ConfigError("trainer.default_local_dir", got=got, expected=expected, fix=fix) from error
        self._backends: list[TrackingBackend] = []
        try:
            for name in dict.fromkeys(backends):
                with waiting(f"the tracker {name} to start"):
                    self._backends.append(ConsoleBackend(progress) if name == "console" else BACKENDS[name](facts))
        except BaseException:
            self.close(has_failed=True)
            raise

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.close(has_failed=kind is not None)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._each(lambda backend: backend.log(metrics, step))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Record validation samples (`trainer.log_val_generations` of them)."""
        if samples:
            self._each(lambda backend: backend.log_samples(samples, step))

    def close(self, *, has_failed: bool = False) -> None:
        try:
            self._each(lambda backend: backend.close(has_failed=has_failed))
        finally:
            self._backends = []

    def _each(self, call: Callable[[TrackingBackend], None]) -> None:
        errors: list[Exception] = []
        for backend in self._backends:
            try:
                with waiting(f"{type(backend).__name__} to record the run"):
                    call(backend)
            except Exception as error:
                error.add_note(f"while {type(backend).__name__} was recording the run")
                errors.append(error)
        if errors:
            raise errors[0]
