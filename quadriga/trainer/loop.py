# SPDX-License-Identifier: Apache-2.0
"""Base class of the training loops of `quadriga train` and `quadriga sft`.

It counts and measures steps, decides what is due after each (validation, checkpoint, end of the
run), resumes from a checkpoint or from a copy in memory, and reports progress and metrics. A
subclass defines `steps`, and takes each step inside `measured`.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quadriga.config import Config, saves_by_time, writes_checkpoints
from quadriga.config.actor import HF_FOLDER
from quadriga.data.files import written_aside
from quadriga.observe.progress import Progress, step_fields
from quadriga.observe.stopping import expiry, stop_requested
from quadriga.observe.timing import PhaseTimer
from quadriga.observe.tracking import RunFacts, Tracking
from quadriga.observe.watchdog import waiting
from quadriga.protocol import DataProto
from quadriga.redact import redact
from quadriga.trainer import saving
from quadriga.trainer.checkpoint import step_of
from quadriga.trainer.profiler import Profiler
from quadriga.trainer.quarantine import Quarantine
from quadriga.trainer.settings import RunSettings, keep_settings, say_nothing_to_do
from quadriga.trainer.timed_saving import TimedSaver, run_checkpoints

logger = logging.getLogger(__name__)

MODEL_FOLDER = "model"  # the final model in a run's directory: an ordinary Hugging Face folder


class TrainingStep(NamedTuple):
    """A completed training step, already measured and reported."""

    # The loop that took the step. A restart of the workers makes a new loop.
    loop: "TrainingLoop"
    # All rows of the step with everything that was computed for them. None before the first step of
    # a loop, and for a skipped step.
    batch: DataProto | None

    @property
    def number(self) -> int:
        """Number of the step, starting at 1."""
        return self.loop.global_steps

    @property
    def metrics(self) -> dict[str, float]:
        """Metrics of the step; valid until the next step is taken."""
        return self.loop.metrics


Step = TrainingStep
"""Earlier name of `TrainingStep`, for users' callbacks."""


class TrainingLoop:
    """A training loop with checkpoints.

    Args:
        config: the resolved configuration.
        learners: worker groups that save and load checkpoints, by the name of their folder in a
            checkpoint.
        total_training_steps: number of the last step.
        resumable: objects with `state_dict` and `load_state_dict` that a resumed run restores, by
            their name in `trainer/state.pt`.

    Attributes:
        global_steps: number of the current step, which has begun; 0 before the first.
        initial_steps: number of the step that this process resumed from; 0 if it did not resume.
        total_training_steps: number of the last step; with dynamic sampling an upper bound of it.
        metrics, timer: metrics and phases of the current step.
        is_stopping: whether a stop before the last step had been requested when `save_where_due`
            was last called.
        num_rows: rows of data that the current step has taken so far, if it may take several
            batches.
        quarantine: the steps to skip.
        recovery: number of restarts so far, and the time of the last loss of a worker (of
            `time.monotonic`); None without a restart whose metrics are still to be logged.
        copies: the backend's `StateCopies`; None if it keeps none.
        newest_copy: the newest of these copies, to resume from; None if there is none.
        warned: kinds of warnings that `warn_once` does not log again.
        progress, tracking: progress bar (log lines without a terminal) and trackers; they exist
            only inside `reporting`.
    """

    progress: Progress
    tracking: Tracking

    def __init__(
        self,
        config: Config,
        learners: Mapping[str, Any],
        total_training_steps: int,
        resumable: Mapping[str, Any],
    ) -> None:
        self.config = config
        self.settings = config.trainer
        self.total_training_steps = total_training_steps
        self.saver = self._make_saver(learners)
        self.checkpoints = self.saver.checkpoints
        self.resumable = resumable
        self.global_steps = 0
        self.initial_steps = 0
        self.is_stopping = False
        self.num_rows = 0
        self.quarantine = Quarantine(self.settings)
        self.metrics: dict[str, float] = {}
        self.timer = PhaseTimer()
        self.profiler = Profiler(config, {})
        self.recovery: tuple[int, float] | None = None
        self.copies: Any = None
        self.newest_copy: Any = None
        self.warned: set[str] = set()
        # Writes config.yaml for the coming steps; None if that is done.
        self._keep_settings: Callable[[], None] | None = None
        # When the machine is taken back, in seconds since 1970; infinity if unknown.
        self._expires_at = expiry()
        self._longest_step_s = 0.0

    def _make_saver(self, learners: Mapping[str, Any]) -> saving.CheckpointSaver:
        """Make the saver of checkpoints: by steps, or by the clock if `saves_by_time`."""

        def report(text: str) -> None:
            """Print a message of the saver above the progress bar."""
            # A copy in memory may be saved before there is a progress bar.
            if hasattr(self, "progress"):
                self.progress.message(text)
            else:
                print(text)

        checkpoints = run_checkpoints(self.config)
        save_minutes = self.settings.save_minutes
        if save_minutes is None or not checkpoints.is_by_time:
            return saving.CheckpointSaver(checkpoints, learners, self._write_own_part, report)
        period_s = 60 * save_minutes
        return TimedSaver(checkpoints, learners, self._write_own_part, report, period_s)

    # Where the run starts from

    def load_checkpoint(self) -> bool:
        """Resume from the newest copy in memory, or from the checkpoint of the configuration.

        Returns:
            Whether there was anything to resume from.
        """
        # The folder of a checkpoint, or a description of the copy in memory; None: neither exists.
        source: Path | str | None
        # A copy in memory is never older than the checkpoints.
        if self.newest_copy is None:
            source = self.checkpoints.resume(self.settings, self._load)
        else:
            source = self._load_copy(self.newest_copy)
        if source is not None:
            print(f"resumed from {source}")

        if self.copies is not None:
            print(f"state copies: {self._attach_copies()}")
        # A copy must exist before the next step, which may lose workers.
        if source is not None:
            self._copy_state()

        run_settings = RunSettings.of(self.config)
        last = self.total_training_steps
        # Before the data were loaded, `has_nothing_to_do` may not have known the last step. Now it
        # is known.
        if isinstance(source, Path) and self.is_last_step and not self.settings.val_only:
            last = min(last, self.global_steps)
            say_nothing_to_do(self.config, source, last, run_settings)
            self.checkpoints.delete_leftovers()
        self._keep_settings = partial(
            keep_settings, self.config, run_settings, self.global_steps, last
        )
        # A resumed run writes its settings after its first step, see `log_step`.
        if source is None:
            self._keep_settings()
        return source is not None

    def _attach_copies(self) -> str:
        """Start to keep copies of the state in memory. Returns a text about them for the log."""
        for part in self.resumable.values():
            obstacle = getattr(part, "resume_obstacle", "")
            if obstacle:
                return f"none, for {obstacle}"
        return self.copies.attach(self.saver.workers)

    def _load(self, path: Path) -> None:
        """Load a checkpoint into the workers and into this process."""
        step = step_of(path)
        # Read first: a damaged state is refused before the workers load anything.
        state = saving.load_run_state(path, step)
        for learner in self.saver.workers.values():
            learner.load_checkpoint(path.absolute())
        loads_extra = "extra" in self.config.actor_rollout_ref.actor.checkpoint.load_contents
        self._restore(state, step, with_random_states=loads_extra and "random" in state)

    def _load_copy(self, newest: Any) -> str:
        """Load a copy in memory; write the checkpoint of its step if that is due and missing.

        Returns:
            A description of the copy.
        """
        newest.load(self.saver.workers)
        self._restore(newest.driver, newest.step, with_random_states=True)
        # The workers may have been lost before the checkpoint of the copy's step was complete.
        is_due = self.is_due(self.settings.save_freq)
        # Checkpoints by the clock are never due, except at the end.
        if saves_by_time(self.config):
            is_due = self.is_last_step
        if is_due and self.checkpoints.newest() != newest.step:
            self.saver.start(self.global_steps)
        return f"the copy of step {newest.step} in memory"

    def _restore(self, state: Mapping[str, Any], step: int, *, with_random_states: bool) -> None:
        """Restore this process's part of the state after a step."""
        if with_random_states:
            saving.restore_random_states(state["random"])
        for name, part in self.resumable.items():
            part.load_state_dict(state.get(name))
        self.global_steps = step
        self.initial_steps = step

    # Steps

    def steps(self) -> Iterator[TrainingStep]:
        """Train to the last step, from the newest checkpoint if there is one.

        Yields:
            Each step after it was taken.
        """
        raise NotImplementedError

    def fit(self) -> None:
        """Train to the last step, from the newest checkpoint if there is one."""
        for _ in self.steps():
            pass

    def close(self) -> None:
        """Stop the profiler. The workers end with their groups."""
        self.profiler.close()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Context manager: take the next step; count it, time it, and profile it if configured."""
        self.global_steps += 1
        self.num_rows = 0
        self.timer = PhaseTimer()
        self.metrics = {}
        with (
            self.profiler.step(self.global_steps, is_last=self.is_last_step),
            self.timer.phase("step"),
        ):
            yield

    @property
    def skips_next_step(self) -> bool:
        """Whether the next step is to be skipped because it has lost workers twice."""
        return self.global_steps + 1 in self.quarantine.num_rows

    def skip_step(self, take: Callable[[int], list[dict[str, Any]]]) -> None:
        """Skip the next step: take its rows from the data, but write them to the quarantine.

        Args:
            take: called with the least number of rows to take from the data; returns the rows as
                they are to be written.
        """
        with self.measured():
            rows = take(self.quarantine.num_rows[self.global_steps])
            path = self.quarantine.write(self.global_steps, rows)
        self.metrics["recovery/skipped_steps"] = float(len(self.quarantine.num_rows))
        self.progress.message(
            f"step {self.global_steps} is skipped, for it has lost workers twice. "
            f"Its {len(rows)} rows: {path}"
        )

    @property
    def is_last_step(self) -> bool:
        """Whether the current step is the last one."""
        return self.global_steps >= self.total_training_steps

    def is_due(self, frequency: int) -> bool:
        """Whether something that happens every `frequency` steps is due after this step.

        It is also due after the last step; with a frequency of -1 it never is.
        """
        return frequency > 0 and (self.is_last_step or self.global_steps % frequency == 0)

    def warn_once(self, warnings: Mapping[str, str]) -> None:
        """Log warnings, unless one of the same kind has been logged before.

        Args:
            warnings: texts by kind.
        """
        for kind, text in warnings.items():
            if kind not in self.warned:
                logger.warning("step %d: %s", self.global_steps, text)
                self.warned.add(kind)

    def log_step(self) -> None:
        """Show and track the metrics of the step, with the cost of a restart before it."""
        if self._keep_settings is not None:
            # Only after a step: a run that cannot take one must not replace the settings of an
            # earlier run.
            self._keep_settings()
            self._keep_settings = None
        if self.recovery is not None:
            num_restarts, lost_at = self.recovery
            self.metrics["recovery/restarts"] = num_restarts
            self.metrics["recovery/seconds"] = time.monotonic() - lost_at
            self.recovery = None
        self.progress.update(self.global_steps, step_fields(self.metrics))
        self.tracking.log(self.metrics, self.global_steps)

    # Checkpoints and copies

    def save_where_due(self) -> None:
        """Start a checkpoint if one is due; complete it if the run may end with this step.

        The run may end because a stop was requested, or because the machine may expire before
        another step can be taken and saved.
        """
        settings = self.settings
        # After the last step the run ends anyway.
        self.is_stopping = stop_requested.is_set() and not self.is_last_step
        self._longest_step_s = max(self._longest_step_s, self.timer.seconds["step"])
        # Time for another step and its checkpoint, with a margin.
        needed_s = self._longest_step_s + self.saver.longest_s + settings.esi_redundant_time
        # An expiry in the past belonged to an earlier machine.
        expires_soon = 0 < self._expires_at - time.time() <= needed_s
        may_be_last = self.is_stopping or expires_soon
        if writes_checkpoints(self.config):
            self.saver.start_where_due(
                self.global_steps,
                is_due=self.is_due(settings.save_freq),
                is_last=may_be_last or self.is_last_step,
            )
        self._copy_state()
        if may_be_last:
            self.saver.finish()

    def save(self) -> None:
        """Write a checkpoint of the step, and wait until it is on disk."""
        self.saver.start(self.global_steps)
        self.saver.finish()

    def write_model(self) -> None:
        """Write the trained model to the folder `model` of the run's directory."""
        target = self.checkpoints.directory / MODEL_FOLDER
        learner = self.saver.workers["actor"]
        # Workers write the whole folder of their role; only the Hugging Face folder in it is kept.
        with written_aside(target, where="trainer.default_local_dir") as draft:
            role_folder = draft.absolute().with_suffix(".parts")
            try:
                learner.save_model(role_folder)
                learner.checkpoint_written(wait=True)
                (role_folder / HF_FOLDER).rename(draft)
            finally:
                shutil.rmtree(role_folder, ignore_errors=True)
        self.progress.message(f"model: {target}")

    def _copy_state(self) -> None:
        """Copy the state of this step in memory, if copies are kept."""
        if self.copies is not None:
            state = self._run_state() | {"random": saving.random_states()}
            self.copies.copy(self.global_steps, state)

    def _write_own_part(self, folder: Path) -> None:
        """Write this process's part of a checkpoint."""
        has_random_states = "extra" in self.config.actor_rollout_ref.actor.checkpoint.save_contents
        saving.save_run_state(folder, self._run_state(), with_random_states=has_random_states)

    def _run_state(self) -> dict[str, Any]:
        """This process's part of the state, without random states."""
        with waiting("the state of the data set and the sampler"):
            state = {"step": self.global_steps}
            for name, part in self.resumable.items():
                state[name] = part.state_dict()
            return state

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Context manager: show progress and track metrics. An error in the block reaches both."""
        facts = RunFacts(
            project_name=self.settings.project_name,
            experiment_name=self.settings.experiment_name,
            config=redact(self.config.model_dump(mode="json")),
            directory=self.settings.directory,
            resume_step=self.global_steps,
            is_restart=self.recovery is not None,
        )
        with (
            Progress(
                self.total_training_steps,
                initial=self.global_steps,
                activity=lambda: self.timer.activity,
                quiet_s=self.settings.progress_s,
            ) as self.progress,
            Tracking(self.settings.loggers, facts, self.progress) as self.tracking,
        ):
            yield
