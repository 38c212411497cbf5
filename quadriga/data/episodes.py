# SPDX-License-Identifier: Apache-2.0
"""Rows for an environment that needs no data file: each row is a seed for `reset`.

seed of row `number` = 2 * hash(data.seed, number) for training, 2 * hash(...) + 1 for validation
"""

import hashlib
from io import BytesIO
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.config import Config
from quadriga.data.files import write_once

SEED = "env_seed"
"""Entry of `extra_info` with the seed of `reset`."""
IS_SEED = "is_env_seed"
"""Entry of `extra_info` that marks a row as a seed alone, whose prompt is only a placeholder."""


def with_episodes(config: Config) -> Config:
    """Write the rows of the environment to files in the cache, and name these files in `data`.

    Args:
        config: the configuration. `data.train_files` and `data.val_files` stay as they are if set.

    Returns:
        A copy of the configuration in which these two keys are set; `data.val_files` stays empty if
        `env.num_val_episodes` is 0. Without an environment (`env.name`) the configuration itself.
    """
    env = config.env
    if env.name is None:
        return config
    files = {}
    if not config.data.train_files:
        files["train_files"] = _write_rows(config, env.num_episodes, is_validation=False)
    if not config.data.val_files and env.num_val_episodes:
        files["val_files"] = _write_rows(config, env.num_val_episodes, is_validation=True)
    return config.model_copy(update={"data": config.data.model_copy(update=files)})


def episode_seed(seed: int, number: int, *, is_validation: bool) -> int:
    """Seed of an episode, below 2**31: even for training, odd for validation.

    Args:
        seed: `data.seed`.
        number: number of the row.
        is_validation: whether it is a validation row.
    """
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return 2 * (int.from_bytes(digest, "big") % 2**30) + is_validation


def _write_rows(config: Config, num_rows: int, *, is_validation: bool) -> str:
    """Write a file of rows, named after its content, unless it exists already; return its path."""
    name = str(config.env.name)
    rows = []
    for number in range(num_rows):
        seed = episode_seed(config.data.seed, number, is_validation=is_validation)
        # A placeholder, which the environment's first observation replaces. It is short, so that the
        # row passes every check of prompt lengths.
        prompt = [{"role": "user", "content": str(number)}]
        row = {
            config.data.prompt_key: prompt,
            config.data.reward_fn_key: name,
            "reward_model": {"style": "environment", "ground_truth": ""},
            "extra_info": {"index": number, SEED: seed, IS_SEED: True},
        }
        rows.append(row)
    content = BytesIO()
    pq.write_table(pa.Table.from_pylist(rows), content)
    folder = Path(config.data.cache_dir).expanduser() / "episodes"
    return str(write_once(content.getvalue(), folder))
