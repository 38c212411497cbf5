# SPDX-License-Identifier: Apache-2.0
"""Grades any task of the reasoning-gym library by the library's own scorer for that task.

The scorer needs the entry that the task generated. A row has it in `extra_info`, as "entry", or as
"metadata" (with the ground truth as the entry's answer). Either may be text in JSON, which is how a
parquet file stores entries of different shapes; {"__tuple__": [...]} in that text stands for a
tuple, which some scorers distinguish from a list. The answer is the text in the last `<answer>`
tags of the response, or the whole response if there are none.

Some scorers raise an error on an answer that they cannot parse (prime_factorization on "foo bar",
coin_flip on "1e400"). Such an answer is wrong. If the scorer cannot judge the entry's own answer
either, or misses a key of the entry, the row is at fault and the error is raised. In the same way,
an answer is wrong if the scorer takes more than `CPU_LIMIT_S` of CPU time for it but less for the
entry's own answer; then "ungradable" in the result gives the reason.
"""

import json
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

from reasoning_gym import get_score_answer_fn

from quadriga.rewards.cpu_limit import CPULimitError, cpu_limit
from quadriga.rewards.graders.reading import last_answer

CPU_LIMIT_S = 1.7

# Errors of a scorer that cannot parse an answer: no number, too large a number, or other JSON than
# expected.
_PARSING_ERRORS = (
    ValueError,
    TypeError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)
# An answer without content (no move, no colour), for entries that have no answer of their own.
_EMPTY_ANSWER = "{}"
# Cached, because the library makes a data set of the task for each scorer.
_scorer: Callable[[str], Callable[..., float]] = cache(get_score_answer_fn)


class MissingKeyError(KeyError):
    """An entry lacks a key that the scorer of its task needs."""


class _Record(dict[str, Any]):
    """A dict that raises MissingKeyError for a missing key.

    So a key that an entry lacks is told apart from one that a scorer misses in a parsed answer.
    """

    def __missing__(self, key: str) -> Any:
        raise MissingKeyError(
            f"extra_info: the entry has no {key!r}, which the scorer of its task needs"
        )


def compute_score(
    solution_str: str,
    ground_truth: str | None,
    extra_info: dict[str, Any] | None = None,
    *,
    task: str = "",
) -> dict[str, Any]:
    """Score a response with the library's scorer, from 0 to 1; some tasks give partial credit.

    Args:
        solution_str: the response.
        ground_truth: the entry's answer, used if `extra_info` does not have the whole entry.
        extra_info: has the entry as "entry" or its metadata as "metadata".
        task: name of the task; if empty, the entry's `metadata["source_dataset"]`.

    Returns:
        "score", "pred", and "ungradable" if the answer exceeded a limit.

    Raises:
        ValueError: there is no entry or no such task, or the entry's own answer cannot be scored.
        MissingKeyError: the entry is incomplete. Other errors of a scorer over a faulty entry are
            raised as they are.
    """
    entry = _read_entry(ground_truth, extra_info or {})
    name = task or (entry.get("metadata") or {}).get("source_dataset") or ""
    # The library's own function for this takes quadratic time.
    tagged = last_answer(solution_str)
    answer = (solution_str if tagged is None else tagged).strip()
    scorer = _scorer(name)
    result: dict[str, Any] = {"score": 0.0, "pred": answer}
    try:
        with cpu_limit(CPU_LIMIT_S):
            result["score"] = float(scorer(answer=answer, entry=entry))
    except MissingKeyError:
        # It is a LookupError, too, and must not count as a wrong answer.
        raise
    except (*_PARSING_ERRORS, CPULimitError, MemoryError) as error:
        if not isinstance(error, _PARSING_ERRORS):
            result["ungradable"] = f"{type(error).__name__}: {error}"
        # If the entry is at fault and not the answer, scoring the entry's own answer raises an
        # error too, which is passed on.
        reference = entry.get("answer")
        if reference is None:
            reference = _EMPTY_ANSWER
        try:
            with cpu_limit(CPU_LIMIT_S):
                scorer(answer=reference, entry=entry)
        except CPULimitError as too_slow:
            raise ValueError(
                f"extra_info: got an entry whose own answer cannot be scored: {too_slow}"
            ) from too_slow
    return result


def _read_entry(ground_truth: str | None, extra_info: Mapping[str, Any]) -> _Record:
    """Read the entry of a row, as a dict whose missing keys raise MissingKeyError.

    Raises:
        ValueError: the row has no entry, or one of another form.
    """
    # `extra_info` has the whole entry, or the metadata alone, with question and answer elsewhere.
    key = "entry"
    if extra_info.get(key) is None:
        key = "metadata"
    value = extra_info.get(key)
    if value is None:
        got = f"the keys {sorted(extra_info)}" if extra_info else "nothing"
        raise ValueError(
            f"extra_info: got {got}, expected the reasoning-gym 'entry' or its 'metadata'"
        )
    if isinstance(value, str):
        # JSON has no tuples: they are written as {"__tuple__": [...]}.
        value = json.loads(
            value,
            object_hook=lambda entry: (
                tuple(entry["__tuple__"]) if list(entry) == ["__tuple__"] else entry
            ),
        )
    if not isinstance(value, Mapping):
        raise ValueError(
            f"extra_info[{key!r}]: got {type(value).__name__}, "
            "expected a dict or a dict as JSON text"
        )
    entry = _Record(value)
    if key == "metadata":
        entry = _Record(
            question=extra_info.get("question", ""), answer=ground_truth, metadata=value
        )
    metadata = entry.get("metadata")
    if isinstance(metadata, Mapping):
        entry["metadata"] = _Record(metadata)
    return entry
