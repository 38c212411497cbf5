# SPDX-License-Identifier: Apache-2.0
"""Programs (CodeContests, APPS, Codeforces, TACO), run on their tests under limits, or on a Sandbox Fusion server.

The last fenced block of the response is the program; the whole response where there is none. A ground truth is a dict,
or JSON text of one, as the data sets have it:

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                     standard input and output
    {"inputs": [[1, 2], ...], "outputs": [3, ...], "fn_name": "add"}          a call of a function a test

An input of a call is the list of its arguments, or text with one argument in JSON a line; an output is the result, or
its JSON text, or (in APPS) the result in a list of one.

A test passes if the program ends by itself, with exit status 0, and prints (or its function returns) what is expected.
A test that ends at a limit of time, and one that opens a socket, ends the problem: the tests after it are not run and
have not passed.

Besides the score it returns "pass_rate" (share of the tests that passed), "num_tests", and "reason": in words, the
first failure, "" where all passed.
"""

import gc
import json
import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from operator import methodcaller
from typing import Any

from quadriga.rewards.code.containment import Limits
from quadriga.rewards.code.run import Case, Run, run_cases, run_remotely

_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?P<language>[\w+#-]*)[^\n]*\n(?P<program>.*?)(?:^[ \t]*```|\Z)", re.M | re.S
)
_ENDS_PROBLEM = frozenset({"time", "wall", "network"})
LONGEST_REASON = 300
TOLERANCE = 1e-6
_is_close = partial(math.isclose, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
# A limit that a program meets as an error of its own, by the beginning of the last line that it leaves.
_FOLDER = "folder limit: more than {0.folder_megabytes} MB or {0.num_files} files"
_LIMIT_OF_ERROR = {
    "OSError: [Errno 28]": _FOLDER,
    "MemoryError": "memory limit, {0.memory_megabytes} MB",
    "BlockingIOError": "process limit, no process beside its own (fork and clone are refused)",
    "RuntimeError: can't start new thread": "thread limit, {0.num_threads} and their memory",
}


def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    use_partial_credit: bool = True,
    parallel: int = 2,
    total_s: float = 8.0,
    sandbox_url: str | None = None,
    language: str = "python",
    **limits: float,
) -> dict[str, Any]:
    """The share of the tests that pass, or, without partial credit, 1 if all do and 0 if not.
    `parallel`: tests at the same time.
    `total_s`: seconds for all tests together; keep it below reward_model.timeout_s.
    `sandbox_url`: address of a Sandbox Fusion server. None: programs run on this machine, contained.
    `language`: of the programs; other than "python" needs `sandbox_url`.
    `limits`: of one test, the fields of `Limits`.
    Raises ValueError: the ground truth holds no tests, or there is no such option.
    Raises RewardError: programs cannot be contained here, or the server does not answer."""
    known = Limits._fields
    if unknown := [name for name in limits if name not in known]:
        raise ValueError(
            f"grader code: got the options {', '.join(unknown)}, expected limits ({', '.join(known)})"
        )
    checked = Limits(**limits)
    if language != "python" and sandbox_url is None:
        raise ValueError(
            f"grader code: got language {language!r}, expected 'python' where sandbox_url is not set"
        )
    cases = read_cases(ground_truth)
    program = extract_program(solution_str)
    if not program.strip():
        return _graded(0, len(cases), "the response holds no program", use_partial_credit)
    if sandbox_url is None:
        runs = run_cases(program, cases, checked, parallel=parallel, total_s=total_s)
    else:
        runs = run_remotely(
            program, cases, checked, url=sandbox_url, language=language, parallel=parallel
        )
    num_passed, failures = 0, {}
    try:
        for run in runs:
            failure = why_failed(run, cases[run.index], checked)
            num_passed += not failure
            if failure:
                failures[run.index] = failure + (
                    f" (containment refused {run.refused})" if run.refused else ""
                )
            if run.status in _ENDS_PROBLEM or (failure and not use_partial_credit):
                break
        else:
            if num_passed + len(failures) < len(cases):
                failures[len(cases)] = (
                    f"the {total_s:g} s for all {len(cases)} tests were over after {num_passed}"
                )
    finally:
        runs.close()
    first = min(failures, default=-1)
    place = f"test {first + 1} of {len(cases)}: " if 0 <= first < len(cases) else ""
    return _graded(
        num_passed, len(cases), f"{place}{failures[first]}" if failures else "", use_partial_credit
    )


def extract_program(solution_str: str) -> str:
    """The program of a response: its last fenced block, closed or not; the whole response where there is none."""
    blocks = list(_FENCE.finditer(solution_str))
    return blocks[-1]["program"] if blocks else solution_str


def why_failed(run: Run, case: Case, limits: Limits) -> str:
    """In words, why a test has not passed; "" if it has."""
    if run.status != "ok":
        return _ended(run, limits)
    if not case.is_call:
        if is_same_text(run.stdout, case.expected):
            return ""
        return f"wrong answer: got {_short(run.stdout)}, expected {_short(case.expected)}"
    if not run.result:
        return "the program ended before its function returned"
    try:
        result = _read_json(run.result)
    except (ValueError, RecursionError) as error:
        # The program has written there by itself.
        return f"its function's result cannot be read: {_short(run.result)} ({error})"
    if is_same_result(result, case.expected):
        return ""
    return f"wrong answer: got {_short(run.result)}, expected {_short(case.expected)}"


def _ended(run: Run, limits: Limits) -> str:
    lines = run.stderr.strip().splitlines()
    error = lines[-1][-LONGEST_REASON:] if lines else ""
    if run.status == "error":
        for beginning, limit in _LIMIT_OF_ERROR.items():
            if error.startswith(beginning):
                return f"{limit.format(limits)}: {error}"
    reasons = {
        "time": f"time limit: {limits.time_s:g} s of CPU time",
        "wall": f"time limit: {limits.wall_s:g} s by the clock",
        "output": f"output limit: more than {limits.output_megabytes} MB in one stream or file",
        "folder": _FOLDER.format(limits),
        "network": "network: it tried to open a socket and was killed",
        "crash": f"it was ended by signal {-run.code}" + (f": {error}" if error else ""),
    }
    return reasons.get(run.status, f"error: {error or f'exit status {run.code}'}")


def _graded(
    num_passed: int, num_tests: int, reason: str, use_partial_credit: bool
) -> dict[str, Any]:
    share = num_passed / num_tests
    score = share if use_partial_credit else float(num_passed == num_tests)
    return {
        "score": score,
        "pred": None,
        "pass_rate": share,
        "num_tests": num_tests,
        "reason": reason,
    }


def _read_json(text: str) -> Any:
    """The value; ValueError or RecursionError where the text is none that Python reads."""
    was_collecting = gc.isenabled()
    # There are no cycles in it, and to look for them again and again makes millions of empty lists take seconds.
    gc.disable()
    try:
        return json.loads(text)
    finally:
        if was_collecting:
            gc.enable()


def _short(value: Any) -> str:
    text = repr(value[:81] if isinstance(value, str) else value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def read_cases(ground_truth: Any) -> list[Case]:
    """The tests of a problem; ValueError where the ground truth has none of the forms above."""
    tests = ground_truth
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"ground truth: got text that is not JSON ({error}), expected tests as JSON"
            ) from error
    if not isinstance(tests, Mapping) or "inputs" not in tests or "outputs" not in tests:
        got = (
            f"the keys {sorted(map(str, tests))}"
            if isinstance(tests, Mapping)
            else type(tests).__name__
        )
        raise ValueError(f"ground truth: got {got}, expected a dict with 'inputs' and 'outputs'")
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"ground truth: got {len(inputs)} inputs and {len(outputs)} outputs, expected one of each"
        )
    name, pairs = tests.get("fn_name"), zip(inputs, outputs, strict=True)
    if name:
        cases = [
            Case({"function": name, "arguments": _arguments(given)}, output)
            for given, output in pairs
        ]
        try:
            json.dumps([case.given for case in cases])
            json.dumps(outputs, default=methodcaller("tolist"))
        except (TypeError, ValueError, AttributeError, RecursionError) as error:
            got = f"calls that JSON cannot hold ({error})"
            raise ValueError(f"ground truth: got {got}, expected JSON values") from error
        return cases
    return [Case({"input": _text(given)}, _text(output)) for given, output in pairs]


def is_same_text(printed: str, expected: str) -> bool:
    """Whether two outputs are the same, blanks at the ends of lines and empty lines at the end aside. Where the
    expected word is a number with a decimal point, one within 1e-6 of it (absolutely or relatively) is the same."""
    lines, wanted = (text.rstrip().splitlines() for text in (printed, expected))
    if len(lines) != len(wanted):
        return False
    for line, want in zip(lines, wanted, strict=True):
        words = want.split()
        # One word more than is wanted tells enough.
        got = line.split(maxsplit=len(words))
        if got != words and not (len(got) == len(words) and all(map(_is_same_word, got, words))):
            return False
    return True


def is_same_result(result: Any, expected: Any) -> bool:
    """Whether a function's result is the expected one, as `==` in Python; numbers with a fraction within 1e-6."""
    readings = [expected]
    if isinstance(expected, str):
        # Text that is not JSON stands for itself.
        with suppress(ValueError, RecursionError):
            readings.append(_read_json(expected))
    alone = [
        reading[0] for reading in readings if isinstance(reading, Sequence) and len(reading) == 1
    ]
    return any(_is_same_value(result, reading) for reading in readings + alone)


def _is_same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if not any(mark in expected for mark in ".eE"):
        return False
    try:
        return _is_close(float(word), float(expected))
    except ValueError:
        # One of them is a word.
        return False


def _is_same_value(value: Any, expected: Any) -> bool:
    # Not by recursion: lists may lie in lists deeper than Python's stack.
    pairs = [(value, expected)]
    while pairs:
        value, expected = pairs.pop()
        # Arrays and numbers of NumPy, as tables of ground truths may hold them.
        expected = expected.tolist() if hasattr(expected, "tolist") else expected
        if isinstance(expected, list | tuple):
            if not isinstance(value, list) or len(value) != len(expected):
                return False
            pairs += zip(value, expected, strict=True)
        elif isinstance(expected, Mapping):
            keys = {str(key): entry for key, entry in expected.items()}
            if not isinstance(value, Mapping) or value.keys() != keys.keys():
                return False
            pairs += [(value[key], entry) for key, entry in keys.items()]
        elif not _is_same_scalar(value, expected):
            return False
    return True


def _is_same_scalar(value: Any, expected: Any) -> bool:
    if isinstance(value, float) or isinstance(expected, float):
        try:
            return (
                isinstance(value, int | float)
                and isinstance(expected, int | float)
                and _is_close(value, expected)
            )
        except OverflowError:
            # An integer beyond every float.
            return False
    return value == expected


def _text(value: Any) -> str:
    if not isinstance(value, str | list | tuple):
        kind = type(value).__name__
        raise ValueError(
            f"ground truth: got {kind} as a test's input or output, expected text or lines"
        )
    try:
        text = value if isinstance(value, str) else "\n".join(map(str, value))
        text.encode("utf-8", "surrogateescape")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"ground truth: got an input or output that is no text ({error}), expected text"
        ) from error
    return text


def _arguments(given: Any) -> list[Any]:
    if isinstance(given, str):
        try:
            return [json.loads(line) for line in given.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"ground truth: got the arguments {given[:80]!r}, expected JSON, one a line"
            ) from error
    if isinstance(given, list | tuple):
        return list(given)
    raise ValueError(
        f"ground truth: got {type(given).__name__} as a test's arguments, expected a list or JSON text"
    )
