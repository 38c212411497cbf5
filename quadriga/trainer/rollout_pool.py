# SPDX-License-Identifier: Apache-2.0
"""Rollout engines in separate processes: weight sync, and recovery from lost engines.

    driver     publish(s) ────┬──────────────┬───────────────────────> both are done
    actor                     └ send_weights │ ── buckets ──┐      without frozen weights the rollout has
    rollout                                  └ receive_weights ── compare fingerprints

    rank 0   ── chunk 0 ────────────> done     ── first half of chunk 1 ──> done
    rank 1   ── chunk 1 ──> lost ── started again in a thread ── publish(s) ──> takes chunks again
    rank 2   ── chunk 2 ────────────> done     ── second half of chunk 1 ─> done

Consumes: batches of prompts. Waits for: the first engine that responds or is lost. Unblocked by: its
rows, or its error. The other engines generate the rows of a lost engine. Each row has its own seed,
so the responses are the same on any engine.

An engine may be a group of ranks: all of them get its rows, and the outputs of the first one count.
The loss of a rank of a group ends the run.
"""

import logging
from collections import Counter
from copy import copy
from operator import itemgetter
from typing import Any

from quadriga.background import Restarts
from quadriga.errors import EngineLostError, PeerLostError, WeightSyncError, WorkerLostError
from quadriga.observe.timing import Tally
from quadriga.protocol import DataProto
from quadriga.single_controller import WorkerGroup

logger = logging.getLogger(__name__)

LOST = (WorkerLostError, EngineLostError)
# Errors of a weight sync that was not completed. On Ray, ranks whose peer has left raise a
# PeerLostError.
UNSENT = (WeightSyncError, PeerLostError)


class WeightPublisher:
    """Publishes the actor's weights to the rollout in the actor's own processes.

    Args:
        actor: worker group with actor and rollout.
    """

    def __init__(self, actor: WorkerGroup[Any]) -> None:
        self._actor = actor

    def publish(self, step: int) -> None:
        """Load the actor's weights of a step into the rollout; the step is their version.

        Raises:
            WeightSyncError: the rollout does not have the actor's weights.
        """
        self._actor.method("publish_weights")(step)

    def take_counts(self) -> dict[str, int]:
        """Engine restarts and rerouted requests since the last call, as metrics."""
        return {}

    def close(self) -> None:
        """Wait for engines that are being restarted. The workers must have been shut down."""


class RolloutPool(WeightPublisher):
    """Engines in separate processes, which may be lost and restarted during a run.

    A lost engine is restarted in the background, wherever the cluster has room. It generates again
    from the next batch on for which its weights have the version and fingerprints of the actor's.
    The loss of the last engine raises its error, and so does the loss of a rank of a rollout group.
    Engines start with weights of version 0.

    Args:
        actor: worker group that sends the weights.
        rollout: worker group of the engines.
        group_size: ranks per engine.

    Attributes:
        is_lazy: whether `publish` does not send the weights; they are sent before the next rows
            are generated.
    """

    is_lazy = False

    def __init__(
        self, actor: WorkerGroup[Any], rollout: WorkerGroup[Any], group_size: int = 1
    ) -> None:
        super().__init__(actor)
        self._group_size = group_size
        self._rollout = rollout
        self._restarts = Restarts(self._restart, "rollout engine")
        self._version = 0
        self._has_frozen = False  # whether all engines have the frozen weights
        self._is_sent = False  # whether all engines have the weights of `_version`
        self._connected: list[int] = []  # ranks of the engines that weights are sent to
        self._new_ranks: set[int] = set()  # started again, without weights so far
        self._counts = Counter[str]()
        self.publish(0)

    def take_counts(self) -> dict[str, int]:
        """Engine restarts and rerouted requests since the last call, as metrics."""
        counts = self._counts
        self._counts = Counter()
        return dict(counts)

    def close(self) -> None:
        """Wait for engines that are being restarted. The workers must have been shut down."""
        # An engine that is still being started would connect to Ray again.
        self._restarts.wait()

    def publish(self, step: int) -> None:
        """Declare the actor's current weights to be version `step`; send them unless `is_lazy`."""
        self._version = step
        self._is_sent = False
        if not self.is_lazy:
            self._send_all()

    def _send_all(self) -> None:
        """Send the current weights to all engines, again if an engine is lost on the way."""
        self._add_restarted_engines()
        while not self._send(self._version):
            pass
        self._new_ranks.clear()
        self._is_sent = True

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response to each row. The interface is that of the workers' method."""
        # Restarted engines have no weights yet.
        if self._add_restarted_engines() or not self._is_sent:
            self._send_all()
        outputs = []  # number of the first row, responses
        pending = self._begin(0, prompts)
        while pending:
            lost_rows = []
            for handle, output in self._rollout.first_outcomes(list(pending)).items():
                rank, first, rows = pending.pop(handle)
                if isinstance(output, BaseException):
                    self._drop_engine(rank, output)
                    if len(rows):
                        lost_rows.append((first, rows))
                    continue
                # All ranks of a rollout group return the same rows.
                if rank % self._group_size == 0:
                    outputs.append((first, output))
                    Tally.add(len(rows))
                # The engine works, so its next restart need not be delayed.
                self._restarts.reset_pause(rank)
            # Reassigned only after all outcomes, because some may tell of further lost engines.
            for first, rows in lost_rows:
                ranks = self._rollout.ranks
                logger.warning(
                    "%d rows of a lost engine are generated by the engines %s", len(rows), ranks
                )
                self._counts["rollout/requests_moved"] += len(rows)
                pending |= self._begin(first, rows)
        outputs.sort(key=itemgetter(0))
        return DataProto.concat([output for _, output in outputs])

    def _begin(self, first: int, rows: DataProto) -> dict[Any, tuple[int, int, DataProto]]:
        """Start to generate rows on all engines.

        Args:
            first: number of the first row in the batch.
            rows: the rows.

        Returns:
            For each handle: the rank, the number of its first row in the batch, its rows.
        """
        size = self._group_size
        # For each rank, the number of its first row and its rows.
        chunks = []
        for chunk in rows.chunk(self._rollout.world_size // size):
            # Every rank of an engine gets its chunk.
            chunks += [(first, chunk)] * size
            first += len(chunk)
        arguments = [((chunk,), {}) for _, chunk in chunks]
        handles = self._rollout.start_all("generate_sequences", arguments)
        calls = zip(handles, self._rollout.ranks, chunks, strict=True)
        return {handle: (rank, start, chunk) for handle, rank, (start, chunk) in calls}

    def _send(self, version: int) -> bool:
        """Send the weights to all engines.

        With an adapter that is not merged, engines that already have the frozen weights get only
        the adapter.

        Returns:
            Whether all engines have the weights; False if one was lost on the way.
        """
        # New engines, and engines that were started again, have no frozen weights.
        if self._connected != self._rollout.ranks:
            self._has_frozen = False
            self._connected = list(self._rollout.ranks)
            # The first rank of the actor returns the address to which the engines connect.
            address, *_ = self._actor.method("offer_weights")(self._connected)
            if not self._call("expect_weights", address):
                return False
        has_frozen = self._has_frozen
        # Stays False if an error is raised below, because some engines may lack the frozen weights.
        self._has_frozen = False
        sending = self._actor.method("send_weights")(version, has_frozen)
        try:
            # For each engine, whether it has the frozen weights now; empty if an engine was lost.
            frozen_flags = self._call("receive_weights", version)
        except UNSENT:
            sending.get()  # if both sides failed, the sender's error has the reason
            raise
        try:
            sending.get()
        except UNSENT:
            # If an engine was lost, `_call` has returned nothing, and the sender's error is expected.
            if frozen_flags:
                raise
        self._has_frozen = all(frozen_flags)
        return bool(frozen_flags)

    def _call(self, method: str, argument: Any) -> list[Any]:
        """Call a method on all engines, and wait for all of them.

        A restarted engine without weights that fails counts as lost: it has refused the weights, or
        has different ones afterwards.

        Returns:
            The outputs; empty if an engine was lost.

        Raises:
            Exception: an engine failed without being lost, or cannot be spared (`_drop_engine`).
        """
        ranks = list(self._rollout.ranks)
        handles = self._rollout.start_all(method, [((argument,), {})] * len(ranks))
        pending = dict(zip(handles, ranks, strict=True))
        outputs = {}
        failures = {}
        while pending:
            for handle, output in self._rollout.first_outcomes(list(pending)).items():
                rank = pending.pop(handle)
                outputs[rank] = output
                if isinstance(output, BaseException):
                    failures[rank] = output

        losses = {rank: error for rank, error in failures.items() if isinstance(error, LOST)}
        # A lost engine may make others fail. If none is lost, each engine has failed by itself, and
        # the new ones among them are refused.
        refused_ranks = set() if losses else self._new_ranks & failures.keys()
        if failures and not losses and not refused_ranks:
            raise next(iter(failures.values()))
        for rank, error in losses.items():
            self._drop_engine(rank, error)
        for rank in refused_ranks:
            self._drop_engine(rank, failures[rank], is_refused=True)
        return [] if failures else list(outputs.values())

    def _drop_engine(self, rank: int, error: BaseException, *, is_refused: bool = False) -> None:
        """Continue without an engine, and restart it in the background.

        Args:
            rank: rank of the engine.
            error: error of the engine.
            is_refused: whether the engine is running but has wrong weights, which counts as a loss.

        Raises:
            BaseException: `error`, if it is not a loss, if the engine spans several ranks, if no
                other engine remains, or if the engine's process also has other roles.
        """
        remaining_ranks = [other for other in self._rollout.ranks if other != rank]
        if self._group_size > 1:
            group = rank // self._group_size
            logger.error("rollout group %d is without its rank %d: %s", group, rank, error)
            raise error
        is_loss = is_refused or isinstance(error, LOST)
        if not is_loss or not remaining_ranks or self._rollout.shares_processes:
            raise error
        # Another call may have found the same loss.
        if rank not in self._rollout.ranks:
            return
        self._rollout.use_ranks(remaining_ranks)
        self._new_ranks.discard(rank)
        # So that all engines connect again, even if this one is back by the next weight sync.
        self._connected = []
        state = "refused" if is_refused else "lost"
        num_left = len(remaining_ranks)
        logger.warning("rollout engine %d is %s, %d are left: %s", rank, state, num_left, error)
        self._restarts.request(rank)

    def _restart(self, rank: int) -> None:
        """Start an engine again and load its model. Called in a thread."""
        self._rollout.restart(rank)
        # A copy of the group: the group itself must not use the rank before it has weights.
        engine = copy(self._rollout).use_ranks([rank])
        engine.resolve(engine.start_all("init_model", [((), {})]))

    def _add_restarted_engines(self) -> bool:
        """Add engines that have been restarted. Returns whether an engine has no weights yet."""
        for rank, restart in self._restarts.ended().items():
            error = restart.exception()
            # The restart is tried again, after a longer pause.
            if error:
                logger.warning(
                    "rollout engine %d did not start again, the run goes on without it: %s",
                    rank,
                    error,
                )
                self._restarts.request(rank)
                continue
            logger.warning(
                "rollout engine %d is started again, and gets weights of version %d",
                rank,
                self._version,
            )
            self._counts["rollout/engine_restarts"] += 1
            self._new_ranks.add(rank)
            self._rollout.use_ranks([*self._rollout.ranks, rank])
        return bool(self._new_ranks)
