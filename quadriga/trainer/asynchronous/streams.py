# SPDX-License-Identifier: Apache-2.0
"""Streams that generate for a schedule: the engines of other processes, and the schedule's workers.

    trainer's thread, or one below   start ─ load ─ abort ──>  calls in order, which wait for nothing
    a thread for each engine         stream_events  <───────   ended groups, loaded weights
                                     └ done(group), futures of loads and saves

A listening thread consumes the events of an engine. It waits for the next ones, a second at most
at a time, and is unblocked by an event, the end of the process, or `StreamPool.stop`. The trainer's
thread finds lost and restarted engines (`StreamPool.tend`).
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
from quadriga.workers.stream import GenerationStream, UnderWay

Done = Callable[[int, Callable[[], DataProto]], None]


class RemoteStream:
    """`GenerationStream` of an engine in another process.

    Args:
        group: worker group of all rollout engines.
        ranks: ranks of the engine. In a rollout group the first one is called, and all get weights.
        done: see `GenerationStream`; called in the listening thread.
        pauses: whether the engine pauses for weights that are not there yet, and after each event
            until the callbacks here have returned. Otherwise it continues.

    Attributes:
        rank: the rank that is called.
        num_ranks: number of ranks of the engine.
        weight_version: version of the weights that were loaded last; -1: none were.
        is_over: tells the listening thread to end.
        error: error that ended the stream.
        has_ended: whether a group has ended.
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
        self.has_ended = False
        self._group = copy(group).use_ranks(ranks)
        self._done = done
        self._pauses = pauses
        # Keeps calls in order, and no two threads from taking the same unseen calls.
        self._lock = Lock()
        self._unseen: list[Any] = []  # calls whose errors nobody has looked for
        self._open: set[int] = set()  # unfinished groups
        self._loads: dict[int, Future[int]] = {}  # by version
        self._saves: list[tuple[Callable[[int, list[UnderWay]], None], Future[int]]] = []
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
        under_way: Sequence[UnderWay] = (),
    ) -> None:
        """Start to generate groups; see `GenerationStream.start`. `joined` is not called."""
        self._open |= groups.keys()
        self._call("start", dict(groups), None, under_way)

    def load(
        self, weights: Callable[[], DataProtoFuture | None], version: int, *, keeps_cache: bool
    ) -> Future[int]:
        """Load weights; see `GenerationStream.load`.

        `weights` is called here: in a background thread if the engine pauses for it.
        """
        done: Future[int] = Future()
        self._loads[version] = done
        if self._pauses:
            # The engine waits from its next step on, and `weights` may wait in its thread.
            self._call("await_weights", version, keeps_cache=keeps_cache)
            in_background(
                lambda: self._call("give_weights", version, weights()), f"weights {version}"
            )
        else:
            # The engine continues until the weights have arrived.
            self._call("give_weights", version, weights())
            self._call("await_weights", version, keeps_cache=keeps_cache)
        return done

    def save(self, saved: Callable[[int, list[UnderWay]], None]) -> Future[int]:
        """Save unfinished groups; see `GenerationStream.save`.

        `saved` is called in the listening thread, with 0 for the number of steps. The engine waits
        for it if it pauses.
        """
        done: Future[int] = Future()
        self._saves.append((saved, done))
        self._call("hand_out")
        return done

    def abort(self, group: int) -> None:
        """Abort a group; `done` is not called."""
        self._open.discard(group)
        self._call("abort", group)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
        num_ranks = self.num_ranks if method == "give_weights" else 1
        calls = [((method, *args), kwargs)] * num_ranks
        with self._lock:
            self._unseen += self._group.start_all("call_stream", calls)

    def _listen(self) -> None:
        try:
            while not self.is_over:
                events = self._group.start_all("stream_events", [((), {})] * self.num_ranks)
                with self._lock:
                    calls = self._unseen
                    self._unseen = []
                # Errors of calls are raised here too, before the events that they may explain.
                # The first rank's events follow the results of the calls.
                results = self._group.resolve([*calls, *events])
                for event in results[len(calls)]:
                    self._take(*event)
        except BaseException as error:
            self.error = error

    def _take(self, kind: str, number: int, value: Any) -> None:
        """Handle an event: see `ServedStream.events`."""
        if kind == "loaded":
            self.weight_version = value
            self._loads.pop(number).set_result(0)
        elif kind == "under way":
            saved, done = self._saves.pop(0)
            saved(0, value)
            done.set_result(0)
        elif number in self._open:
            self._open.discard(number)
            self.has_ended = True
            self._done(number, lambda: value)
        if self._pauses:
            self._call("go_on")


class StreamPool(RolloutPool):
    """Engines that generate during training, each a stream. They come and go as in `RolloutPool`.

    Its batches are those of validation, so its engines get weights when there is something to
    validate.
    """

    is_lazy = True

    def __init__(
        self, actor: WorkerGroup[Any], rollout: WorkerGroup[Any], group_size: int = 1
    ) -> None:
        super().__init__(actor, rollout, group_size)
        self._streams: dict[int, RemoteStream] = {}  # by rank

    def tend(self, done: Done, *, pauses: bool) -> tuple[list[RemoteStream], list[RemoteStream]]:
        """Open streams to new engines, and request restarts of lost ones. For one thread only.

        Args:
            done: see `RemoteStream`.
            pauses: see `RemoteStream`.

        Returns:
            Streams that are new since the last call, and streams that were lost.

        Raises:
            Exception: the error of a stream that is not about a loss, or of the last stream.
        """
        lost = [stream for stream in self._streams.values() if stream.error is not None]
        # An engine that has generated something is restarted without a pause when it is lost.
        for stream in self._streams.values():
            if stream.has_ended:
                self._restarts.lasts(stream.rank)
        # Raises if the run cannot go on without this engine.
        for stream in lost:
            assert stream.error is not None
            del self._streams[stream.rank]
            self._lose(stream.rank, stream.error)
        self._take_back()
        new = []
        for rank in self._rollout.ranks[:: self._group_size]:
            if rank not in self._streams:
                ranks = range(rank, rank + self._group_size)
                new.append(RemoteStream(self._rollout, ranks, done, pauses=pauses))
        self._streams |= {stream.rank: stream for stream in new}
        return new, lost

    def stop(self) -> None:
        """End the listening threads."""
        # All are told before the first is waited for: each may take a second.
        for stream in self._streams.values():
            stream.is_over = True
        for stream in self._streams.values():
            stream.thread.join()


Stream = GenerationStream | RemoteStream


class Pause:
    """Wait of a worker for weights. It ends without them if `is_over`."""

    is_over = False


class StreamWorkers:
    """The schedule's workers: a stream each, and the weights that they load.

    It has neither threads nor a lock: `AsyncBatches` calls it with its lock.

    Attributes:
        actor: worker group whose weights are loaded.
        pool: engines in other processes. None: the only stream is an engine of this process.
        streams: streams by number of the worker.
        joining: streams that have no weights yet, by the number that they will have.
        numbers: numbers of workers; none is used twice.
        weights: copies of the actor's weights by version.
        unannounced: the newest of these versions, if the schedule does not know it yet.
        pauses: wait of the last load of each worker.
        idle_since: time since which a worker has had nothing to do (`time.perf_counter`).
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
        """Remove lost streams. Returns the numbers of those that were workers."""
        for number, stream in tuple(self.joining.items()):
            if stream in lost:
                del self.joining[number]
        numbers = []
        for number, stream in tuple(self.streams.items()):
            if stream in lost:
                numbers.append(number)
                del self.streams[number]
                self.idle_since.pop(number, None)
        return numbers

    def end_idleness(self, number: int) -> float | None:
        """End the idle time of a worker, and return its share of the rollout's time, in seconds.

        None: the worker was not idle.
        """
        idle_since = self.idle_since.pop(number, None)
        if idle_since is None:
            return None
        return (time.perf_counter() - idle_since) / len(self.streams)

    def forget_weights(self, used_versions: Iterable[int]) -> None:
        """Release the weights that nobody loads again.

        Args:
            used_versions: versions that workers generate with. Another engine may join with the
                oldest of them; the engine of this process has loaded it already.
        """
        oldest = min(used_versions)
        if self.pool is None:
            oldest += 1
        for version in tuple(self.weights):
            if version < oldest:
                del self.weights[version]
