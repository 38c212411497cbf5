# SPDX-License-Identifier: Apache-2.0
"""One `a.b=c` of a command line: which key, which value."""

import re
from typing import Any

import yaml

from quadriga.config.base import Section
from quadriga.config.problems import as_text
from quadriga.config.root import Config
from quadriga.config.tree import leaf_of
from quadriga.config.yaml_text import parse_scalar
from quadriga.errors import ConfigError

# Hydra's + (a new key) and ++ (a key, new or not) are taken and mean nothing: every key is known.
_OVERRIDE = re.compile(r"\s*\+{0,2}(?P<key>[A-Za-z_][\w\-]*(?:\.[\w\-/]+)*)=(?P<value>.*)", re.DOTALL)
_NULLS = ("null", "Null", "NULL", "~")
_INTERPOLATION = re.compile(r"\$\{[^{}]*\}")


def parse_override(argument: str, root: type[Section] = Config) -> tuple[str, Any]:
    """Splits an override and reads its value as the key's type asks: text as it stands, the rest as YAML.

    Args:
        argument: `a.b=c`; a leading `+` or `++` is taken.
        root: the tree that the key is looked for in.

    Raises:
        ConfigError: it is not of the form `key=value`, or the value is not YAML.
    """
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
        raise _not_an_override(argument)
    key, text = match["key"], match["value"].strip()
    leaf = leaf_of(key, root)
    # A text may begin with a brace (a directory of "{project_name}"), unless a dictionary may stand in its place.
    is_quoted = text[:1] in ("[", "'", '"') or (text[:1] == "{" and leaf is not None and leaf.is_open)
    if leaf is not None and leaf.is_text and not (is_quoted or key != leaf.key):
        return key, None if text in _NULLS else text
    return key, _yaml_value(key, text, is_known=leaf is not None)


def _yaml_value(key: str, text: str, *, is_known: bool) -> Any:
    if text == "":
        return ""
    try:
        value = parse_scalar(text)
    except yaml.YAMLError as error:
        if not is_known:
            return text
        got = f"'{text}' ({getattr(error, 'problem', None) or error})"
        raise ConfigError(
            key, got=got, expected="a value in YAML", fix="Put text with special signs in quotes."
        ) from error
    if isinstance(value, dict) and any(":" in str(name) and inner is None for name, inner in value.items()):
        raise ConfigError(key, got=text, expected="a dictionary", fix="Write a space after the colon: {name: value}.")
    return value


def _not_an_override(argument: str) -> ConfigError:
    fix = "Write the key, an equals sign and the value, without spaces around the sign."
    if argument.startswith("~"):
        fix = "A key cannot be removed: leave it out, or set it to null."
    elif argument.startswith("-"):
        fix = "Keys are written without dashes; --config FILE stands before them."
    elif argument.endswith((".yaml", ".yml")):
        fix = f"To read a configuration file write --config {argument}."
    return ConfigError("command line", got=f"'{argument}'", expected="key=value", fix=fix)


def interpolation_problem(where: str, value: Any) -> ConfigError | None:
    """The error for a value that holds `${...}`, which nothing here fills in."""
    if isinstance(value, dict):
        inner = (interpolation_problem(f"{where}.{name}", one) for name, one in value.items())
        return next((problem for problem in inner if problem is not None), None)
    if isinstance(value, list):
        return next((problem for problem in (interpolation_problem(where, one) for one in value) if problem), None)
    if not isinstance(value, str) or not _INTERPOLATION.search(value):
        return None
    return ConfigError(
        where, got=as_text(value), expected="a value", fix="References are not filled in: write the value."
    )
