# SPDX-License-Identifier: Apache-2.0
"""A batch of answers and what graders said of it, without a model."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from quadriga.protocol import DataProto
from quadriga.rewards import RewardOutput


class Letters:
    """A tokenizer whose tokens are the letters: 1 is a, 2 is b; 0 pads, 9 is special."""

    def decode(self, ids: torch.Tensor, skip_special_tokens: bool = False) -> str:
        return "".join(
            chr(96 + int(i)) for i in ids if not (skip_special_tokens and int(i) in (0, 9))
        )


@pytest.fixture
def tokenizer() -> Letters:
    return Letters()


@pytest.fixture
def answers() -> DataProto:
    """Prompt "a" with the answers "bc" (and a special token) and "b", prompt "ab" with the answer "c"."""
    rows = torch.tensor([[0, 1, 2, 3, 9], [0, 1, 2, 0, 0], [1, 2, 3, 0, 0]])
    attention = torch.tensor([[0, 1, 1, 1, 1], [0, 1, 1, 0, 0], [1, 1, 1, 0, 0]])
    truths = [{"ground_truth": "bc"}, {"ground_truth": "bc"}, None]
    return DataProto.from_dict(
        tensors={
            "prompts": rows[:, :2],
            "responses": rows[:, 2:],
            "input_ids": rows,
            "attention_mask": attention,
            "response_mask": attention[:, 2:],
        },
        non_tensors={
            "uid": np.array(["p", "p", "q"], dtype=object),
            "data_source": np.array(["x", "x", "y"], dtype=object),
            "reward_model": np.array(truths, dtype=object),
        },
    )


@pytest.fixture
def graded() -> Callable[..., RewardOutput]:
    """`graded(scores, **extra)`: the score of each answer at its first token."""

    def build(scores: list[float], **extra: list[object]) -> RewardOutput:
        columns = {}
        for name, values in extra.items():
            columns[name] = np.empty(len(values), dtype=object)
            columns[name][:] = values
        return RewardOutput(
            torch.tensor(scores)[:, None] * torch.tensor([[1.0, 0.0, 0.0]]), columns, {}
        )

    return build
