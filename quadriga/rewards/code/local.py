# SPDX-License-Identifier: Apache-2.0
"""Tests on this machine: starts the supervisor of one problem, and reads what became of each test."""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from functools import cache
from pathlib import Path
from select import select
from typing import Any, NamedTuple

from quadriga.errors import RewardError
from quadriga.rewards.code import containment
from quadriga.rewards.code.cases import Case
from quadriga.rewards.code.containment import Limits
from quadriga.rewards.code.supervisor import COMMAND

# An editable installation is found by the site's start-up files, which the supervisor goes without.
_OWN_FOLDER = str(Path(__file__).resolve().parents[3])


class Run(NamedTuple):
    """What became of one test.

    `status` is "ok" where the program ended by itself with exit status 0; else "error" (another status), "crash" (a
    signal), the limit that ended it ("time", "wall", "output", "folder"), "network", or "unfinished" (the problem's
    time was up).
    """

    index: int
    status: str
    code: int
    cpu_s: float
    stdout: str
    stderr: str
    result: str


UNFINISHED = Run(-1, "unfinished", 0, 0.0, "", "", "")


@cache
def require_containment() -> None:
    """Check, once a process, that programs can be contained here.

    Raises:
        RewardError: they cannot; no program runs then.
    """
    reason = containment.missing()
    if reason:
        raise RewardError(
            "grader code",
            got=reason,
            expected="a system on which a model's program can be contained",
            fix="Run programs on a Sandbox Fusion server: custom_reward_function.reward_kwargs.code.sandbox_url.",
        )


def run_cases(
    program: str, cases: Sequence[Case], limits: Limits, *, parallel: int = 1, total_s: float = 8.0
) -> Iterator[Run]:
    """Run the program on each test; runs come as they end, and closing the iterator ends the rest.

    Args:
        program: Python text.
        cases: the tests.
        limits: of one test.
        parallel: tests at the same time.
        total_s: seconds for all of them; the ones that have not ended by then are missing from what comes.

    Raises:
        RewardError: programs cannot be contained here, or the supervisor failed.
    """
    require_containment()
    deadline = time.monotonic() + total_s
    prefixes = sorted({sys.prefix, sys.base_prefix} - {"/"})
    with tempfile.TemporaryDirectory(prefix="quadriga-code-") as folder:
        os.chmod(folder, 0o711)
        job = {
            "program": program,
            "cases": [case.given for case in cases],
            "limits": asdict(limits),
            "parallel": parallel,
            "folder": folder,
            # What a program may import from: the interpreter's own folders, and nothing of the run's.
            "path": [path for path in sys.path if path.startswith(tuple(f"{prefix}{os.sep}" for prefix in prefixes))],
            "readable": prefixes,
        }
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", COMMAND, _OWN_FOLDER, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={"PATH": "/usr/bin:/bin", "LC_ALL": "C.UTF-8", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        ) as process:
            try:
                _send(process, job)
                yield from _runs(process, len(cases), deadline)
            finally:
                # Its children die with it.
                process.kill()


def _send(process: subprocess.Popen[bytes], job: dict[str, Any]) -> None:
    assert process.stdin is not None
    try:
        with process.stdin as stream:
            stream.write(json.dumps(job).encode())
    except BrokenPipeError:
        # It has died; the end of its output, read next, tells.
        return


def _runs(process: subprocess.Popen[bytes], num_cases: int, deadline: float) -> Iterator[Run]:
    assert process.stdout is not None and process.stderr is not None
    num_seen, rest, fd = 0, b"", process.stdout.fileno()
    while num_seen < num_cases:
        if not select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return
        block = os.read(fd, 1 << 20)
        if not block:
            said = process.stderr.read().decode("utf-8", "replace").strip()
            raise RewardError(
                "supervisor of a program's tests",
                got=f"its end after {num_seen} of {num_cases} tests: {said[-2000:] or 'it said nothing'}",
                expected="an outcome for each",
            )
        *lines, rest = (rest + block).split(b"\n")
        for line in lines:
            num_seen += 1
            yield Run(**json.loads(line))
