# SPDX-License-Identifier: Apache-2.0
"""The driver's memory: what is drawn after a resume is what would have been drawn."""

import random
from pathlib import Path

import numpy as np
import pytest
import torch

from quadriga.errors import CheckpointError
from quadriga.trainer.run_state import load_run_state, save_run_state


def draw() -> tuple[float, float, float, float]:
    """From every generator, the half-used pair of numpy's normal included."""
    return random.random(), float(np.random.rand()), float(np.random.randn()), float(torch.rand(()))


def test_random_states_come_back(tmp_path: Path) -> None:
    draw()
    save_run_state(tmp_path, step=3, loader={}, kl_controller={})
    expected = [draw(), draw()]
    random.seed(0), np.random.seed(0), torch.manual_seed(0)
    load_run_state(tmp_path)
    assert [draw(), draw()] == expected


@pytest.mark.parametrize(("saved", "loaded"), [(False, True), (True, False)])
def test_random_states_may_stay_out(saved: bool, loaded: bool, tmp_path: Path) -> None:
    save_run_state(tmp_path, step=3, loader={}, kl_controller={}, with_random_states=saved)
    draw()
    before = torch.get_rng_state()
    load_run_state(tmp_path, with_random_states=loaded)
    assert torch.equal(torch.get_rng_state(), before)


def test_facts_come_back(tmp_path: Path) -> None:
    loader = {"position": 4, "generator": torch.arange(3), "rows": [1, 2], "nested": {"epoch": None}}
    save_run_state(tmp_path, step=3, loader=loader, kl_controller={"value": 0.1})
    state = load_run_state(tmp_path)
    assert (state["step"], state["kl_controller"]) == (3, {"value": 0.1})
    assert torch.equal(state["loader"].pop("generator"), loader.pop("generator"))
    assert state["loader"] == loader


@pytest.mark.parametrize("content", [None, b"", b"PK\x03\x04 and no more", b"no archive"])
def test_unreadable_file_is_named(content: bytes | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "trainer").mkdir()
        (tmp_path / "trainer" / "state.pt").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"state\.pt"):
        load_run_state(tmp_path)


def test_state_that_could_not_be_read_again_is_refused_at_the_save(tmp_path: Path) -> None:
    """Unpickling it would run code from the file; a resume would be too late to say so."""
    with pytest.raises(CheckpointError, match="state_dict of your own data set or sampler"):
        save_run_state(tmp_path, step=1, loader={"mine": Path("x")}, kl_controller={})
