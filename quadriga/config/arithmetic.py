# SPDX-License-Identifier: Apache-2.0
"""What follows from the batch sizes: how many sequences, optimizer steps and passes a training step has."""

from dataclasses import dataclass

from quadriga.config.root import Config


@dataclass(frozen=True)
class BatchPlan:
    """One training step in numbers."""

    num_prompts: int
    """Prompts a step takes."""
    num_sequences: int
    """Responses a step generates and learns from."""
    num_mini_batches: int
    """Mini-batches of one pass over the batch; the last may be smaller."""
    num_epochs: int
    """Passes over the batch."""
    mini_batch_prompts: int
    """Prompts of a mini-batch, at most those of the batch."""
    mini_batch_sequences: int
    micro_batch_sequences: int | None
    """Sequences of a forward and backward pass; None: cut by tokens."""
    num_micro_batches: int | None
    """Forward and backward passes of a whole mini-batch; None: cut by tokens, so it depends on the lengths."""
    max_sequence_tokens: int
    """Tokens of the longest sequence: prompt and response."""

    @property
    def num_optimizer_steps(self) -> int:
        """Optimizer steps of a training step."""
        return self.num_mini_batches * self.num_epochs

    @property
    def is_on_policy(self) -> bool:
        """Whether the only update is made by the policy that sampled, so that old and current log-probs are equal."""
        return self.num_optimizer_steps == 1


def batch_plan(config: Config) -> BatchPlan:
    """The numbers of one training step of the actor."""
    actor, answers = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    prompts = config.data.train_batch_size
    mini = min(actor.ppo_mini_batch_size, prompts)
    micro = None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
    micro = None if micro is None else min(micro, mini * answers)
    return BatchPlan(
        num_prompts=prompts,
        num_sequences=prompts * answers,
        num_mini_batches=-(-prompts // mini),
        num_epochs=actor.ppo_epochs,
        mini_batch_prompts=mini,
        mini_batch_sequences=mini * answers,
        micro_batch_sequences=micro,
        num_micro_batches=None if micro is None else -(-mini * answers // micro),
        max_sequence_tokens=config.data.max_prompt_length + config.data.max_response_length,
    )


def needs_old_log_prob_pass(config: Config) -> bool:
    """Whether log-probs of the sampling policy must be computed in a pass of their own.

    One optimizer step a batch learns from exactly the policy that sampled: its own forward pass gives the same numbers.
    The divergence inside the reward needs them before that, and so does a correction of the rollout, unless it takes
    the rollout's own for them.
    """
    correction = config.algorithm.rollout_correction
    if correction.needs_old_log_probs or config.algorithm.use_kl_in_reward:
        return True
    return not correction.bypass_mode and not batch_plan(config).is_on_policy


def needs_reference(config: Config) -> bool:
    """Whether a frozen reference model is kept."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss
