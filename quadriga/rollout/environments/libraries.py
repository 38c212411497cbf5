# SPDX-License-Identifier: Apache-2.0
"""Adapters of published libraries. A library is imported when one of its environments is made.

TextArena (arXiv 2504.11442), GEM (arXiv 2510.01051), Gymnasium (arXiv 2407.17032) and SkyRL Gym.
"""

import importlib
import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from quadriga.errors import MachineError, RolloutError, did_you_mean
from quadriga.rollout.environments.interface import (
    Action,
    EnvironmentSpec,
    Step,
    TextEnvironment,
    plain_value,
)
from quadriga.rollout.environments.user_classes import SteppedEnvironment, as_observation

# Extras of this package (`pip install -e '.[EXTRA]'`) by the module that they install.
_EXTRAS = {
    "textarena": "textarena",
    "gem": "gem",
    "gymnasium": "gymnasium",
    "skyrl_gym": "skyrl-gym",
    "websockets": "openenv",
}
_INVALID_MOVE = "invalid move"  # in messages of TextArena's games
_ESCAPE = re.compile(r"\x1b\[[0-9;]*m")  # colors of a terminal


def import_library(name: str) -> Any:
    """Import a library of environments.

    Raises:
        MachineError: the library is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        raise MachineError(
            "env.name",
            got=f"the library {name}, which cannot be imported ({error})",
            expected="an installed library",
            fix=f"Install it: pip install -e '.[{_EXTRAS[name]}]', or scripts/install-agents.",
        ) from error


def identifiers(name: str) -> list[str]:
    """Names of the environments of a library, such as "gem".

    Raises:
        MachineError: the library is not installed.
    """
    module = import_library(name)
    if name == "textarena":
        return sorted(module.envs.registration.ENV_REGISTRY)
    if name == "gem":
        return sorted(importlib.import_module("gem.envs.registration").ENV_REGISTRY)
    return sorted(module.envs.registration.registry)


def _require_known(identifier: str, name: str) -> None:
    """Raise a RolloutError if a library has no environment of this identifier.

    Args:
        identifier: name of the environment.
        name: name of the library.
    """
    known = identifiers(name)
    if identifier not in known:
        raise RolloutError(
            "env.name",
            got=f"{name}:{identifier}",
            expected=f"an environment of {name}",
            fix=did_you_mean(identifier, known) or f"See `quadriga env list {name}`.",
        )


class TextArenaEnvironment(TextEnvironment):
    """Adapter of a game of TextArena, with one agent or several.

    An agent reads the messages since its last move. Messages that repeat the agent's own move are
    left out, because the move is in the agent's conversation already.

    Args:
        spec: the environment.
        identifier: name of the game.

    Raises:
        MachineError: TextArena is not installed.
        RolloutError: there is no such game.
    """

    def __init__(self, spec: EnvironmentSpec, identifier: str) -> None:
        textarena = import_library("textarena")
        self._where = f"environment {spec.name}"
        self._num_agents = spec.num_agents
        _require_known(identifier, "textarena")
        self._game = textarena.make(identifier, **spec.options)
        # Kinds of messages: from the game about an invalid move, and the move of a player.
        self._admin = textarena.ObservationType.GAME_ADMIN
        self._player_action = textarena.ObservationType.PLAYER_ACTION
        self._is_done = False

    def reset(self, seed: int, row: Mapping[str, Any]) -> Step:
        """Begin a game with as many agents as the environment has.

        Args:
            seed: seed of the episode.
            row: columns of the data row; empty if the row is only a seed.

        Raises:
            RolloutError: the game does not take this number of agents.
        """
        try:
            self._game.reset(num_players=self._num_agents, seed=seed)
        except AssertionError as error:
            raise RolloutError(
                self._where,
                got=str(error),
                expected="as many agents as the game has",
                fix="Set env.agents to a list with a player for each, as in [policy, random].",
            ) from error
        return self._observe()

    def step(self, action: Action) -> Step:
        """Make the move of the current agent. The last step has the rewards of all agents."""
        agent = self._game.state.current_player_id
        self._is_done, _ = self._game.step(str(action))
        if not self._is_done:
            return self._observe()
        rewards, game_info = self._game.close()
        agent_info = game_info.get(agent, {})
        reason = agent_info.get("reason")
        rewards = dict(rewards or {})
        for number, reward in rewards.items():
            if isinstance(reward, str):
                # After an invalid move, some games swap the reward and the reason, as in
                # "Invalid move: -1".
                rewards[number] = float(str(reason).rpartition(": ")[2])
        # A winner has at least the reward 1. A lower best reward, such as that of an invalid move,
        # wins nothing.
        best = max([1, *rewards.values()])
        wins = [number for number, reward in rewards.items() if reward == best]
        is_invalid = bool(agent_info.get("invalid_move"))
        info = {"is_invalid": is_invalid, "reason": reason, "wins": wins}
        return Step(str(reason or ""), agent, rewards, is_done=True, info=info)

    def finish(self) -> Step:
        """End the episode. A game that was cut off has no winner, and its rewards are 0."""
        if self._is_done:
            return Step()
        return Step(rewards=dict.fromkeys(range(self._num_agents), 0.0), info={"wins": []})

    def _observe(self) -> Step:
        """Make the step that shows the next agent the messages that it has not read."""
        state = self._game.state
        agent = state.current_player_id
        info = {}
        texts = []
        for sender, message, kind in state.get_current_player_observation():
            if kind is self._player_action and sender == agent:
                continue
            # After an invalid move the same agent acts again, so the message is about its own move.
            if kind is self._admin and _INVALID_MOVE in message:
                info["is_invalid"] = True
            sender_name = state.role_mapping.get(sender, f"Player {sender}")
            # -1 is the game itself.
            texts.append(message if sender == -1 else f"[{sender_name}] {message}")
        return Step("\n".join(texts), agent, info=info)


class GemEnvironment(SteppedEnvironment):
    """Adapter of a game of GEM, whose observations continue in `info["suffix"]`.

    Args:
        spec: the environment; its options are arguments of `gem.make`.
        identifier: name of the game, with or without the prefix `game:`.

    Raises:
        MachineError: GEM is not installed.
        RolloutError: there is no such game.
    """

    def __init__(self, spec: EnvironmentSpec, identifier: str) -> None:
        gem = import_library("gem")
        if f"game:{identifier}" in identifiers("gem"):
            identifier = f"game:{identifier}"
        _require_known(identifier, "gem")
        super().__init__(gem.make(identifier, **spec.options))

    def observation_text(self, observation: Any, info: Mapping[str, Any]) -> str:
        suffix = info.get("suffix") or ""
        return f"{as_observation(observation)}\n{suffix}".strip()

    def sample_action(self, text: str, generator: random.Random) -> Action:
        try:
            return str(self.environment.sample_random_action())
        except NotImplementedError:
            return super().sample_action(text, generator)


class GymnasiumEnvironment(SteppedEnvironment):
    """Adapter of an environment of Gymnasium.

    The model replies with JSON that fits the action space. In a space of texts, the reply itself is
    the action. With the option `render_mode: ansi` the model reads the rendered text.

    Args:
        spec: the environment; its options are arguments of `gymnasium.make`.
        identifier: a registered name, `namespace/name` or `module:name`.

    Raises:
        MachineError: Gymnasium is not installed.
        RolloutError: there is no such environment.
    """

    def __init__(self, spec: EnvironmentSpec, identifier: str) -> None:
        gymnasium = import_library("gymnasium")
        # Names with a module or a namespace may be registered only while `make` imports the module.
        if "/" not in identifier and ":" not in identifier:
            _require_known(identifier, "gymnasium")
        environment = gymnasium.make(identifier, **spec.options)
        space = environment.action_space
        if type(space).__name__ == "Text":
            # The reply itself is the action.
            super().__init__(environment)
            return
        schema = json.dumps(space_schema(space))
        instructions = f"Reply with JSON that fits the schema {schema}, and nothing else."
        super().__init__(environment, lambda text: read_space(space, text), instructions)

    def observation_text(self, observation: Any, info: Mapping[str, Any]) -> str:
        if self.environment.render_mode != "ansi":
            return as_observation(observation)
        return _ESCAPE.sub("", str(self.environment.render())).strip()

    def sample_action(self, text: str, generator: random.Random) -> Action:
        space = self.environment.action_space
        space.seed(generator.randrange(2**31))
        sample = space.sample()
        return sample if isinstance(sample, str) else json.dumps(plain_value(sample))


def space_schema(space: Any) -> dict[str, Any]:
    """JSON schema of the actions of one of Gymnasium's spaces.

    Actions of other spaces than those below, such as `Box`, are arrays. The schema describes them
    by the text of the space.

    Args:
        space: the space.
    """
    # Names of classes, because comparing classes would need to import Gymnasium here.
    kind = type(space).__name__
    if kind == "Discrete":
        first = int(space.start)
        return {"type": "integer", "minimum": first, "maximum": first + int(space.n) - 1}
    if kind == "Dict":
        properties = {name: space_schema(part) for name, part in space.spaces.items()}
        return {"type": "object", "properties": properties, "required": [*properties]}
    if kind == "Tuple":
        return {"type": "array", "prefixItems": [space_schema(part) for part in space.spaces]}
    if kind == "Text":
        return {"type": "string"}
    return {"type": "array", "description": str(space)}


def read_space(space: Any, text: str) -> Any:
    """Read an action of one of Gymnasium's spaces.

    Args:
        space: the space.
        text: JSON.

    Raises:
        ValueError: the text is no JSON, or no action of the space.
    """
    value = read_json(text)
    try:
        action = _to_action(space, value)
    except (KeyError, TypeError, OverflowError, IndexError) as error:
        raise ValueError(f"got {text[:200]!r}, expected an action of {space}") from error
    if not space.contains(action):
        raise ValueError(f"got {text[:200]!r}, expected an action of {space}")
    return action


def read_json(text: str) -> Any:
    """Read JSON, which may be in a code block of Markdown.

    Raises:
        ValueError: the text is no JSON.
    """
    stripped = text.strip()
    if stripped.startswith("```"):
        stripped = stripped.strip("`").removeprefix("json").strip()
    try:
        return json.loads(stripped)
    except json.JSONDecodeError as error:
        raise ValueError(f"got {text[:200]!r}, expected JSON and nothing else") from error


def _to_action(space: Any, value: Any) -> Any:
    """Convert a JSON value to the type of the space's actions.

    The caller checks by `space.contains` whether the result is an action of the space.

    Args:
        space: a space of Gymnasium.
        value: the value.

    Raises:
        KeyError, TypeError, OverflowError, IndexError, ValueError: the value does not fit.
    """
    kind = type(space).__name__
    if kind == "Dict":
        return {name: _to_action(part, value[name]) for name, part in space.spaces.items()}
    if kind == "Tuple":
        pairs = zip(space.spaces, value, strict=True)
        return tuple(_to_action(part, entry) for part, entry in pairs)
    if kind in ("Discrete", "Text"):
        # A bool is an int for Python, and `contains` would take it.
        is_bool = isinstance(value, bool)
        if is_bool or (kind == "Discrete" and not isinstance(value, int)):
            raise TypeError(f"got {value!r}")
        return value
    numpy = importlib.import_module("numpy")
    return numpy.asarray(value, dtype=space.dtype).reshape(space.shape)


class SkyRLEnvironment(TextEnvironment):
    """Adapter of an environment of SkyRL Gym, which needs the rows of a data file.

    Args:
        spec: the environment; its options are the `env_config`.
        identifier: name of the environment.

    Raises:
        MachineError: SkyRL Gym is not installed.
        RolloutError: there is no such environment.
    """

    def __init__(self, spec: EnvironmentSpec, identifier: str) -> None:
        self._library = import_library("skyrl_gym")
        _require_known(identifier, "skyrl_gym")
        self._identifier = identifier
        self._options = dict(spec.options)

    def reset(self, seed: int, row: Mapping[str, Any]) -> Step:
        """Make the environment of the row, and begin its episode.

        Args:
            seed: seed of the episode.
            row: columns of the data row.

        Raises:
            RolloutError: there is no row.
        """
        if not row:
            raise RolloutError(
                f"environment skyrl_gym:{self._identifier}",
                got="an episode that is only a seed",
                expected="a row of a data file",
                fix="Set data.train_files; for `quadriga env try` data.val_files and --model.",
            )
        # SkyRL Gym calls the column `reward_model` "reward_spec".
        extras = {"reward_spec": row.get("reward_model"), **(row.get("extra_info") or {}), **row}
        self._environment = self._library.make(
            self._identifier, env_config=self._options, extras=extras
        )
        prompt = row.get("prompt") or []
        messages, info = self._environment.init(prompt)
        # `init` may return the prompt with new messages behind it. The conversation has the prompt
        # already.
        if messages[: len(prompt)] == prompt:
            messages = messages[len(prompt) :]
        return Step(_join_contents(messages), info=info or {})

    def step(self, action: Action) -> Step:
        result = self._environment.step(str(action))
        text = _join_contents(result["observations"])
        rewards = {0: result["reward"]}
        return Step(text, 0, rewards, bool(result["done"]), result.get("metadata") or {})

    def finish(self) -> Step:
        info = self._environment.get_metrics()
        self._environment.close()
        return Step(info=info)


def _join_contents(messages: Sequence[Mapping[str, Any]]) -> str:
    """Join the texts of messages by line breaks."""
    return "\n".join(str(message["content"]) for message in messages)
