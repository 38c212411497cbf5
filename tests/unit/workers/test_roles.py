# SPDX-License-Identifier: Apache-2.0
"""What the roles' workers do alike."""

import pytest
import torch

from quadriga.config import ActorConfig, RolloutConfig
from quadriga.engines.micro_batches import MicroBatching
from quadriga.errors import ConfigError
from quadriga.workers.roles import choose_device, inference_pieces, passes


def test_device_by_name() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match=r"trainer\.device: got 'cuda:99'.*trainer\.device=auto"):
        choose_device("cuda:99")


def test_passes_count_prompts_times_answers() -> None:
    """Every step has shuffles of its own, and each of its epochs another one."""
    config = ActorConfig(ppo_mini_batch_size=4, ppo_epochs=3, ppo_micro_batch_size_per_gpu=2, shuffle=True)
    how = [passes(config, 5, share_prompts=True, global_step=step) for step in (1, 2)]
    assert (how[0].mini_batch_size, how[0].num_epochs) == (20, 3)
    assert how[0].micro == MicroBatching(2, config.ppo_max_token_len_per_gpu, True)
    seeds = [one.shuffle_seed + epoch for one in how for epoch in range(3)]
    assert len(set(seeds)) == 6


def test_no_shuffle_has_no_seed() -> None:
    assert passes(ActorConfig(), 1, share_prompts=True, global_step=1).shuffle_seed is None


@pytest.mark.parametrize(
    ("settings", "num_sequences"),
    [
        ({}, None),
        ({"log_prob_micro_batch_size_per_gpu": 3}, 3),
        ({"log_prob_micro_batch_size_per_gpu": 3, "log_prob_use_dynamic_bsz": True}, None),
    ],
)
def test_pieces_without_gradients(settings: dict, num_sequences: int | None) -> None:
    config = RolloutConfig(log_prob_max_token_len_per_gpu=99, **settings)
    assert inference_pieces(config, share_prompts=False) == MicroBatching(num_sequences, 99, False)
