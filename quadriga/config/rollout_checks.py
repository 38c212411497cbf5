# SPDX-License-Identifier: Apache-2.0
"""Checks of how responses are generated: groups, lengths, engines, conversations and tools."""

from difflib import get_close_matches

from quadriga.config.base import Findings, Section, notice_unused
from quadriga.config.explain import BatchPlan, learns_from_rewards
from quadriga.config.multi_turn import (
    ENVIRONMENT,
    FORMATS,
    LOOPS,
    InteractionFile,
    ToolFile,
    read_tool_file,
)
from quadriga.config.path_checks import check_exists
from quadriga.config.placement import ACTOR
from quadriga.config.reward import check_classifier
from quadriga.config.rollout import ROLLOUT
from quadriga.config.root import Config
from quadriga.declared_algorithms import read_declarations
from quadriga.engine_traits import engines_with
from quadriga.errors import ConfigError

DEFAULT_GROUP_SIZE = 8
"""Responses to a prompt if the estimator compares them and `rollout.n` is not given."""
_MULTI_TURN = f"{ROLLOUT}.multi_turn"
_AGENT_LOOP = f"{ROLLOUT}.agent.default_agent_loop"


def _lacks_groups(config: Config) -> bool:
    """Whether the advantage estimator compares responses with their group, but groups have one.

    False for a user's estimator, whose declaration is not read.
    """
    if not learns_from_rewards(config) or config.actor_rollout_ref.rollout.n > 1:
        return False
    declaration = read_declarations("register_adv_est").get(config.algorithm.adv_estimator)
    return declaration is not None and "compares_group" in declaration.flags


def check_groups(config: Config) -> Findings:
    """Yield an error if the estimator compares responses with their group, but groups have one."""
    if _lacks_groups(config):
        yield ConfigError(
            f"{ROLLOUT}.n",
            f"1, with algorithm.adv_estimator={config.algorithm.adv_estimator}",
            "groups of at least 2 responses",
            (
                "A single response has no others to compare with: "
                f"set {ROLLOUT}.n={DEFAULT_GROUP_SIZE}, or another estimator."
            ),
        )


def with_groups(config: Config) -> tuple[Config, str]:
    """Choose `rollout.n` if the estimator compares responses and the key is not set.

    Args:
        config: a training run.

    Returns:
        The configuration, and a notice about the choice; "" if there was nothing to choose.
    """
    policy = config.actor_rollout_ref
    if config.task != "rl" or "n" in policy.rollout.model_fields_set or not _lacks_groups(config):
        return config, ""
    rollout = policy.rollout.model_copy(update={"n": DEFAULT_GROUP_SIZE})
    policy = policy.model_copy(update={"rollout": rollout})
    notice = (
        f"{ROLLOUT}.n: {DEFAULT_GROUP_SIZE} responses to each prompt, because "
        f"algorithm.adv_estimator={config.algorithm.adv_estimator} compares them."
    )
    return config.model_copy(update={"actor_rollout_ref": policy}), notice


def check_rollout(config: Config) -> Findings:
    """Yield lengths, dynamic sampling and rewards that the rollout does not support."""
    rollout = config.actor_rollout_ref.rollout
    reward = config.reward_model
    max_tokens = BatchPlan(config).max_sequence_tokens
    if rollout.max_model_len is not None and rollout.max_model_len < max_tokens:
        yield ConfigError(
            f"{ROLLOUT}.max_model_len",
            f"{rollout.max_model_len} tokens",
            f"at least {max_tokens}, data.max_prompt_length + data.max_response_length",
            "Leave it out, or lower these lengths.",
        )
    if config.algorithm.filter_groups.enable:
        yield from _check_filter(config)
    if reward.enable and reward.model.path is not None:
        yield from check_classifier(reward, max_tokens)
    if reward.enable and config.custom_reward_function.path is not None:
        yield "reward_model.enable, custom_reward_function.path: the reward is the sum of both scores."


def _check_filter(config: Config) -> Findings:
    """Yield settings that do not fit dynamic sampling, which drops groups of equal scores."""
    rollout = config.actor_rollout_ref.rollout
    trainer = config.trainer
    key = "algorithm.filter_groups"
    if rollout.n == 1:
        yield ConfigError(
            f"{key}.enable",
            f"true, with {ROLLOUT}.n=1",
            "groups of at least 2 responses",
            f"All groups would be dropped: raise {ROLLOUT}.n, or turn the filter off.",
        )
    if rollout.skip.enable and rollout.skip.action == "repeat":
        yield ConfigError(
            f"{ROLLOUT}.skip.action",
            f"repeat, with {key}.enable=True",
            "cache",
            "All batches of prompts in a step would be the same, and fill it with copies.",
        )
    if config.algorithm.filter_groups.max_num_gen_batches == 0:
        yield (
            f"{key}.max_num_gen_batches: 0: a step generates until its batch is full, "
            "which never happens if the scores of no group differ."
        )
    if trainer.total_training_steps is None:
        yield (
            f"{key}: a step may take several batches of prompts; the run ends with the step that "
            f"takes the last batch of trainer.total_epochs={trainer.max_epochs}."
        )


def check_replay(config: Config) -> Findings:
    """Yield settings with which an update cannot repeat the choices of routers."""
    actor = config.actor_rollout_ref.actor
    rollout = config.actor_rollout_ref.rollout
    key = f"{ACTOR}.router_replay"
    if actor.router_replay == "rollout" and not rollout.traits.reports_routes:
        engines = engines_with("reports_routes")
        yield ConfigError(
            key,
            f"rollout, with {ROLLOUT}.name={rollout.name}",
            f"an engine that reports its choices: {engines}",
            f"Set {ROLLOUT}.name={engines}, or {key}=old_log_prob.",
        )
    if actor.router_replay != "old_log_prob":
        return
    num_stages = actor.pipeline_model_parallel_size
    if num_stages > 1:
        yield ConfigError(
            key,
            f"old_log_prob, with pipeline_model_parallel_size={num_stages}",
            "1: only the last stage returns results",
            "Set it to rollout.",
        )
    if config.algorithm.rollout_correction.bypass_mode:
        yield ConfigError(
            key,
            "old_log_prob, with algorithm.rollout_correction.bypass_mode=True",
            "a pass for old log-probs",
            "Set it to rollout, or bypass_mode=False.",
        )


def check_multi_turn(config: Config) -> Findings:
    """Yield contradictions between keys about turns, agents and `mode`, and missing files."""
    rollout = config.actor_rollout_ref.rollout
    turns = rollout.multi_turn
    # A loop of the user's own may take several turns even without `multi_turn`.
    may_take_turns = turns.enable or rollout.agent.agent_loop_path is not None
    is_single_turn = rollout.mode == "sync" or not may_take_turns
    if config.actor_rollout_ref.actor.echo_coeff and is_single_turn:
        yield ConfigError(
            f"{ACTOR}.echo_coeff",
            f"{config.actor_rollout_ref.actor.echo_coeff:g}, with responses of one turn",
            "0, or conversations of several turns",
            f"Set {ROLLOUT}.mode=async and {_MULTI_TURN}.enable=True, or env=NAME.",
        )
    if rollout.mode == "sync":
        yield from _check_without_loops(config)
        return
    yield from _check_agent_loop(config)
    if turns.enable:
        yield from _check_tools(config)
        return
    loop = rollout.agent.default_agent_loop
    if loop == "tool_agent":
        yield ConfigError(
            _AGENT_LOOP,
            loop,
            "multi-turn responses to be enabled",
            f"Set {_MULTI_TURN}.enable=True.",
        )
    yield from notice_unused(turns.changed_keys(_MULTI_TURN), f"{_MULTI_TURN}.enable is false")


def _check_without_loops(config: Config) -> Findings:
    """Yield keys of agent loops that `mode=sync` does not read."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.multi_turn.enable:
        yield ConfigError(
            f"{_MULTI_TURN}.enable",
            "true, with rollout.mode=sync",
            "rollout.mode=async",
            f"Set {ROLLOUT}.mode=async.",
        )
        return
    keys = rollout.multi_turn.changed_keys(_MULTI_TURN)
    reason = f"{ROLLOUT}.mode is sync"
    yield from notice_unused(keys, reason)
    yield from notice_unused(rollout.agent.changed_keys(f"{ROLLOUT}.agent"), reason)
    if rollout.trace_dir:
        yield from notice_unused([f"{ROLLOUT}.trace_dir"], reason)


def _check_agent_loop(config: Config) -> Findings:
    """Yield an agent loop or tool format that nothing registers, or a loop that ignores `env`."""
    rollout = config.actor_rollout_ref.rollout
    path = rollout.agent.agent_loop_path
    yield from check_exists(f"{ROLLOUT}.agent.agent_loop_path", path, "a Python or YAML file")
    loop = rollout.agent.default_agent_loop
    if not path:
        yield from _check_registered(_AGENT_LOOP, loop, LOOPS)
    # With data files this is no error: their rows may name the loop of environments in the column
    # agent_name.
    if config.env.name and not config.data.train_files and loop in LOOPS and loop != ENVIRONMENT:
        yield ConfigError(
            _AGENT_LOOP,
            f"{loop}, with env={config.env.name}",
            ENVIRONMENT,
            "Leave the key out: env sets it.",
        )
    if not path and not config.actor_rollout_ref.model.external_lib:
        yield from _check_registered(f"{_MULTI_TURN}.format", rollout.multi_turn.format, FORMATS)


def _check_registered(where: str, name: str, known: tuple[str, ...]) -> Findings:
    """Yield an error if a name is not among the known ones.

    Args:
        where: dotted key of the name.
        name: the name.
        known: the built-in names.
    """
    if name in known:
        return
    close_names = get_close_matches(name, known, n=1)
    fix = f"To use your own, set {ROLLOUT}.agent.agent_loop_path."
    if close_names:
        fix = f"Did you mean {close_names[0]}?"
    yield ConfigError(where, f"'{name}'", f"one of {', '.join(known)}", fix)


def _check_tools(config: Config) -> Findings:
    """Yield missing or broken files of tools, and keys that tools need."""
    turns = config.actor_rollout_ref.rollout.multi_turn
    loop = config.actor_rollout_ref.rollout.agent.default_agent_loop
    functions = turns.function_tool_path
    yield from check_exists(f"{_MULTI_TURN}.function_tool_path", functions, "a Python file")
    yield from _check_tool_file("tool_config_path", turns.tool_config_path, ToolFile)
    interactions = turns.interaction_config_path
    yield from _check_tool_file("interaction_config_path", interactions, InteractionFile)
    if not config.data.return_raw_chat:
        yield ConfigError(
            "data.return_raw_chat",
            f"false, with {_MULTI_TURN}.enable=True",
            "true",
            "The prompt and its tools are rendered from the prompt's messages.",
        )
    if loop == "tool_agent" and not (functions or turns.tool_config_path or interactions):
        yield ConfigError(
            _MULTI_TURN,
            "neither tools nor user simulators, with agent.default_agent_loop=tool_agent",
            "function_tool_path, tool_config_path or interaction_config_path",
            f"Set {_MULTI_TURN}.function_tool_path to a Python file with @function_tool functions.",
        )
    if loop == "single_turn_agent":
        yield (
            f"{_AGENT_LOOP}: only rows with an agent loop in their column agent_name may take "
            "several turns; with tool_agent all rows may."
        )


def _check_tool_file(name: str, path: str | None, section: type[Section]) -> Findings:
    """Yield an error if a YAML file that `multi_turn` names is missing or wrong.

    Args:
        name: name of the key in `multi_turn`.
        path: the file; None: the key is not set.
        section: schema of the file.
    """
    if path is None:
        return
    missing_files = list(check_exists(f"{_MULTI_TURN}.{name}", path, "a YAML file"))
    yield from missing_files
    if missing_files:
        return
    try:
        read_tool_file(path, section)
    except ConfigError as error:
        yield error
