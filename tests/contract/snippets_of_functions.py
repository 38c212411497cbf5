# SPDX-License-Identifier: Apache-2.0
"""Calls of `test_specification.py`: single functions of a step. `written_loop.py` has the whole loop."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from snippets import Place, snippet

from quadriga.config import Config


@snippet
def the_mask_of_responses(place: Place) -> None:
    from verl.trainer.ppo.ray_trainer import compute_response_mask

    assert compute_response_mask(place.batch()).tolist() == [[1, 1, 1], [1, 1, 0]] * 2


def graded(data: Any, return_dict: bool = False) -> Any:
    """A reward manager as a function: a point for each token with an odd number."""
    rewards = (data.batch["responses"] % 2).float()
    return (
        {"reward_tensor": rewards, "reward_extra_info": {"acc": [1.0] * len(data)}}
        if return_dict
        else rewards
    )


@snippet
def metrics_to_a_tracker(place: Place) -> None:
    from verl.utils.tracking import Tracking

    logger = Tracking(
        project_name="p", experiment_name="e", default_backend=["jsonl"], config={"a": {"b": 1}}
    )
    logger.log(data={"actor/loss": 1.0}, step=1)
    logger.close()
    (line,) = (place.folder / "outputs" / "p" / "e" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["actor/loss"] == 1.0


@snippet
def probabilities_of_two_engines(place: Place) -> None:
    from verl.utils.debug.metrics import calculate_debug_metrics

    batch = place.batch()
    batch.batch["rollout_log_probs"] = batch.batch["old_log_probs"].clone()
    batch.batch["rollout_log_probs"][0, 0] = 0.0
    batch.batch["old_log_probs"][1, 0] = -2.0
    found = calculate_debug_metrics(batch)
    assert found["training/rollout_probs_diff_max"] == pytest.approx(1 - np.exp(-1))
    assert found["training/rollout_probs_diff_valid"] == 1


@snippet
def rewards_by_a_manager(place: Place) -> None:
    from verl.trainer.ppo.reward import compute_reward

    reward_tensor, reward_extra_infos_dict = compute_reward(place.batch(), graded)
    assert reward_tensor.sum() == 6 and reward_extra_infos_dict == {"acc": [1] * 4}


@snippet
def a_penalty_in_the_reward(place: Place) -> None:
    from verl.trainer.ppo.core_algos import get_kl_controller
    from verl.trainer.ppo.ray_trainer import apply_kl_penalty, compute_response_mask

    batch = place.batch()
    batch.batch["response_mask"] = compute_response_mask(batch)
    control = get_kl_controller(Config(algorithm={"kl_ctrl": {"kl_coef": 0.2}}).algorithm.kl_ctrl)
    batch, metrics = apply_kl_penalty(batch, kl_ctrl=control, kl_penalty="kl")
    # Half a nat for each token, times 0.2.
    assert batch.batch["token_level_rewards"][0].tolist() == pytest.approx([-0.1, -0.1, 0.9])
    assert metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)


@snippet
def advantages_of_a_batch(place: Place) -> None:
    from verl.trainer.ppo.core_algos import AdvantageEstimator
    from verl.trainer.ppo.ray_trainer import compute_advantage

    config = Config().algorithm
    for estimator, expected in ((AdvantageEstimator.GRPO, 0.5), (AdvantageEstimator.GAE, None)):
        batch = place.batch()
        batch.batch["token_level_rewards"] = batch.batch["token_level_scores"]
        options = {"gamma": 1.0, "lam": 1.0, "num_repeat": 2, "norm_adv_by_std_in_grpo": False}
        batch = compute_advantage(batch, adv_estimator=estimator, **options, config=config)
        assert batch.batch["advantages"].shape == batch.batch["returns"].shape == (4, 3)
        if expected is not None:
            assert batch.batch["advantages"][0].tolist() == [expected] * 3


@snippet
def losses_by_their_functions(place: Place) -> None:
    from verl.trainer.ppo.core_algos import agg_loss, compute_value_loss

    mask = torch.tensor([[1, 1], [1, 0]])
    assert (
        float(agg_loss(loss_mat=torch.ones(2, 2), loss_mask=mask, loss_agg_mode="token-mean"))
        == 1.0
    )
    vf_loss, clipped = compute_value_loss(
        vpreds=torch.ones(2, 2),
        values=torch.zeros(2, 2),
        returns=torch.zeros(2, 2),
        response_mask=mask,
        cliprange_value=0.5,
        loss_agg_mode="token-mean",
    )
    assert (float(vf_loss), float(clipped)) == (0.5, 0.0)


@snippet
def metrics_of_a_step(place: Place) -> None:
    from verl.trainer.ppo.metric_utils import (
        compute_data_metrics,
        compute_throughout_metrics,
        compute_timing_metrics,
    )
    from verl.trainer.ppo.ray_trainer import compute_response_mask

    batch, seconds = place.batch(), {"step": 2.0, "gen": 0.5}
    batch.batch["response_mask"] = compute_response_mask(batch)
    for name in ("token_level_rewards", "advantages", "returns"):
        batch.batch[name] = batch.batch["token_level_scores"]
    found = compute_data_metrics(batch=batch, use_critic=True)
    assert (
        found["critic/score/mean"] == 0.5
        and found["response_length/max"] == 3
        and "critic/values/mean" in found
    )
    assert "critic/values/mean" not in compute_data_metrics(batch=batch, use_critic=False)
    times = compute_timing_metrics(batch=batch, timing_raw=seconds)
    assert times["timing_s/gen"] == 0.5 and times["timing_per_token_ms/gen"] == pytest.approx(50.0)
    speed = compute_throughout_metrics(batch=batch, timing_raw=seconds, n_gpus=2)
    assert speed["perf/total_num_tokens"] == 18 and speed["perf/throughput"] == 4.5


@snippet
def metrics_are_gathered(place: Place) -> None:
    from verl.utils.debug import marked_timer
    from verl.utils.metric import reduce_metrics
    from verl.utils.py_functional import append_to_dict

    metrics: dict[str, list[float]] = {}
    for loss in (1.0, 3.0):
        append_to_dict(metrics, {"actor/loss": loss, "actor/max": loss})
    assert reduce_metrics(metrics) == {"actor/loss": 2.0, "actor/max": 3.0}
    timing_raw: dict[str, float] = {}
    with marked_timer("gen", timing_raw, color="red"):
        pass
    assert timing_raw["gen"] >= 0.0
