# SPDX-License-Identifier: Apache-2.0
"""The interface between environments, their processes and the driver.

    reset(seed, row) ──> Step: text, agent ──> reply of the agent ──> step(reply) ──> Step ... is_done
                                                                                        └──> finish()

An adapter makes a `TextEnvironment` of another library's class. It runs in a process of its own
(`process.py`) and only plain values leave it.
"""

import json
import math
import random
import re
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import MappingProxyType
from typing import Any, TypeAlias

from quadriga.user_file import load_reference

# A reply of the model, or a call of a tool: {"name": ..., "arguments": {...}}.
Action: TypeAlias = str | dict[str, Any]

RANDOM = "random"
"""Name of the player whose actions are random."""
_LARGEST_REWARD = 3.4028234663852886e38  # the largest float32
_MAX_SHOWN_CHARACTERS = 200
_BRACKETED = re.compile(r"\[[^\[\]\n]{1,40}\]|\\boxed\{[^{}\n]{1,40}\}")


@dataclass(frozen=True)
class EnvironmentSpec:
    """The environment that a configuration names, as its process receives it."""

    name: str  # `library:id`, `file.py:Class` or `openenv:ws://...`
    options: Mapping[str, Any] = field(default_factory=dict)  # arguments of its constructor
    num_agents: int = 1
    has_network: bool = False  # whether its process may use the network
    max_observation_length: int = 8192  # in characters; longer observations are cut


@dataclass(frozen=True)
class Step:
    """An environment's response to `reset`, `step` or `finish`."""

    text: str = ""  # observation of the agent that acts next, or result of a tool
    agent: int = 0  # number of the agent that acts next
    # Rewards of this step, by number of the agent. None, unlike 0, means that the environment has
    # not scored the step for this agent.
    rewards: Mapping[int, float | None] = field(default_factory=dict)
    is_done: bool = False  # whether the episode is over
    # Values that JSON can express. "state" identifies the state in which the next agent acts, and
    # "is_invalid" marks an action without effect. For each other name, the last number of the
    # episode becomes a metric.
    info: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Description:
    """Properties of an environment that all of its episodes share."""

    schemas: tuple[Mapping[str, Any], ...] = ()  # of its tools; empty if actions are texts


class TextEnvironment(ABC):
    """Base class of adapters. An object serves one episode.

    Attributes:
        schemas: JSON schemas of the tools. Empty: an action is the text of a reply.
    """

    schemas: Sequence[Mapping[str, Any]] = ()

    @abstractmethod
    def reset(self, seed: int, row: Mapping[str, Any]) -> Step:
        """Begin the episode, and return the first observation.

        Args:
            seed: seed of the episode. Global random states have been seeded with it already.
            row: columns of the data row; empty if the row is only a seed.
        """

    @abstractmethod
    def step(self, action: Action) -> Step:
        """Take an action of the agent that acts next."""

    def finish(self) -> Step:
        """End the episode, and return a step with the rewards that are known only at its end."""
        return Step()

    def discard(self) -> None:  # noqa: B027 - most environments hold nothing
        """Free resources of the environment, whose episode may be unfinished."""

    def sample(self, text: str, seed: int, reference: str) -> Step:
        """Choose an action for an agent that is not a model.

        Args:
            text: observation of the agent.
            seed: seed of this action.
            reference: "random", or a user's function: `file.py:NAME`, called with the observation
                and a `random.Random`.

        Returns:
            A step whose text is the action, as JSON if it is a call of a tool. The action is not
            taken.
        """
        generator = random.Random(seed)
        if reference == RANDOM:
            action = self.sample_action(text, generator)
        else:
            action = load_reference(reference, "env.agents")(text, generator)
        return Step(action if isinstance(action, str) else json.dumps(action))

    def sample_action(self, text: str, generator: random.Random) -> Action:
        """Draw a random action.

        By default it is a call of a tool. Without tools it is an example in brackets from the
        observation, such as `[3]`, or a digit in brackets if there is none.

        Args:
            text: observation of the agent.
            generator: source of random numbers.
        """
        if self.schemas:
            function = generator.choice(self.schemas)["function"]
            arguments = random_value(function["parameters"], generator)
            return {"name": function["name"], "arguments": arguments}
        examples = _BRACKETED.findall(text)
        return generator.choice(examples) if examples else f"[{generator.randrange(10)}]"


def finite_rewards(rewards: Mapping[Any, Any], num_agents: int) -> dict[int, float | None]:
    """Check the rewards of a step, and convert them to plain floats.

    Args:
        rewards: rewards by number of the agent, as in `Step`; numbers may be of numpy or torch.
        num_agents: number of agents.

    Returns:
        The rewards. A reward that is None stays None.

    Raises:
        ValueError: a reward is not a finite number, or there is no such agent.
    """
    checked = {}
    for agent, reward in rewards.items():
        if agent not in range(num_agents):
            raise ValueError(f"got a reward of agent {agent!r}, expected {num_agents} agents")
        if reward is None:
            checked[int(agent)] = None
            continue
        if hasattr(reward, "item"):
            reward = reward.item()
        # `not ... <=` also refuses NaN, for which `>` would be false.
        if not isinstance(reward, Real) or not abs(reward) <= _LARGEST_REWARD:
            shown = repr(reward)[:_MAX_SHOWN_CHARACTERS]
            raise ValueError(f"got the reward {shown}, expected a finite number")
        checked[int(agent)] = float(reward)
    return checked


def random_value(
    schema: Mapping[str, Any],
    generator: random.Random,
    definitions: Mapping[str, Any] = MappingProxyType({}),
) -> Any:
    """Draw a random value that fits a JSON schema. Limits on lengths and patterns are ignored.

    Args:
        schema: the schema.
        generator: source of random numbers.
        definitions: schemas to which `$ref` may refer, besides `$defs` of the schema itself.
    """
    definitions = {**definitions, **schema.get("$defs", {})}
    if "$ref" in schema:
        # Such as "#/$defs/NAME".
        name = schema["$ref"].rpartition("/")[2]
        return random_value(definitions[name], generator, definitions)
    if "enum" in schema:
        return generator.choice(schema["enum"])
    if "const" in schema:
        return schema["const"]
    if schema.get("anyOf"):
        return random_value(generator.choice(schema["anyOf"]), generator, definitions)
    kind = schema.get("type")
    if kind == "object" or "properties" in schema:
        properties = schema.get("properties", {})
        return {
            name: random_value(part, generator, definitions) for name, part in properties.items()
        }
    if kind == "array":
        return [random_value(schema.get("items", {}), generator, definitions)]
    if kind in ("integer", "number"):
        low = int(schema.get("minimum", 0))
        return generator.randint(low, int(schema.get("maximum", low + 9)))
    if kind == "boolean":
        return generator.random() < 0.5
    # A letter stands for any text, and for a value of unknown type.
    return None if kind == "null" else generator.choice("abc")


def plain_value(value: Any) -> Any:
    """Convert a value to one that JSON can express.

    NaN, infinite numbers, and objects of unknown types become texts by `str`.
    """
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return {str(key): plain_value(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain_value(entry) for entry in value]
    # Arrays and numbers of numpy and torch, then models of pydantic.
    if hasattr(value, "tolist"):
        return plain_value(value.tolist())
    if hasattr(value, "model_dump"):
        return plain_value(value.model_dump(mode="json"))
    return str(value)
