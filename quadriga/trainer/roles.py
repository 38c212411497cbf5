# SPDX-License-Identifier: Apache-2.0
"""Roles of the models of a run, and the optional passes of a training step.

Which passes a step makes follows from the configuration and the fields that the estimator reads; no
table lists algorithms.
"""

from dataclasses import dataclass
from enum import StrEnum

from quadriga.algorithms.registry import Algorithm, check_fields, choose_estimator
from quadriga.config import Config, learns_from_rewards, needs_old_log_prob_pass, needs_reference
from quadriga.protocol.fields import FIELDS
from quadriga.user_file import import_external

_FIELDS_OF_OLD_LOG_PROB_PASS = frozenset({"old_log_probs", "sum_pi_squared"})


class Role(StrEnum):
    """A worker group's role, under the name that errors and logs use."""

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
    old_log_probs: bool  # they may differ from the current ones, or are read before the update
    sum_pi_squared: bool  # the estimator reads it; the pass for old log-probs computes it
    larger_groups: bool  # the estimator compares the responses to one prompt, and there is only one

    @classmethod
    def of(cls, config: Config) -> "Needs":
        """Passes that each step of a run with this configuration makes."""
        fields = ()
        if config.task == "rl":
            import_external(config.actor_rollout_ref.model.external_lib)
            # Chosen even if it is not used, so that a wrong name is refused.
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
        """The passes that are made or left out, each with its reason, to be printed."""
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
    """The advantage estimator of `algorithm.adv_estimator`, with its options bound."""
    algorithm = config.algorithm
    # Any key of the section may be an option of the estimator.
    shared = {**dict(algorithm), "config": algorithm}
    estimator = choose_estimator(algorithm.adv_estimator, algorithm.adv_options, shared)
    check_fields(estimator, FIELDS, "algorithm.adv_estimator")
    return estimator
