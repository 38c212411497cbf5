# SPDX-License-Identifier: Apache-2.0
"""The door for Python: the runs of `quadriga train`, `sft`, `generate` and `eval`, from a program or a notebook.

    arguments ──> rows and functions become files of the run's directory ──> a configuration ──> the command's own run

So the run has the command's checks, messages, files, checkpoints and numbers, in one process and on Ray.
"""

import hashlib
import json
import math
import os
import shlex
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from operator import methodcaller
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, Unpack

import datasets
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from quadriga.config import Config, load_config
from quadriga.config.root import respell
from quadriga.data.files import (
    drop_null_fields,
    make_directory,
    read_table,
    resolve_files,
    written_aside,
)
from quadriga.descendants import own_folder
from quadriga.errors import CheckpointError, ConfigError, DataError, QuadrigaError
from quadriga.observe.progress import HEADLINES, VALIDATION_PREFIX, Picture
from quadriga.observe.tracking.jsonl import METRICS_FILE, jsonable, read_metrics
from quadriga.rewards.by_name import ROW, ItemReward, reward_of
from quadriga.trainer import evaluate as frozen
from quadriga.trainer import launch
from quadriga.trainer.checkpoint import Checkpoints, model_folder
from quadriga.trainer.loop import MODEL_FOLDER, Step, TrainingLoop
from quadriga.trainer.settings import CONFIGURATION
from quadriga.trainer.validate import first_samples
from quadriga.user_function import NAME, write_function

AT_THE_END = 1_000_000_000
"""As `trainer.save_freq`: after the last step alone."""
RESPONSES_OF_A_CORE, RESPONSES_OF_A_GPU = 16, 256
"""Responses of a step, where no batch size is given."""

Rows = Any
"""Dictionaries in a list or another iterable, a data frame, a `datasets.Dataset`, a path, or a list of paths."""


class Settings(TypedDict, total=False):
    """What a run is told beside its model, its rows and its reward."""

    steps: int
    """Training steps in all. Without it: epochs of the data."""
    eval_data: Rows
    """Validation rows."""
    algorithm: str
    """`algorithm.adv_estimator`, by its name."""
    estimator: Callable[..., Any]
    """An advantage estimator of your own, in the place of `algorithm`."""
    loss: str | Callable[..., Any]
    """A policy loss, by its name or as a function."""
    config: str | Path | Sequence[str | Path]
    """A YAML file, or several. What the arguments say goes over it, and `options` over both."""
    name: str
    """Of the run's directory, whose run is continued if there is one. Without it: a new directory."""
    options: Mapping[str, Any]
    """Keys of the configuration with their values."""


class Trainer:
    """A run whose steps are taken one at a time: `for step in trainer` gives each once it is taken.
    Raises QuadrigaError: what the command would say, and when it would.
    `model`: a Hugging Face folder or name, a run's directory or checkpoint, or a `Run`.
    `data`: rows. Text as `prompt` is a message of the user; `data_source` and `reward_model` may be missing, a column
    `ground_truth` then stands for the second.
    `reward`: a function, called by the names of its arguments (`quadriga.rewards.by_name`); a list of functions, each
    alone or as `(function, weight)`; `file.py` or `file.py:function`. None: the built-in graders.
    `callbacks`: each is called with the `Step` after each step.
    `task`: rl, sft or reward_model.
    `settings`: as `Settings` says."""

    def __init__(
        self,
        model: Any = None,
        data: Rows = None,
        reward: Any = None,
        *,
        callbacks: Sequence[Callable[[Step], Any]] = (),
        task: str = "rl",
        **settings: Unpack[Settings],
    ) -> None:
        if unknown := settings.keys() - Settings.__annotations__.keys():
            expected = f"one of {', '.join(Settings.__annotations__)}"
            raise ConfigError("quadriga", got=f"the argument {min(unknown)!r}", expected=expected)
        estimator, algorithm, name = (
            settings.get(one) for one in ("estimator", "algorithm", "name")
        )
        if estimator is not None and algorithm is not None:
            fix = "Leave one of them out."
            raise ConfigError(
                "estimator", got="a function, and algorithm", expected="one of them", fix=fix
            )
        given = {
            "trainer.total_training_steps": settings.get("steps"),
            "trainer.experiment_name": name,
        }
        given |= {"algorithm.adv_estimator": algorithm}
        draft = _Draft(model, given, settings.get("config", ()), settings.get("options"), task)
        draft.choose_directory(is_new=name is None)
        draft.set_function("algorithm.adv_estimator", estimator, "estimator")
        draft.set_function(
            "actor_rollout_ref.actor.policy_loss.loss_mode", settings.get("loss"), "loss"
        )
        draft.set_reward(reward)
        num_rows = draft.set_rows("data.train_files", data)
        draft.set_rows("data.val_files", settings.get("eval_data"))
        draft.set_defaults(num_rows)
        self._begin(draft.load(for_training=True), callbacks)

    def _begin(self, config: Config, callbacks: Sequence[Callable[[Step], Any]]) -> None:
        self.config, self.callbacks = config, list(callbacks)
        self._steps = launch.steps(config)
        self._loop: TrainingLoop | None = None
        # Of a trainer that is not closed the processes end with the interpreter.
        self._finalizer = weakref.finalize(self, self._steps.close)

    @classmethod
    def of(cls, config: Config, callbacks: Sequence[Callable[[Step], Any]] = ()) -> "Trainer":
        """The trainer of a resolved configuration."""
        trainer = cls.__new__(cls)
        trainer._begin(config, callbacks)
        return trainer

    @property
    def loop(self) -> TrainingLoop:
        """The loop with its worker groups, built if it is not: `actor`, `generate`, `compute_advantages` ..."""
        if self._loop is None:
            self._loop = self._next().loop
        return self._loop

    def __iter__(self) -> Iterator[Step]:
        return self

    def __next__(self) -> Step:
        """Take the next step; one that the run skips is passed over."""
        while (step := self._next()).batch is None:
            self._loop = step.loop
            if step.number:
                self._complete(step, [])
        self._complete(step, self.callbacks)
        return step

    def _complete(self, step: Step, callbacks: Sequence[Callable[[Step], Any]]) -> None:
        """Write the model after the last step, and call the callbacks."""
        try:
            if step.loop.is_last_step and self.config.task == "rl":
                step.loop.write_model()
            for callback in callbacks:
                callback(step)
        except BaseException as error:
            # Inside the run, which then ends as after an error of its own.
            self._steps.throw(error)
            raise

    def _next(self) -> Step:
        try:
            return next(self._steps)
        except QuadrigaError as error:
            raise respell(error, self.config.task) from error.__cause__

    def run(self) -> "Run":
        """Take all steps that are left."""
        for _ in self:
            pass
        return Run(self.config.trainer.directory, self.callbacks, self.config)

    def close(self) -> None:
        """End the run, if it is not at its end."""
        self._finalizer()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Run:
    """What a run has left in its directory."""

    def __init__(
        self,
        directory: str | Path,
        callbacks: Sequence[Callable[[Step], Any]] = (),
        config: Config | None = None,
    ) -> None:
        self.directory, self.callbacks = Path(directory), list(callbacks)
        self.config = config or load_config(files=[self.directory / CONFIGURATION]).config

    def __repr__(self) -> str:
        return f"quadriga.Run({str(self.directory)!r})"

    @property
    def metrics(self) -> pd.DataFrame:
        """A row for each step, a column for each metric; row 0 is the validation before the first step."""
        if not (self.directory / METRICS_FILE).is_file():
            raise DataError(
                str(self.directory / METRICS_FILE),
                got="no such file",
                expected="a run that took a step",
            )
        return pd.DataFrame.from_dict(
            read_metrics(self.directory / METRICS_FILE), orient="index"
        ).rename_axis("step")

    def samples(self, step: int) -> pd.DataFrame:
        """The responses of a training step with their prompts and scores."""
        folder = Path(
            self.config.trainer.rollout_data_dir or self.directory / "rollouts"
        ).expanduser()
        if not (folder / f"{step}.jsonl").is_file():
            there = sorted(int(file.stem) for file in folder.glob("*.jsonl"))
            expected = (
                f"one of {', '.join(map(str, there))}"
                if there
                else "trainer.rollout_data_dir to be set"
            )
            raise DataError("run.samples", got=f"step {step}", expected=expected)
        table = read_table(folder / f"{step}.jsonl")
        return pd.DataFrame([table[row] for row in range(len(table))])

    def plot(self, *names: str) -> Picture:
        """The curves of metrics; without names, of reward (or loss) and validation. It has `save(path)`."""
        metrics = self.metrics
        known = list(map(str, metrics))
        if not names:
            first = next(name for line in HEADLINES for name in line.sources if name in known)
            names = (
                first,
                *(name for name in known if name.startswith((VALIDATION_PREFIX, "val/"))),
            )
        if unknown := [name for name in names if name not in known]:
            raise ConfigError(
                "run.plot", got=unknown[0], expected=f"one of {', '.join(sorted(known))}"
            )
        return Picture({name: list(metrics[name].dropna().items()) for name in names})

    @cached_property
    def model(self) -> PreTrainedModel:
        kind = (
            AutoModelForSequenceClassification
            if self.config.task == "reward_model"
            else AutoModelForCausalLM
        )
        return kind.from_pretrained(self.model_folder)

    @property
    def model_folder(self) -> Path:
        """The model with the last weights as a Hugging Face folder."""
        folder = self.directory / MODEL_FOLDER
        if not folder.is_dir():
            command = f"quadriga export {shlex.quote(str(self.directory))} --output FOLDER"
            fix = f"Go on with it, or make a model: {command}"
            raise CheckpointError(
                str(folder), got="nothing", expected="a run that came to its last step", fix=fix
            )
        return folder

    def resume(self, steps: int) -> "Run":
        """Go on from the newest checkpoint, up to so many steps in all."""
        if Checkpoints(self.directory).newest() is None:
            fix = "Train with a trainer.save_freq above 0."
            raise CheckpointError(
                str(self.directory), got="no checkpoint", expected="one to go on from", fix=fix
            )
        changes = {
            "trainer.total_training_steps": steps,
            "trainer.total_epochs": None,
            "trainer.resume_mode": "auto",
        }
        values = self.config.model_dump(mode="json", exclude_unset=True) | changes
        loaded = load_config(for_training=True, values=values, task=self.config.task)
        return Trainer.of(loaded.config, self.callbacks).run()


class Evaluation(NamedTuple):
    """Validation metrics by their names, and a row for each prompt: input, output, ground truth, score."""

    metrics: dict[str, float]
    samples: pd.DataFrame


def train(model: Any = None, data: Rows = None, reward: Any = None, **settings: Any) -> Run:
    """Train a policy by rewards, as `quadriga train` does; `settings` are the arguments of `Trainer`."""
    return Trainer(model, data, reward, **settings).run()


def sft(model: Any = None, data: Rows = None, **settings: Any) -> Run:
    """Supervised fine-tuning, as `quadriga sft` does; `settings` are the arguments of `Trainer`.
    Rows have `messages`, or `prompt` and `response`; with `task="reward_model"`: `prompt`, `chosen` and `rejected`."""
    return Trainer(model, data, **{"task": "sft"} | settings).run()


def generate(
    model: Any,
    prompts: str | Sequence[str | list[dict[str, str]]],
    *,
    system: str | None = None,
    images: Sequence[Sequence[str]] | None = None,
    config: str | Path | Sequence[str | Path] = (),
    options: Mapping[str, Any] | None = None,
) -> list[list[str]]:
    """Responses to prompts, each a text (behind `system`, if given) or a chat: `rollout.n` for each, with its sampling.
    `images` are files for the `<image>`s of each prompt."""
    resolved = _Draft(model, {}, config, options, "rl").load()
    every = [prompts] if isinstance(prompts, str) else prompts
    first = [{"role": "system", "content": system}] if system is not None else []
    chats = [
        [*first, {"role": "user", "content": one}] if isinstance(one, str) else one for one in every
    ]
    return frozen.answer(resolved, chats, images)


def evaluate(
    model: Any,
    data: Rows = None,
    reward: Any = None,
    *,
    config: str | Path | Sequence[str | Path] = (),
    options: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Answer the prompts of `data` with the sampling of `rollout.val_kwargs` and grade them, as `quadriga eval`."""
    draft = _Draft(model, {}, config, options, "rl")
    with own_folder() as folder:
        draft.directory = Path(folder)
        draft.set_reward(reward)
        draft.set_rows("data.val_files", data)
        trainer = draft.config.trainer
        grades = frozen.evaluate(draft.load())
    count = (
        trainer.log_val_generations
        if "log_val_generations" in trainer.model_fields_set
        else len(grades.rows)
    )
    return Evaluation(grades.metrics, pd.DataFrame(first_samples(grades.rows, count)))


class _Draft:
    """A configuration in the making: `values` over `files`; `config` is what they say without defaults of the door."""

    def __init__(
        self,
        model: Any,
        given: Mapping[str, Any],
        config: str | Path | Sequence[str | Path],
        options: Mapping[str, Any] | None,
        task: str,
    ) -> None:
        self.task, self.files = task, [config] if isinstance(config, str | Path) else list(config)
        self.values = {key: value for key, value in given.items() if value is not None}
        if model is not None:
            path = model.model_folder if isinstance(model, Run) else model_folder(model)
            self.values["actor_rollout_ref.model.path"] = path
        for key, value in (options or {}).items():
            self.values[key] = list(value) if isinstance(value, tuple) else value
        if "trainer.total_training_steps" in self.values:
            # The steps that are asked for are taken, whatever number of epochs a file names.
            self.values.setdefault("trainer.total_epochs", None)
        self.config = load_config(files=self.files, values=self.values, task=task).config
        self.directory = self.config.trainer.directory
        self.reward: ItemReward | None = None

    def load(self, *, for_training: bool = False) -> Config:
        loaded = load_config(
            files=self.files, values=self.values, task=self.task, for_training=for_training
        )
        for notice in loaded.notices:
            print(f"notice: {notice}", file=sys.stderr)
        return loaded.config

    def choose_directory(self, *, is_new: bool) -> None:
        """A directory of its own for a run that has no name."""
        trainer, untouched = self.config.trainer, load_config(task=self.task).config.trainer
        keys = ("experiment_name", "default_local_dir")
        if is_new and all(getattr(trainer, key) == getattr(untouched, key) for key in keys):
            places = (
                self.directory.with_name(f"{self.directory.name}-{number}")
                for number in range(1, AT_THE_END)
            )
            self.directory = next(place for place in places if not place.exists())
            self.values["trainer.experiment_name"] = self.directory.name
            print(f"run: {self.directory}")

    def set_function(self, key: str, given: str | Callable[..., Any] | None, label: str) -> None:
        """Name a function by its file."""
        if callable(given):
            file, obstacle = write_function(given, self.directory / "functions", label)
            if obstacle and self.config.trainer.backend != "local":
                fix = "Do not let it hold such an object, or train in one process."
                raise ConfigError(
                    label, got=obstacle, expected="a function that can be pickled", fix=fix
                )
            given = f"{file}:{NAME}"
        if given is not None:
            self.values[key] = given

    def set_reward(self, given: Any) -> None:
        """Name the reward by its file, and say where it runs."""
        if isinstance(given, str | Path):
            path, _, name = str(given).rpartition(":")
            self.values["custom_reward_function.path"] = path or name
            if path:
                self.values["custom_reward_function.name"] = name
        elif given is not None:
            self.reward = reward_of(given)
            is_batch = any(part.is_batch for part in self.reward.parts)
            file, obstacle = write_function(self.reward, self.directory / "functions", "reward")
            self.values |= {
                "custom_reward_function.path": file,
                "custom_reward_function.name": NAME,
            }
            names = ", ".join(part.name for part in self.reward.parts)
            if obstacle:
                self.values["reward_model.reward_manager"] = "in_process"
                self.values["reward_model.reward_kwargs"] = {"is_batch": is_batch}
                print(
                    f"reward: {names} in this process, without a time limit; other processes: {obstacle}"
                )
                return
            if is_batch:
                self.values.setdefault("reward_model.reward_manager", "batch")
            print(
                f"reward: {names} in grading processes, each with a copy; what it changes outside itself stays there"
            )

    def set_rows(self, key: str, given: Rows) -> int:
        """Name the rows by their file, and return how many there are."""
        files = getattr(self.config.data, key.rpartition(".")[2]) if given is None else given
        if given is None and not files:
            return 0
        listed = files if isinstance(files, list) else [files]
        if listed and all(isinstance(one, str | Path) for one in listed):
            rows, num_rows = self._read(files, key)
            if not rows:
                self.values[key] = files
                return num_rows
        else:
            rows = self._rows_of_program(given)
        label = key.rpartition(".")[2].removesuffix("_files")
        if not rows:
            raise DataError(label, got="no rows", expected="at least one")
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{label} row {number}", got=repr(row)[:80], expected="a dictionary of columns"
                )
        # NaN in these columns is a missing text. It stays missing: as the text "NaN" it would be learned.
        text_columns = {*self.config.data.chat_columns, self.config.data.response_key}
        rows = [
            {**row, **dict.fromkeys(name for name in text_columns if _is_missing(row.get(name)))}
            for row in rows
        ]
        if self.task == "rl":
            rows = [self._complete(row) for row in rows]
        elif "response" in rows[0] and "messages" not in rows[0]:
            self.values.setdefault("data.format", "prompt_response")
        self.values[key] = _write_rows(rows, self.directory / "data", label)
        return len(rows)

    def _rows_of_program(self, given: Any) -> list[Any]:
        """The rows of an argument, without the nulls that a table adds to chats."""
        if not isinstance(given, pd.DataFrame | datasets.Dataset):
            return list(given)
        is_frame = isinstance(given, pd.DataFrame)
        # Of a data set as they are stored: images as bytes.
        rows = given.to_dict("records") if is_frame else given.with_format("arrow")[:].to_pylist()
        for row in rows:
            drop_null_fields(row, self.config.data.chat_columns)
        return rows

    def _read(self, files: Any, key: str) -> tuple[list[dict[str, Any]], int]:
        """The rows of files that lack what is read of them, none of files that have it; and their number."""
        data = self.config.data
        paths = resolve_files(files, data.cache_dir, where=key)
        tables = [read_table(path, chat_columns=data.chat_columns) for path in paths]
        needed = {data.reward_fn_key, "reward_model"} if self.reward else set()
        is_complete = all(needed <= set(table.columns) for table in tables)
        if is_complete and not (self.reward and any(part.reads_row for part in self.reward.parts)):
            return [], sum(map(len, tables))
        rows = [table[row] for table in tables for row in range(len(table))]
        return rows, len(rows)

    def _complete(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row with the columns that the trainer reads, and for functions that name columns with all of them."""
        truth = {"style": "rule", "ground_truth": row.get("ground_truth")}
        complete = {self.config.data.reward_fn_key: "rows", "reward_model": truth, **row}
        if isinstance(truth := complete["reward_model"], Mapping) and _is_missing(
            truth.get("ground_truth")
        ):
            complete["reward_model"] = {
                key: value for key, value in truth.items() if key != "ground_truth"
            }
        own = {
            name: value for name, value in row.items() if name not in ("extra_info", "reward_model")
        }
        for part in self.reward.parts if self.reward else ():
            part.check(own)
            if (
                "ground_truth" in part.required
                and not {"ground_truth", "reward_model"} & row.keys()
            ):
                got = f"the columns {', '.join(row)}"
                raise DataError(
                    f"reward {part.name}", got=got, expected="the column 'ground_truth'"
                )
            if part.reads_row:
                complete["extra_info"] = {**(row.get("extra_info") or {}), ROW: own}
        return complete

    def set_defaults(self, num_rows: int) -> None:
        """What the door sets where nobody has: the batch size, trackers, and what is written."""
        config, trainer = self.config, self.config.trainer
        self.values["trainer.logger"] = list(dict.fromkeys([*trainer.loggers, "jsonl"]))
        if "save_freq" not in trainer.model_fields_set:
            self.values["trainer.save_freq"] = AT_THE_END
        if self.task != "rl":
            return
        size = config.data.train_batch_size
        if "train_batch_size" not in config.data.model_fields_set and num_rows:
            size = self.values["data.train_batch_size"] = self._batch_size(num_rows)
        if "ppo_mini_batch_size" not in config.actor_rollout_ref.actor.model_fields_set:
            self.values["actor_rollout_ref.actor.ppo_mini_batch_size"] = size
        has_validation = self.values.get("data.val_files", config.data.val_files)
        if not has_validation and "val_before_train" not in trainer.model_fields_set:
            self.values["trainer.val_before_train"] = False
        if trainer.rollout_data_dir is None:
            self.values["trainer.rollout_data_dir"] = self.directory / "rollouts"

    def _batch_size(self, num_rows: int) -> int:
        """Prompts of a step, as the rows and the processors allow; it is printed."""
        trainer, num_responses = self.config.trainer, self.config.actor_rollout_ref.rollout.n
        num_processes = trainer.nnodes * trainer.n_gpus_per_node
        if torch.cuda.is_available():
            room, of = RESPONSES_OF_A_GPU * num_processes, f"{num_processes} processes on GPUs"
        else:
            cores = len(os.sched_getaffinity(0))
            room, of = RESPONSES_OF_A_CORE * cores, f"{cores} cores"
        size = min(num_rows, max(1, room // num_responses))
        size = max(size - size % num_processes, 1)
        print(
            f"data.train_batch_size: {size} prompts a step ({num_rows} rows, {of}, {num_responses} responses each)"
        )
        return size


def _is_missing(value: Any) -> bool:
    """Whether a table has no value there, for which pandas writes NaN."""
    return isinstance(value, float) and math.isnan(value)


def _write_rows(rows: list[dict[str, Any]], folder: Path, label: str) -> Path:
    """The rows as a file named after its content: JSON lines, or parquet where JSON cannot hold a value."""
    make_directory(folder, where="trainer.default_local_dir")
    try:
        lines = [
            json.dumps(jsonable(row, methodcaller("tolist")), ensure_ascii=False, allow_nan=False)
            for row in rows
        ]
        text = "".join(f"{line}\n" for line in lines)
        suffix, content = "jsonl", text.encode("utf-8", "backslashreplace")
    except (TypeError, AttributeError):
        stream = pa.BufferOutputStream()
        try:
            pq.write_table(pa.Table.from_pylist(rows), stream)
        except pa.ArrowException as error:
            fix = "Give each column one type, of numbers, texts, bytes, lists and dictionaries."
            raise DataError(
                label, got=str(error), expected="rows that a parquet file can hold", fix=fix
            ) from error
        suffix, content = "parquet", stream.getvalue().to_pybytes()
    path = folder / f"{label}_{hashlib.sha256(content).hexdigest()[:12]}.{suffix}"
    with written_aside(path, where="trainer.default_local_dir") as draft:
        draft.write_bytes(content)
    return path
