# SPDX-License-Identifier: Apache-2.0
"""Hydra's words: `key=value`, `+key`, `++key`, `~key`, configuration files with `defaults`, `${...}` references."""

import json
import os
import re
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from quadriga.config.yaml_text import as_text, read_yaml
from quadriga.errors import ConfigError

VERSIONS = ("0.5.0", "0.6.1", "0.8.0", "0.10.0")
"""Versions of verl whose defaults are known; the last one is taken where none is named."""
MISSING = "???"  # Hydra's word for a value that has to be given
_WORD = re.compile(
    r"(?P<sign>~|\+{0,2})(?P<key>[A-Za-z_][\w./@:\-]*)(?:=(?P<value>.*))?", re.DOTALL
)
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_NUMBER = re.compile(r"[-+]?(\d[\d_]*)?(\.\d*)?(e[-+]?\d+)?", re.IGNORECASE)
_CONSTANTS = {"null": None, "true": True, "false": False}
_STRUCTURED = re.compile(r"""[\[\]{},'"\\]""")  # signs of a value that is more than a word
_OPAQUE = re.compile(r"[=$]")  # what Hydra takes in a word and OmegaConf does not, or would fill in
_HIDDEN = re.compile(r"@reference(\d+)@")


class Word(NamedTuple):
    """One word of a command line: its sign (+, ++, ~ or none), the key, and the value, read."""

    sign: str
    key: str
    value: Any


def parse_word(argument: str) -> Word:
    """Reads `key=value` by Hydra's rules; ConfigError says what is wrong."""
    match = _WORD.fullmatch(argument.strip())
    if match is None or (match["value"] is None and match["sign"] != "~"):
        fix = "Write key=value, without spaces around the sign."
        raise ConfigError("command line", got=f"'{argument}'", expected="key=value", fix=fix)
    key, text = match["key"], match["value"] or ""
    if re.search(r"\$[A-Za-z_]", text):
        fix = "The shell has not filled it in: run the script, or write the value."
        raise ConfigError(key, got=f"'{text}', a variable of a shell", expected="a value", fix=fix)
    return Word(match["sign"], key, parse_value(text, key))


def parse_value(text: str, key: str = "value") -> Any:
    """The value that Hydra reads from a text: quoted text, a list, a dictionary, a number, true, false, null, text.
    Its grammar is that of OmegaConf's `oc.decode`; references stay as they are written."""
    references = list[str]()

    def hidden(found: re.Match[str]) -> str:
        references.append(found[0])
        return f"@reference{len(references) - 1}@"

    def shown(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(name): shown(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return list(map(shown, value))
        return (
            _HIDDEN.sub(lambda at: shown(references[int(at[1])]), value)
            if isinstance(value, str)
            else value
        )

    one = text.strip()
    for signs in (_REFERENCE, _OPAQUE):
        while signs.search(one):
            one = signs.sub(hidden, one)
    if not _STRUCTURED.search(one):
        return shown(plain(one))
    # Only lists, dictionaries and quoted text need it; every command reads this module.
    import omegaconf

    try:
        tree = omegaconf.OmegaConf.create({"text": one, "value": "${oc.decode:${text}}"})
        return shown(omegaconf.OmegaConf.to_container(tree, resolve=True)["value"])
    except omegaconf.errors.OmegaConfBaseException as error:
        got = f"{as_text(text, key)}: {str(error.__cause__ or error).partition(chr(10))[0]}"
        fix = "Put text with special signs in quotes, and a list in brackets; a sweep over several values is not run."
        raise ConfigError(key, got=got, expected="one value", fix=fix) from error


def plain(text: str) -> Any:
    """What a text without quotes means."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if text and text[-1] not in "._" and _NUMBER.fullmatch(text) and re.search(r"\d", text):
        return float(text) if re.search(r"[.eE]", text) else int(text)
    return float(text) if text.endswith(".") and text[:-1].isdigit() else text


class Tree:
    """Leaves by their dotted key. References in values are filled in when a value is asked for."""

    def __init__(self, values: dict[str, Any] | None = None) -> None:
        self.values = dict(values or {})

    def put(self, key: str, value: Any) -> None:
        """Sets a leaf, or the leaves of a dictionary, in place of what stood there; a dictionary is merged."""
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                self.put(f"{key}.{name}" if key else str(name), inner)
            return
        if value != {}:
            self.drop(key)
        path = key.split(".")
        for depth in range(1, len(path)):
            self.values.pop(".".join(path[:depth]), None)
        if value != {} or not self.below(key):
            self.values[key] = value

    def drop(self, key: str) -> None:
        for one in [key, *self.below(key)]:
            self.values.pop(one, None)

    def below(self, key: str) -> list[str]:
        return [one for one in self.values if one.startswith(f"{key}.")]

    def resolved(self, key: str, above: tuple[str, ...] = ()) -> Any:
        """The value of a leaf, or the dictionary of a section, with references filled in; KeyError: there is none."""
        if key in above:
            got = " -> ".join((*above[above.index(key) :], key))
            raise ConfigError(
                key,
                got=f"references in a circle, {got}",
                expected="a value",
                fix="Write the value.",
            )
        if key in self.values:
            return self._filled(self.values[key], key, (*above, key))
        if not (leaves := self.below(key)):
            raise KeyError(key)
        section = Tree()
        for leaf in leaves:
            section.put(leaf[len(key) + 1 :], self.resolved(leaf, above))
        return section.nested()

    def nested(self) -> dict[str, Any]:
        """The leaves as dictionaries in dictionaries."""
        root: dict[str, Any] = {}
        for key, value in self.values.items():
            *path, last = key.split(".")
            node = root
            for name in path:
                node = node.setdefault(name, {})
            node[last] = value
        return root

    def _filled(self, value: Any, key: str, above: tuple[str, ...]) -> Any:
        if isinstance(value, list):
            return [self._filled(one, key, above) for one in value]
        while isinstance(value, str) and (match := _REFERENCE.search(value)):
            found = self._referred(match[1].strip(), key, above)
            if match[0] == value:
                return found
            value = f"{value[: match.start()]}{found}{value[match.end() :]}"
        return value

    def _referred(self, name: str, key: str, above: tuple[str, ...]) -> Any:
        kind, is_function, arguments = name.partition(":")
        target, has_default, default = (
            part.strip() for part in (arguments if is_function else name).partition(",")
        )
        if kind == "oc.env" and (target in os.environ or has_default):
            return plain(os.environ.get(target, default))
        if is_function and kind != "oc.select":
            got, fix = (
                f"${{{name}}}",
                "Write the value: of functions oc.select and oc.env are filled in.",
            )
            raise ConfigError(key, got=got, expected="a reference that can be filled in", fix=fix)
        if target.startswith("."):
            dots = len(target) - len(target.lstrip("."))
            target = ".".join((*key.split(".")[:-dots], target.lstrip(".")))
        try:
            return self.resolved(target, above)
        except KeyError:
            if is_function:
                return parse_value(default, key) if has_default else None
            fix = "Write the value, or name a key that there is; a variable of a shell is filled in by the shell."
            raise ConfigError(
                key, got=f"${{{name}}}", expected="a key that there is", fix=fix
            ) from None


@cache
def _rows() -> list[tuple[list[str], str, list[str]]]:
    lines = Path(__file__).with_name("defaults.tsv").read_text(encoding="utf-8").splitlines()
    rows = (line.split("\t") for line in lines if not line.startswith("#"))
    return [(trees.split(","), key, cells) for trees, key, *cells in rows]


@cache
def defaults(tree: str, version: str) -> dict[str, Any]:
    """verl's default leaves of a tree in a version; keys that it has not are absent."""
    found: dict[str, Any] = {}
    for trees, key, cells in _rows():
        if tree in trees:
            at = VERSIONS.index(version)
            while cells[at] == "^":
                at -= 1
            if cells[at] != "-":
                found[key] = json.loads(cells[at])
    if found or tree not in {one for trees, _, _ in _rows() for one in trees}:
        return found
    # A tree that a version has not is taken from the one before; the first one's from the next.
    return defaults(tree, VERSIONS[VERSIONS.index(version) - 1 if version != VERSIONS[0] else 1])


@cache
def known_keys() -> frozenset[str]:
    """Every leaf of every tree and version."""
    return frozenset(key for _, key, _ in _rows())


def read_config(path: Path, base: dict[str, dict[str, Any]], problems: list[ConfigError]) -> Tree:
    """A user's YAML file with what its `defaults` name: files beside it or on its search path, or trees of verl's.
    `base`: verl's trees by the names of their files."""
    own, _ = read_yaml(path, problems)
    tree, entries = Tree(), own.get("defaults") or []
    named = [
        str(one)
        for one in (own.get("hydra") or {}).get("searchpath") or []
        if not str(one).startswith("pkg://")
    ]
    folders = [path.parent, *(Path(one.removeprefix("file://")) for one in named)]
    for entry in entries if "_self_" in entries else [*entries, "_self_"]:
        if entry == "_self_":
            tree.put(
                "",
                {name: value for name, value in own.items() if name not in ("defaults", "hydra")},
            )
            continue
        group, name = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
        group, _, package = (
            str(group).removeprefix("override ").removeprefix("optional ").partition("@")
        )
        for leaf, value in _named(str(name), group, package, folders, base, problems, str(path)):
            tree.put(leaf, value)
    return tree


def _named(
    name: str, group: str, package: str, folders: Sequence[Path], base: dict[str, dict[str, Any]],
    problems: list[ConfigError], where: str,
) -> Iterator[tuple[str, Any]]:  # fmt: skip
    """The leaves that one entry of a `defaults` list brings."""
    place, stem = package or group.replace("/", "."), name.removesuffix(".yaml")
    prefix = f"{place}." if place and place != "_global_" else ""
    file = next((one for at in folders if (one := at / group / f"{stem}.yaml").is_file()), None)
    if file is not None:
        for key, value in read_config(file, base, problems).values.items():
            yield prefix + key, value
    elif not group and stem in base:
        yield from base[stem].items()
    elif group and package:
        # A part of verl's own tree, by the place that it has there.
        yield from ((key, value) for key, value in base[""].items() if key.startswith(prefix))
    elif stem not in ("null", "None"):
        fix = "Write it beside this file, or name its folder in hydra.searchpath."
        problems.append(
            ConfigError(
                f"{where}: defaults", got=f"'{name}'", expected="a file that exists", fix=fix
            )
        )
