# SPDX-License-Identifier: Apache-2.0
"""The policy served inside training on Ray: one server on the driver, in front of the engines of all ranks."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.served import first_tokens, options


@pytest.mark.usefixtures("ray_cluster")
def test_the_driver_serves_the_engines_of_its_ranks(
    train: Callable[..., Path], metric_lines: Callable[..., list], tmp_path: Path
) -> None:
    """Two ranks sample what one process samples, whichever of them a call goes to."""
    folders = {"ray": tmp_path / "ray", "local": tmp_path / "local"}
    on_ray = ("trainer.backend=ray", "trainer.n_gpus_per_node=2")
    for backend, folder in folders.items():
        folder.mkdir()
        overrides = options(folder, tmp_path / backend)
        lines = metric_lines(train(*overrides, *on_ray * (backend == "ray"), run=backend))
        assert max(line["rollout/log_prob_diff_max"] for line in lines) < 1e-5
    assert first_tokens(folders["ray"]) == first_tokens(folders["local"]) != {}
