# SPDX-License-Identifier: Apache-2.0
"""Rows of rules.tsv, which say what becomes of verl's keys, and the functions that they name."""

import json
import re
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple, TypeVar

from quadriga.config.keys import leaf_of
from quadriga_verl.commands.tables import read_rows

Function = TypeVar("Function", bound=Callable[..., None])

FUNCTIONS: dict[str, Callable[..., None]] = {}
"""Functions that rows name by `@ NAME`; see `rule_function`."""

SECTIONS = {
    "<engine>": r"(actor_rollout_ref\.actor|actor_rollout_ref\.ref|critic(?:\.model)?|reward_model(?:\.model)?)",
    "<role>": r"(actor_rollout_ref\.(?:actor|ref|rollout|model)|actor_rollout_ref|critic|reward_model|reward)",
    "<rollout>": r"(actor_rollout_ref\.rollout)",
    "<model>": r"((?:actor_rollout_ref|critic)\.model)",
}
"""Regular expressions for names in angle brackets, which patterns in rules.tsv contain."""


class Rule(NamedTuple):
    """A row of rules.tsv; its head explains the columns."""

    pattern: re.Pattern[str]
    becomes: str  # ">", "@", "any", "note", "given", "stop", "unlike" or "values"
    argument: Any  # what follows in the column, with JSON parsed; the list of "values"
    sentence: str  # "" if the row has none


def rule_function(function: Function) -> Function:
    """Decorator that makes a function available to rules.tsv as `@ NAME`.

    It is called as `function(line, key, value)`: the `Line` that is being translated, the key in
    the spelling of its row, and verl's value. `line.sentence` has the sentence of the row.
    """
    FUNCTIONS[function.__name__] = function
    return function


@cache
def rules_of(names: str) -> tuple[Rule, ...]:
    """Read the rows of a program.

    Args:
        names: `Entry.rules`. Rows that have none of these names are left out.

    Returns:
        The rows, in the order of the file.
    """
    own_names = set(names.split(","))
    rules = []
    for trees, pattern, becomes, sentence in read_rows("rules.tsv"):
        if trees != "*" and own_names.isdisjoint(trees.split(",")):
            continue
        # In a pattern, `*` and names in angle brackets are special.
        text = re.escape(pattern).replace(r"\*", "(.*)")
        for name, sections in SECTIONS.items():
            text = text.replace(re.escape(name), sections)
        kind, _, argument = becomes.partition(" ")
        if becomes.startswith("["):
            kind = "values"
            argument = becomes
        if kind in ("values", "stop", "unlike"):
            argument = json.loads(argument)
        rules.append(Rule(re.compile(text), kind, argument, sentence if sentence != "-" else ""))
    return tuple(rules)


@cache
def find_rule(names: str, task: str, key: str) -> Rule | None:
    """Find the first row that matches a key.

    Args:
        names: the program's names, as for `rules_of`.
        task: the task of the translation.
        key: the key of verl.

    Returns:
        The row; if it renames the key, its argument is the new name without placeholders. None: no
        row matches.
    """
    is_ours = leaf_of(key, task) is not None
    for rule in rules_of(names):
        # A row that drops all keys of a pattern does not apply to keys that exist here too.
        if rule.becomes == "unlike" or (is_ours and rule.becomes in ("any", "values")):
            continue
        match = rule.pattern.fullmatch(key)
        if match is None:
            continue
        if rule.becomes != ">":
            return rule
        name = rule.argument
        for part in match.groups():
            name = re.sub(r"\*|<\w+>", part, name, count=1)
        return rule._replace(argument=name)
    return None
