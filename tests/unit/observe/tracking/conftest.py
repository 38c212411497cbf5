# SPDX-License-Identifier: Apache-2.0
"""A run to be recorded, and made-up metrics for it."""

from collections.abc import Callable
from pathlib import Path

import pytest

from quadriga.observe.tracking.base import RunFacts

CONFIG = {
    "trainer": {"project_name": "numbers", "logger": ["x"]},
    "data": {"train_files": None, "sampler": {}},
}
SAMPLES = [
    {"input": "Which is | the\nlargest?", "output": "82", "score": 1.0, "step_in_game": [1, 2]},
    {"input": "And now?", "output": "7", "score": 0.0},
]


@pytest.fixture
def make_run(tmp_path: Path) -> Callable[..., RunFacts]:
    """A run in this test's directory, new or continued."""

    def make(resume_step: int = 0, *, is_restart: bool = False) -> RunFacts:
        return RunFacts("numbers", "largest", CONFIG, tmp_path, resume_step, is_restart)

    return make


@pytest.fixture
def samples() -> list[dict]:
    return [dict(sample) for sample in SAMPLES]
