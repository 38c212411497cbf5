# SPDX-License-Identifier: Apache-2.0
"""Test cases: read from ground truths, and answers compared."""

import json

import pytest

from quadriga.rewards.code.run import Case
from quadriga.rewards.graders.code import is_same_result, is_same_text, read_cases


def test_standard_input_as_text_or_lines_or_json():
    cases = [Case({"input": "1\n2"}, "3")]
    assert read_cases({"inputs": ["1\n2"], "outputs": ["3"]}) == cases
    assert read_cases({"inputs": [["1", "2"]], "outputs": [["3"]]}) == cases
    assert read_cases(json.dumps({"inputs": ["1\n2"], "outputs": ["3"], "fn_name": None})) == cases


def test_calls_as_lists_or_json_lines():
    given = {"function": "add", "arguments": [[1], "a"]}
    assert read_cases({"inputs": [[[1], "a"]], "outputs": [3], "fn_name": "add"}) == [Case(given, 3)]
    assert read_cases({"inputs": ['[1]\n"a"\n'], "outputs": ["3"], "fn_name": "add"}) == [Case(given, "3")]


@pytest.mark.parametrize(
    ("truth", "message"),
    [
        ("not json", "text that is not JSON"),
        (None, "NoneType"),
        ({"inputs": []}, "the keys"),
        ({"inputs": [], "outputs": []}, "0 inputs and 0 outputs"),
        ({"inputs": ["1"], "outputs": ["1", "2"]}, "1 inputs and 2 outputs"),
        ({"inputs": [1], "outputs": ["1"]}, "int as a test's input"),
        ({"inputs": ["x ="], "outputs": ["1"], "fn_name": "f"}, "expected JSON, one a line"),
        ({"inputs": [5], "outputs": ["1"], "fn_name": "f"}, "int as a test's arguments"),
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
        (True, 1, False),
        (True, "true", True),
        (0.1 + 0.2, 0.3, True),
        (3.0, 3, True),
        ("ab", "ab", True),
        ("ab", '"ab"', True),
        ({"1": [2]}, {1: [2]}, True),
        ({"1": 2}, {"2": 2}, False),
        (None, "null", True),
        ("3", 3, False),
    ],
)
def test_results(result, expected, is_same):
    assert is_same_result(result, expected) is is_same
