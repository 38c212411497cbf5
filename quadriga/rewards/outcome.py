# SPDX-License-Identifier: Apache-2.0
"""What became of one graded sample: a score with its extras, or the reason why there is none.

A grading process turns whatever a score function returned into an `Outcome` of plain Python values, so that nothing
a user's function invents has to be pickled, and so that a string, None or NaN is an error with a reason and never a
number.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

from quadriga.errors import traceback_text

_LARGEST = 3.4028234663852886e38  # of float32, in which a batch has its scores
Kind = Literal["graded", "raised", "invalid", "timeout", "died", "skipped", "ungradable"]

UNGRADABLE = "ungradable"
"""Entry of a grade: why a built-in grader could not evaluate the response, which then gets what a wrong one gets."""


class Outcome(NamedTuple):
    """One sample's grade. `error` is empty exactly when `kind` is "graded"; otherwise the score is 0."""

    score: float
    extra: dict[str, Any]
    error: str
    kind: Kind


def failure(kind: Kind, error: str) -> Outcome:
    """The outcome of a sample that has no grade."""
    return Outcome(0.0, {}, error, kind)


def raised(error: BaseException) -> Outcome:
    """The outcome of a sample whose grader raised, with the grader's own traceback."""
    # The outermost frame is the grading process's own: it says nothing about the mistake.
    inner = error.__traceback__.tb_next if error.__traceback__ else None
    return failure(
        "timeout" if isinstance(error, TimeoutError) else "raised", traceback_text(error, inner)
    )


def read_outcome(returned: Any) -> Outcome:
    """What a score function returned for one sample: a number, or a dict with the number as "score"."""
    value, extra, what = returned, {}, "the score function returned"
    if isinstance(returned, Mapping):
        if "score" not in returned:
            keys = ", ".join(map(str, returned)) or "no keys"
            return failure("invalid", f"{what} a dict with {keys}, expected one with 'score'")
        value, what = returned["score"], "the score function's dict has as 'score'"
        extra = {str(name): _plain(entry) for name, entry in returned.items() if name != "score"}
    number = value.item() if hasattr(value, "item") and math.prod(value.shape) == 1 else value
    if not isinstance(number, Real):
        text = repr(value)
        shown = (
            "None"
            if value is None
            else f"{type(value).__name__} {text if len(text) <= 80 else text[:80] + '...'}"
        )
        return failure("invalid", f"{what} {shown}, expected a number")
    if not abs(number) <= _LARGEST:
        shown = number if isinstance(number, float) else "a number too large for a float"
        return failure("invalid", f"{what} {shown}, expected a finite number that float32 can hold")
    return Outcome(float(number), extra, "", "graded")


def read_outcomes(returned: Any, num_samples: int) -> list[Outcome]:
    """What a batch score function returned: one number or dict a sample, in order."""
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    if (
        not isinstance(returned, Sequence)
        or isinstance(returned, str)
        or len(returned) != num_samples
    ):
        got = type(returned).__name__ + (
            f" of length {len(returned)}" if hasattr(returned, "__len__") else ""
        )
        error = f"the batch score function returned {got}, expected a list of {num_samples} scores"
        return [failure("invalid", error)] * num_samples
    return [read_outcome(entry) for entry in returned]


def _plain(value: Any) -> Any:
    """The value in plain Python types; of an object that has no such form, its text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value)
