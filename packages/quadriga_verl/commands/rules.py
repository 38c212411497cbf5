# SPDX-License-Identifier: Apache-2.0
"""Rows of rules.tsv, which say what becomes of verl's keys, and the functions that they name."""

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from quadriga.config.keys import leaf_of

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
    """Read the rows of a program.

    Args:
        names: `Entry.rules`. Rows that have none of these names are left out.

    Returns:
        The rows, in the order of the file.
    """
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
        rules.append(Rule(_compile_pattern(pattern), kind, argument, sentence))
    return tuple(rules)


def _compile_pattern(pattern: str) -> re.Pattern[str]:
    """Compile a pattern of rules.tsv, whose special parts are `*` and names in angle brackets."""
    text = re.escape(pattern).replace(r"\*", "(.*)")
    for name, sections in SECTIONS.items():
        text = text.replace(re.escape(name), sections)
    return re.compile(text)


@cache
def find_rule(names: str, task: str, key: str) -> tuple[Rule, tuple[str, ...]] | None:
    """Find the first row that matches a key.

    Args:
        names: the program's names, as for `rules_of`.
        task: the task of the translation.
        key: the key of verl.

    Returns:
        The row, and the text that matches each star and name in angle brackets. None: no row
        matches.
    """
    is_ours = leaf_of(key, task) is not None
    for rule in rules_of(names):
        # A row that drops all keys of a pattern does not apply to keys that exist here too.
        if rule.becomes == "unlike" or (is_ours and rule.becomes in ("any", "values")):
            continue
        match = rule.pattern.fullmatch(key)
        if match is not None:
            return rule, match.groups()
    return None
