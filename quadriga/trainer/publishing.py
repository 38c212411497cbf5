# SPDX-License-Identifier: Apache-2.0
"""Weight sync from the driver's side: one call for the loop, wherever actor and rollout are."""

from typing import Any

from quadriga.single_controller.worker_group import WorkerGroup


class WeightPublisher:
    """Gives the rollout the actor's weights.

    Where the rollout has processes of its own, weights of version 0 are sent at once:

        driver     publish(v) ────┬──────────────┬───────────────────────> both are done
        actor                     └ send_weights │ ── buckets ──┐      without frozen weights that the rollout has
        rollout                                  └ receive_weights ── compare fingerprints

    Args:
        actor: worker group with the actor.
        rollout: worker group of the rollout; None: it is in the actor's processes.
    """

    def __init__(self, actor: WorkerGroup[Any], rollout: WorkerGroup[Any] | None = None) -> None:
        self._actor, self._rollout, self._has_frozen = actor, rollout, False
        if rollout is not None:
            address, *_ = actor.method("offer_weights")(rollout.world_size)
            rollout.method("expect_weights")(address)
            self.publish(0)

    def publish(self, version: int) -> None:
        """Afterwards the rollout generates with the actor's weights, under this version; else a WeightSyncError."""
        if self._rollout is None:
            self._actor.method("publish_weights")(version)
            return
        has_frozen, self._has_frozen = self._has_frozen, False
        sent = self._actor.method("send_weights")(version, has_frozen)
        received = self._rollout.method("receive_weights")(version)
        sent.get()
        received.get()
        self._has_frozen = True
