# SPDX-License-Identifier: Apache-2.0
"""Where the metrics of a run go: a console, files, tracking services; one call for all of them."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from quadriga.errors import ConfigError
from quadriga.observe.progress import Progress, aligned, step_fields, validation_results
from quadriga.observe.tracking.base import RunFacts, Sample, TrackingBackend, sample_columns
from quadriga.observe.tracking.jsonl import JsonlBackend, jsonable
from quadriga.observe.tracking.services import (
    MlflowBackend,
    SwanlabBackend,
    TensorboardBackend,
    WandbBackend,
)
from quadriga.observe.watchdog import waiting

# A response longer than this is cut in the middle of the screen; the files of the other backends hold it whole.
SHOWN_CHARACTERS = 400
INDENT = "  "


class ConsoleBackend(TrackingBackend):
    """Prints. `progress`: prints above this run's bar and leaves the steps to it; None prints everything itself."""

    def __init__(self, progress: Progress | None = None) -> None:
        self._has_progress = progress is not None
        self._emit = partial(print, flush=True) if progress is None else progress.message
        self._widths: dict[str, int] = {}
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        fields = step_fields(metrics)
        if fields and not self._has_progress:
            self._emit(aligned({"step": str(step), **fields}, self._widths))
        results = validation_results(metrics)
        if not results:
            return
        # One line per data source; a column shows its value and the change since the last validation.
        columns = list(dict.fromkeys(result.column for result in results))
        cells: dict[str, list[str]] = {result.source: [] for result in results}
        for result in sorted(results, key=lambda result: columns.index(result.column)):
            before = self._last.get((result.source, result.column))
            self._last[result.source, result.column] = (result.value, step)
            change = (
                ""
                if before is None
                else f" ({result.value - before[0]:+.3f} since step {before[1]})"
            )
            cells[result.source].append(f"{result.column} {result.value:.3f}{change}")
        width = max(map(len, cells))
        lines = [
            f"{INDENT}{source:<{width}}{INDENT}{'   '.join(shown)}"
            for source, shown in cells.items()
        ]
        self._emit("\n".join([f"validation at step {step}", *lines]))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        lines = [f"samples at step {step}"]
        names = sample_columns(samples)
        width = max(len(name) for name in names)
        for number, sample in enumerate(samples, start=1):
            lines.append(f"{INDENT}{number} of {len(samples)}")
            for name in (name for name in names if name in sample):
                value = sample[name]
                text = f"{value:.3f}" if isinstance(value, float) else str(value)
                if len(text) > SHOWN_CHARACTERS:
                    half = SHOWN_CHARACTERS // 2
                    text = (
                        f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"
                    )
                # The further lines of a text stand below its first.
                label = f"{INDENT * 2}{name.replace('_', ' '):<{width}}{INDENT}"
                for line in text.splitlines() or [""]:
                    lines.append(f"{label}{line}".rstrip())
                    label = " " * len(label)
        self._emit("\n".join(lines))


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

    def __init__(
        self, backends: Sequence[str], facts: RunFacts, progress: Progress | None = None
    ) -> None:
        try:
            facts.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            got = f"{facts.directory}, which cannot be created ({error.strerror})"
            expected, fix = (
                "a directory that can be written",
                "Set trainer.default_local_dir to another place.",
            )
            raise ConfigError(
                "trainer.default_local_dir", got=got, expected=expected, fix=fix
            ) from error
        self._backends: list[TrackingBackend] = []
        facts = replace(facts, config=jsonable(facts.config))
        try:
            for name in dict.fromkeys(backends):
                with waiting(f"the tracker {name} to start"):
                    self._backends.append(
                        ConsoleBackend(progress) if name == "console" else BACKENDS[name](facts)
                    )
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
            records = jsonable(list(samples))
            self._each(lambda backend: backend.log_samples(records, step))

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
