# SPDX-License-Identifier: Apache-2.0
"""Streams of responses from engines in processes of their own, as the driver calls them.

    trainer's thread, or one below   start ─ load ─ abort ──>  calls in their order, which wait for nothing
    a thread for each engine         stream_events  <───────   groups that have ended, weights that were taken
                                     └ done(group), a load's future: the schedule decides there what follows

Consumes: what happens in the engines. Waits for: the next of it, a second at most at a time. Unblocked by: an event,
the end of the process, or `stop`. The trainer's thread sees which engines are lost and come back (`StreamPool.tend`).
"""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from copy import copy
from threading import Lock, Thread
from typing import Any

from quadriga.background import in_background
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.single_controller import WorkerGroup
from quadriga.trainer.rollout_pool import RolloutPool
from quadriga.workers.stream import UnderWay

Done = Callable[[int, Callable[[], DataProto]], None]


class RemoteStream:
    """`GenerationStream` of an engine in another process.

    Args:
        ranks: of the engine; where they are a rollout group, the first one is called, and all get weights.
        pauses: whether the engine pauses for weights that are not there yet, and after each event until what is called
            here has returned; else it goes on.
        done: as of `GenerationStream`, in a thread of this one's own.

    Attributes:
        error: what ended the stream.
        has_ended: whether a group has.
    """

    def __init__(
        self, group: WorkerGroup[Any], ranks: Sequence[int], done: Done, *, pauses: bool
    ) -> None:
        self.rank, self.num_ranks, self.weight_version, self.is_over = (
            ranks[0],
            len(ranks),
            -1,
            False,
        )
        self.error: BaseException | None = None
        self.has_ended = False
        self._group, self._done, self._pauses = copy(group).use_ranks(ranks), done, pauses
        self._lock = Lock()  # of the order of calls
        self._unseen: list[Any] = []  # calls whose errors nobody has looked for
        self._open: set[int] = set()
        self._loads: dict[int, Future[int]] = {}
        self._saves: list[tuple[Callable[[int, list[UnderWay]], None], Future[int]]] = []
        self.thread = Thread(target=self._listen, name=f"stream {self.rank}", daemon=True)
        self.thread.start()

    @property
    def num_open(self) -> int:
        """Groups that have not ended."""
        return len(self._open)

    def start(
        self,
        groups: Mapping[int, DataProto],
        joined: Callable[[int], None] | None = None,
        under_way: Sequence[UnderWay] = (),
    ) -> None:
        """As of `GenerationStream`; `joined` is not called."""
        self._open |= groups.keys()
        self._call("start", dict(groups), None, under_way)

    def load(
        self, weights: Callable[[], DataProtoFuture | None], version: int, *, keeps_cache: bool
    ) -> Future[int]:
        """As of `GenerationStream`; `weights` is called in a thread here."""
        self._loads[version] = done = Future()
        if self._pauses:
            self._call("await_weights", version, keeps_cache=keeps_cache)
            in_background(
                lambda: self._call("give_weights", version, weights()), f"weights {version}"
            )
        else:
            self._call("give_weights", version, weights())
            self._call("await_weights", version, keeps_cache=keeps_cache)
        return done

    def save(self, saved: Callable[[int, list[UnderWay]], None]) -> Future[int]:
        """As of `GenerationStream`, in a thread of this one's own, without the number of steps; the engine waits for it
        if it `pauses`."""
        self._saves.append((saved, done := Future()))
        self._call("hand_out")
        return done

    def abort(self, group: int) -> None:
        """A group is not wanted any more; `done` is not called."""
        self._open.discard(group)
        self._call("abort", group)

    def _call(self, method: str, *args: Any, **kwargs: Any) -> None:
        num_ranks = self.num_ranks if method == "give_weights" else 1
        with self._lock:
            self._unseen += self._group.start_all(
                "call_stream", [((method, *args), kwargs)] * num_ranks
            )

    def _listen(self) -> None:
        try:
            while not self.is_over:
                asked = self._group.start_all("stream_events", [((), {})] * self.num_ranks)
                with self._lock:
                    calls, self._unseen = self._unseen, []
                for event in self._group.resolve([*calls, *asked])[len(calls)]:
                    self._take(*event)
        except BaseException as error:
            self.error = error

    def _take(self, kind: str, number: int, value: Any) -> None:
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
    """Engines that generate beside training, each a stream. They come and go as those of a `RolloutPool`, whose batches
    are validation's: its engines get weights when there is something to validate."""

    is_lazy = True

    def __init__(
        self, actor: WorkerGroup[Any], rollout: WorkerGroup[Any], group_size: int = 1
    ) -> None:
        super().__init__(actor, rollout, group_size)
        self._streams: dict[int, RemoteStream] = {}

    def tend(self, done: Done, *, pauses: bool) -> tuple[list[RemoteStream], list[RemoteStream]]:
        """Streams that are new since the last call, and those that were lost; by the trainer's thread. Raises the error
        of a stream that says nothing of a loss, or of the last one."""
        lost = [stream for stream in self._streams.values() if stream.error is not None]
        for stream in self._streams.values():
            if stream.has_ended:
                self._restarts.lasts(stream.rank)
        for stream in lost:
            assert stream.error is not None
            del self._streams[stream.rank]
            self._lose(stream.rank, stream.error)
        self._take_back()
        new = [
            RemoteStream(self._rollout, range(rank, rank + self._group_size), done, pauses=pauses)
            for rank in self._rollout.ranks[:: self._group_size]
            if rank not in self._streams
        ]
        self._streams |= {stream.rank: stream for stream in new}
        return new, lost

    def stop(self) -> None:
        """Listen no more."""
        for stream in self._streams.values():
            stream.is_over = True
        for stream in self._streams.values():
            stream.thread.join()
