# SPDX-License-Identifier: Apache-2.0
"""Whole runs on Ray whose rollout groups span the actor's ranks, against the same run in one process.

What they do not prove: anything of speed, nor groups on GPUs.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("ray_cluster")
COMMON = (
    "trainer.total_training_steps=2",
    "trainer.test_freq=2",
    "data.train_batch_size=5",
    "actor_rollout_ref.rollout.n=3",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.eps=1e-3",
)
ACTOR = "actor_rollout_ref.actor"
TP, PP = f"{ACTOR}.tensor_model_parallel_size=2", f"{ACTOR}.pipeline_model_parallel_size=2"
LORA = ["actor_rollout_ref.model.lora_rank=4", f"{ACTOR}.optim.lr=5e-2"]


@pytest.mark.parametrize(
    ("ranks", "size", "layout", "more", "mode"),
    [
        (4, 2, [], LORA, "async"),
        pytest.param(4, 2, [TP], [], "sync", marks=pytest.mark.slow),
        pytest.param(4, 2, [TP, PP], [], "async", marks=pytest.mark.slow),
        pytest.param(4, 4, [TP, PP], [], "sync", marks=pytest.mark.slow),
    ],
    ids=[
        "two groups, an adapter",
        "fsdp 2 x tp 2",
        "tp 2 x pp 2",
        "tp 2 x pp 2 to 4",
    ],
)
def test_groups_learn_what_one_process_does(
    ranks: int,
    size: int,
    layout: list[str],
    more: list[str],
    mode: str,
    alone: Callable[..., Path],
    train: Callable[..., Path],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Metrics to 1e-4, validation too. Weights that an adapter is merged into are not shared with the trainer.

    One group that shares all weights, also in steps without conversations: test_data_parallel.py. A group on a pool of
    its own: test_async_training.py.
    """
    keys = (*COMMON, *more, f"actor_rollout_ref.rollout.mode={mode}")
    one = alone(*keys)
    capfd.readouterr()
    groups = f"actor_rollout_ref.rollout.tensor_model_parallel_size={size}"
    run = train("trainer.backend=ray", groups, *keys, *layout, f"trainer.n_gpus_per_node={ranks}")
    output = capfd.readouterr().out
    assert f"in groups of {size} ranks, each with a shard of the weights" in output
    require_equal(metric_lines(run), metric_lines(one))


# Kills one rank, the youngest process, a moment after the second step, in the midst of the next generation. It runs in
# the driver's process, which has started the cluster.
ROWS = """
import os, signal, threading
from pathlib import Path
from quadriga.data import RLHFDataset
from watching import own_workers

class Rows(RLHFDataset):
    def on_batch_end(self, batch):
        mark = Path(__file__).with_name("killed")
        if batch.meta_info["global_steps"] == 2 and not mark.exists():
            mark.touch()
            threading.Timer(0.02, lambda: os.kill(max(own_workers()), signal.SIGKILL)).start()
"""


@pytest.mark.slow
def test_a_run_that_loses_a_rank_of_a_group_starts_again(
    alone: Callable[..., Path],
    train: Callable[..., Path],
    metric_lines: Callable[[Path], list[dict[str, Any]]],
    capfd: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    """From its beginning, to the numbers of a run that nothing happened to."""
    (tmp_path / "rows.py").write_text(ROWS)
    keys = (*COMMON, "trainer.total_training_steps=3", "actor_rollout_ref.rollout.mode=async")
    one = alone(*keys)
    capfd.readouterr()
    rows = (
        f"data.custom_cls.path={tmp_path / 'rows.py'}",
        "data.custom_cls.name=Rows",
        "trainer.state_copies=False",
    )
    groups = "actor_rollout_ref.rollout.tensor_model_parallel_size=2"
    run = train("trainer.backend=ray", groups, *keys, TP, *rows, "trainer.n_gpus_per_node=2")
    assert (tmp_path / "killed").exists()
    assert capfd.readouterr().out.count("Recovery: ") == 1
    require_equal(metric_lines(run), metric_lines(one))


def require_equal(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> None:
    """Metrics to 1e-4, of all steps."""
    assert [line["step"] for line in ours] == [line["step"] for line in theirs] != []
    for left, right in zip(ours, theirs, strict=True):
        for name in left.keys() & right.keys() - {"actor/packed_tokens"}:
            if not name.startswith(("balance/", "timing", "perf/")):
                assert left[name] == pytest.approx(right[name], rel=1e-4, abs=2e-6), (
                    name,
                    left["step"],
                )
