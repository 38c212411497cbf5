# SPDX-License-Identifier: Apache-2.0
"""Several engines as one: each request goes where the fewest tokens are in flight, and an engine that dies is left.

                       ┌─ engine 0   120 tokens in flight
    request ─ Balancer ┼─ engine 1    40 tokens in flight   <── the next request
                       └─ engine 2    dead: its requests go to the others

Consumes: requests, from tasks of an event loop or as a batch. Waits for: the engine that a request was given to.
Unblocked by: its answer or its error.

A request that fails goes to the next engine. If that one answers, the first is at fault, and is given nothing more; if
every engine fails, the request is at fault, and the first error is raised. Which engine answers changes nothing: a
request brings its own seed.
"""

import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from quadriga.errors import QuadrigaError, RolloutError, WeightSyncError
from quadriga.rollout.base import Completion, Images, RolloutEngine, SamplingParams, with_images
from quadriga.rollout.shared_stream import SharedStream
from quadriga.weight_sync.fingerprint import Fingerprint

logger = logging.getLogger(__name__)

T = TypeVar("T")
R = TypeVar("R")
Prompt = Sequence[int]


class Balancer:
    """See `RolloutEngine`.

    Args:
        engines: with equal weights.
    """

    name = "balancer"

    def __init__(self, engines: Sequence[RolloutEngine]) -> None:
        if not engines:
            raise RolloutError("Balancer", got="no engines", expected="at least one")
        self.engines = list(engines)
        self.in_flight = [0] * len(engines)
        """Tokens of each engine's unfinished requests: of their prompts, and the most that they may answer."""
        self.dead: dict[int, Exception] = {}
        """Why an engine is given nothing more, by its number."""
        self.weight_version = engines[0].weight_version

    @property
    def alive(self) -> list[int]:
        """Numbers of the engines that are given requests."""
        return [number for number in range(len(self.engines)) if number not in self.dead]

    @property
    def has_frozen_weights(self) -> bool:
        """See `RolloutEngine`; whether all engines have them that are given requests."""
        return bool(self.alive) and all(self.engines[number].has_frozen_weights for number in self.alive)

    async def generate(
        self, prompt_token_ids: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """See `RolloutEngine.generate`."""
        self._require_loaded()
        failed: dict[int, Exception] = {}
        while (number := self._least_loaded(failed)) is not None:
            tokens = _tokens(prompt_token_ids, sampling)
            self.in_flight[number] += tokens
            try:
                engine = self.engines[number]
                option = {"images": images} if with_images(engine, [images]) else {}
                completion = await engine.generate(prompt_token_ids, sampling, **option)
            except Exception as error:  # raised again below, if no other engine can answer
                failed[number] = error
            else:
                self._bury(failed)
                return completion
            finally:
                self.in_flight[number] -= tokens
        raise self._none_answers(failed)

    def generate_batch(
        self,
        prompts: Sequence[Prompt],
        sampling: Sequence[SamplingParams],
        images: Sequence[Images | None] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate_batch`. Samples of one prompt stay together where that delays no others."""
        self._require_loaded()
        if len(prompts) != len(sampling):
            got = f"{len(prompts)} prompts and {len(sampling)} sampling parameters"
            raise RolloutError("Balancer.generate_batch", got=got, expected="one for each prompt")
        seen = [None] * len(prompts) if images is None else images
        answers: dict[int, Completion] = {}
        failed: dict[int, Exception] = {}
        while len(answers) < len(prompts):
            usable = [number for number in self.alive if number not in failed]
            if not usable:
                raise self._none_answers(failed)
            rest = [row for row in range(len(prompts)) if row not in answers]
            shares = _shares(prompts, sampling, rest, len(usable))
            given = {number: share for number, share in zip(usable, shares, strict=True) if share}
            done, errors = self._on_each(
                given,
                lambda number, rows: self.engines[number].generate_batch(
                    [prompts[row] for row in rows],
                    [sampling[row] for row in rows],
                    **with_images(self.engines[number], [seen[row] for row in rows]),
                ),
            )
            for number, completions in done.items():
                answers.update(zip(given[number], completions, strict=True))
            failed |= errors
        self._bury(failed)
        return [answers[row] for row in range(len(prompts))]

    def abort(self) -> None:
        """See `RolloutEngine.abort`."""
        if self.alive:
            self._by_each(lambda engine: engine.abort())

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """See `RolloutEngine.load_weights`. All engines take over each tensor before the next one is asked for.

        An engine that fails is given nothing more, unless all fail, or the weights are at fault.

        Raises:
            WeightSyncError: an engine says that the weights are wrong. One that tells of another error beneath it tells
                of itself.
        """
        self.weight_version = -1
        stream = SharedStream(weights, len(self.alive))
        readers = dict(zip(self.alive, stream.readers, strict=True))

        def load(number: int, reader: Iterator[tuple[str, torch.Tensor]]) -> None:
            try:
                self.engines[number].load_weights(reader, version)
            finally:
                stream.leave(readers[number])

        done, failed = self._on_each(readers, load, meanwhile=stream.lend)
        told = (error for error in failed.values() if isinstance(error, WeightSyncError) and error.__cause__ is None)
        wrong = next(told, None)
        if wrong is not None or not done:
            raise wrong or self._none_answers(failed)
        self._bury(failed)
        self.weight_version = version

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        """See `RolloutEngine.named_weights`; those of the first engine."""
        return self.engines[self.alive[0] if self.alive else 0].named_weights()

    def fingerprint(self) -> Fingerprint:
        """See `RolloutEngine.fingerprint`.

        Raises:
            WeightSyncError: the engines do not have the same weights.
        """
        marks = self._by_each(lambda engine: engine.fingerprint())
        first, *others = marks
        for number in others:
            if names := marks[first].differences(marks[number]):
                raise WeightSyncError(
                    f"engines {first} and {number} of a balancer",
                    got=f"other weights in {len(names)} tensors: {', '.join(names[:5])}",
                    expected="the same in all engines",
                    fix="Publish the weights again.",
                )
        return marks[first]

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`. An engine that cannot, while others can, is given nothing more."""
        self._by_each(lambda engine: engine.sleep())

    def wake(self) -> None:
        """See `RolloutEngine.wake`. An engine that cannot, while others can, is given nothing more."""
        self._by_each(lambda engine: engine.wake())

    def close(self) -> None:
        """See `RolloutEngine.close`. That a dead engine cannot be closed is said, and no more."""
        for number, engine in enumerate(self.engines):
            try:
                engine.close()
            except Exception as error:
                if number not in self.dead:
                    raise
                logger.warning("engine %d of %d, which is dead, did not close: %s", number, len(self.engines), error)

    def _require_loaded(self) -> None:
        if self.weight_version < 0:
            raise RolloutError(
                "Balancer.generate",
                got="weights that were not loaded completely",
                fix="Load a complete set of weights after the error of the last load.",
            )

    def _least_loaded(self, failed: Mapping[int, Exception]) -> int | None:
        usable = [number for number in self.alive if number not in failed]
        return min(usable, key=lambda number: (self.in_flight[number], number), default=None)

    def _bury(self, failed: Mapping[int, Exception]) -> None:
        """Others have done what these could not."""
        for number, error in failed.items():
            if number not in self.dead:
                self.dead[number] = error
                logger.warning(
                    "engine %d of %d is given nothing more, %d are left: %s",
                    number, len(self.engines), len(self.alive), error,
                )  # fmt: skip

    def _none_answers(self, failed: Mapping[int, Exception]) -> Exception:
        if failed:
            number, first = next(iter(failed.items()))
            if isinstance(first, QuadrigaError):
                return first
            told = RolloutError(
                f"engine {number} of {len(self.engines)}",
                got=f"{type(first).__name__}: {first}",
                expected="an answer, of this engine or another",
                fix="No other engine could answer either: look at what this one says.",
            )
            told.__cause__ = first
            return told
        reasons = "; ".join(f"engine {number}: {error}" for number, error in self.dead.items())
        return RolloutError(
            "Balancer.generate",
            got=f"{len(self.engines)} engines that are all dead ({reasons})",
            expected="one that answers",
            fix="Look at the first reason, and start the run again.",
        )

    def _by_each(self, work: Callable[[RolloutEngine], R]) -> dict[int, R]:
        """What every engine does that is alive; results by the engines' numbers.

        An engine that fails is given nothing more, unless all fail: then the first error is raised.
        """
        done, failed = self._on_each(dict.fromkeys(self.alive), lambda number, _: work(self.engines[number]))
        if not done:
            raise self._none_answers(failed)
        self._bury(failed)
        return done

    def _on_each(
        self, given: Mapping[int, T], work: Callable[[int, T], R], meanwhile: Callable[[], None] = lambda: None
    ) -> tuple[dict[int, R], dict[int, Exception]]:
        """Work of several engines at the same time, a thread each; results and errors by the engines' numbers."""
        done: dict[int, R] = {}
        failed: dict[int, Exception] = {}
        with ThreadPoolExecutor(max(1, len(given)), "engine") as threads:
            futures = {number: threads.submit(work, number, share) for number, share in given.items()}
            try:
                meanwhile()
                wait(futures.values())
            except KeyboardInterrupt:
                # The threads end with their engines' work, so that is given up.
                self.abort()
                raise
            for number, future in futures.items():
                error = future.exception()
                if isinstance(error, Exception):
                    failed[number] = error
                else:
                    done[number] = future.result()
        return done, failed


def _tokens(prompt: Prompt, sampling: SamplingParams) -> int:
    return len(prompt) + sampling.max_tokens


def _shares(
    prompts: Sequence[Prompt], sampling: Sequence[SamplingParams], rows: Sequence[int], count: int
) -> list[list[int]]:
    """Rows for each of `count` engines, of about as many tokens: costly groups first, each to the least loaded."""
    groups: dict[tuple[int, ...], list[int]] = {}
    for row in rows:
        groups.setdefault(tuple(prompts[row]), []).append(row)
    cost = {row: _tokens(prompts[row], sampling[row]) for row in rows}
    fair = sum(cost.values()) / count
    # A group that is more than an engine's part is dealt row by row.
    pieces = [
        piece
        for group in groups.values()
        for piece in ([group] if sum(cost[row] for row in group) <= fair else [[row] for row in group])
    ]
    shares: list[list[int]] = [[] for _ in range(count)]
    loads = [0] * count
    for piece in sorted(pieces, key=lambda piece: -sum(cost[row] for row in piece)):
        lightest = loads.index(min(loads))
        shares[lightest] += piece
        loads[lightest] += sum(cost[row] for row in piece)
    return [sorted(share) for share in shares]
