# SPDX-License-Identifier: Apache-2.0
"""Packed attention against one dense mask over all packed tokens, values and gradients."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.models.attention import PackedAttention, Segment

GROUPS = st.lists(st.tuples(st.integers(1, 6), st.lists(st.integers(1, 5), max_size=4)), min_size=1, max_size=4)


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


def dense(segments: list[Segment], query, key, value, scale: float):
    size = query.shape[2]
    allowed = torch.zeros(size, size, dtype=torch.bool)
    for segment in segments:
        rows = slice(segment.start, segment.start + segment.length)
        allowed[rows, rows] = torch.ones(segment.length, segment.length).tril().bool()
        if segment.prefix:
            allowed[rows, segment.prefix.start : segment.prefix.start + segment.prefix.length] = True
    groups = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)
    scores = (query @ key.transpose(2, 3) * scale).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2)


@settings(max_examples=40, deadline=None)
@given(groups=GROUPS, max_padding=st.sampled_from([0.0, 0.5, 10.0]))
def test_equals_dense_attention(groups: list[tuple[int, list[int]]], max_padding: float) -> None:
    """For any lengths and bucketing. Does not show how fast it is, nor what bfloat16 loses."""
    segments = segments_of(groups)
    size = sum(segment.length for segment in segments)
    generator = torch.Generator().manual_seed(size)
    parts = [torch.randn(1, heads, size, 8, generator=generator, requires_grad=True) for heads in (4, 2, 2)]
    outer = torch.randn(1, size, 4, 8, generator=generator)
    plan = PackedAttention(segments, torch.device("cpu"), max_padding)

    ours = plan.attend(0, *parts, scale=0.3)
    gradients = torch.autograd.grad((ours * outer).sum(), parts)
    expected = dense(segments, *parts, scale=0.3)
    torch.testing.assert_close(ours, expected, atol=1e-5, rtol=1e-4)
    for gradient, exact in zip(gradients, torch.autograd.grad((expected * outer).sum(), parts), strict=True):
        torch.testing.assert_close(gradient, exact, atol=1e-5, rtol=1e-4)
