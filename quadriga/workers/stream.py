# SPDX-License-Identifier: Apache-2.0
"""Generation that goes on while the process that it is in trains: groups of responses, by an engine with weights of its
own.

    driver           start(groups)          load(weights)                         abort(group)
    engine's thread  └ step ─ step ─ step ──┴ newer weights ─ step ─ step ─ ...
                              └ done(group)                         └ done(group)

Consumes: groups of prompts. Waits for: weights that are loaded, while they are not there. Unblocked by: their
publication, or None in their place. With `rollout.mode=async` conversations run in an event loop in a further thread.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from quadriga.protocol import DataProto
from quadriga.rollout.event_loop import EventLoopThread
from quadriga.rollout.interface import Completion
from quadriga.rollout.native.engine import NativeEngine
from quadriga.rollout.sequences import completed, images_of, requests_of
from quadriga.weight_sync import CopiedWeights
from quadriga.workers.generation import Generation

Weights = Mapping[str, torch.Tensor]
Done = Callable[[int, Callable[[], DataProto]], None]


class GenerationStream:
    """Groups of responses that are begun, aborted, and go on with newer weights, from any thread.

    Args:
        generation: with an engine whose weights are a copy.
        done: called with the number of a group that has ended, and what gives its rows or raises, in a thread of the
            engine's or of the conversations.
    """

    def __init__(self, generation: Generation, done: Done) -> None:
        assert isinstance(generation.engine, NativeEngine), "the configuration is checked before"
        self.generation, self.engine = generation, generation.engine
        self.done = done
        self._weights = CopiedWeights()
        self._open: dict[int, list[Future[Any]]] = {}
        self._loop = EventLoopThread("conversations") if generation.loops is not None else None

    def start(self, groups: Mapping[int, DataProto], joined: Callable[[int], None] | None = None) -> None:
        """Begin groups of rows, as `generate_sequences` takes them. Without conversations the first tokens of all are
        drawn in one step, before which `joined` is called with the number of the engine's steps so far."""
        config, seed = self.generation.config, self.generation.config.trainer.seed
        if self._loop is not None and self.generation.loops is not None:
            grade = None if self.generation.grader is None else self.generation.grader.grade_one
            for group, rows in groups.items():
                future = self._loop.submit(self.generation.loops.lead(self.engine, rows, seed=seed, grade=grade))
                self._open[group] = [future]
                future.add_done_callback(partial(self._end_request, group, rows, 0.0))
            return
        length = config.data.max_response_length
        requests = [requests_of(rows, config.actor_rollout_ref.rollout, length, seed) for rows in groups.values()]
        prompts = [ids for token_ids, _ in requests for ids in token_ids]
        sampling = [params for _, own in requests for params in own]
        images = [own for rows in groups.values() for own in images_of(rows)]
        futures, started = iter(self.engine.begin(prompts, sampling, images, joined)), time.perf_counter()
        for group, rows in groups.items():
            self._open[group] = [next(futures) for _ in range(len(rows))]
        for group, rows in groups.items():
            for future in tuple(self._open[group]):
                future.add_done_callback(partial(self._end_request, group, rows, started))

    def load(self, weights: Callable[[], Weights | None], version: int, *, keeps_cache: bool) -> Future[int]:
        """Take weights of a version between two steps; `weights` is called there and may wait. None: keep the older."""

        def work() -> None:
            if (found := weights()) is not None:
                self._weights.publish(found.items(), self.engine, version)

        return self.engine.between_steps(work, keeps_cache=keeps_cache)

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

    def _end_request(self, group: int, rows: DataProto, started: float, _: Future[Any]) -> None:
        """A response has ended; its group perhaps with it."""
        futures = self._open.get(group, ())
        if not futures or not all(future.done() for future in futures) or self._open.pop(group, None) is None:
            return
        is_whole = self._loop is not None  # all rows are one future
        self.done(group, futures[0].result if is_whole else partial(self._joined, rows, futures, started))

    def _joined(self, rows: DataProto, futures: Sequence[Future[Completion]], started: float) -> DataProto:
        completions, config = [future.result() for future in futures], self.generation.config
        for row, completion in enumerate(completions):
            completion.require_fit(config.data.max_response_length, f"engine, response {row}")
        length, pad = config.data.max_response_length, self.generation.tokenizer.pad_token_id
        return completed(rows, completions, self.engine.weight_version, length, pad, started)
