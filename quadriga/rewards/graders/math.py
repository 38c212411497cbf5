# SPDX-License-Identifier: Apache-2.0
"""Mathematical answers compared by meaning (math-verify): 1/2, 0.5 and \\frac{1}{2} are the same answer.

The last `\\boxed{...}` of a response counts, and nothing else of it; without a box, the answer that math-verify finds
at the end of the text. (math-verify itself would read the boxes of one line as one answer of several parts.) It reads
the last 4,000 characters, for its time grows with the square of them; a longer box holds no answer.

Three things are looked at beside what math-verify does, for it reads a word as a product of its letters, leaves out a
relation at the beginning ("\\neq 5"), and takes the parts of a pair in any order: words are compared as words, what
begins with a relation equals only what does, and (2, 1) is not the set of 1 and 2.

math-verify says "wrong" when it fails or runs out of time, unless it is set to raise, as it is here. Its own time
limit is an alarm signal, which exists in a process's main thread only (where graders run); elsewhere it is off and
the caller must bring a limit. Its exception for a limit passes by `except Exception`, so it is translated.
"""

import re
import threading
from functools import lru_cache
from itertools import product
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from sympy import FiniteSet, Number

from quadriga.rewards.graders.reading import last_box, plain_math

STEP_LIMIT_S = 5
LONGEST_TEXT = 4000
LARGEST_VOTE = 1e15
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
_WORD = re.compile(r"(?:\\(?:text|textbf|mathrm|mathbf)\{)?([A-Za-z]{3,})\}?")
_RELATION = re.compile(r"\s*(?:[<>\u2260\u2264\u2265]|\\(?:neq?|leq?|geq?|lt|gt|not)(?![A-Za-z]))")


def compute_score(solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> dict[str, Any]:
    """1 if the response's answer means the same as the ground truth, else 0.
    Raises ValueError: the ground truth is not mathematics.
    Raises TimeoutError: an expression is too hard to read or compare within 5 s."""
    try:
        truth = _parse_truth(str(ground_truth), _limit_s())
        # A box that is never closed holds no answer; the rest of the text is none either.
        box = last_box(solution_str)
        text = "" if "\\boxed{" in solution_str else plain_math(solution_str[-LONGEST_TEXT:])
        if box is not None and len(box) <= LONGEST_TEXT:
            text = f"\\boxed{{{plain_math(box)}}}"
        answers = parse(text, _EXTRACTION, parsing_timeout=_limit_s(), raise_on_error=True)
        # What majority voting counts: numbers by value, everything else by the text that was read. Expressions are not
        # written out: for one such as 9^{9^9} that may never end.
        vote = next((" ".join(answer.split()) for answer in answers if isinstance(answer, str)), None)
        if answers and isinstance(answers[0], Number) and abs(answers[0]) < LARGEST_VOTE:
            vote = f"{float(answers[0]):.12g}"
        is_right = not _is_other_form(truth, answers) and _is_same(truth, answers)
        return {"score": float(is_right), "pred": vote}
    except TimeoutException as error:
        message = f"math-verify did not finish a step within its {STEP_LIMIT_S} s on ...{solution_str[-200:]!r}"
        raise TimeoutError(message) from error


@lru_cache(maxsize=1024)
def _parse_truth(ground_truth: str, limit_s: int | None) -> list[Any]:
    # Bare mathematics ("\frac{1}{2}") is boxed first: outside an environment its parts would be read as several
    # numbers.
    text = ground_truth if "\\boxed" in ground_truth or "$" in ground_truth else f"\\boxed{{{ground_truth}}}"
    if not (truth := parse(plain_math(text), _EXTRACTION, parsing_timeout=limit_s, raise_on_error=True)):
        raise ValueError(f"ground truth: got {ground_truth!r}, expected an expression that math-verify can read")
    return truth


def _is_same(truth: list[Any], answers: list[Any]) -> bool:
    """Whether some reading of the answer equals some reading of the truth: a pair that fails hides no equal one."""
    first_failure: Exception | None = None
    for true_reading, reading in product(truth, answers):
        try:
            if verify(true_reading, reading, timeout_seconds=_limit_s(), raise_on_error=True):
                return True
        except Exception as error:
            first_failure = first_failure or error
    if first_failure is not None:
        raise first_failure
    return False


def _is_other_form(truth: list[Any], answers: list[Any]) -> bool:
    """Whether two lists of readings differ in what math-verify does not look at."""
    texts = [next((reading for reading in readings if isinstance(reading, str)), "") for readings in (truth, answers)]
    words = [found[1].casefold() for text in texts if (found := _WORD.fullmatch(text))]
    # Three small letters may be a product.
    if len(words) == 2 and (max(map(len, words)) > 3 or not "".join(texts).islower()):
        return words[0] != words[1]
    if bool(_RELATION.match(texts[0])) != bool(_RELATION.match(texts[1])):
        return True
    begins = [
        "a set" if text.startswith("\\{") and isinstance(readings[0], FiniteSet) and len(readings[0]) > 1 else text[:1]
        for text, readings in zip(texts, (truth, answers), strict=True)
    ]
    return set(begins) == {"a set", "("}


def _limit_s() -> int | None:
    return STEP_LIMIT_S if threading.current_thread() is threading.main_thread() else None
