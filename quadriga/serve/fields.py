# SPDX-License-Identifier: Apache-2.0
"""Reading JSON from a client: every field is checked, and every refusal names it."""

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

from quadriga.serve.errors import CallError, shown

_KINDS: dict[str, Callable[[Any], bool]] = {
    "a text": lambda value: isinstance(value, str),
    "a number": lambda value: type(value) in (int, float) and _is_finite(value),
    "an integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "true or false": lambda value: isinstance(value, bool),
    "a list": lambda value: isinstance(value, list),
    "an object": lambda value: isinstance(value, dict),
}


class Fields:
    """Fields of a JSON object.

    Args:
        values: the object.
        where: its place in the body, such as "messages[2]"; "" for the body itself.

    Raises:
        CallError: it is no object.
    """

    def __init__(self, values: Any, where: str = "") -> None:
        if not isinstance(values, dict):
            raise CallError(where or "body", got=shown(values), expected="an object")
        self.values: Mapping[str, Any] = values
        self._where = where

    def where(self, name: str) -> str:
        """Place of a field in the body."""
        return f"{self._where}.{name}" if self._where else name

    def get(self, name: str, kind: str, default: Any = None) -> Any:
        """Value of a field, or the default if it is missing or null.

        Raises:
            CallError: it is of another kind.
        """
        value = self.values.get(name)
        if value is None:
            return default
        self.require(name, value, kind)
        return value

    def need(self, name: str, kind: str) -> Any:
        """Value of a field that must be there.

        Raises:
            CallError: it is missing, null, or of another kind.
        """
        self.require(name, self.values.get(name), kind)
        return self.values[name]

    def require(self, name: str, value: Any, kind: str) -> None:
        """Check the kind of a value.

        Raises:
            CallError: it is of another kind.
        """
        if not _KINDS[kind](value):
            got = shown(value) if name in self.values else "nothing"
            raise CallError(self.where(name), got=got, expected=kind)

    def refuse(self, harmless: Mapping[str, tuple[tuple[Any, ...], str]]) -> None:
        """Refuse fields that would change the answer and are not supported.

        Args:
            harmless: for each field the values that change nothing, and what to do instead.

        Raises:
            CallError: a field has another value.
        """
        for name, (values, fix) in harmless.items():
            value = self.values.get(name)
            if value is not None and value not in values:
                expected = f"{values[0]!r}" if values else "nothing"
                raise CallError(self.where(name), got=shown(value), expected=expected, fix=fix)


def read_json(text: str | bytes, where: str = "body") -> Any:
    """Value of a JSON text.

    Args:
        text: the text.
        where: its place, for errors.

    Raises:
        CallError: it is not JSON, or has a text that cannot be encoded, such as half of a surrogate
            pair.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CallError(where, got=f"no JSON ({error})", expected="a JSON object") from error
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _is_finite(value: float) -> bool:
    """Whether a number fits into a float; an integer of JSON may have any length."""
    try:
        return math.isfinite(value)
    except OverflowError:
        return False
