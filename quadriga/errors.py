# SPDX-License-Identifier: Apache-2.0
"""All errors that Quadriga raises on purpose.

    QuadrigaError
    ├── ConfigError        a command line, a configuration file, a key
    │   └── MachineError   something this machine does not have: a file, a model, a package
    ├── DataError          a data file, a row, a tokenizer
    ├── ProtocolError      a DataProto that is inconsistent
    ├── WorkerError        a worker, a worker group, a resource pool, a dispatch mode
    │   ├── WorkerLostError  a worker whose process or node is gone, or does not answer
    │   └── NoRoomError      a cluster with fewer resources than the pools need
    ├── EngineError        a training engine
    │   └── PeerLostError  a collective that another process left
    ├── RolloutError       a generation engine
    │   └── EngineLostError  a generation engine whose process is gone
    ├── WeightSyncError    weights that differ from the trainer's
    ├── RewardError        a grader, a reward manager
    └── CheckpointError    a checkpoint that cannot be written or read
        └── DamagedCheckpointError  a checkpoint whose files are not as they were written

Each message has the form *where: got what, expected what. How to fix it.*
"""

import traceback
from collections.abc import Collection
from difflib import get_close_matches
from functools import partial
from types import TracebackType

from quadriga.redact import redact_text

_MAX_TRACEBACK_CHARACTERS = 8000


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Suggest known names that are similar to `name`, as a sentence for `fix`; "" if none is."""
    # A name that differs only in case is surely meant, so no other is suggested.
    near = [candidate for candidate in known if candidate.casefold() == name.casefold()]
    if not near:
        near = get_close_matches(name, known, cutoff=0.5)
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else ""


class QuadrigaError(Exception):
    """Base class of all errors that Quadriga raises on purpose.

    Args:
        where: key, file or method at which the error arose.
        got: what was there.
        expected: what should be there.
        fix: what to do about it, as a sentence.
    """

    # The worker that raised the error, as in "actor[rank 3/8 on 10.0.0.2]"; its traceback is a note
    # of the error. "" if this process raised it.
    worker: str = ""

    def __init__(self, where: str, got: str = "", expected: str = "", fix: str = "") -> None:
        self.where = where
        self.got = got
        self.expected = expected
        self.fix = fix

    def __str__(self) -> str:
        facts = []
        if self.got:
            facts.append(f"got {self.got}")
        if self.expected:
            facts.append(f"expected {self.expected}")
        message = self.where
        if facts:
            message += f": {', '.join(facts)}"
        # A question that is quoted at the end needs no full stop.
        if not message.endswith("?"):
            message += "."
        return redact_text(f"{message} {self.fix}".strip())

    def __reduce__(self):
        fields = {"got": self.got, "expected": self.expected, "fix": self.fix}
        # Attributes that were set after construction are pickled as well.
        attached = {key: vars(self)[key] for key in ("worker", "__notes__") if key in vars(self)}
        return partial(type(self), **fields), (self.where,), attached or None


class ConfigError(QuadrigaError):
    """A command line, a configuration file or a key is wrong."""


class MachineError(ConfigError):
    """The configuration needs a file, a model, a package or a device that this machine lacks."""


class DataError(QuadrigaError):
    """A data file, a row or a tokenizer is wrong."""


class ProtocolError(QuadrigaError, AssertionError):
    """A DataProto is inconsistent, or two of them do not fit together.

    It is also an AssertionError, which users' code expects of a DataProto.
    """


class WorkerError(QuadrigaError):
    """A worker, a worker group, a resource pool or a dispatch mode failed."""


class WorkerLostError(WorkerError):
    """A worker's process or node is lost, or does not respond. A run can go on with new workers."""


class NoRoomError(WorkerError):
    """A cluster does not have the resources that the pools of a run need."""


class EngineError(QuadrigaError):
    """A training engine failed, or cannot do what it was asked to do."""


class PeerLostError(EngineError):
    """A collective failed because another process failed, whose error has the cause."""


class RolloutError(QuadrigaError):
    """A generation engine failed, or cannot do what it was asked to do."""


class EngineLostError(RolloutError):
    """A generation engine failed or its process is lost. Another one can take its requests."""


class WeightSyncError(QuadrigaError):
    """The weights of a rollout differ from those of the trainer."""


class RewardError(QuadrigaError):
    """A grader or a reward manager failed."""


class CheckpointError(QuadrigaError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A file of a checkpoint is missing, truncated, changed or unreadable."""


def first_line(error: BaseException) -> str:
    """Shorten a library's error to one line: its type and the first two lines of its message."""
    lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
    return redact_text(": ".join([type(error).__name__, *lines]))


def traceback_text(error: BaseException, begin: TracebackType | None = None) -> str:
    """Format the traceback of an error in a user's code, for a message or a log.

    Args:
        error: the error.
        begin: first frame to show; None: the outermost one.

    Returns:
        The text, without its middle if it has more than 8,000 characters.
    """
    frames = begin or error.__traceback__
    text = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    num_omitted = len(text) - _MAX_TRACEBACK_CHARACTERS
    if num_omitted > 0:
        half = _MAX_TRACEBACK_CHARACTERS // 2
        omission = f"... ({num_omitted:,} characters are left out) ..."
        text = f"{text[:half]} {omission} {text[-half:]}"
    return redact_text(text)
