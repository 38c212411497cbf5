# SPDX-License-Identifier: Apache-2.0
"""Which parts compute in Megatron's layers, and why; experts in grouped products are those in a loop.

What it does not prove: the same with Transformer Engine, which needs CUDA; in layouts.py stand-ins take its place.
"""

from importlib import import_module
from typing import Any

import pytest
import torch
from transformers.models.qwen3_moe import Qwen3MoeConfig

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture
def model() -> Any:
    """The module, where Megatron-core is installed."""
    return import_module("quadriga.engines.megatron.model")


def config_of(model: Any, dtype: torch.dtype, width: int) -> Any:
    sizes = {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": 2,
    }
    mixture = Qwen3MoeConfig(
        **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=width
    )
    return model.transformer_config(mixture, dtype, CPU, {})


def test_grouped_products_are_the_loop(model: Any) -> None:
    """Values and all gradients; an expert without tokens, too."""
    with import_module("quadriga.engines.megatron.cpu").megatron_context(CPU):
        experts = model.Experts(4, config_of(model, torch.float32, 20))
    assert experts.use_grouped_products
    for parameter in experts.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    tokens, weights, found = (
        torch.randn(10, 32, requires_grad=True),
        torch.rand(10, requires_grad=True),
        [],
    )
    wanted = (tokens, weights, *experts.parameters())
    for experts.use_grouped_products in (True, False):
        values, _ = experts(tokens, torch.tensor([3, 0, 5, 2]), weights)
        found.append((values, *torch.autograd.grad(values.square().sum(), wanted)))
    for grouped, in_a_loop in zip(*found, strict=True):
        assert grouped.abs().max() > 0
        torch.testing.assert_close(grouped, in_a_loop, rtol=1e-5, atol=1e-5)


def test_why_experts_compute_one_after_the_other(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert not model.loop_reason_of(config_of(model, torch.bfloat16, 24), CPU)
    assert "32 and 20 numbers are no multiples of 16 bytes" in model.loop_reason_of(
        config_of(model, torch.bfloat16, 20), CPU
    )
    for capability, reason in (((8, 0), ""), ((7, 5), "compute capability 8.0")):
        monkeypatch.setattr(
            torch.cuda, "get_device_capability", lambda device, found=capability: found
        )
        assert reason in model.loop_reason_of(config_of(model, torch.float32, 20), CUDA)
    assert model.loop_reason_of(config_of(model, torch.float32, 20), CUDA)


def test_linear_modules_and_their_reason(model: Any) -> None:
    """Transformer Engine's where it is installed and the device is its own."""
    for device, reason in (
        (CPU, "Transformer Engine is for CUDA"),
        (CUDA, "Transformer Engine is not installed"),
    ):
        column, _, told = model.linear_modules(device)
        assert column is model.ColumnParallelLinear and reason in told
