# SPDX-License-Identifier: Apache-2.0
"""Rows that are generated between batches, samplers that learn, and that both go on where they were."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.data import (
    AbstractCurriculumSampler,
    DynamicGenDataset,
    SuccessRateSampler,
    create_dataloader,
    create_rl_dataset,
    create_rl_sampler,
)
from quadriga.errors import ConfigError, DataError
from quadriga.protocol import DataProto
from quadriga.trainer.prompts import PromptStream

GENERATOR = """
from quadriga.data import AbstractDataGenerator

class Harder(AbstractDataGenerator):
    count = 0
    def generate(self, dataset):
        self.count += 1
        first, number = dataset.dataframe[0], self.config.options["rows"]
        rows = [{**first, "extra_info": {"index": 100 * self.count + one}} for one in range(number)]
        long = {**first, "prompt": [{"role": "user", "content": "far too long " * 50}]}
        return [*rows, long] if dataset.batch is not None else rows
    def state_dict(self):
        return {"count": self.count}
    def load_state_dict(self, state):
        self.count = state["count"]

class Nothing(AbstractDataGenerator):
    def generate(self, dataset):
        return []

class Wrong(Nothing):
    def generate(self, dataset):
        return ["a text"]

class Mixed(Nothing):
    def generate(self, dataset):
        return [{**dataset.dataframe[0], "x": 1}, {**dataset.dataframe[0], "x": "1"}]

class Other:
    pass
"""


@pytest.fixture
def make(write, row, tokenizer, config, tmp_path: Path) -> Callable[..., Any]:
    """`make(name, **values)`: the section and a training set of six rows, with a generator of that name."""
    file = write("t.jsonl", [row(index=i) for i in range(6)])
    (tmp_path / "gen.py").write_text(GENERATOR)

    def build(name: str = "Harder", **values: Any) -> Any:
        datagen = {"path": str(tmp_path / "gen.py"), "name": name, "options": {"rows": 2}}
        given = {
            "cache_dir": str(tmp_path / "cache"),
            "train_batch_size": 2,
            "filter_overlong_prompts": True,
        }
        section = config(datagen=datagen, **given | values)
        return section, create_rl_dataset(str(file), section, tokenizer)

    return build


def stream(section: Any, rows: Any) -> PromptStream:
    sampler = create_rl_sampler(section, rows)
    loader = create_dataloader(rows, section, batch_size=2, sampler=sampler, drop_last=True)
    return PromptStream(loader, num_epochs=2)


def taught(prompts: PromptStream, rows: Any, rate: Callable[[int], float]) -> Iterator[list[int]]:
    """The rows of each step; each is graded by `rate` of its number, and sampler and data set are told."""
    while True:
        batch = prompts.take().repeat(2)
        items = batch.non_tensor_batch["item"].tolist()
        batch.batch["token_level_scores"] = torch.tensor([[0.0, rate(item)] for item in items])
        for told in ("update", "on_batch_end"):
            for one in (prompts.loader.sampler, rows):
                if hasattr(one, told):
                    getattr(one, told)(batch=batch)
        yield batch.non_tensor_batch["index"].tolist()[::2]


@pytest.mark.parametrize("curriculum", [False, True])
@pytest.mark.parametrize("num_steps", [1, 3, 4])
def test_a_resumed_run_sees_the_same_rows(
    make, tmp_path: Path, curriculum: bool, num_steps: int
) -> None:
    """Rows that were generated, the order and the curriculum go on from the state, in the middle of a pass and at its
    end, without the cache."""
    values: dict[str, Any] = {"seed": 3}
    if curriculum:
        values["sampler"] = {
            "class_path": "pkg://quadriga.data.curriculum",
            "class_name": "SuccessRateSampler",
        }

    def rate(item: int) -> float:
        return item % 3 / 2

    section, rows = make(**values)
    assert type(rows) is DynamicGenDataset
    prompts = stream(section, rows)
    steps, seen, state, epochs = taught(prompts, rows, rate), [], {}, []
    for number in range(1, 10):
        seen.append(next(steps))
        epochs.append(prompts.epoch)
        if number == num_steps:
            state = torch.load(_saved(tmp_path, prompts.state_dict()), weights_only=True)
    assert len(rows) == 6 + 2 * 9 and any(index >= 100 for indices in seen for index in indices)
    assert epochs == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    (section, rows), cache = make(**values), tmp_path / "cache" / "generated"
    for file in cache.iterdir():
        file.unlink()
    prompts = stream(section, rows)
    prompts.load_state_dict(state)
    assert [
        indices for indices, _ in zip(taught(prompts, rows, rate), seen[num_steps:], strict=False)
    ] == seen[num_steps:]


def _saved(folder: Path, state: dict[str, Any]) -> Path:
    torch.save(state, folder / "state.pt")
    return folder / "state.pt"


def test_new_rows_come_with_the_next_pass(make, capsys: pytest.CaptureFixture[str]) -> None:
    section, rows = make(shuffle=False)
    steps = taught(stream(section, rows), rows, lambda item: 0.0)
    assert [next(steps) for _ in range(6)] == [[0, 1], [2, 3], [4, 5], [0, 1], [2, 3], [4, 5]]
    assert next(steps) == [100, 101]
    assert (
        len(rows) == len(rows.dataframe) == 6 + 2 * 7
        and rows[7]["index"] == 101
        and rows[7]["item"] == 7
    )
    assert ": 1 of 3 prompts are over" in capsys.readouterr().out


def test_what_is_generated_is_checked(make, tokenizer, config) -> None:
    with pytest.raises(
        ConfigError, match=r"data\.datagen: got Other, .*expected a subclass of .*AbstractDataGen"
    ):
        make("Other")
    section, rows = make("Nothing")
    rows.on_batch_end(None)
    assert len(rows) == 6
    for name, words in (
        ("Wrong", "Wrong.generate: got 'a text', expected rows"),
        ("Mixed", "columns of one type"),
    ):
        _, rows = make(name)
        with pytest.raises(DataError, match=words):
            rows.on_batch_end(None)
    section, rows = make(dataloader_num_workers=1)
    with pytest.raises(
        DataError, match=r"dataloader_num_workers: got 1, expected 0 with data\.datagen"
    ):
        create_rl_sampler(section, rows)
    with pytest.raises(ValueError, match=r"data\.custom_cls or data\.datagen"):
        make(custom_cls={"path": "a.py", "name": "A"})


def test_rows_that_are_solved_at_times_are_drawn_most(config) -> None:
    """Of 8 rows two are always solved, two never and four at times; no batch has a row twice."""
    sampler = SuccessRateSampler(range(8), config(train_batch_size=2, seed=1))
    assert isinstance(sampler, AbstractCurriculumSampler) and len(sampler) == 8
    rates, counts = [0.0, 0.0, 1.0, 1.0, 0.5, 0.5, 0.25, 0.75], np.zeros(8)

    def update(items: list[int]) -> None:
        columns = {"item": np.repeat(items, 4).astype(object)}
        scores = torch.tensor([float(one < 4 * rates[item]) for item in items for one in range(4)])
        sampler.update(DataProto.from_dict({"token_level_scores": scores[:, None]}, columns))

    update([7, 1])
    assert sampler.rates[7] == 0.75 and sampler.rates[1] == 0.0 and sampler.rates[0].isnan()
    for _ in range(50):
        order = iter(sampler)
        for items in zip(order, order, strict=True):
            assert items[0] != items[1]
            counts[list(items)] += 1
            update(list(items))
    assert counts.sum() == 400 and np.allclose(sampler.rates, rates)
    assert counts[:4].sum() < 100 and counts[:4].min() > 0
    with pytest.raises(DataError, match="a batch without the column `item`"):
        sampler.update(DataProto.from_dict({"token_level_scores": torch.zeros(2, 1)}))
