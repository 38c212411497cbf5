# SPDX-License-Identifier: Apache-2.0
"""Which group of responses starts where and when, and which step learns from it, while generation and training go on
at the same time: decided without a tensor, a thread or a clock.

    events in                                          decisions out
    joined, lost (a worker)                            Start     samples of a group, on a worker
    has_published, loaded (weights)              ──>   Load      newer weights, by a worker; Resume without them
    ended (a sample), graded (a group)                 HandOver  the groups of a training step, or a mini-batch of them
    wants_batch (the trainer)                          Drop      a group, with the reason
    hold, release (before and after a save)            Save      what a worker has under way

The weights have a *version*, the number of publications before them; there is one after every `sync_every` steps. Step
s begins with version V(s), known from its number alone. A token of version w is V(s) - w versions old in step s, and a
sample is as old as its oldest token.

    the gate    a group for step s starts only with weights of a version w with V(s) - w <= max_staleness

Tokens that follow are of the same version or of a newer one, so the bound holds whatever is slow, late or lost. With
`on_stale="wait"` a group belongs to the step that it was started for, which waits for it: it is handed over in step s.
With "drop" a step takes the groups that are there, the oldest first, and what would be too old in the next step is
dropped: each group is handed over or dropped before a step that begins with a version over `max_staleness` above its
own.

A worker takes newer weights at once (`in_flight="continue"`: samples under way go on with them), or when what it
generates has ended, until which nothing starts on it ("finish"). `deterministic` ties that to batches instead of to the
time: a worker pauses for version w + 1 once every batch that version w may begin has been generated, or with "continue"
every batch that version w - 1 may begin. What is generated with which weights then follows from the rules.

With `part_size` a step gets its batch in parts: each is handed over once it is complete, in the order of the prompts
where it is `deterministic`, else the first that are there.

Dynamic sampling: a batch starts in rounds of `round_size` groups, until enough of its groups are kept.

A save is an event like others: `hold` comes before it, and once `is_quiet`, each worker is told to `Save`. With
`saves_running` that is once all have the newest weights; if it is deterministic, where they would pause for those that
follow the version which the step began with. Else it is once all that is under way has ended. Nothing starts then until
`release`, in the schedule that goes on as in one that goes on from `state`.
"""

from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from quadriga.errors import RolloutError
from quadriga.trainer.asynchronous.rules import (
    Decision,
    Drop,
    HandOver,
    Load,
    Reason,
    Resume,
    Rules,
    Save,
    Start,
)

Verdict = Literal["kept", "equal", "failed"]


@dataclass
class Group:
    """The samples of one prompt.

    Attributes:
        number: in the order of starts.
        batch, row: the batch that it was started for, and its number there.
        waiting: samples that have no worker.
        running: worker of each sample under way.
        starts: version of the first token of each sample that has begun.
        oldest: version of the oldest token of its samples.
        is_complete: whether all have ended; is_kept: whether it is graded and may be learned from.
    """

    number: int
    batch: int
    row: int
    waiting: list[int]
    oldest: int = 0
    running: dict[int, int] = field(default_factory=dict)
    starts: dict[int, int] = field(default_factory=dict)
    is_complete: bool = False
    is_kept: bool = False


@dataclass
class Batch:
    """Groups that were started for one step: how many are wanted, have a row, are open (not graded), were handed over;
    which are kept."""

    num_wanted: int
    num_rows: int = 0
    num_open: int = 0
    num_handed: int = 0
    kept: list[int] = field(default_factory=list)


@dataclass
class _Worker:
    version: int
    capacity: int | None
    running: set[tuple[int, int]] = field(default_factory=set)
    loading: int | None = None


class Schedule:
    """Takes events, by its methods, and answers with decisions, by `decide`.

    Attributes:
        step: the last step whose batch was handed over.
        published: the newest version that workers can take.
        groups: those that are started and neither handed over nor dropped, by number.
        hold_after: batches up to this one may start groups; None: all.
    """

    def __init__(self, rules: Rules, *, step: int = 0) -> None:
        self.rules, self.step = rules, step
        self.published = rules.version_at(step + 1)
        self.groups: dict[int, Group] = {}
        self.num_groups = 0
        self.workers: dict[int, _Worker] = {}
        self.hold_after: int | None = None
        self._batches: dict[int, Batch] = {}
        self._kept: list[int] = []  # with on_stale="drop", of all batches
        self._to_start: set[int] = set()  # groups with samples that have no worker
        self._free: set[int] = set()  # workers that take samples
        self._behind: set[int] = set()  # workers that could load newer weights
        self._loading: set[int] = set()  # workers that load weights which are there
        self._generated = step  # all batches up to this one have been
        self._wants = self._awaits_save = False
        self._pending: list[Decision] = []

    # Events.

    def joined(self, worker: int, version: int, capacity: int | None = None) -> None:
        """A worker with weights of a version generates from here on, up to `capacity` samples at a time."""
        self.workers[worker] = _Worker(version, capacity)
        self._refresh(worker)

    def lost(self, worker: int) -> None:
        """A worker is gone: what it was generating starts anew on another. One that comes back has a new number."""
        for number, sample in sorted(self.workers.pop(worker).running):
            group = self.groups[number]
            del group.running[sample], group.starts[sample]
            group.waiting.append(sample)
            self._to_start.add(number)
        for those in (self._free, self._behind, self._loading):
            those.discard(worker)

    def has_published(self, version: int) -> None:
        """Weights of this version can be loaded."""
        self.published = version
        for worker in self.workers:
            self._refresh(worker)

    def loaded(self, worker: int, version: int) -> None:
        """A worker has taken weights."""
        if worker in self.workers:
            self.workers[worker].version, self.workers[worker].loading = version, None
            self._refresh(worker)

    def ended(self, worker: int, group: int, sample: int, oldest: int | None = None) -> bool:
        """A sample has ended; `oldest` is the version of its oldest token, as the engine says it. Returns whether its
        group is complete by it; also False for a sample that is not awaited from this worker.

        Raises RolloutError: the engine used older weights than the worker was said to have.
        """
        own = self.groups.get(group)
        if own is None or own.running.get(sample) != worker:
            return False
        started = own.starts[sample]
        if oldest is not None and oldest < started:
            got = f"a token of version {oldest} from worker {worker}, in a sample that it began with version {started}"
            raise RolloutError("async_training", got=got, expected=f"version {started} or newer")
        own.starts[sample] = started if oldest is None else oldest
        del own.running[sample]
        self.workers[worker].running.remove((group, sample))
        self._refresh(worker)
        own.is_complete = not own.running and not own.waiting
        own.oldest = min(own.starts.values())
        return own.is_complete

    def graded(self, group: int, verdict: Verdict = "kept") -> None:
        """A complete group is graded: it is kept, or left out since its samples are equal or grading failed."""
        own = self.groups.get(group)
        if own is None or own.is_kept:
            return
        batch = self._batches[own.batch]
        batch.num_open -= 1
        if verdict == "kept":
            own.is_kept = True
            insort(self._kept if self._drops else batch.kept, group)
        else:
            self._drop(own, verdict)
            if not self.rules.round_size:
                batch.num_wanted += 1
        is_short = len(batch.kept) < self.rules.num_groups
        if (
            self.rules.round_size
            and not self._drops
            and not batch.num_open
            and batch.num_rows == batch.num_wanted
        ):
            batch.num_wanted += self.rules.round_size * is_short

    def wants_batch(self) -> None:
        """The trainer waits for the batch of the step after the last one."""
        self._wants = True

    def decide(self) -> list[Decision]:
        """What is to be done, as of the events so far; each decision once."""
        # What is handed over makes room for starts, what is loaded lets them through.
        self._hand_over()
        if self.rules.deterministic:
            self._start()  # before a load, whether or not one is due already
        self._load()
        self._start()
        if self._awaits_save and self.is_quiet:
            self._awaits_save = False
            self._pending += [Save(number, self.step) for number in sorted(self.workers)]
            if self.rules.pauses_to_save:
                self._start_nothing()
        decisions, self._pending = self._pending, []
        return decisions

    @property
    def is_over(self) -> bool:
        """Whether every step has its batch."""
        return self.step >= self.rules.num_steps

    @property
    def is_quiet(self) -> bool:
        """Whether all that a save waits for has come."""
        rules, workers = self.rules, self.workers.values()
        if rules.pauses_to_save:
            next_version = rules.version_at(self.step) + 1
            return all(one.loading == next_version for one in workers) or self._all_generated(
                rules.num_steps
            )
        if any(worker.version < self.published for worker in workers):
            return False
        if rules.saves_running:
            return True
        is_over = all(group.is_complete for group in self.groups.values())
        return is_over and (
            not rules.deterministic
            or self._all_generated(min(self.hold_after or 0, rules.num_steps))
        )

    def hold(self, published: int | None = None) -> None:
        """After a step, before a save, with the version that it publishes; where the schedule pauses to save, that is
        published after `release`. If it is deterministic, all that may start before that publication does."""
        self._awaits_save = True
        if not self.rules.pauses_to_save:
            self.published = self.published if published is None else published
            self._start_nothing()

    def _start_nothing(self) -> None:
        """More than a deterministic schedule starts by now, until `release`; nor wait for weights."""
        rules = self.rules
        allowed = (
            rules.last_step_with(rules.version_at(self.step) + rules.max_staleness)
            if self.step
            else 0
        )
        self.hold_after = allowed if rules.deterministic else 0
        for number, worker in self.workers.items():
            if worker.loading is not None and worker.loading > self.published:
                worker.loading = None
                self._pending.append(Resume(number))
            self._refresh(number)

    def release(self) -> None:
        """End `hold`."""
        self.hold_after = None
        for worker in self.workers:
            self._refresh(worker)

    def state(self) -> dict[str, Any]:
        """What the schedule goes on from after a save, in numbers: batches, and groups with the version of each
        sample's first token, the samples that have not ended, and whether they are kept."""
        groups = [
            [
                one.number,
                one.batch,
                one.row,
                [*one.starts.items()],
                sorted([*one.running, *one.waiting]),
                one.is_kept,
            ]
            for one in self.groups.values()
        ]
        batches = {number: [one.num_wanted, one.num_rows] for number, one in self._batches.items()}
        return {"num_groups": self.num_groups, "groups": groups, "batches": batches}

    def restore(self, state: dict[str, Any]) -> None:
        """Go on, after the step that this schedule was made with, from what `state` gave after it: what was under way
        starts first, on any worker."""
        self.num_groups = state["num_groups"]
        self._batches = {number: Batch(*counts) for number, counts in state["batches"].items()}
        for number, batch, row, starts, waiting, is_kept in state["groups"]:
            own = Group(
                number,
                batch,
                row,
                waiting,
                starts=dict(starts),
                is_complete=not waiting,
                is_kept=is_kept,
            )
            own.oldest = min(own.starts.values(), default=0)
            self.groups[number] = own
            if waiting:
                self._to_start.add(number)
            if is_kept:
                (self._kept if self._drops else self._batches[batch].kept).append(number)
            else:
                self._batches[batch].num_open += 1

    def may_start(self, version: int, batch: int) -> bool:
        """The gate: whether weights of a version may begin a sample for a batch."""
        return self.rules.version_at(batch) - version <= self.rules.max_staleness

    # Decisions.

    @property
    def _drops(self) -> bool:
        return self.rules.on_stale == "drop"

    def _refresh(self, worker: int) -> None:
        """Whether a worker takes samples, and whether there are newer weights for it."""
        own, rules = self.workers[worker], self.rules
        newest = self.published
        if rules.deterministic and self.hold_after is None:
            newest = rules.version_at(rules.num_steps)
        drains = (
            rules.in_flight == "finish" and not rules.deterministic and own.version < self.published
        )
        has_room = own.capacity is None or len(own.running) < own.capacity
        (self._free.add if has_room and own.loading is None and not drains else self._free.discard)(
            worker
        )
        is_behind = own.loading is None and own.version < newest
        (self._behind.add if is_behind else self._behind.discard)(worker)
        is_loading = own.loading is not None and own.loading <= self.published
        (self._loading.add if is_loading else self._loading.discard)(worker)

    def _load(self) -> None:
        for number in sorted(self._behind):
            worker = self.workers[number]
            if self._may_load(worker):
                worker.loading = worker.version + 1 if self.rules.deterministic else self.published
                self._refresh(number)
                self._pending.append(Load(number, worker.loading))

    def _may_load(self, worker: _Worker) -> bool:
        rules = self.rules
        if not rules.deterministic:
            return not (rules.in_flight == "finish" and worker.running)
        ahead = rules.max_staleness - (rules.in_flight == "continue")
        return self._all_generated(
            min(rules.last_step_with(worker.version + max(ahead, 0)), rules.num_steps)
        )

    def _all_generated(self, last: int) -> bool:
        """Whether every batch up to this one has all of its groups, complete and graded."""
        self._generated = max(self._generated, self.step)
        while self._generated < last:
            batch = self._batches.get(self._generated + 1)
            if batch is None or batch.num_open or batch.num_rows < batch.num_wanted:
                return False
            self._generated += 1
        return True

    def _start(self) -> None:
        for number in sorted(self._to_start) if self._free else ():
            group = self.groups[number]
            if (worker := self._worker_for(group.batch, len(group.waiting))) is not None:
                self._begin(worker, group)
        while self._free and (batch := self._next_batch()) is not None:
            if (worker := self._worker_for(batch, self.rules.group_size)) is None:
                break
            own = self._batches.setdefault(
                batch, Batch(self.rules.round_size or self.rules.num_groups)
            )
            group = Group(self.num_groups, batch, own.num_rows, list(range(self.rules.group_size)))
            own.num_rows, own.num_open = own.num_rows + 1, own.num_open + 1
            self.groups[self.num_groups] = group
            self.num_groups += 1
            self._begin(worker, group)

    def _next_batch(self) -> int | None:
        """The first batch that lacks groups; None: no further step does."""
        last = (
            self.rules.num_steps
            if self.hold_after is None
            else min(self.rules.num_steps, self.hold_after)
        )
        if self._drops:
            batch = self.step + 1 + len(self.groups) // self.rules.num_groups
            return batch if batch <= last else None
        for number in range(self.step + 1, last + 1):
            batch = self._batches.get(number)
            if batch is None or batch.num_rows < batch.num_wanted:
                return number
        return None

    def _worker_for(self, batch: int, size: int) -> int | None:
        """The worker with the least to do of those that may begin samples of this batch now; None too where one that
        takes weights, which are there, has less to do: that gets its share once it has them."""
        best = None
        for number in self._free | self._loading:
            worker = self.workers[number]
            load = len(worker.running)
            fits = worker.capacity is None or load + size <= worker.capacity or not load
            version = worker.version if worker.loading is None else worker.loading
            if fits and self.may_start(version, batch) and (best is None or (load, number) < best):
                best = load, number
        return None if best is None or best[1] in self._loading else best[1]

    def _begin(self, worker: int, group: Group) -> None:
        own, samples = self.workers[worker], tuple(sorted(group.waiting))
        for sample in samples:
            group.running[sample] = worker
            group.starts.setdefault(sample, own.version)  # it may go on from a checkpoint
            own.running.add((group.number, sample))
        group.waiting.clear()
        group.oldest = min(group.starts.values())
        self._to_start.discard(group.number)
        self._refresh(worker)
        self._pending.append(
            Start(worker, group.number, group.batch, group.row, samples, own.version)
        )

    def _drop(self, group: Group, reason: Reason) -> None:
        del self.groups[group.number]
        if group.is_kept and self._drops:
            self._kept.remove(group.number)
        self._to_start.discard(group.number)
        running = tuple((worker, sample) for sample, worker in sorted(group.running.items()))
        for worker, sample in running:
            self.workers[worker].running.remove((group.number, sample))
            self._refresh(worker)
        self._pending.append(Drop(group.number, reason, running))

    def _hand_over(self) -> None:
        if not self._wants or self.is_over or (numbers := self._ready()) is None:
            return
        self._wants, step = False, self.step + 1
        self._check_bound(step, numbers)
        for number in numbers:
            del self.groups[number]
        is_last = True
        if not self._drops:
            batch = self._batches[step]
            batch.num_handed += len(numbers)
            batch.kept = [number for number in batch.kept if number in self.groups]
            is_last = batch.num_handed == self.rules.num_groups
        self._pending.append(HandOver(step, tuple(numbers), is_last))
        if not is_last:
            return
        self.step = step
        for number in () if self._drops else self._batches.pop(step).kept:
            self._drop(self.groups[number], "surplus")
        oldest = self.rules.version_at(step + 1) - self.rules.max_staleness
        for group in list(self.groups.values()) if self.is_over or self._drops else ():
            if self.is_over or group.oldest < oldest:
                self._drop(group, "end" if self.is_over else "stale")

    def _ready(self) -> Sequence[int] | None:
        """The groups of the next step or of its next part, if they are there."""
        batch, size = self._batches.get(self.step + 1), self.rules.num_groups
        if self._drops:
            if len(self._kept) < size:
                return None
            chosen, self._kept = self._kept[:size], self._kept[size:]
            return chosen
        if batch is None:
            return None
        part = min(self.rules.part_size or size, size - batch.num_handed)
        chosen = batch.kept[:part]
        if len(chosen) < part:
            return None
        if not self.rules.part_size:
            return None if batch.num_open or batch.num_rows < batch.num_wanted else chosen
        of_batch = [group for group in self.groups.values() if group.batch == self.step + 1]
        is_next = all(group.is_kept for group in of_batch if group.number < chosen[-1])
        return chosen if is_next or not self.rules.deterministic else None

    def _check_bound(self, step: int, numbers: Iterable[int]) -> None:
        """The invariant, at each hand-over. Raises RolloutError: a group is too old."""
        version = self.rules.version_at(step)
        for number in numbers:
            staleness = version - self.groups[number].oldest
            if not 0 <= staleness <= self.rules.max_staleness:
                got = f"group {number} with a token {staleness} versions older than step {step} begins with"
                raise RolloutError(
                    "async_training", got=got, expected=f"0 to {self.rules.max_staleness}"
                )
