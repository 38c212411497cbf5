# SPDX-License-Identifier: Apache-2.0
"""Adapters of environments that are users' classes, in one of two forms.

    class Countdown:                                          class Account:
        def reset(self, seed=None):                               def reset(self, **row):
            return "From 3 to 1, please."                             self.balance = row.get("balance", 0)
                                                                      return "Pay in until you have 5."
        def step(self, action):
            is_right = action.split() == ["3", "2", "1"]          def pay_in(self, amount: int) -> str:
            return "", float(is_right), True, False, {}               '''Pay in.'''
                                                                      self.balance += amount
                                                                      return f"You have {self.balance}."

                                                                  def get_reward(self):
                                                                      return float(self.balance == 5)

The left class has a method `step`, which takes the model's reply. The public methods of the right class are tools,
except for `reset`, `get_reward` and `close`. If a tool raises, the model reads the message of the exception.
"""

import inspect
import json
from collections.abc import Callable, Mapping
from numbers import Real
from typing import Any

from pydantic import BaseModel, ValidationError

from quadriga.errors import RolloutError, did_you_mean
from quadriga.rollout.agent_loop.tools import describe, faults_of
from quadriga.rollout.environments.interface import (
    Action,
    EnvironmentSpec,
    Step,
    TextEnvironment,
    plain_value,
)
from quadriga.user_file import accepted_arguments

_NO_TOOLS = frozenset({"reset", "get_reward", "close"})  # public methods that are no tools
_MAX_ERROR_CHARACTERS = 2000


def user_environment(user_class: type[Any], spec: EnvironmentSpec) -> TextEnvironment:
    """Make an object of a user's class, and the adapter for the form of the class.

    Args:
        user_class: a class with `reset`, and with `step` or with public methods as tools.
        spec: the environment; its options are arguments of the class.

    Raises:
        RolloutError: the class has no `reset`, or neither `step` nor a public method.
    """
    if not callable(getattr(user_class, "reset", None)):
        raise RolloutError(
            f"environment {spec.name}",
            got="a class without reset",
            expected="reset(self, **row), and step(self, action) or public methods as tools",
        )
    environment = user_class(**spec.options)
    if callable(getattr(user_class, "step", None)):
        return SteppedEnvironment(environment)
    return ToolEnvironment(environment, spec.name)


def as_observation(value: Any) -> str:
    """Convert an observation to text: None becomes "", other values than texts become JSON."""
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    return json.dumps(plain_value(value), ensure_ascii=False)


class SteppedEnvironment(TextEnvironment):
    """Adapter of an object with `reset(seed)` and `step(action)`, as in Gymnasium.

    `reset` returns an observation, or an observation and a dictionary. `step` returns observation,
    reward, terminated, truncated and info; four values without `truncated`, or the first three. With
    several agents `info["agent"]` is the number of the agent that acts next, and the reward may be
    a dictionary by agent.

    Args:
        environment: the object.
        read_action: converts a reply to the action that `step` takes. If it raises a ValueError,
            the model reads the message of the error. None: the reply is the action.
        instructions: text that the model reads after the first observation. "": none.
    """

    def __init__(
        self,
        environment: Any,
        read_action: Callable[[str], Any] | None = None,
        instructions: str = "",
    ) -> None:
        self.environment = environment
        self._read_action = read_action
        self._instructions = instructions
        self._agent = 0

    def reset(self, seed: int, row: Mapping[str, Any]) -> Step:
        """Call `reset` of the object with the seed and the columns of the row that it takes.

        Args:
            seed: seed of the episode.
            row: columns of the data row; empty if the row is only a seed.
        """
        reset = self.environment.reset
        result = reset(**accepted_arguments(reset, {**row, "seed": seed}))
        info = {}
        if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], Mapping):
            result, info = result
        text = self.observation_text(result, info)
        if self._instructions:
            text = f"{text}\n{self._instructions}".lstrip()
        self._agent = info.get("agent", 0)
        return Step(text, self._agent, info=self._add_state(info, result))

    def step(self, action: Action) -> Step:
        """Read the action from the reply, and call `step` of the object with it."""
        if self._read_action is not None:
            try:
                action = self._read_action(str(action))
            except ValueError as error:
                # A ValueError of `read_action` is the model's mistake. One of `step`, which is
                # called outside this block, is the environment's.
                return Step(f"Error: {error}", self._agent, info={"is_invalid": True})
        result = self.environment.step(action)
        observation, reward, is_done, info = _read_step(result)
        rewards = reward if isinstance(reward, Mapping) else {self._agent: reward}
        text = self.observation_text(observation, info)
        self._agent = info.get("agent", 0)
        return Step(text, self._agent, rewards, is_done, self._add_state(info, observation))

    def finish(self) -> Step:
        self.discard()
        return Step()

    def discard(self) -> None:
        _close(self.environment)

    def observation_text(self, observation: Any, info: Mapping[str, Any]) -> str:
        """Convert an observation to the text that the model reads.

        Args:
            observation: observation that `reset` or `step` returned.
            info: the info beside it, for subclasses.
        """
        return as_observation(observation)

    def _add_state(self, info: Mapping[str, Any], observation: Any) -> Mapping[str, Any]:
        """Add the observation to the info as "state", unless the info has a state.

        Without a "state", the text that the agent reads is the state. That is enough if the
        observation is a text. Otherwise the text may show it in another form, as when Gymnasium
        renders it.

        Args:
            info: the info of a step.
            observation: the observation beside it.
        """
        if "state" in info or observation is None or isinstance(observation, str):
            return info
        return {**info, "state": as_observation(observation)}


def _read_step(result: Any) -> tuple[Any, Any, bool, Mapping[str, Any]]:
    """Check what a user's `step` has returned, in any of its forms.

    Returns:
        Observation, reward, whether the episode is over, and info.

    Raises:
        ValueError: the result has none of the forms that `SteppedEnvironment` describes.
    """
    if not isinstance(result, tuple) or len(result) not in (3, 4, 5):
        shown = type(result).__name__
        if isinstance(result, tuple):
            shown = f"{len(result)} values"
        raise ValueError(
            f"step returned {shown}, expected (observation, reward, terminated, truncated, info)"
        )
    # Flags are `terminated` and perhaps `truncated`. Of more than three values, the last is info.
    observation, reward, *flags = result
    info = {}
    if len(result) > 3:
        info = flags.pop() or {}
    if not isinstance(info, Mapping):
        raise ValueError(f"step returned {type(info).__name__} as info, expected a dictionary")
    return observation, reward, any(map(bool, flags)), info


class ToolEnvironment(TextEnvironment):
    """Adapter of an object whose public methods are tools, as in TRL's `environment_factory`.

    The reward of the episode is the result of `get_reward()`, or else the attribute `reward`.

    Args:
        environment: the object.
        name: name of the environment, for errors.

    Raises:
        RolloutError: there is no public method, or one has no docstring or no type hints.
    """

    def __init__(self, environment: Any, name: str) -> None:
        self.environment = environment
        self._methods: dict[str, Callable[..., Any]] = {}
        self._validators: dict[str, Callable[[Any], BaseModel]] = {}
        schemas = []
        # Each public method is a tool. Its signature and docstring describe it to the model.
        for method_name, function in inspect.getmembers(type(environment), inspect.isfunction):
            if method_name.startswith("_") or method_name in _NO_TOOLS:
                continue
            schema, validate = describe(function)
            schemas.append(schema)
            self._validators[method_name] = validate
            self._methods[method_name] = getattr(environment, method_name)
        if not schemas:
            raise RolloutError(
                f"environment {name}",
                got="neither step nor a public method",
                expected="step(self, action), or public methods as tools",
            )
        self.schemas = schemas

    def reset(self, seed: int, row: Mapping[str, Any]) -> Step:
        reset = self.environment.reset
        result = reset(**accepted_arguments(reset, {**row, "seed": seed}))
        return Step(as_observation(result))

    def step(self, action: Action) -> Step:
        """Check the arguments of a call, and call the method that it names."""
        assert isinstance(action, dict), "an action of this environment is a call of a tool"
        name = action["name"]
        if name not in self._methods:
            known = ", ".join(self._methods)
            hint = did_you_mean(name, self._methods)
            return _refusal(f"got the name {name!r}, expected one of {known}. {hint}".rstrip())
        try:
            model = self._validators[name](action["arguments"])
        except ValidationError as error:
            return _refusal(f"{name}, {faults_of(error)[0]}")
        arguments = {field: getattr(model, field) for field in model.model_fields_set}
        try:
            result = self._methods[name](**arguments)
        except Exception as error:
            # In classes of this form, a tool raises to tell the model what was wrong.
            return _refusal(str(error) or type(error).__name__)
        return Step(as_observation(result))

    def finish(self) -> Step:
        """End the episode, whose reward is that of the object; None if the object has no reward."""
        get_reward = getattr(self.environment, "get_reward", None)
        reward: Any = getattr(self.environment, "reward", None)
        if callable(get_reward):
            reward = get_reward()
        elif not isinstance(reward, Real):
            reward = None
        self.discard()
        return Step(rewards={0: reward})

    def discard(self) -> None:
        _close(self.environment)


def _close(environment: Any) -> None:
    """Call the method `close` of a user's object, if there is one."""
    close = getattr(environment, "close", None)
    if callable(close):
        close()


def _refusal(reason: str) -> Step:
    """Make the response to a refused call, from which the model learns what was wrong."""
    return Step(f"Error: {reason[:_MAX_ERROR_CHARACTERS]}", info={"is_invalid": True})
