# SPDX-License-Identifier: Apache-2.0
"""Chunked log-probs and entropies against log_softmax over all logits, values and gradients."""

import pytest
import torch
from torch import nn

from quadriga.models.fused import rms_norm
from quadriga.models.heads import ValueHead, token_scores


def naive(hidden, head, targets, temperature):
    logp = (head(hidden) / temperature).log_softmax(-1)
    return logp.gather(-1, targets[:, None])[:, 0], -(logp.exp() * logp).sum(-1)


@pytest.mark.parametrize("chunk", [1, 4, 7, 100])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_values_and_gradients(chunk: int, has_bias: bool, temperature: float) -> None:
    """For every chunk size, also one that does not divide the tokens. Does not show what bfloat16 loses."""
    torch.manual_seed(0)
    head = nn.Linear(16, 53, bias=has_bias, dtype=torch.float64)
    single = nn.Linear(16, 53, bias=has_bias)
    single.load_state_dict(head.state_dict())
    hidden = torch.randn(10, 16)
    targets = torch.randint(0, 53, (10,))
    weights = torch.randn(2, 10)

    wide = hidden.double().requires_grad_()
    log_probs, entropy = naive(wide, head, targets, temperature)
    (log_probs * weights[0] + entropy * weights[1]).sum().backward()
    narrow = hidden.clone().requires_grad_()
    scores = token_scores(narrow, single, targets, temperature=temperature, with_entropy=True, chunk_tokens=chunk)
    (scores.log_probs * weights[0] + scores.entropy * weights[1]).sum().backward()

    torch.testing.assert_close(scores.log_probs.double(), log_probs, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(scores.entropy.double(), entropy, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(narrow.grad.double(), wide.grad, atol=1e-4, rtol=1e-4)
    for ours, theirs in zip(single.parameters(), head.parameters(), strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, atol=1e-4, rtol=1e-4)


def test_entropy_without_gradient_costs_nothing_else() -> None:
    """Asking for the entropy as a metric leaves the gradient of the log-probs as it is."""
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(8, 30), torch.randn(6, 8), torch.randint(0, 30, (6,))
    results = []
    for with_entropy in (False, True):
        leaf = hidden.clone().requires_grad_()
        token_scores(leaf, head, targets, with_entropy=with_entropy).log_probs.sum().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_token_of_probability_zero_keeps_the_gradient_finite() -> None:
    """Logits so far apart that most probabilities underflow. Does not cover infinite logits, which are an error."""
    head = nn.Linear(2, 5, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0, 400], [0, 0], [0, -400], [1, 1], [2, 2]]))
    hidden = torch.tensor([[1.0, 1.0]], requires_grad=True)
    scores = token_scores(hidden, head, torch.tensor([2]), with_entropy=True)
    (scores.log_probs + scores.entropy).sum().backward()
    assert torch.isfinite(hidden.grad).all()
    assert scores.log_probs.item() == pytest.approx(-800.0)


def test_bfloat16_logits_are_not_rounded() -> None:
    """Log-probs of bfloat16 weights and states are those of the same numbers in float32, not of rounded logits."""
    torch.manual_seed(0)
    head = nn.Linear(64, 1000, bias=False).bfloat16()
    hidden, targets = (torch.randn(20, 64) * 4).bfloat16(), torch.randint(0, 1000, (20,))
    exact = (hidden.float() @ head.weight.float().t()).log_softmax(-1).gather(-1, targets[:, None])[:, 0]
    torch.testing.assert_close(token_scores(hidden, head, targets).log_probs, exact.detach(), atol=1e-4, rtol=1e-5)


def test_value_head_starts_at_zero_and_learns() -> None:
    head = ValueHead(8, torch.float32)
    hidden = torch.randn(5, 8)
    assert torch.equal(head(hidden), torch.zeros(5))
    head(hidden).sum().backward()
    torch.testing.assert_close(head.linear.weight.grad[0], hidden.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_the_one_written_out(dtype: torch.dtype) -> None:
    """Forward and backward against autograd over the formula in float32."""
    torch.manual_seed(0)
    hidden, weight, outer = torch.randn(6, 32).to(dtype), torch.rand(32).to(dtype), torch.randn(6, 32).to(dtype)
    leaf, scale = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = rms_norm(leaf, scale, 1e-5)
    (out * outer).sum().backward()
    wide, wide_scale = hidden.float().requires_grad_(), weight.float().requires_grad_()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * wide_scale
    (expected * outer.float()).sum().backward()
    tolerance = {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    torch.testing.assert_close(out.float(), expected, **tolerance)
    torch.testing.assert_close(leaf.grad.float(), wide.grad, **tolerance)
    torch.testing.assert_close(scale.grad.float(), wide_scale.grad, **tolerance)
