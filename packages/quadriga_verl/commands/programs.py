# SPDX-License-Identifier: Apache-2.0
"""Functions that rules.tsv names for keys of single programs of verl, or of single features.

The sections are: engine sizes, supervised training, distillation, asynchronous training, mixtures of
experts, generation and grading, and the program that merges checkpoints.
"""

import argparse
from collections.abc import Sequence
from math import ceil, lcm, prod
from pathlib import Path
from typing import Any

from quadriga.engine_traits import ENGINES
from quadriga.errors import ConfigError, MachineError
from quadriga_verl.commands.entries import MEGATRON_ENGINES, OWN_ENGINES
from quadriga_verl.commands.line import Line
from quadriga_verl.commands.rules import rule_function
from quadriga_verl.commands.verl_keys import is_number

_ACTOR = "actor_rollout_ref.actor"
_ROLLOUT = "actor_rollout_ref.rollout"
_SIZES = (
    "ulysses_sequence_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
)


# ---- sizes of engines ---------------------------------------------------------------------------


def _size(line: Line, key: str, otherwise: int = 1) -> int:
    """A size in the translation, or `otherwise` if it is not set or no integer.

    The checks of the configuration refuse a value that is no integer.
    """
    size = line.settings.get(key)
    return size if isinstance(size, int) else otherwise


def set_shard_size(line: Line, role: str, num_processes: int) -> None:
    """Adapt `fsdp_size`, the number of ranks over which one copy of a role's weights is sharded.

    In Quadriga it must be a multiple of the sequence-parallel size, and is -1 if there is only one
    copy, sharded over all ranks. Other values are adapted to that.

    Args:
        line: the line.
        role: section of the role.
        num_processes: number of processes.
    """
    key = f"{role}.fsdp_config.fsdp_size"
    sequence_size, tensor_size, pipeline_size = (_size(line, f"{role}.{name}") for name in _SIZES)
    size = _size(line, key, -1)
    num_ranks = num_processes // (tensor_size * pipeline_size)
    if 0 < size < num_ranks and size % sequence_size:
        line.note(
            "It is raised to a multiple of the sequence-parallel size; no number depends on it.",
            line.sources[key],
        )
        size = lcm(size, sequence_size)
    if size == 0 or size < -1 or size >= num_ranks:
        line.settings[key] = -1
    elif size > 0:
        line.settings[key] = size


def share_actor_sizes(line: Line, roles: list[str]) -> None:
    """Give all roles on the actor's processes the parallel sizes of the actor, as Megatron requires.

    Args:
        line: a line that trains with Megatron.
        roles: roles on the processes of the actor. The reward model is added if it has no processes of
            its own.
    """
    sections = ("reward.reward_model", "reward_model")
    has_model = any(line.get(f"{section}.enable") for section in sections)
    has_pool = any(line.get(f"{section}.enable_resource_pool") for section in sections)
    if has_model and not has_pool:
        roles = [*roles, "reward_model"]
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size")
    for role in roles:
        for name in names:
            key = f"{role}.{name}"
            actor_size = line.settings.get(f"{_ACTOR}.{name}", 1)
            if line.settings.get(key, 1) != actor_size:
                line.note(
                    "Roles that share processes have the actor's sizes: Megatron has one set of sizes in a process.",
                    line.sources.get(key, key),
                )
                line.settings[key] = actor_size


@rule_function
def drop_engine_setting(line: Line, key: str, value: Any) -> None:
    """Drop a setting of a training engine that does not exist here."""
    engine = line.get("engine.group", line.get("engine.strategy"))
    # verl would refuse such a key too: its own FSDP engine does not have it.
    if engine in OWN_ENGINES and key not in line.keys.default:
        line.refuse("a key of verl's FSDP engine", "Leave it out.")
    line.note(
        "Only memory and speed depend on it: weights are sharded layer by layer, and sequences are packed."
    )


# ---- supervised training ------------------------------------------------------------------------


@rule_function
def set_supervised_key(line: Line, key: str, value: Any) -> None:
    """Set a key of a supervised run that has another name, unit or type in verl."""
    match key:
        case "engine.strategy" | "engine.group":
            if value in MEGATRON_ENGINES:
                line.set("engine.strategy", value)
            else:
                line.note(f"FSDP2 trains in place of {value}, with the same sizes.")
        case "engine.dtype":
            # verl's default is left out, so that the dtype is chosen for the machine.
            if line.keys.is_changed(key):
                line.set("engine.fsdp_config.model_dtype", value)
        case "data.micro_batch_size_per_gpu" | "data.max_token_len_per_gpu":
            # With dynamic batches verl reads the number of tokens, otherwise that of rows.
            key_in_use = "data.micro_batch_size_per_gpu"
            if line.get("data.use_dynamic_bsz", True):
                key_in_use = "data.max_token_len_per_gpu"
            if key == key_in_use:
                line.set(f"engine.{key.removeprefix('data.')}", value)
            else:
                line.note("It is not read with this value of data.use_dynamic_bsz.")
        case "data.multiturn.enable":
            line.set("data.format", "messages" if value else "prompt_response")


@rule_function
def set_min_lr(line: Line, key: str, value: Any) -> None:
    """Convert the learning rate at the end of the schedule to a share of the highest one."""
    highest_rate = line.get("optim.lr")
    if is_number(value) and is_number(highest_rate) and highest_rate > 0:
        line.set("optim.min_lr_ratio", value / highest_rate)
    elif value:
        line.refuse("a number, and optim.lr above 0", "It is a share of the highest rate.")


@rule_function
def set_column(line: Line, key: str, value: Any) -> None:
    """Set the name of a column, or the dotted path of an entry inside it.

    In verl the names inside a column are in another key, such as `prompt_dict_keys` for `prompt_key`.
    """
    inner_names = line.get(key.replace("_key", "_dict_keys"), [])
    names = value if isinstance(value, list) else [value]
    line.set(key, ".".join([*names, *inner_names]))


def set_supervised_run(line: Line) -> None:
    """Set the processes of a supervised run, and no validation before its first step."""
    line.set("trainer.val_before_train", False)
    # `find_program` has converted torchrun's options to these keys. Without them, the run has as many
    # processes as its parallel sizes need.
    launcher_keys = line.keys.from_user & {"trainer.nnodes", "trainer.n_gpus_per_node"}
    # Factors of the number of processes: nodes and processes of each, or else the parallel sizes.
    factors = [line.get(key, 1) for key in launcher_keys]
    factors = [factor for factor in factors if isinstance(factor, int)]
    if not factors:
        factors = [_size(line, f"engine.{name}") for name in _SIZES]
    num_processes = prod(factors)
    set_shard_size(line, "engine", num_processes)
    if num_processes == 1:
        return
    line.set("trainer.backend", "ray")
    if not launcher_keys:
        line.set("trainer.n_gpus_per_node", num_processes)
        line.note(
            f"{num_processes} processes are started, as many as the parallel sizes need. Set another "
            "number by torchrun's options, or by trainer.n_gpus_per_node and trainer.nnodes.",
            "engine.ulysses_sequence_parallel_size",
        )


# ---- distillation -------------------------------------------------------------------------------

_TEACHERS = "distillation.teacher_models"
_LOSS = "distillation.distillation_loss"
_TOP_K = "forward_kl_topk"


@rule_function
def check_teacher_key(line: Line, key: str, value: Any) -> None:
    """Note a key of distillation that has no effect, or refuse a `teacher_key` that has no counterpart.

    `set_distillation` translates all keys of distillation together.
    """
    if not line.get("distillation.enabled"):
        line.note()
        return
    grader_column = line.get("data.reward_fn_key", "data_source")
    if key == "distillation.teacher_key" and value != grader_column:
        fix = "Use that column: teachers are chosen by the column that chooses graders."
        line.refuse("the name in data.reward_fn_key", fix)


def set_distillation(line: Line) -> None:
    """Set the teachers, their processes, and how the student learns from them."""
    if not line.get("distillation.enabled"):
        return
    paths = {}
    for key in line.keys.tree.keys_below(_TEACHERS):
        # `distillation.teacher_models.NAME.KEY`
        name = key.split(".")[2]
        path = line.get(f"{_TEACHERS}.{name}.model_path")
        if path:
            paths[name] = path
        else:
            line.note("A teacher without model_path does not answer.", key)
    source = "distillation.enabled"
    line.set("distillation.enable", True, source)
    data_sources = {name: line.get(f"{_TEACHERS}.{name}.key") for name in paths}
    # A single teacher answers for all data sources.
    if len(paths) == 1:
        ((name, path),) = paths.items()
        line.set("distillation.path", path, source)
        line.note("A single teacher answers for all data sources.", f"{_TEACHERS}.{name}.key")
    elif None in data_sources.values():
        expected = "a `key`, the data source, for each of several teachers"
        line.refuse(expected, f"Set {_TEACHERS}.NAME.key.", source)
    else:
        teachers = {str(data_sources[name]): path for name, path in paths.items()}
        line.set("distillation.teachers", teachers, source)

    # Teachers have processes of their own if verl's line gives them nodes.
    num_per_node = line.get("distillation.n_gpus_per_node", 8)
    num_nodes = line.get("distillation.nnodes", 0)
    if all(isinstance(number, int) and number > 0 for number in (num_per_node, num_nodes)):
        line.set("trainer.backend", "ray")
        placement = line.settings.get("trainer.placement")
        placement = placement or {"actor_rollout_ref": "all", "critic": "all"}
        line.settings["trainer.placement"] = {**placement, "teacher": "teacher"}
        pools = line.settings.get("trainer.resource_pools") or {}
        line.settings["trainer.resource_pools"] = {**pools, "teacher": [num_per_node] * num_nodes}
    _set_teacher_loss(line)


def _set_teacher_loss(line: Line) -> None:
    """Set the divergence from a teacher.

    In verl the divergence is a loss of its own, with its own clips; without task rewards it is the
    only loss. With `use_policy_gradient` it is subtracted from the advantages here, so that the
    clips of the policy loss must be those of the divergence, too.
    """
    has_rewards = line.get(f"{_LOSS}.use_task_rewards", True)
    uses_policy_gradient = line.get(f"{_LOSS}.use_policy_gradient", False)
    names = ["loss_mode", "use_policy_gradient", "use_task_rewards", "loss_max_clamp"]
    if line.get(f"{_LOSS}.loss_mode", "k3") == _TOP_K:
        names += ["topk", "log_prob_min_clamp"]
    for name in names:
        key = f"{_LOSS}.{name}"
        line.set(f"distillation.{name}", line.get(key), key)

    weight_key = f"{_LOSS}.distillation_loss_coef"
    if has_rewards:
        line.set("distillation.loss_coef", float(line.get(weight_key, 1.0)), weight_key)
    else:
        line.note("verl reads this weight only with task rewards.", weight_key)
        _drop_task_loss(line, uses_policy_gradient=uses_policy_gradient)
    if not uses_policy_gradient:
        return

    for name in ("clip_ratio_low", "clip_ratio_high"):
        key = f"{_LOSS}.{name}"
        clip = line.get(key, 0.2)
        actor_clip = line.settings.get(f"{_ACTOR}.{name}", 0.2)
        if not has_rewards:
            line.settings[f"{_ACTOR}.{name}"] = clip
        elif clip != actor_clip:
            fix = "Set both to one value: the divergence is subtracted from the advantages, and one loss clips both."
            line.refuse(f"{actor_clip}, as {_ACTOR}.{name}", fix, key)
    if has_rewards:
        line.note(
            "The divergence is subtracted from the advantages, and one loss clips both; verl clips two losses.",
            f"{_LOSS}.use_policy_gradient",
        )


def _drop_task_loss(line: Line, *, uses_policy_gradient: bool) -> None:
    """Set keys of the policy loss to neutral values, because verl does not use this loss.

    Args:
        line: a line that distills without task rewards.
        uses_policy_gradient: whether the divergence is a policy loss, whose dual clip is then neutral
            too.
    """
    neutral_values = {
        f"{_ACTOR}.policy_loss.loss_mode": "vanilla",
        f"{_ACTOR}.entropy_coeff": 0.0,
        f"{_ACTOR}.use_kl_loss": False,
        "algorithm.use_kl_in_reward": False,
    }
    if uses_policy_gradient:
        neutral_values[f"{_ACTOR}.clip_ratio_c"] = 3.0
    for key, value in neutral_values.items():
        if line.settings.get(key, value) != value:
            line.settings[key] = value
            line.note(
                "verl does not read it without task rewards (distillation_loss.use_task_rewards).",
                line.sources.get(key, key),
            )


# ---- asynchronous training ----------------------------------------------------------------------

_ASYNC = "async_training"


@rule_function
def set_async_key(line: Line, key: str, value: Any) -> None:
    """Translate a key of `async_training`. Keys without a branch here are read by other functions."""
    mini_batch = line.get(f"{_ACTOR}.ppo_mini_batch_size")
    step_size = mini_batch * line.get(f"{_ASYNC}.require_batches", 1)  # prompts
    match key.rpartition(".")[2]:
        case "staleness_threshold":
            # verl's may be a fraction, the share of a batch that may be stale.
            line.set(f"{_ASYNC}.max_staleness", ceil(value))
            if value % 1:
                line.note()
        case "partial_rollout":
            line.set(f"{_ASYNC}.in_flight", "continue" if value else "finish")
        case "require_batches":
            line.set("data.train_batch_size", step_size)
        case "total_rollout_steps" if value:
            # verl's number counts the prompts of the whole run.
            line.set("trainer.total_training_steps", max(1, value // step_size))
        case "use_rollout_log_probs" if value and not line.get(f"{_ASYNC}.compute_prox_log_prob"):
            line.set("algorithm.rollout_correction.bypass_mode", True)


_V1 = "trainer.v1"


@rule_function
def check_v1_key(line: Line, key: str, value: Any) -> None:
    """Refuse an unknown mode of the trainer since verl 0.10, and note its keys that have no effect.

    `set_trainer_mode` translates the mode and the other keys.
    """
    if key == f"{_V1}.trainer_mode":
        if value == "colocate_async":
            line.note()
        elif value not in ("sync", "separate_async", None):
            line.refuse("sync, colocate_async or separate_async", "verl has no other trainer.")
        return
    # The other keys belong to the mode `separate_async`. `set_trainer_mode` reads these of them:
    is_read = key.endswith((".parameter_sync_step", "off_policy_threshold", "off_policy_strategy"))
    is_read = is_read or key.startswith(f"{_ROLLOUT}.")
    if not (is_read and _has_separate_rollout(line)):
        line.note()


def _has_separate_rollout(line: Line) -> bool:
    """Whether verl 0.10's trainer generates on separate processes (`trainer_mode=separate_async`)."""
    is_v1 = line.get("trainer.use_v1", True)
    return bool(is_v1) and line.get(f"{_V1}.trainer_mode") == "separate_async"


def set_trainer_mode(line: Line) -> None:
    """Set asynchronous training for `trainer_mode=separate_async`.

    A step of that trainer has `parameter_sync_step` updates. Here each update is a step.
    """
    if not _has_separate_rollout(line):
        return
    sync_key = f"{_V1}.separate_async.parameter_sync_step"
    num_updates = line.get(sync_key, 4)
    if not isinstance(num_updates, int) or num_updates < 1:
        fix = "Set the number of updates after which weights are published."
        line.refuse("a whole number, at least 1", fix, sync_key)
        return
    line.set(f"{_ASYNC}.sync_every", num_updates, sync_key)
    threshold_key = f"{_V1}.sampler.max_off_policy_threshold"
    line.set(f"{_ASYNC}.max_staleness", line.get(threshold_key, 8), threshold_key)
    strategy_key = f"{_V1}.sampler.max_off_policy_strategy"
    strategy = line.get(strategy_key, "drop")
    # `drop` cannot be combined with a filter of groups, because both fill a batch with other groups.
    # With a filter, the step waits for the groups that were started for it.
    if line.settings.get("algorithm.filter_groups.enable"):
        strategy = "wait"
    line.set(f"{_ASYNC}.on_stale", strategy, strategy_key)

    # A step of verl is several steps here.
    for name in ("total_training_steps", "save_freq", "test_freq"):
        num_steps = line.settings.get(f"trainer.{name}")
        if is_number(num_steps) and num_steps > 0:
            line.settings[f"trainer.{name}"] = num_steps * num_updates
    line.note(
        f"A step is one update; verl counts {num_updates} updates as one step, so the numbers of "
        "steps between checkpoints and validations are multiplied by it.",
        f"{_V1}.trainer_mode",
    )
    set_async_training(line)


def _generate_natively(line: Line, reason: str) -> None:
    """Replace the rollout engine by `native`, in which each process has the whole model."""
    replaced = {"name": "native", "tensor_model_parallel_size": 1, "expert_parallel_size": 1}
    for name, value in replaced.items():
        line.note(reason, f"{_ROLLOUT}.{name}")
        line.settings[f"{_ROLLOUT}.{name}"] = value


def set_async_training(line: Line) -> None:
    """Set asynchronous training, with processes that only generate."""
    traits = ENGINES.get(line.settings.get(f"{_ROLLOUT}.name", ""))
    if traits is None or not traits.streams:
        _generate_natively(
            line,
            "Generated by the engine native, with the whole model in each process. Of verl's engines, "
            "vllm can be used here, and sglang by main_ppo.",
        )
    line.set(f"{_ASYNC}.enable", True)
    if line.entry.name == "one_step_off_ppo":
        line.set(f"{_ASYNC}.preset", "one_step_off")
    if not any(key.startswith("algorithm.rollout_correction.") for key in line.settings):
        line.set("algorithm.rollout_correction.preset", "disabled")

    # All training roles share the pool "all", and the rollout has the pool "generation". Other roles,
    # such as teachers, keep their pools.
    placement = {}
    for role, pool in line.settings.get("trainer.placement", {}).items():
        if "rollout" not in role:
            placement[role] = pool
    placement |= {"actor": "all", "ref": "all", "critic": "all", "rollout": "generation"}
    # verl's asynchronous programs have the numbers of processes in the section `rollout`.
    section = _ROLLOUT if _has_separate_rollout(line) else "rollout"
    num_nodes = line.get(f"{section}.nnodes", 1) or 1
    pool = [line.get(f"{section}.n_gpus_per_node", 8)] * num_nodes
    pools = line.settings.get("trainer.resource_pools", {})
    line.settings["trainer.backend"] = "ray"
    line.settings["trainer.placement"] = placement
    line.settings["trainer.resource_pools"] = {**pools, "generation": pool}


# ---- mixtures of experts ------------------------------------------------------------------------

_WHOLE_EXPERTS = frozenset({"hf", "sglang"})
"""Rollout engines whose ranks do not divide the experts."""
_ROUTER_REPLAY = {"disabled": "off", None: "off", "R2": "old_log_prob", "R3": "rollout"}


@rule_function
def set_expert_key(line: Line, key: str, value: Any) -> None:
    """Set a key of a mixture of experts."""
    section, _, name = key.rpartition(".")
    match name:
        case "expert_parallel_size":
            # Here an engine divides its experts over its tensor-parallel ranks, or not at all. verl's
            # number may span several engines.
            if is_number(value) and value > 1:
                size = 1
                if line.get(f"{section}.name") not in _WHOLE_EXPERTS:
                    size = line.get(f"{section}.tensor_model_parallel_size")
                if value != size:
                    line.note()
                value = size or 1
            line.set(key, value)
        case "mode" if value in _ROUTER_REPLAY:
            # verl's key `router_replay.mode` is `router_replay` here: whose choice of experts an update
            # repeats, that of the old log-probs (R2) or of the rollout (R3).
            line.set(section, _ROUTER_REPLAY[value])
        case "mode":
            fix = "Routes travel with the batch: there is nothing to record, or to read."
            line.refuse("disabled, R2 or R3", fix)
        case "moe_router_enable_expert_bias":
            # Megatron would update the biases of routers in each step, unless their rate is 0. Both keys
            # are in the section that the user wrote, before a row has renamed `key`.
            rate_key = f"{line.current_key.rpartition('.')[0]}.moe_router_bias_update_rate"
            if value and line.get(rate_key) != 0:
                line.refuse("moe_router_bias_update_rate=0 beside it")
            line.note()


def replace_engine_for_replay(line: Line) -> None:
    """Replace a rollout engine that does not report its choices of experts, if the update repeats them.

    Engines of the user, which are not in `ENGINES`, stay.
    """
    traits = ENGINES.get(line.settings.get(f"{_ROLLOUT}.name", ""))
    repeats_choices = line.settings.get(f"{_ACTOR}.router_replay") == "rollout"
    if repeats_choices and traits is not None and not traits.reports_routes:
        _generate_natively(
            line,
            "Generated by the engine native, with the whole model in each process: only it reports the "
            "experts that it chose, which router_replay repeats.",
        )
        line.note(
            "The rollout engine is native, which reports the experts that it chose.",
            line.sources[f"{_ACTOR}.router_replay"],
        )


# ---- generation and grading ---------------------------------------------------------------------


@rule_function
def check_rollout_dtype(line: Line, key: str, value: Any) -> None:
    """Refuse a dtype of generation that training does not have, because here both have the same one."""
    names = ("megatron.dtype", "fsdp_config.dtype", "fsdp_config.mixed_precision.param_dtype")
    trains_in_float16 = any(line.get(f"{_ACTOR}.{name}") in ("fp16", "float16") for name in names)
    is_possible = value in ("bfloat16", "float32", "auto", None)
    if not is_possible and not (value == "float16" and trains_in_float16):
        line.refuse("bfloat16, float32, or float16 for training too")


@rule_function
def set_option(line: Line, key: str, value: Any) -> None:
    """Set an option of the function that runs in place of the program (`cli.RUNS`)."""
    line.options[key.removeprefix("data.")] = value


def cut_prompts_at_end(line: Line) -> None:
    """Cut long prompts at their end, as verl's program does."""
    line.set("data.truncation", "right")


# ---- the merger of checkpoints ------------------------------------------------------------------

_MERGER_OPTIONS = (
    "backend",
    "local_dir",
    "target_dir",
    "hf_model_path",
    "hf_upload_path",
    "test_hf_dir",
)
_MERGER_FLAGS = (
    "--tie-word-embedding",
    "--trust-remote-code",
    "--use_cpu_initialization",
    "--private",
)
"""Flags of the merger that change nothing here."""


def translate_merger(words: Sequence[str]) -> tuple[list[str], list[ConfigError], list[str]]:
    """Translate the arguments of verl's merger.

    Returns:
        The arguments of `quadriga export`, the problems, and the notices. If there are problems, the
        arguments are not valid.
    """
    parser = argparse.ArgumentParser("model_merger", add_help=False, allow_abbrev=False)
    parser.add_argument("operation", nargs="?", default="merge")
    for name in _MERGER_OPTIONS:
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    options, unknown_words = parser.parse_known_args(list(words))
    notices = []
    if options.hf_model_path:
        notices.append(
            "--hf_model_path: the checkpoint has the model's configuration and tokenizer."
        )
    folder = Path(options.local_dir or "").expanduser()

    where = "model_merger"
    problems = []
    # Flags that have no effect here are accepted without a notice.
    for word in unknown_words:
        if word not in _MERGER_FLAGS:
            problems.append(ConfigError(where, f"'{word}'", "an option of the merger"))
    if options.operation != "merge":
        got = f"'{options.operation}'"
        problems.append(ConfigError(where, got, "merge", "Compare the two models by yourself."))
    if options.backend not in {None, *OWN_ENGINES}:
        problems.append(ConfigError(f"{where} --backend", options.backend, "fsdp, megatron"))
    if options.hf_upload_path:
        fix = "Upload the folder when it is written: hf upload NAME FOLDER."
        place = f"{where} --hf_upload_path"
        problems.append(ConfigError(place, options.hf_upload_path, "none", fix))
    if not options.local_dir or not options.target_dir:
        problems.append(ConfigError(where, "not both", "--local_dir and --target_dir"))
    elif not folder.exists():
        place = f"{where} --local_dir"
        problems.append(MachineError(place, f"'{folder}'", "a folder that exists"))
    elif any(folder.glob("model_world_size_*")) or (folder / "dist_ckpt").exists():
        fix = "Merge it where it was trained, with verl; a checkpoint of a run of Quadriga is taken here."
        got = "shards of verl's own"
        problems.append(ConfigError(str(folder), got, "a checkpoint of Quadriga", fix))
    return [str(folder), "--output", str(options.target_dir)], problems, notices
