# SPDX-License-Identifier: Apache-2.0
"""Functions that rules.tsv names for keys of verl's RL trainers, ordered by the part of a run.

`rule_function` says how they are called, and `Line` has the methods that they call. `FINISH` at the
end lists functions that are called once, after all keys of a line.
"""

from collections.abc import Callable
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
    numbers = (line.get("trainer.n_gpus_per_node", 1), line.get("trainer.nnodes", 1))
    return prod(number for number in numbers if isinstance(number, int))


def has_adapter(line: Line) -> bool:
    """Whether a LoRA adapter is trained."""
    names = ("lora_rank", "lora.rank", "lora_adapter_path", "lora.adapter_path")
    return any(line.get(f"actor_rollout_ref.model.{name}") for name in names)


def _first_value(line: Line, keys: tuple[str, ...]) -> Any:
    """First value among keys that is set and not false. Keys that the user has set come first."""
    users_keys = [key for key in keys if key in line.keys.from_user]
    for key in (*users_keys, *keys):
        value = line.get(key)
        if value:
            return value
    return None


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
def set_frequency(line: Line, key: str, value: Any) -> None:
    """Set the steps between checkpoints or validations. In verl, 0 and below mean never."""
    if value == "after_each_epoch":
        line.set(key, value)
    elif isinstance(value, str):
        line.refuse("a number of steps, or -1", line.sentence)
    else:
        line.set(key, int(value) if value and value > 0 else -1)


@rule_function
def set_critic_warmup(line: Line, key: str, value: Any) -> None:
    """Set the number of steps before the actor learns. verl's key names the first such step."""
    line.set(key, max(int(value or 0) - 1, 0))
    if value and value > 0:
        line.note(line.sentence)


@rule_function
def set_auto_device(line: Line, key: str, value: Any) -> None:
    """Set `auto`: the device is chosen by the machine, not by the command line."""
    line.set(key, "auto")
    if value not in ("cuda", "cpu"):
        line.note(line.sentence)


@rule_function
def set_loggers(line: Line, key: str, value: Any) -> None:
    """Set the trackers that exist here; verl's `file` is `jsonl`."""
    names = [value] if isinstance(value, str) else list(value or [])
    names = ["jsonl" if name == "file" else name for name in names]
    known_names = get_args(Tracker)
    line.set(key, [name for name in names if name in known_names])
    missing_names = [str(name) for name in names if name not in known_names]
    if missing_names:
        line.note(f"{', '.join(missing_names)}: {line.sentence}")


@rule_function
def set_logged_samples(line: Line, key: str, value: Any) -> None:
    """Set the samples of validation that are logged; a negative number means none."""
    if is_number(value) and value < 0:
        line.note(line.sentence)
    set_unless_null(line, key, max(value, 0) if is_number(value) else value)


@rule_function
def set_directory(line: Line, key: str, value: Any) -> None:
    """Set a directory. Empty text means the current one, as in verl, which joins paths to it."""
    if value == "":
        line.note(line.sentence)
    line.set(key, value or ".")


@rule_function
def set_profiler(line: Line, key: str, value: Any) -> None:
    """Set the profiler's tool and steps, if the tool exists here."""
    if line.get("global_profiler.tool") not in _PROFILERS:
        line.note(line.sentence)
    elif value is not None:
        line.set(key, value)


@rule_function
def set_profiled_ranks(line: Line, key: str, value: Any) -> None:
    """Set the ranks of a role that are profiled.

    In verl a role profiles no rank unless it enables the profiler; here null means all ranks.
    """
    role = key.rpartition(".")[0]
    if line.get("global_profiler.tool") not in _PROFILERS:
        line.note(line.sentence)
        return
    ranks: list[int] | None = line.get(f"{role}.ranks", [])
    if not line.get(f"{role}.enable", True):
        ranks = []
    elif line.get(f"{role}.all_ranks"):
        ranks = None
    line.set(f"{role}.ranks", ranks)


# ---- data ---------------------------------------------------------------------------------------


@rule_function
def set_batch_size(line: Line, key: str, value: Any) -> None:
    """Set the prompts of a step (`train_batch_size`) or of a generation step (`gen_batch_size`).

    Without dynamic sampling, a step of verl has a single generation step, whose size is used.
    """
    is_filtered = line.get("algorithm.filter_groups.enable")
    if value is None:
        return
    if is_filtered:
        line.set(key, value)
    elif line.get("data.gen_batch_size", value) == value:
        line.set("data.train_batch_size", value)
    else:
        line.note(line.sentence)


@rule_function
def set_raw_chat(line: Line, key: str, value: Any) -> None:
    """Set whether rows have their messages, which conversations of several turns need."""
    line.set(key, bool(value or line.get(f"{ROLLOUT}.multi_turn.enable")))


@rule_function
def set_data_length(line: Line, key: str, value: Any) -> None:
    """Set the prompt or response length of the data from that of the rollout, if the user has set it."""
    if line.current_key in line.keys.from_user and value is not None:
        name = "max_prompt_length" if key.endswith("prompt_length") else "max_response_length"
        line.set(f"data.{name}", value)


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
    """Set the name of a registered function or class, or a file of the user."""
    known_names = _KNOWN_NAMES[key.rpartition(".")[2]]
    is_users = ".py:" in str(value) or line.get("actor_rollout_ref.model.external_lib")
    if key.endswith("reward_manager") and value in _PLAIN_MANAGERS:
        line.set(key, "naive")
    elif value in known_names or is_users:
        line.set(key, value)
    elif value is not None:
        expected = f"one of {', '.join(sorted(known_names))}, or path/to/file.py:name"
        line.refuse(expected, line.sentence)


@rule_function
def set_filter_groups(line: Line, key: str, value: Any) -> None:
    """Set a key of dynamic sampling, if the program and version have it."""
    if line.entry.name == "main_ppo" and key not in line.keys.default:
        line.note(line.sentence)
    elif value is not None:
        line.set(key, value)


@rule_function
def set_clip_ratio(line: Line, key: str, value: Any) -> None:
    """Set the clip of a side. verl uses `clip_ratio` for a side whose own clip is null."""
    sides = (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high")
    if key in sides:
        line.set(key, line.get(f"{ACTOR}.clip_ratio", 0.2) if value is None else value)
        return
    has_both = all(line.get(side) is not None for side in sides)
    if has_both and line.keys.from_user.isdisjoint(sides):
        line.note(line.sentence)


@rule_function
def set_loss_option(line: Line, key: str, value: Any) -> None:
    """Set an option of a policy loss, if that loss is used."""
    name = key.rpartition(".")[2]
    loss = line.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    is_known_loss = loss in LOSSES
    if is_known_loss and name not in LOSSES[loss]:
        line.note(line.sentence)
    elif value is not None and (is_known_loss or line.current_key in line.keys.from_user):
        line.set(f"{ACTOR}.policy_loss.options.{name}", value)


@rule_function
def set_loss_agg_mode(line: Line, key: str, value: Any) -> None:
    """Set how the loss is averaged. Some losses of verl ignore the key."""
    loss = line.get(f"{ACTOR}.policy_loss.loss_mode")
    is_before_0_9 = VERSIONS.index(line.version) < VERSIONS.index("0.10.0")
    if loss in ("sapo", "geo_mean") or (loss == "gspo" and is_before_0_9):
        line.note(line.sentence)
        value = "seq-mean-token-mean"
        # Also a comment in the YAML file, where the value differs from that of the line.
        line.comments[key] = line.sentence
    elif value == "seq-mean-token-sum-norm" and is_before_0_9:
        line.note(
            "Sums of tokens are averaged over sequences, as in verl from 0.9 on; before, they are added up."
        )
    line.set(key, value)


@rule_function
def set_rejection(line: Line, key: str, value: Any) -> None:
    """Set rejection by importance ratios.

    Keys of verl since 0.8 are the same here. In verl 0.6.1 there are a level, an upper and a lower
    bound, and a threshold for single tokens (veto). These bounds apply to the ratio of trained to
    rollout probabilities; thresholds of the methods `k1` apply to its inverse.
    """
    section = "algorithm.rollout_correction"
    level = line.get(f"{section}.rollout_rs")
    veto = line.get(f"{section}.rollout_token_veto_threshold")
    if level not in _REJECTIONS and veto is None:
        # The line is written for verl 0.8 or later.
        if key.endswith("_lower"):
            line.note(line.sentence)
        elif not key.endswith("veto_threshold"):
            line.set(key, value)
        return

    upper = line.get(f"{section}.rollout_rs_threshold")
    if upper is None:
        upper = line.get(f"{section}.rollout_is_threshold", 2.0)
    lower = line.get(f"{section}.rollout_rs_threshold_lower")
    bounds = [veto] if level is None else [veto, upper, lower]
    bounds = [bound for bound in bounds if bound is not None]
    is_known_level = level is None or level in _REJECTIONS
    if not is_known_level or not all(is_number(bound) and bound > MIN_RATIO for bound in bounds):
        if value in bounds:
            line.refuse(f"a number above {MIN_RATIO:.0e}", line.sentence)
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
def set_pure_correction(line: Line, key: str, value: Any) -> None:
    """Set the REINFORCE loss, which verl uses only together with `bypass_mode`."""
    if not value:
        return
    section = key.rpartition(".")[0]
    if line.get(f"{section}.bypass_mode") or line.get(f"{section}.bypass_old_logprob_for_rollout"):
        line.set(f"{section}.loss_type", "reinforce")
    else:
        line.note(line.sentence)


@rule_function
def set_weight_bound(line: Line, key: str, value: Any) -> None:
    """Set the bound of importance weights. It may be null only if there are no weights."""
    if value is None and line.get("algorithm.rollout_correction.rollout_is") is not None:
        line.refuse("a number", line.sentence)
    set_unless_null(line, key, value)


# ---- learning rates -----------------------------------------------------------------------------


@rule_function
def refuse_schedule_length(line: Line, key: str, value: Any) -> None:
    """Refuse the length of a schedule, which verl's trainers replace by their number of steps."""
    if value not in (-1, None):
        line.refuse("-1", line.sentence)


@rule_function
def set_warmup_steps(line: Line, key: str, value: Any) -> None:
    """Set the steps of warm-up, or -1 if they are a share of all steps.

    0 means no warm-up for the RL trainers before verl 0.10. Otherwise it means, like -1, that the
    share is used.
    """
    is_zero_unset = line.version == VERSIONS[-1] or line.entry.task == "sft"
    if value is None or value < 0 or (value == 0 and is_zero_unset):
        value = -1
    line.set(key, value)


@rule_function
def set_end_of_schedule(line: Line, key: str, value: Any) -> None:
    """Translate Megatron's last learning rate, or the step at which the schedule reaches it."""
    section, _, name = key.rpartition(".")
    highest_rate = line.get(f"{section}.lr")
    if line.get(f"{section}.lr_decay_style", "constant") == "constant":
        line.note(line.sentence)
    elif name == "lr_decay_steps":
        line.set(f"{section}.total_training_steps", value)
    elif is_number(value) and is_number(highest_rate) and highest_rate > 0:
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
"""Names that other training engines of verl have for the sizes of a role."""


def _trained_role(key: str) -> str:
    """Section of the role that a key belongs to: the critic's, or else the actor's."""
    return "critic" if key.startswith("critic") else ACTOR


@rule_function
def set_strategy(line: Line, key: str, value: Any) -> None:
    """Set the training engine. FSDP with the same sizes replaces one that does not exist here."""
    if key != "model_engine":
        line.set(key, value if value in OWN_ENGINES else "fsdp")
    if value not in {"dp", *OWN_ENGINES}:
        line.note(line.sentence)


@rule_function
def set_engine_size(line: Line, key: str, value: Any) -> None:
    """Set a parallel size of a role from the section of a training engine that does not exist here."""
    role = _trained_role(key)
    name = key.rpartition(".")[2]
    is_size = isinstance(value, int) and value > 1
    if role in key and is_size and line.keys.is_changed(line.current_key):
        for size, other_names in _SIZES.items():
            if name in other_names:
                line.set(f"{role}.{size}", value)
                return
    line.note(line.sentence)


@rule_function
def set_compute_dtype(line: Line, key: str, value: Any) -> None:
    """Set the dtype of computations, if the user has set it. By default the machine decides."""
    if line.current_key not in line.keys.from_user:
        return
    if value in _COMPUTE_FLOATS:
        role = key.partition(".fsdp_config")[0].removesuffix(".dtype")
        line.set(f"{role}.fsdp_config.model_dtype", _COMPUTE_FLOATS[value])
    elif value is not None:
        line.refuse("bfloat16, float16 or float32", line.sentence)


@rule_function
def set_master_dtype(line: Line, key: str, value: Any) -> None:
    """Set the dtype of the weights that the optimizer updates."""
    if value is not None and value not in FLOATS:
        line.refuse("fp32 or bf16", line.sentence)
    elif value is not None:
        line.set(f"{_trained_role(key)}.optim.master_dtype", FLOATS[value])


@rule_function
def set_step_on_host(line: Line, key: str, value: Any) -> None:
    """Keep weights and optimizer in host memory, where the step is computed."""
    if value:
        line.set(f"{key.partition('.optim')[0]}.fsdp_config.offload_policy", True)
    else:
        line.note("The optimizer's state is where fsdp_config says.")


@rule_function
def set_recompute(line: Line, key: str, value: Any) -> None:
    """Set gradient checkpointing, also if only Megatron's granularity says so.

    Whole layers are recomputed with any granularity.
    """
    if not value:
        sections = (f"{ACTOR}.megatron", "engine")
        name = "override_transformer_config.recompute_granularity"
        value = any(line.get(f"{section}.{name}") for section in sections)
    line.set(key, value)


@rule_function
def set_micro_batch(line: Line, key: str, value: Any) -> None:
    """Set the micro-batch of a process from the number of sequences on all processes together.

    Ranks that share a sequence count as one process.
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
def set_adapter_detail(line: Line, key: str, value: Any) -> None:
    """Set a key of the LoRA adapter, if one is trained."""
    section = "actor_rollout_ref.model."
    if not has_adapter(line):
        line.note(line.sentence)
    elif not key.startswith(f"{section}lora."):
        line.set(key, value)
    elif line.current_key in line.keys.from_user:
        name = key.removeprefix(f"{section}lora.")
        # Without a rank in this section, verl reads `model.lora_rank`.
        has_no_rank = name == "rank" and value == 0
        if value not in (None, []) and not has_no_rank:
            line.set(f"{section}lora_{name}" if name in _LORA_KEYS else f"{section}{name}", value)


@rule_function
def set_adapter_modules(line: Line, key: str, value: Any) -> None:
    """Set the modules that have a LoRA adapter, from the names of Megatron or transformers."""
    if not has_adapter(line):
        line.note(line.sentence)
    elif line.current_key in line.keys.from_user and value:
        modules: list[str] = []
        for name in [value] if isinstance(value, str) else value:
            modules += _MEGATRON_MODULES.get(name, (name,))
        line.set("actor_rollout_ref.model.target_modules", modules)


# ---- rollout ------------------------------------------------------------------------------------

_CONVERSATION_FILES = (
    "tool_config_path",
    "interaction_config_path",
    "function_tool_path",
    "interaction_config_file",
)


@rule_function
def set_rollout_engine(line: Line, key: str, value: Any) -> None:
    """Set the rollout engine. vLLM replaces one that does not exist here."""
    is_replaced = value in ("trtllm", "vllm_omni", "dynamo")
    line.set(key, "vllm" if is_replaced else value)
    if is_replaced:
        line.note(line.sentence)


@rule_function
def set_rollout_mode(line: Line, key: str, value: Any) -> None:
    """Set the mode of the rollout. Conversations of several turns need the mode `async`."""
    section = f"{ROLLOUT}.multi_turn"
    has_turns = line.get(f"{section}.enable")
    line.set(key, "async" if has_turns else value)
    if has_turns and value == "sync":
        line.note(line.sentence)
        if any(line.get(f"{section}.{name}") for name in _CONVERSATION_FILES):
            line.set(f"{ROLLOUT}.agent.default_agent_loop", "tool_agent")


@rule_function
def set_rollout_parallel(line: Line, key: str, value: Any) -> None:
    """Set a parallel size of the engine. The engine `hf` always has one rank."""
    if line.get(f"{ROLLOUT}.name") == "hf":
        line.note(line.sentence)
    else:
        line.set(key, value)


@rule_function
def set_do_sample(line: Line, key: str, value: Any) -> None:
    """Set whether tokens are sampled. In verl's asynchronous mode the temperature decides."""
    if line.get(f"{ROLLOUT}.mode") == "async":
        is_sampled = line.get(f"{key.removesuffix('do_sample')}temperature", 1) > 0
        if is_sampled != value:
            line.note(line.sentence)
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
    """Set the penalty for long responses. Only the manager `dapo` has it."""
    is_enabled = any(line.get(f"{section}.enable") for section in _OVERLONG_SECTIONS)
    if not is_enabled or _first_value(line, _MANAGER_KEYS) != "dapo":
        line.note(line.sentence)
        return
    line.set(key, value)
    our_limit = f"{REWARD}.reward_kwargs.max_resp_len"
    limits = ("reward.reward_kwargs.max_resp_len", our_limit, "data.max_response_length")
    line.set(our_limit, _first_value(line, limits))


@rule_function
def set_reward_model_key(line: Line, key: str, value: Any) -> None:
    """Set a key of the reward model, if there is one."""
    if not (line.get("reward.reward_model.enable") or line.get("reward_model.enable")):
        line.note(line.sentence)
    elif value is not None or line.current_key in line.keys.from_user:
        line.take_over(key, value)


# ---- critic -------------------------------------------------------------------------------------


@rule_function
def set_kept_checkpoints(line: Line, key: str, value: Any) -> None:
    """Set the number of checkpoints to keep. Here a checkpoint contains both actor and critic."""
    if has_critic(line):
        line.set("trainer.max_ckpt_to_keep", value or None)
    else:
        line.note(line.sentence)


@rule_function
def set_critic_key(line: Line, key: str, value: Any) -> None:
    """Set a key of the critic, if verl has one in this run."""
    if has_critic(line):
        line.take_over(key, value)
    else:
        line.note(line.sentence)


@rule_function
def check_critic_switch(line: Line, key: str, value: Any) -> None:
    """Refuse `critic.enable` if it contradicts the estimator, by which a critic is used here."""
    if value is not None and value != (line.get("algorithm.adv_estimator") == "gae"):
        line.refuse("null", line.sentence)


# ---- the line as a whole ------------------------------------------------------------------------


def set_processes(line: Line) -> None:
    """Set the backend, and fit the sizes of the roles to the number of processes."""
    num_processes = count_processes(line)
    for role in (ACTOR, "critic"):
        _fit_sequence_parallel(line, role, num_processes)
        programs.set_shard_size(line, role, num_processes)
    # A line that trains with Megatron has further rules.
    if line.rules != line.entry.rules:
        programs.share_actor_sizes(line, ["critic"] if has_critic(line) else [])
    line.current_key = "trainer.n_gpus_per_node"
    # A line that names a cluster runs on Ray, even with one process.
    if num_processes != 1 or "ray_kwargs.ray_init.address" in line.settings:
        line.set("trainer.backend", "ray")
    line.current_key = f"{ROLLOUT}.name"
    if line.current_key not in line.settings:
        line.set(f"{ROLLOUT}.name", "vllm")


def _fit_sequence_parallel(line: Line, role: str, num_processes: int) -> None:
    """Lower the sequence-parallel size if it is larger than the number of processes.

    The checks of the configuration report a size that does not fit for another reason.
    """
    line.current_key = f"{role}.ulysses_sequence_parallel_size"
    size = line.settings.get(line.current_key, 1)
    model_sizes = []
    for dimension in ("tensor", "pipeline"):
        model_sizes.append(line.settings.get(f"{role}.{dimension}_model_parallel_size", 1))
    are_numbers = is_number(size) and all(map(is_number, model_sizes))
    if not are_numbers or size <= num_processes:
        return
    # Processes are divided by the model sizes; all ranks that remain share a sequence.
    ranks_per_model = prod(model_sizes)
    if num_processes % ranks_per_model == 0:
        line.settings[line.current_key] = num_processes // ranks_per_model
        line.note(
            f"There are {num_processes} processes: as many share a sequence. No number depends on it."
        )


def set_schedules(line: Line) -> None:
    """Set how learning-rate schedules count steps, and when they end.

    verl counts steps from 0, except for cosine schedules if version 0.10's key says so. A schedule
    ends at `total_training_steps` if it is set, even if the epochs end before.
    """
    num_steps = line.settings.get("trainer.total_training_steps")
    for section in (spell_key(f"{ACTOR}.optim", line.entry.task), "critic.optim"):
        scheduler = line.settings.get(f"{section}.lr_scheduler_type", "constant")
        has_warmup = line.settings.get(f"{section}.lr_warmup_steps_ratio")
        if is_number(num_steps) and (scheduler != "constant" or has_warmup):
            line.current_key = f"{section}.total_training_steps"
            line.set(line.current_key, num_steps)
        line.current_key = f"{section}.zero_indexed_step"
        if f"{section}.lr" not in line.settings:
            continue
        if scheduler == "cosine":
            line.settings.setdefault(line.current_key, True)
        else:
            line.note(
                "verl reads it for a cosine alone: the steps of other schedules are counted from 0."
            )
            line.settings[line.current_key] = True


def set_reward_model(line: Line) -> None:
    """Set the processes of a reward model, and drop the reward function that it replaces."""
    line.current_key = "reward.reward_model.enable"
    if not line.get(line.current_key):
        line.current_key = "reward_model.enable"
    if not line.get(line.current_key):
        return
    section = line.current_key.removesuffix(".enable")
    _drop_reward_function(line)
    if line.get(f"{section}.enable_resource_pool"):
        num_nodes = line.get(f"{section}.nnodes", 1)
        pool = [line.get(f"{section}.n_gpus_per_node", 8)] * num_nodes
        placement = {"actor_rollout_ref": "all", "critic": "all", "reward_model": "reward"}
        line.set("trainer.resource_pools", {"reward": pool})
        line.set("trainer.placement", placement)


def _drop_reward_function(line: Line) -> None:
    """Drop the reward function of a line with a reward model, because verl's trainer ignores it.

    Since 0.8 verl's reward loop calls the function, which may call the served reward model. A notice
    says so.
    """
    path = "custom_reward_function.path"
    if not line.settings.get(path):
        return
    has_loop = VERSIONS.index(line.version) >= VERSIONS.index("0.8.0")
    sentence = "The reward model gives the scores: the function is not called."
    if has_loop and line.get(f"{REWARD}.use_reward_loop", True):
        sentence += " verl would call it, with the address of the served model."
    line.current_key = line.sources[path]
    line.note(sentence)
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
    "generation": (programs.set_generation,),
}
"""Functions that are called after all keys of a line, by the first name of `Entry.rules`."""
