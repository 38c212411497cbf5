# SPDX-License-Identifier: Apache-2.0
"""Short answers to questions about facts (Search-R1): exact match, sub-match and F1, as in SQuAD.

The answer is the text in the last `<answer>` tags of the response. Answers are compared in lower
case, without punctuation, without the articles a, an and the, and with single blanks.

    em         the answer is one of the accepted answers
    sub_match  the answer contains one of the accepted answers, as whole words
    f1         F1 of the words that the answer shares with an accepted answer; the best of these

One metric is the score; all three are returned and logged separately.
"""

import re
import string
from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

from quadriga.rewards.graders.reading import last_answer

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_NO_PUNCTUATION = str.maketrans("", "", string.punctuation)


def compute_score(
    solution_str: str,
    ground_truth: Any,
    extra_info: dict[str, Any] | None = None,
    *,
    metric: Literal["em", "sub_match", "f1"] = "em",
    format_score: float = 0.0,
) -> dict[str, Any]:
    """Score the answer in tags by one of the metrics. The score is 0 without an answer in tags.

    Args:
        solution_str: the response.
        ground_truth: an accepted answer, a list of them, or a dict that has either as "target".
        extra_info: not used.
        metric: the metric that is the score.
        format_score: score of an answer in tags for which the metric is 0.

    Returns:
        "score", "em", "sub_match", "f1" and "pred".

    Raises:
        ValueError: the metric is unknown, or the ground truth has another form or an empty answer.
    """
    if metric not in ("em", "sub_match", "f1"):
        raise ValueError(
            f"question answering metric: got {metric!r}, expected 'em', 'sub_match' or 'f1'"
        )
    accepted = _accepted_answers(ground_truth)
    tagged = last_answer(solution_str)
    if tagged is None:
        return {"score": 0.0, "em": 0.0, "sub_match": 0.0, "f1": 0.0, "pred": None}
    answer = normalize(tagged)
    words = answer.split()
    f1 = 0.0
    for text in accepted:
        # Harmonic mean of precision and recall over words. A repeated word counts as often as both
        # answers have it.
        accepted_words = text.split()
        num_common = (Counter(words) & Counter(accepted_words)).total()
        f1 = max(f1, 2 * num_common / (len(words) + len(accepted_words)))
    # Compared with a blank on both sides, so that only whole words match.
    sub_match = any(f" {text} " in f" {answer} " for text in accepted)
    values = {"em": float(answer in accepted), "sub_match": float(sub_match), "f1": f1}
    return {"score": values[metric] or format_score, **values, "pred": answer}


def _accepted_answers(ground_truth: Any) -> list[str]:
    """Read and normalise the accepted answers of a row.

    Raises:
        ValueError: the ground truth has another form, no answer, or an empty one.
    """
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    if hasattr(target, "tolist"):
        target = target.tolist()
    texts = [target] if isinstance(target, str) else target
    # Stays empty for a ground truth of any other form.
    accepted = []
    if isinstance(texts, list | tuple) and all(isinstance(text, str) for text in texts):
        accepted = [normalize(text) for text in texts]
    if not accepted or not all(accepted):
        raise ValueError(
            f"ground truth: got {ground_truth!r}, expected a text, texts, or a dict with 'target'"
        )
    return accepted


def normalize(text: str) -> str:
    """Normalise a text to the form in which it is compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
