# SPDX-License-Identifier: Apache-2.0
"""verl's keys and their values, for a command line: defaults, replaced by the user's values."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from quadriga.errors import ConfigError
from quadriga_verl.commands.entries import Entry
from quadriga_verl.commands.hydra import MISSING, VERSIONS, Tree, verl_defaults


def is_number(value: Any) -> bool:
    """Whether a value is a number; booleans are not."""
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_same(value: Any, other_value: Any) -> bool:
    """Whether two values are equal. Unlike in Python, 1 and True are different."""
    has_same_kind = isinstance(value, bool) == isinstance(other_value, bool)
    return value == other_value and has_same_kind


def is_among(value: Any, accepted: Sequence[Any]) -> bool:
    """Whether a value is the same as one of the accepted values."""
    return any(is_same(value, accepted_value) for accepted_value in accepted)


@dataclass
class VerlKeys:
    """verl's keys and their values, for a command line.

    Attributes:
        entry: the program.
        tree: all keys with their values.
        default: verl's defaults of this program and version.
        from_user: keys of `tree` that the command line or a user's file sets.
        new: keys in `from_user` that verl need not know, because they have Hydra's sign for a new key
            (`+` or `++`) or are from a file. Hydra refuses any other unknown key.
    """

    entry: Entry
    tree: Tree = field(default_factory=Tree)
    default: dict[str, Any] = field(default_factory=dict)
    from_user: set[str] = field(default_factory=set)
    new: set[str] = field(default_factory=set)

    def get(self, key: str, otherwise: Any = None) -> Any:
        """Value of a key, with references resolved.

        Args:
            key: the key.
            otherwise: value to return if the key is missing, null, or `MISSING`.
        """
        try:
            value = self.tree.resolve(key)
        except (KeyError, ConfigError):
            # A reference that cannot be resolved is reported when its own key is translated.
            return otherwise
        return otherwise if value is None or value == MISSING else value

    def unset(self, key: str) -> None:
        """Undo the user's setting of a key: restore verl's default, or remove a key without default."""
        if key in self.default:
            self.tree.values[key] = self.default[key]
        else:
            self.tree.drop(key)
        self.from_user.discard(key)
        self.new.discard(key)

    def is_changed(self, key: str) -> bool:
        """Whether the user has set a key to another value than verl's default."""
        return key in self.from_user and not is_same(self.get(key), self.default_of(key))

    def default_of(self, key: str) -> Any:
        """verl's default of a key, with references resolved.

        If this version does not have the key, return the default of the latest version that has it.
        None: no version has the key.
        """
        defaults = [self.default]
        # A user may also set keys of the Megatron trainers in a line of the others.
        for tree in (self.entry.tree, "ppo_megatron"):
            defaults += [verl_defaults(tree, version) for version in reversed(VERSIONS)]
        for values in defaults:
            if key in values:
                return Tree(self.tree.values | {key: values[key]}).resolve(key)
        return None
