# SPDX-License-Identifier: Apache-2.0
"""A run from its configuration to its last step: what is said when it is cut short, how it gets over a lost worker."""

from collections.abc import Sequence

from quadriga.config import Config, show
from quadriga.errors import PeerLostError, QuadrigaError, WorkerError
from quadriga.observe.machine import describe_machine
from quadriga.observe.stopping import heeding_sigterm
from quadriga.observe.timing import Timeline
from quadriga.trainer.build import build_run
from quadriga.trainer.checkpoint import Checkpoints, write_configuration
from quadriga.trainer.run_lock import run_lock
from quadriga.trainer.saving import random_states, restore_random_states, seed_random_states


class TaskRunner:
    """Runs one training from configuration to last step. On Ray this is the driver."""

    def run(self, config: Config, start_up: Sequence[tuple[str, float]] = ()) -> None:
        """Build everything, say where the time went, train, and close what was opened.

        After the death of a worker, or an error that is none of Quadriga's own (those would come again), the run
        restarts up to `trainer.max_worker_restarts` times: from the last checkpoint that it has written, or from its
        beginning.

        Args:
            config: the resolved configuration.
            start_up: parts of the start-up so far, each with its begin in seconds since 1970.

        Raises:
            QuadrigaError: what is wrong with the configuration, the data or the models is said before the first step.
        """
        with run_lock(config.trainer.directory):
            self._run(config, start_up)

    def _run(self, config: Config, start_up: Sequence[tuple[str, float]]) -> None:
        timeline = Timeline(earlier=start_up)
        write_configuration(config.trainer.directory, show(config))
        print(describe_machine())
        seed_random_states(config.trainer.seed)
        at_first = random_states()
        self._saved: int | None = None
        restarts = config.trainer.max_worker_restarts
        while True:
            try:
                self._train(config, timeline)
                return
            except QuadrigaError as error:
                is_lost_worker = error.worker and isinstance(error, (WorkerError, PeerLostError))
                if not restarts or not is_lost_worker:
                    raise
                restarts -= 1
                left = f"{restarts} restart{'' if restarts == 1 else 's'} left"
                print(f"\n{error}\nThe workers are built anew; {left} after this.")
            restore_random_states(at_first)
            timeline = Timeline("restart")
            if self._saved is not None:
                newest = Checkpoints(config.trainer.directory).path(self._saved)
                resume = {"resume_mode": "resume_path", "resume_from_path": str(newest)}
                config = config.model_copy(update={"trainer": config.trainer.model_copy(update=resume)})

    def _train(self, config: Config, timeline: Timeline) -> None:
        run = build_run(config, timeline)
        trainer = run.trainer
        is_cut_short = True
        try:
            print(timeline.render())
            with heeding_sigterm():
                trainer.fit()
            is_cut_short = False
        except KeyboardInterrupt:
            trainer.saver.settle(can_ask=not run.team.is_remote)
            step, change = trainer.checkpoints.newest(), ""
            if config.trainer.resume_mode != "auto":
                change = " with trainer.resume_mode=auto"
            advice = f"The same command{change} goes on from the checkpoint of step {step}."
            if step is None:
                advice = "There is no checkpoint to go on from; trainer.save_freq=N writes one every N steps."
            print(f"\ninterrupted in step {trainer.global_steps}. {advice}")
            raise
        finally:
            trainer.saver.settle(can_ask=not run.team.is_remote)
            self._saved = trainer.checkpoints.last_written or self._saved
            run.close(is_cut_short=is_cut_short)
