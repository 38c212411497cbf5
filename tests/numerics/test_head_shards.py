# SPDX-License-Identifier: Apache-2.0
"""A vocabulary in parts over two and three processes on gloo, against the whole vocabulary in one.

What this does not prove: the same on NCCL.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.numerics.head_shards import HIDDEN, ROWS
from tests.numerics.launching import run_ranks

PROGRAM = Path(__file__).with_name("head_shards.py")
# A float32 sum of n terms is off by about sqrt(n) roundings, in an order that differs by CPU; a score is a sum over the
# hidden size and one over the vocabulary, on either side of the comparison: 2e-6.
ROUNDING = 2 * math.sqrt(HIDDEN + ROWS) * torch.finfo(torch.float32).eps


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    """What each rank found."""
    folder = tmp_path_factory.mktemp("shards")
    run_ranks(PROGRAM, 3, folder)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(3)]


def test_parts_say_what_the_whole_says(results: list[Any]) -> None:
    """Log-probs, entropies, squares, top tokens and all gradients to the rounding of their sums, with uneven and empty
    parts, bias and temperature; in bfloat16 the outputs likewise, and the gradients to its own rounding."""
    cases = [(key, found) for differences, *_ in results for key, found in differences.items()]
    assert len(cases) == (3 * 2 + 3 * 3) * 2 * 2
    for (sizes, temperature, dtype), found in cases:
        for name, error in found.items():
            is_rounded = dtype == "torch.bfloat16" and name in ("hidden", "weight", "bias")
            assert error <= (0.01 if is_rounded else ROUNDING), (
                sizes,
                temperature,
                dtype,
                name,
                error,
            )


def test_all_ranks_get_the_same_bits(results: list[Any]) -> None:
    assert all(found["ranks"] == 0 for differences, *_ in results for found in differences.values())


def test_a_token_that_nobody_holds_and_a_top_beyond_the_vocabulary(results: list[Any]) -> None:
    """Twelve rows of equal logits: -inf for the thirteenth, and fourteen likeliest of twelve end in two of none."""
    for _, few, _ in results:
        assert few.entropy is None and few.sum_pi_squared is None
        assert few.log_probs.tolist() == [pytest.approx(-math.log(12)), -math.inf]
        assert (
            few.top_log_probs[0].tolist() == [pytest.approx(-math.log(12))] * 12 + [-math.inf] * 2
        )
        assert sorted(few.top_ids[0].tolist()) == [-1, -1, *range(12)]


def test_no_tokens(results: list[Any]) -> None:
    for *_, none in results:
        assert none.log_probs.shape == none.entropy.shape == none.sum_pi_squared.shape == (0,)
        assert none.top_ids.shape == (0, 2)
