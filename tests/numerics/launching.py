# SPDX-License-Identifier: Apache-2.0
"""Starts a program in several processes, one for each rank, and waits for them."""

import faulthandler
import gc
import multiprocessing
import os
import random
import runpy
import socket
import sys
import time
from contextlib import ExitStack
from importlib import import_module
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from tests.limits import RANKS_S

REPOSITORY = Path(__file__).parents[2]
LOOK_S = 0.05
# Runs in this process seed the module's own generator, so two processes of pytest would draw the same ports.
RANDOM = random.SystemRandom()
# Imported once for all ranks of all programs; none of it starts a thread.
PRELOADED = [
    __name__,
    "quadriga.workers",
    "quadriga.weight_sync",
    "transformers.models.llama.modeling_llama",
    "transformers.models.qwen2.modeling_qwen2",
]


def run_ranks(program: Path, num_ranks: int, folder: Path, *, num_ports: int = 0) -> None:
    """Run `program RANK FOLDER PORT ...` for each rank. When one fails, the others, who may wait for it, are ended.

    The ranks are forks of a process that has imported what the program does, which takes longer than most programs do;
    that one is a fork of one that has imported torch and the like, for all programs of this process.

    Args:
        program: a Python file.
        num_ranks: how many processes.
        folder: where they read and write; what they print goes there too.
        num_ports: how many ports they need to meet at.

    Raises:
        AssertionError: a process failed, or RANKS_S have passed; with what all of them have printed.
    """
    arguments = [str(folder), *map(str, free_ports(num_ports))]
    logs = [folder / f"rank_{rank}.log" for rank in range(num_ranks)]
    for log in logs:
        log.touch()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    paths = [str(REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])]
    own = {
        "PYTHONPATH": os.pathsep.join(paths),
        "OMP_NUM_THREADS": "1",
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    with pytest.MonkeyPatch.context() as patch:
        # The server keeps the environment in which it starts.
        for name, value in own.items():
            patch.setenv(name, value)
        forkserver.ensure_running()
    ours, theirs = context.Pipe()
    leader = context.Process(
        target=lead_ranks, args=(str(program), arguments, list(map(str, logs)), theirs)
    )
    leader.start()
    theirs.close()
    statuses: list[int | None] = [None] * num_ranks
    try:
        while leader.is_alive() and not ours.poll(LOOK_S):
            pass
        if ours.poll():
            statuses = ours.recv()
    finally:
        # The leader notices, and ends the ranks.
        ours.close()
        leader.join()
    told = "\n".join(f"rank {rank}:\n{log.read_text()}" for rank, log in enumerate(logs))
    assert statuses == [0] * num_ranks, f"statuses {statuses} (None: ended from here)\n{told}"


def lead_ranks(program: str, arguments: list[str], logs: list[str], results: Connection) -> None:
    """Import what a program imports, run it in a fork for each rank, and send the exit statuses of all.

    Ends the ranks when one fails, when RANKS_S have passed, and when nobody awaits the statuses any more.
    """
    with open(logs[0], "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    import_module(".".join(Path(program).relative_to(REPOSITORY).with_suffix("").parts))
    # Nothing that was imported before a fork is garbage. Looking through it would also copy its memory.
    gc.freeze()
    context = multiprocessing.get_context("fork")
    processes = [
        context.Process(target=run_rank, args=(program, [str(rank), *arguments], log))
        for rank, log in enumerate(logs)
    ]
    end = time.monotonic() + RANKS_S
    statuses: list[int | None] = []
    try:
        for process in processes:
            process.start()
        while any(process.is_alive() for process in processes):
            is_over = results.poll(LOOK_S) or time.monotonic() > end
            if is_over or any(process.exitcode for process in processes):
                break
        statuses = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.pid is not None:
                process.kill()
                process.join()
    results.send(statuses)


def run_rank(program: str, arguments: list[str], log: str) -> None:
    """Run a Python file as the main program of this process; what it prints goes into the log."""
    with open(log, "w") as output:
        os.dup2(output.fileno(), 1)
        os.dup2(output.fileno(), 2)
    # A rank that crashes leaves a traceback in its log.
    faulthandler.enable()
    sys.argv = [program, *arguments]
    runpy.run_path(program, run_name="__main__")


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses, and that the system gives to nobody: its own choices, which the connections of the
    processes take, begin at 32768. All are held until the last is found, so that they differ."""
    ports: list[int] = []
    with ExitStack() as held:
        while len(ports) < count:
            port = RANDOM.randint(15_000, 32_000)
            try:
                held.enter_context(socket.create_server(("", port)))
            except OSError:
                continue
            ports.append(port)
    return ports
