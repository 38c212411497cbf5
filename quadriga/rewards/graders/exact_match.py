# SPDX-License-Identifier: Apache-2.0
"""The response is the answer, word for word, blanks at its ends and runs of blanks aside."""

from typing import Any


def compute_score(
    solution_str: str,
    ground_truth: str | list[str],
    extra_info: dict[str, Any] | None = None,
    *,
    ignore_case: bool = False,
) -> dict[str, Any]:
    """1 if the response equals the ground truth, or one of them where several are accepted, else 0."""
    accepted = [ground_truth] if isinstance(ground_truth, str) else list(ground_truth)
    if not accepted or not all(isinstance(answer, str) for answer in accepted):
        raise ValueError(f"ground truth: got {ground_truth!r}, expected a text or a list of texts")
    answer = _normal(solution_str, ignore_case)
    is_right = any(answer == _normal(text, ignore_case) for text in accepted)
    return {"score": float(is_right), "pred": answer}


def _normal(text: str, ignore_case: bool) -> str:
    text = " ".join(text.split())
    return text.casefold() if ignore_case else text
