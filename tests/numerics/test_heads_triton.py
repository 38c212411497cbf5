# SPDX-License-Identifier: Apache-2.0
"""The CUDA kernels of the vocabulary head, of norms, gated MLPs and decode steps, without a GPU: Triton's interpreter
computes them.

What this does not prove: that they are fast, or that a GPU's compiler makes of them what the interpreter does;
tests/gpu is for that.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from quadriga.models.heads import HAS_TRITON
from tests.limits import PROGRAM_S


@pytest.mark.parametrize(
    ("program", "num_cases"), [("heads_interpreted.py", 7), ("decode_interpreted.py", 49)]
)
@pytest.mark.skipif(
    not HAS_TRITON,
    reason="the package triton is not installed, so its kernels were not interpreted",
)
def test_kernels_compute_what_torch_does(program: str, num_cases: int) -> None:
    """Of the head values and all gradients: parts of the vocabulary, ragged tiles, bias, temperature, half precision,
    and what is asked for beside log-probs. Of a decode step norms, rotary positions, gates, attention in one part and
    several, sampling, and whole responses."""
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("agrees") == num_cases, done.stdout
