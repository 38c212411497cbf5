# SPDX-License-Identifier: Apache-2.0
"""Weights from any layout of the trainer to rollouts in other processes: the same numbers, in no more than a bucket.

What it does not prove: the same on nccl, nor what the gloo library itself allocates, nor the memory of GPUs.
"""

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.config import Layout
from quadriga.engines.process_group import ALONE
from quadriga.models.load import load_causal_lm
from quadriga.weight_sync.broadcast import SHARES
from tests.numerics import weight_layouts
from tests.numerics.launching import run_ranks
from tests.numerics.weight_layouts import BUCKET_BYTES, CASES, ROLLOUTS, make_engine, published

# What a fingerprint and a header need beside, however large the model: a few rows of sums, and the names.
SMALL_THINGS = 256 << 10


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random models of 3 MiB with sizes that the processes do not divide, and what came of them."""
    folder = tmp_path_factory.mktemp("weights")
    for name, is_tied in (("tied", True), ("untied", False)):
        torch.manual_seed(5)
        config = LlamaConfig(
            hidden_size=104,
            intermediate_size=390,
            num_hidden_layers=10,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=431,  # an odd one; no tensor takes more than an eighth of the bucket
            max_position_embeddings=32,
            tie_word_embeddings=is_tied,
        )
        LlamaForCausalLM(config).save_pretrained(folder / name)
    run_ranks(Path(weight_layouts.__file__), 6, folder, num_ports=2)
    return folder


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, dict[str, Tensor]]:
    """What one process sends of each model."""
    models = {
        name: {
            key: parameter.detach()
            for key, parameter in load_causal_lm(
                folder / name, dtype=torch.bfloat16
            ).named_parameters()
        }
        for name in ("tied", "untied")
    }
    engine, ways = (
        make_engine(folder, "lora", Layout(), ALONE),
        ("lora", "lora beside", "lora alone"),
    )
    found = {way: {name: tensor.clone() for name, tensor in published(engine, way)} for way in ways}
    assert found["lora beside"].keys() == found["lora"].keys() | found["lora alone"].keys()
    return models | found


def memory(folder: Path, case: str) -> dict[int, dict[str, int]]:
    """What each process measured."""
    ranks = [*range(CASES[case][0].world_size), *ROLLOUTS]
    return {rank: json.loads((folder / f"{case}.{rank}.memory").read_text()) for rank in ranks}


@pytest.mark.parametrize("case", CASES)
def test_every_layout_sends_the_model(
    folder: Path, expected: dict[str, dict[str, Tensor]], case: str
) -> None:
    """Every weight under its name, bit for bit, also into a rollout of another dtype."""
    weights = expected[CASES[case][1]]
    for rank, dtype in zip(ROLLOUTS, (torch.bfloat16, torch.float32), strict=True):
        arrived = torch.load(folder / f"{case}.{rank}.pt")
        assert arrived.keys() == weights.keys()
        for name, tensor in weights.items():
            assert arrived[name].dtype == dtype
            assert torch.equal(arrived[name], tensor.to(dtype)), name


@pytest.mark.parametrize("case", CASES)
def test_no_more_than_a_bucket_is_alive(folder: Path, case: str) -> None:
    """Beyond the models, in every process; a whole copy in the same process takes several times as much."""
    for rank, told in memory(folder, case).items():
        assert told["peak"] <= BUCKET_BYTES + SMALL_THINGS, rank
        if rank == 0 and case not in ("replicas 2", "fsdp 2, lora alone"):
            assert told["whole copy"] > 2 * BUCKET_BYTES
            assert told["peak"] > BUCKET_BYTES // SHARES, "the measure sees the bucket"
