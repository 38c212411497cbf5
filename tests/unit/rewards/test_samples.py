# SPDX-License-Identifier: Apache-2.0
"""What a grader is given of each response, and how outcomes become rewards, extras and metrics."""

import logging

import numpy as np
import pytest
import torch

from quadriga.errors import RewardError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards.outcome import Outcome, failure
from quadriga.rewards.samples import Samples, allowed_failures, collect, read_samples
from quadriga.rewards.scoring import ScoreFunction

END = 0


class Letters:
    """A tokenizer of one letter a token; 0 is the special token that ends a text."""

    def batch_decode(self, token_ids, skip_special_tokens):
        end = "" if skip_special_tokens else "<end>"
        return ["".join(end if token == END else chr(token) for token in row) for row in token_ids]


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
    return DataProto.from_dict(
        tensors={"responses": responses, "attention_mask": mask}, non_tensors=non_tensors
    )


def test_only_valid_tokens_are_read_and_special_ones_left_out():
    extra_info = np.array([{"index": 5}, None, {"index": 7}], dtype=object)
    samples = read_samples(
        batch(["ab", "", "abcdef"], extra_info=extra_info), Letters(), "data_source"
    )
    assert [row["solution_str"] for row in samples.rows] == ["ab", "", "abcdef"]
    assert samples.lengths.tolist() == [3, 0, 6]
    assert samples.response_length == 6
    assert [row["extra_info"] for row in samples.rows] == [{"index": 5}, {}, {"index": 7}]
    assert [row["ground_truth"] for row in samples.rows] == ["truth 0", "truth 1", "truth 2"]


def test_what_a_tool_said_is_read_by_users_functions_and_not_by_built_in_graders():
    data = batch(["abcd"])
    data.batch["response_mask"] = torch.tensor([[1, 0, 0, 1, 1, 0]])
    messages = [{"role": "assistant", "content": "a"}, {"role": "tool", "content": "bc"}]
    data.non_tensor_batch["solution_messages"] = object_array([messages])
    (row,) = read_samples(data, Letters(), "data_source").rows
    assert row["solution_str"] == "abcd"
    assert ScoreFunction().arguments_of(row)["solution_str"] == "a\nd"
    users = ScoreFunction("pkg://json", "loads").arguments_of(row)
    assert (users["solution_str"], users["solution_messages"]) == ("abcd", messages)
    assert users["solution_with_special_tokens"] == "abcd<end>"


def test_without_a_mask_or_with_one_run_all_read_the_same():
    data = batch(["abc"])
    (row,) = read_samples(data, Letters(), "data_source").rows
    assert ScoreFunction().arguments_of(row)["solution_str"] == "abc"
    data.batch["response_mask"] = torch.tensor([[1, 1, 1, 1, 0, 0]])
    (row,) = read_samples(data, Letters(), "data_source").rows
    assert ScoreFunction().arguments_of(row)["solution_str"] == "abc"


def test_the_column_of_the_data_source_has_the_name_of_the_configuration():
    origin = np.array(["theirs"], dtype=object)
    assert (
        read_samples(batch(["a"], origin=origin), Letters(), "origin").rows[0]["data_source"]
        == "theirs"
    )
    with pytest.raises(
        RewardError,
        match=r"column origin: got only the columns .*data_source, .*reward_model, .*reward_fn_key",
    ):
        read_samples(batch(["a"]), Letters(), "origin")


@pytest.mark.parametrize(
    ("reward_model", "words"),
    [
        (None, "got None"),
        ({"style": "rule"}, "got a dict with style"),
        ("5", "got '5'"),
        ({"ground_truth": float("nan")}, "got the ground truth NaN"),
    ],
)
def test_a_row_without_a_ground_truth_is_named(reward_model, words):
    """By its place in its file; without one, by that in the batch."""
    column = np.array([{"ground_truth": "a"}, reward_model], dtype=object)
    said = f"column 'reward_model': {words}, expected a dict with 'ground_truth'"
    with pytest.raises(RewardError, match=f"^row 1 of the batch, {said}"):
        read_samples(batch(["a", "b"], reward_model=column), Letters(), "data_source")
    places = np.array(["t.jsonl row 2", "t.jsonl row 5"], dtype=object)
    with pytest.raises(RewardError, match=rf"^t\.jsonl row 5, {said}"):
        read_samples(
            batch(["a", "b"], reward_model=column, source_row=places), Letters(), "data_source"
        )


def test_a_batch_without_responses_is_refused():
    data = batch(["a"]).select(batch_keys=["attention_mask"])
    with pytest.raises(RewardError, match="responses"):
        read_samples(data, Letters(), "data_source")


def test_an_empty_batch_has_no_rows():
    samples = read_samples(batch(["a"])[:0], Letters(), "data_source")
    assert (samples.rows, len(samples.lengths)) == ([], 0)


def test_score_functions_hear_how_a_conversation_went():
    data = batch(["a", "b"])
    assert all(
        "num_turns" not in row["extra_info"]
        for row in read_samples(data, Letters(), "data_source").rows
    )
    data.non_tensor_batch |= {
        "num_turns": np.array([3, 1], dtype=object),
        "tool_rewards": np.array([{"add": 0.5}, {}], dtype=object),
    }
    data.non_tensor_batch["extra_info"] = np.array([{"index": 7}, None], dtype=object)
    rows = read_samples(data, Letters(), "data_source").rows
    assert rows[0]["extra_info"] == {"index": 7, "num_turns": 3, "tool_rewards": {"add": 0.5}}
    assert rows[1]["extra_info"] == {"num_turns": 1, "tool_rewards": {}}


def samples(*lengths, response_length=4):
    rows = [{"data_source": f"source {row}"} for row in range(len(lengths))]
    places = [f"row {row} of the batch" for row in range(len(lengths))]
    return Samples(rows, torch.tensor(lengths, dtype=torch.int64), response_length, places)


def graded(score, **extra):
    return Outcome(score, extra, "", "graded")


def test_the_score_stands_at_the_last_valid_token():
    output = collect(
        samples(1, 3, 4, 0), [graded(0.5), graded(-1.0), graded(2.0), graded(0.25)], 0.0
    )
    expected = [[0.5, 0, 0, 0], [0, 0, -1, 0], [0, 0, 0, 2], [0.25, 0, 0, 0]]
    assert output.scores.dtype == torch.float32
    torch.testing.assert_close(output.scores, torch.tensor(expected))
    assert output.metrics["reward/error_rate"].value == 0


def test_extras_are_columns_with_gaps():
    outcomes = [
        graded(1.0, acc=True, pred="5"),
        graded(0.0, parts=[1, 2]),
        graded(0.0, acc=False, pred=None),
    ]
    output = collect(samples(1, 1, 1), outcomes, 0.0)
    assert output.extra["acc"].tolist() == [True, None, False]
    assert output.extra["pred"].tolist() == ["5", None, None]
    assert output.extra["parts"].tolist() == [None, [1, 2], None]
    assert output.extra["reward_error"].tolist() == ["", "", ""]
    assert all(column.shape == (3,) for column in output.extra.values())
    # The mean of two values out of three, and none for texts and lists.
    metric = output.metrics["reward/extra/acc"]
    assert (metric.value, metric.weight) == (0.5, 2.0)
    assert "reward/extra/pred" not in output.metrics and "reward/extra/parts" not in output.metrics


def test_ungradable_responses_are_counted_and_are_no_failures():
    outcomes = [graded(-1.0, ungradable="too many digits"), graded(1.0, ungradable=""), graded(0.0)]
    output = collect(samples(1, 1, 1), outcomes, 0.0)
    assert output.metrics["reward/ungradable"].value == 1
    assert output.metrics["reward/errors"].value == 0
    assert output.scores.sum(dim=1).tolist() == [-1, 1, 0]


def test_failures_are_counted_kept_and_said(caplog):
    outcomes = [
        graded(1.0),
        failure("raised", "Traceback: bad"),
        failure("timeout", "too slow"),
        graded(1.0),
    ]
    with caplog.at_level(logging.WARNING):
        output = collect(samples(1, 1, 1, 1), outcomes, 0.5)
    assert output.scores.sum(dim=1).tolist() == [1, 0, 0, 1]
    assert output.extra["reward_error"].tolist() == ["", "Traceback: bad", "too slow", ""]
    values = {name: metric.value for name, metric in output.metrics.items()}
    assert values == {
        "reward/errors": 2,
        "reward/timeouts": 1,
        "reward/ungradable": 0,
        "reward/error_rate": 0.5,
    }
    assert output.metrics["reward/error_rate"].weight == 4
    assert (
        "2 of 4 samples could not be graded and count as 0. The first, row 1 of the batch, of data source source 1"
        in caplog.text
    )


def test_too_many_failures_stop_the_run_with_the_first_traceback():
    outcomes = [
        graded(1.0),
        failure("raised", "Traceback:\n  KeyError: 'x'"),
        failure("invalid", "returned None"),
    ]
    with pytest.raises(RewardError) as caught:
        collect(samples(1, 1, 1), outcomes, 0.5)
    message = str(caught.value)
    assert (
        "2 of 3 samples could not be graded, expected at most 50% (reward_model.max_error_rate)"
        in message
    )
    assert message.endswith(
        "The first, row 1 of the batch, of data source source 1: Traceback:\n  KeyError: 'x'"
    )


def test_a_round_that_stopped_early_says_so():
    outcomes = [
        failure("skipped", "not graded"),
        failure("timeout", "slow"),
        failure("timeout", "slow"),
    ]
    with pytest.raises(RewardError, match=r"2 of 3 .*\(grading stopped there\).*row 1"):
        collect(samples(1, 1, 1), outcomes, 0.5)


@pytest.mark.parametrize(
    ("num_samples", "rate", "allowed"),
    [(4, 0.5, 2), (5, 0.5, 2), (100, 0.29, 29), (3, 0.0, 0), (3, 1.0, 3), (0, 0.5, 0)],
)
def test_the_share_is_a_whole_number_of_samples(num_samples, rate, allowed):
    assert allowed_failures(num_samples, rate) == allowed


@pytest.mark.parametrize("name", ["reward_error", "uid", "data_source"])
def test_an_extra_cannot_replace_a_column_of_the_batch(name):
    with pytest.raises(RewardError, match=f"got {name} in the dict it returned"):
        collect(samples(1), [graded(1.0, **{name: 1})], 0.0)


def test_an_empty_batch_and_empty_responses():
    assert collect(samples(), [], 0.0).scores.shape == (0, 4)
    assert collect(samples(0, response_length=0), [graded(1.0)], 0.0).scores.shape == (1, 0)
