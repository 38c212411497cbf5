# SPDX-License-Identifier: Apache-2.0
"""What of vLLM's engine needs no vLLM: the list of a model's weights, and parcels of shared memory."""

import pytest
import torch
from torch import nn

from quadriga.errors import RolloutError, WeightSyncError
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.vllm.library import require_version
from quadriga.rollout.vllm.parcels import ParcelReader, ParcelWriter


class Tied(nn.Module):
    """Two names of one weight, and another weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.LayerNorm(3, bias=False)


@pytest.mark.parametrize("name", ["embed.weight", "head.weight"])
def test_a_tied_weight_is_complete_under_any_name(name: str) -> None:
    """One of its names is enough."""
    stream = [(name, torch.ones(5, 3)), ("norm.weight", torch.ones(3))]
    assert [one for one, _ in Manifest.of(Tied()).checked(stream)] == [name, "norm.weight"]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([("norm.weight", torch.ones(3))], "without 2 of 3 weights: embed.weight, head.weight"),
        ([("norm.weight", torch.ones(4))], r"weight norm.weight: got shape \(4,\), expected shape \(3,\)"),
        ([("bias", torch.ones(4))], "expected a weight of the rollout's model"),
    ],
)
def test_a_stream_that_is_not_the_models(stream: list, message: str) -> None:
    """Each way in which it can differ."""
    with pytest.raises(WeightSyncError, match=message):
        list(Manifest.of(Tied()).checked(stream))


def test_parcels_hold_no_more_than_the_block() -> None:
    """Every dtype arrives bit by bit; a weight that is larger than the block gets a parcel of its own."""
    weights = [
        ("a", torch.randn(100)),
        ("b", torch.randn(7, 9).to(torch.bfloat16)),
        ("c", torch.randn(40, 50)[:, ::2]),  # 4,000 bytes, not in one piece
        ("d", torch.arange(5, dtype=torch.int64)),
        ("scalar", torch.tensor(3.5)),
    ]
    sizes, arrived = [], {}
    reader = ParcelReader()
    with ParcelWriter(1000) as writer:
        for label in writer.pack(weights):
            sizes.append(len(label["entries"]))
            arrived |= dict(reader.open(label))
    reader.close()
    assert sizes == [2, 1, 2]
    for name, tensor in weights:
        assert arrived[name].dtype == tensor.dtype
        assert torch.equal(arrived[name], tensor)


@pytest.mark.parametrize("found", ["", "0.19.1", "0.29"])
def test_versions_that_are_refused(found: str) -> None:
    """None, and those that are too old: with what to install."""
    with pytest.raises(RolloutError, match=r"expected 0\.30 or newer\. pip install 'vllm>=0\.30'"):
        require_version(found)


def test_versions_that_are_taken() -> None:
    """The least one, and later ones whatever stands behind the numbers."""
    for found in ("0.30", "0.30.0", "0.32.0+cpu", "1.0rc1"):
        require_version(found)
