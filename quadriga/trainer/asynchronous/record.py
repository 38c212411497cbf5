# SPDX-License-Identifier: Apache-2.0
"""Records the schedule of an asynchronous run, and repeats recorded schedules.

DIRECTORY/async_schedule.jsonl has a line for each event. `at` is the number of steps that the
engine had made before the event:

    {"at": 31, "start": [[8, 3, 0], [9, 3, 1]]}     groups that begin with the next step: number,
                                                    batch, row
    {"version": 1, "start": [[8, 3, 0]]}            the same for an engine in another process, by
                                                    the version of its weights
    {"at": 57, "load": 2}                           later tokens are drawn by weights of this
                                                    version
    {"at": 60, "save": 3}                           the KV cache of unfinished samples is
                                                    recomputed, for the checkpoint of a step
    {"step": 3, "groups": {"8": [[[1, 0], [2, 14]], ...]}}
                                                    groups of a training step, or of a mini-batch;
                                                    for each row its versions, each with the
                                                    position of its first token

The native engine, in float32 on a CPU, draws the same tokens if groups start and weights load at
the same of its steps, independent of time. A resumed run continues the count of steps of its
checkpoint, and its unfinished samples start at once. So the rest of the interrupted run's record,
after the `save`, is also valid for the resumed run, and the other way round.

Legend: B rows, T response positions.
"""

import json
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import torch

from quadriga.errors import DataError
from quadriga.trainer.asynchronous.rules import Decision, Load, Rules, Save
from quadriga.trainer.asynchronous.schedule import Batch, Group, Schedule

RECORD = "async_schedule.jsonl"


class ScheduleRecord:
    """Writes the record of a run, from its start or from where it resumed, to a new file."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file: IO[str] = path.open("w", encoding="utf-8")

    def add(self, **event: Any) -> None:
        """Write an event."""
        self._file.write(json.dumps(event, separators=(",", ":")) + "\n")

    def add_start(self, groups: Sequence[tuple[int, int, int]], **where: int) -> None:
        """Write that groups begin; write nothing if there are none.

        Args:
            groups: number, batch and row of each group.
            where: `at`, the number of the engine's steps so far, or `version`, the version of the
                weights.
        """
        if groups:
            self.add(**where, start=groups)

    def add_step(self, step: int, versions_by_group: Mapping[int, torch.Tensor]) -> None:
        """Write which tokens a step learns from, and flush the file.

        Args:
            step: the training step.
            versions_by_group: versions of the tokens of each group, [rows, T]; -1 for tokens that
                were not drawn.
        """
        spans_by_group = {}
        for number, versions in versions_by_group.items():
            # For each row, pairs of a version and the position of its first token.
            spans = []
            for row in versions:
                # Runs of tokens of the same version, and the position at which each begins.
                values, lengths = torch.unique_consecutive(row, return_counts=True)
                starts = lengths.cumsum(0) - lengths
                pairs = zip(values.tolist(), starts.tolist(), strict=True)
                spans.append([[version, start] for version, start in pairs if version >= 0])
            spans_by_group[number] = spans
        self.add(step=step, groups=spans_by_group)
        self._file.flush()

    def close(self) -> None:
        """Close the file with everything in it."""
        self._file.close()


class RecordedSchedule(Schedule):
    """Schedule that repeats a record on an engine in this process.

    Groups start and weights load at the same steps of the engine, and training steps get the same
    groups.

    Args:
        rules: rules of the recorded run, which are also those of the repetition.
        path: file of the record.
        step: step of the checkpoint that the run resumes from.

    Raises:
        DataError: the file cannot be read, or has no checkpoint of `step`.
    """

    def __init__(self, rules: Rules, path: Path, *, step: int = 0) -> None:
        super().__init__(rules, step=step)
        self._events: deque[dict[str, Any]] = deque()
        # Version of the weights with which each group began, of its last start if it started again.
        self._versions: dict[int, int] = {}
        # Groups of each part of a step's batch, by step.
        self._parts: dict[int, deque[list[int]]] = defaultdict(deque)

        # Starts on a local engine are recorded without a version: it is the version of the last load.
        version = self.published
        for event in _events_after(path, step):
            if "step" in event:
                numbers = [int(number) for number in event["groups"]]
                self._parts[event["step"]].append(numbers)
            else:
                self._events.append(event)
            version = event.get("load", version)
            for number, *_ in event.get("start", ()):
                self._versions[number] = event.get("version", version)

    def decisions_at(self, num_steps: int, worker: int) -> list[Decision]:
        """Return the recorded decisions before the engine's next step.

        Args:
            num_steps: number of steps that the engine has made.
            worker: number of the only worker.
        """
        decisions: list[Decision] = []
        # The unfinished samples of the checkpoint start first.
        for number in sorted(self._to_start):
            self._begin(worker, self.groups[number])
        while self._events and self._events[0]["at"] <= num_steps:
            event = self._events.popleft()
            for number, batch, row in event.get("start", ()):
                # A group that was waiting to start at the save is part of the checkpoint, so it has
                # begun above, although the record has its start after the save.
                if number not in self.groups:
                    self._begin(worker, self._recorded_group(number, batch, row))
            if "load" in event:
                decisions.append(Load(worker, event["load"]))
            if "save" in event:
                decisions.append(Save(worker, event["save"]))
        # The starts of the groups above are pending.
        decisions += self._pending
        self._pending = []
        return decisions

    def _recorded_group(self, number: int, batch: int, row: int) -> Group:
        """Add a group of the record to its batch, which is created with its first group."""
        self._batches.setdefault(batch, Batch(self.rules.num_groups))
        return self._new_group(number, batch, row)

    def _start(self) -> None:
        """Start nothing: `decisions_at` does."""

    def _load(self) -> None:
        """Load nothing: `decisions_at` does."""

    def _take_ready_groups(self) -> Sequence[int] | None:
        """Take the recorded groups of the next part of the next step's batch.

        Returns:
            Numbers of the groups; None if one of them is not graded yet, or if none is recorded.
        """
        parts = self._parts[self.step + 1]
        if not parts:
            return None
        for number in parts[0]:
            group = self.groups.get(number)
            if group is None or not group.is_kept:
                return None
        return parts.popleft()


class RecordedVersions(RecordedSchedule):
    """Schedule that repeats a record on any number of engines in other processes.

    Each group starts with weights of its recorded version, on any engine that has them, and
    training steps get the same groups. If samples end with the weights that they began with
    (`in_flight="finish"`), this determines the results, up to rounding in batches of other sizes.
    """

    def __init__(self, rules: Rules, path: Path, *, step: int = 0) -> None:
        super().__init__(rules, path, step=step)
        # Engines in other processes have no common count of steps: only the starts are used.
        starts = []
        for event in self._events:
            starts += event.get("start", ())
        # Number, batch and row of the groups that have not started, in the order of their numbers.
        self._not_started: dict[int, list[int]] = {start[0]: start for start in sorted(starts)}

    def _start(self) -> None:
        """Start groups on workers that have the recorded versions of their weights."""
        for number in sorted(self._to_start):
            worker = self._worker_with(self._versions[number])
            if worker is not None:
                self._begin(worker, self.groups[number])
        for number, batch, row in tuple(self._not_started.values()):
            worker = self._worker_with(self._versions[number])
            if worker is not None and self._is_round_due(batch, row):
                del self._not_started[number]
                self._begin(worker, self._recorded_group(number, batch, row))

    def _is_round_due(self, batch: int, row: int) -> bool:
        """Whether all rounds of dynamic sampling before the round of a row have been graded."""
        size = self.rules.round_size
        if not size:
            return True
        rows_before_round = row // size * size
        # A batch without groups has no entry.
        recorded_batch = self._batches.get(batch, Batch(0))
        num_graded = recorded_batch.num_rows - recorded_batch.num_open
        return num_graded >= rows_before_round

    def _worker_with(self, version: int) -> int | None:
        """The least loaded worker with weights of a version. None: no worker has them."""
        loads = []
        for number, worker in self.workers.items():
            if worker.version == version:
                loads.append((len(worker.running), number))
        return min(loads)[1] if loads else None

    def _load(self) -> None:
        """Make workers load the next version if no group needs their present one any more."""
        incomplete = list(self._not_started)
        for number, group in self.groups.items():
            if not group.is_complete:
                incomplete.append(number)
        # The oldest version that a worker may still need. Without any group, the newest one is next.
        oldest_needed = min(
            (self._versions[number] for number in incomplete), default=self.published
        )
        for number in self._workers_behind():
            version = self.workers[number].version
            if version < oldest_needed:
                self._load_version(number, version + 1)


def _events_after(path: Path, step: int) -> list[dict[str, Any]]:
    """Read the events of a record after the save of a step.

    All events are returned if the record begins later than this save: for step 0, and if it was
    written by a run that resumed from the step.

    Raises:
        DataError: the file cannot be read, or the record should have the save but does not.
    """
    where = f"async_training.replay={path}"
    try:
        events = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DataError(where, got=str(error), expected=f"the {RECORD} of a run") from error
    for place, event in enumerate(events):
        if event.get("save") == step:
            return events[place + 1 :]
    # A record that has the step itself, or an earlier one, begins before the save and should have it.
    if any(event.get("step", step + 1) <= step for event in events):
        raise DataError(
            where,
            got=f"no checkpoint of step {step}",
            expected="the record of the run that wrote this checkpoint, or that resumed from it",
        )
    return events
