# SPDX-License-Identifier: Apache-2.0
"""Trainer and rollout live in one process with a model each: weights are copied, and compared afterwards."""

from collections.abc import Iterator, Mapping

import torch

from quadriga.errors import WeightSyncError
from quadriga.weight_sync.base import NamedWeights, WeightTarget, name_some, require_version
from quadriga.weight_sync.fingerprint import Fingerprint, tensor_fingerprint


class InProcessWeights:
    """See `WeightSync`. A tensor is brought to the target's dtype on the way; one at a time is alive."""

    def __init__(self) -> None:
        self._published = Fingerprint({})

    def publish(self, weights: NamedWeights, target: WeightTarget, version: int) -> None:
        """Copies the weights and compares what the target holds with what was sent.

        Raises:
            WeightSyncError: the target refused the weights, holds others afterwards, or another version. It then
                generates nothing until it is given a complete set.
        """
        self._published = self._published.updated(deliver(weights, target, version))

    def verify(self, target: WeightTarget, version: int) -> None:
        """See `WeightSync.verify`: every tensor is compared anew."""
        require_held(self._published, target, version)


def deliver(
    weights: NamedWeights, target: WeightTarget, version: int, marks: Mapping[str, str] | None = None
) -> Fingerprint:
    """Give a target weights, and see that it has them.

    Args:
        weights: a complete set, or what is new of one that the target has; see `RolloutEngine.load_weights`.
        target: its `weight_version` is -1 after an error.
        version: of the weights.
        marks: fingerprints of tensors that have one already, by name; filled while the stream runs.

    Returns:
        The fingerprint of what was given, in the target's dtypes.

    Raises:
        WeightSyncError: see `InProcessWeights.publish`.
    """
    given: dict[str, str] = {}
    dtypes = {name: tensor.dtype for name, tensor in target.named_weights()}
    stream = _recorded(weights, dtypes, {} if marks is None else marks, given)
    try:
        target.load_weights(stream, version)
        for _ in stream:  # a target that did not ask for all of them does not hold up whoever sends the rest
            pass
        require_held(Fingerprint(given), target, version)
    except BaseException:
        target.weight_version = -1
        raise
    return Fingerprint(given)


def require_held(expected: Fingerprint, target: WeightTarget, version: int) -> None:
    """Raise a WeightSyncError unless the target works with these tensors under this version.

    Names that are in the target only are not looked at: a tied weight comes under one of its names.
    """
    require_version(target, version)
    held = target.fingerprint().tensors
    differing = [name for name, mark in expected.tensors.items() if held.get(name) != mark]
    if differing:
        raise WeightSyncError(
            f"weights of version {version}",
            got=f"{len(differing)} of {len(expected.tensors)} weights that differ: {name_some(sorted(differing))}",
            expected="in the rollout what the trainer sent",
            fix="The rollout's engine did not take them over as they are; it generates nothing until it does.",
        )


def _recorded(
    weights: NamedWeights, dtypes: Mapping[str, torch.dtype], marks: Mapping[str, str], given: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream in the target's dtypes; the fingerprint of each tensor is noted as it passes."""
    for name, tensor in weights:
        fitted = tensor.detach().to(dtypes.get(name, tensor.dtype))
        is_known = name in marks and fitted.dtype == tensor.dtype
        given[name] = marks[name] if is_known else tensor_fingerprint(fitted)
        yield name, fitted
