# SPDX-License-Identifier: Apache-2.0
"""The real mlflow on plain files: metrics, parameters, samples, status, and one run over a resume."""

import json
import os
from importlib.util import find_spec

import pytest

from quadriga.observe.tracking.services import MlflowBackend, metric_name

# Not imported where tests are collected, which every process does.
pytestmark = pytest.mark.skipif(
    find_spec("mlflow") is None, reason="needs mlflow: pip install -e '.[mlflow]'"
)


@pytest.fixture
def own_environment(monkeypatch):
    """mlflow and the backend write into the environment; the test ends with the one it began with."""
    for name in [name for name in os.environ if name.startswith("MLFLOW_")]:
        monkeypatch.delenv(name)
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]


def test_a_run_and_its_continuation(make_run, samples, own_environment):
    run = make_run()
    first = MlflowBackend(run)
    for step in (1, 2):
        first.log({"val-core/a/reward/mean@8": step / 4, "actor/lr": 2e-5}, step)
    first.log_samples(samples, 2)
    first.close(has_failed=True)
    stored = first._client.get_run(first._run_id)
    assert stored.info.status == "FAILED" and stored.info.run_name == "largest"
    assert stored.data.params["trainer.project_name"] == "numbers"
    assert stored.data.params["trainer.logger"] == "['x']"

    second = MlflowBackend(make_run(resume_step=1))
    assert second._run_id == first._run_id
    for step in (2, 3):
        second.log({"val-core/a/reward/mean@8": step / 4}, step)
    second.close()
    history = second._client.get_metric_history(second._run_id, "val-core/a/reward/mean_at_8")
    assert [(point.step, point.value) for point in history] == [(1, 0.25), (2, 0.5), (3, 0.75)]
    assert second._client.get_run(second._run_id).info.status == "FINISHED"
    (file,) = run.directory.glob("mlruns/*/*/artifacts/samples/step_2.json")
    assert json.loads(file.read_text())["samples"] == samples
    configs = {file.name for file in run.directory.glob("mlruns/*/*/artifacts/config/*")}
    assert configs == {"step_0.json", "step_1.json"}


@pytest.mark.parametrize(
    ("name", "taken"), [("a/b-c.d e", "a/b-c.d e"), ("mean@8", "mean_at_8"), ("x:y*(z)", "x_y__z_")]
)
def test_names_are_written_as_mlflow_takes_them(name, taken):
    assert metric_name(name) == taken
