# SPDX-License-Identifier: Apache-2.0
"""DAPO's mathematics (arXiv:2503.14476): the answer behind the last "Answer:", right 1, wrong -1.

Where there is no such line, the last `\\boxed{...}` counts. Two answers are the same

1. if their texts are, blanks, `$`, units of text, `\\left` and the like aside, or their numbers are; and if not,
2. if they mean the same to math-verify (`graders/math.py`). Without the package, or with `use_symbols=False`, only 1
   counts.
"""

import re
from importlib.util import find_spec
from typing import Any

from quadriga.rewards.graders.reading import find_numbers, last_box, plain_math

if HAS_SYMBOLS := find_spec("math_verify") is not None:
    from quadriga.rewards.graders import math as symbols

_TAIL_CHARS = 2000
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}")
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
    """1 for the right answer, `wrong_score` for any other; "acc" is 1 or 0, "ungradable" as in `graders/math.py`.

    Raises:
        ValueError: the ground truth is empty, or it has to be compared by its meaning and cannot be.
    """
    if not (truth := normal(str(ground_truth))):
        raise ValueError(f"ground truth: got {ground_truth!r}, expected an answer")
    if (answer := extract_answer(solution_str)) is None:
        return {"score": wrong_score, "acc": 0.0, "pred": None, "ungradable": ""}
    text = normal(answer)
    is_right = text == truth
    ungradable = ""
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
    """What stands behind the last "Answer:" near the end, or in the last box; None where neither is."""
    tail = solution_str[-_TAIL_CHARS:]
    lines = _ANSWER.findall(tail)
    text = lines[-1] if lines else tail
    box = last_box(text)
    return box if box is not None else (text.lstrip(" *").rstrip(" .*") if lines else None)


def normal(text: str) -> str:
    """An answer as its text is compared."""
    box = last_box(text)
    text = _TEXT.sub(r"\1", plain_math(text if box is None else box))
    text = _FRACTION.sub(r"\\frac", _LEFT_OUT.sub("", text))
    # "x = 5" answers with 5, and "x >= 5" does not.
    head, mark, rest = text.rpartition("=")
    text = rest if mark and len(head) <= 2 and head[-1:] not in ("<", ">", "!") else text
    return text.rstrip(".").lower()
