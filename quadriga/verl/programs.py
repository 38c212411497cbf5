# SPDX-License-Identifier: Apache-2.0
"""verl's programs, a row each in programs.tsv: whose defaults they start from, by which rules, and what runs here.

Also what values of its keys mean in supervised training, generation and grading, and how its merger's words read.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from math import ceil, lcm, prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from quadriga.engine_traits import ENGINES
from quadriga.errors import ConfigError, MachineError

if TYPE_CHECKING:
    from quadriga.verl.translate import Line

MEGATRON_ENGINES = frozenset({"megatron"})
OWN_ENGINES = frozenset({"fsdp", "fsdp2"}) | MEGATRON_ENGINES
_WHOLE_EXPERTS = frozenset({"hf", "sglang"})
"""Engines whose ranks do not divide them."""
_SIZES = (
    "ulysses_sequence_parallel_size",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
)


@dataclass(frozen=True)
class Entry:
    """One program of verl's, or several that read the same keys."""

    name: str
    """What `quadriga verl NAME` calls it; defaults that it has beyond `tree` stand under this name in defaults.tsv."""
    modules: tuple[str, ...]
    """Patterns of the dotted module that `python -m` names, without `verl.`; a script's path is read like one."""
    tree: str  # its tree in defaults.tsv
    rules: str
    """Its rows in rules.tsv; of several names a row needs one, and the first has the functions of the whole line."""
    task: str  # the task whose keys are ours
    run: str  # what runs in its place: a name in the table of the command line. Of a training the checks are made
    refused: str  # of a program that cannot be taken: why, and what to use, in one sentence


_LINES = Path(__file__).with_name("programs.tsv").read_text(encoding="utf-8").splitlines()
_ROWS = (line.split("\t") for line in _LINES if not line.startswith("#"))
ENTRIES = tuple(Entry(name, tuple(modules.split()), *rest) for name, modules, *rest in _ROWS)
"""The first row with a name, or a pattern, that fits holds."""

CONFIG_FILES = {
    "ppo_trainer": "ppo", "ppo_megatron_trainer": "ppo_megatron", "dapo_trainer": "ppo", "dapo_megatron_trainer":
    "ppo_megatron", "entropy_trainer": "ppo",
    **{f"{name}_trainer": "ppo" for name in ("fully_async_ppo", "fully_async_dapo", "one_step_off_ppo")},
    **{f"{name}_ppo_megatron_trainer": "ppo_megatron" for name in ("fully_async", "one_step_off")},
    "sft_trainer_engine": "sft_trainer_engine", "sft_trainer": "fsdp_sft_trainer", "generation": "generation",
    "evaluation": "evaluation",
}  # fmt: skip
"""Name of a configuration file of verl's -> its tree in defaults.tsv."""

TREES = frozenset(CONFIG_FILES.values())


def find_entry(program: str) -> Entry:
    """The row of a program, as its name, its module or its script's path; ConfigError: there is none."""
    module = program.removesuffix(".py").replace("/", ".").lstrip(".").removeprefix("verl.")
    for entry in ENTRIES:
        if module == entry.name or any(fnmatchcase(module, pattern) for pattern in entry.modules):
            return entry
    names = [entry.name for entry in ENTRIES]
    near = get_close_matches(module.rsplit(".", 1)[-1], names, n=1)
    fix = f"Did you mean {near[0]}?" if near else f"There are {', '.join(names)}."
    raise ConfigError(
        "verl's program", got=f"'{program}'", expected="one that has an entry here", fix=fix
    )


def is_number(value: Any) -> bool:
    """Whether it is a number, which true is not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def rollout_experts(line: "Line", key: str, value: Any) -> None:
    """Ranks that divide the experts of an engine: in verl those of several engines, too."""
    if is_number(value) and value > 1:
        rollout = key.rpartition(".")[0]
        size = (
            1
            if line.get(f"{rollout}.name") in _WHOLE_EXPERTS
            else line.get(f"{rollout}.tensor_model_parallel_size")
        )
        if value != size:
            line.note(line.sentence)
        value = size or 1
    line.set(key, value)


def engine(line: "Line", key: str, value: Any) -> None:
    """The training engine of a supervised run."""
    if value in MEGATRON_ENGINES:
        line.set("engine.strategy", value)
    elif value not in OWN_ENGINES:
        line.note(f"FSDP2 trains in place of {value}, with the same sizes.")


def engine_setting(line: "Line", key: str, value: Any) -> None:
    """A setting of an engine that has no place here."""
    engine = line.get("engine.group", line.get("engine.strategy"))
    if engine in OWN_ENGINES and key not in line.default:
        line.refuse("a key of verl's FSDP engine", "Leave it out.")
    line.note(
        "Memory and speed alone depend on it: weights are sharded layer by layer, and sequences are packed."
    )


def shards(line: "Line", role: str, count: int) -> None:
    """Ranks that shard one copy of a role's weights: a multiple, here, of those that share a sequence."""
    key, (sp, tp, pp) = (
        f"{role}.fsdp_config.fsdp_size",
        (_size(line, f"{role}.{name}") for name in _SIZES),
    )
    size, most = _size(line, key, -1), count // (tp * pp)
    if 0 < size < most and size % sp:
        line.written = line.sources[key]
        line.note(
            "Ranks that share a sequence share one copy of the weights too; no number depends on it."
        )
        size = lcm(size, sp)
    if size == 0 or size < -1 or size >= most:
        line.ours[key] = -1
    elif size > 0:
        line.ours[key] = size


def _size(line: "Line", key: str, otherwise: int = 1) -> int:
    """One of our sizes; what is no number is refused elsewhere."""
    found = line.ours.get(key)
    return found if isinstance(found, int) else otherwise


def share_sizes(line: "Line", roles: list[str]) -> None:
    """Roles that share processes have the sizes of the actor: Megatron has one set in a process."""
    grades = line.get("reward.reward_model.enable") or line.get("reward_model.enable")
    has_pool = line.get("reward.reward_model.enable_resource_pool") or line.get(
        "reward_model.enable_resource_pool"
    )
    roles = [*roles, *(["reward_model"] if grades and not has_pool else [])]
    names = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_parallel_size")
    for key in (f"{role}.{name}" for role in roles for name in names):
        line.written = line.sources.get(key, key)
        if line.ours.get(key, 1) != (
            size := line.ours.get(f"actor_rollout_ref.actor.{key.rpartition('.')[2]}", 1)
        ):
            line.note(
                "Roles that share processes have the actor's sizes: Megatron has one set of them in a process."
            )
            line.ours[key] = size


def supervised(line: "Line") -> None:
    """Processes, which the launcher counts, and validation, which verl begins after a step."""
    line.written = ""
    line.set("trainer.val_before_train", False)
    # As many as the launcher says, else the fewest that the sizes need.
    given = [
        line.get(key, 1)
        for key in ("trainer.nnodes", "trainer.n_gpus_per_node")
        if key in line.given
    ]
    count = prod(
        [one for one in given if isinstance(one, int)]
        or [_size(line, f"engine.{name}") for name in _SIZES]
    )
    shards(line, "engine", count)
    line.written = ""
    if count == 1:
        return
    line.set("trainer.backend", "ray")
    if not {"trainer.nnodes", "trainer.n_gpus_per_node"} & line.given:
        line.set("trainer.n_gpus_per_node", count)
        line.written = "engine.ulysses_sequence_parallel_size"
        told = f"{count} processes are started, as many as it needs: torchrun's words, or trainer.n_gpus_per_node"
        line.note(f"{told} and trainer.nnodes, say how many.")


_TEACHERS, _LOSS = "distillation.teacher_models", "distillation.distillation_loss"
_TOP_K = "forward_kl_topk"


def teacher_key(line: "Line", key: str, value: Any) -> None:
    """A key of distillation, where it is on: what each comes to depends on the others (`distillation`)."""
    if not line.get("distillation.enabled"):
        line.note(line.sentence)
    elif key == "distillation.teacher_key" and value != line.get(
        "data.reward_fn_key", "data_source"
    ):
        line.refuse(
            "the name in data.reward_fn_key",
            "Teachers are chosen by the column that chooses graders.",
        )


def distillation(line: "Line") -> None:
    """Teachers by data source, on processes of their own where they have some, and how the student learns from them."""
    if not line.get("distillation.enabled"):
        return
    names = dict.fromkeys(key.split(".")[2] for key in line.tree.below(_TEACHERS))
    paths = {name: path for name in names if (path := line.get(f"{_TEACHERS}.{name}.model_path"))}
    sources = {name: line.get(f"{_TEACHERS}.{name}.key") for name in paths}
    line.written = "distillation.enabled"
    line.set("distillation.enable", True)
    if len(paths) == 1:
        line.set("distillation.path", *paths.values())
    elif None in sources.values():
        line.refuse(
            "a `key`, the data source, for each of several teachers", f"Set {_TEACHERS}.NAME.key."
        )
    else:
        line.set(
            "distillation.teachers", {str(sources[name]): path for name, path in paths.items()}
        )
    processes = line.get("distillation.n_gpus_per_node", 8), line.get("distillation.nnodes", 0)
    if all(isinstance(number, int) and number > 0 for number in processes):
        line.written = ""
        line.set("trainer.backend", "ray")
        others = line.ours.get("trainer.placement") or {"actor_rollout_ref": "all", "critic": "all"}
        line.ours["trainer.placement"] = {**others, "teacher": "teacher"}
        pools = line.ours.get("trainer.resource_pools") or {}
        line.ours["trainer.resource_pools"] = {**pools, "teacher": [processes[0]] * processes[1]}
    _teacher_loss(line)


def _teacher_loss(line: "Line") -> None:
    """The divergence from a teacher: verl's has a clipped loss of its own, and without task rewards is all the loss."""
    with_rewards = line.get(f"{_LOSS}.use_task_rewards", True)
    is_gradient, mode = (
        line.get(f"{_LOSS}.use_policy_gradient", False),
        line.get(f"{_LOSS}.loss_mode", "k3"),
    )
    names = ["loss_mode", "use_policy_gradient", "use_task_rewards", "loss_max_clamp"]
    for name in [*names, *(["topk", "log_prob_min_clamp"] if mode == _TOP_K else [])]:
        line.written = f"{_LOSS}.{name}"
        line.set(f"distillation.{name}", line.get(line.written))
    line.written = f"{_LOSS}.distillation_loss_coef"
    if with_rewards:
        line.set("distillation.loss_coef", float(line.get(line.written, 1.0)))
    else:
        line.note("verl weighs the divergence beside task rewards alone.")
    actor = "actor_rollout_ref.actor"
    clips = {
        name: line.get(f"{_LOSS}.{name}", 0.2) for name in ("clip_ratio_low", "clip_ratio_high")
    }
    for name, value in clips.items() if is_gradient else ():
        line.written, ours = f"{_LOSS}.{name}", line.ours.get(f"{actor}.{name}", 0.2)
        if not with_rewards:
            line.ours[f"{actor}.{name}"] = value
        elif value != ours:
            line.refuse(
                f"{ours}, as {actor}.{name}",
                "The divergence comes off the advantages: one loss clips both.",
            )
    if with_rewards:
        line.written = f"{_LOSS}.use_policy_gradient"
        if is_gradient:
            line.note(
                "The divergence comes off the advantages, and one loss clips both; verl clips two."
            )
        return
    # What belongs to the loss that verl leaves out.
    without = {f"{actor}.policy_loss.loss_mode": "vanilla", f"{actor}.entropy_coeff": 0.0}
    without |= {f"{actor}.use_kl_loss": False, "algorithm.use_kl_in_reward": False}
    without |= {f"{actor}.clip_ratio_c": 3.0} if is_gradient else {}
    for key, value in without.items():
        if line.ours.get(key, value) != value:
            line.written, line.ours[key] = line.sources.get(key, key), value
            line.note(
                "verl does not read it without task rewards (distillation_loss.use_task_rewards)."
            )


_ASYNC, _EXPERTS = "async_training", "expert_parallel_size"


def async_key(line: "Line", key: str, value: Any) -> None:
    """How far generation may be ahead; keys without a line here are read with others."""
    size = line.get("actor_rollout_ref.actor.ppo_mini_batch_size") * line.get(
        f"{_ASYNC}.require_batches", 1
    )
    match key.rpartition(".")[2]:
        case "staleness_threshold":
            line.set(f"{_ASYNC}.max_staleness", ceil(value))
            if value % 1:
                line.note(line.sentence)
        case "partial_rollout":
            line.set(f"{_ASYNC}.in_flight", "continue" if value else "finish")
        case "require_batches":
            line.set("data.train_batch_size", size)
        case "total_rollout_steps" if value:
            line.set("trainer.total_training_steps", max(1, value // size))
        case "use_rollout_log_probs" if value and not line.get(f"{_ASYNC}.compute_prox_log_prob"):
            line.set("algorithm.rollout_correction.bypass_mode", True)


def beside_training(line: "Line") -> None:
    """Generation on processes of its own, while the policy is trained."""
    traits = ENGINES.get(line.ours.get("actor_rollout_ref.rollout.name", ""))
    if traits is None or not traits.streams:
        for name, value in {"name": "native", "tensor_model_parallel_size": 1, _EXPERTS: 1}.items():
            line.written = f"actor_rollout_ref.rollout.{name}"
            line.note(
                "native generates, each process with the whole model; vllm would stay; main_ppo keeps sglang."
            )
            line.ours[line.written] = value
    line.written = ""
    line.set(f"{_ASYNC}.enable", True)
    if line.entry.name == "one_step_off_ppo":
        line.set(f"{_ASYNC}.preset", "one_step_off")
    if not any(key.startswith("algorithm.rollout_correction.") for key in line.ours):
        line.set("algorithm.rollout_correction.preset", "disabled")
    others = {
        role: pool
        for role, pool in line.ours.get("trainer.placement", {}).items()
        if "rollout" not in role
    }
    policy = {"actor": "all", "ref": "all", "critic": "all", "rollout": "generation"}
    line.ours |= {"trainer.backend": "ray", "trainer.placement": {**others, **policy}}
    pool = [line.get("rollout.n_gpus_per_node", 8)] * line.get("rollout.nnodes", 1)
    line.ours["trainer.resource_pools"] = {
        **line.ours.get("trainer.resource_pools", {}),
        "generation": pool,
    }


def router_replay(line: "Line", key: str, value: Any) -> None:
    """Whose choice of experts the update repeats: R2 and R3, of the papers that bring them."""
    meanings = {"disabled": "off", None: "off", "R2": "old_log_prob", "R3": "rollout"}
    if value not in meanings:
        line.refuse(
            "disabled, R2 or R3",
            "Routes travel with the batch: there is nothing to record, or to read.",
        )
    else:
        line.set("actor_rollout_ref.actor.router_replay", meanings[value])


def expert_bias(line: "Line", key: str, value: Any) -> None:
    """Biases of a mixture's routers, which Megatron moves with each step unless the rate is 0."""
    rate = f"{line.written.rpartition('.')[0]}.moe_router_bias_update_rate"
    if value and line.get(rate) != 0:
        line.refuse("moe_router_bias_update_rate=0 beside it", line.sentence)
    line.note(line.sentence)


def cut(line: "Line", key: str, value: Any) -> None:
    """How a batch is cut: by tokens or by rows, as data.use_dynamic_bsz says."""
    name = key.removeprefix("data.")
    if bool(line.get("data.use_dynamic_bsz", True)) == (name == "max_token_len_per_gpu"):
        line.set(f"engine.{name}", value)
    else:
        line.note("data.use_dynamic_bsz says that it is not read.")


def supervised_dtype(line: "Line", key: str, value: Any) -> None:
    """What computes, where the user has a wish: verl's default is what the device is fast at."""
    if line.is_changed(key):
        line.set("engine.fsdp_config.model_dtype", value)


def rollout_dtype(line: "Line", key: str, value: Any) -> None:
    """The dtype of generation: training's. Who asks for float16 alone would get another one."""
    names = ("megatron.dtype", "fsdp_config.dtype", "fsdp_config.mixed_precision.param_dtype")
    is_too = any(
        line.get(f"actor_rollout_ref.actor.{name}") in ("fp16", "float16") for name in names
    )
    if value not in ("bfloat16", "float32", "auto", None) and not (value == "float16" and is_too):
        line.refuse("bfloat16, float32, or float16 for training too", line.sentence)


def min_lr(line: "Line", key: str, value: Any) -> None:
    """The last learning rate, here a share of the highest."""
    highest = line.get("optim.lr")
    if is_number(value) and is_number(highest) and highest > 0:
        line.set("optim.min_lr_ratio", value / highest)
    elif value:
        line.refuse("a number, and optim.lr above 0", "It is a share of the highest rate.")


def column(line: "Line", key: str, value: Any) -> None:
    """A column, or an entry inside it."""
    inner = line.get(key.replace("_key", "_dict_keys"), [])
    line.set(key, ".".join([*(value if isinstance(value, list) else [value]), *inner]))


def multiturn(line: "Line", key: str, value: Any) -> None:
    """Whether rows are chats, or a prompt and a response."""
    line.set("data.format", "messages" if value else "prompt_response")


def option(line: "Line", key: str, value: Any) -> None:
    """An argument of the command that runs in the program's place."""
    line.options[key.removeprefix("data.")] = value


def generation(line: "Line") -> None:
    """verl's program cuts a long prompt at its end."""
    line.set("data.truncation", "right")


def merger(words: Sequence[str]) -> tuple[list[str], list[ConfigError], list[str]]:
    """The words of `quadriga export` for those of verl's merger, what is wrong with them, and notices."""
    parser = argparse.ArgumentParser("model_merger", add_help=False, allow_abbrev=False)
    parser.add_argument("operation", nargs="?", default="merge")
    for name in (
        "backend",
        "local_dir",
        "target_dir",
        "hf_model_path",
        "hf_upload_path",
        "test_hf_dir",
    ):
        parser.add_argument(f"--{name}", f"--{name.replace('_', '-')}")
    options, rest = parser.parse_known_args(list(words))
    where, local = "model_merger", Path(options.local_dir or "").expanduser()
    taken = ("--tie-word-embedding", "--trust-remote-code", "--use_cpu_initialization", "--private")
    problems = [
        ConfigError(where, got=f"'{one}'", expected="a word of its own")
        for one in rest
        if one not in taken
    ]
    if options.operation != "merge":
        problems.append(
            ConfigError(
                where, got=f"'{options.operation}'", expected="merge", fix="Compare by yourself."
            )
        )
    if options.backend not in {None, *OWN_ENGINES}:
        problems.append(
            ConfigError(f"{where} --backend", got=options.backend, expected="fsdp, megatron")
        )
    if options.hf_upload_path:
        fix = "Upload the folder when it is written: hf upload NAME FOLDER."
        problems.append(
            ConfigError(
                f"{where} --hf_upload_path", got=options.hf_upload_path, expected="none", fix=fix
            )
        )
    if not options.local_dir or not options.target_dir:
        problems.append(ConfigError(where, got="not both", expected="--local_dir and --target_dir"))
    elif not local.exists():
        problems.append(
            MachineError(f"{where} --local_dir", got=f"'{local}'", expected="a folder that exists")
        )
    elif any(local.glob("model_world_size_*")) or (local / "dist_ckpt").exists():
        fix = "Merge it where it was trained, with verl; a checkpoint of a run of Quadriga is taken here."
        problems.append(
            ConfigError(
                str(local), got="shards of verl's own", expected="a checkpoint of ours", fix=fix
            )
        )
    known = ["--hf_model_path: the checkpoint has the model's configuration and tokenizer."]
    return (
        [str(local), "--output", str(options.target_dir)],
        problems,
        known if options.hf_model_path else [],
    )
