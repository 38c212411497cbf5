# SPDX-License-Identifier: Apache-2.0
"""The rows of rules.tsv, which say what becomes of verl's keys, and the functions that they name."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from quadriga.config.keys import leaf_of

Function = TypeVar("Function", bound=Callable[..., None])

FUNCTIONS: dict[str, Callable[..., None]] = {}
"""Functions that a row names by `@ NAME`; see `rule_function`."""

SECTIONS = {
    "<engine>": r"(actor_rollout_ref\.actor|actor_rollout_ref\.ref|critic(?:\.model)?|reward_model(?:\.model)?)",
    "<role>": r"(actor_rollout_ref\.(?:actor|ref|rollout|model)|actor_rollout_ref|critic|reward_model|reward)",
    "<rollout>": r"(actor_rollout_ref\.rollout)",
    "<model>": r"((?:actor_rollout_ref|critic)\.model)",
}
"""Names in angle brackets in the patterns of rules.tsv -> the sections that they stand for."""


class Rule(NamedTuple):
    """A row of rules.tsv; its head explains the columns."""

    pattern: re.Pattern[str]
    becomes: str  # ">", "@", "any", "note", "given", "stop", "unlike" or "values"
    argument: Any  # what follows in the column; the list of "values"
    sentence: str


def rule_function(function: Function) -> Function:
    """Decorator that makes a function available to rules.tsv as `@ NAME`.

    It is called as `function(line, key, value)`: the `Line` that is being translated, the key in
    the spelling of its row, and verl's value. `line.sentence` has the sentence of the row.
    """
    FUNCTIONS[function.__name__] = function
    return function


@cache
def rules_of(names: str) -> tuple[Rule, ...]:
    """The rows for a list of names, in order."""
    lines = Path(__file__).with_name("rules.tsv").read_text(encoding="utf-8").splitlines()
    own_names = set(names.split(","))
    rules = []
    for line in lines:
        if line.startswith("#"):
            continue
        trees, pattern, becomes, sentence = line.split("\t")
        if trees != "*" and own_names.isdisjoint(trees.split(",")):
            continue
        kind, _, argument = becomes.partition(" ")
        if becomes.startswith("["):
            kind = "values"
            argument = json.loads(becomes)
        rules.append(Rule(_compiled(pattern), kind, argument, sentence))
    return tuple(rules)


def _compiled(pattern: str) -> re.Pattern[str]:
    # All other characters stand for themselves.
    text = re.escape(pattern).replace(r"\*", "(.*)")
    for name, sections in SECTIONS.items():
        text = text.replace(re.escape(name), sections)
    return re.compile(text)


@cache
def find_rule(names: str, task: str, key: str) -> tuple[Rule, tuple[str, ...]] | None:
    """Find the row of a key.

    Args:
        names: the rows that hold, as for `rules_of`.
        task: the task whose keys are ours.
        key: the key.

    Returns:
        The row, and what its stars and names in angle brackets stand for; None without a row.
    """
    is_ours = leaf_of(key, task) is not None
    for rule in rules_of(names):
        # Rows that drop the keys of a pattern do not mean keys that exist here too.
        if rule.becomes == "unlike" or (is_ours and rule.becomes in ("any", "values")):
            continue
        match = rule.pattern.fullmatch(key)
        if match is not None:
            return rule, match.groups()
    return None
