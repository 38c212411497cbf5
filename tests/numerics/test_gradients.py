# SPDX-License-Identifier: Apache-2.0
"""The gradient of an update, against one written out with Hugging Face's eager attention on padded rows."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from quadriga.algorithms.aggregate import LOSS_AGG_MODES, agg_loss
from quadriga.algorithms.kl import kl_penalty
from quadriga.algorithms.losses import vanilla
from quadriga.config import ActorConfig, DistillationConfig, OptimConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Memory, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import infer, update
from quadriga.models.scorers import PolicyScorer
from quadriga.protocol import DataProto
from tests.numerics.recording import Recording

WHOLE = MicroBatching(num_sequences=99, max_tokens=1)
CUTS = {
    "one by one": MicroBatching(1, 1),
    "three": MicroBatching(3, 1),
    "five, across groups": MicroBatching(5, 1),
    "all, prompts not shared": MicroBatching(99, 1, share_prompts=False),
    "by tokens": MicroBatching(None, 30),
    "by tokens, smaller than a sequence": MicroBatching(None, 4),
}


def gradients(
    model: PreTrainedModel,
    batch: DataProto,
    config: ActorConfig,
    micro: MicroBatching,
    teacher: DistillationConfig | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    training = Training(OptimConfig(), grad_clip=1.0, max_nonfinite_steps=3)
    device = torch.device("cpu")
    engine = Recording(
        PolicyScorer(model), dtype=torch.float32, device=device, training=training, **options
    )
    objective = PolicyObjective(config, None, teacher)
    update(engine, batch, objective, Passes(len(batch), 1, micro), lr=1e-3, temperature=0.7)
    return engine.recorded


def padded_scores(
    model: PreTrainedModel, batch: DataProto, temperature: float
) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies by the book."""
    columns = batch.batch
    logits = model(
        input_ids=columns["input_ids"],
        attention_mask=columns["attention_mask"],
        position_ids=columns["position_ids"],
    ).logits
    width = columns["responses"].shape[1]
    logp = (logits[:, -width - 1 : -1] / temperature).log_softmax(-1)
    return logp.gather(-1, columns["responses"][..., None])[..., 0], -(logp.exp() * logp).sum(-1)


def reference_gradients(
    model: PreTrainedModel, batch: DataProto, config: ActorConfig
) -> dict[str, Tensor]:
    columns, mask = batch.batch, batch.batch["response_mask"]
    log_prob, entropy = padded_scores(model, batch, 0.7)
    losses, _ = vanilla(
        columns["old_log_probs"],
        log_prob,
        columns["advantages"],
        mask,
        clip_ratio_low=config.clip_ratio_low,
        clip_ratio_high=config.clip_ratio_high,
        clip_ratio_c=config.clip_ratio_c,
    )

    def total(per_token: Tensor) -> Tensor:
        return agg_loss(
            per_token, mask, config.loss_agg_mode, loss_scale_factor=config.loss_scale_factor
        )

    loss = total(losses) - config.entropy_coeff * total(entropy)
    if config.use_kl_loss:
        loss = loss + config.kl_loss_coef * total(
            kl_penalty(log_prob, columns["ref_log_prob"], config.kl_loss_type)
        )
    loss.backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def largest_difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Over all parameters, relative to each one's norm."""
    assert set(ours) == set(theirs)
    return max(float((ours[name] - theirs[name]).norm() / theirs[name].norm()) for name in theirs)


@pytest.mark.parametrize("micro", CUTS.values(), ids=CUTS.keys())
@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradient_does_not_depend_on_the_cut(
    make_model: Callable, batch: DataProto, mode: str, micro
) -> None:
    """For every way of aggregating and of cutting, packed equals padded. Does not show it for more than one process,
    nor in bfloat16."""
    config = ActorConfig(loss_agg_mode=mode, loss_scale_factor=5)
    expected = reference_gradients(make_model("eager"), batch, config)
    assert largest_difference(gradients(make_model(), batch, config, micro), expected) < 1e-5


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_gradient_with_entropy_and_divergence(
    make_model: Callable, batch: DataProto, mode: str
) -> None:
    """The bonus and the divergence reach the gradient too. Does not show it for every kind of divergence: these are
    shown where they are defined."""
    config = ActorConfig(
        loss_agg_mode=mode,
        entropy_coeff=0.05,
        use_kl_loss=True,
        kl_loss_coef=0.1,
        kl_loss_type="k3",
    )
    expected = reference_gradients(make_model("eager"), batch, config)
    for micro in (WHOLE, CUTS["three"]):
        assert largest_difference(gradients(make_model(), batch, config, micro), expected) < 1e-5


@pytest.mark.parametrize(
    "cut", ["three", "all, prompts not shared", "by tokens, smaller than a sequence"]
)
def test_gradient_of_what_others_wrote(make_model: Callable, batch: DataProto, cut: str) -> None:
    """Cross entropy of every third token, also of the last ones of a response, beside a policy loss of the others."""
    columns = batch.batch
    mask = columns["response_mask"]
    is_echo = (torch.arange(mask.shape[1]) % 3 == 2) & mask.bool()
    columns["response_mask"] = mask * ~is_echo
    columns["echo_mask"] = is_echo.long()
    config = ActorConfig(echo_coeff=0.7)
    model = make_model("eager")
    log_prob, _ = padded_scores(model, batch, 0.7)
    (-0.7 * log_prob[is_echo].mean()).backward()
    # Gradients add up.
    expected = reference_gradients(model, batch, ActorConfig())
    assert largest_difference(gradients(make_model(), batch, config, CUTS[cut]), expected) < 1e-5


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum"])
@pytest.mark.parametrize("loss_mode", ["k1", "k3", "k3+", "forward_kl_topk"])
def test_gradient_from_a_teacher(
    make_model: Callable, batch: DataProto, mode: str, loss_mode: str
) -> None:
    """Reverse KL as a policy gradient (k1) and as a loss, and forward KL over the teacher's likeliest tokens, whatever
    the cut; its bounds act. Does not show it on several processes, which test_layouts.py does."""
    teacher = make_teacher(batch)
    config, columns = ActorConfig(loss_agg_mode=mode), batch.batch
    options = (
        {"log_prob_min_clamp": -6.0, "loss_max_clamp": 0.9}
        if loss_mode == "forward_kl_topk"
        else {}
    )
    settings = {
        "loss_mode": loss_mode,
        "use_policy_gradient": loss_mode == "k1",
        "loss_coef": 0.3,
        **options,
    }
    distillation = DistillationConfig(enable=True, **settings)
    model, mask = make_model("eager"), columns["response_mask"]
    logits = model(
        **{name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    ).logits
    logp = (logits[:, -mask.shape[1] - 1 : -1] / 0.7).log_softmax(-1)
    own, q = logp.gather(-1, columns["responses"][..., None])[..., 0], columns["teacher_log_prob"]
    if loss_mode == "forward_kl_topk":
        p, told = (
            logp.gather(-1, columns["teacher_top_ids"].long()).clamp(min=-6.0),
            teacher.clamp(min=-6.0),
        )
        summed = (told.exp() * (told - p)).sum(-1)
        divergence = summed.clamp(0, 0.9)
        is_moved = ((summed > 0) & (summed < 0.9))[mask.bool()]
        assert 0 < is_moved.sum() < len(is_moved)
        assert (summed < 0)[mask.bool()].any() and (summed > 0.9)[mask.bool()].any()
    else:
        divergence = own - q if loss_mode == "k1" else kl_penalty(own, q, loss_mode)
    advantages = columns["advantages"] - (0.3 * (own - q).detach() if loss_mode == "k1" else 0.0)
    losses, _ = vanilla(
        columns["old_log_probs"],
        own,
        advantages,
        mask,
        clip_ratio_low=0.2,
        clip_ratio_high=0.2,
        clip_ratio_c=3.0,
    )
    if loss_mode != "k1":
        losses = losses + 0.3 * divergence
    agg_loss(losses, mask, mode).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    for micro in (WHOLE, CUTS["three"], CUTS["by tokens"]):
        found = gradients(make_model(), batch, config, micro, teacher=distillation)
        assert largest_difference(found, expected) < 1e-5


def make_teacher(batch: DataProto) -> Tensor:
    """Adds what a teacher says of the responses; returns its three likeliest log-probs [B, T, 3]."""
    generator, mask = torch.Generator().manual_seed(5), batch.batch["response_mask"]
    logits = torch.randn(*mask.shape, 97, generator=generator) * 2
    top = logits.log_softmax(-1).topk(3, -1)
    batch.batch["teacher_log_prob"] = -4.6 + torch.randn(mask.shape, generator=generator)
    # In some places it is sure of none of the three.
    told = top.values - 6.0 * (torch.rand(mask.shape, generator=generator) < 0.3)[..., None]
    batch.batch["teacher_top_log_probs"], batch.batch["teacher_top_ids"] = told, top.indices.int()
    return told


def test_likeliest_tokens(make_model: Callable, batch: DataProto) -> None:
    """What a teacher is asked for is what a padded pass gives, whatever the cut."""
    columns, mask = batch.batch, batch.batch["response_mask"].bool()
    inputs = {name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")}
    logits = make_model("eager")(**inputs).logits[:, -mask.shape[1] - 1 : -1]
    expected = (logits / 1.3).log_softmax(-1).topk(4, -1)
    engine = FSDPEngine(PolicyScorer(make_model()), dtype=torch.float32, device=torch.device("cpu"))
    for micro in (WHOLE, CUTS["three"]):
        scores = infer(engine, batch, micro, temperature=1.3, top_k=4)
        assert torch.equal(scores["top_ids"][mask], expected.indices[mask].int())
        torch.testing.assert_close(
            scores["top_log_probs"][mask], expected.values[mask].detach(), atol=1e-5, rtol=1e-5
        )


def test_gradient_checkpointing_changes_no_bit(make_model: Callable, batch: DataProto) -> None:
    """Layers are computed twice and give what they gave. Does not show how much memory that saves."""
    results, calls = [], []
    for use_gradient_checkpointing in (False, True):
        model, seen = make_model(), []
        model.model.layers[0].mlp.register_forward_pre_hook(lambda *_, seen=seen: seen.append(1))
        options = {"memory": Memory(gradient_checkpointing=use_gradient_checkpointing)}
        results.append(gradients(model, batch, ActorConfig(), WHOLE, **options))
        calls.append(len(seen))
    assert calls == [1, 2]
    for name, gradient in results[0].items():
        torch.testing.assert_close(results[1][name], gradient, rtol=0, atol=0)


def test_log_probs_and_entropies(make_model: Callable, batch: DataProto) -> None:
    """Asking gives what a padded pass gives, however it is cut. Does not show it in bfloat16."""
    log_probs, entropy = padded_scores(make_model("eager"), batch, 1.3)
    engine = FSDPEngine(PolicyScorer(make_model()), dtype=torch.float32, device=torch.device("cpu"))
    mask = batch.batch["response_mask"]
    for micro in (WHOLE, *CUTS.values()):
        scores = infer(engine, batch, micro, temperature=1.3, with_entropy=True)
        torch.testing.assert_close(
            scores["log_probs"], (log_probs * mask).detach(), atol=1e-5, rtol=1e-5
        )
        torch.testing.assert_close(
            scores["entropy"], (entropy * mask).detach(), atol=1e-5, rtol=1e-5
        )


def test_rows_without_advantage_are_counted_and_not_computed(
    make_model: Callable, batch: DataProto
) -> None:
    """Three of twelve rows have no advantage: they change no gradient, and are left out of the computation."""
    engine = Recording(
        PolicyScorer(make_model()),
        dtype=torch.float32,
        device=torch.device("cpu"),
        training=Training(OptimConfig(), 1.0, 3),
    )
    metrics = update(engine, batch, PolicyObjective(ActorConfig()), Passes(99, 1, WHOLE), lr=1e-3)
    assert metrics["actor/computed_sequences"].value == len(batch) - 3
    with_entropy = PolicyObjective(ActorConfig(entropy_coeff=0.1))
    assert (
        update(engine, batch, with_entropy, Passes(99, 1, WHOLE), lr=1e-3)[
            "actor/computed_sequences"
        ].value
        == 12
    )


def test_a_batch_without_any_advantage_is_still_looked_at(
    make_model: Callable, batch: DataProto
) -> None:
    """No row is computed for its gradient, which is zero; entropy and the distance from the rollout are told all the
    same. Does not show them for every row: one micro-batch stands for the batch."""
    batch.batch["advantages"] = torch.zeros_like(batch.batch["advantages"])
    batch.batch.pop("old_log_probs")
    training = Training(OptimConfig(), 1.0, 3)
    engine = FSDPEngine(
        PolicyScorer(make_model()),
        dtype=torch.float32,
        device=torch.device("cpu"),
        training=training,
    )
    known = infer(engine, batch, WHOLE, temperature=0.7, with_entropy=True)
    mask = batch.batch["response_mask"]
    batch.batch["rollout_log_probs"] = known["log_probs"] + 0.25 * mask
    before = {name: weight.clone() for name, weight in engine.weights()}
    metrics = update(
        engine, batch, PolicyObjective(ActorConfig()), Passes(99, 1, WHOLE), lr=0.0, temperature=0.7
    )
    assert metrics["actor/computed_sequences"].value == metrics["actor/pg_loss"].value == 0
    assert metrics["actor/grad_norm"].value == 0
    assert metrics["rollout/log_prob_diff_mean"].value == pytest.approx(0.25, abs=1e-5)
    assert metrics["actor/entropy"].value == pytest.approx(
        float(known["entropy"].sum() / mask.sum()), rel=1e-5
    )
    assert all(torch.equal(weight, before[name]) for name, weight in engine.weights())


def test_old_log_probs_by_construction(make_model: Callable, batch: DataProto) -> None:
    """One optimizer step from the sampling policy: leaving the old log-probs out gives the bits of passing them in."""
    policy = FSDPEngine(PolicyScorer(make_model()), dtype=torch.float32, device=torch.device("cpu"))
    same_rows = batch.select_idxs(batch.batch["advantages"].ne(0).any(-1))
    same_rows.batch["old_log_probs"] = infer(policy, same_rows, WHOLE, temperature=0.7)["log_probs"]
    passed = gradients(make_model(), same_rows, ActorConfig(), WHOLE)
    same_rows.batch.pop("old_log_probs")
    left_out = gradients(make_model(), same_rows, ActorConfig(), WHOLE)
    for name, gradient in left_out.items():
        torch.testing.assert_close(gradient, passed[name], rtol=0, atol=0)
