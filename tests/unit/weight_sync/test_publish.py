# SPDX-License-Identifier: Apache-2.0
"""Published weights arrive, or the error names those that did not."""

from collections.abc import Iterable

import pytest
import torch

from quadriga.errors import WeightSyncError
from quadriga.weight_sync import CopiedWeights, Fingerprint, SharedWeights, fingerprint


class Rollout:
    """Holds weights by name; forgets to copy those named in `deaf_to`."""

    def __init__(self, weights: dict[str, torch.Tensor], deaf_to: tuple[str, ...] = ()) -> None:
        self.weights, self.deaf_to, self.weight_version = weights, deaf_to, 0

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        for name, tensor in weights:
            if name not in self.deaf_to:
                self.weights[name].copy_(tensor)
        self.weight_version = version

    def named_weights(self) -> Iterable[tuple[str, torch.Tensor]]:
        return self.weights.items()

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.named_weights())


def _weights(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.randn(3, 4, generator=generator).to(dtype)
        for name in ("embed", "layer", "head")
    }


def test_shared_weights_are_the_same_memory() -> None:
    """Views of the same memory pass, under the target's version; a copy is named."""
    weights = _weights()
    target = Rollout({name: tensor.detach() for name, tensor in weights.items()})
    SharedWeights().publish(weights.items(), target, version=3)
    assert target.weight_version == 3
    target.weights["layer"] = target.weights["layer"].clone()
    with pytest.raises(
        WeightSyncError, match="1 of 3 weights that are not the trainer's own: layer,"
    ):
        SharedWeights().publish(weights.items(), target, version=4)
    assert target.weight_version == 3


def test_shared_weights_may_be_tied() -> None:
    """A head that is the embedding may come under one name only; a weight that never came is named."""
    weights = _weights()
    target = Rollout({**weights, "tied": weights["embed"]})
    SharedWeights().publish(weights.items(), target, version=1)
    target.weights["other"] = torch.zeros(1)
    with pytest.raises(WeightSyncError, match="own: other,"):
        SharedWeights().publish(weights.items(), target, version=2)


def test_in_process_weights_are_copied() -> None:
    """The target holds the same values in its own memory and dtype."""
    weights, target = (
        _weights(),
        Rollout({name: torch.zeros(3, 4).bfloat16() for name in _weights()}),
    )
    CopiedWeights().publish(weights.items(), target, version=2)
    assert target.weight_version == 2
    for name, tensor in weights.items():
        assert torch.equal(target.weights[name], tensor.bfloat16())


def test_a_weight_that_did_not_arrive_is_named() -> None:
    """Silence of the target does not pass for success."""
    target = Rollout({name: torch.zeros(3, 4) for name in _weights()}, deaf_to=("head", "layer"))
    with pytest.raises(WeightSyncError, match="2 of 3 weights that differ: head, layer"):
        CopiedWeights().publish(_weights().items(), target, version=2)


def test_shared_weights_that_were_written_to_are_not_those_of_the_version() -> None:
    """An update changes the rollout's weights at once: they must be published before the next generation."""
    weights = {name: torch.nn.Parameter(tensor) for name, tensor in _weights().items()}
    target, sync = (
        Rollout({name: tensor.detach() for name, tensor in weights.items()}),
        SharedWeights(),
    )
    sync.publish(weights.items(), target, version=3)
    sync.verify(target, 3)
    with pytest.raises(WeightSyncError, match="got version 3, expected version 4"):
        sync.verify(target, 4)
    with torch.no_grad():
        weights["layer"].add_(1)
    with pytest.raises(WeightSyncError, match="1 of 3 weights that were written to since: layer,"):
        sync.verify(target, 3)
    sync.publish(weights.items(), target, version=4)
    sync.verify(target, 4)


def test_copied_weights_are_compared_whenever_it_is_asked() -> None:
    """A number that changes in the rollout's copy is seen; what the trainer does with its own is not."""
    weights, target = _weights(), Rollout({name: torch.zeros(3, 4) for name in _weights()})
    sync = CopiedWeights()
    sync.publish(weights.items(), target, version=2)
    weights["embed"].zero_()
    sync.verify(target, 2)
    target.weights["head"][0, 0] += 1
    with pytest.raises(WeightSyncError, match="1 of 3 weights that differ: head,"):
        sync.verify(target, 2)


def test_a_target_that_was_not_given_all_has_no_version() -> None:
    """It refuses to generate, whatever it has set itself."""
    target = Rollout({name: torch.zeros(3, 4) for name in _weights()}, deaf_to=("head",))
    with pytest.raises(WeightSyncError):
        CopiedWeights().publish(_weights().items(), target, version=2)
    assert target.weight_version == -1
