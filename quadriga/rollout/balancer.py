# SPDX-License-Identifier: Apache-2.0
"""Several engines as one: requests go to the engine with the fewest tokens in flight; one that dies is made again.

                       ┌─ engine 0   120 tokens in flight
    request ─ Balancer ┼─ engine 1    40 tokens in flight   <── the next request
                       └─ engine 2    dead: its requests go to the others; made again, it joins with the next weights

Consumes: requests, from tasks of an event loop or as a batch. Waits for: the engine that a request was given to.
Unblocked by: its response or its error.

A request that fails goes to the next engine. If that one serves it, the first is at fault, and gets no more requests;
if every engine fails, the request is at fault, and the first error is raised. Which engine serves it changes nothing: a
request brings its own seed.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from threading import Condition
from typing import Generic, TypeAlias, TypeVar

import torch

from quadriga.background import Restarts
from quadriga.errors import QuadrigaError, RolloutError, WeightSyncError
from quadriga.partition import Parts
from quadriga.rollout.interface import (
    BatchImages,
    Completion,
    Images,
    Prompt,
    Prompts,
    RolloutEngine,
    Sampling,
    SamplingParams,
)
from quadriga.rollout.third_party import process_environment
from quadriga.weight_sync.fingerprint import Fingerprint
from quadriga.weight_sync.publish import name_some

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=RolloutEngine)
Maker: TypeAlias = Callable[[], E]


def start_engines(makers: Sequence[Maker[E]], num_shares: int = 0) -> list[E]:
    """Make engines one after the other; where one does not start, those before it are closed.

    Several divide the threads that this process has: their processes find their share in `OMP_NUM_THREADS`. There are
    `num_shares` of them; 0: as many as makers.
    """
    engines: list[E] = []
    shares = num_shares or len(makers)
    try:
        with process_environment(shares if shares > 1 else 0):
            for make in makers:
                engines.append(make())
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return engines


class Balancer(RolloutEngine):
    """A `RolloutEngine` over several with equal weights.
    `makers`: of the same engines again. One that dies is made again in the background, and gets requests once it has
        loaded the next weights and their fingerprints are those of the others. Without them it is left for good."""

    name = "balancer"
    takes_images = True  # each engine says whether it does

    def __init__(
        self,
        engines: Sequence[RolloutEngine],
        description: str = "",
        makers: Sequence[Maker[RolloutEngine]] = (),
    ) -> None:
        super().__init__()
        if not engines:
            raise RolloutError("Balancer", got="no engines", expected="at least one")
        self.engines = list(engines)
        each = f"requests balanced over {len(engines)} engines, each: {engines[0].description}"
        self.description = description or each
        self.in_flight = [0] * len(engines)
        """Tokens of each engine's unfinished requests: of their prompts, and the most that they may generate."""
        self.dead: dict[int, Exception] = {}
        """Why an engine gets no more requests, by its number."""
        self._makers = list(makers)
        self._restarts = Restarts(self._make_again, "rollout engine")
        self._is_new: set[int] = set()
        """Engines among the dead that were made again, and wait for weights."""
        self.weight_version = engines[0].weight_version

    @property
    def alive(self) -> list[int]:
        """Numbers of the engines that get requests."""
        return [number for number in range(len(self.engines)) if number not in self.dead]

    @property
    def has_frozen_weights(self) -> bool:
        """Whether all engines that the next load reaches have them; those that were made again are among them."""
        for number, made in self._restarts.ended().items():
            if error := made.exception():
                logger.warning(
                    "engine %d of %d did not start again: %s", number, len(self.engines), error
                )
                self._restarts.request(number)
            else:
                self.engines[number] = made.result()
                self._is_new.add(number)
        reached = {*self.alive, *self._is_new}
        return bool(reached) and all(self.engines[number].has_frozen_weights for number in reached)

    @property
    def has_dropped_weights(self) -> bool:
        """Whether one of those that get requests has."""
        return any(self.engines[number].has_dropped_weights for number in self.alive)

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        self._require_ready([prompt], [sampling])
        tokens = len(prompt) + sampling.max_tokens
        failed: dict[int, Exception] = {}
        while usable := [number for number in self.alive if number not in failed]:
            number = min(usable, key=self.in_flight.__getitem__)
            self.in_flight[number] += tokens
            try:
                completion = await self.engines[number].generate(prompt, sampling, images)
            except (
                Exception
            ) as error:  # raised again below, if no other engine can serve the request
                failed[number] = error
            else:
                self._restarts.lasts(number)
                self.counts["rollout/requests_moved"] += len(failed)
                self._mark_dead(failed)
                return completion
            finally:
                self.in_flight[number] -= tokens
        raise self._none_left(failed)

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """Samples of one prompt stay together where that delays no others."""
        self._require_ready(prompts, sampling)
        given = images or [None] * len(prompts)

        def generate(number: int, rows: list[int]) -> list[Completion]:
            return self.engines[number].generate_batch(
                [prompts[row] for row in rows],
                [sampling[row] for row in rows],
                [given[row] for row in rows],
            )

        responses: dict[int, Completion] = {}
        failed: dict[int, Exception] = {}
        num_moved = 0
        while len(responses) < len(prompts):
            if not (usable := [number for number in self.alive if number not in failed]):
                raise self._none_left(failed)
            rest = [row for row in range(len(prompts)) if row not in responses]
            shares = zip(usable, _shares(prompts, sampling, rest, len(usable)), strict=True)
            rows = {number: share for number, share in shares if share}
            done, errors = self._on_each(rows, generate)
            for number, completions in done.items():
                self._restarts.lasts(number)
                responses.update(zip(rows[number], completions, strict=True))
            failed |= errors
            num_moved += sum(len(rows[number]) for number in errors)
        self.counts["rollout/requests_moved"] += num_moved
        self._mark_dead(failed)
        return [responses[row] for row in range(len(prompts))]

    def abort(self) -> None:
        if self.alive:
            self._by_each(lambda engine: engine.abort())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """All engines load each tensor before the next one is requested.

        An engine that fails is dead, unless all fail, or the weights are at fault.
        Raises WeightSyncError: an engine found the weights wrong. One with another error as its cause is about itself.
        """
        self.weight_version = -1
        alive, new = self.alive, sorted(self._is_new)
        stream = SharedStream(weights, len(alive) + len(new))

        def load(number: int, _: None) -> None:
            try:
                if number in new and self._state == "asleep":
                    self.engines[number].sleep()
                self.engines[number].load_weights(stream.read(), version)
            finally:
                stream.leave()

        done, failed = self._on_each(dict.fromkeys([*alive, *new]), load, meanwhile=stream.lend)
        for number, error in failed.items():
            if number in alive and isinstance(error, WeightSyncError) and error.__cause__ is None:
                raise error
        if not done.keys() - new:
            raise self._none_left(failed)
        self._mark_dead(failed)
        self._admit([number for number in new if number in done])
        self.weight_version = version

    def _admit(self, numbers: Sequence[int]) -> None:
        """Give requests to engines that were made again, if they have loaded what the others have."""
        expected = self.engines[self.alive[0]].fingerprint()
        for number in numbers:
            self._is_new.discard(number)
            reason = self.dead.pop(number)
            if names := expected.differences(self.engines[number].fingerprint()):
                got = f"other weights in {len(names)} tensors: {name_some(names)}"
                where = f"engine {number} of {len(self.engines)}, made again"
                self._mark_dead(
                    {number: WeightSyncError(where, got=got, expected="those of the others")}
                )
                continue
            self.counts["rollout/engine_restarts"] += 1
            logger.warning(
                "engine %d of %d is made again, after: %s", number, len(self.engines), reason
            )

    def _make_again(self, number: int) -> RolloutEngine:
        """Another engine in the place of a dead one, whose memory and processes go first."""
        self._close_dead(number)
        [engine] = start_engines([self._makers[number]], len(self.engines))
        return engine

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """Those of the first engine."""
        return self.engines[self.alive[0] if self.alive else 0].named_weights()

    def fingerprint(self) -> Fingerprint:
        """Of the weights of all engines.
        Raises WeightSyncError: the engines do not have the same weights."""
        marks = self._by_each(lambda engine: engine.fingerprint())
        first, *others = marks
        for number in others:
            if names := marks[first].differences(marks[number]):
                where, fix = (
                    f"engines {first} and {number} of a balancer",
                    "Publish the weights again.",
                )
                got = f"other weights in {len(names)} tensors: {name_some(names)}"
                raise WeightSyncError(where, got=got, expected="the same in all engines", fix=fix)
        return marks[first]

    def sleep(self) -> None:
        """An engine that fails to, while others do not, is dead."""
        super().sleep()
        self._by_each(lambda engine: engine.sleep())

    def wake(self) -> None:
        """An engine that fails to, while others do not, is dead."""
        super().wake()
        self._by_each(lambda engine: engine.wake())

    def close(self) -> None:
        """Close all engines; a dead one that cannot be closed is a warning. One that is being made is waited for."""
        super().close()
        self._restarts.wait()
        made = [one.result() for one in self._restarts.ended().values() if one.exception() is None]
        for engine in [*made, *(self.engines[number] for number in {*self.alive, *self._is_new})]:
            engine.close()
        for number in self.dead.keys() - self._is_new:
            self._close_dead(number)

    def _close_dead(self, number: int) -> None:
        try:
            self.engines[number].close()
        except Exception as error:  # whatever is left of it
            logger.warning(
                "engine %d of %d, which is dead, did not close: %s",
                number,
                len(self.engines),
                error,
            )

    def _mark_dead(self, failed: Mapping[int, Exception]) -> None:
        """Engines failed at what others have done."""
        for number, error in failed.items():
            if number not in self.dead or number in self._is_new:
                self.dead[number] = error
                self._is_new.discard(number)
                if self._makers:
                    self._restarts.request(number)
                logger.warning(
                    "engine %d of %d is given nothing more, %d are left: %s",
                    number, len(self.engines), len(self.alive), error,
                )  # fmt: skip

    def _none_left(self, failed: Mapping[int, Exception]) -> Exception:
        """The error of a request that every engine failed, or of a balancer without engines."""
        if failed:
            number, error = next(iter(failed.items()))
            if isinstance(error, QuadrigaError):
                return error
            where, got = (
                f"engine {number} of {len(self.engines)}",
                f"{type(error).__name__}: {error}",
            )
            fix = "No other engine could serve the request either: look at what this one says."
            told = RolloutError(
                where, got=got, expected="a response, of this engine or another", fix=fix
            )
            told.__cause__ = error
            return told
        reasons = "; ".join(f"engine {number}: {error}" for number, error in self.dead.items())
        got = f"{len(self.engines)} engines that are all dead ({reasons})"
        fix = "Look at the first reason, and start the run again."
        return RolloutError("Balancer.generate", got=got, expected="one that responds", fix=fix)

    def _by_each(self, work: Callable[[RolloutEngine], R]) -> dict[int, R]:
        """What each engine that is alive returns. One that fails is dead, unless all fail: then the first error."""
        done, failed = self._on_each(
            dict.fromkeys(self.alive), lambda number, _: work(self.engines[number])
        )
        if not done:
            raise self._none_left(failed)
        self._mark_dead(failed)
        return done

    def _on_each(
        self,
        given: Mapping[int, T],
        work: Callable[[int, T], R],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[dict[int, R], dict[int, Exception]]:
        """Work of several engines at the same time, a thread each; results and errors by the engines' numbers."""
        done: dict[int, R] = {}
        failed: dict[int, Exception] = {}
        with ThreadPoolExecutor(max(1, len(given)), "engine") as threads:
            futures = {
                number: threads.submit(work, number, share) for number, share in given.items()
            }
            try:
                meanwhile()
                wait(futures.values())
            except KeyboardInterrupt:
                # The threads end with their engines' work, so that is aborted.
                self.abort()
                raise
            for number, future in futures.items():
                error = future.exception()
                if isinstance(error, Exception):
                    failed[number] = error
                else:
                    done[number] = future.result()
        return done, failed


def _shares(
    prompts: Prompts, sampling: Sampling, rows: Sequence[int], count: int
) -> list[list[int]]:
    """Rows for each of `count` engines, of about as many tokens: costly groups first, each to the least loaded."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        groups.setdefault(tuple(prompts[row]), []).append(row)
    cost = {row: len(prompts[row]) + sampling[row].max_tokens for row in rows}
    fair = sum(cost.values()) / count
    # A group that is more than an engine's part is divided row by row.
    pieces = [
        piece
        for group in groups.values()
        for piece in (
            [group] if sum(cost[row] for row in group) <= fair else [[row] for row in group]
        )
    ]
    parts = Parts([0] * count)
    for piece in sorted(pieces, key=lambda piece: -sum(cost[row] for row in piece)):
        parts.give(piece, sum(cost[row] for row in piece))
    return [sorted(share) for share in parts.items]


class SharedStream(Generic[T]):
    """One stream of weights for several engines, each in a thread: all have a tensor before the next one is requested.

        source ── next ──> tensor k ──┬─> engine 0 copies it ─ wants the next ─┐
           ^                          └─> engine 1 copies it ─ wants the next ─┤
           └────────────────────────── all of them want the next ──────────────┘

    Consumes: the source, in the thread that calls `lend`. Waits for: every reader that has not left. Unblocked by: a
    reader that requests the next tensor, or leaves because its engine failed or was satisfied.
    """

    def __init__(self, source: Iterable[T], num_readers: int) -> None:
        self._source = source
        self._changed = Condition()
        self._num_reading, self._num_waiting = num_readers, 0
        self._next: Future[T | None] = Future()
        """The item that readers wait for: None once there are no more, or the error of the source."""

    def lend(self) -> None:
        """Lend one item after the other, until there are no more or all readers have left.
        Raises BaseException: of the source; the readers get it too."""
        try:
            source = iter(self._source)
            is_open = True
            while is_open:
                with self._changed:
                    self._changed.wait_for(lambda: self._num_waiting == self._num_reading)
                    if not self._num_reading:
                        break
                item = next(source, None)
                is_open = item is not None
                with self._changed:
                    lent, self._next, self._num_waiting = self._next, Future(), 0
                    lent.set_result(item)
        except BaseException as error:
            self._next.set_exception(error)
            raise

    def leave(self) -> None:
        """Do not wait for one of the readers any more."""
        with self._changed:
            self._num_reading -= 1
            self._changed.notify_all()

    def read(self) -> Iterator[T]:
        """The items, for one reader: the next one comes when all have done with the one before."""
        while True:
            with self._changed:
                wanted = self._next
                self._num_waiting += 1
                self._changed.notify_all()
            if (item := wanted.result()) is None:
                return
            yield item
