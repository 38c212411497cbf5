# SPDX-License-Identifier: Apache-2.0
"""The swanlab backend. SWANLAB_MODE=offline keeps everything in the run's directory."""

import os
from collections.abc import Mapping, Sequence

from quadriga.observe.tracking.base import Run, Sample, require, sample_columns


class SwanlabBackend:
    """Scalars over the training step, and samples as texts.

    A continued run has the identity of the one it continues; the service knows it only in its online mode, a run
    kept on disk begins a new one.
    """

    def __init__(self, run: Run) -> None:
        self._swanlab = require("swanlab", logger="swanlab", install="swanlab")
        is_online = os.environ.get("SWANLAB_MODE", "online") in ("online", "cloud")
        identity = run.load_id("swanlab") if is_online else None
        continued = {"id": identity, "resume": "allow"} if identity else {}
        self._run = self._swanlab.init(
            project=run.project_name,
            experiment_name=run.experiment_name,
            config=dict(run.config),
            logdir=str(run.directory / "swanlog"),
            **continued,
        )
        if self._run.id:
            run.save_id("swanlab", self._run.id)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """All metrics of the step."""
        self._swanlab.log(dict(metrics), step=step)

    def log_samples(self, rows: Sequence[Sample], step: int) -> None:
        """One text per sample."""
        if rows:
            columns = sample_columns(rows)
            texts = [
                self._swanlab.Text("\n".join(f"{name}: {row[name]}" for name in columns if name in row)) for row in rows
            ]
            self._swanlab.log({"samples": texts}, step=step)

    def close(self, *, has_failed: bool = False) -> None:
        """Send what is left and mark the run finished or failed."""
        if has_failed:
            self._swanlab.finish(state="crashed", error="the run ended in an error")
        else:
            self._swanlab.finish()
