# SPDX-License-Identifier: Apache-2.0
"""What every section of the configuration is made of: the base class, and what a check of it finds."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from quadriga.config.yaml_text import as_text
from quadriga.errors import ConfigError, MachineError

Finding = (
    ConfigError | str
)  # what a check yields: an error that keeps a training run from starting, or a notice


@dataclass(frozen=True)
class ReadIf:
    """Marks a field that is read only where another one of its section has one of some values, or none of them."""

    name: str
    values: tuple[Any, ...]
    is_one: bool = True


class Section(BaseModel):
    """A part of the tree: frozen, strict, without keys that it does not know."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def get(self, name: str, default: Any = None) -> Any:
        """The value of a field, for classes of users' that read a section like a mapping."""
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in type(self).model_fields

    def findings(self, at: str) -> Iterator[Finding]:
        """What a training run should be told about the values of this section alone, whose dotted key is `at`."""
        return iter(())

    def changed(self, at: str) -> list[str]:
        """Dotted keys of the fields that do not have their default; `at` is the section's own."""
        default = type(self)()
        return [f"{at}.{name}" for name, value in self if value != getattr(default, name)]

    def unread(self, at: str) -> Iterator[str]:
        """The notices about fields that were set and, marked by a `ReadIf`, are not read."""
        found: dict[str, list[str]] = {}
        for name, field in type(self).model_fields.items():
            for rule in field.metadata:
                if (
                    isinstance(rule, ReadIf)
                    and (getattr(self, rule.name) in rule.values) != rule.is_one
                ):
                    found.setdefault(rule.name, []).append(f"{at}.{name}")
        changed = self.changed(at) if found else []
        for name, keys in found.items():
            yield from unused(
                [key for key in keys if key in changed],
                f"{at}.{name} is {as_text(getattr(self, name))}",
            )


def refuse(expected: str, fix: str = "") -> PydanticCustomError:
    """The error that a validator raises; the loader adds the key, the value and where it stands."""
    return PydanticCustomError(
        "refused", "expected {expected}. {fix}", {"expected": expected, "fix": fix}
    )


wrong, absent = ConfigError, MachineError
"""The errors that a check yields: about a value, and about what this machine has not."""


def unused(names: list[str], because: str) -> Iterator[str]:
    """The notice about keys that were set and are not read; none without keys."""
    if names:
        yield f"{', '.join(names)}: not used, for {because}."


def filled(given: Any, defaults: Mapping[str, Any]) -> Any:
    """Adds keys that were not given, section by section; the result is validated like anything that the user wrote."""
    if not isinstance(given, Mapping):
        return given
    for name, value in defaults.items():
        inner = (
            filled(given.get(name, {}), value)
            if isinstance(value, Mapping)
            else given.get(name, value)
        )
        given = {**given, name: inner}
    return given
