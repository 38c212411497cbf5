# SPDX-License-Identifier: Apache-2.0
"""verl's keys that have no field here: what becomes of each, or what to set instead.

The table is `verl_keys.tsv`; the head of that file says what its columns are.
"""

import json
import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

SECTIONS = {
    "<engine>": r"(?:actor_rollout_ref\.actor|actor_rollout_ref\.ref|critic(?:\.model)?|reward_model(?:\.model)?)",
    "<role>": r"(?:actor_rollout_ref\.(?:actor|ref|rollout|model)|actor_rollout_ref|critic|reward_model|reward)",
    "<rollout>": r"actor_rollout_ref\.rollout",
    "<model>": r"(?:actor_rollout_ref|critic)\.model",
}
"""What the names in angle brackets stand for in a pattern."""


@dataclass(frozen=True)
class Rule:
    """What becomes of the keys that fit one pattern."""

    pattern: re.Pattern[str]
    accepted: list[Any] | None
    """Values that are taken without effect; None: every value is."""
    sentence: str

    def accepts(self, value: Any) -> bool:
        """Whether a value of such a key can be taken without changing what the user gets."""
        # 1 == True in Python; `use_x=1` and `size=True` are not the same wish.
        return self.accepted is None or any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.accepted
        )


@cache
def rules() -> tuple[Rule, ...]:
    """The table, read on first use: many command lines never need it."""
    found = []
    lines = Path(__file__).with_name("verl_keys.tsv").read_text(encoding="utf-8").splitlines()
    for line in [one for one in lines if not one.startswith("#")][1:]:
        pattern, accepted, sentence = line.split("\t")
        text = re.escape(pattern).replace(r"\*", ".*")
        for name, alternatives in SECTIONS.items():
            text = text.replace(re.escape(name), alternatives)
        found.append(Rule(re.compile(text), None if accepted == "any" else json.loads(accepted), sentence))
    return tuple(found)


def rule_for(key: str) -> Rule | None:
    """The first rule whose pattern fits a dotted key without a field, if any."""
    return next((rule for rule in rules() if rule.pattern.fullmatch(key)), None)
