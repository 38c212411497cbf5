# SPDX-License-Identifier: Apache-2.0
"""The mlflow backend. Without MLFLOW_TRACKING_URI the run is kept in the `mlruns` directory beside its other files."""

import os
import re
import time
from collections.abc import Mapping, Sequence
from typing import Any

from quadriga.observe.tracking.base import Run, Sample, flatten, require

# Limits of the service: entries of one request, characters of a parameter's value.
PARAMS_PER_REQUEST = 100
METRICS_PER_REQUEST = 1000
PARAM_CHARACTERS = 6000


class MlflowBackend:
    """Metrics, the configuration as parameters and as a file, and samples as files.

    A continued run has the identity of the one it continues; a repeated step is stored a second time with a later
    time stamp, which the charts take. Characters that mlflow refuses in a name are written out: "mean@8" becomes
    "mean_at_8".
    """

    def __init__(self, run: Run) -> None:
        self._mlflow = require("mlflow", logger="mlflow", install="mlflow-skinny")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # mlflow asks for this consent before it writes plain files; they are what a run's own directory wants.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (run.directory / "mlruns").resolve().as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        self._run_id = self._continue(run) or self._begin(run)
        self._client.log_dict(self._run_id, _plain(run.config), f"config/step_{run.resume_step}.json")

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """One request for all metrics of the step."""
        now_ms = round(time.time() * 1000)
        entries = [
            self._mlflow.entities.Metric(metric_name(name), float(value), now_ms, step)
            for name, value in metrics.items()
        ]
        for start in range(0, len(entries), METRICS_PER_REQUEST):
            self._client.log_batch(self._run_id, metrics=entries[start : start + METRICS_PER_REQUEST])

    def log_samples(self, rows: Sequence[Sample], step: int) -> None:
        """One file per validation: samples/step_12.json."""
        if rows:
            samples = {"step": step, "samples": [_plain(row) for row in rows]}
            self._client.log_dict(self._run_id, samples, f"samples/step_{step}.json")

    def close(self, *, has_failed: bool = False) -> None:
        """Mark the run finished or failed."""
        self._client.set_terminated(self._run_id, status="FAILED" if has_failed else "FINISHED")

    def _continue(self, run: Run) -> str | None:
        run_id = run.load_id("mlflow")
        if run_id is not None:
            self._client.update_run(run_id, status="RUNNING")
        return run_id

    def _begin(self, run: Run) -> str:
        experiment = self._client.get_experiment_by_name(run.project_name)
        experiment_id = experiment.experiment_id if experiment else self._client.create_experiment(run.project_name)
        run_id = self._client.create_run(experiment_id, run_name=run.experiment_name).info.run_id
        run.save_id("mlflow", run_id)
        # Parameters cannot change within a run; a continued one has those it began with, and a configuration file more.
        params = [
            self._mlflow.entities.Param(metric_name(name), str(value)[:PARAM_CHARACTERS])
            for name, value in flatten(run.config)
        ]
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            self._client.log_batch(run_id, params=params[start : start + PARAMS_PER_REQUEST])
        return run_id


def metric_name(name: str) -> str:
    """The name with every character replaced that mlflow does not take."""
    return re.sub(r"[^/\w.\- ]", "_", name.replace("@", "_at_"))


def _plain(value: Any) -> Any:
    """Values that a JSON file holds; others as their text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return value if value is None or isinstance(value, str | int | float) else str(value)
