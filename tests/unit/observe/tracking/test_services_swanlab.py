# SPDX-License-Identifier: Apache-2.0
"""The real swanlab, offline: it takes metrics, samples and configuration.

Of its binary file only the presence of the names is read; that the service shows the values well is not tried here.
"""

import pytest

pytest.importorskip("swanlab", reason="needs swanlab: pip install -e '.[swanlab]'")

from quadriga.observe.tracking.services import SwanlabBackend


def test_an_offline_run_and_a_second_one(make_run, samples, monkeypatch):
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    run = make_run()
    first = SwanlabBackend(run)
    first.log({"critic/rewards/mean": 0.25}, 1)
    first.log_samples(samples, 1)
    first.close()
    second = SwanlabBackend(make_run(resume_step=1))
    second.log({"critic/rewards/mean": 0.5}, 2)
    second.close(has_failed=True)
    texts = {file.read_text() for file in run.directory.glob("swanlog/run-*/media/text/*")}
    assert "input: And now?\noutput: 7\nscore: 0.0" in texts
    records = [file.read_bytes() for file in run.directory.glob("swanlog/run-*/run-*.swanlab")]
    assert len(records) == 2 and all(b"critic/rewards/mean" in record for record in records)
    configs = [file.read_text() for file in run.directory.glob("swanlog/run-*/files/config.yaml")]
    assert configs and all("numbers" in config for config in configs)
