# SPDX-License-Identifier: Apache-2.0
"""Written or copied by four, two or one process under one layout, read under any other: every value is the same.

What it does not prove: that an engine's own state has these names; the tests of the engine do.
"""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.checkpoint_layouts import ALL, NAMES, PAIRS
from tests.numerics.launching import run_ranks

PROGRAM = Path(__file__).with_name("checkpoint_layouts.py")


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[Any, Any]:
    """Of all layouts, from one launch."""
    folder = tmp_path_factory.mktemp("layouts")
    run_ranks(PROGRAM, 4, folder, num_ports=4)
    return torch.load(folder / "results.pt")


@pytest.mark.parametrize(("writer", "reader"), PAIRS)
def test_any_layout_reads_any_other(results: dict[Any, Any], writer: str, reader: str) -> None:
    """Weights, moments and step counts; the writer's memory was cleared as soon as the call returned."""
    assert results[writer, reader] == []


def test_names_are_those_of_the_model(results: dict[Any, Any]) -> None:
    for writer in ALL:
        names = sorted(results["files"][writer])
        assert len(names) == len(NAMES) and {name.partition(".")[0] for name in names} == {
            "first",
            "second",
        }


def test_one_rank_that_cannot_write_is_an_error_of_all(results: dict[Any, Any]) -> None:
    """It names the file; what is there is no checkpoint; the next save is one."""
    full = results["full disk"]
    assert (
        len(set(full["errors"])) == 1
        and "full/__1_0.distcp: got OSError: [Errno 28] No space" in full["errors"][0]
    )
    assert full["is complete"] is False
    assert full["is written after"] is True


def test_another_model_is_refused_by_all_stages(results: dict[Any, Any]) -> None:
    """Also by the stage whose own tensors are all there."""
    first, second = results["others"]
    assert first == second
    assert "got 0 unknown and 1 missing tensors, first model.third" in first[0]
    assert "model.second.few: got shape (2, 5), expected (3, 5)" in first[1]
