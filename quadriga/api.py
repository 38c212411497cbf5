# SPDX-License-Identifier: Apache-2.0
"""Python interface: `quadriga train`, `sft`, `generate` and `eval` for programs and notebooks.

    arguments -> rows and functions, written to files of the run's directory -> configuration
              -> the run that the command would start

So a run has the same checks, messages, files, checkpoints and results as that of the command, in
one process and on Ray.
"""

import inspect
import shlex
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from html import escape
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import pandas as pd
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedModel

from quadriga.config import Config, load_config
from quadriga.config.root import respell
from quadriga.config.yaml_text import read_yaml
from quadriga.config_draft import ConfigDraft, ConfigFiles, Reward, Rows, name_sources
from quadriga.descendants import own_folder
from quadriga.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    QuadrigaError,
    did_you_mean,
)
from quadriga.observe.progress import (
    HEADLINES,
    VALIDATION_PREFIXES,
    Picture,
    summary_lines,
)
from quadriga.observe.records import STEP, VALIDATION, RecordFolder, table_for_people
from quadriga.observe.stopping import Interrupted, quiet_interrupt
from quadriga.observe.tracking.jsonl import METRICS_FILE, read_metrics
from quadriga.redact import remove_hidden
from quadriga.trainer import evaluate as evaluation
from quadriga.trainer import launch
from quadriga.trainer.checkpoint import Checkpoints, model_folder
from quadriga.trainer.loop import MODEL_FOLDER, TrainingLoop, TrainingStep
from quadriga.trainer.run_folder import RunFolder
from quadriga.trainer.settings import CONFIGURATION

_ADVICE_BY_NAME_IN_TRL = {
    "eval_dataset": "Its name here is eval_data.",
    "num_generations": 'Give options={"actor_rollout_ref.rollout.n": NUMBER}.',
    "reward_funcs": "Its name here is reward.",
    "reward_weights": "Give the weights in reward: [(function, weight), ...].",
    "train_dataset": "Its name here is data.",
}
"""Advice about arguments of TRL's trainers, by their names there."""

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
    """Decorator: list all settings in the signature of a function that takes `**settings`.

    Only `help` and tab completion read this signature; calls of the function do not change.

    Args:
        defaults: the defaults to show, by name of the setting; None is shown for all others.
    """

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        *parameters, _ = signature.parameters.values()  # the last one is `**settings`
        for name, annotation in TrainerSettings.__annotations__.items():
            if name not in signature.parameters:
                default = defaults.get(name)
                parameters.append(
                    inspect.Parameter(
                        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation
                    )
                )
        # `inspect.signature` returns this attribute.
        vars(function)["__signature__"] = signature.replace(parameters=parameters)
        return function

    return decorate


class Trainer:
    """A run whose steps are taken one at a time: `for step in trainer` yields each finished step.

    Args:
        model: Hugging Face folder or name, directory or checkpoint of a run, a `Run`, or its
            `model`. None: the model that `config` or `options` name.
        data: training rows. A text in the column `prompt` becomes a user message. The columns
            `data_source` and `reward_model` are optional; a column `ground_truth` can replace
            `reward_model`.
        reward: function whose arguments are passed by their names (see
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
        # `**settings` accepts any name, so misspelled ones are refused here.
        known_names = list(Settings.__annotations__)
        unknown_names = settings.keys() - known_names
        if unknown_names:
            unknown_name = min(unknown_names)
            advice = _ADVICE_BY_NAME_IN_TRL.get(unknown_name)
            raise ConfigError(
                "quadriga",
                got=f"the argument {unknown_name!r}",
                expected=f"one of {', '.join(known_names)}",
                fix=advice or did_you_mean(unknown_name, known_names),
            )
        estimator = settings.get("estimator")
        algorithm = settings.get("algorithm")
        name = settings.get("name")
        # Both would set `algorithm.adv_estimator`.
        if estimator is not None and algorithm is not None:
            raise ConfigError(
                "estimator",
                got="a function, and algorithm",
                expected="one of them",
                fix="Leave one of them out.",
            )
        draft = ConfigDraft(
            None if model is None else _find_model(model),
            values={
                "trainer.total_training_steps": settings.get("steps"),
                "trainer.experiment_name": name,
                "algorithm.adv_estimator": algorithm,
            },
            config=settings.get("config", ()),
            options=settings.get("options"),
            task=task,
        )
        # Functions and rows are written to files in the run's directory, so it is chosen first.
        if name is None:
            draft.choose_directory()
        draft.set_function("algorithm.adv_estimator", estimator, "estimator")
        draft.set_function(
            "actor_rollout_ref.actor.policy_loss.loss_mode", settings.get("loss"), "loss"
        )
        draft.set_reward(reward)
        # The reward is set first, because it decides which columns the rows must have.
        num_rows = draft.set_rows("data.train_files", data)
        draft.set_rows("data.val_files", settings.get("eval_data"))
        draft.set_defaults(num_rows)
        self._set_up(draft.load(for_training=True), callbacks, draft.sources)

    def _set_up(
        self,
        config: Config,
        callbacks: Sequence[Callable[[TrainingStep], Any]],
        sources: Mapping[str, str] = MappingProxyType({}),
    ) -> None:
        """Set the attributes. Neither processes nor models are started yet.

        Args:
            config: resolved configuration.
            callbacks: functions that are called with the `TrainingStep` after each step.
            sources: for each file that was written for rows of the caller, the name that errors
                show in its place (`ConfigDraft.sources`).
        """
        self.config = config
        self._sources = sources
        self.callbacks = list(callbacks)
        # The generator of the run. It yields the state before the first step, then each step.
        self._steps = launch.steps(config, in_python=True)
        self._loop: TrainingLoop | None = None
        # Ends the run's processes even if `close` is never called.
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
        trainer._set_up(config, callbacks)
        return trainer

    @property
    def loop(self) -> TrainingLoop:
        """The training loop, built on first use.

        It has the worker groups and the parts of a step: `actor`, `generate`, `compute_advantages`.
        """
        if self._loop is None:
            # The first item is the state before the first step, so no step is lost.
            self._loop = self._next_item().loop
        return self._loop

    def __iter__(self) -> Iterator[TrainingStep]:
        return self

    def __next__(self) -> TrainingStep:
        """Take the next step. Skipped steps are neither returned nor passed to callbacks."""
        while True:
            step = self._next_item()
            # An item without a batch is a skipped step, or the state before the first one.
            if step.batch is not None:
                self._finish_step(step, self.callbacks)
                return step
            self._loop = step.loop
            # 0 stands for the state before the first step. A skipped step may be the last one, after
            # which the model is written.
            if step.number:
                self._finish_step(step, callbacks=[])

    def _finish_step(
        self, step: TrainingStep, callbacks: Sequence[Callable[[TrainingStep], Any]]
    ) -> None:
        """Write the model after the last step, and call the callbacks.

        An error here, such as one of a callback, ends the run.
        """
        try:
            # The loop of a supervised task writes the model itself.
            if step.loop.is_last_step and self.config.task == "rl":
                step.loop.write_model()
            for callback in callbacks:
                callback(step)
        except BaseException as error:
            self._raise_in_run(error)
            raise

    def _raise_in_run(self, error: BaseException) -> None:
        """Raise an error inside the run's generator: the run ends as after an error of its own."""
        with quiet_interrupt(is_reported=True):
            self._steps.throw(error)

    def _next_item(self) -> TrainingStep:
        """Take the next item of the run: a finished step, or the state before the first one.

        Raises:
            StopIteration: the run has ended.
            QuadrigaError: the run has failed. The message names the caller's arguments in place of
                files that were written for them, and keys as the task spells them.
        """
        try:
            with quiet_interrupt(is_reported=True):
                return next(self._steps)
        except QuadrigaError as error:
            error = name_sources(error, self._sources)
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
        # The run does not see an interrupt of the caller's own code, but must end as interrupted.
        # One that arrived during a step is an `Interrupted`, and has ended the run already.
        if isinstance(error, KeyboardInterrupt) and not isinstance(error, Interrupted):
            self._raise_in_run(error)
        self.close()


class Run:
    """Results of a run, read from its directory. `print(run)` shows the metrics of the last steps.

    Args:
        directory: directory with the results of `quadriga train` or `quadriga sft`.
        callbacks: functions that `resume` calls with the `TrainingStep` after each step.
        config: the resolved configuration. None: it is read from the directory on first use.

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
            self.config = config  # replaces the cached property, so no file is read
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
        """Table of metrics with a row for each step and a column for each metric.

        Row 0 has the validation before the first step.

        Raises:
            DataError: the run has no `metrics.jsonl`.
        """
        file = self.directory / METRICS_FILE
        if not file.is_file():
            raise DataError(
                str(file),
                got="no such file",
                expected="a run that took a step, with jsonl among its trainer.logger",
            )
        return pd.DataFrame.from_dict(read_metrics(file), orient="index").rename_axis("step")

    def samples(self, step: int) -> pd.DataFrame:
        """Responses of a training step with their prompts and scores.

        Raises:
            DataError: the run has not recorded the step.
        """
        folder = RunFolder(self.directory)
        # By step, a function that reads the recorded responses.
        responses = folder.responses if folder.has_training_responses else {}
        if step not in responses:
            expected = "a run that records its rollouts (trainer.rollout_record)"
            if responses:
                expected = f"one of {', '.join(map(str, responses))}"
            raise DataError("run.samples", got=f"step {step}", expected=expected)
        return pd.DataFrame(responses[step]())

    def rollouts(self, step: int, *, validation: bool = False) -> pd.DataFrame:
        """Everything that is recorded about the rollouts of a step, one per row.

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
            # The first headline of this run is the reward, or the loss of a supervised task.
            names = (*measured[:1], *validations)
        for name in names:
            if name not in known_names:
                raise ConfigError(
                    "run.plot", got=name, expected=f"one of {', '.join(sorted(known_names))}"
                )
        return Picture({name: list(metrics[name].dropna().items()) for name in names})

    @cached_property
    def model(self) -> PreTrainedModel:
        """The trained model, loaded on first use."""
        model_class = AutoModelForCausalLM
        if self.config.task == "reward_model":
            model_class = AutoModelForSequenceClassification
        model = model_class.from_pretrained(self.model_folder)
        # Remembered, so that the unchanged model can be passed to `train` in place of its folder.
        _loaded_models[model] = (self.model_folder, _num_changes(model))
        return model

    @property
    def model_folder(self) -> Path:
        """Hugging Face folder of the model with the last weights.

        Raises:
            CheckpointError: the run did not come to its last step.
        """
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
        """Continue from the newest checkpoint to step `steps`, counted from the run's beginning.

        Raises:
            CheckpointError: the run has no checkpoint.
            ConfigError: the newest checkpoint is of a later step than `steps`.
        """
        newest_step = Checkpoints(self.directory).newest()
        if newest_step is None:
            raise CheckpointError(
                str(self.directory),
                got="no checkpoint",
                expected="one to go on from",
                fix='Train with options={"trainer.save_freq": N}, which writes one every N steps.',
            )
        if steps < newest_step:
            raise ConfigError(
                "run.resume",
                got=f"steps={steps}, with a checkpoint of step {newest_step}",
                expected="the number of steps counted from the beginning",
                fix=f"run.resume(steps={newest_step + steps}) takes {steps} more.",
            )
        changes = {
            "trainer.total_training_steps": steps,
            "trainer.total_epochs": None,
            "trainer.resume_mode": "auto",
        }
        # Continue in the directory that this object reads.
        if self.config.trainer.directory.resolve() != self.directory.resolve():
            # The folder was moved, or its path is relative to another working directory.
            changes["trainer.default_local_dir"] = str(self.directory)
        values = self.config.model_dump(mode="json", exclude_unset=True) | changes
        loaded = load_config(for_training=True, values=values, task=self.config.task)
        return Trainer.of(loaded.config, self.callbacks).run()


_loaded_models = weakref.WeakKeyDictionary[PreTrainedModel, tuple[Path, int]]()
"""Models that `Run.model` has loaded, with their folders and their `_num_changes` at that time."""


def _num_changes(model: PreTrainedModel) -> int:
    """Number of in-place changes of a model's weights so far; PyTorch counts them per tensor."""
    return sum(tensor._version for tensor in model.state_dict().values())


def _find_model(model: Any) -> str | Path:
    """Find the folder or name of the model that an argument stands for.

    Args:
        model: a folder or name, a `Run`, or the unchanged `model` of a `Run`.

    Raises:
        ConfigError: the argument is another object.
        CheckpointError: there is no model in the folder or run.
    """
    if isinstance(model, str | Path):
        return model_folder(model)
    if isinstance(model, Run):
        # A run that did not come to its last step has no final model, but may have a checkpoint.
        has_checkpoint = Checkpoints(model.directory).newest() is not None
        if has_checkpoint and not (model.directory / MODEL_FOLDER).is_dir():
            return model_folder(model.directory)
        return model.model_folder
    # A model whose weights the caller has changed is no longer the one in the folder.
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
    """Validation metrics by name, and a table with a graded response to each prompt.

    `print(evaluation)` shows the metrics.

    The table has `input`, `output`, `ground_truth` and `score`, the values that the reward returns
    besides the score, and the columns of the data row.
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
    resolved = _draft_without_training(model, config, options).load()
    system_messages = []
    if system is not None:
        system_messages = [{"role": "system", "content": system}]
    # A system message is for texts only: a chat has its own.
    chats = []
    for prompt in [prompts] if isinstance(prompts, str) else prompts:
        if isinstance(prompt, str):
            prompt = [*system_messages, {"role": "user", "content": prompt}]
        chats.append(prompt)
    return evaluation.answer(resolved, chats, images)


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
            The files of a run have no secrets: give those that the evaluation needs in `options`.
        data: validation rows, as for `train`. None: those of `data.val_files`.
        reward: as for `train`. None: the reward of the run, or that of `config` and `options`.
        config: configuration file, or several, which overrides a run's configuration.
            `rollout.val_kwargs` has the sampling parameters.
        options: configuration keys with their values, which override both.

    Returns:
        Metrics and graded responses.

    Raises:
        QuadrigaError: an argument is wrong, or the model cannot be loaded or run.
    """
    draft = _draft_without_training(model, config, options)
    # Files with rows and functions of the caller are only needed during this call.
    with own_folder() as folder:
        draft.directory = Path(folder)
        draft.set_reward(reward)
        draft.set_rows("data.val_files", data)
        try:
            grades = evaluation.evaluate(draft.load())
        except QuadrigaError as error:
            raise name_sources(error, draft.sources) from error.__cause__
    # A row for the first response to each prompt, by the prompt's uid.
    samples = {}
    for response in grades.rows:
        samples.setdefault(response["uid"], _sample_row(response))
    return Evaluation(grades.metrics, pd.DataFrame(list(samples.values())))


def _sample_row(response: Mapping[str, Any]) -> dict[str, Any]:
    """Make the row of `Evaluation.samples` for a graded response.

    Args:
        response: the graded response. Its entry `row` is the data row of the prompt, whose columns
            are added unless the response has an entry of the same name.
    """
    hidden = ("uid", "output_with_special_tokens", "row")
    sample = {name: value for name, value in response.items() if name not in hidden}
    columns = response.get("row") or {}
    return sample | {name: value for name, value in columns.items() if name not in sample}


def _draft_without_training(
    model: "str | Path | Run", config: ConfigFiles, options: Mapping[str, Any] | None
) -> ConfigDraft:
    """Start the configuration of a call that does not train the model (`generate`, `evaluate`)."""
    defaults = _frozen_defaults(model) if isinstance(model, Run) else None
    return ConfigDraft(
        _find_model(model), defaults=defaults, config=config, options=options, is_frozen=True
    )


def _frozen_defaults(run: Run) -> dict[str, Any]:
    """Sections of a run's configuration that are the defaults of `evaluate` and `generate`.

    Returns:
        All sections, but no secrets, and neither `rollout.n` nor `trainer.validation_data_dir`,
        which are about the training. {} if the run is of a supervised task.

    Raises:
        ConfigError: the configuration file of the run cannot be read.
    """
    # Whether the configuration is in memory already: given to `Run`, or read before.
    if "config" in vars(run):
        sections = run.config.model_dump(mode="json", exclude_unset=True)
    else:
        # Not through `run.config`, which refuses a file in which secrets are hidden.
        problems = []
        sections, _ = read_yaml(run.directory / CONFIGURATION, problems)
        if problems:
            raise problems[0]
    # Settings of supervised tasks, such as lengths, have another meaning for generation.
    if sections.pop("task", "rl") != "rl":
        return {}
    sections = remove_hidden(sections)
    sections.get("actor_rollout_ref", {}).get("rollout", {}).pop("n", None)
    sections.get("trainer", {}).pop("validation_data_dir", None)
    return sections
