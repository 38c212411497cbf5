# SPDX-License-Identifier: Apache-2.0
"""The package's names exist, and the light ones load nothing heavy."""

import subprocess
import sys

import quadriga.observe as observe


def test_every_public_name_can_be_had():
    assert sorted(observe.__all__) == sorted(observe._HOMES)
    for name in observe.__all__:
        assert getattr(observe, name).__name__ == name


def test_metrics_tracking_and_probe_need_neither_torch_nor_a_tracker():
    script = (
        "import sys; from quadriga.observe import Metric, Tracking, probe_capabilities, PhaseTimer, waiting\n"
        "print(sorted({'torch', 'wandb', 'mlflow', 'swanlab', 'matplotlib', 'tensorboard'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
