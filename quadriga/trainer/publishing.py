# SPDX-License-Identifier: Apache-2.0
"""From the actor's weights to the rollout: one call for the loop, wherever the two are."""

from typing import Any, Protocol

from quadriga.single_controller.worker_group import WorkerGroup


class WeightPublisher(Protocol):
    """Gives the rollout the actor's weights."""

    def publish(self, version: int) -> None:
        """Afterwards the rollout generates with the actor's weights, under this version; else a WeightSyncError."""
        ...


class WithinWorkers:
    """Actor and rollout are in the same processes.

    Args:
        policy: worker group with both.
    """

    def __init__(self, policy: WorkerGroup[Any]) -> None:
        self._publish = policy.method("publish_weights")

    def publish(self, version: int) -> None:
        """See `WeightPublisher.publish`."""
        self._publish(version)


class BetweenWorkers:
    """The rollout has processes of its own. Weights of version 0 are sent at once.

        driver     publish(v) ────┬──────────────┬───────────────────────> both are done
        actor                     └ send_weights │ ── buckets ──┐      what the rollout has not from before
        rollout                                  └ receive_weights ── compare fingerprints

    Args:
        actor, rollout: worker groups.
        channel: how weights travel; see `weight_sync`.
    """

    def __init__(self, actor: WorkerGroup[Any], rollout: WorkerGroup[Any], channel: str = "broadcast") -> None:
        self._send, self._receive = actor.method("send_weights"), rollout.method("receive_weights")
        address, *_ = actor.method("offer_weights")(channel, rollout.world_size)
        rollout.method("expect_weights")(address)
        self._has_arrived = False
        self.publish(0)

    def publish(self, version: int) -> None:
        """See `WeightPublisher.publish`."""
        has_arrived, self._has_arrived = self._has_arrived, False
        sent, received = self._send(version, has_arrived), self._receive(version)
        sent.get()
        received.get()
        self._has_arrived = True
