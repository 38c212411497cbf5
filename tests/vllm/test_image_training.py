# SPDX-License-Identifier: Apache-2.0
"""`quadriga train` with vLLM, on pictures."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from small_runs import require_run
from tests.e2e.colors import of_studio, write_studio


@pytest.mark.skipif(
    find_spec("torchvision") is None, reason="no torchvision here: scripts/install-vllm installs it"
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_run_sees_with_the_weights_that_it_trains(tmp_path: Path, mode: str) -> None:
    """See `require_run`; those of the vision encoder among them. The other time an adapter, merged."""
    (tmp_path / "studio").mkdir()
    own = of_studio(write_studio(tmp_path / "studio"))
    block = "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32"
    few = ("actor_rollout_ref.rollout.n=4", "actor_rollout_ref.actor.ppo_mini_batch_size=8")
    model = str(tmp_path / "studio" / "model")
    adapter = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_merge=true")
    few += adapter if mode == "async" else ()
    require_run(
        "vllm", model, tmp_path, *own, *few, block, f"actor_rollout_ref.rollout.mode={mode}"
    )
