# SPDX-License-Identifier: Apache-2.0
"""Roles of the models of a run, and the optional passes of a training step.

The configuration and the fields that the estimator reads decide which passes a step needs; there is
no table of algorithms.
"""

from collections import defaultdict
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch

from quadriga.algorithms.registry import (
    Algorithm,
    check_fields,
    choose_estimator,
    estimate_advantages,
)
from quadriga.config import Config, learns_from_rewards, needs_old_log_prob_pass, needs_reference
from quadriga.errors import ConfigError
from quadriga.protocol.fields import FIELDS
from quadriga.user_file import import_external

_FIELDS_OF_OLD_LOG_PROB_PASS = frozenset({"old_log_probs", "sum_pi_squared"})


class Role(StrEnum):
    """Role of a worker group. The values are the names in errors and logs."""

    ActorRolloutRef = "actor_rollout_ref"
    ActorRollout = "actor_rollout"
    Actor = "actor"
    Rollout = "rollout"
    RefPolicy = "ref"
    Critic = "critic"
    RewardModel = "reward_model"
    Teacher = "teacher"


@dataclass(frozen=True)
class Needs:
    """The optional passes of a training step."""

    critic: bool  # the estimator reads `values`
    greedy_baseline: bool  # the estimator reads `reward_baselines`
    reference: bool  # a KL term is configured, or the estimator reads `ref_log_prob`
    # A pass before the update computes log-probs, because those that the update computes may differ
    # from them, or because something reads them earlier.
    old_log_probs: bool
    # The estimator reads `sum_pi_squared`, which the pass for old log-probs computes.
    sum_pi_squared: bool
    # No pass, but advice: the estimator compares the responses to a prompt, and there is only one.
    larger_groups: bool

    @classmethod
    def of(cls, config: Config) -> "Needs":
        """Determine the passes of a step for a configuration."""
        fields = ()
        if config.task == "rl":
            import_external(config.actor_rollout_ref.model.external_lib)
            # Looked up even if rewards are not used, so that a wrong name is refused.
            estimator = configured_estimator(config)
            if learns_from_rewards(config):
                fields = estimator.fields
        reads_old_log_probs = not _FIELDS_OF_OLD_LOG_PROB_PASS.isdisjoint(fields)
        return cls(
            critic="values" in fields,
            greedy_baseline="reward_baselines" in fields,
            reference=needs_reference(config) or "ref_log_prob" in fields,
            old_log_probs=needs_old_log_prob_pass(config) or reads_old_log_probs,
            sum_pi_squared="sum_pi_squared" in fields,
            larger_groups="uid" in fields and config.actor_rollout_ref.rollout.n == 1,
        )

    def describe(self) -> dict[str, str]:
        """Describe automatic choices about the passes and their reasons, to be printed."""
        choices = {}
        if not self.reference:
            choices["reference"] = "not needed: no KL term is configured"
        if self.old_log_probs:
            choices["old log-probs"] = (
                "recomputed: they are read before the update, or several updates use one batch"
            )
        else:
            choices["old log-probs"] = (
                "not recomputed: the one optimizer step starts from the policy that sampled"
            )
        if self.larger_groups:
            choices["groups"] = (
                "of one response: the estimator compares the responses to one prompt; "
                "set actor_rollout_ref.rollout.n above 1"
            )
        return choices


def configured_estimator(config: Config) -> Algorithm:
    """The advantage estimator of `algorithm.adv_estimator`, with its options bound.

    Raises:
        ConfigError: the estimator or an option is unknown, or a built-in estimator refuses the
            value of an option.
    """
    algorithm = config.algorithm
    # An option without a default takes the value of the section's key of the same name.
    shared = {**dict(algorithm), "config": algorithm}
    estimator = choose_estimator(algorithm.adv_estimator, algorithm.adv_options, shared)
    check_fields(estimator, FIELDS, "algorithm.adv_estimator")
    # A user's own estimator may need larger groups, or columns that only the data have.
    if estimator.is_built_in:
        _try_estimator(estimator)
    return estimator


def _try_estimator(estimator: Algorithm) -> None:
    """Call an estimator on two made-up responses, so that it checks the values of its options.

    Raises:
        ConfigError: the estimator refuses them.
    """
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    # Options may name any value that graders return beside the score.
    rewards = defaultdict(float)
    fields = {
        "uid": np.array(["prompt", "prompt"], dtype=object),
        "data_source": np.array(["data", "data"], dtype=object),
        "reward_extra": [rewards, rewards],
        "reward_baselines": torch.zeros(2),
        "turn_spans": [[(0, 3)], [(0, 2)]],
        "turn_states": [[""], [""]],
    }
    for name in estimator.fields:
        if name in FIELDS and FIELDS[name].shape == "(B, T)":
            fields[name] = torch.full(mask.shape, -0.5)
    fields["response_mask"] = mask
    try:
        estimate_advantages(estimator.function, fields)
    except ConfigError:
        raise
    except Exception as error:
        # For example a TypeError, if an option is a text instead of a number.
        raise ConfigError(
            f"algorithm.adv_options ({estimator.name})",
            got=f"{type(error).__name__}: {error}, with two responses of three tokens",
            expected="advantages and returns",
        ) from error
