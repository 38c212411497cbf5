# SPDX-License-Identifier: Apache-2.0
"""From files and a command line to a configuration, or to one error that names everything that is wrong.

files, `a.b=c`  ->  dotted keys, each with its place  ->  one tree  ->  pydantic: `Config`  ->  checks
"""

import json
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from types import MappingProxyType
from typing import Any

import yaml
from pydantic import ValidationError

from quadriga.config.base import filled
from quadriga.config.checks import training_findings
from quadriga.config.keys import is_key_of_verl, leaf_keys, leaf_of, nearest_keys, section_keys
from quadriga.config.root import PRESETS, Config, respell, spelled, spelled_text
from quadriga.config.yaml_text import as_text, combined, parse_yaml, read_yaml
from quadriga.errors import ConfigError
from quadriga.redact import HIDDEN, hidden_names

# Hydra's + (a new key) and ++ (a key, new or not) are taken; every key is known but those of a user's data set.
_OVERRIDE = re.compile(
    r"\s*(?P<sign>\+{0,2})(?P<key>[A-Za-z_][\w\-]*(?:\.[\w\-/]+)*)=(?P<value>.*)", re.DOTALL
)
_MISSING = object()
_SIZES_OF_MEGATRON = {
    "context_parallel_size": "ulysses_sequence_parallel_size",
    "expert_model_parallel_size": "expert_parallel_size",
}


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
    values: Mapping[str, Any] = MappingProxyType({}),
) -> Loaded:
    """Reads YAML files in order, each over the one before, then `values`, dotted keys with what they are set to, then
    overrides `a.b=c`, whose values are YAML. Raises ConfigError: everything that is wrong, in one error.
    `for_training`: whether the checks between keys that hold for a training run are made too.
    `task`: the task, where neither files nor overrides name one (`task`, or `objective`)."""
    problems: list[ConfigError] = []
    trees = [read_yaml(Path(file), problems) for file in files]
    named = [tree.get("task", tree.get("objective")) for tree, _ in trees]
    named += [
        one.partition("=")[2] for one in overrides if re.match(r"\s*\+*(task|objective)=", one)
    ]
    chosen = [one for one in [task, *named] if isinstance(one, str) and one in PRESETS][-1]
    reading = _Reading(chosen, problems=problems)
    for tree, places in [({"task": chosen}, {}), *trees, (values, {})]:
        for key, value in tree.items():
            reading.assign(str(key), value, places)
    notices = list(reading.take_overrides(overrides))
    # Whoever starts a run again from what it has written gives the keys again.
    for key, place in reading.places.items():
        for name in hidden_names(reading.value(key), key):
            expected, fix = (
                "the value, which a run does not write down",
                f"Give it again: {name}=...",
            )
            reading.refuse(name, place, got=HIDDEN, expected=expected, fix=fix)
    config = reading.finish(notices, for_training=for_training)
    if problems or config is None:
        raise combined(problems)
    return Loaded(config, notices)


def read_settings(
    values: Mapping[str, Any],
    places: Mapping[str, str],
    task: str = "rl",
    *,
    for_training: bool = True,
) -> tuple[Config | None, list[ConfigError], list[str]]:
    """The configuration from dotted keys, with all that is wrong and the notices; for a training run with its checks.
    `places`: where a value comes from, for messages: by key, where that is not the key itself."""
    reading, notices = _Reading(task, problems=[]), list[str]()
    for key, value in {"task": task, **values}.items():
        reading.assign(key, value, places)
    return (
        reading.finish(notices, for_training=for_training, is_verls=True),
        reading.problems,
        notices,
    )


def parse_override(argument: str, task: str = "rl") -> tuple[str, Any]:
    """Splits `a.b=c` and reads the value as the key's type asks, as text or YAML; ConfigError says what is wrong."""
    if (match := _OVERRIDE.fullmatch(argument)) is None:
        fix = "Write the key, an equals sign and the value, without spaces around the sign."
        if argument.startswith("~"):
            fix = "A key cannot be removed: leave it out, or set it to null."
        elif argument.startswith("-"):
            fix = "Keys are written without dashes; --config FILE stands before them."
        elif argument.endswith((".yaml", ".yml")):
            fix = f"To read a configuration file write --config {shlex.quote(argument)}."
        raise ConfigError("command line", got=f"'{argument}'", expected="key=value", fix=fix)
    key, text = spelled(match["key"], task), match["value"].strip()
    section, _, name = key.rpartition(".")
    if (
        match["sign"]
        and section == "data"
        and not leaf_of(key, task)
        and not nearest_keys(key, task)
    ):
        key = f"data.custom_cls.options.{name}"
    leaf = leaf_of(key, task)
    # A text may begin with a brace (a directory of "{project_name}"), unless a dictionary may stand in its place.
    is_quoted = text[:1] in ("[", "'", '"') or (
        text[:1] == "{" and leaf is not None and leaf.is_open
    )
    if text == "" or (leaf is not None and leaf.is_text and key == leaf.key and not is_quoted):
        return key, None if text in ("null", "Null", "NULL", "~") else text
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        if leaf is None:
            return key, text
        got = f"{as_text(text, key)} ({getattr(error, 'problem', None) or error})"
        fix = "Put text with special signs in quotes."
        raise ConfigError(key, got=got, expected="a value in YAML", fix=fix) from error
    if isinstance(value, dict) and any(
        ":" in str(name) and inner is None for name, inner in value.items()
    ):
        fix = "Write a space after the colon: {name: value}."
        raise ConfigError(key, got=as_text(value, key), expected="a dictionary", fix=fix)
    return key, value


def as_override(key: str, path: str | Path) -> str:
    """`key=path` as a word of a shell's command line, which `parse_override` reads as this path again."""
    text = str(path)
    # At the beginning these would be YAML.
    is_yaml = text.startswith(("[", "{", "'", '"'))
    return shlex.quote(f"{key}={json.dumps(text, ensure_ascii=False) if is_yaml else text}")


@dataclass
class _Reading:
    """What was read so far. Keys are spelled as the task does; `values` is a tree of the schema's own names."""

    task: str
    problems: list[ConfigError]
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def take_overrides(self, overrides: Sequence[str]) -> Iterator[str]:
        """Assigns what the command line sets; yields notices of what it sets twice."""
        seen: set[str] = set()
        for argument in overrides:
            try:
                key, value = parse_override(argument, self.task)
            except ConfigError as problem:
                self.problems.append(problem)
                continue
            if key in seen:
                yield f"{key} stands twice on the command line; the last value holds: {as_text(value, key)}."
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
            below = (
                one.removeprefix(f"{key}.")
                for one in leaf_keys(self.task)
                if one.startswith(f"{key}.")
            )
            inside = dict.fromkeys(one.split(".")[0] for one in below)
            fix = f"It holds {', '.join(inside)}."
            self.refuse(key, place, got=as_text(value, key), expected="a section", fix=fix)

    def _set(self, key: str, value: Any, place: str | None) -> None:
        if "${" in str(value):
            fix = "References are not filled in: write the value."
            self.refuse(key, place, got=as_text(value, key), expected="a value", fix=fix)
            return
        *path, last = spelled(key, self.task, in_full=True).split(".")
        node = self.values
        for depth, name in enumerate(path, start=1):
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                above = spelled(".".join(path[:depth]), self.task)
                expected = f"none, for {above} is {as_text(node, above)}"
                self.refuse(key, place, got=f"a key under {above}", expected=expected)
                return
        # An entry of a dictionary goes over what is there. Copied: an anchor in YAML is one object in two places.
        is_merged = isinstance(value, dict) and isinstance(node.get(last), dict)
        node[last] = deepcopy(filled(value, node[last]) if is_merged else value)
        self.places[key] = place or ""

    def _take_foreign(self, key: str, value: Any, place: str | None) -> None:
        if is_key_of_verl(key, self.task):
            program = "main_ppo" if self.task == "rl" else "sft_trainer"
            fix = f"`quadriga verl {program}` takes verl's command lines; here leave the key out."
            section, _, name = key.rpartition(".megatron.")
            ours = f"{section}.{_SIZES_OF_MEGATRON.get(name, name)}"
            fix = (
                f"Set {ours}, the size of either training engine."
                if leaf_of(ours, self.task)
                else fix
            )
            self.refuse(key, place, got="a key of verl's that has no place here", fix=fix)
            return
        close = nearest_keys(key, self.task)
        command = "quadriga config keys" if self.task == "rl" else "quadriga sft --keys"
        fix = f"Did you mean {' or '.join(close)}?" if close else f"`{command}` lists them all."
        self.refuse(key, place, got="a key that does not exist", fix=fix)

    def refuse(
        self, key: str, place: str | None, *, got: str, expected: str = "", fix: str = ""
    ) -> None:
        self.problems.append(
            ConfigError(f"{key} ({place})" if place else key, got=got, expected=expected, fix=fix)
        )

    def finish(
        self, notices: list[str], *, for_training: bool, is_verls: bool = False
    ) -> Config | None:
        """The configuration, with the problems and `notices` of all checks in the task's spelling."""
        config = self.validate()
        if for_training and config is not None:
            named_already = {one.where.partition(" (")[0] for one in self.problems}
            wrong, further = training_findings(config, is_verls=is_verls)
            self.problems += [
                one for one in wrong if spelled(one.where, self.task) not in named_already
            ]
            notices += [spelled_text(one, self.task) for one in further]
        for problem in self.problems:
            respell(problem, self.task)
        return config

    def validate(self) -> Config | None:
        """The configuration, with defaults where keys are wrong, so that the checks between keys can go on."""
        known = section_keys(self.task) | leaf_keys(self.task).keys()
        for _ in range(2):
            try:
                return Config.model_validate(self.values)
            except ValidationError as error:
                errors = error.errors(include_url=False)
            wrong: set[str] = set()
            for one in errors:
                # pydantic's places have list positions and names of union members at their end.
                place = one["loc"]
                keys = (
                    spelled(".".join(map(str, place[:depth])), self.task)
                    for depth in range(len(place), 0, -1)
                )
                key = next((key for key in keys if key in known), "")
                value, leaf = self.value(key), leaf_keys(self.task).get(key)
                # A key that follows another one (clip_ratio) fails with it; only the one that was written is named.
                if key in wrong or value is _MISSING:
                    continue
                wrong.add(key)
                expected, fix = leaf.kind if leaf else "a section", ""
                if one["type"] == "refused":
                    expected, fix = one["ctx"]["expected"], one["ctx"]["fix"]
                elif value in ("None", "none") and leaf is not None and leaf.kind.endswith("null"):
                    fix = "Write null."
                elif isinstance(value, int | float) and leaf is not None and leaf.is_text:
                    fix = "Put text that looks like a number in quotes."
                elif isinstance(value, str) and leaf is not None and expected.startswith("one of "):
                    near = get_close_matches(
                        value, expected.removeprefix("one of ").split(", "), n=1
                    )
                    fix = (
                        f"Did you mean {near[0]}?"
                        if near
                        else f"Set {key}={leaf.default or 'null'}, the default."
                    )
                self.refuse(
                    key, self.places.get(key), got=as_text(value, key), expected=expected, fix=fix
                )
            assert wrong, f"pydantic refuses what was not given: {errors}"
            for key in wrong:
                self.value(key, remove=True)
        return None

    def value(self, key: str, *, remove: bool = False) -> Any:
        """What stands under a key, `_MISSING` for nothing."""
        *path, last = spelled(key, self.task, in_full=True).split(".")
        node: Any = self.values
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last not in node:
            return _MISSING
        return node.pop(last) if remove else node[last]
