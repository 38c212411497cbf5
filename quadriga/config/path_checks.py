# SPDX-License-Identifier: Apache-2.0
"""Checks of files, folders and models that the configuration names."""

import glob
import os
import re
from pathlib import Path

from quadriga.config.base import Findings
from quadriga.config.rollout import ROLLOUT
from quadriga.config.root import Config
from quadriga.errors import MachineError

_HUB_NAME = re.compile(r"[\w\-]+(?:/[\w.\-]+)?")


def check_paths(config: Config) -> Findings:
    """Yield paths that do not exist, and directories that cannot be written."""
    yield from _check_inputs(config)
    trainer = config.trainer
    yield from _check_directory("trainer.default_local_dir", str(trainer.directory))
    yield from _check_directory("trainer.rollout_data_dir", trainer.rollout_data_dir)
    yield from _check_directory(f"{ROLLOUT}.trace_dir", config.actor_rollout_ref.rollout.trace_dir)
    yield from _check_directory("trainer.validation_data_dir", trainer.validation_data_dir)
    if config.global_profiler.tool:
        yield from _check_directory("global_profiler.save_path", config.global_profiler.save_path)


def _check_inputs(config: Config) -> Findings:
    """Yield files and directories to read that do not exist."""
    data = config.data
    rollout = config.actor_rollout_ref.rollout
    functions = config.custom_reward_function.path
    yield from check_exists("custom_reward_function.path", functions, "a Python file")
    yield from check_exists("async_training.replay", config.async_training.replay, "a file")
    yield from check_exists("data.custom_cls.path", data.custom_cls.path, "a Python file")
    yield from check_exists("data.sampler.class_path", data.sampler.class_path, "a Python file")
    for option in rollout.traits.file_options:
        key = f"{ROLLOUT}.engine_kwargs.{option}"
        path = rollout.engine_kwargs.get(option)
        # The key is in an open dictionary, so it may be missing or no text.
        if isinstance(path, str):
            yield from check_exists(key, path, "a file")
        else:
            yield MachineError(key, "nothing", "a file", f"The engine {rollout.name} reads it.")
    template = config.actor_rollout_ref.model.custom_chat_template
    # Text with a brace is a template itself; other text is the name of a file.
    if template and "{" not in template:
        key = "actor_rollout_ref.model.custom_chat_template"
        yield from check_exists(key, template, "a file")
    if config.trainer.resume_mode == "resume_path":
        checkpoint = config.trainer.resume_from_path
        yield from check_exists("trainer.resume_from_path", checkpoint, "a checkpoint's directory")


def check_exists(key: str, path: str | None, expected: str) -> Findings:
    """Yield an error if a path does not exist.

    Args:
        key: the key that names the path.
        path: a path or a `file://` URL; null is not checked.
        expected: what the path must name, for the error. "a Python file" may also be a module
            (`pkg://`), and like "a YAML file" it cannot be a folder. The last word, such as "file",
            is used alone as well.
    """
    is_python = expected == "a Python file"
    # Whether a module exists shows only when it is imported, which a check must not do.
    if path is None or (is_python and path.startswith("pkg://")):
        return
    must_be_file = is_python or expected == "a YAML file"
    exists = os.path.isfile if must_be_file else os.path.exists
    if not exists(os.path.expanduser(path.removeprefix("file://"))):
        kind = expected.split()[-1]
        yield MachineError(
            key,
            f"'{path}'",
            expected,
            f"There is no such {kind}; relative paths start at the current directory.",
        )


def _check_directory(key: str, path: str | None) -> Findings:
    """Yield an error if a directory cannot be created or written."""
    if path is None:
        return
    if "://" in path:
        yield MachineError(
            key,
            f"'{path}'",
            "a local directory",
            "Write to a local directory, and copy it from there.",
        )
        return
    # The nearest folder on the path that exists must be writable: the others are created in it.
    parent = Path(path).expanduser().absolute()
    while not parent.exists():
        parent = parent.parent
    if not parent.is_dir():
        yield MachineError(key, f"'{path}'", "a directory", f"{parent} is a file.")
    elif not os.access(parent, os.W_OK | os.X_OK):
        yield MachineError(key, f"'{path}'", "a writable directory", f"{parent} is not writable.")


def check_files(config: Config) -> Findings:
    """Yield data files and models that do not exist."""
    trainer = config.trainer
    env = config.env
    # An environment makes the rows of a run without files.
    needs_files = env.name is None
    yield from _check_data("data.train_files", config.data.train_files, is_needed=needs_files)
    # Supervised tasks skip the validation before training if there are no files.
    validates_first = trainer.val_before_train and config.task == "rl"
    validates = validates_first or trainer.test_freq != -1
    yield from _check_data(
        "data.val_files",
        config.data.val_files,
        is_needed=validates and (needs_files or env.num_val_episodes == 0),
        alternative="To train without validation set trainer.val_before_train=False "
        "and leave trainer.test_freq at -1.",
    )

    key = "actor_rollout_ref.model.path"
    policy = config.actor_rollout_ref.model.path
    if not policy:
        yield MachineError(
            key,
            "nothing",
            "a model",
            "Set it to a folder or a name on the hub (`quadriga prepare model` writes a folder).",
        )
    yield from _check_model(key, policy)
    yield from _check_model("critic.model.path", config.critic.model.path)
    if config.reward_model.enable:
        yield from _check_model("reward_model.model.path", config.reward_model.model.path)
    for teacher_key, teacher in config.distillation.loaded_teachers.items():
        yield from _check_model(teacher_key, teacher)


def _check_data(
    key: str, files: str | list[str], *, is_needed: bool, alternative: str = ""
) -> Findings:
    """Yield data files that do not exist, patterns without a match, and a needed key without files.

    Args:
        key: the key that names the files.
        files: a path or pattern, or a list of these.
        is_needed: whether the run needs at least one file.
        alternative: a sentence for errors about missing files, on how to do without any; "": none.
    """
    listed_paths = [files] if isinstance(files, str) else files
    paths = [path for path in listed_paths if path]
    if not paths and is_needed:
        fix = f"Set {key} to a parquet, json or jsonl file (`quadriga prepare data` writes some)."
        yield MachineError(key, "nothing", "a file", f"{fix} {alternative}".strip())
    for path in paths:
        if path in ("None", "none"):
            fix = f"For no file write null. {alternative}".strip()
            yield MachineError(key, f"'{path}'", "a file", fix)
            continue
        # Whether a URL exists shows when the data are loaded.
        if "://" in path:
            continue
        full_path = os.path.expanduser(path)
        # A file whose name has a `*` or a bracket is no pattern.
        if not glob.has_magic(full_path) or os.path.exists(full_path):
            yield from check_exists(key, path, "a file")
        elif not glob.glob(full_path, recursive=True):
            yield MachineError(
                key, f"'{path}'", "a pattern that matches a file", "No file matches it."
            )


def _check_model(key: str, path: str | None) -> Findings:
    """Yield an error if a path is neither a model's folder nor a name on the hub."""
    if not path:
        return
    folder = Path(path).expanduser()
    if not folder.is_dir():
        if not _HUB_NAME.fullmatch(path):
            yield MachineError(
                key,
                f"'{path}'",
                "a model's folder",
                "There is no such folder, and it is not a name on the hub.",
            )
    elif not (folder / "config.json").is_file():
        yield MachineError(
            key,
            f"'{path}', without a config.json",
            "a model's folder",
            "Name the folder of a Hugging Face model, which has config.json and the weights.",
        )
