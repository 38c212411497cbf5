# SPDX-License-Identifier: Apache-2.0
"""Shares of a pool's resources that Ray cannot give."""

import pytest

pytest.importorskip("ray")

from quadriga.errors import WorkerError
from quadriga.single_controller.ray import RayResourcePool, ResourcePoolManager


def test_groups_that_would_share_several_gpus_of_a_process() -> None:
    """Ray would give each process of the default's ten groups a fifth of one GPU."""
    expected = (
        r"max_colocate_count: got 10, with 2 GPUs per process, expected 1: .* one GPU, but not"
        r" parts of several\. Set max_colocate_count=1"
    )
    with pytest.raises(WorkerError, match=expected):
        RayResourcePool([1], use_gpu=True, num_devices=2)
    with pytest.raises(WorkerError, match=expected):
        ResourcePoolManager({"roll": [1]}, {"rollout": "roll"}, use_gpu=True, devices={"roll": 2})
    assert RayResourcePool([1], use_gpu=True, num_devices=2, max_colocate_count=1).use_gpu
    assert RayResourcePool([1], num_devices=2).device_on_nodes == [2]
