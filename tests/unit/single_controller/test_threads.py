# SPDX-License-Identifier: Apache-2.0
"""The share of the cores that a worker process gets, and that torch really takes it."""

import subprocess
import sys

import pytest

from quadriga.errors import WorkerError
from quadriga.single_controller.resource_pool import share_of_cores


@pytest.mark.parametrize(
    ("cores", "processes", "threads"), [(8, 1, 8), (8, 2, 4), (8, 3, 2), (8, 8, 1), (2, 5, 1), (1, 1, 1)]
)
def test_the_processes_of_a_pool_never_have_more_threads_than_cores_unless_there_are_too_few(cores, processes, threads):
    share = share_of_cores(cores, processes)

    assert share.num_threads == threads
    assert share.num_threads * processes <= max(cores, processes)


def test_a_process_alone_on_its_node_may_spin():
    share = share_of_cores(4, 1)

    assert share.environment() == {"OMP_NUM_THREADS": "4", "MKL_NUM_THREADS": "4"}
    assert share.reason == "4 threads a process: alone on 4 cores"


def test_processes_that_share_a_node_sleep_while_they_wait():
    share = share_of_cores(2, 2)

    assert share.environment() == {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    assert share.reason == (
        "1 thread a process: 2 processes of the pool share 2 cores; "
        "waiting threads sleep, since 2 processes are on the node"
    )


def test_pools_take_turns_so_another_one_changes_the_waiting_and_not_the_threads():
    alone, together = share_of_cores(8, 2), share_of_cores(8, 2, processes_on_node=6)

    assert (alone.num_threads, together.num_threads) == (4, 4)
    assert share_of_cores(8, 1, processes_on_node=2).is_passive
    assert "6 processes are on the node" in together.reason


def test_more_processes_than_cores_are_said():
    assert "3 processes of the pool share 2 cores, which is more than there are" in share_of_cores(2, 3).reason


@pytest.mark.parametrize(("cores", "processes"), [(0, 1), (4, 0)])
def test_a_share_of_nothing_is_an_error(cores, processes):
    with pytest.raises(WorkerError, match=f"got {cores} cores for {processes} processes"):
        share_of_cores(cores, processes)


def test_torch_computes_with_the_share():
    """It does not show what the wait policy does: that is a matter of time on a loaded machine."""
    environment = share_of_cores(2, 2).environment()

    done = subprocess.run(
        [sys.executable, "-c", "import torch; print(torch.get_num_threads())"],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.strip() == "1"
