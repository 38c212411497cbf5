# SPDX-License-Identifier: Apache-2.0
"""Every error that Quadriga raises on purpose.

    QuadrigaError
    ├── ConfigError        a command line, a configuration file, a key
    │   └── MachineError   what this machine has not: a file, a model, a package
    ├── DataError          a data file, a row, a tokenizer
    ├── ProtocolError      a DataProto that does not hold together
    ├── WorkerError        a worker, a worker group, a resource pool, a dispatch mode
    │   ├── WorkerLostError  a worker's process or node is gone, or silent
    │   └── NoRoomError      a cluster with fewer resources than the pools need
    ├── EngineError        a training engine
    │   └── PeerLostError  a collective that another process left
    ├── RolloutError       a generation engine
    │   └── EngineLostError  a generation engine whose process is gone
    ├── WeightSyncError    weights that are not those of the trainer
    ├── RewardError        a grader, a reward manager
    └── CheckpointError    a checkpoint that cannot be written or read
        └── DamagedCheckpointError  one whose files are not what was written

Each says *where: got what, expected what. How to fix.*
"""

import traceback
from collections.abc import Collection
from difflib import get_close_matches
from functools import partial
from types import TracebackType

from quadriga.redact import redacted_text


def did_you_mean(name: str, known: Collection[str]) -> str:
    """A sentence with the nearest known names, for `fix` below; "" if none is near."""
    near = [one for one in known if one.casefold() == name.casefold()] or get_close_matches(
        name, known, cutoff=0.5
    )
    return f"Did you mean {' or '.join(map(repr, near))}?" if near else ""


class QuadrigaError(Exception):
    """An error that says at which key, file or method it arose, what was found and expected, and what to do."""

    # The worker it comes from, as in "actor[rank 3/8 on 10.0.0.2]", whose traceback is a note of it; "": this process.
    worker: str = ""

    def __init__(self, where: str, got: str = "", expected: str = "", fix: str = "") -> None:
        self.where, self.got, self.expected, self.fix = where, got, expected, fix

    def __str__(self) -> str:
        parts = {"got": self.got, "expected": self.expected}
        facts = ", ".join(f"{name} {said}" for name, said in parts.items() if said)
        said = f"{self.where}: {facts}" if facts else self.where
        return redacted_text(f"{said}{'' if said.endswith('?') else '.'} {self.fix}".strip())

    def __reduce__(self):
        fields = {"got": self.got, "expected": self.expected, "fix": self.fix}
        # What was attached later travels as it is.
        attached = {
            name: vars(self)[name] for name in ("worker", "__notes__") if name in vars(self)
        }
        return partial(type(self), **fields), (self.where,), attached or None


class ConfigError(QuadrigaError):
    """A command line, a configuration file or a key is wrong."""


class MachineError(ConfigError):
    """A configuration asks for what this machine has not: a file, a model, a package, a device."""


class DataError(QuadrigaError):
    """A data file, a row or a tokenizer is wrong."""


class ProtocolError(QuadrigaError):
    """A DataProto does not hold together, or two of them do not fit."""


class WorkerError(QuadrigaError):
    """A worker, a worker group, a resource pool or a dispatch mode failed."""


class WorkerLostError(WorkerError):
    """A worker's process or node is gone, or does not answer: a run can go on with new ones."""


class NoRoomError(WorkerError):
    """A cluster has not the resources that the pools of a run need."""


class EngineError(QuadrigaError):
    """A training engine failed or was asked for what it cannot do."""


class PeerLostError(EngineError):
    """A collective failed because another process did: the error to look for is that one's."""


class RolloutError(QuadrigaError):
    """A generation engine failed or was asked for what it cannot do."""


class EngineLostError(RolloutError):
    """A generation engine's process is gone or failed: another engine can answer its requests."""


class WeightSyncError(QuadrigaError):
    """A rollout's weights are not those of the trainer."""


class RewardError(QuadrigaError):
    """A grader or a reward manager failed."""


class CheckpointError(QuadrigaError):
    """A checkpoint could not be written or read."""


class DamagedCheckpointError(CheckpointError):
    """A checkpoint is not what was written: a file is missing, cut, changed or cannot be read."""


def first_line(error: BaseException) -> str:
    """What an error of others says, without the rest of a long report."""
    lines = [line.strip() for line in str(error).strip().splitlines()[:2]]
    return redacted_text(": ".join([type(error).__name__, *lines]))


def traceback_text(error: BaseException, begin: TracebackType | None = None) -> str:
    """The traceback of a user's error, from `begin` on if given; over 8,000 characters without the middle."""
    text = "".join(
        traceback.format_exception(type(error), error, begin or error.__traceback__)
    ).rstrip()
    if (left_out := len(text) - 8000) > 0:
        text = f"{text[:4000]} ... ({left_out:,} characters are left out) ... {text[-4000:]}"
    return redacted_text(text)
