# SPDX-License-Identifier: Apache-2.0
"""A few cases of the campaigns of `benchmarks/chaos.py`, with the default keys; a full sitting is run by hand.

What it does not prove: what only many cases show. Deaths on Ray are in ray/test_deaths.py.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.conftest import REPOSITORY, with_the_tests
from tests.limits import PROGRAM_S


@pytest.mark.slow
@pytest.mark.parametrize(
    ("campaign", "numbers"),
    [
        # Programs that signal others, look for the secret and leave processes, as root and as a user.
        ("hostile", (1, 9, 18, 27, 36, 80, 95, 150, 220)),
        # Several updates a step in one process, killed six times.
        ("kills", (3,)),
        # A file of a checkpoint flipped, missing, swapped.
        ("damage", (0, 10, 15)),
    ],
)
def test_cases_of_a_campaign(campaign: str, numbers: tuple[int, ...], tmp_path: Path) -> None:
    words = (
        "benchmarks/chaos.py",
        "again",
        campaign,
        *map(str, numbers),
        "--output",
        str(tmp_path),
    )
    done = subprocess.run(
        with_the_tests(sys.executable, *words),
        cwd=REPOSITORY,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": ok ") == len(numbers)
