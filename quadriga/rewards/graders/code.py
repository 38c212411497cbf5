# SPDX-License-Identifier: Apache-2.0
"""Grades programs (CodeContests, APPS, Codeforces, TACO) by their tests, run here or on a server.

The program is the last fenced block of the response, or the whole response if there is none. A
ground truth is a dict, or text of one in JSON, as the data sets have it:

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}             standard input and output
    {"inputs": [[1, 2], ...], "outputs": [3, ...], "fn_name": "add"}  a call of a function per test

The input of a call is the list of its arguments, or text with one argument in JSON per line. The
output of a call is the result, its text in JSON, or (in APPS) a list with the result alone.

A test passes if the program ends by itself, with exit status 0, and prints (or its function
returns) what is expected. After a test in which the program reaches a time limit or opens a socket,
no further test is run; the remaining tests count as not passed.

In addition to the score, the result has "pass_rate" (share of the tests that passed), "num_tests",
and "reason", which describes the first failure ("" if all passed).
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

from quadriga.rewards.code.containment import ResourceLimits
from quadriga.rewards.code.run import Case, CaseRun, run_cases, run_remotely

_FENCE = re.compile(
    r"^[ \t]*```[ \t]*(?P<language>[\w+#-]*)[^\n]*\n(?P<program>.*?)(?:^[ \t]*```|\Z)", re.M | re.S
)
# Values of `CaseRun.status` after which no further test of the problem is run.
_ENDS_PROBLEM = frozenset({"time", "wall", "network"})
LONGEST_REASON = 300
TOLERANCE = 1e-6
_is_close = partial(math.isclose, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
_MAX_SHOWN_CHARS = 80
# Some limits appear as an exception in the program. Beginning of the last line of the program's
# standard error -> description of the limit, in which {0} stands for the `ResourceLimits`:
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
    """Score a program by the share of the tests that pass.

    Args:
        solution_str: the response, with the program.
        ground_truth: the tests, in one of the forms at the top of this file.
        extra_info: not used.
        use_partial_credit: whether the score is the share of tests that pass. Otherwise it is 1 if
            all tests pass and 0 if not.
        parallel: number of tests to run at the same time.
        total_s: seconds for all tests together; keep it below `reward_model.timeout_s`.
        sandbox_url: address of a Sandbox Fusion server. None: programs run contained on this
            machine.
        language: language of the programs; one other than "python" needs `sandbox_url`.
        **limits: limits of one test, by the names of the fields of `ResourceLimits`.

    Returns:
        "score", "pred" (None), "pass_rate", "num_tests" and "reason".

    Raises:
        ValueError: the ground truth has no tests, or an option is unknown or needs a server.
        RewardError: programs cannot be contained here, or the server does not answer.
    """
    unknown = [name for name in limits if name not in ResourceLimits._fields]
    if unknown:
        raise ValueError(
            f"grader code: got the options {', '.join(unknown)}, "
            f"expected limits ({', '.join(ResourceLimits._fields)})"
        )
    if language != "python" and sandbox_url is None:
        raise ValueError(
            f"grader code: got language {language!r}, "
            "expected 'python' where sandbox_url is not set"
        )
    test_limits = ResourceLimits(**limits)
    cases = read_cases(ground_truth)
    program = extract_program(solution_str)
    if not program.strip():
        return _make_result(0, len(cases), "the response holds no program", use_partial_credit)
    # Both functions return an iterator, so that tests which have not begun can be left out.
    if sandbox_url is None:
        runs = run_cases(program, cases, test_limits, parallel=parallel, total_s=total_s)
    else:
        runs = run_remotely(
            program, cases, test_limits, url=sandbox_url, language=language, parallel=parallel
        )

    # Why tests have failed, by the number of the test. The lowest number is reported.
    failures: dict[int, str] = {}
    num_passed = 0
    try:
        for run in runs:
            failure = why_failed(run, cases[run.index], test_limits)
            if not failure:
                num_passed += 1
            else:
                if run.refused:
                    failure += f" (containment refused {run.refused})"
                failures[run.index] = failure
            if run.status in _ENDS_PROBLEM or (failure and not use_partial_credit):
                break
        else:
            # No `break`: all runs were read. If some are missing, the time for all tests was over.
            if num_passed + len(failures) < len(cases):
                # Stored under a number beyond all tests, so that the failure of a test comes first.
                failures[len(cases)] = (
                    f"the {total_s:g} s for all {len(cases)} tests were over after {num_passed}"
                )
    finally:
        # Ends the tests that are still running.
        runs.close()
    reason = ""
    if failures:
        first = min(failures)
        reason = failures[first]
        if first < len(cases):
            reason = f"test {first + 1} of {len(cases)}: {reason}"
    return _make_result(num_passed, len(cases), reason, use_partial_credit)


def extract_program(solution_str: str) -> str:
    """Take the program from a response: the last fenced block, closed or not; without one, all."""
    blocks = list(_FENCE.finditer(solution_str))
    return blocks[-1]["program"] if blocks else solution_str


def why_failed(run: CaseRun, case: Case, limits: ResourceLimits) -> str:
    """Say why a test has not passed.

    Args:
        run: how the program ran on the test.
        case: the test.
        limits: limits of the test.

    Returns:
        The reason; "" if the test has passed.
    """
    if run.status != "ok":
        return _describe_end(run, limits)
    if not case.is_call:
        if is_same_text(run.stdout, case.expected):
            return ""
        return f"wrong answer: got {_shorten(run.stdout)}, expected {_shorten(case.expected)}"
    if not run.result:
        return "the program ended before its function returned"
    try:
        result = _read_json(run.result)
    except (ValueError, RecursionError) as error:
        # The program may have written to the descriptor for the result itself.
        return f"its function's result cannot be read: {_shorten(run.result)} ({error})"
    if is_same_result(result, case.expected):
        return ""
    return f"wrong answer: got {_shorten(run.result)}, expected {_shorten(case.expected)}"


def _describe_end(run: CaseRun, limits: ResourceLimits) -> str:
    """Say why a program did not end by itself with exit status 0.

    Args:
        run: how the program ran on the test; the status is not "ok".
        limits: limits of the test.
    """
    # The last line of the standard error, where Python writes an uncaught exception.
    lines = run.stderr.strip().splitlines()
    error = lines[-1][-LONGEST_REASON:] if lines else ""
    if run.status == "error":
        for beginning, limit in _LIMIT_OF_ERROR.items():
            if error.startswith(beginning):
                return f"{limit.format(limits)}: {error}"
    if run.status == "crash":
        reason = f"it was ended by signal {-run.code}"
        return f"{reason}: {error}" if error else reason
    reasons = {
        "time": f"time limit: {limits.time_s:g} s of CPU time",
        "wall": f"time limit: {limits.wall_s:g} s by the clock",
        "output": f"output limit: more than {limits.output_megabytes} MB in one stream or file",
        "folder": _FOLDER.format(limits),
        "network": "network: it tried to open a socket and was killed",
    }
    return reasons.get(run.status, f"error: {error or f'exit status {run.code}'}")


def _make_result(
    num_passed: int, num_tests: int, reason: str, use_partial_credit: bool
) -> dict[str, Any]:
    """Make the result of `compute_score` from the number of tests that passed."""
    share = num_passed / num_tests
    return {
        "score": share if use_partial_credit else float(num_passed == num_tests),
        "pred": None,
        "pass_rate": share,
        "num_tests": num_tests,
        "reason": reason,
    }


def _read_json(text: str) -> Any:
    """Parse JSON. Raise a ValueError or a RecursionError if Python cannot parse the text."""
    was_collecting = gc.isenabled()
    # With millions of lists, the garbage collector would take seconds, to find nothing.
    gc.disable()
    try:
        return json.loads(text)
    finally:
        if was_collecting:
            gc.enable()


def _shorten(value: Any) -> str:
    """Represent a value in at most `_MAX_SHOWN_CHARS` characters, for a reason."""
    # `repr` of a long text would be slow.
    if isinstance(value, str):
        value = value[: _MAX_SHOWN_CHARS + 1]
    text = repr(value)
    return text if len(text) <= _MAX_SHOWN_CHARS else f"{text[:_MAX_SHOWN_CHARS]}..."


def read_cases(ground_truth: Any) -> list[Case]:
    """Read the tests of a problem.

    Args:
        ground_truth: the tests, in one of the forms at the top of this file.

    Returns:
        The tests, at least one.

    Raises:
        ValueError: the ground truth has another form, or no tests.
    """
    tests = ground_truth
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"ground truth: got text that is not JSON ({error}), expected tests as JSON"
            ) from error
    if not isinstance(tests, Mapping) or "inputs" not in tests or "outputs" not in tests:
        got = type(tests).__name__
        if isinstance(tests, Mapping):
            got = f"the keys {sorted(map(str, tests))}"
        raise ValueError(f"ground truth: got {got}, expected a dict with 'inputs' and 'outputs'")
    # In tables the values are NumPy's arrays.
    inputs = list(tests["inputs"])
    outputs = list(tests["outputs"])
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(
            f"ground truth: got {len(inputs)} inputs and {len(outputs)} outputs, "
            "expected one output for each input, and at least one"
        )
    name = tests.get("fn_name")
    cases = []
    for value, output in zip(inputs, outputs, strict=True):
        if name:
            cases.append(Case({"function": name, "arguments": _read_arguments(value)}, output))
        else:
            cases.append(Case({"input": _read_text(value)}, _read_text(output)))
    if not name:
        return cases
    # The supervisor gets the inputs as JSON, and results are compared as JSON values.
    try:
        json.dumps([case.test_input for case in cases])
        json.dumps(outputs, default=methodcaller("tolist"))
    except (TypeError, ValueError, AttributeError, RecursionError) as error:
        raise ValueError(
            f"ground truth: got calls that JSON cannot hold ({error}), expected JSON values"
        ) from error
    return cases


def is_same_text(printed: str, expected: str) -> bool:
    """Whether a program's output is the expected one.

    Lines are compared word by word, so white space within them does not matter; empty lines at the
    end do not either. An expected number with a decimal point or an exponent also matches numbers
    that differ by at most 1e-6 (absolutely or relatively).

    Args:
        printed: output of the program.
        expected: output of the test.

    Returns:
        Whether they are the same.
    """
    lines = printed.rstrip().splitlines()
    expected_lines = expected.rstrip().splitlines()
    if len(lines) != len(expected_lines):
        return False
    for line, expected_line in zip(lines, expected_lines, strict=True):
        expected_words = expected_line.split()
        # Split off no more words than needed to see that there are too many: a program may print a
        # very long line.
        words = line.split(maxsplit=len(expected_words))
        if words == expected_words:
            continue
        if len(words) != len(expected_words) or not all(map(_is_same_word, words, expected_words)):
            return False
    return True


def is_same_result(result: Any, expected: Any) -> bool:
    """Whether a function's result is the expected one.

    Values are compared as by `==` in Python, but floats may differ by 1e-6.

    Args:
        result: result of the function, read from JSON.
        expected: output of the test: the result, its JSON text, or a list with the result alone.

    Returns:
        Whether they are the same.
    """
    # What the expected output may mean: itself; the value, if it is JSON text; and of both their
    # only element, if they have just one.
    readings = [expected]
    if isinstance(expected, str):
        # Text that is not JSON can only mean itself.
        with suppress(ValueError, RecursionError):
            readings.append(_read_json(expected))
    for reading in list(readings):
        if isinstance(reading, Sequence) and len(reading) == 1:
            readings.append(reading[0])
    return any(_is_same_value(result, reading) for reading in readings)


def _is_same_word(word: str, expected: str) -> bool:
    """Whether a word is the expected one, or a number close to an expected decimal number."""
    if word == expected:
        return True
    if not any(mark in expected for mark in ".eE"):
        return False
    try:
        return _is_close(float(word), float(expected))
    except ValueError:
        return False  # one of them is no number


def _is_same_value(value: Any, expected: Any) -> bool:
    """Whether a value read from JSON is the expected one, whose types may be NumPy's."""
    # A loop and no recursion, because lists may be nested more deeply than Python's stack allows.
    pairs = [(value, expected)]
    while pairs:
        value, expected = pairs.pop()
        if hasattr(expected, "tolist"):
            # Ground truths in tables have NumPy's arrays and numbers.
            expected = expected.tolist()
        if isinstance(expected, list | tuple):
            if not isinstance(value, list) or len(value) != len(expected):
                return False
            pairs += zip(value, expected, strict=True)
        elif isinstance(expected, Mapping):
            # JSON has only strings as keys.
            entries = {str(key): entry for key, entry in expected.items()}
            if not isinstance(value, Mapping) or value.keys() != entries.keys():
                return False
            pairs += [(value[key], entry) for key, entry in entries.items()]
        elif not _is_same_scalar(value, expected):
            return False
    return True


def _is_same_scalar(value: Any, expected: Any) -> bool:
    """Whether two values without elements are the same, or, as floats, about the same."""
    if not isinstance(value, float) and not isinstance(expected, float):
        return value == expected
    if not isinstance(value, int | float) or not isinstance(expected, int | float):
        return False
    try:
        return _is_close(value, expected)
    except OverflowError:
        return False  # an integer that is larger than any float


def _read_text(value: Any) -> str:
    """Read the input or output of a program: text, or a list of lines; else raise a ValueError."""
    if not isinstance(value, str | list | tuple):
        raise ValueError(
            f"ground truth: got {type(value).__name__} as a test's input or output, "
            "expected text or lines"
        )
    try:
        text = value if isinstance(value, str) else "\n".join(map(str, value))
        # The supervisor encodes it in the same way.
        text.encode("utf-8", "surrogateescape")
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"ground truth: got an input or output that is no text ({error}), expected text"
        ) from error
    return text


def _read_arguments(value: Any) -> list[Any]:
    """Read the arguments of a call: a list, or text with one argument in JSON per line.

    Raises:
        ValueError: the arguments have another form.
    """
    if isinstance(value, str):
        try:
            return [json.loads(line) for line in value.splitlines() if line.strip()]
        except (ValueError, RecursionError) as error:
            raise ValueError(
                f"ground truth: got the arguments {value[:80]!r}, expected JSON, one per line"
            ) from error
    if isinstance(value, list | tuple):
        return list(value)
    raise ValueError(
        f"ground truth: got {type(value).__name__} as a test's arguments, "
        "expected a list or JSON text"
    )
