# SPDX-License-Identifier: Apache-2.0
"""Mathematical answers compared by meaning (math-verify): 1/2, 0.5 and \\frac{1}{2} are the same answer.

The last `\\boxed{...}` of a response counts, and nothing else of it; without a box, the answer that math-verify finds
at the end of the text. (math-verify itself would read the boxes of one line as one answer of several parts.) It reads
the last 4,000 characters, for its time grows with the square of them; a longer box holds no answer.

Three things are looked at beside what math-verify does, for it reads a word as a product of its letters, leaves out a
relation at the beginning ("\\neq 5"), and takes the parts of a pair in any order: words are compared as words, what
begins with a relation equals only what does, and (2, 1) is not the set of 1 and 2. Numbers that math-verify calls equal
because their difference is tiny must also be close by their ratio.

A response that cannot be graded is a wrong answer, and "ungradable" in the result says why: its expression is beyond
the bounds of `quadriga/rewards/bounds.py`, the library fails on it, or it takes more than `CPU_LIMIT_S` of CPU time (in
a process's main thread, where graders run). A ground truth of which one of these holds is an error.
"""

import logging
import re
from collections.abc import Callable
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
LARGEST_VOTE = 1e15
LARGEST_SMALL = 1e-3  # numbers up to here are compared by their ratio too
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_WORD = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\{)?([A-Za-z]{3,})\}?")
_RELATION = re.compile(r"\s*(?:[<>\u2260\u2264\u2265]|\\(?:neq?|leq?|geq?|lt|gt|not)(?![A-Za-z]))")


# Whether the library is called from here: for other callers in the process it stays as it is.
_is_grading: ContextVar[bool] = ContextVar("is_grading", default=False)
# It warns that its time limits are off, as they are here.
logging.getLogger("math_verify").setLevel(logging.ERROR)


class UngradableError(BaseException):
    """An expression is beyond the bounds. No `Exception`, since the library goes on after these."""


def compute_score(
    solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """1 if the response's answer means the same as the ground truth, else 0; "ungradable" says why it was not compared.

    Raises:
        ValueError: the ground truth is not mathematics, or too hard to evaluate.
    """
    truth = _parse_truth(str(ground_truth))
    # A box that is never closed holds no answer; the rest of the text is none either.
    box = last_box(solution_str)
    text = "" if "\\boxed{" in solution_str else plain_math(solution_str[-MAX_CHARS:])
    if box is not None and len(box) <= MAX_CHARS:
        text = f"\\boxed{{{plain_math(box)}}}"
    result: dict[str, Any] = {"score": 0.0, "pred": None, "ungradable": ""}
    token = _is_grading.set(True)
    try:
        with cpu_limit(CPU_LIMIT_S):
            answers = parse(text, _EXTRACTION, parsing_timeout=None, raise_on_error=True)
            # What majority voting counts: numbers by value, everything else by the text that was read. Expressions are
            # not written out: for one such as 9^{9^9} that may never end.
            result["pred"] = next(
                (" ".join(answer.split()) for answer in answers if isinstance(answer, str)), None
            )
            if answers and isinstance(answers[0], Number) and abs(answers[0]) < LARGEST_VOTE:
                result["pred"] = f"{float(answers[0]):.12g}"
            result["score"] = float(not _is_other_form(truth, answers) and _is_same(truth, answers))
    except (Exception, CPULimitError, UngradableError) as error:
        result["ungradable"] = f"{type(error).__name__}: {error}"[:500]
    finally:
        _is_grading.reset(token)
    return result


@lru_cache(maxsize=1024)
def _parse_truth(ground_truth: str) -> list[Any]:
    # Bare mathematics ("\frac{1}{2}") is boxed first: outside an environment its parts would be read as several
    # numbers.
    text = (
        ground_truth
        if "\\boxed" in ground_truth or "$" in ground_truth
        else f"\\boxed{{{ground_truth}}}"
    )
    expected = "expected an expression that math-verify can read"
    token = _is_grading.set(True)
    try:
        with cpu_limit(CPU_LIMIT_S):
            truth = parse(plain_math(text), _EXTRACTION, parsing_timeout=None, raise_on_error=True)
            # A comparison that fails with this truth on both sides would fail with every response.
            _is_same(truth, truth)
    except (Exception, CPULimitError, UngradableError) as error:
        raise ValueError(
            f"ground truth: got {ground_truth[:200]!r} ({error}), {expected}"
        ) from error
    finally:
        _is_grading.reset(token)
    if not truth:
        raise ValueError(f"ground truth: got {ground_truth[:200]!r}, {expected}")
    return truth


def _is_same(truth: list[Any], answers: list[Any]) -> bool:
    """Whether some reading of the answer equals some reading of the truth: a pair that fails hides no equal one."""
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


def _bounded(parse_expression: Callable[[str], Any]) -> Callable[[str], Any]:
    """A parser of the library that refuses what is beyond the bounds."""

    @wraps(parse_expression)
    def parse_bounded(text: str) -> Any:
        if _is_grading.get() and (reason := why_ungradable(text)):
            raise UngradableError(reason)
        return parse_expression(text)

    return parse_bounded


def _also_by_ratio(are_equal: Callable[..., bool]) -> Callable[..., bool]:
    """The library's comparison of numbers, which looks at absolute differences, where it must hold for ratios too."""

    @wraps(are_equal)
    def compare(a: Any, b: Any, float_rounding: int, numeric_precision: int) -> bool:
        if not are_equal(a, b, float_rounding, numeric_precision):
            return False
        if not _is_grading.get() or not (
            getattr(a, "is_number", False) and getattr(b, "is_number", False)
        ):
            return True
        size = abs(a.evalf())
        if not size.is_Float or size > LARGEST_SMALL:
            return True
        tolerance = 1e-2 if a.atoms(Float) or b.atoms(Float) else 1e-12
        return bool(abs(a.evalf() - b.evalf()) <= tolerance * size)

    return compare


for _name in ("parse_latex_cached", "parse_expr_cached"):
    setattr(library_parser, _name, _bounded(getattr(library_parser, _name)))
library_grader.sympy_numeric_eq = _also_by_ratio(library_grader.sympy_numeric_eq)


def _is_other_form(truth: list[Any], answers: list[Any]) -> bool:
    """Whether two lists of readings differ in what math-verify does not look at."""
    texts = [
        next((reading for reading in readings if isinstance(reading, str)), "")
        for readings in (truth, answers)
    ]
    words = [found[1].casefold() for text in texts if (found := _WORD.fullmatch(text))]
    # Three small letters may be a product.
    if len(words) == 2 and (max(map(len, words)) > 3 or not "".join(texts).islower()):
        return words[0] != words[1]
    if bool(_RELATION.match(texts[0])) != bool(_RELATION.match(texts[1])):
        return True
    begins = [
        "a set"
        if text.startswith("\\{") and isinstance(readings[0], FiniteSet) and len(readings[0]) > 1
        else text[:1]
        for text, readings in zip(texts, (truth, answers), strict=True)
    ]
    return set(begins) == {"a set", "("}
