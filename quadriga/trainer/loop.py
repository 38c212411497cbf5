# SPDX-License-Identifier: Apache-2.0
"""What the loops of `quadriga train` and `quadriga sft` share: at which step they are, what is due after it, whether
they must end before the last one, and where progress and metrics go.

A subclass counts `global_steps` and measures each step, by a `timer` with the phase `step`.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from quadriga.config import Config
from quadriga.observe.progress import Progress
from quadriga.observe.stopping import expiry, stop_requested
from quadriga.observe.timing import PhaseTimer
from quadriga.observe.tracking import RunFacts, Tracking
from quadriga.trainer.checkpoint import Checkpoints, step_of
from quadriga.trainer.saving import CheckpointSaver, load_run_state, save_run_state


class TrainingLoop(ABC):
    """A training loop with checkpoints.

    Args:
        config: the resolved configuration, which trackers store.
        learners: the worker groups that checkpoints are made of, by the names of their parts.
        total_training_steps: where the run ends.

    Attributes:
        global_steps: number of the step that has begun; 0 before the first.
        metrics: of that step.
        timer: of that step.
        is_stopping: whether a stop before the last step was requested, as of the last `save_where_due`.
    """

    progress: Progress
    tracking: Tracking

    def __init__(self, config: Config, learners: Mapping[str, Any], total_training_steps: int) -> None:
        self.config, self.settings, self.total_training_steps = config, config.trainer, total_training_steps
        self.checkpoints = Checkpoints(self.settings.directory, self.settings.max_ckpt_to_keep)
        self.saver = CheckpointSaver(self.checkpoints, learners, report=lambda text: self.progress.message(text))
        self.global_steps, self.is_stopping = 0, False
        self.metrics: dict[str, float] = {}
        self.timer = PhaseTimer()
        self._expires_at, self._longest_step_s = expiry(), 0.0

    @abstractmethod
    def run_state(self) -> dict[str, dict[str, Any]]:
        """What the driver must keep in a checkpoint beside its step and random states: `loader`, `kl_controller`."""

    @abstractmethod
    def restore(self, state: dict[str, dict[str, Any]]) -> None:
        """Put back what `run_state` gave, once the workers have loaded their parts."""

    def write_run_state(self, directory: Path) -> None:
        """Write the driver's own part of a checkpoint into its folder."""
        with_random_states = "extra" in self.config.actor_rollout_ref.actor.checkpoint.save_contents
        save_run_state(directory, step=self.global_steps, **self.run_state(), with_random_states=with_random_states)

    def load_checkpoint(self) -> None:
        """Go on from the checkpoint that the configuration asks for, if there is one."""
        path = self.checkpoints.to_resume(self.settings)
        if path is None:
            return
        self.global_steps = step_of(path)
        for learner in self.saver.workers.values():
            learner.load_checkpoint(path.absolute())
        contents = self.config.actor_rollout_ref.actor.checkpoint.load_contents
        self.restore(load_run_state(path, with_random_states="extra" in contents))
        print(f"resumed from {path}")

    def close(self) -> None:
        """Stop what the loop itself has started. The workers end with their groups."""
        self.saver.settle(can_ask=False)

    @property
    def is_last_step(self) -> bool:
        """Whether the step that has begun is the last one."""
        return self.global_steps >= self.total_training_steps

    def is_due(self, frequency: int) -> bool:
        """Whether what is done every so many steps, and in the last one, is done in this one. -1: never."""
        return frequency > 0 and (self.is_last_step or self.global_steps % frequency == 0)

    def save_where_due(self) -> None:
        """Begin the checkpoint of this step where it has one, and complete it where no other step may follow."""
        save_freq = self.settings.save_freq
        may_be_last = self._may_be_last_step() and save_freq > 0
        if may_be_last or self.is_due(save_freq):
            self.saver.start(self.global_steps, self.write_run_state)
        if may_be_last:
            self.saver.finish()

    def open_progress(self) -> Progress:
        """The progress bar, or log lines where there is no terminal."""
        total = self.total_training_steps
        return Progress(total, initial=self.global_steps, activity=lambda: self.timer.current)

    def open_tracking(self) -> Tracking:
        """The trackers of the run, beside its `progress`."""
        settings, config = self.settings, self.config.model_dump(mode="json")
        facts = RunFacts(settings.project_name, settings.experiment_name, config, settings.directory, self.global_steps)
        return Tracking(settings.loggers, facts, self.progress)

    def _may_be_last_step(self) -> bool:
        """Whether a stop was requested, or the machine may be taken back before another step is saved."""
        # The last step is the end anyway.
        self.is_stopping = stop_requested.is_set() and not self.is_last_step
        self._longest_step_s = max(self._longest_step_s, self.timer.seconds["step"])
        needed_s = self._longest_step_s + self.saver.longest_s + self.settings.esi_redundant_time
        # A second that has passed was meant for an earlier machine.
        return self.is_stopping or 0 < self._expires_at - time.time() <= needed_s
