# SPDX-License-Identifier: Apache-2.0
"""DAPO's mathematics (arXiv:2503.14476): a right answer after the last "Answer:" scores 1, else -1.

Without such a line the last `\\boxed{...}` is the answer. Two answers are the same

1. if their texts are the same apart from white space, `$`, units as text, `\\left` and the like, or
   if both are the same number; else
2. if math-verify finds that they mean the same (`graders/math.py`). If the package math-verify is
   not installed, or with `use_symbols=False`, only rule 1 counts.
"""

import re
from importlib.util import find_spec
from typing import Any

from quadriga.rewards.graders.reading import find_numbers, last_box, plain_math

HAS_SYMBOLS = find_spec("math_verify") is not None
if HAS_SYMBOLS:
    from quadriga.rewards.graders import math as symbols

_TAIL_CHARS = 2000  # only the end of a response is searched for the answer
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}")
# Markup that does not change the meaning of an answer, and white space.
_LEFT_OUT = re.compile(
    r"\\left|\\right|\\[!,;: ]|\\%|%|\\\$|\$|\\degree|\^\\circ|\^\{\\circ\}|\s|\*\*"
)
_FRACTION = re.compile(r"\\[dt]frac")
_PLAIN_NUMBER = re.compile(r"[-+\u2212]?[0-9.,]+")


def compute_score(
    solution_str: str,
    ground_truth: str,
    extra_info: Any = None,
    *,
    wrong_score: float = -1.0,
    use_symbols: bool = True,
) -> dict[str, Any]:
    """Score 1 for the right answer and `wrong_score` for a wrong or missing one.

    Args:
        solution_str: the response.
        ground_truth: the right answer.
        extra_info: not used.
        wrong_score: score of a wrong answer.
        use_symbols: whether answers whose texts differ are compared by meaning.

    Returns:
        "score"; "acc", 1 or 0; "pred"; and "ungradable" as for `graders/math.py`.

    Raises:
        ValueError: the ground truth is empty, or has to be compared by its meaning and cannot be.
    """
    truth = normalize(str(ground_truth))
    if not truth:
        raise ValueError(f"ground truth: got {ground_truth!r}, expected an answer")
    answer = extract_answer(solution_str)
    if answer is None:
        return {"score": wrong_score, "acc": 0.0, "pred": None, "ungradable": ""}
    text = normalize(answer)
    is_right = text == truth
    ungradable = ""
    # The same number may be written in two ways, as in 1,000 and 1000.
    if not is_right and _PLAIN_NUMBER.fullmatch(text) and _PLAIN_NUMBER.fullmatch(truth):
        numbers = find_numbers(text)
        is_right = len(numbers) == 1 and numbers == find_numbers(truth)
    if not is_right and use_symbols and HAS_SYMBOLS:
        graded = symbols.compute_score(f"\\boxed{{{answer.strip('$')}}}", str(ground_truth))
        is_right = graded["score"] == 1.0
        ungradable = graded["ungradable"]
    score = 1.0 if is_right else wrong_score
    return {"score": score, "acc": float(is_right), "pred": text, "ungradable": ungradable}


def extract_answer(solution_str: str) -> str | None:
    """Read the answer after the last "Answer:" near the end, or else the last box there.

    Returns:
        The answer; None if there is neither.
    """
    text = solution_str[-_TAIL_CHARS:]
    lines = _ANSWER.findall(text)
    if lines:
        text = lines[-1]
    # A box in the line after "Answer:" holds the answer, too.
    box = last_box(text)
    if box is not None:
        return box
    return text.lstrip(" *").rstrip(" .*") if lines else None


def normalize(text: str) -> str:
    """Normalise an answer to the form in which texts are compared."""
    box = last_box(text)
    text = _TEXT.sub(r"\1", plain_math(text if box is None else box))
    text = _FRACTION.sub(r"\\frac", _LEFT_OUT.sub("", text))
    # "x=5", with a short name, has the answer 5, but "x>=5" is an answer itself.
    name, mark, value = text.rpartition("=")
    if mark and len(name) <= 2 and not name.endswith(("<", ">", "!")):
        text = value
    return text.rstrip(".").lower()
