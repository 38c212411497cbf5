# SPDX-License-Identifier: Apache-2.0
"""Which of an actor's weights a publication sends.

all weights trained         all of them
an adapter, merged          all of them, the adapter merged on the way
an adapter, alone           the frozen weights and the adapter; once the frozen ones are there, the adapter
on the actor's own modules  the parameters as they are, for the rollout to see that they are its own
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from quadriga.config import Config
from quadriga.config.adapter import AdapterRoute, adapter_route
from quadriga.engines.base import TrainEngine


class ActorWeights:
    """The actor's weights as streams for the rollout. Every rank of the actor has one, and calls it collectively.

    Args:
        actor: whose weights they are.
        config: configuration.
        is_shared: whether the rollout computes with the actor's own modules.
    """

    def __init__(self, actor: TrainEngine, config: Config, *, is_shared: bool = False) -> None:
        self._actor, self._is_shared = actor, is_shared
        self.route: AdapterRoute | None = None
        if config.actor_rollout_ref.model.has_adapter:
            is_wide = actor.device.type != "cpu" and actor.dtype == torch.float32
            self.route = adapter_route(config, is_wide_on_accelerator=is_wide)
        self.has_sent_frozen = False
        """Whether the frozen weights, as they are, were sent; False makes the next publication send them."""

    @contextmanager
    def stream(self, *, has_frozen: bool) -> Iterator[Iterator[tuple[str, torch.Tensor]]]:
        """The weights of one publication, which has arrived when the context ends without an error.

        Args:
            has_frozen: whether the rollout still has frozen weights that were sent to it.
        """
        if self.route is None or not self.route.is_alone or self._is_shared:
            yield self._actor.weights(is_merged=not self._is_shared)
            return
        # All ranks gather the same tensors, so all decide alike.
        are_there = all(self._actor.world.gather(self.has_sent_frozen and has_frozen))
        self.has_sent_frozen = False
        yield self._actor.adapter_weights(with_frozen=not are_there)
        self.has_sent_frozen = True

    def describe(self) -> str:
        """How an adapter gets to the rollout, for people to read."""
        assert self.route is not None, "called for an actor with an adapter"
        if self._is_shared:
            return "the rollout computes in the same modules"
        way = "alone, after the weights below it" if self.route.is_alone else "merged"
        return f"to the rollout it goes {way} ({self.route.reason})"
