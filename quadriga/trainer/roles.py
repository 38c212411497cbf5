# SPDX-License-Identifier: Apache-2.0
"""The models of a run: the roles that they play, and which of them a step needs.

What a step needs follows from the configuration and the fields that the estimator takes; no table lists algorithms.
"""

from dataclasses import dataclass
from enum import StrEnum

from quadriga.algorithms.registry import choose_estimator
from quadriga.config import Config, learns_from_rewards, needs_old_log_prob_pass, needs_reference
from quadriga.user_file import import_external

_OF_THE_PASS = frozenset({"old_log_probs", "sum_pi_squared"})


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
    reference: (
        bool  # a divergence from the first policy is used, or the estimator reads `ref_log_prob`
    )
    old_log_probs: (
        bool  # they are not the current ones by construction, or are wanted before the update
    )
    sum_pi_squared: bool  # the estimator reads it; it comes with the old log-probs
    larger_groups: bool  # the estimator compares the responses to one prompt, and there is only one

    @classmethod
    def of(cls, config: Config) -> "Needs":
        """What a run with this configuration must compute at each step."""
        algorithm, fields = config.algorithm, ()
        if config.task == "rl":
            import_external(config.actor_rollout_ref.model.external_lib)
            shared = {**dict(algorithm), "config": algorithm}
            estimator = choose_estimator(algorithm.adv_estimator, algorithm.adv_options, shared)
            fields = estimator.fields if learns_from_rewards(config) else ()
        return cls(
            critic="values" in fields,
            greedy_baseline="reward_baselines" in fields,
            reference=needs_reference(config) or "ref_log_prob" in fields,
            old_log_probs=needs_old_log_prob_pass(config) or not _OF_THE_PASS.isdisjoint(fields),
            sum_pi_squared="sum_pi_squared" in fields,
            larger_groups="uid" in fields and config.actor_rollout_ref.rollout.n == 1,
        )

    def describe(self) -> dict[str, str]:
        """The passes that are made or left out, each with its reason, to be printed."""
        if self.old_log_probs:
            old = "a pass of their own: they are read before the update, or several updates learn from one batch"
        else:
            old = "no pass of their own: the one optimizer step starts from the policy that sampled"
        choices = {"old log-probs": old}
        if self.larger_groups:
            why = "the estimator compares the responses to one prompt; set actor_rollout_ref.rollout.n above 1"
            choices["groups"] = f"of one response: {why}"
        return (
            choices
            if self.reference
            else {"reference": "none: no divergence from it is used", **choices}
        )
