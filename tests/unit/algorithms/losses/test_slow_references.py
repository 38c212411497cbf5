# SPDX-License-Identifier: Apache-2.0
"""Every policy loss against plain Python, token by token: values and gradients, on random ragged batches with gaps.

The loops share no code with what they check, and are written from the formulas of the papers. They say nothing about
what a loss is good for.
"""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.algorithms.registry import POLICY_LOSSES, bind_options, required_fields

LOW, HIGH, DUAL = 0.2, 0.3, 3.0
SETTINGS = {"clip_ratio_low": LOW, "clip_ratio_high": HIGH, "clip_ratio_c": DUAL}
WIDTH = 6

Token = tuple[float, float, float, bool]
"""Old log-prob, log-prob, advantage, and whether the token is marked by a column of the batch."""
Answer = list[Token]
Slopes = list[tuple[float, float]]
"""Loss and its derivative by the token's own log-prob."""


def ppo_token(old: float, new: float, gain: float) -> tuple[float, float]:
    """Schulman et al., equation 7, with the dual clip."""
    ratio = math.exp(new - old)
    held = min(max(ratio, 1 - LOW), 1 + HIGH)
    loss, slope = (
        (-gain * ratio, -gain * ratio) if -gain * ratio >= -gain * held else (-gain * held, 0.0)
    )
    if gain < 0 and loss > -gain * DUAL:
        return -gain * DUAL, 0.0
    return loss, slope


def vanilla(answer: Answer) -> Slopes:
    return [ppo_token(old, new, gain) for old, new, gain, _ in answer]


def gspo(answer: Answer) -> Slopes:
    ratio = math.exp(sum(new - old for old, new, _, _ in answer) / len(answer))
    held = min(max(ratio, 1 - LOW), 1 + HIGH)
    return [
        (-gain * ratio, -gain * ratio) if -gain * ratio >= -gain * held else (-gain * held, 0.0)
        for _, _, gain, _ in answer
    ]


def luspo(answer: Answer) -> Slopes:
    return [(len(answer) * loss, len(answer) * slope) for loss, slope in gspo(answer)]


def vespo(answer: Answer) -> Slopes:
    ratio = math.exp(sum(new - old for old, new, _, _ in answer))
    results = []
    for _, new, gain, _ in answer:
        power, decay = (2, 3) if gain > 0 else (3, 2)
        weight = ratio**power * math.exp(decay * (1 - ratio))
        results.append((-gain * weight * new, -gain * weight))
    return results


def geo_mean(answer: Answer) -> Slopes:
    logs, frees = [], []
    for old, new, gain, _ in answer:
        log_ratio = new - old
        bounded = min(max(log_ratio, -LOW), HIGH)
        smaller = min(gain * log_ratio, gain * bounded)
        frees.append(smaller == gain * log_ratio)
        logs.append(log_ratio if frees[-1] else bounded)
    ratio = math.exp(sum(logs) / len(logs))
    return [
        (-gain * ratio, -gain * ratio if free else 0.0)
        for (_, _, gain, _), free in zip(answer, frees, strict=True)
    ]


def sapo(answer: Answer) -> Slopes:
    results = []
    for old, new, gain, _ in answer:
        tau, ratio = (1.0 if gain > 0 else 1.05), math.exp(new - old)
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        results.append((-gain * gate * 4 / tau, -gain * 4 * gate * (1 - gate) * ratio))
    return results


def gpg(answer: Answer) -> Slopes:
    return [(-gain * new, -gain) for _, new, gain, _ in answer]


def cispo(answer: Answer) -> Slopes:
    weights = [min(max(math.exp(new - old), 1 - LOW), 1 + HIGH) for old, new, _, _ in answer]
    return [
        (-gain * w * new, -gain * w) for (_, new, gain, _), w in zip(answer, weights, strict=True)
    ]


def dppo(answer: Answer, divergence: Callable[[float, float], float]) -> Slopes:
    results = []
    for old, new, gain, _ in answer:
        p, q = math.exp(new), math.exp(old)
        is_left = divergence(p, q) > (HIGH if gain > 0 else LOW) and (p - q) * gain > 0
        weight = 0.0 if is_left else min(p / q, DUAL)
        results.append((-gain * weight * new, -gain * weight))
    return results


def dppo_tv(answer: Answer) -> Slopes:
    return dppo(answer, lambda p, q: abs(p - q))


def dppo_kl(answer: Answer) -> Slopes:
    return dppo(
        answer,
        lambda p, q: q * math.log(q / p) + (1 - q) * math.log((1 - q + 1e-8) / (1 - p + 1e-8)),
    )


def dro(answer: Answer) -> Slopes:
    return [
        (-gain * new + 0.05 * (new - old) ** 2, -gain + 0.1 * (new - old))
        for old, new, gain, _ in answer
    ]


def clip_cov(answer: Answer) -> Slopes:
    return [
        (0.0, 0.0) if marked else ppo_token(old, new, gain) for old, new, gain, marked in answer
    ]


def kl_cov(answer: Answer) -> Slopes:
    results = []
    for old, new, gain, marked in answer:
        ratio, distance = math.exp(new - old), 0.1 * marked * abs(new - old)
        results.append(
            (-gain * ratio + distance, -gain * ratio + 0.1 * marked * math.copysign(1, new - old))
        )
    return results


REFERENCES: dict[str, Callable[[Answer], Slopes]] = {
    "bypass_mode": vanilla,
    "cispo": cispo,
    "clip_cov": clip_cov,
    "dppo_kl": dppo_kl,
    "dppo_tv": dppo_tv,
    "dro": dro,
    "geo_mean": geo_mean,
    "gpg": gpg,
    "gspo": gspo,
    "kl_cov": kl_cov,
    "luspo": luspo,
    "sapo": sapo,
    "vanilla": vanilla,
    "vespo": vespo,
}


def test_every_loss_has_a_reference() -> None:
    """A new one brings its own."""
    assert set(REFERENCES) == set(POLICY_LOSSES)


@pytest.mark.parametrize("name", list(REFERENCES))
@settings(deadline=None, max_examples=25)
@given(
    rows=st.integers(1, 5),
    density=st.sampled_from([0.0, 0.4, 0.9, 1.0]),
    seed=st.integers(0, 10_000),
)
def test_values_and_gradients(name: str, rows: int, density: float, seed: int) -> None:
    """To 1e-6 in float64; outside the mask, which may leave a sequence empty, both are 0."""
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return torch.randn(rows, WIDTH, dtype=torch.float64, generator=generator)

    mask = torch.rand(rows, WIDTH, generator=generator) < density
    old, new, gains, marks = (
        -noise().abs() - 0.01,
        -noise().abs() - 0.01,
        noise(),
        (noise() > 0) & mask,
    )
    inputs = {
        "old_log_prob": old,
        "rollout_log_probs": old,
        "log_prob": new.clone().requires_grad_(),
    }
    inputs |= {
        "advantages": gains,
        "response_mask": mask,
        "covariance_clipped": marks,
        "covariance_top": marks,
    }
    function = bind_options(POLICY_LOSSES.get(name), shared=SETTINGS)
    losses, _ = function(*(inputs[field] for field in required_fields(function)))
    losses.sum().backward()
    expected, slopes = torch.zeros_like(old), torch.zeros_like(old)
    for row in range(rows):
        places = mask[row].nonzero()[:, 0].tolist()
        answer = [
            tuple(column[row, t].item() for column in (old, new, gains, marks)) for t in places
        ]
        for t, (loss, slope) in zip(
            places, REFERENCES[name](answer) if answer else [], strict=True
        ):
            expected[row, t], slopes[row, t] = loss, slope
    torch.testing.assert_close(losses.detach(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(inputs["log_prob"].grad, slopes, rtol=1e-6, atol=1e-6)
