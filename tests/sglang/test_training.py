# SPDX-License-Identifier: Apache-2.0
"""`quadriga train` with SGLang."""

from pathlib import Path

from small_runs import require_run


def test_a_run_generates_with_the_weights_that_it_trains(folder: str, tmp_path: Path) -> None:
    """See `require_run`."""
    require_run("sglang", folder, tmp_path)
