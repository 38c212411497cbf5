# SPDX-License-Identifier: Apache-2.0
"""A run from its configuration to its last step, and what is said when it is cut short."""

from collections.abc import Sequence

from quadriga.config import Config, show
from quadriga.observe.machine import describe_machine
from quadriga.observe.timing import Timeline
from quadriga.trainer.build import build_trainer
from quadriga.trainer.checkpoint import check_writable


class TaskRunner:
    """Runs one training from configuration to last step. On Ray this is the actor that holds the driver."""

    def run(self, config: Config) -> None:
        """Build everything, say where the time went, train, and close what was opened.

        Raises:
            QuadrigaError: what is wrong with the configuration, the data or the models is said before the first step.
        """
        timeline = Timeline()
        directory = config.trainer.directory
        check_writable(directory)
        (directory / "config.yaml").write_text(show(config), encoding="utf-8")
        print(describe_machine())
        trainer = build_trainer(config, timeline)
        print(timeline.render())
        try:
            trainer.fit()
        except KeyboardInterrupt:
            print(f"\ninterrupted in step {trainer.global_steps}. {_how_to_go_on(trainer.checkpoints.steps())}")
            raise
        finally:
            trainer.close()


def _how_to_go_on(steps: Sequence[int]) -> str:
    if not steps:
        return "There is no checkpoint to go on from; trainer.save_freq=N writes one every N steps."
    return f"The same command goes on from the checkpoint of step {steps[-1]}."


def run_ppo(config: Config) -> None:
    """Train in this process."""
    TaskRunner().run(config)
