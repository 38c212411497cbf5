# SPDX-License-Identifier: Apache-2.0
"""The state of an engine, written in the background. tests/numerics has the layouts of several processes."""

import threading
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter

from quadriga.engines.checkpoint import StateWriter, load_state
from quadriga.engines.process_group import ALONE
from quadriga.errors import CheckpointError

WAIT_S = 60.0


def make_state(
    fill: float = 1.5, kinds: tuple[str, ...] = ("exp_avg", "exp_avg_sq")
) -> dict[str, torch.Tensor]:
    """Two parameters and their moments."""
    shapes = {"up": (3, 2), "down": (2,)}
    state = {f"model.{name}": torch.full(shape, fill) for name, shape in shapes.items()}
    moments = {
        f"optimizer.{kind}.{name}": torch.full(shape, fill)
        for kind in kinds
        for name, shape in shapes.items()
    }
    return state | moments | {"optimizer.step.up": torch.tensor(fill)}


def write(folder: Path, state: dict[str, torch.Tensor]) -> Path:
    writer = StateWriter(ALONE)
    writer.start({folder: state})
    assert writer.is_written(wait=True)
    return folder


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written until it is set."""
    opened, write_data = threading.Event(), FileSystemWriter.write_data

    def waits(writer: FileSystemWriter, *args: object) -> object:
        assert opened.wait(WAIT_S)
        return write_data(writer, *args)

    monkeypatch.setattr(FileSystemWriter, "write_data", waits)
    return opened


def test_training_goes_on_while_it_is_written(gate: threading.Event, tmp_path: Path) -> None:
    """What the engine does to its memory after `start` has returned does not change what is written."""
    state, done = make_state(), threading.Event()
    writer = StateWriter(ALONE)
    writer.start({tmp_path / "state": state}, done.set)
    assert not writer.is_written() and not done.is_set()
    assert not list((tmp_path / "state").iterdir())
    for tensor in state.values():
        tensor.fill_(-7.0)
    gate.set()
    assert writer.is_written(wait=True) and writer.is_written() and done.is_set()
    load_state(tmp_path / "state", state, ALONE)
    for name, tensor in make_state().items():
        assert torch.equal(state[name], tensor), name


def test_next_save_waits_for_the_last(gate: threading.Event, tmp_path: Path) -> None:
    writer = StateWriter(ALONE)
    writer.start({tmp_path / "one": make_state(1.0)})
    threading.Timer(0.1, gate.set).start()
    writer.start({tmp_path / "two": make_state(2.0)})
    assert (tmp_path / "one" / ".metadata").is_file()
    assert writer.is_written(wait=True)
    for name, fill in (("one", 1.0), ("two", 2.0)):
        state = make_state(0.0)
        load_state(tmp_path / name, state, ALONE)
        assert all(bool((tensor == fill).all()) for tensor in state.values())


@pytest.mark.parametrize("call", ["is_written", "start"])
def test_error_of_the_thread_is_raised_by_the_next_call(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It names the file, there is no list of chunks, and it is raised once."""
    file = tmp_path / "state" / "__0_0.distcp"

    def fails(*args: object) -> None:
        raise OSError(28, "No space left on device", str(file))

    writer = StateWriter(ALONE)
    with monkeypatch.context() as patch:
        patch.setattr(FileSystemWriter, "write_data", fails)
        writer.start({tmp_path / "state": make_state()})
        with pytest.raises(
            CheckpointError, match=rf"{file}: got OSError: \[Errno 28\] No space left"
        ):
            writer.is_written(wait=True) if call == "is_written" else writer.start(
                {tmp_path / "next": make_state()}
            )
    assert not (tmp_path / "state" / ".metadata").exists()
    writer.start({tmp_path / "next": make_state()})
    assert writer.is_written(wait=True)


def test_bug_in_the_thread_is_not_lost(tmp_path: Path) -> None:
    """Its traceback is a note."""

    def fails() -> None:
        raise ZeroDivisionError("ours")

    writer = StateWriter(ALONE)
    writer.start({tmp_path / "state": make_state()}, fails)
    with pytest.raises(CheckpointError, match="ZeroDivisionError: ours") as caught:
        writer.is_written(wait=True)
    assert "in fails" in caught.value.__notes__[0]


def test_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="file/state: got NotADirectoryError"):
        StateWriter(ALONE).start({tmp_path / "file" / "state": make_state()})


@pytest.mark.parametrize("size", [1, 100_000])
def test_full_disk_is_named_as_what_it_is(size: int, tmp_path: Path) -> None:
    """Not by what torch's writer says when it closes its file: "unexpected pos"."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "__0_0.distcp").symlink_to("/dev/full")
    writer = StateWriter(ALONE)
    writer.start({tmp_path / "model": {"model.weight": torch.ones(size)}})
    with pytest.raises(
        CheckpointError,
        match=r"/model: got OSError: \[Errno 28\] No space left on device, expected space",
    ):
        writer.is_written(wait=True)


def test_same_state_has_the_same_bytes(tmp_path: Path) -> None:
    """Neither paths nor random numbers are in the files."""
    one, two = write(tmp_path / "one", make_state()), write(tmp_path / "two", make_state())
    for name in (".metadata", "__0_0.distcp"):
        assert (one / name).read_bytes() == (two / name).read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.third": torch.ones(2)}, "got 0 unknown and 1 missing tensors, first model.third"),
        (
            {"model.up": torch.ones(2, 3), "model.down": torch.ones(9)},
            "model.down: got shape (2,), and 1 more",
        ),
        (
            {"optimizer.max_exp_avg_sq.up": torch.ones(3, 2)},
            "another optimizer keeps: exp_avg, exp_avg_sq, step",
        ),
    ],
    ids=["names", "shapes", "optimizer"],
)
def test_another_model_and_another_optimizer(
    change: dict[str, torch.Tensor], words: str, tmp_path: Path
) -> None:
    """Both are said before anything is read, and what to do."""
    folder, state = write(tmp_path / "state", make_state()), make_state(0.0) | change
    before = {name: tensor.clone() for name, tensor in state.items()}
    with pytest.raises(CheckpointError) as caught:
        load_state(folder, state, ALONE)
    assert words in str(caught.value) and "Resume with the" in str(caught.value)
    assert all(torch.equal(state[name], before[name]) for name in state)


def test_moments_of_momentum_alone_are_said(tmp_path: Path) -> None:
    folder = write(tmp_path / "state", make_state(kinds=("momentum",)))
    with pytest.raises(
        CheckpointError, match=r"keeps: momentum, step, expected exp_avg, exp_avg_sq, step\. .*anew"
    ):
        load_state(folder, make_state(), ALONE)


def test_part_that_was_not_saved(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"optimizer: got no such part.*'optimizer'.*load_contents"
    ):
        load_state(tmp_path / "optimizer", make_state(), ALONE)
