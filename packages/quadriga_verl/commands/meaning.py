# SPDX-License-Identifier: Apache-2.0
"""Functions that rules.tsv names for keys of verl's RL trainers, ordered by the part of a run.

`rule_function` says how they are called, and `Line` has the methods that they call. `FINISH` at the
end lists functions that are called once, after all keys of a line.
"""

from collections.abc import Callable
from itertools import chain
from math import prod
from typing import Any, get_args

from quadriga.config.root import spell_key
from quadriga.config.trainer import Tracker
from quadriga.declared_algorithms import loss_options, read_declarations
from quadriga_verl.commands import programs
from quadriga_verl.commands.entries import OWN_ENGINES
from quadriga_verl.commands.hydra import VERSIONS
from quadriga_verl.commands.line import Line, has_critic
from quadriga_verl.commands.rules import rule_function
from quadriga_verl.commands.verl_keys import is_number

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
REWARD = "reward_model"

ENGINES = ("vllm", "sglang", "hf")
FLOATS = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}
"""Dtypes that weights and optimizer may have, by verl's names for them."""
_COMPUTE_FLOATS = FLOATS | {"fp16": "float16", "float16": "float16"}


# ---- questions about a line ---------------------------------------------------------------------


def count_processes(line: Line) -> int:
    """Number of processes that a run has. A setting that is not a number counts as 1."""
    numbers = (line.get("trainer.n_gpus_per_node"), line.get("trainer.nnodes"))
    return prod(number for number in numbers if isinstance(number, int))


def has_adapter(line: Line) -> bool:
    """Whether a LoRA adapter is trained."""
    names = ("lora_rank", "lora.rank", "lora_adapter_path", "lora.adapter_path")
    return any(line.get(f"actor_rollout_ref.model.{name}") for name in names)


def _first_value(line: Line, keys: tuple[str, ...]) -> Any:
    """First truthy value of several keys, or None. Keys that the user has set come first."""
    users_keys = [key for key in keys if key in line.keys.from_user]
    values = [line.get(key) for key in (*users_keys, *keys)]
    return next(filter(None, values), None)


# ---- any key ------------------------------------------------------------------------------------


@rule_function
def set_unless_null(line: Line, key: str, value: Any) -> None:
    """Set the key, unless the value is null or empty text, which means the default."""
    if value not in (None, ""):
        line.set(key, value)


@rule_function
def set_null_if_falsy(line: Line, key: str, value: Any) -> None:
    """Set the key; False, 0 and empty text mean null."""
    line.set(key, value or None)


# ---- the run ------------------------------------------------------------------------------------

_PROFILERS = ("torch", "torch_memory", "nsys")


@rule_function
def set_run_key(line: Line, key: str, value: Any) -> None:
    """Set a key of the section `trainer`."""
    match key.removeprefix("trainer."):
        case "save_freq" | "test_freq":
            # In verl, 0 and below mean never.
            if value == "after_each_epoch":
                line.set(key, value)
            elif isinstance(value, str):
                line.refuse("a number of steps, or -1")
            else:
                line.set(key, int(value) if value and value > 0 else -1)
        case "critic_warmup":
            # verl's value is the first step in which the actor learns; ours is the number of steps
            # before it.
            line.set(key, max(int(value or 0) - 1, 0))
            if value and value > 0:
                line.note()
        case "device":
            # The device is chosen by the machine, not by the command line.
            line.set(key, "auto")
            if value not in ("cuda", "cpu"):
                line.note()
        case "log_val_generations":
            if is_number(value) and value < 0:
                line.note()
                value = 0
            set_unless_null(line, key, value)
        case "default_local_dir":
            # verl joins paths to the directory: empty text means the current one.
            line.set(key, value or ".")
            if value == "":
                line.note()


@rule_function
def set_loggers(line: Line, key: str, value: Any) -> None:
    """Set the trackers that exist here; verl's `file` is `jsonl`."""
    names = [value] if isinstance(value, str) else list(value or [])
    names = ["jsonl" if name == "file" else name for name in names]
    known_names = get_args(Tracker)
    missing_names = [str(name) for name in names if name not in known_names]
    line.set(key, [name for name in names if name in known_names])
    if missing_names:
        line.note(f"{', '.join(missing_names)}: {line.sentence}")


@rule_function
def set_profiler_key(line: Line, key: str, value: Any) -> None:
    """Set the profiler's tool and steps, or the ranks of a role, if the tool exists here.

    In verl a role profiles no rank unless it enables the profiler (`enable`, `ranks`, `all_ranks`).
    Here there are only `ranks`, and null means all ranks.
    """
    section = key.rpartition(".")[0]
    if line.get("global_profiler.tool") not in _PROFILERS:
        line.note()
    elif section != "global_profiler":
        ranks = line.get(f"{section}.ranks", [])
        if line.get(f"{section}.all_ranks"):
            ranks = None
        if not line.get(f"{section}.enable", True):
            ranks = []
        line.set(f"{section}.ranks", ranks)
    elif value is not None:
        line.set(key, value)


# ---- data ---------------------------------------------------------------------------------------


@rule_function
def set_data_key(line: Line, key: str, value: Any) -> None:
    """Set a key of the data: batch sizes, lengths and whether rows have their messages."""
    name = key.rpartition(".")[2]
    match name:
        case "return_raw_chat":
            # Conversations of several turns need the messages.
            line.set(key, bool(value or line.get(f"{ROLLOUT}.multi_turn.enable")))
        case _ if value is None:
            # The keys below keep their defaults.
            return
        case "prompt_length" | "response_length":
            # These keys of the rollout refer to those of the data, unless the user has set them.
            if line.is_users_key:
                line.set(f"data.max_{name}", value)
        case "train_batch_size" | "gen_batch_size":
            # Without dynamic sampling, a step of verl generates once, for `gen_batch_size` prompts if
            # it is set.
            if line.get("algorithm.filter_groups.enable"):
                line.set(key, value)
            elif line.get("data.gen_batch_size", value) == value:
                line.set("data.train_batch_size", value)
            else:
                line.note()


# ---- algorithm ----------------------------------------------------------------------------------

ESTIMATORS = frozenset(read_declarations("register_adv_est"))
LOSSES = loss_options()
"""Options that each policy loss has, by its name."""
MANAGERS = ("naive", "batch", "dapo", "prime")
_PLAIN_MANAGERS = ("gdpo", "limited", "rate_limited", "remote")
"""Managers of verl with the same results as `naive`. They run score functions elsewhere, or limit their rate."""
_KNOWN_NAMES = {"adv_estimator": ESTIMATORS, "loss_mode": LOSSES, "reward_manager": MANAGERS}

_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
"""Names of rejection methods since verl 0.8, by the level that verl 0.6.1 has for them."""
MIN_RATIO = 3e-9  # just above e^-20, where log-ratios are clipped


@rule_function
def set_known_name(line: Line, key: str, value: Any) -> None:
    """Set the name of a registered function or class, or a file of the user. Refuse other names."""
    known_names = _KNOWN_NAMES[key.rpartition(".")[2]]
    # `external_lib` is a module of the user, which may register any name.
    may_be_users = ".py:" in str(value) or line.get("actor_rollout_ref.model.external_lib")
    if key.endswith("reward_manager") and value in _PLAIN_MANAGERS:
        line.set(key, "naive")
    elif value in known_names or may_be_users:
        line.set(key, value)
    elif value is not None:
        expected = f"one of {', '.join(sorted(known_names))}, or path/to/file.py:name"
        line.refuse(expected)


@rule_function
def set_filter_groups(line: Line, key: str, value: Any) -> None:
    """Set a key of dynamic sampling, if the program reads it in this version of verl."""
    # In old versions only main_dapo filters groups. The defaults of main_ppo then lack the key.
    if line.entry.name == "main_ppo" and key not in line.keys.default:
        line.note()
    elif value is not None:
        line.set(key, value)


@rule_function
def set_clip_ratio(line: Line, key: str, value: Any) -> None:
    """Set the clip of a side. verl uses `clip_ratio` for a side whose own clip is null.

    `clip_ratio` itself sets nothing. If both sides have a clip, it has no effect. That is reported
    here if verl's defaults set both clips, and by `_note_redundant_keys` of translate.py if the
    user has set one.
    """
    sides = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
    has_both = all(line.get(side) is not None for side in sides)
    if key in sides:
        line.set(key, line.get(f"{ACTOR}.clip_ratio", 0.2) if value is None else value)
    # Both sides have a clip, and neither is the user's.
    elif has_both and line.keys.from_user.isdisjoint(sides):
        line.note()


@rule_function
def set_loss_option(line: Line, key: str, value: Any) -> None:
    """Set an option of a policy loss, if that loss is used.

    A loss that is not in `LOSSES` is the user's own. It gets only options that the user has set.
    """
    name = key.rpartition(".")[2]
    loss = line.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    is_known_loss = loss in LOSSES
    if is_known_loss and name not in LOSSES[loss]:
        line.note()
    elif value is not None and (is_known_loss or line.is_users_key):
        line.set(f"{ACTOR}.policy_loss.options.{name}", value)


@rule_function
def set_loss_agg_mode(line: Line, key: str, value: Any) -> None:
    """Set how the loss is averaged. Some losses of verl always use `seq-mean-token-mean`."""
    loss = line.get(f"{ACTOR}.policy_loss.loss_mode")
    # `VERSIONS` has none between 0.8 and 0.10.
    is_before_0_9 = VERSIONS.index(line.version) < VERSIONS.index("0.10.0")
    if loss in ("sapo", "geo_mean") or (loss == "gspo" and is_before_0_9):
        line.note()
        value = "seq-mean-token-mean"
        # Also a comment in the YAML file, where the value differs from that of the line.
        line.comments[key] = line.sentence
    elif value == "seq-mean-token-sum-norm" and is_before_0_9:
        line.note(
            "Sums of tokens are averaged over sequences, as in verl from 0.9 on; verl before 0.9 adds them up."
        )
    line.set(key, value)


@rule_function
def set_rejection(line: Line, key: str, value: Any) -> None:
    """Set rejection by importance ratios.

    Keys of verl since 0.8 are the same here. In verl 0.6.1 there are a level (`rollout_rs`), an upper
    and a lower bound, and a threshold for single tokens (veto). All bounds of verl 0.6.1 are for the
    ratio of trained to rollout probabilities. They become thresholds of the methods `k1` of later
    versions, which are for the inverse ratio.
    """
    section = "algorithm.rollout_correction"
    level = line.get(f"{section}.rollout_rs")
    veto = line.get(f"{section}.rollout_token_veto_threshold")
    if level not in _REJECTIONS and veto is None:
        # The line is written for verl 0.8 or later.
        if key.endswith("_lower"):
            line.note()
        elif not key.endswith("veto_threshold"):
            line.set(key, value)
        return

    upper = line.get(f"{section}.rollout_rs_threshold")
    if upper is None:
        upper = line.get(f"{section}.rollout_is_threshold", 2.0)
    lower = line.get(f"{section}.rollout_rs_threshold_lower")
    bounds = [veto] if level is None else [veto, upper, lower]
    bounds = [bound for bound in bounds if bound is not None]
    is_known_level = level in (None, *_REJECTIONS)
    if not is_known_level or not all(is_number(bound) and bound > MIN_RATIO for bound in bounds):
        # This function is called for each key of the section: refuse only those with a bound.
        if value in bounds:
            line.refuse(f"a number above {MIN_RATIO:.0e}")
        return

    thresholds = {}
    if level is None and "rs_threshold" in key:
        line.note("Read only with rollout_rs.")
    # Thresholds are written LOWER_UPPER. Because the ratio is inverted, verl's upper bound becomes
    # the lower one. By default verl's lower bound is 1 / upper.
    if level is not None:
        thresholds[_REJECTIONS[level]] = f"{1 / upper}_{1 / lower if lower else upper}"
    # A veto rejects tokens that are much less likely in training than in rollout: one side is open.
    if veto is not None:
        thresholds["seq_max_k1"] = f"{MIN_RATIO}_{1 / veto}"
    line.set(f"{section}.rollout_rs", ",".join(thresholds))
    line.set(f"{section}.rollout_rs_threshold", ",".join(thresholds.values()))


@rule_function
def set_correction_key(line: Line, key: str, value: Any) -> None:
    """Set the bound of importance weights, or the REINFORCE loss for off-policy correction."""
    section, _, name = key.rpartition(".")
    if name == "rollout_is_threshold":
        # The bound may be null only if there are no weights.
        if value is None and line.get(f"{section}.rollout_is") is not None:
            line.refuse("a number")
        set_unless_null(line, key, value)
    elif value:
        # Keys of the loss, which verl uses only together with `bypass_mode`.
        old_name = f"{section}.bypass_old_logprob_for_rollout"
        if line.get(f"{section}.bypass_mode") or line.get(old_name):
            line.set(f"{section}.loss_type", "reinforce")
        else:
            line.note()


# ---- learning rates -----------------------------------------------------------------------------


@rule_function
def set_schedule_key(line: Line, key: str, value: Any) -> None:
    """Set a key of the learning-rate schedule."""
    section, _, name = key.rpartition(".")
    if name == "total_training_steps":
        # verl's trainers replace it by their number of steps.
        if value not in (-1, None):
            line.refuse("-1")
    elif name == "lr_warmup_steps":
        # A negative number means that `lr_warmup_steps_ratio`, a share of all steps, is used instead
        # (-1 here). So do null and 0, but 0 means no warm-up in the RL trainers before verl 0.10.
        is_zero_unset = line.version == VERSIONS[-1] or line.entry.task == "sft"
        is_unset = value is None or value < 0 or (value == 0 and is_zero_unset)
        line.set(key, -1 if is_unset else value)
    elif line.get(f"{section}.lr_decay_style", "constant") == "constant":
        # Only Megatron has the keys below.
        line.note()
    elif name == "lr_decay_steps":
        line.set(f"{section}.total_training_steps", value)
    else:
        # Megatron's `min_lr` is a rate; ours is a share of the highest rate.
        highest_rate = line.get(f"{section}.lr")
        if is_number(value) and is_number(highest_rate) and highest_rate > 0:
            line.set(f"{section}.min_lr_ratio", value / highest_rate)


# ---- training engine ----------------------------------------------------------------------------

_SIZES = {
    "tensor_model_parallel_size": ("tp", "tensor_parallel_size", "tensor_model_parallel_size"),
    "pipeline_model_parallel_size": (
        "pp",
        "pipeline_parallel_size",
        "pipeline_model_parallel_size",
    ),
    "ulysses_sequence_parallel_size": (
        "cp",
        "context_parallel_size",
        "ulysses_parallel_size",
        "ulysses_sequence_parallel_size",
    ),
    "fsdp_config.fsdp_size": (
        "fsdp_size",
        "data_parallel_shard_size",
        "fully_shard_parallel_size",
    ),
}
"""Names that other training engines of verl have for a size, by the name here."""


def _trained_role(key: str) -> str:
    """Section of the trained role that a key belongs to: "critic", or else `ACTOR`."""
    return "critic" if key.startswith("critic") else ACTOR


@rule_function
def set_strategy(line: Line, key: str, value: Any) -> None:
    """Set the training engine. FSDP with the same sizes replaces one that does not exist here."""
    if key != "model_engine":
        line.set(key, value if value in OWN_ENGINES else "fsdp")
    # `dp` is verl's default of `model_engine`, FSDP.
    if value not in {"dp", *OWN_ENGINES}:
        line.note()


@rule_function
def set_engine_size(line: Line, key: str, value: Any) -> None:
    """Set a parallel size of a role from the section of a training engine that does not exist here.

    Sizes of 1, sizes of roles that are not trained, and other keys of such sections have no effect.
    """
    role = _trained_role(key)
    name = key.rpartition(".")[2]
    is_size = isinstance(value, int) and value > 1
    if role in key and is_size and line.keys.is_changed(line.current_key):
        for our_name, other_names in _SIZES.items():
            if name in other_names:
                line.set(f"{role}.{our_name}", value)
                return
    line.note()


@rule_function
def set_compute_dtype(line: Line, key: str, value: Any) -> None:
    """Set the dtype of computations, if the user has set it. By default the machine decides."""
    if not line.is_users_key:
        return
    if value in _COMPUTE_FLOATS:
        # The key is `ROLE.dtype` or a key of `ROLE.fsdp_config`.
        role = key.partition(".fsdp_config")[0].removesuffix(".dtype")
        line.set(f"{role}.fsdp_config.model_dtype", _COMPUTE_FLOATS[value])
    elif value is not None:
        line.refuse("bfloat16, float16 or float32")


@rule_function
def set_master_dtype(line: Line, key: str, value: Any) -> None:
    """Set the dtype of the weights that the optimizer updates."""
    if value is not None and value not in FLOATS:
        line.refuse("fp32 or bf16")
    elif value is not None:
        line.set(f"{_trained_role(key)}.optim.master_dtype", FLOATS[value])


@rule_function
def set_step_on_host(line: Line, key: str, value: Any) -> None:
    """Keep weights and optimizer in host memory and compute the step there (`offload_policy`)."""
    if value:
        line.set(f"{key.partition('.optim')[0]}.fsdp_config.offload_policy", True)
    else:
        line.note("The optimizer's state is where fsdp_config says.")


@rule_function
def set_recompute(line: Line, key: str, value: Any) -> None:
    """Set gradient checkpointing, also if only Megatron's `recompute_granularity` is set.

    Here whole layers are recomputed with any granularity.
    """
    if not value:
        sections = (f"{ACTOR}.megatron", "engine")
        name = "override_transformer_config.recompute_granularity"
        value = any(line.get(f"{section}.{name}") for section in sections)
    line.set(key, value)


@rule_function
def set_micro_batch(line: Line, key: str, value: Any) -> None:
    """Set the micro-batch per process from a micro-batch that counts the sequences of all processes.

    Processes that share a sequence (sequence parallelism) count as one.
    """
    num_sharing = line.get(f"{_trained_role(key)}.ulysses_sequence_parallel_size", 1)
    if value is not None:
        line.set(f"{key}_per_gpu", max(1, value * num_sharing // count_processes(line)))


# ---- adapters -----------------------------------------------------------------------------------

_LORA_KEYS = ("rank", "alpha", "merge", "adapter_path")
"""Keys of verl's section `model.lora` that are `model.lora_NAME` here. Others are `model.NAME`."""
_MEGATRON_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
"""Modules of transformers, by Megatron's name for them."""


@rule_function
def set_adapter_key(line: Line, key: str, value: Any) -> None:
    """Set a key of the LoRA adapter, if one is trained."""
    section, _, name = key.rpartition(".")
    if not has_adapter(line):
        line.note()
    elif not section.endswith(".lora"):
        line.set(key, value)
    # The key is in the section `model.lora`.
    elif not line.is_users_key or value in (None, []):
        return
    elif name == "target_modules":
        names = [value] if isinstance(value, str) else value
        modules = chain.from_iterable(_MEGATRON_MODULES.get(module, (module,)) for module in names)
        # With empty text, the modules keep their default.
        if value:
            line.set("actor_rollout_ref.model.target_modules", list(modules))
    # A rank of 0 sets nothing, because verl then reads `model.lora_rank`.
    elif (name, value) != ("rank", 0):
        our_name = f"lora_{name}" if name in _LORA_KEYS else name
        line.set(f"actor_rollout_ref.model.{our_name}", value)


# ---- rollout ------------------------------------------------------------------------------------

_CONVERSATION_FILES = (
    "tool_config_path",
    "interaction_config_path",
    "function_tool_path",
    "interaction_config_file",
)


@rule_function
def set_rollout_key(line: Line, key: str, value: Any) -> None:
    """Set the rollout engine, its mode or its parallel size."""
    section = f"{ROLLOUT}.multi_turn"
    match key.removeprefix(f"{ROLLOUT}."):
        case "name":
            # vLLM replaces an engine that does not exist here.
            is_replaced = value in ("trtllm", "vllm_omni", "dynamo")
            line.set(key, "vllm" if is_replaced else value)
            if is_replaced:
                line.note()
        case "mode":
            # Conversations of several turns need the mode `async`.
            has_turns = line.get(f"{section}.enable")
            line.set(key, "async" if has_turns else value)
            if has_turns and value == "sync":
                line.note()
                # In verl, the mode `sync` calls tools if these files are set. Here an agent loop does so.
                if any(line.get(f"{section}.{name}") for name in _CONVERSATION_FILES):
                    line.set(f"{ROLLOUT}.agent.default_agent_loop", "tool_agent")
        case "tensor_model_parallel_size":
            # The engine `hf` always has one rank.
            if line.get(f"{ROLLOUT}.name") == "hf":
                line.note()
            else:
                line.set(key, value)


@rule_function
def set_do_sample(line: Line, key: str, value: Any) -> None:
    """Set whether tokens are sampled. In verl's asynchronous mode the temperature decides."""
    if line.get(f"{ROLLOUT}.mode") == "async":
        is_sampled = line.get(f"{key.removesuffix('do_sample')}temperature", 1) > 0
        if is_sampled != value:
            line.note()
        value = is_sampled
    line.set(key, value)


# ---- rewards ------------------------------------------------------------------------------------

_MANAGER_KEYS = (
    "reward_model.reward_manager",
    "reward.reward_manager.name",
    "reward_manager.name",
)
_OVERLONG_SECTIONS = (
    "reward_model.overlong_buffer",
    "reward_model.reward_kwargs.overlong_buffer_cfg",
    "reward.reward_kwargs.overlong_buffer_cfg",
)


@rule_function
def set_overlong_penalty(line: Line, key: str, value: Any) -> None:
    """Set a key of the penalty for long responses, and the length from which it is counted.

    Without the reward manager `dapo`, or if the penalty is not enabled, the key has no effect.
    """
    is_enabled = any(line.get(f"{section}.enable") for section in _OVERLONG_SECTIONS)
    if not is_enabled or _first_value(line, _MANAGER_KEYS) != "dapo":
        line.note()
        return
    line.set(key, value)
    limit_key = f"{REWARD}.reward_kwargs.max_resp_len"
    limit_keys = ("reward.reward_kwargs.max_resp_len", limit_key, "data.max_response_length")
    line.set(limit_key, _first_value(line, limit_keys))


@rule_function
def set_reward_model_key(line: Line, key: str, value: Any) -> None:
    """Set a key of the reward model, if there is one."""
    if not (line.get("reward.reward_model.enable") or line.get("reward_model.enable")):
        line.note()
    elif value is not None or line.is_users_key:
        line.take_over(key, value)


# ---- critic -------------------------------------------------------------------------------------


@rule_function
def set_critic_key(line: Line, key: str, value: Any) -> None:
    """Set a key of the critic, if verl has one in this run."""
    if key == "critic.enable":
        # Here the estimator decides whether there is a critic.
        if value is not None and value != (line.get("algorithm.adv_estimator") == "gae"):
            line.refuse("null")
    elif not has_critic(line):
        line.note()
    elif key == "trainer.max_critic_ckpt_to_keep":
        # Here a checkpoint contains both actor and critic.
        line.set("trainer.max_ckpt_to_keep", value or None)
    else:
        line.take_over(key, value)


# ---- the line as a whole ------------------------------------------------------------------------


def set_processes(line: Line) -> None:
    """Set the backend, and adapt the parallel sizes of the roles to the number of processes."""
    num_processes = count_processes(line)
    for role in (ACTOR, "critic"):
        _fit_sequence_parallel(line, role, num_processes)
        programs.set_shard_size(line, role, num_processes)
    # Only a line that trains with Megatron has rules beside those of its program.
    if line.rule_names != line.entry.rule_names:
        programs.share_actor_sizes(line, ["critic"] if has_critic(line) else [])
    # A line that names a cluster runs on Ray, even with one process.
    if num_processes != 1 or "ray_kwargs.ray_init.address" in line.settings:
        line.set("trainer.backend", "ray", "trainer.n_gpus_per_node")
    # Some versions of verl have no default of the rollout engine (`MISSING`).
    engine_key = f"{ROLLOUT}.name"
    if engine_key not in line.settings:
        line.set(engine_key, "vllm", engine_key)


def _fit_sequence_parallel(line: Line, role: str, num_processes: int) -> None:
    """Lower the sequence-parallel size of a role if it is larger than the number of processes.

    Nothing changes if the tensor- and pipeline-parallel sizes do not divide the number of processes;
    the checks of the configuration report that.
    """
    key = f"{role}.ulysses_sequence_parallel_size"
    size = line.settings.get(key, 1)
    tensor_size = line.settings.get(f"{role}.tensor_model_parallel_size", 1)
    pipeline_size = line.settings.get(f"{role}.pipeline_model_parallel_size", 1)
    are_numbers = all(map(is_number, (size, tensor_size, pipeline_size)))
    if not are_numbers or size <= num_processes:
        return
    # Processes are divided by the model sizes; all ranks that remain share a sequence.
    ranks_per_model = tensor_size * pipeline_size
    if num_processes % ranks_per_model == 0:
        line.settings[key] = num_processes // ranks_per_model
        line.note(
            f"There are only {num_processes} processes, which share a sequence. No number depends on it.",
            key,
        )


def set_schedules(line: Line) -> None:
    """Set how learning-rate schedules count steps, and when they end.

    verl counts steps from 0 (`zero_indexed_step`). Since 0.10 this is a key, but only cosine schedules
    read it. A schedule ends at `total_training_steps` if it is set, even if the epochs end before.
    """
    num_steps = line.settings.get("trainer.total_training_steps")
    for section in (spell_key(f"{ACTOR}.optim", line.entry.task), "critic.optim"):
        scheduler = line.settings.get(f"{section}.lr_scheduler_type", "constant")
        has_warmup = line.settings.get(f"{section}.lr_warmup_steps_ratio")
        if is_number(num_steps) and (scheduler != "constant" or has_warmup):
            steps_key = f"{section}.total_training_steps"
            line.set(steps_key, num_steps, steps_key)
        if f"{section}.lr" not in line.settings:
            continue
        key = f"{section}.zero_indexed_step"
        if scheduler == "cosine":
            line.settings.setdefault(key, True)
        else:
            line.note(
                "verl reads it only for cosine schedules: the steps of other schedules are counted from 0.",
                key,
            )
            line.settings[key] = True


def set_reward_model(line: Line) -> None:
    """Set the processes of a reward model, and drop the user's reward function that it replaces."""
    # verl's section is the first; in older versions the second.
    sections = ("reward.reward_model", "reward_model")
    section = next((name for name in sections if line.get(f"{name}.enable")), None)
    if section is None:
        return
    if line.get(f"{section}.enable_resource_pool"):
        source = f"{section}.enable"
        num_nodes = line.get(f"{section}.nnodes", 1)
        pool = [line.get(f"{section}.n_gpus_per_node", 8)] * num_nodes
        placement = {"actor_rollout_ref": "all", "critic": "all", "reward_model": "reward"}
        line.set("trainer.resource_pools", {"reward": pool}, source)
        line.set("trainer.placement", placement, source)

    # verl's trainer ignores a reward function beside a reward model. Since 0.8 its reward loop calls
    # the function, which may call the served reward model.
    function_key = "custom_reward_function.path"
    if line.settings.get(function_key):
        reason = "The function is not called, because the reward model gives the scores."
        has_loop = VERSIONS.index(line.version) >= VERSIONS.index("0.8.0")
        if has_loop and line.get(f"{REWARD}.use_reward_loop", True):
            reason += " verl would call it, with the address of the served model."
        line.note(reason, line.sources[function_key])
        for key in list(line.settings):
            if key.startswith("custom_reward_function."):
                del line.settings[key]


_PPO = (
    set_processes,
    set_reward_model,
    programs.set_distillation,
    set_schedules,
    programs.replace_engine_for_replay,
    programs.set_trainer_mode,
)
FINISH: dict[str, tuple[Callable[[Line], None], ...]] = {
    "ppo": _PPO,
    "async_flow": _PPO,
    "async": (*_PPO, programs.set_async_training),
    "fully_async": (*_PPO, programs.set_async_training),
    "sft": (programs.set_supervised_run, set_schedules),
    "fsdp_sft": (programs.set_supervised_run, set_schedules),
    "generation": (programs.cut_prompts_at_end,),
}
"""Functions that are called after all keys of a line, by the first of `Entry.rule_names`."""
