# SPDX-License-Identifier: Apache-2.0
"""Test cases: read from ground truths, and answers compared."""

import json
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from quadriga.rewards.code.containment import ResourceLimits
from quadriga.rewards.code.run import Case, CaseRun
from quadriga.rewards.graders.code import is_same_result, is_same_text, read_cases, why_failed

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.integers(10**300, 10**330)
    | st.floats()
    | st.text(st.characters(codec=None), max_size=5)
)
VALUES = st.recursive(
    SCALARS,
    lambda parts: (
        st.lists(parts, max_size=3) | st.dictionaries(st.text(max_size=3), parts, max_size=3)
    ),
)


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


def test_standard_input_as_text_or_lines_or_json():
    cases = [Case({"input": "1\n2"}, "3")]
    assert read_cases({"inputs": ["1\n2"], "outputs": ["3"]}) == cases
    assert read_cases({"inputs": [["1", "2"]], "outputs": [["3"]]}) == cases
    assert read_cases(json.dumps({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": None})) == cases


def test_calls_as_lists_or_json_lines():
    given = {"function": "add", "arguments": [[1], "a"]}
    assert read_cases({"inputs": [[[1], "a"]], "outputs": [3], "fn_name": "add"}) == [
        Case(given, 3)
    ]
    assert read_cases({"inputs": ['[1]\n"a"\n'], "outputs": ["3"], "fn_name": "add"}) == [
        Case(given, "3")
    ]


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("not json", "text that is not JSON"),
        (None, "NoneType"),
        ({"inputs": []}, "the keys"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "1 inputs and 2 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "int as a test's input"),
        ({"inputs": ["x ="], "outputs": ["1"], "fn_name": "f"}, "expected JSON, one"),
        ({"inputs": [5], "outputs": ["1"], "fn_name": "f"}, "int as a test's arguments"),
        ('{"inputs": [' + "1" * 5000 + "]}", r"not JSON \(Exceeds the limit"),
        ("[" * 100_000, r"not JSON \(maximum recursion"),
        ({"inputs": ["1" * 5000], "outputs": ["1"], "fn_name": "f"}, "expected JSON, one"),
        (
            {"inputs": [[b"x"]], "outputs": ["1"], "fn_name": "f"},
            "calls that JSON cannot hold .*bytes",
        ),
        (
            {"inputs": [[1]], "outputs": [{1, 2}], "fn_name": "f"},
            "calls that JSON cannot hold .*set",
        ),
        (
            {"inputs": [[1]], "outputs": [nested(5000)], "fn_name": "f"},
            "calls that JSON cannot hold .*recursion",
        ),
        (
            {"inputs": [[10**5000]], "outputs": ["1"], "fn_name": "f"},
            "calls that JSON cannot hold .*Exceeds",
        ),
        ({"inputs": ["\ud800"], "outputs": ["1"]}, "that is no text .*surrogates"),
        ({"inputs": [[10**5000]], "outputs": ["1"]}, "that is no text .*Exceeds"),
    ],
)
def test_a_truth_without_tests_is_an_error(truth, message):
    with pytest.raises(ValueError, match=message):
        read_cases(truth)


@pytest.mark.parametrize(
    ("printed", "expected", "is_same"),
    [
        ("3\n", "3", True),
        ("1  \n2\n\n", "1\n2", True),
        ("1 2", "1\n2", False),
        ("0.3333333", "0.333333", True),
        ("0.34", "0.333333", False),
        ("1e9", "1000000000.0", True),
        ("3.0", "3", False),
        ("nan", "1.0", False),
        ("YES", "yes", False),
        ("", "3", False),
        ("", "", True),
        ("1", "", False),
        (" 1 2 ", "1.0 2", True),
        ("1 2 3", "1.0 2", False),
        ("1\r\n2\r\n", "1\n2", True),
        ("1" * 5000, "2.5", False),
        ("1e999", "2.5", False),
        ("\x00", "2.5", False),
        ("\ufffd", "2.5", False),
    ],
)
def test_outputs(printed, expected, is_same):
    assert is_same_text(printed, expected) is is_same


@pytest.mark.parametrize(
    ("result", "expected", "is_same"),
    [
        (3, 3, True),
        (3, [3], True),
        (3, "3", True),
        ([1, 2], (1, 2), True),
        ([1, 2], "[1, 2]", True),
        ([1, 2], [[1, 2]], True),
        ([1], [1, 2], False),
        (True, 1, True),
        (False, 0, True),
        (1, True, True),
        (True, 0, False),
        ([True, False], "[1, 0]", True),
        (3, "[3]", True),
        (3, "[4]", False),
        ("[3]", "[3]", True),
        (True, "true", True),
        (0.1 + 0.2, 0.3, True),
        (3.0, 3, True),
        ("ab", "ab", True),
        ("ab", '"ab"', True),
        ({"1": [2]}, {1: [2]}, True),
        ({"1": 2}, {"2": 2}, False),
        (None, "null", True),
        ("3", 3, False),
        (10**400, 2.5, False),
        (10**400, [2.5], False),
        (10**400, "2.5", False),
        (2.5, 10**400, False),
        (10**400, 10**400, True),
        (math.inf, 2.5, False),
        (math.inf, math.inf, True),
        (3, "1" * 5000, False),
        (3, "[" * 100_000, False),
        ("\ud800", "\ud800", True),
        (nested(5000), nested(5000), True),
        (nested(5000), nested(5002), False),
        ([1, 2], np.array([1, 2]), True),
        ([1, 2], [np.int64(1), np.float32(2)], True),
    ],
)
def test_results(result, expected, is_same):
    assert is_same_result(result, expected) is is_same


@given(VALUES, VALUES)
@example([10**400], [2.5])
@example(float("nan"), 10**400)
def test_no_result_makes_a_comparison_fail(result, expected):
    for given_result in (result, expected):
        run = CaseRun(0, "ok", 0, 0.0, json.dumps(given_result), "", json.dumps(given_result))
        for case in (
            Case({"function": "f", "arguments": []}, expected),
            Case({"input": ""}, json.dumps(expected)),
        ):
            reason = why_failed(run, case, ResourceLimits())
            assert reason == "" or reason.startswith("wrong answer: got ")
    if "nan" not in repr(expected):
        assert is_same_result(expected, expected)


@given(st.text(st.characters(codec=None)), st.text(st.characters(codec=None)))
def test_no_output_makes_a_comparison_fail(printed, expected):
    assert is_same_text(expected, expected)
    assert is_same_text(printed, expected) in (True, False)


@pytest.mark.parametrize(
    "result", ["1" * 5000, "[" * 100_000, '{"":' * 100_000, "{", "\x00", "\ufffd", "[1e", "1 2"]
)
def test_a_result_that_cannot_be_read_is_a_wrong_one(result):
    reason = why_failed(
        CaseRun(0, "ok", 0, 0.0, "", "", result),
        Case({"function": "f", "arguments": []}, 3),
        ResourceLimits(),
    )
    assert reason.startswith("its function's result cannot be read: ")
    assert len(reason) < 300
