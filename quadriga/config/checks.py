# SPDX-License-Identifier: Apache-2.0
"""Checks between sections, made before anything starts: what a training run would trip over, or would do in silence.

What a section can say of its own values alone stands beside its fields, as `findings`.
"""

import glob
import os
import re
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from pathlib import Path

from quadriga.config.adapter import check_adapter
from quadriga.config.base import Finding, Section, absent, unused, wrong
from quadriga.config.distillation import is_served
from quadriga.config.explain import BatchPlan, learns_from_rewards
from quadriga.config.multi_turn import FORMATS, LOOPS, InteractionFile, ToolFile, read_tool_file
from quadriga.config.placement import (
    ACTOR,
    DISTILLATION,
    asked_roles,
    check_layouts,
    check_megatron,
    check_placement,
    check_profiles,
    engine_ranks,
    role_pools,
    rollout_devices,
    rollout_group_size,
    rollout_ranks,
)
from quadriga.config.reward import check_classifier
from quadriga.config.rollout import ROLLOUT
from quadriga.config.root import Config
from quadriga.errors import ConfigError

_CUT_BY = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
_BY_GROUP = (
    "grpo", "grpo_vectorized", "grpo_passk", "rloo", "rloo_vectorized", "opo", "gdpo", "reinforce_plus_plus_baseline",
)  # fmt: skip
"""Estimators that compare the responses to one prompt; that of a group of one is its bare score."""
REPORTS_ROUTES = ("native",)  # engines that say which experts each token went through
_HUB_NAME = re.compile(r"[\w\-]+(?:/[\w.\-]+)?")


def training_findings(
    config: Config, *, is_verls: bool = False
) -> tuple[list[ConfigError], list[str]]:
    """What is wrong with a training run, and what its user should know; `is_verls` of a command line of verl's, which
    may compare a response with nothing."""
    checks = _CHECKS if config.task == "rl" else _SUPERVISED_CHECKS
    found = [
        one for check in checks if not (is_verls and check is check_groups) for one in check(config)
    ]
    problems = [one for one in found if isinstance(one, ConfigError)]
    return problems, [one for one in found if isinstance(one, str)]


def check_sections(config: Config) -> Iterator[Finding]:
    """Yields what each section finds in its own values."""
    sections: list[tuple[str, Section]] = [("", config)]
    while sections:
        at, section = sections.pop(0)
        yield from section.unread(at)
        yield from section.findings(at)
        sections += [
            (f"{at}.{name}".lstrip("."), value)
            for name, value in section
            if isinstance(value, Section)
        ]


def check_paths(config: Config) -> Iterator[Finding]:
    """Yields paths that are missing, and directories that cannot be written."""
    trainer, data, rollout = config.trainer, config.data, config.actor_rollout_ref.rollout
    responses, key = None, f"{ROLLOUT}.engine_kwargs.responses_file"
    template = config.actor_rollout_ref.model.custom_chat_template
    if rollout.name == "scripted":
        responses = rollout.engine_kwargs.get("responses_file")
        if not isinstance(responses, str):
            yield absent(
                key, "nothing", "a file", "The scripted engine reads its responses from it."
            )
    resumed_from = trainer.resume_from_path if trainer.resume_mode == "resume_path" else None
    for name, path, what in (
        ("custom_reward_function.path", config.custom_reward_function.path, "a Python file"),
        ("async_training.replay", config.async_training.replay, "a file"),
        ("data.custom_cls.path", data.custom_cls.path, "a Python file"),
        ("data.sampler.class_path", data.sampler.class_path, "a Python file"),
        (key, responses if isinstance(responses, str) else None, "a file"),
        (
            "actor_rollout_ref.model.custom_chat_template",
            None if "{" in (template or "{") else template,
            "a file",
        ),
        ("trainer.resume_from_path", resumed_from, "a checkpoint's directory"),
    ):
        yield from _check_exists(name, path, what)
    for name, path in (
        ("trainer.default_local_dir", str(trainer.directory)),
        ("trainer.rollout_data_dir", trainer.rollout_data_dir),
        (f"{ROLLOUT}.trace_dir", rollout.trace_dir),
        ("trainer.validation_data_dir", trainer.validation_data_dir),
        (
            "global_profiler.save_path",
            config.global_profiler.save_path if config.global_profiler.tool else None,
        ),
    ):
        if path is None:
            continue
        # The nearest directory above that exists must be one that we may write in.
        place = Path(path).expanduser().absolute()
        while not place.exists():
            place = place.parent
        if "://" in path:
            yield absent(
                name, f"'{path}'", "a local directory", "Write locally, and copy it from there."
            )
        elif not place.is_dir():
            yield absent(name, f"'{path}'", "a directory", f"{place} is a file.")
        elif not os.access(place, os.W_OK | os.X_OK):
            yield absent(
                name, f"'{path}'", "a directory that can be written", f"{place} cannot be."
            )


def _check_exists(key: str, path: str | None, what: str) -> Iterator[Finding]:
    is_there = os.path.isfile if what in ("a Python file", "a YAML file") else os.path.exists
    if path is None or (what == "a Python file" and path.startswith("pkg://")):
        return  # a module is found by importing it, which is not done here
    if not is_there(os.path.expanduser(path.removeprefix("file://"))):
        fix = f"There is no such {what.split()[-1]}; relative paths start where the command is run."
        yield absent(key, f"'{path}'", what, fix)


def check_files(config: Config) -> Iterator[Finding]:
    """Yields data files and models that are missing."""
    trainer, data, policy = config.trainer, config.data, config.actor_rollout_ref.model.path
    needs_validation = (trainer.val_before_train and config.task == "rl") or trainer.test_freq != -1
    without = " To train without validation set trainer.val_before_train=False and leave trainer.test_freq at -1."
    for key, files, is_needed, alternative in (
        ("data.train_files", data.train_files, True, ""),
        ("data.val_files", data.val_files, needs_validation, without),
    ):
        paths = [one for one in ([files] if isinstance(files, str) else files) if one]
        if not paths and is_needed:
            fix = f"Set {key} to a parquet, json or jsonl file (`quadriga prepare data` writes some).{alternative}"
            yield absent(key, "nothing", "a file", fix)
        # Files behind a URL are looked for when the data are loaded.
        for path in (one for one in paths if "://" not in one):
            full = os.path.expanduser(path)
            if not glob.has_magic(full) or os.path.exists(full):
                yield from _check_exists(key, path, "a file")
            elif not glob.glob(full, recursive=True):
                yield absent(key, f"'{path}'", "a pattern that fits a file", "No file fits it.")
    if not policy:
        fix = "Set it to a folder or a name on the hub (`quadriga prepare model` writes a folder)."
        yield absent("actor_rollout_ref.model.path", "nothing", "a model", fix)
    for key, path in (
        ("actor_rollout_ref.model.path", policy),
        ("critic.model.path", config.critic.model.path),
        (
            "reward_model.model.path",
            config.reward_model.model.path if config.reward_model.enable else None,
        ),
        *config.distillation.loaded.items(),
    ):
        folder = Path(path or "").expanduser()
        if path and folder.is_dir() and not (folder / "config.json").is_file():
            fix = "It does not hold a Hugging Face model: name the folder with config.json and the weights."
            yield absent(key, f"'{path}', without a config.json", "a model's folder", fix)
        elif path and not folder.is_dir() and not _HUB_NAME.fullmatch(path):
            fix = "There is no such folder, and it is not a name on the hub."
            yield absent(key, f"'{path}'", "a model's folder", fix)


def check_distillation(config: Config) -> Iterator[Finding]:
    """Yields what a teacher and the rest of the step do not agree about."""
    section, rollout = config.distillation, config.actor_rollout_ref.rollout
    if not section.enable:
        return
    if any(map(is_served, section.all_teachers)) and rollout.temperature != 1.0:
        got, expected = (
            f"{rollout.temperature:g}, with a teacher that is a server",
            "1: it tells probabilities at 1",
        )
        yield wrong(
            f"{ROLLOUT}.temperature", got, expected, "Set it to 1, or let the run load the teacher."
        )
    if not section.use_task_rewards and config.algorithm.use_kl_in_reward:
        got, expected = (
            f"true, with {DISTILLATION}.use_task_rewards=False",
            "false: no reward is learned from",
        )
        yield wrong(
            "algorithm.use_kl_in_reward",
            got,
            expected,
            f"Set {ACTOR}.use_kl_loss=True in its place.",
        )


def check_batches(config: Config) -> Iterator[Finding]:
    """Yields batches that are not full, or are cut in another way than the keys suggest."""
    plan, mini = BatchPlan(config), config.actor_rollout_ref.actor.ppo_mini_batch_size
    prompts, longest, limit = (
        plan.num_prompts,
        plan.max_sequence_tokens,
        config.data.train_max_samples,
    )
    key = f"{ACTOR}.ppo_mini_batch_size"
    if mini > prompts:
        yield f"{key}: mini-batches of {mini} of {prompts} prompts: the whole batch is one mini-batch."
    elif rest := prompts % mini:
        yield f"{key}: {prompts} prompts in mini-batches of {mini}: the last one has {rest}."
    if 0 < limit < prompts:
        got, fix = (
            f"{prompts}, with data.train_max_samples={limit}",
            "Not one batch would be full: take more samples",
        )
        yield wrong("data.train_batch_size", got, f"at most {limit}", f"{fix}, or a smaller batch.")
    if config.data.gen_batch_size is not None and not config.algorithm.filter_groups.enable:
        yield from unused(["data.gen_batch_size"], "algorithm.filter_groups.enable is false")
    policy, reward = config.actor_rollout_ref, [("reward_model", config.reward_model)]
    sections: list[tuple[str, Section]] = [
        (ACTOR, policy.actor), (ROLLOUT, policy.rollout), ("actor_rollout_ref.ref", policy.ref),
        *(reward if config.reward_model.enable else []),
    ]  # fmt: skip
    for at, section in sections:
        # The three fields have the same ends in every section.
        cut = {
            end: (name, value) for name, value in section for end in _CUT_BY if name.endswith(end)
        }
        (_, size), (_, is_by_tokens), (name, tokens) = (cut[end] for end in _CUT_BY)
        if (size is None or is_by_tokens) and tokens < longest:
            yield f"{at}.{name}: {tokens} tokens, but a sequence may have {longest}: a longer one is computed alone."


def check_groups(config: Config) -> Iterator[Finding]:
    """Yields groups of one response where responses are compared with their group."""
    if not learns_from_rewards(config):
        return
    if (
        estimator := config.algorithm.adv_estimator
    ) in _BY_GROUP and config.actor_rollout_ref.rollout.n == 1:
        fix = f"Nothing is compared with one response to a prompt: set {ROLLOUT}.n=8, or another estimator."
        got, expected = (
            f"1, with algorithm.adv_estimator={estimator}",
            "groups of at least 2 responses",
        )
        yield wrong(f"{ROLLOUT}.n", got, expected, fix)


def check_rollout(config: Config) -> Iterator[Finding]:
    """Yields lengths, dynamic sampling and rewards that the rollout cannot serve."""
    rollout, groups, trainer = (
        config.actor_rollout_ref.rollout,
        config.algorithm.filter_groups,
        config.trainer,
    )
    longest, reward = BatchPlan(config).max_sequence_tokens, config.reward_model
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        expected = (
            f"at least {longest}, data.max_prompt_length and data.max_response_length together"
        )
        got, fix = f"{rollout.max_model_len} tokens", "Leave it out, or lower those."
        yield wrong(f"{ROLLOUT}.max_model_len", got, expected, fix)
    key = "algorithm.filter_groups"
    if groups.enable and rollout.n == 1:
        fix = f"Nothing would be kept: raise {ROLLOUT}.n, or turn the filter off."
        yield wrong(
            f"{key}.enable", f"true, with {ROLLOUT}.n=1", "groups of at least 2 responses", fix
        )
    if groups.enable and rollout.skip.enable and rollout.skip.action == "repeat":
        fix = "Every batch of prompts of a step would be the same one, and fill it with copies."
        yield wrong(f"{ROLLOUT}.skip.action", f"repeat, with {key}.enable=True", "cache", fix)
    if groups.enable and groups.max_num_gen_batches == 0:
        yield f"{key}.max_num_gen_batches: 0: a step generates until its batch is full, for ever if none differ."
    if groups.enable and trainer.total_training_steps is None:
        ends = f"the run ends with the step that takes the last one of trainer.total_epochs={trainer.max_epochs}"
        yield f"{key}: a step may take several batches of prompts; {ends}."
    if reward.enable and reward.model.path is not None:
        yield from check_classifier(reward, longest)
    if reward.enable and config.custom_reward_function.path is not None:
        yield "reward_model.enable, custom_reward_function.path: the reward is the sum of both scores."


def check_streaming(config: Config) -> Iterator[Finding]:
    """Yields what needs all rows, or their number, where they are read as they are needed."""
    data, trainer, unknown = config.data, config.trainer, "How many rows there are is not known."
    if data.streaming is None:
        return
    for is_wrong, key, got, expected, fix in (
        (trainer.total_training_steps is None, "trainer.total_training_steps", "null", "a number of steps", unknown),
        (trainer.total_epochs is not None, "trainer.total_epochs", str(trainer.total_epochs), "null", unknown),
        (trainer.save_freq == "after_each_epoch", "trainer.save_freq", "after_each_epoch", "a number", unknown),
        (trainer.test_freq == "after_each_epoch", "trainer.test_freq", "after_each_epoch", "a number", unknown),
        (data.mixture, "data.mixture", str(data.mixture), "none", "Leave it out."),
        (data.custom_cls.path, "data.custom_cls.path", str(data.custom_cls.path), "null", "Leave one of them out."),
        (data.datagen.path, "data.datagen.path", str(data.datagen.path), "null", "Leave one of them out."),
        (data.sampler.class_path, "data.sampler.class_path", str(data.sampler.class_path), "null",
         "Rows come in the order of the files, data.shuffle among those that are read at a time."),
        (data.train_max_samples != -1, "data.train_max_samples", str(data.train_max_samples), "-1", unknown),
        (data.dataloader_num_workers > 0, "data.dataloader_num_workers", str(data.dataloader_num_workers), "0",
         "A thread reads ahead."),
    ):  # fmt: skip
        if is_wrong:
            yield wrong(key, f"{got}, with data.streaming={data.streaming}", expected, fix)


def check_async(config: Config) -> Iterator[Finding]:
    """Yields what cannot run beside training, and what is computed otherwise on stale samples."""
    settings, rollout, trainer = (
        config.async_training,
        config.actor_rollout_ref.rollout,
        config.trainer,
    )
    if not settings.enable:
        return
    at, stale, groups = "async_training", settings.is_stale, config.algorithm.filter_groups.enable
    has_conversations, filtered = rollout.mode == "async", "algorithm.filter_groups.enable=True"
    streams, on_ray, group_size = (
        settings.by_mini_batch,
        trainer.backend == "ray",
        rollout_group_size(config),
    )
    num_engines, in_groups = sum(rollout_ranks(config)) // engine_ranks(config), group_size > 1
    pools = role_pools(trainer, asked_roles(config))
    beside = [
        role for role, pool in pools.items() if role != "rollout" and pool == pools.get("rollout")
    ]
    for is_wrong, key, got, expected, fix in (
        (on_ray and "rollout" not in pools, "trainer.placement", str(trainer.placement),
         "actor and rollout in pools of their own", "Such as {actor: training, ref: training, rollout: generation}."),
        (rollout_devices(config) > 1 and beside, "trainer.placement", f"{' and '.join(beside)} in the rollout's pool",
         "a pool for the rollout alone: its processes have several devices each", "Name another pool for the others."),
        (in_groups and config.actor_rollout_ref.model.has_adapter, f"{ROLLOUT}.tensor_model_parallel_size",
         f"{rollout.tensor_model_parallel_size}, with an adapter", "1", "Take a rank for each engine, or vllm."),
        (on_ray and settings.replay and settings.in_flight == "continue", f"{at}.replay",
         f"{settings.replay}, with in_flight=continue", "null, with trainer.backend=ray",
         "At which of its steps an engine in another process takes weights is not in the record."),
        (on_ray and settings.deterministic and settings.in_flight == "continue" and num_engines > 1,
         f"{at}.deterministic", f"true, with in_flight=continue and {num_engines} engines that generate",
         "in_flight=finish, or one engine", "How far each one is when weights change is a matter of time."),
        (rollout.name not in ("native", "vllm"), f"{ROLLOUT}.name", rollout.name,
         "native or vllm, which take weights between two tokens and have a version of each", ""),
        (rollout.name == "vllm" and (settings.deterministic or settings.replay), f"{ROLLOUT}.name", "vllm",
         f"native, with {at}.deterministic or replay", "vLLM's numbers depend on what it computes together."),
        (rollout.name == "vllm" and rollout.data_parallel_size > 1, f"{ROLLOUT}.data_parallel_size",
         str(rollout.data_parallel_size), "1", "Take a rank for each engine of vLLM."),
        (rollout.skip.enable, f"{ROLLOUT}.skip.enable", "true", "false", "Kept responses have no versions."),
        (settings.deterministic and has_conversations, f"{ROLLOUT}.mode", f"async, with {at}.deterministic=True",
         "sync", "The time that tools and users take is not in the configuration."),
        (settings.replay and (has_conversations or settings.on_stale == "drop" or trainer.save_freq != -1),
         f"{at}.replay", str(settings.replay), f"null with {ROLLOUT}.mode=async, on_stale=drop or trainer.save_freq",
         "A record says when sequences start and weights change, and no more."),
        (groups and settings.on_stale == "drop", f"{at}.on_stale", f"drop, with {filtered}", "wait", ""),
        (groups and streams, f"{at}.by_mini_batch", f"true, with {filtered}", "false", "A batch is filled in rounds."),
        (streams and config.actor_rollout_ref.actor.shuffle, f"{ACTOR}.shuffle", f"true, with {at}.by_mini_batch=True",
         "false", "Mini-batches are learned from as they come."),
        (groups and trainer.total_training_steps is None, "trainer.total_training_steps", f"null, with {filtered}",
         "a number of steps", "Prompts are taken ahead of the steps."),
    ):  # fmt: skip
        if is_wrong:
            yield wrong(key, f"{got}, with {at}.enable=True", expected, fix)
    if (
        stale
        and settings.in_flight == "continue"
        and trainer.save_freq != -1
        and not rollout.has_unfinished
    ):
        what = "conversations" if has_conversations else "the responses"
        yield f"trainer.save_freq: a save waits until {what} under way have ended."
    if on_ray and stale and trainer.state_copies:
        yield "trainer.state_copies: none beside generation: a run that loses its actor goes on from a checkpoint."
    correction, key = config.algorithm.rollout_correction, "algorithm.rollout_correction"
    if stale and not (correction.needs_old_log_probs or correction.bypass_mode):
        yield f"{key}: nothing corrects for samples up to {settings.max_staleness} versions old: set {key}.preset."
    if stale and settings.in_flight == "continue" and config.algorithm.adv_estimator == "gae":
        yield f"{at}.in_flight: values are the critic's as a step begins, over tokens of several versions."


def check_update(config: Config) -> Iterator[Finding]:
    """Yields what actor, critic, their schedules and checkpoints do not agree about."""
    actor, critic, steps = (
        config.actor_rollout_ref.actor,
        config.critic,
        config.trainer.total_training_steps,
    )
    algorithm, reports = (
        config.algorithm,
        "at 0 the reference model is computed only to report the KL divergence.",
    )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield from unused(["algorithm.kl_ctrl.type"], "algorithm.use_kl_in_reward is false")
    if algorithm.use_kl_in_reward and algorithm.kl_ctrl.kl_coef == 0:
        yield f"algorithm.kl_ctrl.kl_coef: {reports}"
    if actor.use_kl_loss and actor.kl_loss_coef == 0:
        yield f"{ACTOR}.kl_loss_coef: {reports}"
    if actor.use_kl_loss and algorithm.use_kl_in_reward:
        keys = f"{ACTOR}.use_kl_loss, algorithm.use_kl_in_reward"
        yield f"{keys}: the divergence from the reference counts twice, in the loss and in the reward."
    for key, section in ((ACTOR, actor), ("critic", critic)):
        optim, parts = section.optim, section.checkpoint
        if optim.lr == 0:
            yield f"{key}.optim.lr: at 0 nothing is learned."
        if section.loss_agg_mode == "seq-mean-token-sum-norm" and section.loss_scale_factor is None:
            length = config.data.max_response_length
            yield f"{key}.loss_scale_factor: token sums are divided by data.max_response_length, {length}."
        if steps is not None and optim.lr_warmup_steps >= steps:
            yield f"{key}.optim.lr_warmup_steps: the run ends in warm-up; the rate never reaches {optim.lr:g}."
        if missing := [one for one in parts.load_contents if one not in parts.save_contents]:
            where, expected = (
                f"{key}.checkpoint.load_contents",
                f"parts of {key}.checkpoint.save_contents",
            )
            yield wrong(where, ", ".join(missing), expected, "What is not written cannot be read.")
        absent = [one for one in ("model", "optimizer", "extra") if one not in parts.load_contents]
        if absent and not missing and config.trainer.save_freq != -1:
            without = ", ".join(absent)
            yield f"{key}.checkpoint: without {without} a resumed run does not equal the run that was not stopped."


def check_replay(config: Config) -> Iterator[Finding]:
    """Yields what keeps an update from repeating the choices of routers."""
    actor, key, name = (
        config.actor_rollout_ref.actor,
        f"{ACTOR}.router_replay",
        config.actor_rollout_ref.rollout.name,
    )
    if actor.router_replay == "rollout" and name not in REPORTS_ROUTES:
        expected = f"an engine that reports its choices: {' or '.join(REPORTS_ROUTES)}"
        fix = f"Set {ROLLOUT}.name={REPORTS_ROUTES[0]}, or {key}=old_log_prob."
        yield wrong(key, f"rollout, with {ROLLOUT}.name={name}", expected, fix)
    if actor.router_replay == "old_log_prob" and actor.pipeline_model_parallel_size > 1:
        got = (
            f"old_log_prob, with pipeline_model_parallel_size={actor.pipeline_model_parallel_size}"
        )
        yield wrong(
            key, got, "1: only the last stage returns what was computed", "Set it to rollout."
        )
    if actor.router_replay == "old_log_prob" and config.algorithm.rollout_correction.bypass_mode:
        got, expected = (
            "old_log_prob, with algorithm.rollout_correction.bypass_mode=True",
            "a pass for old log-probs",
        )
        yield wrong(key, got, expected, "Set it to rollout, or bypass_mode=False.")


def _check_own(where: str, name: str, known: tuple[str, ...], files: object) -> Iterator[Finding]:
    """A name that is not among those there are needs a file that registers it."""
    if name not in known and not files:
        close = get_close_matches(name, known, n=1)
        fix = (
            f"Did you mean {close[0]}?"
            if close
            else f"One of your own needs {ROLLOUT}.agent.agent_loop_path."
        )
        yield wrong(where, f"'{name}'", f"one of {', '.join(known)}", fix)


def check_multi_turn(config: Config) -> Iterator[Finding]:
    """Yields what does not fit together in `multi_turn`, `agent`, `mode` and `data`, and files that are missing."""
    rollout, key = config.actor_rollout_ref.rollout, ROLLOUT
    turns, agent = rollout.multi_turn, rollout.agent
    if rollout.mode == "sync":
        if turns.enable:
            fix = f"Set {key}.mode=async."
            yield wrong(
                f"{key}.multi_turn.enable",
                "true, with rollout.mode=sync",
                "rollout.mode=async",
                fix,
            )
            return
        trace = [f"{key}.trace_dir"] if rollout.trace_dir else []
        for names in (turns.changed(f"{key}.multi_turn"), agent.changed(f"{key}.agent"), trace):
            yield from unused(names, f"{key}.mode is sync")
        return
    loop, at = agent.default_agent_loop, f"{key}.agent.default_agent_loop"
    yield from _check_exists(
        f"{key}.agent.agent_loop_path", agent.agent_loop_path, "a Python or YAML file"
    )
    yield from _check_own(at, loop, LOOPS, agent.agent_loop_path)
    may_register = agent.agent_loop_path or config.actor_rollout_ref.model.external_lib
    yield from _check_own(f"{key}.multi_turn.format", turns.format, FORMATS, may_register)
    if not turns.enable:
        if loop == "tool_agent":
            yield wrong(
                at, loop, "several turns to be allowed", f"Set {key}.multi_turn.enable=True."
            )
        yield from unused(turns.changed(f"{key}.multi_turn"), f"{key}.multi_turn.enable is false")
        return
    yield from _check_exists(
        f"{key}.multi_turn.function_tool_path", turns.function_tool_path, "a Python file"
    )
    for name, section in (
        ("tool_config_path", ToolFile),
        ("interaction_config_path", InteractionFile),
    ):
        path = getattr(turns, name)
        yield from (missing := list(_check_exists(f"{key}.multi_turn.{name}", path, "a YAML file")))
        try:
            missing or path is None or read_tool_file(path, section)
        except ConfigError as error:
            yield error
    if not config.data.return_raw_chat:
        fix = "The prompt is rendered with its tools, out of its messages."
        yield wrong(
            "data.return_raw_chat", f"false, with {key}.multi_turn.enable=True", "true", fix
        )
    files = (turns.function_tool_path, turns.tool_config_path, turns.interaction_config_path)
    if loop == "tool_agent" and not any(files):
        got = "neither tools nor user simulators, with agent.default_agent_loop=tool_agent"
        expected = "function_tool_path, tool_config_path or interaction_config_path"
        fix = f"Set {key}.multi_turn.function_tool_path to a Python file with @function_tool functions."
        yield wrong(f"{key}.multi_turn", got, expected, fix)
    if loop == "single_turn_agent":
        yield f"{at}: only rows whose column agent_name says so take several turns; tool_agent would be all of them."


def check_supervised(config: Config) -> Iterator[Finding]:
    """Yields what SFT or the training of a reward model cannot do."""
    data, model, actor = config.data, config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    yield from model.findings("actor_rollout_ref.model")
    if data.truncation == "middle":
        yield wrong("data.truncation", f"'middle', with task={config.task}", "error, left or right")
    if model.has_adapter and model.lora_merge is not None:
        fix = "Leave the key out; `quadriga export` merges an adapter."
        yield wrong(
            "actor_rollout_ref.model.lora_merge",
            str(model.lora_merge),
            "null: nothing generates",
            fix,
        )
    if config.task != "reward_model":
        return
    if data.truncation == "right":
        fix = "Set data.truncation=left, which takes from the prompt, or leave them out with data.filter_overlong."
        yield wrong("data.truncation", "'right', for pairs", "error or left", fix)
    if model.has_adapter:
        fix = "Leave lora_rank and lora_adapter_path out: a reward model is trained as a whole."
        yield wrong(
            "actor_rollout_ref.model.lora_rank",
            "an adapter",
            "none, for objective=reward_model",
            fix,
        )
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if (size := getattr(actor, name)) > 1:
            fix = f"Shard weights with {ACTOR}.fsdp_config.fsdp_size."
            yield wrong(f"{ACTOR}.{name}", f"{size}, for objective=reward_model", "1", fix)


_SUPERVISED_CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    check_files, check_paths, check_layouts, check_megatron, check_profiles, check_adapter,
    check_supervised,
)  # fmt: skip
_CHECKS: tuple[Callable[[Config], Iterator[Finding]], ...] = (
    check_files, check_paths, check_sections, check_batches, check_groups, check_rollout, check_update,
    check_replay, check_multi_turn, check_placement, check_layouts, check_megatron, check_profiles, check_adapter,
    check_async, check_streaming, check_distillation,
)  # fmt: skip
