# SPDX-License-Identifier: Apache-2.0
"""A run from its configuration to its last step: what is said when it is cut short, how it gets over a lost worker.

a worker, a node, the run's own cluster is lost    the workers are started again on what is left, the newest state
                                                   is loaded, the step is taken again
the same step loses a worker once more             it is skipped, its rows are kept (quarantine.py)
as many steps as may be are skipped,               the run ends, and says how it can go on
or the restarts of an hour are used up
a worker raises an exception                       the run ends: the exception would come again
"""

import random
import shlex
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress

import numpy as np
import torch

from quadriga.config import Config
from quadriga.config.loader import as_override
from quadriga.config.placement import with_fewer_processes
from quadriga.errors import (
    EngineLostError,
    NoRoomError,
    PeerLostError,
    QuadrigaError,
    WorkerLostError,
)
from quadriga.observe.machine import describe_machine
from quadriga.observe.stopping import heeding_sigterm, stop_requested
from quadriga.observe.timing import Timeline
from quadriga.trainer.build import Run, build_run, state_copies
from quadriga.trainer.checkpoint import Checkpoints
from quadriga.trainer.loop import Step
from quadriga.trainer.quarantine import Quarantine
from quadriga.trainer.run_lock import run_lock
from quadriga.trainer.saving import random_states, restore_random_states
from quadriga.trainer.settings import CONFIGURATION, Settings, has_nothing_to_do

RESTARTS_KEY = "trainer.max_worker_restarts"
RESTART_WINDOW_S = 3600.0  # the time in which `trainer.max_worker_restarts` are counted


class TaskRunner:
    """Runs one training from configuration to last step. On Ray this is the driver."""

    def run(self, config: Config) -> None:
        """Train to the last step; see `steps`."""
        for _ in self.steps(config):
            pass

    def steps(
        self,
        config: Config,
        start_up: Timeline | None = None,
        build: Callable[[Config, Timeline], Run] | None = None,
    ) -> Iterator[Step]:
        """Build everything, say where the time went, train, and close what was opened.

        Gives a `Step` without a batch when everything is built, and one after each step of the training. Between them
        the run stands still; to close the iterator ends it.

        The loss of a worker is got over up to `trainer.max_worker_restarts` times within an hour; a checkpoint that is
        completed resets the count.

        `start_up` has the parts of the start-up so far; `build` makes the run, where `build_run` does not.

        Raises QuadrigaError: what is wrong with the configuration, the data or the models is said before the first
        step.
        Raises WorkerLostError: a worker was lost and the run does not go on by itself: why, and how it does."""
        self.config, self._build_run = config, build or build_run
        self._run: Run | None = None
        self._is_stopping = False
        self._written: int | None = None
        self._restarts: list[float] = []
        self._losses: list[tuple[str, str]] = []  # where in the run, and what was lost
        with run_lock(config.trainer.directory), ExitStack() as opened:
            self._quarantine = Quarantine(config.trainer)
            if (copies := state_copies(config)) is not None:
                opened.callback(copies.close)
            self._copies = copies
            yield from self._until_done(config, start_up or Timeline())

    def _until_done(self, config: Config, timeline: Timeline) -> Iterator[Step]:
        if has_nothing_to_do(config, Settings.of(config)):
            return
        print(describe_machine())
        # A user's data set or reward that draws from these draws the same again; our own choices have their generators.
        random.seed(config.trainer.seed)
        np.random.seed(config.trainer.seed % 2**32)
        torch.manual_seed(config.trainer.seed)
        at_first = random_states()
        while True:
            try:
                yield from self._train(config, timeline)
                break
            except (WorkerLostError, PeerLostError, EngineLostError) as error:
                timeline.close()
                config = self._after_loss(error)
            restore_random_states(at_first)
            timeline = Timeline("restart")
        if self._losses:
            lines = [f"  in {place}: {told}" for place, told in self._losses]
            print(
                "\n".join(
                    [f"The workers were started again {len(lines)} times, after losses", *lines]
                )
            )

    def _after_loss(self, error: QuadrigaError) -> Config:
        """The configuration to go on with; raises the error, and how the run goes on, if it does not by itself."""
        now, limit, run = time.monotonic(), self.config.trainer.max_worker_restarts, self._run
        place = (
            f"step {run.trainer.global_steps}"
            if run
            else f"the start-up after step {self._written or 0}"
        )
        if run and run.trainer.checkpoints.last_written not in (None, self._written):
            self._written = run.trainer.checkpoints.last_written
            self._restarts.clear()
        self._restarts = [at for at in self._restarts if now - at < RESTART_WINDOW_S]
        is_repeated = place in [lost_place for lost_place, _ in self._losses]
        step = run.trainer.global_steps if run else 0
        reason = skipped = ""
        if self._is_stopping:
            reason = "a stop was requested"
        elif is_repeated and (refusal := self._quarantine.refusal(step)):
            reason = f"{place} has lost a worker before, so the cause may be in it, and {refusal}"
        elif (count := len(self._restarts)) >= limit:
            reason = f"{count} restarts within an hour and since the last checkpoint, {RESTARTS_KEY}={limit}"
        if reason:
            advice = how_to_go_on(self.config)
            error.fix = f"{error.fix} The workers are not started again: {reason}. {advice}".strip()
            raise error
        self._restarts.append(now)
        self._lost_at = now
        self._losses.append((place, error.where))
        if run and is_repeated:
            self._quarantine.add(step, run.trainer.num_rows)
            skipped = f" Step {step} has lost workers twice, and is skipped."
        state, resume = "where it began, for it has written no checkpoint yet", {}
        if self._written is not None:
            # The newest that this run has written; older ones stand behind it.
            state, resume = f"the checkpoint of step {self._written}", {"resume_mode": "auto"}
        if self._copies is not None and self._copies.steps:
            state = f"the copy in memory of step {self._copies.steps}, the last that is whole, else {state}"
        left = f"{limit - len(self._restarts)} of {limit} restarts are left ({RESTARTS_KEY})"
        resumed = f"the workers are started again, and the run goes on from {state}"
        print(f"\n{error}\nRecovery: {resumed}; {left}.{skipped}")
        return self.config.model_copy(
            update={"trainer": self.config.trainer.model_copy(update=resume)}
        )

    def _train(self, config: Config, timeline: Timeline) -> Iterator[Step]:
        self._run, self._is_stopping = None, False
        run = self._run = self._build(config, timeline)
        trainer = run.trainer
        trainer.quarantine = self._quarantine
        if self._losses:
            trainer.recovery = len(self._losses), self._lost_at
        is_cut_short = True
        try:
            timeline.close()
            print(timeline.render())
            if self._copies is not None:
                trainer.copies, newest = self._copies, self._copies.newest()
                trainer.newest_copy = (
                    newest if newest is not None and newest.step >= (self._written or 0) else None
                )
            with heeding_sigterm(lambda: f"If it is killed before: {how_to_go_on(config)}"):
                try:
                    yield Step(trainer, None)
                    yield from trainer.steps()
                finally:
                    self._is_stopping = stop_requested.is_set()
            is_cut_short = False
        except KeyboardInterrupt:
            trainer.saver.settle(can_ask=not run.team.is_remote)
            print(f"\ninterrupted in step {trainer.global_steps}. {how_to_go_on(config)}")
            raise
        finally:
            trainer.saver.settle(can_ask=not run.team.is_remote)
            run.close(is_cut_short=is_cut_short)
        if not config.trainer.val_only:
            print(what_next(config, trainer.checkpoints.last_written))

    def _build(self, config: Config, timeline: Timeline) -> Run:
        """The run; after a loss with fewer processes, where the cluster has no room for all of them."""
        try:
            return self._build_run(config, timeline)
        except NoRoomError as error:
            missing = error
        for smaller in with_fewer_processes(config) if self._losses else ():
            with suppress(NoRoomError):
                run = self._build_run(smaller, timeline)
                pools = ", ".join(
                    f"{pool} {counts}" for pool, counts in smaller.trainer.resource_pools.items()
                )
                said = (
                    "Its numbers differ by rounding. The next restart asks for all of them again."
                )
                print(f"NOTICE: {missing}\nThe run goes on with fewer processes: {pools}. {said}")
                return run
        raise missing


def what_next(config: Config, step: int | None) -> str:
    """What can be done with a run that has ended, whose last checkpoint is that of a step."""
    trainer, run = config.trainer, config.trainer.directory
    length = "total_training_steps" if trainer.total_training_steps == step else "total_epochs"
    if config.task != "rl":
        enables, section = "", "actor_rollout_ref"
        if config.task == "reward_model":
            enables, section = "reward_model.enable=True ", "reward_model"
        model = as_override(f"{section}.model.path", run / "model")
        return f"done. Next:\n  quadriga train --config FILE {enables}{model}"
    rows = "" if config.data.val_files else " data.val_files=FILE"
    if step is None:
        return f"done: {run}, without a checkpoint; trainer.save_freq=N writes one every N steps and at the end."
    return (
        f"done: {run} has the checkpoint of step {step}. Next:\n"
        f"  quadriga eval {shlex.quote(str(run))} --config {shlex.quote(str(run / CONFIGURATION))}{rows}\n"
        f"  quadriga export {shlex.quote(str(run))} --output DIR\n"
        f"  the same command with a larger trainer.{length} goes on"
    )


def how_to_go_on(config: Config) -> str:
    """What stands on the disk, and what takes the run up again from there."""
    step, change = Checkpoints(config.trainer.directory).newest(), ""
    if step is None:
        return "There is no checkpoint to go on from; trainer.save_freq=N writes one every N steps."
    if config.trainer.resume_mode != "auto":
        change = " with trainer.resume_mode=auto"
    return f"The same command{change} goes on from the checkpoint of step {step}."
