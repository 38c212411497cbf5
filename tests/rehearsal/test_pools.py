# SPDX-License-Identifier: Apache-2.0
"""Ranks of all pools of a node see different GPUs, whatever Ray is told about CUDA_VISIBLE_DEVICES."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.limits import PROGRAM_S

PROGRAM = Path(__file__).with_name("pools_on_ray.py")


@pytest.mark.parametrize(
    ("visible", "noset"),
    [("4,5,6,7", "1"), ("GPU-aa,GPU-bb,GPU-cc,GPU-dd", "1"), ("", "1"), ("4,5,6,7", "0")],
)
def test_pools_share_no_gpu(visible: str, noset: str) -> None:
    """With RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES, Ray itself would show all GPUs to each."""
    command = [sys.executable, str(PROGRAM), visible, noset]
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=PROGRAM_S, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    seen = json.loads(done.stdout.splitlines()[-1])
    assert [len(devices.split(",")) for devices in seen] == [1, 1, 2]
    assert sorted(",".join(seen).split(",")) == (visible or "0,1,2,3").split(",")
