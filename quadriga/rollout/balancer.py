# SPDX-License-Identifier: Apache-2.0
"""Several engines as one: requests go to the least busy engine, and dead engines are restarted.

                       ┌─ engine 0   120 tokens in flight
    request ─ Balancer ┼─ engine 1    40 tokens in flight   <── the next request
                       └─ engine 2    dead: its requests go to the others; once restarted, it
                                      joins with the next weights

Consumes: requests, from tasks of an event loop or as a batch. Waits for: the engine that serves the
request. Unblocked by: its response or its error.

A request that fails goes to the next engine. If that one serves it, the first engine is at fault,
and gets no more requests. If every engine fails, the request is at fault, and the first error is
raised. Responses do not depend on the choice of the engine, because each request has its own seed.
"""

import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from threading import Condition
from typing import Generic, TypeAlias, TypeVar

from quadriga.background import Restarts
from quadriga.errors import QuadrigaError, RolloutError, WeightSyncError
from quadriga.partition import BalancedParts
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
from quadriga.weight_sync.publish import NamedWeights, name_some

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
E = TypeVar("E", bound=RolloutEngine)
Maker: TypeAlias = Callable[[], E]


def start_engines(makers: Sequence[Maker[E]], num_shares: int = 0) -> list[E]:
    """Make engines one after the other. If one does not start, those before it are closed.

    Args:
        makers: functions that make an engine each.
        num_shares: number of engines that share this process's threads. The processes of an engine
            get the engine's share as `OMP_NUM_THREADS`. 0: the number of makers.

    Returns:
        The engines, in order.
    """
    engines = []
    num_shares = num_shares or len(makers)
    try:
        # 0: a single engine need not share, so `OMP_NUM_THREADS` stays as it is.
        with process_environment(num_shares if num_shares > 1 else 0):
            for make in makers:
                engines.append(make())
    except BaseException:
        for engine in engines:
            engine.close()
        raise
    return engines


def start_balanced(makers: Sequence[Maker[E]]) -> "E | Balancer":
    """Make engines, and balance requests over them if there are several."""
    engines = start_engines(makers)
    return engines[0] if len(engines) == 1 else Balancer(engines, makers=makers)


class Balancer(RolloutEngine):
    """A `RolloutEngine` over several engines with equal weights.

    Args:
        engines: the engines.
        description: summary of the choices made at the start, for people to read.
        makers: functions that make each engine again. A dead engine is restarted in the background.
            It gets requests after the next load of weights, if it then has the same fingerprints as
            the other engines. Without makers it stays dead.

    Attributes:
        engines: the engines by number.
        in_flight: tokens of each engine's unfinished requests: prompts and longest responses.
        dead: errors of the engines that get no more requests, by number.
    """

    name = "balancer"
    takes_images = True  # if an engine does not, it refuses them itself

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
        self.traits = engines[0].traits
        self.description = description or (
            f"requests balanced over {len(engines)} engines, each: {engines[0].description}"
        )
        self.in_flight = [0] * len(engines)
        self.dead: dict[int, Exception] = {}
        self._makers = list(makers)
        self._restarts = Restarts(self._restart_engine, "rollout engine")
        # Numbers of dead engines that were restarted, and wait for weights.
        self._restarted: set[int] = set()
        self.weight_version = engines[0].weight_version

    def _title(self, number: int) -> str:
        """Name of an engine in messages."""
        return f"engine {number} of {len(self.engines)}"

    @property
    def alive(self) -> list[int]:
        """Numbers of the engines that get requests."""
        return [number for number in range(len(self.engines)) if number not in self.dead]

    @property
    def has_frozen_weights(self) -> bool:
        """Whether each engine that the next load reaches has the weights below an adapter.

        The sender asks this before each load. Reading it also takes in engines whose restart has
        ended, so that the load reaches them, and requests new restarts of those that failed.
        """
        for number, restart in self._restarts.ended().items():
            error = restart.exception()
            if error is None:
                self.engines[number] = restart.result()
                self._restarted.add(number)
            else:
                logger.warning("%s did not start again: %s", self._title(number), error)
                self._restarts.request(number)
        reached = {*self.alive, *self._restarted}
        return bool(reached) and all(self.engines[number].has_frozen_weights for number in reached)

    @property
    def has_dropped_weights(self) -> bool:
        """Whether an engine that gets requests has dropped its weights."""
        return any(self.engines[number].has_dropped_weights for number in self.alive)

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """Generate one response with the least busy engine, or with the next one if that fails.

        Args:
            prompt: token ids.
            sampling: how the response is sampled.
            images: images of the prompt.

        Raises:
            RolloutError: every engine failed, or all are dead.
        """
        self._require_ready([prompt], [sampling])
        # The length of the response is not known, so its limit counts.
        num_tokens = len(prompt) + sampling.max_tokens
        failed = {}  # errors by the engines' numbers
        while usable := [number for number in self.alive if number not in failed]:
            number = min(usable, key=self.in_flight.__getitem__)
            self.in_flight[number] += num_tokens
            try:
                completion = await self.engines[number].generate(prompt, sampling, images)
            except Exception as error:  # raised below if no other engine can serve the request
                failed[number] = error
            else:
                # This engine works, so after its next failure it is restarted without a pause.
                self._restarts.reset_pause(number)
                # It could serve the request, so those that could not are at fault.
                self.counts["rollout/requests_moved"] += len(failed)
                self._mark_dead(failed)
                return completion
            finally:
                self.in_flight[number] -= num_tokens
        raise self._error_of_all(failed)

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """Generate a response for each prompt, with all engines at the same time.

        Samples of a prompt go to the same engine, unless that would make its share too large.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt.

        Returns:
            The responses, in order.

        Raises:
            RolloutError: every engine failed, or all are dead.
        """
        self._require_ready(prompts, sampling)
        row_images = images or [None] * len(prompts)

        rows: dict[int, list[int]] = {}  # of the current round, by the engines' numbers

        def generate_rows(number: int) -> list[Completion]:
            """Generate the responses of an engine's rows."""
            engine = self.engines[number]
            # Each engine reports its progress to the balancer's own caller.
            engine.count_ended = self.count_ended
            try:
                return engine.generate_batch(
                    [prompts[row] for row in rows[number]],
                    [sampling[row] for row in rows[number]],
                    [row_images[row] for row in rows[number]],
                )
            finally:
                # Responses that end later are not of this batch.
                engine.count_ended = None

        responses = {}  # by row
        failed = {}  # errors by the engines' numbers
        num_moved = 0
        # Rows of an engine that fails are shared among the remaining ones in the next round.
        while len(responses) < len(prompts):
            usable = [number for number in self.alive if number not in failed]
            if not usable:
                raise self._error_of_all(failed)
            unserved_rows = [row for row in range(len(prompts)) if row not in responses]
            shares = _divide_rows(prompts, sampling, unserved_rows, len(usable))
            # An engine without rows takes no part in the round.
            rows = {number: share for number, share in zip(usable, shares, strict=True) if share}
            results, errors = self._run_concurrently(rows, generate_rows)
            for number, completions in results.items():
                self._restarts.reset_pause(number)
                responses.update(zip(rows[number], completions, strict=True))
            failed |= errors
            num_moved += sum(len(rows[number]) for number in errors)
        self.counts["rollout/requests_moved"] += num_moved
        self._mark_dead(failed)
        return [responses[row] for row in range(len(prompts))]

    def abort(self) -> None:
        """End all unfinished responses of all engines that get requests."""
        if self.alive:
            self._call_alive(lambda engine: engine.abort())

    def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load weights into all engines, which read the stream in lockstep; see `SharedStream`.

        Restarted engines get requests again if they have loaded the same weights as the others. An
        engine that fails is marked dead, unless all fail or the weights are at fault.

        Args:
            weights: names and tensors of the weights.
            version: version of the weights.

        Raises:
            WeightSyncError: an engine found the weights wrong.
        """
        self.weight_version = -1
        alive = self.alive
        restarted = sorted(self._restarted)
        stream = SharedStream(weights, len(alive) + len(restarted))

        def load(number: int) -> None:
            try:
                # A restarted engine is awake, even if the others are asleep.
                if number in restarted and self._state == "asleep":
                    self.engines[number].sleep()
                self.engines[number].load_weights(stream.read(), version)
            finally:
                # Also after an error, or the other readers would wait for this one.
                stream.leave()

        numbers = [*alive, *restarted]
        results, failed = self._run_concurrently(numbers, load, meanwhile=stream.lend)
        for number, error in failed.items():
            # A WeightSyncError without a cause says that the weights are wrong, for all engines.
            # One with another error as its cause is about this engine.
            if number in alive and isinstance(error, WeightSyncError) and error.__cause__ is None:
                raise error
        # A restarted engine is compared with the others, so at least one of them is needed.
        if not results.keys() - restarted:
            raise self._error_of_all(failed)
        self._mark_dead(failed)
        loaded = [number for number in restarted if number in results]
        if loaded:
            self._admit_restarted(loaded)
        self.weight_version = version

    def _admit_restarted(self, numbers: Sequence[int]) -> None:
        """Give restarted engines requests again, if their weights are those of the others.

        Args:
            numbers: numbers of the engines, which have loaded the weights.
        """
        # Any engine that was not restarted will do, because all of them have the same weights.
        expected = self.engines[self.alive[0]].fingerprint()
        for number in numbers:
            self._restarted.discard(number)
            reason = self.dead.pop(number)
            differing_names = expected.differences(self.engines[number].fingerprint())
            if differing_names:
                some_names = name_some(differing_names)
                error = WeightSyncError(
                    f"{self._title(number)}, made again",
                    got=f"other weights in {len(differing_names)} tensors: {some_names}",
                    expected="those of the others",
                )
                self._mark_dead({number: error})
                continue
            self.counts["rollout/engine_restarts"] += 1
            logger.warning("%s is made again, after: %s", self._title(number), reason)

    def _restart_engine(self, number: int) -> RolloutEngine:
        """Make an engine in the place of a dead one, whose memory and processes are freed first."""
        self._close_dead(number)
        [engine] = start_engines([self._makers[number]], len(self.engines))
        return engine

    def named_weights(self) -> NamedWeights:
        """Weights of the first engine that gets requests; of engine 0 if all are dead."""
        first = self.alive[0] if self.alive else 0
        return self.engines[first].named_weights()

    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the weights of all engines.

        Raises:
            WeightSyncError: the engines do not have the same weights.
        """
        fingerprints = self._call_alive(lambda engine: engine.fingerprint())
        first = next(iter(fingerprints))
        for number, fingerprint in fingerprints.items():
            names = fingerprints[first].differences(fingerprint)
            if names:
                raise WeightSyncError(
                    f"engines {first} and {number} of a balancer",
                    got=f"other weights in {len(names)} tensors: {name_some(names)}",
                    expected="the same in all engines",
                    fix="Publish the weights again.",
                )
        return fingerprints[first]

    def sleep(self) -> None:
        """Put all engines to sleep. One that fails is marked dead, unless all fail."""
        super().sleep()
        self._call_alive(lambda engine: engine.sleep())

    def wake(self) -> None:
        """Wake all engines. One that fails is marked dead, unless all fail."""
        super().wake()
        self._call_alive(lambda engine: engine.wake())

    def close(self) -> None:
        """Close all engines, after waiting for those that are being restarted.

        If a dead engine cannot be closed, this is logged as a warning. The error of another engine is
        raised once all are closed.
        """
        super().close()
        restarts = self._restarts.stop()
        # The stack calls all functions, even after an error, from the last to the first. Dead
        # engines, which may take long to close, come last.
        with ExitStack() as stack:
            for number in self.dead.keys() - self._restarted:
                stack.callback(self._close_dead, number)
            for number in {*self.alive, *self._restarted}:
                stack.callback(self.engines[number].close)
            for restart in restarts.values():
                if restart.exception() is None:
                    stack.callback(restart.result().close)

    def _close_dead(self, number: int) -> None:
        """Close a dead engine. If this fails, only a warning is logged."""
        try:
            self.engines[number].close()
        except Exception as error:  # a dead engine may fail in any way
            title = self._title(number)
            logger.warning("%s, which is dead, did not close: %s", title, error)

    def _mark_dead(self, failed: Mapping[int, Exception]) -> None:
        """Send no more requests to engines that failed where others succeeded, and restart them.

        Args:
            failed: errors by the engines' numbers.
        """
        for number, error in failed.items():
            # Another request that failed at the same time may have marked the engine already. A
            # restarted engine counts as dead until it has weights, and may now have died again.
            if number in self.dead and number not in self._restarted:
                continue
            self.dead[number] = error
            self._restarted.discard(number)
            if self._makers:
                self._restarts.request(number)
            num_alive = len(self.alive)
            logger.warning(
                "%s gets no more requests, %d are left: %s", self._title(number), num_alive, error
            )

    def _error_of_all(self, failed: Mapping[int, Exception]) -> Exception:
        """Choose the error to raise if no engine could do what was requested.

        Args:
            failed: errors by the engines' numbers; empty if all engines were dead before.

        Returns:
            The first engine's error if it is one of ours, else a RolloutError about it. If all
            engines were dead before, a RolloutError with the reasons.
        """
        if failed:
            number, error = next(iter(failed.items()))
            if isinstance(error, QuadrigaError):
                return error
            wrapped = RolloutError(
                self._title(number),
                got=f"{type(error).__name__}: {error}",
                expected="success of this engine or another",
                fix="All other engines have failed, too: see this engine's message.",
            )
            wrapped.__cause__ = error
            return wrapped
        reasons = "; ".join(f"engine {number}: {error}" for number, error in self.dead.items())
        return RolloutError(
            "Balancer.generate",
            got=f"{len(self.engines)} engines that are all dead ({reasons})",
            expected="one that responds",
            fix="Look at the first reason, and start the run again.",
        )

    def _call_alive(self, work: Callable[[RolloutEngine], R]) -> dict[int, R]:
        """Call a function with each engine that gets requests, concurrently.

        An engine that fails is marked dead. If all fail, the first error is raised.

        Args:
            work: the function.

        Returns:
            The results by the engines' numbers.
        """
        results, failed = self._run_concurrently(
            self.alive, lambda number: work(self.engines[number])
        )
        if not results:
            raise self._error_of_all(failed)
        self._mark_dead(failed)
        return results

    def _run_concurrently(
        self,
        numbers: Collection[int],
        work: Callable[[int], R],
        meanwhile: Callable[[], None] = lambda: None,
    ) -> tuple[dict[int, R], dict[int, Exception]]:
        """Run a function for several engines at the same time, in a thread each.

        Args:
            numbers: numbers of the engines.
            work: called with the number of each engine.
            meanwhile: called in this thread while the engines work.

        Returns:
            The results of the engines that succeeded, and the errors of the others, by the engines'
            numbers.
        """
        results = {}
        failed = {}
        with ThreadPoolExecutor(max(1, len(numbers)), "engine") as threads:
            futures = {number: threads.submit(work, number) for number in numbers}
            try:
                meanwhile()
                wait(futures.values())
            except KeyboardInterrupt:
                # The end of the pool waits for its threads, so their responses are aborted.
                self.abort()
                raise
            for number, future in futures.items():
                error = future.exception()
                if isinstance(error, Exception):
                    failed[number] = error
                else:
                    # Raises an error that is no Exception, such as KeyboardInterrupt.
                    results[number] = future.result()
        return results, failed


def _divide_rows(
    prompts: Prompts, sampling: Sampling, rows: Sequence[int], num_engines: int
) -> list[list[int]]:
    """Divide rows among engines, with about as many tokens for each.

    Rows with equal prompts stay together, because an engine computes a prompt once for all of them.
    The largest groups are assigned first, each to the engine with the fewest tokens.

    Args:
        prompts: token ids of the prompt of each row of the batch.
        sampling: how the response of each row is sampled.
        rows: numbers of the rows to divide.
        num_engines: number of engines.

    Returns:
        The rows of each engine, sorted. An engine may get none.
    """
    groups = defaultdict[tuple[int, ...], list[int]](list)
    for row in rows:
        groups[tuple(prompts[row])].append(row)
    row_tokens = {row: len(prompts[row]) + sampling[row].max_tokens for row in rows}
    fair_tokens = sum(row_tokens.values()) / num_engines

    def num_tokens(piece: list[int]) -> int:
        return sum(row_tokens[row] for row in piece)

    # A group with more tokens than an engine's fair share is divided row by row.
    pieces: list[list[int]] = []
    for group in groups.values():
        if num_tokens(group) <= fair_tokens:
            pieces.append(group)
        else:
            pieces += [[row] for row in group]
    parts = BalancedParts([0] * num_engines)
    for piece in sorted(pieces, key=num_tokens, reverse=True):
        parts.give(piece, num_tokens(piece))
    return [sorted(share) for share in parts.items]


class SharedStream(Generic[T]):
    """A stream of weights for several engines, each in a thread, that read it in lockstep.

        source ── next ──> tensor k ──┬─> engine 0 copies it ─ wants the next ─┐
           ^                          └─> engine 1 copies it ─ wants the next ─┤
           └────────────────────────── all of them want the next ──────────────┘

    Consumes: the source, in the thread that calls `lend`. Waits for: every reader that has not
    left. Unblocked by: a reader that requests the next tensor, or leaves because its engine failed
    or needs no more.

    Args:
        source: the items.
        num_readers: number of threads that call `read`.
    """

    def __init__(self, source: Iterable[T], num_readers: int) -> None:
        self._source = source
        self._changed = Condition()
        self._num_reading = num_readers
        self._num_waiting = 0
        # Future of the item that readers wait for. Its result is None after the last item.
        self._next: Future[T | None] = Future()

    def lend(self) -> None:
        """Lend one item after the other, until there are no more or all readers have left.

        Raises:
            BaseException: any error of the source, which the readers get as well.
        """
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
                # Replace the future before its result is set: a reader that has the item looks for
                # the next future at once.
                with self._changed:
                    current = self._next
                    self._next = Future()
                    self._num_waiting = 0
                    current.set_result(item)
        except BaseException as error:
            # Readers in other threads would otherwise wait forever.
            self._next.set_exception(error)
            raise

    def leave(self) -> None:
        """Stop waiting for the calling reader, which needs no more items."""
        with self._changed:
            self._num_reading -= 1
            self._changed.notify_all()

    def read(self) -> Iterator[T]:
        """Yield the items, each once all readers are done with the item before it."""
        while True:
            with self._changed:
                current = self._next
                self._num_waiting += 1
                self._changed.notify_all()
            # Waits without the lock, which `lend` needs.
            item = current.result()
            if item is None:
                return
            yield item
