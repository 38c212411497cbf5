# SPDX-License-Identifier: Apache-2.0
"""Packed attention against one dense mask over all packed tokens, values and gradients."""

from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from quadriga.models import attention, varlen
from quadriga.models.attention import PLAIN, AttentionOptions, PackedAttention, Segment
from quadriga.models.flash import (
    ScoreRule,
    flash_backward,
    flash_forward,
    plain_backward,
    plain_forward,
)
from tests.rehearsal import devices

CPU = torch.device("cpu")
GROUPS = st.lists(
    st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), max_size=4)), min_size=1, max_size=4
)


def segments_of(groups: list[tuple[int, list[int]]]) -> list[Segment]:
    segments, start = [], 0
    for prompt_length, answers in groups:
        prompt = Segment(start, prompt_length)
        segments.append(prompt)
        start += prompt_length
        for length in answers:
            segments.append(Segment(start, length, prompt))
            start += length
    return segments


def random_parts(size: int, heads: tuple[int, int], head_size: int) -> list[torch.Tensor]:
    """Query, key and value, and the gradient of the result, as a model's layers make them."""
    generator = torch.Generator().manual_seed(size)
    query_heads, key_heads = heads
    parts = [
        torch.randn(1, size, number, head_size, generator=generator)
        .transpose(1, 2)
        .requires_grad_()
        for number in (query_heads, key_heads, key_heads)
    ]
    return [*parts, torch.randn(1, size, query_heads, head_size, generator=generator)]


def dense(
    segments: list[Segment], query, key, value, scale: float, options: AttentionOptions = PLAIN
):
    size = query.shape[2]
    places = torch.zeros(size, dtype=torch.long)  # of each token in its sequence
    allowed = torch.zeros(size, size, dtype=torch.bool)
    for segment in segments:
        rows = slice(segment.start, segment.start + segment.length)
        places[rows] = torch.arange(segment.length) + (
            segment.prefix.length if segment.prefix else 0
        )
        allowed[rows, rows] = torch.ones(segment.length, segment.length).tril().bool()
        if segment.prefix:
            allowed[rows, segment.prefix.start : segment.prefix.start + segment.prefix.length] = (
                True
            )
    if options.window is not None:
        allowed &= places[:, None] - places < options.window
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = query @ key.transpose(2, 3) * scale
    if options.softcap is not None:
        scores = (scores / options.softcap).tanh() * options.softcap
    scores = scores.masked_fill(~allowed, float("-inf"))
    if options.sinks is not None:
        sinks = options.sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, sinks], -1)
    return (scores.softmax(-1)[..., :size] @ value).transpose(1, 2)


@settings(max_examples=60, deadline=None)
@given(
    groups=GROUPS,
    max_padding=st.sampled_from([0.0, 0.5, 10.0]),
    block_tokens=st.sampled_from([1, 2, 5, 12, 30, None]),
)
def test_equals_dense_attention(
    groups: list[tuple[int, list[int]]], max_padding: float, block_tokens: int | None
) -> None:
    """For any lengths, bucketing and cut. Does not show how fast it is, nor what bfloat16 loses."""
    segments = segments_of(groups)
    *parts, outer = random_parts(sum(segment.length for segment in segments), (4, 2), 8)
    plan = PackedAttention(segments, CPU, max_padding, block_tokens)

    ours = plan.attend(0, *parts, scale=0.3)
    gradients = torch.autograd.grad(ours, parts, outer)
    # float64 for the exact values: in float32 either side may be off by some last bits.
    exact = dense(segments, *(part.double() for part in parts), scale=0.3)
    torch.testing.assert_close(ours, exact.float(), atol=2e-6, rtol=2e-6)
    for gradient, expected in zip(
        gradients, torch.autograd.grad(exact, parts, outer.double()), strict=True
    ):
        torch.testing.assert_close(gradient, expected, atol=5e-6, rtol=5e-6)


@settings(max_examples=60, deadline=None)
@given(
    groups=GROUPS,
    block_tokens=st.sampled_from([1, 2, 5, 12, None]),
    window=st.sampled_from([None, 1, 2, 3, 5, 8]),
    softcap=st.sampled_from([None, 0.5]),
    has_sinks=st.booleans(),
)
def test_windows_caps_and_sinks_equal_dense_attention(
    groups: list[tuple[int, list[int]]],
    block_tokens: int | None,
    window: int | None,
    softcap: float | None,
    has_sinks: bool,
) -> None:
    """Each alone and together, for any lengths and cut, with the gradients of the sinks. Does not show it on a GPU."""
    segments = segments_of(groups)
    *parts, outer = random_parts(sum(segment.length for segment in segments), (4, 2), 8)
    sinks = [torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)] if has_sinks else []
    options = AttentionOptions(window, softcap, *sinks)
    ours = PackedAttention(segments, CPU, 0.5, block_tokens).attend(0, *parts, 0.9, options)
    gradients = torch.autograd.grad(ours, [*parts, *sinks], outer)
    exact = dense(segments, *(part.double() for part in parts), 0.9, options)
    torch.testing.assert_close(ours, exact.float(), atol=3e-6, rtol=3e-6)
    for gradient, expected in zip(
        gradients, torch.autograd.grad(exact, [*parts, *sinks], outer.double()), strict=True
    ):
        torch.testing.assert_close(gradient, expected, atol=2e-5, rtol=1e-5)


@settings(max_examples=60, deadline=None)
@given(groups=GROUPS, window=st.sampled_from([None, 1, 2, 5, 8]), has_sinks=st.booleans())
def test_the_two_calls_on_cuda_equal_dense_attention(
    groups, window: int | None, has_sinks: bool
) -> None:
    """Which tokens they are given, and how their results merge. The kernels are plain operators here (tests/gpu has
    the true ones), in float16 numbers, which round by one in two thousand."""
    segments = segments_of(groups)
    *parts, outer = random_parts(sum(segment.length for segment in segments), (4, 2), 8)
    sinks = [torch.tensor([0.5, -1.0, 2.0, 0.0], requires_grad=True)] if has_sinks else []
    options = AttentionOptions(window, None, *sinks)
    half = [part.half() for part in parts]
    kernels = {"forward": devices.flash_forward, "backward": devices.flash_backward}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention, "has_cuda_kernel", lambda query: True)
        patch.setattr(
            varlen,
            "_aten",
            SimpleNamespace(**{f"_flash_attention_{key}": one for key, one in kernels.items()}),
        )
        ours = PackedAttention(segments, CPU).attend(0, *half, 0.9, options)
        gradients = torch.autograd.grad(ours, [*parts, *sinks], outer.half())
    exact = dense(segments, *(part.double() for part in half), 0.9, options)
    torch.testing.assert_close(ours.float(), exact.float(), atol=5e-3, rtol=5e-3)
    for gradient, expected in zip(
        gradients, torch.autograd.grad(exact, [*parts, *sinks], outer.double()), strict=True
    ):
        torch.testing.assert_close(gradient, expected, atol=2e-2, rtol=2e-2)


def test_a_window_that_hides_nothing_changes_no_bit() -> None:
    """It is as long as the longest sequence. Blocks outside of a shorter one are not computed."""
    segments = segments_of([(3, [4, 2]), (20, [])])
    *parts, _ = random_parts(29, (4, 2), 8)
    plan = PackedAttention(segments, CPU, block_tokens=5)
    assert torch.equal(
        plan.attend(0, *parts, 0.3, AttentionOptions(window=20)), plan.attend(0, *parts, 0.3)
    )
    assert not plan.masks
    whole = [block for block in plan.blocks if block.queries.shape == (1, 5)][-1]
    rule = attention._LayerRule(0.3, 3, None, plan.masks)
    assert (len(whole.key_runs), len(list(whole.visible_runs(torch.zeros(1, 5, 1, 1), rule)))) == (
        4,
        2,
    )


def test_the_gradient_of_a_sum() -> None:
    """One number for all entries, which the kernels would read past its end."""
    segments = segments_of([(3, [4, 2])])
    *parts, _ = random_parts(9, (4, 2), 8)
    found = torch.autograd.grad(
        PackedAttention(segments, CPU).attend(0, *parts, scale=0.3).sum(), parts
    )
    expected = torch.autograd.grad(dense(segments, *parts, scale=0.3).sum(), parts)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("wide_tokens", [0, 8192], ids=["computed again", "kept"])
def test_bfloat16_is_rounded_at_the_end(wide_tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Results and gradients of queries, and of keys that forty responses in many blocks add to, are about as near to
    the exact ones as these rounded to bfloat16: the prompts' keys are rounded twice, all else once. Does not show it on
    a GPU, whose kernels round what each block gives."""
    monkeypatch.setattr(attention, "_MAX_FLOAT32_TOKENS", wide_tokens)
    segments = segments_of([(5, [7] * 40), (9, [30])])
    *parts, outer = (part.detach().bfloat16() for part in random_parts(324, (4, 2), 16))
    parts = [part.requires_grad_() for part in parts]
    wide = [part.detach().double().requires_grad_() for part in parts]
    exact = dense(segments, *wide, scale=0.25)
    expected = [exact, *torch.autograd.grad(exact, wide, outer.double())]
    ours = PackedAttention(segments, CPU, block_tokens=16).attend(0, *parts, scale=0.25)
    for found, one in zip([ours, *torch.autograd.grad(ours, parts, outer)], expected, strict=True):
        assert found.dtype == torch.bfloat16
        rounding = (one.bfloat16().double() - one).norm()
        assert (found.double() - one).norm() <= 1.1 * rounding


@pytest.mark.parametrize(
    ("answers", "dtype"),
    [
        pytest.param([1] * 8, torch.float32, id="eight responses"),
        pytest.param([1] * 8, torch.bfloat16, id="eight responses in bfloat16"),
        pytest.param([8], torch.bfloat16, id="one response in bfloat16", marks=pytest.mark.slow),
    ],
)
def test_memory_is_linear_and_below_that_of_the_inputs(
    answers: list[int], dtype: torch.dtype
) -> None:
    """Forward and backward at 16k and 32k response tokens, allocations inside of kernels included, beyond arguments,
    results and gradients. Does not show the memory of a GPU."""
    peaks = []
    for unit in (2048, 4096):
        segments = segments_of([(128, [answer * unit for answer in answers])])
        *parts, outer = (
            part.detach().to(dtype) for part in random_parts(128 + 8 * unit, (3, 1), 32)
        )
        parts = [part.requires_grad_() for part in parts]
        plan = PackedAttention(segments, CPU)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            result = plan.attend(0, *parts, scale=0.3)
            gradients = torch.autograd.grad(result, parts, outer)
        events = [
            one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"
        ]
        changes = [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]
        assert changes
        peak = torch.tensor(changes).cumsum(0).max().item()
        given_back = sum(one.numel() * one.element_size() for one in (result, *gradients))
        inputs = sum(part.numel() * part.element_size() for part in parts)
        peaks.append((peak - given_back, inputs))
    (half, _), (whole, inputs) = peaks
    assert whole <= 0.3 * inputs
    assert whole <= 2.1 * half


@pytest.mark.parametrize("is_causal", [True, False])
def test_plain_operators_are_the_kernel(is_causal: bool) -> None:
    """What devices without a flash kernel compute, beside what the CPU's kernel does. Does not show it on them."""
    *inputs, grad = (part.detach().transpose(1, 2) for part in random_parts(37, (6, 2), 8))
    grad = grad.transpose(1, 2)
    out, log_sums = flash_forward(inputs, ScoreRule(0.3, is_causal))
    log_sums = log_sums + 0.5  # as if merged with those of other keys
    expected = flash_backward((grad, out, log_sums), inputs, ScoreRule(0.3, is_causal))
    turned, (grad, out, log_sums) = (
        [one.transpose(1, 2) for one in ones] for ones in (inputs, (grad, out, log_sums))
    )
    plain, plain_sums = plain_forward(turned, ScoreRule(0.3, is_causal))
    torch.testing.assert_close(plain, out)
    torch.testing.assert_close(plain_sums + 0.5, log_sums)
    for one, other in zip(
        plain_backward((grad, out, log_sums), turned, ScoreRule(0.3, is_causal)),
        expected,
        strict=True,
    ):
        torch.testing.assert_close(one.transpose(1, 2), other)
