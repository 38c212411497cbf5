# SPDX-License-Identifier: Apache-2.0
"""vLLM on rollout groups: several processes hold an engine together, by its external launcher.

What it does not prove: groups on accelerators, where weights and logits travel by NCCL.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from quadriga.rollout.interface import SamplingParams
from quadriga.weight_sync import CopiedWeights
from small_groups import PROMPTS
from small_models import model
from small_runs import require_run


def test_a_group_generates_as_one_process(start: Any, folder: str, tmp_path: Path) -> None:
    """Three publications into an engine that sleeps, greedy and sampled, a batch at once and requests that join, are
    cancelled and aborted: tokens equal, log-probabilities to 1e-4."""
    command = [sys.executable, str(Path(__file__).with_name("small_groups.py")), folder, str(tmp_path), "2"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    leader, member = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(2))
    assert "in the processes of 2 ranks, which hold it together" in leader["description"]
    assert [equal for equal, _ in leader["versions"]] == [True] * 3
    assert max(worst for _, worst in leader["versions"]) < 1e-4
    engine = start()
    try:
        CopiedWeights().publish(model(0).named_parameters(), engine, 1)
        params = [SamplingParams(max_tokens=24, seed=11 * row) for row in range(len(PROMPTS))]
        alone = [one.token_ids for one in engine.generate_batch(PROMPTS, params)]
    finally:
        engine.close()
    assert leader["sampled"] == leader["joined"] == leader["again"] == alone
    assert member["sampled"] is None and leader["rebuilt"] == member["rebuilt"] == [256 * 64 * 4, "model.embed_tokens"]


FSDP = ("actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",)
TP_AND_PP = (
    "actor_rollout_ref.actor.tensor_model_parallel_size=2",
    "actor_rollout_ref.actor.pipeline_model_parallel_size=2",
)
APART = (
    "trainer.placement={actor: training, ref: training, rollout: generation}",
    "trainer.resource_pools.generation=[2]",
)
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=5e-2")


@pytest.mark.parametrize(
    ("ranks", "size", "layout", "mode"),
    [
        (2, 2, FSDP, "sync"),
        pytest.param(4, 2, FSDP, "async", marks=pytest.mark.slow),
        pytest.param(4, 2, TP_AND_PP, "sync", marks=pytest.mark.slow),
        pytest.param(1, 2, APART, "async", marks=pytest.mark.slow),
        pytest.param(2, 2, LORA, "sync", marks=pytest.mark.slow),
    ],
    ids=["fsdp 2", "fsdp 4, async", "tp 2 x pp 2", "a pool of its own", "an adapter"],
)
def test_a_run_on_ray_is_that_of_one_process(
    ranks: int, size: int, layout: tuple[str, ...], mode: str, folder: str, tmp_path: Path
) -> None:
    """Metrics to 1e-4: the groups draw the same tokens, from the weights that are trained in any layout."""
    common = ("+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32", "actor_rollout_ref.actor.optim.eps=1e-3")
    runs = {
        "one": layout if layout == LORA else (),
        "groups": (
            *layout,
            "trainer.backend=ray",
            f"trainer.n_gpus_per_node={ranks}",
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}",
            f"actor_rollout_ref.rollout.mode={mode}",
        ),
    }
    found = {}
    for name, keys in runs.items():
        (tmp_path / name).mkdir()
        found[name] = require_run("vllm", folder, tmp_path / name, *common, *keys)
    assert f"in the processes of {size} ranks, which hold it together" in found["groups"][1]
    for ours, theirs in zip(found["groups"][0], found["one"][0], strict=True):
        for name in ours.keys() & theirs.keys() - {"actor/packed_tokens"}:
            if not name.startswith(("balance/", "timing", "perf/")):
                close = 1e-5 if "log_prob_diff" in name else 2e-6  # differences are rounding alone
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=close), (
                    name,
                    ours["training/global_step"],
                )
