# SPDX-License-Identifier: Apache-2.0
"""Tests on a Sandbox Fusion server: a small one of ours that speaks its interface and really runs Python.

Not shown here: the real server's own behaviour.
"""

import subprocess
import sys

import pytest

from quadriga.errors import RewardError
from quadriga.rewards.graders.code import compute_score
from tests.http_server import Handler, serving

SUMS = {"inputs": ["1 2\n", "3 4\n"], "outputs": ["3\n", "7\n"]}


class Fusion(Handler):
    """POST /run_code: the program is run; `server.broken` answers with an error come first."""

    def answer(self, body):
        self.server.bodies.append((self.path, body))
        if self.server.broken:
            self.server.broken -= 1
            self.reply(
                200, {"status": "SandboxError", "message": "no container", "run_result": None}
            )
            return
        try:
            program = [sys.executable, "-c", body["code"]]
            done = subprocess.run(
                program,
                input=body["stdin"],
                capture_output=True,
                text=True,
                timeout=body["run_timeout"],
            )
            result = {"status": "Finished", "execution_time": 0.1, "return_code": done.returncode}
            result |= {"stdout": done.stdout, "stderr": done.stderr}
        except subprocess.TimeoutExpired:
            result = {
                "status": "TimeLimitExceeded",
                "execution_time": body["run_timeout"],
                "return_code": None,
            }
        is_right = result.get("return_code") == 0
        self.reply(
            200,
            {"status": "Success" if is_right else "Failed", "message": "", "run_result": result},
        )


@pytest.fixture
def server():
    with serving(Fusion, bodies=[], broken=0) as server:
        yield server


def test_programs_run_over_there(server):
    result = compute_score(
        "print(sum(map(int, input().split())))", SUMS, sandbox_url=server.url, memory_megabytes=77
    )
    assert result == {"score": 1.0, "pred": None, "pass_rate": 1.0, "num_tests": 2, "reason": ""}
    (path, body), _ = sorted(server.bodies, key=lambda entry: entry[1]["stdin"])
    assert path == "/run_code"
    assert (body["stdin"], body["language"], body["memory_limit_MB"]) == ("1 2\n", "python", 77)
    assert "3" not in body["stdin"] + body["code"]


def test_functions_are_called_over_there(server):
    calls = {"inputs": [[1, 2]], "outputs": [3], "fn_name": "add"}
    for program in (
        "def add(a, b):\n    print(1)\n    return a + b",
        "class Solution:\n    add = lambda s, a, b: a + b",
    ):
        assert compute_score(program, calls, sandbox_url=server.url)["reason"] == ""
    wrong = compute_score("def add(a, b): return 0", calls, sandbox_url=server.url)
    assert wrong["reason"] == "test 1 of 1: wrong answer: got '0', expected 3"
    with pytest.raises(ValueError, match="function calls in 'cpp'"):
        compute_score("x", calls, sandbox_url=server.url, language="cpp")


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        ("1/0", "ZeroDivisionError"),
        ("while True: pass", "time limit: 1 s of CPU time"),
        ("print(8)", "wrong answer"),
    ],
)
def test_failures_say_why(server, program, reason):
    result = compute_score(program, SUMS, sandbox_url=server.url, time_s=1.0, parallel=1)
    assert result["score"] == 0.0
    assert reason in result["reason"]


def test_an_error_of_the_server_is_no_wrong_answer(server):
    server.broken = 2
    assert (
        compute_score("print(sum(map(int, input().split())))", SUMS, sandbox_url=server.url)[
            "score"
        ]
        == 1.0
    )
    server.broken = 99
    with pytest.raises(RewardError, match="SandboxError: no container"):
        compute_score("print(3)", SUMS, sandbox_url=f"{server.url}/run_code/")
