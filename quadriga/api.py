# SPDX-License-Identifier: Apache-2.0
"""Python interface: what `quadriga train`, `sft`, `generate` and `eval` do, from a program or notebook.

    arguments -> rows and functions, written to files of the run's directory -> configuration
              -> the run that the command would start

A run therefore has the checks, messages, files, checkpoints and numbers of the command, in one
process and on Ray.
"""

import inspect
import itertools
import math
import os
import shlex
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import datasets
import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from quadriga.config import Config, load_config, with_groups
from quadriga.config.loader import Loaded
from quadriga.config.root import respell
from quadriga.config.trainer import AT_THE_END
from quadriga.config.yaml_text import read_yaml
from quadriga.data.files import (
    drop_null_fields,
    read_table,
    resolve_files,
    write_data_file,
)
from quadriga.descendants import own_folder
from quadriga.errors import CheckpointError, ConfigError, DataError, QuadrigaError
from quadriga.observe.progress import (
    HEADLINES,
    VALIDATION_PREFIXES,
    Picture,
    summary_lines,
)
from quadriga.observe.records import STEP, VALIDATION, RecordFolder, table_for_people
from quadriga.observe.stopping import Interrupted, quiet_interrupt
from quadriga.observe.tracking.jsonl import METRICS_FILE, read_metrics
from quadriga.redact import without_hidden
from quadriga.rewards.by_name import ROW, ItemReward, reward_of
from quadriga.trainer import evaluate as frozen
from quadriga.trainer import launch
from quadriga.trainer.checkpoint import Checkpoints, model_folder
from quadriga.trainer.loop import MODEL_FOLDER, TrainingLoop, TrainingStep
from quadriga.trainer.run_folder import RunFolder
from quadriga.trainer.settings import CONFIGURATION
from quadriga.user_function import NAME, source_of, write_function

RESPONSES_OF_A_CORE = 16
"""Responses of a step for each CPU core, if no batch size is set."""
RESPONSES_OF_A_GPU = 256
"""Responses of a step for each GPU, if no batch size is set."""

Rows = (
    str
    | Path
    | Sequence[str | Path]
    | Iterable[Mapping[str, Any]]
    | pd.DataFrame
    | datasets.Dataset
)
"""Data: a file, a list of files, dictionaries in an iterable, a data frame, or a data set."""
Reward = (
    str
    | Path
    | Callable[..., Any]
    | Sequence[Callable[..., Any] | tuple[Callable[..., Any], float]]
)
"""A function, several functions, each alone or as `(function, weight)`, or `file.py:function`."""
ConfigFiles = str | Path | Sequence[str | Path]
"""A YAML file, or several; later files override earlier ones."""


_Function = TypeVar("_Function", bound=Callable[..., Any])


class Settings(TypedDict, total=False):
    """Further arguments of a training run."""

    steps: int
    """Training steps in total. Default: as many as `trainer.total_epochs` epochs have."""
    eval_data: Rows
    """Validation rows."""
    algorithm: str
    """Name of the advantage estimator, `algorithm.adv_estimator`."""
    estimator: Callable[..., Any]
    """Advantage estimator as a function, instead of `algorithm`."""
    loss: str | Callable[..., Any]
    """Policy loss, by name or as a function."""
    config: ConfigFiles
    """Configuration files. Arguments override them, and `options` overrides both."""
    name: str
    """Name of the run's directory; a run in it is continued. Default: a new directory."""
    options: Mapping[str, Any]
    """Configuration keys with their values."""


class TrainerSettings(Settings, total=False):
    """Keyword arguments that `train` and `sft` pass to `Trainer`."""

    callbacks: Sequence[Callable[[TrainingStep], Any]]
    """Functions that are called with the `TrainingStep` after each step."""
    task: str
    """Task of the run: "rl", "sft" or "reward_model"."""


def _with_settings(**defaults: Any) -> Callable[[_Function], _Function]:
    """Decorator: name the settings of a run in a signature, for `help` and tab completion.

    Args:
        defaults: values of settings that the function does not get. The others are None.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *parameters, _ = signature.parameters.values()
        for name, annotation in TrainerSettings.__annotations__.items():
            if name not in signature.parameters:
                default = defaults.get(name)
                parameters.append(
                    inspect.Parameter(
                        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
                    )
                )
        vars(function)["__signature__"] = signature.replace(parameters=parameters)
        return function

    return decorate


class Trainer:
    """A run whose steps are taken one at a time: `for step in trainer` yields each finished step.

    Args:
        model: Hugging Face folder or name, directory or checkpoint of a run, a `Run`, or its
            `model`. None: the one that `config` or `options` name.
        data: training rows. A text in the column `prompt` becomes a user message. The columns
            `data_source` and `reward_model` are optional; a column `ground_truth` can replace
            the second.
        reward: function that is called by the names of its arguments (see
            `quadriga.rewards.by_name`), a list of functions, each alone or as
            `(function, weight)`, `file.py` or `file.py:function`. None: the built-in graders.
        callbacks: functions that are called with the `TrainingStep` after each step.
        task: "rl", "sft" or "reward_model".
        settings: further arguments, see `Settings`.

    Raises:
        QuadrigaError: an argument is wrong, or the run fails; the same errors as the command's.
    """

    @_with_settings(config=())
    def __init__(
        self,
        model: "str | Path | Run | None" = None,
        data: Rows | None = None,
        reward: Reward | None = None,
        *,
        callbacks: Sequence[Callable[[TrainingStep], Any]] = (),
        task: str = "rl",
        **settings: Unpack[Settings],
    ) -> None:
        unknown_arguments = settings.keys() - Settings.__annotations__.keys()
        if unknown_arguments:
            raise ConfigError(
                "quadriga",
                got=f"the argument {min(unknown_arguments)!r}",
                expected=f"one of {', '.join(Settings.__annotations__)}",
            )
        estimator = settings.get("estimator")
        algorithm = settings.get("algorithm")
        name = settings.get("name")
        if estimator is not None and algorithm is not None:
            raise ConfigError(
                "estimator",
                got="a function, and algorithm",
                expected="one of them",
                fix="Leave one of them out.",
            )
        draft = _ConfigDraft(
            model,
            values={
                "trainer.total_training_steps": settings.get("steps"),
                "trainer.experiment_name": name,
                "algorithm.adv_estimator": algorithm,
            },
            config=settings.get("config", ()),
            options=settings.get("options"),
            task=task,
        )
        if name is None:
            draft.choose_directory()
        draft.set_function("algorithm.adv_estimator", estimator, "estimator")
        draft.set_function(
            "actor_rollout_ref.actor.policy_loss.loss_mode", settings.get("loss"), "loss"
        )
        draft.set_reward(reward)
        num_rows = draft.set_rows("data.train_files", data)
        draft.set_rows("data.val_files", settings.get("eval_data"))
        draft.set_defaults(num_rows)
        self._begin(draft.load(for_training=True), callbacks, draft.sources)

    def _begin(
        self,
        config: Config,
        callbacks: Sequence[Callable[[TrainingStep], Any]],
        sources: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        self.config = config
        self._sources = sources
        self.callbacks = list(callbacks)
        self._steps = launch.steps(config, in_python=True)
        self._loop: TrainingLoop | None = None
        # If `close` is never called, the run's processes end with the interpreter.
        self._finalizer = weakref.finalize(self, self._steps.close)

    @classmethod
    def of(
        cls, config: Config, callbacks: Sequence[Callable[[TrainingStep], Any]] = ()
    ) -> "Trainer":
        """Make the trainer of a resolved configuration.

        Args:
            config: resolved configuration.
            callbacks: functions that are called with the `TrainingStep` after each step.

        Returns:
            The trainer, before its first step.
        """
        trainer = cls.__new__(cls)
        trainer._begin(config, callbacks)
        return trainer

    @property
    def loop(self) -> TrainingLoop:
        """The training loop, built on first use.

        It has the worker groups and the parts of a step: `actor`, `generate`, `compute_advantages`.
        """
        if self._loop is None:
            self._loop = self._next().loop
        return self._loop

    def __iter__(self) -> Iterator[TrainingStep]:
        return self

    def __next__(self) -> TrainingStep:
        """Take the next step. Steps that the run skips are not returned."""
        while True:
            step = self._next()
            if step.batch is not None:
                self._complete(step, self.callbacks)
                return step
            self._loop = step.loop
            # Step 0 is the state before training.
            if step.number:
                self._complete(step, [])

    def _complete(
        self, step: TrainingStep, callbacks: Sequence[Callable[[TrainingStep], Any]]
    ) -> None:
        """Write the model after the last step, and call the callbacks."""
        try:
            if step.loop.is_last_step and self.config.task == "rl":
                step.loop.write_model()
            for callback in callbacks:
                callback(step)
        except BaseException as error:
            self._throw(error)
            raise

    def _throw(self, error: BaseException) -> None:
        """Raise an error inside the run, so that it ends as after an error of its own."""
        with quiet_interrupt(is_reported=True):
            self._steps.throw(error)

    def _next(self) -> TrainingStep:
        try:
            with quiet_interrupt(is_reported=True):
                return next(self._steps)
        except QuadrigaError as error:
            error = _with_sources(error, self._sources)
            raise respell(error, self.config.task) from error.__cause__

    def run(self) -> "Run":
        """Take all remaining steps."""
        for _ in self:
            pass
        return Run(self.config.trainer.directory, self.callbacks, self.config)

    def close(self) -> None:
        """End the run if it has not finished."""
        self._finalizer()

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            self._throw(error)
        self.close()


class Run:
    """Results of a run, read from its directory. `print(run)` shows the metrics of the last steps.

    Args:
        directory: where the run wrote its files.
        callbacks: functions that `resume` calls with the `TrainingStep` after each step.
        config: its configuration. None: the one in the directory.

    Raises:
        ConfigError: the directory is not that of a run.
    """

    def __init__(
        self,
        directory: str | Path,
        callbacks: Sequence[Callable[[TrainingStep], Any]] = (),
        config: Config | None = None,
    ) -> None:
        self.directory = Path(directory).expanduser()
        self.callbacks = list(callbacks)
        if config is not None:
            self.config = config
        elif not (self.directory / CONFIGURATION).is_file():
            got = f"a folder without {CONFIGURATION}" if self.directory.is_dir() else "no folder"
            raise ConfigError(str(self.directory), got=got, expected="the directory of a run")

    @cached_property
    def config(self) -> Config:
        """Configuration of the run's last steps."""
        return load_config(files=[self.directory / CONFIGURATION]).config

    def __repr__(self) -> str:
        return f"quadriga.Run({str(self.directory)!r})"

    def __str__(self) -> str:
        file = self.directory / METRICS_FILE
        if not file.is_file():
            return f"{self.directory}: no {METRICS_FILE}"
        metrics_of_steps = read_metrics(file)
        num_steps = max(metrics_of_steps, default=0)
        lines = summary_lines(metrics_of_steps)
        return "\n".join([f"{self.directory}: {num_steps} steps", *lines])

    def _repr_html_(self) -> str:
        """Show the metrics of the last steps in a notebook."""
        return f"<pre>{escape(str(self))}</pre>"

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the metrics of the last steps in IPython."""
        printer.text(str(self))

    @property
    def metrics(self) -> pd.DataFrame:
        """Metrics with a row for each step and a column for each metric.

        Row 0 is the validation before the first step.
        """
        file = self.directory / METRICS_FILE
        if not file.is_file():
            raise DataError(
                str(file),
                got="no such file",
                expected="a run that took a step, with jsonl among its trainer.logger",
            )
        table = pd.DataFrame.from_dict(read_metrics(file), orient="index")
        return table.rename_axis("step")

    def samples(self, step: int) -> pd.DataFrame:
        """Responses of a training step with their prompts and scores.

        Raises:
            DataError: the run has not recorded the step.
        """
        folder = RunFolder(self.directory)
        responses = folder.responses if folder.has_training_responses else {}
        if step not in responses:
            expected = "a run that records its rollouts (trainer.rollout_record)"
            if responses:
                expected = f"one of {', '.join(map(str, responses))}"
            raise DataError("run.samples", got=f"step {step}", expected=expected)
        return pd.DataFrame(responses[step]())

    def rollouts(self, step: int, *, validation: bool = False) -> pd.DataFrame:
        """Everything that is recorded of the rollouts of a step, with a row for each.

        Args:
            step: the step.
            validation: whether to return the rollouts of the validation after the step.

        Returns:
            Texts, tokens with their log-probs and advantages, rewards and more; docs/rollout.md
            has the columns. Columns of tokens have arrays.

        Raises:
            DataError: the step is not recorded.
        """
        kind = VALIDATION if validation else STEP
        return table_for_people(RecordFolder(self.directory), step, kind)

    def plot(self, *names: str) -> Picture:
        """Draw the curves of metrics.

        Args:
            names: names of metrics. Default: reward (or loss) and the validation metrics.

        Returns:
            A picture for notebooks, which `save(path)` writes to a file: `.svg`, or `.png` with
            matplotlib.

        Raises:
            ConfigError: the run has no metric of that name.
        """
        metrics = self.metrics
        known_names = list(map(str, metrics))
        if not names:
            headlines = (name for line in HEADLINES for name in line.sources)
            measured = [name for name in headlines if name in known_names]
            validations = [name for name in known_names if name.startswith(VALIDATION_PREFIXES)]
            names = (*measured[:1], *validations)
        for name in names:
            if name not in known_names:
                expected = f"one of {', '.join(sorted(known_names))}"
                raise ConfigError("run.plot", got=name, expected=expected)
        return Picture({name: list(metrics[name].dropna().items()) for name in names})

    @cached_property
    def model(self) -> PreTrainedModel:
        """The trained model, loaded on first use."""
        kind = AutoModelForCausalLM
        if self.config.task == "reward_model":
            kind = AutoModelForSequenceClassification
        model = kind.from_pretrained(self.model_folder)
        _loaded_models[model] = (self.model_folder, _num_changes(model))
        return model

    @property
    def model_folder(self) -> Path:
        """Hugging Face folder of the model with the last weights."""
        folder = self.directory / MODEL_FOLDER
        if not folder.is_dir():
            command = f"quadriga export {shlex.quote(str(self.directory))} --output FOLDER"
            raise CheckpointError(
                str(folder),
                got="nothing",
                expected="a run that came to its last step",
                fix=f"Continue it with run.resume(steps=N), or make a model: {command}",
            )
        return folder

    def resume(self, steps: int) -> "Run":
        """Continue from the newest checkpoint until the run has taken `steps` steps in total."""
        if Checkpoints(self.directory).newest() is None:
            raise CheckpointError(
                str(self.directory),
                got="no checkpoint",
                expected="one to go on from",
                fix='Train with options={"trainer.save_freq": N}, which writes one every N steps.',
            )
        changes = {
            "trainer.total_training_steps": steps,
            "trainer.total_epochs": None,
            "trainer.resume_mode": "auto",
        }
        if self.config.trainer.directory.resolve() != self.directory.resolve():
            # The folder was moved, or the path is relative to another working directory.
            changes["trainer.default_local_dir"] = str(self.directory)
        values = self.config.model_dump(mode="json", exclude_unset=True) | changes
        loaded = load_config(for_training=True, values=values, task=self.config.task)
        return Trainer.of(loaded.config, self.callbacks).run()


_loaded_models: "weakref.WeakKeyDictionary[PreTrainedModel, tuple[Path, int]]"
_loaded_models = weakref.WeakKeyDictionary()
"""Models of runs, with their folder and `_num_changes` after loading."""


def _num_changes(model: PreTrainedModel) -> int:
    """Number of changes in place that the weights of a model have had."""
    return sum(tensor._version for tensor in model.state_dict().values())


def _find_model(model: Any) -> str | Path:
    """Find the folder or name of a model that is given as an argument.

    Raises:
        ConfigError: it is an object other than a `Run` or its unchanged model.
        CheckpointError: there is no model in the folder or run.
    """
    if isinstance(model, str | Path):
        return model_folder(model)
    if isinstance(model, Run):
        has_checkpoint = Checkpoints(model.directory).newest() is not None
        if has_checkpoint and not (model.directory / MODEL_FOLDER).is_dir():
            return model_folder(model.directory)
        return model.model_folder
    if isinstance(model, PreTrainedModel) and model in _loaded_models:
        folder, num_changes = _loaded_models[model]
        if _num_changes(model) == num_changes:
            return folder
    fix = ""
    if hasattr(model, "save_pretrained"):
        fix = "Call save_pretrained(DIR) of the model and of its tokenizer, and give DIR."
    raise ConfigError(
        "model",
        got=f"an object of the class {type(model).__name__}",
        expected="a folder or name of a model, or a quadriga.Run",
        fix=fix,
    )


class Evaluation(NamedTuple):
    """Validation metrics by name, and a table of graded responses with a row for each prompt.

    `print(evaluation)` shows the metrics.

    The table has `input`, `output`, `ground_truth` and `score`, what the reward returns beside the
    score, and the columns of the row.
    """

    metrics: dict[str, float]
    samples: pd.DataFrame

    def __str__(self) -> str:
        lines = [f"{name} {value:.3f}" for name, value in self.metrics.items()]
        return "\n".join([f"{len(self.samples)} prompts", *lines])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """Show the metrics in IPython."""
        printer.text(str(self))


@_with_settings(config=(), callbacks=(), task="rl")
@quiet_interrupt()
def train(
    model: "str | Path | Run | None" = None,
    data: Rows | None = None,
    reward: Reward | None = None,
    **settings: Unpack[TrainerSettings],
) -> Run:
    """Train a policy with rewards, as `quadriga train` does.

    Args:
        model: Hugging Face folder or name, directory or checkpoint of a run, a `Run`, or its
            `model`. Default: the one that `config` or `options` name.
        data: training rows: a file, a list of files, dictionaries, a data frame or a data set.
            Default: the files that `config` or `options` name.
        reward: function that is called by the names of its arguments, a list of functions, each
            alone or as `(function, weight)`, or `file.py:function`. Default: the built-in graders.
        settings: further arguments of `Trainer`:

            - `steps`: training steps in total. Default: as many as one epoch has.
            - `eval_data`: validation rows. Default: none.
            - `algorithm`: name of the advantage estimator. Default: "grpo".
            - `estimator`: advantage estimator as a function, instead of `algorithm`. Default: none.
            - `loss`: policy loss, by name or as a function. Default: "vanilla".
            - `config`: configuration file, or several. Default: none.
            - `name`: name of the run's directory; a run in it is continued. Default: a new one.
            - `options`: configuration keys with their values. Default: none.
            - `callbacks`: functions that are called with the `TrainingStep` after each step. Default: none.
            - `task`: "rl" (default), "sft" or "reward_model".

    Returns:
        The finished run.

    Raises:
        QuadrigaError: an argument is wrong, or the run fails; the same errors as the command's.
    """
    return Trainer(model, data, reward, **settings).run()


@_with_settings(config=(), callbacks=(), task="sft")
@quiet_interrupt()
def sft(
    model: "str | Path | Run | None" = None,
    data: Rows | None = None,
    **settings: Unpack[TrainerSettings],
) -> Run:
    """Fine-tune a model on demonstrations, as `quadriga sft` does.

    Args:
        model: Hugging Face folder or name, directory or checkpoint of a run, or a `Run`.
        data: training rows with `messages`, or with `prompt` and `response`. With
            `task="reward_model"`: with `prompt`, `chosen` and `rejected`.
        settings: further arguments of `Trainer`, listed at `train`. Default of `task`: "sft".

    Returns:
        The finished run.

    Raises:
        QuadrigaError: an argument is wrong, or the run fails; the same errors as the command's.
    """
    settings.setdefault("task", "sft")
    return Trainer(model, data, **settings).run()


@quiet_interrupt()
def generate(
    model: "str | Path | Run",
    prompts: str | Sequence[str | list[dict[str, str]]],
    *,
    system: str | None = None,
    images: Sequence[Sequence[str]] | None = None,
    config: ConfigFiles = (),
    options: Mapping[str, Any] | None = None,
) -> list[list[str]]:
    """Generate responses to prompts with the sampling parameters of `rollout`.

    Args:
        model: Hugging Face folder or name, directory or checkpoint of a run, or a `Run`, whose
            configuration is then the default of every key but `rollout.n`, which is 1.
        prompts: a text, or a list of texts and chats.
        system: system message of the prompts that are texts.
        images: files for the `<image>` marks of each prompt.
        config: configuration file, or several.
        options: configuration keys with their values.

    Returns:
        The responses to each prompt, `rollout.n` of them.

    Raises:
        QuadrigaError: an argument is wrong, or the model cannot be loaded or run.
    """
    resolved = _ConfigDraft(model, config=config, options=options, is_frozen=True).load()
    system_messages = []
    if system is not None:
        system_messages = [{"role": "system", "content": system}]
    chats = []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        if isinstance(prompt, str):
            prompt = [*system_messages, {"role": "user", "content": prompt}]
        chats.append(prompt)
    return frozen.answer(resolved, chats, images)


@quiet_interrupt()
def evaluate(
    model: "str | Path | Run",
    data: Rows | None = None,
    reward: Reward | None = None,
    *,
    config: ConfigFiles = (),
    options: Mapping[str, Any] | None = None,
) -> Evaluation:
    """Answer the prompts of `data` and grade the responses, as `quadriga eval` does.

    Args:
        model: Hugging Face folder or name, directory or checkpoint of a run, or a `Run`, whose
            configuration is then the default, as with `quadriga eval RUN --config RUN/config.yaml`.
            Secrets that the run does not write down are given in `options` if they are needed.
        data: validation rows, as for `train`. None: those of `data.val_files`.
        reward: as for `train`.
        config: configuration file, or several, which overrides a run's configuration.
            `rollout.val_kwargs` has the sampling parameters.
        options: configuration keys with their values, which override both.

    Returns:
        Metrics and graded responses.

    Raises:
        QuadrigaError: an argument is wrong, or the model cannot be loaded or run.
    """
    draft = _ConfigDraft(model, config=config, options=options, is_frozen=True)
    with own_folder() as folder:
        draft.directory = Path(folder)
        draft.set_reward(reward)
        draft.set_rows("data.val_files", data)
        try:
            grades = frozen.evaluate(draft.load())
        except QuadrigaError as error:
            raise _with_sources(error, draft.sources) from error.__cause__
    samples: dict[str, dict[str, Any]] = {}
    for response in grades.rows:
        samples.setdefault(response["uid"], _sample(response))
    return Evaluation(grades.metrics, pd.DataFrame(list(samples.values())))


def _sample(response: Mapping[str, Any]) -> dict[str, Any]:
    """A graded response as a row of a table, with the columns of its data row."""
    hidden = ("uid", "output_with_special_tokens", "row")
    sample = {name: value for name, value in response.items() if name not in hidden}
    columns = response.get("row") or {}
    return sample | {name: value for name, value in columns.items() if name not in sample}


def _defaults_of(run: Run) -> dict[str, Any]:
    """Configuration of a run that `evaluate` and `generate` take as their default.

    Returns:
        Sections without what the run hides in its files and what belongs to training: the group
        size and the folder of validation rows. {} unless the run trained with rewards.
    """
    if "config" in vars(run):
        sections = run.config.model_dump(mode="json", exclude_unset=True)
    else:
        problems: list[ConfigError] = []
        sections, _ = read_yaml(run.directory / CONFIGURATION, problems)
        if problems:
            raise problems[0]
    if sections.pop("task", "rl") != "rl":
        return {}
    sections = without_hidden(sections)
    sections.get("actor_rollout_ref", {}).get("rollout", {}).pop("n", None)
    sections.get("trainer", {}).pop("validation_data_dir", None)
    return sections


class _ConfigDraft:
    """A configuration under construction.

    Attributes:
        values: keys that override the configuration files.
        is_frozen: whether the model is not trained.
        defaults: what files and keys override: the configuration of a run that is not trained on.
        config: what files, arguments and options say, without the defaults of `set_defaults`.
        directory: where files for rows and functions are written.
        reward: the reward functions, if they are functions of this program.
        sources: what errors call the rows of each file that was written for them.
    """

    def __init__(
        self,
        model: "str | Path | Run | None",
        *,
        values: Mapping[str, Any] | None = None,
        config: ConfigFiles = (),
        options: Mapping[str, Any] | None = None,
        task: str = "rl",
        is_frozen: bool = False,
    ) -> None:
        self.task = task
        self.is_frozen = is_frozen
        self.defaults = _defaults_of(model) if is_frozen and isinstance(model, Run) else {}
        self.files = [config] if isinstance(config, str | Path) else list(config)
        self.values = {key: value for key, value in (values or {}).items() if value is not None}
        if model is not None:
            self.values["actor_rollout_ref.model.path"] = _find_model(model)
        for key, value in (options or {}).items():
            self.values[key] = list(value) if isinstance(value, tuple) else value
        if "trainer.total_training_steps" in self.values:
            # A number of epochs in a file does not limit the steps that the caller asks for.
            self.values.setdefault("trainer.total_epochs", None)
        self.config = self._load().config
        self.directory = self.config.trainer.directory
        self.reward: ItemReward | None = None
        self.sources: dict[str, str] = {}

    def _load(self, *, for_training: bool = False) -> Loaded:
        return load_config(
            files=self.files,
            values=self.values,
            task=self.task,
            for_training=for_training,
            defaults=self.defaults,
        )

    def load(self, *, for_training: bool = False) -> Config:
        """Load and check the configuration, and print its notices."""
        loaded = self._load(for_training=for_training)
        for notice in loaded.notices:
            print(f"notice: {notice}", file=sys.stderr)
        return loaded.config

    def choose_directory(self) -> None:
        """Choose a new directory, unless the configuration names one."""
        trainer = self.config.trainer
        default = load_config(task=self.task).config.trainer
        keys = ("experiment_name", "default_local_dir")
        if any(getattr(trainer, key) != getattr(default, key) for key in keys):
            return
        name = self.directory.name
        for number in itertools.count(1):
            self.directory = self.directory.with_name(f"{name}-{number}")
            if not self.directory.exists():
                break
        self.values["trainer.experiment_name"] = self.directory.name
        print(f"run: {self.directory}")

    def set_function(self, key: str, function: str | Callable[..., Any] | None, label: str) -> None:
        """Set a key to a function, which is written to a file, or to the name of one."""
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
        """Set the keys of the reward, and where its functions run."""
        if reward is None:
            return
        # The reward of the run that is evaluated, and its manager, give way.
        self.defaults.pop("custom_reward_function", None)
        for key in ("reward_manager", "reward_kwargs"):
            self.defaults.get("reward_model", {}).pop(key, None)
        if isinstance(reward, str | Path):
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
            # Only this process has the functions.
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
        """Set a key to the file with the rows, which is written unless the rows are complete files.

        Args:
            key: "data.train_files" or "data.val_files".
            rows: rows of the caller. None: the files that the configuration names, if any.

        Returns:
            The number of rows.

        Raises:
            DataError: there are no rows, or one of them is not a dictionary.
        """
        name = key.rpartition(".")[2]
        source = rows
        if rows is None:
            source = getattr(self.config.data, name)
            if not source:
                return 0
        entries = source if isinstance(source, list) else [source]
        label = "eval_data" if name == "val_files" and not self.is_frozen else "data"
        if entries and all(isinstance(entry, str | Path) for entry in entries):
            if len(entries) == 1:
                label = str(entries[0])
            dictionaries, num_rows = self._read(source, key)
            if not dictionaries:
                self.values[key] = source
                return num_rows
        else:
            dictionaries = self._dictionaries(source)

        if not dictionaries:
            raise DataError(label, got="no rows", expected="at least one")
        self._check_rows(dictionaries, label)
        # NaN in a text column means that the text is missing. Written as "NaN" it would be learned.
        text_columns = {*self.config.data.chat_columns, self.config.data.response_key}
        completed = []
        for row in dictionaries:
            missing = [column for column in text_columns if _is_missing(row.get(column))]
            row = {**row, **dict.fromkeys(missing)}
            completed.append(self._complete(row) if self.task == "rl" else row)
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
        """Require dictionaries with the column of the prompt, before a model is loaded."""
        for number, row in enumerate(rows):
            if not isinstance(row, Mapping):
                raise DataError(
                    f"{label} row {number}", got=repr(row)[:80], expected="a dictionary of columns"
                )
        data = self.config.data
        column = data.prompt_key
        # A data set of the user's own may read other columns.
        is_checked = self.task == "rl" and data.custom_cls.path is None
        if is_checked and not any(column in row for row in rows):
            raise DataError(
                label,
                got=f"the columns {', '.join(map(str, rows[0]))}",
                expected=f"a column {column!r}",
                fix="Rename or add it, or set data.prompt_key to the column that holds the prompts.",
            )

    def _dictionaries(self, rows: Any) -> list[Any]:
        """Rows as dictionaries, without the nulls that a table adds to chats."""
        if isinstance(rows, pd.DataFrame):
            dictionaries = rows.to_dict("records")
        elif isinstance(rows, datasets.Dataset):
            # The Arrow format has images as they are stored, as bytes.
            dictionaries = rows.with_format("arrow")[:].to_pylist()
        else:
            return list(rows)
        for row in dictionaries:
            drop_null_fields(row, self.config.data.chat_columns)
        return dictionaries

    def _read(self, files: Any, key: str) -> tuple[list[dict[str, Any]], int]:
        """Read files of rows.

        Returns:
            The rows, [] if the run can read the files as they are; and the number of rows.
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

    def _complete(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Add the columns that the trainer reads, and copies of all columns if a reward names one."""
        complete = {
            self.config.data.reward_fn_key: "rows",
            "reward_model": {"style": "rule", "ground_truth": row.get("ground_truth")},
            **row,
        }
        truth = complete["reward_model"]
        if isinstance(truth, Mapping) and _is_missing(truth.get("ground_truth")):
            complete["reward_model"] = {
                key: value for key, value in truth.items() if key != "ground_truth"
            }
        if self.reward is None:
            return complete

        columns = dict(row)
        # The name of the prompt in reward functions.
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
        """Set what neither files nor arguments set: batch sizes, trackers and files to write.

        Args:
            num_rows: number of training rows; 0 if unknown.
        """
        # Arguments such as the estimator are among the values by now.
        config, choice = with_groups(self._load().config)
        trainer = config.trainer
        self.values["trainer.logger"] = list(dict.fromkeys([*trainer.loggers, "jsonl"]))
        # Runs in lockstep save by time: trainer.save_minutes.
        if "save_freq" not in trainer.model_fields_set and config.async_training.enable:
            self.values["trainer.save_freq"] = AT_THE_END
        if self.task != "rl":
            return
        num_responses = config.actor_rollout_ref.rollout.n
        if choice:
            self.values["actor_rollout_ref.rollout.n"] = num_responses
            print(choice)
        size = config.data.train_batch_size
        if "train_batch_size" not in config.data.model_fields_set and num_rows:
            size = self._choose_batch_size(num_rows, num_responses)
            self.values["data.train_batch_size"] = size
        if "ppo_mini_batch_size" not in config.actor_rollout_ref.actor.model_fields_set:
            self.values["actor_rollout_ref.actor.ppo_mini_batch_size"] = size
        if not config.data.val_files and "val_before_train" not in trainer.model_fields_set:
            self.values["trainer.val_before_train"] = False

    def _choose_batch_size(self, num_rows: int, num_responses: int) -> int:
        """Choose and print the prompts of a step, for the rows and the processors of this machine."""
        trainer = self.config.trainer
        num_processes = trainer.nnodes * trainer.n_gpus_per_node
        if torch.cuda.is_available():
            max_responses = RESPONSES_OF_A_GPU * num_processes
            processors = f"{num_processes} processes on GPUs"
        else:
            num_cores = len(os.sched_getaffinity(0))
            max_responses = RESPONSES_OF_A_CORE * num_cores
            processors = f"{num_cores} cores"
        size = min(num_rows, max(1, max_responses // num_responses))
        # Each process gets the same number of prompts.
        size = max(size - size % num_processes, 1)
        print(
            f"data.train_batch_size: {size} prompts a step "
            f"({num_rows} rows, {processors}, {num_responses} responses each)"
        )
        return size


def _with_sources(error: QuadrigaError, sources: Mapping[str, str]) -> QuadrigaError:
    """Replace written files in an error by the caller's names for their rows; return the same object."""
    for name in ("where", "got", "expected", "fix"):
        text = getattr(error, name)
        for file, source in sources.items():
            text = text.replace(file, source)
        setattr(error, name, text)
    return error


def _is_missing(value: Any) -> bool:
    """Whether a value of a table is missing, for which pandas writes NaN."""
    return isinstance(value, float) and math.isnan(value)
