# SPDX-License-Identifier: Apache-2.0
"""The tensorboard backend: event files in the `tensorboard` directory of the run."""

import json
from collections.abc import Iterable, Mapping, Sequence

from quadriga.observe.tracking.base import Run, Sample, require, sample_columns


class TensorboardBackend:
    """Scalars, the configuration as text, and samples as tables."""

    def __init__(self, run: Run) -> None:
        module = require("torch.utils.tensorboard", logger="tensorboard", install="tensorboard")
        # TensorBoard hides every event from purge_step on that an earlier process wrote.
        purge_step = run.resume_step + 1 if run.resume_step > 0 else 0
        self._writer = module.SummaryWriter(log_dir=str(run.directory / "tensorboard"), purge_step=purge_step)
        config = json.dumps(run.config, indent=2, default=str)
        self._writer.add_text("config", _code(config), run.resume_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One scalar per metric; written out at once, since a killed process cannot do it later."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def log_samples(self, rows: Sequence[Sample], step: int) -> None:
        """One table of all samples under "samples"."""
        if not rows:
            return
        columns = sample_columns(rows)
        lines = [_row(columns), _row("---" for _ in columns)]
        lines += [_row(_cell(row.get(name, "")) for name in columns) for row in rows]
        self._writer.add_text("samples", "\n".join(lines), step)
        self._writer.flush()

    def close(self, *, has_failed: bool = False) -> None:
        """Close the event file; the format has no place for how a run ended."""
        self._writer.close()


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(value: object) -> str:
    """Text that stays inside its table cell."""
    return str(value).replace("|", "\\|").replace("\n", "<br>")


def _code(text: str) -> str:
    """A Markdown code block; four spaces, because the text may itself contain fences."""
    return "\n".join(f"    {line}" for line in text.splitlines())
