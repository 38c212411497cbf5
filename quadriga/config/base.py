# SPDX-License-Identifier: Apache-2.0
"""Base class of the configuration's sections, and the findings that their checks yield."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel, ConfigDict
from pydantic_core import PydanticCustomError

from quadriga.config.yaml_text import as_text
from quadriga.errors import ConfigError

# A check yields errors, which keep a training run from starting, and notices, which are texts.
Finding = ConfigError | str
Findings = Iterator[Finding]


@dataclass(frozen=True)
class ReadIf:
    """Marks a field that is read only for certain values of another field of its section.

    Attributes:
        name: the other field.
        values: values of the other field.
        is_listed: whether the field is read if the other field has one of these values. Otherwise
            it is read for all other values.
    """

    name: str
    values: tuple[Any, ...]
    is_listed: bool = True


class Section(BaseModel):
    """Base class of the sections of the configuration, which are immutable and have fixed keys."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    def get(self, name: str, default: Any = None) -> Any:
        """Value of a field, or the default if there is no such field.

        Like this method, `[]` and `in` let users' code read a section as a mapping.
        """
        return getattr(self, name, default)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise KeyError(name)
        return getattr(self, name)

    def __contains__(self, name: object) -> bool:
        return name in type(self).model_fields

    def findings(self, at: str) -> Findings:
        """Yield problems and notices about the values of this section.

        Args:
            at: dotted key of the section.
        """
        return iter(())

    def changed_keys(self, at: str) -> list[str]:
        """Dotted keys of the fields whose values differ from their defaults.

        A sub-section counts as one field. A field that was set to its default does not count.

        Args:
            at: dotted key of the section.
        """
        default = type(self)()
        return [f"{at}.{name}" for name, value in self if value != getattr(default, name)]

    def notice_unread(self, at: str) -> Iterator[str]:
        """Yield notices about changed fields that are not read according to their `ReadIf`.

        Args:
            at: dotted key of the section.
        """
        # Keys that are not read, by the name of the field whose value decides that.
        keys_by_condition: dict[str, list[str]] = {}
        for name, field in type(self).model_fields.items():
            for rule in field.metadata:
                if not isinstance(rule, ReadIf):
                    continue
                has_listed_value = getattr(self, rule.name) in rule.values
                is_read = has_listed_value == rule.is_listed
                if not is_read:
                    keys_by_condition.setdefault(rule.name, []).append(f"{at}.{name}")
        if not keys_by_condition:
            return  # most sections: comparing all fields with their defaults takes longer
        changed = self.changed_keys(at)
        for name, keys in keys_by_condition.items():
            unread_keys = [key for key in keys if key in changed]
            yield from notice_unused(unread_keys, f"{at}.{name} is {as_text(getattr(self, name))}")


def refuse(expected: str, fix: str = "") -> PydanticCustomError:
    """Make an error for a validator to raise. The loader adds the key, the value and its place.

    Args:
        expected: the values that are accepted.
        fix: how to correct the value.
    """
    return PydanticCustomError(
        "refused", "expected {expected}. {fix}", {"expected": expected, "fix": fix}
    )


def notice_unused(names: list[str], because: str) -> Iterator[str]:
    """Yield a notice that keys were set but are not read; nothing if there are no keys.

    Args:
        names: the dotted keys.
        because: the reason.
    """
    if names:
        yield f"{', '.join(names)}: not used because {because}."


def fill_preset(values: Any, presets: Mapping[str, Mapping[str, Any]]) -> Any:
    """Add the keys of a preset to a section's values; keys that are set themselves stay.

    Args:
        values: values of the section, of which `preset` names the preset. Without a known preset,
            they are returned as they are, for validation to refuse.
        presets: the keys of each preset with their values, by name of the preset.
    """
    preset = values.get("preset") if isinstance(values, dict) else None
    return fill_missing(values, presets.get(preset, {})) if isinstance(preset, str) else values


def fill_missing(tree: Any, defaults: Mapping[str, Any]) -> Any:
    """Add missing keys to a tree of values, section by section.

    Args:
        tree: the tree. If it is no mapping, it is returned as it is, for validation to refuse.
        defaults: values of missing keys, also as a tree.

    Returns:
        A new tree.
    """
    if not isinstance(tree, Mapping):
        return tree
    filled_tree = dict(tree)
    for name, default in defaults.items():
        if isinstance(default, Mapping):
            filled_tree[name] = fill_missing(filled_tree.get(name, {}), default)
        else:
            filled_tree.setdefault(name, default)
    return filled_tree
