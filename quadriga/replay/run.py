# SPDX-License-Identifier: Apache-2.0
"""A replay, from its request to its result."""

from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from functools import reduce
from io import StringIO
from operator import getitem
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from quadriga.config import Config, load_config
from quadriga.config.loader import parse_override
from quadriga.errors import ConfigError, DamagedCheckpointError, DataError
from quadriga.observe.machine import describe_numerics
from quadriga.observe.records import RecordFolder, StepRecord
from quadriga.observe.timing import Timeline
from quadriga.redact import HIDDEN
from quadriga.replay.compare import TOLERANCE, Comparison, compare_metrics, compare_rows
from quadriga.replay.start import ReplayStart, configure_one_process, find_start
from quadriga.replay.trainer import (
    ADVANTAGES,
    REWARDS,
    UPDATE,
    PhaseReachedError,
    ReplayTrainer,
    ReplayWorker,
)
from quadriga.rewards import RewardManager, load_reward_manager
from quadriga.trainer.asynchronous.simulation import training_ranks
from quadriga.trainer.build import (
    Replacements,
    build_run,
    build_tokenizer,
    check_before_start,
)
from quadriga.trainer.record_rows import record_table
from quadriga.trainer.roles import Needs, Role
from quadriga.trainer.saving import seed_generators
from quadriga.trainer.settings import RunSettings

MAX_S = 300.0
"""Predicted seconds of a replay above which it must be confirmed."""
_GRADING_PREFIXES = ("custom_reward_function.", "reward_model.")
"""Prefixes of the keys that change rewards."""
_PROMPT_KEYS = frozenset(
    {
        *("mixture", "mixture_until", "max_prompt_length", "train_batch_size", "gen_batch_size"),
        *("filter_overlong_prompts", "truncation", "streaming", "shuffle", "seed"),
        *("train_max_samples", "dataloader_num_workers", "datagen", "sampler"),
    }
)
"""Keys of `data` that decide which prompts a step has, and how they are cut."""
_EDITABLE = (
    "a key of grading, advantages or the update, such as those of reward_model, "
    "custom_reward_function, algorithm, actor_rollout_ref.actor and critic"
)
"""Description of the keys that may be edited, for errors."""
_REWARD_SECTION = "custom_reward_function"
_LOSS_KEY = "actor_rollout_ref.actor.policy_loss.loss_mode"


@dataclass(frozen=True)
class ReplayRequest:
    """A replay that a user asks for.

    Attributes:
        directory: the run's directory.
        step: step to replay.
        until: phase after which the replay ends. "": advantages for an edited step whose loss is
            not edited, else the update.
        debugs: whether to start the debugger after the first phase with a difference, or after the
            phase `until` in any case.
        uid: `uid` of the prompt whose rows the report shows, or `rollout_id` of one of its
            rollouts. "": none.
        edits: changes of the replayed step: `reward=FILE`, `loss=NAME` and `key=value`.
        is_confirmed: whether the replay may take longer than `MAX_S`.
    """

    directory: Path
    step: int
    until: str = ""
    debugs: bool = False
    uid: str = ""
    edits: Sequence[str] = ()
    is_confirmed: bool = False


@dataclass(frozen=True)
class ReplayResult:
    """Result of a replay: the replayed step beside its record.

    Attributes:
        start: the state that the replay started from.
        until: phase after which the replay ended.
        is_edited: whether the step was computed with other settings than the run's.
        obstacle: why the numbers need not be equal bit for bit to the recorded ones; "" if they
            should be.
        recorded: the record of the step.
        rows: rows of the step as replayed, with the columns of the record.
        tokenizer: decodes prompts and responses.
        columns: comparison of the columns.
        metrics: comparison of the metrics.
        recorded_alone: names of metrics that the record has and the replay did not compute.
        earlier: a sentence on the first earlier step that differs from its record; "" if none does.
    """

    start: ReplayStart
    until: str
    is_edited: bool
    obstacle: str
    recorded: StepRecord
    rows: pa.Table
    tokenizer: PreTrainedTokenizerBase
    columns: list[Comparison]
    metrics: list[Comparison] = field(default_factory=list)
    recorded_alone: list[str] = field(default_factory=list)
    earlier: str = ""

    @property
    def largest(self) -> float:
        """Largest `distance` in a column or a metric."""
        return max([entry.largest for entry in (*self.columns, *self.metrics)], default=0.0)

    @property
    def is_equal(self) -> bool:
        """Whether the replay agrees with the record as well as can be expected.

        Without an obstacle all numbers must be equal bit for bit. With an obstacle, the numbers of
        the first step after a checkpoint must be equal within `TOLERANCE`; in later steps the
        differences grow, so any are accepted. An edited step is meant to differ.
        """
        if self.is_edited:
            return True
        if not self.obstacle:
            return all(entry.is_equal for entry in (*self.columns, *self.metrics))
        return not self.start.is_first or self.largest <= TOLERANCE


def replay(request: ReplayRequest) -> ReplayResult:
    """Replay a step and compare it with the record.

    Args:
        request: the replay.

    Raises:
        DataError: something that the replay needs is missing, or it needs to be confirmed.
        ConfigError: the settings of the run, or edits of them, cannot be used.
    """
    start = find_start(request.directory, request.step)
    if request.uid:
        # Raises early if the step does not have the prompt.
        uid_of(start.record.read(start.step, columns=["uid", "rollout_id"]).rows, request.uid)

    # The configuration of the run, and the edited one.
    overrides = _edits_to_overrides(request.edits)
    # The run's configuration file does not contain secrets. An override that supplies one is no
    # edit, and belongs to the run's configuration too.
    secrets = _select_secrets(overrides, start.settings)
    config = load_config(secrets, [start.configuration]).config
    edited = config
    edits = [override for override in overrides if override not in secrets]
    is_edited = bool(edits)
    if is_edited:
        # Edits are checked as `quadriga train` checks them.
        edited = load_config(overrides, [start.configuration], for_training=True).config
    _require_replayable(config, start)
    _require_same_prompts(overrides, config, edited)
    until = request.until or UPDATE
    # Another loss shows only in the update, other edits already in the advantages.
    changes_loss = any(edit.startswith(f"{_LOSS_KEY}=") for edit in edits)
    if is_edited and not request.until and not changes_loss:
        until = ADVANTAGES
    changes_grading = any(edit.startswith(_GRADING_PREFIXES) for edit in edits)
    grades_again = until == REWARDS or changes_grading
    if grades_again:
        _require_grader(edited)

    if until == REWARDS:
        print(f"replay: step {start.step} up to its rewards; its recorded responses are graded")
    else:
        _require_confirmation(start, training_ranks(config), is_confirmed=request.is_confirmed)
    # `config` has the run's settings, so only files that it names can have changed.
    for change in start.settings.changes(RunSettings.of(config)):
        print(f"NOTICE: {change} has changed since the run")

    with TemporaryDirectory(prefix="quadriga_replay_") as path:
        folder = Path(path)
        final = configure_one_process(edited, folder / "replay", start.checkpoint)
        _require_effect(overrides, edited, final)
        if is_edited and not start.is_first and until != REWARDS:
            # Train the earlier steps without the edits, and continue from a checkpoint of the last
            # of them. This takes long, so errors in the edits are looked for first.
            check_before_start(final, Needs.of(final))
            if grades_again:
                load_reward_manager(final, build_tokenizer(final)).close()
            unedited = configure_one_process(config, folder / "before", start.checkpoint)
            checkpoint = _train_to_previous_step(unedited, start)
            final = configure_one_process(edited, folder / "replay", checkpoint)
        trainer, run = _build_trainer(final, start, grades_again=grades_again)
        trainer.until = until
        trainer.debugs = request.debugs
        trainer.debugged_phase = request.until
        trainer.last_step = request.step
        try:
            rows, metrics = _replay_step(trainer)
            earlier = _earlier_difference(trainer)
        finally:
            run.close()

    recorded = start.record.read(request.step)
    columns = compare_rows(recorded.rows, rows)
    metric_comparisons, recorded_alone = compare_metrics(recorded.facts["metrics"], metrics)
    return ReplayResult(
        start=start,
        until=until,
        is_edited=is_edited,
        obstacle=_find_obstacle(config, recorded),
        recorded=recorded,
        rows=rows,
        tokenizer=trainer.tokenizer,
        columns=columns,
        metrics=metric_comparisons,
        recorded_alone=recorded_alone,
        earlier=earlier,
    )


def _edits_to_overrides(edits: Sequence[str]) -> list[str]:
    """Translate edits into overrides `key=value` of the configuration.

    Args:
        edits: `reward=FILE`, `reward=FILE:FUNCTION`, `loss=NAME` or `key=value`.

    Raises:
        ConfigError: an edit has no value.
    """
    overrides = []
    for edit in edits:
        name, separator, value = edit.partition("=")
        if not separator:
            raise ConfigError(
                f"--edit {edit}",
                got="no value",
                expected="reward=FILE, loss=NAME or key=value",
                fix="`quadriga config keys WORDS` lists keys.",
            )
        if name == "reward":
            # The value is FILE:FUNCTION, or FILE for the section's default, `compute_score`.
            path, colon, function = value.rpartition(":")
            if not colon:
                path = value
                function = "compute_score"
            overrides += [f"{_REWARD_SECTION}.path={path}", f"{_REWARD_SECTION}.name={function}"]
        elif name == "loss":
            overrides.append(f"{_LOSS_KEY}={value}")
        else:
            overrides.append(edit)
    return overrides


def uid_of(recorded: pa.Table, name: str) -> str:
    """Find the prompt that a name means.

    Args:
        recorded: recorded rows of the step, with `uid` and `rollout_id`.
        name: `uid` of the prompt, or `rollout_id` of one of its rollouts.

    Returns:
        The `uid`.

    Raises:
        DataError: the step has no such prompt.
    """
    uids = recorded.column("uid").to_pylist()
    rollout_ids = recorded.column("rollout_id").to_pylist()
    if name in rollout_ids:
        return uids[rollout_ids.index(name)]
    if name not in uids:
        raise DataError(
            f"--uid {name}",
            got="no such prompt in the step",
            expected=f"one of {len(set(uids))} prompts, {uids[0]} to {uids[-1]}, or a rollout",
        )
    return name


def _require_grader(config: Config) -> None:
    """Refuse to grade responses again if only the environment can give scores."""
    has_grader = config.custom_reward_function.path is not None or config.reward_model.enable
    if config.env.name is not None and not has_grader:
        raise DataError(
            "replay of rewards",
            got=f"scores of env={config.env.name}",
            expected="scores of a reward function or a reward model",
            fix="A replay cannot run the environment again. Grade with a function of your own: "
            "--edit reward=FILE.",
        )


def _select_secrets(overrides: Sequence[str], settings: RunSettings) -> list[str]:
    """Select the overrides of keys whose values the run's configuration file hides.

    Args:
        overrides: the edits as overrides.
        settings: settings in the run's configuration file, by key.
    """
    hidden_keys = [name for name, value in settings.values.items() if HIDDEN in str(value)]
    secrets = []
    for override in overrides:
        key = override.partition("=")[0]
        # A hidden value may be a dictionary, of which the override sets an entry.
        if any(key == name or key.startswith(f"{name}.") for name in hidden_keys):
            secrets.append(override)
    return secrets


def _require_effect(overrides: Sequence[str], edited: Config, final: Config) -> None:
    """Refuse edits of keys that a replay sets itself.

    Args:
        overrides: the edits as overrides.
        edited: the edited configuration.
        final: the edited configuration after `configure_one_process`.

    Raises:
        ConfigError: `configure_one_process` has changed the value of an edited key.
    """
    for override in overrides:
        key, _ = parse_override(override)
        names = key.split(".")
        # Descend from the configuration to the key.
        if reduce(getitem, names, edited) != reduce(getitem, names, final):
            raise ConfigError(
                f"--edit {override}",
                got="a key that a replay sets itself",
                expected=_EDITABLE,
                fix="Leave out the edit: a replay is always one process without engine, validation "
                "and checkpoints.",
            )


def _require_same_prompts(overrides: Sequence[str], config: Config, edited: Config) -> None:
    """Refuse edits of keys that decide on the prompts: a replay takes the recorded prompts.

    Args:
        overrides: the edits as overrides.
        config: the run's configuration.
        edited: the edited configuration.
    """
    for override in overrides:
        key, _ = parse_override(override)
        section, *names = key.split(".")
        if section != "data":
            continue
        # `data={...}` names no key of the section, and may edit several.
        for name in names[:1] or sorted(_PROMPT_KEYS):
            if name in _PROMPT_KEYS and config.data[name] != edited.data[name]:
                raise ConfigError(
                    f"--edit {override}",
                    got="a key that decides on the prompts, which are those of the record",
                    expected=_EDITABLE,
                )


def _require_replayable(config: Config, start: ReplayStart) -> None:
    """Refuse a run whose steps do not follow from a checkpoint and recorded responses alone.

    Raises:
        DataError: the run is not of the task rl, or it was asynchronous.
    """
    if config.task != "rl":
        raise DataError(
            str(start.configuration),
            got=f"a run of the task {config.task}",
            expected="a run of quadriga train, which records rollouts",
        )
    if config.async_training.enable:
        raise DataError(
            str(start.configuration),
            got="async_training.enable=True",
            expected="a run in lockstep",
            fix="A step of this run also depends on responses that were under way at its "
            "checkpoint. Its record can be read: quadriga show, Run.rollouts.",
        )


def _require_confirmation(start: ReplayStart, ranks: int, *, is_confirmed: bool) -> None:
    """Print the predicted time of a replay, and refuse a long one that is not confirmed.

    Args:
        start: the state that the replay starts from.
        ranks: number of ranks that trained in the run.
        is_confirmed: whether the replay may take longer than `MAX_S`.

    Raises:
        DataError: the replay would take longer, and is not confirmed.
    """
    # One process does the work of all ranks.
    seconds = start.recorded_s * ranks
    begin = "the start of the run" if start.checkpoint is None else start.checkpoint
    steps = f"step {start.step}"
    if not start.is_first:
        steps = f"steps {start.after_step + 1} to {start.step}"
    source = f" by the time in the run on {ranks} ranks" if ranks > 1 else ""
    print(
        f"replay: {steps} from {begin}; about {seconds:.0f} s of steps{source}, plus the start-up"
    )
    if seconds > MAX_S and not is_confirmed:
        raise DataError(
            f"replay of step {start.step}",
            got=f"about {seconds / 60:.0f} minutes of training from {begin}",
            expected=f"at most {MAX_S / 60:.0f} minutes",
            fix="Add --yes, or replay a step right after a checkpoint.",
        )


def _build_trainer(
    config: Config, start: ReplayStart, *, grades_again: bool
) -> tuple[ReplayTrainer, Any]:
    """Build the trainer of a replay. The caller closes the run that it belongs to.

    Args:
        config: the configuration from `configure_one_process`.
        start: the state to start from.
        grades_again: whether the responses of the replayed step are graded.

    Returns:
        The trainer, and the run.
    """
    if not grades_again:
        # All scores come from the record, so the reward model is not loaded.
        reward_model = config.reward_model.model_copy(update={"enable": False})
        config = config.model_copy(update={"reward_model": reward_model})
    seed_generators(config.trainer.seed)
    # None: the configured reward manager grades. Else the plain class stands in, and is never called.
    parts = Replacements(
        workers={Role.ActorRollout: ReplayWorker},
        reward=None if grades_again else RewardManager,
        trainer=ReplayTrainer,
    )
    run = build_run(config, Timeline(), parts)
    trainer = run.trainer
    assert isinstance(trainer, ReplayTrainer)
    # Mark the warning on scores as given: its advice would name the temporary folder.
    trainer.warned.add("scores")
    trainer.recorded = start.record
    trainer.grades_again = grades_again
    trainer.quarantine.num_rows |= start.skipped
    return trainer, run


def _train_to_previous_step(config: Config, start: ReplayStart) -> Path:
    """Train up to the step before the replayed one. Return the path of a checkpoint of that step.

    Args:
        config: the run's configuration from `configure_one_process`, without edits.
        start: the state to start from.
    """
    # The replayed step gets a trainer of its own, whose start-up prints the same choices.
    with redirect_stdout(StringIO()):
        trainer, run = _build_trainer(config, start, grades_again=False)
    try:
        for step in _iterate_steps(trainer):
            if step.number == start.step - 1:
                # The message on the checkpoint would name the temporary folder.
                with redirect_stdout(StringIO()):
                    trainer.save()
                break
    finally:
        run.close()
    return trainer.checkpoints.path(start.step - 1)


def _replay_step(trainer: ReplayTrainer) -> tuple[pa.Table, dict[str, float]]:
    """Train up to the replayed step. Return its rows, as they are recorded, and its metrics."""
    config = trainer.config
    try:
        for step in _iterate_steps(trainer):
            if step.number == trainer.last_step:
                break
    except PhaseReachedError as end:
        return record_table(end.batch, config.data), end.metrics
    # Wait for the thread that records the steps of the replay.
    trainer.recorder.finish()
    replayed = RecordFolder(config.trainer.directory).read(trainer.last_step)
    return replayed.rows, replayed.facts["metrics"]


def _earlier_difference(trainer: ReplayTrainer) -> str:
    """Describe the first earlier step that differs from its record; "" if none does."""
    # Wait for the thread that records the steps of the replay.
    trainer.recorder.finish()
    replayed = RecordFolder(trainer.config.trainer.directory)
    for step in replayed.steps():
        if step == trainer.last_step:
            break
        columns = compare_rows(trainer.recorded.read(step).rows, replayed.read(step).rows)
        # Differences in a step cause those in later steps, so only the first step is described.
        names = [entry.name for entry in columns if not entry.is_equal]
        if names:
            return f"step {step} differs in {', '.join(names)}"
    return ""


def _iterate_steps(trainer: ReplayTrainer) -> Any:
    """Iterate over the steps of a trainer.

    Raises:
        DamagedCheckpointError: the checkpoint is damaged. The advice for a training run is replaced
            by one for a replay.
    """
    try:
        yield from trainer.steps()
    except DamagedCheckpointError as error:
        error.fix = "Put the file back from a copy, or move the checkpoint away: the replay then "
        error.fix += "starts from an earlier one."
        raise


def _find_obstacle(config: Config, recorded: StepRecord) -> str:
    """Why the numbers of a replay need not be equal bit for bit; "" if they should be.

    Args:
        config: the run's configuration.
        recorded: the record of the step.
    """
    ranks = training_ranks(config)
    # Several ranks add gradients in another order than one process.
    if ranks > 1:
        return f"the run had {ranks} ranks"
    if config.trainer.backend != "local":
        return "the run computed in worker processes"
    machine = recorded.facts.get("machine")
    this_machine = describe_numerics()
    if machine != this_machine:
        return f"the run was on {machine or 'an unknown machine'}, the replay is on {this_machine}"
    # `describe_numerics` names the GPUs, or says "no GPU".
    if "no GPU" not in this_machine:
        return "an accelerator does not add in the same order each time"
    return ""
