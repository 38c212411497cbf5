# SPDX-License-Identifier: Apache-2.0
"""Conversations as tokens: which of them are learned, and what cannot be learned from."""

import pytest

from quadriga.data.sft_dataset import chat_of_row, conversation, text_parts
from quadriga.data.tokenizing import ChatEncoder
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
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


def tokens_of(tokenizer, messages, template: str | None = None, **kwargs):
    encoder = ChatEncoder(tokenizer, {"chat_template": template} if template else {})
    parts = text_parts(messages, encoder, where="f row 3", **kwargs)
    ids = encoder.encode([part.text for part in parts])
    return conversation(ids, [part.is_learned for part in parts], tokenizer.eos_token_id)


def marked(tokenizer, made) -> list[str]:
    return [
        f"{tokenizer.decode([i])}{'*' if learned else ''}" for i, learned in zip(made.ids, made.is_learned, strict=True)
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


def test_what_follows_the_last_answer_is_left_out(tokenizer) -> None:
    whole, cut = (tokens_of(tokenizer, messages, CLOSED) for messages in (chat("w1", "w2", "w3"), chat("w1", "w2")))
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
    with pytest.raises(DataError, match="changes earlier turns: '2 w3 ' became '3 <user>") as caught:
        tokens_of(
            tokenizer, chat("w1 w1", "w2 w3", "w4", "w5"), FORGETFUL.replace("loop.last", "loop.first or loop.last")
        )
    assert "custom_chat_template" in str(caught.value)


@pytest.mark.parametrize("value", [None, []])
def test_a_row_without_messages_is_refused(value) -> None:
    with pytest.raises(DataError, match=r"x.jsonl row 2: got no messages.*data.messages_key"):
        chat_of_row(value, where="x.jsonl row 2")


def test_a_row_that_is_no_chat_is_refused() -> None:
    with pytest.raises(DataError, match="a list of messages"):
        chat_of_row([{"text": "w1"}], where="x.jsonl row 2")
