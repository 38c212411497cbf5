# SPDX-License-Identifier: Apache-2.0
"""Turns the arguments of Quadriga's Python functions into a configuration.

Rows and functions of the caller are written to files that the configuration names.
"""

import itertools
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import datasets
import pandas as pd
import torch

from quadriga.config import Config, load_config, with_groups
from quadriga.config.loader import Loaded
from quadriga.config.trainer import AT_THE_END
from quadriga.data.files import (
    drop_null_fields,
    read_table,
    resolve_files,
    write_data_file,
)
from quadriga.errors import ConfigError, DataError, QuadrigaError
from quadriga.rewards.by_name import ROW, ItemReward, reward_of
from quadriga.user_file import import_file
from quadriga.user_function import NAME, source_of, write_function

RESPONSES_OF_A_CORE = 16
"""Responses in a step for each CPU core, if no batch size is set."""
RESPONSES_OF_A_GPU = 256
"""Responses in a step for each GPU, if no batch size is set."""

Rows = (
    str
    | Path
    | Sequence[str | Path]
    | Iterable[Mapping[str, Any]]
    | pd.DataFrame
    | datasets.Dataset
)
"""Data: a file, a list of files, an iterable of dictionaries, a data frame, or a data set."""
Reward = (
    str
    | Path
    | Callable[..., Any]
    | Sequence[Callable[..., Any] | tuple[Callable[..., Any], float]]
)
"""A function; a list of functions and of pairs `(function, weight)`; or `file.py:function`."""
ConfigFiles = str | Path | Sequence[str | Path]
"""A YAML file, or several; later files override earlier ones."""


class ConfigDraft:
    """A configuration under construction. `load` returns the finished one.

    Args:
        model: folder or name of the model; None: the one of the configuration.
        defaults: sections that the configuration files override.
        values: keys of the caller's arguments, which override the files. None is no value.
        config: the configuration files.
        options: further keys, which override all others.
        task: "rl", "sft" or "reward_model".
        is_frozen: whether the model is used without training.

    Attributes:
        files: the configuration files.
        values: keys that override the files: those of `values` and `options`, and those that were
            set or chosen since.
        config: the configuration at construction, without what was set since.
        directory: folder for the files with rows and functions.
        reward: the reward functions; None if they are not functions of this program.
        sources: for each file that was written for rows of the caller, the name of these rows in
            errors.
    """

    def __init__(
        self,
        model: str | Path | None,
        *,
        defaults: dict[str, Any] | None = None,
        values: Mapping[str, Any] | None = None,
        config: ConfigFiles = (),
        options: Mapping[str, Any] | None = None,
        task: str = "rl",
        is_frozen: bool = False,
    ) -> None:
        self.task = task
        self.is_frozen = is_frozen
        self.defaults = defaults or {}
        self.files = [config] if isinstance(config, str | Path) else list(config)
        self.values = {key: value for key, value in (values or {}).items() if value is not None}
        if model is not None:
            self.values["actor_rollout_ref.model.path"] = model
        for key, value in (options or {}).items():
            self.values[key] = list(value) if isinstance(value, tuple) else value
        if "trainer.total_training_steps" in self.values:
            # A number of epochs in a file must not limit the steps that the caller asks for.
            self.values.setdefault("trainer.total_epochs", None)
        self.config = self._load_config().config
        self.directory = self.config.trainer.directory
        self.reward: ItemReward | None = None
        self.sources: dict[str, str] = {}

    def _load_config(self, *, for_training: bool = False) -> Loaded:
        """Load the configuration from its files, with the keys that were set so far."""
        return load_config(
            files=self.files,
            values=self.values,
            task=self.task,
            for_training=for_training,
            defaults=self.defaults,
        )

    def load(self, *, for_training: bool = False) -> Config:
        """Load and check the configuration, and print its notices."""
        loaded = self._load_config(for_training=for_training)
        for notice in loaded.notices:
            print(f"notice: {notice}", file=sys.stderr)
        return loaded.config

    def choose_directory(self) -> None:
        """Choose a new directory for the run, unless the configuration names one."""
        trainer = self.config.trainer
        default = load_config(task=self.task).config.trainer
        keys = ("experiment_name", "default_local_dir")
        # The user has named the run or its directory.
        if any(getattr(trainer, key) != getattr(default, key) for key in keys):
            return
        # The first number that no earlier run has.
        name = self.directory.name
        for number in itertools.count(1):
            self.directory = self.directory.with_name(f"{name}-{number}")
            if not self.directory.exists():
                break
        self.values["trainer.experiment_name"] = self.directory.name
        print(f"run: {self.directory}")

    def set_function(self, key: str, function: str | Callable[..., Any] | None, label: str) -> None:
        """Set a key to a function.

        Args:
            key: the configuration key.
            function: a function, which is written to a file; or a name that the key accepts, such
                as that of a registered function. None: the key is not set.
            label: name of the caller's argument, for errors and for the file.

        Raises:
            ConfigError: other processes need the function, but it cannot be pickled.
        """
        if callable(function):
            file, obstacle = write_function(function, self.directory / "functions", label)
            if obstacle and self.config.trainer.backend != "local":
                raise ConfigError(
                    label,
                    got=obstacle,
                    expected="a function that can be pickled",
                    fix="Do not let it hold such an object, or train in one process.",
                )
            self.values[key] = f"{file}:{NAME}"
        elif function is not None:
            self.values[key] = function

    def set_reward(self, reward: Reward | None) -> None:
        """Set the keys of the reward, and decide in which processes its functions run.

        Functions run in this process if they cannot be pickled, else in separate ones.

        Args:
            reward: the caller's argument. None: the reward of the configuration.
        """
        if reward is None:
            # The reward of an earlier run may be functions that its program wrote to a file.
            section = self.config.custom_reward_function
            if section.path is not None and section.name == NAME:
                module = import_file(section.path, "custom_reward_function.path")
                function = getattr(module, NAME, None)
                self.reward = function if isinstance(function, ItemReward) else None
            return
        # The argument replaces the reward, and the reward manager, of the run that is evaluated.
        self.defaults.pop("custom_reward_function", None)
        for key in ("reward_manager", "reward_kwargs"):
            self.defaults.get("reward_model", {}).pop(key, None)
        if isinstance(reward, str | Path):
            # `file.py:function`. Without a colon the whole text is in `name`.
            path, _, name = str(reward).rpartition(":")
            self.values["custom_reward_function.path"] = path or name
            if path:
                self.values["custom_reward_function.name"] = name
            return

        self.reward = reward_of(reward)
        is_batch = any(part.is_batch for part in self.reward.parts)
        names = ", ".join(part.name for part in self.reward.parts)
        source = source_of(*(part.function for part in self.reward.parts))
        file, obstacle = write_function(self.reward, self.directory / "functions", "reward", source)
        self.values["custom_reward_function.path"] = file
        self.values["custom_reward_function.name"] = NAME
        if obstacle:
            # Other processes cannot load the functions, so a manager calls them in this one.
            self.values["reward_model.reward_manager"] = "in_process"
            self.values["reward_model.reward_kwargs"] = {"is_batch": is_batch}
            print(
                f"reward: {names} in this process, without a time limit; other processes: {obstacle}"
            )
            return
        if is_batch:
            self.values.setdefault("reward_model.reward_manager", "batch")
        print(f"reward: {names}, in separate processes: changes to global state are not shared")

    def set_rows(self, key: str, rows: Rows | None) -> int:
        """Set a key to files with the rows.

        The caller's own files are used if they have all columns that the trainer reads. Other rows
        are completed, and written to a new file.

        Args:
            key: "data.train_files" or "data.val_files".
            rows: the caller's argument. None: the files that the configuration names, if any.

        Returns:
            The number of rows; 0 if neither the caller nor the configuration names any.

        Raises:
            DataError: there are no rows, one of them is not a dictionary, or a column is missing.
        """
        name = key.rpartition(".")[2]  # "train_files" or "val_files"
        source = rows
        if rows is None:
            source = getattr(self.config.data, name)
            if not source:
                return 0
        entries = source if isinstance(source, list) else [source]
        # The name of the caller's argument, for errors. `evaluate` calls its validation rows `data`.
        label = "eval_data" if name == "val_files" and not self.is_frozen else "data"
        if entries and all(isinstance(entry, str | Path) for entry in entries):
            if len(entries) == 1:
                label = str(entries[0])
            dictionaries, num_rows = self._read_if_incomplete(source, key)
            # The files are complete, so the trainer reads them itself.
            if not dictionaries:
                self.values[key] = source
                return num_rows
        else:
            dictionaries = self._to_dictionaries(source)

        if not dictionaries:
            raise DataError(label, got="no rows", expected="at least one")
        self._check_rows(dictionaries, label)
        # pandas has NaN for a missing text. It becomes None here, so as not to become "NaN" later.
        text_columns = {*self.config.data.chat_columns, self.config.data.response_key}
        completed = []
        for row in dictionaries:
            missing = [column for column in text_columns if _is_missing(row.get(column))]
            row = {**row, **dict.fromkeys(missing)}
            completed.append(self._add_trainer_columns(row) if self.task == "rl" else row)
        # The format of supervised rows follows from their columns, unless the caller has set it.
        if self.task != "rl" and "response" in completed[0] and "messages" not in completed[0]:
            self.values.setdefault("data.format", "prompt_response")
        file = write_data_file(
            completed,
            self.directory / "data",
            name.removesuffix("_files"),
            where="trainer.default_local_dir",
        )
        self.values[key] = file
        self.sources[str(file)] = label
        return len(completed)

    def _check_rows(self, rows: Sequence[Any], label: str) -> None:
        """Check that rows are dictionaries, and that there is a column with prompts.

        Args:
            rows: the rows.
            label: name of the rows in errors.

        Raises:
            DataError: a row is no dictionary, or there is no such column.
        """
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{label} row {number}", got=repr(row)[:80], expected="a dictionary of columns"
                )
        data = self.config.data
        column = data.prompt_key
        # A user's data set class may read other columns.
        is_checked = self.task == "rl" and data.custom_cls.path is None
        if is_checked and not any(column in row for row in rows):
            raise DataError(
                label,
                got=f"the columns {', '.join(map(str, rows[0]))}",
                expected=f"a column {column!r}",
                fix="Rename or add it, or set data.prompt_key to the column that holds the prompts.",
            )

    def _to_dictionaries(self, rows: Any) -> list[Any]:
        """Convert rows to dictionaries.

        A table gives all messages of its chats the same fields, and null to those that lack one.
        Such fields are removed.
        """
        if isinstance(rows, pd.DataFrame):
            dictionaries = rows.to_dict("records")
        elif isinstance(rows, datasets.Dataset):
            # This format does not decode images: they stay bytes, as they are stored.
            dictionaries = rows.with_format("arrow")[:].to_pylist()
        else:
            return list(rows)
        for row in dictionaries:
            drop_null_fields(row, self.config.data.chat_columns)
        return dictionaries

    def _read_if_incomplete(self, files: Any, key: str) -> tuple[list[dict[str, Any]], int]:
        """Read the rows of files, unless the trainer can use the files as they are.

        With reward functions of this program, files may lack columns that the trainer reads, and
        functions may read columns that must be copied into `extra_info`. Without such functions the
        files are used as they are.

        Args:
            files: a file or several.
            key: the configuration key, for errors.

        Returns:
            The rows, or [] if the trainer can use the files; and the number of rows.
        """
        data = self.config.data
        paths = resolve_files(files, data.cache_dir, where=key)
        tables = [read_table(path, chat_columns=data.chat_columns) for path in paths]
        needed_columns = {data.reward_fn_key, "reward_model"} if self.reward else set()
        is_complete = all(needed_columns <= set(table.columns) for table in tables)
        reads_rows = self.reward is not None and any(part.reads_row for part in self.reward.parts)
        if is_complete and not reads_rows:
            return [], sum(map(len, tables))
        rows = [table[row] for table in tables for row in range(len(table))]
        return rows, len(rows)

    def _add_trainer_columns(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Add the columns that the trainer reads to a row of the caller.

        If a reward function reads columns by their names, `extra_info` gets a copy of all columns
        as its entry `ROW`.

        Raises:
            ConfigError: a reward function has an argument that is no column of the row.
            DataError: a reward function needs the ground truth, and the row has none.
        """
        complete = {
            self.config.data.reward_fn_key: "rows",
            "reward_model": {"style": "rule", "ground_truth": row.get("ground_truth")},
            **row,
        }
        reward_model = complete["reward_model"]
        # A missing ground truth is left out rather than NaN, so that graders which need it report
        # that.
        if isinstance(reward_model, Mapping) and _is_missing(reward_model.get("ground_truth")):
            complete["reward_model"] = {
                key: value for key, value in reward_model.items() if key != "ground_truth"
            }
        if self.reward is None:
            return complete

        # The copy of all columns that reward functions read by name.
        columns = dict(row)
        # Reward functions know the prompt by this name.
        columns.setdefault("prompt", row.get(self.config.data.prompt_key))
        columns.pop("extra_info", None)
        columns.pop("reward_model", None)
        has_truth = "ground_truth" in row or "reward_model" in row
        for part in self.reward.parts:
            part.check(columns)
            if "ground_truth" in part.required and not has_truth:
                raise DataError(
                    f"reward {part.name}",
                    got=f"the columns {', '.join(row)}",
                    expected="the column 'ground_truth'",
                )
            if part.reads_row:
                complete["extra_info"] = {**(row.get("extra_info") or {}), ROW: columns}
        return complete

    def set_defaults(self, num_rows: int) -> None:
        """Choose batch sizes, trackers and the like that neither files nor arguments have set.

        Args:
            num_rows: number of training rows; 0 if unknown.
        """
        # `with_groups` chooses `rollout.n` if the estimator compares responses. The configuration is
        # loaded again, because `self.config` lacks arguments that were set since, such as the
        # estimator.
        config, notice = with_groups(self._load_config().config)
        trainer = config.trainer
        self.values["trainer.logger"] = list(dict.fromkeys([*trainer.loggers, "jsonl"]))
        # Only an asynchronous run needs it: others save by time (trainer.save_minutes).
        if "save_freq" not in trainer.model_fields_set and config.async_training.enable:
            self.values["trainer.save_freq"] = AT_THE_END
        if self.task != "rl":
            return
        num_responses = config.actor_rollout_ref.rollout.n
        if notice:
            self.values["actor_rollout_ref.rollout.n"] = num_responses
            print(notice)
        size = config.data.train_batch_size
        if "train_batch_size" not in config.data.model_fields_set and num_rows:
            size = self._choose_batch_size(num_rows, num_responses)
            self.values["data.train_batch_size"] = size
        if "ppo_mini_batch_size" not in config.actor_rollout_ref.actor.model_fields_set:
            self.values["actor_rollout_ref.actor.ppo_mini_batch_size"] = size
        if not config.data.val_files and "val_before_train" not in trainer.model_fields_set:
            self.values["trainer.val_before_train"] = False

    def _choose_batch_size(self, num_rows: int, num_responses: int) -> int:
        """Choose the number of prompts in a step for the processors of this machine, and print it.

        Args:
            num_rows: number of training rows. A step does not have more prompts.
            num_responses: responses to each prompt.
        """
        trainer = self.config.trainer
        num_processes = trainer.nnodes * trainer.n_gpus_per_node
        if torch.cuda.is_available():
            max_responses = RESPONSES_OF_A_GPU * num_processes
            processors = f"{num_processes} processes on GPUs"
        else:
            num_cores = len(os.sched_getaffinity(0))
            max_responses = RESPONSES_OF_A_CORE * num_cores
            processors = f"{num_cores} cores"
        # As many prompts as the processors have work for.
        size = min(num_rows, max(1, max_responses // num_responses))
        # Each process gets the same number of prompts.
        size = max(size - size % num_processes, 1)
        print(
            f"data.train_batch_size: {size} prompts a step "
            f"({num_rows} rows, {processors}, {num_responses} responses each)"
        )
        return size


def name_sources(error: QuadrigaError, sources: Mapping[str, str]) -> QuadrigaError:
    """Replace the names of written files in an error by the caller's names for their rows.

    Args:
        error: the error, which is changed and returned.
        sources: names by file (`ConfigDraft.sources`).
    """
    for name in ("where", "got", "expected", "fix"):
        text = getattr(error, name)
        for file, source in sources.items():
            text = text.replace(file, source)
        setattr(error, name, text)
    return error


def _is_missing(value: Any) -> bool:
    """Whether a value is NaN, which pandas writes for missing values."""
    return isinstance(value, float) and math.isnan(value)
