# SPDX-License-Identifier: Apache-2.0
"""Checked access to JSON from clients. Every error names the field that is wrong."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from quadriga.serve.errors import CallError, format_value

# For Python True is an int, but it is no number in JSON.
_KINDS: dict[str, Callable[[Any], bool]] = {
    "a text": lambda value: isinstance(value, str),
    "a number": lambda value: type(value) in (int, float) and _is_finite(value),
    "an integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "true or false": lambda value: isinstance(value, bool),
    "a list": lambda value: isinstance(value, list),
    "an object": lambda value: isinstance(value, dict),
}


class Fields:
    """Fields of a JSON object, checked when they are read.

    A kind of value is one of the keys of `_KINDS`, such as "a text", which error messages show.

    Args:
        values: the object.
        where: its place in the body, such as "messages[2]"; "" for the body itself.

    Raises:
        CallError: it is no object.
    """

    def __init__(self, values: Any, where: str = "") -> None:
        if not isinstance(values, dict):
            raise CallError(where or "body", got=format_value(values), expected="an object")
        self.values: Mapping[str, Any] = values
        self._where = where

    def where(self, name: str) -> str:
        """Place of a field in the body, for errors."""
        return f"{self._where}.{name}" if self._where else name

    def get(self, name: str, kind: str, default: Any = None) -> Any:
        """Value of an optional field.

        Args:
            name: name of the field.
            kind: kind that the value must have.
            default: value to return if the field is missing or null.

        Raises:
            CallError: it is of another kind.
        """
        value = self.values.get(name)
        if value is None:
            return default
        self.require(name, value, kind)
        return value

    def need(self, name: str, kind: str) -> Any:
        """Value of a required field.

        Args:
            name: name of the field.
            kind: kind that the value must have.

        Raises:
            CallError: it is missing, null, or of another kind.
        """
        self.require(name, self.values.get(name), kind)
        return self.values[name]

    def require(self, name: str, value: Any, kind: str) -> None:
        """Check the kind of a value.

        Args:
            name: name of the field that has the value.
            value: the value.
            kind: kind that it must have.

        Raises:
            CallError: it is of another kind.
        """
        if not _KINDS[kind](value):
            got = format_value(value) if name in self.values else "nothing"
            raise CallError(self.where(name), got=got, expected=kind)

    def refuse(self, harmless: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
        """Refuse fields that are not supported, unless their values have no effect.

        Args:
            harmless: for each unsupported field the values without effect, and advice.

        Raises:
            CallError: a field has another value.
        """
        for name, (values, fix) in harmless.items():
            value = self.values.get(name)
            if value is not None and value not in values:
                expected = f"{values[0]!r}" if values else "nothing"
                raise CallError(
                    self.where(name), got=format_value(value), expected=expected, fix=fix
                )


def read_json(text: str | bytes, where: str = "body") -> Any:
    """Decode JSON.

    Args:
        text: the JSON.
        where: its place in the call, for errors.

    Raises:
        CallError: it is not JSON, or has a text that cannot be encoded, such as half of a surrogate
            pair.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # Tokenizers and answers need texts that can be encoded.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CallError(where, got=f"no JSON ({error})", expected="a JSON object") from error
    return value


def _refuse_constant(name: str) -> None:
    """Raise a ValueError for NaN or Infinity, which Python's decoder would take."""
    raise ValueError(f"{name} is no JSON")


def _is_finite(value: float) -> bool:
    """Whether a number fits into a float. An integer in JSON may have any number of digits."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
