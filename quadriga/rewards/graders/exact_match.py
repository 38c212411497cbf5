# SPDX-License-Identifier: Apache-2.0
"""Grades by whether the whole response equals an accepted answer, apart from white space."""

from typing import Any


def compute_score(
    solution_str: str,
    ground_truth: str | list[str],
    extra_info: Any = None,
    *,
    ignore_case: bool = False,
) -> dict[str, Any]:
    """Score 1 if the response equals a right answer, else 0.

    Args:
        solution_str: the response.
        ground_truth: the right answer, or a list of them.
        extra_info: not used.
        ignore_case: whether upper and lower case are the same.

    Returns:
        "score", and as "pred" the response as it was compared.

    Raises:
        ValueError: the ground truth is neither a text nor a list of texts.
    """
    accepted = [ground_truth] if isinstance(ground_truth, str) else list(ground_truth)
    if not accepted or not all(isinstance(answer, str) for answer in accepted):
        raise ValueError(f"ground truth: got {ground_truth!r}, expected a text or a list of texts")
    texts = [solution_str, *accepted]
    if ignore_case:
        texts = [text.casefold() for text in texts]
    response, *answers = (" ".join(text.split()) for text in texts)
    return {"score": float(response in answers), "pred": response}
