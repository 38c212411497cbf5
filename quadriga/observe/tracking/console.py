# SPDX-License-Identifier: Apache-2.0
"""The console backend: validation results and sample answers for a person, and the steps where no progress shows them.

Which of the two prints a step is decided in `quadriga.observe.progress`.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from quadriga.observe.headline import ValidationResult, step_fields, validation_results
from quadriga.observe.progress import AlignedLine, Progress
from quadriga.observe.tracking.base import Sample, sample_columns

# An answer longer than this is cut in the middle of the screen; the files of the other backends hold it whole.
SHOWN_CHARACTERS = 400
INDENT = "  "


class ConsoleBackend:
    """Prints.

    Args:
        progress: prints above this run's bar and leaves the steps to it; None prints everything itself.
        emit: where lines go when there is no `progress`.
    """

    def __init__(self, progress: Progress | None = None, emit: Callable[[str], None] | None = None) -> None:
        self._has_progress = progress is not None
        self._emit = emit or (progress.message if progress is not None else _print)
        self._line = AlignedLine()
        self._last: dict[tuple[str, str], tuple[float, int]] = {}

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """Print the step's line (without a progress) and its validation results."""
        fields = step_fields(metrics)
        if fields and not self._has_progress:
            self._emit(self._line.render({"step": str(step), **fields}))
        results = validation_results(metrics)
        if results:
            self._emit(self._validation(results, step))

    def log_samples(self, rows: Sequence[Sample], step: int) -> None:
        """Print each sample as a small paragraph."""
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

    def _validation(self, results: Sequence[ValidationResult], step: int) -> str:
        """A table with one row per data source; a column shows its value and the change since the last validation."""
        cells: dict[str, dict[str, str]] = {}
        for result in results:
            cells.setdefault(result.source, {})[result.column] = self._cell(result, step)
        columns = list(dict.fromkeys(result.column for result in results))
        width = max(len(source) for source in cells)
        lines = [f"validation at step {step}"]
        for source, row in cells.items():
            shown = [f"{column} {row[column]}" for column in columns if column in row]
            lines.append(f"{INDENT}{source:<{width}}{INDENT}{'   '.join(shown)}")
        return "\n".join(lines)

    def _cell(self, result: ValidationResult, step: int) -> str:
        key = (result.source, result.column)
        before = self._last.get(key)
        self._last[key] = (result.value, step)
        text = f"{result.value:.3f}"
        return text if before is None else f"{text} ({result.value - before[0]:+.3f} since step {before[1]})"


def _print(text: str) -> None:
    print(text, flush=True)


def _paragraph(label: str, value: Any) -> list[str]:
    text = f"{value:.3f}" if isinstance(value, float) else str(value)
    if len(text) > SHOWN_CHARACTERS:
        half = SHOWN_CHARACTERS // 2
        text = f"{text[:half]} ... ({len(text) - 2 * half} characters) ... {text[-half:]}"
    first, *rest = text.splitlines() or [""]
    return [f"{label}{first}".rstrip(), *(f"{' ' * len(label)}{line}".rstrip() for line in rest)]
