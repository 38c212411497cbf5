# SPDX-License-Identifier: Apache-2.0
"""Which role runs in which resource pool.

    together   all: actor_rollout_ref + critic + reward_model
    grouped    policy: actor_rollout      scoring: ref + critic + reward_model
    apart      actor_rollout: actor_rollout      ref: ref      critic: critic      reward_model: reward_model

Roles that share a pool share its processes. `actor_rollout_ref` is the policy with the reference inside;
`actor_rollout` is the policy where the reference is a role of its own, or where there is none. In an arrangement of
one's own the policy may also be two roles in two pools, `actor` and `rollout`: weights then travel between them.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quadriga.config.findings import Findings
from quadriga.config.root import Config
from quadriga.config.trainer import TrainerConfig
from quadriga.errors import ConfigError

ROLES = ("actor_rollout_ref", "actor_rollout", "actor", "rollout", "ref", "critic", "reward_model")
POLICIES = ("actor_rollout_ref", "actor_rollout", "actor")
"""The roles with the actor in them; a run has one of them."""
_ARRANGEMENTS: dict[str, dict[str, str]] = {
    "together": {"actor_rollout_ref": "all", "critic": "all", "reward_model": "all"},
    "grouped": {"actor_rollout": "policy", "ref": "scoring", "critic": "scoring", "reward_model": "scoring"},
    "apart": {"actor_rollout": "actor_rollout", "ref": "ref", "critic": "critic", "reward_model": "reward_model"},
}
_KEY = "trainer.placement"


@dataclass(frozen=True)
class Placement:
    """The roles of one run and the pools that they need.

    Attributes:
        roles: role -> name of its pool.
        pools: name of a pool -> its processes on each machine.
    """

    roles: Mapping[str, str]
    pools: Mapping[str, list[int]]

    @property
    def num_processes(self) -> int:
        """Processes of all pools."""
        return sum(sum(counts) for counts in self.pools.values())


def role_pools(trainer: TrainerConfig, *, has_reward_model: bool = False) -> dict[str, str]:
    """Role -> pool as `trainer.placement` has it, whether or not a run needs the role (a reward model: if it does)."""
    placement = trainer.placement if trainer.backend == "ray" else "together"
    pools = dict(_ARRANGEMENTS[placement] if isinstance(placement, str) else placement)
    return pools if has_reward_model else {role: pool for role, pool in pools.items() if role != "reward_model"}


def place_roles(
    trainer: TrainerConfig, *, has_reference: bool, has_critic: bool, has_reward_model: bool = False
) -> Placement:
    """The pool of each role that a run needs.

    Args:
        trainer: says where each role runs.
        has_reference: whether there is a frozen reference model.
        has_critic: whether there is a critic.
        has_reward_model: whether a model grades.

    Raises:
        ConfigError: a role has no pool.
    """
    given = role_pools(trainer, has_reward_model=has_reward_model)
    policy = next((role for role in POLICIES if role in given), "actor_rollout")
    is_inside = has_reference and policy == "actor_rollout_ref"
    wanted = {
        "actor_rollout" if policy == "actor_rollout_ref" and not is_inside else policy: given.get(policy),
        **({"rollout": given.get("rollout")} if policy == "actor" else {}),
        **({"ref": given.get("ref")} if has_reference and not is_inside else {}),
        **({"critic": given.get("critic")} if has_critic else {}),
        **({"reward_model": given.get("reward_model")} if has_reward_model else {}),
    }
    roles = {role: pool for role, pool in wanted.items() if pool is not None}
    if homeless := [role for role in wanted if role not in roles]:
        raise ConfigError(
            _KEY,
            got=f"no pool for {' and '.join(homeless)}",
            expected="a pool for each role of the run",
            fix=f"Add {' and '.join(f'{_KEY}.{role}=NAME' for role in homeless)}.",
        )
    return Placement(roles, {pool: trainer.processes_of(pool) for pool in dict.fromkeys(roles.values())})


def check_placement(config: Config, found: Findings) -> None:
    """Refuses what cannot be placed, and says which keys are read on Ray only."""
    trainer = config.trainer
    if trainer.backend == "local":
        _check_local(config, found)
        return
    if trainer.device not in ("auto", "cpu", "cuda"):
        found.refuse(
            "trainer.device",
            got=f"'{trainer.device}', with trainer.backend=ray",
            expected="auto, cpu or cuda",
            fix="Ray gives each process a device of its own.",
        )
    given = role_pools(trainer, has_reward_model=config.reward_model.enable)
    if unknown := [role for role in given if role not in ROLES]:
        found.refuse(_KEY, got=f"the role {unknown[0]}", expected=f"roles out of {', '.join(ROLES)}", fix="")
    _check_policy(given, found)
    if config.reward_model.enable and "reward_model" not in given:
        found.refuse(
            _KEY,
            got="no pool for reward_model, with reward_model.enable=True",
            expected="a pool for each role of the run",
            fix=f"Add {_KEY}.reward_model=NAME.",
        )
    if idle := [pool for pool in trainer.resource_pools if pool not in given.values()]:
        found.refuse(
            f"trainer.resource_pools.{idle[0]}",
            got="a pool without a role",
            expected=f"pools out of {', '.join(dict.fromkeys(given.values()))}",
            fix=f"{_KEY} names the pool of each role.",
        )


def _check_policy(given: Mapping[str, str], found: Findings) -> None:
    policies = [role for role in POLICIES if role in given]
    if not policies:
        found.refuse(_KEY, got="no pool for the policy", expected=f"{_KEY}.actor_rollout_ref=NAME", fix="")
    if len(policies) > 1 or {"actor_rollout_ref", "ref"} <= given.keys():
        found.refuse(
            _KEY,
            got=f"{' and '.join(given)}",
            expected="actor_rollout_ref, or actor_rollout and ref, or actor, rollout and ref",
            fix="The reference is inside the policy's processes, or a role of its own.",
        )
    elif policies and ("rollout" in given) != (policies == ["actor"]):
        found.refuse(
            _KEY,
            got=f"{' and '.join(given)}",
            expected="actor_rollout_ref or actor_rollout, or both of actor and rollout",
            fix="The rollout is inside the policy's processes, or a role of its own beside `actor`.",
        )
    elif policies == ["actor"] and given["actor"] == given["rollout"]:
        found.refuse(
            _KEY,
            got=f"actor and rollout in one pool, {given['actor']}",
            expected="a pool for each",
            fix=f"In one pool they are one role: set {_KEY}.actor_rollout={given['actor']} instead of both.",
        )


def _check_local(config: Config, found: Findings) -> None:
    trainer = config.trainer
    for name, value in (("nnodes", trainer.nnodes), ("n_gpus_per_node", trainer.n_gpus_per_node)):
        if value != 1:
            found.refuse(
                f"trainer.{name}",
                got=f"{value}, with trainer.backend=local",
                expected="1",
                fix="Several processes run on Ray: set trainer.backend=ray (`quadriga train --ray`).",
            )
    changed = {
        _KEY: trainer.placement != "together",
        "trainer.resource_pools": trainer.resource_pools,
        "trainer.max_worker_restarts": trainer.max_worker_restarts,
        "ray_kwargs.ray_init": config.ray_kwargs.arguments,
        "ray_kwargs.timeline_json_file": config.ray_kwargs.timeline_json_file,
    }
    if unused := [key for key, is_changed in changed.items() if is_changed]:
        found.notice(f"{', '.join(unused)}: not used, for trainer.backend is local.")
