# SPDX-License-Identifier: Apache-2.0
"""Base class of the configuration's sections, and the findings that their checks yield."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from quadriga.config.yaml_text import as_text
from quadriga.errors import ConfigError, MachineError

# A check yields errors, which keep a training run from starting, and notices.
Finding = ConfigError | str
Findings = Iterator[Finding]
wrong = ConfigError
"""Error that a check yields about a value."""
absent = MachineError
"""Error that a check yields about something this machine does not have."""


@dataclass(frozen=True)
class ReadIf:
    """Marks a field that is only read depending on the value of another field of its section.

    Attributes:
        name: the other field.
        values: values of the other field.
        is_one: whether the other field must have one of these values, or none of them.
    """

    name: str
    values: tuple[Any, ...]
    is_one: bool = True


class Section(BaseModel):
    """Part of the configuration tree. It cannot be changed and refuses unknown keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def get(self, name: str, default: Any = None) -> Any:
        """Value of a field. Users' classes may read a section like a mapping."""
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in type(self).model_fields

    def findings(self, at: str) -> Findings:
        """Problems and notices about the values of this section, whose dotted key is `at`."""
        return iter(())

    def changed(self, at: str) -> list[str]:
        """Dotted keys of the fields that differ from their defaults; `at` is the section's key."""
        default = type(self)()
        return [f"{at}.{name}" for name, value in self if value != getattr(default, name)]

    def unread(self, at: str) -> Iterator[str]:
        """Notices about changed fields that are not read, as a `ReadIf` says."""
        keys_by_condition: dict[str, list[str]] = {}
        for name, field in type(self).model_fields.items():
            for rule in field.metadata:
                if not isinstance(rule, ReadIf):
                    continue
                is_listed = getattr(self, rule.name) in rule.values
                if is_listed != rule.is_one:
                    keys_by_condition.setdefault(rule.name, []).append(f"{at}.{name}")
        if not keys_by_condition:
            return
        changed = self.changed(at)
        for name, keys in keys_by_condition.items():
            unread_keys = [key for key in keys if key in changed]
            yield from unused(unread_keys, f"{at}.{name} is {as_text(getattr(self, name))}")


def refuse(expected: str, fix: str = "") -> PydanticCustomError:
    """Error for a validator to raise. The loader adds the key, the value and its place."""
    return PydanticCustomError(
        "refused", "expected {expected}. {fix}", {"expected": expected, "fix": fix}
    )


def unused(names: list[str], because: str) -> Iterator[str]:
    """Notice that these keys were set but are not read; none if there are no keys."""
    if names:
        yield f"{', '.join(names)}: not used because {because}."


def filled(given: Any, defaults: Mapping[str, Any]) -> Any:
    """Add missing keys to a tree, section by section. The result is validated like user input."""
    if not isinstance(given, Mapping):
        return given
    tree = dict(given)
    for name, default in defaults.items():
        if isinstance(default, Mapping):
            tree[name] = filled(tree.get(name, {}), default)
        else:
            tree.setdefault(name, default)
    return tree
