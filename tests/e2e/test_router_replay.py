# SPDX-License-Identifier: Apache-2.0
"""A mixture of experts learns, and its update repeats choices of experts that were made before."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast
from transformers.models.qwen3_moe import Qwen3MoeConfig

REPLAY = "actor_rollout_ref.actor.router_replay"
ASYNC = ("actor_rollout_ref.rollout.mode=async", "data.return_raw_chat=True")
DIFFERS, DIFFERENCE = "actor/router_replay_differs", "rollout/log_prob_diff_mean"


@pytest.fixture
def experts(home: Path, tmp_path: Path) -> str:
    """The option with a mixture of 4 experts in the place of the model."""
    tokenizer: PreTrainedTokenizerFast = AutoTokenizer.from_pretrained(home / "model")
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        moe_intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        max_position_embeddings=256,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id,
    )
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
        tmp_path / "experts"
    )
    tokenizer.save_pretrained(tmp_path / "experts")
    return f"actor_rollout_ref.model.path={tmp_path / 'experts'}"


def test_in_float32_nothing_differs(
    experts: str, train: Callable[..., Path], metric_lines: Callable[..., list[dict[str, Any]]]
) -> None:
    """So a run with replay is one without, whatever leads the responses; and the choices did travel."""
    options = (
        experts,
        "trainer.total_training_steps=3",
        "actor_rollout_ref.actor.router_aux_loss_coef=0.01",
    )
    own = metric_lines(train(*options, run="off"))
    assert all(DIFFERS not in line for line in own)
    for name, changes in (
        ("batch", (f"{REPLAY}=rollout",)),
        ("tasks", (f"{REPLAY}=rollout", *ASYNC)),
    ):
        for line, expected in zip(
            metric_lines(train(*options, *changes, run=name)), own, strict=True
        ):
            assert line[DIFFERS] == pytest.approx(0.0, abs=0.01)
            for metric in (
                "critic/score/mean",
                "actor/grad_norm",
                "actor/router_entropy",
                "actor/router_aux_loss",
            ):
                assert line[metric] == pytest.approx(expected[metric], rel=1e-3), metric


def test_in_bfloat16_it_brings_rollout_and_training_no_farther_apart(
    experts: str, train: Callable[..., Path], metric_lines: Callable[..., list[dict[str, Any]]]
) -> None:
    """How often choices differ there is measured by benchmarks/experts.py: of a model so small hardly ever."""
    options = (
        experts,
        "trainer.total_training_steps=1",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16",
    )
    off, on = (
        (*metric_lines(train(*options, f"{REPLAY}={mode}", run=mode)),)[0]
        for mode in ("off", "rollout")
    )
    assert 0 <= on[DIFFERS] < 0.1
    assert 0 < on[DIFFERENCE] <= 1.01 * off[DIFFERENCE]


def test_choices_of_the_pass_for_old_log_probs(
    experts: str, train: Callable[..., Path], metric_lines: Callable[..., list[dict[str, Any]]]
) -> None:
    """The pass is made though one step a batch needs none; of the first of several steps no choice differs."""
    learn = ("actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.actor.ppo_epochs=3")
    for steps, differ in (((), False), (learn, True)):
        options = (experts, "trainer.total_training_steps=1", f"{REPLAY}=old_log_prob", *steps)
        (line,) = metric_lines(train(*options, run=f"{len(steps)}"))
        assert (line[DIFFERS] > 0) == differ
