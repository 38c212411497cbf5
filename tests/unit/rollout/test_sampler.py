# SPDX-License-Identifier: Apache-2.0
"""The sampler draws from the distribution that it says, and keeps the tokens that a sorted list would keep."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.errors import RolloutError
from quadriga.rollout.base import SamplingParams
from quadriga.rollout.sampler import SamplingRules, draw_uniforms, sample


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


def _sweep(logits: torch.Tensor, params: SamplingParams, count: int) -> torch.Tensor:
    """How often each token comes when the uniform numbers are an even grid, as shares [V]."""
    rules = SamplingRules.from_params([params] * count)
    uniforms = (torch.arange(count, dtype=torch.float64) + 0.5) / count
    tokens, _ = sample(logits.repeat(count, 1), rules, uniforms)
    return torch.bincount(tokens, minlength=logits.shape[-1]).double() / count


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
    """An even grid of uniform numbers gives each token its share, to within one step of the grid."""
    logits = torch.randn(num_tokens, generator=torch.Generator().manual_seed(num_tokens)) * 2
    sampling = SamplingParams(max_tokens=1, **params)
    expected = _kept_by_sorting(logits, sampling)
    shares = _sweep(logits, sampling, count=3000)
    assert (shares - expected).abs().max() < 1 / 3000 + 1e-6
    assert not shares[expected == 0].any()


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
    params = SamplingParams(max_tokens=1, temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p)
    expected = _kept_by_sorting(logits, params)
    uniforms = torch.cat((torch.rand(30, generator=generator, dtype=torch.float64), torch.tensor([0.0, 1 - 2.0**-53])))
    tokens, _ = sample(logits.repeat(32, 1), SamplingRules.from_params([params] * 32), uniforms)
    assert (expected[tokens] > 0).all()


def test_log_probs_are_before_the_filters() -> None:
    """The number reported is that of the temperature-scaled softmax over the whole vocabulary."""
    logits = torch.randn(50, 300, generator=torch.Generator().manual_seed(1)) * 3
    uniforms = torch.rand(50, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    tokens, log_probs = sample(logits.clone(), _rules(50, temperature=0.7, top_k=3, top_p=0.9), uniforms)
    expected = (logits / 0.7).log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(log_probs, expected, atol=2e-6, rtol=1e-6)


@pytest.mark.parametrize("params", [{"do_sample": False}, {"temperature": 0.0}, {"do_sample": False, "top_k": 2}])
def test_greedy_takes_the_lowest_of_equals(params: dict) -> None:
    """Greedy rows take the first of the largest logits; the log-probability is at temperature 1."""
    logits = torch.tensor([[0.0, 2.0, 1.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    tokens, log_probs = sample(logits.clone(), _rules(2, **params), torch.rand(2, dtype=torch.float64))
    assert tokens.tolist() == [1, 0]
    torch.testing.assert_close(log_probs, logits.log_softmax(-1)[[0, 1], [1, 0]])


def test_rows_follow_their_own_rules() -> None:
    """A row gives the same token and number alone and among rows with other rules."""
    kinds = [{}, {"do_sample": False}, {"top_k": 2}, {"top_p": 0.3}, {"min_p": 0.5}, {"temperature": 4.0}]
    params = [SamplingParams(max_tokens=1, **kind) for kind in kinds * 5]
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(len(params), 700, generator=generator)
    uniforms = torch.rand(len(params), generator=generator, dtype=torch.float64)
    tokens, log_probs = sample(logits.clone(), SamplingRules.from_params(params), uniforms)
    for row, one in enumerate(params):
        alone = sample(logits[row : row + 1].clone(), SamplingRules.from_params([one]), uniforms[row : row + 1])
        assert (alone[0].item(), alone[1].item()) == (tokens[row].item(), log_probs[row].item())


def test_tokens_without_probability_never_come() -> None:
    """Logits of minus infinity at both ends and in between: the extremes of the uniform numbers avoid them."""
    logits = torch.full((3, 600), -math.inf)
    logits[:, [300, 400]] = 1.0
    tokens, log_probs = sample(logits, _rules(3), torch.tensor([0.0, 0.5, 1 - 2.0**-53], dtype=torch.float64))
    assert tokens.tolist() == [300, 400, 400]
    torch.testing.assert_close(log_probs, torch.full((3,), math.log(0.5)))


def test_uniform_numbers() -> None:
    """They depend on the seed alone, and a longer draw begins with the shorter one."""
    assert (draw_uniforms(7, 20)[:5] == draw_uniforms(7, 5)).all()
    assert not np.isin(draw_uniforms(7, 20), draw_uniforms(8, 20)).any()
    many = np.concatenate([draw_uniforms(2**64 - 1 - seed, 10) for seed in range(2000)])
    assert abs(many.mean() - 0.5) < 0.01
    assert abs(np.corrcoef(many[:-1], many[1:])[0, 1]) < 0.02


@pytest.mark.parametrize(
    "wrong", [{"top_p": 0.0}, {"top_k": -2}, {"min_p": 1.5}, {"temperature": -1.0}, {"max_tokens": 0}, {"seed": -1}]
)
def test_wrong_parameters(wrong: dict) -> None:
    """A parameter out of its range is named with its value."""
    name, value = next(iter(wrong.items()))
    with pytest.raises(RolloutError, match=f"sampling {name}: got {value}"):
        SamplingParams(**{"max_tokens": 1, **wrong})
