# SPDX-License-Identifier: Apache-2.0
"""Two GPUs and NCCL: each way to spread a model over them gives the log-probs and weights of one."""

from pathlib import Path

import pytest
import torch

from tests.gpu.nccl_layouts import LAYOUTS, learnt
from tests.gpu.test_cuda import make_engine, make_model
from tests.numerics.launching import run_ranks

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("nccl_layouts.py")


def test_layouts_on_nccl(tmp_path: Path) -> None:
    """After an optimizer step. Does not show it for more than two GPUs, nor in bfloat16."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here: no layout was tested on NCCL")
    make_model().save_pretrained(tmp_path / "model")
    run_ranks(PROGRAM, 2, tmp_path, num_ports=len(LAYOUTS))
    expected = learnt(make_engine("cuda"))
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        assert list(found) == list(LAYOUTS)
        for layout, values in found.items():
            assert values.keys() == expected.keys()
            for name, value in values.items():
                bound = 1e-3 if name == "log-probs" else 1e-4
                torch.testing.assert_close(value, expected[name], atol=bound, rtol=bound, msg=f"{layout}: {name}")
