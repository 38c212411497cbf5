# SPDX-License-Identifier: Apache-2.0
"""Checks between sections of the configuration, made before anything starts.

They yield errors for what would fail later, and notices about effects that users may not expect.
Checks of the values of a single section are its `findings`. Checks of paths, of lengths, of the
rollout, of asynchronous training and of placement have files of their own.
"""

from collections.abc import Iterator

from quadriga.config.actor import ActorConfig, CriticConfig
from quadriga.config.adapter import check_adapter
from quadriga.config.async_checks import check_async, check_streaming
from quadriga.config.base import Findings, Section, notice_unused
from quadriga.config.distillation import is_served
from quadriga.config.explain import BatchPlan, writes_checkpoints
from quadriga.config.length_checks import check_positions
from quadriga.config.path_checks import check_files, check_paths
from quadriga.config.placement import (
    ACTOR,
    DISTILLATION,
    check_layouts,
    check_megatron,
    check_placement,
    check_profiles,
)
from quadriga.config.rollout import ROLLOUT
from quadriga.config.rollout_checks import (
    check_groups,
    check_multi_turn,
    check_replay,
    check_rollout,
)
from quadriga.config.root import Config
from quadriga.errors import ConfigError


def training_findings(
    config: Config, *, is_verls: bool = False
) -> tuple[list[ConfigError], list[str]]:
    """Run all checks of a training run.

    Args:
        config: the run.
        is_verls: whether the configuration is from a command line of verl, which allows groups of
            one response with any estimator.

    Returns:
        The problems, and the notices for the user.
    """
    problems = []
    notices = []
    for check in _CHECKS if config.task == "rl" else _SUPERVISED_CHECKS:
        if is_verls and check is check_groups:
            continue
        for finding in check(config):
            if isinstance(finding, ConfigError):
                problems.append(finding)
            else:
                notices.append(finding)
    return problems, notices


def check_sections(config: Config) -> Findings:
    """Yield the findings of each section about its own values."""
    # Each section with its dotted key. The list grows while it is read, breadth first, so findings
    # of outer sections come first.
    sections: list[tuple[str, Section]] = [("", config)]
    for at, section in sections:
        yield from section.notice_unread(at)
        yield from section.findings(at)
        for name, value in section:
            if isinstance(value, Section):
                # The key of the root is "", so its sections' keys would begin with a dot.
                sections.append((f"{at}.{name}".lstrip("."), value))


def check_distillation(config: Config) -> Findings:
    """Yield settings outside the section `distillation` that do not fit a teacher."""
    section = config.distillation
    if not section.enable:
        return
    temperature = config.actor_rollout_ref.rollout.temperature
    # Probabilities of student and teacher are compared at one temperature.
    if any(map(is_served, section.all_teachers)) and temperature != 1.0:
        yield ConfigError(
            f"{ROLLOUT}.temperature",
            f"{temperature:g}, with a teacher that is a server",
            "1: the server returns probabilities at temperature 1",
            "Set it to 1, or let the run load the teacher.",
        )
    if not section.use_task_rewards and config.algorithm.use_kl_in_reward:
        yield ConfigError(
            "algorithm.use_kl_in_reward",
            f"true, with {DISTILLATION}.use_task_rewards=False",
            "false: the policy does not learn from rewards",
            f"Set {ACTOR}.use_kl_loss=True instead.",
        )


def check_batches(config: Config) -> Findings:
    """Yield mini-batches that are not full, batches that never are, and small micro-batches."""
    num_prompts = config.data.train_batch_size
    mini_batch_size = config.actor_rollout_ref.actor.ppo_mini_batch_size
    key = f"{ACTOR}.ppo_mini_batch_size"
    num_last_prompts = num_prompts % mini_batch_size
    if mini_batch_size > num_prompts:
        yield (
            f"{key}: mini-batches of {mini_batch_size} of {num_prompts} prompts: "
            "the whole batch is one mini-batch."
        )
    elif num_last_prompts:
        yield (
            f"{key}: {num_prompts} prompts in mini-batches of {mini_batch_size}: "
            f"the last one has {num_last_prompts}."
        )
    # Only full batches are trained on.
    limit = config.data.train_max_samples
    if 0 < limit < num_prompts:
        yield ConfigError(
            "data.train_batch_size",
            f"{num_prompts}, with data.train_max_samples={limit}",
            f"at most {limit}",
            "No batch would be full: use more samples, or a smaller batch.",
        )
    if config.data.gen_batch_size is not None and not config.algorithm.filter_groups.enable:
        yield from notice_unused(["data.gen_batch_size"], "algorithm.filter_groups.enable is false")

    yield from _check_micro_batches(config)


def _check_micro_batches(config: Config) -> Iterator[str]:
    """Yield notices about token limits of micro-batches below the longest possible sequence."""
    max_tokens = BatchPlan(config).max_sequence_tokens
    # By key, the limit of each pass whose micro-batches are cut by tokens.
    limits: dict[str, int] = {}
    policy = config.actor_rollout_ref
    actor = policy.actor
    if actor.ppo_micro_batch_size_per_gpu is None or actor.use_dynamic_bsz:
        limits[f"{ACTOR}.ppo_max_token_len_per_gpu"] = actor.ppo_max_token_len_per_gpu
    for at, section in ((ROLLOUT, policy.rollout), ("actor_rollout_ref.ref", policy.ref)):
        has_size = section.log_prob_micro_batch_size_per_gpu is not None
        if section.log_prob_use_dynamic_bsz or not has_size:
            limits[f"{at}.log_prob_max_token_len_per_gpu"] = section.log_prob_max_token_len_per_gpu
    reward = config.reward_model
    if reward.enable and (reward.micro_batch_size_per_gpu is None or reward.use_dynamic_bsz):
        key = "reward_model.forward_max_token_len_per_gpu"
        limits[key] = reward.forward_max_token_len_per_gpu
    for key, limit in limits.items():
        if limit < max_tokens:
            yield (
                f"{key}: {limit} tokens, but a sequence may have {max_tokens}: "
                "a longer sequence is computed alone."
            )


def check_update(config: Config) -> Findings:
    """Yield KL terms without effect or counted twice, and problems in the training of a model."""
    actor = config.actor_rollout_ref.actor
    algorithm = config.algorithm
    zero_notice = "at 0 the reference model is computed only to report the KL divergence."
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield from notice_unused(["algorithm.kl_ctrl.type"], "algorithm.use_kl_in_reward is false")
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        yield f"algorithm.kl_ctrl.kl_coef: {zero_notice}"
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield f"{ACTOR}.kl_loss_coef: {zero_notice}"
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            f"{ACTOR}.use_kl_loss, algorithm.use_kl_in_reward: "
            "the KL divergence counts twice, in the loss and in the reward."
        )
    yield from _check_trained(config, ACTOR, actor)
    yield from _check_trained(config, "critic", config.critic)


def _check_trained(config: Config, at: str, section: ActorConfig | CriticConfig) -> Findings:
    """Yield problems with the learning rate, the scale of the loss or the checkpoints of a model.

    Args:
        config: the run.
        at: dotted key of the section.
        section: the section of the actor or the critic, which are the trained models.
    """
    optim = section.optim
    num_steps = config.trainer.total_training_steps
    if optim.lr == 0:
        yield f"{at}.optim.lr: at 0 nothing is learned."
    if section.loss_agg_mode == "seq-mean-token-sum-norm" and section.loss_scale_factor is None:
        yield (
            f"{at}.loss_scale_factor: token sums are divided by data.max_response_length, "
            f"{config.data.max_response_length}."
        )
    if num_steps is not None and optim.lr_warmup_steps >= num_steps:
        yield (
            f"{at}.optim.lr_warmup_steps: the run ends during warm-up; "
            f"the rate never reaches {optim.lr:g}."
        )

    # A checkpoint must have at least the parts that a resumed run reads.
    checkpoint = section.checkpoint
    loaded = checkpoint.load_contents
    unsaved_parts = [part for part in loaded if part not in checkpoint.save_contents]
    if unsaved_parts:
        yield ConfigError(
            f"{at}.checkpoint.load_contents",
            ", ".join(unsaved_parts),
            f"parts of {at}.checkpoint.save_contents",
            "What is not written cannot be read.",
        )
        return
    # Without one of these three parts a resumed run cannot continue exactly.
    skipped_parts = [part for part in ("model", "optimizer", "extra") if part not in loaded]
    if skipped_parts and writes_checkpoints(config):
        yield (
            f"{at}.checkpoint: without {', '.join(skipped_parts)} a resumed run differs from a "
            "run that was not interrupted."
        )


def check_supervised(config: Config) -> Findings:
    """Yield settings that SFT and the training of reward models do not support."""
    model = config.actor_rollout_ref.model
    # Findings of other sections are about keys that supervised tasks do not read.
    yield from model.findings("actor_rollout_ref.model")
    if config.data.truncation == "middle":
        yield ConfigError(
            "data.truncation", f"'middle', with task={config.task}", "error, left or right"
        )
    loss_agg_mode = config.actor_rollout_ref.actor.loss_agg_mode
    if loss_agg_mode == "rollout-mean-token-mean":
        yield ConfigError(
            "actor_rollout_ref.actor.loss_agg_mode",
            repr(loss_agg_mode),
            f"another one: task={config.task} has no rollouts",
            "Set it to seq-mean-token-mean.",
        )
    if model.has_adapter and model.lora_merge is not None:
        yield ConfigError(
            "actor_rollout_ref.model.lora_merge",
            str(model.lora_merge),
            "null: nothing generates",
            "Leave the key out; `quadriga export` merges an adapter.",
        )
    if config.task == "reward_model":
        yield from _check_pairs(config)


def _check_pairs(config: Config) -> Findings:
    """Yield settings that the training of a reward model on pairs does not support."""
    actor = config.actor_rollout_ref.actor
    if config.data.truncation == "right":
        yield ConfigError(
            "data.truncation",
            "'right', for pairs",
            "error or left",
            (
                "Set data.truncation=left, which cuts the prompt, "
                "or data.filter_overlong, which leaves the pair out."
            ),
        )
    if config.actor_rollout_ref.model.has_adapter:
        yield ConfigError(
            "actor_rollout_ref.model.lora_rank",
            "an adapter",
            "none, for objective=reward_model",
            "Leave lora_rank and lora_adapter_path out: all weights of a reward model are trained.",
        )
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        size = getattr(actor, name)
        if size > 1:
            yield ConfigError(
                f"{ACTOR}.{name}",
                f"{size}, for objective=reward_model",
                "1",
                f"Shard weights with {ACTOR}.fsdp_config.fsdp_size.",
            )


# Missing files come first: they are the most frequent mistake.
_SUPERVISED_CHECKS = (
    check_files,
    check_paths,
    check_positions,
    check_layouts,
    check_megatron,
    check_profiles,
    check_adapter,
    check_supervised,
)
_CHECKS = (
    check_files,
    check_paths,
    check_sections,
    check_positions,
    check_batches,
    check_groups,
    check_rollout,
    check_update,
    check_replay,
    check_multi_turn,
    check_placement,
    check_layouts,
    check_megatron,
    check_profiles,
    check_adapter,
    check_async,
    check_streaming,
    check_distillation,
)
