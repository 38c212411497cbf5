# SPDX-License-Identifier: Apache-2.0
"""Settings of a run: stored in its directory, and compared when it is resumed.

DIRECTORY/
  config.yaml               the resolved configuration. Comments at its end name the steps for
                            which it is valid, and the SHA-256 of each data file and each file of
                            the user that it names
  config_from_step_1.yaml   configuration of earlier steps, which begin with that one
"""

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from quadriga.config import Config, show
from quadriga.config.keys import leaf_keys
from quadriga.config.yaml_text import as_text, parse_yaml
from quadriga.errors import CheckpointError, ConfigError
from quadriga.observe.watchdog import waiting
from quadriga.trainer.checkpoint import (
    checkpoint_to_resume,
    numbered_paths,
    sha256_of,
    step_of,
    verify,
    write_atomically,
)

CONFIGURATION = "config.yaml"
CONTENT = ": its content"  # suffix of a change in the content of a file
_STEPS = re.compile(r"^# steps (\d+) to (\d+)$", re.MULTILINE)
_FILE = re.compile(r"^# ([0-9a-f]{64})  (.+)$", re.MULTILINE)
_SOURCE = re.compile(r"^# source: (.+)$", re.MULTILINE)  # in files that `write_function` writes
# Keys that do not affect the steps: where a run resumes, and when the clock saves it.
_RESUMING = (
    "trainer.resume_mode",
    "trainer.resume_from_path",
    "trainer.resume_fallback",
    "trainer.save_minutes",
)
# Sections that may name files.
_WITH_FILES = (
    "data",
    "actor_rollout_ref",
    "critic",
    "reward_model",
    "custom_reward_function",
    "algorithm",
)
_STEPS_FROM = ("data.", "trainer.total_")  # prefixes of keys that the number of steps depends on
_MAX_VALUE_CHARACTERS = 80  # in a message


@dataclass(frozen=True)
class RunSettings:
    """The configuration with which some steps of a run were taken."""

    values: dict[str, Any]  # value of each key that the task reads, by its dotted name
    files: dict[str, str]  # SHA-256 of the files that the configuration names, by path
    first: int = 1  # first step for which it is valid
    last: int = 0  # last step of the run; 0 if it is not known

    @classmethod
    def of(cls, config: Config) -> "RunSettings":
        """Compute the settings of a run that starts with a configuration."""
        with waiting("the checksums of data files and of files that the configuration names"):
            return cls(_task_values(show(config), config.task), _checksums(config))

    @classmethod
    def read(cls, path: Path, task: str) -> "RunSettings | None":
        """Read the settings from a file; None if it is missing or unreadable."""
        try:
            text = path.read_text(encoding="utf-8")
            values = _task_values(text, task)
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return None
        files = {name: digest for digest, name in _FILE.findall(text)}
        steps = _STEPS.search(text)
        if steps is None:
            return cls(values, files)
        return cls(values, files, first=int(steps[1]), last=int(steps[2]))

    def digest_lines(self) -> str:
        """Comments with the digests of the files, for the end of a file that `read` reads."""
        return "".join(f"# {digest}  {name}\n" for name, digest in self.files.items())

    def changes(self, later: "RunSettings") -> list[str]:
        """Describe how later settings differ from these.

        A key that only one of them has was added or removed by another version of Quadriga, and is
        not a change.

        Returns:
            One line for each key, which begins with the key; and for each file whose content
            differs, its path followed by `CONTENT`.
        """
        lines = []
        for key, value in later.values.items():
            # `after_each_epoch` is replaced by a number of steps once the data are read.
            if key not in self.values or key in _RESUMING or value == "after_each_epoch":
                continue
            if value != self.values[key]:
                before = _short_text(self.values[key], key)
                after = _short_text(value, key)
                change = f"{before} -> {after}"
                # Each version of a user's function is written to a file of another name, so two
                # versions have different values but the same text.
                if before == after:
                    change = f"another version of {after}"
                lines.append(f"{key}: {change}")
        # A file that only one of the two names is no change here: the key that names it has changed.
        for name, digest in later.files.items():
            if self.files.get(name, digest) != digest:
                lines.append(f"{name}{CONTENT}")
        return lines


def settings_of(checkpoint: Path, task: str) -> RunSettings | None:
    """The settings of the step after which a checkpoint was written; None if they are not known.

    Args:
        checkpoint: folder of the checkpoint.
        task: `task` of the configuration.
    """
    _, settings = configuration_of(checkpoint.parent, step_of(checkpoint), task)
    return settings


def configuration_of(directory: Path, step: int, task: str) -> tuple[Path, RunSettings | None]:
    """Find the file with the configuration of a step.

    Args:
        directory: the run's directory.
        step: number of the step.
        task: `task` of the configuration.

    Returns:
        The path of the newest configuration that begins at the step or before, and its settings. If
        there is no readable one, the path of `CONFIGURATION` and None.
    """
    path = directory / CONFIGURATION
    settings = None
    for candidate_path in (directory / CONFIGURATION, *earlier_configurations(directory).values()):
        candidate = RunSettings.read(candidate_path, task)
        if candidate is None or candidate.first > step:
            continue
        if settings is None or candidate.first > settings.first:
            path = candidate_path
            settings = candidate
    return path, settings


def has_nothing_to_do(config: Config, settings: RunSettings, *, in_python: bool = False) -> bool:
    """Whether no step is left to take after the checkpoint to resume from.

    If steps are left, prints which settings differ from those of the checkpoint.

    Args:
        config: the resolved configuration.
        settings: its settings.
        in_python: whether messages name arguments of Python functions rather than keys.

    Returns:
        True if no step is left. False if steps are left, or if their number is not known before the
        data are loaded.

    Raises:
        ConfigError: no step is left, and settings differ.
    """
    trainer = config.trainer
    path = checkpoint_to_resume(trainer)
    if path is None or trainer.val_only:
        return False
    try:
        step = step_of(path)
        old_settings = settings_of(path, config.task)
        changes = old_settings.changes(settings) if old_settings else []
        last = trainer.total_training_steps
        # If the configuration has no number of steps, that of the earlier run holds if neither the
        # data nor the number of epochs has changed.
        if not last and old_settings:
            steps_may_differ = any(
                change.startswith(_STEPS_FROM) or change.endswith(CONTENT) for change in changes
            )
            last = 0 if steps_may_differ else old_settings.last
        # A supervised run may have been interrupted before it wrote its model, so it goes on.
        if last and step >= last and (config.task == "rl" or changes):
            verify(path)
            say_nothing_to_do(config, path, last, settings, in_python=in_python)
            return True
    except CheckpointError:
        # Loading the checkpoint will raise the error again.
        return False
    if changes:
        print(f"The run goes on from step {step} with other settings than before:")
        for change in changes:
            print(f"  {change}")
    return False


def say_nothing_to_do(
    config: Config, checkpoint: Path, last: int, settings: RunSettings, *, in_python: bool = False
) -> None:
    """Print that no step is left after a checkpoint.

    Args:
        config: the resolved configuration.
        checkpoint: the checkpoint to resume from.
        last: number of the last step.
        settings: settings of the configuration.
        in_python: whether messages name arguments of Python functions rather than keys.

    Raises:
        ConfigError: the checkpoint was made with other settings.
    """
    trainer = config.trainer
    done = f"{step_of(checkpoint)} of {last} steps are done"
    # The settings that make the run longer, and that select another directory.
    length_key = "trainer.total_epochs"
    if trainer.total_training_steps == last:
        length_key = "trainer.total_training_steps"
    directory_key = "trainer.default_local_dir"
    if "{experiment_name}" in trainer.default_local_dir:
        directory_key = "trainer.experiment_name"
    if in_python:
        length_key = "steps"
        directory_key = "name"
    old_settings = settings_of(checkpoint, config.task)
    changes = old_settings.changes(settings) if old_settings else []
    if not changes:
        where = checkpoint.parent
        print(f"nothing to do: {done} in {where}; raise {length_key} or set {directory_key}")
        return
    fix = (
        f"Set {directory_key} for a run of its own, raise {length_key} to go on with these "
        "settings, or begin anew with trainer.resume_mode=disable. What differs:"
    )
    raise ConfigError(
        str(checkpoint.parent),
        got=f"a run whose {done}, with other settings",
        expected="a run with steps to do",
        fix="\n  ".join([fix, *changes]),
    )


def keep_settings(config: Config, settings: RunSettings, done: int, last: int) -> None:
    """Write config.yaml for the coming steps; a file with other settings is kept under a new name.

    Args:
        config: the resolved configuration.
        settings: its settings.
        done: number of steps that are done.
        last: number of the last step.

    Raises:
        CheckpointError: the file cannot be written.
    """
    directory = config.trainer.directory
    path = directory / CONFIGURATION
    first = done + 1
    old_settings = RunSettings.read(path, config.task)
    # A run that takes no steps must not replace the settings of one that did.
    if path.exists() and (config.trainer.val_only or done >= last):
        return
    # The file is already valid for the coming steps.
    if (
        old_settings
        and old_settings.first < first
        and old_settings.last == last
        and not old_settings.changes(settings)
    ):
        return
    text = f"{show(config)}# steps {first} to {last}\n{settings.digest_lines()}"
    try:
        for earlier_first, earlier_path in earlier_configurations(directory).items():
            # The run is about to take these steps again.
            if earlier_first >= first:
                earlier_path.unlink()
        # The existing file stays valid for earlier steps. It is kept, and named by the first of them.
        if old_settings and old_settings.first < first:
            path.rename(directory / f"config_from_step_{old_settings.first}.yaml")
        elif not old_settings and path.exists():
            damaged_path = path.rename(directory / f"damaged_{CONFIGURATION}")
            print(
                f"DAMAGED: {path} holds no configuration: how earlier steps were made is not "
                f"known. Kept: {damaged_path}"
            )
        directory.mkdir(parents=True, exist_ok=True)
        # Readable for its owner alone, as it may hold secrets.
        write_atomically(path, text, mode=0o600)
    except OSError as error:
        raise CheckpointError(
            f"trainer.default_local_dir={directory}",
            got=f"{type(error).__name__}: {error.strerror or error}",
            expected="a directory that can be written",
            fix="Free space or set trainer.default_local_dir to another one.",
        ) from error


def earlier_configurations(directory: Path) -> dict[int, Path]:
    """Files with the configurations of earlier steps, by the first of these steps."""
    return numbered_paths(directory, "config_from_step_", ".yaml")


def _task_values(text: str, task: str) -> dict[str, Any]:
    """Values of the keys that a task reads, as far as the text of a configuration has them.

    Raises:
        ValueError: the text is no configuration.
    """
    tree = parse_yaml(text)
    if not isinstance(tree, dict):
        raise ValueError("no configuration")
    values = {}
    for key in leaf_keys(task):
        *sections, name = key.split(".")
        node = tree
        for section in sections:
            # A file of another version may lack the section.
            node = node.get(section) if isinstance(node, dict) else None
        if isinstance(node, dict) and name in node:
            values[key] = node[name]
    return values


def _checksums(config: Config) -> dict[str, str]:
    """SHA-256 of the files that a configuration names, by path."""
    tree = config.model_dump(mode="json")
    checksums = {}
    # Every text in these sections may be the path of a file, or a pattern of paths.
    for text in _strings_in([tree[section] for section in _WITH_FILES]):
        name = os.path.expanduser(_file_named(text))
        paths = [name]
        if glob.has_magic(name) and "\n" not in name:
            paths = sorted(glob.glob(name, recursive=True))
        for path in paths:
            if os.path.isfile(path):
                checksums[path] = _sha256(path, os.stat(path).st_mtime_ns)
    return checksums


@cache
def _sha256(path: str, _mtime_ns: int) -> str:
    """SHA-256 of a file. The time is part of the cache's key: a changed file is read again."""
    return sha256_of(path)


def _strings_in(value: Any) -> Iterator[str]:
    """All strings among the values of nested lists and dictionaries."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        yield from _strings_in(list(value.values()))
    elif isinstance(value, list):
        for item in value:
            yield from _strings_in(item)


def _file_named(text: str) -> str:
    """The file that a value names, without the function of `path/to/file.py:function`."""
    return text.rpartition(":")[0] if ".py:" in text else text


def _short_text(value: Any, key: str) -> str:
    """The value of a key as a short text for messages."""
    file = Path(_file_named(str(value)))
    # A user's function that `write_function` wrote is named by its source.
    if file.suffix == ".py" and file.with_suffix(".pickle").is_file():
        source = _SOURCE.search(file.read_text(encoding="utf-8"))
        if source:
            return source[1]
    text = as_text(value, key)
    return text if len(text) <= _MAX_VALUE_CHARACTERS else f"{text[: _MAX_VALUE_CHARACTERS - 3]}..."
