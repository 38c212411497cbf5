# SPDX-License-Identifier: Apache-2.0
"""Trainer and rollout live in one process with a model each: weights are copied, and compared afterwards."""

from collections.abc import Iterator

import torch

from quadriga.errors import WeightSyncError
from quadriga.weight_sync.base import NamedWeights, WeightTarget, name_some
from quadriga.weight_sync.fingerprint import Fingerprint, fingerprint, tensor_fingerprint


class InProcessWeights:
    """See `WeightSync`. A tensor is brought to the target's dtype on the way."""

    def publish(self, weights: NamedWeights, target: WeightTarget, version: int) -> None:
        """Copies the weights and compares what arrived with what was sent.

        Raises:
            WeightSyncError: the target refused the weights, holds others afterwards, or another version.
        """
        sent: dict[str, str] = {}
        dtypes = {name: tensor.dtype for name, tensor in target.named_weights()}
        target.load_weights(_recorded(weights, dtypes, sent), version)
        arrived = fingerprint((name, tensor) for name, tensor in target.named_weights() if name in sent)
        differing = Fingerprint(sent).differences(arrived) if dtypes else []
        if differing or target.weight_version != version:
            got = f"{len(differing)} of {len(sent)} weights that differ: {name_some(differing)}"
            raise WeightSyncError(
                f"weights of version {version}",
                got=got if differing else f"version {target.weight_version}",
                expected="in the rollout what the trainer sent",
            )


def _recorded(
    weights: NamedWeights, dtypes: dict[str, torch.dtype], sent: dict[str, str]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The stream in the target's dtypes; the fingerprint of each tensor is noted as it passes."""
    for name, tensor in weights:
        tensor = tensor.detach().to(dtypes.get(name, tensor.dtype))
        sent[name] = tensor_fingerprint(tensor)
        yield name, tensor
