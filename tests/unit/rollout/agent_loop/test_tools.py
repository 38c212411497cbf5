# SPDX-License-Identifier: Apache-2.0
"""A tool's schema is what its signature and docstring say; arguments that do not fit are refused in words."""

import json
from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from quadriga.errors import RolloutError
from quadriga.rollout.agent_loop.tools import Tool, ToolError, ToolSpec, function_spec, validator_of


class Place(BaseModel):
    """A place."""

    city: str


def forecast(
    place: Place,
    days: int = 1,
    unit: Literal["C", "F"] = "C",
    hours: Annotated[list[int] | None, Field(description="which hours")] = None,
    *,
    key: str = "",
) -> str:
    """The weather to come.

    It is never right.

    Args:
        place: where it is
            looked for.
        days (int): how many.

    Returns:
        A sentence.
    """
    return f"{place.city} {days} {unit} {hours} {key}"


def test_schema_says_what_the_function_says() -> None:
    """Types, defaults, choices and the words of the docstring; what is hidden and titles are left out."""
    function = function_spec(forecast).schema["function"]
    assert function["name"] == "forecast"
    assert function["description"] == "The weather to come.\n\nIt is never right."
    properties = function["parameters"]["properties"]
    assert list(properties) == ["place", "days", "unit", "hours"]
    assert properties["days"] == {"type": "integer", "default": 1, "description": "how many."}
    assert properties["unit"]["enum"] == ["C", "F"]
    assert properties["place"]["description"] == "where it is looked for."
    assert properties["hours"]["description"] == "which hours"
    assert function["parameters"]["required"] == ["place"]
    assert "title" not in str(function["parameters"])
    assert function_spec(forecast).options == {"execute_kwargs": {"key"}}


def test_arguments_come_in_their_types() -> None:
    """JSON becomes what the function takes; what was not given is left to its default."""
    checked = function_spec(forecast).check({"place": {"city": "Rome"}, "days": "3"})
    assert checked == {"place": Place(city="Rome"), "days": 3}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "place: Field required"),
        ({"place": {"city": "Rome"}, "days": "many"}, "days: Input should be a valid integer"),
        ({"place": {"city": "Rome"}, "key": "x"}, "key: Extra inputs are not permitted"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, expected: str) -> None:
    """The error names the argument and shows the schema."""
    with pytest.raises(ToolError, match="tool forecast: got ") as raised:
        function_spec(forecast).check(arguments)
    assert expected in str(raised.value)
    assert '"properties"' in str(raised.value)


def _undocumented(a: int) -> int:
    return a


def _untyped(a) -> int:
    """A."""
    return a


def _variadic(*a: int) -> int:
    """A."""
    return sum(a)


class Handle:
    """Something that JSON cannot express."""


def _odd(a: int, b: Handle) -> None:
    """A."""


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (_undocumented, "no docstring"),
        (_untyped, "a without a type hint"),
        (_variadic, r"\*a"),
        (_odd, "no JSON form"),
    ],
)
def test_functions_that_cannot_be_tools(function: Any, expected: str) -> None:
    """The error names the tool, its file and what is missing."""
    with pytest.raises(RolloutError, match=expected) as raised:
        function_spec(function)
    assert function.__name__ in str(raised.value)
    assert __file__.rsplit("/", 1)[-1] in str(raised.value)


def test_a_foreign_schema_is_checked_at_the_top() -> None:
    """Of a server's schema: missing and unknown names, and types; what fits is passed on as the model wrote it."""
    parameters = {
        "type": "object",
        "properties": {
            "a": {"type": "number"},
            "b": {"type": ["string", "null"]},
            "_c-d": {},
            "n": {"type": "integer"},
        },
        "required": ["a"],
    }
    schema = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    spec = ToolSpec(Tool, schema, validator_of(parameters), {})
    fitting = {"a": 1, "b": None, "_c-d": [1], "n": 3}
    assert json.dumps(spec.check(fitting)) == json.dumps(fitting)
    for arguments, expected in (
        ({}, "a: Field required"),
        ({"a": True}, "a: Input should be a valid number"),
        ({"a": "1"}, "a: Input should be a valid number"),
        ({"a": 1, "b": 2}, "b: Input should be a valid string"),
        ({"a": 1, "n": 3.5}, "n: Input should be a valid integer"),
        ({"a": 1, "x": 2}, "x: Extra inputs are not permitted"),
    ):
        with pytest.raises(ToolError, match=expected):
            spec.check(arguments)
    assert validator_of({**parameters, "additionalProperties": True})({"a": 1, "x": 2})
    assert validator_of({"type": "object"})({"x": 2})
