# SPDX-License-Identifier: Apache-2.0
"""Schedule of asynchronous training, without tensors, threads or a clock.

It decides which group of samples starts when, on which worker and with which weights, and which
step learns from it.

    events in                                          decisions out
    joined, lost (a worker)                            Start     samples of a group, on a worker
    has_published, loaded (weights)              ──>   Load      newer weights, on a worker
    ended (a sample), graded (a group)                 Resume    a worker without newer weights
    wants_batch (the trainer)                          HandOver  groups, to a training step
    hold, release (before and after a save)            Drop      a group, with the reason
                                                       Save      unfinished samples of a worker

Staleness. Weights have a *version*, the number of publications before them. Step s begins with
version V(s), which follows from s alone (`Rules.version_at`). In step s a token of version w is
V(s) - w versions old, and a sample is as old as its oldest token.

    the gate    a group for step s starts only with weights of a version w for which
                V(s) - w <= max_staleness

Later tokens of a sample have the same version or a newer one, so the bound holds even if workers
are slow or lost. It is checked again at each hand-over.

Batches. With `on_stale="wait"` a group belongs to the step for which it was started, and that step
waits for it. With "drop" a step takes the oldest groups that are ready, and a group that would be
too old for the next step is dropped. With `part_size` a batch is handed over in parts, each as soon
as it is complete: in the order of the prompts if `deterministic`, else the first groups that are
ready. With dynamic sampling (`round_size`) the groups of a batch start in rounds, until enough of
them are kept.

Weights. With `in_flight="continue"` a worker loads newer weights at once, and unfinished samples
continue with them. With "finish" it loads them when its samples have ended, and starts no others
until then. If `deterministic`, batches rather than time determine the loads: a worker pauses for
version w + 1 when all batches that may begin with version w are generated, or with "continue" all
that may begin with version w - 1. So it follows from the rules alone what is generated with which
weights.

Saves. `hold` is called before a save. Once the schedule `is_quiet`, each worker gets the decision
`Save`. With `saves_running` it is quiet when all workers have the newest weights or, if
`deterministic`, when all pause for the next ones. Otherwise it is quiet when all samples have
ended. Nothing starts until `release`, both in the schedule that continues and in one that resumes
from `state`.
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

Verdict = Literal["kept", "equal"]


@dataclass
class Group:
    """The samples of one prompt.

    Attributes:
        number: number of the group, in the order of starts.
        batch: step for which the group was started.
        row: number of its prompt in this batch.
        waiting: samples without a worker.
        oldest: version of the oldest token of its samples.
        running: worker of each unfinished sample.
        sample_versions: for each sample that has begun, the version of its first token; once it has
            ended, that of its oldest token.
        is_complete: whether all samples have ended.
        is_kept: whether the group is graded and a step may learn from it.
    """

    number: int
    batch: int
    row: int
    waiting: list[int]
    oldest: int = 0
    running: dict[int, int] = field(default_factory=dict)
    sample_versions: dict[int, int] = field(default_factory=dict)
    is_complete: bool = False
    is_kept: bool = False


@dataclass
class Batch:
    """The groups that are started for one step.

    With `on_stale="drop"` any step may learn from them. The batch then only numbers their rows, and
    bounds the staleness of the weights with which they start.

    Attributes:
        num_wanted: number of groups to start; only with `on_stale="wait"`.
        num_rows: number of groups that were started.
        num_open: number of started groups that are neither graded nor dropped.
        num_handed: number of groups that were handed over.
        kept: numbers of groups that may be handed over, sorted; only with `on_stale="wait"`.
    """

    num_wanted: int
    num_rows: int = 0
    num_open: int = 0
    num_handed: int = 0
    kept: list[int] = field(default_factory=list)

    @property
    def is_generated(self) -> bool:
        """Whether all groups have been started and graded."""
        return not self.num_open and self.num_rows >= self.num_wanted


@dataclass
class _WorkerState:
    """Weights and samples of a worker.

    Attributes:
        version: version of its weights.
        capacity: largest number of samples at a time. None: no limit.
        running: group and number of each unfinished sample.
        loading: version that it is loading or waiting for. None: neither.
    """

    version: int
    capacity: int | None
    running: set[tuple[int, int]] = field(default_factory=set)
    loading: int | None = None


class Schedule:
    """Makes decisions about generation from events.

    Callers report events by calling methods, and then get decisions from `decide`.

    Args:
        rules: rules to follow.
        step: last step that is already over. The first workers are expected to join with the
            version that the next step begins with, `published`.

    Attributes:
        step: last step whose batch was handed over.
        published: newest version that workers can load.
        groups: groups that have been started and neither handed over nor dropped, by number.
        num_groups: number of groups that have been started.
        workers: workers by number.
        hold_after: only batches of steps up to this one may start groups. None: all.
    """

    def __init__(self, rules: Rules, *, step: int = 0) -> None:
        self.rules = rules
        self.step = step
        self.published = rules.version_at(step + 1)
        self.groups: dict[int, Group] = {}
        self.num_groups = 0
        self.workers: dict[int, _WorkerState] = {}
        self.hold_after: int | None = None
        self._batches: dict[int, Batch] = {}  # by step
        self._kept: list[int] = []  # kept groups of all batches, sorted, with on_stale="drop"
        self._to_start: set[int] = set()  # groups with samples that have no worker
        self._last_generated = step  # all batches up to this step are generated
        self._is_batch_wanted = False  # whether the trainer is waiting for a batch or a part
        self._awaits_save = False  # whether `hold` was called, but no worker saved yet
        self._pending: list[Decision] = []  # decisions that `decide` has not returned yet

    # Events.

    def joined(self, worker: int, version: int, capacity: int | None = None) -> None:
        """A worker is ready to generate.

        Args:
            worker: its number, which no other worker has had.
            version: version of its weights.
            capacity: largest number of samples at a time. None: no limit.
        """
        self.workers[worker] = _WorkerState(version, capacity)

    def lost(self, worker: int) -> None:
        """A worker is lost. Its unfinished samples start anew on other workers."""
        state = self.workers.pop(worker)
        # Samples of its groups that have already ended are kept.
        for number, sample in sorted(state.running):
            group = self.groups[number]
            del group.running[sample]
            del group.sample_versions[sample]
            group.waiting.append(sample)
            self._to_start.add(number)

    def has_published(self, version: int) -> None:
        """Weights of this version can be loaded."""
        self.published = version

    def loaded(self, worker: int, version: int) -> None:
        """A worker has loaded weights."""
        # The worker may have been lost while it was loading.
        if worker in self.workers:
            self.workers[worker].version = version
            self.workers[worker].loading = None

    def ended(self, worker: int, group: int, sample: int, oldest: int | None = None) -> bool:
        """A sample has ended.

        Args:
            worker: worker that generated it.
            group: number of its group.
            sample: number of the sample in the group.
            oldest: version of its oldest token, as the engine reports it. None: unknown.

        Returns:
            Whether this completes the group. If the worker is not generating this sample, for
            example because the group was dropped, the event is ignored and the result is False.

        Raises:
            RolloutError: the engine used older weights than the worker had.
        """
        state = self.groups.get(group)
        if state is None or state.running.get(sample) != worker:
            return False
        first_version = state.sample_versions[sample]
        if oldest is not None and oldest < first_version:
            raise RolloutError(
                "async_training",
                got=f"a token of version {oldest} from worker {worker}, in a sample that it began "
                f"with version {first_version}",
                expected=f"version {first_version} or newer",
            )

        # A sample without generated tokens keeps the version that it began with.
        if oldest is not None:
            state.sample_versions[sample] = oldest
        del state.running[sample]
        self.workers[worker].running.remove((group, sample))
        state.is_complete = not state.running and not state.waiting
        state.oldest = min(state.sample_versions.values())
        return state.is_complete

    def graded(self, group: int, verdict: Verdict = "kept") -> None:
        """A complete group has been graded.

        Args:
            group: number of the group.
            verdict: "kept", or "equal" if dynamic sampling drops it because of its equal rewards.
        """
        state = self.groups.get(group)
        # The group may have been dropped while it was being graded.
        if state is None or state.is_kept:
            return
        rules = self.rules
        batch = self._batches[state.batch]
        if verdict == "kept":
            batch.num_open -= 1
            state.is_kept = True
            insort(self._kept if self._drops_stale else batch.kept, group)
        else:
            self._drop(state, verdict)
        # If a round of dynamic sampling has not filled the batch, the next one starts. With
        # on_stale="drop", batches are not filled one by one.
        if rules.round_size and not self._drops_stale:
            is_round_over = not batch.num_open and batch.num_rows == batch.num_wanted
            if is_round_over and len(batch.kept) < rules.num_groups:
                batch.num_wanted += rules.round_size

    def wants_batch(self) -> None:
        """The trainer is waiting for its next batch, or for the next part of it."""
        self._is_batch_wanted = True

    def hold(self, published: int | None = None) -> None:
        """A step is over, and will be saved.

        In a deterministic schedule, everything that may start before the next publication starts
        before the save.

        Args:
            published: version that the step publishes; None if it publishes none. It is ignored
                with `Rules.pauses_to_save`, where it is published after `release`.
        """
        self._awaits_save = True
        # With `pauses_to_save`, starts end only when all workers pause for weights, in `decide`.
        if not self.rules.pauses_to_save:
            if published is not None:
                self.published = published
            self._stop_starts()

    def release(self) -> None:
        """The save is over: `hold` ends."""
        self.hold_after = None

    # Queries.

    def decide(self) -> list[Decision]:
        """Return the decisions that follow from the events so far. Each is returned once."""
        # First, because handing a batch over makes room for starts.
        self._hand_over()
        # In a deterministic schedule, everything that may start with a version starts before the
        # next one is loaded.
        if self.rules.deterministic:
            self._start()
        self._load()
        self._start()
        if self._awaits_save and self.is_quiet:
            self._awaits_save = False
            for number in sorted(self.workers):
                self._pending.append(Save(number, self.step))
            if self.rules.pauses_to_save:
                self._stop_starts()
        decisions = self._pending
        self._pending = []
        return decisions

    @property
    def is_over(self) -> bool:
        """Whether every step has its batch."""
        return self.step >= self.rules.num_steps

    @property
    def is_quiet(self) -> bool:
        """Whether everything that a save waits for has happened."""
        rules = self.rules
        workers = self.workers.values()
        if rules.pauses_to_save:
            # The next version to be published, for which all workers pause.
            next_version = rules.version_at(self.step) + 1
            if all(worker.loading == next_version for worker in workers):
                return True
            # Near the end of the run there is no next version to pause for.
            return self._all_generated(rules.num_steps)
        # After the save, workers generate with the newest weights, also in a run that resumes.
        if any(worker.version < self.published for worker in workers):
            return False
        if rules.saves_running:
            return True
        # All samples must have ended, and a deterministic schedule must have started all it may.
        if not all(group.is_complete for group in self.groups.values()):
            return False
        if not rules.deterministic:
            return True
        # Between `hold` and `release`, `hold_after` is the last step whose batch may still start.
        return self._all_generated(min(self.hold_after or 0, rules.num_steps))

    def may_start(self, version: int, batch: int) -> bool:
        """The gate: whether weights of this version may begin a sample for a batch."""
        return self.rules.version_at(batch) - version <= self.rules.max_staleness

    def state(self) -> dict[str, Any]:
        """State of the schedule for a checkpoint, as plain values.

        Returns:
            `num_groups`, the number of groups that have been started; `groups`, for each group
            [number, batch, row, pairs of a sample and its version, unfinished samples, is_kept];
            and `batches`, for each step [num_wanted, num_rows].
        """
        groups = []
        for group in self.groups.values():
            sample_versions = list(group.sample_versions.items())
            unfinished = sorted([*group.running, *group.waiting])
            groups.append(
                [group.number, group.batch, group.row, sample_versions, unfinished, group.is_kept]
            )
        batches = {
            step: [batch.num_wanted, batch.num_rows] for step, batch in self._batches.items()
        }
        return {"num_groups": self.num_groups, "groups": groups, "batches": batches}

    def restore(self, state: dict[str, Any]) -> None:
        """Continue from a state, in a new schedule with the step of the state.

        Unfinished samples start first, on any worker.

        Args:
            state: what `state` returned when the checkpoint was written.
        """
        self.num_groups = state["num_groups"]
        # The state has two fields of a batch. The loop below sets the others from its groups.
        for step, (num_wanted, num_rows) in state["batches"].items():
            self._batches[step] = Batch(num_wanted, num_rows)
        for number, step, row, sample_versions, unfinished, is_kept in state["groups"]:
            group = Group(
                number, step, row, waiting=unfinished, sample_versions=dict(sample_versions)
            )
            group.is_complete = not unfinished
            group.is_kept = is_kept
            group.oldest = min(group.sample_versions.values(), default=0)
            self.groups[number] = group
            if unfinished:
                self._to_start.add(number)
            batch = self._batches[step]
            if not is_kept:
                batch.num_open += 1
            elif self._drops_stale:
                self._kept.append(number)
            else:
                batch.kept.append(number)

    # Decisions about starts.

    @property
    def _drops_stale(self) -> bool:
        """Whether a step takes the oldest groups that are ready, for whichever step they began."""
        return self.rules.on_stale == "drop"

    def _start(self) -> None:
        """Start samples without a worker, then new groups, as long as workers are free."""
        # Samples of lost workers or of the checkpoint, which belong to the oldest groups.
        for number in sorted(self._to_start):
            group = self.groups[number]
            worker = self._worker_for(group.batch, len(group.waiting))
            if worker is not None:
                self._begin(worker, group)
        while (batch := self._next_batch()) is not None:
            # A later batch needs weights that are at least as new, so no worker could take its
            # groups either.
            worker = self._worker_for(batch, self.rules.group_size)
            if worker is None:
                break
            num_wanted = self.rules.round_size or self.rules.num_groups
            row = self._batches.setdefault(batch, Batch(num_wanted)).num_rows
            group = self._new_group(self.num_groups, batch, row)
            self.num_groups += 1
            self._begin(worker, group)

    def _new_group(self, number: int, batch: int, row: int) -> Group:
        """Add a group, whose samples have no worker yet, to a batch."""
        group = Group(number, batch, row, list(range(self.rules.group_size)))
        self.groups[number] = group
        self._batches[batch].num_rows += 1
        self._batches[batch].num_open += 1
        return group

    def _next_batch(self) -> int | None:
        """The first batch to which groups may be added. None: there is none."""
        last_step = self.rules.num_steps
        if self.hold_after is not None:
            last_step = min(last_step, self.hold_after)
        if self._drops_stale:
            # Groups belong to no step: the existing ones fill the batches of the next steps.
            step = self.step + 1 + len(self.groups) // self.rules.num_groups
            return step if step <= last_step else None
        for step in range(self.step + 1, last_step + 1):
            batch = self._batches.get(step)
            if batch is None or batch.num_rows < batch.num_wanted:
                return step
        return None

    def _worker_for(self, batch: int, size: int) -> int | None:
        """The least loaded worker that may begin samples of a batch, if it can do so now.

        Args:
            batch: step for which the samples are.
            size: number of samples.

        Returns:
            The number of the worker. None if there is no such worker, or if it is still loading
            published weights: the samples then wait for it, so that loads are shared evenly.
        """
        finishes_first = self.rules.in_flight == "finish" and not self.rules.deterministic
        candidates = []
        for number, worker in self.workers.items():
            is_loading = worker.loading is not None
            # A worker that is loading weights will begin samples with these weights.
            version = worker.loading if is_loading else worker.version
            # A worker begins no samples while it waits for weights that are not published.
            is_paused = is_loading and version > self.published
            # With "finish", a worker with older weights begins no samples: it waits until its
            # running samples have ended, and then loads the newest weights.
            is_draining = not is_loading and finishes_first and version < self.published
            num_running = len(worker.running)
            # A worker without samples takes a group that is larger than its capacity.
            has_room = worker.capacity is None or num_running + size <= worker.capacity
            is_free = (has_room or not num_running) and not is_paused and not is_draining
            if is_free and self.may_start(version, batch):
                candidates.append((num_running, number))
        if not candidates:
            return None
        # Among equally loaded workers, the smallest number wins, so that runs can be repeated.
        _, number = min(candidates)
        return number if self.workers[number].loading is None else None

    def _begin(self, worker: int, group: Group) -> None:
        """Assign all waiting samples of a group to a worker."""
        state = self.workers[worker]
        samples = tuple(sorted(group.waiting))
        for sample in samples:
            group.running[sample] = worker
            # A sample that continues from a checkpoint keeps the version of its first token.
            group.sample_versions.setdefault(sample, state.version)
            state.running.add((group.number, sample))
        group.waiting.clear()
        group.oldest = min(group.sample_versions.values())
        self._to_start.discard(group.number)
        self._pending.append(
            Start(worker, group.number, group.batch, group.row, samples, state.version)
        )

    def _stop_starts(self) -> None:
        """Start nothing until `release`, and end all waits for weights.

        A deterministic schedule may still start what it would have started in any case before the
        next publication.
        """
        rules = self.rules
        self.hold_after = 0
        if rules.deterministic and self.step:
            # The gate admits batches of steps that begin with up to this version.
            newest = rules.version_at(self.step) + rules.max_staleness
            self.hold_after = rules.last_step_with(newest)
        for number, worker in self.workers.items():
            if worker.loading is not None and worker.loading > self.published:
                worker.loading = None
                self._pending.append(Resume(number))

    # Decisions about weights.

    def _workers_behind(self) -> list[int]:
        """Numbers of the workers that are to load newer weights, and are not loading any yet."""
        newest = self.published
        # A deterministic worker also waits for weights that are not published yet.
        if self.rules.deterministic and self.hold_after is None:
            newest = self.rules.version_at(self.rules.num_steps)
        return [
            number
            for number, worker in sorted(self.workers.items())
            if worker.loading is None and worker.version < newest
        ]

    def _load(self) -> None:
        """Make workers load newer weights, or pause for them."""
        for number in self._workers_behind():
            worker = self.workers[number]
            if not self._may_load(worker):
                continue
            version = self.published
            if self.rules.deterministic:
                # No version is left out, however fast the trainer is.
                version = worker.version + 1
            self._load_version(number, version)

    def _load_version(self, number: int, version: int) -> None:
        """Make a worker load a version, or pause for it if it is not published yet."""
        self.workers[number].loading = version
        self._pending.append(Load(number, version))

    def _may_load(self, worker: _WorkerState) -> bool:
        """Whether a worker that is behind may change its weights now."""
        rules = self.rules
        if not rules.deterministic:
            return rules.in_flight == "continue" or not worker.running
        # The worker first generates all batches that may begin with its version. These are the
        # batches of steps whose version is at most `num_ahead` higher.
        num_ahead = rules.max_staleness
        if rules.in_flight == "continue":
            # The batches of the last of these versions need not be complete, because their samples
            # continue with the worker's next version.
            num_ahead = max(num_ahead - 1, 0)
        last_step = rules.last_step_with(worker.version + num_ahead)
        return self._all_generated(min(last_step, rules.num_steps))

    def _all_generated(self, last: int) -> bool:
        """Whether all batches up to a step are generated."""
        # A generated batch stays generated, so it is not checked again.
        self._last_generated = max(self._last_generated, self.step)
        while self._last_generated < last:
            batch = self._batches.get(self._last_generated + 1)
            if batch is None or not batch.is_generated:
                return False
            self._last_generated += 1
        return True

    # Decisions about batches.

    def _hand_over(self) -> None:
        """Hand the next batch or part over, if the trainer is waiting for it and it is ready."""
        if not self._is_batch_wanted or self.is_over:
            return
        numbers = self._take_ready_groups()
        if numbers is None:
            return
        self._is_batch_wanted = False
        step = self.step + 1
        self._check_bound(step, numbers)
        for number in numbers:
            del self.groups[number]

        is_last = True
        if not self._drops_stale:
            batch = self._batches[step]
            batch.num_handed += len(numbers)
            batch.kept = [number for number in batch.kept if number in self.groups]
            # A step ends with the last part of its batch.
            is_last = batch.num_handed == self.rules.num_groups
        self._pending.append(HandOver(step, tuple(numbers), is_last))
        if is_last:
            self.step = step
            self._drop_leftovers()

    def _drop_leftovers(self) -> None:
        """Drop the groups that no later step can learn from."""
        # Dynamic sampling may keep more groups than a batch needs; `_hand_over` has left the surplus.
        if not self._drops_stale:
            for number in self._batches[self.step].kept:
                self._drop(self.groups[number], "surplus")
        oldest_allowed = self.rules.version_at(self.step + 1) - self.rules.max_staleness
        for group in list(self.groups.values()):
            if self.is_over:
                self._drop(group, "end")
            elif self._drops_stale and group.oldest < oldest_allowed:
                self._drop(group, "stale")
        # Batches of later steps are kept even without groups, because they number further rows.
        steps_with_groups = {group.batch for group in self.groups.values()}
        for step in list(self._batches):
            if step <= self.step and step not in steps_with_groups:
                del self._batches[step]

    def _drop(self, group: Group, reason: Reason) -> None:
        """Remove a group, and free the workers that still generate samples of it."""
        del self.groups[group.number]
        if not group.is_kept:
            self._batches[group.batch].num_open -= 1
        elif self._drops_stale:
            # With on_stale="wait" the group is in the list `kept` of its batch, which is over.
            self._kept.remove(group.number)
        self._to_start.discard(group.number)
        # The caller aborts these samples. Events that they still cause are ignored.
        running = []
        for sample, worker in sorted(group.running.items()):
            running.append((worker, sample))
            self.workers[worker].running.remove((group.number, sample))
        self._pending.append(Drop(group.number, reason, tuple(running)))

    def _take_ready_groups(self) -> Sequence[int] | None:
        """Choose the groups of the next batch, or of its next part, if all of them are ready.

        With `on_stale="drop"` they are also removed from `_kept`.

        Returns:
            Numbers of the groups; None if they are not all ready.
        """
        rules = self.rules
        if self._drops_stale:
            if len(self._kept) < rules.num_groups:
                return None
            chosen = self._kept[: rules.num_groups]
            self._kept = self._kept[rules.num_groups :]
            return chosen

        batch = self._batches.get(self.step + 1)
        if batch is None:
            return None
        num_missing = rules.num_groups - batch.num_handed
        size = min(rules.part_size or rules.num_groups, num_missing)
        chosen = batch.kept[:size]
        if len(chosen) < size:
            return None

        # With dynamic sampling there may be more groups than needed. All are awaited, so that the
        # choice does not depend on which are graded first.
        if not rules.part_size:
            return chosen if batch.is_generated else None
        if rules.deterministic:
            # In the order of the prompts, so no earlier group of the batch may be missing.
            for group in self.groups.values():
                is_earlier = group.batch == self.step + 1 and group.number < chosen[-1]
                if is_earlier and not group.is_kept:
                    return None
        return chosen

    def _check_bound(self, step: int, numbers: Iterable[int]) -> None:
        """Check the bound on staleness for the groups of a step.

        Raises:
            RolloutError: a group is too old.
        """
        version = self.rules.version_at(step)
        for number in numbers:
            staleness = version - self.groups[number].oldest
            if not 0 <= staleness <= self.rules.max_staleness:
                raise RolloutError(
                    "async_training",
                    got=f"group {number} with a token {staleness} versions older than step {step} "
                    "begins with",
                    expected=f"0 to {self.rules.max_staleness}",
                )
