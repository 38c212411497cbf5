# SPDX-License-Identifier: Apache-2.0
"""The estimators that read `sum_pi_squared`: from the forward pass to the advantages."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

TEMPERATURE = 0.7
RECORDING = """
import torch
from quadriga.algorithms.advantages import optimal_token_baseline


def recording(token_level_rewards, response_mask, uid, old_log_probs, sum_pi_squared, input_ids, attention_mask):
    read = [response_mask, old_log_probs, sum_pi_squared, input_ids, attention_mask]
    torch.save([column.clone() for column in read], {path!r})
    weights = torch.ones_like(old_log_probs)
    return optimal_token_baseline(token_level_rewards, response_mask, uid, old_log_probs, sum_pi_squared, weights)
"""


@pytest.mark.parametrize("estimator", ["optimal_token_baseline", "tir_optimal_token_baseline"])
def test_reward_rises(estimator: str, train: Callable[..., Path], metric_lines: Callable) -> None:
    """Twelve steps of one update each: for another estimator they would take no pass that has these numbers."""
    lines: list[dict[str, Any]] = metric_lines(
        train(
            f"algorithm.adv_estimator={estimator}",
            "trainer.total_training_steps=12",
            "data.train_batch_size=8",
            "actor_rollout_ref.rollout.n=8",
            "actor_rollout_ref.actor.optim.lr=1e-2",
        )
    )
    rewards = [line["critic/rewards/mean"] for line in lines]
    assert rewards[0] < 0.1 and sum(rewards[-3:]) / 3 > 0.5


def test_squares_are_those_of_the_whole_distribution(
    train: Callable[..., Path], home: Path, tmp_path: Path
) -> None:
    """What the estimator reads at the first step is what transformers' logits give, at the temperature of sampling."""
    file, path = tmp_path / "estimator.py", tmp_path / "read.pt"
    file.write_text(RECORDING.format(path=str(path)))
    train(
        f"algorithm.adv_estimator={file}:recording",
        f"actor_rollout_ref.rollout.temperature={TEMPERATURE}",
        "trainer.total_training_steps=1",
        "actor_rollout_ref.rollout.n=3",
    )
    mask, log_probs, squares, tokens, attention = torch.load(path)
    model = AutoModelForCausalLM.from_pretrained(home / "model", dtype=torch.float32)
    positions = (attention.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        logits = model(input_ids=tokens, attention_mask=attention, position_ids=positions).logits
    width = mask.shape[1]
    distribution = (logits[:, -width - 1 : -1] / TEMPERATURE).log_softmax(-1)
    chosen = distribution.gather(-1, tokens[:, -width:, None])[..., 0]
    is_ours = mask.bool()
    torch.testing.assert_close(log_probs[is_ours], chosen[is_ours], atol=1e-5, rtol=1e-5)
    expected = distribution.exp().square().sum(-1)
    torch.testing.assert_close(squares[is_ours], expected[is_ours], atol=1e-7, rtol=1e-4)
    assert bool((squares[~is_ours] == 0).all()) and float(squares[is_ours].std()) > 0
