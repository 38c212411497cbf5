# SPDX-License-Identifier: Apache-2.0
"""The caches hold what was written, through every change of rows, prompts and room."""

import torch

from quadriga.rollout.native.cache import AnswerCache, PromptCache

CPU = torch.device("cpu")


def _prompts(names: list[str], lengths: list[int], fill: float) -> PromptCache:
    cache = PromptCache(names, lengths)
    states = fill + torch.arange(len(names)).float()[:, None, None, None].expand(-1, 2, cache.width, 4)
    cache.write(0, slice(0, len(names)), states, -states)
    cache.last_hidden = states[:, 0, 0]
    return cache


def test_prompts_come_and_go() -> None:
    """Kept and added prompts keep their values; the cache is as wide as the longest of them."""
    cache = PromptCache([], [])
    cache.extend(_prompts(["a", "b", "c"], [2, 5, 3], fill=1.0))
    cache.keep([0, 2])
    assert (cache.prompts, cache.width, cache.keys[0].shape) == (["a", "c"], 3, (2, 2, 3, 4))
    cache.extend(_prompts(["d"], [6], fill=7.0))
    assert (cache.prompts, cache.lengths) == (["a", "c", "d"], [2, 3, 6])
    assert cache.keys[0][:, 0, :, 0].tolist() == [[1, 1, 1, 0, 0, 0], [3, 3, 3, 0, 0, 0], [7, 7, 7, 7, 7, 7]]
    assert cache.values[0][:, 1, 0, 0].tolist() == [-1, -3, -7]
    assert cache.last_hidden[:, 0].tolist() == [1, 3, 7]


def _write(cache: AnswerCache, written: list[int], limit: int) -> torch.Tensor:
    """Row r writes 100 r + written[r]; returns what the cache shows, [R, t]."""
    cache.start_step(written, limit, CPU)
    states = torch.tensor([100.0 * row + count for row, count in enumerate(written)])[:, None, None, None]
    keys, values = cache.write(0, states.expand(-1, 2, 1, 4), -states.expand(-1, 2, 1, 4))
    assert torch.equal(keys, -values)
    return keys[:, 0, :, 0]


def test_rows_write_in_place_and_grow() -> None:
    """The room doubles when it is full; earlier tokens stay, memory in between does not move."""
    cache = AnswerCache()
    cache.rearrange([], 2, 0, 150)
    for count in range(150):
        before = cache.keys[0].data_ptr() if count else 0
        shown = _write(cache, [count, count], 150)
        assert count in (0, 64, 128) or cache.keys[0].data_ptr() == before
    assert cache.room == 150
    assert shown.tolist() == [list(range(150)), list(range(100, 250))]


def test_rows_of_different_length() -> None:
    """A row that starts later writes at its own place; a row that left is gone."""
    cache = AnswerCache()
    cache.rearrange([], 3, 0, 10)
    for count in range(3):
        _write(cache, [count] * 3, 10)
    cache.rearrange([0, 2], 3, 3, 10)
    shown = _write(cache, [3, 3, 0], 10)
    assert shown.tolist() == [[0, 1, 2, 3], [200, 201, 202, 103], [200, 0, 0, 0]]


def test_float32_on_the_cpu() -> None:
    """Keys and values are widened once, when they are written."""
    cache = AnswerCache()
    cache.rearrange([], 1, 0, 4)
    cache.start_step([0], 4, CPU)
    keys, _ = cache.write(0, torch.ones(1, 1, 1, 2).bfloat16(), torch.ones(1, 1, 1, 2).bfloat16())
    assert keys.dtype == torch.float32
