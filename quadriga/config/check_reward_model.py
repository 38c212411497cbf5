# SPDX-License-Identifier: Apache-2.0
"""Checks of the reward model: what its folder says of itself, before anything is loaded."""

import json
from pathlib import Path
from typing import Any

from quadriga.config.arithmetic import batch_plan
from quadriga.config.base import Section
from quadriga.config.findings import Findings
from quadriga.config.optimizer import ParallelConfig
from quadriga.config.reward import RewardModelConfig
from quadriga.config.root import Config

_SECTION = "reward_model"
_KEY = f"{_SECTION}.model.path"
# What a configuration of transformers means that says nothing of labels.
_DEFAULT_LABELS = 2


def check_reward_model(config: Config, found: Findings) -> None:
    """Refuses a reward model that cannot score, and says how scores are made up."""
    reward = config.reward_model
    if not reward.enable:
        if unused := _changed(reward):
            found.notice(f"{', '.join(unused)}: not used, for reward_model.enable is false.")
        return
    if reward.model.path is None:
        fix = "Set it to a folder or a hub name of a sequence classifier with one label."
        found.refuse(_KEY, got="null, with reward_model.enable=True", expected="a reward model", fix=fix)
    else:
        _check_folder(config, reward.model.path, found)
    if config.custom_reward_function.path is not None:
        found.notice("reward_model.enable, custom_reward_function.path: the reward is the sum of both scores.")
    _check_pieces(config, found)


def _changed(reward: RewardModelConfig) -> list[str]:
    """Keys of the reward model that do not have their default."""
    names = (
        "model",
        "micro_batch_size_per_gpu",
        "use_dynamic_bsz",
        "forward_max_token_len_per_gpu",
        "max_length",
        *ParallelConfig.model_fields,
    )
    default = RewardModelConfig()
    changed = []
    for name in names:
        value = getattr(reward, name)
        if value != getattr(default, name):
            changed += [f"{_SECTION}.{name}.{key}" for key in _given(value)] or [f"{_SECTION}.{name}"]
    return changed


def _given(value: Any) -> list[str]:
    return sorted(value.model_fields_set) if isinstance(value, Section) else []


def _check_folder(config: Config, path: str, found: Findings) -> None:
    """Of a local folder: that config.json describes a classifier with one label, and how long its inputs may be."""
    file = Path(path).expanduser() / "config.json"
    if not file.is_file():
        return
    try:
        described = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        found.refuse(_KEY, got=f"'{file}' ({error})", expected="JSON", fix="Get the model anew.")
        return
    names = described.get("architectures") or []
    is_classifier = not names or any(name.endswith("ForSequenceClassification") for name in names)
    if not is_classifier and not config.reward_model.model.trust_remote_code:
        found.refuse(
            _KEY,
            got=f"'{path}', whose config.json names {', '.join(names)}: it has no classification head",
            expected="an architecture that ends in ForSequenceClassification, with one label",
            fix="Name a model that was trained to score.",
        )
        return
    labels = described.get("num_labels", len(described.get("id2label") or range(_DEFAULT_LABELS)))
    if labels != 1:
        found.refuse(
            _KEY,
            got=f"'{path}', a classifier with {labels} labels by its config.json",
            expected="one label, the score",
            fix="Name a model that was trained to score.",
        )
    _check_length(config, described.get("max_position_embeddings"), found)


def _check_length(config: Config, positions: Any, found: Findings) -> None:
    limit, longest = config.reward_model.max_length, batch_plan(config).max_sequence_tokens
    if not isinstance(positions, int):
        return
    if limit is not None and limit > positions:
        found.refuse(
            f"{_SECTION}.max_length",
            got=str(limit),
            expected=f"at most {positions}, the positions of the reward model",
            fix="Lower it, or leave it out.",
        )
    elif (limit or positions) < longest:
        found.notice(
            f"{_SECTION}.max_length: {limit or positions} tokens, but a sequence of the policy may have {longest}: a "
            "longer one loses the beginning of its prompt, and is counted in reward/rm_cut."
        )


def _check_pieces(config: Config, found: Findings) -> None:
    reward = config.reward_model
    if reward.micro_batch_size_per_gpu is not None and reward.use_dynamic_bsz:
        found.notice(
            f"{_SECTION}.micro_batch_size_per_gpu: not used, for passes are cut by "
            f"{_SECTION}.forward_max_token_len_per_gpu."
        )
    is_by_tokens = reward.micro_batch_size_per_gpu is None or reward.use_dynamic_bsz
    tokens, longest = reward.forward_max_token_len_per_gpu, batch_plan(config).max_sequence_tokens
    if is_by_tokens and tokens < longest:
        found.notice(
            f"{_SECTION}.forward_max_token_len_per_gpu: {tokens} tokens, but a sequence may have {longest}: "
            "a longer one is a pass of its own."
        )
