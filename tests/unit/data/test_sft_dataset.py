# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens, which of them are learned, and the dataset that yields them."""

from typing import Any

import pytest

from quadriga.config import DataConfig
from quadriga.data import MultiTurnSFTDataset, SFTDataset
from quadriga.data.sft_dataset import BATCH_ROWS, join_parts, text_parts
from quadriga.data.tokenizing import ChatEncoder, as_messages
from quadriga.errors import DataError

# Turns end as in ChatML, with a line break behind the end of sequence.
CLOSED = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] }} <eos> ! {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
# Earlier answers lose their first word once another turn follows.
FORGETFUL = (
    "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] if loop.last else m['content'][3:] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)


def chat(*contents: str) -> list[dict[str, str]]:
    """Question, answer, question, answer, ..."""
    return [
        {"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)
    ]


def tokens_of(tokenizer, messages, template: str | None = None, **kwargs):
    encoder = ChatEncoder(tokenizer, {"chat_template": template} if template else {})
    parts = text_parts(messages, encoder, where="f row 3", **kwargs)
    ids = encoder.encode([part.text for part in parts])
    return join_parts(ids, [part.is_learned for part in parts], tokenizer.eos_token_id)


def marked(tokenizer, made) -> list[str]:
    return [
        f"{tokenizer.decode([i])}{'*' if learned else ''}"
        for i, learned in zip(made.ids, made.is_learned, strict=True)
    ]


def test_every_answer_is_learned_up_to_its_end(tokenizer) -> None:
    made = tokens_of(tokenizer, chat("w1", "w2 w3", "w4", "w5"), CLOSED)
    assert marked(tokenizer, made) == [
        *["<user>", "w1", "<eos>", "!", "<assistant>", "w2*", "w3*", "<eos>*", "!"],
        *["<user>", "w4", "<eos>", "!", "<assistant>", "w5*", "<eos>*"],
    ]


def test_a_template_that_never_ends_a_turn_gets_an_end_behind_the_last(tokenizer) -> None:
    made = tokens_of(tokenizer, chat("w1", "w2", "w3", "w4"))
    assert marked(tokenizer, made) == [
        *["<user>", "w1", "<assistant>", "w2*", "<user>", "w3", "<assistant>", "w4*", "<eos>*"]
    ]


def test_where_no_turn_has_an_end_the_next_role_is_learned_if_it_stops_generation(
    tokenizer,
) -> None:
    encoder = ChatEncoder(tokenizer, {})
    parts = text_parts(chat("w1", "w2", "w3", "w4"), encoder, where="")
    ids = encoder.encode([part.text for part in parts])
    is_response = [part.is_learned for part in parts]
    user = tokenizer.convert_tokens_to_ids("<user>")
    made = join_parts(ids, is_response, tokenizer.eos_token_id, [user])
    assert marked(tokenizer, made) == [
        *["<user>", "w1", "<assistant>", "w2*", "<user>*", "w3", "<assistant>", "w4*", "<eos>*"]
    ]


@pytest.mark.parametrize(("ends", "num_open"), [([], 1), (["<user>"], 0)])
def test_turns_without_an_end_are_told(
    write, data, tokenizer, capsys, ends: list[str], num_open: int
) -> None:
    stop_token_ids = tokenizer.convert_tokens_to_ids(ends)
    path = write("t.jsonl", [chat_dataset("w1", "w2", "w3", "w4"), chat_dataset("w1", "w2")])
    rows = MultiTurnSFTDataset(path, tokenizer, data(), stop_token_ids=stop_token_ids)
    assert rows.num_open_turns == num_open
    assert (
        "1 turns of the assistant before the last are learned without an end"
        in capsys.readouterr().out
    ) == num_open


def test_a_batch_of_bad_rows_is_left_out(write, data, tokenizer, capsys) -> None:
    bad_rows = [chat_dataset("w1", "")] * (BATCH_ROWS + 1)
    path = write("t.jsonl", [*bad_rows, chat_dataset("w1", "w2")])
    rows = MultiTurnSFTDataset(path, tokenizer, data(on_bad_row="skip"))
    assert len(rows) == 1
    assert f"{len(bad_rows)} bad rows are left out" in capsys.readouterr().out


def test_what_follows_the_last_answer_is_left_out(tokenizer) -> None:
    whole, cut = (
        tokens_of(tokenizer, messages, CLOSED)
        for messages in (chat("w1", "w2", "w3"), chat("w1", "w2"))
    )
    assert whole.ids.tolist() == cut.ids.tolist()


def test_tokens_are_those_of_the_whole_text(tokenizer) -> None:
    messages = chat("w1", "w2 w3", "w4", "w5")
    whole = tokenizer.apply_chat_template(messages, chat_template=CLOSED, tokenize=False)
    made = tokens_of(tokenizer, messages, CLOSED)
    assert made.ids.tolist() == tokenizer(whole, add_special_tokens=False)["input_ids"][:-1]


@pytest.mark.parametrize("content", ["", "  ", None])
def test_an_empty_answer_is_refused(tokenizer, content) -> None:
    messages = [*chat("w1", "w2", "w3"), {"role": "assistant", "content": content}]
    with pytest.raises(DataError, match="f row 3, message 3: got an empty turn of the assistant"):
        tokens_of(tokenizer, messages)


def test_an_answer_of_tool_calls_alone_is_not_empty(tokenizer) -> None:
    template = (
        "{% for m in messages %}<{{ m['role'] }}> {{ m['content'] or '' }}"
        "{% for c in m['tool_calls'] or [] %} {{ c['function']['name'] }}{% endfor %} <eos> {% endfor %}"
        "{% if add_generation_prompt %}<assistant> {% endif %}"
    )
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "w9"}}]}
    assert "w9*" in marked(tokenizer, tokens_of(tokenizer, [*chat("w1"), call], template))


def test_the_template_is_told_of_tools(tokenizer) -> None:
    template = "{% for t in tools or [] %}{{ t['name'] }} {% endfor %}" + CLOSED
    made = tokens_of(tokenizer, chat("w1", "w2"), template, tools=[{"name": "w7"}])
    assert marked(tokenizer, made)[0] == "w7"


@pytest.mark.parametrize(
    ("messages", "said"),
    [
        (chat("w1"), "none of them by the assistant"),
        (chat("w1", "w2")[1:], "begins with the assistant"),
    ],
)
def test_a_chat_without_question_or_answer_is_refused(tokenizer, messages, said: str) -> None:
    with pytest.raises(DataError, match=said):
        tokens_of(tokenizer, messages)


def test_a_template_that_changes_earlier_turns_is_refused_with_what_changed(tokenizer) -> None:
    with pytest.raises(
        DataError, match="changes earlier turns: '2 w3 ' became '3 <user>"
    ) as caught:
        tokens_of(
            tokenizer,
            chat("w1 w1", "w2 w3", "w4", "w5"),
            FORGETFUL.replace("loop.last", "loop.first or loop.last"),
        )
    assert "custom_chat_template" in str(caught.value)


@pytest.mark.parametrize("value", [None, []])
def test_a_row_without_messages_is_refused(value) -> None:
    with pytest.raises(DataError, match=r"x.jsonl row 2: got the messages .*data.messages_key"):
        as_messages(value, where="x.jsonl row 2", key="messages_key")


def test_a_row_that_is_no_chat_is_refused() -> None:
    with pytest.raises(DataError, match="a list of messages"):
        as_messages([{"text": "w1"}], where="x.jsonl row 2")


def chat_dataset(*contents: str) -> dict[str, Any]:
    return {
        "messages": [
            {"role": ("user", "assistant")[i % 2], "content": text}
            for i, text in enumerate(contents)
        ]
    }


@pytest.fixture
def data(tmp_path):
    """A section `data`: ten tokens a row."""
    return lambda **values: DataConfig(**({"max_length": 10, "cache_dir": str(tmp_path)} | values))


@pytest.mark.parametrize("name", ["a.parquet", "a.jsonl", "a.json"])
def test_a_row_is_padded_on_the_right_and_says_what_is_learned(
    write, data, tokenizer, name: str
) -> None:
    row = MultiTurnSFTDataset(write(name, [chat_dataset("w1", "w2 w3")]), tokenizer, data())[0]
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
    single = SFTDataset(
        write("a.jsonl", [{"prompt": prompt, "response": "w2 w3"}]), tokenizer, data()
    )[0]
    multi = MultiTurnSFTDataset(write("b.jsonl", [chat_dataset("w1", "w2 w3")]), tokenizer, data())[
        0
    ]
    assert all(single[key].equal(multi[key]) for key in multi)


def test_only_the_response_of_two_columns_is_learned(write, data, tokenizer) -> None:
    rows = [{"prompt": chat_dataset("w1", "w2", "w3")["messages"], "response": "w4"}]
    row = SFTDataset(write("a.jsonl", rows), tokenizer, data())[0]
    assert tokenizer.decode(row["input_ids"][row["loss_mask"].bool()]) == "w4 <eos>"


def test_too_long_is_an_error_that_names_row_and_ways_out(write, data, tokenizer) -> None:
    file = write("a.jsonl", [chat_dataset("w1", "w2"), chat_dataset("w1 w1 w1 w1", "w2 w2 w2 w2")])
    with pytest.raises(
        DataError, match=r"a\.jsonl row 1: got 11 tokens, expected at most data\.max_length=10"
    ) as caught:
        MultiTurnSFTDataset(file, tokenizer, data())
    assert "filter_overlong" in str(caught.value) and "truncation" in str(caught.value)


def test_too_long_is_left_out_and_counted(write, data, tokenizer, capsys) -> None:
    file = write("a.jsonl", [chat_dataset("w1", "w2"), chat_dataset("w1 w1 w1 w1", "w2 w2 w2 w2")])
    assert len(MultiTurnSFTDataset(file, tokenizer, data(filter_overlong_prompts=True))) == 1
    assert "1 of 2 rows are over 10 tokens" in capsys.readouterr().out
    with pytest.raises(DataError, match=r"at least one of at most data\.max_length=2"):
        MultiTurnSFTDataset(file, tokenizer, data(filter_overlong_prompts=True, max_length=2))


@pytest.mark.parametrize(
    ("side", "kept"), [("left", "w1 <assistant> w2 <eos>"), ("right", "<user> w1 w1 <assistant>")]
)
def test_too_long_is_cut_at_the_side_that_is_named(
    write, data, tokenizer, side: str, kept: str
) -> None:
    file = write("a.jsonl", [chat_dataset("w1 w1", "w2")])
    config = data(max_length=4, truncation=side)
    if side == "left":
        assert (
            tokenizer.decode(MultiTurnSFTDataset(file, tokenizer, config)[0]["input_ids"]) == kept
        )
    else:
        # The response would be gone: a row without anything to learn is no row.
        with pytest.raises(DataError, match="without a response among them"):
            MultiTurnSFTDataset(file, tokenizer, config)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"messages": None, "id": 1}, "row 1: got the messages None"),
        ({"messages": [{"role": "user", "content": "w1"}]}, "none of them by the assistant"),
        (chat_dataset("w1", ""), "row 1, message 1: got an empty turn"),
    ],
)
def test_a_bad_row_is_found_before_the_first_step(write, data, tokenizer, row, said: str) -> None:
    with pytest.raises(DataError, match=said):
        MultiTurnSFTDataset(write("a.jsonl", [chat_dataset("w1", "w2"), row]), tokenizer, data())


def test_a_response_that_is_no_text_is_refused(write, data, tokenizer) -> None:
    with pytest.raises(DataError, match="the response 7"):
        SFTDataset(write("a.jsonl", [{"prompt": "w1", "response": 7}]), tokenizer, data())


def test_a_missing_column_is_named_with_the_keys_that_name_columns(write, data, tokenizer) -> None:
    with pytest.raises(DataError, match=r"'messages' among them.*data.messages_key.*data.format"):
        MultiTurnSFTDataset(
            write("a.jsonl", [{"prompt": "w1", "response": "w2"}]), tokenizer, data()
        )


def test_a_position_in_other_rows_is_refused(write, data, tokenizer) -> None:
    one = MultiTurnSFTDataset(write("a.jsonl", [chat_dataset("w1", "w2")]), tokenizer, data())
    other = MultiTurnSFTDataset(write("b.jsonl", [chat_dataset("w1", "w3")]), tokenizer, data())
    one.load_state_dict(one.state_dict())
    with pytest.raises(DataError, match="not the 1 rows of the checkpoint"):
        other.load_state_dict(one.state_dict())


def test_a_dotted_name_reaches_into_a_column(write, data, tokenizer) -> None:
    rows = [{"extra_info": {"question": "w1", "answer": "w2 w3"}, "prompt": "w9"}]
    config = data(prompt_key="extra_info.question", response_key="extra_info.answer")
    row = SFTDataset(write("a.parquet", rows), tokenizer, config)[0]
    assert tokenizer.decode(row["input_ids"][:6]) == "<user> w1 <assistant> w2 w3 <eos>"
    with pytest.raises(
        DataError,
        match=r"row 0: got no 'reply' in \{'question': .*data.response_key=extra_info.reply",
    ):
        SFTDataset(
            write("a.jsonl", rows),
            tokenizer,
            data(prompt_key="prompt", response_key="extra_info.reply"),
        )


def test_at_most_so_many_rows_are_the_first(write, data, tokenizer) -> None:
    file = write("a.jsonl", [chat_dataset("w1", f"w{number}") for number in range(2, 7)])
    whole, some = (
        MultiTurnSFTDataset(file, tokenizer, data(train_max_samples=size)) for size in (-1, 3)
    )
    assert (len(whole), len(some)) == (5, 3)
    assert all(some[row]["input_ids"].equal(whole[row]["input_ids"]) for row in range(3))
    assert len(MultiTurnSFTDataset(file, tokenizer, data(train_max_samples=3), is_train=False)) == 5


def test_the_template_is_told_whether_a_row_thinks(write, data, tokenizer) -> None:
    template = (
        "{{ 'w7 ' if enable_thinking else 'w8 ' if enable_thinking is defined else '' }}" + CLOSED
    )
    rows = [chat_dataset("w1", "w2") | {"enable_thinking": value} for value in (True, False, None)]
    made = MultiTurnSFTDataset(
        write("a.jsonl", rows),
        tokenizer,
        data(apply_chat_template_kwargs={"chat_template": template}),
    )
    assert [tokenizer.decode(made[row]["input_ids"][:1]) for row in range(3)] == [
        "w7",
        "w8",
        "<user>",
    ]
