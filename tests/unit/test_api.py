# SPDX-License-Identifier: Apache-2.0
"""Rows of a program as the file that a run reads."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quadriga.api import _Draft

NAN = float("nan")
ROW = {"prompt": "1+1=", "ground_truth": "2"}


@pytest.fixture
def written(tmp_path: Path) -> Callable[..., list[dict[str, Any]]]:
    """The rows of the file that is written of rows; it holds JSON alone."""

    def write(rows: Any, reward: Any = None) -> list[dict[str, Any]]:
        draft = _Draft(None, options={"trainer.default_local_dir": str(tmp_path)})
        draft.set_reward(reward)
        draft.set_rows("data.train_files", rows)
        lines = Path(draft.values["data.train_files"]).read_text().splitlines()
        return [json.loads(line, parse_constant=pytest.fail) for line in lines]

    return write


def test_numbers_that_json_cannot_hold_are_written_as_text(written: Callable) -> None:
    facts = {
        "list": [NAN, 1.5],
        "array": np.array([math.inf, 2.0]),
        "number": np.float64(-math.inf),
    }
    (row,) = written([ROW | {"extra_info": facts}])
    assert row["extra_info"] == {
        "list": ["NaN", 1.5],
        "array": ["Infinity", 2.0],
        "number": "-Infinity",
    }


def test_what_a_table_lacks_stays_missing(written: Callable) -> None:
    rows = written(pd.DataFrame([ROW, {"prompt": NAN, "ground_truth": NAN}]))
    assert rows[0]["reward_model"]["ground_truth"] == "2"
    assert rows[1]["prompt"] is None
    assert "ground_truth" not in rows[1]["reward_model"]


def test_chats_lose_the_nulls_that_arrow_adds(written: Callable, tmp_path: Path) -> None:
    arguments = [{"x": 1}, {"y": "q"}]
    rows = [
        ROW | {"prompt": [{"role": "user", "content": "", "tool_calls": [one]}]}
        for one in arguments
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")

    def reward(prompt: Any) -> float:  # names a column: the rows are written anew
        return 0.0

    sources = (
        datasets.Dataset.from_list(rows),
        pd.read_parquet(tmp_path / "t.parquet"),
        tmp_path / "t.parquet",
    )
    for source in sources:
        assert [row["prompt"] for row in written(source, reward)] == [row["prompt"] for row in rows]
