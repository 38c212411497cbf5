# SPDX-License-Identifier: Apache-2.0
"""Reward managers that derive from verl's, on a batch; in runs they are shown in tests/e2e."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.config import Config, CustomRewardFunctionConfig, DataConfig, RewardModelConfig
from quadriga.errors import ConfigError, RewardError
from quadriga.protocol import DataProto
from quadriga.rewards import RewardManager, load_reward_manager

pytestmark = pytest.mark.usefixtures("verl_names")

FILE = """
from verl.experimental.reward_loop.reward_manager.dapo import DAPORewardManager as SingleDAPO
from verl.workers.reward_manager import DAPORewardManager


class Batch(DAPORewardManager):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        assert self.overlong_buffer_cfg.penalty_factor == 2.0  # verl's own files read it as an attribute


class Single(SingleDAPO):
    async def run_single(self, data):
        found = await super().run_single(data)
        assert self.config.reward_model.reward_kwargs.overlong_buffer_cfg.len == 2
        return found


class Text(SingleDAPO):
    async def run_single(self, data):
        return {"reward_score": "high"}


class Short(DAPORewardManager):
    def __call__(self, data, return_dict=False):
        return {**super().__call__(data, return_dict=True), "reward_extra_info": {"names": [1]}}


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    return {"score": 1.0, "length": len(solution_str)}
"""
BUFFER = {"enable": True, "len": 2, "penalty_factor": 2.0, "log": True}


class Letters:
    """A tokenizer: a letter for each token."""

    def batch_decode(self, token_ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["x" * len(row) for row in token_ids]


@pytest.fixture
def made(tmp_path: Path) -> Any:
    """`made(name, **buffer)`: a manager of the file."""
    (tmp_path / "mine.py").write_text(FILE)
    managers: list[RewardManager] = []

    def make(name: str, **buffer: Any) -> RewardManager:
        kwargs = {"max_resp_len": 4, "overlong_buffer_cfg": BUFFER | buffer}
        config = Config(
            reward_model=RewardModelConfig(
                reward_manager=f"{tmp_path / 'mine.py'}:{name}", reward_kwargs=kwargs
            ),
            custom_reward_function=CustomRewardFunctionConfig(path=str(tmp_path / "mine.py")),
            data=DataConfig(),
        )
        managers.append(load_reward_manager(config, Letters()))
        return managers[-1]

    yield make
    for manager in managers:
        manager.close()


def batch() -> DataProto:
    """Responses of 1, 2, 3 and 4 tokens."""
    lengths = torch.arange(1, 5)
    mask = torch.cat([torch.ones(4, 1), torch.arange(4) < lengths[:, None]], dim=1).long()
    columns = {"data_source": ["any"] * 4, "reward_model": [{"ground_truth": "5"}] * 4}
    arrays = {name: np.array(values, dtype=object) for name, values in columns.items()}
    tensors = {
        "prompts": torch.ones(4, 1).long(),
        "responses": torch.ones(4, 4).long(),
        "attention_mask": mask,
    }
    return DataProto.from_dict(tensors, arrays)


@pytest.mark.parametrize("name", ["Batch", "Single"])
def test_over_long_responses_cost(made: Callable[..., RewardManager], name: str) -> None:
    """From two tokens on: one more costs 1, two more cost 2; what the score function said comes along."""
    output = made(name)(batch())
    assert output.scores.sum(-1).tolist() == [1.0, 1.0, 0.0, -1.0]
    assert output.scores.ne(0).nonzero().tolist() == [[0, 0], [1, 1], [3, 3]]
    assert output.extra["length"].tolist() == [1, 2, 3, 4]
    assert output.extra["overlong"].tolist() == [False, False, True, True]
    assert output.metrics["reward/extra/overlong_reward"].value == -0.75
    with pytest.raises(
        ConfigError, match=r"overlong_buffer_cfg\.len: got 9, expected .* max_resp_len=4"
    ):
        made("Batch", len=9)(batch())


def test_what_is_no_reward(made: Callable[..., RewardManager]) -> None:
    with pytest.raises(
        RewardError, match=r"Text: got .*'high', expected a number.* expected a number for each"
    ):
        made("Text")(batch())
    with pytest.raises(
        RewardError, match=r"Short, reward_extra_info 'names': got 1 values, expected 4"
    ):
        made("Short")(batch())
