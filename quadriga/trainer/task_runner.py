# SPDX-License-Identifier: Apache-2.0
"""A run from its configuration to its last step, and what is said when it is cut short."""

from quadriga.config import Config, show
from quadriga.observe.machine import describe_machine
from quadriga.observe.timing import Timeline
from quadriga.trainer.build import build_trainer
from quadriga.trainer.checkpoint import write_configuration


class TaskRunner:
    """Runs one training from configuration to last step. On Ray this is the actor that holds the driver."""

    def run(self, config: Config) -> None:
        """Build everything, say where the time went, train, and close what was opened.

        Raises:
            QuadrigaError: what is wrong with the configuration, the data or the models is said before the first step.
        """
        timeline = Timeline()
        write_configuration(config.trainer.directory, show(config))
        print(describe_machine())
        trainer = build_trainer(config, timeline)
        print(timeline.render())
        try:
            trainer.fit()
        except KeyboardInterrupt:
            print(
                f"\ninterrupted in step {trainer.global_steps}. {_how_to_go_on(trainer.checkpoints.newest(), config)}"
            )
            raise
        finally:
            trainer.close()


def _how_to_go_on(step: int | None, config: Config) -> str:
    if step is None:
        return "There is no checkpoint to go on from; trainer.save_freq=N writes one every N steps."
    change = "" if config.trainer.resume_mode == "auto" else " with trainer.resume_mode=auto"
    return f"The same command{change} goes on from the checkpoint of step {step}."


def run_ppo(config: Config) -> None:
    """Train in this process."""
    TaskRunner().run(config)
