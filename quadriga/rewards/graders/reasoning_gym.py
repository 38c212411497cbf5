# SPDX-License-Identifier: Apache-2.0
"""Any task of the reasoning-gym library, graded by the library's own scorer for that task.

The scorer wants the entry that the task generated. A row carries it in `extra_info`: as "entry", or as "metadata"
(with the ground truth as the entry's answer). Either may be JSON text, which is how a parquet file keeps entries of
different shapes. The answer is what stands in the last `<answer>` tags of the response, or the whole response where
there are none.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from reasoning_gym import get_score_answer_fn
from reasoning_gym.utils import extract_answer

SOURCE_PREFIX = "reasoning_gym/"


def compute_score(
    solution_str: str, ground_truth: str | None, extra_info: dict[str, Any] | None = None, *, task: str = ""
) -> dict[str, Any]:
    """The library's score of the response, between 0 and 1; some tasks give partial credit.

    Args:
        solution_str: the response.
        ground_truth: the entry's answer, used where `extra_info` does not hold the whole entry.
        extra_info: "entry" or "metadata", see above.
        task: name of the task; without it the entry's `metadata["source_dataset"]`.
    """
    entry = _entry(ground_truth, extra_info or {})
    name = task or (entry.get("metadata") or {}).get("source_dataset") or ""
    answer = extract_answer(solution_str)
    if answer is None:
        answer = solution_str.strip()
    return {"score": float(_scorer(name)(answer=answer, entry=entry)), "pred": answer}


def _entry(ground_truth: str | None, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    if extra_info.get("entry") is not None:
        return _decoded(extra_info["entry"], "entry")
    if extra_info.get("metadata") is None:
        got = f"the keys {sorted(extra_info)}" if extra_info else "nothing"
        raise ValueError(f"extra_info: got {got}, expected the reasoning-gym 'entry' or its 'metadata'")
    return {
        "question": extra_info.get("question", ""),
        "answer": ground_truth,
        "metadata": _decoded(extra_info["metadata"], "metadata"),
    }


def _decoded(value: Any, key: str) -> dict[str, Any]:
    decoded = json.loads(value) if isinstance(value, str) else value
    if not isinstance(decoded, Mapping):
        raise ValueError(f"extra_info[{key!r}]: got {type(decoded).__name__}, expected a dict or a dict as JSON text")
    return dict(decoded)


@cache
def _scorer(task: str) -> Callable[..., float]:
    return get_score_answer_fn(task)
