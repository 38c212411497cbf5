# SPDX-License-Identifier: Apache-2.0
"""vLLM on rollout groups: several processes hold an engine together, by its external launcher.

What it does not prove: groups on accelerators, where weights and logits travel by NCCL.
"""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from quadriga.rollout.interface import SamplingParams
from quadriga.weight_sync import CopiedWeights
from small_groups import PROMPTS
from small_models import save, wide_model
from small_runs import require_run
from tests.limits import PROGRAM_S

COMMON = (
    "+actor_rollout_ref.rollout.engine_kwargs.vllm.block_size=32",
    "actor_rollout_ref.actor.optim.eps=1e-3",
)
FSDP = ("actor_rollout_ref.actor.fsdp_config.fsdp_size=-1",)
TP = ("actor_rollout_ref.actor.tensor_model_parallel_size=2",)
PP = ("actor_rollout_ref.actor.pipeline_model_parallel_size=2",)
APART = (
    "trainer.placement={actor: training, ref: training, rollout: generation}",
    "trainer.resource_pools.generation=[2]",
)
LORA = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.actor.optim.lr=5e-3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with two models, called by their seeds."""
    folder = tmp_path_factory.mktemp("wide")
    for seed in range(2):
        save(wide_model(seed), folder / str(seed))
    return folder


@pytest.fixture(scope="module")
def sampled(start: Any, models: Path) -> list[list[int]]:
    """What one process draws with the model of seed 0."""
    engine = start(path=str(models / "0"))
    try:
        CopiedWeights().publish(wide_model(0).named_parameters(), engine, 1)
        params = [SamplingParams(max_tokens=24, seed=11 * row) for row in range(len(PROMPTS))]
        return [one.token_ids for one in engine.generate_batch(PROMPTS, params)]
    finally:
        engine.close()


@pytest.mark.parametrize(
    ("size", "more"),
    [(2, []), (4, []), (2, ["async"])],
    ids=["2", "4", "2, asynchronous scheduling"],
)
def test_groups_generate_as_one_process(
    size: int, more: list[str], sampled: list[list[int]], models: Path, tmp_path: Path
) -> None:
    """Publications from shards of FSDP, with tensor parallelism, and of that with pipeline stages, into an engine that
    sleeps; greedy and sampled, a batch at once and requests that join, are cancelled and aborted: tokens equal,
    log-probabilities to 1e-4. Four ranks repeat the two key-value heads. With asynchronous scheduling a batch is in
    flight at each sleep after the first."""
    command = [
        sys.executable,
        str(Path(__file__).with_name("small_groups.py")),
        str(models),
        str(tmp_path),
        str(size),
        *more,
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PROGRAM_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    found = [json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in range(4)]
    for leader in found[::size]:
        assert f"in the processes of {size} ranks, which hold it together" in leader["description"]
        assert [equal for equal, _ in leader["versions"]] == [True] * 3
        assert max(worst for _, worst in leader["versions"]) < 1e-4
        assert leader["sampled"] == leader["joined"] == leader["again"] == sampled
    assert found[1]["sampled"] is None
    assert [one["in flight"] for one in found] == [[0, 1, 1] if more else []] * 4
    # The gate and up projections of a layer, beside the norm that arrives after them.
    assert [one["rebuilt"] for one in found] == [
        [2 * 192 * 128 * 4 + 128 * 4, "model.layers.1.input_layernorm"]
    ] * 4


@pytest.fixture(scope="module")
def alone(
    models: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., list[dict[str, float]]]:
    """`alone(*keys)`: the metrics of a run in one process, which each set of keys has once."""
    runs: dict[tuple[str, ...], list[dict[str, float]]] = {}

    def run(*keys: str) -> list[dict[str, float]]:
        if keys not in runs:
            runs[keys], _ = require_run(
                "vllm", str(models / "0"), tmp_path_factory.mktemp("one"), *COMMON, *keys
            )
        return runs[keys]

    return run


@pytest.mark.parametrize(
    ("ranks", "size", "layout", "mode"),
    [
        (4, 2, FSDP, "async"),
        pytest.param(4, 2, (*TP, *PP), "sync", marks=pytest.mark.slow),
        pytest.param(4, 4, (*TP, *PP), "async", marks=pytest.mark.slow),
        pytest.param(4, 2, (*TP, *APART), "async", marks=pytest.mark.slow),
        pytest.param(2, 2, LORA, "sync", marks=pytest.mark.slow),
    ],
    ids=[
        "fsdp 4",
        "tp 2 x pp 2",
        "tp 2 x pp 2 to 4",
        "fsdp 2 x tp 2 to a pool of its own",
        "an adapter",
    ],
)
def test_a_run_on_ray_is_that_of_one_process(
    ranks: int,
    size: int,
    layout: tuple[str, ...],
    mode: str,
    alone: Callable[..., list[dict[str, float]]],
    models: Path,
    tmp_path: Path,
) -> None:
    """Metrics to 1e-4: the groups draw the same tokens, from the weights that are trained in any layout."""
    keys = (
        *layout,
        "trainer.backend=ray",
        f"trainer.n_gpus_per_node={ranks}",
        f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}",
        f"actor_rollout_ref.rollout.mode={mode}",
    )
    found, told = require_run("vllm", str(models / "0"), tmp_path, *COMMON, *keys)
    assert f"in the processes of {size} ranks, which hold it together" in told
    for ours, theirs in zip(found, alone(*(layout if layout == LORA else ())), strict=True):
        for name in ours.keys() & theirs.keys() - {"actor/packed_tokens"}:
            if not name.startswith(("balance/", "timing", "perf/")):
                close = 1e-5 if "log_prob_diff" in name else 2e-6  # differences are rounding alone
                assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=close), (
                    name,
                    ours["training/global_step"],
                )


def test_a_group_whose_processes_see_one_gpu_each(tmp_path: Path) -> None:
    """vLLM's own coordinator fails with its defaults, and starts with the arguments of a group."""
    program = str(Path(__file__).with_name("lonely_gpus.py"))
    done = subprocess.run(
        [sys.executable, program, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for rank in range(2):
        found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert found["as they are"].startswith("IndexError")
        assert found["of a group"] == "cuda:0"
