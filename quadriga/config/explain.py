# SPDX-License-Identifier: Apache-2.0
"""The configuration in words: the batch arithmetic, what a step does, and the resolved tree."""

from dataclasses import dataclass

from quadriga.config.keys import leaf_keys
from quadriga.config.placement import role_pools
from quadriga.config.root import Config
from quadriga.config.tasks import full_key
from quadriga.config.yaml_text import to_yaml

_ROLE_WORDS = {
    "actor_rollout_ref": "actor, rollout and reference (if one is used)",
    "actor_rollout": "actor and rollout",
    "actor": "actor",
    "rollout": "rollout",
    "ref": "reference (if one is used)",
    "critic": "critic (if the advantages take values)",
    "reward_model": "reward model",
}


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
    actor, responses = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout.n
    prompts = config.data.train_batch_size
    mini = min(actor.ppo_mini_batch_size, prompts)
    micro = None if actor.use_dynamic_bsz else actor.ppo_micro_batch_size_per_gpu
    micro = None if micro is None else min(micro, mini * responses)
    return BatchPlan(
        num_prompts=prompts,
        num_sequences=prompts * responses,
        num_mini_batches=-(-prompts // mini),
        num_epochs=actor.ppo_epochs,
        mini_batch_prompts=mini,
        mini_batch_sequences=mini * responses,
        micro_batch_sequences=micro,
        num_micro_batches=None if micro is None else -(-mini * responses // micro),
        max_sequence_tokens=config.data.max_prompt_length + config.data.max_response_length,
    )


def needs_old_log_prob_pass(config: Config) -> bool:
    """Whether log-probs of the sampling policy must be computed in a pass of their own.

    One optimizer step a batch learns from exactly the policy that sampled: its own forward pass gives the same numbers.
    The KL divergence in the reward needs them before that, and so does the off-policy correction, unless it takes the
    rollout's own for them.
    """
    correction = config.algorithm.rollout_correction
    if correction.needs_old_log_probs or config.algorithm.use_kl_in_reward:
        return True
    return not correction.bypass_mode and not batch_plan(config).is_on_policy


def needs_reference(config: Config) -> bool:
    """Whether a frozen reference model is kept."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def show(config: Config) -> str:
    """The resolved tree as YAML, the keys that the task reads; read again, it gives an equal configuration."""
    dumped, tree = config.model_dump(mode="json"), {}
    for key in leaf_keys(config.task):
        value, node = dumped, tree
        for name in full_key(key, config.task).split("."):
            value = value[name]
        *path, last = key.split(".")
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    return to_yaml(tree)


def explain(config: Config, num_train_prompts: int | None = None) -> str:
    """What a training run with this configuration does.

    Args:
        config: the configuration.
        num_train_prompts: prompts in the training data, where they have been counted.
    """
    plan = batch_plan(config)
    paragraphs = (
        ("Step", _step(config, plan)),
        ("Update", _update(config, plan)),
        ("Passes", _passes(config, plan)),
        ("Run", _run(config, plan, num_train_prompts)),
        ("Processes", _processes(config)),
        ("Files", _files(config)),
    )
    return "\n".join(f"{title}\n" + "".join(f"  {line}\n" for line in lines) for title, lines in paragraphs)


def _count(number: int, thing: str, things: str | None = None) -> str:
    return f"{number} {thing if number == 1 else things or thing + 's'}"


def _step(config: Config, plan: BatchPlan) -> list[str]:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    lines = [
        f"{_count(plan.num_prompts, 'prompt')} x {_count(rollout.n, 'response')} = "
        f"{_count(plan.num_sequences, 'sequence')}, generated by {rollout.name} at temperature {rollout.temperature:g}",
        f"up to {data.max_prompt_length} + {data.max_response_length} = {plan.max_sequence_tokens} tokens a sequence, "
        f"{plan.num_sequences * plan.max_sequence_tokens} a step",
    ]
    if (groups := config.algorithm.filter_groups).enable:
        limit = groups.max_num_gen_batches
        most = f"up to {_count(limit, 'batch', 'batches')} of prompts" if limit else "any number of batches"
        lines.append(f"prompts whose responses all have the same {groups.metric} are replaced: {most} a step")
    return lines


def _update(config: Config, plan: BatchPlan) -> list[str]:
    actor, warmup = config.actor_rollout_ref.actor, config.trainer.critic_warmup
    lines = [
        f"{_count(plan.num_optimizer_steps, 'optimizer step')} a batch: "
        f"{_count(plan.num_mini_batches, 'mini-batch', 'mini-batches')} of {_count(plan.mini_batch_prompts, 'prompt')} "
        f"({_count(plan.mini_batch_sequences, 'sequence')}) x {_count(plan.num_epochs, 'epoch')}"
    ]
    if rest := plan.num_prompts % plan.mini_batch_prompts:
        lines.append(f"the last mini-batch has {_count(rest, 'prompt')}")
    if plan.num_micro_batches is None:
        lines.append(f"micro-batches of up to {actor.ppo_max_token_len_per_gpu} tokens")
    else:
        lines.append(
            f"{_count(plan.num_micro_batches, 'micro-batch', 'micro-batches')} of {plan.micro_batch_sequences} "
            "in a mini-batch; the gradient does not depend on their size"
        )
    lines.append(
        f"advantages: {config.algorithm.adv_estimator}; loss: {actor.policy_loss.loss_mode}, {actor.loss_agg_mode}"
    )
    return lines + ([f"the actor waits for {_count(warmup, 'step')}, in which only a critic learns"] if warmup else [])


def _passes(config: Config, plan: BatchPlan) -> list[str]:
    if needs_old_log_prob_pass(config):
        why = "the batch makes several updates" if not plan.is_on_policy else "the divergence in the reward needs them"
        lines = [f"old log-probs: a pass of their own, for {why}"]
    else:
        lines = ["old log-probs: no separate pass; the only update is made by the policy that sampled"]
    if config.reward_model.enable:
        added = ", added to the custom reward function" if config.custom_reward_function.path else ""
        lines.append(f"reward model: one pass a step{added}")
    if not needs_reference(config):
        return [*lines, "reference model: none, for no divergence from it is used"]
    places = [
        *(["the loss"] if config.actor_rollout_ref.actor.use_kl_loss else []),
        *(["the reward"] if config.algorithm.use_kl_in_reward else []),
    ]
    is_actor = config.actor_rollout_ref.model.has_adapter and "actor_rollout_ref" in role_pools(config.trainer)
    by = ", by the actor with its adapter off" if is_actor else ""
    return [*lines, f"reference model: one pass a step, for {' and '.join(places)}{by}"]


def _run(config: Config, plan: BatchPlan, num_train_prompts: int | None) -> list[str]:
    trainer = config.trainer
    epochs, steps = _count(trainer.total_epochs, "epoch"), trainer.total_training_steps
    if num_train_prompts is not None:
        batches = num_train_prompts // plan.num_prompts
        # The epochs bound the run even when a number of steps is given: after the last one there are no prompts left.
        total = min(batches * trainer.total_epochs, steps or batches * trainer.total_epochs)
        lines = [f"{_count(total, 'step')}: {_count(batches, 'batch', 'batches')} an epoch, {epochs}"]
    elif steps is not None:
        lines = [f"{_count(steps, 'step')}, at most {epochs}"]
    else:
        lines = [f"{epochs}; the number of steps depends on the data"]
    when = [
        *(["before training"] if trainer.val_before_train else []),
        *([f"every {_count(trainer.test_freq, 'step')}"] if trainer.test_freq > 0 else []),
    ]
    lines.append(f"validation: {' and '.join(when) or 'none'}{', then the run ends' if trainer.val_only else ''}")
    saves = f"every {_count(trainer.save_freq, 'step')} and at the end" if trainer.save_freq > 0 else "none"
    kept = f", the last {trainer.max_ckpt_to_keep} kept" if trainer.max_ckpt_to_keep and trainer.save_freq > 0 else ""
    return [*lines, f"checkpoints: {saves}{kept}", f"resume: {trainer.resume_mode}"]


def _processes(config: Config) -> list[str]:
    trainer = config.trainer
    if trainer.backend == "local":
        return ["all models in one process, which computes with every core"]
    lines = []
    roles = role_pools(trainer, has_reward_model=config.reward_model.enable)
    for pool in dict.fromkeys(roles.values()):
        counts = trainer.processes_of(pool)
        inside = " and ".join(_ROLE_WORDS.get(role, role) for role, name in roles.items() if name == pool)
        where = "on one machine" if len(counts) == 1 else f"on {len(counts)} machines ({' + '.join(map(str, counts))})"
        each = "" if max(counts) == 1 else f", which share a machine's cores ({max(counts)} to a machine)"
        lines.append(f"pool {pool}: {_count(sum(counts), 'process', 'processes')} {where}{each}, with {inside}")
    if len(lines) > 1:
        lines.append("pools take turns, so a process has the threads that it would have if there were no other pool")
    if restarts := trainer.max_worker_restarts:
        lines.append(f"after a failure: up to {_count(restarts, 'restart')} from the last checkpoint")
    return lines


def _files(config: Config) -> list[str]:
    trainer = config.trainer
    lines = [f"run: {trainer.directory}", f"metrics: {', '.join(trainer.loggers)}"]
    for what, path in (("responses", trainer.rollout_data_dir), ("validation responses", trainer.validation_data_dir)):
        lines += [f"{what}: {path}"] if path is not None else []
    return lines
