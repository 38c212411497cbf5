# SPDX-License-Identifier: Apache-2.0
"""Packed attention on a CUDA device against the CPU's in float32: values, gradients and memory."""

import pytest
import torch

from quadriga.models import attention
from quadriga.models.attention import AttentionOptions, PackedAttention, Segment

pytestmark = pytest.mark.gpu


def segments_of(prompt: int, answers: list[int]) -> list[Segment]:
    first = Segment(0, prompt)
    starts = [prompt + sum(answers[:number]) for number in range(len(answers))]
    return [
        first,
        *(Segment(start, length, first) for start, length in zip(starts, answers, strict=True)),
    ]


def results(
    parts: list[torch.Tensor],
    segments: list[Segment],
    device: str,
    dtype: torch.dtype,
    window: int | None = None,
    has_sinks: bool = False,
) -> list[torch.Tensor]:
    *leaves, outer = (part.to(device, dtype) for part in parts)
    sinks = (
        [torch.linspace(-1, 1, 12, device=device, dtype=dtype).requires_grad_()]
        if has_sinks
        else []
    )
    leaves = [leaf.transpose(1, 2).requires_grad_() for leaf in leaves]
    options = AttentionOptions(window, None, *sinks)
    out = PackedAttention(segments, torch.device(device)).attend(0, *leaves, 0.1, options)
    leaves += sinks
    return [one.detach().float().cpu() for one in (out, *torch.autograd.grad(out, leaves, outer))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_size", [64, 128])
@pytest.mark.parametrize(
    ("answers", "wide_tokens"),
    [([], 8192), ([300, 700, 9], 8192), ([300, 700, 9], 0), ([5000], 8192)],
    ids=["plain", "shared", "sums of keys in the gradients' memory", "cut"],
)
def test_the_device_computes_what_the_cpu_does(
    dtype: torch.dtype,
    head_size: int,
    answers: list[int],
    wide_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Six query heads for each key head, more than 256 tokens: flash kernels for half precision, plain operators for
    float32. Does not show how fast they are."""
    monkeypatch.setattr(attention, "_MAX_FLOAT32_TOKENS", wide_tokens)
    segments = segments_of(270, answers)
    generator, size = torch.Generator().manual_seed(0), 270 + sum(answers)
    shapes = [(1, size, heads, head_size) for heads in (12, 2, 2, 12)]
    parts = [torch.randn(shape, generator=generator).to(dtype) for shape in shapes]
    found, expected = (
        results(parts, segments, device, kind)
        for device, kind in (("cuda", dtype), ("cpu", torch.float))
    )
    for ours, theirs in zip(found, expected, strict=True):
        bound = 1e-4 if dtype == torch.float32 else 0.02
        assert (ours - theirs).norm() <= bound * theirs.norm()


@pytest.mark.parametrize("has_prefix", [False, True])
@pytest.mark.parametrize(("window", "has_sinks"), [(100, False), (None, True), (33, True)])
def test_windows_and_sinks(window: int | None, has_sinks: bool, has_prefix: bool) -> None:
    """Sequences of several lengths; a window hides tokens of a prefix too."""
    segments = segments_of(270, [300, 700, 9])
    segments = segments if has_prefix else [Segment(one.start, one.length) for one in segments]
    generator = torch.Generator().manual_seed(0)
    parts = [
        torch.randn((1, 1279, heads, 64), generator=generator).bfloat16()
        for heads in (12, 2, 2, 12)
    ]
    found, expected = (
        results(parts, segments, device, kind, window, has_sinks)
        for device, kind in (("cuda", torch.bfloat16), ("cpu", torch.float))
    )
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


def test_memory_grows_with_the_tokens() -> None:
    """Twice the response tokens take at most 2.1 times the memory beyond inputs, results and gradients."""
    peaks = []
    for unit in (2048, 4096):
        segments = segments_of(512, [unit] * 8)
        shapes = [(1, 512 + 8 * unit, heads, 128) for heads in (12, 2, 2, 12)]
        *leaves, outer = (
            torch.randn(shape, device="cuda", dtype=torch.bfloat16) for shape in shapes
        )
        leaves = [leaf.transpose(1, 2).requires_grad_() for leaf in leaves]
        plan = PackedAttention(segments, torch.device("cuda"))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = plan.attend(0, *leaves, scale=0.1)
        gradients = torch.autograd.grad(out, leaves, outer)
        kept = sum(one.nbytes for one in (out, *gradients))
        peaks.append(torch.cuda.max_memory_allocated() - before - kept)
    assert peaks[1] <= 2.1 * peaks[0]
