# SPDX-License-Identifier: Apache-2.0
"""Backends of tracking services: TensorBoard, Weights & Biases, MLflow, SwanLab.

| backend | where it writes |
|---|---|
| tensorboard | event files in the `tensorboard` directory of the run |
| wandb | the service; with WANDB_MODE=offline the run's directory |
| mlflow | MLFLOW_TRACKING_URI, or else the `mlruns` directory of the run |
| swanlab | the service; with SWANLAB_MODE=offline the run's directory |

Each package is imported when its backend is made. A resumed run keeps its identity at the service.
Steps that it computes again are recorded again only in TensorBoard, which can hide earlier records.
"""

import json
import os
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any

from quadriga.errors import ConfigError
from quadriga.observe.tracking.base import (
    Metrics,
    RecordedSteps,
    RunFacts,
    Sample,
    TrackingBackend,
    sample_columns,
    skip_recorded,
)
from quadriga.observe.tracking.jsonl import jsonable

STEP_AXIS = "step"
# Limits of MLflow: entries of a request, characters of a parameter's value.
PARAMS_PER_REQUEST = 100
METRICS_PER_REQUEST = 1000
PARAM_CHARACTERS = 6000
_MODULES = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
}


def import_package(logger: str) -> ModuleType:
    """Import the package of a backend.

    Args:
        logger: name of the backend in `trainer.logger`.

    Raises:
        ConfigError: the package is not installed, or its import fails.
    """
    module = _MODULES[logger]
    try:
        return import_module(module)
    except ImportError as error:
        package = "mlflow-skinny" if logger == "mlflow" else logger
        raise ConfigError(
            f"trainer.logger={logger}",
            got=f"no usable package {module} ({error})",
            expected="an installed package",
            fix=f"Install it with: pip install {package}; or take {logger} out of trainer.logger.",
        ) from error


def check_services(names: Sequence[str]) -> None:
    """Import the packages of the services in `trainer.logger`, and log in to wandb.

    Call it before anything is loaded, so that a run without a package or a key ends early.

    Args:
        names: names in `trainer.logger`. Names of backends that are no services are skipped.

    Raises:
        ConfigError: a package or a key is missing.
    """
    for name in names:
        if name not in _MODULES:
            continue
        module = import_package(name)
        if name == "wandb" and os.environ.get("WANDB_MODE", "online") == "online":
            try:
                module.login(verify=False)  # on a terminal it asks for a key
            except module.errors.UsageError as error:
                raise ConfigError(
                    "trainer.logger=wandb",
                    got="no key",
                    expected="an API key",
                    fix="Set WANDB_API_KEY, or WANDB_MODE=offline, which keeps everything in the run's directory.",
                ) from error


class TensorboardBackend(TrackingBackend):
    """Scalars, the configuration as text, and samples as a table "samples".

    TensorBoard has no place for the state in which a run ended.
    """

    def __init__(self, facts: RunFacts) -> None:
        module = import_package("tensorboard")
        # TensorBoard hides events from `purge_step` on that earlier processes have written.
        log_dir = str(facts.directory / "tensorboard")
        self._writer = module.SummaryWriter(log_dir=log_dir, purge_step=facts.first_step)
        config = json.dumps(facts.config, indent=2, default=str)
        # A Markdown code block by indentation: the text may contain fences.
        code = "\n".join(f"    {line}" for line in config.splitlines())
        self._writer.add_text("config", code, facts.resume_step)

    def log(self, metrics: Metrics, step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # The process may be killed before the next step.
        self._writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns = sample_columns(samples)
        rows: list[list[Any]] = [columns, ["---"] * len(columns)]
        for sample in samples:
            rows.append([sample.get(name, "") for name in columns])
        lines = []
        for row in rows:
            cells = [str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row]
            lines.append(f"| {' | '.join(cells)} |")
        self._writer.add_text("samples", "\n".join(lines), step)
        self._writer.flush()

    def close(self, *, has_failed: bool = False) -> None:
        self._writer.close()


class WandbBackend(TrackingBackend):
    """Scalars over the training step, and samples as one table per validation.

    The service numbers records by itself. So the training step is recorded as a metric, which the
    charts use as their axis.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._wandb = import_package("wandb")
        identity = facts.load_id("wandb")
        self._run = self._wandb.init(
            project=facts.project_name,
            name=facts.experiment_name,
            id=identity,
            config=dict(facts.config),
            dir=str(facts.directory),
            resume="allow" if identity else None,
        )
        facts.save_id("wandb", self._run.id)
        self.steps = RecordedSteps(facts, "wandb", identity)
        self._run.define_metric(STEP_AXIS)
        self._run.define_metric("*", step_metric=STEP_AXIS)

    @skip_recorded
    def log(self, metrics: Metrics, step: int) -> None:
        self._run.log({**metrics, STEP_AXIS: step})

    @skip_recorded
    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns = sample_columns(samples)
        plain_types = (str, int, float, type(None))
        rows = []
        for sample in samples:
            row = []
            for name in columns:
                cell = sample.get(name)
                # A table holds numbers and texts.
                row.append(cell if isinstance(cell, plain_types) else str(cell))
            rows.append(row)
        self._run.log({"samples": self._wandb.Table(columns=columns, data=rows), STEP_AXIS: step})

    def close(self, *, has_failed: bool = False) -> None:
        self._run.finish(exit_code=1 if has_failed else 0)


class MlflowBackend(TrackingBackend):
    """Metrics, the configuration as parameters and as a file, and samples as files.

    MLflow refuses some characters in names: "mean@8" becomes "mean_at_8".
    """

    def __init__(self, facts: RunFacts) -> None:
        self._mlflow = import_package("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # Without this variable, MLflow refuses to write plain files, which fit into the run's
            # directory.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (facts.directory / "mlruns").resolve().as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        identity = facts.load_id("mlflow")
        if identity is not None:
            # The earlier process may have ended the run.
            self._client.update_run(identity, status="RUNNING")
        self._run_id = identity or self._begin(facts)
        self.steps = RecordedSteps(facts, "mlflow", identity)
        self._client.log_dict(
            self._run_id, jsonable(facts.config), f"config/step_{facts.resume_step}.json"
        )

    def _begin(self, facts: RunFacts) -> str:
        """Create a run at the service, with the configuration as its parameters. Return its id."""
        experiment = self._client.get_experiment_by_name(facts.project_name)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(facts.project_name)
        )
        run_id = self._client.create_run(experiment_id, run_name=facts.experiment_name).info.run_id
        facts.save_id("mlflow", run_id)
        # Parameters cannot change within a run. A continued run keeps those of its first process,
        # and writes its configuration to a file of its own.
        params = []
        for name, value in flatten(facts.config):
            text = str(value)[:PARAM_CHARACTERS]
            params.append(self._mlflow.entities.Param(metric_name(name), text))
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            self._client.log_batch(run_id, params=params[start : start + PARAMS_PER_REQUEST])
        return run_id

    @skip_recorded
    def log(self, metrics: Metrics, step: int) -> None:
        now_ms = round(time.time() * 1000)
        entries = []
        for name, value in metrics.items():
            entry = self._mlflow.entities.Metric(metric_name(name), float(value), now_ms, step)
            entries.append(entry)
        for start in range(0, len(entries), METRICS_PER_REQUEST):
            batch = entries[start : start + METRICS_PER_REQUEST]
            self._client.log_batch(self._run_id, metrics=batch)

    @skip_recorded
    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        record = {"step": step, "samples": jsonable(list(samples))}
        self._client.log_dict(self._run_id, record, f"samples/step_{step}.json")

    def close(self, *, has_failed: bool = False) -> None:
        self._client.set_terminated(self._run_id, status="FAILED" if has_failed else "FINISHED")


class SwanlabBackend(TrackingBackend):
    """Scalars over the training step, and samples as texts.

    SwanLab continues a run only in its online mode; on disk it begins a new run.
    """

    def __init__(self, facts: RunFacts) -> None:
        self._swanlab = import_package("swanlab")
        is_online = os.environ.get("SWANLAB_MODE", "online") in ("online", "cloud")
        identity = facts.load_id("swanlab") if is_online else None
        options = {"id": identity, "resume": "allow"} if identity else {}
        self._run = self._swanlab.init(
            project=facts.project_name,
            experiment_name=facts.experiment_name,
            config=dict(facts.config),
            logdir=str(facts.directory / "swanlog"),
            **options,
        )
        if self._run.id:
            facts.save_id("swanlab", self._run.id)
        self.steps = RecordedSteps(facts, "swanlab", identity)

    @skip_recorded
    def log(self, metrics: Metrics, step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    @skip_recorded
    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns = sample_columns(samples)
        texts = []
        for sample in samples:
            lines = [f"{name}: {sample[name]}" for name in columns if name in sample]
            texts.append(self._swanlab.Text("\n".join(lines)))
        self._swanlab.log({"samples": texts}, step=step)

    def close(self, *, has_failed: bool = False) -> None:
        state = {"state": "crashed", "error": "the run ended in an error"} if has_failed else {}
        self._swanlab.finish(**state)


def metric_name(name: str) -> str:
    """A name without the characters that MLflow refuses."""
    return re.sub(r"[^/\w.\- ]", "_", name.replace("@", "_at_"))


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Iterate over the values of a nested configuration as ("a.b.c", value)."""
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, path)
        else:
            yield path, value
