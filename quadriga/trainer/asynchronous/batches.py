# SPDX-License-Identifier: Apache-2.0
"""Batches of responses that were generated while earlier ones were learned from (`async_training`).

    trainer             take(s) ─── waits ──> batch s ── update ── publish(s) ── take(s + 1) ── ...
                          │ wants_batch         ^ HandOver            │ a copy of the weights
    schedule (a lock)  ───┼─────────────────────┼─────────────────────┼───────────────────────────
                          v Start               │ ended, graded       v Load
    rollout (threads)     step ─ step ─ step ─ done(group) ─ step ─ newer weights ─ step ─ ...

take       consumes: groups that are complete, in the order of the schedule. Waits for: the groups of its step, as the
           schedule chooses them. Unblocked by: the last of them, or an error in the rollout, which is raised.
publish    consumes: the actor's weights, copied. Waits for: the copy alone.
done       consumes: the rows of a group, in the rollout's thread. Waits for: the lock, and with dynamic sampling in a
           deterministic run for the graders. Unblocked by: them.
a load     waits for: the weights, where the schedule lets the rollout pause for them. Unblocked by: `publish`, or a
           save.
state_dict consumes: what is under way. Waits for: the schedule to say `Save`, then the rollout's next step. Unblocked
           by: it; in a deterministic run the rollout itself waits until the next `take`.

With a rollout in processes of its own each engine is a worker of the schedule (`trainer/asynchronous/streams.py`).

What becomes of events is decided in one place, `trainer/asynchronous/schedule.py`; here its decisions are carried out.
The bound on staleness is checked again on the tokens of every batch.

Legend: B rows, T response positions.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from itertools import count
from pathlib import Path
from threading import Condition
from typing import Any

import torch

from quadriga.background import in_background
from quadriga.config import Config
from quadriga.errors import ConfigError
from quadriga.observe.metrics import Metric
from quadriga.observe.watchdog import waiting
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.rewards import RewardManager
from quadriga.trainer.asynchronous.record import (
    RECORD,
    RecordedSchedule,
    RecordedVersions,
    ScheduleRecord,
)
from quadriga.trainer.asynchronous.schedule import (
    Decision,
    Drop,
    HandOver,
    Load,
    Resume,
    Rules,
    Save,
    Schedule,
    Start,
)
from quadriga.trainer.asynchronous.snapshot import read, require_state, written
from quadriga.trainer.asynchronous.streams import StreamPool
from quadriga.trainer.group_filter import GroupFilter
from quadriga.trainer.metrics import measure_staleness, token_versions
from quadriga.trainer.prompts import PromptStream, assign_uids
from quadriga.trainer.responses import grade, repeat_prompts, rollout_inputs, without_passing
from quadriga.trainer.rollout_pool import WeightPublisher
from quadriga.workers import ActorRolloutRefWorker
from quadriga.workers.stream import UnderWay

TEND_S = 1.0  # how often a wait looks after engines in other processes


class AsyncBatches(WeightPublisher):
    """Where the batches of an asynchronous run come from, and where its weights go.

    Args:
        weights: gives validation the actor's weights.
        actor: of whose weights the rollout gets copies.
        prompts: of training; batches of them are taken here only.
        num_steps: the last training step.
    """

    def __init__(
        self,
        weights: WeightPublisher,
        actor: ActorRolloutRefWorker,
        prompts: PromptStream,
        reward: RewardManager,
        config: Config,
        num_steps: int,
    ) -> None:
        self._validation, self._actor, self._config, self._reward = weights, actor, config, reward
        self._prompts, self._settings = prompts, config.async_training
        self._pool = weights if isinstance(weights, StreamPool) else None
        self.rules = Rules.of(config, num_steps)
        learners = [getattr(prompts.loader, name, None) for name in ("sampler", "dataset")]
        if self.rules.max_staleness and any(map(hasattr, learners, ("update", "on_batch_end"))):
            got, fix = (
                "a sampler or a data set that learns from batches",
                "Set async_training.max_staleness=0.",
            )
            raise ConfigError(
                "async_training.enable", got=got, expected="one whose rows are known ahead", fix=fix
            )
        self.schedule: Schedule | None = None
        self._changed = Condition()  # holds the lock of everything below
        self._rows: list[DataProto] = []  # prompts that are taken and not started
        self._next_rows: dict[int, DataProto] = {}  # of these, those that have a group
        self._num_taken = 0  # groups that have a prompt
        self._streams: dict[int, Any] = {}  # by worker
        self._joining: list[Any] = []  # streams that have no weights yet
        self._numbers, self._has_begun = count(), False  # of workers
        self._begun: dict[int, DataProto] = {}  # the prompt of a group, one row
        self._under_way: list[UnderWay] = []  # in the checkpoint, and not started yet
        self._complete: dict[int, DataProto] = {}
        self._filters: dict[int, GroupFilter] = {}  # by batch
        self._rounds: dict[int, list[int]] = {}  # complete groups of a batch that are not graded
        self._saved: dict[str, Any] | None = None
        self._saving: dict[
            int, Sequence[UnderWay] | None
        ] = {}  # under way in each worker that saves; None: not told
        self._weights: dict[int, DataProtoFuture] = {}  # by version
        self._unannounced: int | None = None
        self._handed: HandOver | None = None
        self._error: BaseException | None = None
        self._is_ended = False
        self._resumed: dict[str, Any] = {}
        self._pauses: dict[
            int, dict[str, bool]
        ] = {}  # of each worker's last load: whether it is given up
        self._counts: dict[str, float] = defaultdict(float)
        self.is_current = (
            True  # nothing was learned between the newest version and the batch taken last
        )
        self._taken = 0  # the step of the batch that was taken last
        self._idle_since: dict[int, float] = {}

    # What the loop calls.

    def publish(self, version: int) -> None:
        """After a step (or what was loaded before the first): validation gets the weights, and the rollout a copy of
        them where a publication is due."""
        self._validation.publish(version)
        if self.schedule is None or not self.rules.publishes(version):
            return
        copied, number = self._actor.copy_weights(), self.rules.version_at(version + 1)
        with self._changed:
            self._weights[number] = copied
            self._unannounced = number
            # In lockstep prompts are taken once the step is over, for a sampler may learn from its batch; and a save
            # must not depend on what starts before it.
            if self.rules.max_staleness > 0 and not self.rules.deterministic:
                self._announce()
                self._act()
            self._changed.notify_all()

    def take(self, step: int) -> tuple[DataProto, bool]:
        """The batch of a step, `data.train_batch_size` groups, or its next mini-batch; with `token_staleness` [B, T]
        beside what `generate_sequences` gives. And whether the step has all of its groups with it.
        Raises what failed in the rollout; RolloutError: a token is older than allowed."""
        started = time.perf_counter()
        with self._changed:
            schedule = self._begin(step) if self.schedule is None else self.schedule
            schedule.release()
            self._announce()
            self._tend()
            schedule.wants_batch()
            self._act()
            with waiting(f"the responses of step {step}", self._state):
                self._wait_for(lambda: self._handed is not None)
            handed, self._handed = self._handed, None
            assert handed is not None and handed.step == step
            depth = sum(group.is_kept for group in schedule.groups.values())
            parts = [self._complete.pop(group) for group in handed.groups]
            groups = self._filters.pop(step, None)
            versions = torch.cat([part.batch["token_versions"] for part in parts])
            self._file.add_step(step, handed.groups, versions, self.rules.group_size)
        batch = groups.batch() if groups is not None else DataProto.concat(parts)
        batch.meta_info |= {"global_steps": step, "total_training_steps": self.rules.num_steps}
        is_newest = self.rules.publishes(step - 1) or step - 1 <= self.rules.warmup_steps
        self.is_current, self._taken = is_newest and step != self._taken, step
        measured = {
            "depth": Metric(depth, "last"),
            "wait_s": Metric(time.perf_counter() - started, "sum"),
        }
        measured |= measure_staleness(batch, step, self.rules)
        batch.meta_info["metrics"] |= {f"async/{name}": metric for name, metric in measured.items()}
        return batch, handed.is_last

    def state_dict(self) -> dict[str, Any]:
        """After a step: what was generated ahead, and what is under way, or that is waited for (`Rules.saves_running`);
        in the run that goes on as in the one that resumes nothing starts before the next step."""
        with self._changed:
            if (schedule := self.schedule) is None:
                return self._resumed
            schedule.hold(self._unannounced)
            if not self.rules.pauses_to_save:
                self._announce()
            self._act()
            with waiting("the rollout, whose state is saved", self._state):
                self._wait_for(lambda: self._saved is not None)
            found, self._saved = self._saved, None
        assert found is not None
        return written(found)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Go on from what was generated ahead; None or nothing of a run in lockstep.
        Raises CheckpointError: it is not what `state_dict` gives."""
        self._resumed = state or {}
        if self._resumed:
            require_state(self._resumed)

    def take_counts(self) -> dict[str, Any]:
        with self._changed:
            counts, self._counts = self._counts, defaultdict(float)
        return self._validation.take_counts() | {
            f"async/{name}": count for name, count in counts.items()
        }

    def stop(self) -> None:
        """Let nothing wait any more; what is under way is given up with the workers."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        if self._pool is not None:
            self._pool.stop()

    def close(self) -> None:
        self._validation.close()
        if self.schedule is not None:
            self._file.close()

    # What happens.

    def _begin(self, step: int) -> Schedule:
        """The first step that is taken here begins: the rollout gets the weights that there are."""
        path, own = self._settings.replay, self._config.trainer.directory / RECORD
        recorded = RecordedSchedule if self._pool is None else RecordedVersions
        kind = Schedule if path is None else partial(recorded, path=Path(path))
        schedule = kind(self.rules, step=step - 1)
        if step > 1:
            own = own.with_name(own.name.replace(".", f"_from_step_{step}.", 1))
        self._file = ScheduleRecord(own)
        if self._resumed:
            self._restore(schedule, self._resumed)
        self.schedule = schedule
        self._weights[schedule.published] = self._actor.copy_weights()
        if self._pool is None:
            self._join(self._actor.open_stream(self._end_group))
        self._wait_for(lambda: bool(self._streams) and not self._joining)
        if self._pool is None:
            self._weights.clear()
            self._streams[0].engine.num_steps = self._resumed.get("num_steps", 0)
        if isinstance(schedule, RecordedSchedule) and self._pool is None:
            stream = self._streams[0]
            stream.engine.before_step = self._replay
            stream.load(
                lambda: None, schedule.published, keeps_cache=True
            )  # so that the engine looks
        self._has_begun = True
        for batch in tuple(self._rounds):
            self._grade_round(batch)
        return schedule

    def _restore(self, schedule: Schedule, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave."""
        found = read(state)
        schedule.restore(found["schedule"])
        self._num_taken = schedule.num_groups
        self._begun, self._complete, self._rows = found["begun"], found["groups"], found["rows"]
        self._under_way, self._rounds = found["under_way"], found["rounds"]
        self._counts |= found["counts"]
        for batch, own in found["filters"].items():
            self._filters[batch] = GroupFilter(self._config)
            self._filters[batch].load_state_dict(own)

    def _take_state(self, step: int, num_steps: int) -> None:
        """All that the run goes on from after a save, once each worker has told what it has under way; not in a
        repetition, which writes none."""
        if len(told := [own for own in self._saving.values() if own is not None]) < len(
            self._saving
        ):
            return
        self._saving.clear()
        self._file.add(at=num_steps, save=step)
        if self._settings.replay is not None:
            return
        assert self.schedule is not None
        self._saved = {
            "schedule": self.schedule.state(),
            "num_steps": num_steps,
            "begun": dict(self._begun),
            # Others may have ended since their worker told of them.
            "under_way": [one for own in told for one in own if one[0] in self._begun],
            "groups": dict(self._complete),
            "rows": list(self._rows),
            "counts": dict(self._counts),
            "rounds": {batch: list(numbers) for batch, numbers in self._rounds.items()},
            "filters": {batch: one.state_dict() for batch, one in self._filters.items()},
        }
        self._changed.notify_all()

    def _join(self, stream: Any) -> None:
        """A stream gets weights, and is a worker of the schedule once it has them: those that others generate with, so
        that in a deterministic run the same ones begin a batch."""
        assert self.schedule is not None
        workers, number = self.schedule.workers.values(), next(self._numbers)
        version = min((worker.version for worker in workers), default=self.schedule.published)
        weights = self._weights[version]
        self._joining.append(stream)

        def joined(loaded: Future[int]) -> None:
            with self._deciding(), self._changed:
                loaded.result()
                assert self.schedule is not None
                self._joining.remove(stream)
                self._streams[number], self._idle_since[number] = stream, time.perf_counter()
                self.schedule.joined(number, version)

        stream.load(lambda: weights, version, keeps_cache=False).add_done_callback(joined)

    def _tend(self) -> None:
        """Engines in other processes that are new or lost, as workers of the schedule."""
        if self._pool is None or self.schedule is None:
            return
        new, lost = self._pool.tend(self._end_group, pauses=self.rules.deterministic)
        self._joining = [stream for stream in self._joining if stream not in lost]
        for number in [number for number, stream in self._streams.items() if stream in lost]:
            del self._streams[number]
            self._idle_since.pop(number, None)
            self.schedule.lost(number)
            if number in self._saving:
                self._saving[number] = ()
                self._take_state(self.schedule.step, 0)
        if lost:
            self._act()
        for stream in new:
            self._join(stream)

    def _wait_for(self, is_there: Callable[[], bool]) -> None:
        """Wait with the lock, looking after the engines. Raises what fails in the rollout."""
        while self._error is None and not is_there():
            self._tend()
            if not is_there():
                self._changed.wait(None if self._pool is None else TEND_S)
        if self._error is not None:
            raise self._error

    def _announce(self) -> None:
        if self._unannounced is not None and self.schedule is not None:
            self.schedule.has_published(self._unannounced)
            self._unannounced = None
        self._changed.notify_all()

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        """Around what happens in another thread than the trainer's, which decisions follow; the trainer's raises its
        error."""
        try:
            yield
            with self._changed:
                self._act()
        except BaseException as error:
            with self._changed:
                self._error = self._error or error
        with self._changed:
            self._changed.notify_all()

    def _end_group(self, number: int, output: Callable[[], DataProto]) -> None:
        """A group has ended."""
        with self._deciding(), self._changed:
            rows, schedule = output(), self.schedule
            assert schedule is not None
            begun, group = self._begun.pop(number, None), schedule.groups.get(number)
            if group is None or begun is None:  # it was dropped meanwhile
                self._counts["discarded_tokens"] += int(rows.batch["response_mask"].sum())
                return
            complete = without_passing(repeat_prompts(begun, self.rules.group_size)).union(rows)
            complete.meta_info = {
                "metrics": rows.meta_info["metrics"]
            }  # the rest may differ between groups
            self._complete[number] = complete
            for sample, own in enumerate(token_versions(rows)):
                drawn, worker = own[own >= 0], group.running[sample]
                schedule.ended(worker, number, sample, int(drawn.min()) if len(drawn) else None)
                if not self._streams[worker].num_open:
                    self._idle_since[worker] = time.perf_counter()
            if not self.rules.round_size:
                schedule.graded(number)
                return
            self._rounds.setdefault(group.batch, []).append(number)
            self._grade_round(group.batch)

    def _grade_round(self, batch: int) -> None:
        """Grade the complete groups of a batch where they are a whole round."""
        if len(numbers := sorted(self._rounds[batch])) < self.rules.round_size:
            return
        work = partial(
            self._grade, batch, numbers, DataProto.concat([self._complete[one] for one in numbers])
        )
        _ = work() if self.rules.deterministic else in_background(work, "grading of a round")

    def _grade(self, batch: int, numbers: list[int], part: DataProto) -> None:
        """Dynamic sampling: which groups of a round are kept."""
        with self._deciding():
            grade(self._reward, part)
            with self._changed:
                del self._rounds[batch]  # until here, for a save
                kept = self._filters.setdefault(batch, GroupFilter(self._config)).add(part)
                for number in numbers:
                    is_kept = self._complete[number].non_tensor_batch["uid"][0] in kept
                    assert self.schedule is not None
                    self.schedule.graded(number, "kept" if is_kept else "equal")

    # What is decided.

    def _act(self) -> None:
        """Carry out what the schedule decides, as long as it decides anything."""
        assert self.schedule is not None
        decided: list[Decision] = []
        while self._has_begun and (decisions := self.schedule.decide()):
            decided += decisions
        self._carry_out(decided)

    def _carry_out(self, decided: Sequence[Decision]) -> None:
        for decision in decided:
            match decision:
                case Load(worker, version):
                    self._load(worker, version)
                case Resume(worker):
                    self._pauses[worker]["is_over"] = True
                    self._changed.notify_all()
                case Save(worker, step):
                    self._save(worker, step)
                case HandOver():
                    self._handed = decision
                case Drop(group, reason, running):
                    for worker in {worker for worker, _ in running}:
                        self._streams[worker].abort(group)
                    self._begun.pop(group, None)
                    self._counts[f"dropped_{reason}"] += 1
                    if (rows := self._complete.pop(group, None)) is not None:
                        self._counts["discarded_tokens"] += int(rows.batch["response_mask"].sum())
        # After a load that was decided with them: else it would be a matter of time which one the engine takes first.
        self._start([one for one in decided if isinstance(one, Start)])

    def _replay(self, num_steps: int) -> None:
        """Before a step of the engine, what the record has there."""
        with self._deciding(), self._changed:
            assert isinstance(self.schedule, RecordedSchedule)
            self._carry_out(self.schedule.at(num_steps, next(iter(self._streams))))

    def _start(self, starts: Sequence[Start]) -> None:
        rows = {
            start.group: self._rows_of(start) for start in starts
        }  # prompts in the order of the schedule
        for worker in dict.fromkeys(start.worker for start in starts):
            own = [start for start in starts if start.worker == worker]
            if (idle_since := self._idle_since.pop(worker, None)) is not None:
                self._counts["rollout_wait_s"] += (time.perf_counter() - idle_since) / len(
                    self._streams
                )
            begun = {start.group: rows[start.group] for start in own}
            going = [one for one in self._under_way if one[0] in begun]
            new = [
                (one.group, one.batch, one.row)
                for one in own
                if all(one.group != group for group, *_ in going)
            ]
            if self._pool is not None:
                self._file.add_start(new, version=own[0].version)
            self._streams[worker].start(
                begun, lambda at, new=new: self._file.add_start(new, at=at), going
            )
        self._under_way = [one for one in self._under_way if one[0] not in rows]

    def _rows_of(self, start: Start) -> DataProto:
        """What the rollout gets of a group: of the next prompt, or of the same one, where its worker was lost."""
        if start.group not in self._begun:
            while (
                start.group not in self._next_rows
            ):  # a repetition on several workers may start a later one first
                if not self._rows:
                    taken = self._prompts.take()
                    self._rows = [taken.slice(row, row + 1) for row in range(len(taken))]
                self._next_rows[self._num_taken] = self._rows.pop(0)
                self._num_taken += 1
            row = self._next_rows.pop(start.group)
            meta_info = {"global_steps": start.batch, "total_training_steps": self.rules.num_steps}
            prompt = DataProto(row.batch, dict(row.non_tensor_batch), row.meta_info | meta_info)
            self._begun[start.group] = assign_uids(prompt, str(start.batch), first=start.row)
        elif not any(group == start.group for group, *_ in self._under_way):
            self._counts["restarted_groups"] += 1
        return rollout_inputs(
            repeat_prompts(self._begun[start.group], self.rules.group_size), self._config
        )

    def _load(self, worker: int, version: int) -> None:
        """Have a worker take weights; it waits for them where they are not published yet."""
        pause, schedule, stream = {"is_over": False}, self.schedule, self._streams[worker]
        self._pauses[worker] = pause
        assert schedule is not None

        def weights() -> DataProtoFuture | None:
            with self._changed:
                self._changed.wait_for(
                    lambda: version <= schedule.published or pause["is_over"] or self._is_ended
                )
                return None if pause["is_over"] else self._weights.get(version)

        done = stream.load(weights, version, keeps_cache=self._settings.kv_on_update == "keep")
        done.add_done_callback(partial(self._loaded, worker, version))

    def _save(self, worker: int, step: int) -> None:
        """Have the state taken between two steps of a worker, which waits there if it is deterministic; or now."""
        schedule, stream = self.schedule, self._streams[worker]
        assert schedule is not None

        def take(num_steps: int, under_way: Sequence[UnderWay]) -> None:
            with self._changed:
                self._saving[worker] = under_way
                self._take_state(step, num_steps)
                if self.rules.pauses_to_save and not schedule.is_over:
                    self._changed.wait_for(lambda: schedule.hold_after is None or self._is_ended)

        def taken(done: Future[int]) -> None:
            with self._deciding():
                done.result()

        if self.rules.saves_running:
            self._saving[worker] = None
            stream.save(take).add_done_callback(taken)
        elif self._saved is None:  # not of each worker
            self._take_state(step, stream.engine.num_steps if self._pool is None else 0)

    def _loaded(self, worker: int, version: int, done: Future[int]) -> None:
        with self._deciding(), self._changed:
            number, stream = done.result(), self._streams.get(worker)
            if (
                stream is not None
                and stream.weight_version == version
                and self.schedule is not None
            ):
                if self._pool is None:  # the steps of several engines have no order
                    self._file.add(at=number, load=version)
                self.schedule.loaded(worker, version)
                oldest = min(one.version for one in self.schedule.workers.values())
                # One that comes back begins with the oldest that are in use.
                last = oldest if self._pool is None else oldest - 1
                self._weights = {
                    number: own for number, own in self._weights.items() if number > last
                }

    def _state(self) -> str:
        """What a long wait waits for."""
        return f"{len(self.schedule.groups) if self.schedule else 0} groups are started, {len(self._complete)} complete"
