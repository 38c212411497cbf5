# SPDX-License-Identifier: Apache-2.0
"""Test cases of programming problems: read from a ground truth, and whether an output passes.

A ground truth is a dict, or JSON text of one, as the data sets APPS, TACO, CodeContests and Codeforces have it:

    {"inputs": ["1 2\\n", ...], "outputs": ["3\\n", ...]}                     standard input and output
    {"inputs": [[1, 2], ...], "outputs": [3, ...], "fn_name": "add"}          a call of a function a test

An input of a call is the list of its arguments, or text with one argument in JSON a line; an output is the result, or
its JSON text, or (in APPS) the result in a list of one.
"""

import json
import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

TOLERANCE = 1e-6
_is_close = partial(math.isclose, rel_tol=TOLERANCE, abs_tol=TOLERANCE)


class Case(NamedTuple):
    """One test: what the program is given, and the output that is expected (which it never gets)."""

    given: dict[str, Any]
    expected: Any

    @property
    def is_call(self) -> bool:
        """Whether a function is called; else the program reads its standard input."""
        return "function" in self.given


def read_cases(ground_truth: Any) -> list[Case]:
    """The tests of a problem.

    Raises:
        ValueError: the ground truth is none of the forms above.
    """
    tests = ground_truth
    if isinstance(tests, str):
        try:
            tests = json.loads(tests)
        except json.JSONDecodeError as error:
            raise ValueError(f"ground truth: got text that is not JSON ({error}), expected tests as JSON") from error
    if not isinstance(tests, Mapping) or "inputs" not in tests or "outputs" not in tests:
        got = f"the keys {sorted(map(str, tests))}" if isinstance(tests, Mapping) else type(tests).__name__
        raise ValueError(f"ground truth: got {got}, expected a dict with 'inputs' and 'outputs'")
    inputs, outputs = list(tests["inputs"]), list(tests["outputs"])
    if len(inputs) != len(outputs) or not inputs:
        raise ValueError(f"ground truth: got {len(inputs)} inputs and {len(outputs)} outputs, expected one of each")
    name, pairs = tests.get("fn_name"), zip(inputs, outputs, strict=True)
    if name:
        return [Case({"function": name, "arguments": _arguments(given)}, output) for given, output in pairs]
    return [Case({"input": _text(given)}, _text(output)) for given, output in pairs]


def is_same_text(printed: str, expected: str) -> bool:
    """Whether two outputs are the same, blanks at the ends of lines and empty lines at the end aside.

    Where the expected word is a number with a decimal point, a number within 1e-6 of it (absolutely or relatively) is
    the same.
    """
    lines, wanted = ([line.rstrip() for line in text.rstrip().splitlines()] for text in (printed, expected))
    if lines == wanted:
        return True
    if len(lines) != len(wanted):
        return False
    words = [(line.split(), want.split()) for line, want in zip(lines, wanted, strict=True)]
    return all(
        len(got) == len(want) and all(_is_same_word(*pair) for pair in zip(got, want, strict=True))
        for got, want in words
    )


def is_same_result(result: Any, expected: Any) -> bool:
    """Whether a function's result is the expected one; numbers with a fraction within 1e-6."""
    if isinstance(expected, str):
        try:
            if _is_same_value(result, json.loads(expected)):
                return True
        except json.JSONDecodeError:
            # A plain text, which stands for itself.
            return _is_same_value(result, expected)
    if _is_same_value(result, expected):
        return True
    return isinstance(expected, Sequence) and len(expected) == 1 and _is_same_value(result, expected[0])


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
    if isinstance(expected, list | tuple):
        is_list = isinstance(value, list) and len(value) == len(expected)
        return is_list and all(_is_same_value(*pair) for pair in zip(value, expected, strict=True))
    if isinstance(expected, Mapping):
        keys = {str(key): entry for key, entry in expected.items()}
        is_dict = isinstance(value, Mapping) and value.keys() == keys.keys()
        return is_dict and all(_is_same_value(value[key], entry) for key, entry in keys.items())
    if isinstance(value, bool) or isinstance(expected, bool):
        return value is expected
    if isinstance(value, float) or isinstance(expected, float):
        are_numbers = isinstance(value, int | float) and isinstance(expected, int | float)
        return are_numbers and _is_close(value, expected)
    return value == expected


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, list | tuple):
        return "\n".join(map(str, value))
    raise ValueError(f"ground truth: got {type(value).__name__} as a test's input or output, expected text or lines")


def _arguments(given: Any) -> list[Any]:
    if isinstance(given, str):
        try:
            return [json.loads(line) for line in given.splitlines() if line.strip()]
        except json.JSONDecodeError as error:
            raise ValueError(f"ground truth: got the arguments {given[:80]!r}, expected JSON, one a line") from error
    if isinstance(given, list | tuple):
        return list(given)
    raise ValueError(f"ground truth: got {type(given).__name__} as a test's arguments, expected a list or JSON text")
