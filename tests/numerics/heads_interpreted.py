# SPDX-License-Identifier: Apache-2.0
"""The Triton kernels of the vocabulary head, of norms and of gated MLPs, interpreted on the CPU, against torch: for
test_heads_triton.py.

Prints one line for each case that agrees. bfloat16 is left out: the interpreter keeps such numbers as integers of 16
bits, and its matrix product multiplies those.
"""

import torch

from quadriga.models import fused_triton, heads, heads_triton
from quadriga.models.fused import GatedSiLU, RMSNorm
from quadriga.models.heads import token_scores

TOKENS, ROWS, HIDDEN = 150, 700, 80  # none of them a multiple of a tile
ScoreOptions = heads._ScoreOptions


def scores_and_gradients(
    use_triton: bool, parts: list[torch.Tensor], targets: torch.Tensor, **options
) -> list:
    """Log-probs, entropies, squares and the gradients of states, weight and bias."""
    heads._ScoreOptions = lambda **options: ScoreOptions(**options | {"use_triton": use_triton})
    hidden, weight, *bias = (part.detach().clone().requires_grad_() for part in parts)
    outer = torch.randn(2, len(hidden), generator=torch.Generator().manual_seed(1))
    scores = token_scores(hidden, weight, bias[0] if bias else None, targets, **options)
    loss = scores.log_probs @ outer[0]
    if scores.entropy is not None:
        loss = loss + scores.entropy @ outer[1]
    loss.backward()
    found = [scores.log_probs.detach(), *(leaf.grad for leaf in (hidden, weight, *bias))]
    return found + [
        one.detach() for one in (scores.entropy, scores.sum_pi_squared) if one is not None
    ]


def check(
    dtype: torch.dtype, *, has_bias: bool, wanted: tuple[str, ...], temperature: float
) -> None:
    """Half-precision gradients are rounded before they are multiplied, elsewhere in either way."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator)
    weight = torch.randn(ROWS, HIDDEN, generator=generator) / 3
    parts = (
        [hidden, weight, torch.randn(ROWS, generator=generator)] if has_bias else [hidden, weight]
    )
    parts = [part.to(dtype) for part in parts]
    targets = torch.randint(0, ROWS, (TOKENS,), generator=generator)
    options = {"temperature": temperature, "chunk_tokens": 140} | {
        f"with_{name}": True for name in wanted
    }
    found = scores_and_gradients(True, parts, targets, **options)
    expected = scores_and_gradients(False, parts, targets, **options)
    assert len(found) == 3 + has_bias + len(wanted)
    for ours, theirs in zip(found, expected, strict=True):
        bound = 2e-5 if ours.dtype == torch.float32 else 0.02
        torch.testing.assert_close(
            ours.float(),
            theirs.float(),
            rtol=bound,
            atol=bound * theirs.abs().max().item(),
            check_dtype=False,
        )
    print(f"agrees: {dtype}, bias {has_bias}, {wanted}, temperature {temperature}", flush=True)


def check_fused(*shape: int) -> None:
    """Norm and gate, and their gradients, in float16 as the functions of `fused` round them."""
    generator = torch.Generator().manual_seed(0)
    hidden, other, outer = (torch.randn(shape, generator=generator).half() for _ in range(3))
    weight = torch.randn(shape[-1], generator=generator).half()
    normed, scales = fused_triton.rms_norm(hidden, weight, 1e-5)
    grads = fused_triton.rms_norm_gradients(outer, hidden, weight, scales)
    found = [
        normed,
        *grads,
        fused_triton.gated_silu(hidden, other),
        *fused_triton.gated_silu_gradients(outer, hidden, other),
    ]
    expected = []
    for call, inputs in (
        (lambda *two: RMSNorm.apply(*two, 1e-5), (hidden, weight)),
        (GatedSiLU.apply, (hidden, other)),
    ):
        leaves = [one.clone().requires_grad_() for one in inputs]
        expected += [out := call(*leaves), *torch.autograd.grad(out, leaves, outer)]
    for ours, theirs in zip(found, expected, strict=True):
        largest = theirs.abs().max().item()
        torch.testing.assert_close(ours.to(theirs.dtype), theirs, rtol=2e-3, atol=2e-3 * largest)
    print(f"agrees: norm and gate, {shape}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    heads_triton._ROWS_OF_PART = 256
    check(torch.float32, has_bias=True, wanted=("entropy", "sum_pi_squared"), temperature=0.7)
    check(torch.float32, has_bias=False, wanted=(), temperature=1.0)
    check(torch.float16, has_bias=True, wanted=("entropy",), temperature=1.3)
    check(torch.float16, has_bias=False, wanted=("sum_pi_squared",), temperature=1.0)
    check_fused(3, 5, 80, 64)
    check_fused(1300, 16)  # more tiles of rows than parts of the sum
    check_fused(7, 1536)
