# SPDX-License-Identifier: Apache-2.0
"""What score functions get to read of a batch."""

import numpy as np
import pytest
import torch

from quadriga.errors import RewardError
from quadriga.protocol import DataProto
from quadriga.rewards.samples import read_samples

END = 0


class Letters:
    """A tokenizer of one letter a token; 0 is the special token that ends a text."""

    def batch_decode(self, token_ids, skip_special_tokens):
        assert skip_special_tokens
        return ["".join(chr(token) for token in row if token != END) for row in token_ids]


def batch(texts, response_length=6, **columns):
    """Responses that end in the special token where there is room, behind prompts of padding and two tokens."""
    responses = torch.full((len(texts), response_length), ord("#"))
    mask = torch.zeros(len(texts), 3 + response_length, dtype=torch.long)
    mask[:, 1:3] = 1
    for row, text in enumerate(texts):
        token_ids = [*map(ord, text), END][:response_length] if text else []
        responses[row, : len(token_ids)] = torch.tensor(token_ids, dtype=torch.long)
        mask[row, 3 : 3 + len(token_ids)] = 1
    truths = np.array([{"ground_truth": f"truth {row}"} for row in range(len(texts))], dtype=object)
    sources = np.array(["mine"] * len(texts), dtype=object)
    non_tensors = {"data_source": sources, "reward_model": truths, **columns}
    return DataProto.from_dict(tensors={"responses": responses, "attention_mask": mask}, non_tensors=non_tensors)


def test_only_valid_tokens_are_read_and_special_ones_left_out():
    extra_info = np.array([{"index": 5}, None, {"index": 7}], dtype=object)
    samples = read_samples(batch(["ab", "", "abcdef"], extra_info=extra_info), Letters(), "data_source")
    assert [row["solution_str"] for row in samples.rows] == ["ab", "", "abcdef"]
    assert samples.lengths.tolist() == [3, 0, 6]
    assert samples.response_length == 6
    assert [row["extra_info"] for row in samples.rows] == [{"index": 5}, {}, {"index": 7}]
    assert [row["ground_truth"] for row in samples.rows] == ["truth 0", "truth 1", "truth 2"]


def test_what_a_tool_said_is_read_too():
    data = batch(["abc"])
    data.batch["response_mask"] = torch.tensor([[1, 0, 0, 1, 0, 0]])
    assert read_samples(data, Letters(), "data_source").rows[0]["solution_str"] == "abc"


def test_the_column_of_the_data_source_has_the_name_of_the_configuration():
    origin = np.array(["theirs"], dtype=object)
    assert read_samples(batch(["a"], origin=origin), Letters(), "origin").rows[0]["data_source"] == "theirs"
    with pytest.raises(
        RewardError, match=r"column origin: got only the columns data_source, reward_model, .*reward_fn_key"
    ):
        read_samples(batch(["a"]), Letters(), "origin")


@pytest.mark.parametrize(
    ("reward_model", "words"),
    [(None, "got None"), ({"style": "rule"}, "got a dict with style"), ("5", "got '5'")],
)
def test_a_row_without_a_ground_truth_is_named(reward_model, words):
    column = np.array([{"ground_truth": "a"}, reward_model], dtype=object)
    with pytest.raises(RewardError, match=f"reward_model of row 1: {words}, expected a dict with 'ground_truth'"):
        read_samples(batch(["a", "b"], reward_model=column), Letters(), "data_source")


def test_a_batch_without_responses_is_refused():
    data = batch(["a"]).select(batch_keys=["attention_mask"])
    with pytest.raises(RewardError, match="responses"):
        read_samples(data, Letters(), "data_source")


def test_an_empty_batch_has_no_rows():
    samples = read_samples(batch(["a"])[:0], Letters(), "data_source")
    assert (samples.rows, len(samples.lengths)) == ([], 0)


def test_score_functions_hear_how_a_conversation_went():
    data = batch(["a", "b"])
    assert all("num_turns" not in row["extra_info"] for row in read_samples(data, Letters(), "data_source").rows)
    data.non_tensor_batch |= {
        "num_turns": np.array([3, 1], dtype=object),
        "tool_rewards": np.array([{"add": 0.5}, {}], dtype=object),
    }
    data.non_tensor_batch["extra_info"] = np.array([{"index": 7}, None], dtype=object)
    rows = read_samples(data, Letters(), "data_source").rows
    assert rows[0]["extra_info"] == {"index": 7, "num_turns": 3, "tool_rewards": {"add": 0.5}}
    assert rows[1]["extra_info"] == {"num_turns": 1, "tool_rewards": {}}
