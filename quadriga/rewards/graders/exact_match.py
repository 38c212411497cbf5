# SPDX-License-Identifier: Apache-2.0
"""The response is the answer, word for word, blanks at its ends and runs of blanks aside."""

from typing import Any


def compute_score(
    solution_str: str,
    ground_truth: str | list[str],
    extra_info: Any = None,
    *,
    ignore_case: bool = False,
) -> dict[str, Any]:
    """1 if the response equals the ground truth, or one of them where several are accepted, else 0."""
    accepted = [ground_truth] if isinstance(ground_truth, str) else list(ground_truth)
    if not accepted or not all(isinstance(answer, str) for answer in accepted):
        raise ValueError(f"ground truth: got {ground_truth!r}, expected a text or a list of texts")
    plain = [
        " ".join(text.casefold().split() if ignore_case else text.split())
        for text in (solution_str, *accepted)
    ]
    return {"score": float(plain[0] in plain[1:]), "pred": plain[0]}
