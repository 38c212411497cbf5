# SPDX-License-Identifier: Apache-2.0
"""A schema seen as a tree of dotted keys: what each is called, takes, defaults to and means.

The schema is the tree of `quadriga train` unless a function is given the root of another one.
"""

import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from functools import cache
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, Lt, MinLen
from pydantic.fields import FieldInfo

from quadriga.config.base import Meaning, Section
from quadriga.config.root import Config

Path = tuple[str, ...]
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}


@dataclass(frozen=True)
class KeyInfo:
    """One leaf of the tree."""

    key: str
    kind: str
    """What it takes, in words."""
    default: Any
    meaning: str
    is_open: bool
    """Whether keys of the user's own may stand under it."""
    is_text: bool
    """Whether a value on the command line is text as it stands, not YAML."""


def _section_of(field: FieldInfo) -> type[Section] | None:
    annotation = field.annotation
    return annotation if isinstance(annotation, type) and issubclass(annotation, Section) else None


def _constraints(metadata: list[Any]) -> str:
    parts = []
    for one in metadata:
        if isinstance(one, FieldInfo):
            parts.append(_constraints(one.metadata))
        elif isinstance(one, Ge):
            parts.append(f"at least {one.ge}")
        elif isinstance(one, Gt):
            parts.append(f"above {one.gt}")
        elif isinstance(one, Le):
            parts.append(f"at most {one.le}")
        elif isinstance(one, Lt):
            parts.append(f"below {one.lt}")
        elif isinstance(one, MinLen):
            parts.append("not empty")
    return " and ".join(part for part in parts if part)


def _describe(annotation: Any, metadata: list[Any]) -> str:
    """The words for a type: "a whole number, at least 1, or null"."""
    for one in metadata:
        if isinstance(one, Meaning):
            return one.words
    origin: Any = get_origin(annotation)
    arguments: tuple[Any, ...] = get_args(annotation)
    if origin is Annotated:
        words = _describe(arguments[0], list(arguments[1:]))
    elif origin in (Union, types.UnionType):
        words = ", or ".join(_describe(one, []) for one in arguments)
    elif annotation is types.NoneType:
        words = "null"
    elif origin is Literal:
        words = f"one of {', '.join(arguments)}" if len(arguments) > 1 else "".join(arguments)
    elif origin is list:
        words = f"a list, each {_describe(arguments[0], [])}"
    elif origin is tuple:
        words = f"a list of {len(arguments)}, each {_describe(arguments[0], [])}"
    elif origin is dict:
        words = "an open dictionary"
    else:
        words = _WORDS[annotation]
    limits = _constraints(metadata)
    return f"{words}, {limits}" if limits else words


def _takes_text(annotation: Any) -> bool:
    if get_origin(annotation) is Literal:
        return True
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return any(_takes_text(one) for one in get_args(annotation))
    return annotation is str


def _takes_dictionary(annotation: Any) -> bool:
    if get_origin(annotation) in (Annotated, Union, types.UnionType):
        return any(_takes_dictionary(one) for one in get_args(annotation))
    return get_origin(annotation) is dict


def _leaves(section: type[Section], prefix: str) -> Iterator[KeyInfo]:
    for name, field in section.model_fields.items():
        key, inner = f"{prefix}{name}", _section_of(field)
        if inner is not None:
            yield from _leaves(inner, f"{key}.")
            continue
        yield KeyInfo(
            key=key,
            kind=_describe(field.annotation, field.metadata),
            default=field.get_default(call_default_factory=True),
            meaning=" ".join((field.description or "").split()),
            is_open=_takes_dictionary(field.annotation),
            is_text=_takes_text(field.annotation),
        )


@cache
def leaf_keys(root: type[Section] = Config) -> Mapping[str, KeyInfo]:
    """Every leaf by its dotted key, in the order of the schema."""
    return {leaf.key: leaf for leaf in _leaves(root, "")}


@cache
def section_keys(root: type[Section] = Config) -> frozenset[str]:
    """The dotted keys of the sections between the root and the leaves."""
    paths = [key.split(".") for key in leaf_keys(root)]
    return frozenset(".".join(path[:depth]) for path in paths for depth in range(1, len(path)))


def leaf_of(key: str, root: type[Section] = Config) -> KeyInfo | None:
    """The leaf that a dotted key is, or lies under when that leaf is an open dictionary.

    Beside an open dictionary called `options` its entries may stand without its name."""
    leaves = leaf_keys(root)
    if key in leaves:
        return leaves[key]
    path = key.split(".")
    above = (leaves.get(".".join(path[:depth])) for depth in range(1, len(path)))
    beside = leaves.get(".".join((*path[:-1], "options")))
    return next((leaf for leaf in (*above, beside) if leaf is not None and leaf.is_open), None)


def nearest_keys(key: str, root: type[Section] = Config) -> list[str]:
    """Up to three known keys that a mistyped one may have meant, the likeliest first.

    A right name in a wrong section is likelier than a wrong name in the right one.
    """
    known = list(leaf_keys(root))
    tail = [one for one in known if one.endswith(f".{key}")]
    close = get_close_matches(key, known, n=3, cutoff=0.8)
    moved = get_close_matches(key, [one for one in known if one.split(".")[-1] == key.split(".")[-1]], n=3, cutoff=0.3)
    return list(dict.fromkeys(tail + moved + close))[:3]
