# SPDX-License-Identifier: Apache-2.0
"""Mathematical answers compared by meaning (math-verify): 1/2, 0.5 and \\frac{1}{2} are the same answer.

The last `\\boxed{...}` of a response counts, and nothing else of it; without a box, the answer that math-verify finds
at the end of the text. (math-verify itself would read the boxes of one line as one answer of several parts.) It reads
the last 4,000 characters, for its time grows with the square of them; a longer box holds no answer.

math-verify says "wrong" when it fails or runs out of time, unless it is set to raise, as it is here. Its own time
limit is an alarm signal, which exists in a process's main thread only (where graders run); elsewhere it is off and
the caller must bring a limit. Its exception for a limit passes by `except Exception`, so it is translated.
"""

import threading
from functools import lru_cache
from itertools import product
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify
from math_verify.errors import TimeoutException
from sympy import Number

from quadriga.rewards.graders.reading import last_box

STEP_LIMIT_S = 5
LONGEST_TEXT = 4000
LARGEST_VOTE = 1e15
_EXTRACTION = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())


def compute_score(solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None) -> dict[str, Any]:
    """1 if the response's answer means the same as the ground truth, else 0.

    Raises:
        ValueError: the ground truth is not mathematics.
        TimeoutError: an expression is too hard to read or compare within 5 s.
    """
    try:
        truth = _parse_truth(str(ground_truth), _limit_s())
        # A box that is never closed holds no answer; the rest of the text is none either.
        box = last_box(solution_str)
        text = "" if "\\boxed{" in solution_str else solution_str[-LONGEST_TEXT:]
        if box is not None and len(box) <= LONGEST_TEXT:
            text = f"\\boxed{{{box}}}"
        answers = parse(text, _EXTRACTION, parsing_timeout=_limit_s(), raise_on_error=True)
        # What majority voting counts: numbers by value, everything else by the text that was read. Expressions are not
        # written out: for one such as 9^{9^9} that may never end.
        vote = next((" ".join(answer.split()) for answer in answers if isinstance(answer, str)), None)
        if answers and isinstance(answers[0], Number) and abs(answers[0]) < LARGEST_VOTE:
            vote = f"{float(answers[0]):.12g}"
        return {"score": float(_is_same(truth, answers)), "pred": vote}
    except TimeoutException as error:
        message = f"math-verify did not finish a step within its {STEP_LIMIT_S} s on ...{solution_str[-200:]!r}"
        raise TimeoutError(message) from error


@lru_cache(maxsize=1024)
def _parse_truth(ground_truth: str, limit_s: int | None) -> list[Any]:
    # Bare mathematics ("\frac{1}{2}") is boxed first: outside an environment its parts would be read as several
    # numbers.
    text = ground_truth if "\\boxed" in ground_truth or "$" in ground_truth else f"\\boxed{{{ground_truth}}}"
    truth = parse(text, _EXTRACTION, parsing_timeout=limit_s, raise_on_error=True)
    if not truth:
        raise ValueError(f"ground truth: got {ground_truth!r}, expected an expression that math-verify can read")
    return truth


def _is_same(truth: list[Any], answers: list[Any]) -> bool:
    """Whether some reading of the answer equals some reading of the truth.

    Each pair is compared on its own: one pair that sympy cannot compare must not hide the next pair that is equal.
    """
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


def _limit_s() -> int | None:
    return STEP_LIMIT_S if threading.current_thread() is threading.main_thread() else None
