# SPDX-License-Identifier: Apache-2.0
"""Trainer and rollout hold the same parameters: only the version travels, and that they are the same is checked.

What was published is known by the place of each tensor and by torch's count of writes to it: an update of the trainer
changes the rollout's weights at once, and so the rollout must not go on under the old version.
"""

import torch

from quadriga.errors import WeightSyncError
from quadriga.weight_sync.base import NamedWeights, WeightTarget, name_some, require_version


class SharedWeights:
    """See `WeightSync`."""

    def __init__(self) -> None:
        self._published: dict[str, tuple[object, ...]] = {}

    def publish(self, weights: NamedWeights, target: WeightTarget, version: int) -> None:
        """Checks that each weight is the target's own memory, then passes on the version.

        Raises:
            WeightSyncError: some are not.
        """
        offered, held = dict(weights), dict(target.named_weights())
        places = {_place(tensor) for tensor in offered.values()}
        apart = [name for name, tensor in offered.items() if name not in held or _place(tensor) != _place(held[name])]
        apart += [name for name, tensor in held.items() if name not in offered and _place(tensor) not in places]
        if apart:
            raise WeightSyncError(
                f"shared weights, version {version}",
                got=f"{len(apart)} of {len(held)} weights that are not the trainer's own: {name_some(apart)}",
                expected="one set of parameters for both",
                fix="Give the rollout the trainer's module, or publish by InProcessWeights.",
            )
        target.load_weights(offered.items(), version)
        self._published = {name: _state(tensor) for name, tensor in target.named_weights()}

    def verify(self, target: WeightTarget, version: int) -> None:
        """See `WeightSync.verify`: no tensor is read."""
        require_version(target, version)
        held = {name: _state(tensor) for name, tensor in target.named_weights()}
        changed = [name for name, state in self._published.items() if held.get(name) != state]
        if changed:
            raise WeightSyncError(
                f"shared weights, version {version}",
                got=f"{len(changed)} of {len(held)} weights that were written to since: {name_some(changed)}",
                expected="weights as they were published",
                fix="Publish the weights after each update.",
            )


def _place(tensor: torch.Tensor) -> tuple[object, ...]:
    return tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _state(tensor: torch.Tensor) -> tuple[object, ...]:
    return *_place(tensor), tensor._version
