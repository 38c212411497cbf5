# SPDX-License-Identifier: Apache-2.0
"""Geometry with pictures (Geometry3K): scores the answer, and with a small weight its format.

    score = (1 - format_weight) * acc + format_weight * format

acc     whether the last `\\boxed{...}` means the same as the ground truth (`graders/math.py`)
format  whether the response is `<think>...</think>` followed by text with a box

Both are returned and logged separately.
"""

from typing import Any

from quadriga.rewards.components import weighted
from quadriga.rewards.graders import math


def compute_score(
    solution_str: str,
    ground_truth: str,
    extra_info: dict[str, Any] | None = None,
    *,
    format_weight: float = 0.1,
) -> dict[str, Any]:
    """Score the answer by its meaning and its format.

    Args:
        solution_str: the response.
        ground_truth: the right answer, as for `graders/math.py`.
        extra_info: not used.
        format_weight: weight of the format, from 0 to 1.

    Returns:
        "score", "acc", "format", "pred", and "ungradable" as for `graders/math.py`.

    Raises:
        ValueError: the ground truth is not mathematics, or too hard to evaluate.
    """
    answer = math.compute_score(solution_str, ground_truth, extra_info)
    acc = 0.0
    pred = None
    # Without a box, `math` takes an answer from elsewhere in the text, which does not count here.
    if "\\boxed" in solution_str:
        acc = answer["score"]
        pred = answer["pred"]
    thought, _, conclusion = solution_str.partition("</think>")
    has_box = "}" in conclusion.partition("\\boxed{")[2]
    has_format = has_box and thought.lstrip().startswith("<think>")
    score = weighted(
        {"acc": acc, "format": float(has_format)},
        {"acc": 1.0 - format_weight, "format": format_weight},
    )
    return {**score, "pred": pred, "ungradable": answer["ungradable"]}
