# SPDX-License-Identifier: Apache-2.0
"""The files of the record of rollouts: texts of tokens, thinning, a new run, and files that are damaged."""

from pathlib import Path

import pyarrow as pa
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from quadriga.errors import DataError
from quadriga.observe.records import (
    SCHEMA,
    STEP,
    VALIDATION,
    RecordFolder,
    TokenTable,
    samples_of,
    table_for_people,
    token_bytes,
)
from quadriga.observe.records.samples import sample_of


def rows(count: int = 4) -> pa.Table:
    """Rollouts of two tokens with a long text each."""
    columns = {
        "uid": [f"1-{number}" for number in range(count)],
        "score": [float(number) for number in range(count)],
        "prompt_ids": [[0]] * count,
        "response_ids": [[1, 2]] * count,
        "turn_rewards": ["[0.5]"] * count,
        "row": [f'{{"text": "{"".join(map(str, range(9000)))}"}}'] * count,
    }
    arrays = [
        pa.array(columns[field.name], field.type)
        if field.name in columns
        else pa.nulls(count, field.type)
        for field in SCHEMA
    ]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


@pytest.fixture
def record(tmp_path: Path) -> RecordFolder:
    """Steps 1 to 5, and a validation after step 2."""
    folder = RecordFolder(tmp_path)
    folder.begin(0, is_continued=False)
    for step in range(1, 6):
        folder.write(step, STEP, rows(), {"metrics": {"loss": float("nan")}})
    folder.write(2, VALIDATION, rows(), {})
    return folder


def test_tokens_that_are_parts_of_a_character() -> None:
    """Bytes of several tokens are one character; a lone part is shown as such, an unknown id by its number."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<eos>")
    table = TokenTable(*token_bytes(tokenizer))
    ids = tokenizer.encode("a €")
    assert len(ids) == 5
    assert table.decode(ids) == "a €"
    assert table.decode(ids[:3]) == "a \N{REPLACEMENT CHARACTER}"
    assert table.decode([tokenizer.eos_token_id, 999]) == "<eos><|999|>"
    assert table.decode([tokenizer.eos_token_id], skips_special=True) == ""


def test_thinning_takes_texts_first_and_needed_steps_last(record: RecordFolder) -> None:
    """Ids and scores of the steps since a checkpoint stay, whatever the limit."""
    size = record.num_bytes()
    assert record.thin(size, 10, first_needed_step=1) == size
    smaller = record.thin(0.8 * size, 10, first_needed_step=6)
    assert smaller == record.num_bytes() <= 0.72 * size
    assert record.steps() == [1, 2, 3, 4, 5]
    assert record.read(1).rows["row"].null_count == 4
    assert record.read(5).rows["row"].null_count == 0
    record.thin(0, 10, first_needed_step=4)
    assert record.steps() == [4, 5] and record.steps(VALIDATION) == []
    assert record.read(4).rows["score"].to_pylist() == [0.0, 1.0, 2.0, 3.0]
    assert record.read(4).facts["step"] == 4


def test_columns_of_json_are_parsed_for_people(record: RecordFolder) -> None:
    assert table_for_people(record, 1)["turn_rewards"].tolist() == [[0.5]] * 4


def test_a_validation_does_not_take_the_texts_of_its_step(record: RecordFolder) -> None:
    record.write(5, VALIDATION, rows(), {})
    record.thin(0, 10, first_needed_step=5)
    assert record.steps() == record.steps(VALIDATION) == [5]
    assert record.read(5).rows["row"].null_count == 0


def test_the_newest_steps_alone(record: RecordFolder) -> None:
    record.thin(1e9, 2, first_needed_step=3)
    assert record.steps() == [3, 4, 5] and record.steps(VALIDATION) == []
    texts = [record.read(step).rows["row"].null_count for step in (3, 4, 5)]
    assert texts == [4, 0, 0]


def test_what_a_run_finds_in_its_folder(record: RecordFolder) -> None:
    """A resumed run records later steps again; another one moves them aside, twice too."""
    (record.folder / ".unfinished_step_000006.parquet").write_bytes(b"PAR1")
    record.begin(3, is_continued=True)
    assert record.steps() == [1, 2, 3]
    assert not list(record.folder.glob(".unfinished*"))
    for number in (1, 2):
        record.begin(0, is_continued=False)
        assert record.steps() == []
        record.write(1, STEP, rows(), {})
        assert (record.folder / f"superseded_{number}" / "step_000001.parquet").is_file()


def test_damaged_files_are_named(record: RecordFolder) -> None:
    path = record.path(2)
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"step_000002\.parquet: got a damaged file"):
        record.read(2)
    record.write(3, STEP, rows(), {"version": 2})
    with pytest.raises(DataError, match="version 2 of the record"):
        record.read(3)
    with pytest.raises(DataError, match="one of 5 recorded steps, 1 to 5"):
        record.read(9)
    (sample, *_) = samples_of(record, 1)
    assert sample["output"] == "[2 tokens; tokens.parquet is missing]"


def test_a_tool_whose_answer_did_not_fit_is_marked() -> None:
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "add"}}]}
    row = dict.fromkeys(SCHEMA.names) | {"prompt_ids": [1], "response_ids": [2]}
    for reason, messages, is_marked in (
        ("length", [call], True),
        ("length", [call, {"role": "tool"}, {"role": "assistant"}], False),
        ("stop", [call], False),
    ):
        sample = sample_of(row | {"finish_reason": reason, "messages": messages}, None)
        assert sample.get("answer_left_out", False) == is_marked
