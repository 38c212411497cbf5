# SPDX-License-Identifier: Apache-2.0
"""A reward function of your own: the share of words that begin with the letter, each word counted once."""

import re

FEWEST_WORDS = 6  # or "Bears." alone would be perfect


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict | None = None
) -> dict:
    """0 to 1; what stands beside the score appears in the validation metrics under its own name."""
    words = re.findall(r"[a-z]+", solution_str.lower())
    hits = {word for word in words if word.startswith(ground_truth)}
    return {"score": len(hits) / max(len(words), FEWEST_WORDS), "alliterations": len(hits)}
