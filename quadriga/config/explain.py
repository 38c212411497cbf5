# SPDX-License-Identifier: Apache-2.0
"""Describes a configuration in words: batch arithmetic, steps of a run, and the resolved tree."""

from collections.abc import Iterable, Iterator

from quadriga.config.keys import leaf_keys
from quadriga.config.placement import (
    enabled_roles,
    role_pools,
    rollout_devices,
    rollout_group_size,
    rollout_ranks,
)
from quadriga.config.root import Config, spell_key
from quadriga.config.trainer import TrainerConfig
from quadriga.config.yaml_text import to_yaml
from quadriga.redact import redact

_ROLE_WORDS = {
    "actor_rollout_ref": "actor, rollout and reference (if one is used)",
    "actor_rollout": "actor and rollout",
    "ref": "reference (if one is used)",
    "critic": "critic (if the advantages take values)",
    "reward_model": "reward model",
    "teacher": "teacher",
}


class BatchPlan:
    """Batch arithmetic of one training step of the actor.

    Attributes:
        num_prompts: prompts of the step.
        num_sequences: sequences that the step generates and trains on.
        mini_batch_prompts: prompts of a mini-batch.
        mini_batch_sequences: sequences of a mini-batch.
        num_mini_batches: mini-batches of one epoch; the last one may be smaller.
        num_optimizer_steps: optimizer steps of all epochs.
        is_on_policy: whether the policy that sampled makes the only update, so that old
            log-probabilities equal current ones.
        micro_batch_sequences: sequences of a micro-batch; None if micro-batches are cut by tokens.
        num_micro_batches: micro-batches of a mini-batch; None if they are cut by tokens.
        max_sequence_tokens: tokens of the longest possible sequence.
    """

    def __init__(self, config: Config) -> None:
        actor = config.actor_rollout_ref.actor
        num_responses = config.actor_rollout_ref.rollout.n
        self.num_prompts = config.data.train_batch_size
        self.num_sequences = self.num_prompts * num_responses
        self.mini_batch_prompts = min(actor.ppo_mini_batch_size, self.num_prompts)
        self.mini_batch_sequences = self.mini_batch_prompts * num_responses
        self.num_mini_batches = _ceil_div(self.num_prompts, self.mini_batch_prompts)
        self.num_optimizer_steps = self.num_mini_batches * actor.ppo_epochs
        self.is_on_policy = self.num_optimizer_steps == 1
        self.micro_batch_sequences: int | None = None
        self.num_micro_batches: int | None = None
        size = actor.ppo_micro_batch_size_per_gpu
        if size and not actor.use_dynamic_bsz:
            self.micro_batch_sequences = min(size, self.mini_batch_sequences)
            self.num_micro_batches = _ceil_div(self.mini_batch_sequences, size)
        self.max_sequence_tokens = config.data.max_prompt_length + config.data.max_response_length


def _ceil_div(number: int, divisor: int) -> int:
    """Divide and round up."""
    return -(-number // divisor)


def needs_old_log_prob_pass(config: Config) -> bool:
    """Whether log-probs of the sampling policy are computed in a separate pass.

    If a batch has a single optimizer step, the forward pass of the update computes the same
    numbers. A separate pass is still needed if the KL divergence in the reward or off-policy
    correction reads log-probs before the update, or if the update repeats the expert choices of
    that pass.
    """
    correction = config.algorithm.rollout_correction
    if correction.needs_old_log_probs or config.algorithm.use_kl_in_reward:
        return True
    if config.actor_rollout_ref.actor.router_replay == "old_log_prob":
        return True
    # In bypass mode the rollout's log-probs are used as old ones, even for several optimizer steps.
    return not correction.bypass_mode and not BatchPlan(config).is_on_policy


def needs_reference(config: Config) -> bool:
    """Whether the run needs a frozen reference model."""
    return config.algorithm.use_kl_in_reward or config.actor_rollout_ref.actor.use_kl_loss


def learns_from_rewards(config: Config) -> bool:
    """Whether the policy learns from rewards, and not only from a teacher."""
    return not config.distillation.enable or config.distillation.use_task_rewards


def saves_by_time(config: Config) -> bool:
    """Whether the clock decides when a checkpoint is written: `trainer.save_minutes`."""
    trainer = config.trainer
    is_on = trainer.save_freq == -1 and trainer.save_minutes is not None
    return is_on and not config.async_training.enable


def writes_checkpoints(config: Config) -> bool:
    """Whether the run writes checkpoints, by steps or by time."""
    return config.trainer.save_freq != -1 or saves_by_time(config)


def show(config: Config) -> str:
    """Format the resolved configuration as YAML, with the keys that the task reads.

    The YAML can be loaded again, and gives an equal configuration once the secrets that
    `quadriga.redact` hides are filled in.
    """
    # The tree of the schema: the values of all keys, in the schema's spelling.
    dumped = redact(config.model_dump(mode="json"))
    # The tree to show: the keys that the task reads, in the task's spelling.
    tree = {}
    for key in leaf_keys(config.task):
        value = dumped
        for name in spell_key(key, config.task, in_full=True).split("."):
            value = value[name]
        *path, last = key.split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
        node[last] = value
    return to_yaml(tree)


def explain(
    config: Config,
    num_train_prompts: int | None = None,
    estimator_fields: tuple[str, ...] | None = None,
) -> str:
    """Describe a training run with this configuration.

    Args:
        config: the run.
        num_train_prompts: number of training prompts; None if they have not been counted.
        estimator_fields: fields of a batch that the advantage estimator reads; None if unknown.
    """
    plan = BatchPlan(config)
    paragraphs = [
        _paragraph("Step", _describe_step(config, plan)),
        _paragraph("Update", _describe_update(config, plan)),
    ]
    if config.async_training.enable:
        paragraphs.append(_paragraph("Overlap", _describe_overlap(config)))
    paragraphs += [
        _paragraph("Passes", _describe_passes(config, plan, estimator_fields)),
        _paragraph("Run", _describe_run(config, plan, num_train_prompts)),
        _paragraph("Processes", _describe_processes(config)),
        _paragraph("Files", _describe_files(config.trainer)),
    ]
    return "\n".join(paragraphs)


def _paragraph(title: str, lines: Iterable[str]) -> str:
    """Format a title with indented lines below it."""
    return "\n  ".join([title, *lines]) + "\n"


def _count(number: int, singular: str, plural: str = "") -> str:
    """Format a number with its noun, such as "2 batches"; by default the plural adds an s."""
    noun = singular if number == 1 else plural or f"{singular}s"
    return f"{number} {noun}"


def _describe_step(config: Config, plan: BatchPlan) -> Iterator[str]:
    """Describe the size of a step: prompts, responses and tokens."""
    rollout = config.actor_rollout_ref.rollout
    groups = config.algorithm.filter_groups
    yield (
        f"{_count(plan.num_prompts, 'prompt')} x {_count(rollout.n, 'response')} = "
        f"{_count(plan.num_sequences, 'sequence')}, "
        f"generated by {rollout.name} at temperature {rollout.temperature:g}"
    )
    yield (
        f"up to {config.data.max_prompt_length} + {config.data.max_response_length} = "
        f"{plan.max_sequence_tokens} tokens per sequence, "
        f"{plan.num_sequences * plan.max_sequence_tokens} per step"
    )
    if groups.enable:
        batches = "any number of batches"
        if groups.max_num_gen_batches:
            batches = f"up to {_count(groups.max_num_gen_batches, 'batch', 'batches')} of prompts"
        yield (
            f"prompts whose responses all have the same {groups.metric} are replaced: "
            f"{batches} per step"
        )


def _describe_files(trainer: TrainerConfig) -> Iterator[str]:
    """List where the run writes: directories, files and loggers."""
    yield f"run: {trainer.directory}"
    yield f"metrics: {', '.join(trainer.loggers)}"
    if trainer.rollout_record != "off":
        yield f"rollouts: {trainer.directory / 'rollouts'}"
    if trainer.rollout_data_dir is not None:
        yield f"responses: {trainer.rollout_data_dir}"
    if trainer.validation_data_dir is not None:
        yield f"validation responses: {trainer.validation_data_dir}"


def _describe_update(config: Config, plan: BatchPlan) -> Iterator[str]:
    """Describe the mini-batches and micro-batches of an update, and its loss."""
    actor = config.actor_rollout_ref.actor
    yield (
        f"{_count(plan.num_optimizer_steps, 'optimizer step')} per batch: "
        f"{_count(plan.num_mini_batches, 'mini-batch', 'mini-batches')} of "
        f"{_count(plan.mini_batch_prompts, 'prompt')} "
        f"({_count(plan.mini_batch_sequences, 'sequence')}) x {_count(actor.ppo_epochs, 'epoch')}"
    )
    # Prompts that do not fill a mini-batch.
    num_last_prompts = plan.num_prompts % plan.mini_batch_prompts
    if num_last_prompts:
        yield f"the last mini-batch has {_count(num_last_prompts, 'prompt')}"
    if plan.num_micro_batches is None:
        yield f"micro-batches of up to {actor.ppo_max_token_len_per_gpu} tokens"
    else:
        yield (
            f"{_count(plan.num_micro_batches, 'micro-batch', 'micro-batches')} of "
            f"{plan.micro_batch_sequences} in a mini-batch; the gradient does not depend on their size"
        )

    teacher = config.distillation
    loss = f"{actor.policy_loss.loss_mode}, {actor.loss_agg_mode}"
    if teacher.enable:
        target = "the advantages" if teacher.use_policy_gradient else "the loss"
        loss += f"; {teacher.loss_mode} from the teacher, in {target}"
    advantages = "none from rewards"
    if learns_from_rewards(config):
        advantages = config.algorithm.adv_estimator
    yield f"advantages: {advantages}; loss: {loss}"
    warmup = config.trainer.critic_warmup
    if warmup:
        yield f"the actor waits for {_count(warmup, 'step')}, in which only a critic learns"


def _describe_overlap(config: Config) -> Iterator[str]:
    """Describe how generation and training overlap in an asynchronous run."""
    settings = config.async_training
    yield (
        "generation continues during training, with weights that are published every "
        f"{_count(settings.sync_every, 'step')}"
    )
    yield (
        f"the oldest token of a sample is up to {_count(settings.max_staleness, 'version')} behind "
        "the weights at the beginning of its step"
    )
    if settings.by_mini_batch:
        prompts = _count(BatchPlan(config).mini_batch_prompts, "prompt")
        yield f"an update starts as soon as the responses to {prompts} are complete"
    # Batches for the steps of the current version and of the next `max_staleness` versions. A version
    # lasts `sync_every` steps.
    num_batches = (settings.max_staleness + 1) * settings.sync_every
    waits = settings.on_stale == "wait"
    yield (
        f"up to {_count(num_batches, 'batch', 'batches')} are in flight or wait for a step; "
        f"{'a step waits for its own batch' if waits else 'stale samples are dropped'}"
    )
    if settings.in_flight == "finish":
        yield "new weights are loaded once the sequences in flight have ended"
    elif settings.kv_on_update == "recompute":
        yield "new weights are loaded during generation; the KV cache is recomputed"
    else:
        yield "new weights are loaded during generation; the KV cache is kept"


def _describe_passes(
    config: Config, plan: BatchPlan, fields: tuple[str, ...] | None
) -> Iterator[str]:
    """Describe the forward passes of each model in a step, besides those of the actor's update.

    Args:
        config: the run.
        plan: batch arithmetic of a step.
        fields: fields of a batch that the advantage estimator reads; None if unknown. Without
            "values" there is no critic.
    """
    actor = config.actor_rollout_ref.actor
    yield _describe_old_log_probs(config, plan)
    if fields is not None and "values" in fields:
        start = config.critic.model.path
        if start is None:
            start = "the policy's model"
        yield f"critic: one pass per step, for values, and its own update; it starts from {start}"
    if config.reward_model.enable:
        has_function = config.custom_reward_function.path is not None
        sum_text = ", added to the custom reward function" if has_function else ""
        yield f"reward model: one pass per step{sum_text}"
    if config.distillation.enable:
        yield f"teacher: one pass per step, by {' and '.join(config.distillation.all_teachers)}"
    if not needs_reference(config):
        yield "reference model: not needed (no KL term)"
        return
    uses = ["the loss"] if actor.use_kl_loss else []
    if config.algorithm.use_kl_in_reward:
        uses.append("the reward")
    reference = f"reference model: one pass per step, for {' and '.join(uses)}"
    # The actor with its adapter switched off is the reference.
    is_colocated = "actor_rollout_ref" in role_pools(config.trainer)
    if config.actor_rollout_ref.model.has_adapter and is_colocated:
        reference += ", by the actor with its adapter off"
    yield reference


def _describe_old_log_probs(config: Config, plan: BatchPlan) -> str:
    """Say whether old log-probs are computed in a separate pass, and why."""
    correction = config.algorithm.rollout_correction
    if not needs_old_log_prob_pass(config):
        reason = "a single update by the policy that sampled"
        if correction.bypass_mode:
            reason = "bypass mode takes those of the rollout"
        return f"old log-probs: no separate pass ({reason})"
    if not plan.is_on_policy and not correction.bypass_mode:
        reason = "several updates per batch"
    elif correction.needs_old_log_probs:
        reason = "off-policy correction needs them"
    elif config.algorithm.use_kl_in_reward:
        reason = "the KL divergence in the reward needs them"
    else:
        reason = "the update repeats the routes of that pass"
    return f"old log-probs: separate pass ({reason})"


def _describe_run(config: Config, plan: BatchPlan, num_train_prompts: int | None) -> Iterator[str]:
    """Describe the length of the run, its validations and its checkpoints."""
    trainer = config.trainer
    yield _describe_length(config, plan, num_train_prompts)
    validations = ["before training"] if trainer.val_before_train else []
    if trainer.test_freq != -1:
        validations.append(_every(trainer.test_freq))
    end = ", then the run ends" if trainer.val_only else ""
    yield f"validation: {' and '.join(validations) or 'none'}{end}"
    checkpoints = "none"
    if trainer.save_freq != -1:
        checkpoints = f"{_every(trainer.save_freq)} and at the end"
    elif saves_by_time(config):
        checkpoints = f"every {trainer.save_minutes:g} minutes and at the end"
    # Checkpoints by the clock are written without anybody having asked for them, so they must not
    # fill the disk.
    num_kept = trainer.max_ckpt_to_keep or (2 if saves_by_time(config) else None)
    if num_kept and checkpoints != "none":
        checkpoints += f", the last {num_kept} kept"
    yield f"checkpoints: {checkpoints}"
    yield f"resume: {trainer.resume_mode}"


def _describe_length(config: Config, plan: BatchPlan, num_train_prompts: int | None) -> str:
    """Describe the number of steps and epochs, as far as they are known before the data are read."""
    trainer = config.trainer
    filters_groups = config.algorithm.filter_groups.enable
    batch_size = plan.num_prompts
    if filters_groups and config.data.gen_batch_size:
        batch_size = config.data.gen_batch_size
    # Batches of an epoch; 0 if the prompts have not been counted.
    num_batches = (num_train_prompts or 0) // batch_size
    batches = _count(num_batches, "batch", "batches")
    max_steps = trainer.total_training_steps
    epochs = trainer.total_epochs
    if filters_groups and trainer.max_epochs:
        # A step may take several batches, so the number of steps is not known.
        steps = f"at most {_count(max_steps, 'step')}" if max_steps else "steps"
        size_of_pass = f" ({batches} each, at least one per step)" if num_batches else ""
        passes = _count(trainer.max_epochs, "pass", "passes")
        return f"{steps} until {passes} over the data are taken{size_of_pass}"
    if num_batches:
        num_steps = trainer.num_steps(num_batches)
        num_epochs = _ceil_div(num_steps, num_batches)
        return f"{_count(num_steps, 'step')}: {batches} per epoch, {_count(num_epochs, 'epoch')}"
    if max_steps and epochs:
        return f"at most {_count(max_steps, 'step')}, over at most {_count(epochs, 'epoch')}"
    if max_steps:
        return f"{_count(max_steps, 'step')}, over as many epochs as they take"
    return f"{_count(epochs or 1, 'epoch')}; the number of steps depends on the data"


def _every(frequency: int | str) -> str:
    """Format a frequency: a number of steps, or `after_each_epoch`."""
    if isinstance(frequency, int):
        return f"every {_count(frequency, 'step')}"
    return "after each epoch"


def _describe_processes(config: Config) -> Iterator[str]:
    """Describe the processes of the run, the roles in them, and what happens if one is lost."""
    trainer = config.trainer
    if trainer.backend == "local":
        yield "all models in one process, which computes with every core"
        return
    roles = role_pools(trainer, enabled_roles(config))
    # Several roles may be in one pool.
    pools = list(dict.fromkeys(roles.values()))
    for pool in pools:
        yield _describe_pool(config, pool, roles)
    # Several processes may form one rollout engine.
    size = rollout_group_size(config)
    if size > 1:
        groups = _count(sum(rollout_ranks(config)) // size, "rollout group")
        yield f"{groups} of {size} neighbouring processes, each with 1/{size} of the rollout's weights"
    if len(pools) > 1 and config.async_training.enable:
        yield "training and generation run at the same time, each process with the threads it would have alone"
    elif len(pools) > 1:
        yield "pools take turns, so each process has as many threads as if there were no other pool"
    yield from _describe_recovery(trainer)


def _describe_pool(config: Config, pool: str, roles: dict[str, str]) -> str:
    """Describe the processes of a resource pool, and the roles in them.

    Args:
        config: the run.
        pool: name of the pool.
        roles: name of the pool of each role.
    """
    # A rollout process may have several devices, where the engine starts processes of its own.
    num_devices = rollout_devices(config) if pool == roles.get("rollout") else 1
    # Number of processes on each machine.
    counts = [count // num_devices for count in config.trainer.processes_of(pool)]
    machines = "on one machine"
    if len(counts) > 1:
        machines = f"on {len(counts)} machines ({' + '.join(map(str, counts))})"
    sharing = ""
    if max(counts) != 1:
        sharing = f", which share a machine's cores ({max(counts)} to a machine)"
    names = [_ROLE_WORDS.get(role, role) for role, role_pool in roles.items() if role_pool == pool]
    text = (
        f"pool {pool}: {_count(sum(counts), 'process', 'processes')} {machines}{sharing}, "
        f"with {' and '.join(names)}"
    )
    if num_devices > 1:
        text += f", each on {num_devices} devices, where the engine starts {num_devices} processes"
    return text


def _describe_recovery(trainer: TrainerConfig) -> Iterator[str]:
    """Describe the limits on lost processes, skipped steps and waiting times."""
    restarts = trainer.max_worker_restarts
    if restarts:
        yield f"after the loss of a process or a node: up to {_count(restarts, 'restart')} an hour"
        if trainer.max_skipped_steps:
            steps = _count(trainer.max_skipped_steps, "step")
            yield f"a step that loses workers twice is skipped; up to {steps} in the run"
    limits = f"does not answer for {trainer.stall_timeout_s} s"
    if trainer.phase_timeout_s:
        limits += f", or whose call takes over {trainer.phase_timeout_s} s,"
    yield f"a process that {limits} is killed and counts as lost"
