# SPDX-License-Identifier: Apache-2.0
"""Starts a program in several processes, one for each rank, and waits for them."""

import os
import random
import socket
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]
LOOK_S = 0.1


def run_ranks(program: Path, num_ranks: int, folder: Path, *, num_ports: int = 0, limit_s: float = 900) -> None:
    """Run `program RANK FOLDER PORT ...` for each rank. When one fails, the others, who may wait for it, are ended.

    Args:
        program: a Python file.
        num_ranks: how many processes.
        folder: where they read and write; what they print goes there too.
        num_ports: how many ports they need to meet at.
        limit_s: seconds for all of them.

    Raises:
        AssertionError: a process failed, or time is up; with what all of them have printed.
    """
    arguments = [str(folder), *map(str, free_ports(num_ports))]
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    logs = [folder / f"rank_{rank}.log" for rank in range(num_ranks)]
    processes = []
    for rank, log in enumerate(logs):
        with log.open("w") as output:
            command = [sys.executable, str(program), str(rank), *arguments]
            processes.append(subprocess.Popen(command, env=os.environ | own, stdout=output, stderr=output))
    end = time.monotonic() + limit_s
    try:
        while any(process.poll() is None for process in processes):
            if any(process.returncode for process in processes) or time.monotonic() > end:
                break
            time.sleep(LOOK_S)
        statuses = [process.returncode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    told = "\n".join(f"rank {rank}:\n{log.read_text()}" for rank, log in enumerate(logs))
    assert statuses == [0] * num_ranks, f"statuses {statuses} (None: ended from here)\n{told}"


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses, and that the system gives to nobody: its own choices, which the connections of the
    processes take, begin at 32768. All are held until the last is found, so that they differ."""
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port = random.randint(15_000, 32_000)
            try:
                held.enter_context(socket.create_server(("localhost", port)))
            except OSError:
                continue
            ports.append(port)
    return ports
