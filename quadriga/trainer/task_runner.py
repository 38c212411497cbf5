# SPDX-License-Identifier: Apache-2.0
"""Runs a training from its configuration to its last step, and restarts lost workers.

a worker, a node, or the run's own cluster is lost   the workers are restarted on what is left,
                                                     the newest state is loaded, and the step is
                                                     taken again
the same step loses a worker again                   it is skipped, its rows are kept
                                                     (quarantine.py)
no more steps may be skipped, or the restarts of     the run ends, and says how it can be
an hour are used up                                  continued
a worker raises an exception                         the run ends: the exception would come
                                                     again
"""

import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

from quadriga.config import Config
from quadriga.config.loader import as_override
from quadriga.config.placement import with_fewer_processes
from quadriga.config.trainer import AT_THE_END
from quadriga.errors import (
    EngineLostError,
    NoRoomError,
    PeerLostError,
    QuadrigaError,
    WorkerLostError,
)
from quadriga.observe.machine import describe_machine
from quadriga.observe.stopping import stop_on_sigterm, stop_requested
from quadriga.observe.timing import Timeline
from quadriga.trainer.build import BuiltRun, build_run, state_copies
from quadriga.trainer.checkpoint import Checkpoints
from quadriga.trainer.loop import TrainingStep
from quadriga.trainer.quarantine import Quarantine
from quadriga.trainer.run_folder import RunFolder
from quadriga.trainer.run_lock import run_lock
from quadriga.trainer.run_report import summary
from quadriga.trainer.saving import random_states, restore_random_states, seed_generators
from quadriga.trainer.settings import CONFIGURATION, RunSettings, has_nothing_to_do
from quadriga.trainer.timed_saving import run_checkpoints

RESTARTS_KEY = "trainer.max_worker_restarts"
RESTART_WINDOW_S = 3600.0  # period in which `trainer.max_worker_restarts` are counted


class TaskRunner:
    """Runs one training from configuration to last step. On Ray this is the driver.

    Attributes:
        in_python: whether messages recommend Python functions rather than commands.
    """

    in_python = False

    def run(self, config: Config) -> None:
        """Train to the last step; see `steps`."""
        for _ in self.steps(config):
            pass

    def steps(
        self,
        config: Config,
        start_up: Timeline | None = None,
        build: Callable[[Config, Timeline], BuiltRun] | None = None,
    ) -> Iterator[TrainingStep]:
        """Build everything, report how long it took, train, and close everything.

        The run pauses between two items; closing the iterator ends it. It survives up to
        `trainer.max_worker_restarts` losses of workers within an hour; a completed checkpoint
        resets the count.

        Args:
            config: the resolved configuration.
            start_up: timeline of the start-up so far.
            build: builds the run; by default `build_run`.

        Yields:
            A `TrainingStep` without a batch each time everything is built, then each step of the
            training.

        Raises:
            QuadrigaError: the configuration, the data or the models are wrong. This is found before
                the first step.
            WorkerLostError: a worker was lost, and the run does not continue by itself; the error
                says why not, and how to continue.
        """
        self.config = config
        self._build_run = build or build_run
        self._run: BuiltRun | None = None
        self._is_stopping = False
        self._written: int | None = None  # step of the newest checkpoint that this run has written
        self._restarts: list[float] = []  # monotonic seconds of the restarts within the window
        # For each loss, where in the run it occurred ("step 7"), and what was lost.
        self._losses: list[tuple[str, str]] = []
        with run_lock(config.trainer.directory), ExitStack() as stack:
            self._quarantine = Quarantine(config.trainer)
            self._copies = state_copies(config)
            if self._copies is not None:
                stack.callback(self._copies.close)
            yield from self._until_done(config, start_up or Timeline())

    def _until_done(self, config: Config, timeline: Timeline) -> Iterator[TrainingStep]:
        """Train to the last step, and start over after each loss of a worker."""
        if has_nothing_to_do(config, RunSettings.of(config), in_python=self.in_python):
            run_checkpoints(config).delete_leftovers()
            return
        print(describe_machine())
        seed_generators(config.trainer.seed)
        initial_states = random_states()
        while True:
            try:
                yield from self._train(config, timeline)
                break
            # A restart would meet any other error again.
            except (WorkerLostError, PeerLostError, EngineLostError) as error:
                timeline.close()
                config = self._after_loss(error)
            # The data set is built again, and must draw the same random numbers.
            restore_random_states(initial_states)
            timeline = Timeline("restart")
        if self._losses:
            count = f"{len(self._losses)} times, after losses"
            if len(self._losses) == 1:
                count = "once, after a loss"
            print(f"The workers were started again {count}")
            for place, lost in self._losses:
                print(f"  in {place}: {lost}")

    def _after_loss(self, error: QuadrigaError) -> Config:
        """Decide how to continue after a loss, and print it.

        Returns:
            The configuration to continue with.

        Raises:
            QuadrigaError: `error`, with the reason why the workers are not restarted, and how to
                continue the run.
        """
        now = time.monotonic()
        # None if the workers were lost before the run was built.
        trainer = self._run.trainer if self._run else None
        step = trainer.global_steps if trainer else 0
        place = f"step {step}" if trainer else f"the start-up after step {self._written or 0}"
        is_repeated = any(place == earlier_place for earlier_place, _ in self._losses)

        # Since the run has written a new checkpoint, earlier restarts do not count any more.
        if trainer and trainer.checkpoints.last_written not in (None, self._written):
            self._written = trainer.checkpoints.last_written
            self._restarts.clear()
        self._restarts = [time_s for time_s in self._restarts if now - time_s < RESTART_WINDOW_S]

        reason = self._obstacle(place, step, is_repeated=is_repeated)
        if reason:
            advice = self._how_to_go_on(self.config)
            error.fix = f"{error.fix} The workers are not started again: {reason}. {advice}".strip()
            raise error

        self._restarts.append(now)
        self._lost_at = now
        self._losses.append((place, error.where))
        skip_notice = ""
        if trainer and is_repeated:
            # The next attempt skips the step, with as many rows of data as it has taken.
            self._quarantine.num_rows[step] = trainer.num_rows
            skip_notice = f" Step {step} has lost workers twice, and is skipped."

        changed_settings = {}
        # For the message: the state from which the run goes on.
        source = "where it began, for it has written no checkpoint yet"
        if self._written is not None:
            # Even if the user named a checkpoint: this run has written newer ones.
            changed_settings["resume_mode"] = "auto"
            source = f"the checkpoint of step {self._written}"
        # `steps` is text such as "7 or 8": the last copy may be incomplete.
        if self._copies is not None and self._copies.steps:
            source = (
                f"the copy in memory of step {self._copies.steps}, the last that is whole, "
                f"else {source}"
            )
        limit = self.config.trainer.max_worker_restarts
        num_left = limit - len(self._restarts)
        print(
            f"\n{error}\nRecovery: the workers are started again, and the run goes on from "
            f"{source}; {num_left} of {limit} restarts are left ({RESTARTS_KEY}).{skip_notice}"
        )
        settings = self.config.trainer.model_copy(update=changed_settings)
        return self.config.model_copy(update={"trainer": settings})

    def _obstacle(self, place: str, step: int, *, is_repeated: bool) -> str:
        """Why the workers are not restarted after a loss; "" if they are.

        Args:
            place: where in the run the loss occurred.
            step: number of the step.
            is_repeated: whether there was a loss in the same place before.
        """
        if self._is_stopping:
            return "a stop was requested"
        # A step that has lost workers twice has to be skipped.
        refusal = self._quarantine.refusal(step) if is_repeated else ""
        if refusal:
            return f"{place} has lost a worker before, so the cause may be in it, and {refusal}"
        limit = self.config.trainer.max_worker_restarts
        if len(self._restarts) >= limit:
            return (
                f"{len(self._restarts)} restarts within an hour and since the last checkpoint, "
                f"{RESTARTS_KEY}={limit}"
            )
        return ""

    def _train(self, config: Config, timeline: Timeline) -> Iterator[TrainingStep]:
        """Build the run, train to the last step, and close the run.

        Raises:
            WorkerLostError, PeerLostError, EngineLostError: workers were lost on the way.
        """
        self._run = None
        self._is_stopping = False
        try:
            run = self._build(config, timeline)
        except KeyboardInterrupt:
            print(f"\ninterrupted before the first step. {self._how_to_go_on(config)}")
            raise
        self._run = run
        trainer = run.trainer
        trainer.quarantine = self._quarantine
        if self._losses:
            # For the metrics of the next step.
            trainer.recovery = (len(self._losses), self._lost_at)
        is_cut_short = True
        try:
            timeline.close()
            print(timeline.render())
            if self._copies is not None:
                trainer.copies = self._copies
                newest = self._copies.newest()
                # A checkpoint may be newer than all copies: the copy of its step may have been lost
                # with the workers.
                if newest is not None and newest.step >= (self._written or 0):
                    trainer.newest_copy = newest
            with stop_on_sigterm(lambda: f"If it is killed before: {self._how_to_go_on(config)}"):
                try:
                    yield TrainingStep(trainer, None)
                    yield from trainer.steps()
                finally:
                    self._is_stopping = stop_requested.is_set()
            is_cut_short = False
        except KeyboardInterrupt:
            # Settled before the message, which then names the checkpoint that was being written.
            # Remote workers are not asked, because they may be dead or in the middle of a call.
            trainer.saver.settle(can_ask=not run.team.is_remote)
            print(f"\ninterrupted in step {trainer.global_steps}. {self._how_to_go_on(config)}")
            raise
        finally:
            # Does nothing after the last step, or if the checkpoint was settled above.
            trainer.saver.settle(can_ask=not run.team.is_remote)
            run.close(is_cut_short=is_cut_short)
        if not config.trainer.val_only:
            print_summary(config)
            next_steps = what_next_in_python if self.in_python else what_next
            print(next_steps(config, trainer.checkpoints.last_written))

    def _how_to_go_on(self, config: Config) -> str:
        """Say how an interrupted run can be resumed, for a command or for Python."""
        return how_to_go_on(config, in_python=self.in_python)

    def _build(self, config: Config, timeline: Timeline) -> BuiltRun:
        """Build the run; after a loss, with fewer processes if the cluster has no room for all."""
        try:
            return self._build_run(config, timeline)
        except NoRoomError as error:
            no_room = error
        # Only a restart takes fewer processes: at the first start the user gets the error.
        if self._losses:
            for smaller_config in with_fewer_processes(config):
                with suppress(NoRoomError):
                    run = self._build_run(smaller_config, timeline)
                    pools = smaller_config.trainer.resource_pools.items()
                    described_pools = ", ".join(f"{pool} {counts}" for pool, counts in pools)
                    print(
                        f"NOTICE: {no_room}\n"
                        f"The run goes on with fewer processes: {described_pools}. Its numbers "
                        "differ by rounding. The next restart asks for all of them again."
                    )
                    return run
        raise no_room


def print_summary(config: Config) -> None:
    """Print a summary of a finished run, or why its files cannot be read."""
    try:
        lines = summary(RunFolder(config.trainer.directory))
    except (QuadrigaError, OSError) as error:
        lines = [str(error)]
    for line in lines:
        print(line)


def what_next(config: Config, step: int | None) -> str:
    """Say what to do with a finished run.

    Args:
        config: the resolved configuration.
        step: step of its last checkpoint; None if it has none.
    """
    run = config.trainer.directory
    if config.task != "rl":
        override = as_override("actor_rollout_ref.model.path", run / "model")
        if config.task == "reward_model":
            override = as_override("reward_model.model.path", run / "model")
            override = f"reward_model.enable=True {override}"
        return f"done. Next:\n  quadriga train --config FILE {override}"
    if step is None:
        return (
            f"done: {run}, without a checkpoint; "
            "trainer.save_freq=N writes one every N steps and at the end."
        )
    folder = shlex.quote(str(run))
    file = shlex.quote(str(run / CONFIGURATION))
    rows = "" if config.data.val_files else " data.val_files=FILE"
    # The key that has limited the run.
    is_by_steps = config.trainer.total_training_steps == step
    length = "total_training_steps" if is_by_steps else "total_epochs"
    return (
        f"done: {run} has the checkpoint of step {step}. Next:\n"
        f"  quadriga eval {folder} --config {file}{rows}\n"
        f"  quadriga export {folder} --output DIR\n"
        f"  the same command with a larger trainer.{length} goes on"
    )


def what_next_in_python(config: Config, step: int | None) -> str:
    """Say what to call in Python after a finished run; the arguments are those of `what_next`."""
    run = config.trainer.directory
    lines = [f"done: run = quadriga.Run({str(run)!r}) opens it again. Next:"]
    if config.task == "reward_model":
        keys = {"reward_model.enable": True, "reward_model.model.path": str(run / "model")}
        lines.append(f"  quadriga.train(model, rows, options={keys!r})")
    elif config.task == "sft":
        lines.append("  quadriga.train(run, rows, reward)")
    else:
        lines.append("  quadriga.evaluate(run, rows, reward)")
    if step is not None:
        lines.append(f"  run.resume(steps={2 * step}) takes {step} more steps")
    return "\n".join(lines)


def how_to_go_on(config: Config, *, in_python: bool = False) -> str:
    """Say from which checkpoint an interrupted run can be resumed, and how.

    Args:
        config: the resolved configuration.
        in_python: whether to recommend a Python function rather than a command.
    """
    trainer = config.trainer
    step = Checkpoints(trainer.directory).newest()
    if step is None:
        frequency = trainer.save_freq
        if isinstance(frequency, int) and 0 < frequency < AT_THE_END:
            return f"There is no checkpoint to go on from: the first is due after step {frequency}."
        key = 'options={"trainer.save_freq": N}' if in_python else "trainer.save_freq=N"
        return f"There is no checkpoint to go on from; {key} writes one every N steps."
    caller = "The same command"
    if in_python:
        steps = trainer.total_training_steps or "..."
        caller = f"quadriga.Run({str(trainer.directory)!r}).resume(steps={steps})"
    elif trainer.resume_mode != "auto":
        caller = "The same command with trainer.resume_mode=auto"
    return f"{caller} goes on from the checkpoint of step {step}."
