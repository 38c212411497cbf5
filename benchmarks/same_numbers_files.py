# SPDX-License-Identifier: Apache-2.0
"""The files from which all runs of `same_numbers.py` start.

FOLDER/            a playground, its supervised model and a reward model, trained for a few steps
FOLDER/studio      a tiny vision-language model, pictures and a reward function
FOLDER/calculator  a tiny model that calls a tool, sums, the tool and a reward function
FOLDER/of_verl.py  a reward function, an estimator, a loss and a reward manager written for verl
"""

from pathlib import Path

from tests.e2e.calculator import write_calculator
from tests.e2e.colors import write_studio

OF_VERL = """
from collections import defaultdict
from typing import Optional

import numpy as np
import torch

import verl.utils.torch_functional as verl_F
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.utils.reward_score import default_compute_score
from verl.workers.config import ActorConfig
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    answer = solution_str.strip()
    by_verl = default_compute_score("openai/gsm8k", f"#### {answer}", str(ground_truth))
    return {"score": float(answer == str(ground_truth)), "by_verl": by_verl}


@register_adv_est("mean_of_the_prompt")
def mean_of_the_prompt(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Optional[AlgoConfig] = None,
    **kwargs,
):
    scores = token_level_rewards.sum(dim=-1)
    rows_of = defaultdict(list)
    for row, uid in enumerate(index):
        rows_of[uid].append(row)
    for rows in rows_of.values():
        scores[rows] = scores[rows] - scores[rows].mean()
    advantages = scores.unsqueeze(-1) * response_mask
    return advantages, advantages


@register_policy_loss("clipped")
def clipped(
    old_log_prob,
    log_prob,
    advantages,
    response_mask,
    loss_agg_mode="token-mean",
    config: ActorConfig = None,
    **kwargs,
):
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0))
    bounded = ratio.clamp(1 - config.clip_ratio, 1 + config.clip_ratio)
    losses = torch.maximum(-advantages * ratio, -advantages * bounded)
    pg_loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)
    return pg_loss, {"actor/mean_ratio": verl_F.masked_mean(ratio, response_mask).detach().item()}


@register("adding")
class AddingRewardManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, bonus=0.0, **kwargs):
        self.tokenizer = tokenizer
        self.compute_score = compute_score or default_compute_score
        self.bonus = bonus

    def __call__(self, data: DataProto, return_dict: bool = False):
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        reward_extra_info = defaultdict(list)
        for i in range(len(data)):
            data_item = data[i]
            prompt_length = data_item.batch["prompts"].shape[-1]
            length = int(data_item.batch["attention_mask"][prompt_length:].sum())
            response_ids = data_item.batch["responses"][:length]
            result = self.compute_score(
                data_source=data_item.non_tensor_batch["data_source"],
                solution_str=self.tokenizer.decode(response_ids, skip_special_tokens=True),
                ground_truth=data_item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=data_item.non_tensor_batch.get("extra_info"),
            )
            reward_tensor[i, length - 1] = result["score"] + self.bonus * length
            reward_extra_info["by_verl"].append(result["by_verl"])
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": reward_extra_info}
        return reward_tensor
"""


def of_verl(folder: Path) -> tuple[str, ...]:
    """Overrides that take everything from `of_verl.py`."""
    file = folder / "of_verl.py"
    return (
        f"custom_reward_function.path={file}",
        f"algorithm.adv_estimator={file}:mean_of_the_prompt",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={file}:clipped",
        f"actor_rollout_ref.model.external_lib={file}",
        "reward_model.reward_manager=adding",
        "reward_model.reward_kwargs={bonus: 0.01}",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    )


def write_small_tasks(folder: Path) -> None:
    """Write what does not belong to the playground."""
    for name, write in (("studio", write_studio), ("calculator", write_calculator)):
        (folder / name).mkdir()
        write(folder / name)
    (folder / "of_verl.py").write_text(OF_VERL, encoding="utf-8")
