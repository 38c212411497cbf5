# SPDX-License-Identifier: Apache-2.0
"""From prompts to token ids, and tokenizers that cannot be worked with."""

import json
from pathlib import Path

import pytest
from transformers import GPT2Config, Qwen2Config

from quadriga.data import load_tokenizer, tokenizing
from quadriga.data.tokenizing import ChatEncoder, as_messages
from quadriga.errors import DataError

MESSAGES = [{"role": "user", "content": "w1 w2"}]


def test_render_and_encode(tokenizer):
    encoder = ChatEncoder(tokenizer, {})
    text = encoder.render(MESSAGES, where="row")
    assert text == "<user> w1 w2 <assistant>"
    assert tokenizer.convert_ids_to_tokens(encoder.encode([text])[0]) == [
        "<user>",
        "w1",
        "w2",
        "<assistant>",
    ]


def test_template_arguments_reach_the_template(tokenizer):
    encoder = ChatEncoder(tokenizer, {"shout": True, "add_generation_prompt": False})
    assert encoder.render(MESSAGES, where="row") == "<user> w1 w2 ! "


def test_arguments_that_are_not_the_templates_are_refused(tokenizer):
    with pytest.raises(DataError, match=r"apply_chat_template_kwargs\.max_length"):
        ChatEncoder(tokenizer, {"max_length": 3})


def test_a_template_that_raises_names_the_row(make_tokenizer):
    encoder = ChatEncoder(
        make_tokenizer(template="{{ raise_exception('roles must alternate') }}"), {}
    )
    with pytest.raises(DataError, match=r"x.jsonl row 3: .*roles must alternate"):
        encoder.render(MESSAGES, where="x.jsonl row 3")


def test_fingerprint_follows_tokenizer_template_and_arguments(make_tokenizer):
    other = make_tokenizer()
    other.add_tokens(["extra"])
    encoders = [
        ChatEncoder(make_tokenizer(), {}),
        ChatEncoder(other, {}),
        ChatEncoder(make_tokenizer(template="{{ messages }}"), {}),
        ChatEncoder(make_tokenizer(), {"shout": True}),
        ChatEncoder(make_tokenizer(), {"chat_template": "x"}),
    ]
    prints = [encoder.fingerprint() for encoder in encoders]
    assert len(set(prints)) == len(prints)
    assert ChatEncoder(make_tokenizer(), {}).fingerprint() == prints[0]


def test_messages_lose_keys_without_a_value():
    prompt = [{"role": "user", "content": "a", "name": None}]
    assert as_messages(prompt, where="row") == [{"role": "user", "content": "a"}]
    assert as_messages("a", where="row") == [{"role": "user", "content": "a"}]


def test_parts_that_are_all_text_become_one(make_tokenizer):
    """The template of these tests, as that of many language models, writes content out as Python does."""
    parts = [{"type": "text", "text": "w1 ", "image": None}, {"type": "text", "text": "w2"}]
    messages = as_messages([{"role": "user", "content": parts}], where="row")
    assert messages == [{"role": "user", "content": "w1 w2"}]
    assert (
        ChatEncoder(make_tokenizer(), {}).render(messages, where="row")
        == "<user> w1 w2 <assistant>"
    )
    assert as_messages([{"role": "user", "content": []}], where="row") == [
        {"role": "user", "content": ""}
    ]
    with_image = [{"role": "user", "content": [*parts, {"type": "image"}]}]
    assert as_messages(with_image, where="row") == with_image


@pytest.mark.parametrize(
    "prompt", [None, 3, [], {}, ["text"], [{"content": "a"}], [{"role": 1}], float("nan")]
)
def test_what_is_no_chat_names_the_row(prompt):
    with pytest.raises(DataError, match=r"t.parquet row 7: got the prompt"):
        as_messages(prompt, where="t.parquet row 7")


def test_load_from_a_folder_and_replace_the_template(make_tokenizer, tmp_path: Path):
    make_tokenizer().save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token == "<pad>"
    template = "{% for m in messages %}<{{ m.content }}>{% endfor %}"
    (tmp_path / "template.jinja").write_text(template)
    for given in (template, str(tmp_path / "template.jinja")):
        changed = load_tokenizer(tmp_path, chat_template=given)
        assert (
            ChatEncoder(changed, {}).render(MESSAGES, where="row") == f"<{MESSAGES[0]['content']}>"
        )


def test_templates_that_are_none(make_tokenizer, tmp_path: Path):
    """A file that is not there, and templates that write the same whatever the messages say."""
    make_tokenizer().save_pretrained(tmp_path)
    with pytest.raises(DataError, match=r"custom_chat_template: got 'chat.jinja' \(.*No such file"):
        load_tokenizer(tmp_path, chat_template="chat.jinja")
    (tmp_path / "words.txt").write_text("Answer the question.")
    for given in (str(tmp_path / "words.txt"), "{% for m in messages %}{{ m.role }}{% endfor %}"):
        with pytest.raises(DataError, match="writes the same whatever the messages say"):
            load_tokenizer(tmp_path, chat_template=given)
    in_parts = "{% for p in messages[0].content %}{{ p.text }}{% endfor %}"
    reads_two = "{% if messages[1].role == 'user' %}{{ messages[1].content }}{% endif %}{{ messages[9].content }}"
    for given in (in_parts, reads_two):
        assert load_tokenizer(tmp_path, chat_template=given).chat_template == given


def test_end_of_sequence_pads_where_there_is_no_pad_token(make_tokenizer, tmp_path: Path, capsys):
    make_tokenizer(pad=None).save_pretrained(tmp_path)
    assert load_tokenizer(tmp_path).pad_token == "<eos>"
    assert "no pad token" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("missing", "message"),
    [
        ({"pad": None, "eos": None}, "neither a pad token nor"),
        ({"template": None}, "no chat template"),
    ],
)
def test_tokenizers_that_training_cannot_use(
    make_tokenizer, tmp_path: Path, missing: dict, message: str
):
    make_tokenizer(**missing).save_pretrained(tmp_path)
    with pytest.raises(DataError, match=message):
        load_tokenizer(tmp_path)


def test_a_folder_without_a_tokenizer(tmp_path: Path):
    with pytest.raises(DataError, match="expected a folder or hub name with a tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("family", [Qwen2Config, GPT2Config])
def test_a_model_without_a_tokenizer(family, tmp_path: Path):
    """From a config.json alone transformers makes a tokenizer that turns every text into nothing."""
    family().save_pretrained(tmp_path)
    with pytest.raises(
        DataError,
        match=r"got an empty vocabulary.*expected tokenizer\.json.*data\.tokenizer",
    ):
        load_tokenizer(tmp_path, chat_template="{{ messages }}")


CLOSED = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}<eos>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
PREFILLED = [{"role": "user", "content": "w1"}, {"role": "assistant", "content": "It is "}]


@pytest.mark.parametrize(
    ("messages", "options", "text"),
    [
        (PREFILLED, {}, "<user>w1<eos><assistant>It is "),
        (PREFILLED[:1], {}, "<user>w1<eos><assistant>"),
        (
            PREFILLED,
            {"add_generation_prompt": True},
            "<user>w1<eos><assistant>It is <eos><assistant>",
        ),
        (PREFILLED, {"add_generation_prompt": False}, "<user>w1<eos><assistant>It is <eos>"),
        (PREFILLED, {"continue_final_message": True}, "<user>w1<eos><assistant>It is "),
    ],
)
def test_a_prompt_that_ends_with_the_assistant_is_continued(
    make_tokenizer, messages, options, text: str
):
    encoder = ChatEncoder(make_tokenizer(template=CLOSED), options)
    assert encoder.render(messages, where="row") == text


def test_prompts_of_agent_loops_end_as_the_loops_decide(make_tokenizer):
    """Arguments of the template that say how a prompt ends do not change prompts with tools."""
    for ending in ("continue_final_message", "add_generation_prompt"):
        for value in (True, False):
            encoder = ChatEncoder(make_tokenizer(template=CLOSED), {ending: value})
            texts = [
                encoder.render(messages, where="row", tools=[{"name": "f"}])
                for messages in (PREFILLED[:1], PREFILLED)
            ]
            assert texts == ["<user>w1<eos><assistant>", "<user>w1<eos><assistant>It is "]


def test_a_call_of_a_tool_is_not_continued(make_tokenizer):
    call = {
        "role": "assistant",
        "content": "w2",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    encoder = ChatEncoder(make_tokenizer(template=CLOSED), {})
    assert encoder.render([*PREFILLED[:1], call], where="row").endswith("w2<eos><assistant>")


@pytest.mark.parametrize("chat", [PREFILLED, [{"role": "system", "content": "w3"}, PREFILLED[0]]])
def test_a_text_that_is_a_chat_in_json_is_that_chat(chat):
    assert as_messages(f" {json.dumps(chat)}\n", where="row") == chat


@pytest.mark.parametrize(
    "text",
    [
        "[1, 2]",
        "[]",
        '{"role": "user", "content": "w1"}',
        '[{"role": "user"}]',
        "[w1",
        "[" * 10_000,
    ],
)
def test_any_other_text_in_json_stays_text(text: str):
    assert as_messages(text, where="row") == [{"role": "user", "content": text}]


LOOP = "{% for m in messages %}{% if m.role in ROLES %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}<assistant>"
FIRST_SYSTEM = "{% if messages[0].role == 'system' %}{{ messages[0].content }}{% endif %}" + LOOP
MARKER = "{% for m in messages %}<{{ m.role }}>{% if m.role != 'tool' %}{{ m.content }}{% endif %}{% endfor %}"
CALLS = [{"function": {"name": "f", "arguments": {}}}]
CHAT = [
    {"role": "system", "content": "w1"},
    {"role": "user", "content": "w2"},
    {"role": "assistant", "content": "", "tool_calls": CALLS},
    {"role": "tool", "content": "w3"},
    {"role": "system", "content": "w4"},
    {"role": "user", "content": "w5"},
]


@pytest.mark.parametrize(
    ("template", "place"),
    [
        (
            LOOP.replace("ROLES", "('user', 'assistant', 'tool')"),
            "message 0: got the role 'system'",
        ),
        (
            FIRST_SYSTEM.replace("ROLES", "('user', 'assistant', 'tool')"),
            "message 4: got the role 'system'",
        ),
        (
            LOOP.replace("ROLES", "('system', 'user', 'assistant')"),
            "message 3: got the role 'tool'",
        ),
        (MARKER, "message 3: got the role 'tool'"),
    ],
)
def test_a_role_that_the_template_leaves_out(make_tokenizer, template: str, place: str):
    encoder = ChatEncoder(make_tokenizer(template=template), {})
    for row in ("t.jsonl row 1", "t.jsonl row 2"):
        with pytest.raises(
            DataError, match=f"{row}, {place}, whose messages the chat template leaves out"
        ):
            encoder.render(CHAT, where=row)


THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content.split('</think>')[-1] if not loop.last else m.content }}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)
NO_EMPTY_TURNS = (
    "{% for m in messages %}{% if m.content %}<{{ m.role }}>{{ m.content }}{% endif %}{% endfor %}"
    "<assistant>"
)
DEFAULT_SYSTEM = (
    "{% if messages[0].role != 'system' %}<system>w1{% endif %}"
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"
)
BESIDE_CALLS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.tool_calls %}{{ m.tool_calls[0].function.name }}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}<assistant>"
)


@pytest.mark.parametrize(
    ("template", "changes"),
    [
        (THOUGHTS, {"content": "<think>w8</think>w9", "tool_calls": None}),
        (NO_EMPTY_TURNS, {"content": "", "reasoning_content": "w8"}),
        (DEFAULT_SYSTEM, {}),
        (BESIDE_CALLS, {"content": "w8"}),
    ],
)
def test_what_templates_drop_by_design_is_no_role_left_out(
    make_tokenizer, template: str, changes: dict
):
    """Thoughts of earlier turns, turns of thoughts alone, a system prompt that is the default, words beside a call."""
    chat = [*CHAT[:2], CHAT[2] | changes, *CHAT[3:]]
    assert "w5" in ChatEncoder(make_tokenizer(template=template), {}).render(chat, where="row")


def test_one_chat_of_each_role_order_is_rendered_again(
    make_tokenizer, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(tokenizing, "MAX_ROLE_ORDERS", 2)
    encoder = ChatEncoder(make_tokenizer(), {})
    chats = [CHAT[:2], CHAT[:2], CHAT[1:2], CHAT[3:4]]
    rendered: list[int] = []
    write_text = encoder.apply_template

    def counted(*arguments, **options) -> str:
        rendered.append(1)
        return write_text(*arguments, **options)

    monkeypatch.setattr(encoder, "apply_template", counted)
    counts = []
    for chat in chats:
        encoder.render(chat, where="row")
        counts.append(len(rendered))
    assert counts == [3, 4, 6, 7]
    assert encoder.num_role_orders == 2
