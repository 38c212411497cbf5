# SPDX-License-Identifier: Apache-2.0
"""Any task of the reasoning-gym library, graded by the library's own scorer for that task.

The scorer wants the entry that the task generated. A row carries it in `extra_info`: as "entry", or as "metadata"
(with the ground truth as the entry's answer). Either may be JSON text, which is how a parquet file keeps entries of
different shapes; {"__tuple__": [...]} in that text stands for a tuple, which some scorers distinguish from a list. The
answer is what stands in the last `<answer>` tags of the response, or the whole response where there are none.

Some of the library's scorers raise on an answer that they cannot parse (prime_factorization on "foo bar", coin_flip on
"1e400"). That is a wrong answer. A scorer that cannot judge the entry's own answer either, or misses a key of the
entry, has found a fault of the row, and its error goes up. So is an answer wrong that a scorer takes more than
`CPU_LIMIT_S` of CPU time for, if it takes less for the entry's own; "ungradable" says so."""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from reasoning_gym import get_score_answer_fn

from quadriga.rewards.cpu_limit import CPULimitError, cpu_limit
from quadriga.rewards.graders.reading import last_answer

CPU_LIMIT_S = 1.7

# What a scorer may raise over the text of an answer: not a number, too large a one, or JSON of another shape.
_MALFORMED = (ValueError, TypeError, ArithmeticError, LookupError, AttributeError, RecursionError)
_EMPTY_ANSWER = (
    "{}"  # the answer that says nothing, for entries without one of their own: no move, no colour
)
_scorer: Callable[[str], Callable[..., float]] = cache(
    get_score_answer_fn
)  # each makes a data set of the task


class MissingKeyError(KeyError):
    """The entry lacks something that the scorer of its task wants."""


class _Record(dict[str, Any]):
    """A dict whose missing keys raise another error than those of a parsed answer."""

    def __missing__(self, key: str) -> Any:
        raise MissingKeyError(
            f"extra_info: the entry has no {key!r}, which the scorer of its task wants"
        )


def compute_score(
    solution_str: str,
    ground_truth: str | None,
    extra_info: dict[str, Any] | None = None,
    *,
    task: str = "",
) -> dict[str, Any]:
    """The library's score of the response, between 0 and 1; some tasks give partial credit.

    The ground truth is the entry's answer, used where `extra_info` does not hold the whole entry. Without
    `task`, its name is the entry's `metadata["source_dataset"]`.
    Raises ValueError: there is no entry, or no such task.
    Raises MissingKeyError: the entry is incomplete. What else a scorer raises over a faulty entry goes up as it is."""
    entry = _entry(ground_truth, extra_info or {})
    name = task or (entry.get("metadata") or {}).get("source_dataset") or ""
    # The library's own reader takes quadratic time.
    found = last_answer(solution_str)
    answer = (solution_str if found is None else found).strip()
    scorer = _scorer(name)
    result: dict[str, Any] = {"score": 0.0, "pred": answer}
    try:
        with cpu_limit(CPU_LIMIT_S):
            result["score"] = float(scorer(answer=answer, entry=entry))
    except MissingKeyError:
        raise
    except (*_MALFORMED, CPULimitError, MemoryError) as error:
        if not isinstance(error, _MALFORMED):
            result["ungradable"] = f"{type(error).__name__}: {error}"
        # Is the answer to blame, or the row? The row's own answer tells: this raises if it is the row.
        reference = entry.get("answer")
        try:
            with cpu_limit(CPU_LIMIT_S):
                scorer(answer=_EMPTY_ANSWER if reference is None else reference, entry=entry)
        except CPULimitError as too_slow:
            raise ValueError(
                f"extra_info: got an entry whose own answer cannot be scored: {too_slow}"
            ) from too_slow
    return result


def _entry(ground_truth: str | None, extra_info: Mapping[str, Any]) -> _Record:
    """The entry of a row, in which a missing key is an error of its own."""
    key = next((key for key in ("entry", "metadata") if extra_info.get(key) is not None), None)
    if key is None:
        got = f"the keys {sorted(extra_info)}" if extra_info else "nothing"
        raise ValueError(
            f"extra_info: got {got}, expected the reasoning-gym 'entry' or its 'metadata'"
        )
    found = extra_info[key]
    if isinstance(found, str):
        found = json.loads(
            found,
            object_hook=lambda one: tuple(one["__tuple__"]) if [*one] == ["__tuple__"] else one,
        )
    if not isinstance(found, Mapping):
        raise ValueError(
            f"extra_info[{key!r}]: got {type(found).__name__}, expected a dict or a dict as JSON text"
        )
    if key == "metadata":
        found = {
            "question": extra_info.get("question", ""),
            "answer": ground_truth,
            "metadata": found,
        }
    metadata = found.get("metadata")
    return _Record(
        {**found, "metadata": _Record(metadata)} if isinstance(metadata, Mapping) else found
    )
