# SPDX-License-Identifier: Apache-2.0
"""The caches hold what was written, through every change of rows, prefixes and room."""

import torch

from quadriga.rollout.native.attention import PrefixCache, ResponseCache

CPU = torch.device("cpu")


def _prefixes(names: list[str], lengths: list[int], fill: float) -> PrefixCache:
    cache = PrefixCache(names, lengths)
    states = fill + torch.arange(len(names)).float()[:, None, None, None].expand(-1, 2, cache.width, 4)
    cache.write(0, slice(0, len(names)), states, -states)
    cache.last_hidden = states[:, 0, 0]
    return cache


def test_prefixes_come_and_go() -> None:
    """Kept and added prefixes keep their values; the cache is as wide as the longest of them."""
    cache = PrefixCache()
    cache.extend(_prefixes(["a", "b", "c"], [2, 5, 3], fill=1.0))
    cache.keep([0, 2])
    assert (cache.prefixes, cache.width, cache.keys[0].shape) == (["a", "c"], 3, (2, 2, 3, 4))
    cache.extend(_prefixes(["d"], [6], fill=7.0))
    assert (cache.prefixes, cache.lengths) == (["a", "c", "d"], [2, 3, 6])
    assert cache.keys[0][:, 0, :, 0].tolist() == [[1, 1, 1, 0, 0, 0], [3, 3, 3, 0, 0, 0], [7, 7, 7, 7, 7, 7]]
    assert cache.values[0][:, 1, 0, 0].tolist() == [-1, -3, -7]
    assert cache.last_hidden is not None
    assert cache.last_hidden[:, 0].tolist() == [1, 3, 7]


def _write(cache: ResponseCache, written: list[int]) -> torch.Tensor:
    """Row r writes 100 r + written[r] into each of two layers; returns what the cache shows, [R, t]."""
    cache.start_step(written, CPU)
    states = torch.tensor([100.0 * row + count for row, count in enumerate(written)])[:, None, None, None]
    for layer in range(2):
        keys, values = cache.write(layer, states.expand(-1, 2, 1, 4), -states.expand(-1, 2, 1, 4))
        assert torch.equal(keys, -values)
        assert torch.equal(keys, keys[:, :1, :, :1].expand_as(keys))
    return keys[:, 0, :, 0]


def test_rows_write_in_place_and_get_more_room() -> None:
    """Earlier tokens stay where they are, and move with the cache when it grows."""
    cache = ResponseCache()
    cache.resize(2, 8, 0, 0)
    for count in range(20):
        if count == 8:
            cache.resize(2, 20, 2, 8)
        before = cache.keys[0].data_ptr() if count else 0
        shown = _write(cache, [count, count])
        assert count == 0 or cache.keys[0].data_ptr() == before
    assert shown.tolist() == [list(range(20)), list(range(100, 120))]


def test_the_last_row_takes_the_place_of_one_that_ends() -> None:
    """Rows in use have no gaps; a row that comes later writes over what an earlier one left."""
    cache = ResponseCache()
    cache.resize(3, 10, 0, 0)
    for count in range(3):
        _write(cache, [count] * 3)
    cache.move(2, 0, 3)
    assert _write(cache, [3, 3]).tolist() == [[200, 201, 202, 3], [100, 101, 102, 103]]
    shown = _write(cache, [4, 4, 0])
    assert shown[:2].tolist() == [[200, 201, 202, 3, 4], [100, 101, 102, 103, 104]]
    assert shown[2, 0] == 200
    assert shown.isfinite().all()


def test_float32_on_the_cpu() -> None:
    """Keys and values are widened once, when they are written."""
    cache = ResponseCache()
    cache.resize(1, 4, 0, 0)
    cache.start_step([0], CPU)
    keys, _ = cache.write(0, torch.ones(1, 1, 1, 2).bfloat16(), torch.ones(1, 1, 1, 2).bfloat16())
    assert keys.dtype == torch.float32
