# SPDX-License-Identifier: Apache-2.0
"""The loader: its order, its state, and classes from the user's files."""

import gc
import multiprocessing
import os
from collections.abc import Callable, Iterable
from itertools import product
from pathlib import Path

import pytest
import torch
from torch.utils.data import Dataset, SequentialSampler

from quadriga.data import (
    RLHFDataset,
    create_dataloader,
    create_rl_dataset,
    create_rl_sampler,
)
from quadriga.errors import ConfigError, DataError

NUM_ROWS = 10
CONTEXTS = {method: multiprocessing.get_context(method) for method in ("fork", "spawn")}


@pytest.fixture
def path(write, row) -> Path:
    return write("t.jsonl", [row(index=i) for i in range(NUM_ROWS)])


@pytest.fixture
def loader(path: Path, tokenizer, config) -> Callable:
    """A fresh loader over the same ten rows, as a new process would make it."""

    def make(batch_size: int | None = 3, drop_last: bool = True, **values):
        section = config(**values)
        dataset = create_rl_dataset(str(path), section, tokenizer)
        sampler = create_rl_sampler(section, dataset)
        return create_dataloader(
            dataset, section, batch_size=batch_size, sampler=sampler, drop_last=drop_last
        )

    return make


def order(batches: Iterable[dict]) -> list[list[int]]:
    return [batch["index"].tolist() for batch in batches]


def test_epochs_are_seeded_and_differ(loader):
    one = loader(seed=3)
    epochs = [order(one), order(one)]
    assert epochs[0] != epochs[1]
    two = loader(seed=3)
    assert [order(two), order(two)] == epochs
    assert order(loader(seed=4)) != epochs[0]
    assert all(len({index for batch in epoch for index in batch}) == 9 for epoch in epochs)


def test_without_shuffle_rows_come_in_file_order(loader):
    assert order(loader(shuffle=False, drop_last=False)) == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9]]


def test_the_whole_set_at_once(loader):
    assert order(loader(batch_size=None, drop_last=False, shuffle=False)) == [list(range(NUM_ROWS))]


@pytest.mark.parametrize(
    ("num_workers", "shuffle", "num_steps"),
    [*product([0], [True, False], [1, 3, 4, 5]), (1, True, 4), (1, False, 4)],
)
def test_resume_gives_the_remaining_order_and_the_next_epochs(
    loader, num_workers: int, shuffle: bool, num_steps: int
):
    """Stopped in the middle of an epoch, at its last batch and in the second one, three batches an epoch."""

    def steps(one, num_epochs: int):
        for _ in range(num_epochs):
            for batch in one:
                yield batch["index"].tolist(), one

    values = {"dataloader_num_workers": num_workers, "shuffle": shuffle}
    seen, state = [], None
    for number, (indices, one) in enumerate(steps(loader(**values), 3), start=1):
        seen.append(indices)
        if number == num_steps:
            state = one.state_dict()
    assert len(seen) == 9
    resumed = loader(**values)
    resumed.load_state_dict(state)
    left = [indices for indices, _ in steps(resumed, 4)]
    assert left[: 9 - num_steps] == seen[num_steps:]


def test_worker_processes_are_forked_whatever_the_default_is(
    config, monkeypatch: pytest.MonkeyPatch
):
    """A data set that cannot be pickled is fetched from, and what was inherited is not freed."""
    monkeypatch.setattr(
        multiprocessing, "get_context", lambda method=None: CONTEXTS[method or "spawn"]
    )

    class Rows(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, item: int) -> dict:
            return {"item": item, "pid": os.getpid(), "num_frozen": gc.get_freeze_count()}

    rows = Rows()
    loader = create_dataloader(
        rows,
        config(dataloader_num_workers=2),
        batch_size=1,
        sampler=SequentialSampler(rows),
        drop_last=True,
    )
    batches = list(loader)
    assert [batch["item"].tolist() for batch in batches] == [[0], [1], [2], [3]]
    pids = {pid for batch in batches for pid in batch["pid"].tolist()}
    assert len(pids) == 2 and os.getpid() not in pids
    assert min(count for batch in batches for count in batch["num_frozen"].tolist()) > 0


def test_state_before_the_first_batch_changes_nothing(loader):
    plain, asked = loader(), loader()
    asked.state_dict()
    assert order(asked) == order(plain)


def test_starting_a_loader_leaves_the_global_generator_alone(loader):
    before = torch.get_rng_state()
    next(iter(loader()))
    assert torch.equal(torch.get_rng_state(), before)


def test_resuming_in_other_data_is_refused(loader, write, row):
    one = loader()
    next(iter(one))
    state = one.state_dict()
    write("t.jsonl", [row(index=i) for i in range(1, NUM_ROWS + 1)])
    with pytest.raises(DataError, match="not the 10 rows of the checkpoint"):
        other = loader()
        other.load_state_dict(state)
        next(iter(other))


def test_a_batch_larger_than_the_data(loader):
    with pytest.raises(
        DataError, match=r"data\.train_batch_size: got 11 prompts a batch from a data set of 10"
    ):
        loader(batch_size=11)
    assert len(order(loader(batch_size=11, drop_last=False))) == 1


def test_validation_order(path, tokenizer, config):
    dataset = RLHFDataset(path, tokenizer, config())
    assert list(create_rl_sampler(config(shuffle=True), dataset, is_train=False)) == list(
        range(NUM_ROWS)
    )
    shuffled = list(create_rl_sampler(config(validation_shuffle=True), dataset, is_train=False))
    assert sorted(shuffled) == list(range(NUM_ROWS)) != shuffled


USER_FILE = """
from torch.utils.data import Dataset, Sampler

class Plain(Dataset):
    def __init__(self, data_files, tokenizer, config, processor):
        self.data_files = data_files
    def __len__(self):
        return 2
    def __getitem__(self, item):
        return {"index": item}

class Empty(Plain):
    def __len__(self):
        return 0

class Sized(Plain):
    def __init__(self, data_files, tokenizer, config, processor, max_samples=-1):
        self.max_samples = max_samples

class NotADataset:
    pass

class Endless(Dataset):
    def __getitem__(self, item):
        return {}

class Alone(Plain):
    def __init__(self, data_files):
        pass

class Backwards(Sampler):
    def __init__(self, data_source, data_config):
        self.length = len(data_source)
    def __len__(self):
        return self.length
    def __iter__(self):
        return iter(reversed(range(self.length)))

class Curriculum(Backwards):
    def update(self, batch):
        pass
"""


@pytest.fixture
def user_file(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(USER_FILE)
    return str(tmp_path / "mine.py")


def test_a_data_set_class_from_a_file(user_file: str, tokenizer, config):
    section = config(custom_cls={"path": user_file, "name": "Plain"})
    dataset = create_rl_dataset("files", section, tokenizer)
    assert (type(dataset).__name__, dataset.data_files, len(dataset)) == ("Plain", "files", 2)
    with pytest.raises(
        DataError, match=r"data\.train_max_samples: got 3, which Plain does not take"
    ):
        create_rl_dataset("files", section, tokenizer, max_samples=3)
    sized = config(custom_cls={"path": user_file, "name": "Sized"})
    assert create_rl_dataset("files", sized, tokenizer, max_samples=3).max_samples == 3


def test_a_sampler_class_from_a_file(user_file: str, path: Path, tokenizer, config, capsys):
    section = config(sampler={"class_path": user_file, "class_name": "Backwards"})
    dataset = RLHFDataset(path, tokenizer, section)
    assert list(create_rl_sampler(section, dataset)) == list(reversed(range(NUM_ROWS)))
    learning = {"class_path": user_file, "class_name": "Curriculum"}
    assert "data.sampler" not in capsys.readouterr().out
    create_rl_sampler(config(sampler=learning), dataset)
    assert (
        "data.sampler: Curriculum has update() and no state_dict(): a resumed run"
        in capsys.readouterr().out
    )
    with pytest.raises(DataError, match="expected 0 with Curriculum"):
        create_rl_sampler(config(sampler=learning, dataloader_num_workers=1), dataset)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("NotADataset", USER_FILE, "a subclass of object, expected a subclass of .*Dataset"),
        ("Missing", USER_FILE, "no class 'Missing'"),
        (
            "Endless",
            USER_FILE,
            "got Endless without __len__, expected a class with __len__ and __getitem__",
        ),
        (
            "Alone",
            USER_FILE,
            r"got Alone.__init__ \(got an unexpected keyword argument 'tokenizer'\), expected param",
        ),
        ("Plain", "raise RuntimeError('broken file')", "RuntimeError: broken file"),
    ],
)
def test_classes_that_cannot_be_used(
    tmp_path: Path, tokenizer, config, name: str, content: str, message: str
):
    (tmp_path / "bad.py").write_text(content)
    section = config(custom_cls={"path": str(tmp_path / "bad.py"), "name": name})
    with pytest.raises(ConfigError, match=message):
        create_rl_dataset("files", section, tokenizer)


def test_a_class_that_leaves_all_rows_out_hears_of_the_limit(tmp_path: Path, tokenizer, config):
    (tmp_path / "mine.py").write_text(USER_FILE)
    section = config(custom_cls={"path": str(tmp_path / "mine.py"), "name": "Empty"})
    dataset = create_rl_dataset("files", section, tokenizer)
    with pytest.raises(DataError, match=r"without rows \(Empty\), .*data\.max_prompt_length="):
        sampler = create_rl_sampler(section, dataset)
        create_dataloader(dataset, section, batch_size=1, sampler=sampler, drop_last=True)


@pytest.mark.parametrize("hook", ["_build_messages", "maybe_filter_out_long_prompts"])
def test_methods_of_verls_data_set_are_not_passed_over(
    tmp_path: Path, path, tokenizer, config, hook: str
):
    """They would never be called: also where a class between brings them."""
    head = "from quadriga.data import RLHFDataset\n\n\nclass Between(RLHFDataset):\n"
    body = f"    def {hook}(self, example):\n        return example\n\n\nclass Mine(Between):\n    pass\n"
    (tmp_path / "verls.py").write_text(head + body)
    section = config(custom_cls={"path": str(tmp_path / "verls.py"), "name": "Mine"})
    with pytest.raises(
        ConfigError, match=f"got Mine, which overrides {hook}, expected .*QUADRIGA_VERL=1"
    ):
        create_rl_dataset(path, section, tokenizer)


def test_a_class_file_that_is_not_there(tokenizer, config):
    with pytest.raises(ConfigError, match=r"data\.custom_cls: got 'no\.py', which is not a file"):
        create_rl_dataset("files", config(custom_cls={"path": "no.py", "name": "X"}), tokenizer)
