# SPDX-License-Identifier: Apache-2.0
"""Backends of tracking services: TensorBoard, Weights & Biases, MLflow, SwanLab.

| backend | where it writes |
|---|---|
| tensorboard | event files in the `tensorboard` directory of the run |
| wandb | WANDB_MODE=offline keeps everything in the run's directory |
| mlflow | without MLFLOW_TRACKING_URI the `mlruns` directory of the run |
| swanlab | SWANLAB_MODE=offline keeps everything in the run's directory |

Each package is imported when its backend is made. A continued run has the identity of the one it continues, and
records what it computes again only where that can be hidden (TensorBoard).
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
    RecordedSteps,
    RunFacts,
    Sample,
    TrackingBackend,
    once,
    sample_columns,
)
from quadriga.observe.tracking.jsonl import jsonable

STEP_AXIS = "step"
# Limits of MLflow: entries of one request, characters of a parameter's value.
PARAMS_PER_REQUEST = 100
METRICS_PER_REQUEST = 1000
PARAM_CHARACTERS = 6000
_MODULES = {
    "tensorboard": "torch.utils.tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
}


def require(logger: str) -> ModuleType:
    """Import the package of a backend; a `ConfigError` says how to get it."""
    module, package = _MODULES[logger], "mlflow-skinny" if logger == "mlflow" else logger
    try:
        return import_module(module)
    except ImportError as error:
        got = f"no usable package {module} ({error})"
        fix = f"Install it with: pip install {package}; or take {logger} out of trainer.logger."
        raise ConfigError(
            f"trainer.logger={logger}", got=got, expected="it to be installed", fix=fix
        ) from error


def check_services(names: Sequence[str]) -> None:
    """Import what `trainer.logger` names, before anything is loaded; a `ConfigError` says what is missing."""
    for name in [one for one in names if one in _MODULES]:
        module = require(name)
        if name == "wandb" and os.environ.get("WANDB_MODE", "online") == "online":
            try:
                module.login(verify=False)  # on a terminal it asks for a key
            except module.errors.UsageError as error:
                fix = "Set WANDB_API_KEY, or WANDB_MODE=offline, which keeps everything in the run's directory."
                raise ConfigError(
                    "trainer.logger=wandb", got="no key", expected="an API key", fix=fix
                ) from error


class TensorboardBackend(TrackingBackend):
    """Scalars, the configuration as text, and samples as one table "samples". There is no place for how a run ended."""

    def __init__(self, facts: RunFacts) -> None:
        module = require("tensorboard")
        # TensorBoard hides every event from purge_step on that an earlier process wrote.
        place = str(facts.directory / "tensorboard")
        self._writer = module.SummaryWriter(log_dir=place, purge_step=facts.first_step)
        config = json.dumps(facts.config, indent=2, default=str)
        # A Markdown code block by four spaces, because the text may itself contain fences.
        code = "\n".join(f"    {line}" for line in config.splitlines())
        self._writer.add_text("config", code, facts.resume_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        # At once, since a killed process cannot do it later.
        self._writer.flush()

    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns = sample_columns(samples)
        table = [
            columns,
            ["---"] * len(columns),
            *([sample.get(name, "") for name in columns] for sample in samples),
        ]
        cells = [
            [str(cell).replace("|", "\\|").replace("\n", "<br>") for cell in row] for row in table
        ]
        self._writer.add_text("samples", "\n".join(f"| {' | '.join(row)} |" for row in cells), step)
        self._writer.flush()

    def close(self, *, has_failed: bool = False) -> None:
        self._writer.close()


class WandbBackend(TrackingBackend):
    """Scalars over the training step, and samples as one table per validation. The service numbers what it is sent by
    itself; so the training step is a metric of its own, which the charts use as their axis."""

    def __init__(self, facts: RunFacts) -> None:
        self._wandb = require("wandb")
        identity = facts.load_id("wandb")
        named = {"project": facts.project_name, "name": facts.experiment_name, "id": identity}
        resume = "allow" if identity else None
        self._run = self._wandb.init(
            **named, config=dict(facts.config), dir=str(facts.directory), resume=resume
        )
        facts.save_id("wandb", self._run.id)
        self.steps = RecordedSteps(facts, "wandb", identity)
        self._run.define_metric(STEP_AXIS)
        self._run.define_metric("*", step_metric=STEP_AXIS)

    @once
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log({**metrics, STEP_AXIS: step})

    @once
    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns = sample_columns(samples)
        plain = (str, int, float, type(None))
        # A table column holds one type; anything but numbers and text goes in as its text.
        found = [[sample.get(name) for name in columns] for sample in samples]
        cells = [[cell if isinstance(cell, plain) else str(cell) for cell in row] for row in found]
        self._run.log({"samples": self._wandb.Table(columns=columns, data=cells), STEP_AXIS: step})

    def close(self, *, has_failed: bool = False) -> None:
        self._run.finish(exit_code=1 if has_failed else 0)


class MlflowBackend(TrackingBackend):
    """Metrics, the configuration as parameters and as a file, and samples as files. Characters that MLflow refuses in a
    name are written out: "mean@8" becomes "mean_at_8"."""

    def __init__(self, facts: RunFacts) -> None:
        self._mlflow = require("mlflow")
        uri = os.environ.get("MLFLOW_TRACKING_URI")
        if not uri:
            # MLflow wants this consent before it writes plain files; they are what a run's own directory wants.
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
            uri = (facts.directory / "mlruns").resolve().as_uri()
        self._client = self._mlflow.MlflowClient(tracking_uri=uri)
        identity = facts.load_id("mlflow")
        if identity is not None:
            self._client.update_run(identity, status="RUNNING")
        self._run_id = identity or self._begin(facts)
        self.steps = RecordedSteps(facts, "mlflow", identity)
        self._client.log_dict(
            self._run_id, jsonable(facts.config), f"config/step_{facts.resume_step}.json"
        )

    def _begin(self, facts: RunFacts) -> str:
        experiment = self._client.get_experiment_by_name(facts.project_name)
        experiment_id = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(facts.project_name)
        )
        run_id = self._client.create_run(experiment_id, run_name=facts.experiment_name).info.run_id
        facts.save_id("mlflow", run_id)
        # Parameters cannot change within a run; a continued one has those it began with, and a configuration file more.
        make = self._mlflow.entities.Param
        params = [
            make(metric_name(name), str(value)[:PARAM_CHARACTERS])
            for name, value in flatten(facts.config)
        ]
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            self._client.log_batch(run_id, params=params[start : start + PARAMS_PER_REQUEST])
        return run_id

    @once
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        now_ms, make = round(time.time() * 1000), self._mlflow.entities.Metric
        entries = [
            make(metric_name(name), float(value), now_ms, step) for name, value in metrics.items()
        ]
        for start in range(0, len(entries), METRICS_PER_REQUEST):
            self._client.log_batch(
                self._run_id, metrics=entries[start : start + METRICS_PER_REQUEST]
            )

    @once
    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        record = {"step": step, "samples": jsonable(list(samples))}
        self._client.log_dict(self._run_id, record, f"samples/step_{step}.json")

    def close(self, *, has_failed: bool = False) -> None:
        self._client.set_terminated(self._run_id, status="FAILED" if has_failed else "FINISHED")


class SwanlabBackend(TrackingBackend):
    """Scalars over the training step, and samples as texts. The service knows the identity of a continued run only in
    its online mode; a run kept on disk begins a new one."""

    def __init__(self, facts: RunFacts) -> None:
        self._swanlab = require("swanlab")
        is_online = os.environ.get("SWANLAB_MODE", "online") in ("online", "cloud")
        identity = facts.load_id("swanlab") if is_online else None
        named = {"project": facts.project_name, "experiment_name": facts.experiment_name}
        named |= {"id": identity, "resume": "allow"} if identity else {}
        self._run = self._swanlab.init(
            **named, config=dict(facts.config), logdir=str(facts.directory / "swanlog")
        )
        if self._run.id:
            facts.save_id("swanlab", self._run.id)
        self.steps = RecordedSteps(facts, "swanlab", identity)

    @once
    def log(self, metrics: Mapping[str, float], step: int) -> None:
        self._swanlab.log(dict(metrics), step=step)

    @once
    def log_samples(self, samples: Sequence[Sample], step: int) -> None:
        columns = sample_columns(samples)
        texts = [
            "\n".join(f"{name}: {one[name]}" for name in columns if name in one) for one in samples
        ]
        self._swanlab.log({"samples": [self._swanlab.Text(text) for text in texts]}, step=step)

    def close(self, *, has_failed: bool = False) -> None:
        how = {"state": "crashed", "error": "the run ended in an error"} if has_failed else {}
        self._swanlab.finish(**how)


def metric_name(name: str) -> str:
    """The name with every character replaced that MLflow does not take."""
    return re.sub(r"[^/\w.\- ]", "_", name.replace("@", "_at_"))


def flatten(config: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The leaves of a nested configuration as ("a.b.c", value)."""
    for key, value in config.items():
        path = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flatten(value, path)
        else:
            yield path, value
