# SPDX-License-Identifier: Apache-2.0
"""How weights get from whoever trains them to whoever generates with them. Seen from here both are streams of
`(name, tensor)`; what model, engine or framework stands behind them is not known.
"""

from collections.abc import Iterable
from typing import Protocol, TypeAlias

import torch

from quadriga.errors import WeightSyncError
from quadriga.weight_sync.fingerprint import Fingerprint

NamedWeights: TypeAlias = Iterable[tuple[str, torch.Tensor]]

NUM_NAMED = 5


class WeightTarget(Protocol):
    """What receives weights: a rollout engine."""

    weight_version: int

    def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Takes over a complete set of weights and their version; each tensor is lent until the next one is asked."""
        ...

    def named_weights(self) -> NamedWeights:
        """The weights that it works with; none if it keeps them in another form."""
        ...

    def fingerprint(self) -> Fingerprint:
        """Of the weights that it works with; if it keeps them in another form, of what reached it."""
        ...


class WeightSync(Protocol):
    """One way for weights to travel within a process."""

    def publish(self, weights: NamedWeights, target: WeightTarget, version: int) -> None:
        """Afterwards the target works with exactly these weights, or a WeightSyncError says which differ."""
        ...

    def verify(self, target: WeightTarget, version: int) -> None:
        """Whether the target still works with what was published under this version; else a WeightSyncError."""
        ...


def require_version(target: WeightTarget, version: int) -> None:
    """Raise a WeightSyncError unless the target's weights are of this version."""
    if target.weight_version != version:
        raise WeightSyncError(
            "weights of the rollout",
            got=f"version {target.weight_version}",
            expected=f"version {version}, the trainer's",
            fix="Publish the weights before the next generation.",
        )


def name_some(names: Iterable[str]) -> str:
    """The first names of a list and how many more there are."""
    names = list(names)
    rest = len(names) - NUM_NAMED
    return ", ".join(names[:NUM_NAMED]) + (f" and {rest} more" if rest > 0 else "")
