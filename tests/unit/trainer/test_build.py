# SPDX-License-Identifier: Apache-2.0
"""How a run ends; that its workers do is in tests/e2e/ray."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from quadriga.errors import RolloutError, WorkerLostError
from quadriga.single_controller import WorkerGroups
from quadriga.trainer.build import BuiltRun


class Failing(WorkerGroups):
    """Groups whose end fails."""

    is_remote = True

    def __init__(self, error: Exception) -> None:
        self.error, self.groups = error, {}

    def close(self) -> None:
        raise self.error


@pytest.fixture
def make() -> Callable[[Exception], BuiltRun]:
    """`make(error)`: a run whose workers' end fails with it."""
    trainer: Any = SimpleNamespace(close=lambda: None)
    return lambda error: BuiltRun(trainer, Failing(error))


def test_a_worker_that_is_lost_behind_the_last_step_is_told(
    make: Callable, capsys: pytest.CaptureFixture[str]
) -> None:
    """Else the whole run would start again."""
    make(WorkerLostError("rollout[rank 0/3]", got="it ended without a word")).close()
    assert capsys.readouterr().out.startswith(
        "The run is complete. rollout[rank 0/3]: got it ended without a word"
    )


def test_another_error_of_the_end_is_raised(make: Callable) -> None:
    with pytest.raises(RolloutError, match="a full disk"):
        make(RolloutError("rollout", got="a full disk")).close()
