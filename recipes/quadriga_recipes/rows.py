# SPDX-License-Identifier: Apache-2.0
"""The row that every prepared data set is made of, and the parquet file that holds such rows."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from quadriga.data.files import written_aside
from quadriga.errors import DataError

_MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
_REWARD_MODEL = pa.struct([("style", pa.string()), ("ground_truth", pa.string())])


@dataclass(frozen=True)
class Problem:
    """One prompt and what its answers are measured by.

    Attributes:
        text: the user's message.
        ground_truth: the right answer; None where only a scorer knows it.
        extra: further entries of `extra_info`.
    """

    text: str
    ground_truth: str | None
    extra: dict[str, Any] = field(default_factory=dict)


def write_rows(problems: Iterable[Problem], target: Path, *, data_source: str, ability: str, split: str) -> Path:
    """Write `problems` to the parquet file `target`, all of them or nothing, and return it.

    Raises:
        DataError: there are none, or the file cannot be written.
    """
    rows = [
        {
            "data_source": data_source,
            "prompt": [{"role": "user", "content": problem.text}],
            "ability": ability,
            "reward_model": {"style": "rule", "ground_truth": problem.ground_truth},
            "extra_info": {"split": split, "index": index, **problem.extra},
        }
        for index, problem in enumerate(problems)
    ]
    if not rows:
        raise DataError(
            "prepare data", got=f"no rows for {target.name}", expected="at least one", fix="Ask for at least one row."
        )
    # The types of the fixed columns are written down: a column of Nones has none of its own.
    columns = {
        "data_source": pa.array([row["data_source"] for row in rows], pa.string()),
        "prompt": pa.array([row["prompt"] for row in rows], _MESSAGES),
        "ability": pa.array([row["ability"] for row in rows], pa.string()),
        "reward_model": pa.array([row["reward_model"] for row in rows], _REWARD_MODEL),
        "extra_info": pa.array([row["extra_info"] for row in rows]),
    }
    with written_aside(target, where="prepare data") as draft:
        pq.write_table(pa.table(columns), draft)
    return target


def write_splits(
    train: Iterable[Problem], val: Iterable[Problem], output_dir: Path, *, data_source: str, ability: str
) -> dict[str, Path]:
    """Write train.parquet and val.parquet into `output_dir` and return their paths by split."""
    return {
        split: write_rows(
            problems, output_dir / f"{split}.parquet", data_source=data_source, ability=ability, split=split
        )
        for split, problems in (("train", train), ("val", val))
    }
