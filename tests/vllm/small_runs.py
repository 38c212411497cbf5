# SPDX-License-Identifier: Apache-2.0
"""`quadriga train` on a small model with a third-party engine, in a process of its own."""

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

LIMIT_S = 400.0
REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return float(len(set(solution_str))) / 8
"""


def require_run(
    engine: str, model: str, folder: Path, *more: str, is_stale: bool = False
) -> tuple[list[dict[str, float]], str]:
    """Three steps; in each the rollout's log-probabilities are the trainer's, which stale weights would not give.

    Args:
        engine: `rollout.name`.
        model: folder of the model.
        folder: for the run and what it reads.
        more: further overrides.
        is_stale: whether it may be seen in the first step alone, as later ones learn from older weights.

    Returns:
        The metrics of each step, and what was printed.
    """
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": chr(0x110 + row) * 3}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": row},
        }
        for row in range(8)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "train.parquet")
    (folder / "reward.py").write_text(REWARD)
    overrides = {
        "data.train_files": folder / "train.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 16,
        "data.max_response_length": 8,
        "custom_reward_function.path": folder / "reward.py",
        "actor_rollout_ref.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 2,
        "actor_rollout_ref.actor.optim.lr": 1e-2,
        "actor_rollout_ref.actor.fsdp_config.model_dtype": "float32",
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.cache_gigabytes": 0.05,
        "trainer.val_before_train": False,
        "trainer.total_training_steps": 3,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.default_local_dir": folder / "run",
        "trainer.logger": "[console,jsonl]",
    }
    words = [f"{key}={value}" for key, value in overrides.items()]
    command = [sys.executable, "-m", "quadriga.cli.main", "train", *words, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    lines = [
        json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert len(lines) == 3
    assert all(line["actor/grad_norm"] > 0 for line in lines)
    assert all(
        line["rollout/log_prob_diff_max"] < 2e-3 for line in lines[: 1 if is_stale else 3]
    ), lines
    return lines, done.stdout
