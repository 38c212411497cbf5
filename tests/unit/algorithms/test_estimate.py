# SPDX-License-Identifier: Apache-2.0
"""Calling an estimator on a batch: the fields it names, and the answers that are refused."""

import pytest
import torch

from quadriga.algorithms.registry import estimate_advantages
from quadriga.errors import ConfigError

FIELDS = {"response_mask": torch.tensor([[1, 1, 0], [1, 0, 0]]), "scores": torch.tensor([2.0, 3.0])}


def test_fields_by_name_and_mask() -> None:
    """The function gets what its parameters are called after; its result is 0 outside the mask."""

    def estimator(scores, response_mask):
        spread = scores[:, None].expand(response_mask.shape)
        return spread, spread + 1

    advantages, returns = estimate_advantages(estimator, FIELDS)
    assert advantages.tolist() == [[2, 2, 0], [3, 0, 0]]
    assert returns.tolist() == [[3, 3, 0], [4, 0, 0]]


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (lambda reward, response_mask: reward, "reads reward, expected fields of the batch: response_mask, scores"),
        (lambda scores: scores, "got a Tensor, expected two tensors"),
        (lambda scores: (scores, scores), r"advantages of shape \[2\], expected \[2, 3\]"),
        (lambda response_mask: (response_mask / 0, response_mask), "advantages that are not finite in 2 of 2"),
    ],
)
def test_refused(estimator, message: str) -> None:
    """Each error names the key and the way out."""
    with pytest.raises(ConfigError, match=f"algorithm.adv_estimator: .*{message}"):
        estimate_advantages(estimator, FIELDS)
