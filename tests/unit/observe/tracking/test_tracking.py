# SPDX-License-Identifier: Apache-2.0
"""One call reaches every backend, and the failure of one does not cost the others a step."""

import json
import math
import os

import pytest

from quadriga.errors import ConfigError
from quadriga.observe.tracking import BACKENDS, RunFacts, Tracking


def tracking(directory, backends=("console", "jsonl"), **options) -> Tracking:
    return Tracking(backends, RunFacts("p", "e", {}, directory), **options)


class Broken:
    def __init__(self) -> None:
        self.closed_with: list[bool] = []

    def log(self, metrics, step):
        raise OSError("the disk is full")

    def log_samples(self, rows, step):
        raise OSError("the disk is full")

    def close(self, *, has_failed=False):
        self.closed_with.append(has_failed)


def test_metrics_and_samples_reach_every_backend(tmp_path, capsys):
    with tracking(tmp_path / "new" / "run") as sink:
        sink.log({"critic/rewards/mean": 0.5}, 1)
        sink.log_samples([{"input": "a", "output": "b"}], 1)
        sink.log_samples([], 2)
    assert json.loads((tmp_path / "new/run/metrics.jsonl").read_text()) == {
        "step": 1,
        "critic/rewards/mean": 0.5,
    }
    assert json.loads((tmp_path / "new/run/samples.jsonl").read_text()) == {
        "step": 1,
        "input": "a",
        "output": "b",
    }
    printed = capsys.readouterr().out
    assert "step 1  reward 0.500" in printed and "output  b" in printed and "step 2" not in printed


def test_a_broken_backend_is_reported_after_the_others_had_their_turn(tmp_path):
    sink = tracking(tmp_path, ["jsonl"])
    broken = Broken()
    sink._backends.insert(0, broken)
    with pytest.raises(OSError, match="disk is full") as caught:
        sink.log({"x": 1.0}, 1)
    assert caught.value.__notes__ == ["while Broken was recording the run"]
    assert (tmp_path / "metrics.jsonl").read_text() == '{"step": 1, "x": 1.0}\n'
    sink.close()
    sink.close()
    assert broken.closed_with == [False]


def test_backends_get_values_that_json_can_hold(tmp_path, monkeypatch):
    class Recorder(Broken):
        def __init__(self, facts) -> None:
            super().__init__()
            self.config = facts.config

        def log_samples(self, rows, step):
            self.samples = rows

    monkeypatch.setitem(BACKENDS, "jsonl", Recorder)
    with Tracking(["jsonl"], RunFacts("p", "e", {"clip": math.inf}, tmp_path)) as sink:
        (recorder,) = sink._backends
        sink.log_samples([{"score": math.nan}], 1)
    assert recorder.config == {"clip": "Infinity"}
    assert recorder.samples == [{"score": "NaN"}]


def test_a_run_that_fails_is_closed_as_failed(tmp_path):
    broken = Broken()
    with pytest.raises(KeyError), tracking(tmp_path, []) as sink:
        sink._backends.append(broken)
        raise KeyError("x")
    assert broken.closed_with == [True]


def test_a_name_given_twice_is_one_backend(tmp_path):
    with tracking(tmp_path, ["jsonl", "jsonl"]) as sink:
        sink.log({"x": 1.0}, 1)
    assert len((tmp_path / "metrics.jsonl").read_text().splitlines()) == 1


@pytest.mark.parametrize("obstacle", ["file", "permission"])
def test_a_directory_that_cannot_be_made_is_refused(tmp_path, obstacle):
    (tmp_path / "run").write_text("a file stands here")
    directory = tmp_path / "run" / "deeper"
    if obstacle == "permission":
        if os.geteuid() == 0:
            pytest.skip(
                "root may write everywhere, so a forbidden directory cannot be tried as root"
            )
        tmp_path.chmod(0o500)
        directory = tmp_path / "forbidden"
    with pytest.raises(ConfigError, match=r"trainer\.default_local_dir: got .* cannot be created"):
        tracking(directory)
