# SPDX-License-Identifier: Apache-2.0
"""How weights get from whoever trains them to whoever generates with them. Seen from here both are streams of
`(name, tensor)`; what model, engine or framework stands behind them is not known.
"""

from collections.abc import Iterable
from typing import Protocol, TypeAlias

import torch

NamedWeights: TypeAlias = Iterable[tuple[str, torch.Tensor]]

NUM_NAMED = 5


class WeightTarget(Protocol):
    """What receives weights: a rollout engine."""

    weight_version: int

    def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Takes over a complete set of weights and their version."""
        ...

    def named_weights(self) -> NamedWeights:
        """The weights that it works with."""
        ...


class WeightSync(Protocol):
    """One way for weights to travel."""

    def publish(self, weights: NamedWeights, target: WeightTarget, version: int) -> None:
        """Afterwards the target works with exactly these weights, or a WeightSyncError says which differ."""
        ...


def name_some(names: Iterable[str]) -> str:
    """The first names of a list and how many more there are."""
    names = list(names)
    rest = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
