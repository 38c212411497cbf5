# SPDX-License-Identifier: Apache-2.0
"""What every registered advantage estimator and policy loss keeps to. A new one is tested by being registered.

Fields that an estimator reads and options that it needs are filled in by name. None of this shows that an algorithm
computes what its paper says: its own test does.
"""

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.algorithms import (
    LossCounts,
    agg_loss,
    bind_options,
    estimate_advantages,
    options,
    required_fields,
)
from quadriga.algorithms.aggregate import LOSS_AGG_MODES
from quadriga.algorithms.registry import ADVANTAGES, BATCH_COLUMNS, POLICY_LOSSES

SETTINGS = {
    "gamma": 0.9,
    "lam": 0.8,
    "clip_ratio_low": 0.2,
    "clip_ratio_high": 0.3,
    "clip_ratio_c": 3.0,
}
SETTINGS |= {"gdpo_reward_keys": ["score", "format"]}
LOSS_FIELDS = (
    "old_log_prob",
    "log_prob",
    "rollout_log_probs",
    "advantages",
    "response_mask",
    *BATCH_COLUMNS,
)


def noise(seed: int, *shape: int) -> torch.Tensor:
    """Reproducible numbers in float64."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def batch(seed: int = 0) -> dict[str, Any]:
    """Nine answers to four prompts, one of them alone, one answer empty, masks with a gap."""
    lengths = torch.tensor([4, 5, 1, 3, 0, 5, 2, 4, 5])
    mask = (torch.arange(5) < lengths[:, None]).long()
    mask[1, 2] = 0
    scores = torch.zeros(9, 5, dtype=torch.float64)
    scores[torch.arange(9), (lengths - 1).clamp(min=0)] = noise(seed, 9)
    return {
        "token_level_rewards": scores,
        "response_mask": mask,
        "values": noise(seed + 1, 9, 5),
        "reward_baselines": noise(seed + 2, 9),
        "old_log_probs": -noise(seed + 3, 9, 5).abs(),
        "sum_pi_squared": noise(seed + 4, 9, 5).sigmoid(),
        "rollout_is_weights": noise(seed + 6, 9, 5).exp(),
        "reward_extra": np.array(
            [{"format": score.item()} for score in noise(seed + 5, 9)], dtype=object
        ),
        "uid": np.array(["a", "b", "a", "c", "b", "a", "d", "c", "b"], dtype=object),
        "data_source": np.array(["chess"] * 9, dtype=object),
        "agent": np.array(["white"] * 9, dtype=object),
        "row_index": torch.arange(9),
        **turns(lengths.tolist()),
    }


def turns(lengths: list[int]) -> dict[str, np.ndarray]:
    """A turn of up to two tokens and one of the rest for each row, all begun in the same states."""
    spans = np.empty(len(lengths), dtype=object)
    states = np.empty(len(lengths), dtype=object)
    for row, length in enumerate(lengths):
        spans[row] = [(0, min(2, length)), (min(2, length), length)]
        states[row] = ["start", "middle"]
    return {"turn_spans": spans, "turn_states": states}


def rows(fields: dict[str, Any], order: np.ndarray) -> dict[str, Any]:
    """The batch in another order."""
    return {name: column[order] for name, column in fields.items()}


@pytest.fixture(params=list(ADVANTAGES))
def estimator(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Each registered estimator, its options bound."""
    return bind_options(ADVANTAGES[request.param], shared=SETTINGS)


@pytest.fixture(params=list(POLICY_LOSSES))
def policy_loss(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """Each registered policy loss, its options bound."""
    return bind_options(POLICY_LOSSES[request.param], shared=SETTINGS)


def test_advantages_are_zero_outside_the_mask(estimator) -> None:
    """Before `estimate_advantages` has a hand in it, and there is something inside."""
    fields = batch()
    mask = fields["response_mask"].bool()
    for result in estimator(*(fields[name] for name in required_fields(estimator))):
        assert result.shape == mask.shape and not result[~mask].any() and result[mask].any()


def test_inputs_are_left_alone(estimator) -> None:
    """An estimator must not write into the batch."""
    fields, untouched = batch(), batch()
    estimate_advantages(estimator, fields)
    for name, column in fields.items():
        assert np.array_equal(np.asarray(column), np.asarray(untouched[name])), name


def test_order_of_rows_does_not_matter(estimator) -> None:
    """Permuting the batch permutes the advantages."""
    fields, order = batch(), np.array([3, 8, 0, 5, 7, 1, 2, 6, 4])
    for result, permuted in zip(
        estimate_advantages(estimator, fields),
        estimate_advantages(estimator, rows(fields, order)),
        strict=True,
    ):
        torch.testing.assert_close(permuted, result[order])


@pytest.mark.parametrize("score", [0.0, 0.1, -3.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_finite_on_scores_all_alike(estimator, score: float, dtype: torch.dtype) -> None:
    """No division by a deviation of zero; `estimate_advantages` raises on anything that is not finite."""
    # A rounding error divided by an epsilon would be far larger than the score of a group of one.
    fields = {name: col.to(dtype) if torch.is_tensor(col) else col for name, col in batch().items()}
    fields["token_level_rewards"] = torch.full((9, 5), score, dtype=dtype)
    fields["reward_extra"] = np.array([{"format": score}] * 9, dtype=object)
    advantages, _ = estimate_advantages(estimator, fields)
    assert float(advantages.abs().max()) < 1000


def test_groups_of_one_and_empty_batches_are_finite(estimator) -> None:
    """Every row alone; one row alone; no token under the mask."""
    fields = batch() | {"uid": np.arange(9)}
    estimate_advantages(estimator, fields)
    estimate_advantages(estimator, rows(fields, np.array([0])))
    advantages, returns = estimate_advantages(
        estimator, fields | {"response_mask": torch.zeros(9, 5)}
    )
    assert not advantages.any() and not returns.any()


def test_group_estimators_are_exactly_zero_where_a_group_is_all_alike(estimator) -> None:
    """Nothing was learned from such a group, and the engine may then skip it."""
    fields = batch() | {
        "token_level_rewards": torch.full((9, 5), 0.1),
        "uid": np.array(list("aaabbbccc")),
    }
    fields["response_mask"] = torch.ones(9, 5)
    fields["reward_extra"] = np.array([{"format": 0.1}] * 9, dtype=object)
    fields |= turns([5] * 9)
    if "uid" in required_fields(estimator):
        assert not estimate_advantages(estimator, fields)[0].any()


def test_better_answers_get_more(estimator) -> None:
    """Of two answers to a prompt that differ in their score alone, the better one has the larger advantage."""
    mask, scores = torch.ones(2, 3), torch.tensor([[0.0, 0.0, 0.2], [0.0, 0.0, 0.9]])
    fields = {"token_level_rewards": scores, "response_mask": mask, "uid": np.array(["a", "a"])}
    fields |= {"values": torch.full((2, 3), 0.5), "reward_baselines": torch.full((2,), 0.5)}
    fields |= {"old_log_probs": torch.full((2, 3), -1.0), "sum_pi_squared": torch.full((2, 3), 0.3)}
    fields["reward_extra"] = np.array([{"format": 0.5}] * 2, dtype=object)
    fields |= turns([3, 3]) | {"data_source": np.array(["chess"] * 2)}
    advantages, _ = estimate_advantages(estimator, fields)
    assert (advantages[1] > advantages[0]).all()


def test_signatures_say_everything(estimator, policy_loss) -> None:
    """Parameters are fields or options, nothing open; a policy loss reads fields that an engine has."""
    for function in (estimator, policy_loss):
        parameters = inspect.signature(function).parameters
        assert set(required_fields(function)) | set(options(function)) == set(parameters)
    assert set(required_fields(policy_loss)) <= set(LOSS_FIELDS)


def loss_inputs(seed: int = 0) -> dict[str, torch.Tensor]:
    """Five sequences, one of them empty, one with a gap, off policy enough for every clip to hold somewhere."""
    mask = torch.arange(6) < torch.tensor([6, 1, 0, 3, 4])[:, None]
    mask[0, 2:4] = False
    old, new = -noise(seed, 5, 6).abs(), -noise(seed + 1, 5, 6).abs()
    inputs = {"old_log_prob": old, "log_prob": new, "rollout_log_probs": old}
    inputs |= {"advantages": noise(seed + 2, 5, 6), "response_mask": mask}
    return inputs | {name: (noise(seed + 3, 5, 6) > 0) & mask for name in BATCH_COLUMNS}


def run(
    policy_loss: Callable[..., Any], inputs: dict[str, torch.Tensor]
) -> tuple[torch.Tensor, dict[str, Any]]:
    """Call a loss with the fields that it names."""
    return policy_loss(*(inputs[name] for name in required_fields(policy_loss)))


def test_losses_are_per_token(policy_loss) -> None:
    """Losses and diagnostics have the mask's shape and are finite; diagnostics carry no gradient."""
    inputs = loss_inputs()
    inputs["log_prob"].requires_grad_()
    losses, diagnostics = run(policy_loss, inputs)
    assert losses.shape == (5, 6) and bool(torch.isfinite(losses).all()) and losses.requires_grad
    for name, value in diagnostics.items():
        assert (
            value.shape == (5, 6) and not value.requires_grad and bool(torch.isfinite(value).all())
        ), name


def test_losses_do_not_read_outside_the_mask(policy_loss) -> None:
    """NaN there changes neither a loss nor a gradient; both are 0 there."""
    results = []
    for filling in (0.0, float("nan")):
        inputs = loss_inputs()
        for name in ("old_log_prob", "log_prob", "rollout_log_probs", "advantages"):
            inputs[name] = inputs[name].masked_fill(~inputs["response_mask"], filling)
        inputs["log_prob"].requires_grad_()
        losses, _ = run(policy_loss, inputs)
        agg_loss(losses, inputs["response_mask"], "token-mean").backward()
        results.append((losses.detach(), inputs["log_prob"].grad))
        assert (
            not losses[~inputs["response_mask"]].any()
            and not results[-1][1][~inputs["response_mask"]].any()
        )
    torch.testing.assert_close(*results, rtol=0, atol=0)


def test_a_fully_masked_batch_has_no_loss(policy_loss) -> None:
    """Finite, 0, and a gradient of 0."""
    inputs = loss_inputs()
    inputs["response_mask"] = torch.zeros_like(inputs["response_mask"])
    inputs["log_prob"].requires_grad_()
    losses, diagnostics = run(policy_loss, inputs)
    losses.sum().backward()
    assert not losses.any() and not inputs["log_prob"].grad.any()
    assert all(bool(torch.isfinite(value).all()) for value in diagnostics.values())


def test_order_of_sequences_does_not_matter_to_a_loss(policy_loss) -> None:
    """Permuting the sequences permutes the losses."""
    inputs, order = loss_inputs(), torch.tensor([3, 0, 4, 2, 1])
    losses, _ = run(policy_loss, inputs)
    permuted, _ = run(policy_loss, {name: value[order] for name, value in inputs.items()})
    torch.testing.assert_close(permuted, losses[order], rtol=0, atol=0)


@pytest.mark.parametrize("name", sorted(POLICY_LOSSES.needing_advantage))
def test_no_advantage_no_loss(name: str) -> None:
    """What is registered with `needs_advantage` is 0, with a gradient of 0, where a sequence has none."""
    function, inputs = bind_options(POLICY_LOSSES[name], shared=SETTINGS), loss_inputs()
    inputs["advantages"][3:] = 0
    inputs["log_prob"].requires_grad_()
    losses, _ = run(function, inputs)
    losses.sum().backward()
    assert not losses[3:].any() and not inputs["log_prob"].grad[3:].any() and losses[:2].any()


def test_good_tokens_become_likelier(policy_loss) -> None:
    """On policy, descending raises tokens with a positive advantage, lowers others, and leaves the rest alone."""
    inputs = loss_inputs()
    # A token that a loss leaves out on purpose is left alone.
    inputs |= {name: torch.zeros_like(inputs["response_mask"]) for name in BATCH_COLUMNS}
    inputs["log_prob"] = inputs["old_log_prob"].clone().requires_grad_()
    losses, _ = run(policy_loss, inputs)
    agg_loss(losses, inputs["response_mask"], "token-mean").backward()
    mask, gradient = inputs["response_mask"], inputs["log_prob"].grad
    assert torch.equal(torch.sign(gradient[mask]), -torch.sign(inputs["advantages"][mask]))
    assert not gradient[~mask].any()


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradient_does_not_depend_on_micro_batches(policy_loss, mode: str) -> None:
    """One, two and all sequences at a time give the same gradient, to rounding in float64."""
    gradients = []
    for size in (1, 2, 5):
        inputs = loss_inputs()
        inputs["log_prob"].requires_grad_()
        counts = LossCounts.of(inputs["response_mask"])
        for start in range(0, 5, size):
            part = {name: value[start : start + size] for name, value in inputs.items()}
            agg_loss(
                run(policy_loss, part)[0],
                part["response_mask"],
                mode,
                batch_num_tokens=counts.batch_num_tokens,
                global_batch_size=counts.global_batch_size,
            ).backward()
        gradients.append(inputs["log_prob"].grad)
    torch.testing.assert_close(gradients[0], gradients[2], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients[1], gradients[2], rtol=1e-12, atol=1e-12)
