# SPDX-License-Identifier: Apache-2.0
"""Checks of lengths that need a model's config.json, but neither torch nor transformers.

A file that is not on this machine, or that leaves its positions to transformers, is checked later,
when the model's configuration is loaded.
"""

import json
from pathlib import Path

from quadriga.config.base import Findings
from quadriga.config.explain import BatchPlan
from quadriga.config.root import Config
from quadriga.errors import ConfigError


def check_positions(config: Config) -> Findings:
    """Yield sequences that are longer than the positions of the policy or of a teacher."""
    num_tokens = BatchPlan(config).max_sequence_tokens
    model = config.actor_rollout_ref.model
    # Entries of `override_config` may raise the positions. Which part of a nested configuration
    # they replace is known to transformers alone.
    if model.path and not model.override_config:
        positions = _num_positions(model.path)
        if positions is not None and num_tokens > positions:
            yield too_long(num_tokens, positions, model.path)
    if not config.distillation.enable:
        return
    for key, path in config.distillation.loaded_teachers.items():
        positions = _num_positions(path)
        if positions is not None and num_tokens > positions:
            yield too_short_teacher(key, num_tokens, positions, path)


def too_long(num_tokens: int, positions: int, path: str) -> ConfigError:
    """Make the error for sequences that are longer than the positions of the policy.

    Args:
        num_tokens: tokens of the longest sequence.
        positions: positions of the policy.
        path: folder or hub name of the policy.
    """
    return ConfigError(
        "data.max_prompt_length + data.max_response_length",
        got=f"{num_tokens} tokens",
        expected=f"at most {positions}, the positions of {path}",
        fix="Lower one of them, or raise the positions with "
        "actor_rollout_ref.model.override_config.",
    )


def too_short_teacher(key: str, num_tokens: int, positions: int, path: str) -> ConfigError:
    """Make the error for a teacher with fewer positions than the longest sequence.

    Args:
        key: dotted key that names the teacher.
        num_tokens: tokens of the longest sequence.
        positions: positions of the teacher.
        path: folder or hub name of the teacher.
    """
    return ConfigError(
        key,
        got=f"'{path}' with {positions} positions, for sequences of up to {num_tokens} tokens",
        expected=f"at least {num_tokens}",
        fix="Lower the lengths under data.",
    )


def _num_positions(path: str) -> int | None:
    """Positions that the config.json in a model's folder names.

    None: the folder is not on this machine, or its config.json does not name them.
    """
    file = Path(path).expanduser() / "config.json"
    try:
        model_config = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        # Other checks report a model that is missing or damaged.
        return None
    # A vision-language model has the positions of its decoder in a section.
    if isinstance(model_config, dict) and "vision_config" in model_config:
        model_config = model_config.get("text_config")
    if not isinstance(model_config, dict):
        return None
    positions = model_config.get("max_position_embeddings")
    return positions if isinstance(positions, int) else None
