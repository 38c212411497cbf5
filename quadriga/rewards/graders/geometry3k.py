# SPDX-License-Identifier: Apache-2.0
"""Geometry with pictures (Geometry3K): the answer by its meaning, and a little for the form.

    score = (1 - format_weight) * acc + format_weight * format

acc: the last `\\boxed{...}` means the same as the ground truth, see `graders/math.py`. format: the response is
`<think>...</think>` followed by something with a box. Both are returned, and logged apart.
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
    """The weighted sum of "acc" and "format". Raises ValueError, and returns "ungradable": see `graders/math.py`."""
    answer = math.compute_score(solution_str, ground_truth, extra_info)
    # Without a box the reader of mathematics would take any number of the text.
    acc = answer["score"] if "\\boxed" in solution_str else 0.0
    thought, _, rest = solution_str.partition("</think>")
    has_form = thought.lstrip().startswith("<think>") and "}" in rest.partition("\\boxed{")[2]
    score = weighted(
        {"acc": acc, "format": float(has_form)},
        {"acc": 1.0 - format_weight, "format": format_weight},
    )
    pred = answer["pred"] if "\\boxed" in solution_str else None
    return {**score, "pred": pred, "ungradable": answer["ungradable"]}
