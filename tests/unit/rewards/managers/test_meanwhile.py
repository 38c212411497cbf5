# SPDX-License-Identifier: Apache-2.0
"""Managers that grade while something else is done: the rewards, errors and metrics of those that are waited for."""

import numpy as np
import pytest
import torch

from quadriga.config import Config, CustomRewardFunctionConfig, RewardModelConfig
from quadriga.errors import RewardError
from quadriga.protocol import DataProto
from quadriga.rewards import Outcome, RewardManager, RewardOutput, load_reward_manager

CODE = """
def compute_score(solution_str, ground_truth, **kwargs):
    if solution_str == "b":
        raise LookupError("nothing to grade")
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}

def compute_scores(solution_strs, ground_truths, **kwargs):
    if "b" in solution_strs:
        raise LookupError("nothing to grade")
    return [compute_score(text, truth) for text, truth in zip(solution_strs, ground_truths)]
"""
BUFFER = {"max_resp_len": 2, "overlong_buffer_cfg": {"enable": True, "len": 1, "log": True}}
MANAGERS = {
    "naive": {},
    "dapo": {"reward_kwargs": BUFFER},
    "prime": {"reward_kwargs": {"num_processes": 2}},
    "batch": {},
}


class Letters:
    """A tokenizer whose tokens are letters: 0 is a, 1 is b, ..."""

    def batch_decode(self, token_ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return ["".join(chr(97 + token) for token in row) for row in token_ids]


def batch(*rows: int) -> DataProto:
    """An answer of one letter in each row."""
    responses = torch.tensor([[row, 0] for row in rows])
    attention = torch.tensor([[1, 1, 0]] * len(rows))
    columns = {
        "data_source": np.array(["x"] * len(rows), dtype=object),
        "reward_model": np.array([{"ground_truth": "c"}] * len(rows), dtype=object),
    }
    return DataProto.from_dict({"responses": responses, "attention_mask": attention}, columns)


@pytest.fixture(params=MANAGERS)
def manager(request, tmp_path):
    (tmp_path / "reward.py").write_text(CODE)
    function = "compute_scores" if request.param == "batch" else "compute_score"
    settings = RewardModelConfig(reward_manager=request.param, max_error_rate=0.4, num_workers=1)
    settings = settings.model_copy(update=MANAGERS[request.param])
    custom = CustomRewardFunctionConfig(path=str(tmp_path / "reward.py"), name=function)
    made = load_reward_manager(
        Config(reward_model=settings, custom_reward_function=custom), Letters()
    )
    yield made
    made.close()


def told(output: RewardOutput) -> tuple:
    return (
        output.scores.tolist(),
        {name: list(column) for name, column in output.extra.items()},
        output.metrics,
    )


def test_rewards_are_those_of_a_call(manager):
    assert isinstance(manager, RewardManager)
    data = batch(2, 0, 3, 2)
    grading = manager.begin(data)
    # Columns may change from here on: the answers were read.
    data.batch["responses"] = torch.zeros(4, 2)
    assert told(grading.result()) == told(manager(batch(2, 0, 3, 2)))


def test_an_error_has_the_words_of_a_call(manager):
    with pytest.raises(RewardError) as waited:
        manager(batch(1))
    grading = manager.begin(batch(1))
    with pytest.raises(RewardError) as joined:
        grading.result()
    assert str(joined.value) == str(waited.value)
    assert "nothing to grade" in str(joined.value)


def test_what_is_missing_is_said_at_the_start(manager):
    data = batch(2)
    del data.non_tensor_batch["data_source"]
    with pytest.raises(RewardError, match="data_source"):
        manager.begin(data)


def test_after_a_cancelled_grading_the_manager_grades(manager):
    manager.begin(batch(2, 0)).cancel()
    assert manager(batch(2, 0)).scores.sum(-1).tolist()[1] <= 0.0


def test_responses_without_an_outcome_are_graded_with_those_that_have_one(manager):
    """As a conversation that was graded early, beside rows that were not."""
    whole = manager(batch(2, 0, 2))
    graded = Outcome(0.25, {"length": 9}, "", "graded")
    output = manager.begin(batch(2, 0, 2), [None, graded, None]).result()
    assert output.scores[0].tolist() == whole.scores[0].tolist() == output.scores[2].tolist()
    assert output.extra["length"].tolist() == [1, 9, 1] and whole.extra["length"].tolist() == [
        1,
        1,
        1,
    ]
