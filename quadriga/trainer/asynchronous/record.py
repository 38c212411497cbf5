# SPDX-License-Identifier: Apache-2.0
"""The schedule of an asynchronous run in a file beside it, and its repetition.

DIRECTORY/async_schedule.jsonl, a line for each event, by the number of steps that the engine had made before it:

    {"at": 31, "start": [[8, 3, 0], [9, 3, 1]]}     groups that begin with the next step: number, batch, row
    {"version": 1, "start": [[8, 3, 0]]}            the same of an engine in another process: with which weights
    {"at": 57, "load": 2}                           from the next step on tokens are of this version
    {"at": 60, "save": 3}                           the KV cache of what is under way is computed anew, for the
                                                    checkpoint of a training step
    {"step": 3, "groups": {"8": [[[1, 0], [2, 14]], ...]}}
                                                    what a training step, or a mini-batch of it, learned from: of each
                                                    sample of a group, each version and its first token

Of the native engine, in float32 on a CPU, a run that starts and loads at the same steps draws the same tokens, whatever
took how long. One that goes on from a checkpoint counts on from its steps: what was under way there begins at once. So
the record of the run that wrote it, from its `save` on, is that of the one that goes on, and the other way round.
"""

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from quadriga.errors import DataError
from quadriga.trainer.asynchronous.schedule import (
    Batch,
    Decision,
    Group,
    Load,
    Rules,
    Save,
    Schedule,
)

RECORD = "async_schedule.jsonl"


class ScheduleRecord:
    """Writes the record, line by line; from a step on, so that a resumed run goes on where its checkpoint is."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("w", encoding="utf-8")

    def add(self, **event: Any) -> None:
        """One event."""
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")

    def add_start(self, groups: Sequence[tuple[int, int, int]], **where: int) -> None:
        """Groups that begin, none of which is in the checkpoint."""
        if groups:
            self.add(**where, start=groups)

    def add_step(
        self, step: int, groups: Sequence[int], versions: torch.Tensor, group_size: int
    ) -> None:
        """What a step learned from; `versions` [B, T] of its tokens, -1 on others, group after group."""
        spans = []
        for row in versions:
            values, counts = torch.unique_consecutive(row, return_counts=True)
            starts = counts.cumsum(0) - counts
            spans.append([[int(v), int(s)] for v, s in zip(values, starts, strict=True) if v >= 0])
        rows = {
            number: spans[place * group_size : (place + 1) * group_size]
            for place, number in enumerate(groups)
        }
        self.add(step=step, groups=rows)
        self._file.flush()

    def close(self) -> None:
        """All of it is in the file."""
        self._file.close()


class RecordedSchedule(Schedule):
    """Starts and loads at the steps of the engine that a record says, and hands over what it says."""

    def __init__(self, rules: Rules, path: Path, *, step: int = 0) -> None:
        super().__init__(rules, step=step)
        self._events: deque[dict[str, Any]] = deque()
        self._versions: dict[
            int, int
        ] = {}  # of the weights that each group began with the last time
        self._parts: dict[int, deque[list[int]]] = defaultdict(deque)  # of each step
        where = f"async_training.replay={path}"
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            raise DataError(where, got=str(error), expected=f"the {RECORD} of a run") from error
        begin = next(
            (place for place, event in enumerate(lines, 1) if event.get("save") == step), 0
        )
        if not begin and any(event.get("step", step + 1) <= step for event in lines):
            got, expected = (
                f"no checkpoint of step {step}",
                "the record of the run that wrote it, or went on from it",
            )
            raise DataError(where, got=got, expected=expected)
        version = self.published
        for event in lines[begin:]:
            if "step" in event:
                self._parts[event["step"]].append([int(group) for group in event["groups"]])
            else:
                self._events.append(event)
            version = event.get("load", version)
            self._versions |= {
                number: event.get("version", version) for number, *_ in event.get("start", ())
            }

    def at(self, num_steps: int, worker: int) -> list[Decision]:
        """What happens before the engine's next step, once it has made so many."""
        decided: list[Decision] = []
        for number in sorted(self._to_start):  # what is in the checkpoint
            self._begin(worker, self.groups[number])
        while self._events and self._events[0]["at"] <= num_steps:
            event = self._events.popleft()
            for started in event.get("start", ()):
                self._begin(worker, self._new_group(*started))
            if "load" in event:
                decided.append(Load(worker, event["load"]))
            if "save" in event:
                decided.append(Save(worker, event["save"]))
        decided, self._pending = decided + self._pending, []
        return decided

    def _new_group(self, number: int, batch: int, row: int) -> Group:
        self.groups[number] = Group(number, batch, row, list(range(self.rules.group_size)))
        own = self._batches.setdefault(batch, Batch(self.rules.num_groups))
        own.num_rows, own.num_open = own.num_rows + 1, own.num_open + 1
        return self.groups[number]

    def _start(self) -> None:
        """Only `at` starts anything."""

    def _load(self) -> None:
        """Only `at` loads anything."""

    def _ready(self) -> Sequence[int] | None:
        parts = self._parts[self.step + 1]
        groups = [self.groups.get(number) for number in parts[0]] if parts else [None]
        return (
            parts.popleft()
            if all(group is not None and group.is_kept for group in groups)
            else None
        )


class RecordedVersions(RecordedSchedule):
    """Starts each group with weights of the version that a record says, whichever engine has them, and hands over what
    it says. Of samples that end with the weights they began with (`in_flight="finish"`) that decides the numbers, to
    the rounding of batches of other sizes."""

    def __init__(self, rules: Rules, path: Path, *, step: int = 0) -> None:
        super().__init__(rules, path, step=step)
        starts = sorted(one for event in self._events for one in event.get("start", ()))
        self._coming: dict[int, list[int]] = {one[0]: one for one in starts}

    def _start(self) -> None:
        for number in sorted(self._to_start):
            if (worker := self._worker_with(self._versions[number])) is not None:
                self._begin(worker, self.groups[number])
        for number, batch, row in tuple(self._coming.values()):
            worker, size = self._worker_with(self._versions[number]), self.rules.round_size
            before = self._batches.get(batch, Batch(0))
            # Dynamic sampling: a round starts once the one before is graded.
            is_next = not size or before.num_rows - before.num_open >= row // size * size
            if worker is not None and is_next:
                self._begin(worker, self._new_group(*self._coming.pop(number)))

    def _worker_with(self, version: int) -> int | None:
        """The worker with the least to do of those that generate with a version."""
        those = [
            (len(own.running), number)
            for number, own in self.workers.items()
            if own.version == version
        ]
        return min(those)[1] if those else None

    def _load(self) -> None:
        incomplete = [
            *self._coming,
            *(number for number, own in self.groups.items() if not own.is_complete),
        ]
        first = min((self._versions[number] for number in incomplete), default=self.published)
        for number in sorted(self._behind):
            worker = self.workers[number]
            if first > worker.version:
                worker.loading = worker.version + 1
                self._refresh(number)
                self._pending.append(Load(number, worker.loading))
