# SPDX-License-Identifier: Apache-2.0
"""Grade-school word problems (GSM8K): a number as the answer.

"strict" wants the number behind `####`, the data set's own form; "flexible" takes the last number of the response.
"""

from decimal import Decimal
from typing import Any, Literal

from quadriga.rewards.graders.reading import find_numbers, leading_number, plain_text, true_number

MARK = "####"


def extract_solution(
    solution_str: str, method: Literal["strict", "flexible"] = "strict"
) -> Decimal | None:
    """The number that a response gives as its answer, or None."""
    if method == "strict":
        _, mark, tail = solution_str.rpartition(MARK)
        return leading_number(tail) if mark else None
    if method == "flexible":
        return next(reversed(find_numbers(solution_str)), None)
    raise ValueError(f"gsm8k method: got {method!r}, expected 'strict' or 'flexible'")


def compute_score(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    method: Literal["strict", "flexible"] = "strict",
    format_score: float = 0.0,
    score: float = 1.0,
) -> dict[str, Any]:
    """`score` for the right number, `format_score` for a wrong one in the right form, 0 where no number is found.
    The ground truth is the number, or the data set's whole worked answer that ends in `#### number`."""
    truth = true_number(str(ground_truth).rpartition(MARK)[2])
    if (answer := extract_solution(solution_str, method)) is None:
        return {"score": 0.0, "pred": None}
    return {"score": score if answer == truth else format_score, "pred": plain_text(answer)}
