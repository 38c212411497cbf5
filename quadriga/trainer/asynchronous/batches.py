# SPDX-License-Identifier: Apache-2.0
"""Generates batches of responses while earlier batches are learned from (`async_training`).

    trainer             take(s) ─── waits ──> batch s ── update ── publish(s) ── take(s + 1) ── ...
                          │ wants_batch         ^ HandOver            │ a copy of the weights
    schedule (a lock)  ───┼─────────────────────┼─────────────────────┼───────────────────────────
                          v Start               │ ended, graded       v Load
    rollout (threads)     step ─ step ─ step ─ done(group) ─ step ─ newer weights ─ step ─ ...

Events come from three kinds of threads. `schedule.py` turns them into decisions, which this file
carries out. The thread of an engine in this process reports ended groups, loads and saves; for
engines in other processes, listening threads do (`streams.py`). A background thread grades a round
of dynamic sampling.

    thread       consumes                    waits for                       unblocked by
    trainer:
     take        complete groups             the groups of its step          the last group, or an
                                                                             error of the rollout
     publish     the actor's weights         their copy                      the copy
     state_dict  unfinished responses        the decision `Save`, then the   the last report, or an
                                             next step of each engine        error of the rollout
    rollout:
     done        rows of a group             the lock; the graders, if       these
                                             `deterministic`
     load        weights                     their publication, if the       `publish`, or the next
                                             worker pauses for it            `take`; `Resume`, `stop`
     save        its unfinished responses    the next `take`, if             `take` or `stop`
                                             `deterministic`
    grading      a round of groups           the graders                     these

One lock protects the schedule and all other state. It is reentrant, because an engine may end a
group inside the call that starts it. After the first step it is not held while weights are copied,
nor, unless `deterministic`, while a round is graded. Locks of engines and streams are taken inside
it, never around it. Each change that a thread may wait for is followed by `notify_all`.

`Prefetcher` has the groups, `StreamWorkers` the engines and their weights, `Snapshot` the state for
a checkpoint.
"""

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
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
from quadriga.trainer.asynchronous.prefetcher import Prefetcher
from quadriga.trainer.asynchronous.record import (
    RECORD,
    RecordedSchedule,
    RecordedVersions,
    ScheduleRecord,
)
from quadriga.trainer.asynchronous.rules import (
    Decision,
    Drop,
    HandOver,
    Load,
    Resume,
    Rules,
    Save,
    Start,
)
from quadriga.trainer.asynchronous.schedule import Schedule
from quadriga.trainer.asynchronous.snapshot import (
    Snapshot,
    as_tensor,
    convert_rows,
    require_state,
)
from quadriga.trainer.asynchronous.staleness import measure_staleness, token_versions
from quadriga.trainer.asynchronous.streams import Pause, Stream, StreamPool, StreamWorkers
from quadriga.trainer.prompts import PromptStream
from quadriga.trainer.responses import grade
from quadriga.trainer.rollout_pool import WeightPublisher
from quadriga.trainer.rollout_rows import rollout_numbers
from quadriga.workers import ActorRolloutRefWorker
from quadriga.workers.stream import GenerationStream, SavedResponse

REFRESH_S = 1.0
"""Seconds between two checks for lost and new engines, while the trainer waits."""


class AsyncBatches(WeightPublisher):
    """Coordinates generation and training: it provides batches, and publishes weights.

    Args:
        weights: publishes the actor's weights for validation.
        actor: worker group whose weights are copied to the rollout.
        prompts: stream of the training prompts. Nothing else may take from it.
        reward: grades rounds of dynamic sampling.
        config: the resolved configuration.
        num_steps: number of the last training step.

    Attributes:
        rules: rules of the schedule.
        schedule: the schedule; None before the first batch is taken.
        is_current: whether the actor had exactly the newest version of the weights when the last
            batch was taken. Only then can log-probs of that version be compared.

    Raises:
        ConfigError: a sampler or data set learns from batches, but prompts are taken in advance.
    """

    _schedule_record: ScheduleRecord  # exists together with `schedule`

    def __init__(
        self,
        weights: WeightPublisher,
        actor: ActorRolloutRefWorker,
        prompts: PromptStream,
        reward: RewardManager,
        config: Config,
        num_steps: int,
    ) -> None:
        self.rules = Rules.of(config, num_steps)
        sampler = getattr(prompts.loader, "sampler", None)
        dataset = getattr(prompts.loader, "dataset", None)
        learns_from_batches = hasattr(sampler, "update") or hasattr(dataset, "on_batch_end")
        if self.rules.max_staleness and learns_from_batches:
            raise ConfigError(
                "async_training.enable",
                got="a sampler or a data set that learns from batches",
                expected="one whose rows are known ahead",
                fix="Set async_training.max_staleness=0.",
            )
        self.schedule: Schedule | None = None
        self.is_current = True
        self._config = config
        self._reward = reward
        self._validation = weights
        # Protects everything below; conditions are checked again after each `notify_all`.
        self._changed = Condition()
        self._prefetcher = Prefetcher(self.rules, prompts, config)
        pool = weights if isinstance(weights, StreamPool) else None
        self._workers = StreamWorkers(actor, pool)
        self._snapshot = Snapshot()
        self._has_begun = False  # whether there are workers, so that decisions can be carried out
        self._error: BaseException | None = None  # first error of another thread
        self._is_ended = False
        self._last_taken = 0  # step of the last batch that was taken

    # Called by the training loop.

    def publish(self, step: int) -> None:
        """Publish weights for validation, and a copy for the rollout if a new version is due.

        Args:
            step: number of the step after which the actor has these weights. Before the first
                step it is 0, or the step of the checkpoint. Validation uses it as their version.
        """
        self._validation.publish(step)
        # Before the first batch there are no workers yet: `_begin` loads the weights on them.
        if self.schedule is None or not self.rules.publishes(step):
            return
        # Without the lock, so that groups can end and start meanwhile.
        copied = self._workers.actor.copy_weights()
        next_version = self.rules.version_at(step + 1)
        with self._changed:
            self._workers.weights[next_version] = copied
            self._workers.unannounced = next_version
            # Otherwise the next `take` announces the version. In lockstep (`max_staleness=0`) no
            # prompts may be taken before the step is over, because a sampler may learn from its
            # batch. In a deterministic run a save must not depend on what starts before it.
            if self.rules.max_staleness > 0 and not self.rules.deterministic:
                self._announce_version()
                self._act()
            self._changed.notify_all()

    def take(self, step: int) -> tuple[DataProto, bool]:
        """Wait for the batch of a step, or for its next mini-batch.

        Args:
            step: the training step; the same again for its next mini-batch.

        Returns:
            Responses with `token_staleness` [B, T], and whether they complete the batch of the
            step.

        Raises:
            RolloutError: a token is older than allowed.
            Exception: an error of the rollout.
        """
        started = time.perf_counter()
        with self._changed:
            if self.schedule is None:
                self._begin(step)
            schedule = self._begun_schedule
            # If the previous step was saved, the engines may have paused for the save. Now they
            # continue.
            schedule.release()
            self._announce_version()
            self._refresh_streams()
            schedule.wants_batch()
            self._act()
            with waiting(f"the responses of step {step}", self._describe_progress):
                self._wait_for(lambda: self._prefetcher.hand_over is not None)
            hand_over, groups, group_filter = self._prefetcher.pop_batch()
            assert hand_over.step == step
            # Number of groups that are ready for later steps.
            depth = sum(group.is_kept for group in schedule.groups.values())
            versions = {number: rows.batch["token_versions"] for number, rows in groups.items()}
            self._schedule_record.add_step(step, versions)

        # Without the lock, because nothing else has these groups any more. With dynamic sampling
        # the filter has chosen the rows of the batch.
        batch = group_filter.batch() if group_filter else DataProto.concat([*groups.values()])
        batch.meta_info["global_steps"] = step
        batch.meta_info["total_training_steps"] = self.rules.num_steps
        # The actor has the newest published weights if the previous step published, or if all steps
        # so far were the critic's warm-up. Otherwise it was updated after the last publication.
        previous = step - 1
        is_newest = self.rules.publishes(previous) or previous <= self.rules.warmup_steps
        # A later mini-batch of the step follows an update on the earlier ones.
        self.is_current = is_newest and step != self._last_taken
        self._last_taken = step
        metrics = {
            "depth": Metric(depth, "last"),
            "wait_s": Metric(time.perf_counter() - started, "sum"),
        }
        metrics |= measure_staleness(batch, step, self.rules)
        batch.meta_info["metrics"] |= {f"async/{name}": metric for name, metric in metrics.items()}
        return batch, hand_over.is_last

    def state_dict(self) -> dict[str, Any]:
        """State of generation after a step, for a checkpoint.

        Unfinished responses are saved, or waited for (`Rules.saves_running`). Nothing else starts
        before the next step, both in this run and in one that resumes.
        """
        with self._changed:
            schedule = self.schedule
            if schedule is None:
                # No batch was taken yet, so the state is still that of the resumed checkpoint.
                return self._snapshot.resumed
            schedule.hold(self._workers.unannounced)
            # With `pauses_to_save`, engines are saved while they pause for the published weights. So
            # these are announced only by the next `take`.
            if not self.rules.pauses_to_save:
                self._announce_version()
            self._act()
            with waiting("the rollout, whose state is saved", self._describe_progress):
                self._wait_for(lambda: self._snapshot.state is not None)
            state = self._snapshot.state
            self._snapshot.state = None
        assert state is not None
        return convert_rows(state, as_tensor)

    def load_state_dict(self, state: dict[str, Any] | None) -> None:
        """Store a state of `state_dict`, from which the first `take` resumes.

        Args:
            state: the state. None or empty: the earlier run had none, because it took no batch or
                was not asynchronous.

        Raises:
            CheckpointError: the state has other entries.
        """
        self._snapshot.resumed = state or {}
        if state:
            require_state(state)

    def take_counts(self) -> dict[str, Any]:
        """Metrics of generation and of lost engines since the last call."""
        with self._changed:
            counts = self._prefetcher.take_counts()
        metrics = {f"async/{name}": count for name, count in counts.items()}
        return self._validation.take_counts() | metrics

    def stop(self) -> None:
        """Unblock all waiting threads. Unfinished responses are dropped with their workers."""
        with self._changed:
            self._is_ended = True
            self._changed.notify_all()
        if self._workers.pool is not None:
            self._workers.pool.stop()

    def close(self) -> None:
        """Close the record, and the publisher of weights for validation."""
        self._validation.close()
        if self.schedule is not None:
            self._schedule_record.close()

    # Called by the trainer's thread, with the lock.

    @property
    def _begun_schedule(self) -> Schedule:
        """The schedule, which exists once the first batch is taken."""
        assert self.schedule is not None, "the first step has begun"
        return self.schedule

    def _begin(self, step: int) -> None:
        """Create the schedule and its workers, and load the current weights on them.

        Args:
            step: the first step that is taken.
        """
        workers = self._workers
        replay = self._config.async_training.replay
        if replay is None:
            schedule = Schedule(self.rules, step=step - 1)
        else:
            repetition = RecordedSchedule if workers.pool is None else RecordedVersions
            schedule = repetition(self.rules, Path(replay), step=step - 1)
        record = self._config.trainer.directory / RECORD
        # A resumed run writes a file of its own: async_schedule_from_step_N.jsonl.
        if step > 1:
            record = record.with_name(record.name.replace(".", f"_from_step_{step}.", 1))
        self._schedule_record = ScheduleRecord(record)
        self._snapshot.restore(schedule, self._prefetcher)
        self.schedule = schedule

        workers.weights[schedule.published] = workers.actor.copy_weights()
        if workers.pool is None:
            self._join(workers.actor.open_stream(self._end_group))
        # While it waits, `_wait_for` opens the streams of engines in other processes.
        self._wait_for(lambda: bool(workers.streams) and not workers.joining)
        if workers.pool is None:
            self._prepare_local_engine(schedule)
        # The schedule decides nothing before this, so that all workers take part in its first
        # decisions.
        self._has_begun = True
        # The checkpoint may have rounds that were complete but not graded.
        for batch in tuple(self._prefetcher.rounds):
            self._grade_round(batch)

    def _prepare_local_engine(self, schedule: Schedule) -> None:
        """Prepare the engine in this process for the first batch.

        The engine continues the count of steps of the checkpoint. If the schedule repeats a record,
        the engine asks for the recorded decisions before each of its steps.
        """
        # The only worker has loaded these weights, so the copy is not needed any more.
        self._workers.weights.clear()
        (stream,) = self._workers.streams.values()
        assert isinstance(stream, GenerationStream)
        engine = stream.engine
        engine.num_steps = self._snapshot.resumed.get("num_steps", 0)
        if isinstance(schedule, RecordedSchedule):
            engine.before_step = self._replay
            # Loads nothing, but wakes the idle engine, which then calls `before_step`.
            stream.load(lambda: None, schedule.published, keeps_cache=True)

    def _wait_for(self, is_fulfilled: Callable[[], bool]) -> None:
        """Wait until a condition holds; meanwhile replace lost engines in other processes.

        Args:
            is_fulfilled: whether the condition holds.

        Raises:
            Exception: an error of the rollout.
        """
        # Wake up regularly to look for lost and new engines in other processes.
        timeout_s = None if self._workers.pool is None else REFRESH_S
        while self._error is None and not is_fulfilled():
            self._refresh_streams()
            # `_refresh_streams` itself may have fulfilled the condition.
            if not is_fulfilled():
                self._changed.wait(timeout_s)
        if self._error is not None:
            raise self._error

    def _refresh_streams(self) -> None:
        """Add new engines in other processes to the workers, and remove lost ones."""
        pool = self._workers.pool
        if pool is None:
            return
        schedule = self._begun_schedule
        new, lost = pool.refresh_streams(self._end_group, pauses=self.rules.deterministic)
        for worker in self._workers.remove(lost):
            schedule.lost(worker)
            if worker in self._snapshot.reports:
                # The save does not wait for the lost worker, which has no unfinished responses to
                # report: its groups start anew, also in a run that resumes.
                self._snapshot.reports[worker] = ()
                self._take_snapshot(schedule.step, num_steps=0)
        if lost:
            self._act()
        for stream in new:
            self._join(stream)

    def _join(self, stream: Stream) -> None:
        """Load weights on a new stream, which then becomes a worker of the schedule.

        The stream gets the oldest version among the workers, because in a deterministic run every
        worker generates with each version in turn.
        """
        schedule = self._begun_schedule
        number = next(self._workers.numbers)
        self._workers.joining[number] = stream
        versions = [worker.version for worker in schedule.workers.values()]
        version = min(versions, default=schedule.published)
        weights = self._workers.weights[version]

        def join(loaded: Future[int]) -> None:
            """Make the stream a worker once it has the weights. Called in another thread."""
            with self._handling_event(), self._changed:
                loaded.result()  # raises the error of a load that has failed
                self._workers.join(number)
                schedule.joined(number, version)

        stream.load(lambda: weights, version, keeps_cache=False).add_done_callback(join)

    def _announce_version(self) -> None:
        """Tell the schedule about a published version, if it does not know it yet."""
        version = self._workers.unannounced
        if version is not None:
            self._workers.unannounced = None
            self._begun_schedule.has_published(version)
        self._changed.notify_all()

    def _describe_progress(self) -> str:
        """Progress of generation, for the notice about a long wait."""
        num_complete = len(self._prefetcher.complete)
        return f"{len(self._begun_schedule.groups)} groups are started, {num_complete} complete"

    # Called by other threads.

    @contextmanager
    def _handling_event(self) -> Iterator[None]:
        """Context manager for threads other than the trainer's: its body reports an event.

        On exit, the decisions that follow from the event are carried out. An error is not raised
        here, but stored for the trainer's thread.
        """
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
        """Store the responses of a group and report its end to the schedule.

        With dynamic sampling the group is graded together with its round. This method is the
        callback `done` of the streams.

        Args:
            number: number of the group.
            output: returns its responses, or raises the error of the engine.
        """
        with self._handling_event(), self._changed:
            rows = output()
            schedule = self._begun_schedule
            group = schedule.groups.get(number)
            if group is None:
                # The group was dropped before its end was reported.
                self._prefetcher.discard(rows)
                return
            self._prefetcher.finish(group, rows)
            # Streams report whole groups, so all samples of the group end at once.
            samples = torch.tensor(rollout_numbers(rows))
            versions = token_versions(rows)
            for sample, worker in tuple(group.running.items()):
                versions_of_sample = versions[samples == sample]
                # Version -1 marks tokens that the policy has not drawn.
                drawn_versions = versions_of_sample[versions_of_sample >= 0]
                oldest = int(drawn_versions.min()) if len(drawn_versions) else None
                schedule.ended(worker, number, sample, oldest)
                if not self._workers.streams[worker].num_open:
                    self._workers.idle_since[worker] = time.perf_counter()
            if self.rules.round_size:
                self._grade_round(group.batch)
            else:
                # Without dynamic sampling no grade decides whether a group is kept.
                schedule.graded(number)

    def _grade_round(self, batch: int) -> None:
        """Start to grade the round of a batch, if all of its groups are complete."""
        rows = self._prefetcher.find_round(batch)
        if rows is None:
            return
        if self.rules.deterministic:
            # The rollout waits for the graders, so that nothing depends on how long they take.
            self._grade(batch, rows)
        else:
            in_background(partial(self._grade, batch, rows), "grading of a round")

    def _grade(self, batch: int, rows: DataProto) -> None:
        """Grade the round of a batch, and tell the schedule which groups are kept.

        Decisions that follow from it are carried out before it returns.

        Args:
            batch: step for which the groups were generated.
            rows: responses of the round, group after group.
        """
        with self._handling_event():
            grade(self._reward, rows)
            with self._changed:
                for number, verdict in self._prefetcher.close_round(batch, rows).items():
                    self._begun_schedule.graded(number, verdict)

    def _replay(self, num_steps: int) -> None:
        """Carry out a record's decisions before the engine's next step, in the engine's thread."""
        with self._handling_event(), self._changed:
            schedule = self._begun_schedule
            assert isinstance(schedule, RecordedSchedule)
            # Only a run with a single engine, in this process, repeats the times of decisions.
            (worker,) = self._workers.streams
            self._carry_out(schedule.decisions_at(num_steps, worker))

    # Carrying out decisions, in any thread, with the lock.

    def _act(self) -> None:
        """Carry out all decisions that the schedule makes now."""
        if not self._has_begun:
            return
        decisions = []
        # A decision may make room for others, so ask until there are no more.
        new_decisions = self._begun_schedule.decide()
        while new_decisions:
            decisions += new_decisions
            new_decisions = self._begun_schedule.decide()
        self._carry_out(decisions)

    def _carry_out(self, decisions: Sequence[Decision]) -> None:
        """Carry out decisions. Groups are started last."""
        starts = []
        for decision in decisions:
            match decision:
                case Start():
                    starts.append(decision)
                case Load(worker, version):
                    self._load(worker, version)
                case Resume(worker):
                    self._workers.pauses[worker].is_over = True
                    self._changed.notify_all()
                case Save(worker, step):
                    self._save(worker, step)
                case HandOver():
                    self._prefetcher.hand_over = decision
                case Drop(group, _, running):
                    for worker in {worker for worker, _ in running}:
                        self._workers.streams[worker].abort(group)
                    self._prefetcher.drop(decision)
        # Starts come after the loads of the same decisions: otherwise it would be a matter of time
        # whether the engine starts a group with the old or the new weights.
        self._start(starts)

    def _start(self, starts: Sequence[Start]) -> None:
        """Take the prompts of some groups, and start the groups on their workers."""
        # The rows of each group, by worker. Prompts are taken in the order of the schedule.
        rows_by_worker = defaultdict(dict)
        for start in starts:
            rows_by_worker[start.worker][start.group] = self._prefetcher.inputs_of(start)
        record = self._schedule_record
        # One call for all groups of a worker, so that the engine begins them in the same step.
        for worker, rows in rows_by_worker.items():
            idle_since = self._workers.idle_since.pop(worker, None)
            if idle_since is not None:
                idle_s = time.perf_counter() - idle_since
                self._prefetcher.counts["rollout_wait_s"] += idle_s / len(self._workers.streams)
            # Groups of the checkpoint continue. Their starts are in the record of the earlier run.
            saved_responses = self._prefetcher.pop_saved_responses(rows)
            resumed_groups = {response[0] for response in saved_responses}
            starts_here = [start for start in starts if start.worker == worker]
            new_groups = []
            for start in starts_here:
                if start.group not in resumed_groups:
                    new_groups.append((start.group, start.batch, start.row))

            # Record the starts. A local engine calls back and says at which of its steps the groups
            # begin. Other engines do not, so their starts are recorded here with the version.
            if self._workers.pool is not None:
                record.add_start(new_groups, version=starts_here[0].version)
            self._workers.streams[worker].start(
                rows,
                lambda num_steps, groups=new_groups: record.add_start(groups, at=num_steps),
                saved_responses,
            )

    def _load(self, worker: int, version: int) -> None:
        """Load weights on a worker, which pauses until they are published."""
        schedule = self._begun_schedule
        pause = Pause()
        self._workers.pauses[worker] = pause

        def weights() -> DataProtoFuture | None:
            """Wait for the weights. Returns None if the worker continues without them.

            At the end of the run the weights may be missing, and the result is None as well.
            """
            with self._changed:
                self._changed.wait_for(
                    lambda: version <= schedule.published or pause.is_over or self._is_ended
                )
                return None if pause.is_over else self._workers.weights.get(version)

        keeps_cache = self._config.async_training.kv_on_update == "keep"
        loading = self._workers.streams[worker].load(weights, version, keeps_cache=keeps_cache)
        loading.add_done_callback(partial(self._end_load, worker, version))

    def _end_load(self, worker: int, version: int, loading: Future[int]) -> None:
        """Report to the schedule that a worker has loaded weights, and release older copies."""
        with self._handling_event(), self._changed:
            # The engine's number of steps before the load; 0 for engines in other processes. Raises
            # the error of a load that has failed.
            num_steps = loading.result()
            # The worker may be lost, or have continued without the weights (`Resume`).
            stream = self._workers.streams.get(worker)
            if stream is None or stream.weight_version != version:
                return
            schedule = self._begun_schedule
            # Only loads of a local engine are recorded, because engines in other processes have no
            # common count of steps.
            if self._workers.pool is None:
                self._schedule_record.add(at=num_steps, load=version)
            schedule.loaded(worker, version)
            self._workers.forget_weights(
                [worker_state.version for worker_state in schedule.workers.values()]
            )

    def _save(self, worker: int, step: int) -> None:
        """Save the unfinished responses of a worker; with the last worker's, take the snapshot."""
        schedule = self._begun_schedule
        stream = self._workers.streams[worker]
        if not self.rules.saves_running:
            # There are no unfinished responses, so the first worker's decision is enough.
            if self._snapshot.state is None:
                num_steps = 0
                if isinstance(stream, GenerationStream):
                    num_steps = stream.engine.num_steps
                self._take_snapshot(step, num_steps)
            return

        def report(num_steps: int, saved_responses: Sequence[SavedResponse]) -> None:
            """Store the unfinished responses of the worker, between two steps of its engine."""
            with self._changed:
                self._snapshot.reports[worker] = saved_responses
                self._take_snapshot(step, num_steps)
                if self.rules.pauses_to_save and not schedule.is_over:
                    # Keep the engine from its next step until the trainer takes its next batch.
                    self._changed.wait_for(lambda: schedule.hold_after is None or self._is_ended)

        def end_save(saving: Future[int]) -> None:
            """Pass an error of the save on to the trainer's thread."""
            with self._handling_event():
                saving.result()

        self._snapshot.reports[worker] = None
        stream.save(report).add_done_callback(end_save)

    def _take_snapshot(self, step: int, num_steps: int) -> None:
        """Take the snapshot if all workers have reported.

        A run that repeats a record writes no checkpoints, so it only records the event.

        Args:
            step: step of the checkpoint.
            num_steps: number of steps that the engine has made; 0 for engines in other processes.
        """
        saved_responses = self._snapshot.pop_reports()
        if saved_responses is None:
            return
        self._schedule_record.add(at=num_steps, save=step)
        if self._config.async_training.replay is None:
            self._snapshot.take(self._begun_schedule, self._prefetcher, saved_responses, num_steps)
            self._changed.notify_all()
