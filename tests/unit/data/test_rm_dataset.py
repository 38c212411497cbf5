# SPDX-License-Identifier: Apache-2.0
"""Preference pairs: their forms, and pairs without anything to learn."""

import pytest

from quadriga.config import DataConfig
from quadriga.data import RMDataset
from quadriga.errors import DataError


def said(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.fixture
def pairs(write, tokenizer, tmp_path):
    """The data set of some rows, ten tokens a sequence."""
    return lambda *rows, **values: RMDataset(
        write("pairs.jsonl", list(rows)),
        tokenizer,
        DataConfig(**({"max_length": 10, "cache_dir": str(tmp_path)} | values)),
    )


FORMS = [
    {"prompt": "w1", "chosen": "w2", "rejected": "w3 w4"},
    {"prompt": [said("user", "w1")], "chosen": "w2", "rejected": "w3 w4"},
    {"prompt": "w1", "chosen": [said("assistant", "w2")], "rejected": [said("assistant", "w3 w4")]},
    {
        "chosen": [said("user", "w1"), said("assistant", "w2")],
        "rejected": [said("user", "w1"), said("assistant", "w3 w4")],
    },
    {
        "prompt": "w1",
        "chosen": [said("user", "w1"), said("assistant", "w2")],
        "rejected": [said("user", "w1"), said("assistant", "w3 w4")],
    },
]


@pytest.mark.parametrize("row", FORMS)
def test_every_form_is_the_same_pair(pairs, tokenizer, row) -> None:
    item = pairs(row)[0]
    texts = [
        tokenizer.decode(ids[mask.bool()])
        for ids, mask in zip(item["input_ids"], item["attention_mask"], strict=True)
    ]
    assert texts == ["<user> w1 <assistant> w2 <eos>", "<user> w1 <assistant> w3 w4 <eos>"]
    assert item["input_ids"].shape == (2, 10) and int(item["num_prompt_tokens"]) == 3


@pytest.mark.parametrize(
    ("row", "error"),
    [
        (
            {"prompt": "w1", "chosen": "w2", "rejected": "w2"},
            "row 0: got two equal responses, ' w2 '",
        ),
        (
            {"prompt": "w1", "chosen": "w2", "rejected": ""},
            "rejected, message 1: got an empty turn",
        ),
        ({"prompt": "w1", "chosen": None, "rejected": "w2"}, "chosen: got the chosen None"),
        ({"chosen": "w1", "rejected": "w2"}, "without a prompt"),
        (
            {
                "chosen": [said("user", "w1"), said("assistant", "w2")],
                "rejected": [said("user", "w5"), said("assistant", "w3")],
            },
            "two responses to different prompts",
        ),
    ],
)
def test_a_pair_that_teaches_nothing_is_refused(pairs, row, error: str) -> None:
    with pytest.raises(DataError, match=error):
        pairs(row)


def test_too_long_is_refused_left_out_or_loses_the_beginning_of_its_prompt(
    pairs, tokenizer
) -> None:
    row = {"prompt": "w1 w2 w3 w4", "chosen": "w5", "rejected": "w6 w7 w8 w9"}
    with pytest.raises(DataError, match="got 11 tokens"):
        pairs(row)
    item = pairs(row, truncation="left")[0]
    assert tokenizer.decode(item["input_ids"][1]) == "w1 w2 w3 w4 <assistant> w6 w7 w8 w9 <eos>"
    assert len(pairs(row, FORMS[0], filter_overlong_prompts=True)) == 1
    with pytest.raises(DataError, match="without a response"):
        pairs(row, truncation="left", max_length=4)
