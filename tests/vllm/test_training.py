# SPDX-License-Identifier: Apache-2.0
"""`quadriga train` with vLLM."""

from pathlib import Path

import pytest

from small_runs import require_run

ROLLOUT = "+actor_rollout_ref.rollout"


@pytest.mark.parametrize(
    "place",
    [f"{ROLLOUT}.engine_kwargs.vllm.block_size=32", f"{ROLLOUT}.tensor_model_parallel_size=2"],
    ids=["in the run's process", "beside it"],
)
def test_a_run_generates_with_the_weights_that_it_trains(place: str, folder: str, tmp_path: Path) -> None:
    """See `require_run`."""
    require_run("vllm", folder, tmp_path, place)
