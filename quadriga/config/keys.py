# SPDX-License-Identifier: Apache-2.0
"""Table of all keys, with type, default and meaning, and functions that search it.

Each task has a table of its own, with the keys that it reads in its spelling (`root.py`). The file
`key_aliases.tsv` has more words by which keys are found.
"""

import ast
import inspect
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from fnmatch import fnmatchcase
from functools import cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from textwrap import fill
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic import BaseModel

from quadriga.config.base import Section
from quadriga.config.root import READ, Config, spell_key, spell_text
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


@dataclass(frozen=True)
class KeyInfo:
    """A key of the configuration.

    Attributes:
        key: dotted key, in the task's spelling.
        kind: description of the values that the key accepts.
        default: default value.
        section: the section that holds the field.
        name: name of the field in its section.
        task: the task.
        is_open: whether users may add keys below it.
        is_text: whether a value on the command line is text as it is, not YAML.
    """

    key: str
    kind: str
    default: Any
    section: type[Section]
    name: str
    task: str
    is_open: bool
    is_text: bool

    @property
    def meaning(self) -> str:
        """Docstring of the field, with the task's spellings."""
        return spell_text(" ".join(_field_docstrings(self.section)[self.name].split()), self.task)


@cache
def _field_docstrings(section: type[Section]) -> dict[str, str]:
    """Read the docstrings below the fields of a section, by name of the field.

    They are read from the source on demand. Pydantic's own option would read all source files on
    import.
    """
    docstrings = {}
    for base in section.__bases__:
        if base is not BaseModel:
            docstrings |= _field_docstrings(base)
    (node,) = ast.parse(inspect.getsource(section)).body
    assert isinstance(node, ast.ClassDef)
    for field, below in pairwise(node.body):
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
            has_docstring = isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
            docstrings[field.target.id] = str(below.value.value) if has_docstring else ""
    return docstrings


def _describe_type(annotation: Any, metadata: Sequence[Any] = ()) -> tuple[str, set[Any]]:
    """Describe a type, such as "a whole number, at least 1, or null".

    Args:
        annotation: the type.
        metadata: constraints of the type, such as `Ge(1)`. A `Meaning` replaces the description.

    Returns:
        The description, and the plain types that a value may have, such as {int, NoneType}.
    """
    words, types_of_values = _describe_bare_type(annotation)
    limits = []
    for constraint in metadata:
        if isinstance(constraint, Meaning):
            return constraint.words, types_of_values
        if type(constraint) in _LIMITS:
            limits.append(_LIMITS[type(constraint)].format(constraint))
    if limits:
        words += f", {' and '.join(limits)}"
    return words, types_of_values


def _describe_bare_type(annotation: Any) -> tuple[str, set[Any]]:
    """Describe a type, as `_describe_type` does, for a type without constraints.

    Types inside it, such as those of a list, may have constraints (`Annotated`).
    """
    origin: Any = get_origin(annotation)
    arguments: tuple[Any, ...] = get_args(annotation)
    if origin is Annotated:
        return _describe_type(arguments[0], arguments[1:])
    if origin in (Union, types.UnionType):
        members = [_describe_type(argument) for argument in arguments]
        words = ", or ".join(member_words for member_words, _ in members)
        return words, set().union(*(member_types for _, member_types in members))
    if origin is Literal:
        words = ", ".join(map(str, arguments))
        if len(arguments) > 1:
            words = f"one of {words}"
        # The first choice decides whether a command line is read as text.
        return words, {type(arguments[0])}
    if origin in (list, tuple):
        count = f" of {len(arguments)}" if origin is tuple else ""
        return f"a list{count}, each {_describe_type(arguments[0])[0]}", {origin}
    if origin is dict:
        return "an open dictionary", {origin}
    return _WORDS[annotation], {annotation}


def _list_keys(section: Section, prefix: str, task: str) -> Iterator[KeyInfo]:
    """Yield the keys of a section and its sub-sections that a task reads.

    Args:
        section: the section, with defaults as values.
        prefix: dotted key of the section with a dot, or "".
        task: the task.
    """
    # A key is read if it matches a pattern and is not among the exceptions.
    patterns, unread_keys = READ[task]
    for name, field in type(section).model_fields.items():
        key = f"{prefix}{name}"
        value = getattr(section, name)
        if isinstance(value, Section):
            yield from _list_keys(value, f"{key}.", task)
        elif key not in unread_keys and any(fnmatchcase(key, pattern) for pattern in patterns):
            words, types_of_values = _describe_type(field.annotation, field.metadata)
            yield KeyInfo(
                key=spell_key(key, task),
                kind=words,
                default=value,
                section=type(section),
                name=name,
                task=task,
                is_open=dict in types_of_values,
                # If truth values and whole numbers are accepted as well, YAML tells them from text.
                is_text=str in types_of_values and types_of_values.isdisjoint((bool, int)),
            )


@cache
def leaf_keys(task: str = "rl") -> Mapping[str, KeyInfo]:
    """Keys that a task reads, by dotted key, in the order of the schema."""
    return {leaf.key: leaf for leaf in _list_keys(Config.model_validate({"task": task}), "", task)}


@cache
def section_keys(task: str = "rl") -> frozenset[str]:
    """Dotted keys of all sections of a task below the root: each beginning of a key up to a dot."""
    paths = [key.split(".") for key in leaf_keys(task)]
    return frozenset(".".join(path[:depth]) for path in paths for depth in range(1, len(path)))


def leaf_of(key: str, task: str = "rl") -> KeyInfo | None:
    """Find the key of the table that a dotted key belongs to.

    Args:
        key: the dotted key.
        task: the task.

    Returns:
        The key itself; or the open dictionary that the key is an entry of. That may be a section
        above the key, or `options` beside it. None: there is neither.
    """
    leaves = leaf_keys(task)
    if key in leaves:
        return leaves[key]
    # Sections above the key, then the key `options` beside it, which losses have.
    path = key.split(".")
    candidates = [".".join(path[:depth]) for depth in range(1, len(path))]
    candidates.append(".".join((*path[:-1], "options")))
    for candidate in candidates:
        if candidate in leaves and leaves[candidate].is_open:
            return leaves[candidate]
    return None


def nearest_keys(key: str, task: str = "rl") -> list[str]:
    """Find up to three keys that a misspelled key may stand for, most likely first."""
    known_keys = list(leaf_keys(task))
    alias_keys = [spell_key(alias_key, task) for alias_key in aliases().get(key, ())]
    # Keys of which the user left out the beginning, or for which another trainer has this name.
    exact = [known for known in known_keys if known.endswith(f".{key}") or known in alias_keys]
    # A correct name in the wrong section is more likely than a wrong name in the correct section.
    name = key.split(".")[-1]
    same_name = [known for known in known_keys if known.split(".")[-1] == name]
    in_other_sections = get_close_matches(key, same_name, n=3, cutoff=0.3)
    misspelled = get_close_matches(key, known_keys, n=3, cutoff=0.8)
    # The key may be an abbreviation, such as trainer.n_gpu.
    longer = [known for known in known_keys if "." in key and known.startswith(key)]
    return list(dict.fromkeys(exact + in_other_sections + misspelled + longer))[:3]


@cache
def aliases() -> Mapping[str, tuple[str, ...]]:
    """Read `key_aliases.tsv`.

    Returns:
        By term, a common one or a name in another trainer, the keys that it stands for. They may be
        patterns with `*`.
    """
    lines = Path(__file__).with_name("key_aliases.tsv").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return {word: tuple(keys.split()) for word, keys in rows}


def is_key_of_verl(key: str, task: str) -> bool:
    """Whether verl's program for a task has this key, or keys below it."""
    # The package is optional. Without it, such a key is reported as any unknown one.
    package = find_spec("quadriga_verl")
    if package is None or package.origin is None:
        return False
    program = "ppo" if task == "rl" else "sft"
    file = Path(package.origin).with_name("commands") / "defaults.tsv"
    for line in file.read_text(encoding="utf-8").splitlines():
        # A row is the names of programs with commas between, the dotted key, and its values, such as
        # `ppo,ppo_megatron`, `actor_rollout_ref.actor.ppo_epochs`, 1. The first program is enough: keys
        # that verl's programs for several tasks have exist here, too.
        row = line.split("\t")
        if row[0].startswith(program) and f"{row[1]}.".startswith(f"{key}."):
            return True
    return False


def keys_text(words: Sequence[str] = (), task: str = "rl") -> str:
    """Describe keys with type, default and meaning.

    Args:
        words: describe only keys whose name or meaning has all of these words, or that have the
            words together (`kv cache`) as an alias. Matches by name come first.
        task: the task.
    """
    lower_words = [word.lower() for word in words]
    patterns = aliases().get(" ".join(lower_words), ())
    by_name = []
    by_meaning = []
    for leaf in leaf_keys(task).values():
        is_alias = any(fnmatchcase(leaf.key, pattern) for pattern in patterns)
        if is_alias or all(word in leaf.key for word in lower_words):
            by_name.append(leaf)
        elif all(word in f"{leaf.key} {leaf.meaning}".lower() for word in lower_words):
            by_meaning.append(leaf)
    blocks = []
    for leaf in by_name + by_meaning:
        meaning = fill(leaf.meaning, 110, initial_indent="    ", subsequent_indent="    ")
        default = as_text(list(leaf.default) if isinstance(leaf.default, tuple) else leaf.default)
        blocks.append(f"{leaf.key} = {default}\n    {leaf.kind}\n{meaning}\n")
    return "\n".join(blocks)
