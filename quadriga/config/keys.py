# SPDX-License-Identifier: Apache-2.0
"""The schema seen as a table of dotted keys: what each is called, takes, defaults to and means; search in it.

Each task has a table of its own: the keys that it reads, as it spells them (`root.py`). `key_aliases.tsv` has further
names by which keys are found.
"""

import ast
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel

from quadriga.config.base import Section
from quadriga.config.root import READ, Config, spelled, spelled_text
from quadriga.config.types import Meaning
from quadriga.config.yaml_text import as_text

_WORDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
}
_LIMITS = {
    Ge: "at least {0.ge}",
    Gt: "above {0.gt}",
    Le: "at most {0.le}",
    Lt: "below {0.lt}",
    MinLen: "not empty",
}
_VERL_KEYS = Path(__file__).parents[1] / "verl" / "defaults.tsv"


@dataclass(frozen=True)
class KeyInfo:
    """One leaf of the tree."""

    key: str
    kind: str  # what it takes, in words
    default: Any
    section: type[Section]
    name: str  # of the field in its section
    task: str
    is_open: bool  # whether keys of the user's own may stand under it
    is_text: bool  # whether a value on the command line is text as it stands, not YAML

    @property
    def meaning(self) -> str:
        """What the schema says below the field, with the task's spellings."""
        return spelled_text(" ".join(_notes(self.section)[self.name].split()), self.task)


@cache
def _notes(section: type[Section]) -> dict[str, str]:
    """The docstrings below the fields, read when they are asked for: pydantic reads them at each import."""
    above = {
        name: note
        for base in section.__bases__
        if base is not BaseModel
        for name, note in _notes(base).items()
    }
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    own = {}
    for field, below in pairwise(node.body):
        is_note = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            own[field.target.id] = str(below.value.value) if is_note else ""
    return above | own


def _described(annotation: Any, metadata: Sequence[Any] = ()) -> tuple[str, set[Any]]:
    """The words for a type, "a whole number, at least 1, or null", and the types that a value may have."""
    origin: Any = get_origin(annotation)
    arguments: tuple[Any, ...] = get_args(annotation)
    kinds = {origin or annotation}
    if origin is Annotated:
        words, kinds = _described(arguments[0], arguments[1:])
    elif origin in (Union, types.UnionType):
        parts = [_described(one) for one in arguments]
        words, kinds = (
            ", or ".join(words for words, _ in parts),
            set().union(*(one for _, one in parts)),
        )
    elif origin is Literal:
        one_of = "one of " if len(arguments) > 1 else ""
        words, kinds = f"{one_of}{', '.join(map(str, arguments))}", {type(arguments[0])}
    elif origin in (list, tuple):
        count = f" of {len(arguments)}" if origin is tuple else ""
        words = f"a list{count}, each {_described(arguments[0])[0]}"
    else:
        words = "an open dictionary" if origin is dict else _WORDS[annotation]
    limits = [_LIMITS[type(one)].format(one) for one in metadata if type(one) in _LIMITS]
    said = [one.words for one in metadata if isinstance(one, Meaning)]
    return said[0] if said else ", ".join(
        [words, *([" and ".join(limits)] if limits else [])]
    ), kinds


def _leaves(section: Section, prefix: str, task: str) -> Iterator[KeyInfo]:
    for name, field in type(section).model_fields.items():
        key, value = f"{prefix}{name}", getattr(section, name)
        if isinstance(value, Section):
            yield from _leaves(value, f"{key}.", task)
        elif any(fnmatchcase(key, one) for one in READ[task][0]) and key not in READ[task][1]:
            words, kinds = _described(field.annotation, field.metadata)
            yield KeyInfo(
                spelled(key, task),
                words,
                value,
                type(section),
                name,
                task,
                dict in kinds,
                str in kinds,
            )


@cache
def leaf_keys(task: str = "rl") -> Mapping[str, KeyInfo]:
    """Every key that a task reads, by its dotted name, in the order of the schema."""
    return {leaf.key: leaf for leaf in _leaves(Config.model_validate({"task": task}), "", task)}


@cache
def section_keys(task: str = "rl") -> frozenset[str]:
    """The dotted keys of the sections between the root and the leaves."""
    paths = [key.split(".") for key in leaf_keys(task)]
    return frozenset(".".join(path[:depth]) for path in paths for depth in range(1, len(path)))


def leaf_of(key: str, task: str = "rl") -> KeyInfo | None:
    """The leaf that a dotted key is, or lies under (beside, where it is called `options`) as an entry of its own."""
    leaves = leaf_keys(task)
    if key in leaves:
        return leaves[key]
    path = key.split(".")
    above = (leaves.get(".".join(path[:depth])) for depth in range(1, len(path)))
    beside = leaves.get(".".join((*path[:-1], "options")))
    return next((leaf for leaf in (*above, beside) if leaf is not None and leaf.is_open), None)


def nearest_keys(key: str, task: str = "rl") -> list[str]:
    """Up to three known keys that a mistyped one may have meant, the likeliest first."""
    # A right name in a wrong section is likelier than a wrong name in the right one.
    known = list(leaf_keys(task))
    meant = [spelled(own, task) for own in aliases().get(key, ())]
    tail = [one for one in known if one.endswith(f".{key}") or one in meant]
    close = get_close_matches(key, known, n=3, cutoff=0.8)
    moved = get_close_matches(
        key, [one for one in known if one.split(".")[-1] == key.split(".")[-1]], n=3, cutoff=0.3
    )
    return list(dict.fromkeys(tail + moved + close))[:3]


@cache
def aliases() -> Mapping[str, tuple[str, ...]]:
    """The field's words, and the names of other trainers -> patterns of the keys that they mean."""
    lines = Path(__file__).with_name("key_aliases.tsv").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return {word: tuple(keys.split()) for word, keys in rows}


def is_key_of_verl(key: str, task: str) -> bool:
    """Whether verl's program for a task has a leaf of this name, or one under it."""
    program = "ppo" if task == "rl" else "sft"
    rows = (line.split("\t") for line in _VERL_KEYS.read_text(encoding="utf-8").splitlines())
    return any(f"{row[1]}.".startswith(f"{key}.") for row in rows if row[0].startswith(program))


def keys_text(words: Sequence[str] = (), task: str = "rl") -> str:
    """Keys with what they take, their default and their meaning; those found by name come first.
    With `words` only keys that have each of them in their name or meaning, or their phrase (`kv cache`) as an alias."""
    wanted, patterns = [word.lower() for word in words], aliases().get(" ".join(words).lower(), ())
    named, others = [], []
    for leaf in leaf_keys(task).values():
        is_alias = any(fnmatchcase(leaf.key, one) for one in patterns)
        if is_alias or all(word in leaf.key for word in wanted):
            named.append(leaf)
        elif all(word in f"{leaf.key} {leaf.meaning}".lower() for word in wanted):
            others.append(leaf)
    blocks = []
    for leaf in named + others:
        meaning = fill(leaf.meaning, 110, initial_indent="    ", subsequent_indent="    ")
        default = as_text(list(leaf.default) if isinstance(leaf.default, tuple) else leaf.default)
        blocks.append(f"{leaf.key} = {default}\n    {leaf.kind}\n{meaning}\n")
    return "\n".join(blocks)
