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
    """A row of rules.tsv, whose head explains the columns.

    Attributes:
        key: the column `pattern` as it is written. Rows of the kind "unlike" have a plain key there.
        pattern: the same as a regular expression.
        becomes: kind of the row, the first word of the column `becomes`: ">", "@", "any", "note",
            "given", "stop" or "unlike"; or "values" if the column is a list.
        argument: the rest of that column, with JSON parsed: a key (">"), the name of a function
            ("@"), accepted values ("stop", "values"), or accepted values by key ("unlike").
        sentence: the column `sentence`; "" if the row has none.
    """

    key: str
    pattern: re.Pattern[str]
    becomes: str
    argument: Any
    sentence: str


def rule_function(function: Function) -> Function:
    """Decorator that makes a function available to rules.tsv as `@ NAME`.

    The function is called as `function(line, key, value)` with the `Line` that is being translated,
    the key (its new name if a row has renamed it) and verl's value. `line.sentence` is the sentence
    of the row.
    """
    FUNCTIONS[function.__name__] = function
    return function


@cache
def rules_of(names: tuple[str, ...]) -> tuple[Rule, ...]:
    """Read the rows of a program.

    Args:
        names: `Line.rule_names`. Rows for other names are left out.

    Returns:
        The rows, in the order of the file.
    """
    rules = []
    for row_names, pattern, becomes, sentence in read_rows("rules.tsv"):
        if row_names != "*" and set(names).isdisjoint(row_names.split(",")):
            continue
        # In a pattern, `*` and names in angle brackets are special; all else stands for itself.
        text = re.escape(pattern).replace(r"\*", "(.*)")
        for name, sections in SECTIONS.items():
            text = text.replace(re.escape(name), sections)
        kind, _, argument = becomes.partition(" ")
        if becomes.startswith("["):
            kind = "values"
            argument = becomes
        if kind in ("values", "stop", "unlike"):
            argument = json.loads(argument)
        if sentence == "-":
            sentence = ""
        rules.append(Rule(pattern, re.compile(text), kind, argument, sentence))
    return tuple(rules)


@cache
def find_rule(names: tuple[str, ...], task: str, key: str) -> Rule | None:
    """Find the row that says what becomes of a key: the first that matches.

    Args:
        names: names by which rows address the program (`Line.rule_names`). Other rows are ignored.
        task: "rl" or "sft"; decides which keys exist here.
        key: the key of verl.

    Returns:
        The row. If it renames the key, `argument` is the new name, with the parts of `key` in place
        of `*` and `<NAME>`. None: no row matches.
    """
    is_ours = leaf_of(key, task) is not None
    for rule in rules_of(names):
        # Rows of the kind "unlike" only add notices, see `translate`. Rows "any" and "values" drop a
        # key, so they do not apply to keys that exist here too.
        if rule.becomes == "unlike" or (is_ours and rule.becomes in ("any", "values")):
            continue
        match = rule.pattern.fullmatch(key)
        if match is None:
            continue
        if rule.becomes != ">":
            return rule
        new_key = rule.argument
        for part in match.groups():
            new_key = re.sub(r"\*|<\w+>", part, new_key, count=1)
        return rule._replace(argument=new_key)
    return None
