# SPDX-License-Identifier: Apache-2.0
"""Padding to a divisor, folding, and `all_gather_data_proto` between two real processes on gloo."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.errors import ProtocolError
from quadriga.protocol import (
    DataProto,
    fold_batch_dim,
    pad_dataproto_to_divisor,
    unfold_batch_dim,
    unpad_dataproto,
)
from tests.limits import PROGRAM_S


def rows(count: int) -> DataProto:
    return DataProto.from_dict({"x": torch.arange(count)}, {"uid": list(range(count))}, {"step": 1})


@pytest.mark.parametrize(
    ("count", "divisor", "expected"),
    [(3, 4, [0, 1, 2, 0]), (2, 5, [0, 1, 0, 1, 0]), (5, 2, [0, 1, 2, 3, 4, 0]), (0, 4, [])],
)
def test_padding_repeats_the_first_rows(count: int, divisor: int, expected: list[int]) -> None:
    data = rows(count)
    padded, pad_size = pad_dataproto_to_divisor(data, divisor)
    assert padded.batch["x"].tolist() == expected == padded.non_tensor_batch["uid"].tolist()
    assert pad_size == len(expected) - count and len(data) == count
    assert unpad_dataproto(padded, pad_size).batch["x"].tolist() == list(range(count))


def test_nothing_to_pad_returns_the_same_object() -> None:
    data = rows(4)
    padded, pad_size = pad_dataproto_to_divisor(data, 2)
    assert padded is data and pad_size == 0 and unpad_dataproto(data, 0) is data


def test_impossible_paddings() -> None:
    for call in (
        lambda: pad_dataproto_to_divisor(rows(2), 0),
        lambda: unpad_dataproto(rows(2), 3),
        lambda: unpad_dataproto(rows(2), -1),
        lambda: fold_batch_dim(rows(4), 3),
        lambda: unfold_batch_dim(rows(4)),
        lambda: unfold_batch_dim(
            DataProto.from_dict({"a": torch.ones(2, 3), "b": torch.ones(2, 4)})
        ),
    ):
        with pytest.raises(ProtocolError):
            call()


def test_fold_keeps_neighbours_together() -> None:
    data = DataProto.from_dict(
        {"x": torch.arange(12).view(6, 2)}, {"uid": np.array(list("aabbcc"), dtype=object)}
    )
    folded = fold_batch_dim(data, 3)
    assert len(folded) == 3 and folded.non_tensor_batch["uid"].tolist() == [
        ["a", "a"],
        ["b", "b"],
        ["c", "c"],
    ]
    assert folded.batch["x"][1].tolist() == [[4, 5], [6, 7]]
    back = unfold_batch_dim(folded)
    assert back.batch["x"].tolist() == data.batch["x"].tolist()
    assert back.non_tensor_batch["uid"].tolist() == list("aabbcc")


PROGRAM = """
import datetime, sys
import numpy as np, torch, torch.distributed as dist
from quadriga.errors import ProtocolError
from quadriga.protocol import DataProto, all_gather_data_proto

rank, store = int(sys.argv[1]), sys.argv[2]
dist.init_process_group(
    "gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
)
rows = [3, 1][rank]
data = DataProto.from_dict(
    {"x": torch.arange(rows) + 10 * rank, "half": torch.full((rows, 2), 0.5 + rank, dtype=torch.bfloat16),
     "mask": torch.tensor([True, False, True])[:rows]},
    {"uid": [f"{rank}-{row}" for row in range(rows)]},
    {"rank": rank},
)
empty = data[:0] if rank else data.select()
all_gather_data_proto(data)
assert data.batch["x"].tolist() == [0, 1, 2, 10], data.batch["x"]
assert data.batch["half"].tolist() == [[0.5, 0.5]] * 3 + [[1.5, 1.5]] and data.batch["half"].dtype == torch.bfloat16
assert data.batch["mask"].tolist() == [True, False, True, True]
assert data.non_tensor_batch["uid"].tolist() == ["0-0", "0-1", "0-2", "1-0"] and data.meta_info == {"rank": rank}
all_gather_data_proto(empty)
assert empty.batch["x"].tolist() == [0, 1, 2] and empty.non_tensor_batch["uid"].tolist() == ["0-0", "0-1", "0-2"]
try:
    all_gather_data_proto(DataProto.from_dict({["x", "y"][rank]: torch.ones(1)}))
except ProtocolError as error:
    assert "rank 1" in str(error)
else:
    raise AssertionError("columns that differ were accepted")
print("done", rank)
"""


def test_two_processes_of_unequal_rows(tmp_path: Path) -> None:
    """Rows of every rank in rank order, in any dtype, a rank without rows included; refusals are refused by all."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(rank), str(tmp_path / "store")],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=PROGRAM_S)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
