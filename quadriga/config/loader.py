# SPDX-License-Identifier: Apache-2.0
"""Loads a configuration from files and a command line, or raises one error with all problems.

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
from pydantic_core import ErrorDetails

from quadriga.config.base import fill_missing
from quadriga.config.checks import training_findings
from quadriga.config.keys import (
    KeyInfo,
    is_key_of_verl,
    leaf_keys,
    leaf_of,
    nearest_keys,
    section_keys,
)
from quadriga.config.rollout_checks import with_groups
from quadriga.config.root import PRESETS, Config, respell, spell_key, spell_text
from quadriga.config.yaml_text import as_text, combine_errors, parse_yaml, read_yaml
from quadriga.errors import ConfigError
from quadriga.redact import HIDDEN, hidden_names

# Hydra's + (a new key) and ++ (any key) are accepted. New keys are those of a user's own code.
_OVERRIDE = re.compile(
    r"\s*(?P<sign>\+{0,2})(?P<key>[A-Za-z_][\w\-]*(?:\.[\w\-/]+)*)=(?P<value>.*)", re.DOTALL
)
_MISSING = object()  # stands for the value of a key that was not set; null is a value
CUSTOM_CLASS = "data.custom_cls.path"
CUSTOM_OPTIONS = "data.custom_cls.options"
EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"
_ENVIRONMENT = "env"  # a section that users can write as the name of an environment
# Keys of verl's section `megatron` -> keys for both training engines.
_SIZES_OF_MEGATRON = {
    "context_parallel_size": "ulysses_sequence_parallel_size",
    "expert_model_parallel_size": "expert_parallel_size",
}


@dataclass(frozen=True)
class Loaded:
    """A configuration, and notices for its user.

    Attributes:
        config: the configuration.
        notices: sentences about choices and effects that the user may not expect.
    """

    config: Config
    notices: list[str]


def load_config(
    overrides: Sequence[str] = (),
    files: Sequence[str | Path] = (),
    *,
    for_training: bool = False,
    task: str = "rl",
    values: Mapping[str, Any] = MappingProxyType({}),
    defaults: Mapping[str, Any] = MappingProxyType({}),
) -> Loaded:
    """Load a configuration.

    Args:
        overrides: words `a.b=c`, whose values are YAML; they replace all other values.
        files: YAML files. A later file replaces values of an earlier one.
        for_training: whether to make the checks of a training run, too. Groups of responses then
            have 8 responses unless `rollout.n` is given.
        task: the task, unless files or overrides name one as `task` or `objective`.
        values: values by dotted key, which replace those of the files.
        defaults: values by dotted key, which files, `values` and overrides replace.

    Raises:
        ConfigError: all problems, in one error.
    """
    problems = []
    # The tree of each file, and file and line of its keys. Problems are added to the list.
    trees = [read_yaml(Path(file), problems) for file in files]
    chosen_task = _choose_task(task, [tree for tree, _ in trees], overrides)
    # The task has to be known first, because it determines which keys exist and their spelling.
    builder = _ConfigBuilder(chosen_task, problems=problems)
    # In rising order of precedence: a later value replaces an earlier one.
    for tree, places in [({"task": chosen_task}, {}), (defaults, {}), *trees, (values, {})]:
        for key, value in tree.items():
            builder.assign(str(key), value, places)
    notices = list(builder.assign_overrides(overrides))
    # A run writes its configuration down with placeholders for secrets. They are no values.
    for key, place in builder.places.items():
        for name in hidden_names(builder.value(key), key):
            expected = "the value, which a run does not write down"
            fix = f"Give it again: {name}=..."
            builder.add_problem(name, place, got=HIDDEN, expected=expected, fix=fix)
    config = builder.finish(notices, for_training=for_training)
    if problems or config is None:
        raise combine_errors(problems)
    return Loaded(config, notices)


def _choose_task(default: str, trees: Sequence[Mapping[str, Any]], overrides: Sequence[str]) -> str:
    """Find the task: the last valid one that files or overrides name, else the default.

    Args:
        default: the task if none is named.
        trees: trees of the files.
        overrides: words `a.b=c`.
    """
    names = [default]
    names += [tree.get("task", tree.get("objective")) for tree in trees]
    for override in overrides:
        if re.match(r"\s*\+*(task|objective)=", override):
            names.append(override.partition("=")[2])
    return [name for name in names if isinstance(name, str) and name in PRESETS][-1]


def read_settings(
    values: Mapping[str, Any],
    places: Mapping[str, str],
    task: str,
    *,
    for_training: bool,
) -> tuple[Config | None, list[ConfigError], list[str]]:
    """Read the configuration that a command line of verl was translated to.

    Args:
        values: values by dotted key.
        places: by dotted key, the place that errors name after the key; a key may have none.
        task: the task.
        for_training: whether to make the checks of a training run, too.

    Returns:
        The configuration (None if it cannot be read), all problems, and all notices.
    """
    builder = _ConfigBuilder(task, problems=[])
    notices = []
    for key, value in {"task": task, **values}.items():
        builder.assign(key, value, places)
    config = builder.finish(notices, for_training=for_training, is_verls=True)
    return config, builder.problems, notices


def parse_override(
    argument: str, task: str = "rl", open_sections: Mapping[str, str] = MappingProxyType({})
) -> tuple[str, Any]:
    """Split `a.b=c`, and read the value as text or YAML, depending on the key.

    Args:
        argument: the word.
        task: the task.
        open_sections: for each section to which the user's code may add keys, the dotted key of the
            dictionary that holds them. `+section.name=value` with a new name sets an entry of it.

    Returns:
        The dotted key in the task's spelling, and the value.

    Raises:
        ConfigError: the word is not `key=value`, or the value is not valid YAML.
    """
    match = _OVERRIDE.fullmatch(argument)
    if match is None:
        raise ConfigError(
            "command line", got=f"'{argument}'", expected="key=value", fix=_fix_of_word(argument)
        )
    key = spell_key(match["key"], task)
    if key == _ENVIRONMENT:
        key = f"{_ENVIRONMENT}.name"
    text = match["value"].strip()
    section, _, name = key.partition(".")
    # A new key with a plus sign is an entry of a dictionary that the user's code reads.
    if match["sign"] and not leaf_of(key, task):
        # A key below a sub-section of the package is a misspelled one, not a new one.
        subsection = f"{section}.{name.partition('.')[0]}"
        if section in open_sections and subsection not in section_keys(task):
            key = f"{open_sections[section]}.{name}"
        elif section == "data" and "." not in name and not nearest_keys(key, task):
            # No class reads the key. Validation refuses it in this dictionary, and says which key
            # must name the class.
            key = f"{CUSTOM_OPTIONS}.{name}"
    # Text needs no quotes on the command line, except where YAML could mean something else.
    leaf = leaf_of(key, task)
    if _is_text(text, leaf, key):
        return key, None if text in ("null", "Null", "NULL", "~") else text
    try:
        value = parse_yaml(text)
    except yaml.YAMLError as error:
        # The key does not exist: the caller reports that, and not its value.
        if leaf is None:
            return key, text
        raise ConfigError(
            key,
            got=f"{as_text(text, key)} ({getattr(error, 'problem', None) or error})",
            expected="a value in YAML",
            fix="Put text with special characters in quotes.",
        ) from error
    if isinstance(value, dict):
        # YAML reads {name:value} as a key "name:value" without a value.
        for entry, entry_value in value.items():
            if ":" in str(entry) and entry_value is None:
                raise ConfigError(
                    key,
                    got=as_text(value, key),
                    expected="a dictionary",
                    fix="Write a space after the colon: {name: value}.",
                )
    return key, value


def _fix_of_word(argument: str) -> str:
    """Say how to correct a word that is not `key=value`."""
    if argument.startswith("~"):
        return "A key cannot be removed: leave it out, or set it to null."
    if argument.startswith("-"):
        return "Keys are written without dashes; --config FILE precedes them."
    if argument.endswith((".yaml", ".yml")):
        return f"To read a configuration file write --config {shlex.quote(argument)}."
    return "Write the key, an equals sign and the value, without spaces around the sign."


def _is_text(text: str, leaf: KeyInfo | None, key: str) -> bool:
    """Whether the value of an override is text as it is, not YAML.

    Args:
        text: the value.
        leaf: the result of `leaf_of` for `key`: the key itself, or an open dictionary around it.
        key: the dotted key.
    """
    if text == "":
        return True
    # Entries of open dictionaries are YAML: their type is not known.
    if leaf is None or not leaf.is_text or key != leaf.key:
        return False
    # Text may begin with a brace, as in "{project_name}", unless the key may be a dictionary.
    is_dictionary = text[0] == "{" and leaf.is_open
    return text[0] not in ("[", "'", '"') and not is_dictionary


def as_override(key: str, path: str | Path) -> str:
    """Format a path as an override `key=path`, quoted for a shell."""
    text = str(path)
    if text.startswith(("[", "{", "'", '"')):
        # `parse_override` would read this as YAML, so it gets quotes.
        text = json.dumps(text, ensure_ascii=False)
    return shlex.quote(f"{key}={text}")


@dataclass
class _ConfigBuilder:
    """Builds a configuration: collects its values, then validates them.

    Dotted keys are in the task's spelling.

    Attributes:
        task: the task.
        problems: all problems so far; methods add to the list.
        values: tree of values so far, in the schema's spelling.
        places: file and line of each key that has a value; "" for the command line.
    """

    task: str
    problems: list[ConfigError]
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def assign_overrides(self, overrides: Sequence[str]) -> Iterator[str]:
        """Assign the values of the command line.

        Yields:
            Notices about keys that are set twice, and about keys of the user's own that resemble
            keys of the package.
        """
        assigned_keys = set()
        open_sections = self._open_sections(overrides)
        for argument in overrides:
            try:
                key, value = parse_override(argument, self.task, open_sections)
            except ConfigError as problem:
                self.problems.append(problem)
                continue
            # A key that became an entry of a user's dictionary may be a misspelled one of the
            # package.
            for section, dictionary in open_sections.items():
                name = key.removeprefix(f"{dictionary}.")
                near_keys = nearest_keys(f"{section}.{name}", self.task)
                if name != key and argument.startswith("+") and near_keys:
                    yield (
                        f"{section}.{name}: taken as a key of your own; "
                        f"the package's is {near_keys[0]}."
                    )
            if key in assigned_keys:
                yield (
                    f"{key} is set twice on the command line; "
                    f"the last value is used: {as_text(value, key)}."
                )
            assigned_keys.add(key)
            self.assign(key, value, {})

    def _open_sections(self, overrides: Sequence[str]) -> dict[str, str]:
        """Sections to which a user's class, estimator or library may add keys.

        Returns:
            For each section, the dictionary that holds such keys, as for `parse_override`.
        """
        # Keys by which a user's code takes part, with their values. Those of the command line are
        # not assigned yet, so they are read from it here.
        keys = (CUSTOM_CLASS, "algorithm.adv_estimator", EXTERNAL_LIB)
        values = {key: self.value(key) for key in keys if leaf_of(key, self.task)}
        for argument in overrides:
            key, _, value = argument.lstrip("+").partition("=")
            if key in values:
                values[key] = value
        unset_values = (_MISSING, None, "", "null")
        open_sections = {}
        if values.get(CUSTOM_CLASS) not in unset_values:
            open_sections["data"] = CUSTOM_OPTIONS
        # `file.py:function` names a user's estimator.
        is_users_estimator = ":" in str(values.get("algorithm.adv_estimator", ""))
        if is_users_estimator or values.get(EXTERNAL_LIB) not in unset_values:
            open_sections["algorithm"] = "algorithm.adv_options"
        return open_sections

    def assign(self, key: str, value: Any, places: Mapping[str, str]) -> None:
        """Assign a value to a dotted key, or add a problem if that is impossible.

        Args:
            key: a key, or a section whose value is a dictionary, in either spelling.
            value: the value.
            places: file and line by dotted key, as the file spells it.
        """
        key_in_file = key
        place = places.get(key)
        key = spell_key(key, self.task)
        if key == _ENVIRONMENT and isinstance(value, str):
            key = f"{_ENVIRONMENT}.name"
        sections = section_keys(self.task)
        if leaf_of(key, self.task) is not None:
            self._store(key, value, place)
        elif isinstance(value, dict) and (value or key in sections):
            for name, entry in value.items():
                self.assign(f"{key_in_file}.{name}", entry, places)
        elif key not in sections:
            self._report_unknown_key(key, value, place)
        elif value is not None:
            # A section without keys is null in YAML, which is accepted. Other values are not.
            prefix = f"{key}."
            names = [
                leaf_key.removeprefix(prefix).partition(".")[0]
                for leaf_key in leaf_keys(self.task)
                if leaf_key.startswith(prefix)
            ]
            self.add_problem(
                key,
                place,
                got=as_text(value, key),
                expected="a section",
                fix=f"Its keys are {', '.join(dict.fromkeys(names))}.",
            )

    def _store(self, key: str, value: Any, place: str | None) -> None:
        """Store the value of a key in the tree, or add a problem if that is impossible.

        Entries of a dictionary are added to those that the key has already.
        """
        if "${" in str(value):
            self.add_problem(
                key,
                place,
                got=as_text(value, key),
                expected="a value",
                fix="References are not resolved: write the value.",
            )
            return
        *path, last = spell_key(key, self.task, in_full=True).split(".")
        node = self.values
        for depth, name in enumerate(path, start=1):
            node = node.setdefault(name, {})
            # A section above the key may have been set to a plain value.
            if not isinstance(node, dict):
                above = spell_key(".".join(path[:depth]), self.task)
                self.add_problem(
                    key,
                    place,
                    got=f"a key under {above}",
                    expected=f"none, because {above} is {as_text(node, above)}",
                )
                return
        # A later dictionary replaces single entries of an earlier one, not all of it.
        if isinstance(value, dict) and isinstance(node.get(last), dict):
            value = fill_missing(value, node[last])
        # A copy, because an anchor in YAML puts one object in several places.
        node[last] = deepcopy(value)
        self.places[key] = place or ""

    def _report_unknown_key(self, key: str, value: Any, place: str | None) -> None:
        """Add a problem about a key that does not exist, with the keys that may be meant."""
        if is_key_of_verl(key, self.task):
            program = "main_ppo" if self.task == "rl" else "sft_trainer"
            fix = f"`quadriga verl {program}` accepts verl's command lines; here leave the key out."
            # verl has the parallel sizes in a section for Megatron; here they are beside it. For a key
            # outside that section `section` is "", and `size_key`, which begins with a dot, is no key.
            section, _, name = key.rpartition(".megatron.")
            size_key = f"{section}.{_SIZES_OF_MEGATRON.get(name, name)}"
            if leaf_of(size_key, self.task):
                fix = f"Set {size_key}, the size for either training engine."
            self.add_problem(key, place, got="a key of verl that does not exist here", fix=fix)
            return
        close_keys = nearest_keys(key, self.task)
        command = "quadriga config keys" if self.task == "rl" else "quadriga sft --keys"
        fix = f"`{command}` lists all keys."
        if close_keys:
            fix = f"Did you mean {' or '.join(close_keys)}?"
        self.add_problem(key, place, got="a key that does not exist", fix=fix)

    def add_problem(
        self, key: str, place: str | None, *, got: str, expected: str = "", fix: str = ""
    ) -> None:
        """Add a problem about a key.

        Args:
            key: the dotted key.
            place: file and line, if known.
            got: value of the key, or what is wrong with it, such as "a key that does not exist".
            expected: the values that are accepted.
            fix: how to correct the configuration.
        """
        where = f"{key} ({place})" if place else key
        self.problems.append(ConfigError(where, got=got, expected=expected, fix=fix))

    def finish(
        self, notices: list[str], *, for_training: bool, is_verls: bool = False
    ) -> Config | None:
        """Validate the values and make all checks.

        Problems are added to `self.problems`, notices to `notices`, both in the task's spelling.

        Args:
            notices: the notices so far.
            for_training: whether to make the checks of a training run.
            is_verls: whether the values are from a command line of verl.

        Returns:
            The configuration. None: the values cannot be read.
        """
        config = self.validate()
        if for_training and config is not None:
            if not is_verls:
                config, notice = with_groups(config)
                if notice:
                    notices.append(notice)
            # Checks see defaults in place of refused values, so they may report such a key again.
            refused_keys = {problem.where.partition(" (")[0] for problem in self.problems}
            problems, further_notices = training_findings(config, is_verls=is_verls)
            for problem in problems:
                if spell_key(problem.where, self.task) not in refused_keys:
                    self.problems.append(problem)
            notices += [spell_text(text, self.task) for text in further_notices]
        for problem in self.problems:
            respell(problem, self.task)  # in place
        return config

    def validate(self) -> Config | None:
        """Validate the values, and add a problem for each that is refused.

        Returns:
            The configuration, with defaults in place of refused values, so that checks between keys
            can continue. None: defaults alone are refused too.
        """
        # A second attempt without the refused values, so that checks can report more problems.
        for _ in range(2):
            try:
                return Config.model_validate(self.values)
            except ValidationError as error:
                errors = error.errors(include_url=False)
            refused_keys = set()
            for error in errors:
                key = self._key_of(error["loc"])
                # A key that has no value here got it from another one, such as from clip_ratio, and
                # is refused with it. Only the key that the user has written is reported.
                if key not in refused_keys and self.value(key) is not _MISSING:
                    refused_keys.add(key)
                    self._report_value(key, error)
            assert refused_keys, f"pydantic refuses a default value: {errors}"
            for key in refused_keys:
                self.value(key, remove=True)
        return None

    def _key_of(self, location: Sequence[int | str]) -> str:
        """Find the key at which pydantic reports an error.

        Args:
            location: path of the error. After the key it may have positions in lists and names of
                members of a union.

        Returns:
            The dotted key; "" for the root.
        """
        known_keys = section_keys(self.task) | leaf_keys(self.task).keys()
        for depth in range(len(location), 0, -1):
            key = spell_key(".".join(map(str, location[:depth])), self.task)
            if key in known_keys:
                return key
        return ""

    def _report_value(self, key: str, error: ErrorDetails) -> None:
        """Add a problem about a value that pydantic refuses."""
        value = self.value(key)
        leaf = leaf_keys(self.task).get(key)
        expected = leaf.kind if leaf else "a section"
        fix = ""
        # An error that `refuse` made has both texts.
        if error["type"] == "refused":
            expected = error["ctx"]["expected"]
            fix = error["ctx"]["fix"]
        elif leaf is None:
            pass  # a section
        elif value in ("None", "none") and leaf.kind.endswith("null"):
            fix = "Write null."
        elif isinstance(value, int | float) and leaf.is_text:
            fix = "Put text that looks like a number in quotes."
        elif isinstance(value, str) and expected.startswith("one of "):
            # The text is that of `_describe_type`: "one of a, b, c".
            choices = expected.removeprefix("one of ").split(", ")
            close_choices = get_close_matches(value, choices, n=1)
            fix = f"Set {key}={leaf.default or 'null'}, the default."
            if close_choices:
                fix = f"Did you mean {close_choices[0]}?"
        self.add_problem(
            key, self.places.get(key), got=as_text(value, key), expected=expected, fix=fix
        )

    def value(self, key: str, *, remove: bool = False) -> Any:
        """Value of a key; `_MISSING` if it has none.

        Args:
            key: the dotted key.
            remove: whether to remove the value from the tree.
        """
        *path, last = spell_key(key, self.task, in_full=True).split(".")
        node: Any = self.values
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        if not isinstance(node, dict) or last not in node:
            return _MISSING
        return node.pop(last) if remove else node[last]
