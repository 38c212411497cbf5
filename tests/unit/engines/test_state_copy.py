# SPDX-License-Identifier: Apache-2.0
"""Copies of an engine's state in shared memory: two slots, of which a torn one is never taken.

tests/e2e/ray has the layouts of several processes, and what happens when one of them dies.
"""

import threading
from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.engines.checkpoint import StateCopier, read_copy
from quadriga.engines.process_group import ALONE
from quadriga.protocol.memory import SLOT_HEADER_BYTES, slot_of, whole_steps


def make_state(fill: float) -> dict[str, torch.Tensor]:
    """Tensors of several sizes and dtypes, one of them a scalar, one a view that is not contiguous."""
    return {
        "model.up": torch.arange(6.0).view(3, 2) * fill,
        "model.down": (torch.arange(20.0).view(4, 5) + fill).T,
        "optimizer.step.up": torch.tensor(fill),
        "optimizer.nonfinite_steps": torch.tensor(int(fill)),
        "model.half": torch.full((3,), fill, dtype=torch.bfloat16),
    }


class Rank:
    """A state, its copier and its memory, a file of `tmp_path`."""

    def __init__(self, folder: Path) -> None:
        self.state = make_state(1.0)
        self.copier = StateCopier(self.state, ALONE)
        path = folder / "memory"
        path.write_bytes(bytes(2 * self.copier.plan.slot_bytes[0]))
        self.copier.open(str(path))
        self.memory = np.memmap(path, dtype=np.uint8, mode="r+")

    def copy(self, step: int) -> None:
        """Copy the state that belongs to a step."""
        for name, tensor in make_state(float(step)).items():
            self.state[name].copy_(tensor)
        self.copier.start(step).result()

    def read(self, step: int) -> dict[str, torch.Tensor]:
        """What the slot of a step has."""
        slot, state = slot_of(self.memory, step), make_state(0.0)
        read_copy(self.copier.plan, lambda rank, start, size: slot[start : start + size], state)
        return state


@pytest.fixture
def rank(tmp_path: Path) -> Rank:
    return Rank(tmp_path)


def test_two_steps_are_kept_and_read_back_bit_for_bit(rank: Rank) -> None:
    assert whole_steps(rank.memory) == []
    for step in (1, 2, 3):
        rank.copy(step)
    assert sorted(whole_steps(rank.memory)) == [2, 3]
    for step in (2, 3):
        for name, tensor in rank.read(step).items():
            assert torch.equal(tensor, make_state(float(step))[name]), name


def test_copy_that_was_cut_short_leaves_the_one_before(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    rank.copy(1)
    rank.copy(2)

    def dies(targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        targets[0].copy_(sources[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "_foreach_copy_", dies)
    with pytest.raises(KeyboardInterrupt):
        rank.copy(3)
    assert whole_steps(rank.memory) == [2]


@pytest.mark.parametrize("where", [8, SLOT_HEADER_BYTES, -64])
def test_a_flipped_bit_is_found(rank: Rank, where: int) -> None:
    """In the sum, and in the first and the last chunk."""
    rank.copy(1)
    rank.copy(2)
    slot_of(rank.memory, 2)[where] ^= 16
    assert whole_steps(rank.memory) == [1]


def test_state_may_change_once_the_copy_is_made(
    rank: Rank, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`start` returns before the copy is made, and its future says when it is."""
    gate, copy = threading.Event(), torch._foreach_copy_
    monkeypatch.setattr(torch, "_foreach_copy_", lambda *tensors: (gate.wait(60), copy(*tensors)))
    copying = rank.copier.start(1)
    assert not copying.done() and whole_steps(rank.memory) == []
    gate.set()
    copying.result()
    assert whole_steps(rank.memory) == [1]


def test_no_memory_under_a_path_is_an_os_error(rank: Rank) -> None:
    with pytest.raises(OSError, match="No such file"):
        rank.copier.open("/proc/0/fd/0")
