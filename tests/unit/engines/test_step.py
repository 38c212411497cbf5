# SPDX-License-Identifier: Apache-2.0
"""Learning rates at hand-computed steps, and how metrics are read."""

import pytest
import torch

from quadriga.config import OptimConfig
from quadriga.engines import step
from quadriga.engines.step import lr_at
from quadriga.observe.metrics import Metric


def rates(total: int, **options) -> list[float]:
    config = OptimConfig(lr=1.0, **options)
    return [lr_at(step, config, total) for step in range(1, total + 1)]


def test_constant_with_warmup() -> None:
    assert rates(5, lr_warmup_steps=3) == pytest.approx([1 / 3, 2 / 3, 1, 1, 1])


def test_steps_counted_from_zero() -> None:
    zero = {"zero_indexed_step": True}
    # A schedule of its own length, whenever the run ends.
    assert (
        lr_at(5, OptimConfig(lr=1.0, lr_scheduler_type="linear", total_training_steps=10), 5) == 0.5
    )
    assert rates(5, lr_warmup_steps=3, **zero) == pytest.approx([0, 1 / 3, 2 / 3, 1, 1])
    assert rates(2, **zero) == [1, 1]
    assert rates(4, lr_scheduler_type="cosine", **zero) == pytest.approx(
        [1, 0.8535534, 0.5, 0.1464466]
    )


def test_warmup_as_a_share_of_the_run() -> None:
    assert rates(10, lr_warmup_steps_ratio=0.2)[:3] == pytest.approx([0.5, 1, 1])


def test_linear_ends_at_the_minimum() -> None:
    assert rates(4, lr_scheduler_type="linear", min_lr_ratio=0.2) == pytest.approx(
        [0.8, 0.6, 0.4, 0.2]
    )


def test_cosine_passes_the_middle_and_ends_at_the_minimum() -> None:
    result = rates(4, lr_scheduler_type="cosine", min_lr_ratio=0.1)
    assert result[1] == pytest.approx(0.55)
    assert result[3] == pytest.approx(0.1)


def test_beyond_the_end_the_rate_stays() -> None:
    assert lr_at(9, OptimConfig(lr=1.0, lr_scheduler_type="linear"), 4) == 0.0


def test_metrics_that_are_still_on_a_device_are_read_together() -> None:
    """Values and weights find their places again. Does not show that an accelerator is waited for once."""
    parts = [{"a": Metric(1.0, weight=2.0), "b": Metric(3.0, "sum")}, {"a": Metric(5.0, "max")}]
    object.__setattr__(parts[0]["a"], "weight", torch.tensor(7))
    object.__setattr__(parts[1]["a"], "value", torch.tensor(0.1))
    read = step._tensors_to_numbers(parts)
    assert read == [
        {"a": Metric(1.0, weight=7.0), "b": Metric(3.0, "sum")},
        {"a": Metric(torch.tensor(0.1).item(), "max")},
    ]
