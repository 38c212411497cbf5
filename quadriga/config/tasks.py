# SPDX-License-Identifier: Apache-2.0
"""What differs between the tasks: defaults, the keys that are read, and how `quadriga sft` spells them.

A key of a supervised task has a short spelling, `optim.lr` for `actor_rollout_ref.actor.optim.lr`; both are taken, and
messages use the short one.
"""

from fnmatch import fnmatchcase
from typing import Any, Literal

from quadriga.errors import QuadrigaError

Task = Literal["rl", "sft", "reward_model"]

_SUPERVISED: dict[str, dict[str, Any]] = {
    "data": {"train_batch_size": 256, "val_batch_size": 256, "max_length": 1024},
    "trainer": {"experiment_name": "sft"},
}
# Pairs share their prompt; conversations are packed as they are.
PRESETS: dict[str, dict[str, Any]] = {
    "rl": {},
    "sft": _SUPERVISED | {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-5}, "use_prefix_sharing": False}}},
    "reward_model": _SUPERVISED | {"actor_rollout_ref": {"actor": {"optim": {"lr": 1e-5}, "use_prefix_sharing": True}}},
}
"""Defaults of a task where they are not those of the schema."""

_SFT_DATA = ("format", "messages_key", "tools_key", "response_key", "chosen_key", "rejected_key", "max_length")
_SHARED_DATA = (
    "train_files", "val_files", "prompt_key", "truncation", "filter_overlong_prompts", "train_batch_size",
    "val_batch_size", "tokenizer", "apply_chat_template_kwargs", "shuffle", "seed", "cache_dir",
)  # fmt: skip
_RL_TRAINER = (
    "log_val_generations", "placement", "resource_pools", "max_worker_restarts", "balance_batch", "val_only",
    "critic_warmup", "rollout_data_dir", "validation_data_dir",
)  # fmt: skip
_ACTOR = "actor_rollout_ref.actor"
_READ = (
    "task",
    *(f"data.{name}" for name in (*_SHARED_DATA, *_SFT_DATA)),
    *("actor_rollout_ref.model.*", f"{_ACTOR}.optim.*", f"{_ACTOR}.checkpoint.*", f"{_ACTOR}.fsdp_config.*"),
    *(f"{_ACTOR}.ppo_m*_per_gpu", f"{_ACTOR}.*_parallel_size", f"{_ACTOR}.loss_agg_mode", f"{_ACTOR}.grad_clip"),
    *(f"{_ACTOR}.max_nonfinite_steps", "trainer.*", "ray_kwargs.*"),
)
"""Patterns of the keys that a supervised task reads."""

_SHORT = {
    "task": "objective",
    "data.filter_overlong_prompts": "data.filter_overlong",
    "actor_rollout_ref.model": "model",
    f"{_ACTOR}.optim": "optim",
    f"{_ACTOR}.checkpoint": "checkpoint",
    f"{_ACTOR}.ppo_micro_batch_size_per_gpu": "engine.micro_batch_size_per_gpu",
    f"{_ACTOR}.ppo_max_token_len_per_gpu": "engine.max_token_len_per_gpu",
    _ACTOR: "engine",
}
"""Beginning of a key -> its spelling in a supervised task; the first that fits holds."""
_FULL = {short: full for full, short in _SHORT.items()}


def is_read(key: str, task: str) -> bool:
    """Whether a task reads a key of the schema."""
    if task == "rl":
        return key not in {f"data.{name}" for name in _SFT_DATA}
    return any(fnmatchcase(key, one) for one in _READ) and key not in {f"trainer.{name}" for name in _RL_TRAINER}


def _exchanged(key: str, table: dict[str, str]) -> str:
    start = next((one for one in table if key == one or key.startswith(f"{one}.")), None)
    return key if start is None else table[start] + key[len(start) :]


def spelled(key: str, task: str) -> str:
    """A dotted key as the task spells it."""
    return key if task == "rl" else _exchanged(key, _SHORT)


def full_key(key: str, task: str) -> str:
    """The dotted key of the schema that a spelling stands for."""
    return key if task == "rl" else _exchanged(key, _FULL)


def spelled_text(text: str, task: str) -> str:
    """A message about keys of the schema, with the task's spellings."""
    if task == "rl":
        return text
    text = text.replace("data.max_prompt_length + data.max_response_length", "data.max_length")
    for full, short in list(_SHORT.items())[1:]:
        text = text.replace(full, short)
    return text.replace("`ppo_m", "`m")


def respell(error: QuadrigaError, task: str) -> QuadrigaError:
    """The same error object, with the task's spellings in its message."""
    for name in ("where", "got", "expected", "fix"):
        setattr(error, name, spelled_text(getattr(error, name), task))
    error.args = tuple(spelled_text(str(one), task) for one in error.args)
    return error
