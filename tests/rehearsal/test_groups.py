# SPDX-License-Identifier: Apache-2.0
"""Communicators of NCCL that a run makes: few, none for a group of gloo, and one GPU per rank."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.limits import PROGRAM_S

PROGRAM = Path(__file__).with_name("nccl_groups.py")
MOST_COMMUNICATORS = 20
# Groups of one rank are not counted: they have nothing to send, and NCCL makes the communicator of a
# group when it is first used. Megatron-core makes 17 groups, whatever the layout: of those of several
# ranks in its line, those along tp (twice), pp, dp (twice), ep, tp x pp, tp x dp (twice), tp x ep,
# ep x pp and ep's dp, that of the embeddings, and that of the optimizer; of one rank, those along cp
# and the experts' tp, and in the first stage that of the position embeddings.
MOST_GROUPS = 23


def test_communicators_of_each_layout(tmp_path: Path) -> None:
    """Those of the default group, of a layout (or Megatron's), and of rollout groups, on each rank."""
    pytest.importorskip("megatron.core")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        (tmp_path / "port").write_text(str(probe.getsockname()[1]))
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(PROGRAM), str(tmp_path)],
        env=variables,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for rank in range(4):
        result = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert result["splits"] == 0
        assert "No backend type associated with device type cpu" in result["host tensors"]
        numbers = result["communicators"]
        of_rollout = numbers.pop("rollout groups")
        of_megatron = numbers.pop("megatron")
        # Axes with the same ranks share a group: of all, of neighbours, of every other one, and of
        # one rank alone, in all layouts together.
        of_layouts = sum(numbers.values())
        assert of_layouts == 4, numbers
        assert 1 + max(of_layouts, of_megatron) + of_rollout <= MOST_COMMUNICATORS


@pytest.fixture(params=[2, 3], ids=["asynchronous", "Megatron-core"])
def line(request: pytest.FixtureRequest) -> dict[str, list[dict[str, Any]]]:
    """What the ranks of each role of a command line of the page found."""
    if request.param == 3:
        pytest.importorskip("megatron.core")
    variables = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2]), "OMP_NUM_THREADS": "1"}
    variables.pop("CUDA_VISIBLE_DEVICES", None)
    done = subprocess.run(
        # As a module: transformers would take kernels.py of the program's folder for a package.
        [sys.executable, "-m", "tests.rehearsal.line_groups", str(request.param)],
        cwd=Path(__file__).parents[2],
        env=variables,
        capture_output=True,
        text=True,
        timeout=PROGRAM_S,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    # Ray prints the lines of its processes among those of the program.
    [found] = [text for text in done.stdout.splitlines() if text.startswith("{")]
    return json.loads(found)


def test_devices_and_groups_of_a_command_line(line: dict[str, list[dict[str, Any]]]) -> None:
    """All eight GPUs, one for each rank, in the layout of the line, with few communicators."""
    ranks = [rank for role in line.values() for rank in role]
    assert sorted(rank["gpu"] for rank in ranks) == list(range(8))
    assert {rank["device"] for rank in ranks} == {"cuda:0"}
    assert max(rank["communicators"] for rank in ranks) <= MOST_COMMUNICATORS
    assert max(rank["groups"] for rank in ranks) <= MOST_GROUPS
    assert {rank["splits"] for rank in ranks} == {0}
    if "rollout" in line:
        assert [rank["layout"] for rank in line["actor"]] == [
            {"pp": 1, "fsdp": 4, "tp": 1, "ep": 1}
        ] * 4
        # Each of the others generates alone, and weights reach it through the driver.
        assert [rank["communicators"] for rank in line["rollout"]] == [0] * 4
        return
    [role] = line
    assert role == "actor_rollout"
    assert [rank["layout"] for rank in ranks] == [{"pp": 2, "fsdp": 2, "tp": 2, "ep": 2}] * 8
    pairs = [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert [rank["rollout group"] for rank in ranks] == [pairs[rank // 2] for rank in range(8)]
