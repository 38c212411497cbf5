# SPDX-License-Identifier: Apache-2.0
"""From files and a command line to a configuration, or to one error that names everything that is wrong.

One reader for every command's tree: `load_config` reads that of `quadriga train`, `load_tree` any.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ValidationError

from quadriga.config.base import Section
from quadriga.config.check import training_findings
from quadriga.config.overrides import interpolation_problem, parse_override
from quadriga.config.problems import as_text, combined
from quadriga.config.root import Config
from quadriga.config.tree import KeyInfo, leaf_keys, leaf_of, nearest_keys, section_keys
from quadriga.config.verl_keys import Rule, rule_for
from quadriga.config.yaml_text import read_yaml
from quadriga.errors import ConfigError

Root = TypeVar("Root", bound=Section)
_MISSING = object()


@dataclass(frozen=True)
class Tree(Generic[Root]):
    """The tree of a command, and what its reader has to know beside its keys."""

    root: type[Root]
    findings: Callable[[Root], tuple[list[ConfigError], list[str]]]
    """The checks between keys that hold for a training run: what is wrong, and what its user should know."""
    list_command: str
    """The command that lists every key."""
    rule_for: Callable[[str], Rule | None] = lambda key: None
    """What is said to a key of another program that is not one of the tree."""


TRAIN = Tree(Config, training_findings, "quadriga config keys", rule_for)


@dataclass(frozen=True)
class Loaded(Generic[Root]):
    """A configuration, and what its user should know about how it was read."""

    config: Root
    notices: list[str]


def load_config(
    overrides: Sequence[str] = (), files: Sequence[str | Path] = (), *, for_training: bool = False
) -> Loaded[Config]:
    """Reads the tree of `quadriga train`: files in order, each over the one before, then the `key=value` overrides.

    Args:
        overrides: `a.b=c`, the value in YAML; a leading `+` or `++` is taken.
        files: YAML files.
        for_training: whether the checks between keys that hold for a training run are made too.

    Raises:
        ConfigError: anything is wrong; all of it is in this one error.
    """
    return load_tree(TRAIN, overrides, files, for_training=for_training)


def load_tree(
    tree: Tree[Root], overrides: Sequence[str] = (), files: Sequence[str | Path] = (), *, for_training: bool = False
) -> Loaded[Root]:
    """Reads any tree, as `load_config` does that of `quadriga train`.

    Args:
        tree: what is read.
        overrides: as there.
        files: as there.
        for_training: as there.

    Raises:
        ConfigError: anything is wrong; all of it is in this one error.
    """
    reading = _Reading(tree)
    for file in files:
        written, places = read_yaml(Path(file), reading.problems)
        for key, value in written.items():
            reading.assign(str(key), value, places)
    reading.take_overrides(overrides)
    config = reading.validate()
    notices = reading.notices()
    if for_training and config is not None:
        problems, further = tree.findings(config)
        reading.problems += [one for one in problems if one.where not in reading.wrong_keys]
        notices += further
    if reading.problems or config is None:
        raise combined(reading.problems)
    return Loaded(config, notices)


@dataclass
class _Reading(Generic[Root]):
    tree: Tree[Root]
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[ConfigError] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    noted: dict[str, list[str]] = field(default_factory=dict)
    neutral: list[str] = field(default_factory=list)
    wrong_keys: set[str] = field(default_factory=set)

    def take_overrides(self, overrides: Sequence[str]) -> None:
        seen: set[str] = set()
        for argument in overrides:
            try:
                key, value = parse_override(argument, self.tree.root)
            except ConfigError as problem:
                self.problems.append(problem)
                self.wrong_keys.add(problem.where)
                continue
            if key in seen:
                self.repeated.append(f"{key} stands twice on the command line; the last value holds: {as_text(value)}.")
            seen.add(key)
            self.assign(key, value, {})

    def assign(self, key: str, value: Any, places: Mapping[str, str]) -> None:
        """Puts a value under a dotted key, or says why it cannot stand there."""
        leaf, sections = leaf_of(key, self.tree.root), section_keys(self.tree.root)
        if leaf is None and isinstance(value, dict) and (value or key in sections):
            for name, inner in value.items():
                self.assign(f"{key}.{name}", inner, places)
        elif leaf is not None:
            self._set_leaf(key, value, places)
        elif key not in sections:
            self._take_foreign(key, value, places)
        elif value is not None:
            below = (one.removeprefix(f"{key}.") for one in leaf_keys(self.tree.root) if one.startswith(f"{key}."))
            inside = dict.fromkeys(one.split(".")[0] for one in below)
            self._refuse(key, places, got=as_text(value), expected="a section", fix=f"It holds {', '.join(inside)}.")

    def _set_leaf(self, key: str, value: Any, places: Mapping[str, str]) -> None:
        problem = interpolation_problem(_where(key, places), value)
        if problem is not None:
            self.problems.append(problem)
            self.wrong_keys.add(key)
            return
        *path, last = key.split(".")
        node = self.values
        for depth, name in enumerate(path, start=1):
            inner = node.setdefault(name, {})
            if not isinstance(inner, dict):
                above = ".".join(path[:depth])
                self._refuse(key, places, got=f"a key under {above}", expected=f"none, for {above} is {as_text(inner)}")
                return
            node = inner
        node[last] = _merged(node.get(last), value) if isinstance(value, dict) else value
        if key in places:
            self.places[key] = places[key]
        else:
            self.places.pop(key, None)

    def _take_foreign(self, key: str, value: Any, places: Mapping[str, str]) -> None:
        rule = self.tree.rule_for(key)
        if rule is None:
            close = nearest_keys(key, self.tree.root)
            fix = f"Did you mean {' or '.join(close)}?" if close else f"`{self.tree.list_command}` lists them all."
            self._refuse(key, places, got="a key that does not exist", expected="", fix=fix)
        elif not rule.accepts(value):
            known = [as_text(one) for one in rule.accepted or [] if one is not None][:1]
            expected = known[0] if known else "the key left out"
            self._refuse(key, places, got=as_text(value), expected=expected, fix=rule.sentence)
        elif rule.accepted is None:
            self.noted.setdefault(rule.sentence, []).append(key)
        else:
            self.neutral.append(key)

    def _refuse(self, key: str, places: Mapping[str, str], *, got: str, expected: str, fix: str = "") -> None:
        self.problems.append(ConfigError(_where(key, places), got=got, expected=expected, fix=fix))

    def validate(self) -> Root | None:
        """The configuration, with defaults where keys are wrong, so that the checks between keys can go on."""
        root = self.tree.root
        try:
            return root.model_validate(self.values)
        except ValidationError as error:
            wrong = _problems_by_key(error, root, self.values, self.places)
        self.problems += wrong.values()
        self.wrong_keys |= wrong.keys()
        for key in wrong:
            _remove(self.values, key)
        try:
            return root.model_validate(self.values)
        except ValidationError as error:
            self.problems += _problems_by_key(error, root, self.values, self.places).values()
            return None

    def notices(self) -> list[str]:
        """What was taken without effect, and why."""
        notes = [f"{', '.join(keys)}: {sentence}" for sentence, keys in self.noted.items()]
        if self.neutral:
            notes.append(f"{', '.join(self.neutral)}: not needed, the value is what holds here anyway.")
        return self.repeated + notes


def _where(key: str, places: Mapping[str, str]) -> str:
    return f"{key} ({places[key]})" if key in places else key


def _merged(below: Any, above: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(below, dict):
        return above
    inner = {
        name: _merged(below.get(name), value) if isinstance(value, dict) else value for name, value in above.items()
    }
    return {**below, **inner}


def _lookup(values: Mapping[str, Any], key: str) -> Any:
    node: Any = values
    for name in key.split("."):
        if not isinstance(node, Mapping) or name not in node:
            return _MISSING
        node = node[name]
    return node


def _remove(values: dict[str, Any], key: str) -> None:
    *path, last = key.split(".")
    node = _lookup(values, ".".join(path)) if path else values
    if isinstance(node, dict):
        node.pop(last, None)


def _key_of(location: tuple[int | str, ...], root: type[Section]) -> str:
    """The key that a place inside pydantic's error stands for: without list positions and names of union members."""
    known: frozenset[str] = section_keys(root) | leaf_keys(root).keys()
    depth = next((d for d in range(len(location), 0, -1) if ".".join(map(str, location[:d])) in known), 0)
    return ".".join(map(str, location[:depth]))


def _problems_by_key(
    error: ValidationError, root: type[Section], values: Mapping[str, Any], places: Mapping[str, str]
) -> dict[str, ConfigError]:
    problems: dict[str, ConfigError] = {}
    for one in error.errors(include_url=False):
        key = _key_of(one["loc"], root)
        value = _lookup(values, key)
        # A key that follows another one (clip_ratio) fails with it; only the one that was written is named.
        if key in problems or value is _MISSING:
            continue
        leaf = leaf_keys(root).get(key)
        if one["type"] == "refused":
            said = one.get("ctx", {})
            expected, fix = said["expected"], said["fix"]
        else:
            expected, fix = leaf.kind if leaf else "a section", _hint(value, leaf)
        problems[key] = ConfigError(_where(key, places), got=as_text(value), expected=expected, fix=fix)
    assert problems, f"pydantic refuses what nobody wrote: {error}"
    return problems


def _hint(value: Any, leaf: KeyInfo | None) -> str:
    if value in ("None", "none") and leaf is not None and leaf.kind.endswith("null"):
        return "Write null."
    if isinstance(value, int | float) and leaf is not None and leaf.is_text:
        return "Put text that looks like a number in quotes."
    return ""
