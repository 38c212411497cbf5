# SPDX-License-Identifier: Apache-2.0
"""Tests on a Sandbox Fusion server (github.com/bytedance/SandboxFusion): one POST to `/run_code` a test.

The server contains programs; for what it does not (its own limits on output, its network) see its documentation. A
function-call test is sent as a program that calls the function and prints the result behind a mark.
"""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from typing import Any

from quadriga.errors import RewardError
from quadriga.http_client import HTTPClient
from quadriga.rewards.code.cases import Case
from quadriga.rewards.code.containment import Limits
from quadriga.rewards.code.local import Run

_URL = "custom_reward_function.reward_kwargs.code.sandbox_url"
_MARK = "\n---- quadriga result ----\n"
_STATUS = {"Finished": "ok", "Error": "error", "TimeLimitExceeded": "time"}
# What the server may take beside the program's own time.
_QUEUE_S = 60.0
# An error of the server's own may pass; then it is not the program's.
_MAX_SANDBOX_ERRORS = 3


def run_remotely(
    program: str,
    cases: Sequence[Case],
    limits: Limits,
    *,
    url: str,
    language: str = "python",
    parallel: int = 2,
    max_attempts: int = 4,
) -> Iterator[Run]:
    """Run the program on each test, over there; runs come as they end.

    Args:
        program: text in `language`.
        cases: the tests; calls of functions in Python only.
        limits: of one test; `time_s` and `memory_megabytes` are sent, the others are the server's.
        url: of the server; `/run_code` is added if it is not there.
        language: as the server names it.
        parallel: requests at the same time.
        max_attempts: requests for one test.

    Raises:
        RewardError: the server does not answer, or reports an error of its own each time.
        ValueError: calls of functions in another language.
    """
    if language != "python" and any(case.is_call for case in cases):
        raise ValueError(f"grader code: got function calls in {language!r}, expected them in 'python' only")
    address = url if url.endswith("/run_code") else f"{url.rstrip('/')}/run_code"
    server = HTTPClient(address, RewardError, setting=_URL, use_proxies=True)
    pool = ThreadPoolExecutor(parallel)
    try:
        waiting: list[Future[Run]] = [
            pool.submit(_run, server, program, index, case, limits, language, max_attempts)
            for index, case in enumerate(cases)
        ]
        for future in as_completed(waiting):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)


def _run(
    server: HTTPClient, program: str, index: int, case: Case, limits: Limits, language: str, max_attempts: int
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
        reply = server.call_until(body, timeout_s=limits.wall_s + limits.time_s + _QUEUE_S, max_attempts=max_attempts)
        if reply.get("status") != "SandboxError":
            break
    else:
        raise RewardError(server.url, got=f"SandboxError: {reply.get('message')}", expected="Success or Failed")
    for part in (reply.get("compile_result"), reply.get("run_result")):
        if part and (part.get("status") != "Finished" or part.get("return_code") != 0):
            return _as_run(index, part)
    return _as_run(index, reply.get("run_result") or {"status": "Error", "stderr": "the server ran nothing"})


def _as_run(index: int, part: dict[str, Any]) -> Run:
    code = part.get("return_code")
    status = _STATUS.get(str(part.get("status")), "error")
    if status == "ok" and code:
        status = "error"
    stdout, _, result = (part.get("stdout") or "").partition(_MARK)
    return Run(
        index, status, code or 0, part.get("execution_time") or 0.0, stdout, part.get("stderr") or "", result.strip()
    )


def _with_call(program: str, case: Case) -> str:
    name = case.given["function"]
    arguments = json.dumps(case.given["arguments"])
    return "\n".join(
        [
            program,
            "import json as _json",
            f"_function = {name} if {name!r} in globals() else getattr(Solution(), {name!r})",
            f"_result = _function(*_json.loads({arguments!r}))",
            f"print({_MARK!r} + _json.dumps(_result, default=list))",
        ]
    )
