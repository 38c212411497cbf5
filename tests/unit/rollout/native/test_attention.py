# SPDX-License-Identifier: Apache-2.0
"""Attention over a KV cache against a plain loop; prefix and response caches that grow, move and fold."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.models.attention import AttentionOptions
from quadriga.rollout.native.attention import (
    CompiledPlan,
    DecodePlan,
    PrefixCache,
    ResponseCache,
    attend_part,
    plan_decoding,
)
from quadriga.rollout.native.kernels import about_kernels, kernels

CPU = torch.device("cpu")


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(0, 3), min_size=1, max_size=12))
def test_each_row_meets_its_own_prefix(prompts: list[int]) -> None:
    """Whatever they share: attention is that of each row over its own prefix and its own token."""
    order = list(dict.fromkeys(prompts))
    places = [order.index(prompt) for prompt in prompts]
    generator = torch.Generator().manual_seed(0)
    prefixes, responses = PrefixCache(["abcd"] * len(order)), ResponseCache()
    keys, values = (torch.randn(len(order), 2, 4, 16, generator=generator) for _ in range(2))
    prefixes.write(0, slice(0, len(order)), keys, values)
    responses.resize(len(places), 1, 0, 0)
    plan = DecodePlan(prefixes, responses, places, CPU)
    plan.start_step([0] * len(places))
    query, key, value = (
        torch.randn(len(places), heads, 1, 16, generator=generator) for heads in (6, 2, 2)
    )
    seen, read = torch.cat((keys[places], key), 2), torch.cat((values[places], value), 2)
    scores = query.unflatten(1, (2, 3)) @ seen.unsqueeze(2).transpose(-1, -2) * 0.3
    expected = (scores.softmax(-1) @ read.unsqueeze(2)).flatten(1, 2).transpose(1, 2)
    torch.testing.assert_close(plan.attend(0, query, key, value, 0.3), expected)


def _plan(
    kind: type[DecodePlan | CompiledPlan],
    prefixes: PrefixCache,
    responses: ResponseCache,
    places: list[int],
) -> DecodePlan | CompiledPlan:
    if kind is DecodePlan:
        return DecodePlan(prefixes, responses, places, torch.device("cpu"))
    loops = kernels()
    if loops is None:
        pytest.skip(about_kernels())
    return CompiledPlan(loops, prefixes, responses, places, CPU)


@pytest.mark.parametrize("kind", [DecodePlan, CompiledPlan])
@pytest.mark.parametrize("places", [[0, 0, 1, 1], [1, 0, 2, 1, 1], [2, 2]])
@pytest.mark.parametrize(("group", "size", "width"), [(3, 16, 7), (1, 64, 70), (7, 80, 129)])
@pytest.mark.parametrize(
    ("window", "softcap", "has_sinks"),
    [(None, None, False), (3, None, False), (6, None, True), (None, 0.7, False), (2, 0.7, True)],
)
def test_prefix_and_answer_put_together(
    kind: type[DecodePlan | CompiledPlan],
    places: list[int],
    group: int,
    size: int,
    width: int,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    """Two parts with their sums give what attention over all keys of each row gives; a prefix may be without a row.
    The same in a window, with a cap, and with sinks."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    lengths, num_rows = [4, 2, width], len(places)
    prefixes, responses = PrefixCache("a" * length for length in lengths), ResponseCache()
    keys, values = random(3, 2, width, size), random(3, 2, width, size)
    prefixes.write(0, slice(0, 3), keys, values)
    responses.resize(num_rows, 6, 0, 0)
    plan = _plan(kind, prefixes, responses, places)
    options = AttentionOptions(window, softcap, random(2 * group) if has_sinks else None)
    own: list[list[tuple[torch.Tensor, torch.Tensor]]] = [[] for _ in places]
    for step in range(5):
        written = [max(0, step - row) for row in range(num_rows)]  # rows of different length
        positions = plan.start_step(written)
        assert positions[:, 0].tolist() == [
            lengths[place] + count for place, count in zip(places, written, strict=True)
        ]
        # As they come out of one product: what is left of a row stands between the others' heads.
        states = random(num_rows, 1, 2 * (group + 2), size).transpose(1, 2)
        query, key, value = states.split((2 * group, 2, 2), 1)
        found = plan.attend(0, query, key, value, 0.3, options)
        assert found.shape == (num_rows, 1, 2 * group, size)
        for row, place in enumerate(places):
            own[row] = [*own[row][: written[row]], (key[row], value[row])]
            seen = torch.cat([keys[place, :, : lengths[place]], *(pair[0] for pair in own[row])], 1)
            read = torch.cat(
                [values[place, :, : lengths[place]], *(pair[1] for pair in own[row])], 1
            )
            seen, read = seen.repeat_interleave(group, 0), read.repeat_interleave(group, 0)
            scores = query[row] @ seen.transpose(-1, -2) * 0.3
            if softcap is not None:
                scores = (scores / softcap).tanh() * softcap
            if window is not None:
                scores[..., : max(0, scores.shape[-1] - window)] = -torch.inf
            if options.sinks is not None:
                scores = torch.cat([scores, options.sinks[:, None, None]], -1)
                read = torch.cat([read, torch.zeros_like(read[:, :1])], 1)
            expected = scores.softmax(-1) @ read
            torch.testing.assert_close(found[row, 0], expected[:, 0], atol=1e-5, rtol=1e-5)


def test_the_plan_fits_the_model() -> None:
    """Heads whose size the compiled loop does not take go by torch's operators."""
    responses, prefixes = ResponseCache(), {size: PrefixCache(["abc"]) for size in (24, 32)}
    for size, cache in prefixes.items():
        cache.write(0, slice(0, 1), torch.zeros(1, 2, 3, size), torch.zeros(1, 2, 3, size))
    chosen = [
        type(plan_decoding(cache, responses, [0], torch.device("cpu")))
        for cache in prefixes.values()
    ]
    assert chosen == [DecodePlan, DecodePlan if kernels() is None else CompiledPlan]


@pytest.mark.parametrize("is_masked", [False, True])
def test_attention_written_out(is_masked: bool) -> None:
    """What other devices compute step by step is what the CPU's kernel computes, to the precision of bfloat16."""
    generator = torch.Generator().manual_seed(2)
    query, keys, values = (
        torch.randn(2, 3, count, 16, generator=generator).bfloat16() for count in (4, 9, 9)
    )
    mask = torch.zeros(2, 1, 1, 9)
    mask[1, ..., 5:] = torch.finfo(torch.float32).min
    args = (mask if is_masked else None, 0.25)
    mixed, sums = attend_part(query, keys, values, *args)
    exact, exact_sums = attend_part(query.float(), keys.float(), values.float(), *args)
    torch.testing.assert_close(sums, exact_sums, atol=2e-2, rtol=0)
    torch.testing.assert_close(mixed.float(), exact, atol=2e-2, rtol=0)


def _prefixes(*prefixes: str, fill: float) -> PrefixCache:
    cache = PrefixCache(prefixes)
    states = fill + torch.arange(len(prefixes)).float()[:, None, None, None].expand(
        -1, 2, max(cache.lengths), 4
    )
    cache.write(0, slice(0, len(prefixes)), states, -states)
    cache.last_hidden = states[:, 0, 0]
    return cache


def test_prefixes_come_and_go() -> None:
    """Kept and added prefixes keep their values; the cache is as wide as the longest of them."""
    cache = PrefixCache()
    cache.extend(_prefixes("aa", "bbbbb", "ccc", fill=1.0))
    cache.keep({"aa", "ccc"})
    assert (cache.prefixes, cache.keys[0].shape) == (["aa", "ccc"], (2, 2, 3, 4))
    cache.extend(_prefixes("dddddd", fill=7.0))
    assert (cache.prefixes, cache.lengths) == (["aa", "ccc", "dddddd"], [2, 3, 6])
    assert cache.keys[0][:, 0, :, 0].tolist() == [
        [1, 1, 1, 0, 0, 0],
        [3, 3, 3, 0, 0, 0],
        [7, 7, 7, 7, 7, 7],
    ]
    assert cache.values[0][:, 1, 0, 0].tolist() == [-1, -3, -7]
    assert cache.last_hidden is not None
    assert cache.last_hidden[:, 0].tolist() == [1, 3, 7]


def _write(cache: ResponseCache, written: list[int]) -> torch.Tensor:
    """Row r writes 100 r + written[r] into each of two layers; returns what the cache shows, [R, t]."""
    cache.start_step(torch.tensor(written), max(written) + 1)
    states = torch.tensor([100.0 * row + count for row, count in enumerate(written)])[
        :, None, None, None
    ]
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
    """The KV cache is widened once, when it is written."""
    cache = ResponseCache()
    cache.resize(1, 4, 0, 0)
    cache.start_step(torch.zeros(1, dtype=torch.long), 1)
    keys, _ = cache.write(0, torch.ones(1, 1, 1, 2).bfloat16(), torch.ones(1, 1, 1, 2).bfloat16())
    assert keys.dtype == torch.float32
