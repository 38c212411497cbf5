# SPDX-License-Identifier: Apache-2.0
"""Generation streams: an engine with its own copy of the weights generates during training.

    driver           start(groups)          load(weights)                         abort(group)
    engine's thread  └ step ─ step ─ step ──┴ newer weights ─ step ─ step ─ ...
                              └ done(group)                         └ done(group)

A group is the rows of one prompt, that is, several responses. After `load`, the engine's thread
waits between two steps for newer weights, until they are there or it is told to keep the older
ones. With `rollout.mode=async`, conversations run in an event loop in another thread.

The driver may be another process (`ServedStream`). It calls these methods one after the other:

    start  await_weights  give_weights  abort  hand_out  go_on

At the same time, it calls `events`, which returns groups that have ended, versions of weights that
were loaded and unfinished responses, or raises an error.
"""

import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import astuple, replace
from functools import partial
from itertools import zip_longest
from threading import Condition
from typing import Any, NamedTuple

import numpy as np
import torch

from quadriga.background import EventLoopThread, in_background
from quadriga.engine_traits import engines_with
from quadriga.errors import RolloutError, WeightSyncError
from quadriga.protocol import DataProto, DataProtoFuture
from quadriga.rollout.interface import Completion
from quadriga.rollout.sequences import batch_of_completions, images_of, requests_of
from quadriga.weight_sync import Box, CopiedWeights, tensor_fingerprint
from quadriga.weight_sync.publish import name_some
from quadriga.workers.generation import ResponseGenerator

Done = Callable[[int, Callable[[], DataProto]], None]
"""Callback for the end of a group; see `GenerationStream`."""
EVENTS_WITHIN_S = 1.0  # time for which `events` waits for a first event
TOGETHER_WITHIN_S = 0.1  # time for which it then waits for further groups of the same batch


class WeightCopy(NamedTuple):
    """Copied weights by name, and the fingerprint of each."""

    weights: Mapping[str, torch.Tensor]
    fingerprints: Mapping[str, str]


def join_shares(shares: Sequence[WeightCopy]) -> WeightCopy:
    """Join the shares of all trainer ranks to a copy of the model.

    The ranks took turns: weight i of the model is in the share of rank i modulo their number.

    Args:
        shares: share of each rank, from `copy_weights`.

    Returns:
        All weights, in the order of the model.
    """
    weights: dict[str, torch.Tensor] = {}
    fingerprints: dict[str, str] = {}
    for round_of_ranks in zip_longest(*(share.weights.items() for share in shares)):
        # In the last round some ranks have no weight: zip_longest gives None for them.
        weights.update(filter(None, round_of_ranks))
    for share in shares:
        fingerprints.update(share.fingerprints)
    return WeightCopy(weights, fingerprints)


SavedResponse = tuple[Any, ...]
"""A response of an unfinished group: the group, the number of the row, and then the fields of the
response so far, with lists as tensors. Its `finish_reason` is "abort" if it has not ended."""


class GenerationStream:
    """Generates groups of responses, and loads newer weights meanwhile. Called from any thread.

    Args:
        generation: the generator, whose engine has its own copy of the weights.
        done: called with the number of a group that has ended, and a function that returns the
            group's rows or raises its error. Called in a thread of the engine or of the
            conversations.
    """

    def __init__(self, generation: ResponseGenerator, done: Done) -> None:
        engine = generation.engine
        assert engine.traits.streams, "checked with the configuration"
        self.generation = generation
        self.engine = engine
        self.done = done
        if generation.calls is not None:
            generation.calls.accept()
        self._weights = CopiedWeights()
        self.group = generation.group
        # A rank of a rollout group holds shards in memory of its own, apart from the actor's.
        if self.group is not None:
            assert engine.traits.takes_shards, "checked with the configuration"
            self._shards = engine.wanted_shards()
            device = self.group.device
            memory = {}
            for name, (box, dtype) in self._shards.items():
                memory[name] = torch.empty(box.shape, dtype=dtype, device=device)
            engine.hold_shards(memory)
        # Futures of each unfinished group: one per response, or a single one with conversations.
        self._open: dict[int, list[Future[Any]]] = {}
        self._loop = EventLoopThread("conversations") if generation.loops is not None else None

    def start(
        self,
        groups: Mapping[int, DataProto],
        joined: Callable[[int], None] | None = None,
        saved: Sequence[SavedResponse] = (),
    ) -> None:
        """Start to generate groups of responses.

        Args:
            groups: rows of each group, as for `generate_sequences`, by its number.
            joined: called once, when every response is in the engine's batch, with the number of
                engine steps before that. Not called for conversations.
            saved: responses of unfinished groups, from `save`. Responses that had not ended are
                continued in this order; the others are not generated again. Not used for
                conversations.

        Raises:
            RolloutError: the engine cannot continue responses.
        """
        if self._loop is not None:
            self._converse(groups)
            return
        # All three dictionaries have the keys (number of the group, number of the row).
        requests = self._requests_of_groups(groups)
        futures = {}
        to_continue = {}
        for group, row, *fields in saved:
            response = _response_of(fields)
            if response.finish_reason == "abort":
                # It had not ended when it was saved.
                to_continue[group, row] = response
            else:
                # A future that is done already stands for the ended response.
                futures[group, row] = Future()
                futures[group, row].set_result(response)
        if to_continue and not self.engine.traits.continues_unfinished:
            raise RolloutError(
                f"rollout.name={self.generation.config.actor_rollout_ref.rollout.name}",
                got=f"{len(to_continue)} responses that another engine has begun",
                expected="a checkpoint without unfinished responses",
                fix=f"Resume with rollout.name={engines_with('continues_unfinished')}.",
            )

        # `begin` continues responses in its first requests; new requests follow.
        order = list(to_continue)
        order += [key for key in requests if key not in to_continue and key not in futures]
        ordered_requests = [requests[key] for key in order]
        prompts, sampling, images = map(list, zip(*ordered_requests, strict=True))
        begun = self.engine.begin(prompts, sampling, images, joined, list(to_continue.values()))
        futures |= zip(order, begun, strict=True)
        started = time.perf_counter()

        # First open all groups: a callback for a future that is done runs at once.
        for group, rows in groups.items():
            self._open[group] = [futures[group, row] for row in range(len(rows))]
        for group, rows in groups.items():
            for future in tuple(self._open[group]):
                future.add_done_callback(partial(self._end_request, group, rows, started))

    def _requests_of_groups(
        self, groups: Mapping[int, DataProto]
    ) -> dict[tuple[int, int], tuple[Any, ...]]:
        """Make the requests of groups: prompt, sampling and images of each response.

        Args:
            groups: rows of each group.

        Returns:
            The requests, by number of the group and number of the row in the group.
        """
        config = self.generation.config
        rollout = config.actor_rollout_ref.rollout
        length = config.data.max_response_length
        requests = {}
        for group, rows in groups.items():
            # Two lists: prompts and sampling of all rows.
            fields = requests_of(rows, rollout, length, config.trainer.seed)
            for row, request in enumerate(zip(*fields, images_of(rows), strict=True)):
                requests[group, row] = request
        return requests

    @property
    def weight_version(self) -> int:
        """Version of the weights that will draw the next token."""
        return self.engine.weight_version

    def load(
        self, weights: Callable[[], DataProtoFuture | None], version: int, *, keeps_cache: bool
    ) -> Future[int]:
        """Load weights between two steps.

        Args:
            weights: called between the steps, and may wait. Returns a future of the shares of a
                `WeightCopy`, or None to keep the older weights.
            version: version of the weights.
            keeps_cache: whether unfinished responses continue on the KV cache of older weights.

        Returns:
            A future of the number of steps before the weights were loaded, or of the error.
        """

        def publish() -> None:
            """Publish the weights. Called by the engine between two steps."""
            future = weights()
            if future is not None:
                self._publish(join_shares(future.get()), version)

        return self.engine.between_steps(publish, keeps_cache=keeps_cache)

    def _publish(self, copied: WeightCopy, version: int) -> None:
        """Publish weights to the engine. A rank of a rollout group first cuts out its shards.

        Args:
            copied: the full weights.
            version: version of the weights.

        Raises:
            WeightSyncError: weights differ from their fingerprints.
        """
        fingerprints = copied.fingerprints
        if self.group is None:
            self._weights.publish(copied.weights.items(), self.engine, version, fingerprints)
            return
        # The fingerprints are those of full weights, so check them before shards are cut out.
        changed = []
        for name, tensor in copied.weights.items():
            if tensor_fingerprint(tensor) != fingerprints[name]:
                changed.append(name)
        if changed:
            raise WeightSyncError(
                f"weights of version {version}",
                got=f"{len(changed)} of {len(fingerprints)} weights "
                f"that differ: {name_some(changed)}",
                expected="what the trainer sent",
            )

        def shards() -> Iterator[tuple[str, torch.Tensor]]:
            """Cut this rank's shard out of each full tensor."""
            for name, tensor in copied.weights.items():
                full = Box((0,) * tensor.dim(), tuple(tensor.shape))  # starts at 0 everywhere
                box, _ = self._shards[name]
                yield name, full.view(tensor, box).contiguous()

        self._weights.publish(shards(), self.engine, version)

    def save(self, report: Callable[[int, list[SavedResponse]], None]) -> Future[int]:
        """Save unfinished groups between two steps. The KV cache is recomputed afterwards.

        Args:
            report: called with the number of steps so far, and the responses of unfinished groups:
                first responses that have ended, then the others in the order in which they
                continue. The engine waits until it returns.

        Returns:
            A future of the number of steps before the groups were saved, or of the error.
        """
        engine = self.engine
        assert engine.traits.continues_unfinished, "others finish their responses first"

        def collect() -> None:
            """Collect the responses. Called by the engine between two steps."""
            # Groups that another thread starts from now on are not saved, and start again later.
            groups = tuple(self._open.items())
            places = {}
            for group, futures in groups:
                for row, future in enumerate(futures):
                    places[future] = (group, row)
            # A dictionary keeps the order: ended responses come before unfinished ones.
            responses = {}
            for future in places:
                # A group that was aborted since `groups` was taken has cancelled futures.
                if future.done() and not future.cancelled():
                    responses[future] = future.result()
            responses |= engine.unfinished()
            saved = []
            for future, response in responses.items():
                # Skip responses of groups that were started since `groups` was taken.
                if future in places:
                    saved.append((*places[future], *_response_fields(response)))
            report(engine.num_steps, saved)

        return engine.between_steps(collect, keeps_cache=False, recomputes=True)

    def abort(self, group: int) -> None:
        """Abort a group. It ends at the next step, and `done` is not called."""
        for future in self._open.pop(group, ()):
            future.cancel()

    @property
    def num_open(self) -> int:
        """Number of unfinished groups."""
        return len(self._open)

    def close(self) -> None:
        """Abort everything, and end the engine."""
        for group in tuple(self._open):
            self.abort(group)
        if self._loop is not None:
            self._loop.close()
        self.generation.close()

    def _converse(self, groups: Mapping[int, DataProto]) -> None:
        """Start to generate groups as conversations, with one future for all rows of a group."""
        loops = self.generation.loops
        grader = self.generation.grader
        seed = self.generation.config.trainer.seed
        assert self._loop is not None and loops is not None
        grade = None if grader is None else grader.grade_one
        for group, rows in groups.items():
            future = self._loop.submit(loops.lead(self.engine, rows, seed=seed, grade=grade))
            self._open[group] = [future]
            future.add_done_callback(partial(self._end_request, group, rows, 0.0))

    def _end_request(self, group: int, rows: DataProto, started: float, _: Future[Any]) -> None:
        """Callback of a future: call `done` if all responses of the group have ended.

        Args:
            group: number of the group.
            rows: rows of the group.
            started: time at which the group was started (`time.perf_counter`).
            _: the future that has ended.
        """
        # An aborted group is not in `_open`.
        futures = self._open.get(group, ())
        if not futures or not all(future.done() for future in futures):
            return
        # Several callbacks may get here at the same time. Only one of them removes the group.
        if self._open.pop(group, None) is None:
            return
        if self._loop is not None:
            self.done(group, futures[0].result)
        else:
            self.done(group, partial(self._join_responses, rows, futures, started))

    def _join_responses(
        self, rows: DataProto, futures: Sequence[Future[Completion]], started: float
    ) -> DataProto:
        """Join the responses of a group to rows. Raises the error of a response that failed."""
        completions = [future.result() for future in futures]
        return batch_of_completions(
            rows,
            completions,
            self.engine.weight_version,
            self.generation.config.data.max_response_length,
            self.generation.tokenizer.pad_token_id,
            started,
        )


class ServedStream(GenerationStream):
    """A stream whose driver is another process, which asks for `events`.

    Args:
        generation: the generator, whose engine has its own copy of the weights.
        waits: whether the engine pauses before each step until the driver has called `go_on` for
            every event, so that the driver's decisions take effect at the same step in every run.
    """

    def __init__(self, generation: ResponseGenerator, *, waits: bool) -> None:
        super().__init__(generation, partial(self._report, "ended"))
        self._changed = Condition()
        # Kind, number and a function that returns the third item or raises the event's error.
        self._queued_events: queue.Queue[tuple[str, int, Callable[[], Any]]] = queue.Queue()
        self._new_weights: dict[int, DataProtoFuture | None] = {}  # by version
        self._num_events = 0
        self._num_handled = 0  # number of events that the driver has handled
        self._is_closed = False
        settings = generation.config.async_training
        # Whether the driver may act on a single group of a batch, and so must be told at once.
        self._reports_at_once = (
            waits or settings.by_mini_batch or settings.on_stale == "drop" or bool(settings.replay)
        )
        # The batch (training step) of each group whose end has not been reported to the driver.
        self._batches: dict[int, int] = {}
        if waits:
            assert self.engine.traits.is_deterministic, "checked with the configuration"
            self.engine.before_step = lambda _: self._wait_for_driver()
        # The end of the thread in which a member follows the leader of its rollout group; None on
        # a leader and without groups.
        self._following: Future[None] | None = None
        if self.group is not None and not self.group.is_leader:

            def publish(version: int) -> None:
                """Load the weights that the leader of the group loads. Called by the engine."""
                weights = self._wait_for_weights(version)
                assert weights is not None, "the leader loads only weights that it was given"
                self._publish(join_shares(weights.get()), version)

            self.engine.take_weights = publish
            self._following = in_background(self.engine.follow, "rank of a rollout group")
            # An error of the thread reaches the driver as an event.
            self._following.add_done_callback(
                lambda done: self._queued_events.put(("over", 0, done.result))
            )

    def start(self, groups: Mapping[int, DataProto], *args: Any) -> None:
        """Start groups, and remember the batch of each for `events`."""
        self._batches |= {group: rows.meta_info["global_steps"] for group, rows in groups.items()}
        super().start(groups, *args)

    def abort(self, group: int) -> None:
        """Abort a group. Its end is not reported."""
        super().abort(group)
        self._batches.pop(group, None)

    def await_weights(self, version: int, *, keeps_cache: bool) -> None:
        """Load weights from `give_weights` before the next step.

        If `give_weights` has not been called yet, the engine waits for it between the steps.

        Args:
            version: version of the weights.
            keeps_cache: see `load`.
        """

        def report(done: Future[int]) -> None:
            """Report the end of the load to the driver."""
            # Read it now: the version may be newer when the driver asks for the event.
            current_version = self.weight_version

            def outcome() -> int:
                """Return the version, or raise the error of the load."""
                done.result()  # raises the error of a failed load
                return current_version

            self._report("loaded", version, outcome)

        weights = partial(self._wait_for_weights, version)
        self.load(weights, version, keeps_cache=keeps_cache).add_done_callback(report)

    def give_weights(self, version: int, weights: DataProtoFuture | None) -> None:
        """Receive weights for `await_weights`. The engine generates meanwhile.

        Args:
            version: version of the weights.
            weights: see `load`. None: keep the older weights.
        """
        received = None
        if weights is not None:
            # Wait here, in the thread of the driver's call, so that the engine need not wait.
            shares = weights.get()
            # A complete future, whose `get` returns the shares.
            received = DataProtoFuture(list, shares, resolve=list)
        is_member = self._following is not None
        with self._changed:
            # A member of a group loads only what its leader loads. It would never take out a None.
            if received is not None or not is_member:
                self._new_weights[version] = received
            self._changed.notify_all()

    def hand_out(self) -> None:
        """Report unfinished responses as the event "saved" before the next step; see `save`."""

        def report_failure(done: Future[int]) -> None:
            """Report an error of the save to the driver."""
            # Not by `_report`, which counts events that the driver handles: this error is raised by
            # `events` in the driver's call.
            if done.exception() is not None:
                self._queued_events.put(("saved", 0, done.result))

        saving = self.save(lambda _, saved: self._report("saved", 0, lambda: saved))
        saving.add_done_callback(report_failure)

    def go_on(self) -> None:
        """Count an event as handled by the driver, for which the engine may wait (`waits`)."""
        with self._changed:
            self._num_handled += 1
            self._changed.notify_all()

    def events(self) -> list[tuple[str, int, Any]]:
        """Wait up to a second for a first event, and return all events since the last call.

        After the end of a group, wait a moment for further groups of the batch, to report them
        together. Raises the error of a failed event.

        Returns:
            The events: ("ended", group, its rows), ("loaded", version, version of the weights since
            then), ("saved", 0, responses from `save`), or from a member of a rollout group that no
            longer follows its leader ("over", 0, None).
        """
        events = []
        deadline = time.monotonic() + EVENTS_WITHIN_S
        # Members of a rollout group only report errors, so they do not wait: the leader does.
        waits = self._following is None
        with suppress(queue.Empty):
            while True:
                event = self._queued_events.get(waits, max(0.0, deadline - time.monotonic()))
                events.append(event)
                kind, number, _ = event
                if kind == "ended" and self._expects_more(number):
                    deadline = min(deadline, time.monotonic() + TOGETHER_WITHIN_S)
                else:
                    # A deadline in the past: take only events that are there already.
                    deadline = 0.0
        # Calling a value raises the error of its event.
        return [(kind, number, value()) for kind, number, value in events]

    def _expects_more(self, group: int) -> bool:
        """Whether to delay the report of an ended group for other open groups of its batch.

        Forgets the group, whose end is reported once.
        """
        batch = self._batches.pop(group, None)
        if batch is None or self._reports_at_once:
            return False
        return any(self._batches.get(open_group) == batch for open_group in tuple(self._open))

    def close(self) -> None:
        """Unblock all waits, and end the stream and its engine."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        if self._following is not None:
            self._following.result()
        elif self.group is not None:
            self.engine.release()
        super().close()

    def _wait_for_weights(self, version: int) -> DataProtoFuture | None:
        """Wait until `give_weights` was called for a version, and take its weights.

        Returns:
            A future of the shares; None to keep the older weights, or if the stream was closed.
        """
        with self._changed:
            self._changed.wait_for(lambda: version in self._new_weights or self._is_closed)
            return self._new_weights.pop(version, None)

    def _report(self, kind: str, number: int, value: Callable[[], Any]) -> None:
        """Queue an event for the driver.

        Args:
            kind: kind of the event; see `events`.
            number: number of the group, or version of the weights.
            value: returns the third item of the event, or raises its error.
        """
        with self._changed:
            self._num_events += 1
        self._queued_events.put((kind, number, value))

    def _wait_for_driver(self) -> None:
        """Wait until the driver has handled all events. Called by the engine before each step.

        `_report` must not wait instead: it is also called in the thread of the driver's calls, and
        the call of `go_on` that it would wait for comes after the current one.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._num_handled >= self._num_events or self._is_closed)


def _response_fields(response: Completion) -> list[Any]:
    """Fields of a response for a checkpoint, with lists and arrays as tensors."""
    fields = []
    # Leave out the last field, `times`: times of this run mean nothing in a resumed run.
    for value in astuple(replace(response, times=None))[:-1]:
        if isinstance(value, list):
            dtype = torch.float64 if value and isinstance(value[0], float) else torch.int64
            value = torch.tensor(value, dtype=dtype)
        elif isinstance(value, np.ndarray):
            value = torch.from_numpy(value)
        fields.append(value)
    return fields


def _response_of(fields: Sequence[Any]) -> Completion:
    """Rebuild a response from the fields that `_response_fields` returned."""
    values = []
    for value in fields:
        if isinstance(value, torch.Tensor):
            # Lists have one dimension, arrays have more.
            value = value.tolist() if value.ndim == 1 else value.numpy()
        values.append(value)
    return Completion(*values)
