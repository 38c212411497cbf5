# SPDX-License-Identifier: Apache-2.0
"""Short answers to questions about facts (Search-R1): exact match, sub-match and F1, as SQuAD's evaluation counts them.

The answer is what stands in the last `<answer>` tags of the response. Answers are compared in lower case, without
punctuation, without the articles a, an and the, and with single blanks.

    em         the answer is one of the accepted ones
    sub_match  one of the accepted ones stands in the answer, as whole words
    f1         of the words that the answer and the accepted one nearest to it have in common

One of them is the score; all three are returned, and logged apart.
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
    """The score of the response by `metric`; an answer in tags that gets 0 by it gets `format_score`. The ground truth
    is an accepted answer, a list of them, or a dict that holds either as "target"."""
    if metric not in ("em", "sub_match", "f1"):
        raise ValueError(
            f"question answering metric: got {metric!r}, expected 'em', 'sub_match' or 'f1'"
        )
    target = ground_truth.get("target") if isinstance(ground_truth, Mapping) else ground_truth
    if hasattr(target, "tolist"):
        target = target.tolist()
    texts = [target] if isinstance(target, str) else target
    is_usable = (
        isinstance(texts, list | tuple) and texts and all(isinstance(text, str) for text in texts)
    )
    accepted = [normal(text) for text in texts] if is_usable else [""]
    if not all(accepted):
        raise ValueError(
            f"ground truth: got {ground_truth!r}, expected a text, texts, or a dict with 'target'"
        )
    if (found := last_answer(solution_str)) is None:
        return {"score": 0.0, "em": 0.0, "sub_match": 0.0, "f1": 0.0, "pred": None}
    answer = normal(found)
    words, f1 = answer.split(), 0.0
    for wanted in map(str.split, accepted):
        # Harmonic mean of precision and recall over the words, repeated words counted.
        num_common = (Counter(words) & Counter(wanted)).total()
        f1 = max(f1, 2 * num_common / (len(words) + len(wanted)))
    sub_match = any(f" {text} " in f" {answer} " for text in accepted)
    values = {"em": float(answer in accepted), "sub_match": float(sub_match), "f1": f1}
    return {"score": values[metric] or format_score, **values, "pred": answer}


def normal(text: str) -> str:
    """The text as it is compared."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_NO_PUNCTUATION)).split())
