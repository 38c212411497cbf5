# SPDX-License-Identifier: Apache-2.0
"""Configurations of the playground, for small tasks and a small model.

    sft.yaml, reward_model.yaml   for quadriga sft
    sums.yaml, largest.yaml       for quadriga train
    over/NAME.yaml                changes to sums.yaml, and to the recipe NAME if there is one. Used as
        --config DIR/sums.yaml --config configs/recipes/ppo.yaml --config DIR/over/ppo.yaml

A recipe without a file here runs on sums.yaml without changes.
"""

from pathlib import Path
from typing import Any

from quadriga_recipes.playground_tasks import LARGEST, SUMS, Task

Tree = dict[str, Any]
"""Nested sections of a configuration."""

NUM_PROMPTS = 32
"""Prompts of a step. There are only 100 sums, too few for 256 prompts with one response each."""
NUM_RESPONSES = 8
"""Responses to each prompt, with every recipe."""
MAX_RESPONSE_TOKENS = 6
"""Longest response, of which right answers need at most three tokens: two digits and the end."""


def build_configurations(folder: Path) -> dict[str, Tree]:
    """Configurations of a playground, by name of their file below `folder`."""
    recipes = {f"over/{name}.yaml": tree for name, tree in _recipe_changes().items()}
    reward_model = {
        "path": f"{folder}/runs/reward_model/model",
        "fsdp_config": {"model_dtype": "float32"},
    }
    return {
        "sft.yaml": _sft_config(folder),
        "sums.yaml": _grpo_config(folder, SUMS),
        "largest.yaml": _grpo_config(folder, LARGEST),
        "reward_model.yaml": _reward_model_config(folder),
        **recipes,
        # Hold the divergence from the supervised model at a target. With this horizon, the controller
        # changes the coefficient by at most 2.5 % per step. The policy responds about ten steps later,
        # so that a controller that is four times as fast oscillates around the target.
        "over/kl_target.yaml": {
            "algorithm": {
                "use_kl_in_reward": True,
                "kl_ctrl": {
                    "type": "adaptive",
                    "kl_coef": 0.3,
                    "target_kl": 0.1,
                    "horizon": 2048,
                },
            },
            "trainer": {"total_training_steps": 160},
        },
        # Grade with the model of `reward_model.yaml` instead of comparing with the right answer. This
        # model was trained on numbers up to 18, and gives some other answers a high score, such as 111
        # for 5+6. A penalty on divergence from the supervised model keeps the policy from such answers.
        "over/by_reward_model.yaml": {
            "reward_model": {"enable": True, "model": reward_model},
            "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.2}},
        },
        # Learn from a teacher instead of rewards. `quadriga export FOLDER/runs/sums --output
        # FOLDER/teacher` writes the teacher.
        "over/distilled.yaml": {
            "distillation": {
                "enable": True,
                "path": f"{folder}/teacher",
                "use_task_rewards": False,
                "fsdp_config": {"model_dtype": "float32"},
            }
        },
    }


def _sft_config(folder: Path) -> Tree:
    """Supervised training on mixed habits, for the model that all other runs begin with."""
    return {
        "data": {
            "train_files": f"{folder}/data/sft.parquet",
            "max_length": 32,
            "train_batch_size": 128,
        },
        "model": {"path": f"{folder}/model"},
        "optim": {"lr": 2e-3, "lr_warmup_steps": 20},
        "engine": {"fsdp_config": {"model_dtype": "float32"}},
        "trainer": _trainer_section(folder, "sft") | {"total_epochs": 1},
    }


def _grpo_config(folder: Path, task: Task) -> Tree:
    """GRPO on a task, from the supervised model."""
    return {
        "data": {
            "train_files": f"{folder}/data/{task.name}_train.parquet",
            "val_files": f"{folder}/data/{task.name}_val.parquet",
            "train_batch_size": NUM_PROMPTS,
            "max_prompt_length": 16,
            "max_response_length": MAX_RESPONSE_TOKENS,
        },
        "actor_rollout_ref": {
            "model": {"path": f"{folder}/runs/sft/model"},
            "actor": {
                "ppo_mini_batch_size": NUM_PROMPTS,
                "optim": {"lr": 3e-4, "betas": [0.9, 0.95], "weight_decay": 0.0},
                "fsdp_config": {"model_dtype": "float32"},
            },
            "rollout": {"n": NUM_RESPONSES, "temperature": 1.0, "max_num_seqs": 256},
        },
        "trainer": _trainer_section(folder, task.name)
        | {"total_training_steps": 80, "test_freq": 10, "save_freq": 80},
    }


def _recipe_changes() -> dict[str, Tree]:
    """Changes, by recipe, for recipes whose lengths, batches or responses do not suit the playground.

    They have longer responses, larger batches, or one response to each prompt.
    """
    several_responses = {"actor_rollout_ref": {"rollout": {"n": NUM_RESPONSES}}}
    four_updates = {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": NUM_PROMPTS // 4}}}
    # The critic learns faster than the policy.
    critic = {
        "ppo_mini_batch_size": NUM_PROMPTS,
        "optim": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.0},
        "fsdp_config": {"model_dtype": "float32"},
    }
    overlong = {"enable": True, "len": MAX_RESPONSE_TOKENS // 3, "penalty_factor": 1.0, "log": True}
    return {
        "cispo": four_updates,
        "dapo": {
            "data": {"train_batch_size": NUM_PROMPTS // 2},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": NUM_PROMPTS // 2}},
            # Late in training most responses are right. Then few groups have different scores, and
            # a step needs many prompts.
            "algorithm": {"filter_groups": {"max_num_gen_batches": 40}},
            "reward_model": {
                "reward_kwargs": {
                    "max_resp_len": MAX_RESPONSE_TOKENS,
                    "overlong_buffer_cfg": overlong,
                }
            },
        },
        "gspo": four_updates,
        "ppo": several_responses | {"critic": critic},
        "reinforce_plus_plus": several_responses,
        "remax": several_responses,
    }


def _reward_model_config(folder: Path) -> Tree:
    """Training of a reward model on preference pairs, from the supervised model."""
    return {
        "objective": "reward_model",
        "data": {
            "train_files": f"{folder}/data/pairs_train.parquet",
            "val_files": f"{folder}/data/pairs_val.parquet",
            "max_length": 32,
            "train_batch_size": 128,
        },
        "model": {"path": f"{folder}/runs/sft/model"},
        "optim": {"lr": 1e-3, "lr_warmup_steps": 20, "lr_scheduler_type": "cosine"},
        "engine": {"fsdp_config": {"model_dtype": "float32"}},
        "trainer": _trainer_section(folder, "reward_model") | {"total_epochs": 8},
    }


def _trainer_section(folder: Path, name: str) -> Tree:
    """Settings of the section `trainer` that all configurations share.

    Args:
        folder: the folder of the playground.
        name: name of the run, and of its directory below `runs`.
    """
    return {
        "project_name": "playground",
        "experiment_name": name,
        "logger": ["console", "jsonl"],
        # Runs take seconds and need no checkpoints. A supervised run writes its model anyway.
        "save_freq": -1,
        "default_local_dir": f"{folder}/runs/{{experiment_name}}",
    }
