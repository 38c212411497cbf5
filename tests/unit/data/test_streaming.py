# SPDX-License-Identifier: Apache-2.0
"""Rows that are read as they are needed: which, in which order, and where a resumed run goes on."""

import json
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from quadriga.config import load_config, training_findings
from quadriga.data import RLHFDataset, create_dataloader, create_rl_dataset, create_rl_sampler
from quadriga.errors import DataError

SIZE = 4


@pytest.fixture
def files(write, row, tmp_path: Path) -> list[str]:
    """Ten rows of Parquet in groups of six, and seven lines of JSON; rows 3 and 12 are too long, and row 14 is none."""
    rows = [row(index=i, num_words=20 if i in (3, 12) else 2) for i in range(17)]
    pq.write_table(pa.Table.from_pylist(rows[:10]), tmp_path / "a.parquet", row_group_size=6)
    write("b.jsonl", rows[10:])
    lines = (tmp_path / "b.jsonl").read_text().splitlines()
    lines[4] = "no JSON"
    (tmp_path / "b.jsonl").write_text("\n".join(lines) + "\n")
    return [str(tmp_path / "a.parquet"), str(tmp_path / "b.jsonl")]


@pytest.fixture
def loader(files, tokenizer, config) -> Callable[..., Any]:
    """Batches of two rows."""

    def make(paths: Any = None, **values: Any) -> Any:
        values = {
            "filter_overlong_prompts": True,
            "on_bad_row": "skip",
            "shuffle": False,
            "streaming": SIZE,
        } | values
        section = config(**values)
        dataset = create_rl_dataset(paths or files, section, tokenizer)
        sampler = create_rl_sampler(section, dataset)
        return create_dataloader(dataset, section, batch_size=2, sampler=sampler, drop_last=True)

    return make


def taken(one: Any, count: int) -> list[int]:
    return [index for batch in islice(one, count) for index in batch["index"].tolist()]


def test_rows_are_those_of_the_files_pass_after_pass(
    loader, files, tokenizer, config, capsys
) -> None:
    """As the data set has them that reads the files at once; what is left out is told when it is read."""
    whole = RLHFDataset(files, tokenizer, config(filter_overlong_prompts=True, on_bad_row="skip"))
    expected = [whole[item] for item in range(len(whole))]
    one = loader()
    rows = [one.dataset[item] for item in range(2 * len(whole))]
    assert [row["index"] for row in rows] == 2 * [row["index"] for row in expected]
    assert [row["item"] for row in rows] == list(range(len(rows)))
    for row, other in zip(rows, expected, strict=False):
        assert (
            row["raw_prompt_ids"] == other["raw_prompt_ids"]
            and row["source_row"] == other["source_row"]
        )
    told = capsys.readouterr().out
    assert "data.streaming: rows are read as they are needed, in the order of the files." in told
    assert "b.jsonl line 5: got text that is no JSON" in told
    assert "1 of 4 prompts are over 8 tokens and left out" in told


def test_rows_are_shuffled_among_those_that_are_read_together(loader) -> None:
    """Each pass in an order of its own, by the seed."""
    order = taken(loader(shuffle=True), 14)
    passes = order[:14], order[14:]
    blocks = [0, 1, 2], [4, 5], [6, 7, 8, 9], [10, 11, 13], [15, 16]
    for one in passes:
        assert [
            sorted(one[start:end]) for start, end in ((0, 3), (3, 5), (5, 9), (9, 12), (12, 14))
        ] == list(blocks)
    assert passes[0] != passes[1] and passes[0] != sorted(passes[0])
    assert taken(loader(shuffle=True), 14) == order
    assert taken(loader(shuffle=True, seed=7), 14) != order


@pytest.mark.parametrize("place", [*range(9), 15])
def test_a_resumed_run_goes_on_at_the_same_row(loader, place: int) -> None:
    """Within a block, at its end, at the ends of a group, of a file and of a pass."""
    alone, first, second = (loader(shuffle=True) for _ in range(3))
    expected = taken(alone, place + 8)
    batches = iter(first)
    for _ in range(place):
        next(batches)
    second.load_state_dict(first.state_dict())
    assert taken(second, 8) == expected[2 * place :]


def test_nothing_is_read_before_its_turn(loader, files) -> None:
    """A row that ends a run does so when its block is read, and is named by its number in the file."""
    lines = Path(files[1]).read_text().splitlines()
    lines[4] = json.dumps({**json.loads(lines[3]), "prompt": []})
    Path(files[1]).write_text("\n".join(lines))
    one = loader(on_bad_row="error")
    batches = iter(one)
    assert [next(batches)["index"].tolist() for _ in range(6)][-1] == [11, 13]
    with pytest.raises(DataError, match=r"b\.jsonl row 4, column 'prompt'"):
        next(batches)


def test_what_cannot_be_gone_on_with_is_refused(loader, files, write, row) -> None:
    """Other files than those of a state; rows of which none can be used; a column that comes late."""
    state = loader().state_dict()
    write("b.jsonl", [row(index=1)])
    with pytest.raises(DataError, match="files of other sizes"):
        other = loader()
        other.load_state_dict(state)
        next(iter(other))
    long = str(write("long.jsonl", [row(num_words=20)] * 3))
    with pytest.raises(DataError, match="a pass over the files without a row that can be used"):
        next(iter(loader(long)))
    late = str(write("late.jsonl", [*([row()] * SIZE), row(more=1)]))
    with pytest.raises(
        DataError, match=r"late\.jsonl: got the new column 'more' at or after row 4"
    ):
        taken(loader(late), 3)
    with pytest.raises(DataError, match=r"empty\.jsonl: got no rows"):
        loader(str(write("empty.jsonl", [])))


def test_settings_that_need_all_rows_are_refused(files) -> None:
    def refused(*changes: str) -> set[str]:
        problems, _ = training_findings(
            load_config([f"data.train_files={files[0]}", *changes]).config
        )
        return {one.where for one in problems if "with data.streaming=4" in str(one)}

    others = [
        "trainer.save_freq=after_each_epoch",
        "data.dataloader_num_workers=1",
        "data.train_max_samples=3",
    ]
    others += ["trainer.total_epochs=2", "data.mixture=[1]"]
    assert refused("data.streaming=4") == {"trainer.total_training_steps"}
    assert refused("data.streaming=4", *others) == {one.partition("=")[0] for one in others} | {
        "trainer.total_training_steps"
    }
    assert not refused(*others) and not refused(
        "data.streaming=4", "trainer.total_training_steps=3"
    )
