# SPDX-License-Identifier: Apache-2.0
"""Canned answers come as they were written down, and what is missing is named."""

import json
from pathlib import Path

import pytest

from quadriga.errors import RolloutError
from quadriga.rollout import SamplingParams, ScriptedEngine


class Letters:
    """A tokenizer whose tokens are characters; 0 ends a text."""

    eos_token_id = 0

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(letter) for letter in text]

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def _texts(engine: ScriptedEngine, prompts: list[str], max_tokens: int = 9) -> list[str]:
    letters = Letters()
    completions = engine.generate_batch(
        [letters.encode(prompt) for prompt in prompts],
        [SamplingParams(max_tokens=max_tokens)] * len(prompts),
    )
    return [letters.decode(completion.token_ids).replace("\0", ".") for completion in completions]


def test_a_list_is_given_in_turn() -> None:
    """Over the end of the list it begins again; texts end with the end-of-text token, token ids as they are."""
    engine = ScriptedEngine(["yes", [ord("n"), ord("o")]], tokenizer=Letters())
    assert _texts(engine, ["?", "?", "?"]) == ["yes.", "no", "yes."]
    assert _texts(engine, ["?"]) == ["no"]


def test_a_mapping_looks_into_the_prompt() -> None:
    """The longest part found counts; several answers to one part are given in turn."""
    engine = ScriptedEngine(
        {"sum": ["4", "five"], "sum of three": "6", "": "hm"}, tokenizer=Letters()
    )
    assert _texts(engine, ["the sum?", "the sum of three?", "the sum?", "what?"]) == [
        "4.",
        "6.",
        "five.",
        "hm.",
    ]


def test_a_function_sees_the_prompt() -> None:
    """It may answer in token ids, without any tokenizer."""
    engine = ScriptedEngine(lambda prompt: prompt[::-1])
    assert _texts(engine, ["abc"]) == ["cba"]


def test_a_file(tmp_path: Path) -> None:
    """Lines with a prompt form a mapping; the same prompt may come twice."""
    lines = [
        {"prompt": "a", "response": "1"},
        {"prompt": "b", "response": [50]},
        {"prompt": "a", "response": "3"},
    ]
    path = tmp_path / "answers.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    assert _texts(ScriptedEngine(path, tokenizer=Letters()), ["a", "a", "b", "a"]) == [
        "1.",
        "3.",
        "2",
        "1.",
    ]


def test_long_answers_are_cut() -> None:
    """What does not fit is cut, with the reason; log-probabilities are those of certainty."""
    (completion,) = ScriptedEngine([[1, 2, 3]]).generate_batch(
        [[9]], [SamplingParams(max_tokens=2)]
    )
    assert (completion.token_ids, completion.log_probs) == ([1, 2], [0.0, 0.0])
    assert completion.finish_reason == "length"


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ({"sum": "4"}, "the prompt 'why'"),
        ([], "no responses"),
        (lambda prompt: [], "a response without a token"),
    ],
)
def test_what_is_missing_is_named(script, message: str) -> None:
    """No part fits, nothing to say, an empty answer."""
    with pytest.raises(RolloutError, match=message):
        _texts(ScriptedEngine(script, tokenizer=Letters()), ["why"])


def test_a_text_needs_a_tokenizer() -> None:
    """Token ids do not."""
    with pytest.raises(RolloutError, match="without a tokenizer"):
        ScriptedEngine(["yes"]).generate_batch([[1]], [SamplingParams(max_tokens=2)])


def test_a_broken_file_is_named_with_its_line(tmp_path: Path) -> None:
    """So is one that is not there."""
    path = tmp_path / "answers.jsonl"
    path.write_text('{"response": "1"}\n{"answer": "2"}\n')
    with pytest.raises(RolloutError, match=r"answers\.jsonl, line 2: got KeyError"):
        ScriptedEngine(path)
    with pytest.raises(RolloutError, match="responses_file"):
        ScriptedEngine(tmp_path / "none.jsonl")
