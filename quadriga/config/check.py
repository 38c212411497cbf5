# SPDX-License-Identifier: Apache-2.0
"""Checks between keys, made before anything starts: what a training run would trip over, or would do in silence."""

from collections.abc import Callable

from quadriga.config.adapter_route import check_adapter_route
from quadriga.config.arithmetic import batch_plan
from quadriga.config.check_layout import check_layouts
from quadriga.config.check_lora import check_lora
from quadriga.config.check_multi_turn import check_multi_turn
from quadriga.config.check_paths import check_paths
from quadriga.config.check_reward_model import check_reward_model
from quadriga.config.check_rollout import check_rollout
from quadriga.config.findings import Findings
from quadriga.config.placement import check_placement
from quadriga.config.problems import combined
from quadriga.config.root import Config
from quadriga.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"
_ACTOR = "actor_rollout_ref.actor"


def training_findings(config: Config) -> tuple[list[ConfigError], list[str]]:
    """What is wrong with a training run, and what its user should know."""
    found = Findings()
    for check in _CHECKS:
        check(config, found)
    return found.problems, found.notices


def check_training(config: Config) -> list[str]:
    """Refuses a configuration that cannot train.

    Returns:
        Notices.

    Raises:
        ConfigError: with everything that is wrong.
    """
    problems, notices = training_findings(config)
    if problems:
        raise combined(problems)
    return notices


def _check_batches(config: Config, found: Findings) -> None:
    plan, actor = batch_plan(config), config.actor_rollout_ref.actor
    if actor.ppo_mini_batch_size > plan.num_prompts:
        found.notice(
            f"{_ACTOR}.ppo_mini_batch_size: mini-batches of {actor.ppo_mini_batch_size} of {plan.num_prompts} prompts: "
            "the whole batch is one mini-batch."
        )
    elif rest := plan.num_prompts % actor.ppo_mini_batch_size:
        found.notice(
            f"{_ACTOR}.ppo_mini_batch_size: {plan.num_prompts} prompts in mini-batches of {actor.ppo_mini_batch_size}: "
            f"the last one has {rest}."
        )
    limit = config.data.train_max_samples
    if 0 < limit < plan.num_prompts:
        found.refuse(
            "data.train_batch_size",
            got=f"{plan.num_prompts}, with data.train_max_samples={limit}",
            expected=f"at most {limit}",
            fix="Not one batch would be full: take more samples, or a smaller batch.",
        )


def _check_micro_batches(config: Config, found: Findings) -> None:
    longest = batch_plan(config).max_sequence_tokens
    policy = config.actor_rollout_ref
    for key, size, by_tokens, tokens in (
        (f"{_ACTOR}.ppo", policy.actor.ppo_micro_batch_size_per_gpu, policy.actor.use_dynamic_bsz,
         policy.actor.ppo_max_token_len_per_gpu),
        (f"{_ROLLOUT}.log_prob", policy.rollout.log_prob_micro_batch_size_per_gpu,
         policy.rollout.log_prob_use_dynamic_bsz, policy.rollout.log_prob_max_token_len_per_gpu),
        ("actor_rollout_ref.ref.log_prob", policy.ref.log_prob_micro_batch_size_per_gpu,
         policy.ref.log_prob_use_dynamic_bsz, policy.ref.log_prob_max_token_len_per_gpu),
    ):  # fmt: skip
        if size is not None and by_tokens:
            found.notice(
                f"{key}_micro_batch_size_per_gpu: not used, for micro-batches are cut by {key}_max_token_len_per_gpu."
            )
        if (size is None or by_tokens) and tokens < longest:
            found.notice(
                f"{key}_max_token_len_per_gpu: {tokens} tokens, but a sequence may have {longest}: "
                "a longer one is a micro-batch of its own."
            )


def _check_sampling(config: Config, found: Findings) -> None:
    rollout = config.actor_rollout_ref.rollout
    greedy = "Training learns from the differences between answers: let it sample."
    if not rollout.do_sample:
        found.refuse(f"{_ROLLOUT}.do_sample", got="false", expected="true", fix=greedy)
    if rollout.temperature == 0:
        equal = f" All {rollout.n} answers to a prompt would be the same, and teach nothing." if rollout.n > 1 else ""
        found.refuse(f"{_ROLLOUT}.temperature", got="0", expected="a number above 0", fix=greedy + equal)
    if rollout.top_p < 1 or rollout.top_k != -1 or rollout.min_p > 0:
        found.notice(
            f"{_ROLLOUT}.top_p, top_k, min_p: generation leaves out unlikely tokens, the log-probabilities of training "
            "do not: what is learned from differs a little from what was sampled."
        )
    for engine in ("vllm", "sglang", "native", "hf", "scripted"):
        if engine != rollout.name and isinstance(rollout.engine_kwargs.get(engine), dict):
            found.notice(f"{_ROLLOUT}.engine_kwargs.{engine}: not used, for {_ROLLOUT}.name is {rollout.name}.")


def _check_kept_answers(config: Config, found: Findings) -> None:
    rollout = config.actor_rollout_ref.rollout
    stop, warn = rollout.log_prob_diff_stop, rollout.log_prob_diff_warn
    if stop is not None and stop < warn:
        found.notice(f"{_ROLLOUT}.log_prob_diff_warn: the run stops at {stop:g} before it would warn at {warn:g}.")
    if rollout.skip.enable:
        found.notice(
            f"{_ROLLOUT}.skip: steps whose answers are in {rollout.skip.dump_dir} do not generate, whatever the "
            "weights are by then; the others keep theirs there."
        )
        if rollout.skip.action == "repeat":
            found.notice(f"{_ROLLOUT}.skip.action: repeat: every step learns from the same answers.")


def _check_filter_groups(config: Config, found: Findings) -> None:
    groups, rollout, trainer = config.algorithm.filter_groups, config.actor_rollout_ref.rollout, config.trainer
    key = "algorithm.filter_groups"
    if not groups.enable:
        return
    if rollout.n == 1:
        found.refuse(
            f"{key}.enable",
            got="true, with actor_rollout_ref.rollout.n=1",
            expected="groups of at least 2 answers",
            fix=f"An only answer equals itself, so nothing would be kept: raise {_ROLLOUT}.n, or turn the filter off.",
        )
    if rollout.skip.enable and rollout.skip.action == "repeat":
        found.refuse(
            f"{_ROLLOUT}.skip.action",
            got="repeat, with algorithm.filter_groups.enable=True",
            expected="cache",
            fix="Every batch of prompts of a step would be the same one, and fill it with copies.",
        )
    if trainer.total_training_steps is None:
        found.notice(
            f"{key}: a step may take several batches of prompts: the steps of trainer.total_epochs="
            f"{trainer.total_epochs} go over the data more often; trainer.total_training_steps sets their number."
        )
    if groups.max_num_gen_batches == 0:
        found.notice(
            f"{key}.max_num_gen_batches: 0: a step asks until its batch is full, for ever if no answers differ."
        )


def _check_async_rewards(config: Config, found: Findings) -> None:
    key = "reward_model.launch_reward_fn_async"
    if not config.reward_model.launch_reward_fn_async:
        return
    if config.algorithm.filter_groups.enable:
        found.notice(f"{key}: not used: algorithm.filter_groups asks for rewards before the batch of a step is full.")
    elif config.actor_rollout_ref.rollout.mode == "async":
        found.notice(
            f"{key}: used by reward managers that grade whole batches only: with {_ROLLOUT}.mode=async the others "
            "grade each answer while more are being generated."
        )


def _check_validation(config: Config, found: Findings) -> None:
    sampling, trainer = config.actor_rollout_ref.rollout.val_kwargs, config.trainer
    key = f"{_ROLLOUT}.val_kwargs"
    if not sampling.do_sample and sampling.temperature > 0:
        found.notice(
            f"{key}.temperature: not used, for {key}.do_sample is false: validation takes the likeliest token."
        )
    if sampling.do_sample and sampling.temperature == 0:
        found.notice(f"{key}.do_sample: at temperature 0 validation takes the likeliest token all the same.")
    if sampling.n > 1 and (not sampling.do_sample or sampling.temperature == 0):
        found.notice(
            f"{key}.n: validation takes the likeliest token, so the {sampling.n} answers to a prompt are equal."
        )
    if trainer.val_only and not trainer.val_before_train:
        found.refuse(
            "trainer.val_only",
            got="true, with trainer.val_before_train=False",
            expected="the first validation",
            fix="Nothing would run: set trainer.val_before_train=True.",
        )


def _check_loss(config: Config, found: Findings) -> None:
    actor, algorithm = config.actor_rollout_ref.actor, config.algorithm
    for key, section in ((_ACTOR, actor), ("critic", config.critic)):
        is_norm = section.loss_agg_mode == "seq-mean-token-sum-norm"
        if is_norm and section.loss_scale_factor is None:
            found.notice(
                f"{key}.loss_scale_factor: token sums are divided by data.max_response_length, "
                f"{config.data.max_response_length}."
            )
        elif not is_norm and section.loss_scale_factor is not None:
            found.notice(f"{key}.loss_scale_factor: not used with loss_agg_mode={section.loss_agg_mode}.")
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        found.notice(
            f"{_ACTOR}.use_kl_loss, algorithm.use_kl_in_reward: the divergence from the reference counts twice, "
            "in the loss and in the reward."
        )
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        found.notice(f"{_ACTOR}.kl_loss_coef: at 0 the reference model is computed only to report the divergence.")
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        found.notice("algorithm.kl_ctrl.type: not used, for algorithm.use_kl_in_reward is false.")
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        found.notice("algorithm.kl_ctrl.kl_coef: at 0 the reference model is computed only to report the divergence.")


def _check_schedule(config: Config, found: Findings) -> None:
    steps, warmup = config.trainer.total_training_steps, config.trainer.critic_warmup
    if steps is not None and warmup >= steps:
        found.refuse(
            "trainer.critic_warmup",
            got=f"{warmup}, with trainer.total_training_steps={steps}",
            expected=f"at most {steps - 1}",
            fix="The actor would never learn.",
        )
    for key, optim in (
        (f"{_ACTOR}.optim", config.actor_rollout_ref.actor.optim),
        ("critic.optim", config.critic.optim),
    ):
        if steps is not None and optim.lr_warmup_steps >= steps:
            found.notice(f"{key}.lr_warmup_steps: the run ends in warm-up; the rate never reaches {optim.lr:g}.")
        if optim.lr_warmup_steps >= 0 and optim.lr_warmup_steps_ratio > 0:
            found.notice(f"{key}.lr_warmup_steps_ratio: not used, for lr_warmup_steps is {optim.lr_warmup_steps}.")
        if optim.lr_scheduler_type == "constant" and optim.min_lr_ratio > 0:
            found.notice(f"{key}.min_lr_ratio: not used, for the rate stays constant after warm-up.")
        if optim.lr == 0:
            found.notice(f"{key}.lr: at 0 nothing is learned.")


def _check_checkpoints(config: Config, found: Findings) -> None:
    trainer = config.trainer
    for key, part in ((f"{_ACTOR}.checkpoint", config.actor_rollout_ref.actor.checkpoint),
                      ("critic.checkpoint", config.critic.checkpoint)):  # fmt: skip
        missing = [one for one in part.load_contents if one not in part.save_contents]
        if missing:
            found.refuse(
                f"{key}.load_contents",
                got=", ".join(missing),
                expected=f"parts of {key}.save_contents",
                fix="What is not written cannot be read.",
            )
        absent = [one for one in ("model", "optimizer", "extra") if one not in part.load_contents]
        if absent and not missing and trainer.save_freq > 0:
            found.notice(
                f"{key}: without {', '.join(absent)} a resumed run does not equal the run that was not stopped."
            )
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is None:
        found.refuse(
            "trainer.resume_from_path",
            got="null, with trainer.resume_mode=resume_path",
            expected="a checkpoint",
            fix="Name its directory, or set trainer.resume_mode=auto.",
        )
    if trainer.resume_mode != "resume_path" and trainer.resume_from_path is not None:
        found.notice(f"trainer.resume_from_path: not used, for trainer.resume_mode is {trainer.resume_mode}.")
    if trainer.save_freq == -1 and not trainer.val_only:
        found.notice("trainer.save_freq: no checkpoint is written; the trained weights end with the run.")
    if trainer.save_freq == -1 and trainer.max_ckpt_to_keep is not None:
        found.notice("trainer.max_ckpt_to_keep: not used, for trainer.save_freq is -1.")


def _check_profiler(config: Config, found: Findings) -> None:
    profiler = config.global_profiler
    if profiler.tool is not None and not profiler.steps:
        found.notice("global_profiler.steps: no step is listed, so nothing is profiled.")
    if profiler.tool is None and profiler.steps:
        found.notice("global_profiler.tool: not set, so the steps listed are not profiled.")


_CHECKS: tuple[Callable[[Config, Findings], None], ...] = (
    check_paths, _check_batches, _check_micro_batches, _check_sampling, _check_kept_answers, _check_filter_groups,
    _check_async_rewards, _check_validation, _check_loss, _check_schedule, _check_checkpoints, _check_profiler,
    check_placement, check_reward_model, check_layouts, check_lora, check_adapter_route, check_rollout,
    check_multi_turn,
)  # fmt: skip
