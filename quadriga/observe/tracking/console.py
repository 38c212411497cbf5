# SPDX-License-Identifier: Apache-2.0
"""The console backend: validation results and samples, and the steps where no `Progress` shows them."""

from collections.abc import Mapping, Sequence
from functools import partial

from quadriga.observe.progress import Progress, aligned, step_fields, validation_results
from quadriga.observe.tracking.base import Sample, TrackingBackend, sample_columns

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
            change = "" if before is None else f" ({result.value - before[0]:+.3f} since step {before[1]})"
            cells[result.source].append(f"{result.column} {result.value:.3f}{change}")
        width = max(map(len, cells))
        lines = [f"{INDENT}{source:<{width}}{INDENT}{'   '.join(shown)}" for source, shown in cells.items()]
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
                    text = f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"
                # The further lines of a text stand below its first.
                label = f"{INDENT * 2}{name.replace('_', ' '):<{width}}{INDENT}"
                for line in text.splitlines() or [""]:
                    lines.append(f"{label}{line}".rstrip())
                    label = " " * len(label)
        self._emit("\n".join(lines))
