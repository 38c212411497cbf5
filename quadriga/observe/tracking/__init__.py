# SPDX-License-Identifier: Apache-2.0
"""Trackers of a run: `Tracking` records its metrics on the console, in files and at services."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial

from quadriga.errors import ConfigError
from quadriga.observe.progress import Progress, align_fields, step_fields, validation_results
from quadriga.observe.tracking.base import (
    Metrics,
    RunFacts,
    Sample,
    TrackingBackend,
    sample_columns,
)
from quadriga.observe.tracking.jsonl import JsonlBackend, jsonable
from quadriga.observe.tracking.services import (
    MlflowBackend,
    SwanlabBackend,
    TensorboardBackend,
    WandbBackend,
)
from quadriga.observe.watchdog import waiting

# A longer response is cut in its middle on the screen. The other backends record all of it.
SHOWN_CHARACTERS = 400
INDENT = "  "


class ConsoleBackend(TrackingBackend):
    """Prints metrics and samples.

    Args:
        progress: the progress of the run, which shows the steps; everything else is printed above
            it. None: steps are printed too.
    """

    def __init__(self, progress: Progress | None = None) -> None:
        self._has_progress = progress is not None
        self._emit = partial(print, flush=True) if progress is None else progress.message
        self._widths: dict[str, int] = {}  # widths of the fields, to align the lines of steps
        # The last validation result of each data source and column, with its step.
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def log(self, metrics: Metrics, step: int) -> None:
        fields = step_fields(metrics)
        if fields and not self._has_progress:
            self._emit(align_fields({"step": str(step), **fields}, self._widths))
        results = validation_results(metrics)
        if not results:
            return
        # A line for each data source. Each column has a value and its change since the last one.
        columns = list(dict.fromkeys(result.column for result in results))
        cells: dict[str, list[str]] = {result.source: [] for result in results}
        # All lines have their columns in the same order, that of first appearance.
        for result in sorted(results, key=lambda result: columns.index(result.column)):
            cell = f"{result.column} {result.value:.3f}"
            key = (result.source, result.column)
            if key in self._last:
                last_value, last_step = self._last[key]
                cell += f" ({result.value - last_value:+.3f} since step {last_step})"
            self._last[key] = (result.value, step)
            cells[result.source].append(cell)
        width = max(map(len, cells))
        lines = [f"validation at step {step}"]
        for source, row in cells.items():
            lines.append(f"{INDENT}{source:<{width}}{INDENT}{'   '.join(row)}")
        self._emit("\n".join(lines))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        lines = [f"samples at step {step}"]
        names = sample_columns(samples)
        width = max(len(name) for name in names)
        for number, sample in enumerate(samples, start=1):
            lines.append(f"{INDENT}{number} of {len(samples)}")
            for name in names:
                if name not in sample:
                    continue
                value = sample[name]
                text = f"{value:.3f}" if isinstance(value, float) else str(value)
                if len(text) > SHOWN_CHARACTERS:
                    half = SHOWN_CHARACTERS // 2
                    omission = f"... ({len(text) - 2 * half} characters) ..."
                    text = f"{text[:half]} {omission} {text[-half:]}"
                # The label stands before the first line of a text; further lines are indented.
                label = f"{INDENT * 2}{name.replace('_', ' '):<{width}}{INDENT}"
                for line in text.splitlines() or [""]:
                    lines.append(f"{label}{line}".rstrip())
                    label = " " * len(label)
        self._emit("\n".join(lines))


# Backends by their names in `trainer.logger`. Making one imports the package of its service.
BACKENDS: dict[str, Callable[..., TrackingBackend]] = {
    "console": ConsoleBackend,
    "jsonl": JsonlBackend,
    "tensorboard": TensorboardBackend,
    "wandb": WandbBackend,
    "mlflow": MlflowBackend,
    "swanlab": SwanlabBackend,
}


class Tracking(AbstractContextManager["Tracking"]):
    """Records metrics and samples with every backend in `trainer.logger`.

    If a backend fails, the others still record the step; then the first error is raised.

    Args:
        backends: names of the backends.
        facts: facts about the run. Its directory is created if it does not exist.
        progress: the progress of the run, which shows the steps instead of the console backend.

    Raises:
        ConfigError: the directory cannot be created, or the package of a backend is missing.
    """

    def __init__(
        self, backends: Sequence[str], facts: RunFacts, progress: Progress | None = None
    ) -> None:
        try:
            facts.directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                "trainer.default_local_dir",
                got=f"{facts.directory}, which cannot be created ({error.strerror})",
                expected="a directory that can be written",
                fix="Set trainer.default_local_dir to another place.",
            ) from error
        self._backends: list[TrackingBackend] = []
        facts = replace(facts, config=jsonable(facts.config))
        try:
            # Names that occur twice are taken once.
            for name in dict.fromkeys(backends):
                argument = progress if name == "console" else facts
                with waiting(f"the tracker {name} to start"):
                    self._backends.append(BACKENDS[name](argument))
        except BaseException:
            self.close(has_failed=True)
            raise

    def __exit__(self, kind: type[BaseException] | None, *raised: object) -> None:
        self.close(has_failed=kind is not None)

    def log(self, metrics: Metrics, step: int) -> None:
        """Record the metrics of a step."""
        self._call_each(lambda backend: backend.log(metrics, step))

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        """Record validation samples (`trainer.log_val_generations` of them)."""
        if samples:
            records = jsonable(list(samples))
            self._call_each(lambda backend: backend.log_samples(records, step))

    def close(self, *, has_failed: bool = False) -> None:
        """Close the backends. Later calls do nothing.

        Args:
            has_failed: whether to mark the run as failed.
        """
        try:
            self._call_each(lambda backend: backend.close(has_failed=has_failed))
        finally:
            self._backends = []

    def _call_each(self, call: Callable[[TrackingBackend], None]) -> None:
        """Call every backend, even if one fails, then raise the first error."""
        errors = []
        for backend in self._backends:
            try:
                with waiting(f"{type(backend).__name__} to record the run"):
                    call(backend)
            except Exception as error:
                error.add_note(f"while {type(backend).__name__} was recording the run")
                errors.append(error)
        if errors:
            raise errors[0]
