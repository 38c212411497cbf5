# SPDX-License-Identifier: Apache-2.0
"""The schedule of an asynchronous run in a file beside it, and its repetition.

DIRECTORY/async_schedule.jsonl, a line for each event, by the number of steps that the engine had made before it:

    {"at": 31, "start": [[8, 3, 0], [9, 3, 1]]}     groups that begin with the next step: number, batch, row
    {"at": 57, "load": 2}                           from the next step on tokens are of this version
    {"step": 3, "groups": {"8": [[[1, 0], [2, 14]], ...]}}
                                                    what a training step, or a mini-batch of it, learned from: of each
                                                    sample of a group, each version and its first token

Of the native engine, in float32 on a CPU, a run that starts and loads at the same steps draws the same tokens, whatever
took how long.
"""

import json
from collections import defaultdict, deque
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import torch

from quadriga.errors import DataError
from quadriga.trainer.async_schedule import Batch, Decision, Group, Load, Rules, Schedule

RECORD = "async_schedule.jsonl"


class ScheduleRecord:
    """Writes the record, line by line; from a step on, so that a resumed run goes on where its checkpoint is."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("w", encoding="utf-8")

    def add(self, **event: Any) -> None:
        """One event."""
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")

    def add_step(self, step: int, groups: Sequence[int], versions: torch.Tensor, group_size: int) -> None:
        """What a step learned from; `versions` [B, T] of its tokens, -1 on others, group after group."""
        spans = []
        for row in versions:
            values, counts = torch.unique_consecutive(row, return_counts=True)
            starts = counts.cumsum(0) - counts
            spans.append([[int(v), int(s)] for v, s in zip(values, starts, strict=True) if v >= 0])
        rows = {number: spans[place * group_size : (place + 1) * group_size] for place, number in enumerate(groups)}
        self.add(step=step, groups=rows)
        self._file.flush()

    def close(self) -> None:
        """All of it is in the file."""
        self._file.close()


class RecordedSchedule(Schedule):
    """Starts and loads when a record says, and hands over what it says."""

    def __init__(self, rules: Rules, path: Path, *, step: int = 0) -> None:
        super().__init__(rules, step=step)
        self._events: deque[dict[str, Any]] = deque()
        self._parts: dict[int, deque[list[int]]] = defaultdict(deque)  # of each step
        try:
            lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except (OSError, ValueError) as error:
            where, expected = f"async_training.replay={path}", f"the {RECORD} of a run"
            raise DataError(where, got=str(error), expected=expected) from error
        for event in lines:
            if "step" in event:
                self._parts[event["step"]].append([int(group) for group in event["groups"]])
            else:
                self._events.append(event)

    def at(self, num_steps: int, worker: int) -> list[Decision]:
        """What happens before the engine's next step, once it has made so many."""
        decided: list[Decision] = []
        while self._events and self._events[0]["at"] <= num_steps:
            event = self._events.popleft()
            for number, batch, row in event.get("start", ()):
                samples = range(self.rules.group_size)
                group = self.groups[number] = Group(number, batch, row, list(samples))
                self._batches.setdefault(batch, Batch(self.rules.num_groups)).num_open += 1
                self._begin(worker, group)
            if "load" in event:
                decided.append(Load(worker, event["load"]))
        decided, self._pending = decided + self._pending, []
        return decided

    def _start(self) -> None:
        """Only `at` starts anything."""

    def _load(self) -> None:
        """Only `at` loads anything."""

    def _ready(self) -> Sequence[int] | None:
        parts = self._parts[self.step + 1]
        groups = [self.groups.get(number) for number in parts[0]] if parts else [None]
        return parts.popleft() if all(group is not None and group.is_kept for group in groups) else None
