# SPDX-License-Identifier: Apache-2.0
"""Classes of the user: public methods as tools, and reset with step."""

import random
from typing import Any

import pytest

from quadriga.errors import RolloutError
from quadriga.rollout.environments.interface import EnvironmentSpec
from quadriga.rollout.environments.user_classes import user_environment

SPEC = EnvironmentSpec("file.py:Class")


class Counter:
    """An environment in the form of TRL's documentation."""

    def __init__(self) -> None:
        self.reward = 0.0

    def reset(self, **row: Any) -> str | None:
        self.count = row.get("start", 0)
        return f"The counter is {self.count}."

    def increment(self, step: int) -> str:
        """
        Increment the counter.

        Args:
            step: How much to add.

        Returns:
            The counter.
        """
        if step > 3:
            raise ValueError("at most 3")
        self.count += step
        self.reward = float(self.count == 5)
        return f"{self.count}"

    def _reveal(self) -> None:
        """Be no tool."""


class Walk:
    """Reset and step, with three of Gymnasium's five values."""

    def reset(self, seed: int | None = None) -> Any:
        self.place = 0
        return {"place": 0}, {}

    def step(self, action: str) -> tuple[Any, float, bool]:
        self.place += 1
        return {"place": self.place}, 0.5, self.place == 2


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def test_public_methods_are_tools() -> None:
    environment = user_environment(Counter, SPEC)
    (schema,) = environment.schemas
    assert schema["function"]["name"] == "increment"
    assert schema["function"]["description"] == "Increment the counter."
    assert environment.reset(1, {"start": 1}).text == "The counter is 1."
    assert environment.step(call("increment", step=2)).text == "3"
    for refused, message in (
        (call("_reveal"), "Error: got the name '_reveal', expected one of increment"),
        (call("increment", step="x"), "Error: increment, step: Input should be a valid integer"),
        (call("increment", step=9), "Error: at most 3"),
    ):
        step = environment.step(refused)
        assert step.text.startswith(message)
        assert step.info == {"is_invalid": True}
    random_call = environment.sample_action("", random.Random(0))
    assert environment.step(random_call).text != ""
    assert random_call["name"] == "increment"
    environment.environment.count = 3
    environment.step(call("increment", step=2))
    assert environment.finish().rewards == {0: 1.0}


def test_observations_that_are_no_text_are_json_and_states() -> None:
    environment = user_environment(Walk, SPEC)
    first = environment.reset(1, {})
    assert (first.text, first.info) == ('{"place": 0}', {"state": '{"place": 0}'})
    environment.step("on")
    step = environment.step("on")
    assert (step.text, step.rewards, step.is_done) == ('{"place": 2}', {0: 0.5}, True)


def test_a_class_that_is_no_environment_is_refused() -> None:
    with pytest.raises(RolloutError, match="got a class without reset"):
        user_environment(object, SPEC)
    without_tools = type("Empty", (), {"reset": lambda self: None})
    with pytest.raises(RolloutError, match="got neither step nor a public method"):
        user_environment(without_tools, SPEC)
