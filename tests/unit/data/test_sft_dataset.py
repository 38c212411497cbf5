# SPDX-License-Identifier: Apache-2.0
"""Conversation data sets: rows from files, lengths, and what is said of rows that are too long or wrong."""

from typing import Any

import pytest

from quadriga.config import DataConfig
from quadriga.data import MultiTurnSFTDataset, SFTDataset
from quadriga.errors import DataError


def chat(*contents: str) -> dict[str, Any]:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


@pytest.fixture
def data(tmp_path):
    """A section `data`: ten tokens a row."""
    return lambda **values: DataConfig(**({"max_length": 10, "cache_dir": str(tmp_path)} | values))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json"])
def test_a_row_is_padded_on_the_right_and_says_what_is_learned(write, data, tokenizer, name: str) -> None:
    row = MultiTurnSFTDataset(write(name, [chat("w1", "w2 w3")]), tokenizer, data())[0]
    assert {key: values.shape for key, values in row.items()} == dict.fromkeys(row, (10,))
    assert tokenizer.decode(row["input_ids"]).split() == [
        "<user>",
        "w1",
        "<assistant>",
        "w2",
        "w3",
        "<eos>",
        *["<pad>"] * 4,
    ]
    assert row["attention_mask"].tolist() == [1] * 6 + [0] * 4
    assert row["position_ids"].tolist() == [0, 1, 2, 3, 4, 5, 0, 0, 0, 0]
    assert row["loss_mask"].tolist() == [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]


@pytest.mark.parametrize("prompt", ["w1", [{"role": "user", "content": "w1"}]])
def test_one_turn_in_two_columns_is_the_same_row(write, data, tokenizer, prompt) -> None:
    single = SFTDataset(write("a.jsonl", [{"prompt": prompt, "response": "w2 w3"}]), tokenizer, data())[0]
    multi = MultiTurnSFTDataset(write("b.jsonl", [chat("w1", "w2 w3")]), tokenizer, data())[0]
    assert all(single[key].equal(multi[key]) for key in multi)


def test_only_the_response_of_two_columns_is_learned(write, data, tokenizer) -> None:
    rows = [{"prompt": chat("w1", "w2", "w3")["messages"], "response": "w4"}]
    row = SFTDataset(write("a.jsonl", rows), tokenizer, data())[0]
    assert tokenizer.decode(row["input_ids"][row["loss_mask"].bool()]) == "w4 <eos>"


def test_too_long_is_an_error_that_names_row_and_ways_out(write, data, tokenizer) -> None:
    file = write("a.jsonl", [chat("w1", "w2"), chat("w1 w1 w1 w1", "w2 w2 w2 w2")])
    with pytest.raises(
        DataError, match=r"a\.jsonl row 1: got 11 tokens, expected at most data\.max_length=10"
    ) as caught:
        MultiTurnSFTDataset(file, tokenizer, data())
    assert "filter_overlong" in str(caught.value) and "truncation" in str(caught.value)


def test_too_long_is_left_out_and_counted(write, data, tokenizer, capsys) -> None:
    file = write("a.jsonl", [chat("w1", "w2"), chat("w1 w1 w1 w1", "w2 w2 w2 w2")])
    assert len(MultiTurnSFTDataset(file, tokenizer, data(filter_overlong_prompts=True))) == 1
    assert "1 of 2 rows are over 10 tokens" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"at least one of at most data\.max_length=2"):
        MultiTurnSFTDataset(file, tokenizer, data(filter_overlong_prompts=True, max_length=2))


@pytest.mark.parametrize(("side", "kept"), [("left", "w1 <assistant> w2 <eos>"), ("right", "<user> w1 w1 <assistant>")])
def test_too_long_is_cut_at_the_side_that_is_named(write, data, tokenizer, side: str, kept: str) -> None:
    file = write("a.jsonl", [chat("w1 w1", "w2")])
    config = data(max_length=4, truncation=side)
    if side == "left":
        assert tokenizer.decode(MultiTurnSFTDataset(file, tokenizer, config)[0]["input_ids"]) == kept
    else:
        # The answer would be gone: a row that teaches nothing is no row.
        with pytest.raises(DataError, match="without a response among them"):
            MultiTurnSFTDataset(file, tokenizer, config)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": None, "id": 1}, "row 1: got no messages"),
        ({"messages": [{"role": "user", "content": "w1"}]}, "none of them by the assistant"),
        (chat("w1", ""), "row 1, message 1: got an empty turn"),
    ],
)
def test_a_bad_row_is_found_before_the_first_step(write, data, tokenizer, row, said: str) -> None:
    with pytest.raises(DataError, match=said):
        MultiTurnSFTDataset(write("a.jsonl", [chat("w1", "w2"), row]), tokenizer, data())


def test_a_response_that_is_no_text_is_refused(write, data, tokenizer) -> None:
    with pytest.raises(DataError, match="the response 7"):
        SFTDataset(write("a.jsonl", [{"prompt": "w1", "response": 7}]), tokenizer, data())


def test_a_missing_column_is_named_with_the_keys_that_name_columns(write, data, tokenizer) -> None:
    with pytest.raises(DataError, match=r"'messages' among them.*data.messages_key.*data.format"):
        MultiTurnSFTDataset(write("a.jsonl", [{"prompt": "w1", "response": "w2"}]), tokenizer, data())


def test_a_position_in_other_rows_is_refused(write, data, tokenizer) -> None:
    one = MultiTurnSFTDataset(write("a.jsonl", [chat("w1", "w2")]), tokenizer, data())
    other = MultiTurnSFTDataset(write("b.jsonl", [chat("w1", "w3")]), tokenizer, data())
    one.load_state_dict(one.state_dict())
    with pytest.raises(DataError, match="not the 1 rows of the checkpoint"):
        other.load_state_dict(one.state_dict())
