# SPDX-License-Identifier: Apache-2.0
"""A tool's schema is what its signature and docstring say; arguments that do not fit are refused in words."""

from typing import Annotated, Any, Literal

import pytest
from pydantic import BaseModel, Field

from quadriga.errors import RolloutError
from quadriga.rollout.agent_loop.tools import Tool, ToolError, ToolSpec, spec_of


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
    function = spec_of(forecast).schema["function"]
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
    assert spec_of(forecast).hidden == {"key"}


def test_arguments_come_in_their_types() -> None:
    """JSON becomes what the function takes; what was not given is left to its default."""
    checked = spec_of(forecast).check({"place": {"city": "Rome"}, "days": "3"})
    assert checked == {"place": Place(city="Rome"), "days": 3}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, "place: Field required"),
        ({"place": {"city": "Rome"}, "days": "many"}, "days: Input should be a valid integer"),
        ({"place": {"city": "Rome"}, "key": "x"}, "key: Extra inputs are not permitted"),
        ([1], "the arguments are of type array, not an object"),
    ],
)
def test_wrong_arguments_are_named(arguments: Any, expected: str) -> None:
    """The error names the argument and shows the schema."""
    with pytest.raises(ToolError, match="tool forecast: got ") as raised:
        spec_of(forecast).check(arguments)
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
        spec_of(function)
    assert function.__name__ in str(raised.value)
    assert __file__.rsplit("/", 1)[-1] in str(raised.value)


def test_a_foreign_schema_is_checked_at_the_top() -> None:
    """Of a server's schema: missing and unknown names, and types."""
    parameters = {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": ["string", "null"]}, "c": {}},
        "required": ["a"],
    }
    signature = ToolSpec(Tool, {"type": "function", "function": {"name": "f", "parameters": parameters}})
    assert signature.check({"a": 1, "b": None, "c": [1]}) == {"a": 1, "b": None, "c": [1]}
    for arguments, expected in (
        ({}, "a is missing"),
        ({"a": True}, "a is of type boolean, not number"),
        ({"a": 1, "b": 2}, "b is of type integer, not string or null"),
        ({"a": 1, "x": 2}, "x is not one of a, b, c"),
    ):
        with pytest.raises(ToolError, match=expected):
            signature.check(arguments)
