# SPDX-License-Identifier: Apache-2.0
"""Norms and gated MLPs in half precision on a CUDA device: Triton's kernels against what they stand for."""

import pytest
import torch

from quadriga.models import fused, heads
from quadriga.models.fused import GatedSiLU, RMSNorm

pytestmark = pytest.mark.gpu


@pytest.mark.skipif(not heads.HAS_TRITON, reason="the package triton is not installed")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 3000, 12, 128), (1, 3001, 1536), (5, 8192), (70_000, 64)])
def test_kernels_round_as_the_operators_do(
    shape: tuple[int, ...], dtype: torch.dtype, monkeypatch
) -> None:
    """Values and all gradients to one rounding; the sums over a row and over all rows in another order."""
    hidden, other, outer = (torch.randn(shape, device="cuda", dtype=dtype) for _ in range(3))
    weight = torch.randn(shape[-1], device="cuda", dtype=dtype)
    found = []
    for uses_triton in (True, False):
        monkeypatch.setattr(fused, "supports_triton", lambda tensor, answer=uses_triton: answer)
        results = []
        for call, inputs in (
            (lambda *two: RMSNorm.apply(*two, 1e-6), (hidden, weight)),
            (GatedSiLU.apply, (hidden, other)),
        ):
            leaves = [one.clone().requires_grad_() for one in inputs]
            results += [out := call(*leaves), *torch.autograd.grad(out, leaves, outer)]
        found.append(results)
    bound = 2 * torch.finfo(dtype).eps
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(
            ours, theirs, rtol=bound, atol=bound * theirs.abs().max().item() / 8
        )
