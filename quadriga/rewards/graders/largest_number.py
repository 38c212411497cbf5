# SPDX-License-Identifier: Apache-2.0
"""The quickstart's task, "Which is the largest: 27, 82 or 18?": the last number is the answer."""

from typing import Any

from quadriga.rewards.graders.reading import find_numbers, plain_text, true_number


def compute_score(
    solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    """Score 1 if the last number of the response equals the ground truth, else 0.

    Args:
        solution_str: the response.
        ground_truth: the right number.
        extra_info: not used.

    Returns:
        "score" and "pred".

    Raises:
        ValueError: the ground truth is no number.
    """
    truth = true_number(ground_truth)
    numbers = find_numbers(solution_str)
    answer = numbers[-1] if numbers else None
    return {"score": float(answer == truth), "pred": plain_text(answer)}
