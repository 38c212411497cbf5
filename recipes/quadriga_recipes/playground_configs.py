# SPDX-License-Identifier: Apache-2.0
"""The configurations of the playground: what `sft`, `train` and the recipes need on tasks and a model of that size.

    sft.yaml, reward_model.yaml   for quadriga sft
    sums.yaml, largest.yaml       for quadriga train
    over/NAME.yaml                a few keys, laid over sums.yaml, and over the recipe of that name where there is one:
                                  --config DIR/sums.yaml --config configs/recipes/ppo.yaml --config DIR/over/ppo.yaml

A recipe that has no file here needs nothing but sums.yaml below it.
"""

from pathlib import Path
from typing import Any

from quadriga_recipes.playground_tasks import LARGEST, SUMS, Task

Tree = dict[str, Any]

NUM_PROMPTS, NUM_RESPONSES = 32, 8
"""Of a step: 256 responses, whatever the recipe. All 100 sums are too few for 256 prompts with one response each."""
MAX_RESPONSE_TOKENS = 6


def configurations(folder: Path) -> dict[str, Tree]:
    """What each configuration file says, by its name below `folder`."""
    recipes = {f"over/{name}.yaml": tree for name, tree in _over_recipes().items()}
    return {
        "sft.yaml": _sft(folder),
        "sums.yaml": _grpo(folder, SUMS),
        "largest.yaml": _grpo(folder, LARGEST),
        "reward_model.yaml": _reward_model(folder),
        **recipes,
        "over/kl_target.yaml": _kl_target(),
        "over/by_reward_model.yaml": _by_reward_model(folder),
        "over/distilled.yaml": _distilled(folder),
    }


def _sft(folder: Path) -> Tree:
    return {
        "data": {
            "train_files": f"{folder}/data/sft.parquet",
            "max_length": 32,
            "train_batch_size": 128,
        },
        "model": {"path": f"{folder}/model"},
        "optim": {"lr": 2e-3, "lr_warmup_steps": 20},
        "engine": {"fsdp_config": {"model_dtype": "float32"}},
        "trainer": _trainer(folder, "sft") | {"total_epochs": 1},
    }


def _grpo(folder: Path, task: Task) -> Tree:
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
        "trainer": _trainer(folder, task.name)
        | {"total_training_steps": 80, "test_freq": 10, "save_freq": 80},
    }


def _over_recipes() -> dict[str, Tree]:
    """For the recipes that are made for longer responses, larger batches or one response a prompt."""
    several_responses = {"actor_rollout_ref": {"rollout": {"n": NUM_RESPONSES}}}
    four_updates = {"actor_rollout_ref": {"actor": {"ppo_mini_batch_size": NUM_PROMPTS // 4}}}
    overlong = {"enable": True, "len": MAX_RESPONSE_TOKENS // 3, "penalty_factor": 1.0, "log": True}
    return {
        "cispo": four_updates,
        "dapo": {
            "data": {"train_batch_size": NUM_PROMPTS // 2},
            "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": NUM_PROMPTS // 2}},
            # The more is right, the fewer groups differ, and the more prompts it takes.
            "algorithm": {"filter_groups": {"max_num_gen_batches": 40}},
            "reward_model": {
                "reward_kwargs": {
                    "max_resp_len": MAX_RESPONSE_TOKENS,
                    "overlong_buffer_cfg": overlong,
                }
            },
        },
        "gspo": four_updates,
        "ppo": several_responses | {"critic": _critic()},
        "reinforce_plus_plus": several_responses,
        "remax": several_responses,
    }


def _critic() -> Tree:
    return {
        "ppo_mini_batch_size": NUM_PROMPTS,
        "optim": {"lr": 1e-3, "betas": [0.9, 0.95], "weight_decay": 0.0},
        "fsdp_config": {"model_dtype": "float32"},
    }


def _kl_target() -> Tree:
    """The divergence from the supervised model is held; the controller moves its coefficient by 2.5 % a step at most.

    The policy follows its coefficient some ten steps late: a controller that is four times as fast swings around its
    target.
    """
    controller = {"type": "adaptive", "kl_coef": 0.3, "target_kl": 0.1, "horizon": 2048}
    return {
        "algorithm": {"use_kl_in_reward": True, "kl_ctrl": controller},
        "trainer": {"total_training_steps": 160},
    }


def _reward_model(folder: Path) -> Tree:
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
        "trainer": _trainer(folder, "reward_model") | {"total_epochs": 8},
    }


def _by_reward_model(folder: Path) -> Tree:
    """What `reward_model.yaml` has trained grades, in place of a comparison with the right answer.

    It has seen no response but numbers up to 18, and scores some others high, such as 111 for 5+6. What the supervised
    model would hardly say therefore costs reward.
    """
    model = {"path": f"{folder}/runs/reward_model/model", "fsdp_config": {"model_dtype": "float32"}}
    return {
        "reward_model": {"enable": True, "model": model},
        "algorithm": {"use_kl_in_reward": True, "kl_ctrl": {"kl_coef": 0.2}},
    }


def _distilled(folder: Path) -> Tree:
    """A teacher in place of the rewards: `quadriga export FOLDER/runs/sums --output FOLDER/teacher` writes one."""
    fsdp = {"model_dtype": "float32"}
    return {
        "distillation": {
            "enable": True,
            "path": f"{folder}/teacher",
            "use_task_rewards": False,
            "fsdp_config": fsdp,
        },
    }


def _trainer(folder: Path, name: str) -> Tree:
    return {
        "project_name": "playground",
        "experiment_name": name,
        "logger": ["console", "jsonl"],
        "default_local_dir": f"{folder}/runs/{{experiment_name}}",
    }
