# SPDX-License-Identifier: Apache-2.0
"""Geometry with pictures (Geometry3K): the meaning of the answer, and to a small part its form.

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
    """Score the meaning and the form of the answer.

    Args:
        solution_str: the response.
        ground_truth: the right answer, as for `graders/math.py`.
        extra_info: not used.
        format_weight: weight of the form, from 0 to 1.

    Returns:
        "score", "acc", "format", "pred", and "ungradable" as for `graders/math.py`.

    Raises:
        ValueError: the ground truth is not mathematics, or too hard to evaluate.
    """
    answer = math.compute_score(solution_str, ground_truth, extra_info)
    acc = 0.0
    pred = None
    # Without a box, `math` accepts any number of the text.
    if "\\boxed" in solution_str:
        acc = answer["score"]
        pred = answer["pred"]
    thought, _, rest = solution_str.partition("</think>")
    has_format = thought.lstrip().startswith("<think>") and "}" in rest.partition("\\boxed{")[2]
    score = weighted(
        {"acc": acc, "format": float(has_format)},
        {"acc": 1.0 - format_weight, "format": format_weight},
    )
    return {**score, "pred": pred, "ungradable": answer["ungradable"]}
