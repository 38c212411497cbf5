# SPDX-License-Identifier: Apache-2.0
"""Numbers in running text."""

from decimal import Decimal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.rewards.graders.reading import (
    find_numbers,
    leading_number,
    plain_math,
    plain_text,
    true_number,
)


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("27, 82 or 18?", ["27", "82", "18"]),
        ("1,2,3", ["1", "2", "3"]),
        ("it costs $1,234,567.50.", ["1234567.50"]),
        ("-5 and \u22127 and $-3 and -$4", ["-5", "-7", "-3", "-4"]),
        ("pages 3-5, A-82, x=-1, (-2)", ["3", "5", "82", "-1", "-2"]),
        ("about .5 or 0.25", ["0.5", "0.25"]),
        ("12,3456", ["12", "3456"]),
        ("none at all", []),
    ],
)
def test_numbers_are_found_in_order(text, numbers):
    assert find_numbers(text) == [Decimal(number) for number in numbers]


@given(st.integers(-(10**15), 10**15), st.sampled_from(["{}", "{:,}", "so it is {:,}.", "${}"]))
@settings(deadline=None, max_examples=50)
def test_every_integer_is_read_back(number, form):
    assert find_numbers(form.format(number)) == [number]


@pytest.mark.parametrize("mark", ["**", "*", "__", "`"])
def test_markdown_around_a_number_is_left_out(mark):
    assert leading_number(f" {mark}-1,800.50{mark} in all") == Decimal("-1800.50")
    assert plain_math(f"it is {mark}18{mark}, so") == "it is 18, so"


def test_markdown_is_not_multiplication_or_an_index():
    for text in ("2*3*4", "2 * 3 * 4", "x_1_2", "a**2**b"):
        assert plain_math(text) == text


def test_a_number_of_a_million_digits_is_read_exactly():
    digits = "9" * 1_000_001
    assert plain_text(leading_number(digits)) == digits
    assert leading_number(f"-1{digits}") != leading_number(f"-1{digits[1:]}8")


def test_a_lone_number_may_carry_separators_anywhere():
    assert leading_number(" $ -12,34 apples") == Decimal(-1234)
    assert leading_number("apples 12") is None


def test_the_truth_must_be_a_number():
    assert true_number(7) == 7
    with pytest.raises(ValueError, match="'seven', expected a number"):
        true_number("seven")


def test_equal_numbers_are_the_same_vote():
    assert {plain_text(Decimal(text)) for text in ("7", "7.0", "07.00")} == {"7"}
    assert plain_text(Decimal("-0.0")) == "0"
    assert plain_text(Decimal("1000000")) == "1000000"
    assert plain_text(None) is None
