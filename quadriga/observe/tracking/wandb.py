# SPDX-License-Identifier: Apache-2.0
"""The wandb backend (Weights & Biases). WANDB_MODE=offline keeps everything in the run's directory."""

from collections.abc import Mapping, Sequence

from quadriga.observe.tracking.base import Run, Sample, require, sample_columns

STEP_AXIS = "step"


class WandbBackend:
    """Scalars over the training step, and samples as a table.

    A continued run has the identity of the one it continues. The service refuses a step that lies behind its last one,
    and a continued run repeats the steps since its checkpoint; so the training step is a metric of its own, which the
    charts use as their axis, and a repeated step lies on top of its first version.
    """

    def __init__(self, run: Run) -> None:
        self._wandb = require("wandb", logger="wandb", install="wandb")
        identity = run.load_id("wandb")
        self._run = self._wandb.init(
            project=run.project_name,
            name=run.experiment_name,
            config=dict(run.config),
            dir=str(run.directory),
            id=identity,
            resume="allow" if identity else None,
        )
        run.save_id("wandb", self._run.id)
        self._run.define_metric(STEP_AXIS)
        self._run.define_metric("*", step_metric=STEP_AXIS)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One history row."""
        self._run.log({**metrics, STEP_AXIS: step})

    def log_samples(self, rows: Sequence[Sample], step: int) -> None:
        """One table per validation, under "samples"."""
        if not rows:
            return
        columns = sample_columns(rows)
        table = self._wandb.Table(columns=columns, data=[[_cell(row.get(name)) for name in columns] for row in rows])
        self._run.log({"samples": table, STEP_AXIS: step})

    def close(self, *, has_failed: bool = False) -> None:
        """Send what is left and mark the run finished or failed."""
        self._run.finish(exit_code=1 if has_failed else 0)


def _cell(value: object) -> object:
    # A table column holds one type; anything but numbers and text goes in as its text.
    return value if value is None or isinstance(value, str | int | float) else str(value)
