# SPDX-License-Identifier: Apache-2.0
"""The outcome of grading one sample: a score and further entries, or why it has no score.

A grading process turns whatever a score function returned into an `Outcome` of plain Python values.
So no object of a user's class has to be pickled, and a string, None or NaN becomes an error with a
reason.
"""

import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any, Literal, NamedTuple

from quadriga.errors import traceback_text

_MAX_FLOAT32 = 3.4028234663852886e38  # scores in a batch are float32
_MAX_SHOWN_CHARS = 80

# A "graded" sample has a score. The other kinds say why there is none: the grader raised an error;
# it returned something invalid; it took too long; its process died; the round ended before the
# sample was graded ("skipped"); a built-in grader's process reached the CPU limit ("ungradable");
# the sample has no score on purpose ("unscored"), which is no failure.
Kind = Literal[
    "graded", "raised", "invalid", "timeout", "died", "skipped", "ungradable", "unscored"
]

UNSCORED = "unscored"
"""Kind of the outcome of a sample that has no score on purpose. An entry of `RewardOutput.extra` of
this name says for each sample whether its outcome is of this kind."""

UNGRADABLE = "ungradable"
"""Entry of `Outcome.extra`: why a built-in grader could not evaluate a response.

Such a response gets the score of a wrong one."""


class Outcome(NamedTuple):
    """The grade of one sample, or why it has none.

    Attributes:
        score: the score; 0 unless `kind` is "graded".
        extra: what the score function returned beside the score.
        error: why the sample has no grade; "" if `kind` is "graded" or "unscored".
        kind: how grading ended. An unscored sample is left out of baselines and of the loss.
    """

    score: float
    extra: dict[str, Any]
    error: str
    kind: Kind


def failure(kind: Kind, error: str) -> Outcome:
    """Make the outcome of a sample that has no grade.

    Args:
        kind: any kind but "graded" and "unscored".
        error: the reason.

    Returns:
        An outcome with score 0.
    """
    return Outcome(0.0, {}, error, kind)


def error_outcome(error: BaseException) -> Outcome:
    """Make the outcome of a sample whose grader raised an error, with the grader's traceback."""
    # Leave out the outermost frame, which is the caller's, so that the traceback shows the grader.
    grader_frames = error.__traceback__.tb_next if error.__traceback__ else None
    kind: Kind = "timeout" if isinstance(error, TimeoutError) else "raised"
    return failure(kind, traceback_text(error, grader_frames))


def read_outcome(returned: Any) -> Outcome:
    """Read the result of a score function.

    Args:
        returned: a number, or a dict with the number as "score" and further entries. A dict whose
            "score" is None leaves the sample unscored.

    Returns:
        The outcome. It is "invalid" if `returned` is anything else, or the number is not finite.
    """
    value = returned
    extra = {}
    subject = "the score function returned"  # beginning of an error
    if isinstance(returned, Mapping):
        if "score" not in returned:
            keys = ", ".join(map(str, returned)) or "no keys"
            return failure("invalid", f"{subject} a dict with {keys}, expected one with 'score'")
        value = returned["score"]
        subject = "the score function's dict has as 'score'"
        extra = {str(name): _plain(entry) for name, entry in returned.items() if name != "score"}

    if value is None and isinstance(returned, Mapping):
        return Outcome(0.0, extra, "", "unscored")
    number = value
    # An array or tensor of one element counts as a number.
    if hasattr(value, "item") and math.prod(value.shape) == 1:
        number = value.item()
    if not isinstance(number, Real):
        return failure("invalid", f"{subject} {_describe(value)}, expected a number")
    # Not `abs(number) > _MAX_FLOAT32`, which is false for NaN.
    if not abs(number) <= _MAX_FLOAT32:
        shown = number if isinstance(number, float) else "a number too large for a float"
        return failure(
            "invalid", f"{subject} {shown}, expected a finite number that float32 can hold"
        )
    return Outcome(float(number), extra, "", "graded")


def read_outcomes(returned: Any, num_samples: int) -> list[Outcome]:
    """Read the result of a batch score function.

    Args:
        returned: one number or dict per sample, in order, as a list, an array or a tensor.
        num_samples: number of samples that the function was called with.

    Returns:
        One outcome per sample. All are "invalid" if `returned` is no sequence of this length.
    """
    if hasattr(returned, "tolist"):
        returned = returned.tolist()
    is_list = isinstance(returned, Sequence) and not isinstance(returned, str)
    if is_list and len(returned) == num_samples:
        return [read_outcome(entry) for entry in returned]

    got = type(returned).__name__
    if hasattr(returned, "__len__"):
        got += f" of length {len(returned)}"
    error = f"the batch score function returned {got}, expected a list of {num_samples} scores"
    return [failure("invalid", error)] * num_samples


def _describe(value: Any) -> str:
    """Describe a value for a message: by its type, and the beginning of its `repr`."""
    if value is None:
        return "None"
    text = repr(value)
    if len(text) > _MAX_SHOWN_CHARS:
        text = f"{text[:_MAX_SHOWN_CHARS]}..."
    return f"{type(value).__name__} {text}"


def _plain(value: Any) -> Any:
    """Convert a value to plain Python types; an object of any other type becomes its text."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    return str(value)
