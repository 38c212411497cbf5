# SPDX-License-Identifier: Apache-2.0
"""Rows of several files by their shares: how many of each, in which order, and the same ones after a resume."""

from collections import Counter

import numpy as np
import pytest
from pydantic import ValidationError
from torch.utils.data import Dataset

from quadriga.config import DataConfig
from quadriga.data.curriculum import MixtureSampler
from quadriga.data.loading import create_dataloader, create_rl_dataset, create_rl_sampler
from quadriga.errors import DataError


class Entries(Dataset):
    """Items 0, 1, ... of entries that have so many."""

    def __init__(self, *sizes: int) -> None:
        ends = np.cumsum(sizes)
        self.items = [np.arange(end - size, end) for size, end in zip(sizes, ends, strict=True)]

    def __len__(self) -> int:
        return sum(map(len, self.items))

    def items_by_entry(self) -> list[np.ndarray]:
        return self.items


def sampler(*sizes: int, shares: list[float], **values) -> MixtureSampler:
    config = DataConfig(train_files=["a", "b", "c"][: len(shares)], mixture=shares, **values)
    return MixtureSampler(Entries(*sizes), config)


@pytest.mark.parametrize(("until", "expected"), [("first", [70, 30]), ("all", [700, 300])])
def test_an_epoch_ends_with_the_first_entry_or_with_all(until: str, expected: list[int]):
    one = sampler(70, 300, shares=[7, 3], mixture_until=until)
    drawn = list(one)
    assert len(one) == len(drawn) == sum(expected)
    counts = Counter(drawn)
    assert [sum(counts[item] for item in items) for items in one._items] == expected
    repeats = [{counts[item] for item in items} for items in one._items]
    assert repeats == ([{1}, {0, 1}] if until == "first" else [{10}, {1}])


@pytest.mark.parametrize("shares", [[1, 1], [7, 3], [0.9, 0.1], [1, 2, 4]])
def test_each_run_of_rows_has_the_shares(shares: list[float]):
    one = sampler(*[200] * len(shares), shares=shares)
    is_of = np.concatenate([np.full(200, number) for number in range(len(shares))])[list(one)]
    for number, share in enumerate(np.array(shares) / sum(shares)):
        for size in (10, 32):
            counts = np.convolve(is_of == number, np.ones(size), mode="valid")
            assert abs(counts - share * size).max() <= 2


def test_passes_are_shuffled_by_the_seed_or_go_on():
    one, other = sampler(20, 90, shares=[1, 1]), sampler(20, 90, shares=[1, 1])
    first, second = list(one), list(one)
    assert list(other) == first != second
    assert list(sampler(20, 90, shares=[1, 1], seed=2)) != first
    plain = sampler(20, 50, shares=[1, 1], shuffle=False)
    passes = [[item - 20 for item in plain if item >= 20] for _ in range(3)]
    assert passes == [[*range(20)], [*range(20, 40)], [*range(40, 50), *range(10)]]


def test_a_resumed_run_draws_the_same_rows(tokenizer, config, write, row):
    sizes = {"a": 6, "b": 20}
    files = [
        str(write(f"{name}.jsonl", [row(index=i, data_source=name) for i in range(size)]))
        for name, size in sizes.items()
    ]
    values = config(train_files=files, mixture=[1, 3], max_prompt_length=16)

    def loader():
        rows = create_rl_dataset(files, values, tokenizer)
        return create_dataloader(
            rows, values, batch_size=4, sampler=create_rl_sampler(values, rows), drop_last=True
        )

    def names(batches) -> list[list[str]]:
        return [
            [f"{a}{b}" for a, b in zip(batch["data_source"], batch["index"], strict=True)]
            for batch in batches
        ]

    whole = loader()
    expected = names(whole) + names(whole)
    assert all(sorted(name[0] for name in batch) == ["a", "b", "b", "b"] for batch in expected)
    assert len(expected) == 2 * len(whole) == 12
    cut = loader()
    taken = iter(cut)
    begun = names(next(taken) for _ in range(3))
    state = cut.state_dict()
    resumed = loader()
    resumed.load_state_dict(state)
    assert begun + names(resumed) + names(resumed) == expected


def test_what_cannot_be_mixed(tokenizer, config, write, row):
    with pytest.raises(ValidationError, match=r"a share for each entry of data\.train_files, 2"):
        DataConfig(train_files=["a", "b"], mixture=[1])
    with pytest.raises(ValidationError, match="greater than 0"):
        DataConfig(train_files=["a", "b"], mixture=[1, 0])
    with pytest.raises(
        DataError, match=r"data\.mixture: got entry 1 of data\.train_files without a row in use"
    ):
        sampler(3, 0, shares=[1, 1])
    with pytest.raises(
        DataError, match=r"data\.mixture: got a list, expected a data set with items_by_entry"
    ):
        MixtureSampler([1], DataConfig(train_files="a", mixture=[1]))
