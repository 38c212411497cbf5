# SPDX-License-Identifier: Apache-2.0
"""DAPO's mathematics (arXiv:2503.14476): the answer behind the last "Answer:", right 1, wrong -1.

Where there is no such line, the last `\\boxed{...}` counts. Two answers are the same

1. if their texts are, blanks, `$`, units of text, `\\left` and the like aside, or their numbers are; and if not,
2. if they mean the same to math-verify (`graders/math.py`), which runs in a process of its own with a time limit:
   an expression such as 9^{9^9} holds an interpreter where no alarm reaches it. Without the package, or with
   `use_symbols=False`, only 1 counts.

A comparison that runs out of time raises: it is counted as an error, and is not a wrong answer.
"""

import re
from functools import cache
from importlib.util import find_spec
from typing import Any

from quadriga.rewards.graders.reading import find_numbers, last_box, plain_math
from quadriga.rewards.pool import GradingPool
from quadriga.rewards.scoring import ScoreFunction

SYMBOLS_LIMIT_S = 5.0
_TAIL_CHARS = 2000
_ANSWER = re.compile(r"(?i)answer\s*:\s*([^\n]+)")
_TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}")
_LEFT_OUT = re.compile(r"\\left|\\right|\\[!,;: ]|\\%|%|\\\$|\$|\\degree|\^\\circ|\^\{\\circ\}|\s|\*\*")
_FRACTION = re.compile(r"\\[dt]frac")
_PLAIN_NUMBER = re.compile(r"[-+\u2212]?[0-9.,]+")


def compute_score(
    solution_str: str, ground_truth: str, extra_info: Any = None, *, wrong_score: float = -1.0, use_symbols: bool = True
) -> dict[str, Any]:
    """1 for the right answer, `wrong_score` for any other; "acc" is 1 or 0.
    Raises ValueError: the ground truth is empty.
    Raises TimeoutError: math-verify did not finish in 5 s. RuntimeError: it failed otherwise; its own error is quoted.
    """
    if not (truth := normal(str(ground_truth))):
        raise ValueError(f"ground truth: got {ground_truth!r}, expected an answer")
    if (answer := extract_answer(solution_str)) is None:
        return {"score": wrong_score, "acc": 0.0, "pred": None}
    text = normal(answer)
    is_right = text == truth
    if not is_right and _PLAIN_NUMBER.fullmatch(text) and _PLAIN_NUMBER.fullmatch(truth):
        numbers = find_numbers(text)
        is_right = len(numbers) == 1 and numbers == find_numbers(truth)
    if not is_right and use_symbols and find_spec("math_verify") is not None:
        is_right = _is_same_meaning(answer, str(ground_truth))
    return {"score": 1.0 if is_right else wrong_score, "acc": float(is_right), "pred": text}


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


def _is_same_meaning(answer: str, ground_truth: str) -> bool:
    row = {"data_source": "lighteval/MATH", "ground_truth": ground_truth, "extra_info": {}}
    row["solution_str"] = f"\\boxed{{{answer.strip('$')}}}"
    (outcome,) = _symbols().grade([row], timeout_s=SYMBOLS_LIMIT_S)
    if outcome.kind == "timeout":
        raise TimeoutError(f"math-verify did not finish in {SYMBOLS_LIMIT_S:g} s on {answer[-200:]!r}: {outcome.error}")
    if outcome.error:
        raise RuntimeError(f"math-verify failed on {answer[-200:]!r}: {outcome.error}")
    return outcome.score == 1.0


@cache
def _symbols() -> GradingPool:
    # It starts with the first question, ends with this process, and is replaced when it is killed.
    return GradingPool(ScoreFunction(), num_workers=1)
