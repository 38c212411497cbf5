# SPDX-License-Identifier: Apache-2.0
"""Ordinary programs on their tests; hostile ones are in tests/unit/rewards/code."""

import pytest

from quadriga.rewards.code import containment
from quadriga.rewards.graders.code import compute_score, extract_program

pytestmark = pytest.mark.skipif(
    bool(containment.why_unavailable()),
    reason=f"no containment here: {containment.why_unavailable()}",
)

SUMS = {"inputs": ["1 2\n", "3 4\n", "-1 1\n"], "outputs": ["3\n", "7\n", "0\n"]}
CALLS = {"inputs": [[1, 2], [3, 4]], "outputs": [3, [7]], "fn_name": "add"}


@pytest.mark.parametrize(
    ("response", "program"),
    [
        ("```python\nprint(1)\n```", "print(1)\n"),
        ("First\n```python\nx\n```\nno:\n```py\ny\n```\ndone", "y\n"),
        ("```\nz\n```", "z\n"),
        ("cut off\n```python\nprint(", "print("),
        ("print(2)", "print(2)"),
        ("", ""),
    ],
)
def test_the_last_block_is_the_program(response, program):
    assert extract_program(response) == program


@pytest.mark.parametrize(
    "program",
    [
        "a, b = map(int, input().split())\nprint(a + b)",
        "import sys\nprint(sum(map(int, sys.stdin.read().split())))",
        "import sys\nsys.stdout.buffer.write(str(sum(map(int, sys.stdin.buffer.readline().split()))).encode())",
        "print(sum(map(int, open(0).read().split())))",
        "print(sum(map(int, open('/dev/stdin').read().split())))",
        "def main():\n    print(sum(map(int, input().split())))\nif __name__ == '__main__':\n    main()",
        "import atexit\nout = []\natexit.register(lambda: print(*out))\nout.append(sum(map(int, input().split())))",
        "import sys, threading\nthreading.stack_size(1 << 26)\nsys.setrecursionlimit(10**6)\n"
        "def depth(n):\n    return n and depth(n - 1) + 1\n"
        "def main():\n    print(sum(map(int, input().split())) + depth(20000) - 20000)\n"
        "threading.Thread(target=main).start()",
        "from dataclasses import dataclass\n@dataclass\nclass P:\n    a: int\n    b: int\n"
        "p = P(*map(int, input().split()))\nprint(p.a + p.b)",
        "import asyncio\nasync def main():\n    print(sum(map(int, input().split())))\nasyncio.run(main())",
        "import numpy as np\nprint(np.array(input().split(), dtype=int).sum())",
        "import sys\nprint(sum(map(int, input().split())))\nsys.exit(0)",
    ],
)
def test_programs_as_people_write_them_pass(program):
    result = compute_score(f"```python\n{program}\n```", SUMS)
    assert result == {"score": 1.0, "pred": None, "pass_rate": 1.0, "num_tests": 3, "reason": ""}


@pytest.mark.parametrize(
    "program",
    [
        "def add(a, b):\n    print('noise')\n    return a + b",
        "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b",
        "import numpy\nadd = lambda a, b: numpy.int64(a + b)",
    ],
)
def test_calls_of_functions_pass(program):
    assert compute_score(program, CALLS)["score"] == 1.0


@pytest.mark.parametrize(
    ("program", "reason"),
    [
        (
            "def sub(a, b): ...",
            "NameError: the program has neither a function 'add' nor a class Solution",
        ),
        ("def add(a, b): return a - b", "wrong answer: got '-1', expected 3"),
        ("import sys\nsys.exit(0)", "the program ended before its function returned"),
        ("import os\nos.write(3, b'{')\nos._exit(0)", "result cannot be read: '{'"),
        ("import os\nos.write(3, b'[' * 100000)\nos._exit(0)", "result cannot be read"),
        ("def add(a, b): return object()", "TypeError"),
    ],
)
def test_calls_that_fail_say_why(program, reason):
    result = compute_score(program, CALLS)
    assert result["score"] == 0.0
    assert reason in result["reason"]
    assert result["reason"].startswith("test 1 of 2")


@pytest.mark.parametrize(
    ("result", "reason"),
    [
        ("10**400", "wrong answer: got '1000"),
        ("10**5000", "ValueError: Exceeds the limit"),
        ("[float('nan'), float('inf')]", "wrong answer: got '[NaN, Infinity]'"),
        ("cycle", "ValueError: Circular reference"),
        ("deep", "RecursionError"),
        ("1j", "TypeError"),
        ("b'2.5'", "wrong answer: got '[50, 46, 53]'"),
        ("Strange()", "ZeroDivisionError"),
        ("'\\ud800'", "wrong answer: got "),
        ("{(1, 2): 3}", "TypeError: keys must be"),
        ("{'a'} | {1}", "TypeError"),
        ("sys.stdout", "UnsupportedOperation"),
        ("print", "TypeError"),
    ],
)
def test_strange_results_are_wrong_and_no_error_of_the_grader(result, reason):
    program = (
        "import sys\nclass Strange:\n    __repr__ = __str__ = __iter__ = lambda self: 1 / 0 if sys else 1\n"
        "cycle, deep = [], []\ncycle.append(cycle)\nfor _ in range(100_000):\n    deep = [deep]\n"
        f"def f():\n    return {result}"
    )
    graded = compute_score(program, {"inputs": [[]], "outputs": [2.5], "fn_name": "f"})
    assert graded["score"] == 0.0
    assert reason in graded["reason"]


def test_partial_credit_and_none():
    program = "print(abs(sum(map(int, input().split()))) or 1)"
    result = compute_score(program, SUMS)
    assert (result["score"], result["pass_rate"]) == (2 / 3, 2 / 3)
    assert result["reason"] == "test 3 of 3: wrong answer: got '1\\n', expected '0\\n'"
    assert compute_score(program, SUMS, use_partial_credit=False)["score"] == 0.0


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ("", "the response holds no program"),
        ("```python\n```", "the response holds no program"),
        ("def f(:", "SyntaxError"),
        ("I cannot do this.", "SyntaxError"),
        ("print('\\udcff')", "wrong answer"),
        ("x = 1 +\x00 2", "null bytes"),
        ("raise SystemExit(3)", "exit status 3"),
    ],
)
def test_no_program_is_a_wrong_answer(response, reason):
    result = compute_score(response, SUMS)
    assert result["score"] == 0.0
    assert reason in result["reason"]


def test_options_that_do_not_exist_are_named():
    with pytest.raises(ValueError, match=r"options memory_mb, expected limits \(time_s"):
        compute_score("x", SUMS, memory_mb=5)
    with pytest.raises(ValueError, match="got language 'cpp'"):
        compute_score("x", SUMS, language="cpp")
