# SPDX-License-Identifier: Apache-2.0
"""The checks before a run call users' code as the run does."""

from pathlib import Path

from quadriga.config import Config
from quadriga.trainer.preflight import preflight


def test_an_estimator_gets_the_options_that_the_run_passes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text("def mine(token_level_rewards, response_mask, *, config):\n    pass\n")
    outcome = preflight(Config(algorithm={"adv_estimator": f"{file}:mine"}))
    assert not [problem for problem in outcome.problems if "adv_estimator" in str(problem)]
    assert outcome.fields == ("token_level_rewards", "response_mask")
