# SPDX-License-Identifier: Apache-2.0
"""Runs a program on its tests: contained on this machine, or on a Sandbox Fusion server.

On this machine a supervisor runs the tests of one problem (`supervisor.py`).

A server (github.com/bytedance/SandboxFusion) gets one POST to `/run_code` per test and contains
programs itself. It does not limit everything, such as output and the use of the network: see its
documentation. If a test calls a function, the call is appended to the program, which prints the
result after a mark.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import suppress
from functools import cache
from pathlib import Path
from select import select
from typing import Any, NamedTuple

from quadriga.descendants import own_folder
from quadriga.errors import RewardError
from quadriga.http_client import HTTPClient
from quadriga.rewards.code import containment
from quadriga.rewards.code.containment import ResourceLimits
from quadriga.rewards.code.supervisor import COMMAND, HEADER

# Part of the supervisor's import path. The supervisor starts without the site's start-up files,
# which would find this package in an editable installation.
_PACKAGE_FOLDER = str(Path(__file__).resolve().parents[3])
_URL = "custom_reward_function.reward_kwargs.code.sandbox_url"
_MARK = "\n---- quadriga result ----\n"
# Status of a run, as the server calls it -> `CaseRun.status`.
_STATUS_OF_SERVER = {"Finished": "ok", "Error": "error", "TimeLimitExceeded": "time"}
_MAX_QUEUE_S = 60.0  # time that a request may wait at the server before its program runs
# The server may report an error of its own, which may be temporary. After so many, a run fails.
_MAX_SANDBOX_ERRORS = 3
_MAX_ATTEMPTS = 4  # requests for each try, if the server does not answer
_ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "LC_ALL": "C.UTF-8",
    "OMP_NUM_THREADS": "1",
    "OPENBLAS_NUM_THREADS": "1",
}


class Case(NamedTuple):
    """A test of a program.

    Attributes:
        test_input: input of the test: {"input": text} for standard input, or {"function": name,
            "arguments": list} for a call.
        expected: the right output or result. The program does not get it.
    """

    test_input: dict[str, Any]
    expected: Any

    @property
    def is_call(self) -> bool:
        """Whether the test calls a function. Otherwise it is about standard input and output."""
        return "function" in self.test_input


class CaseRun(NamedTuple):
    """The outcome of running a program on one test, before its output is compared.

    Attributes:
        index: position of the test.
        status: "ok" if the program ended by itself with exit status 0; else "error" (another exit
            status), "crash" (a signal), "network" (it was killed because it opened a socket), or
            the limit that ended it ("time", "wall", "output", "folder").
        code: exit status. If a signal ended the program, the signal's number, negated.
        cpu_s: CPU time in seconds.
        stdout: the program's standard output.
        stderr: the program's standard error.
        result: result of the function that was called, as JSON; "" if there is none.
        refused: names of the system calls that containment refused, separated by commas.
    """

    index: int
    status: str
    code: int
    cpu_s: float
    stdout: str
    stderr: str
    result: str
    refused: str = ""


@cache
def require_containment() -> None:
    """Raise a RewardError if programs cannot be contained here. The check runs once per process."""
    reason = containment.why_unavailable()
    if reason:
        raise RewardError(
            "grader code",
            got=reason,
            expected="a system on which a model's program can be contained",
            fix=f"Run programs on a Sandbox Fusion server: {_URL}.",
        )


@cache
def can_mount() -> bool:
    """Whether a supervisor can mount file systems here, which many containers forbid.

    This is tried once per process, in a child process: a failed attempt may leave the child in a
    new user namespace.
    """
    with own_folder() as folder:
        code = (
            "import sys; sys.path[:] = sys.argv[2:]; "
            "from quadriga.rewards.code import containment as c; "
            "c.mount_memory_file_systems(sys.argv[1:2], c.ResourceLimits())"
        )
        command = [sys.executable, "-I", "-S", "-c", code, folder, _PACKAGE_FOLDER, *sys.path]
        return subprocess.run(command, capture_output=True, env=_ENVIRONMENT).returncode == 0


def run_cases(
    program: str,
    cases: Sequence[Case],
    limits: ResourceLimits,
    *,
    parallel: int = 1,
    total_s: float = 8.0,
) -> Iterator[CaseRun]:
    """Run a Python program on each test, contained on this machine.

    Args:
        program: text of the program.
        cases: the tests.
        limits: limits of one test.
        parallel: number of tests to run at the same time.
        total_s: seconds for all tests together. Tests that have not ended by then are left out.

    Returns:
        Iterator over the runs, in the order in which they end. Closing it ends the tests that are
        still running.

    Raises:
        RewardError: programs cannot be contained here, or the supervisor failed.
    """
    require_containment()
    deadline = time.monotonic() + total_s
    # The program may import what is in the interpreter's own folders, but no other code of the run.
    # A prefix "/" would make every file readable.
    prefixes = sorted({sys.prefix, sys.base_prefix} - {"/"})
    inside_prefix = tuple(f"{prefix}{os.sep}" for prefix in prefixes)
    command = [sys.executable, "-I", "-S", "-X", "utf8", "-c", COMMAND, _PACKAGE_FOLDER, *sys.path]
    with own_folder() as folder:
        job = {
            "grader": os.getpid(),
            "program": program,
            "cases": [case.test_input for case in cases],
            "limits": limits._asdict(),
            "parallel": parallel,
            "folder": folder,
            "is_in_memory": can_mount(),
            "path": [path for path in sys.path if path.startswith(inside_prefix)],
            "readable": prefixes,
        }
        with subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=_ENVIRONMENT,
        ) as process:
            assert process.stdin is not None
            try:
                # If the supervisor has died already, `_read_runs` reports it.
                with suppress(BrokenPipeError), process.stdin as stream:
                    stream.write(json.dumps(job).encode())
                yield from _read_runs(process, len(cases), deadline)
            finally:
                # The kernel kills the supervisor's children too.
                process.kill()


def _read_runs(
    process: subprocess.Popen[bytes], num_cases: int, deadline: float
) -> Iterator[CaseRun]:
    """Read the supervisor's reports, one per test, until the deadline.

    Args:
        process: the supervisor.
        num_cases: number of tests.
        deadline: time at which to stop, by `time.monotonic`.

    Raises:
        RewardError: the supervisor ended before it had reported all tests.
    """
    assert process.stderr is not None
    for num_read in range(num_cases):
        try:
            header = _read_exactly(process, HEADER.size, deadline)
            # `sizes` are the bytes of standard output, standard error, result and refused calls.
            index, status, code, cpu_s, *sizes = HEADER.unpack(header)
            streams = [
                _read_exactly(process, size, deadline).decode("utf-8", "replace") for size in sizes
            ]
        except TimeoutError:
            return
        except EOFError:
            output = process.stderr.read().decode("utf-8", "replace").strip()
            output = output[-2000:] or "it printed nothing"
            raise RewardError(
                "supervisor of a program's tests",
                got=f"its end after {num_read} of {num_cases} tests: {output}",
                expected="an outcome for each test",
            ) from None
        yield CaseRun(index, status.rstrip(b"\0").decode(), code, cpu_s, *streams)


def _read_exactly(process: subprocess.Popen[bytes], size: int, deadline: float) -> bytearray:
    """Read exactly `size` bytes of a process's standard output.

    Raises:
        TimeoutError: the deadline has passed.
        EOFError: the output has fewer bytes.
    """
    assert process.stdout is not None
    content = bytearray(size)
    view = memoryview(content)
    num_read = 0
    while num_read < size:
        # Checked before each read: output that is always ready must not outlast the deadline.
        remaining_s = deadline - time.monotonic()
        if remaining_s <= 0 or not select([process.stdout], [], [], remaining_s)[0]:
            raise TimeoutError
        num_new = os.readv(process.stdout.fileno(), [view[num_read:]])
        if not num_new:
            raise EOFError
        num_read += num_new
    return content


def run_remotely(
    program: str,
    cases: Sequence[Case],
    limits: ResourceLimits,
    *,
    url: str,
    language: str,
    parallel: int,
) -> Iterator[CaseRun]:
    """Run a program on each test, on a Sandbox Fusion server.

    Args:
        program: text of the program.
        cases: the tests. Tests that call a function are for Python only.
        limits: limits of one test. The server gets `time_s`, `wall_s` (to compile) and
            `memory_megabytes`; for everything else it has its own limits.
        url: address of the server; `/run_code` is added if it is missing.
        language: language of the program, as the server calls it.
        parallel: number of requests at the same time.

    Returns:
        Iterator over the runs, in the order in which they end.

    Raises:
        ValueError: a test calls a function in another language than Python.
        RewardError: the server does not answer, or reports an error of its own each time.
    """
    if language != "python" and any(case.is_call for case in cases):
        raise ValueError(
            f"grader code: got function calls in {language!r}, expected them in 'python' only"
        )
    address = f"{url.rstrip('/').removesuffix('/run_code')}/run_code"
    server = HTTPClient(address, RewardError, setting=_URL, use_proxies=True)
    pool = ThreadPoolExecutor(parallel)
    try:
        futures = [
            pool.submit(_run_remote_case, server, program, limits, language, index, case)
            for index, case in enumerate(cases)
        ]
        for future in as_completed(futures):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _run_remote_case(
    server: HTTPClient, program: str, limits: ResourceLimits, language: str, index: int, case: Case
) -> CaseRun:
    """Run a program on one test, on the server.

    Args:
        server: the server's `/run_code`.
        program: text of the program.
        limits: limits of the test.
        language: language of the program.
        index: position of the test.
        case: the test.

    Returns:
        How the program ran. A failed compilation counts as the run.

    Raises:
        RewardError: the server does not answer, or reports an error of its own each time.
    """
    # The server measures both timeouts by the clock. A run gets `time_s`, which is its CPU time on
    # this machine; compiling, which a test of Python hardly needs, gets the longer `wall_s`.
    body = {
        "code": _append_call(program, case) if case.is_call else program,
        "stdin": case.test_input.get("input", ""),
        "language": language,
        "compile_timeout": limits.wall_s,
        "run_timeout": limits.time_s,
        "memory_limit_MB": limits.memory_megabytes,
        "files": {},
        "fetch_files": [],
    }
    # Time to compile, to run, and to wait for a free place at the server.
    timeout_s = limits.wall_s + limits.time_s + _MAX_QUEUE_S
    reply = {}
    for _ in range(_MAX_SANDBOX_ERRORS):
        reply = server.call_until(body, timeout_s=timeout_s, max_attempts=_MAX_ATTEMPTS)
        if reply.get("status") != "SandboxError":
            break
    else:
        raise RewardError(
            server.url, got=f"SandboxError: {reply.get('message')}", expected="Success or Failed"
        )

    # If the compilation failed, its outcome counts, else the outcome of the run.
    step = reply.get("compile_result")
    if not step or (step.get("status") == "Finished" and step.get("return_code") == 0):
        step = reply.get("run_result") or {"status": "Error", "stderr": "the server ran nothing"}
    code = step.get("return_code") or 0
    # The server calls a run "Finished" whatever the exit status is.
    status = _STATUS_OF_SERVER.get(str(step.get("status")), "error")
    if status == "ok" and code:
        status = "error"
    # The appended call prints its result after the mark.
    stdout, _, result = (step.get("stdout") or "").partition(_MARK)
    return CaseRun(
        index=index,
        status=status,
        code=code,
        cpu_s=step.get("execution_time") or 0.0,
        stdout=stdout,
        stderr=step.get("stderr") or "",
        result=result.strip(),
    )


def _append_call(program: str, case: Case) -> str:
    """Append a call of the test's function to a program. It prints the result after `_MARK`.

    The function is one of the program's, or a method of its class `Solution`. The result is JSON.
    """
    name = case.test_input["function"]
    arguments = json.dumps(case.test_input["arguments"])
    return (
        f"{program}\nimport json as _json\n"
        f"_function = {name} if {name!r} in globals() else getattr(Solution(), {name!r})\n"
        f"_result = _function(*_json.loads({arguments!r}))\n"
        f"print({_MARK!r} + _json.dumps(_result, default=list))"
    )
