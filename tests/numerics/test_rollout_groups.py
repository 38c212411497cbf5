# SPDX-License-Identifier: Apache-2.0
"""Rollout groups generate what one process does, from any training layout, with no more memory than shards and bucket.

What it does not prove: the same on nccl, nor what the gloo library itself allocates.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from quadriga.models.load import load_causal_lm
from quadriga.rollout import NativeEngine
from tests.numerics import rollout_groups, whole_model
from tests.numerics.launching import run_ranks
from tests.numerics.rollout_groups import CASES, PROMPTS, conversations, plain, sampling


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two random models whose sizes nothing divides, and what the groups made of them."""
    folder = tmp_path_factory.mktemp("groups")
    for name, is_tied in (("tied", True), ("untied", False)):
        torch.manual_seed(2)
        config = Qwen2Config(
            hidden_size=64,
            intermediate_size=330,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            vocab_size=997,
            tie_word_embeddings=is_tied,
        )
        model = Qwen2ForCausalLM(config)
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.15)
        model.save_pretrained(folder / name)
    run_ranks(Path(rollout_groups.__file__), 4, folder, num_ports=2)
    return folder


@pytest.fixture(scope="module")
def alone(folder: Path) -> dict[str, dict[str, Any]]:
    """What one process generates with each model."""
    found = {}
    for name in ("tied", "untied"):
        engine = NativeEngine(
            load_causal_lm(folder / name, dtype=torch.float32), eos_token_ids=(0,), max_num_seqs=4
        )
        batch = plain(engine.generate_batch(PROMPTS, sampling()))
        found[name] = {"sync": batch, "async": plain(asyncio.run(conversations(engine)))}
        engine.close()
    return found


def results(folder: Path, case: str) -> list[dict[str, Any]]:
    return [torch.load(folder / f"{case}.{rank}.pt") for rank in range(CASES[case][0].world_size)]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize("case", CASES)
def test_tokens_are_those_of_one_process(
    folder: Path, alone: dict[str, Any], case: str, mode: str
) -> None:
    """Greedy and sampled ones; all ranks of a group have compared theirs. Requests may join, and be given up."""
    _, size, model = CASES[case]
    expected = alone[model][mode]
    found = [one[mode] for one in results(folder, case)[::size]]
    assert found
    for completions in found:
        for (tokens, log_probs, reason), (own, transformers_log_probs, own_reason) in zip(
            completions, expected, strict=True
        ):
            assert (tokens, reason) == (own, own_reason)
            assert log_probs == pytest.approx(transformers_log_probs, abs=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_a_sync_takes_a_bucket_and_the_shards(folder: Path, case: str) -> None:
    """Within 5 % of the shards of both layouts and a bucket of 1/16 of the model. The embedding goes in slices."""
    for one in results(folder, case):
        # Of the cache: keys and values of three layers, of a head of 16 at least.
        assert one["token"] == 2 * 3 * max(1, 2 // CASES[case][1]) * 16 * 4
        assert one["shards"] < one["whole"] / CASES[case][1] * 1.1
        both = one["held"] + one["shards"]
        assert both + one["again"] <= (both + one["bucket"]) * 1.05
        # The plan and the first messages take some kilobytes, whatever the model.
        assert one["held"] + one["first"] <= (both + one["bucket"]) * 1.05 + 16_384
        if not one["shared"]:
            assert one["first"] > one["shards"] + one["bucket"] / 2, "the measure sees the bucket"
            assert one["sliced"] >= 1


@pytest.mark.parametrize("case", CASES)
def test_engines_that_cut_whole_tensors_get_a_bucket_of_them(folder: Path, case: str) -> None:
    """From the parts of all ranks, bit for bit; beside a bucket the largest tensor, and those that end where
    it begins. Where an engine of one rank raises, the stream goes on for those of the others."""
    found = [one["streamed"] for one in results(folder, case)]
    largest, others, bucket = 997 * 64 * 4, 2 * 330 * 64 * 4, results(folder, case)[0]["bucket"]
    for one in found:
        assert one["is_equal"]
        assert one["peak"] <= (bucket + largest + others) * 1.05 + 16_384
    assert [one["version"] for one in found] == [*[3] * (len(found) - 1), -1]
    assert [one.get("refused") is not None for one in found] == [*[False] * (len(found) - 1), True]


def test_equal_layouts_share(folder: Path) -> None:
    """Each shard is the trainer's own memory; where every rank has all weights, those that are cut by rows."""
    assert {(one["shared"], one["again"] < 100_000) for one in results(folder, "tp 2 -> tp 2")} == {
        (3 * 12 + 3, True)
    }
    assert all(one["shared"] == 3 * 10 + 2 for one in results(folder, "replicas 4 -> tp 2"))


def test_a_member_that_is_lost_is_named(folder: Path) -> None:
    """By its group, in messages and in sums."""
    told = torch.load(folder / "lost.pt")
    assert len(told) == 2
    assert all("rank 0 of rollout group 0 (ranks 0, 1)" in one for one in told)


@pytest.mark.slow
def test_no_rank_has_the_whole_model(tmp_path: Path) -> None:
    """From loading to the second sync; a rank that asks for all weights is over the limit."""
    config = LlamaConfig(
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=2000,
    )
    LlamaForCausalLM(config).save_pretrained(tmp_path)
    run_ranks(Path(whole_model.__file__), whole_model.RANKS, tmp_path, num_ports=1)
    found = [
        json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(whole_model.RANKS)
    ]
    assert any(one["refused"] for one in found)
    for one in found:
        assert 100e6 < one["whole"] < one["peak"] <= one["limit"]
        assert (
            one["bucket"] / 2
            < one["sync"]
            <= one["bucket"] + 0.05 * (one["bucket"] + one["shards"])
        )
