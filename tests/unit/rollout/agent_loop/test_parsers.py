# SPDX-License-Identifier: Apache-2.0
"""Each parser reads the calls of its form, and says what is wrong with one that it cannot read."""

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.config.multi_turn import FORMATS
from quadriga.rollout.agent_loop.parsers import PARSERS

SCHEMAS = {
    "add": {"properties": {"a": {"type": "integer"}, "b": {"type": "number"}}},
    "say": {
        "properties": {
            "text": {"type": "string"},
            "times": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        }
    },
    "pick": {
        "properties": {
            "level": {"enum": [1, 2], "type": "integer"},
            "color": {"enum": ["red", "1"]},
            "label": {"type": ["string", "null"]},
        }
    },
}
CALLS = {
    "hermes": (
        'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2.5}}\n</tool_call>'
        '<tool_call>{"name": "say", "arguments": "{\\"text\\": \\"12\\", \\"times\\": null}"}</tool_call><|im_end|>'
    ),
    "qwen3_coder": (
        "I add.\n<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n<parameter=b>\n2.5\n</parameter>\n"
        "</function>\n</tool_call>\n<tool_call><function=say><parameter=text>12</parameter>"
        "<parameter=times>null</parameter></function></tool_call><|im_end|>"
    ),
    "glm": (
        "I add.\n<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n<arg_key>b</arg_key>\n"
        "<arg_value>2.5</arg_value>\n</tool_call>\n<tool_call>say<arg_key>text</arg_key><arg_value>12</arg_value>"
        "<arg_key>times</arg_key><arg_value>null</arg_value></tool_call><|observation|>"
    ),
    "gpt-oss": (
        "<|channel|>analysis<|message|>I add.<|end|><|start|>assistant<|channel|>commentary to=functions.add "
        '<|constrain|>json<|message|>{"a": 1, "b": 2.5}<|call|><|start|>assistant to=functions.say'
        '<|channel|>commentary json<|message|>{"text": "12", "times": null}<|call|>'
    ),
}
BROKEN = {
    "hermes": {
        '<tool_call>{"name": add}</tool_call>': "not JSON",
        '<tool_call>{"name": "add", "argu': "not closed",
        '<tool_call>{"arguments": {}}</tool_call>': "no name",
        "<tool_call>[1]</tool_call>": "no name",
        '<tool_call>{"name": "add", "arguments": [1]}</tool_call>': "no object",
        '<tool_call>{"name": "add", "arguments": "x"}</tool_call>': "arguments are not JSON",
        f"<tool_call>{'[' * 100_000}</tool_call>": "not JSON",
    },
    "qwen3_coder": {
        "<tool_call><function=add><parameter=a>1": "not closed",
        "<tool_call>add</tool_call>": "names no function",
    },
    "glm": {
        "<tool_call>add<arg_key>a</arg_key>": "not closed",
        "<tool_call><arg_key>a</arg_key></tool_call>": "names no function",
    },
    "gpt-oss": {
        "to=functions.add<|message|>{a: 1}<|call|>": "not JSON",
        "to=functions.add<|message|>[1]<|call|>": "no object",
    },
}


PIECES = [
    *'<>/{}[]":=, \na1',
    *(
        "<tool_call>",
        "</tool_call>",
        "<function=",
        "</function>",
        "<parameter=",
        "</parameter>",
        "<arg_key>",
    ),
    *(
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
        "to=functions.",
        "<|message|>",
        "<|call|>",
        '"name"',
        '"arguments"',
    ),
]


@pytest.mark.parametrize("form", PARSERS)
def test_calls_are_read(form: str) -> None:
    """Two calls with texts and numbers, each in the type that the tool asks for."""
    first, second = PARSERS[form](CALLS[form], SCHEMAS)
    assert (first.name, first.arguments, first.problem) == ("add", {"a": 1, "b": 2.5}, "")
    assert (second.name, second.arguments, second.problem) == (
        "say",
        {"text": "12", "times": None},
        "",
    )


def test_types_of_enums_and_of_several_types() -> None:
    """A value of an enum is a text only if the enum has this text; a type may be a list of names."""
    text = (
        "<tool_call>pick<arg_key>level</arg_key><arg_value>2</arg_value><arg_key>color</arg_key>"
        "<arg_value>1</arg_value><arg_key>label</arg_key><arg_value>12</arg_value></tool_call>"
    )
    (call,) = PARSERS["glm"](text, SCHEMAS)
    assert call.arguments == {"level": 2, "color": "1", "label": "12"}


@pytest.mark.parametrize("form", PARSERS)
def test_text_without_a_call(form: str) -> None:
    """An answer is not a call."""
    assert PARSERS[form]('The sum is {"name": "add"} 3.<|im_end|>', SCHEMAS) == []


@pytest.mark.parametrize(
    ("form", "text"), [(form, text) for form, texts in BROKEN.items() for text in texts]
)
def test_calls_that_cannot_be_read(form: str, text: str) -> None:
    """One call with a problem, which says what form is expected and does not grow with the text."""
    (call,) = PARSERS[form](text, SCHEMAS)
    assert BROKEN[form][text] in call.problem
    assert "expected" in call.problem
    assert len(call.problem) < 700


@pytest.mark.parametrize("form", PARSERS)
@given(text=st.lists(st.sampled_from(PIECES)).map("".join))
def test_no_text_breaks_a_parser(form: str, text: str) -> None:
    """Whatever the model writes, a parser returns."""
    for call in PARSERS[form](text, SCHEMAS):
        assert call.name or call.problem


def test_names() -> None:
    """The check of the configuration and the parsers know the same forms."""
    assert tuple(PARSERS) == FORMATS


PIECES = [
    "<tool_call>", "</tool_call>", "<tool_call><function=", "<function=", "<function=a>", "<parameter=", "a.",
    "<arg_key>", "<arg_key></arg_key>", "<arg_key>k</arg_key><arg_value>", "</arg_key> ", "to=functions.", " ", "{",
    "<parameter=a>", "to=functions.a ", "to=functions.a<|message|>", '{"name":',
]  # fmt: skip


@pytest.mark.parametrize("name", PARSERS)
@pytest.mark.parametrize(
    "before", ["", "<tool_call>", "<tool_call><function=a>", "<tool_call>a<arg_key>"]
)
def test_time_is_linear(name: str, before: str) -> None:
    """16 times the text: linear is 16, quadratic 256; what takes less than 20 ms is neither."""

    def seconds(text: str) -> float:
        times = []
        for _ in range(3):
            begun = time.process_time()
            PARSERS[name](text, SCHEMAS)
            times.append(time.process_time() - begun)
        return min(times)

    for piece in PIECES:
        short, long = (seconds(before + (piece * length)[:length]) for length in (4_000, 64_000))
        assert long < 0.02 or long < 64 * short, (piece, short, long)


@given(
    st.lists(
        st.sampled_from(["<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "a", " "])
    ).map("".join)
)
def test_pairs_of_glm(body: str) -> None:
    """What the plain expression finds, in another time; of a key that stands twice the last value."""
    plain = re.findall(r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>", body, re.DOTALL)
    (call,) = PARSERS["glm"](f"<tool_call>f{body}</tool_call>", {})
    assert call.problem or call.arguments == {key.strip(): value for key, value in plain}


@given(
    st.lists(
        st.sampled_from(["to=functions.", "f", ".g ", "<|message|>", "<|call|>", "{}", " "])
    ).map("".join)
)
def test_messages_of_gpt_oss(text: str) -> None:
    plain = r"to=functions\.([\w.\-]+)(?:(?!<\|message\|>).)*?<\|message\|>(.*?)(?:<\|call\|>|<\|end\|>|\Z)"
    assert [call.name for call in PARSERS["gpt-oss"](text, {})] == [
        name for name, _ in re.findall(plain, text, re.S)
    ]
