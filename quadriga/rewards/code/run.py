# SPDX-License-Identifier: Apache-2.0
"""The two places where a program runs on its tests: this machine, contained, or a Sandbox Fusion server.

Here a supervisor runs the tests of one problem (`supervisor.py`). A server (github.com/bytedance/SandboxFusion) gets
one POST to `/run_code` a test and contains programs by itself; what it does not limit (output, its network) is in its
documentation. There a call of a function is a program that calls it and prints the result behind a mark.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from select import select
from typing import Any, NamedTuple

from quadriga.descendants import own_folder
from quadriga.errors import RewardError
from quadriga.http_client import HTTPClient
from quadriga.rewards.code import containment
from quadriga.rewards.code.containment import Limits
from quadriga.rewards.code.supervisor import COMMAND, HEADER

# An editable installation is found by the site's start-up files, which the supervisor goes without.
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[3])
_URL = "custom_reward_function.reward_kwargs.code.sandbox_url"
_MARK = "\n---- quadriga result ----\n"
_STATUS = {"Finished": "ok", "Error": "error", "TimeLimitExceeded": "time"}
_QUEUE_S = 60.0  # what the server may take in addition to the program's own time
# An error of the server's own may pass; then it is not the program's.
_MAX_SANDBOX_ERRORS = 3
_MAX_ATTEMPTS = 4


class Case(NamedTuple):
    """One test: what the program is given, and the output that is expected (which it never gets)."""

    given: dict[str, Any]
    expected: Any

    @property
    def is_call(self) -> bool:
        """Whether a function is called; else the program reads its standard input."""
        return "function" in self.given


class Run(NamedTuple):
    """What became of one test."""

    index: int
    # "ok" where the program ended by itself with exit status 0; else "error" (another status), "crash" (a signal), the
    # limit that ended it ("time", "wall", "output", "folder"), or "network".
    status: str
    code: int
    cpu_s: float
    stdout: str
    stderr: str
    result: str
    refused: str = ""  # names of the system calls that containment refused it


@cache
def require_containment() -> None:
    """Check, once a process, that programs can be contained here; RewardError: none runs then."""
    reason = containment.missing()
    if reason:
        fix = "Run programs on a Sandbox Fusion server: custom_reward_function.reward_kwargs.code.sandbox_url."
        raise RewardError(
            "grader code", reason, "a system on which a model's program can be contained", fix
        )


@cache
def can_mount() -> bool:
    """Whether a supervisor can have file systems of its own here, tried once a process; many containers forbid it."""
    with own_folder() as folder:
        command = (
            "import sys; sys.path[:] = sys.argv[2:]; from quadriga.rewards.code import containment as c; "
            "c.mount_memory(sys.argv[1:2], c.Limits())"
        )
        tried = [sys.executable, "-I", "-S", "-c", command, folder, _PACKAGE_FOLDER, *sys.path]
        return subprocess.run(tried, capture_output=True).returncode == 0


def run_cases(
    program: str, cases: Sequence[Case], limits: Limits, *, parallel: int = 1, total_s: float = 8.0
) -> Iterator[Run]:
    """Run a Python program on each test, `parallel` at a time; runs come as they end.

    Closing the iterator ends the rest; tests that have not ended after `total_s` seconds for all of them do not come.
    Raises RewardError: programs cannot be contained here, or the supervisor failed."""
    require_containment()
    deadline = time.monotonic() + total_s
    prefixes = sorted({sys.prefix, sys.base_prefix} - {"/"})
    with own_folder() as folder:
        job = {
            "grader": os.getpid(),
            "program": program,
            "cases": [case.given for case in cases],
            "limits": limits._asdict(),
            "parallel": parallel,
            "folder": folder,
            "is_in_memory": can_mount(),
            # What a program may import from: the interpreter's own folders, and nothing of the run's.
            "path": [
                path
                for path in sys.path
                if path.startswith(tuple(f"{prefix}{os.sep}" for prefix in prefixes))
            ],
            "readable": prefixes,
        }
        with subprocess.Popen(
            [sys.executable, "-I", "-S", "-X", "utf8", "-c", COMMAND, _PACKAGE_FOLDER, *sys.path],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={
                "PATH": "/usr/bin:/bin",
                "LC_ALL": "C.UTF-8",
                "OMP_NUM_THREADS": "1",
                "OPENBLAS_NUM_THREADS": "1",
            },
        ) as process:
            assert process.stdin is not None
            try:
                # Where it has died already, the end of its output, read next, tells.
                with suppress(BrokenPipeError), process.stdin as stream:
                    stream.write(json.dumps(job).encode())
                yield from _runs(process, len(cases), deadline)
            finally:
                # Its children die with it.
                process.kill()


def _runs(process: subprocess.Popen[bytes], num_cases: int, deadline: float) -> Iterator[Run]:
    assert process.stderr is not None
    for num_seen in range(num_cases):
        try:
            index, status, code, cpu_s, *sizes = HEADER.unpack(
                _read(process, HEADER.size, deadline)
            )
            streams = [_read(process, size, deadline).decode("utf-8", "replace") for size in sizes]
        except TimeoutError:
            return
        except EOFError:
            said = process.stderr.read().decode("utf-8", "replace").strip()
            got = f"its end after {num_seen} of {num_cases} tests: {said[-2000:] or 'it said nothing'}"
            raise RewardError(
                "supervisor of a program's tests", got=got, expected="an outcome for each"
            ) from None
        yield Run(index, status.rstrip(b"\0").decode(), code, cpu_s, *streams)


def _read(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytearray:
    """So many bytes of its standard output; TimeoutError at the deadline, EOFError where it ends before."""
    assert process.stdout is not None
    content, num_read = bytearray(size), 0
    view = memoryview(content)
    # The deadline comes first: a supervisor that always has something to say would never let it be seen.
    while num_read < size:
        left_s = deadline - time.monotonic()
        if left_s <= 0 or not select([process.stdout], [], [], left_s)[0]:
            raise TimeoutError
        num_new = os.readv(process.stdout.fileno(), [view[num_read:]])
        if not num_new:
            raise EOFError
        num_read += num_new
    return content


def run_remotely(
    program: str,
    cases: Sequence[Case],
    limits: Limits,
    *,
    url: str,
    language: str = "python",
    parallel: int = 2,
) -> Iterator[Run]:
    """Run the program on each test, on a Sandbox Fusion server; runs come as they end.
    Raises RewardError: the server does not answer, or reports an error of its own each time.
    `cases`: the tests; calls of functions in Python only.
    `limits`: of one test; `time_s` and `memory_megabytes` are sent, the others are the server's.
    `url`: of the server; `/run_code` is added if it is not there.
    `language`: as the server names it.
    `parallel`: requests at the same time."""
    if language != "python" and any(case.is_call for case in cases):
        raise ValueError(
            f"grader code: got function calls in {language!r}, expected them in 'python' only"
        )
    address = url if url.endswith("/run_code") else f"{url.rstrip('/')}/run_code"
    server = HTTPClient(address, RewardError, setting=_URL, use_proxies=True)
    pool = ThreadPoolExecutor(parallel)
    try:
        run_one = partial(pool.submit, _run_one, server, program, limits, language)
        waiting = [run_one(index, case) for index, case in enumerate(cases)]
        for future in as_completed(waiting):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _run_one(
    server: HTTPClient, program: str, limits: Limits, language: str, index: int, case: Case
) -> Run:
    body = {
        "code": _with_call(program, case) if case.is_call else program,
        "stdin": case.given.get("input", ""),
        "language": language,
        "compile_timeout": limits.wall_s,
        "run_timeout": limits.time_s,
        "memory_limit_MB": limits.memory_megabytes,
        "files": {},
        "fetch_files": [],
    }
    reply: dict[str, Any] = {}
    for _ in range(_MAX_SANDBOX_ERRORS):
        reply = server.call_until(
            body, timeout_s=limits.wall_s + limits.time_s + _QUEUE_S, max_attempts=_MAX_ATTEMPTS
        )
        if reply.get("status") != "SandboxError":
            break
    else:
        raise RewardError(
            server.url, got=f"SandboxError: {reply.get('message')}", expected="Success or Failed"
        )
    # The first part that failed, or else the run itself.
    part = reply.get("compile_result")
    if not part or (part.get("status") == "Finished" and part.get("return_code") == 0):
        part = reply.get("run_result") or {"status": "Error", "stderr": "the server ran nothing"}
    code, status = part.get("return_code") or 0, _STATUS.get(str(part.get("status")), "error")
    stdout, _, result = (part.get("stdout") or "").partition(_MARK)
    status, cpu_s = (
        "error" if status == "ok" and code else status,
        part.get("execution_time") or 0.0,
    )
    return Run(index, status, code, cpu_s, stdout, part.get("stderr") or "", result.strip())


def _with_call(program: str, case: Case) -> str:
    name = case.given["function"]
    arguments = json.dumps(case.given["arguments"])
    return (
        f"{program}\nimport json as _json\n"
        f"_function = {name} if {name!r} in globals() else getattr(Solution(), {name!r})\n"
        f"_result = _function(*_json.loads({arguments!r}))\n"
        f"print({_MARK!r} + _json.dumps(_result, default=list))"
    )
