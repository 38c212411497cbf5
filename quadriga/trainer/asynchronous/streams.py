# SPDX-License-Identifier: Apache-2.0
"""Streams of responses from engines in other processes, and the workers of a schedule.

    trainer's thread, or one below   start ─ load ─ abort ──>  calls in order, which wait for nothing
    a thread for each engine         stream_events  <───────   ended groups, loaded weights
                                     └ done(group), futures of loads and saves

A listening thread consumes the events of an engine. It waits for the next ones, for a second at
most at a time, and is unblocked by an event, the end of the process, or `StreamPool.stop`. The
trainer's thread finds lost and restarted engines (`StreamPool.refresh_streams`).
"""

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from itertools import count
from threading import Lock, Thread
from typing import Any

from quadriga.background import in_background
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.single_controller import WorkerGroup
from quadriga.trainer.rollout_pool import RolloutPool
from quadriga.workers import ActorRolloutRefWorker
from quadriga.workers.stream import GenerationStream, SavedResponse

Done = Callable[[int, Callable[[], DataProto]], None]
"""Callback for the end of a group: its number, and a function that returns its responses."""


class RemoteStream:
    """`GenerationStream` of an engine in another process.

    Args:
        group: worker group of all rollout engines.
        ranks: ranks of the engine. In a rollout group only the first one is called, but all get
            weights.
        done: see `GenerationStream`; called in the listening thread.
        pauses: whether the engine pauses for weights that have not arrived, and after each event
            until the callbacks here have returned. Otherwise it continues.

    Attributes:
        rank: the rank that is called.
        num_ranks: number of ranks of the engine.
        weight_version: version of the last weights that were loaded; -1 if none were.
        is_over: set to end the listening thread.
        error: error that ended the stream; None if it has not ended.
        has_completed_group: whether any group has ended.
        thread: the listening thread.
    """

    def __init__(
        self, group: WorkerGroup[Any], ranks: Sequence[int], done: Done, *, pauses: bool
    ) -> None:
        self.rank = ranks[0]
        self.num_ranks = len(ranks)
        self.weight_version = -1
        self.is_over = False
        self.error: BaseException | None = None
        self.has_completed_group = False
        self._group = copy(group).use_ranks(ranks)
        self._done = done
        self._pauses = pauses
        # Keeps calls in order, and protects `_unchecked_calls`.
        self._lock = Lock()
        # Handles of calls whose results have not been checked.
        self._unchecked_calls: list[Any] = []
        self._open: set[int] = set()  # unfinished groups
        self._loads: dict[int, Future[int]] = {}  # unfinished loads by version
        # Unfinished saves: callback and future.
        self._saves: list[tuple[Callable[[int, list[SavedResponse]], None], Future[int]]] = []
        self.thread = Thread(target=self._listen, name=f"stream {self.rank}", daemon=True)
        self.thread.start()

    @property
    def num_open(self) -> int:
        """Number of unfinished groups."""
        return len(self._open)

    def start(
        self,
        groups: Mapping[int, DataProto],
        joined: Callable[[int], None] | None = None,
        saved: Sequence[SavedResponse] = (),
    ) -> None:
        """Start to generate groups; see `GenerationStream.start`.

        `joined` is not called, because engines in other processes do not report their steps.
        """
        self._open |= groups.keys()
        self._call("start", dict(groups), None, saved)

    def load(
        self, weights: Callable[[], DataProtoFuture | None], version: int, *, keeps_cache: bool
    ) -> Future[int]:
        """Load weights; see `GenerationStream.load`.

        `weights` is called in this process; if the engine pauses, in a background thread.
        """
        future: Future[int] = Future()
        self._loads[version] = future
        if self._pauses:
            # The engine pauses before its next step; `weights` may wait for the publication.
            self._call("await_weights", version, keeps_cache=keeps_cache)
            in_background(
                lambda: self._call("give_weights", version, weights()), f"weights {version}"
            )
        else:
            # The engine continues until the weights have arrived.
            self._call("give_weights", version, weights())
            self._call("await_weights", version, keeps_cache=keeps_cache)
        return future

    def save(self, report: Callable[[int, list[SavedResponse]], None]) -> Future[int]:
        """Save unfinished groups; see `GenerationStream.save`.

        `report` is called in the listening thread, with 0 as the number of steps. An engine that
        pauses waits until it has returned.
        """
        future: Future[int] = Future()
        self._saves.append((report, future))
        self._call("hand_out")
        return future

    def abort(self, group: int) -> None:
        """Abort a group; `done` is not called."""
        self._open.discard(group)
        self._call("abort", group)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
        """Start a call of a method of the engine's stream, without waiting for it."""
        # All ranks of the engine need the weights; the first rank handles all other calls.
        num_ranks = self.num_ranks if method == "give_weights" else 1
        calls = [((method, *args), kwargs)] * num_ranks
        with self._lock:
            self._unchecked_calls += self._group.start_all("call_stream", calls)

    def _listen(self) -> None:
        """Handle the events of the engine until the stream is over or an error ends it."""
        try:
            while not self.is_over:
                events = self._group.start_all("stream_events", [((), {})] * self.num_ranks)
                with self._lock:
                    calls = self._unchecked_calls
                    self._unchecked_calls = []
                # Calls come first, because their errors may be the cause of later ones. Each call has
                # one result, then each rank has one list of events.
                results = self._group.resolve([*calls, *events])
                events_of_first_rank = results[len(calls)]
                for event in events_of_first_rank:
                    self._handle_event(*event)
        except BaseException as error:
            # `StreamPool.refresh_streams` finds it.
            self.error = error

    def _handle_event(self, kind: str, number: int, value: Any) -> None:
        """Handle an event of `ServedStream.events`.

        The parts of an event are: "loaded", the version that `load` was called with, and the version
        of the weights since then; or "saved", 0, and the saved responses; or "ended", the number of
        a group, and its rows.
        """
        # Results are 0, because engines in other processes do not report their numbers of steps.
        if kind == "loaded":
            self.weight_version = value
            self._loads.pop(number).set_result(0)
        elif kind == "saved":
            # Saves end in the order in which they were requested.
            report, future = self._saves.pop(0)
            report(0, value)
            future.set_result(0)
        elif number in self._open:
            self._open.discard(number)
            self.has_completed_group = True
            self._done(number, lambda: value)
        # The engine has paused for this event. The callbacks have returned, so it continues.
        if self._pauses:
            self._call("go_on")


class StreamPool(RolloutPool):
    """`RolloutPool` whose engines also generate during training, through streams.

    The methods of `RolloutPool` are used only for validation, so `publish` does not send the
    weights before there is something to validate.
    """

    is_lazy = True

    def __init__(
        self, actor: WorkerGroup[Any], rollout: WorkerGroup[Any], group_size: int = 1
    ) -> None:
        super().__init__(actor, rollout, group_size)
        self._streams: dict[int, RemoteStream] = {}  # by rank

    def refresh_streams(
        self, done: Done, *, pauses: bool
    ) -> tuple[list[RemoteStream], list[RemoteStream]]:
        """Open streams to new engines, and request restarts of lost ones.

        Always call it from the same thread.

        Args:
            done: see `RemoteStream`.
            pauses: see `RemoteStream`.

        Returns:
            Streams that are new since the last call, and streams that were lost.

        Raises:
            Exception: the error of a stream, unless it means that the engine's process is gone and
                the run can go on without it.
        """
        lost = [stream for stream in self._streams.values() if stream.error is not None]
        # An engine that has completed a group works: if it is lost, it is restarted without a pause.
        for stream in self._streams.values():
            if stream.has_completed_group:
                self._restarts.reset_pause(stream.rank)
        for stream in lost:
            assert stream.error is not None
            del self._streams[stream.rank]
            self._drop_engine(stream.rank, stream.error)  # raises it if the run cannot go on
        self._add_restarted_engines()
        new = []
        # The first rank of each group leads it.
        for rank in self._rollout.ranks[:: self._group_size]:
            if rank not in self._streams:
                ranks = range(rank, rank + self._group_size)
                new.append(RemoteStream(self._rollout, ranks, done, pauses=pauses))
        self._streams |= {stream.rank: stream for stream in new}
        return new, lost

    def stop(self) -> None:
        """End the listening threads."""
        # Each thread may take a second to end, so all are told before any is awaited.
        for stream in self._streams.values():
            stream.is_over = True
        for stream in self._streams.values():
            stream.thread.join()


Stream = GenerationStream | RemoteStream


class Pause:
    """A worker's wait for weights. Setting `is_over` ends it without them."""

    is_over = False


class StreamWorkers:
    """The streams of the schedule's workers, and the weights that they load.

    It has neither threads nor a lock: `AsyncBatches` holds its lock when it uses this class.

    Attributes:
        actor: worker group whose weights are loaded.
        pool: engines in other processes. None: the only stream is an engine in this process.
        streams: streams by number of the worker.
        joining: streams that have no weights yet, by the number that they will have as a worker.
        numbers: iterator of unused numbers for workers.
        weights: copies of the actor's weights by version.
        unannounced: the newest of these versions, if the schedule does not know it yet.
        pauses: wait for the weights of each worker's last load.
        idle_since: for each idle worker, the time since which it has been idle
            (`time.perf_counter`).
    """

    def __init__(self, actor: ActorRolloutRefWorker, pool: StreamPool | None) -> None:
        self.actor = actor
        self.pool = pool
        self.streams: dict[int, Stream] = {}
        self.joining: dict[int, Stream] = {}
        self.numbers = count()
        self.weights: dict[int, DataProtoFuture] = {}
        self.unannounced: int | None = None
        self.pauses: dict[int, Pause] = {}
        self.idle_since: dict[int, float] = {}

    def join(self, number: int) -> None:
        """Make a joining stream a worker."""
        self.streams[number] = self.joining.pop(number)
        self.idle_since[number] = time.perf_counter()

    def remove(self, lost: Collection[RemoteStream]) -> list[int]:
        """Remove lost streams. Returns the numbers of the workers among them."""
        # Streams that have not become workers are not known to the schedule.
        for number in [number for number, stream in self.joining.items() if stream in lost]:
            del self.joining[number]
        numbers = [number for number, stream in self.streams.items() if stream in lost]
        for number in numbers:
            del self.streams[number]
            self.idle_since.pop(number, None)
        return numbers

    def forget_weights(self, used_versions: Iterable[int]) -> None:
        """Release copies of weights that no engine will load any more.

        Args:
            used_versions: versions with which workers generate.
        """
        # Engines in other processes may still join with the oldest version in use. The engine in
        # this process has loaded its version already.
        oldest = min(used_versions)
        if self.pool is None:
            oldest += 1
        for version in [version for version in self.weights if version < oldest]:
            del self.weights[version]
