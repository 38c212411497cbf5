# SPDX-License-Identifier: Apache-2.0
"""The list of a model's weights, and versions of third-party engines."""

import pytest
import torch
from torch import nn

from quadriga.errors import RolloutError, WeightSyncError
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.vllm.library import require_version


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
    assert [one for one, _ in Manifest.of(Tied()).check_stream(stream)] == [name, "norm.weight"]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([("norm.weight", torch.ones(3))], "without 2 of 3 weights: embed.weight, head.weight"),
        (
            [("norm.weight", torch.ones(4))],
            r"weight norm.weight: got shape \(4,\), expected shape \(3,\)",
        ),
        ([("bias", torch.ones(4))], "expected a weight of the rollout's model"),
    ],
)
def test_a_stream_that_is_not_the_models(stream: list, message: str) -> None:
    """Each way in which it can differ."""
    with pytest.raises(WeightSyncError, match=message):
        list(Manifest.of(Tied()).check_stream(stream))


@pytest.mark.parametrize("found", ["", "0.19.1", "0.29"])
def test_versions_that_are_refused(found: str) -> None:
    """None, and those that are too old: with what to install."""
    with pytest.raises(
        RolloutError, match=r"expected 0\.30 or newer\. pip install 'vllm>=0\.30,<0\.34'"
    ):
        require_version(found)


def test_versions_that_are_taken() -> None:
    """The least one, and later ones whatever stands behind the numbers."""
    for found in ("0.30", "0.30.0", "0.32.0+cpu", "1.0rc1"):
        require_version(found)
