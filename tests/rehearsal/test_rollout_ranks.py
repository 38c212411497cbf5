# SPDX-License-Identifier: Apache-2.0
"""Ranks that train and generate with `native` on the stand-in: graphs of a group, and memory while the models train.

It does not show that NCCL's collectives can be captured, nor what the allocator keeps.
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from quadriga.rollout.native.graphs import GraphedSteps
from tests.gpu.test_cuda import make_model
from tests.numerics.launching import run_ranks
from tests.rehearsal import rollout_ranks
from tests.rehearsal.stand_in import StandIn


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    folder = tmp_path_factory.mktemp("ranks")
    make_model().save_pretrained(folder / "model")
    run_ranks(Path(rollout_ranks.__file__), rollout_ranks.RANKS, folder, num_ports=3)
    return [
        json.loads((folder / f"rank{rank}.json").read_text()) for rank in range(rollout_ranks.RANKS)
    ]


def test_groups_replay_graphs(ranks: list[dict[str, Any]]) -> None:
    """Tokens are those without graphs, and all ranks capture at the same steps."""
    leader, member = (rank["group"] for rank in ranks)
    assert leader["tokens, True"] == leader["tokens, False"]
    for found in (leader, member):
        assert found["captured, True"] >= 3 and found["replayed, True"] > 30
        assert found["captured, False"] == 0
    assert member["captured, True"] == leader["captured, True"]
    assert member["replayed, True"] == leader["replayed, True"]


@pytest.mark.parametrize("where", ["sharded", "sharded group"])
def test_no_copy_of_the_weights_through_training(ranks: list[dict[str, Any]], where: str) -> None:
    """The engine's weights are on the device from a publication until the end of the generation."""
    num_bytes = sum(parameter.numel() for parameter in make_model().parameters()) * 2
    num_bytes //= rollout_ranks.RANKS if where == "sharded group" else 1
    for rank in ranks:
        found = rank[where]
        freed = found["with weights"] - found["while training"]
        assert num_bytes <= freed < 1.3 * num_bytes
        assert "decode steps in CUDA graphs" in found["rollout"]
    # Members of a group return no responses.
    first, second = ranks[0][where]["responses"]
    assert first == second


def test_ranks_copy_the_weights_in_turn(ranks: list[dict[str, Any]]) -> None:
    """For engines that generate meanwhile in other processes: each tensor from one of the ranks."""
    names = [name for name, _ in make_model().named_parameters()]
    copied = [rank["sharded"]["copied"] for rank in ranks]
    assert copied == [names[rank :: rollout_ranks.RANKS] for rank in range(rollout_ranks.RANKS)]
    assert [rank["sharded"]["fingerprints"] for rank in ranks] == copied


def test_graphs_belong_to_tensors_and_not_to_addresses(stand_in: StandIn) -> None:
    """New memory may be where the old memory was, on some ranks of a group and not on others."""
    memory = torch.zeros(2, 2, 4, 8)
    caches = [SimpleNamespace(keys=[memory], values=[memory], lengths=[4], room=4) for _ in "ab"]
    plan = SimpleNamespace(prefixes=caches[0], responses=caches[1])
    steps = GraphedSteps(SimpleNamespace())
    for _ in range(2):
        steps.logits(plan, [1], [1])
    assert steps.num_steps == 2
    caches[1].keys = [memory.view_as(memory)]
    steps.logits(plan, [1], [1])
    assert steps.num_steps == 1
