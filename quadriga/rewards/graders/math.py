# SPDX-License-Identifier: Apache-2.0
"""Mathematical answers compared by meaning (math-verify): 1/2, 0.5 and \\frac{1}{2} are equal.

The last `\\boxed{...}` of a response is its answer; without a box, the answer that math-verify
finds at the end of the text. (math-verify itself would read all boxes of a line as one answer of
several parts.) Only the last 4,000 characters of a text without a box are read, because the time of
math-verify grows with the square of their number. A box of more characters counts as no answer.

math-verify reads a word as a product of its letters, ignores a relation at the beginning ("\\neq
5"), takes the parts of a pair in any order, and takes numbers for equal if their difference is
tiny. So four rules are added here: words are compared as words; an answer that begins with a
relation equals only answers that begin with one; (2, 1) is not the set of 1 and 2; the ratio of
small numbers must also be close to 1.

A response that cannot be graded is a wrong answer, and "ungradable" in the result says why: its
expression is beyond the bounds of `quadriga/rewards/bounds.py`, the library fails on it, or it
takes more than `CPU_LIMIT_S` of CPU time (in a process's main thread, where graders run). A ground
truth that cannot be graded is an error.
"""

import logging
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache, wraps
from itertools import product
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify import grader as library_grader
from math_verify import parser as library_parser
from sympy import FiniteSet, Float, Number

from quadriga.rewards.bounds import MAX_CHARS, why_ungradable
from quadriga.rewards.cpu_limit import CPULimitError, cpu_limit
from quadriga.rewards.graders.reading import last_box, plain_math

CPU_LIMIT_S = 1.7
MAX_VOTE = 1e15  # numbers below it are written out for majority voting
MAX_SMALL_NUMBER = 1e-3  # numbers up to here are also compared by their ratio
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_WORD = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\{)?([A-Za-z]{3,})\}?")
_RELATION = re.compile(r"\s*(?:[<>\u2260\u2264\u2265]|\\(?:neq?|leq?|geq?|lt|gt|not)(?![A-Za-z]))")


# True while this module calls the library. Some functions of the library are replaced below; for
# other callers in the process they behave as usual.
_is_grading: ContextVar[bool] = ContextVar("is_grading", default=False)
# The library warns that its own time limits are off. `cpu_limit` replaces them.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class UngradableError(BaseException):
    """An expression is beyond the bounds.

    Not an `Exception`, because the library catches exceptions and goes on.
    """


def compute_score(
    solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 if the response's answer means the same as the ground truth, else 0.

    Args:
        solution_str: the response.
        ground_truth: the right answer: mathematics in LaTeX or plain text, in a box or not.
        extra_info: not used.

    Returns:
        "score"; "pred"; and "ungradable", why the answer could not be compared, or "".

    Raises:
        ValueError: the ground truth is not mathematics, or too hard to evaluate.
    """
    truth = _parse_truth(str(ground_truth))
    text = _answer_text(solution_str)
    result: dict[str, Any] = {"score": 0.0, "pred": None, "ungradable": ""}
    try:
        with _limited_grading():
            # Readings of the one answer: an expression and its text, or several of each.
            answers = _parse(text)
            # "pred", for majority voting, is the value of a number, and any other answer as the
            # response writes it: to evaluate an expression such as 9^{9^9} might never end.
            answer_text = _first_text(answers)
            if answer_text is not None:
                result["pred"] = " ".join(answer_text.split())
            if answers and isinstance(answers[0], Number) and abs(answers[0]) < MAX_VOTE:
                result["pred"] = f"{float(answers[0]):.12g}"
            result["score"] = float(
                not _differ_in_form(truth, answers) and _is_same(truth, answers)
            )
    except (Exception, CPULimitError, UngradableError) as error:
        result["ungradable"] = f"{type(error).__name__}: {error}"[:500]
    return result


@contextmanager
def _limited_grading() -> Iterator[None]:
    """Context manager: limit the CPU time of the library, and refuse expressions beyond the bounds.

    Raises:
        CPULimitError: the body takes more than `CPU_LIMIT_S`.
        UngradableError: an expression is beyond the bounds.
    """
    token = _is_grading.set(True)
    try:
        with cpu_limit(CPU_LIMIT_S):
            yield
    finally:
        _is_grading.reset(token)


def _answer_text(solution_str: str) -> str:
    """Take the part of a response that holds the answer, rewritten by `plain_math`; "" for none."""
    box = last_box(solution_str)
    if box is not None and len(box) <= MAX_CHARS:
        return f"\\boxed{{{plain_math(box)}}}"
    if "\\boxed{" in solution_str:
        # The box is too long or never closed. Numbers elsewhere in the text are not the answer.
        return ""
    return plain_math(solution_str[-MAX_CHARS:])


def _parse(text: str) -> list[Any]:
    """Parse a text into the readings that the library finds: expressions, and their texts."""
    return parse(text, _EXTRACTION, parsing_timeout=None, raise_on_error=True)


@lru_cache(maxsize=1024)
def _parse_truth(ground_truth: str) -> list[Any]:
    """Parse a ground truth. Raise a ValueError if it is no mathematics or cannot be compared."""
    text = ground_truth
    if "\\boxed" not in text and "$" not in text:
        # Outside of a math environment, "\frac{1}{2}" would be read as several numbers.
        text = f"\\boxed{{{text}}}"
    hint = "expected an expression that math-verify can read"
    try:
        with _limited_grading():
            truth = _parse(plain_math(text))
            # Called for its error: a truth that cannot be compared with itself cannot be compared
            # with any response.
            _is_same(truth, truth)
    except (Exception, CPULimitError, UngradableError) as error:
        raise ValueError(f"ground truth: got {ground_truth[:200]!r} ({error}), {hint}") from error
    if not truth:
        raise ValueError(f"ground truth: got {ground_truth[:200]!r}, {hint}")
    return truth


def _is_same(truth: list[Any], answers: list[Any]) -> bool:
    """Whether any reading of the answer equals any reading of the truth.

    An error in comparing two readings is raised only if no other pair of readings is equal.
    """
    first_failure: Exception | None = None
    for true_reading, reading in product(truth, answers):
        try:
            if verify(true_reading, reading, timeout_seconds=None, raise_on_error=True):
                return True
        except Exception as error:
            first_failure = first_failure or error
    if first_failure is not None:
        raise first_failure
    return False


def _refuse_beyond_bounds(parse_expression: Callable[[str], Any]) -> Callable[[str], Any]:
    """Wrap a parser of the library so that it refuses expressions beyond the bounds."""

    @wraps(parse_expression)
    def parse_bounded(text: str) -> Any:
        if _is_grading.get():
            reason = why_ungradable(text)
            if reason:
                raise UngradableError(reason)
        return parse_expression(text)

    return parse_bounded


def _compare_also_by_ratio(are_equal: Callable[..., bool]) -> Callable[..., bool]:
    """Wrap the library's comparison of numbers, so that small numbers are also compared by ratio.

    The library looks at absolute differences only.
    """

    @wraps(are_equal)
    def compare(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
        if not are_equal(a, b, float_rounding, numeric_precision):
            return False
        # For other callers, and unless both are numbers, the library's answer stands.
        if not _is_grading.get():
            return True
        if not getattr(a, "is_number", False) or not getattr(b, "is_number", False):
            return True
        size = abs(a.evalf())
        if not size.is_Float or size > MAX_SMALL_NUMBER:
            return True
        # Decimal numbers may have been rounded; exact expressions have not.
        tolerance = 1e-2 if a.atoms(Float) or b.atoms(Float) else 1e-12
        return bool(abs(a.evalf() - b.evalf()) <= tolerance * size)

    return compare


# Replace the parsers and the comparison of numbers in the library.
for _name in ("parse_latex_cached", "parse_expr_cached"):
    setattr(library_parser, _name, _refuse_beyond_bounds(getattr(library_parser, _name)))
library_grader.sympy_numeric_eq = _compare_also_by_ratio(library_grader.sympy_numeric_eq)


def _first_text(readings: list[Any]) -> str | None:
    """The first reading that is a text: the answer as it was written. None: there is no answer."""
    for reading in readings:
        if isinstance(reading, str):
            return reading
    return None


def _differ_in_form(truth: list[Any], answers: list[Any]) -> bool:
    """Whether truth and answer differ in a way that math-verify ignores (see the top of the file).

    Args:
        truth: readings of the ground truth.
        answers: readings of the response's answer.
    """
    true_text = _first_text(truth) or ""
    text = _first_text(answers) or ""
    # Words are compared as words.
    true_word = _WORD.fullmatch(true_text)
    word = _WORD.fullmatch(text)
    if true_word and word:
        # Up to three lower-case letters may be a product, so these are left to math-verify.
        is_long = max(len(true_word[1]), len(word[1])) > 3
        if is_long or not f"{true_text}{text}".islower():
            return true_word[1].casefold() != word[1].casefold()
    # Only one of the two begins with a relation.
    if bool(_RELATION.match(true_text)) != bool(_RELATION.match(text)):
        return True
    # One of the two is a pair, the other a set.
    return {_brackets(true_text, truth), _brackets(text, answers)} == {"set", "pair"}


def _brackets(text: str, readings: list[Any]) -> str:
    """Kind of an answer by its brackets: "set" (of several elements), "pair" or "other".

    Args:
        text: the answer as it was written; "" if there is none.
        readings: readings of the answer.
    """
    if text.startswith("\\{") and isinstance(readings[0], FiniteSet) and len(readings[0]) > 1:
        return "set"
    return "pair" if text.startswith("(") else "other"
