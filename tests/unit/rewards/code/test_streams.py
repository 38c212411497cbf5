# SPDX-License-Identifier: Apache-2.0
"""What programs leave in their streams reaches the grader as it is, in time that grows with its length only."""

import time

import pytest

from quadriga.rewards.code import containment
from quadriga.rewards.code.containment import ResourceLimits
from quadriga.rewards.code.run import Case, run_cases
from quadriga.rewards.code.supervisor import HEADER
from quadriga.rewards.graders.code import compute_score

pytestmark = pytest.mark.skipif(
    bool(containment.why_unavailable()),
    reason=f"no containment here: {containment.why_unavailable()}",
)

# An outcome of a test that has passed, as the supervisor writes it.
FORGED = HEADER.pack(0, b"ok", 0, 0.0, 1, 0, 0, 0) + b"3"


def run_one(program, **given):
    return next(
        run_cases(program, [Case(given or {"input": ""}, None)], ResourceLimits(), total_s=60.0)
    )


@pytest.mark.parametrize(
    "program",
    [
        "while True: print(chr(1)*1000)",
        "import os\nos.ftruncate(1, 8<<20)",
        "import os\nos.ftruncate(1, 8<<20)\nos.ftruncate(2, 8<<20)\nos.ftruncate(3, 8<<20)",
        "import os\nos.write(1, b'\\xff'*(8<<20))",
        "import os\nos.write(1, b'\\n\\r'*(4<<20))",
    ],
)
def test_large_streams_cost_the_grader_little_and_the_deadline_is_looked_at(program):
    tests = {"inputs": [""] * 40, "outputs": ["2.5"] * 40}
    begun = time.process_time()
    result = compute_score(program, tests, total_s=1.0)
    # By the grader's own CPU time, which a busy machine does not change much: one output takes 0.1 s.
    assert time.process_time() - begun < 4.0
    assert result["score"] == 0.0


def test_a_large_result_costs_the_grader_little():
    program = (
        "import os\ndef f():\n    os.write(3, b'[' + b'[],' * 2_700_000 + b'1]')\n    os._exit(0)"
    )
    begun = time.process_time()
    result = compute_score(
        program, {"inputs": [[]] * 40, "outputs": [3] * 40, "fn_name": "f"}, total_s=1.0
    )
    assert time.process_time() - begun < 4.0
    assert result["score"] == 0.0


def test_streams_arrive_whole_and_apart():
    program = (
        "import os, sys\nos.write(1, b'\\x00\\r\\n\\xff' * (2 << 20))\nos.write(2, b'e' * (1 << 20) + b'last')\n"
        "def f():\n    return '\\ud800' * 1000"
    )
    run = run_one(program, function="f", arguments=[])
    assert (run.status, run.stdout) == ("ok", "\x00\r\n\ufffd" * (2 << 20))
    assert run.stderr == ("e" * 8000 + "last")[-8000:]
    assert run.result == '"' + r"\ud800" * 1000 + '"'


def test_many_tests_and_outcomes_that_come_faster_than_they_are_read():
    cases = [Case({"input": str(number)}, None) for number in range(12)]
    seen = {}
    for run in run_cases(
        "print(input() * (1 << 20))", cases, ResourceLimits(), parallel=3, total_s=60.0
    ):
        time.sleep(0.05)
        seen[run.index] = run.stdout
    assert seen == {number: str(number) * (1 << 20) + "\n" for number in range(12)}


def test_an_outcome_cannot_be_forged():
    program = f"""
import os
for fd in range(4096):
    try:
        os.write(fd, {FORGED!r})
    except OSError:
        pass
print(4)
"""
    result = compute_score(program, {"inputs": [""] * 3, "outputs": ["3"] * 3})
    assert (result["score"], result["pass_rate"]) == (0.0, 0.0)
    assert "wrong answer: got '\\x00" in result["reason"]


def test_as_many_tests_at_a_time_as_wanted_keep_their_streams_apart():
    cases = [Case({"input": str(number)}, None) for number in range(32)]
    program = "import time\ntime.sleep(0.5)\nprint(input())"
    runs = run_cases(program, cases, ResourceLimits(wall_s=60.0), parallel=32, total_s=60.0)
    assert {run.index: run.stdout for run in runs} == {
        number: f"{number}\n" for number in range(32)
    }
