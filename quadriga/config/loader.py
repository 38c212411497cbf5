# SPDX-License-Identifier: Apache-2.0
"""From files and a command line to a configuration, or to one error that names everything that is wrong.

files, `a.b=c`  ->  dotted keys, each with its place  ->  one tree  ->  pydantic: `Config`  ->  checks
"""

import re
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from quadriga.config.base import filled
from quadriga.config.checks import training_findings
from quadriga.config.keys import KeyInfo, leaf_keys, leaf_of, nearest_keys, section_keys
from quadriga.config.root import Config
from quadriga.config.tasks import PRESETS, full_key, respell, spelled, spelled_text
from quadriga.config.verl_keys import rule_for
from quadriga.config.yaml_text import as_text, combined, parse_yaml, read_yaml
from quadriga.errors import ConfigError

# Hydra's + (a new key) and ++ (a key, new or not) are taken and mean nothing: every key is known.
_OVERRIDE = re.compile(r"\s*\+{0,2}(?P<key>[A-Za-z_][\w\-]*(?:\.[\w\-/]+)*)=(?P<value>.*)", re.DOTALL)
_NULLS = ("null", "Null", "NULL", "~")
_MISSING = object()


@dataclass(frozen=True)
class Loaded:
    """A configuration, and what its user should know about how it was read."""

    config: Config
    notices: list[str]


def load_config(
    overrides: Sequence[str] = (),
    files: Sequence[str | Path] = (),
    *,
    for_training: bool = False,
    task: str = "rl",
) -> Loaded:
    """Reads the configuration: files in order, each over the one before, then the `key=value` overrides.

    Args:
        overrides: `a.b=c`, the value in YAML; a leading `+` or `++` is taken.
        files: YAML files.
        for_training: whether the checks between keys that hold for a training run are made too.
        task: the task, where neither files nor overrides name one (`task`, or `objective`).

    Raises:
        ConfigError: anything is wrong; all of it is in this one error.
    """
    problems: list[ConfigError] = []
    trees = [read_yaml(Path(file), problems) for file in files]
    named = [tree.get("task", tree.get("objective")) for tree, _ in trees]
    named += [one.partition("=")[2] for one in overrides if re.match(r"\s*\+*(task|objective)=", one)]
    chosen = [one for one in [task, *named] if isinstance(one, str) and one in PRESETS][-1]
    reading = _Reading(chosen, problems=problems)
    reading.assign("task", chosen, {})
    for tree, places in trees:
        for key, value in tree.items():
            reading.assign(str(key), value, places)
    reading.take_overrides(overrides)
    config, notices = reading.validate(), reading.notices()
    if for_training and config is not None:
        wrong, further = training_findings(config)
        reading.problems += [one for one in wrong if spelled(one.where, chosen) not in reading.wrong_keys]
        notices += further
    if reading.problems or config is None:
        raise combined([respell(one, chosen) for one in reading.problems])
    return Loaded(config, [spelled_text(one, chosen) for one in notices])


def parse_override(argument: str, task: str = "rl") -> tuple[str, Any]:
    """Splits an override and reads its value as the key's type asks: text as it stands, the rest as YAML.

    Args:
        argument: `a.b=c`; a leading `+` or `++` is taken.
        task: whose keys.

    Raises:
        ConfigError: it is not of the form `key=value`, or the value is not YAML.
    """
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
        raise _not_an_override(argument)
    key, text = spelled(match["key"], task), match["value"].strip()
    leaf = leaf_of(key, task)
    # A text may begin with a brace (a directory of "{project_name}"), unless a dictionary may stand in its place.
    is_quoted = text[:1] in ("[", "'", '"') or (text[:1] == "{" and leaf is not None and leaf.is_open)
    if text == "" or (leaf is not None and leaf.is_text and key == leaf.key and not is_quoted):
        return key, None if text in _NULLS else text
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        if leaf is None:
            return key, text
        got = f"'{text}' ({getattr(error, 'problem', None) or error})"
        fix = "Put text with special signs in quotes."
        raise ConfigError(key, got=got, expected="a value in YAML", fix=fix) from error
    if isinstance(value, dict) and any(":" in str(name) and inner is None for name, inner in value.items()):
        raise ConfigError(key, got=text, expected="a dictionary", fix="Write a space after the colon: {name: value}.")
    return key, value


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
    """The error for a value that holds `${...}`, which is not filled in: a text key takes its text as it stands."""
    if isinstance(value, dict | list):
        named = isinstance(value, dict)
        items = [(f"{where}.{name}", value[name]) for name in value] if named else [(where, one) for one in value]
        found = (interpolation_problem(at, one) for at, one in items)
        return next((problem for problem in found if problem is not None), None)
    if not isinstance(value, str) or "${" not in value:
        return None
    fix = "References are not filled in: write the value."
    return ConfigError(where, got=as_text(value), expected="a value", fix=fix)


@dataclass
class _Reading:
    """What was read so far. Keys are spelled as the task does; `values` is a tree of the schema's own names."""

    task: str
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[ConfigError] = field(default_factory=list)
    repeated: list[str] = field(default_factory=list)
    noted: dict[str, list[str]] = field(default_factory=dict)
    neutral: list[str] = field(default_factory=list)
    wrong_keys: set[str] = field(default_factory=set)

    def take_overrides(self, overrides: Sequence[str]) -> None:
        """Assigns what the command line sets, and notes what it sets twice."""
        seen: set[str] = set()
        for argument in overrides:
            try:
                key, value = parse_override(argument, self.task)
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
        typed, place, key = key, places.get(key), spelled(key, self.task)
        leaf, sections = leaf_of(key, self.task), section_keys(self.task)
        if leaf is None and isinstance(value, dict) and (value or key in sections):
            for name, inner in value.items():
                self.assign(f"{typed}.{name}", inner, places)
        elif leaf is not None:
            self._set(key, value, place)
        elif key not in sections:
            self._take_foreign(key, value, place)
        elif value is not None:
            below = (one.removeprefix(f"{key}.") for one in leaf_keys(self.task) if one.startswith(f"{key}."))
            inside = dict.fromkeys(one.split(".")[0] for one in below)
            self._refuse(key, place, got=as_text(value), expected="a section", fix=f"It holds {', '.join(inside)}.")

    def _set(self, key: str, value: Any, place: str | None) -> None:
        if problem := interpolation_problem(_where(key, place), value):
            self.problems.append(problem)
            self.wrong_keys.add(key)
            return
        *path, last = full_key(key, self.task).split(".")
        node = self.values
        for depth, name in enumerate(path, start=1):
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                above = spelled(".".join(path[:depth]), self.task)
                self._refuse(key, place, got=f"a key under {above}", expected=f"none, for {above} is {as_text(node)}")
                return
        # An entry of a dictionary goes over what is there. Copied: an anchor in YAML is one object in two places.
        is_merged = isinstance(value, dict) and isinstance(node.get(last), dict)
        node[last] = deepcopy(filled(value, node[last]) if is_merged else value)
        self.places[key] = place or ""

    def _take_foreign(self, key: str, value: Any, place: str | None) -> None:
        rule = rule_for(key) if self.task == "rl" else None
        if rule is None:
            close = nearest_keys(key, self.task)
            command = "quadriga config keys" if self.task == "rl" else "quadriga sft --keys"
            fix = f"Did you mean {' or '.join(close)}?" if close else f"`{command}` lists them all."
            self._refuse(key, place, got="a key that does not exist", expected="", fix=fix)
        elif not rule.accepts(value):
            known = [as_text(one) for one in rule.accepted or [] if one is not None][:1]
            expected = known[0] if known else "the key left out"
            self._refuse(key, place, got=as_text(value), expected=expected, fix=rule.sentence)
        elif rule.accepted is None:
            self.noted.setdefault(rule.sentence, []).append(key)
        else:
            self.neutral.append(key)

    def _refuse(self, key: str, place: str | None, *, got: str, expected: str, fix: str = "") -> None:
        self.problems.append(ConfigError(_where(key, place), got=got, expected=expected, fix=fix))

    def validate(self) -> Config | None:
        """The configuration, with defaults where keys are wrong, so that the checks between keys can go on."""
        for _ in range(2):
            try:
                return Config.model_validate(self.values)
            except ValidationError as error:
                wrong = self._problems_of(error)
            self.problems += wrong.values()
            self.wrong_keys |= wrong.keys()
            for key in wrong:
                *path, last = full_key(key, self.task).split(".")
                _lookup(self.values, path).pop(last, None)
        return None

    def _problems_of(self, error: ValidationError) -> dict[str, ConfigError]:
        """By its key, each thing that pydantic refuses."""
        problems: dict[str, ConfigError] = {}
        known = section_keys(self.task) | leaf_keys(self.task).keys()
        for one in error.errors(include_url=False):
            # pydantic's places have list positions and names of union members at their end.
            place = one["loc"]
            keys = (spelled(".".join(map(str, place[:depth])), self.task) for depth in range(len(place), 0, -1))
            key = next((key for key in keys if key in known), "")
            value = _lookup(self.values, full_key(key, self.task).split("."))
            # A key that follows another one (clip_ratio) fails with it; only the one that was written is named.
            if key in problems or value is _MISSING:
                continue
            leaf = leaf_keys(self.task).get(key)
            expected, fix = leaf.kind if leaf else "a section", _hint(value, leaf)
            if one["type"] == "refused":
                said = one.get("ctx", {})
                expected, fix = said["expected"], said["fix"]
            where = _where(key, self.places.get(key))
            problems[key] = ConfigError(where, got=as_text(value), expected=expected, fix=fix)
        assert problems, f"pydantic refuses what was not given: {error}"
        return problems

    def notices(self) -> list[str]:
        """What was taken without effect, and why."""
        notes = [f"{', '.join(keys)}: {sentence}" for sentence, keys in self.noted.items()]
        if self.neutral:
            notes.append(f"{', '.join(self.neutral)}: not needed, the value is what holds here anyway.")
        return self.repeated + notes


def _where(key: str, place: str | None) -> str:
    return f"{key} ({place})" if place else key


def _lookup(values: Any, path: Sequence[str]) -> Any:
    for name in path:
        if not isinstance(values, Mapping) or name not in values:
            return _MISSING
        values = values[name]
    return values


def _hint(value: Any, leaf: KeyInfo | None) -> str:
    if value in ("None", "none") and leaf is not None and leaf.kind.endswith("null"):
        return "Write null."
    if isinstance(value, int | float) and leaf is not None and leaf.is_text:
        return "Put text that looks like a number in quotes."
    return ""
