# SPDX-License-Identifier: Apache-2.0
"""Read Hydra's command lines and configuration files, and the defaults of verl's programs.

key=value, +key=value, ++key=value, ~key    `parse_word`
defaults: [...] in a YAML file              `read_config`
${key}, ${oc.env:NAME}, ${oc.select:key}    `Tree.resolve`
verl's own configuration of a version       `verl_defaults`, from defaults.tsv
"""

import json
import os
import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from quadriga.config.yaml_text import as_text, read_yaml
from quadriga.errors import ConfigError
from quadriga_verl.commands.tables import read_rows

VERSIONS = ("0.5.0", "0.6.1", "0.8.0", "0.10.0")
"""Versions of verl whose defaults are known. The last one is the default."""
MISSING = "???"  # Hydra's mark for a value that the user must set
Values: TypeAlias = dict[str, Any]
"""Values by key."""

_WORD = re.compile(
    r"(?P<sign>~|\+{0,2})(?P<key>[A-Za-z_][\w./@:\-]*)(?:=(?P<value>.*))?", re.DOTALL
)
_REFERENCE = re.compile(r"\$\{([^${}]*)\}")
_NUMBER = re.compile(r"[-+]?(\d(_?\d)*\.?\d*|\.\d+)(e[-+]?\d+)?", re.IGNORECASE)
_CONSTANTS = {"null": None, "true": True, "false": False}
# Characters that occur only in a value that is a list, a dictionary or quoted text.
_STRUCTURED = re.compile(r"""[\[\]{},'"\\]""")
# Characters that Hydra allows in plain text, but OmegaConf refuses or interprets.
_OPAQUE = re.compile(r"[=$]")
_PLACEHOLDER = re.compile(r"@hidden(\d+)@")


# ---- words of a command line --------------------------------------------------------------------


class Word(NamedTuple):
    """A parsed word of a command line."""

    sign: str  # "+", "++", "~" or ""
    key: str
    value: Any


def parse_word(argument: str) -> Word:
    """Parse `key=value`, with or without a sign in front, or `~key`, by Hydra's rules.

    Raises:
        ConfigError: the word has another form, or its value cannot be parsed.
    """
    match = _WORD.fullmatch(argument.strip())
    if match is None or (match["value"] is None and match["sign"] != "~"):
        raise ConfigError(
            "command line",
            got=f"'{argument}'",
            expected="key=value",
            fix="Write key=value, without spaces around the sign.",
        )
    key = match["key"]
    text = match["value"] or ""
    if re.search(r"\$[A-Za-z_]", text):
        raise ConfigError(
            key,
            got=f"'{text}', a variable of a shell",
            expected="a value",
            fix="The shell has not filled it in: run the script, or write the value.",
        )
    return Word(match["sign"], key, parse_value(text, key))


def parse_value(text: str, key: str = "value") -> Any:
    """Parse a value by Hydra's grammar, which is that of OmegaConf's `oc.decode`.

    Args:
        text: quoted or plain text, a list, a dictionary, a number, true, false or null. References
            (`${...}`) are not resolved.
        key: the key to name in an error.

    Returns:
        The value.

    Raises:
        ConfigError: the text is not a value.
    """
    # References, and the signs "=" and "$", are replaced by placeholders while OmegaConf parses the
    # text: it would resolve the references, and refuse the signs.
    hidden = []

    def hide(match: re.Match[str]) -> str:
        """Store the matched text in `hidden`, and return the placeholder `@hiddenNUMBER@`."""
        hidden.append(match[0])
        return f"@hidden{len(hidden) - 1}@"

    def restore(value: Any) -> Any:
        """Replace placeholders by the hidden texts, at any depth of a value.

        Keys of dictionaries become texts, as all parts of a dotted key are.
        """
        if isinstance(value, dict):
            return {restore(str(name)): restore(inner) for name, inner in value.items()}
        if isinstance(value, list):
            return [restore(inner) for inner in value]
        if isinstance(value, str):
            # A hidden text may itself contain placeholders, as in `${a.${b}}`.
            return _PLACEHOLDER.sub(lambda match: restore(hidden[int(match[1])]), value)
        return value

    encoded = text.strip()
    for pattern in (_REFERENCE, _OPAQUE):
        while pattern.search(encoded):
            encoded = pattern.sub(hide, encoded)
    if not _STRUCTURED.search(encoded):
        return restore(parse_plain(encoded))

    # Imported here, because most command lines have no lists, dictionaries or quotes.
    import omegaconf

    try:
        tree = omegaconf.OmegaConf.create({"text": encoded, "value": "${oc.decode:${text}}"})
        decoded = omegaconf.OmegaConf.to_container(tree, resolve=True)
    except omegaconf.errors.OmegaConfBaseException as error:
        reason = str(error.__cause__ or error).partition("\n")[0]
        raise ConfigError(
            key,
            got=f"{as_text(text, key)}: {reason}",
            expected="one value",
            fix="Put text with special signs in quotes, and a list in brackets; a sweep over several "
            "values is not run.",
        ) from error
    return restore(decoded["value"])


def parse_plain(text: str) -> Any:
    """Convert text without quotes to its value: a constant, a number, or the text itself."""
    if text.lower() in _CONSTANTS:
        return _CONSTANTS[text.lower()]
    if _NUMBER.fullmatch(text):
        return float(text) if re.search(r"[.eE]", text) else int(text)
    return text


# ---- trees of keys ------------------------------------------------------------------------------


class Tree:
    """Values by dotted key. References are resolved when a value is read."""

    def __init__(self, values: Values | None = None) -> None:
        self.values = dict(values or {})

    def put(self, key: str, value: Any) -> None:
        """Set a key.

        Args:
            key: the key; "" for the root.
            value: the value. A dictionary is merged into the section; an empty one only makes sure
                that the section exists.
        """
        if isinstance(value, dict) and value:
            for name, inner in value.items():
                self.put(f"{key}.{name}" if key else str(name), inner)
            return

        is_empty_section = value == {}
        if not is_empty_section:
            self.drop(key)
        # A key above this one becomes a section, so it loses its own value.
        names = key.split(".")
        for depth in range(1, len(names)):
            self.values.pop(".".join(names[:depth]), None)
        if not is_empty_section or not self.keys_below(key):
            self.values[key] = value

    def drop(self, key: str) -> None:
        """Remove a key and all keys below it."""
        for name in (key, *self.keys_below(key)):
            self.values.pop(name, None)

    def keys_below(self, key: str) -> list[str]:
        """Keys below a section, at any depth."""
        prefix = f"{key}."
        return [name for name in self.values if name.startswith(prefix)]

    def resolve(self, key: str, above: tuple[str, ...] = ()) -> Any:
        """Value of a key, or dictionary of a section, with references resolved.

        Args:
            key: the key.
            above: keys whose references led to this key, the outermost first.

        Raises:
            KeyError: there is no such key.
            ConfigError: a reference cannot be resolved.
        """
        if key in above:
            circle = " -> ".join((*above[above.index(key) :], key))
            raise ConfigError(
                key,
                got=f"circular references, {circle}",
                expected="a value",
                fix="Write the value.",
            )
        if key in self.values:
            return self._resolve_references(self.values[key], key, (*above, key))
        # The key is a section: resolve what is below it.
        leaves = self.keys_below(key)
        if not leaves:
            raise KeyError(key)
        section = Tree()
        for leaf in leaves:
            section.put(leaf.removeprefix(f"{key}."), self.resolve(leaf, above))
        return section.to_nested()

    def to_nested(self) -> Values:
        """The values as nested dictionaries."""
        root = {}
        for key, value in self.values.items():
            *path, last = key.split(".")
            node = root
            for name in path:
                node = node.setdefault(name, {})
            node[last] = value
        return root

    def _resolve_references(self, value: Any, key: str, above: tuple[str, ...]) -> Any:
        """Resolve the references in the value of a key.

        Args:
            value: the value. Text may contain several references.
            key: the key.
            above: see `resolve`, with `key` as the last one.
        """
        if isinstance(value, list):
            return [self._resolve_references(element, key, above) for element in value]
        # Of nested references, the pattern finds the innermost one.
        while isinstance(value, str):
            match = _REFERENCE.search(value)
            if match is None:
                break
            target = self._resolve_reference(match[1].strip(), key, above)
            if match[0] == value:
                # A value that is one reference has the type of its target.
                return target
            value = f"{value[: match.start()]}{target}{value[match.end() :]}"
        return value

    def _resolve_reference(self, reference: str, key: str, above: tuple[str, ...]) -> Any:
        """Value of a reference.

        Args:
            reference: text between `${` and `}`: KEY, `oc.select:KEY,DEFAULT` or
                `oc.env:NAME,DEFAULT`.
            key: the key whose value has the reference.
            above: see `resolve`.

        Raises:
            ConfigError: it cannot be resolved.
        """
        # Split `FUNCTION:TARGET,DEFAULT`. A reference without function has only the target.
        function, is_function, arguments = reference.partition(":")
        inner = arguments if is_function else reference
        target, has_default, default = inner.partition(",")
        target = target.strip()
        default = default.strip()

        if function == "oc.env" and (target in os.environ or has_default):
            return parse_plain(os.environ.get(target, default))
        if is_function and function != "oc.select":
            raise ConfigError(
                key,
                got=f"${{{reference}}}",
                expected="a reference that can be filled in",
                fix="Write the value, or set the environment variable that oc.env names. Of the "
                "functions, only oc.select and oc.env are filled in.",
            )
        if target.startswith("."):
            # One dot means the section of the key, each further dot a section above.
            name = target.lstrip(".")
            num_dots = len(target) - len(name)
            target = ".".join((*key.split(".")[:-num_dots], name))
        try:
            return self.resolve(target, above)
        except KeyError:
            # `oc.select:KEY` without DEFAULT is null if there is no such key.
            if is_function:
                return parse_value(default, key) if has_default else None
            raise ConfigError(
                key,
                got=f"${{{reference}}}",
                expected="a key that there is",
                fix="Write the value, or name a key that there is. If it is a variable of the shell, let "
                "the shell fill it in.",
            ) from None


# ---- verl's defaults ----------------------------------------------------------------------------


@cache
def _read_defaults() -> dict[tuple[str, str], Values]:
    """Read defaults.tsv.

    Returns:
        The defaults by key, for each (tree, version). A version without the tree has no entry.
    """
    defaults: dict[tuple[str, str], Values] = defaultdict(dict)
    for trees, key, *cells in read_rows("defaults.tsv"):
        # A cell per version: JSON, "^" for the cell to the left, "-" for no such key.
        default = "-"
        for version, cell in zip(VERSIONS, cells, strict=True):
            if cell != "^":
                default = cell
            if default != "-":
                value = json.loads(default)
                for tree in trees.split(","):
                    defaults[tree, version][key] = value
    return dict(defaults)


def verl_defaults(tree: str, version: str) -> Values:
    """verl's defaults, by key.

    Args:
        tree: name of the configuration, as in defaults.tsv.
        version: one of `VERSIONS`. If it does not have the tree, the defaults are those of the
            nearest version before that has it, or else of the next one.

    Returns:
        The defaults; empty if no version has the tree.
    """
    defaults = _read_defaults()
    position = VERSIONS.index(version)
    for known_version in (*reversed(VERSIONS[: position + 1]), *VERSIONS[position + 1 :]):
        if (tree, known_version) in defaults:
            return defaults[tree, known_version]
    return {}


@cache
def known_keys() -> frozenset[str]:
    """The keys of all trees and versions."""
    return frozenset(chain.from_iterable(_read_defaults().values()))


# ---- configuration files ------------------------------------------------------------------------


def read_config(path: Path, base: dict[str, Values], problems: list[ConfigError]) -> Tree:
    """Read a user's YAML file, and the files or trees in its `defaults` list.

    Args:
        path: the file.
        base: verl's defaults by name of verl's configuration file. The entry "" has the defaults of
            the program.
        problems: list to which problems are added.

    Returns:
        The settings. Later entries of the `defaults` list replace earlier ones.
    """
    content, _ = read_yaml(path, problems)
    entries = content.get("defaults") or []
    # The entry `_self_` is the file's own content, by default the last one.
    if "_self_" not in entries:
        entries = [*entries, "_self_"]

    # Folders of Python packages (`pkg://`), such as verl's own, are not searched.
    folders = [path.parent]
    for folder in (content.get("hydra") or {}).get("searchpath") or []:
        if not str(folder).startswith("pkg://"):
            folders.append(Path(str(folder).removeprefix("file://")))

    tree = Tree()
    for entry in entries:
        if entry == "_self_":
            settings = dict(content)
            settings.pop("defaults", None)
            settings.pop("hydra", None)
            tree.put("", settings)
            continue
        for key, value in _entry_settings(entry, path, folders, base, problems).items():
            tree.put(key, value)
    return tree


def _entry_settings(
    entry: Any,
    path: Path,
    folders: Sequence[Path],
    base: dict[str, Values],
    problems: list[ConfigError],
) -> Values:
    """Settings that an entry of a `defaults` list adds, by dotted key.

    Args:
        entry: NAME, {GROUP: NAME} or {GROUP@PACKAGE: NAME}: a file or tree NAME, the folder of the
            file, and the section into which its settings go, by default the one named like GROUP.
        path: the file with the `defaults` list.
        folders: folders in which the file may be.
        base: see `read_config`.
        problems: list to which a problem is added if there is no such file or tree.
    """
    group, name = next(iter(entry.items())) if isinstance(entry, dict) else ("", entry)
    group = str(group).removeprefix("override ").removeprefix("optional ")
    group, _, package = group.partition("@")
    stem = str(name).removesuffix(".yaml")
    section = package or group.replace("/", ".")
    # Hydra's package `_global_` is the root.
    prefix = f"{section}." if section and section != "_global_" else ""
    for folder in folders:
        file = folder / group / f"{stem}.yaml"
        if file.is_file():
            values = read_config(file, base, problems).values
            return {f"{prefix}{key}": value for key, value in values.items()}
    # Files of verl are not read: their settings are in defaults.tsv.
    if not group and stem in base:
        return base[stem]
    if group and package:
        return {key: value for key, value in base[""].items() if key.startswith(prefix)}
    # `GROUP: null` selects no file.
    if stem not in ("null", "None"):
        problem = ConfigError(
            f"{path}: defaults",
            got=f"'{name}'",
            expected="a file that exists",
            fix="Write it beside this file, or name its folder in hydra.searchpath.",
        )
        problems.append(problem)
    return {}
