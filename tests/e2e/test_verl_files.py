# SPDX-License-Identifier: Apache-2.0
"""Files in the shape of verl's examples, which import verl, run on a tiny model."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga_verl.shim import VARIABLE

pytestmark = pytest.mark.usefixtures("verl_names")
Lines = Callable[[Path], list[dict[str, Any]]]
Train = Callable[..., Path]

# One file that holds everything, as many recipes do; it is imported in all processes.
RECIPE = """
from collections import defaultdict
from typing import Any, Optional

import numpy as np
import torch
from omegaconf import DictConfig

import verl.utils.torch_functional as verl_F
from verl import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.core_algos import agg_loss, register_adv_est, register_policy_loss
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.reward_score import default_compute_score
from verl.utils.reward_score.math import last_boxed_only_string, remove_boxed
from verl.workers.config import ActorConfig
from verl.workers.reward_manager import register
from verl.workers.reward_manager.abstract import AbstractRewardManager


def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert remove_boxed(last_boxed_only_string("so \\\\boxed{7}")) == "7"
    exact = default_compute_score("openai/gsm8k", f"#### {len(solution_str)}", "8")
    return {"score": solution_str.count(ground_truth) / max(1, len(solution_str)), "exact": exact}


@register_adv_est("centered")
def centered(
    token_level_rewards: torch.Tensor,
    response_mask: torch.Tensor,
    index: np.ndarray,
    config: Optional[AlgoConfig] = None,
    **kwargs,
):
    grpo, _ = core_algos.compute_grpo_outcome_advantage(
        token_level_rewards.clone(), response_mask, index, norm_adv_by_std_in_grpo=config.norm_adv_by_std_in_grpo
    )
    groups = defaultdict(list)
    for row, uid in enumerate(index):
        groups[uid].append(row)
    assert all(len(rows) == 2 for rows in groups.values()), groups
    return verl_F.masked_whiten(grpo, response_mask) * response_mask, grpo


@register_policy_loss("plain")
def plain(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean", config: ActorConfig = None):
    ratio = torch.exp(torch.clamp(log_prob - old_log_prob, min=-20.0, max=20.0))
    low, high = 1 - config.clip_ratio_low, 1 + config.clip_ratio_high
    losses = torch.maximum(-advantages * ratio, -advantages * ratio.clamp(low, high))
    pg_loss = agg_loss(loss_mat=losses, loss_mask=response_mask, loss_agg_mode=loss_agg_mode)
    pg_clipfrac = verl_F.masked_mean((ratio != ratio.clamp(low, high)).float(), response_mask)
    return pg_loss, pg_clipfrac, verl_F.masked_mean(old_log_prob - log_prob, response_mask), torch.tensor(0.0)


@register("counting")
class CountingRewardManager(AbstractRewardManager):
    def __init__(self, tokenizer, num_examine, compute_score=None, reward_fn_key="data_source", bonus=0.0, **kwargs):
        self.tokenizer, self.compute_score, self.bonus = tokenizer, compute_score or default_compute_score, bonus
        self.reward_fn_key = reward_fn_key

    def __call__(self, data: DataProto, return_dict: bool = False):
        reward_tensor = torch.zeros_like(data.batch["responses"], dtype=torch.float32)
        reward_extra_info = defaultdict(list)
        for i in range(len(data)):
            data_item = data[i]
            prompt_length = data_item.batch["prompts"].shape[-1]
            length = int(data_item.batch["attention_mask"][prompt_length:].sum())
            text = self.tokenizer.decode(data_item.batch["responses"][:length], skip_special_tokens=True)
            found = self.compute_score(
                data_source=data_item.non_tensor_batch[self.reward_fn_key],
                solution_str=text,
                ground_truth=data_item.non_tensor_batch["reward_model"]["ground_truth"],
                extra_info=data_item.non_tensor_batch.get("extra_info"),
            )
            reward_tensor[i, length - 1] = found["score"] + self.bonus
            reward_extra_info["plain_score"].append(found["score"])
        if return_dict:
            return {"reward_tensor": reward_tensor, "reward_extra_info": reward_extra_info}
        return reward_tensor


class PoliteDataset(RLHFDataset):
    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = self.dataframe.map(lambda row: {"ability": "politeness"})

    def _build_messages(self, example: dict):
        messages = super()._build_messages(example)
        return [{"role": "user", "content": messages[0]["content"] + " x"}]

    def __getitem__(self, item):
        row = super().__getitem__(item)
        assert row["ability"] == "politeness" and row["raw_prompt"][0]["content"].endswith(" x")
        return {**row, "agent_name": "single_turn_agent"}
"""

LOOP = """
from typing import Any
from uuid import uuid4

from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput, register
from verl.utils.profiler import simple_timer


@register("asks_twice")
class AsksTwice(AgentLoopBase):
    @classmethod
    def init_class(cls, config, tokenizer, processor, **kwargs):
        if cls._class_initialized:
            return
        cls._class_initialized = True
        cls.question = tokenizer.encode("<user>again<assistant>", add_special_tokens=False)

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.response_length = self.config.actor_rollout_ref.rollout.response_length

    async def run(self, sampling_params: dict[str, Any], **kwargs) -> AgentLoopOutput:
        messages, metrics = list(kwargs["raw_prompt"]), {}
        prompt_ids = await self.loop.run_in_executor(
            None,
            lambda: self.tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, tokenize=True, return_dict=False
            ),
        )
        ids, mask = list(prompt_ids), []
        for turn in range(2):
            if turn:
                ids, mask = ids + self.question, mask + [0] * len(self.question)
            with simple_timer("generate_sequences", metrics):
                output = await self.server_manager.generate(
                    request_id=uuid4().hex, prompt_ids=ids, sampling_params={**sampling_params, "max_tokens": 3}
                )
            ids, mask = ids + output.token_ids, mask + [1] * len(output.token_ids)
        response_ids = ids[len(prompt_ids) :]
        return AgentLoopOutput(
            prompt_ids=prompt_ids,
            response_ids=response_ids[: self.response_length],
            response_mask=mask[: self.response_length],
            num_turns=4,
            metrics=metrics,
            reward_score=float(self.tokenizer.decode(response_ids).count("a")),
            extra_fields={"turn_scores": [], "tool_rewards": []},
        )
"""

SINGLE = """
from verl import DataProto
from verl.experimental.reward_loop.reward_manager import register
from verl.experimental.reward_loop.reward_manager.base import RewardManagerBase


@register("of_singles")
class OfSingles(RewardManagerBase):
    async def run_single(self, data: DataProto) -> dict:
        data_item = data[0]
        response_ids = data_item.batch["responses"]
        length = data_item.batch["attention_mask"][-response_ids.shape[-1] :].sum()
        text = await self.loop.run_in_executor(
            None, lambda: self.tokenizer.decode(response_ids[:length], skip_special_tokens=True)
        )
        score = text.count(data_item.non_tensor_batch["reward_model"]["ground_truth"])
        return {"reward_score": float(score), "reward_extra_info": {"letters": score}}
"""


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One file for all tests: a name that another file has registered is refused."""
    file = tmp_path_factory.mktemp("recipe") / "recipe.py"
    file.write_text(RECIPE)
    return file


def of_recipe(recipe: Path) -> list[str]:
    return [
        f"algorithm.adv_estimator={recipe}:centered",
        f"actor_rollout_ref.actor.policy_loss.loss_mode={recipe}:plain",
        f"custom_reward_function.path={recipe}",
        f"data.custom_cls.path={recipe}",
        "data.custom_cls.name=PoliteDataset",
        "data.max_prompt_length=40",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.actor.optim.lr=1e-2",
    ]


def test_reward_estimator_loss_and_data_set(
    train: Train, metric_lines: Lines, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reward function runs in grading processes, which have verl's names by the environment; rewards rise."""
    monkeypatch.setenv(VARIABLE, "0.6.1")
    lines = metric_lines(
        train(*of_recipe(recipe), "trainer.total_training_steps=20", "data.train_batch_size=8")
    )
    rewards = [line["critic/score/mean"] for line in lines]
    assert sum(rewards[-3:]) / 3 > max(0.2, 2 * rewards[0])
    assert all(
        0 <= line["reward/extra/exact"] <= 1 and line["reward/errors"] == 0 for line in lines
    )
    assert all(line["actor/pg_clipfrac"] >= 0 for line in lines)


def test_a_scalar_loss_is_the_loss_per_token(
    train: Train, metric_lines: Lines, recipe: Path
) -> None:
    """In micro-batches of one row, the same numbers as our loss of the same formula."""
    same = [
        f"actor_rollout_ref.actor.{key}"
        for key in ("loss_agg_mode=seq-mean-token-mean", "clip_ratio_c=1e9")
    ]
    # A grading process that loads verl's names takes seconds to start: other tests have the recipe's reward.
    words = [word for word in of_recipe(recipe) if "custom_reward_function" not in word]
    theirs = metric_lines(train(*words, *same, run="theirs"))
    plain = [word for word in words if "loss_mode" not in word]
    ours = metric_lines(train(*plain, *same, run="ours"))
    for one, other in zip(theirs, ours, strict=True):
        for name in ("actor/pg_loss", "actor/grad_norm", "critic/score/mean"):
            assert one[name] == pytest.approx(other[name], rel=1e-3, abs=1e-5), name


def test_a_manager_of_batches(train: Train, metric_lines: Lines, recipe: Path) -> None:
    """Its keyword arguments and its extra entries arrive."""
    words = ["reward_model.reward_manager=counting", "reward_model.reward_kwargs={bonus: 0.5}"]
    for line in metric_lines(train(*of_recipe(recipe), *words)):
        assert line["critic/score/mean"] == pytest.approx(
            line["reward/extra/plain_score"] + 0.5, abs=1e-5
        )


def test_an_agent_loop_and_a_manager_of_singles(
    train: Train, metric_lines: Lines, tmp_path: Path
) -> None:
    """The loop's own reward counts; where it gives none, the manager's. Log-probabilities are the trainer's."""
    (tmp_path / "loop.py").write_text(LOOP)
    words = [
        "actor_rollout_ref.rollout.mode=async",
        "actor_rollout_ref.rollout.agent.default_agent_loop=asks_twice",
        f"actor_rollout_ref.rollout.agent.agent_loop_path={tmp_path / 'loop.py'}",
        "data.return_raw_chat=True",
        "data.max_response_length=16",
        "actor_rollout_ref.actor.ppo_epochs=2",
    ]
    for line in metric_lines(train(*words, run="own")):
        assert line["rollout/log_prob_diff_max"] < 1e-4
        assert line["rollout/num_turns"] == 3.0
        assert (
            line["critic/score/mean"] >= 2.0
        )  # the letters of the question, and those of the model
    text = LOOP.replace("            reward_score=", "            # ")
    (tmp_path / "loop.py").write_text(text)
    (tmp_path / "manager.py").write_text(SINGLE)
    words += [f"actor_rollout_ref.model.external_lib={tmp_path / 'manager.py'}"]
    words += ["reward_model.reward_manager=of_singles"]
    for line in metric_lines(train(*words, run="graded")):
        assert line["critic/score/mean"] == line["reward/extra/letters"]
