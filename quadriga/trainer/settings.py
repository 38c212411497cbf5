# SPDX-License-Identifier: Apache-2.0
"""The settings that the steps of a run were made with, kept beside its checkpoints, and what changes when it goes on.

DIRECTORY/
  config.yaml               the resolved configuration. Comments at its end name the steps that it holds for, and the
                            SHA-256 of each data file and each file of the user's that it names
  config_from_step_1.yaml   one that held before, from that step on
"""

import glob
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from hashlib import file_digest
from pathlib import Path
from typing import Any

import yaml

from quadriga.config import Config, show
from quadriga.config.keys import leaf_keys
from quadriga.config.yaml_text import as_text, parse_yaml
from quadriga.errors import CheckpointError, ConfigError
from quadriga.observe.watchdog import waiting
from quadriga.trainer.checkpoint import start_of, step_of, verify, write_atomically

CONFIGURATION = "config.yaml"
_STEPS = re.compile(r"^# steps (\d+) to (\d+)$", re.MULTILINE)
_FILE = re.compile(r"^# ([0-9a-f]{64})  (.+)$", re.MULTILINE)
# They say where a run goes on, not how.
_RESUMING = ("trainer.resume_mode", "trainer.resume_from_path", "trainer.resume_fallback")
_WITH_FILES = (
    "data",
    "actor_rollout_ref",
    "critic",
    "reward_model",
    "custom_reward_function",
    "algorithm",
)
CONTENT = ": its content"  # the end of a line about a file that changed
_STEPS_FROM = ("data.", "trainer.total_")
_SHOWN = 80


@dataclass(frozen=True)
class Settings:
    """One configuration of a run."""

    values: dict[str, Any]  # what each key of the task has, by its dotted name
    files: dict[str, str]  # SHA-256 of the files that it names, by path
    # first, last: the steps that it holds for; 0: it is not known
    first: int = 1
    last: int = 0

    @classmethod
    def of(cls, config: Config) -> "Settings":
        """Those of a run that begins."""
        with waiting("the checksums of data files and of files that the configuration names"):
            return cls(_values(show(config), config.task), _checksums(config))

    @classmethod
    def read(cls, path: Path, task: str) -> "Settings | None":
        """Those of a file; None: there is none that can be read."""
        try:
            text = path.read_text(encoding="utf-8")
            values = _values(text, task)
        except (OSError, ValueError, yaml.YAMLError, RecursionError):
            return None
        steps = _STEPS.search(text)
        first, last = (int(steps[1]), int(steps[2])) if steps else (1, 0)
        return cls(values, {name: digest for digest, name in _FILE.findall(text)}, first, last)

    def changes(self, now: "Settings") -> list[str]:
        """What differs from these settings in those that hold now, a line each; a key that only one of them has was
        added or removed by another version."""
        keys = [key for key in now.values if key in self.values and key not in _RESUMING]
        # It is counted in steps once the data are read.
        keys = [key for key in keys if now.values[key] != "after_each_epoch"]
        values = [(key, self.values[key], now.values[key]) for key in keys]
        lines = [
            f"{key}: {_shown(old, key)} -> {_shown(new, key)}"
            for key, old, new in values
            if old != new
        ]
        changed = (
            name for name, digest in now.files.items() if self.files.get(name, digest) != digest
        )
        return [*lines, *(f"{name}{CONTENT}" for name in changed)]


def settings_of(checkpoint: Path, task: str) -> Settings | None:
    """The settings that the last step before a checkpoint was made with, if they are known."""
    paths = (checkpoint.parent / CONFIGURATION, *_earlier(checkpoint.parent).values())
    held = [
        one
        for one in (Settings.read(path, task) for path in paths)
        if one and one.first <= step_of(checkpoint)
    ]
    return max(held, key=lambda one: one.first, default=None)


def has_nothing_to_do(config: Config, now: Settings) -> bool:
    """Compare the settings with those of the checkpoint that the run will go on from, and print what differs. Returns
    whether no step is left, as far as that is known before the data are read. Raises ConfigError: no step is left, and
    settings differ."""
    trainer, path = config.trainer, start_of(config.trainer)
    if path is None or trainer.val_only:
        return False
    try:
        step, before = step_of(path), settings_of(path, config.task)
        changes = before.changes(now) if before else []
        # Of epochs, while the data are as they were.
        is_known = not any(one.startswith(_STEPS_FROM) or one.endswith(CONTENT) for one in changes)
        last = trainer.total_training_steps or (before.last if before and is_known else 0)
        # A supervised run may have ended before its model was written.
        if last and step >= last and (config.task == "rl" or changes):
            verify(path)
            say_nothing_to_do(config, path, last, now)
            return True
    except CheckpointError:
        return False  # of its name, or damaged: that is told when it is loaded
    if changes:
        print(
            "\n  ".join(
                [f"The run goes on from step {step} with other settings than before:", *changes]
            )
        )
    return False


def say_nothing_to_do(config: Config, checkpoint: Path, last: int, now: Settings) -> None:
    """No step of `last` is left after a checkpoint: say so.
    Raises ConfigError: its settings are not those that hold now."""
    trainer, before = config.trainer, settings_of(checkpoint, config.task)
    done = f"{step_of(checkpoint)} of {last} steps are done"
    longer = (
        "trainer.total_training_steps"
        if trainer.total_training_steps == last
        else "trainer.total_epochs"
    )
    by_name = "{experiment_name}" in trainer.default_local_dir
    other = "trainer.experiment_name" if by_name else "trainer.default_local_dir"
    changes = before.changes(now) if before else []
    if not changes:
        print(f"nothing to do: {done} in {checkpoint.parent}; raise {longer} or set {other}")
        return
    anew = "or begin anew with trainer.resume_mode=disable. What differs:"
    fix = f"Set {other} for a run of its own, raise {longer} to go on with these settings, {anew}"
    got, expected = f"a run whose {done}, with other settings", "a run with steps to do"
    raise ConfigError(
        str(checkpoint.parent), got=got, expected=expected, fix="\n  ".join([fix, *changes])
    )


def keep_settings(config: Config, now: Settings, done: int, last: int) -> None:
    """Write config.yaml for the steps after `done`, to `last`; one that held for steps before stays under another name.
    Raises CheckpointError: it cannot be written."""
    directory, task = config.trainer.directory, config.task
    path, first = directory / CONFIGURATION, done + 1
    before = Settings.read(path, task)
    if path.exists() and (config.trainer.val_only or done >= last):
        return
    if before and before.first < first and before.last == last and not before.changes(now):
        return
    files = "".join(f"# {digest}  {name}\n" for name, digest in now.files.items())
    try:
        for begin, earlier in _earlier(directory).items():
            if begin >= first:
                earlier.unlink()  # of steps that are no part of the run any more
        if before and before.first < first:
            path.rename(directory / f"config_from_step_{before.first}.yaml")
        elif not before and path.exists():
            kept = path.rename(directory / f"damaged_{CONFIGURATION}")
            print(
                f"DAMAGED: {path} holds no configuration: how earlier steps were made is not known. Kept: {kept}"
            )
        directory.mkdir(parents=True, exist_ok=True)
        # For its owner alone.
        write_atomically(path, f"{show(config)}# steps {first} to {last}\n{files}", mode=0o600)
    except OSError as error:
        where, got = (
            f"trainer.default_local_dir={directory}",
            f"{type(error).__name__}: {error.strerror or error}",
        )
        fix = "Free space or set trainer.default_local_dir to another one."
        raise CheckpointError(
            where, got=got, expected="a directory that can be written", fix=fix
        ) from error


def _earlier(directory: Path) -> dict[int, Path]:
    """The configurations that held before, by the first step that they held for."""
    paths = {
        path.stem.removeprefix("config_from_step_"): path
        for path in directory.glob("config_from_step_*.yaml")
    }
    return {int(number): path for number, path in paths.items() if number.isdecimal()}


def _values(text: str, task: str) -> dict[str, Any]:
    """The keys that the task reads and a configuration's text has; ValueError where it is none."""
    tree, values = parse_yaml(text), {}
    if not isinstance(tree, dict):
        raise ValueError("no configuration")
    for key in leaf_keys(task):
        *path, last = key.split(".")
        node: Any = tree
        for name in path:
            node = node.get(name) if isinstance(node, dict) else None
        if isinstance(node, dict) and last in node:
            values[key] = node[last]
    return values


def _checksums(config: Config) -> dict[str, str]:
    tree, found = config.model_dump(mode="json"), {}
    for text in _texts([tree[name] for name in _WITH_FILES]):
        # `path/to/file.py:function` names a file too.
        name = os.path.expanduser(text.rpartition(":")[0] if ".py:" in text else text)
        for path in (
            sorted(glob.glob(name, recursive=True))
            if glob.has_magic(name) and "\n" not in name
            else [name]
        ):
            if os.path.isfile(path):
                found[path] = _sha256(path, os.stat(path).st_mtime_ns)
    return found


@cache
def _sha256(path: str, _mtime_ns: int) -> str:
    with open(path, "rb") as file:
        return file_digest(file, "sha256").hexdigest()


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from _texts(one)


def _shown(value: Any, key: str) -> str:
    text = as_text(value, key)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."
