# SPDX-License-Identifier: Apache-2.0
"""Checks of the files and directories that a training run names."""

import glob
import os
import re
from pathlib import Path

from quadriga.config.findings import Findings
from quadriga.config.root import Config

_HUB_NAME = re.compile(r"[\w\-]+(?:/[\w.\-]+)?")


def check_paths(config: Config, found: Findings) -> None:
    """Refuses paths that are missing, and directories that cannot be written."""
    trainer = config.trainer
    _check_data_files(found, "data.train_files", config.data.train_files, is_needed=True, without="")
    needs_validation = trainer.val_before_train or trainer.test_freq > 0
    without = " To train without validation set trainer.val_before_train=False and leave trainer.test_freq at -1."
    _check_data_files(found, "data.val_files", config.data.val_files, is_needed=needs_validation, without=without)
    _check_models(config, found)
    _check_code(config, found)
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path is not None:
        _check_exists(found, "trainer.resume_from_path", trainer.resume_from_path, "a checkpoint's directory")
    _check_writable(found, "trainer.default_local_dir", str(trainer.directory))
    for key, path in (
        ("trainer.rollout_data_dir", trainer.rollout_data_dir),
        ("actor_rollout_ref.rollout.trace_dir", config.actor_rollout_ref.rollout.trace_dir),
        ("trainer.validation_data_dir", trainer.validation_data_dir),
        ("global_profiler.save_path", config.global_profiler.save_path if config.global_profiler.tool else None),
    ):
        if path is not None:
            _check_writable(found, key, path)


def _check_data_files(found: Findings, key: str, files: str | list[str], *, is_needed: bool, without: str) -> None:
    paths = [one for one in ([files] if isinstance(files, str) else files) if one]
    if not paths:
        if is_needed:
            fix = f"Set {key} to a parquet, json or jsonl file (`quadriga prepare data` writes some).{without}"
            found.refuse(key, got="nothing", expected="a file", fix=fix)
        return
    for path in paths:
        # Files behind a URL are looked for when the data are loaded.
        if "://" in path:
            continue
        full = os.path.expanduser(path)
        if glob.has_magic(full) and not os.path.exists(full):
            if not glob.glob(full, recursive=True):
                found.refuse(key, got=f"'{path}'", expected="a pattern that fits a file", fix="No file fits it.")
        else:
            _check_exists(found, key, path, "a file")


def _check_models(config: Config, found: Findings) -> None:
    policy = config.actor_rollout_ref.model.path
    if not policy:
        fix = "Set it to a folder or a name on the hub (`quadriga prepare model` writes a folder)."
        found.refuse("actor_rollout_ref.model.path", got="nothing", expected="a model", fix=fix)
    reward = config.reward_model
    for key, path in (
        ("actor_rollout_ref.model.path", policy),
        ("critic.model.path", config.critic.model.path),
        ("reward_model.model.path", reward.model.path if reward.enable else None),
    ):
        if not path:
            continue
        folder = Path(path).expanduser()
        if folder.is_dir():
            if not (folder / "config.json").is_file():
                fix = "It does not hold a Hugging Face model: name the folder with config.json and the weights."
                found.refuse(key, got=f"'{path}', without a config.json", expected="a model's folder", fix=fix)
        elif not _HUB_NAME.fullmatch(path):
            fix = "There is no such folder, and it is not a name on the hub."
            found.refuse(key, got=f"'{path}'", expected="a model's folder", fix=fix)


def _check_code(config: Config, found: Findings) -> None:
    reward = config.custom_reward_function
    for key, path in (
        ("custom_reward_function.path", reward.path),
        ("data.custom_cls.path", config.data.custom_cls.path),
        ("data.sampler.class_path", config.data.sampler.class_path),
    ):
        if path is not None:
            _check_exists(found, key, path, "a Python file")
    if reward.path is None and reward.reward_kwargs:
        found.notice("custom_reward_function.reward_kwargs: not used, for custom_reward_function.path is null.")
    rollout = config.actor_rollout_ref.rollout
    if rollout.name == "scripted":
        answers = rollout.engine_kwargs.get("responses_file")
        key = "actor_rollout_ref.rollout.engine_kwargs.responses_file"
        if not isinstance(answers, str):
            found.refuse(key, got="nothing", expected="a file", fix="The scripted engine reads its answers from it.")
        else:
            _check_exists(found, key, answers, "a file")


def _check_exists(found: Findings, key: str, path: str, what: str) -> None:
    if not os.path.exists(os.path.expanduser(path)):
        fix = "It does not exist; relative paths start where the command is run."
        found.refuse(key, got=f"'{path}'", expected=what, fix=fix)


def _check_writable(found: Findings, key: str, path: str) -> None:
    """The nearest directory above that exists must be one that we may write in."""
    if "://" in path:
        found.refuse(key, got=f"'{path}'", expected="a local directory", fix="Write locally, and copy it from there.")
        return
    place = Path(path).expanduser().absolute()
    while not place.exists():
        place = place.parent
    if not place.is_dir():
        found.refuse(key, got=f"'{path}'", expected="a directory", fix=f"{place} is a file.")
    elif not os.access(place, os.W_OK | os.X_OK):
        found.refuse(key, got=f"'{path}'", expected="a directory that can be written", fix=f"{place} cannot be.")
