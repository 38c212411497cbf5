# SPDX-License-Identifier: Apache-2.0
"""Pass@k GRPO by hand and against sorting."""

import statistics

import torch

from quadriga.algorithms.advantages.grpo_passk import grpo_passk


def test_golden_values() -> None:
    """The best of 1, 3, 4 leads by 1; two that share the best place lead by nothing; 5 is alone."""
    scores = torch.tensor([1.0, 4.0, 3.0, 2.0, 2.0, 5.0])
    uid = ["a", "a", "a", "b", "b", "c"]
    advantages, _ = grpo_passk(
        scores[:, None], torch.ones(6, 1), uid, norm_adv_by_std_in_grpo=False
    )
    assert advantages[:, 0].tolist() == [0.0, 1.0, 0.0, 0.0, 0.0, 5.0]
    scaled, _ = grpo_passk(scores[:, None], torch.ones(6, 1), uid)
    torch.testing.assert_close(scaled[1, 0], torch.tensor(1 / 1.5275252), rtol=1e-5, atol=0)


def test_equals_the_slow_reference(batch) -> None:
    """Sort each group and compare its two best."""
    advantages, _ = grpo_passk(batch.rewards, batch.mask, batch.uid, epsilon=0.0)
    for row, score in enumerate(batch.scores):
        group = sorted(batch.scores[other] for other in batch.group(row))
        lead = group[-1] - group[-2] if len(group) > 1 else score
        deviation = statistics.stdev(group) if len(group) > 1 else 1.0
        expected = lead / deviation if score == group[-1] else 0.0
        torch.testing.assert_close(advantages[row], expected * batch.mask[row].double())
