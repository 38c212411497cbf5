# SPDX-License-Identifier: Apache-2.0
"""Chunked log-probs and entropies against log_softmax over all logits, values and gradients."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.models import heads
from quadriga.models.attention import PackedBatch
from quadriga.models.fused import RMSNorm
from quadriga.models.heads import token_scores
from quadriga.models.scorers import ScoreQuestion, ValueScorer


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
    scores = token_scores(
        narrow,
        single.weight,
        single.bias,
        targets,
        temperature=temperature,
        with_entropy=True,
        chunk_tokens=chunk,
    )
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
        token_scores(
            leaf, head.weight, head.bias, targets, with_entropy=with_entropy
        ).log_probs.sum().backward()
        results.append(leaf.grad)
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)


def test_a_token_of_probability_zero_keeps_the_gradient_finite() -> None:
    """Logits so far apart that most probabilities underflow. Does not cover infinite logits, which are an error."""
    head = nn.Linear(2, 5, bias=False)
    with torch.no_grad():
        head.weight.copy_(torch.tensor([[0.0, 400], [0, 0], [0, -400], [1, 1], [2, 2]]))
    hidden = torch.tensor([[1.0, 1.0]], requires_grad=True)
    scores = token_scores(hidden, head.weight, None, torch.tensor([2]), with_entropy=True)
    (scores.log_probs + scores.entropy).sum().backward()
    assert torch.isfinite(hidden.grad).all()
    assert scores.log_probs.item() == pytest.approx(-800.0)


def test_bfloat16_logits_are_not_rounded() -> None:
    """Log-probs of bfloat16 weights and states are those of the same numbers in float32, not of rounded logits."""
    torch.manual_seed(0)
    head = nn.Linear(64, 1000, bias=False).bfloat16()
    hidden, targets = (torch.randn(20, 64) * 4).bfloat16(), torch.randint(0, 1000, (20,))
    exact = (
        (hidden.float() @ head.weight.float().t())
        .log_softmax(-1)
        .gather(-1, targets[:, None])[:, 0]
    )
    torch.testing.assert_close(
        token_scores(hidden, head.weight, None, targets).log_probs,
        exact.detach(),
        atol=1e-4,
        rtol=1e-5,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_top_tokens_are_the_largest_of_all(temperature: float) -> None:
    """In descending order, over several chunks, without a gradient and without a trace in the others' gradient."""
    torch.manual_seed(0)
    head, hidden, targets = (
        nn.Linear(8, 30),
        torch.randn(6, 8, requires_grad=True),
        torch.randint(0, 30, (6,)),
    )
    expected = (head(hidden) / temperature).log_softmax(-1).topk(4, dim=-1)
    scores = token_scores(
        hidden,
        head.weight,
        head.bias,
        targets,
        temperature=temperature,
        top_k=4,
        with_entropy=True,
        chunk_tokens=4,
    )
    torch.testing.assert_close(scores.top_log_probs, expected.values.detach(), atol=1e-6, rtol=1e-5)
    assert torch.equal(scores.top_ids, expected.indices)
    assert not scores.top_log_probs.requires_grad and not scores.top_ids.requires_grad
    (gradient,) = torch.autograd.grad(scores.log_probs.sum() + scores.entropy.sum(), hidden)
    plain = token_scores(
        hidden, head.weight, head.bias, targets, temperature=temperature, with_entropy=True
    )
    (expected_gradient,) = torch.autograd.grad(plain.log_probs.sum() + plain.entropy.sum(), hidden)
    torch.testing.assert_close(gradient, expected_gradient, atol=1e-6, rtol=1e-5)
    assert plain.top_log_probs is None and plain.top_ids is None


@pytest.mark.parametrize("has_cap", [False, True])
@pytest.mark.parametrize("chunk", [4, 100])
def test_several_targets_of_a_token(chunk: int, has_cap: bool) -> None:
    """Log-probs [M, K] and their gradients, a target that stands twice among them. Does not show it on parts of the
    vocabulary, which test_head_shards.py does."""
    torch.manual_seed(0)
    head, hidden = (
        nn.Linear(8, 30, dtype=torch.float64),
        torch.randn(6, 8, dtype=torch.float64, requires_grad=True),
    )
    targets, outer = torch.randint(0, 30, (6, 4)), torch.randn(6, 5, dtype=torch.float64)
    targets[2] = 7
    rule = heads.LogitRule(softcap=3.0 if has_cap else None)
    logits = head(hidden)
    logp = ((3.0 * (logits / 3.0).tanh() if has_cap else logits) / 0.6).log_softmax(-1)
    entropy = -(logp.exp() * logp).sum(-1)
    expected = torch.autograd.grad(
        (logp.gather(-1, targets) * outer[:, :4]).sum() + entropy @ outer[:, 4], hidden
    )
    narrow, single = hidden.detach().float().requires_grad_(), head.float()
    scores = token_scores(
        narrow,
        single.weight,
        single.bias,
        targets,
        temperature=0.6,
        with_entropy=True,
        chunk_tokens=chunk,
        rule=rule,
    )
    torch.testing.assert_close(
        scores.log_probs.double(), logp.gather(-1, targets), atol=1e-5, rtol=1e-5
    )
    total = (scores.log_probs * outer[:, :4].float()).sum() + scores.entropy @ outer[:, 4].float()
    (found,) = torch.autograd.grad(total, narrow)
    torch.testing.assert_close(found.double(), expected[0], atol=1e-5, rtol=1e-4)


def test_a_small_vocabulary_fills_its_top_with_nothing() -> None:
    scores = token_scores(torch.zeros(2, 3), torch.ones(4, 3), None, torch.tensor([0, 3]), top_k=6)
    assert scores.top_ids[0, 4:].tolist() == [-1, -1] and sorted(
        scores.top_ids[0, :4].tolist()
    ) == [0, 1, 2, 3]
    assert scores.top_log_probs[1, 4:].tolist() == [-float("inf")] * 2


@pytest.mark.parametrize("chunk", [1, 4, 100])
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_sum_of_squared_probabilities(chunk: int, has_bias: bool, temperature: float) -> None:
    """Against exp(logsumexp(2z) - 2 logsumexp(z)) in float64; without a gradient, and without a trace in the others."""
    torch.manual_seed(0)
    head = nn.Linear(16, 53, bias=has_bias)
    hidden, targets = torch.randn(10, 16, requires_grad=True), torch.randint(0, 53, (10,))
    bias = None if head.bias is None else head.bias.double()
    z = nn.functional.linear(hidden.detach().double(), head.weight.double(), bias) / temperature
    expected = (torch.logsumexp(2 * z, -1) - 2 * torch.logsumexp(z, -1)).exp()
    options = {"temperature": temperature, "chunk_tokens": chunk}
    gradients = []
    for wanted in (
        {},
        {"with_sum_pi_squared": True},
        {"with_sum_pi_squared": True, "with_entropy": True},
    ):
        scores = token_scores(hidden, head.weight, head.bias, targets, **options, **wanted)
        gradients += torch.autograd.grad(scores.log_probs.sum(), hidden)
        if not wanted:
            assert scores.sum_pi_squared is None
            continue
        torch.testing.assert_close(scores.sum_pi_squared.double(), expected, atol=0, rtol=1e-5)
        assert not scores.sum_pi_squared.requires_grad
    assert torch.equal(gradients[0], gradients[1]) and torch.equal(gradients[0], gradients[2])


def test_squares_of_a_certain_and_of_an_uncertain_policy() -> None:
    """1 where one token has all of the probability, however large its logit; 1 / V where all are alike."""
    weight = torch.tensor([[200.0], [0.0], [0.0], [-300.0]])
    hidden = torch.tensor([[1.0], [0.0], [-1.0]])
    scores = token_scores(
        hidden, weight, None, torch.zeros(3).long(), with_sum_pi_squared=True, temperature=0.5
    )
    assert scores.sum_pi_squared.tolist() == [1.0, 0.25, 1.0]


def test_a_second_backward_pass_gives_the_same() -> None:
    """The first one uses up the logits of the last chunk that the forward pass has kept."""
    torch.manual_seed(0)
    head, hidden, targets = (
        nn.Linear(8, 30),
        torch.randn(6, 8, requires_grad=True),
        torch.randint(0, 30, (6,)),
    )
    scores = token_scores(
        hidden, head.weight, None, targets, temperature=0.7, with_entropy=True, chunk_tokens=4
    )
    loss = scores.log_probs.sum() + scores.entropy.square().sum()
    first, second = (
        torch.autograd.grad(loss, (hidden, head.weight), retain_graph=True) for _ in range(2)
    )
    torch.testing.assert_close(first, second, atol=1e-6, rtol=1e-6)


def test_the_only_output_used_is_the_entropy() -> None:
    """And only the states are trained: a frozen head."""
    torch.manual_seed(0)
    head, hidden, targets = nn.Linear(8, 30), torch.randn(6, 8), torch.randint(0, 30, (6,))
    leaves = [hidden.clone().requires_grad_() for _ in range(2)]
    _, expected = naive(leaves[0], head, targets, 1.0)
    frozen = head.requires_grad_(False)
    found = token_scores(
        leaves[1], frozen.weight, frozen.bias, targets, with_entropy=True, chunk_tokens=4
    ).entropy
    gradients = [
        torch.autograd.grad(one.sum(), leaf)[0]
        for one, leaf in zip((expected, found), leaves, strict=True)
    ]
    torch.testing.assert_close(*gradients, atol=1e-6, rtol=1e-5)


def test_value_head_starts_at_zero_and_learns() -> None:
    config = LlamaConfig(
        hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=5
    )
    scorer = ValueScorer(LlamaForCausalLM(config))
    hidden, nothing = torch.randn(5, 8), PackedBatch.filler(torch.device("cpu"))
    batch = replace(nothing, predictors=torch.arange(5), targets=torch.zeros(5, dtype=torch.int64))
    values = scorer.score(hidden, batch, ScoreQuestion())["values"]
    assert torch.equal(values, torch.zeros(5))
    values.sum().backward()
    torch.testing.assert_close(scorer.model.value_head["linear"].weight.grad[0], hidden.sum(0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_is_the_one_written_out(dtype: torch.dtype) -> None:
    """Forward and backward against autograd over the formula in float32."""
    torch.manual_seed(0)
    hidden, weight, outer = (
        torch.randn(6, 32).to(dtype),
        torch.rand(32).to(dtype),
        torch.randn(6, 32).to(dtype),
    )
    leaf, scale = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    out = RMSNorm.apply(leaf, scale, 1e-5)
    (out * outer).sum().backward()
    wide, wide_scale = hidden.float().requires_grad_(), weight.float().requires_grad_()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * wide_scale
    (expected * outer.float()).sum().backward()
    tolerance = (
        {"atol": 1e-5, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.05, "rtol": 0.02}
    )
    torch.testing.assert_close(out.float(), expected, **tolerance)
    torch.testing.assert_close(leaf.grad.float(), wide.grad, **tolerance)
    torch.testing.assert_close(scale.grad.float(), wide_scale.grad, **tolerance)


def test_without_a_compiler_triton_is_not_tried(tmp_path, monkeypatch, caplog) -> None:
    """One sentence for a process. Does not show that Triton works where there is one."""
    heads.has_compiler.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    assert not heads.has_compiler() and not heads.has_compiler()
    (told,) = caplog.messages
    assert "got no C compiler for Triton's kernels" in told and "Install gcc or clang" in told
    heads.has_compiler.cache_clear()
    (tmp_path / "clang").write_text("")
    (tmp_path / "clang").chmod(0o755)
    assert heads.has_compiler()
    heads.has_compiler.cache_clear()
