# SPDX-License-Identifier: Apache-2.0
"""Grade-school word problems (GSM8K), whose answer is a number.

The method "strict" takes the number after `####`, as the data set writes it; "flexible" takes the
last number of the response.
"""

from decimal import Decimal
from typing import Any, Literal

from quadriga.rewards.graders.reading import find_numbers, leading_number, plain_text, true_number

MARK = "####"


def extract_solution(
    solution_str: str, method: Literal["strict", "flexible"] = "strict"
) -> Decimal | None:
    """Read the number that a response gives as its answer.

    Args:
        solution_str: the response.
        method: "strict" reads the number after the last `####`, "flexible" the last number.

    Returns:
        The number, or None if there is none.

    Raises:
        ValueError: the method is unknown.
    """
    if method == "strict":
        # `mark` is empty if the response does not have it.
        _, mark, tail = solution_str.rpartition(MARK)
        return leading_number(tail) if mark else None
    if method == "flexible":
        numbers = find_numbers(solution_str)
        return numbers[-1] if numbers else None
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
    """Compare the number that a response gives as its answer with the ground truth.

    Args:
        solution_str: the response.
        ground_truth: the number, or the worked answer of the data set, which ends in
            `#### number`.
        extra_info: not used.
        method: how to find the number, as for `extract_solution`.
        format_score: score of a wrong number.
        score: score of the right number.

    Returns:
        `score`, which is 0 if the response gives no number, and `pred`, the number as text or None.

    Raises:
        ValueError: the ground truth is not a number, or the method is unknown.
    """
    truth = true_number(str(ground_truth).rpartition(MARK)[2])
    answer = extract_solution(solution_str, method)
    if answer is None:
        return {"score": 0.0, "pred": None}
    return {"score": score if answer == truth else format_score, "pred": plain_text(answer)}
