# SPDX-License-Identifier: Apache-2.0
"""Which role runs in which resource pool, and how the ranks of a role are arranged.

Roles of one pool are colocated in its processes. `actor_rollout_ref` is the policy with the reference inside;
`actor_rollout` is the policy where the reference is a role of its own, or where there is none. In an arrangement of
one's own the policy may also be two roles in two pools, `actor` and `rollout`: weight sync then goes between them.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from quadriga.config.actor import ParallelConfig
from quadriga.config.base import Finding, absent, unused, wrong
from quadriga.config.rollout import ROLLOUT, SPANNING, has_servers
from quadriga.config.root import Config
from quadriga.config.trainer import TrainerConfig
from quadriga.errors import ConfigError

ROLES = (
    "actor_rollout_ref",
    "actor_rollout",
    "actor",
    "rollout",
    "ref",
    "critic",
    "reward_model",
    "teacher",
)
_IF_ASKED_FOR = ("reward_model", "teacher")
POLICIES = (
    "actor_rollout_ref",
    "actor_rollout",
    "actor",
)  # the roles with the actor in them; a run has one of them
ACTOR = "actor_rollout_ref.actor"
CRITIC = "critic"
DISTILLATION = "distillation"
_ARRANGEMENTS: dict[str, dict[str, str]] = {
    "together": dict.fromkeys(("actor_rollout_ref", "critic", *_IF_ASKED_FOR), "all"),
    "grouped": {"actor_rollout": "policy"}
    | dict.fromkeys(("ref", "critic", *_IF_ASKED_FOR), "scoring"),
    "apart": {role: role for role in ("actor_rollout", "ref", "critic", *_IF_ASKED_FOR)},
}
"""Value of `trainer.placement` -> role -> name of its pool."""
_KEY = "trainer.placement"
MEGATRON_VERSION = "0.16"  # of megatron-core: that which the engine is tested with


@dataclass(frozen=True)
class Placement:
    """The roles of one run, each with its pool, and these pools with their processes on each machine."""

    roles: Mapping[str, str]
    pools: Mapping[str, list[int]]


def asked_roles(config: Config) -> list[str]:
    """The roles that a run has where its configuration asks for them."""
    is_asked = {"reward_model": config.reward_model.enable, "teacher": config.distillation.enable}
    return [role for role in _IF_ASKED_FOR if is_asked[role]]


def role_pools(trainer: TrainerConfig, asked: Collection[str] = ()) -> dict[str, str]:
    """Role -> pool as `trainer.placement` has it, whether or not a run needs the role; a reward model and a teacher if
    they are among `asked`."""
    placement = trainer.placement if trainer.backend == "ray" else "together"
    pools = dict(_ARRANGEMENTS[placement] if isinstance(placement, str) else placement)
    return {
        role: pool for role, pool in pools.items() if role in asked or role not in _IF_ASKED_FOR
    }


def place_roles(
    trainer: TrainerConfig, *, has_reference: bool, has_critic: bool, asked: Collection[str] = ()
) -> Placement:
    """The pool of each role that a run needs, the policy and those that it has; raises ConfigError for one without."""
    given = role_pools(trainer, asked)
    policy = next((role for role in POLICIES if role in given), "actor_rollout")
    is_inside = has_reference and policy == "actor_rollout_ref"
    needed = {
        "actor_rollout" if policy == "actor_rollout_ref" and not is_inside else policy: True,
        "rollout": policy == "actor",
        "ref": has_reference and not is_inside,
        "critic": has_critic,
        **dict.fromkeys(asked, True),
    }
    roles = {
        role: given.get(policy if role in POLICIES else role)
        for role, is_needed in needed.items()
        if is_needed
    }
    if homeless := [role for role, pool in roles.items() if pool is None]:
        fix = f"Add {' and '.join(f'{_KEY}.{role}=NAME' for role in homeless)}."
        raise wrong(
            _KEY, f"no pool for {' and '.join(homeless)}", "a pool for each role of the run", fix
        )
    found = {role: pool for role, pool in roles.items() if pool is not None}
    return Placement(
        found, {pool: trainer.processes_of(pool) for pool in dict.fromkeys(found.values())}
    )


def arranged_roles(
    config: Config, *, has_critic: bool
) -> Iterator[tuple[str, ParallelConfig, int]]:
    """The roles whose ranks are arranged: the section that says how, by its dotted key, and how many ranks there are.

    The reference is arranged as the actor is, also in a pool of its own. Whether there is a critic the advantage
    estimator decides."""
    sections = _sections(config)
    for role, pool in role_pools(config.trainer, asked_roles(config)).items():
        if role in sections and (role != "critic" or has_critic):
            yield (
                *sections[role],
                sum(config.trainer.processes_of(pool)) if config.trainer.backend == "ray" else 1,
            )


def _sections(config: Config) -> dict[str, tuple[str, ParallelConfig]]:
    """The section that arranges the ranks of a role, behind its dotted key."""
    own = {
        "reward_model": ("reward_model", config.reward_model),
        "teacher": (DISTILLATION, config.distillation),
    }
    policies = dict.fromkeys((*POLICIES, "ref"), (ACTOR, config.actor_rollout_ref.actor))
    return {**policies, "critic": (CRITIC, config.critic), **own}


def profiled_ranks(config: Config, role: str) -> list[int] | None:
    """The ranks of a role that are profiled; None: all. The rollout's are the actor's."""
    _, section = _sections(config)["actor" if role == "rollout" else role]
    return section.profiler.ranks


def check_profiles(config: Config) -> Iterator[Finding]:
    """Yields ranks to profile that do not exist, or without a tool."""
    found: dict[str, tuple[list[int] | None, int]] = {}
    for where, section, size in arranged_roles(config, has_critic=True):
        found[where] = section.profiler.ranks, max(size, *found.get(where, (None, 0))[1:])
    for where, (ranks, size) in found.items():
        key = f"{where}.profiler.ranks"
        if ranks is not None and config.global_profiler.tool is None:
            yield from unused([key], "global_profiler.tool is null")
        elif missing := [rank for rank in ranks or () if rank >= size]:
            expected = (
                f"ranks from 0 to {size - 1}: the role has {size} process{'es' if size > 1 else ''}"
            )
            yield wrong(key, str(missing), expected, "null profiles all of them.")


def with_fewer_processes(config: Config) -> Iterator[Config]:
    """The configuration on ever fewer processes: a machine less in each pool, then a process less on the last one;
    those whose sizes divide the ranks."""
    trainer = config.trainer
    pools = {
        pool: trainer.processes_of(pool)
        for pool in role_pools(trainer, asked_roles(config)).values()
    }
    while any(counts != [1] for counts in pools.values()):
        pools = {pool: counts[:-1] or [max(1, counts[0] - 1)] for pool, counts in pools.items()}
        smaller = config.model_copy(
            update={"trainer": trainer.model_copy(update={"resource_pools": pools})}
        )
        if not any(isinstance(finding, ConfigError) for finding in check_layouts(smaller)):
            yield smaller


def rollout_ranks(config: Config) -> list[int]:
    """Ranks on each machine that have the rollout: the policy's, or those of a pool of its own."""
    if config.trainer.backend != "ray":
        return [1]
    pool = _rollout_pool(config)
    return [] if pool is None else config.trainer.processes_of(pool)


def _rollout_pool(config: Config) -> str | None:
    given = role_pools(config.trainer)
    return next((given[role] for role in ("rollout", *POLICIES) if role in given), None)


def rollout_devices(config: Config) -> int:
    """How many devices each process of the rollout has: beside training on Ray those of the processes that vLLM starts
    in the place of as many ranks."""
    rollout, is_beside = config.actor_rollout_ref.rollout, config.async_training.enable
    is_several = is_beside and config.trainer.backend == "ray" and rollout.name == "vllm"
    return rollout.tensor_model_parallel_size if is_several else 1


def engine_ranks(config: Config) -> int:
    """How many ranks a rollout engine takes."""
    rollout = config.actor_rollout_ref.rollout
    is_spanned = rollout.name in SPANNING and config.trainer.backend == "ray"
    return rollout.tensor_model_parallel_size if is_spanned else 1


def rollout_group_size(config: Config) -> int:
    """How many processes hold one rollout engine together; 1: there are no groups."""
    return engine_ranks(config) // rollout_devices(config)


def sglang_problem(config: Config) -> ConfigError | None:
    """Why SGLang cannot generate on the GPUs of Ray as the configuration says; None: it can."""
    rollout = config.actor_rollout_ref.rollout
    size = (
        1
        if rollout.name != "sglang" or has_servers(rollout)
        else rollout.tensor_model_parallel_size
    )
    if size == 1 or config.trainer.backend != "ray":
        return None
    got, fix = (
        f"{size} on GPUs, with Ray and SGLang",
        "Generate with vllm, or name servers in engine_kwargs.sglang.",
    )
    expected = "1: SGLang starts processes of its own, for which Ray gives no devices"
    return wrong(f"{ROLLOUT}.tensor_model_parallel_size", got, expected, fix)


def experts_problem(config: Config) -> ConfigError | None:
    """Why vLLM cannot divide experts on a CPU; None: it is not asked to."""
    rollout = config.actor_rollout_ref.rollout
    if (size := rollout.expert_parallel_size) == 1 or rollout.name != "vllm":
        return None
    expected, fix = (
        "1: vLLM's build for CPUs ends its process with it",
        "Set it to 1: the same is computed without it.",
    )
    return wrong(f"{ROLLOUT}.expert_parallel_size", f"{size}, on a CPU", expected, fix)


def has_shards(config: Config) -> bool:
    """Whether each rank of a rollout group gets its shards of the weights; else whole tensors, which it cuts."""
    return rollout_group_size(config) > 1 and config.actor_rollout_ref.rollout.name == "native"


def sends_parts(config: Config) -> bool:
    """Whether all ranks of the trainer send what they have to a rollout group in a pool of its own; else their first
    one sends whole tensors. An adapter is merged into those, or beside them, for an engine that cuts them itself."""
    return has_shards(config) or (
        rollout_group_size(config) > 1 and not config.actor_rollout_ref.model.has_adapter
    )


def _check_groups(config: Config) -> Iterator[Finding]:
    """Yields what rollout groups cannot be made of."""
    size, devices, counts = (
        rollout_group_size(config),
        rollout_devices(config),
        rollout_ranks(config),
    )
    where, rollout = f"{ROLLOUT}.tensor_model_parallel_size", config.actor_rollout_ref.rollout
    # Where the device is chosen later, the engine refuses it as it starts.
    problems = (
        (sglang_problem(config), "cuda", "with"),
        (experts_problem(config), "cpu", "without"),
    )
    for problem, device, machine in problems:
        if problem and config.trainer.device in ("auto", device):
            told = f"on a machine {machine} GPUs the run ends at its start. {problem}"
            yield problem if config.trainer.device == device else told
    # Without Ray vLLM and SGLang start processes of their own.
    asked = rollout.tensor_model_parallel_size if rollout.name == "native" else size
    if sum(counts) % asked or any(count % devices for count in counts):
        got, of = (
            f"groups of {asked * devices}, of {sum(counts)} ranks",
            " on each machine" if devices > 1 else "",
        )
        pool, own = _rollout_pool(config), config.trainer.resource_pools
        key = f"trainer.resource_pools.{pool}" if pool in own else "trainer.n_gpus_per_node"
        fix = f"Change it, or the number of ranks: {key}{'' if config.trainer.backend == 'ray' else ', with --ray'}."
        yield wrong(where, got, f"a number that divides the ranks that generate{of}", fix)
    if size > 1 and not rollout.request_seeds:
        fix = "Set it to true, or tensor_model_parallel_size to 1."
        got, why = (
            f"false, with groups of {size} ranks",
            "true: the ranks draw alike by each response's seed",
        )
        yield wrong(f"{ROLLOUT}.request_seeds", got, why, fix)
    if size > 1 and rollout.name == "vllm" and (count := rollout.data_parallel_size) > 1:
        got, fix = f"{count}, with groups of {size} ranks", "Set it to 1: each group is an engine."
        yield wrong(f"{ROLLOUT}.data_parallel_size", got, "1", fix)


def check_layouts(config: Config) -> Iterator[Finding]:
    """Yields sizes that do not divide the ranks, once for each section.

    Estimators, which may be users' own, say whether there is a critic: here one is checked for `gae` only, for others
    before the workers start."""
    has_critic = config.task == "rl" and config.algorithm.adv_estimator == "gae"
    told: dict[str, ConfigError] = {}
    for where, section, size in arranged_roles(config, has_critic=has_critic):
        try:
            section.layout(size, where, config.actor_rollout_ref.actor.megatron_if_chosen)
        except ConfigError as error:
            told.setdefault(where, error)
    yield from told.values()
    if config.task == "rl":
        yield from _check_groups(config)


def check_megatron(config: Config) -> Iterator[Finding]:
    """Yields what keeps Megatron-core from training, and keys that only one engine reads."""
    actor, model = config.actor_rollout_ref.actor, config.actor_rollout_ref.model
    sections = [(ACTOR, actor), *([(CRITIC, config.critic)] if config.task == "rl" else [])]
    if actor.strategy != "megatron":
        yield from unused(
            [f"{ACTOR}.megatron.{name}" for name in actor.megatron.model_fields_set],
            "strategy is fsdp",
        )
        return
    try:
        found = version("megatron-core")
    except PackageNotFoundError:
        found = "not installed"
    if not found.startswith(f"{MEGATRON_VERSION}."):
        fix = "pip install -e '.[megatron]', or set strategy=fsdp."
        yield absent(
            f"{ACTOR}.strategy", f"megatron, with megatron-core {found}", f"{MEGATRON_VERSION}", fix
        )
    if model.has_adapter:
        got, fix = "an adapter, with strategy=megatron", "Train all weights, or set strategy=fsdp."
        yield wrong(
            "actor_rollout_ref.model.lora_rank", got, "0: adapters are trained by FSDP2", fix
        )
    for at in ("actor_rollout_ref.model", *(["critic.model"] if config.task == "rl" else [])):
        if (config.critic.model if at.startswith("critic") else model).enable_activation_offload:
            fix = "Set enable_gradient_checkpointing, or strategy=fsdp."
            yield wrong(
                f"{at}.enable_activation_offload", "true, with strategy=megatron", "false", fix
            )
    if (
        actor.megatron.virtual_pipeline_model_parallel_size
        and actor.pipeline_model_parallel_size == 1
    ):
        key = f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size"
        yield wrong(
            key,
            "a number, with one pipeline stage",
            "null",
            "Set pipeline_model_parallel_size, too.",
        )
    for at, section in sections:
        own = ("fsdp_size", "reshard_after_forward")
        names = [
            f"{at}.fsdp_config.{name}"
            for name in own
            if name in section.fsdp_config.model_fields_set
        ]
        yield from unused(names, "strategy is megatron")
    yield from _check_shared_sizes(config)


def _check_shared_sizes(config: Config) -> Iterator[Finding]:
    """Megatron's process groups are one set in a process."""
    pools = role_pools(config.trainer, asked_roles(config))
    policy = next((pools[role] for role in POLICIES if role in pools), None)
    actor, has_critic = (
        config.actor_rollout_ref.actor,
        config.task == "rl" and config.algorithm.adv_estimator == "gae",
    )
    others = [*(["critic"] if has_critic else []), *asked_roles(config)]
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_parallel_size",
    ):
        for role in others:
            at, section = _sections(config)[role]
            size, expected = getattr(section, name), getattr(actor, name)
            if pools.get(role) == policy and size != expected:
                got = f"{size}, in processes that it shares with the actor"
                fix = "Give both the same size, or processes of their own (trainer.placement), or set strategy=fsdp."
                yield wrong(
                    f"{at}.{name}",
                    got,
                    f"{expected}, as the actor's: Megatron has one set of sizes",
                    fix,
                )


def check_placement(config: Config) -> Iterator[Finding]:
    """Yields what cannot be placed, and which keys are read on Ray only."""
    trainer, ray, rollout = config.trainer, config.ray_kwargs, config.actor_rollout_ref.rollout
    if trainer.backend == "local":
        is_beside = rollout.mode == "async" or config.async_training.enable
        has_own = is_beside or rollout.tensor_model_parallel_size > 1  # processes
        has_own = {"vllm": has_own, "sglang": not has_servers(rollout)}.get(rollout.name, False)
        if has_own and trainer.device not in ("auto", "cpu", "cuda", "cuda:0"):
            got = f"{trainer.device}, with {rollout.name} in processes of its own, which take the first GPUs"
            fix = "Set trainer.device=cuda, and CUDA_VISIBLE_DEVICES to the GPUs that are meant."
            yield wrong("trainer.device", got, "cuda:0", fix)
        for name in ("nnodes", "n_gpus_per_node"):
            if (value := getattr(trainer, name)) != 1:
                fix = "Several processes run on Ray: set trainer.backend=ray (`quadriga train --ray`)."
                yield wrong(f"trainer.{name}", f"{value}, with trainer.backend=local", "1", fix)
        plain = TrainerConfig()
        recovery = ("max_worker_restarts", "max_skipped_steps", "state_copies")
        on_ray = (*recovery, "stall_timeout_s", "phase_timeout_s")
        changed = {
            _KEY: trainer.placement != "together",
            "trainer.resource_pools": trainer.resource_pools,
            **{
                f"trainer.{name}": getattr(trainer, name) != getattr(plain, name) for name in on_ray
            },
            "ray_kwargs.ray_init": ray.ray_init,
            "ray_kwargs.timeline_json_file": ray.timeline_json_file,
        }
        yield from unused(
            [key for key, is_changed in changed.items() if is_changed], "trainer.backend is local"
        )
        return
    if trainer.device not in ("auto", "cpu", "cuda"):
        got, fix = (
            f"'{trainer.device}', with trainer.backend=ray",
            "Ray gives each process a device of its own.",
        )
        yield wrong("trainer.device", got, "auto, cpu or cuda", fix)
    given = role_pools(trainer, asked := asked_roles(config))
    if unknown := [role for role in given if role not in ROLES]:
        yield wrong(_KEY, f"the role {unknown[0]}", f"roles out of {', '.join(ROLES)}")
    yield from _check_policy(given)
    for role in (role for role in asked if role not in given):
        got = f"no pool for {role}, with {DISTILLATION if role == 'teacher' else role}.enable=True"
        yield wrong(_KEY, got, "a pool for each role of the run", f"Add {_KEY}.{role}=NAME.")
    if idle := [pool for pool in trainer.resource_pools if pool not in given.values()]:
        expected, fix = (
            f"pools out of {', '.join(dict.fromkeys(given.values()))}",
            f"{_KEY} names each role's pool.",
        )
        yield wrong(f"trainer.resource_pools.{idle[0]}", "a pool without a role", expected, fix)


def _check_policy(given: Mapping[str, str]) -> Iterator[Finding]:
    policies, got = [role for role in POLICIES if role in given], " and ".join(given)
    if not policies:
        yield wrong(_KEY, "no pool for the policy", f"{_KEY}.actor_rollout_ref=NAME")
    if len(policies) > 1 or {"actor_rollout_ref", "ref"} <= given.keys():
        expected = "actor_rollout_ref, or actor_rollout and ref, or actor, rollout and ref"
        yield wrong(
            _KEY,
            got,
            expected,
            "The reference is inside the policy's processes, or a role of its own.",
        )
    elif policies and ("rollout" in given) != (policies == ["actor"]):
        expected = "actor_rollout_ref or actor_rollout, or both of actor and rollout"
        fix = "The rollout is inside the policy's processes, or a role of its own beside `actor`."
        yield wrong(_KEY, got, expected, fix)
    elif policies == ["actor"] and given["actor"] == given["rollout"]:
        pool = given["actor"]
        fix = f"In one pool they are one role: set {_KEY}.actor_rollout={pool} instead of both."
        yield wrong(_KEY, f"actor and rollout in one pool, {pool}", "a pool for each", fix)
