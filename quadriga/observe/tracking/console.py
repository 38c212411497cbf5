# SPDX-License-Identifier: Apache-2.0
"""The console backend: validation results and samples, and the steps where no `Progress` shows them."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from quadriga.observe.progress import AlignedLine, Progress, ValidationResult, step_fields, validation_results
from quadriga.observe.tracking.base import Sample, TrackingBackend, sample_columns

# A response longer than this is cut in the middle of the screen; the files of the other backends hold it whole.
SHOWN_CHARACTERS = 400
INDENT = "  "


class ConsoleBackend(TrackingBackend):
    """Prints.

    Args:
        progress: prints above this run's bar and leaves the steps to it; None prints everything itself.
        emit: where lines go when there is no `progress`.
    """

    def __init__(self, progress: Progress | None = None, emit: Callable[[str], None] | None = None) -> None:
        self._has_progress = progress is not None
        self._emit = emit or (partial(print, flush=True) if progress is None else progress.message)
        self._line = AlignedLine()
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        fields = step_fields(metrics)
        if fields and not self._has_progress:
            self._emit(self._line.render({"step": str(step), **fields}))
        results = validation_results(metrics)
        if results:
            self._emit("\n".join([f"validation at step {step}", *self._table(results, step)]))

    def _table(self, results: Sequence[ValidationResult], step: int) -> list[str]:
        """One line per data source; a column shows its value and the change since the last validation."""
        rows: dict[str, list[str]] = {}
        order = {column: place for place, column in enumerate(dict.fromkeys(result.column for result in results))}
        for result in sorted(results, key=lambda result: order[result.column]):
            before = self._last.get((result.source, result.column))
            self._last[result.source, result.column] = (result.value, step)
            change = "" if before is None else f" ({result.value - before[0]:+.3f} since step {before[1]})"
            rows.setdefault(result.source, []).append(f"{result.column} {result.value:.3f}{change}")
        width = max(len(source) for source in rows)
        sources = dict.fromkeys(result.source for result in results)
        return [f"{INDENT}{source:<{width}}{INDENT}{'   '.join(rows[source])}" for source in sources]

    def log_samples(self, rows: Sequence[Sample], step: int) -> None:
        if not rows:
            return
        lines = [f"samples at step {step}"]
        names = sample_columns(rows)
        width = max(len(name) for name in names)
        for number, row in enumerate(rows, start=1):
            lines.append(f"{INDENT}{number} of {len(rows)}")
            for name in (name for name in names if name in row):
                lines += _paragraph(f"{INDENT * 2}{name.replace('_', ' '):<{width}}{INDENT}", row[name])
        self._emit("\n".join(lines))

    def close(self, *, has_failed: bool = False) -> None:
        """Nothing is held back, so there is nothing to write out."""


def _paragraph(label: str, value: Any) -> list[str]:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"
    first, *rest = text.splitlines() or [""]
    return [f"{label}{first}".rstrip(), *(f"{' ' * len(label)}{line}".rstrip() for line in rest)]
