# SPDX-License-Identifier: Apache-2.0
"""The data set: what a row yields, what is left out, what is refused."""

import json
import pickle

import pytest
import torch

from quadriga.data import RLHFDataset, collate_fn, tokenizing
from quadriga.data.prompt_lengths import PromptContext
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from tests.unit.data.conftest import TEMPLATE


def words(tokenizer, ids: list[int]) -> list[str]:
    return tokenizer.convert_ids_to_tokens(ids)


def test_a_row(tokenizer, config, write, row):
    path = write("t.parquet", [row(2, index=5)])
    item = RLHFDataset(path, tokenizer, config())[0]
    ids = item["raw_prompt_ids"]
    assert words(tokenizer, ids) == ["<user>", "w5", "w6", "<assistant>"]
    assert item["input_ids"].tolist() == [0, 0, 0, 0, *ids]
    assert item["attention_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert item["position_ids"].tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    rest = {key: value for key, value in item.items() if not key.endswith(("_ids", "_mask"))}
    assert rest == {
        "data_source": "exact_match",
        "ability": "words",
        "reward_model": {"style": "rule", "ground_truth": "w1"},
        "extra_info": {"split": "train", "index": 5},
        "index": 5,
        "item": 0,
        "source_row": f"{path} row 0",
        "tools_kwargs": {},
        "interaction_kwargs": {},
    }


def test_options_and_kwargs(tokenizer, config, write, row):
    extra = {"index": None, "tools_kwargs": {"a": 1}, "interaction_kwargs": {"b": 2}}
    path = write("t.jsonl", [row(), row(extra_info=extra)])
    section = config(
        return_raw_chat=True, return_full_prompt=True, apply_chat_template_kwargs={"shout": True}
    )
    item = RLHFDataset(path, tokenizer, section)[1]
    assert item["raw_prompt"] == [{"role": "user", "content": "w0 w1"}]
    assert item["full_prompts"] == "<user> w0 w1 ! <assistant>"
    assert (item["index"], item["tools_kwargs"], item["interaction_kwargs"]) == (
        1,
        {"a": 1},
        {"b": 2},
    )


@pytest.mark.parametrize(
    ("mode", "kept"),
    [
        ("left", ["w2", "w3", "w4", "<assistant>"]),
        ("right", ["<user>", "w0", "w1", "w2"]),
        ("middle", ["<user>", "w0", "w4", "<assistant>"]),
    ],
)
def test_truncation_reaches_both_forms_of_the_prompt(
    tokenizer, config, write, row, mode: str, kept: list[str]
):
    item = RLHFDataset(
        write("t.jsonl", [row(5)]), tokenizer, config(max_prompt_length=4, truncation=mode)
    )[0]
    assert words(tokenizer, item["raw_prompt_ids"]) == kept
    assert item["input_ids"].tolist() == item["raw_prompt_ids"]
    assert item["attention_mask"].tolist() == [1, 1, 1, 1]


def test_columns_of_verls_rows(tokenizer, config, write, row):
    """An index that is a text, the agent of a row, keywords of tools in `extra_info` or beside it."""
    extra = {
        "index": "6f1c3d1e-52d1-4b5c-9a7e-0c8f5a1b2c3d",
        "tools_kwargs": {"calc": {"create_kwargs": {"a": 1}}},
    }
    beside = row(
        index=2,
        agent_name="tool_agent",
        tools_kwargs={"other": {}},
        interaction_kwargs={"name": "gsm8k"},
    )
    data = RLHFDataset(write("t.jsonl", [row(extra_info=extra), beside]), tokenizer, config())
    batch = DataProto.from_single_dict(collate_fn([data[0], data[1]]))
    columns = batch.repeat(2).non_tensor_batch
    assert columns["index"].tolist() == [extra["index"]] * 2 + [2, 2]
    assert columns["agent_name"].tolist() == [None, None, "tool_agent", "tool_agent"]
    assert columns["tools_kwargs"].tolist() == [extra["tools_kwargs"]] * 2 + [{"other": {}}] * 2
    assert columns["interaction_kwargs"].tolist() == [{}, {}, {"name": "gsm8k"}, {"name": "gsm8k"}]


def test_images_in_a_message_for_a_model_that_reads_text(tokenizer, config, write, row):
    parts = [{"type": "text", "text": "w1"}, {"type": "image", "image": "a.png"}]
    path = write("t.jsonl", [row(), row(prompt=[{"role": "user", "content": parts}])])
    with pytest.raises(
        DataError,
        match="row 1, column 'prompt': got images or videos in a message, for a text-only",
    ):
        RLHFDataset(path, tokenizer, config())


def test_truncation_error_names_file_and_row(tokenizer, config, write, row):
    """When the data set is made, not when the row is reached; of a sample only the rows in use."""
    path = write("t.jsonl", [row(1), row(5)])
    with pytest.raises(
        DataError, match=r"t\.jsonl row 1: got 7 tokens, expected at most data\.max_prompt_length=4"
    ):
        RLHFDataset(path, tokenizer, config(max_prompt_length=4))
    for limits in ({"max_prompt_length": 7}, {"max_prompt_length": 4, "truncation": "left"}):
        assert len(RLHFDataset(path, tokenizer, config(**limits))) == 2
    assert (
        len(RLHFDataset(path, tokenizer, config(max_prompt_length=4, shuffle=False), max_samples=1))
        == 1
    )


def test_a_prompt_that_is_too_long_with_its_tools(make_tokenizer, config, write, row, capsys):
    """It is left out by the filter, and else refused: agent loops do not cut what names tools."""
    template = "{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + TEMPLATE
    tokenizer = make_tokenizer(template=template)
    path = write("t.jsonl", [row(1), row(2, agent_name="tools")])
    context = PromptContext(({"function": {"name": "w7"}},), frozenset({"tools"}))
    for truncation in ("error", "left"):
        with pytest.raises(
            DataError, match=r"t\.jsonl row 1: got a prompt of 5 tokens with its 1 tools, .*=4"
        ):
            RLHFDataset(
                path, tokenizer, config(max_prompt_length=4, truncation=truncation), context=context
            )
    capsys.readouterr()
    section = config(max_prompt_length=4, filter_overlong_prompts=True)
    assert len(RLHFDataset(path, tokenizer, section, context=context)) == 1
    assert (
        "1 prompts measured: the longest has 3 tokens; the chat template writes every message"
        in capsys.readouterr().out
    )
    item = RLHFDataset(path, tokenizer, config(max_prompt_length=5), context=context)[1]
    assert words(tokenizer, item["raw_prompt_ids"])[0] == "w7"
    said = capsys.readouterr().out
    assert "2 prompts measured: the longest has 5 tokens" in said
    assert "1 prompts are measured with the tools" in said


def test_a_template_that_does_not_name_the_tools(tokenizer, config, write, row):
    context = PromptContext(({"function": {"name": "add"}},), frozenset({"tools"}), "tools")
    with pytest.raises(
        DataError, match=r"row 0, column 'prompt': got a prompt that does not name the tools add"
    ):
        RLHFDataset(write("t.jsonl", [row()]), tokenizer, config(), context=context)


def test_tools_that_only_the_messages_name_are_said(
    make_tokenizer, tokenizer, config, write, row, capsys
):
    context = PromptContext(({"function": {"name": "w1"}},), frozenset({"tools"}), "tools")
    path = write("t.jsonl", [row(prompt=[{"role": "user", "content": "w1"}])])
    notice = "1 prompts name the tools in their messages alone: the chat template does not write"
    RLHFDataset(path, tokenizer, config(), context=context)
    assert notice in capsys.readouterr().out
    writes_tools = make_tokenizer(
        template="{% for tool in tools or [] %}{{ tool.function.name }} {% endfor %}" + TEMPLATE
    )
    RLHFDataset(path, writes_tools, config(), context=context)
    assert notice not in capsys.readouterr().out


def test_tools_that_no_row_can_name_are_refused(tokenizer, config, write, row, capsys):
    """A name that is only a part of other words tells the model nothing of the tool."""
    context = PromptContext(({"function": {"name": "w1"}},), frozenset({"tools"}), "tools")
    part = row(prompt=[{"role": "user", "content": "w10"}])
    path = write("t.jsonl", [part, part])
    with pytest.raises(
        DataError, match=r"2 prompts with tools, none of which names a tool, .* system message"
    ):
        RLHFDataset(path, tokenizer, config(), context=context)
    capsys.readouterr()
    # One row that names it is enough to go on, with a notice on the others.
    named = row(prompt=[{"role": "user", "content": "w2 w1"}])
    RLHFDataset(write("n.jsonl", [part, named]), tokenizer, config(), context=context)
    said = capsys.readouterr().out
    assert "1 prompts name the tools in their messages alone" in said
    assert "1 prompts have the names of tools only within other words" in said
    # A name may stand on a line of its own.
    listed = row(prompt=[{"role": "user", "content": "w2\nw1"}])
    RLHFDataset(write("l.jsonl", [listed]), tokenizer, config(), context=context)
    assert "1 prompts name the tools in their messages alone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("bad", "words"),
    [
        ({"prompt": []}, r"b\.jsonl row 1, column 'prompt': got the prompt \[\]"),
        (
            {"extra_info": "text"},
            r"b\.jsonl row 1, column 'extra_info': got 'text', expected a dictionary",
        ),
        (
            {"images": ["a.png"]},
            r"b\.jsonl row 1, column 'images': got images, for a text-only model",
        ),
        (
            {"videos": ["a.mp4"]},
            r"b\.jsonl row 1, column 'videos': got videos, for a text-only model",
        ),
    ],
)
def test_a_bad_row_is_found_when_the_data_set_is_made(bad, words, tokenizer, config, write, row):
    files = [write("a.jsonl", [row(1), row(1)]), write("b.jsonl", [row(1), row(1) | bad])]
    with pytest.raises(DataError, match=words):
        RLHFDataset(files, tokenizer, config())


def test_a_class_that_makes_its_own_rows_is_not_checked(tokenizer, config, write, row):
    class Own(RLHFDataset):
        def __getitem__(self, item):
            return super().__getitem__(0)

    assert (
        len(
            Own(write("t.jsonl", [row(1), row(5)]), tokenizer, config(max_prompt_length=4))[1][
                "raw_prompt_ids"
            ]
        )
        == 3
    )


def test_a_column_has_the_places_of_its_rows(tokenizer, config, write, row):
    files = [
        write("a.jsonl", [row(1), row(1)]),
        write("b.parquet", [row(1, note=str(n)) for n in range(300)]),
    ]
    data = RLHFDataset(files, tokenizer, config(seed=3), max_samples=40)
    found = list(data.column("note"))
    assert [place for place, _ in found] == [data[item]["source_row"] for item in range(40)]
    assert all((value or "") in place.rpartition(" ")[2] for place, value in found)


def test_files_of_different_shape_stand_side_by_side(tokenizer, config, write, row):
    first = write("a.parquet", [row(index=0), row(index=1)])
    second = write(
        "b.jsonl",
        [row(index=2, extra_info={"other": [1]}, reward_model={"ground_truth": 3}, note="n")],
    )
    dataset = RLHFDataset([first, second], tokenizer, config())
    batch = collate_fn([dataset[i] for i in range(len(dataset))])
    assert batch["index"].tolist() == [0, 1, 2]
    assert batch["note"].tolist() == [None, None, "n"]
    assert batch["extra_info"][2] == {"other": [1]}


def test_overlong_rows_are_left_out_and_counted(tokenizer, config, write, row, capsys, monkeypatch):
    path = write("t.parquet", [row(length, index=i) for i, length in enumerate([1, 9, 2, 8, 6])])
    section = config(filter_overlong_prompts=True)
    dataset = RLHFDataset(path, tokenizer, section)
    assert [dataset[i]["index"] for i in range(len(dataset))] == [0, 2, 4]
    assert (
        "data.train_files: 2 of 5 prompts are over 8 tokens and left out" in capsys.readouterr().out
    )

    def never(self, texts):
        raise AssertionError("a second start tokenizes nothing")

    monkeypatch.setattr(tokenizing.ChatEncoder, "encode", never)
    assert len(RLHFDataset(path, tokenizer, section)) == 3
    assert (
        len(
            RLHFDataset(path, tokenizer, config(filter_overlong_prompts=True, max_prompt_length=10))
        )
        == 4
    )


def test_nothing_short_enough(tokenizer, config, write, row):
    with pytest.raises(DataError, match=r"data\.val_files: got prompts of at least 6 tokens"):
        section = config(filter_overlong_prompts=True, max_prompt_length=3)
        RLHFDataset(write("t.jsonl", [row(4), row(6)]), tokenizer, section, is_train=False)


def test_samples_are_drawn_with_the_seed(tokenizer, config, write, row):
    path = write("t.jsonl", [row(index=i) for i in range(30)])

    def indices(is_train: bool = True, **values) -> list[int]:
        dataset = RLHFDataset(path, tokenizer, config(**values), is_train=is_train, max_samples=6)
        return [dataset[i]["index"] for i in range(len(dataset))]

    assert indices(seed=1) == indices(seed=1)
    assert len(set(indices(seed=1))) == 6
    assert indices(seed=1) != indices(seed=2)
    assert indices(shuffle=False) == indices(is_train=False) == list(range(6))
    assert indices(is_train=False, validation_shuffle=True) == indices()


def test_a_sample_larger_than_the_data_is_the_data(tokenizer, config, write, row):
    assert (
        len(RLHFDataset(write("t.jsonl", [row(), row()]), tokenizer, config(), max_samples=9)) == 2
    )


def test_a_missing_column_names_file_column_and_columns(tokenizer, config, write, row):
    path = write("t.parquet", [row()])
    with pytest.raises(
        DataError,
        match=r"t\.parquet: got the columns data_source, prompt,.*'question'.*data\.prompt_key",
    ):
        RLHFDataset(path, tokenizer, config(prompt_key="question"))


def test_all_missing_columns_come_at_once(tokenizer, config, write):
    paths = [
        write("a.jsonl", [{"prompt": "w1"}]),
        write("b.jsonl", [{"data_source": "x", "reward_model": {}}]),
    ]
    with pytest.raises(DataError, match="3 missing columns") as caught:
        RLHFDataset(paths, tokenizer, config())
    lines = str(caught.value).splitlines()
    assert sum("a.jsonl" in line for line in lines) == 2
    assert sum("b.jsonl" in line for line in lines) == 1


def test_prompts_alone_are_enough_where_nothing_is_graded(tokenizer, config, write):
    path = write("t.jsonl", [{"prompt": "w3"}])
    item = RLHFDataset(path, tokenizer, config(), required_columns=["prompt"])[0]
    assert words(tokenizer, item["raw_prompt_ids"]) == ["<user>", "w3", "<assistant>"]
    assert item["index"] == 0


def test_tokenizers_are_checked(make_tokenizer, config, write, row):
    path = write("t.jsonl", [row()])
    with pytest.raises(DataError, match="no chat template"):
        RLHFDataset(path, make_tokenizer(template=None), config())
    section = config(apply_chat_template_kwargs={"chat_template": "{{ messages[0].content }}"})
    assert len(RLHFDataset(path, make_tokenizer(template=None), section)[0]["raw_prompt_ids"]) == 2


def test_state_refuses_other_rows(tokenizer, config, write, row):
    path = write("t.jsonl", [row(index=i) for i in range(4)])
    state = RLHFDataset(path, tokenizer, config()).state_dict()
    RLHFDataset(path, tokenizer, config()).load_state_dict(state)
    with pytest.raises(DataError, match="2 rows that are not the 4 rows of the checkpoint"):
        RLHFDataset(path, tokenizer, config(), max_samples=2).load_state_dict(state)
    write("t.jsonl", [row(index=i) for i in range(1, 5)])
    with pytest.raises(DataError, match="begin a new run"):
        RLHFDataset(path, tokenizer, config()).load_state_dict(state)


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl"])
def test_a_copy_in_another_process_is_the_same(tokenizer, config, write, row, name: str):
    dataset = RLHFDataset(write(name, [row(), row(3, index=1)]), tokenizer, config())
    copy = pickle.loads(pickle.dumps(dataset))
    assert copy[1]["raw_prompt_ids"] == dataset[1]["raw_prompt_ids"]
    assert copy[1]["extra_info"] == dataset[1]["extra_info"]


HALF = "\ud83d"


@pytest.mark.parametrize(
    ("prompt", "said"),
    [
        (f"w0 {HALF} w1", r"got half of a character, '\\ud83d', behind '<user> w0 '"),
        (
            [{"role": "user", "content": HALF}, {"role": "user", "content": "\ude00"}],
            "got half of a character",
        ),
        (None, "got the prompt None"),
        (float("nan"), "got the prompt nan"),
        ({"role": "user", "content": "w0"}, r"got the prompt \{'role'"),
        ([{"role": "user"}, "w0"], r"got the prompt \[\{'role'"),
    ],
)
@pytest.mark.parametrize("filters", [False, True])
def test_a_bad_prompt_is_named_with_file_row_and_column(
    tokenizer, config, write, row, prompt: object, said: str, filters: bool
):
    """Whether all are measured at the start, or each is read when its turn comes."""
    path = write("t.jsonl", [row(), row(prompt=prompt), row()])
    with pytest.raises(DataError, match=rf"t\.jsonl row 1, column 'prompt': {said}"):
        RLHFDataset(path, tokenizer, config(filter_overlong_prompts=filters))[1]


def test_a_row_knows_where_it_stands(tokenizer, config, write, row):
    """In its own file, whatever its index says and wherever it comes in a batch."""
    files = [write("a.jsonl", [row(index=5)] * 3), write("b.jsonl", [row(index=5)] * 2)]
    batch = collate_fn([RLHFDataset(files, tokenizer, config())[item] for item in (4, 0)])
    assert [place.rpartition("/")[2] for place in batch["source_row"]] == [
        "b.jsonl row 1",
        "a.jsonl row 0",
    ]


def test_the_start_says_how_many_prompts_are_continued_or_chats_in_json(
    tokenizer, config, write, row, capsys
):
    user = {"role": "user", "content": "w1"}
    prompts = [[user], [user, {"role": "assistant", "content": "w2"}], json.dumps([user])]
    path = write("t.jsonl", [row(prompt=prompt) for prompt in (*prompts, prompts[2])])
    for max_samples in (-1, -1, 2):  # measured, known from the cache, and a sample
        RLHFDataset(path, tokenizer, config(shuffle=False), max_samples=max_samples)
        said = capsys.readouterr().out
        assert (
            "data.train_files: 1 prompts end with the assistant, whose turn is continued." in said
        )
        assert ("data.train_files: 2 prompts are texts in JSON" in said) is (max_samples == -1)


def test_columns_with_names_of_the_batch_are_moved_into_extra_info(
    tokenizer, config, write, row, capsys
):
    reserved = {
        "num_turns": 3,
        "uid": "mine",
        "responses": ["a"],
        "multi_modal_inputs": 4,
        "input_ids": 5,
    }
    path = write(
        "t.jsonl", [row(level=1, **reserved), row(extra_info={"uid": "its own"}, **reserved)]
    )
    rows = RLHFDataset(path, tokenizer, config(shuffle=False))
    names = "input_ids, multi_modal_inputs, num_turns, responses, uid"
    notice = f"data.train_files: the columns {names} are moved into extra_info,"
    assert notice in capsys.readouterr().out
    first, second = rows[0], rows[1]
    assert first["extra_info"] == {"split": "train", "index": 0} | reserved
    assert second["extra_info"] == reserved | {"uid": "its own"}
    assert first["level"] == 1
    assert first.keys().isdisjoint(reserved.keys() - {"input_ids"})
    assert torch.is_tensor(first["input_ids"])
