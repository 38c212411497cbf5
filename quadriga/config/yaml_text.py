# SPDX-License-Identifier: Apache-2.0
"""Read and write YAML 1.2, with file and line in errors.

In YAML 1.2 `1e-6` is a number, and `yes`, `12:30` and `2026-01-31` are text. In YAML 1.1, which
PyYAML follows, the first is text, and the others are true, 750 and a date.
"""

import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from quadriga.errors import ConfigError
from quadriga.redact import redact

# libyaml's bindings are ten times faster, but not every build of PyYAML has them.
_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BaseDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_MERGE = "tag:yaml.org,2002:merge"
_INT = "tag:yaml.org,2002:int"
_FLOAT = r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)"
_SCALARS = {
    "tag:yaml.org,2002:null": (r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    "tag:yaml.org,2002:bool": (r"true|True|TRUE|false|False|FALSE", list("tTfF")),
    _INT: (r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+", list("-+0123456789")),
    "tag:yaml.org,2002:float": (_FLOAT, list("-+.0123456789")),
}
"""Pattern of plain scalars by tag, and their possible first characters."""


class _Loader(_BaseLoader):
    """Loader with the rules of YAML 1.2 for plain scalars (`_SCALARS`) in place of PyYAML's."""

    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}

    def construct_yaml_int(self, node: ScalarNode) -> int:
        """Read a whole number: decimal (also with leading zeros), hexadecimal or octal."""
        text = self.construct_scalar(node).replace("_", "")
        return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


class _Dumper(_BaseDumper):
    """Dumper whose text means the same in YAML 1.2 and YAML 1.1."""

    # PyYAML's own rules stay, so that text which YAML 1.1 would read as a date is quoted.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: list(rules) for first, rules in _BaseDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        """Return True: an object that occurs twice is written twice, without an anchor in YAML."""
        return True


for _class in (_Loader, _Dumper):
    for _tag, (_pattern, _firsts) in _SCALARS.items():
        _class.add_implicit_resolver(_tag, re.compile(rf"(?:{_pattern})$"), _firsts)
_Loader.add_implicit_resolver(_MERGE, re.compile("<<$"), ["<"])
_Loader.add_constructor(_INT, _Loader.construct_yaml_int)
_Dumper.add_representer(
    list,
    lambda dumper, value: dumper.represent_sequence(
        "tag:yaml.org,2002:seq", value, flow_style=True
    ),
)

parse_yaml = partial(yaml.load, Loader=_Loader)
"""Parse a text in YAML; raises `yaml.YAMLError`."""
to_yaml = partial(yaml.dump, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)
"""Write a value as YAML, with sections in blocks and lists on one line."""


def as_text(value: Any, name: str = "") -> str:
    """Format a value on one line, as a user would write it.

    Args:
        value: the value.
        name: its key. Secrets, which are recognized by their key or their form, are hidden.
    """
    value = redact(value, name)
    if isinstance(value, str):
        return f"'{value}'"
    # Formatted inside a list, because lists are written on one line. Its brackets are cut off.
    text = " ".join(to_yaml([value]).strip()[1:-1].split())
    return text if len(text) <= 120 else f"{text[:117]}..."


def combine_errors(problems: Sequence[ConfigError]) -> ConfigError:
    """Combine errors into one; a single error is returned unchanged."""
    if len(problems) == 1:
        return problems[0]
    lines = "\n".join(f"  {number}. {problem}" for number, problem in enumerate(problems, start=1))
    # ConfigError adds a full stop to `where`, here the whole text, which ends in one.
    return ConfigError(
        f"{len(problems)} things in the configuration are wrong:\n{lines}".removesuffix(".")
    )


def read_yaml(path: Path, problems: list[ConfigError]) -> tuple[dict[str, Any], dict[str, str]]:
    """Read a YAML file.

    Args:
        path: the file.
        problems: list to which problems are added.

    Returns:
        The tree, and file and line of each dotted key. Both are empty if the file is empty or
        cannot be read.
    """
    places = {}
    where = str(path)
    expected = "YAML"
    try:
        loader = _Loader(path.expanduser().read_text(encoding="utf-8"))
        try:
            node = loader.get_single_node()
            if node is None:
                return {}, {}
            _note_places(node, "", path, places, problems)
            tree = loader.construct_document(node)
        finally:
            loader.dispose()
        if isinstance(tree, dict):
            return tree, places
        got = repr(tree)
        expected = "sections such as data, trainer"
    except (OSError, UnicodeDecodeError) as error:
        got = f"'{getattr(error, 'strerror', None) or error}'"
        expected = "a readable YAML file"
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        if mark:
            where = f"{path}, line {mark.line + 1}"
        details = (getattr(error, "context", ""), getattr(error, "problem", ""))
        got = " ".join(filter(None, details)) or str(error)
    problems.append(ConfigError(where, got=got, expected=expected))
    return {}, {}


def _note_places(
    node: Node, key: str, path: Path, places: dict[str, str], problems: list[ConfigError]
) -> None:
    """Record the line of each key below a node, and report keys that occur twice.

    Of two equal keys PyYAML would use the last one in silence.

    Args:
        node: node of the parsed file.
        key: dotted key of the node; "" for the root.
        path: the file.
        places: dictionary to which file and line of each dotted key are added.
        problems: list to which keys that occur twice are added.
    """
    # Lines of the keys of this node.
    lines = {}
    for name, value in node.value if isinstance(node, MappingNode) else ():
        # The key `<<` merges other mappings into this one; it is no key of the configuration.
        if not isinstance(name, ScalarNode) or name.tag == _MERGE:
            continue
        dotted = f"{key}.{name.value}".lstrip(".")
        line = name.start_mark.line + 1
        if name.value in lines:
            got = f"it twice, in lines {lines[name.value]} and {line}"
            where = f"{dotted} ({path})"
            fix = "Remove one of them."
            problems.append(ConfigError(where, got=got, expected="it once", fix=fix))
        lines[name.value] = line
        places[dotted] = f"{path}, line {line}"
        _note_places(value, dotted, path, places, problems)
