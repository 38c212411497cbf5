# SPDX-License-Identifier: Apache-2.0
"""Prompts without end, and the place in them."""

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, Sampler

from quadriga.config import DataConfig
from quadriga.data import RLHFDataset
from quadriga.data.loading import create_dataloader, create_rl_sampler
from quadriga.errors import CheckpointError, DataError
from quadriga.protocol import DataProto
from quadriga.trainer.prompts import PromptStream, assign_row_uids
from quadriga_recipes.playground import build_tokenizer


class Numbers(Dataset):
    """Rows that are their numbers."""

    def __len__(self) -> int:
        return 7

    def __getitem__(self, row: int) -> dict[str, Any]:
        return {"input_ids": torch.tensor([row])}


def stream(num_workers: int = 0) -> PromptStream:
    """Batches of 3 of 7 rows, in an order that differs in each epoch."""
    config = DataConfig(shuffle=True, seed=5, dataloader_num_workers=num_workers)
    sampler = create_rl_sampler(config, Numbers())
    return PromptStream(
        create_dataloader(Numbers(), config, batch_size=3, sampler=sampler, drop_last=True)
    )


def taken(prompts: PromptStream, count: int) -> list[list[int]]:
    return [prompts.take().batch["input_ids"].flatten().tolist() for _ in range(count)]


def test_pass_follows_pass() -> None:
    """Two batches an epoch, each epoch in an order of its own; epochs are counted by batches."""
    prompts = stream()
    epochs = []
    batches = []
    for _ in range(6):
        batches += taken(prompts, 1)
        epochs.append(prompts.epoch)
    assert epochs == [0, 0, 1, 1, 2, 2]
    assert len({tuple(batch) for batch in batches}) == 6


def test_the_share_of_the_passes() -> None:
    """Two passes of two batches; what is taken behind them counts no more."""
    prompts = stream()
    prompts.num_epochs, shares = 2, []
    for _ in range(5):
        taken(prompts, 1)
        shares.append(prompts.share_taken)
    assert shares == [0.25, 0.5, 0.75, 1.0, 1.0]
    prompts.num_epochs = None
    assert prompts.share_taken == 0.0


@pytest.mark.parametrize(("place", "num_workers"), [*((place, 0) for place in range(1, 7)), (3, 1)])
def test_it_goes_on_from_every_place(place: int, num_workers: int) -> None:
    """In the middle of an epoch, at its end, and after it, as if nothing had happened."""
    alone = stream(num_workers)
    before, after = taken(alone, place), taken(alone, 5)
    first = stream(num_workers)
    assert taken(first, place) == before
    second = stream(num_workers)
    second.load_state_dict(first.state_dict())
    assert taken(second, 5) == after
    assert second.num_taken == alone.num_taken


def test_loader_without_batches() -> None:
    class Empty:
        def __iter__(self) -> Any:
            return iter(())

        def __len__(self) -> int:
            return 0

    with pytest.raises(DataError, match="two passes in a row without a batch"):
        PromptStream(Empty()).take()


def test_place_of_another_version() -> None:
    with pytest.raises(CheckpointError, match="place in the training data: got entries _snapshot"):
        stream().load_state_dict({"_snapshot": 3})


class Curriculum(Sampler):
    """A sampler that learns from batches."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(7))

    def __len__(self) -> int:
        return 7

    def update(self, batch: Any) -> None: ...


class Resumable(Curriculum):
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@pytest.mark.parametrize(("sampler", "is_refused"), [(Curriculum(), True), (Resumable(), False)])
def test_a_sampler_that_forgets_what_it_learned_is_not_resumed(
    sampler: Sampler, is_refused: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """A resumed run would take other rows than the run that was cut short: it is said at start, and refused later."""
    loader = create_dataloader(
        Numbers(), DataConfig(), batch_size=3, sampler=sampler, drop_last=True
    )
    prompts = PromptStream(loader)
    assert not caplog.text
    PromptStream(loader, is_saved=True)
    assert ("no run can resume from the checkpoints: got Curriculum" in caplog.text) == is_refused
    assert bool(prompts.resume_obstacle) == is_refused
    state = prompts.state_dict()
    if is_refused:
        said = (
            r"data\.sampler: got Curriculum, whose `update` .* expected both methods: without them"
        )
        with pytest.raises(CheckpointError, match=said):
            prompts.load_state_dict(state)
    else:
        prompts.load_state_dict(state)


class Changed(RLHFDataset):
    """A class of a user's: its rows are read when they are due."""

    def __getitem__(self, item: int) -> dict[str, Any]:
        return super().__getitem__(item)


@pytest.fixture
def read(tmp_path: Path) -> Any:
    """A stream of batches of 2 of 5 prompts."""

    def make(cls: type[RLHFDataset] = RLHFDataset, **values: Any) -> PromptStream:
        rows = [
            {
                "prompt": [{"role": "user", "content": f"{row}+1="}],
                "data_source": "exact_match",
                "reward_model": {},
            }
            for row in range(5)
        ]
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        config = DataConfig(
            shuffle=True, seed=5, max_prompt_length=32, cache_dir=str(tmp_path), **values
        )
        dataset = cls(str(path), build_tokenizer(), config)
        sampler = create_rl_sampler(config, dataset)
        return PromptStream(
            create_dataloader(dataset, config, batch_size=2, sampler=sampler, drop_last=True)
        )

    return make


def items(prompts: PromptStream, count: int) -> list[list[int]]:
    return [prompts.take().non_tensor_batch["item"].tolist() for _ in range(count)]


def test_a_thread_reads_the_next_batch_before_it_is_taken(
    read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four rows are there after one batch of two; and nobody else uses the tokenizer that the thread has."""
    plain, seen, is_ahead = RLHFDataset.__getitem__, list[str](), threading.Event()

    def getitem(self: RLHFDataset, item: int) -> dict[str, Any]:
        seen.append(threading.current_thread().name)
        if len(seen) == 4:
            is_ahead.set()
        return plain(self, item)

    monkeypatch.setattr(RLHFDataset, "__getitem__", getitem)
    prompts = read()
    taken = items(prompts, 1)
    assert is_ahead.wait(60) and all(name.startswith("reading prompts") for name in seen)
    dataset = prompts.loader.dataset
    assert dataset.encoder.tokenizer is not dataset.tokenizer
    monkeypatch.undo()
    alone = read(Changed)
    assert alone.loader.dataset.encoder.tokenizer is alone.loader.dataset.tokenizer
    assert taken + items(prompts, 5) == items(alone, 6)


@pytest.mark.parametrize("place", range(5))
def test_what_is_read_ahead_is_read_again_after_a_resume(read: Any, place: int) -> None:
    """The place is the one behind the last batch that was taken, before the first batch too; a state that is restored
    into a stream that is ahead holds; and a stream that reads ahead goes on from one that does not."""
    alone = read(Changed)
    before, state = items(alone, place), alone.state_dict()
    after = items(alone, 4)
    prompts = read()
    assert items(prompts, place) == before
    kept = prompts.state_dict()
    assert items(prompts, 4) == after
    for stream, given in ((read(), kept), (prompts, kept), (read(), state), (read(Changed), kept)):
        stream.load_state_dict(given)
        assert items(stream, 4) == after and stream.num_taken == place + 4


def test_an_error_is_raised_by_the_batch_that_has_it(
    read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not while the batch before is learned from."""
    prompts = read()
    first, second = items(read(), 2)
    plain = RLHFDataset.__getitem__

    def getitem(self: RLHFDataset, item: int) -> dict[str, Any]:
        if item == second[1]:
            raise DataError("rows.jsonl row 1", got="an image that is gone", expected="it")
        return plain(self, item)

    monkeypatch.setattr(RLHFDataset, "__getitem__", getitem)
    assert items(prompts, 1) == [first]
    with pytest.raises(DataError, match="an image that is gone"):
        prompts.take()


def write_sums(path: Path, first: int, count: int) -> str:
    rows = [
        {
            "data_source": "x",
            "prompt": f"{'1' * (n % 5)}{n}+1=",
            "reward_model": {"ground_truth": ""},
            "n": n,
        }
        for n in range(first, first + count)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def uids_of_validation(files: list[str], batch_size: int, **values: Any) -> dict[int, str]:
    """The `uid` of each row by its column `n`."""
    config = DataConfig(cache_dir=str(Path(files[0]).parent), **values)
    rows = RLHFDataset(files, build_tokenizer(), config, is_train=False)
    uids: dict[int, str] = {}
    num_prompts = 0
    sampler = create_rl_sampler(config, rows, is_train=False)
    for columns in create_dataloader(
        rows, config, batch_size=batch_size, sampler=sampler, drop_last=False
    ):
        prompts = assign_row_uids(DataProto.from_single_dict(columns), rows, num_prompts)
        num_prompts += len(prompts)
        uids |= zip(prompts.non_tensor_batch["n"], prompts.non_tensor_batch["uid"], strict=True)
    return uids


def test_uids_of_validation_follow_the_row_in_its_file(tmp_path: Path) -> None:
    files = [write_sums(tmp_path / "a.jsonl", 0, 5), write_sums(tmp_path / "b.jsonl", 5, 4)]
    whole = uids_of_validation(files, batch_size=9)
    assert len(set(whole.values())) == 9
    assert uids_of_validation(files, batch_size=2) == whole
    longer_first_file = [write_sums(tmp_path / "c.jsonl", 100, 7), files[1]]
    assert uids_of_validation(longer_first_file, batch_size=4)[5] == whole[5]
    short_only = uids_of_validation(
        files, batch_size=3, max_prompt_length=9, filter_overlong_prompts=True
    )
    assert 0 < len(short_only) < 9
    assert short_only.items() <= whole.items()


def test_uids_of_rows_that_a_class_makes_follow_their_order() -> None:
    batches = [DataProto.from_single_dict({"input_ids": torch.zeros(size, 1)}) for size in (2, 1)]
    uids = [
        list(assign_row_uids(batch, Numbers(), first).non_tensor_batch["uid"])
        for batch, first in zip(batches, (0, 2), strict=True)
    ]
    assert uids == [["row-0", "row-1"], ["row-2"]]
