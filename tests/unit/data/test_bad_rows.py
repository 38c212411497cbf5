# SPDX-License-Identifier: Apache-2.0
"""Rows that cannot be used: each names file, row and column; with `data.on_bad_row=skip` they are listed."""

import json
from pathlib import Path

import pytest

from quadriga.data.file_dataset import print_bad_rows
from quadriga.data.prompt_lengths import PromptContext
from quadriga.data.rl_dataset import RLHFDataset
from quadriga.data.sft_dataset import MultiTurnSFTDataset
from quadriga.errors import DataError

USER = {"role": "user", "content": "w1"}
BAD = {
    "a null for a chat": {"prompt": None},
    "a null in a chat": {"prompt": [USER, None]},
    "a null for a role": {"prompt": [{"role": None, "content": "w1"}]},
    "a null for a content": {"prompt": [USER, {"role": "assistant", "content": None}]},
    "a dictionary for a content": {"prompt": [{"role": "user", "content": {"text": "w1"}}]},
    "a role that is unknown": {"prompt": [USER, {"role": "robot", "content": "w1"}]},
    "a number": {"prompt": 5},
    "half of a character": {"prompt": [{"role": "user", "content": "\ud83d"}]},
    "facts that are a text": {"extra_info": "split=train"},
    "an image": {"images": ["one.png"]},
}
COLUMNS = {"facts that are a text": "extra_info", "an image": ""}
STRICT = (
    "{% for m in messages %}{% if m.role in ('user', 'assistant') %}<{{ m.role }}> {{ m.content }} {% endif %}"
    "{% endfor %}<assistant>"
)


@pytest.fixture
def strict(make_tokenizer):
    """A tokenizer whose chat template leaves messages of unknown roles out, as those of some models do."""
    return make_tokenizer(template=STRICT)


@pytest.mark.parametrize("filters", [False, True])
@pytest.mark.parametrize("max_samples", [-1, 2])
@pytest.mark.parametrize("name", BAD)
def test_a_bad_row(strict, config, write, row, capsys, name: str, max_samples: int, filters: bool):
    path = write("t.jsonl", [row(index=0), row(index=1) | BAD[name], row(index=2)])
    values = {"filter_overlong_prompts": filters, "shuffle": False}
    column = COLUMNS.get(name, "prompt")
    place = f"{path} row 1" + f", column '{column}'" * bool(column)
    with pytest.raises(DataError) as caught:
        RLHFDataset(path, strict, config(**values), max_samples=max_samples)
    assert str(caught.value).startswith(place)
    for _ in range(2):
        rows = RLHFDataset(
            path, strict, config(**values, on_bad_row="skip"), max_samples=max_samples
        )
        kept = [0] if max_samples == 2 and not filters else [0, 2]
        assert [rows[item]["index"] for item in range(len(rows))] == kept
        assert [str(error) for error in rows.bad_rows] == [str(caught.value)]
        said = capsys.readouterr().out
        assert "data.train_files: 1 bad rows are left out" in said and str(caught.value) in said


def test_a_role_that_the_template_writes(tokenizer, config, write, row):
    path = write("t.jsonl", [row(prompt=[{"role": "robot", "content": "w1"}])])
    assert len(RLHFDataset(path, tokenizer, config())) == 1


def test_a_token_beyond_the_embedding(tokenizer, config, write, row, capsys):
    """Padding alone, whose id is the highest here, is no fault; nothing is padded with more than its id."""
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    size = tokenizer.pad_token_id
    context = PromptContext(vocabulary_size=size)
    data = {"train": [row(), row()], "bad": [row(), row(prompt="w1 [PAD]")]}
    good, bad = (write(f"{name}.jsonl", rows) for name, rows in data.items())
    padded = RLHFDataset(good, tokenizer, config(), context=context)[0]
    assert padded["input_ids"].tolist()[:4] == [size] * 4
    for _ in range(2):  # the second time as it is in the cache
        with pytest.raises(
            DataError,
            match=rf"bad\.jsonl row 1, .*token '\[PAD\]' with the id {size}, .*below {size}",
        ):
            RLHFDataset(bad, tokenizer, config(), context=context)
    chats = [
        {"messages": [USER, {"role": "assistant", "content": content}]}
        for content in ("w2", "w2 [PAD]")
    ]
    path = write("chats.jsonl", chats)
    with pytest.raises(DataError, match=r"chats\.jsonl row 1: got the token '\[PAD\]'"):
        MultiTurnSFTDataset(path, tokenizer, config(), vocabulary_size=size)
    skipping = MultiTurnSFTDataset(path, tokenizer, config(on_bad_row="skip"), vocabulary_size=size)
    assert skipping[0]["input_ids"][-1] == size


def test_broken_lines_are_left_out_and_listed(tokenizer, config, write, row, capsys):
    path = write("t.jsonl", [row(), row()])
    path.write_text(path.read_text() + '{"prompt": \n')
    with pytest.raises(DataError, match="line 3: got text that is no JSON"):
        RLHFDataset(path, tokenizer, config())
    assert len(RLHFDataset(path, tokenizer, config(on_bad_row="skip"))) == 2
    assert (
        f"1 bad rows are left out (data.on_bad_row=skip):\n  {path} line 3: got text"
        in capsys.readouterr().out
    )


def test_bad_rows_only(tokenizer, config, write, row):
    path = write("t.jsonl", [row(prompt=None)])
    with pytest.raises(DataError, match="got bad rows only"):
        RLHFDataset(path, tokenizer, config(on_bad_row="skip"))


@pytest.mark.parametrize(
    "tools",
    ["{", '{"name": "f"}', [1], ["f"], 7, [None], [json.dumps([{"name": "f"}])]],
)
def test_a_tool_schema_that_is_no_json(tokenizer, config, write, tools):
    chat = [USER, {"role": "assistant", "content": "w2"}]
    path = write("t.jsonl", [{"messages": chat}, {"messages": chat, "tools": tools}])
    with pytest.raises(
        DataError, match=r"t\.jsonl row 1, column 'tools': got the tool schema .*no JSON object"
    ):
        MultiTurnSFTDataset(path, tokenizer, config())
    rows = MultiTurnSFTDataset(path, tokenizer, config(on_bad_row="skip"))
    assert (len(rows), len(rows.bad_rows)) == (1, 1)


def test_tool_schemas_in_json(make_tokenizer, config, write):
    chat = [USER, {"role": "assistant", "content": "w2"}]
    template = "{% for tool in tools or [] %}{{ tool.name }} {% endfor %}" + STRICT.removesuffix(
        "<assistant>"
    )
    forms = [[{"name": "w7"}], '[{"name": "w7"}]', ['{"name": "w7"}'], ""]
    path = write("t.jsonl", [{"messages": chat, "tools": tools} for tools in forms])
    rows = MultiTurnSFTDataset(path, make_tokenizer(template=template), config())
    assert [rows.num_tokens(row) for row in rows.rows] == [6, 6, 6, 5]


def test_neighbours_of_another_schema(tokenizer, config, write, row):
    write("a.parquet", [row(index=0)])
    write("b.parquet", [row(index=1, prompt="w1", extra_info=None, level=3)])
    write("c.parquet", [row(index=2, extra_info="easy")])
    both = RLHFDataset(str(Path(write("b.parquet", [row(index=1, level=3, prompt="w1")]).parent, "[ab].parquet")),
                       tokenizer, config())  # fmt: skip
    assert [(one["level"], len(one["raw_prompt_ids"])) for one in (both[0], both[1])] == [
        (None, 4),
        (3, 3),
    ]
    with pytest.raises(DataError, match=r"c\.parquet row 0, column 'extra_info': got 'easy'"):
        RLHFDataset(str(Path(both._tables[0].path.parent, "*.parquet")), tokenizer, config())
    write("c.parquet", [{"question": "w1"}])
    with pytest.raises(
        DataError, match=r"c\.parquet: got the columns question, expected a column 'prompt'"
    ):
        RLHFDataset(str(Path(both._tables[0].path.parent, "*.parquet")), tokenizer, config())


def test_a_long_list_names_the_first(capsys):
    print_bad_rows(
        "data.val_files", [DataError(f"f row {number}", got="it") for number in range(23)]
    )
    said = capsys.readouterr().out
    assert said.count("got it") == 20
    assert said.endswith("and 3 more: f row 20, f row 21, f row 22\n")
