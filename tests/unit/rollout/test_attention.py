# SPDX-License-Identifier: Apache-2.0
"""Folding rows by prompt and unfolding them again, for groups of any size in any order."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.rollout.native.attention import Groups


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_each_row_meets_its_own_prompt(prompts: list[int]) -> None:
    """Products with the prompts' matrices equal those of each row with its own prompt."""
    order = list(dict.fromkeys(prompts))
    places = [order.index(prompt) for prompt in prompts]
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(len(places), 2, 3, 5, generator=generator)  # [R, K, G, D]
    keys = torch.randn(len(order), 2, 5, 4, generator=generator)  # [P, K, D, S]
    groups = Groups(places, len(order), torch.device("cpu"))
    torch.testing.assert_close(groups.unfold(groups.fold(rows) @ keys), rows @ keys[places])
    assert torch.equal(groups.unfold(groups.fold(rows)), rows)
