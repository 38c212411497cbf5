# SPDX-License-Identifier: Apache-2.0
"""Whether the processes of each role can be arranged as its section asks."""

from collections.abc import Iterator

from quadriga.config.actor import ActorConfig
from quadriga.config.critic import CriticConfig
from quadriga.config.findings import Findings
from quadriga.config.layout import Layout, Sizes
from quadriga.config.placement import role_pools
from quadriga.config.reward import RewardModelConfig
from quadriga.config.root import Config
from quadriga.errors import ConfigError

ACTOR = "actor_rollout_ref.actor"
CRITIC = "critic"
REWARD_MODEL = "reward_model"
Arranged = ActorConfig | CriticConfig | RewardModelConfig


def arranged_roles(config: Config) -> Iterator[tuple[str, Arranged, int]]:
    """The roles whose processes are arranged: the section that says how, by its name, and how many there are.

    The reference is arranged as the actor is, also in a pool of its own.
    """
    pools = role_pools(config.trainer, has_reward_model=config.reward_model.enable)
    sections: dict[str, tuple[str, Arranged]] = {
        "actor_rollout_ref": (ACTOR, config.actor_rollout_ref.actor),
        "actor_rollout": (ACTOR, config.actor_rollout_ref.actor),
        "actor": (ACTOR, config.actor_rollout_ref.actor),
        "ref": (ACTOR, config.actor_rollout_ref.actor),
        "critic": (CRITIC, config.critic),
        "reward_model": (REWARD_MODEL, config.reward_model),
    }
    for role, pool in pools.items():
        if role in sections:
            size = sum(config.trainer.processes_of(pool)) if config.trainer.backend == "ray" else 1
            where, section = sections[role]
            yield where, section, size


def layout_of(section: Arranged, world_size: int, where: str) -> Layout:
    """The layout of a role's processes.

    Raises:
        ConfigError: the sizes do not divide them.
    """
    fsdp = section.model.fsdp_config if isinstance(section, RewardModelConfig) else section.fsdp_config
    return Layout.of(world_size, Sizes.of(fsdp.fsdp_size, section), where)


def check_layouts(config: Config, found: Findings) -> None:
    """Refuses sizes that do not divide the processes; each section is told of once."""
    told: set[str] = set()
    for where, section, size in arranged_roles(config):
        try:
            layout_of(section, size, where)
        except ConfigError as error:
            if where not in told:
                found.problems.append(error)
            told.add(where)
