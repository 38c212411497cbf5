# SPDX-License-Identifier: Apache-2.0
"""verl's keys of a command line: defaults, with the user's values in their place."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quadriga.errors import ConfigError
from quadriga_verl.commands.entries import Entry
from quadriga_verl.commands.hydra import MISSING, VERSIONS, Tree, defaults, known_keys


def is_number(value: Any) -> bool:
    """Whether a value is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_same(value: Any, other_value: Any) -> bool:
    """Whether two values are equal; 1 and True are not."""
    has_same_kind = isinstance(value, bool) == isinstance(other_value, bool)
    return value == other_value and has_same_kind


def is_among(value: Any, accepted: Sequence[Any]) -> bool:
    """Whether a value is the same as one of the accepted values."""
    return any(is_same(value, accepted_value) for accepted_value in accepted)


@dataclass
class VerlKeys:
    """verl's keys of a command line.

    Attributes:
        entry: the program.
        tree: all keys with their values.
        default: verl's defaults of this program and version.
        from_user: keys of `tree` that the command line or a user's file sets.
        new: keys among them with Hydra's sign for a new key, or from a file. Hydra itself refuses
            other keys that it does not know.
    """

    entry: Entry
    tree: Tree = field(default_factory=Tree)
    default: dict[str, Any] = field(default_factory=dict)
    from_user: set[str] = field(default_factory=set)
    new: set[str] = field(default_factory=set)

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Value of a key, or `otherwise` if the key is missing, null or not yet set."""
        try:
            value = self.tree.resolved(key)
        except (KeyError, ConfigError):
            # A reference that cannot be resolved is reported when its own key is translated.
            return otherwise
        return otherwise if value is None or value == MISSING else value

    def leave_out(self, key: str) -> None:
        """Undo the user's setting of a key: it has verl's default again, or is gone."""
        if key in self.default:
            self.tree.values[key] = self.default[key]
        else:
            self.tree.drop(key)
        self.from_user.discard(key)
        self.new.discard(key)

    def is_changed(self, key: str) -> bool:
        """Whether the user gave a key another value than verl's default."""
        return key in self.from_user and not is_same(self.get(key), self.default_of(key))

    def default_of(self, key: str) -> Any:
        """verl's default of a key, of this version or of the nearest one that has the key."""
        if key in self.default:
            return self._with_references(key, self.default[key])
        if key not in known_keys():
            return None
        for tree in (self.entry.tree, "ppo_megatron"):
            for version in reversed(VERSIONS):
                values = defaults(tree, version)
                if key in values:
                    return self._with_references(key, values[key])
        return None

    def _with_references(self, key: str, value: Any) -> Any:
        """A value of a key with its references resolved."""
        return Tree(self.tree.values | {key: value}).resolved(key)
