# SPDX-License-Identifier: Apache-2.0
"""`env`: an environment with reset and step, its episodes, and the agents in it."""

from typing import Any

from pydantic import NonNegativeFloat, NonNegativeInt, PositiveFloat

from quadriga.config.base import Findings, Section
from quadriga.config.types import Count, Name
from quadriga.errors import ConfigError

_FORMS = "textarena:ID, gem:ID, gymnasium:ID, skyrl_gym:ID, openenv:ws://HOST:PORT, file.py:Class"


class EnvironmentConfig(Section):
    """An environment that responses are played in. `env=NAME` is short for `env.name=NAME`."""

    name: Name | None = None
    """Environment: `textarena:ID`, `gem:ID`, `gymnasium:ID`, `skyrl_gym:ID`, `openenv:ws://HOST:PORT`, or a class of
    your own, `path/to/file.py:Class`. null: none."""
    options: dict[str, Any] = {}
    """Open dictionary: arguments of the environment's constructor; for `openenv` of every reset."""
    num_episodes: Count = 1024
    """Training rows where `data.train_files` is empty: each is a seed of `reset`."""
    num_val_episodes: NonNegativeInt = 32
    """Validation rows where `data.val_files` is empty. Their seeds are disjoint from those of training."""
    system_prompt: str | None = None
    """System message in front of the first observation. null: none."""
    timeout_s: PositiveFloat = 30.0
    """Seconds that one call of `reset` or `step` may take; a later one ends its episode, and its process is killed."""
    num_processes: Count | None = None
    """Processes of environments, shared by all rollout processes; each has many episodes. null: one for each core."""
    max_concurrent_episodes: Count | None = None
    """Episodes that are played at a time, shared by all rollout processes; each plays at least one. A server of OpenEnv
    may have only one session. null: as many as there are responses."""
    network: bool = False
    """Whether environments may use the network. Those of `openenv` always may."""
    invalid_penalty: NonNegativeFloat = 0.0
    """Subtracted from the reward for each action without effect, such as a move against the rules. An episode that a
    score function grades has no penalty: the function reads `num_invalid` in `extra_info`."""
    max_observation_length: Count = 8192
    """Longest observation, in characters; the middle of a longer one is cut out."""
    agents: list[Name] = []
    """Players of several agents, in the environment's order: `policy`, `random`, `path/to/file.py:function`, or the URL
    of a server with a fixed model. Empty: one agent, the policy."""
    trained_agents: list[NonNegativeInt] = []
    """Numbers of the agents that are trained, of those that the policy plays. Empty: all of these."""
    train_together: bool = False
    """Whether an episode trains all trained agents, each in a row of its own, for estimators that know agents (`rae`,
    `hierarchical_grpo`). Otherwise an episode trains one of them; rows take turns."""
    roles: list[Name] = []
    """Role of each agent, by which `rae` and `hierarchical_grpo` compare. Empty: the agent's number."""

    @property
    def is_remote(self) -> bool:
        """Whether the environment runs on a server."""
        return self.name is not None and self.name.startswith("openenv:")

    @property
    def num_agents(self) -> int:
        """Number of agents. Without `agents` the policy is the only one."""
        return max(1, len(self.agents))

    @property
    def seats(self) -> list[int]:
        """Numbers of the agents that are trained.

        These are the agents that the policy plays; if `trained_agents` is given, only those in it.
        """
        players = self.agents or ["policy"]
        numbers = [number for number, player in enumerate(players) if player == "policy"]
        if not self.trained_agents:
            return numbers
        return [number for number in numbers if number in self.trained_agents]

    def role_of(self, agent: int) -> str:
        """Name of the role of an agent."""
        return self.roles[agent] if self.roles else str(agent)

    def findings(self, at: str) -> Findings:
        if self.name is None:
            changed_keys = self.changed_keys(at)
            if changed_keys:
                yield ConfigError(
                    f"{at}.name",
                    f"null, with {', '.join(changed_keys)}",
                    "a name",
                    f"Set env=NAME: {_FORMS}.",
                )
            return
        # Each trained agent must exist and be played by the policy. `seats` leaves out all others,
        # so it then has fewer entries.
        num_trained = len(set(self.trained_agents))
        if not self.seats or (num_trained and num_trained != len(self.seats)):
            yield ConfigError(
                f"{at}.trained_agents",
                f"{self.trained_agents}, with {at}.agents={self.agents}",
                "numbers of agents that the policy plays",
            )
        if self.train_together and len(self.seats) < 2:
            yield ConfigError(
                f"{at}.train_together",
                f"True, with {at}.agents={self.agents}",
                "several agents that are trained",
            )
        if self.roles and len(self.roles) != self.num_agents:
            yield ConfigError(
                f"{at}.roles", str(self.roles), f"a role for each of {self.num_agents} agents"
            )
