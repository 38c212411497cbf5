# SPDX-License-Identifier: Apache-2.0
"""What values of verl's keys mean here, where a row of rules.tsv names a function.

Each is called as `function(line, key, value)` with the key in the spelling of its row; `line.sentence` is the row's.
"""

from collections.abc import Callable
from math import prod
from typing import TYPE_CHECKING, Any, get_args

from quadriga.config.root import spelled
from quadriga.config.trainer import Tracker
from quadriga_verl.commands import programs
from quadriga_verl.commands.hydra import VERSIONS
from quadriga_verl.commands.programs import is_number

if TYPE_CHECKING:
    from quadriga_verl.commands.translate import Line

ACTOR, ROLLOUT, REWARD = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "reward_model"
ESTIMATORS = frozenset((
    "gae", "gdpo", "gpg", "grpo", "grpo_passk", "grpo_vectorized", "opo", "optimal_token_baseline",
    "reinforce_plus_plus", "reinforce_plus_plus_baseline", "remax", "rloo", "rloo_vectorized",
    "tir_optimal_token_baseline",
))  # fmt: skip
LOSSES: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(
        ("vanilla", "gpg", "gspo", "geo_mean", "cispo", "dppo_tv", "dppo_kl", "bypass_mode"), ()
    ),
    "clip_cov": ("clip_cov_ratio", "clip_cov_lb", "clip_cov_ub"),
    "kl_cov": ("kl_cov_ratio", "ppo_kl_coef"),
    "sapo": ("tau_pos", "tau_neg"),
    "dro": ("dro_beta",),
}
"""Policy loss -> those of verl's options that it has."""
_PLAIN_MANAGERS = ("gdpo", "limited", "rate_limited", "remote")
"""verl's managers that give what `naive` gives: they differ in where and how fast functions are called."""
_OVERLONG = (
    "reward_model.overlong_buffer",
    *(f"{at}.reward_kwargs.overlong_buffer_cfg" for at in (REWARD, "reward")),
)
_MANAGER = ("reward_model.reward_manager", "reward.reward_manager.name", "reward_manager.name")
MANAGERS = ("naive", "batch", "dapo", "prime")
_REJECTIONS = {"token": "token_k1", "sequence": "seq_sum_k1", "geometric": "seq_mean_k1"}
MIN_RATIO = 3e-9  # just above e^-20, where log-ratios are cut
ENGINES = ("vllm", "sglang", "hf")
_PROFILERS = ("torch", "torch_memory", "nsys")
FLOATS = {
    "fp32": "float32",
    "float32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "bfloat16": "bfloat16",
}
_COMPUTE = FLOATS | {"fp16": "float16", "float16": "float16"}
_SIZES = {
    "tensor_model_parallel_size": ("tp", "tensor_parallel_size", "tensor_model_parallel_size"),
    "pipeline_model_parallel_size": ("pp", "pipeline_parallel_size", "pipeline_model_parallel_size"),
    "ulysses_sequence_parallel_size": (
        "cp", "context_parallel_size", "ulysses_parallel_size", "ulysses_sequence_parallel_size",
    ),
    "fsdp_config.fsdp_size": ("fsdp_size", "data_parallel_shard_size", "fully_shard_parallel_size"),
}  # fmt: skip
"""Our size under a role -> its names in the sections of other training engines."""


def count_of(line: "Line") -> int:
    """Processes of the run; 1 where a number of them is none."""
    numbers = (line.get("trainer.n_gpus_per_node", 1), line.get("trainer.nnodes", 1))
    return prod(number for number in numbers if isinstance(number, int))


def has_critic(line: "Line") -> bool:
    """Whether verl builds a critic."""
    return bool(line.get("critic.enable", line.get("algorithm.adv_estimator") == "gae"))


def has_adapter(line: "Line") -> bool:
    """Whether an adapter is trained."""
    model = "actor_rollout_ref.model."
    names = ("lora_rank", "lora.rank", "lora_adapter_path", "lora.adapter_path")
    return any(line.get(model + name) for name in names)


def _asked(line: "Line", *keys: str) -> Any:
    """The first of these keys that the user gave a value, else the first that has one."""
    values = map(line.get, sorted(keys, key=lambda one: one not in line.given))
    return next(filter(None, values), None)


def frequency(line: "Line", key: str, value: Any) -> None:
    """Steps between checkpoints or validations: verl takes whatever is not above zero for never."""
    if value == "after_each_epoch":
        line.set(key, value)
    elif isinstance(value, str):
        line.refuse("a number of steps, or -1", line.sentence)
    else:
        line.set(key, int(value) if value and value > 0 else -1)


def unless_null(line: "Line", key: str, value: Any) -> None:
    """Null, and text without a letter, are the default."""
    if value not in (None, ""):
        line.set(key, value)


def null_if_falsy(line: "Line", key: str, value: Any) -> None:
    """False, 0 and empty text mean null."""
    line.set(key, value or None)


def set_by_the_run(line: "Line", key: str, value: Any) -> None:
    """The length of a schedule: verl's trainers write their own number of steps over it."""
    if value not in (-1, None):
        line.refuse("-1", line.sentence)


def warmup_steps(line: "Line", key: str, value: Any) -> None:
    """Without a number of steps the share of the run decides; 0 is one to the trainers before verl 0.10 alone."""
    is_none = (
        value is None
        or value < 0
        or (value == 0 and (line.version == VERSIONS[-1] or line.entry.task == "sft"))
    )
    line.set(key, -1 if is_none else value)


def clip_ratio(line: "Line", key: str, value: Any) -> None:
    """verl reads `clip_ratio` only where a side of its own is null."""
    sides = [f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio_high"]
    if key in sides:
        line.set(key, line.get(f"{ACTOR}.clip_ratio", 0.2) if value is None else value)
    elif all(line.get(side) is not None for side in sides) and not any(
        side in line.given for side in sides
    ):
        line.note(line.sentence)


def device(line: "Line", key: str, value: Any) -> None:
    """A process computes on what the machine has."""
    line.set(key, "auto")
    if value not in ("cuda", "cpu"):
        line.note(line.sentence)


def loggers(line: "Line", key: str, value: Any) -> None:
    """The trackers that there are; verl's `file` is our `jsonl`."""
    given = [value] if isinstance(value, str) else list(value or [])
    named = ["jsonl" if one == "file" else one for one in given]
    line.set(key, [one for one in named if one in get_args(Tracker)])
    if missing := [one for one in named if one not in get_args(Tracker)]:
        line.note(f"{', '.join(map(str, missing))}: {line.sentence}")


def batch_size(line: "Line", key: str, value: Any) -> None:
    """Prompts of a step, or of one generation, from which verl's step learns where nothing is filtered."""
    is_filtered = line.get("algorithm.filter_groups.enable")
    if value is not None and (is_filtered or line.get("data.gen_batch_size", value) == value):
        line.set(key if is_filtered else "data.train_batch_size", value)


def filter_groups(line: "Line", key: str, value: Any) -> None:
    """Dynamic sampling, by the programs that have it."""
    if line.entry.name == "main_ppo" and key not in line.default:
        line.note(line.sentence)
    elif value is not None:
        line.set(key, value)


def overlong(line: "Line", key: str, value: Any) -> None:
    """The soft punishment of long responses, of the manager that has it."""
    is_on = any(line.get(f"{place}.enable") for place in _OVERLONG)
    if not is_on or _asked(line, *_MANAGER) != "dapo":
        line.note(line.sentence)
        return
    line.set(key, value)
    limits = (
        "reward.reward_kwargs.max_resp_len",
        f"{REWARD}.reward_kwargs.max_resp_len",
        "data.max_response_length",
    )
    line.set(f"{REWARD}.reward_kwargs.max_resp_len", _asked(line, *limits))


def known_name(line: "Line", key: str, value: Any) -> None:
    """A name out of a registry, or a function in a file of the user's."""
    known = {"adv_estimator": ESTIMATORS, "loss_mode": LOSSES, "reward_manager": MANAGERS}[
        key.rpartition(".")[2]
    ]
    if key.endswith("reward_manager") and value in _PLAIN_MANAGERS:
        line.set(key, "naive")
    elif value in known or ".py:" in str(value) or line.get("actor_rollout_ref.model.external_lib"):
        line.set(key, value)
    elif value is not None:
        line.refuse(f"one of {', '.join(known)}, or path/to/file.py:name", line.sentence)


def loss_option(line: "Line", key: str, value: Any) -> None:
    """An option of a policy loss, where that loss is taken."""
    name, mode = key.rpartition(".")[2], line.get(f"{ACTOR}.policy_loss.loss_mode", "vanilla")
    own = LOSSES.get(mode)
    if own is not None and name not in own:
        line.note(line.sentence)
    elif value is not None and (own is not None or line.written in line.given):
        line.set(f"{ACTOR}.policy_loss.options.{name}", value)


def strategy(line: "Line", key: str, value: Any) -> None:
    """The training engine: whatever it is called, our FSDP with the same sizes."""
    if key != "model_engine":
        line.set(key, value if value in programs.OWN_ENGINES else "fsdp")
    if value not in {"dp", *programs.OWN_ENGINES}:
        line.note(line.sentence)


def engine_size(line: "Line", key: str, value: Any) -> None:
    """A size in the section of a training engine, as the role's own."""
    role, name = (
        key.partition("critic" if key.startswith("critic") else ACTOR)[1],
        key.rpartition(".")[2],
    )
    ours = next((one for one, names in _SIZES.items() if name in names), None)
    is_asked = isinstance(value, int) and value > 1
    if role and ours and is_asked and line.is_changed(line.written):
        line.set(f"{role}.{ours}", value)
    else:
        line.note(line.sentence)


def compute_dtype(line: "Line", key: str, value: Any) -> None:
    """The dtype that computes; what is not asked for is chosen for the machine."""
    if not line.is_changed(line.written) and line.written not in line.given:
        return
    if value in _COMPUTE:
        role = key.partition(".fsdp_config")[0].removesuffix(".dtype")
        line.set(f"{role}.fsdp_config.model_dtype", _COMPUTE[value])
    elif value is not None:
        line.refuse("bfloat16, float16 or float32", line.sentence)


def master_dtype(line: "Line", key: str, value: Any) -> None:
    """The dtype in which verl keeps the weights that the optimizer steps."""
    role = "critic" if key.startswith("critic") else ACTOR
    if value is not None and value not in FLOATS:
        line.refuse("fp32 or bf16", line.sentence)
    elif value is not None:
        line.set(f"{role}.optim.master_dtype", FLOATS[value])


def step_on_host(line: "Line", key: str, value: Any) -> None:
    """Masters and optimizer on the host, where the step is taken."""
    if value:
        line.set(f"{key.partition('.optim')[0]}.fsdp_config.offload_policy", True)


def recompute(line: "Line", key: str, value: Any) -> None:
    """What Megatron computes again, which a key of its own says: here layers, or nothing."""
    fields = ("actor_rollout_ref.actor.megatron", "engine")
    line.set(
        key,
        value
        or any(
            line.get(f"{at}.override_transformer_config.recompute_granularity") for at in fields
        ),
    )


def end_of_schedule(line: "Line", key: str, value: Any) -> None:
    """Where a learning rate ends, and when."""
    section, _, name = key.rpartition(".")
    highest = line.get(f"{section}.lr")
    if line.get(f"{section}.lr_decay_style", "constant") == "constant":
        line.note(line.sentence)
    elif name == "lr_decay_steps":
        line.set(f"{section}.total_training_steps", value)
    elif is_number(value) and is_number(highest) and highest > 0:
        line.set(f"{section}.min_lr_ratio", value / highest)


def loss_agg_mode(line: "Line", key: str, value: Any) -> None:
    """What the loss is averaged over, which some losses of verl's fix."""
    mode, is_early = line.get(f"{ACTOR}.policy_loss.loss_mode"), VERSIONS.index(line.version) < 3
    if mode in ("sapo", "geo_mean") or (mode == "gspo" and is_early):
        line.note(line.sentence)
        value = "seq-mean-token-mean"
    elif value == "seq-mean-token-sum-norm" and is_early:
        line.note(
            "Sums of tokens are averaged over sequences, as in verl from 0.9 on; before, they are added up."
        )
    line.set(key, value)


def micro_batch(line: "Line", key: str, value: Any) -> None:
    """A micro-batch of all processes together, as the share of those that hold a sequence together."""
    role = "critic" if key.startswith("critic") else ACTOR
    shared = line.get(f"{role}.ulysses_sequence_parallel_size", 1)
    if value is not None:
        line.set(f"{key}_per_gpu", max(1, value * shared // count_of(line)))


def one_length(line: "Line", key: str, value: Any) -> None:
    """The rollout's length, where it is not the data's: it is what generation keeps to."""
    if line.written in line.given and value is not None:
        name = "max_prompt_length" if key.endswith("prompt_length") else "max_response_length"
        line.set(f"data.{name}", value)


def adapter_detail(line: "Line", key: str, value: Any) -> None:
    """A property of an adapter, where there is one."""
    if not has_adapter(line):
        line.note(line.sentence)
    elif not key.startswith("actor_rollout_ref.model.lora."):
        line.set(key, value)
    elif line.written in line.given and value not in (None, [], 0):
        ours = key.replace(
            "model.lora.", "model.lora_" if key.rpartition(".")[2] in _LORA else "model."
        )
        line.set(ours, value)


def adapter_modules(line: "Line", key: str, value: Any) -> None:
    """Modules with an adapter, by Megatron's names or transformers'."""
    if not has_adapter(line):
        line.note(line.sentence)
    elif line.written in line.given and value:
        names = [value] if isinstance(value, str) else value
        ours = [one for name in names for one in _MODULES.get(name, (name,))]
        line.set("actor_rollout_ref.model.target_modules", ours)


_MODULES = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
_LORA = ("rank", "alpha", "merge", "adapter_path")


def rollout_engine(line: "Line", key: str, value: Any) -> None:
    """The rollout engine, vLLM in place of those that are not here."""
    line.set(key, "vllm" if value in ("trtllm", "vllm_omni") else value)
    if value in ("trtllm", "vllm_omni"):
        line.note(line.sentence)


def do_sample(line: "Line", key: str, value: Any) -> None:
    """Whether tokens are sampled: in verl's asynchronous mode the temperature says it."""
    if line.get(f"{ROLLOUT}.mode") == "async":
        is_hot = line.get(f"{key.removesuffix('do_sample')}temperature", 1) > 0
        if is_hot != value:
            line.note(line.sentence)
        value = is_hot
    line.set(key, value)


def rollout_mode(line: "Line", key: str, value: Any) -> None:
    """Several turns need sequences that are tasks of their own."""
    has_turns = line.get(f"{ROLLOUT}.multi_turn.enable")
    line.set(key, "async" if has_turns else value)
    files = (
        "tool_config_path",
        "interaction_config_path",
        "function_tool_path",
        "interaction_config_file",
    )
    if has_turns and value == "sync":
        line.note(line.sentence)
        if any(line.get(f"{ROLLOUT}.multi_turn.{name}") for name in files):
            line.set(f"{ROLLOUT}.agent.default_agent_loop", "tool_agent")


def raw_chat(line: "Line", key: str, value: Any) -> None:
    """Several turns are rendered out of their messages."""
    line.set(key, bool(value or line.get(f"{ROLLOUT}.multi_turn.enable")))


def rollout_parallel(line: "Line", key: str, value: Any) -> None:
    """Processes that hold one engine; transformers' generate has one in each process."""
    if line.get(f"{ROLLOUT}.name") != "hf":
        line.set(key, value)


def profiler(line: "Line", key: str, value: Any) -> None:
    """The profiler's tool and steps, where the tool is one of ours."""
    if line.get("global_profiler.tool") not in _PROFILERS:
        line.note(line.sentence)
    elif value is not None:
        line.set(key, value)


def profiled_ranks(line: "Line", key: str, value: Any) -> None:
    """The ranks of a role that are profiled: in verl none, unless it is enabled."""
    role, _, _ = key.rpartition(".")
    if line.get("global_profiler.tool") not in _PROFILERS:
        line.note(line.sentence)
    elif not line.get(f"{role}.enable", True):
        line.set(f"{role}.ranks", [])
    else:
        line.set(
            f"{role}.ranks",
            None if line.get(f"{role}.all_ranks") else line.get(f"{role}.ranks", []),
        )


def rejection(line: "Line", key: str, value: Any) -> None:
    """Rejection by level alone with a lower bound of its own, and a veto of single tokens, as 0.6.1 wrote them.
    Its bounds are of trained over rollout probabilities; those of k1 here, as from 0.8 on, of rollout over trained."""
    section = "algorithm.rollout_correction"
    names = ("rs", "token_veto_threshold", "rs_threshold", "rs_threshold_lower")
    level, veto, upper, lower = (line.get(f"{section}.rollout_{name}") for name in names)
    if level not in _REJECTIONS and veto is None:
        if key.endswith("_lower"):
            line.note(line.sentence)
        elif not key.endswith("veto_threshold"):
            line.set(key, value)
        return
    upper = line.get(f"{section}.rollout_is_threshold", 2.0) if upper is None else upper
    given = [
        one for one in (veto, *((upper, lower) if level is not None else ())) if one is not None
    ]
    if level not in (None, *_REJECTIONS) or not all(
        is_number(one) and one > MIN_RATIO for one in given
    ):
        if value in given:
            line.refuse(f"a number above {MIN_RATIO:.0e}", line.sentence)
        return
    rules = (
        {_REJECTIONS[level]: f"{1 / upper}_{1 / lower if lower else upper}"}
        if level is not None
        else {}
    )
    rules |= {"seq_max_k1": f"{MIN_RATIO}_{1 / veto}"} if veto is not None else {}
    line.set(f"{section}.rollout_rs", ",".join(rules))
    line.set(f"{section}.rollout_rs_threshold", ",".join(rules.values()))


def weight_bound(line: "Line", key: str, value: Any) -> None:
    """The bound of importance weights: null where there are none."""
    if value is None and line.get("algorithm.rollout_correction.rollout_is") is not None:
        line.refuse("a number", line.sentence)
    unless_null(line, key, value)


def reward_model_key(line: "Line", key: str, value: Any) -> None:
    """A key of the reward model, where there is one."""
    if not (line.get("reward.reward_model.enable") or line.get("reward_model.enable")):
        line.note(line.sentence)
    elif value is not None or line.written in line.given:
        line.take_ours(key, value)


def critic_checkpoints(line: "Line", key: str, value: Any) -> None:
    """Checkpoints hold actor and critic together."""
    if has_critic(line):
        line.set("trainer.max_ckpt_to_keep", value or None)
    else:
        line.note(line.sentence)


def critic_key(line: "Line", key: str, value: Any) -> None:
    """A key of the critic, where verl builds one."""
    if has_critic(line):
        line.take_ours(key, value)
    else:
        line.note(line.sentence)


def critic_switch(line: "Line", key: str, value: Any) -> None:
    """Whether there is a critic follows from the estimator, here as in verl; the switch may only agree."""
    if value is not None and value != (line.get("algorithm.adv_estimator") == "gae"):
        line.refuse("null", line.sentence)


def processes(line: "Line") -> None:
    """Several processes run on Ray, as does a line that names a cluster; and as many share a sequence as there are."""
    count, name = count_of(line), "ulysses_sequence_parallel_size"
    for role in (ACTOR, "critic"):
        line.written = f"{role}.{name}"
        size = line.ours.get(line.written, 1)
        sizes = [
            line.ours.get(f"{role}.{one}_model_parallel_size", 1) for one in ("tensor", "pipeline")
        ]
        if (
            is_number(size)
            and size > count
            and all(map(is_number, sizes))
            and count % prod(sizes) == 0
        ):
            line.ours[line.written] = count // prod(sizes)
            line.note(
                f"There are {count} processes: as many share a sequence. No number depends on it."
            )
        programs.shards(line, role, count)
    if line.rules != line.entry.rules:
        programs.share_sizes(line, ["critic"] if has_critic(line) else [])
    line.written = "trainer.n_gpus_per_node"
    if count != 1 or "ray_kwargs.ray_init.address" in line.ours:
        line.set("trainer.backend", "ray")
    if f"{ROLLOUT}.name" not in line.ours:
        line.set(f"{ROLLOUT}.name", "vllm")


def schedules(line: "Line") -> None:
    """Learning-rate schedules count steps from 0; the key of verl 0.10 changes that for a cosine alone. They go on to
    the last step that is named, though epochs end the run before."""
    steps = line.ours.get("trainer.total_training_steps")
    for section in (spelled(f"{ACTOR}.optim", line.entry.task), "critic.optim"):
        has_end = line.ours.get(f"{section}.lr_scheduler_type", "constant") != "constant"
        if is_number(steps) and (has_end or line.ours.get(f"{section}.lr_warmup_steps_ratio")):
            line.written = f"{section}.total_training_steps"
            line.set(line.written, steps)
        line.written = key = f"{section}.zero_indexed_step"
        if (
            f"{section}.lr" in line.ours
            and line.ours.get(f"{section}.lr_scheduler_type") != "cosine"
        ):
            line.note(
                "verl reads it for a cosine alone: the steps of other schedules are counted from 0."
            )
            line.ours[key] = True
        elif f"{section}.lr" in line.ours:
            line.ours.setdefault(key, True)


def reward_models(line: "Line") -> None:
    """A reward model: beside a function its score would be added here, and verl gives it to the function instead."""
    line.written = next(
        (key for key in ("reward.reward_model.enable", "reward_model.enable") if line.get(key)), ""
    )
    if not line.written:
        return
    if line.ours.get("custom_reward_function.path"):
        fix = "Serve it yourself and ask it from the function, or leave the function out."
        line.refuse(
            "no custom_reward_function beside it, for the scores of both would be added", fix
        )
    section = line.written.removesuffix(".enable")
    if line.get(f"{section}.enable_resource_pool"):
        pools = {
            "reward": [line.get(f"{section}.n_gpus_per_node", 8)] * line.get(f"{section}.nnodes", 1)
        }
        line.set("trainer.resource_pools", pools)
        line.set(
            "trainer.placement",
            {"actor_rollout_ref": "all", "critic": "all", "reward_model": "reward"},
        )


_PPO = (processes, reward_models, programs.distillation, schedules)
FINISH: dict[str, tuple[Callable[["Line"], None], ...]] = {
    "ppo": _PPO,
    **dict.fromkeys(("async", "fully_async"), (*_PPO, programs.beside_training)),
    **dict.fromkeys(("sft", "fsdp_sft"), (programs.supervised, schedules)),
    "generation": (programs.generation,),
}
"""Rows of rules.tsv -> functions of the whole line, called when every leaf was translated."""
