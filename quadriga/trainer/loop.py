# SPDX-License-Identifier: Apache-2.0
"""What the loops of `quadriga train` and `quadriga sft` share: at which step they are, what is due after it, whether
they must end before the last one, and where progress and metrics go.

A subclass counts `global_steps` and measures each step, by a `timer` with the phase `step`.
"""

import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from quadriga.config import Config
from quadriga.data.files import written_aside
from quadriga.observe.progress import Progress, step_fields
from quadriga.observe.stopping import expiry, stop_requested
from quadriga.observe.timing import PhaseTimer
from quadriga.observe.tracking import RunFacts, Tracking
from quadriga.observe.watchdog import waiting
from quadriga.protocol import DataProto
from quadriga.redact import redacted
from quadriga.trainer import saving
from quadriga.trainer.checkpoint import Checkpoints, step_of
from quadriga.trainer.profiler import Profiler
from quadriga.trainer.quarantine import Quarantine
from quadriga.trainer.settings import Settings, keep_settings, say_nothing_to_do
from quadriga.workers.checkpoint import HF_FOLDER

logger = logging.getLogger(__name__)

MODEL_FOLDER = "model"  # where a run's directory has the model that it ended with: an ordinary Hugging Face folder


class Step(NamedTuple):
    """A step that was taken, measured and reported."""

    loop: "TrainingLoop"  # that has taken it; it may differ between steps, after the workers were started again
    # batch: all rows of the step with what was computed; None before the first step of a loop, and
    # for a step that was skipped
    batch: DataProto | None

    @property
    def number(self) -> int:
        """Of the step, from 1 on."""
        return self.loop.global_steps

    @property
    def metrics(self) -> dict[str, float]:
        """What was measured in the step; valid until the next one is taken."""
        return self.loop.metrics


class TrainingLoop:
    """A training loop with checkpoints.

    Args:
        learners: worker groups that save and load checkpoints, by the name of their part.
        resumable: what a resumed run goes on from, by its name in `trainer/state.pt`: objects with `state_dict` and
            `load_state_dict`.

    Attributes:
        global_steps: number of the step that has begun; 0 before the first.
        total_training_steps: the last step, or with dynamic sampling the last that may be.
        metrics, timer: metrics and phases of that step.
        is_stopping: whether a stop before the last step was requested, as of the last `save_where_due`.
        num_rows: rows of data that the step has taken so far, where it may take several batches.
        quarantine: the steps that are skipped.
        recovery: number of restarts so far, and the monotonic second of the loss before the last one; None: no restart,
            or it stands in the metrics already.
        copies: the backend's `StateCopies`; `newest_copy`: its newest state, to go on from. None: there is none.
        warned: kinds of warnings that `warn_once` logs no more.
        progress, tracking: progress bar (log lines without a terminal) and trackers, inside `reporting`.
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
        self.config, self.settings, self.total_training_steps = (
            config,
            config.trainer,
            total_training_steps,
        )
        self.checkpoints = Checkpoints(self.settings.directory, self.settings.max_ckpt_to_keep)
        self.saver = saving.CheckpointSaver(
            self.checkpoints, learners, report=lambda text: self.progress.message(text)
        )
        self.resumable = resumable
        self.global_steps, self.is_stopping = 0, False
        self.num_rows = 0
        self.quarantine = Quarantine(self.settings)
        self.metrics: dict[str, float] = {}
        self.timer, self.profiler = PhaseTimer(), Profiler(config, {})
        self.recovery: tuple[int, float] | None = None
        self.copies: Any = None
        self.newest_copy: Any = None
        self.warned: set[str] = set()
        self._keep_settings: Callable[[], None] | None = None
        self._expires_at, self._longest_step_s = expiry(), 0.0

    def load_checkpoint(self) -> bool:
        """Go on from the newest copy, or the checkpoint that the configuration asks for. Returns whether it does."""
        newest, copies = self.newest_copy, self.copies
        place = (
            self.checkpoints.resume(self.settings, self._load)
            if newest is None
            else self._load_copy(newest)
        )
        if place is not None:
            print(f"resumed from {place}")
        reason = next(
            (one.cannot_resume for one in self.resumable.values() if hasattr(one, "cannot_resume")),
            "",
        )
        if copies is not None:
            print(
                f"state copies: {f'none, for {reason}' if reason else copies.attach(self.saver.workers)}"
            )
        if place is not None:
            self._copy()
        now, last = Settings.of(self.config), self.total_training_steps
        if isinstance(place, Path) and self.is_last_step and not self.settings.val_only:
            last = min(last, self.global_steps)
            say_nothing_to_do(self.config, place, last, now)
        self._keep_settings = partial(keep_settings, self.config, now, self.global_steps, last)
        if place is None:
            self._keep_settings()
        return place is not None

    def _load(self, path: Path) -> None:
        step, contents = step_of(path), self.config.actor_rollout_ref.actor.checkpoint.load_contents
        state = saving.load_run_state(path, step)
        for learner in self.saver.workers.values():
            learner.load_checkpoint(path.absolute())
        self._restore(state, step, with_random_states="extra" in contents and "random" in state)

    def _load_copy(self, newest: Any) -> str:
        newest.load(self.saver.workers)
        self._restore(newest.driver, newest.step, with_random_states=True)
        # Its checkpoint may have been lost on the way to the disk.
        if self.is_due(self.settings.save_freq) and self.checkpoints.newest() != newest.step:
            self._begin_checkpoint()
        return f"the copy of step {newest.step} in memory"

    def _restore(self, state: Mapping[str, Any], step: int, *, with_random_states: bool) -> None:
        if with_random_states:
            saving.restore_random_states(state["random"])
        for name, one in self.resumable.items():
            one.load_state_dict(state.get(name))
        self.global_steps = step

    def steps(self) -> Iterator[Step]:
        """Train from the newest checkpoint, or from the start, to the last step, giving each step once it is taken."""
        raise NotImplementedError

    def fit(self) -> None:
        """Train from the newest checkpoint, or from the start, to the last step."""
        for _ in self.steps():
            pass

    def close(self) -> None:
        """Stop what the loop itself has started, above all a profile. The workers end with their groups."""
        self.profiler.close()

    @contextmanager
    def measured(self) -> Iterator[None]:
        """The next step: it is counted, and profiled where that is due. `timer` and `metrics` are its own from here."""
        self.global_steps += 1
        self.num_rows = 0
        self.timer, self.metrics = PhaseTimer(), {}
        with (
            self.profiler.step(self.global_steps, is_last=self.is_last_step),
            self.timer.phase("step"),
        ):
            yield

    @property
    def skips_next_step(self) -> bool:
        """Whether the step to come has lost workers too often, and is skipped."""
        return self.global_steps + 1 in self.quarantine.num_rows

    def skip_step(self, take: Callable[[int], list[dict[str, Any]]]) -> None:
        """The next step, without an update: its rows are written to the quarantine.

        Args:
            take: takes the step's rows out of the data, at least the given number of them, and
                returns them as they are written.
        """
        with self.measured():
            rows = take(self.quarantine.num_rows[self.global_steps])
            path = self.quarantine.write(self.global_steps, rows)
        self.metrics["recovery/skipped_steps"] = float(len(self.quarantine.num_rows))
        told = f"step {self.global_steps} is skipped, for it has lost workers twice"
        self.progress.message(f"{told}. Its {len(rows)} rows: {path}")

    @property
    def is_last_step(self) -> bool:
        """Whether the step that has begun is the last one."""
        return self.global_steps >= self.total_training_steps

    def is_due(self, frequency: int) -> bool:
        """Whether what is done every so many steps, and in the last one, is done in this one. -1: never."""
        return frequency > 0 and (self.is_last_step or self.global_steps % frequency == 0)

    def warn_once(self, warnings: Mapping[str, str]) -> None:
        """Log the text of each kind of warning, if its kind has not been logged in this run."""
        for kind, text in warnings.items():
            if kind not in self.warned:
                logger.warning("step %d: %s", self.global_steps, text)
                self.warned.add(kind)

    def log_step(self) -> None:
        """Show and track the metrics of the step; after a restart its number and the seconds that it cost."""
        if self._keep_settings is not None:
            # A run that cannot make a step has changed nothing of the steps before.
            self._keep_settings()
            self._keep_settings = None
        if self.recovery is not None:
            number, lost_at = self.recovery
            self.metrics |= {
                "recovery/restarts": number,
                "recovery/seconds": time.monotonic() - lost_at,
            }
            self.recovery = None
        self.progress.update(self.global_steps, step_fields(self.metrics))
        self.tracking.log(self.metrics, self.global_steps)

    def save_where_due(self) -> None:
        """Begin the checkpoint of this step where it has one, and complete it where no other step may follow: a stop
        was requested, or the machine may be taken back before another step is saved."""
        settings = self.settings
        # The last step is the end anyway.
        self.is_stopping = stop_requested.is_set() and not self.is_last_step
        self._longest_step_s = max(self._longest_step_s, self.timer.seconds["step"])
        needed_s = self._longest_step_s + self.saver.longest_s + settings.esi_redundant_time
        # A second that has passed was meant for an earlier machine.
        expires = 0 < self._expires_at - time.time() <= needed_s
        may_be_last = settings.save_freq > 0 and (self.is_stopping or expires)
        if may_be_last or self.is_due(settings.save_freq):
            self._begin_checkpoint()
        self._copy()
        if may_be_last:
            self.saver.finish()

    def write_model(self) -> None:
        """The model that learns as an ordinary folder, `model` in the run's directory."""
        target, learner = self.checkpoints.directory / MODEL_FOLDER, self.saver.workers["actor"]
        with written_aside(target, where="trainer.default_local_dir") as draft:
            aside = draft.absolute().with_suffix(".parts")
            try:
                learner.save_model(aside)
                learner.checkpoint_written(wait=True)
                (aside / HF_FOLDER).rename(draft)
            finally:
                shutil.rmtree(aside, ignore_errors=True)
        self.progress.message(f"model: {target}")

    def _copy(self) -> None:
        if self.copies is not None:
            self.copies.copy(
                self.global_steps, self._run_state() | {"random": saving.random_states()}
            )

    def _begin_checkpoint(self) -> None:
        has_random_states = "extra" in self.config.actor_rollout_ref.actor.checkpoint.save_contents

        def write(folder: Path) -> None:
            saving.save_run_state(folder, self._run_state(), with_random_states=has_random_states)

        self.saver.start(self.global_steps, write)

    def _run_state(self) -> dict[str, Any]:
        with waiting("the state of the data set and the sampler"):
            return {
                "step": self.global_steps,
                **{name: one.state_dict() for name, one in self.resumable.items()},
            }

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Shows progress, and tracks metrics; what goes wrong inside the block is seen by both."""
        total, settings = self.total_training_steps, self.settings
        config, names = (
            redacted(self.config.model_dump(mode="json")),
            (settings.project_name, settings.experiment_name),
        )
        is_restart = self.recovery is not None
        facts = RunFacts(
            *names, config, settings.directory, self.global_steps, is_restart=is_restart
        )
        with (
            Progress(
                total,
                initial=self.global_steps,
                activity=lambda: self.timer.current,
                quiet_s=settings.progress_s,
            ) as self.progress,
            Tracking(settings.loggers, facts, self.progress) as self.tracking,
        ):
            yield
