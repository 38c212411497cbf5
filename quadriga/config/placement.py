# SPDX-License-Identifier: Apache-2.0
"""Placement of roles in resource pools, and the arrangement of each role's ranks.

The roles of a pool are colocated in its processes. The role `actor_rollout_ref` is the policy
together with the reference; `actor_rollout` is the policy if the reference is a role of its own, or
if there is none. A user's placement may also split the policy into the roles `actor` and `rollout`
in two pools; weights are then synced between these pools.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from quadriga.config.actor import (
    ActorConfig,
    CriticConfig,
    CriticModelConfig,
    ModelConfig,
    ParallelConfig,
)
from quadriga.config.base import Findings, notice_unused
from quadriga.config.rollout import ROLLOUT
from quadriga.config.root import Config
from quadriga.config.trainer import TrainerConfig
from quadriga.engine_traits import engines_with
from quadriga.errors import ConfigError, MachineError

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
_OPTIONAL_ROLES = ("reward_model", "teacher")
"""Roles that a run has only if the configuration enables them."""
POLICIES = ("actor_rollout_ref", "actor_rollout", "actor")
"""Roles that contain the actor. A run has one of them."""
ACTOR = "actor_rollout_ref.actor"
CRITIC = "critic"
DISTILLATION = "distillation"
_ARRANGEMENTS: dict[str, dict[str, str]] = {
    "together": dict.fromkeys(("actor_rollout_ref", "critic", *_OPTIONAL_ROLES), "all"),
    "grouped": {"actor_rollout": "policy"}
    | dict.fromkeys(("ref", "critic", *_OPTIONAL_ROLES), "scoring"),
    "apart": {role: role for role in ("actor_rollout", "ref", "critic", *_OPTIONAL_ROLES)},
}
"""The pool of each role, by value of `trainer.placement`."""
_KEY = "trainer.placement"
MEGATRON_VERSION = "0.16"
"""Version of megatron-core that the engine is tested with."""


@dataclass(frozen=True)
class Placement:
    """Roles and resource pools of a run.

    Attributes:
        roles: the pool of each role.
        pools: number of processes on each machine of a pool.
    """

    roles: Mapping[str, str]
    pools: Mapping[str, list[int]]


def enabled_roles(config: Config) -> list[str]:
    """Optional roles that the configuration enables."""
    roles = []
    if config.reward_model.enable:
        roles.append("reward_model")
    if config.distillation.enable:
        roles.append("teacher")
    return roles


def role_pools(trainer: TrainerConfig, optional_roles: Collection[str] = ()) -> dict[str, str]:
    """Pool of each role in `trainer.placement`, whether or not a run needs the role.

    Args:
        trainer: the section with the placement.
        optional_roles: names of the optional roles to include. By default none is.

    Returns:
        Name of the pool, by name of the role. A user's placement may lack roles, and have unknown
        ones.
    """
    placement = trainer.placement if trainer.backend == "ray" else "together"
    pools = _ARRANGEMENTS[placement] if isinstance(placement, str) else placement
    return {
        role: pool
        for role, pool in pools.items()
        if role in optional_roles or role not in _OPTIONAL_ROLES
    }


def place_roles(
    trainer: TrainerConfig,
    *,
    has_reference: bool,
    has_critic: bool,
    optional_roles: Collection[str] = (),
) -> Placement:
    """Place each role that a run needs in a pool.

    Args:
        trainer: the section with the placement.
        has_reference: whether the run needs a reference model.
        has_critic: whether the run needs a critic.
        optional_roles: names of the optional roles that the run needs.

    Raises:
        ConfigError: a role has no pool.
    """
    pools = role_pools(trainer, optional_roles)
    # The placement decides which role the policy is, and which further roles it needs.
    policy = next((role for role in POLICIES if role in pools), "actor_rollout")
    policy_pool = pools.get(policy)
    needed_roles = []
    if policy == "actor":
        needed_roles.append("rollout")
    if policy != "actor_rollout_ref" and has_reference:
        needed_roles.append("ref")
    # Without a reference the role `actor_rollout_ref` becomes `actor_rollout`, in the same pool.
    if policy == "actor_rollout_ref" and not has_reference:
        policy = "actor_rollout"
    if has_critic:
        needed_roles.append("critic")
    needed_roles.extend(optional_roles)

    roles = {} if policy_pool is None else {policy: policy_pool}
    roles |= {role: pools[role] for role in needed_roles if role in pools}
    missing_roles = [role for role in (policy, *needed_roles) if role not in roles]
    if missing_roles:
        raise ConfigError(
            _KEY,
            f"no pool for {' and '.join(missing_roles)}",
            "a pool for each role of the run",
            f"Add {' and '.join(f'{_KEY}.{role}=NAME' for role in missing_roles)}.",
        )
    return Placement(roles, {pool: trainer.processes_of(pool) for pool in roles.values()})


def arranged_roles(
    config: Config, *, has_critic: bool
) -> Iterator[tuple[str, ParallelConfig, int]]:
    """List the roles whose ranks have a layout.

    The reference has the actor's layout, even if it has a separate pool.

    Args:
        config: the run.
        has_critic: whether there is a critic, which depends on the advantage estimator.

    Yields:
        For each role, the dotted key of the section with its parallel sizes, this section, and the
        number of ranks. Roles of the policy have the actor's section, so it may come twice.
    """
    trainer = config.trainer
    sections = _sections(config)
    for role, pool in role_pools(trainer, enabled_roles(config)).items():
        # The rollout, which is divided in another way, and misspelled roles have no such section.
        if role not in sections or (role == "critic" and not has_critic):
            continue
        num_ranks = sum(trainer.processes_of(pool)) if trainer.backend == "ray" else 1
        key, section = sections[role]
        yield key, section, num_ranks


def _sections(config: Config) -> dict[str, tuple[str, ParallelConfig]]:
    """For each role, the dotted key of the section with its parallel sizes, and this section."""
    sections: dict[str, tuple[str, ParallelConfig]] = {
        "critic": (CRITIC, config.critic),
        "reward_model": ("reward_model", config.reward_model),
        "teacher": (DISTILLATION, config.distillation),
    }
    for role in (*POLICIES, "ref"):
        sections[role] = (ACTOR, config.actor_rollout_ref.actor)
    return sections


def profiled_ranks(config: Config, role: str) -> list[int] | None:
    """Ranks of a role to profile; None means all. For the rollout the actor's key counts."""
    _, section = _sections(config)["actor" if role == "rollout" else role]
    return section.profiler.ranks


def check_profiles(config: Config) -> Findings:
    """Yield ranks to profile that do not exist, or that are set without a profiler."""
    # Both by the dotted key of the section.
    sections: dict[str, ParallelConfig] = {}
    sizes: dict[str, int] = {}
    for where, section, size in arranged_roles(config, has_critic=True):
        sections[where] = section
        # Several roles share the actor's section, in pools of different sizes.
        sizes[where] = max(size, sizes.get(where, 0))
    for where, section in sections.items():
        key = f"{where}.profiler.ranks"
        ranks = section.profiler.ranks
        if ranks is None:
            continue
        if config.global_profiler.tool is None:
            yield from notice_unused([key], "global_profiler.tool is null")
            continue
        size = sizes[where]
        missing_ranks = [rank for rank in ranks if rank >= size]
        if missing_ranks:
            processes = "process" if size == 1 else "processes"
            yield ConfigError(
                key,
                str(missing_ranks),
                f"ranks from 0 to {size - 1}: the role has {size} {processes}",
                "null profiles all ranks.",
            )


def with_fewer_processes(config: Config) -> Iterator[Config]:
    """Yield configurations with fewer and fewer processes, except those whose ranks do not fit.

    All pools shrink together, by a machine at a time, then by a process of their last machine, until
    each pool has one process.
    """
    trainer = config.trainer
    roles = role_pools(trainer, enabled_roles(config))
    # Number of processes on each machine of a pool.
    pools = {pool: trainer.processes_of(pool) for pool in roles.values()}
    while any(counts != [1] for counts in pools.values()):
        # Without the last machine, or if it is the only one, with a process less.
        pools = {pool: counts[:-1] or [max(1, counts[0] - 1)] for pool, counts in pools.items()}
        smaller_trainer = trainer.model_copy(update={"resource_pools": pools})
        smaller = config.model_copy(update={"trainer": smaller_trainer})
        if not any(isinstance(finding, ConfigError) for finding in check_layouts(smaller)):
            yield smaller


def rollout_ranks(config: Config) -> list[int]:
    """Number of ranks on each machine that generate: the policy's, or those of a separate pool.

    [] if a user's placement has no pool for the rollout.
    """
    if config.trainer.backend != "ray":
        return [1]
    pool = _rollout_pool(config)
    return [] if pool is None else config.trainer.processes_of(pool)


def _rollout_pool(config: Config) -> str | None:
    """Pool of the role that generates; None if a user's placement has none."""
    pools = role_pools(config.trainer)
    return next((pools[role] for role in ("rollout", *POLICIES) if role in pools), None)


def rollout_devices(config: Config) -> int:
    """Number of devices that Ray gives to each rollout process.

    It is 1 unless the process starts further processes for an engine, one per device, as vLLM does
    during asynchronous training on Ray.
    """
    rollout = config.actor_rollout_ref.rollout
    starts_processes = rollout.traits.computes_in == "own_if_async"
    is_on_ray = config.trainer.backend == "ray"
    if is_on_ray and config.async_training.enable and starts_processes:
        return rollout.tensor_model_parallel_size
    return 1


def engine_ranks(config: Config) -> int:
    """Number of devices over which one rollout engine is divided on Ray; 1 without Ray.

    They belong to as many rollout processes (`rollout_group_size`), or all to one process
    (`rollout_devices`).
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.traits.spans_ranks and config.trainer.backend == "ray":
        return rollout.tensor_model_parallel_size
    return 1


def rollout_share(config: Config) -> float:
    """Share of a GPU's memory that an engine with `gpu_memory_utilization` reserves at its start.

    It is the value of the key. If the key is not set and nothing trains on the GPU, it is the
    larger default of the engine's package.
    """
    rollout = config.actor_rollout_ref.rollout
    package = rollout.traits.package
    share = None if package is None else package.share_without_training
    # Whether the engine must leave room for training: the rollout has no pool of its own.
    trains_here = "rollout" not in role_pools(config.trainer)
    if share is None or trains_here or "gpu_memory_utilization" in rollout.model_fields_set:
        return rollout.gpu_memory_utilization
    return share


def rollout_group_size(config: Config) -> int:
    """Number of processes that form one rollout engine; 1 means that there are no groups."""
    return engine_ranks(config) // rollout_devices(config)


def devices_problem(config: Config) -> ConfigError | None:
    """Error about an engine that cannot get several GPUs from Ray, such as SGLang; None: no error.

    The error is only for machines with GPUs.
    """
    rollout = config.actor_rollout_ref.rollout
    size = rollout.tensor_model_parallel_size
    # Without Ray, the engine chooses its devices itself.
    if size == 1 or config.trainer.backend != "ray":
        return None
    if rollout.traits.computes_in != "own" or rollout.has_servers:
        return None
    title = rollout.engine_title
    return ConfigError(
        f"{ROLLOUT}.tensor_model_parallel_size",
        got=f"{size} on GPUs, with Ray and {title}",
        expected=f"1: {title} starts processes of its own, for which Ray gives no devices",
        fix=f"Generate with {engines_with('spans_ranks')}, or name servers in engine_kwargs.",
    )


def experts_problem(config: Config) -> ConfigError | None:
    """Error about an engine that cannot divide experts on a CPU; None: no error.

    The error is only for machines without GPUs.
    """
    rollout = config.actor_rollout_ref.rollout
    size = rollout.expert_parallel_size
    devices = rollout.traits.expert_parallel_devices
    # An engine that divides experts on no device is refused by `RolloutConfig.findings`.
    if size == 1 or not devices or "cpu" in devices:
        return None
    return ConfigError(
        f"{ROLLOUT}.expert_parallel_size",
        got=f"{size}, on a CPU",
        expected=f"1: {rollout.engine_title} divides experts on {' and '.join(devices)} only",
        fix="Set it to 1: the results are the same.",
    )


def has_shards(config: Config) -> bool:
    """Whether weight sync sends each rank of a rollout group only its shards of the weights.

    Otherwise each rank receives full tensors and takes its shards of them.
    """
    return rollout_group_size(config) > 1 and config.actor_rollout_ref.rollout.traits.takes_shards


def sends_parts(config: Config) -> bool:
    """Whether every rank of the trainer sends its part of each weight to a rollout group.

    If false, the first rank sends full tensors, with an adapter merged into them or sent separately.
    Only weight sync to a rollout in another pool asks.
    """
    if has_shards(config):
        return True
    return rollout_group_size(config) > 1 and not config.actor_rollout_ref.model.has_adapter


def _check_groups(config: Config) -> Findings:
    """Yield problems with rollout groups and the devices of a rollout engine."""
    device = config.trainer.device
    yield from _on_device(devices_problem(config), device, "cuda", "with GPUs")
    yield from _on_device(experts_problem(config), device, "cpu", "without GPUs")
    yield from _check_group_sizes(config)
    size = rollout_group_size(config)
    if size == 1:
        return
    rollout = config.actor_rollout_ref.rollout
    condition = f"with groups of {size} ranks"
    if not rollout.request_seeds:
        yield ConfigError(
            f"{ROLLOUT}.request_seeds",
            f"false, {condition}",
            "true: the ranks of a group must sample with the same seed for each response",
            "Set it to true, or tensor_model_parallel_size to 1.",
        )
    # For an engine in the calling process, `RolloutConfig.findings` refuses several replicas.
    num_replicas = rollout.data_parallel_size
    if num_replicas > 1 and rollout.traits.computes_in != "caller":
        yield ConfigError(
            f"{ROLLOUT}.data_parallel_size",
            f"{num_replicas}, {condition}",
            "1",
            "Set it to 1: each group is an engine.",
        )


def _on_device(
    problem: ConfigError | None, chosen_device: str, device: str, machine: str
) -> Findings:
    """Yield a problem that a run has on one kind of device only, if it may run there.

    Args:
        problem: the problem, if there is one.
        chosen_device: `trainer.device`. With "auto" the problem becomes a notice.
        device: the kind of device on which the run fails, "cpu" or "cuda".
        machine: describes the machines on which "auto" chooses this kind: "with GPUs".
    """
    if problem is None:
        return
    if chosen_device == device:
        yield problem
    elif chosen_device == "auto":
        yield f"on a machine {machine} the run fails at its start. {problem}"


def _check_group_sizes(config: Config) -> Findings:
    """Yield an error if the ranks that generate cannot be divided into groups."""
    rollout = config.actor_rollout_ref.rollout
    trainer = config.trainer
    num_devices = rollout_devices(config)
    ranks_per_machine = rollout_ranks(config)
    num_ranks = sum(ranks_per_machine)
    size = rollout_group_size(config)
    # Without Ray `rollout_group_size` is 1. That is right for an engine that starts processes of
    # its own. One that computes in the calling ranks would need several, which only Ray starts.
    if rollout.traits.spans_ranks and rollout.traits.computes_in == "caller":
        size = rollout.tensor_model_parallel_size
    # The devices of one process are on one machine.
    fits_machines = all(count % num_devices == 0 for count in ranks_per_machine)
    if num_ranks % size == 0 and fits_machines:
        return
    group_size = size * num_devices
    got = f"{size}: groups of {group_size} processes, but {num_ranks} generate"
    expected = "a number that divides the processes that generate"
    if num_devices > 1:
        expected += " on each machine"
    # The key that sets the number of processes.
    pool = _rollout_pool(config)
    key = "trainer.n_gpus_per_node"
    if pool in trainer.resource_pools:
        key = f"trainer.resource_pools.{pool}"
    fix = f"Set it to 1, or change the number of processes: {key}"
    if trainer.backend != "ray":
        fix += " with trainer.backend=ray"
    yield ConfigError(f"{ROLLOUT}.tensor_model_parallel_size", got, expected, f"{fix}.")


def check_layouts(config: Config) -> Findings:
    """Yield parallel sizes that do not divide the ranks, once for each section.

    Whether there is a critic depends on the advantage estimator, which may be a user's. So the
    critic is checked here for `gae` only, and for other estimators before the workers start.
    """
    megatron = config.actor_rollout_ref.actor.megatron_if_chosen
    errors = {}
    for where, section, size in arranged_roles(config, has_critic=_is_gae(config)):
        try:
            section.layout(size, where, megatron)
        except ConfigError as error:
            # Several roles may share a section; one error is enough.
            errors.setdefault(where, error)
    yield from errors.values()
    if config.task == "rl":
        yield from _check_groups(config)


def _is_gae(config: Config) -> bool:
    """Whether the run surely has a critic: its estimator is the built-in one that uses values."""
    return config.task == "rl" and config.algorithm.adv_estimator == "gae"


def check_megatron(config: Config) -> Findings:
    """Yield settings that Megatron-core does not support, and keys that the engine does not read."""
    actor = config.actor_rollout_ref.actor
    settings = actor.megatron
    if actor.strategy != "megatron":
        names = [f"{ACTOR}.megatron.{name}" for name in settings.model_fields_set]
        yield from notice_unused(names, "strategy is fsdp")
        return
    yield from _check_megatron_version()
    model = config.actor_rollout_ref.model
    if model.has_adapter:
        yield ConfigError(
            "actor_rollout_ref.model.lora_rank",
            "an adapter, with strategy=megatron",
            "0: adapters are trained by FSDP2",
            "Train all weights, or set strategy=fsdp.",
        )
    # Supervised tasks have no critic.
    has_critic = config.task == "rl"
    yield from _check_activations("actor_rollout_ref.model", model)
    if has_critic:
        yield from _check_activations("critic.model", config.critic.model)
    num_stages = actor.pipeline_model_parallel_size
    if settings.virtual_pipeline_model_parallel_size and num_stages == 1:
        yield ConfigError(
            f"{ACTOR}.megatron.virtual_pipeline_model_parallel_size",
            "a number, with one pipeline stage",
            "null",
            "Set pipeline_model_parallel_size, too.",
        )
    yield from _unread_sharding(ACTOR, actor)
    if has_critic:
        yield from _unread_sharding(CRITIC, config.critic)
    yield from _check_shared_sizes(config)


def _check_megatron_version() -> Findings:
    """Yield an error unless the tested version of megatron-core is installed."""
    try:
        installed = version("megatron-core")
    except PackageNotFoundError:
        installed = "not installed"
    if not installed.startswith(f"{MEGATRON_VERSION}."):
        yield MachineError(
            f"{ACTOR}.strategy",
            f"megatron, with megatron-core {installed}",
            MEGATRON_VERSION,
            "pip install -e '.[megatron]', or set strategy=fsdp.",
        )


def _check_activations(at: str, model: ModelConfig | CriticModelConfig) -> Findings:
    """Yield an error if a model on Megatron-core is to offload activations, as only FSDP2 can.

    Args:
        at: dotted key of the section.
        model: the section of the model.
    """
    if model.enable_activation_offload:
        yield ConfigError(
            f"{at}.enable_activation_offload",
            "true, with strategy=megatron",
            "false",
            "Set enable_gradient_checkpointing, or strategy=fsdp.",
        )


def _unread_sharding(at: str, section: ActorConfig | CriticConfig) -> Iterator[str]:
    """Yield a notice about keys of FSDP that Megatron-core does not read."""
    changed_names = section.fsdp_config.model_fields_set
    names = [name for name in ("fsdp_size", "reshard_after_forward") if name in changed_names]
    yield from notice_unused([f"{at}.fsdp_config.{name}" for name in names], "strategy is megatron")


def _check_shared_sizes(config: Config) -> Findings:
    """Yield parallel sizes of colocated roles that differ from the actor's.

    A process has one set of Megatron-core's process groups, for all of its roles.
    """
    actor = config.actor_rollout_ref.actor
    optional_roles = enabled_roles(config)
    pools = role_pools(config.trainer, optional_roles)
    policy_pool = next((pools[role] for role in POLICIES if role in pools), None)
    critic = ["critic"] if _is_gae(config) else []
    # The roles beside the actor in its processes.
    roles = [role for role in critic + optional_roles if pools.get(role) == policy_pool]
    for name in (
        "tensor_model_parallel_size",
        "pipeline_model_parallel_size",
        "expert_parallel_size",
    ):
        actor_size = getattr(actor, name)
        for role in roles:
            at, section = _sections(config)[role]
            size = getattr(section, name)
            if size != actor_size:
                yield ConfigError(
                    f"{at}.{name}",
                    f"{size}, in processes that it shares with the actor",
                    f"{actor_size}, like the actor: Megatron has one set of sizes",
                    (
                        "Give both the same size, or processes of their own (trainer.placement), "
                        "or set strategy=fsdp."
                    ),
                )


def check_placement(config: Config) -> Findings:
    """Yield roles and pools that cannot be placed, and keys that are only read on Ray."""
    trainer = config.trainer
    if trainer.backend == "local":
        yield from _check_local(config)
        return
    if trainer.device not in ("auto", "cpu", "cuda"):
        yield ConfigError(
            "trainer.device",
            f"'{trainer.device}', with trainer.backend=ray",
            "auto, cpu or cuda",
            "Ray gives each process a device of its own.",
        )
    # A user's placement is an open dictionary, so roles and pools may be missing or misspelled.
    optional_roles = enabled_roles(config)
    pools = role_pools(trainer, optional_roles)
    unknown_roles = [role for role in pools if role not in ROLES]
    if unknown_roles:
        yield ConfigError(_KEY, f"the role {unknown_roles[0]}", f"roles out of {', '.join(ROLES)}")
    yield from _check_policy(pools)
    for role in optional_roles:
        if role not in pools:
            section = DISTILLATION if role == "teacher" else role
            yield ConfigError(
                _KEY,
                f"no pool for {role}, with {section}.enable=True",
                "a pool for each role of the run",
                f"Add {_KEY}.{role}=NAME.",
            )
    # A pool without a role would reserve machines for nothing.
    used_pools = list(dict.fromkeys(pools.values()))
    idle_pools = [pool for pool in trainer.resource_pools if pool not in used_pools]
    if idle_pools:
        yield ConfigError(
            f"trainer.resource_pools.{idle_pools[0]}",
            "a pool without a role",
            f"pools out of {', '.join(used_pools)}",
            f"{_KEY} names the pool of each role.",
        )


def _check_local(config: Config) -> Findings:
    """Yield settings that a run in one process does not support, and keys that only Ray reads."""
    trainer = config.trainer
    # An engine in other processes chooses its GPUs itself, from the first one on.
    if _starts_processes(config) and trainer.device not in ("auto", "cpu", "cuda", "cuda:0"):
        engine = config.actor_rollout_ref.rollout.name
        yield ConfigError(
            "trainer.device",
            f"{trainer.device}, with {engine} in processes of its own, which use the first GPUs",
            "cuda:0",
            "Set trainer.device=cuda, and CUDA_VISIBLE_DEVICES to the GPUs to use.",
        )
    for name in ("nnodes", "n_gpus_per_node"):
        value = getattr(trainer, name)
        if value != 1:
            yield ConfigError(
                f"trainer.{name}",
                f"{value}, with trainer.backend=local",
                "1",
                "Several processes need Ray: set trainer.backend=ray (`quadriga train --ray`).",
            )

    # Only Ray reads the keys about several processes, their recovery and the cluster.
    default = TrainerConfig()
    names = [
        "placement",
        "resource_pools",
        "max_worker_restarts",
        "max_skipped_steps",
        "state_copies",
        "stall_timeout_s",
        "phase_timeout_s",
    ]
    names = [name for name in names if getattr(trainer, name) != getattr(default, name)]
    keys = [f"trainer.{name}" for name in names]
    if config.ray_kwargs.ray_init:
        keys.append("ray_kwargs.ray_init")
    if config.ray_kwargs.timeline_json_file:
        keys.append("ray_kwargs.timeline_json_file")
    yield from notice_unused(keys, "trainer.backend is local")


def _starts_processes(config: Config) -> bool:
    """Whether the rollout engine of a local run computes in processes of its own."""
    rollout = config.actor_rollout_ref.rollout
    computes_in = rollout.traits.computes_in
    if computes_in != "own_if_async":
        return computes_in == "own" and not rollout.has_servers
    is_async = rollout.mode == "async" or config.async_training.enable
    return is_async or rollout.tensor_model_parallel_size > 1


def _check_policy(pools: Mapping[str, str]) -> Findings:
    """Yield an error unless the placement has exactly one valid set of roles for the policy.

    Args:
        pools: the pool of each role.
    """
    policies = [role for role in POLICIES if role in pools]
    got = " and ".join(pools)
    if not policies:
        yield ConfigError(_KEY, "no pool for the policy", f"{_KEY}.actor_rollout_ref=NAME")
    if len(policies) > 1 or {"actor_rollout_ref", "ref"} <= pools.keys():
        yield ConfigError(
            _KEY,
            got,
            "actor_rollout_ref, or actor_rollout and ref, or actor, rollout and ref",
            "The reference is either inside the policy's processes or a separate role.",
        )
    elif policies and ("rollout" in pools) != (policies == ["actor"]):
        # The policy `actor` needs the role `rollout` beside it. The others contain the rollout.
        yield ConfigError(
            _KEY,
            got,
            "actor_rollout_ref or actor_rollout, or both of actor and rollout",
            "The rollout is either inside the policy's processes or a role beside `actor`.",
        )
    elif policies == ["actor"] and pools["actor"] == pools["rollout"]:
        pool = pools["actor"]
        yield ConfigError(
            _KEY,
            f"actor and rollout in one pool, {pool}",
            "a pool for each",
            f"In one pool they are one role: set {_KEY}.actor_rollout={pool} instead of both.",
        )
