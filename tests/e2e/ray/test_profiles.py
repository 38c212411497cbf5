# SPDX-License-Identifier: Apache-2.0
"""A profiled step on Ray: all processes in one trace, with what the same step does in one process.

What it does not prove: several nodes, whose clocks may differ; GPUs.
"""

import gzip
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

PPO = (
    "algorithm.adv_estimator=gae",
    "actor_rollout_ref.actor.use_kl_loss=True",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "trainer.total_training_steps=2",
    "global_profiler.tool=torch",
    "global_profiler.steps=[2]",
)


def test_the_trace_of_all_processes(ray_cluster: str, train: Callable[..., Path], tmp_path: Path) -> None:
    """At least 95 % of the operators of one process, each in its role's; phases and calls lie where they happened."""
    traces = {}
    for name, more in {"alone": (), "apart": ("trainer.backend=ray", "trainer.placement=apart")}.items():
        folder = tmp_path / f"profile_{name}"
        train(*PPO, *more, f"global_profiler.save_path={folder}", run=name)
        (path,) = folder.iterdir()
        assert path.name == "step_2.json.gz"
        traces[name] = json.loads(gzip.decompress(path.read_bytes()))["traceEvents"]
    alone, apart = (Counter(one["name"] for one in events if one.get("cat") == "cpu_op") for events in traces.values())
    assert (alone & apart).total() >= 0.95 * alone.total() > 1000

    events = traces["apart"]
    titles = {one["pid"]: one["args"]["name"] for one in events if one["name"] == "process_name"}
    assert sorted(titles.values()) == ["actor_rollout[0]", "critic[0]", "driver", "ref[0]"]

    def marked(name: str) -> tuple[str, float, float]:
        """Process, start and end of the one block of a name."""
        (one,) = [one for one in events if one.get("cat") == "user_annotation" and one["name"] == name]
        return titles[one["pid"]], one["ts"], one["ts"] + one["dur"]

    phases: dict[str, Any] = {name: marked(name) for name in ("step", "gen", "prepare", "update_critic")}
    assert {process for process, _, _ in phases.values()} == {"driver"}
    for phase, call in {
        "gen": ("actor_rollout[0]", "actor_rollout.generate_sequences"),
        "prepare": ("ref[0]", "ref.compute_ref_log_prob"),
        "update_critic": ("critic[0]", "critic.update_critic"),
    }.items():
        process, start, end = marked(call[1])
        assert process == call[0]
        assert phases[phase][1] <= start < end <= phases[phase][2] <= phases["step"][2]
