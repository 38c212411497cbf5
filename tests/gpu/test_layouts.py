# SPDX-License-Identifier: Apache-2.0
"""NCCL and Megatron-core on one GPU, and on two each way to spread a model over them, against one whole model."""

from pathlib import Path

import pytest
import torch

from quadriga.config.layout import Layout
from quadriga.engines.fsdp.engine import Memory
from tests.gpu.nccl_layouts import HAS_MEGATRON, LAYOUTS, learnt, run
from tests.gpu.test_cuda import make_engine, make_model
from tests.numerics.launching import free_ports, run_ranks

pytestmark = pytest.mark.gpu

PROGRAM = Path(__file__).with_name("nccl_layouts.py")


def test_layouts_on_nccl(tmp_path: Path) -> None:
    """After an optimizer step. Does not show it for more than two GPUs, nor in bfloat16."""
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU here: no layout was tested on NCCL")
    make_model().save_pretrained(tmp_path / "model")
    run_ranks(PROGRAM, 2, tmp_path, num_ports=len(LAYOUTS))
    found = [torch.load(tmp_path / f"{rank}.pt") for rank in range(2)]
    assert list(found[0]) == list(found[1]) == list(LAYOUTS)
    require_agreement(
        {f"{name}, rank {rank}": one for rank in range(2) for name, one in found[rank].items()}
    )


@pytest.mark.skipif(not HAS_MEGATRON, reason="megatron-core is not installed")
@pytest.mark.parametrize("offloads", [False, True])
def test_megatron_on_one_gpu(tmp_path: Path, offloads: bool) -> None:
    """After an optimizer step, and after a checkpoint. Does not show it with Transformer Engine."""
    make_model().save_pretrained(tmp_path / "model")
    (port,) = free_ports(1)
    require_agreement(
        {
            "megatron": run(
                tmp_path,
                0,
                port,
                Layout(uses_megatron_modules=True),
                Memory(offload_weights=offloads),
                1,
            )
        }
    )


def require_agreement(found: dict[str, dict[str, torch.Tensor]]) -> None:
    """Log-probs and weights by layout are those of a model that lies whole on one device."""
    expected = learnt(make_engine("cuda"))
    for layout, values in found.items():
        assert values.keys() == expected.keys()
        for name, value in values.items():
            bound = 1e-3 if name == "log-probs" else 1e-4
            torch.testing.assert_close(
                value, expected[name], atol=bound, rtol=bound, msg=f"{layout}: {name}"
            )
