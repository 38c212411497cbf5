# SPDX-License-Identifier: Apache-2.0
"""What a run says of its lost workers."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest

from quadriga.config import Config, load_config
from quadriga.errors import WorkerLostError
from quadriga.observe.timing import Timeline
from quadriga.trainer.build import BuiltRun
from quadriga.trainer.loop import TrainingStep
from quadriga.trainer.task_runner import TaskRunner


def lose_worker() -> Iterator[TrainingStep]:
    raise WorkerLostError("actor[rank 0/1]", got="SIGKILL", expected="a process")
    yield  # a generator, as the steps of a trainer are


@pytest.mark.parametrize(
    ("num_losses", "sentence"),
    [
        (1, "The workers were started again once, after a loss\n  in the start-up"),
        (2, "The workers were started again 2 times, after losses\n  in the start-up"),
    ],
)
def test_losses_are_counted_at_the_end(
    num_losses: int, sentence: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first worker is lost in the start-up, the second in step 1; then nothing is left to do."""
    # `val_only`: a run that takes no steps has no summary.
    overrides = [f"trainer.default_local_dir={tmp_path}", "trainer.val_only=True"]
    config = load_config([*overrides, "trainer.max_worker_restarts=2"]).config
    builds = iter(range(1, num_losses + 2))

    def build(config: Config, timeline: Timeline) -> BuiltRun:
        number = next(builds)
        if number == 1:
            next(lose_worker())
        run = Mock()
        run.trainer.global_steps = 1
        run.trainer.checkpoints.last_written = None
        run.trainer.steps.side_effect = lose_worker if number <= num_losses else lambda: iter(())
        return run

    for _ in TaskRunner().steps(config, build=build):
        pass
    assert sentence in capsys.readouterr().out
