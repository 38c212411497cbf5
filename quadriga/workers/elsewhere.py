# SPDX-License-Identifier: Apache-2.0
"""What an engine's factory knows of an actor that is in other processes."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ActorElsewhere:
    """Stands where a factory of `workers.rollouts` gets the actor.

    Attributes:
        device: where the engine computes.
        dtype: of the actor's compute weights, and so of the engine's.
        has_whole_weights: no: there are none here.
    """

    device: torch.device
    dtype: torch.dtype
    has_whole_weights: bool = False
