# SPDX-License-Identifier: Apache-2.0
"""The sampler draws from the distribution that it says, and keeps the tokens that a sorted list would keep."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.errors import RolloutError
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.sampler import NUM_DRAWS, Draws, SamplingRules, sample


def _rules(rows: int = 1, **params) -> SamplingRules:
    return SamplingRules.from_params([SamplingParams(max_tokens=1, **params)] * rows)


def _kept_by_sorting(logits: torch.Tensor, params: SamplingParams) -> torch.Tensor:
    """The filtered, normalised distribution of one row, [V] float64, from a full sort."""
    odds = (logits.double() / params.temperature).softmax(-1)
    ranked = odds.sort(descending=True).values
    threshold = torch.tensor(0.0, dtype=torch.float64)
    if params.top_k > 0:
        threshold = ranked[min(params.top_k, len(ranked)) - 1]
    kept = ranked[ranked >= threshold]
    if params.top_p < 1:
        reached = (kept / kept.sum()).cumsum(-1)
        threshold = kept[int((reached < params.top_p).sum().clamp(max=len(kept) - 1))]
    threshold = torch.maximum(threshold, params.min_p * ranked[0])
    kept = torch.where(odds >= threshold, odds, 0.0)
    return kept / kept.sum()


def _uniforms(rows: int, seed: int) -> torch.Tensor:
    return torch.rand(
        rows, NUM_DRAWS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


@pytest.mark.parametrize("num_tokens", [7, 256, 300, 1024])
@pytest.mark.parametrize(
    "params",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0, "top_k": 5},
        {"top_p": 0.6},
        {"top_p": 0.9, "top_k": 40},
        {"min_p": 0.2},
        {"top_p": 0.8, "top_k": 100, "min_p": 0.05, "temperature": 1.5},
    ],
)
def test_distribution(num_tokens: int, params: dict) -> None:
    """Each token comes as often as it should, to within five standard deviations; those cut off never come."""
    count = 6_000
    logits = torch.randn(num_tokens, generator=torch.Generator().manual_seed(num_tokens)) * 2
    sampling = SamplingParams(max_tokens=1, **params)
    expected = _kept_by_sorting(logits, sampling)
    rules = SamplingRules.from_params([sampling] * count)
    tokens, _, _ = sample(logits.repeat(count, 1), rules, _uniforms(count, seed=num_tokens))
    shares = torch.bincount(tokens, minlength=num_tokens).double() / count
    deviation = (expected * (1 - expected) / count).sqrt()
    assert ((shares - expected).abs() <= 5 * deviation + 1 / count).all()
    assert not shares[expected == 0].any()


def test_neighbouring_logits_give_the_same_tokens() -> None:
    """Noise a hundred times that of a float32 model changes less than 1 draw in 100."""
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(600, 20_000, generator=generator)
    moved = logits + 1e-3 * torch.randn(logits.shape, generator=generator)
    uniforms = _uniforms(600, seed=6)
    tokens, _, _ = sample(logits, _rules(600), uniforms)
    others, _, _ = sample(moved, _rules(600), uniforms)
    assert (tokens != others).float().mean() < 0.01


@settings(deadline=None, max_examples=40)
@given(
    st.integers(0, 2**32),
    st.integers(1, 2000),
    st.floats(0.1, 5.0),
    st.floats(0.01, 1.0),
    st.integers(-1, 900),
    st.floats(0.0, 1.0),
)
def test_filters_keep_what_sorting_keeps(
    seed: int, num_tokens: int, temperature: float, top_p: float, top_k: int, min_p: float
) -> None:
    """Any token drawn is among those that a full sort keeps; top-p that needs many tokens is found too."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_tokens, generator=generator)
    params = SamplingParams(
        max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p
    )
    expected = _kept_by_sorting(logits, params)
    uniforms = _uniforms(32, seed)
    uniforms[0], uniforms[1] = 0.0, 1 - 2.0**-53
    tokens, _, _ = sample(logits.repeat(32, 1), SamplingRules.from_params([params] * 32), uniforms)
    assert (expected[tokens] > 0).all()


def test_log_probs_are_before_the_filters() -> None:
    """The number reported is that of the temperature-scaled softmax over the whole vocabulary."""
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)) * 3
    uniforms = _uniforms(50, seed=2)
    tokens, log_probs, _ = sample(
        logits.clone(), _rules(50, temperature=0.7, top_k=3, top_p=0.9), uniforms
    )
    expected = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize(
    "params", [{}, {"top_k": 3}, {"top_p": 0.6, "temperature": 2.0}, {"min_p": 0.1, "top_k": 9}]
)
def test_log_probs_after_the_filters(params: dict) -> None:
    """The second number is that of the distribution that is left; without filters it is the first."""
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)) * 3
    sampling = SamplingParams(max_tokens=1, **params)
    tokens, log_probs, drawn = sample(
        logits.clone(), SamplingRules.from_params([sampling] * 50), _uniforms(50, seed=2)
    )
    expected = [
        _kept_by_sorting(row, sampling)[token].log()
        for row, token in zip(logits, tokens, strict=True)
    ]
    torch.testing.assert_close(drawn.double(), torch.stack(expected), atol=2e-5, rtol=1e-5)
    assert torch.equal(drawn, log_probs) == (not params)


@pytest.mark.parametrize(
    "params", [{"do_sample": False}, {"temperature": 0.0}, {"do_sample": False, "top_k": 2}]
)
def test_greedy_takes_the_lowest_of_equals(params: dict) -> None:
    """Greedy rows take the first of the largest logits; the log-probability is at temperature 1."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    tokens, log_probs, drawn = sample(logits.clone(), _rules(2, **params), _uniforms(2, seed=0))
    assert tokens.tolist() == [1, 0]
    assert drawn.tolist() == [0, 0]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_rows_follow_their_own_rules() -> None:
    """A row gives the same token and number alone and among rows with other rules."""
    kinds = [
        {},
        {"do_sample": False},
        {"top_k": 2},
        {"top_p": 0.3},
        {"min_p": 0.5},
        {"temperature": 4.0},
    ]
    params = [SamplingParams(max_tokens=1, **kind) for kind in kinds * 5]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(params), 700, generator=generator)
    uniforms = _uniforms(len(params), seed=4)
    tokens, log_probs, _ = sample(logits.clone(), SamplingRules.from_params(params), uniforms)
    for row, one in enumerate(params):
        alone = sample(
            logits[row : row + 1].clone(), SamplingRules.from_params([one]), uniforms[row : row + 1]
        )
        assert (alone[0].item(), alone[1].item()) == (tokens[row].item(), log_probs[row].item())


def test_tokens_without_probability_never_come() -> None:
    """Logits of minus infinity at both ends and in between: the extremes of the uniform numbers avoid them."""
    logits = torch.full((3, 600), -math.inf)
    logits[:, [300, 400]] = 1.0
    uniforms = torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64)[:, None].expand(
        3, NUM_DRAWS
    )
    tokens, log_probs, _ = sample(logits, _rules(3), uniforms)
    assert set(tokens.tolist()) == {300, 400}
    assert tokens[0] != tokens[2]
    torch.testing.assert_close(log_probs, torch.full((3,), math.log(0.5)))


def _numbers(seed: int, tokens: int) -> np.ndarray:
    draws = Draws(seed)
    return np.concatenate([draws.next() for _ in range(tokens)])


def test_uniform_numbers() -> None:
    """They depend on the seed and on the token's place alone."""
    assert (_numbers(7, 5) == _numbers(7, 5)).all()
    assert not np.isin(_numbers(7, 5), _numbers(8, 5)).any()
    many = np.concatenate([_numbers(2**64 - 1 - seed, 1) for seed in range(2000)])
    assert abs(many.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02


@pytest.mark.parametrize(
    "wrong",
    [
        {"top_p": 0.0},
        {"top_k": -2},
        {"min_p": 1.5},
        {"temperature": -1.0},
        {"max_tokens": 0},
        {"seed": -1},
    ],
)
def test_wrong_parameters(wrong: dict) -> None:
    """A parameter out of its range is named with its value."""
    name, value = next(iter(wrong.items()))
    with pytest.raises(RolloutError, match=f"sampling {name}: got {value}"):
        SamplingParams(**{"max_tokens": 1, **wrong})
