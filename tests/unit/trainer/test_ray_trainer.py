# SPDX-License-Identifier: Apache-2.0
"""The order of a step's parts, where it decides numbers."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from quadriga.algorithms.kl import get_kl_controller
from quadriga.algorithms.registry import EstimatorMemory, choose_estimator
from quadriga.config import Config
from quadriga.observe.timing import PhaseTimer
from quadriga.protocol import DataProto
from quadriga.trainer.balance import SequenceCost
from quadriga.trainer.ray_trainer import RayPPOTrainer


class Given(RayPPOTrainer):
    """The loop without workers: a step over a batch that is there already, which teaches nobody anything."""

    def __init__(self, config: Config, batch: DataProto) -> None:
        self.config, self.given = config, batch
        self.reference = self.critic = self.teacher = None
        self.filters_groups, self.num_ranks, self.cost, self.global_steps = (
            True,
            1,
            SequenceCost(),
            1,
        )
        self.needs = SimpleNamespace(old_log_probs=False)
        batch.batch["position_ids"] = batch.batch["input_ids"] = batch.batch["attention_mask"]
        self.timer, self.metrics = PhaseTimer(), {}
        self.initial_steps = 0
        self.memory = EstimatorMemory()
        self.kl_controller = get_kl_controller(config.algorithm.kl_ctrl)
        self.estimator = choose_estimator("grpo", {}, dict(config.algorithm)).function
        self.memory = EstimatorMemory()

    def sample_groups(self) -> DataProto:
        return self.given


def test_a_rejected_token_is_charged_and_measured_before_it_is_rejected() -> None:
    """By hand: the one token of the first response is 1 nat from the reference, and is rejected (its ratio is e)."""
    algorithm = {
        "use_kl_in_reward": True,
        "kl_ctrl": {"type": "adaptive", "kl_coef": 0.2, "target_kl": 0.1, "horizon": 10},
        "rollout_correction": {"rollout_rs": "token_k1", "rollout_rs_threshold": 2.0},
    }
    log_probs = torch.tensor([[-1.0], [-1.0]])
    batch = DataProto.from_dict(
        tensors={
            "attention_mask": torch.ones(2, 2, dtype=torch.int64),
            "response_mask": torch.ones(2, 1, dtype=torch.int64),
            "token_level_scores": torch.ones(2, 1),
            "old_log_probs": log_probs,
            "ref_log_prob": torch.tensor([[-2.0], [-1.0]]),
            "rollout_log_probs": torch.tensor([[-2.0], [-1.0]]),
        },
        non_tensors={"uid": np.array(["a", "b"], dtype=object)},
    )
    trainer = Given(Config(algorithm=algorithm, trainer={"critic_warmup": 1}), batch)
    done = trainer.step().batch
    assert done["token_level_rewards"].flatten().tolist() == pytest.approx([0.8, 1.0])
    assert done["response_mask"].tolist() == [[0], [1]]
    assert trainer.metrics["actor/reward_kl_penalty"] == pytest.approx(0.5)
    # 5 times the target is an error of 4, cut to 0.2; two responses.
    assert trainer.kl_controller.value == pytest.approx(0.2 * (1 + 0.2 * 2 / 10))


def test_a_row_without_a_score_is_neither_learned_from_nor_part_of_a_baseline() -> None:
    """Its group of three is one of two, whose standard deviation is that of 1 and 0."""
    log_probs = torch.full((3, 1), -1.0)
    batch = DataProto.from_dict(
        tensors={
            "attention_mask": torch.ones(3, 2, dtype=torch.int64),
            "response_mask": torch.ones(3, 1, dtype=torch.int64),
            "token_level_scores": torch.tensor([[1.0], [0.0], [0.0]]),
            "old_log_probs": log_probs,
            "rollout_log_probs": log_probs,
        },
        non_tensors={
            "uid": np.array(["a"] * 3, dtype=object),
            "reward_extra": np.array([{}, {"unscored": True}, {}], dtype=object),
        },
    )
    done = Given(Config(trainer={"critic_warmup": 1}), batch).step().batch
    assert done["response_mask"].flatten().tolist() == [1, 0, 1]
    expected = [0.5**0.5, 0.0, -(0.5**0.5)]
    assert done["advantages"].flatten().tolist() == pytest.approx(expected, abs=1e-5)
