# SPDX-License-Identifier: Apache-2.0
"""What a rule about a key of verl's is, and the words that the tables of rules are written in.

Three kinds. A `note` is accepted: no value of the key changes a result. `only` accepts the values that say what is so
here anyway and refuses the others. `instead` refuses every value but null: another key decides.
In a pattern `*` stands for any part of a dotted key, and a name in angle brackets for several sections at once.
"""

from dataclasses import dataclass
from typing import Any

_ANY = object()

OFF = (False, None)
ONE = (1, None)
EMPTY = (None, "", [], {})

SECTIONS = {
    "<engine>": r"(?:actor_rollout_ref\.actor|actor_rollout_ref\.ref|critic(?:\.model)?|reward_model(?:\.model)?)",
    "<role>": r"(?:actor_rollout_ref\.(?:actor|ref|rollout|model)|actor_rollout_ref|critic|reward_model|reward)",
    "<rollout>": r"actor_rollout_ref\.rollout",
    "<model>": r"(?:actor_rollout_ref|critic)\.model",
}


@dataclass(frozen=True)
class Rule:
    """What happens to the keys of one pattern."""

    pattern: str
    accepted: tuple[Any, ...]
    """Values that are taken without effect."""
    sentence: str

    @property
    def is_note(self) -> bool:
        """Whether every value is taken."""
        return self.accepted == (_ANY,)

    def accepts(self, value: Any) -> bool:
        """Whether a value of such a key can be taken without changing what the user gets."""
        # 1 == True in Python; `use_x=1` and `size=True` are not the same wish.
        return self.is_note or any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.accepted
        )


def note(sentence: str, *patterns: str) -> list[Rule]:
    """Keys that are taken whatever their value."""
    return [Rule(pattern, (_ANY,), sentence) for pattern in patterns]


def only(accepted: tuple[Any, ...], sentence: str, *patterns: str) -> list[Rule]:
    """Keys that are taken with some values."""
    return [Rule(pattern, accepted, sentence) for pattern in patterns]


def instead(sentence: str, *patterns: str) -> list[Rule]:
    """Keys whose work another key does."""
    return only((None,), sentence, *patterns)
