# SPDX-License-Identifier: Apache-2.0
"""What of an actor's weights a publication sends.

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
from quadriga.workers.elsewhere import ActorElsewhere

Weights = Iterator[tuple[str, torch.Tensor]]


def route_of(config: Config, actor: TrainEngine | ActorElsewhere) -> AdapterRoute:
    """See `adapter_route`; actor and rollout come to the same."""
    is_wide = actor.device.type != "cpu" and actor.dtype == torch.float32
    return adapter_route(config, is_wide_on_accelerator=is_wide)


class Outgoing:
    """See the module. Every process of the actor has one, and asks it in turn with the others.

    Args:
        actor: whose weights they are.
        config: of the run.
        is_shared: whether the rollout computes with the actor's own modules.
    """

    def __init__(self, actor: TrainEngine, config: Config, *, is_shared: bool = False) -> None:
        self._actor, self._is_shared = actor, is_shared
        self.route = route_of(config, actor) if config.actor_rollout_ref.model.has_adapter else None
        self._are_frozen_out = False
        """Whether the frozen weights, as they are, were sent."""

    @contextmanager
    def publication(self, *, has_frozen: bool) -> Iterator[Weights]:
        """The stream of one publication, which has arrived when the context ends without an error.

        Args:
            has_frozen: whether the rollout still has frozen weights that were sent to it.
        """
        if self.route is None or not self.route.is_alone or self._is_shared:
            yield self._actor.weights(is_merged=not self._is_shared)
            return
        # All processes gather the same tensors, so all decide alike.
        are_there = all(self._actor.world.gather(self._are_frozen_out and has_frozen))
        self._are_frozen_out = False
        yield self._actor.adapter_weights(with_frozen=not are_there)
        self._are_frozen_out = True

    def frozen_weights_changed(self) -> None:
        """Others were loaded: the next publication sends them."""
        self._are_frozen_out = False

    def describe(self) -> str:
        """How an adapter gets to the rollout, for people to read."""
        assert isinstance(self.route, AdapterRoute), "asked only of an actor with an adapter"
        if self._is_shared:
            return "the rollout computes in the same modules"
        way = "alone, after the weights below it" if self.route.is_alone else "merged"
        return f"to the rollout it goes {way} ({self.route.reason})"
