# SPDX-License-Identifier: Apache-2.0
"""Checked access to JSON from clients. Every error names the field that is wrong."""

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from quadriga.serve.errors import CallError, format_value

# Types by kind of value.
_KINDS: dict[str, type | tuple[type, ...]] = {
    "a text": str,
    "a number": (int, float),
    "an integer": int,
    "true or false": bool,
    "a list": list,
    "an object": dict,
}


class Fields:
    """Fields of a JSON object, checked when they are read.

    A kind of value is one of the keys of `_KINDS`, such as "a text", which error messages show.

    Args:
        values: the object.
        where: place of the object in the body, such as "messages[2]"; "" for the body itself.

    Raises:
        CallError: `values` is no object.
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
            CallError: the value is of another kind.
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
            CallError: the value is missing, null, or of another kind.
        """
        self.require(name, self.values.get(name), kind)
        return self.values[name]

    def section(self, name: str, default: Mapping[str, Any] | None = None) -> "Fields":
        """Fields of an object within this one.

        Args:
            name: name of the field.
            default: the object if the field is missing or null. None: the field is required.

        Raises:
            CallError: the field is missing without a default, or is not an object.
        """
        if default is None:
            return Fields(self.need(name, "an object"), self.where(name))
        return Fields(self.get(name, "an object", default), self.where(name))

    def require(self, name: str, value: Any, kind: str) -> None:
        """Raise an error if a value is of another kind.

        Args:
            name: name of the field that has the value, or whose list has it.
            value: the value.
            kind: kind that the value must have.

        Raises:
            CallError: the value is of another kind.
        """
        is_right = isinstance(value, _KINDS[kind])
        if isinstance(value, bool):
            # For Python, True is an int; in JSON, it is no number.
            is_right = kind == "true or false"
        if is_right and kind == "a number":
            # An integer in JSON may be larger than any float.
            is_right = abs(value) <= sys.float_info.max
        if not is_right:
            raise CallError(
                self.where(name),
                got=format_value(value) if name in self.values else "nothing",
                expected=kind,
            )

    def refuse(self, unsupported: Mapping[str, Mapping[str, Sequence[Any]]]) -> None:
        """Refuse fields that are not supported, unless their values have no effect.

        Args:
            unsupported: for each advice to the client, the names of fields that it is for, with the
                values of a field that have no effect.

        Raises:
            CallError: a field has another value.
        """
        for fix, fields in unsupported.items():
            for name, values in fields.items():
                value = self.values.get(name)
                if value is not None and value not in values:
                    raise CallError(
                        self.where(name),
                        got=format_value(value),
                        expected=f"{values[0]!r}" if values else "nothing",
                        fix=fix,
                    )


def read_json(text: str | bytes, where: str = "body") -> Any:
    """Decode JSON.

    Args:
        text: the JSON.
        where: place of the JSON in the call, for errors.

    Raises:
        CallError: the text is not JSON, which has no NaN or Infinity; or it contains a text that
            cannot be encoded, such as half of a surrogate pair.
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant)
        # Tokenizers and replies need texts that can be encoded.
        json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise CallError(where, got=f"no JSON ({error})", expected="JSON") from error
    return value


def _refuse_constant(name: str) -> None:
    """Raise a ValueError for NaN or Infinity, which Python's decoder would accept."""
    raise ValueError(f"{name} is no JSON")
