# SPDX-License-Identifier: Apache-2.0
"""YAML in and out, with numbers and words as people mean them.

Scalars follow YAML 1.2: `1e-6` is a number, `yes`, `12:30` and `2026-01-31` are text. YAML 1.1, PyYAML's own rule,
reads them as text, true, 750 and a date.
"""

import re
from pathlib import Path
from typing import Any, ClassVar

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from quadriga.errors import ConfigError

# libyaml's bindings are ten times faster and not in every build of PyYAML.
_BaseLoader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_BaseDumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
_INT = re.compile(r"[-+]?[0-9][0-9_]*|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9][0-9_]*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")


class _Loader(_BaseLoader):
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {}


class _Dumper(_BaseDumper):
    # PyYAML's own rules stay, so that text which another reader takes for a date or a boolean is quoted.
    yaml_implicit_resolvers: ClassVar[dict[str, Any]] = {
        first: list(rules) for first, rules in _BaseDumper.yaml_implicit_resolvers.items()
    }

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_int(loader: Any, node: ScalarNode) -> int:
    text = loader.construct_scalar(node).replace("_", "")
    return int(text, 0) if text[:2] in ("0x", "0o") else int(text)


def _full(pattern: str) -> re.Pattern[str]:
    return re.compile(rf"(?:{pattern})$")


for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver("tag:yaml.org,2002:null", _full("~|null|Null|NULL|"), ["~", "n", "N", ""])
    _class.add_implicit_resolver("tag:yaml.org,2002:bool", _full("true|True|TRUE|false|False|FALSE"), list("tTfF"))
    _class.add_implicit_resolver("tag:yaml.org,2002:int", _full(_INT.pattern), list("-+0123456789"))
    _class.add_implicit_resolver("tag:yaml.org,2002:float", _full(_FLOAT.pattern), list("-+.0123456789"))
_Loader.add_implicit_resolver("tag:yaml.org,2002:merge", _full("<<"), ["<"])
_Loader.add_constructor("tag:yaml.org,2002:int", _construct_int)
_Dumper.add_representer(
    list, lambda dumper, value: dumper.represent_sequence("tag:yaml.org,2002:seq", value, flow_style=True)
)


def parse_scalar(text: str) -> Any:
    """The value that a piece of YAML stands for; raises `yaml.YAMLError`."""
    return yaml.load(text, _Loader)


def to_yaml(tree: Any) -> str:
    """YAML text, sections in blocks and lists on one line."""
    return yaml.dump(tree, Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=10_000)


def _place(path: Path, mark: Any) -> str:
    return f"{path}, line {mark.line + 1}"


def _walk(node: Node, key: str, path: Path, places: dict[str, str], problems: list[ConfigError]) -> None:
    """Notes where each key stands, and which stand there twice (PyYAML would let the last win unseen)."""
    if not isinstance(node, MappingNode):
        return
    seen: dict[str, Any] = {}
    for name, value in node.value:
        if not isinstance(name, ScalarNode) or name.tag == "tag:yaml.org,2002:merge":
            continue
        dotted = f"{key}.{name.value}" if key else name.value
        if name.value in seen:
            got = f"it twice, in lines {seen[name.value].line + 1} and {name.start_mark.line + 1}"
            problems.append(ConfigError(f"{dotted} ({path})", got=got, expected="it once", fix="Remove one of them."))
        seen[name.value] = name.start_mark
        places[dotted] = _place(path, name.start_mark)
        _walk(value, dotted, path, places, problems)


def read_yaml(path: Path, problems: list[ConfigError]) -> tuple[dict[str, Any], dict[str, str]]:
    """Reads one configuration file.

    Returns:
        Its tree, and for every dotted key the file and line it stands in. What is wrong is added to `problems`.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        got = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        problems.append(ConfigError(str(path), got=f"'{got}'", expected="a YAML file that can be read"))
        return {}, {}
    loader, places = _Loader(text), {}
    try:
        node = loader.get_single_node()
        if node is None:
            return {}, {}
        _walk(node, "", path, places, problems)
        tree = loader.construct_document(node)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
        what = " ".join(part for part in (getattr(error, "context", ""), getattr(error, "problem", "")) if part)
        where = _place(path, mark) if mark else str(path)
        problems.append(ConfigError(where, got=what or str(error), expected="YAML"))
        return {}, {}
    finally:
        loader.dispose()
    if not isinstance(tree, dict):
        problems.append(ConfigError(str(path), got=f"{tree!r}", expected="sections such as data, trainer"))
        return {}, {}
    return tree, places
