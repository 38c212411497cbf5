# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts in vLLM: new weights are those that it computes with, whatever trains them.

What it does not prove: experts on accelerators, which other kernels compute.
"""

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from quadriga.models.weight_names import weight_buffers
from quadriga.rollout.interface import SamplingParams
from quadriga.weight_sync import CopiedWeights
from small_models import VOCAB, greedy, save
from small_runs import require_run

PROMPTS = [[5, 6, 7], [8], [2 + number * 7 % 250 for number in range(100)]]
SIZES = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 2,
    "num_key_value_heads": 2, "head_dim": 32, "vocab_size": VOCAB, "max_position_embeddings": 512, "eos_token_id": 1,
    "pad_token_id": 0, "bos_token_id": None, "initializer_range": 0.2, "tie_word_embeddings": False,
    "num_experts_per_tok": 2, "moe_intermediate_size": 48,
}  # fmt: skip
"""An expert's width is padded for a CPU."""
FAMILIES = {
    "qwen2_moe": {"num_experts": 4, "shared_expert_intermediate_size": 64, "mlp_only_layers": [0]},
    "qwen3_moe": {"num_experts": 4, "norm_topk_prob": True},
    "glm4_moe": {
        "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1,
        "partial_rotary_factor": 0.5,
    },
    "mixtral": {"num_local_experts": 4},
}  # fmt: skip
COMMON = (
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
    "actor_rollout_ref.actor.optim.eps=1e-3",
)
MEGATRON = (
    "actor_rollout_ref.actor.strategy=megatron",
    "actor_rollout_ref.actor.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.pipeline_model_parallel_size=2",
    "actor_rollout_ref.actor.expert_parallel_size=2",
)


def mixture(family: str, seed: int) -> PreTrainedModel:
    """A random model; what a router adds to its scores is random, too."""
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **SIZES, **FAMILIES[family])
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    for buffer in weight_buffers(model).values():
        torch.nn.init.normal_(buffer, std=0.1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_new_weights_are_used_at_once(
    family: str, start: Callable[..., Any], tmp_path: Path
) -> None:
    """There and back: experts and routers, greedy tokens of transformers, and their log-probabilities."""
    engine = start(path=save(mixture(family, 0), tmp_path))
    try:
        for version, seed in enumerate((1, 0), start=1):
            model = mixture(family, seed)
            CopiedWeights().publish(
                [*model.named_parameters(), *weight_buffers(model).items()], engine, version
            )
            likeliest = [SamplingParams(max_tokens=16, temperature=0.0)] * len(PROMPTS)
            for prompt, found in zip(
                PROMPTS, engine.generate_batch(PROMPTS, likeliest), strict=True
            ):
                tokens, log_probs = greedy(model, prompt, 16)
                assert found.token_ids == tokens
                assert found.log_probs == pytest.approx(log_probs, abs=1e-4)
    finally:
        engine.close()


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, list[dict[str, float]]]:
    """A folder with a Qwen3-MoE, and the metrics of a run in one process, trained by FSDP2's engine."""
    path = save(mixture("qwen3_moe", 0), tmp_path_factory.mktemp("experts"))
    lines, _ = require_run("vllm", path, tmp_path_factory.mktemp("one"), *COMMON)
    return path, lines


def test_a_run_computes_with_what_it_trains(alone: tuple[str, list[dict[str, float]]]) -> None:
    """In each of three steps log-probabilities are the trainer's, to rounding."""
    assert all(line["rollout/log_prob_diff_max"] < 1e-4 for line in alone[1])


@pytest.mark.slow
@pytest.mark.skipif(
    find_spec("megatron") is None, reason="no megatron-core beside vLLM: pip install '.[megatron]'"
)
def test_megatron_publishes_to_other_processes(
    alone: tuple[str, list[dict[str, float]]], tmp_path: Path
) -> None:
    """Tensor, pipeline and expert parallel on four ranks, to a pool of two that hold an engine together. A publication
    whose fingerprints differ ends a run; and metrics are those of one process, to 1e-4."""
    path, expected = alone
    keys = (
        *MEGATRON,
        "trainer.backend=ray",
        "trainer.n_gpus_per_node=4",
        "trainer.placement={actor: training, ref: training, rollout: generation}",
        "trainer.resource_pools.generation=[2]",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
        "actor_rollout_ref.rollout.mode=async",
    )
    found, told = require_run("vllm", path, tmp_path, *COMMON, *keys)
    assert "Megatron-core" in told and "in the processes of 2 ranks, which hold it together" in told
    for ours, theirs in zip(found, expected, strict=True):
        for name in ours.keys() & theirs.keys() - {"actor/packed_tokens"}:
            if not name.startswith(("balance/", "timing", "perf/")):
                close = 1e-5 if "log_prob_diff" in name else 2e-6  # differences are rounding alone
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=close), name
