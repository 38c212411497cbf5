# SPDX-License-Identifier: Apache-2.0
"""The vocabulary head on a CUDA device against the same numbers in plain torch on the CPU, and its memory."""

import math

import pytest
import torch

from quadriga.models import heads
from quadriga.models.heads import token_scores

pytestmark = pytest.mark.gpu

TOKENS, ROWS, HIDDEN = 300, 20_000, 200  # several parts, and none of them a multiple of a tile


def scores_and_gradients(
    device: str, dtype: torch.dtype, *, has_bias: bool, temperature: float, with_entropy: bool
):
    """Log-probs, perhaps entropies and squares, and the gradients of states, weight and bias, on the CPU in float32."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(ROWS, HIDDEN, generator=generator) * (2 / math.sqrt(HIDDEN))
    leaves = [hidden, weight, torch.randn(ROWS, generator=generator)][: 2 + has_bias]
    targets = torch.randint(0, ROWS, (TOKENS,), generator=generator).to(device)
    outer = torch.randn(2, TOKENS, generator=generator).to(device)
    leaves = [leaf.to(device, dtype).requires_grad_() for leaf in leaves]
    bias = leaves[2] if has_bias else None
    wanted = {"with_entropy": with_entropy, "with_sum_pi_squared": with_entropy}
    scores = token_scores(*leaves[:2], bias, targets, temperature=temperature, **wanted)
    loss = scores.log_probs @ outer[0]
    if scores.entropy is not None:
        loss = loss + scores.entropy @ outer[1]
    loss.backward()
    outputs = [
        one for one in (scores.log_probs, scores.entropy, scores.sum_pi_squared) if one is not None
    ]
    return [part.detach().float().cpu() for part in (*outputs, *(leaf.grad for leaf in leaves))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("has_bias", "temperature", "with_entropy"),
    [(False, 1.0, True), (True, 0.7, True), (False, 1.0, False)],
)
def test_the_device_says_what_the_cpu_says(
    dtype, has_bias: bool, temperature: float, with_entropy: bool
) -> None:
    """Values, and gradients to the rounding of the dtype: Triton for half precision, torch for float32."""
    options = {"has_bias": has_bias, "temperature": temperature, "with_entropy": with_entropy}
    found = scores_and_gradients("cuda", dtype, **options)
    expected = scores_and_gradients("cpu", dtype, **options)
    num_outputs = 1 + 2 * with_entropy
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        bound = 1e-4 if number < num_outputs or dtype == torch.float32 else 0.02
        torch.testing.assert_close(ours, theirs, rtol=bound, atol=bound * theirs.abs().max().item())


@pytest.mark.skipif(not heads.HAS_TRITON, reason="the package triton is not installed")
def test_no_logits_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward, the kernels take less than a hundredth of the logits; torch in chunks, for scale, takes more."""
    hidden = torch.randn(4096, 64, device="cuda", dtype=torch.bfloat16)
    weight = torch.randn(50_000, 64, device="cuda", dtype=torch.bfloat16)
    targets = torch.zeros(4096, dtype=torch.int64, device="cuda")
    extra = []
    for use_triton in (True, False):
        monkeypatch.setattr(heads, "has_compiler", lambda choice=use_triton: choice)
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        token_scores(hidden, weight, None, targets, with_entropy=True)
        extra.append(torch.cuda.max_memory_allocated() - before)
    logits = 4 * 4096 * 50_000
    assert extra[0] < logits / 100 < extra[1]
