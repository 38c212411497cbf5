# SPDX-License-Identifier: Apache-2.0
"""`all_gather_data_proto` between two real processes on gloo."""

import os
import subprocess
import sys
from pathlib import Path

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
    outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
