# SPDX-License-Identifier: Apache-2.0
"""Several rewards, each normalised on its own: by hand, what GRPO cannot tell apart, and what graders get wrong."""

import math

import pytest
import torch

from quadriga.algorithms.advantages import gdpo, grpo
from quadriga.errors import ConfigError

MASK = torch.tensor([[1, 1], [1, 0], [1, 1], [0, 0]])
REWARDS = torch.tensor([[0.0, 1.0], [0.0, 0.0], [0.0, 2.0], [0.0, 0.0]], dtype=torch.float64)
EXTRA = [{"format": 0.0}, {"format": 1.0}, {"format": 3}, {"format": True}]
UID = ["a", "a", "b", "b"]


def test_golden_values() -> None:
    """In pairs a difference of d has the deviation d / sqrt 2, so each reward gives +-1 / sqrt 2 = +-0.7071.

    Scores (1, 0) and (2, 0): (+, -), (+, -); formats (0, 1) and (3, 1): (-, +), (+, -), weighted by 0.5.
    Sums 0.35355 (1, -1, 3, -3). The last answer has no token: of 1, -1 and 3 the mean is 1 and the deviation 2.
    """
    advantages, returns = gdpo(
        REWARDS,
        MASK,
        UID,
        EXTRA,
        gdpo_reward_keys=["score", "format"],
        gdpo_reward_weights=[1.0, 0.5],
        epsilon=0.0,
    )
    expected = [[0, 0], [-1, 0], [1, 1], [0, 0]]
    torch.testing.assert_close(
        advantages, torch.tensor(expected, dtype=torch.float64), rtol=1e-6, atol=1e-6
    )
    assert torch.equal(advantages, returns)


def test_equal_sums_are_told_apart() -> None:
    """(1, 0), (0, 1), (1, 1) in one group, the second reward rarer in the other: GRPO of sums gives the first two one
    advantage, this one does not."""
    uid, mask = ["a"] * 4, torch.ones(4, 1)
    first, second = [1.0, 0.0, 1.0, 1.0], [0.0, 1.0, 0.0, 0.0]
    sums = torch.tensor([[a + b] for a, b in zip(first, second, strict=True)], dtype=torch.float64)
    assert not grpo(sums, mask, uid)[0].any()
    extra = [{"x": a, "y": b} for a, b in zip(first, second, strict=True)]
    advantages, _ = gdpo(
        sums, mask, uid, extra, gdpo_reward_keys=["x", "y"], gdpo_reward_weights=[1.0, 2.0]
    )
    assert advantages[1, 0] > 0 > advantages[0, 0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"gdpo_reward_keys": ["fromat"]},
            r"got 'fromat', expected one of score, format.* Did you mean 'format'",
        ),
        ({"gdpo_reward_keys": []}, "a list of at least one name"),
        ({"gdpo_reward_keys": "format"}, "a list of at least one name"),
        (
            {"gdpo_reward_keys": ["format"], "gdpo_reward_weights": [1, 2]},
            "as many weights or none",
        ),
        ({"gdpo_reward_keys": ["words"]}, "'words', which is not a number"),
        ({"gdpo_reward_keys": ["odd"]}, "'odd', which is not finite for 1 responses"),
    ],
)
def test_refused(options: dict, message: str) -> None:
    """The key, and what the grader gives."""
    extra = [
        {**row, "words": "well done", "odd": math.nan if not at else 1}
        for at, row in enumerate(EXTRA)
    ]
    with pytest.raises(ConfigError, match=rf"(?s)gdpo_reward_keys: .*{message}"):
        gdpo(
            REWARDS,
            MASK,
            UID,
            extra if "words" in str(options) or "odd" in str(options) else EXTRA,
            **options,
        )
