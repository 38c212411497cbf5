# SPDX-License-Identifier: Apache-2.0
"""Generation that goes on while the process that it is in trains: groups of responses, by an engine with weights of its
own.

    driver           start(groups)          load(weights)                         abort(group)
    engine's thread  └ step ─ step ─ step ──┴ newer weights ─ step ─ step ─ ...
                              └ done(group)                         └ done(group)

Consumes: groups of prompts. Waits for: weights that are loaded, while they are not there. Unblocked by: their
publication, or None in their place. With `rollout.mode=async` conversations run in an event loop in a further thread.

The driver may be another process (`ServedStream`):

    driver, its calls in their order   start  await_weights  give_weights  abort  hand_out  go_on
    driver, at the same time           events() <── groups that have ended, weights that were taken, what is under way,
                                                    or an error
"""

import queue
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from threading import Condition
from typing import Any, NamedTuple

import numpy as np
import torch

from quadriga.background import EventLoopThread, in_background
from quadriga.errors import RolloutError, WeightSyncError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.rollout.interface import Completion
from quadriga.rollout.native.engine import NativeEngine
from quadriga.rollout.sequences import completed, images_of, requests_of
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights, Piece, tensor_fingerprint
from quadriga.weight_sync.publish import name_some
from quadriga.workers.generation import Generation

Done = Callable[[int, Callable[[], DataProto]], None]
EVENTS_WITHIN_S, TOGETHER_WITHIN_S = 1.0, 0.1


class WeightCopy(NamedTuple):
    """Weights as they were published, and the fingerprint of each."""

    weights: Mapping[str, torch.Tensor]
    fingerprints: Mapping[str, str]


UnderWay = tuple[Any, ...]
"""A group that has not ended, the number of a row, and the fields of its response so far; lists as tensors."""


class GenerationStream:
    """Groups of responses that are begun, aborted, and go on with newer weights, from any thread.

    Args:
        generation: with an engine whose weights are a copy.
        done: called with the number of a group that has ended, and what gives its rows or raises, in a thread of the
            engine's or of the conversations.
    """

    def __init__(self, generation: Generation, done: Done) -> None:
        assert isinstance(generation.engine, NativeEngine | VLLMEngine), (
            "the configuration is checked before"
        )
        self.generation, self.engine = generation, generation.engine
        self.done = done
        self._weights, self.group = CopiedWeights(), generation.group
        if self.group is not None:
            assert isinstance(self.engine, NativeEngine), "the configuration is checked before"
            self._wanted, place = self.engine.wanted_shards(), self.group.device
            own = {
                name: torch.empty(box.shape, dtype=kind, device=place)
                for name, (box, kind) in self._wanted.items()
            }
            self.engine.hold_shards(own)
        self._open: dict[int, list[Future[Any]]] = {}
        self._loop = EventLoopThread("conversations") if generation.loops is not None else None

    def start(
        self,
        groups: Mapping[int, DataProto],
        joined: Callable[[int], None] | None = None,
        under_way: Sequence[UnderWay] = (),
    ) -> None:
        """Begin groups of rows, as `generate_sequences` takes them. Without conversations the first tokens of all are
        drawn in one step, before which `joined` is called with the number of the engine's steps so far; groups of which
        `save` gave something as `under_way` go on from there, in its order."""
        config, seed = self.generation.config, self.generation.config.trainer.seed
        if self._loop is not None:
            self._converse(groups)
            return
        length = config.data.max_response_length
        requests: dict[tuple[int, int], Any] = {}
        for group, rows in groups.items():
            own = zip(
                *requests_of(rows, config.actor_rollout_ref.rollout, length, seed),
                images_of(rows),
                strict=True,
            )
            requests |= {(group, row): request for row, request in enumerate(own)}
        earlier = {(group, row): _response(own) for group, row, *own in under_way}
        begun = [key for key, response in earlier.items() if response.finish_reason == "abort"]
        if begun and isinstance(self.engine, VLLMEngine):
            got, fix = (
                f"{len(begun)} responses that another engine has begun",
                "Resume with rollout.name=native.",
            )
            raise RolloutError(
                "rollout.name=vllm", got=got, expected="a checkpoint without", fix=fix
            )
        order = [*begun, *(key for key in requests if key not in earlier)]
        prompts, sampling, images = map(list, zip(*(requests[key] for key in order), strict=True))
        futures = self.engine.begin(
            prompts, sampling, images, joined, [earlier[key] for key in begun]
        )
        by_row, started = dict(zip(order, futures, strict=True)), time.perf_counter()
        for key in earlier.keys() - by_row.keys():
            by_row[key] = Future()
            by_row[key].set_result(earlier[key])
        for group, rows in groups.items():
            self._open[group] = [by_row[group, row] for row in range(len(rows))]
        for group, rows in groups.items():
            for future in tuple(self._open[group]):
                future.add_done_callback(partial(self._end_request, group, rows, started))

    @property
    def weight_version(self) -> int:
        """Of the weights that the next token is drawn with."""
        return self.engine.weight_version

    def load(
        self, weights: Callable[[], DataProtoFuture | None], version: int, *, keeps_cache: bool
    ) -> Future[int]:
        """Take weights of a version between two steps. `weights` is called there and may wait: its future has a
        `WeightCopy` first. None: keep the older."""

        def work() -> None:
            if (found := weights()) is not None:
                self._publish(found.get()[0], version)

        return self.engine.between_steps(work, keeps_cache=keeps_cache)

    def _publish(self, copied: WeightCopy, version: int) -> None:
        """Give the engine weights; of a rank of a group its shards, which it cuts from the whole ones."""
        marks = copied.fingerprints
        if self.group is None:
            self._weights.publish(copied.weights.items(), self.engine, version, marks)
            return
        if changed := [
            name for name, one in copied.weights.items() if tensor_fingerprint(one) != marks[name]
        ]:
            got = f"{len(changed)} of {len(marks)} weights that differ: {name_some(changed)}"
            raise WeightSyncError(
                f"weights of version {version}", got=got, expected="what the trainer sent"
            )
        wholes = {
            name: Piece((0,) * one.dim(), tuple(one.shape)) for name, one in copied.weights.items()
        }
        shards = (
            (name, wholes[name].view(one, self._wanted[name][0]))
            for name, one in copied.weights.items()
        )
        self._weights.publish(
            ((name, one.contiguous()) for name, one in shards), self.engine, version
        )

    def save(self, saved: Callable[[int, list[UnderWay]], None]) -> Future[int]:
        """Between two steps call `saved` with their number so far and what is under way: of groups that have not ended
        the responses that have, then the others in the order in which they go on, with a KV cache that is computed
        anew. It may wait."""

        engine = self.engine
        assert isinstance(engine, NativeEngine), "what others have under way is waited for"

        def work() -> None:
            groups = tuple(self._open.items())  # what another thread begins meanwhile begins anew
            places = {
                future: (group, row) for group, own in groups for row, future in enumerate(own)
            }
            found = {
                future: future.result() for future in places if future.done()
            } | engine.unfinished()
            saved(
                engine.num_steps,
                [(*places[one], *_plain(found[one])) for one in found if one in places],
            )

        return engine.between_steps(work, keeps_cache=False, recomputes=True)

    def abort(self, group: int) -> None:
        """A group is not wanted any more: it ends at the next step, and `done` is not called."""
        for future in self._open.pop(group, ()):
            future.cancel()

    @property
    def num_open(self) -> int:
        """Groups that have not ended."""
        return len(self._open)

    def close(self) -> None:
        """Abort everything, and end the engine."""
        for group in tuple(self._open):
            self.abort(group)
        if self._loop is not None:
            self._loop.close()
        self.generation.close()

    def _converse(self, groups: Mapping[int, DataProto]) -> None:
        """Begin groups as conversations."""
        loops, grader, seed = (
            self.generation.loops,
            self.generation.grader,
            self.generation.config.trainer.seed,
        )
        assert self._loop is not None and loops is not None
        for group, rows in groups.items():
            grade = None if grader is None else grader.grade_one
            future = self._loop.submit(loops.lead(self.engine, rows, seed=seed, grade=grade))
            self._open[group] = [future]
            future.add_done_callback(partial(self._end_request, group, rows, 0.0))

    def _end_request(self, group: int, rows: DataProto, started: float, _: Future[Any]) -> None:
        """A response has ended; its group perhaps with it."""
        futures = self._open.get(group, ())
        if (
            not futures
            or not all(future.done() for future in futures)
            or self._open.pop(group, None) is None
        ):
            return
        is_whole = self._loop is not None  # all rows are one future
        self.done(
            group, futures[0].result if is_whole else partial(self._joined, rows, futures, started)
        )

    def _joined(
        self, rows: DataProto, futures: Sequence[Future[Completion]], started: float
    ) -> DataProto:
        completions, length = (
            [one.result() for one in futures],
            self.generation.config.data.max_response_length,
        )
        pad = self.generation.tokenizer.pad_token_id
        return completed(rows, completions, self.engine.weight_version, length, pad, started)


class ServedStream(GenerationStream):
    """A stream whose driver is another process, which asks for what has happened.

    Args:
        waits: whether the engine makes no step after an event until the driver has said `go_on`, so that what the
            driver decides of it holds from that step on.
    """

    def __init__(self, generation: Generation, *, waits: bool) -> None:
        super().__init__(generation, partial(self._tell, "ended"))
        self._changed = Condition()
        self._happened: queue.Queue[tuple[str, int, Callable[[], Any]]] = queue.Queue()
        self._given: dict[int, DataProtoFuture | None] = {}  # weights by version
        self._num_told = self._num_seen = 0  # events, and of how many the driver knows
        self._is_closed = False
        settings = generation.config.async_training
        # Whether anything may follow from the end of one group of a batch.
        self._tells_at_once = (
            waits or settings.by_mini_batch or settings.on_stale == "drop" or bool(settings.replay)
        )
        self._batches: dict[int, int] = {}  # of groups that the driver does not know to have ended
        if waits:
            assert isinstance(self.engine, NativeEngine), "the configuration is checked before"
            self.engine.before_step = lambda _: self._wait_for_driver()
        self._following: Future[None] | None = (
            None  # of another rank of a group: what the first one says
        )
        if self.group is not None and not self.group.is_leader:
            self.engine.take_weights = lambda version: self._publish(
                self._taken(version).get()[0], version
            )
            self._following = in_background(self.engine.follow, "rank of a rollout group")
            self._following.add_done_callback(
                lambda done: self._happened.put(("over", 0, done.result))
            )

    def start(self, groups: Mapping[int, DataProto], *args: Any) -> None:
        self._batches |= {group: rows.meta_info["global_steps"] for group, rows in groups.items()}
        super().start(groups, *args)

    def abort(self, group: int) -> None:
        super().abort(group)
        self._batches.pop(group, None)

    def await_weights(self, version: int, *, keeps_cache: bool) -> None:
        """At the next step take weights of a version, which `give_weights` brings, before it or after."""

        def told(done: Future[int]) -> None:
            now = self.weight_version
            self._tell("loaded", version, lambda: (done.result(), now)[1])

        self.load(
            partial(self._taken, version), version, keeps_cache=keeps_cache
        ).add_done_callback(told)

    def give_weights(self, version: int, weights: DataProtoFuture | None) -> None:
        """Weights of a version, as `load` takes them. They come into this process here, while the engine goes on."""
        found = None if weights is None else DataProtoFuture(list, weights.get(), resolve=list)
        with self._changed:
            if (
                found is not None or self._following is None
            ):  # where the first rank takes none, the others are not told
                self._given[version] = found
            self._changed.notify_all()

    def hand_out(self) -> None:
        """At the next step tell what is under way, as `save` does."""

        def failed(done: Future[int]) -> None:
            if done.exception() is not None:
                self._happened.put(("under way", 0, done.result))

        self.save(lambda _, found: self._tell("under way", 0, lambda: found)).add_done_callback(
            failed
        )

    def go_on(self) -> None:
        """The driver knows of one more event, and has said what follows from it."""
        with self._changed:
            self._num_seen += 1
            self._changed.notify_all()

    def events(self) -> list[tuple[str, int, Any]]:
        """What has happened since the last call, within a second: ("ended", group, its rows), ("loaded", version,
        version of the weights since) and ("under way", 0, what `save` gives). A group whose batch is still generated
        here may wait for others. Raises what failed."""
        found, until = [], time.monotonic() + EVENTS_WITHIN_S
        with suppress(queue.Empty):
            while True:
                # Those of a group's other ranks are errors, which are asked for with the first one's.
                found.append(
                    self._happened.get(self._following is None, max(0.0, until - time.monotonic()))
                )
                batch = self._batches.pop(found[-1][1], None) if found[-1][0] == "ended" else None
                is_whole = all(self._batches.get(one) != batch for one in tuple(self._open))
                may_wait = batch is not None and not (is_whole or self._tells_at_once)
                until = min(until, time.monotonic() + TOGETHER_WITHIN_S) if may_wait else 0.0
        return [(kind, number, value()) for kind, number, value in found]

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._following is not None:
            self._following.result()
        elif self.group is not None:
            self.engine.release()
        super().close()

    def _taken(self, version: int) -> DataProtoFuture | None:
        """Weights of a version, once they are given."""
        with self._changed:
            self._changed.wait_for(lambda: version in self._given or self._is_closed)
            return self._given.pop(version, None)

    def _tell(self, kind: str, number: int, value: Callable[[], Any]) -> None:
        with self._changed:
            self._num_told += 1
        self._happened.put((kind, number, value))

    def _wait_for_driver(self) -> None:
        """Until it knows of all that has happened. Not where it happens: that may be a call of the driver's own, which
        finds the response that it asks for ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_seen >= self._num_told or self._is_closed)


def _plain(response: Completion) -> list[Any]:
    """The fields of a response, for a checkpoint."""
    fields = []
    for value in astuple(response):
        if isinstance(value, list):
            kind = torch.float64 if value and isinstance(value[0], float) else torch.int64
            value = torch.tensor(value, dtype=kind)
        fields.append(torch.from_numpy(value) if isinstance(value, np.ndarray) else value)
    return fields


def _response(fields: Sequence[Any]) -> Completion:
    """What `_plain` was given."""
    values = []
    for value in fields:
        is_tensor = isinstance(value, torch.Tensor)
        values.append(
            (value.tolist() if value.ndim == 1 else value.numpy()) if is_tensor else value
        )
    return Completion(*values)
