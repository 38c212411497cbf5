# SPDX-License-Identifier: Apache-2.0
"""Routers of mixtures of experts: what they are told is done, what they choose is counted, and a loss balances them.

What none of this proves: the same in bfloat16, where choices differ; on several ranks it is in test_expert_layouts.py.
"""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from transformers import PreTrainedModel

from quadriga.config import ActorConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Memory, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import infer, update
from quadriga.errors import EngineError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.experts import ROUTES, mixtures, router_of
from quadriga.models.scorers import PolicyScorer
from quadriga.protocol import DataProto
from quadriga.rollout import NativeEngine, SamplingParams
from tests.moe import CONFIGS, moe_model
from tests.numerics.conftest import ragged_batch

WIDE, NARROW = MicroBatching(None, 999), MicroBatching(None, 24)
FAMILIES = tuple(CONFIGS)


def _engine(family: str, *, is_checkpointed: bool = False) -> FSDPEngine:
    model = moe_model(family)
    model.set_attn_implementation(ATTENTION_NAME)
    training = Training(ActorConfig(optim={"eps": 1.0, "weight_decay": 0.0}).optim, 1e9, 3)
    memory = Memory(gradient_checkpointing=is_checkpointed)
    return FSDPEngine(
        PolicyScorer(model),
        dtype=torch.float32,
        device=torch.device("cpu"),
        training=training,
        memory=memory,
    )


def _with_routes(batch: DataProto, routes: torch.Tensor) -> DataProto:
    told = batch.select(deepcopy=True)
    told.batch[ROUTES] = routes
    return told


def _random_routes(engine: FSDPEngine, batch: DataProto) -> torch.Tensor:
    """Other experts for the tokens of each row, and for some of the tokens none."""
    generator, routers = torch.Generator().manual_seed(5), engine.scorer.routers
    shape = (*batch.batch["input_ids"].shape, routers.count, routers.num_experts)
    routes = torch.rand(shape, generator=generator).argsort(-1)[..., : routers.top_k].to(torch.int8)
    routes[:, ::5] = -1
    return routes


def _by_transformers(
    model: PreTrainedModel,
    batch: DataProto,
    row: int,
    choose: Callable[[int, torch.Tensor], torch.Tensor],
) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
    """Log-probs of a response alone through transformers' own forward, the routers of softmax families written out;
    of each mixture the probabilities [tokens, E], and the chosen experts [tokens, k]."""
    probs, chosen, handles = [], [], []

    def hook(number: int) -> Callable[..., tuple[torch.Tensor, ...]]:
        def route(router, inputs, output):
            weights = output[0].float().softmax(-1)
            experts = choose(number, output[2])
            scores = weights.gather(-1, experts)
            if getattr(router, "norm_topk_prob", True):
                scores = scores / scores.sum(-1, keepdim=True)
            probs.append(weights)
            chosen.append(experts)
            return output[0], scores, experts

        return route

    for number, mixture in enumerate(mixtures(model)):
        handles.append(router_of(mixture).register_forward_hook(hook(number)))
    valid = batch.batch["attention_mask"][row].bool()
    ids, size = batch.batch["input_ids"][row][valid], int(batch.batch["response_mask"][row].sum())
    logits = model(input_ids=ids[None]).logits[0].float()
    for handle in handles:
        handle.remove()
    log_probs = logits.log_softmax(-1)[:-1].gather(-1, ids[1:, None])[:, 0]
    return log_probs[len(ids) - 1 - size :], probs, chosen


def _told(told: torch.Tensor, number: int, own: torch.Tensor) -> torch.Tensor:
    return torch.where(told[:, number] >= 0, told[:, number], own)


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("micro", [WIDE, NARROW])
def test_routers_go_where_they_are_told(family: str, micro: MicroBatching) -> None:
    """Packed, prompts shared, = each row alone by transformers with its router written out; also what is recorded."""
    engine, model, batch = _engine(family), moe_model(family), ragged_batch()
    routes = _random_routes(engine, batch)
    # Rows of a prompt that are told alike share it, the others do not.
    routes[1, :9] = routes[0, :9]
    model.set_attn_implementation("eager")
    found = infer(engine, _with_routes(batch, routes), micro, with_routes=True)
    for row in range(len(batch)):
        valid = batch.batch["attention_mask"][row].bool()

        log_probs, _, chosen = _by_transformers(
            model, batch, row, partial(_told, routes[row, valid].long())
        )
        size = int(batch.batch["response_mask"][row].sum())
        torch.testing.assert_close(found["log_probs"][row, :size], log_probs, atol=1e-5, rtol=0)
        kept = found[ROUTES][row, valid]
        torch.testing.assert_close(kept[:-1].long(), torch.stack(chosen, 1)[:-1])
        assert (kept[-1] == -1).all()  # nothing is predicted from the last token
        assert (found[ROUTES][row, ~valid] == -1).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_recorded_is_replayed(family: str) -> None:
    """Log-probs are those without replay, whatever the family's router; no choice differs."""
    engine, batch = _engine(family), ragged_batch()
    first = infer(engine, batch, WIDE, with_routes=True)
    again = infer(engine, _with_routes(batch, first[ROUTES]), NARROW)
    torch.testing.assert_close(again["log_probs"], first["log_probs"], atol=1e-5, rtol=0)
    metrics = update(
        engine,
        _with_routes(batch, first[ROUTES]),
        PolicyObjective(ActorConfig()),
        Passes(99, 1, WIDE),
        lr=0.0,
    )
    assert metrics["actor/router_replay_differs"].value == 0.0


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "gpt_oss"])
def test_native_reports_its_routes(family: str) -> None:
    """Of prompts and responses, those that training chooses in float32; also where requests are preempted."""
    engine, prompts = _engine(family), [[5, 6, 7], [8], [9, 10, 11, 12, 13], [5, 6, 7]]
    sampling = [
        SamplingParams(max_tokens=length, seed=row) for row, length in enumerate((20, 9, 14, 17))
    ]
    rollout = NativeEngine(engine.model, records_routes=True, eos_token_ids=(), max_num_seqs=3)
    cramped = NativeEngine(engine.model, records_routes=True, eos_token_ids=(), max_num_seqs=4)
    cramped.cache_memory.limit = 60
    all_found = rollout.generate_batch(prompts, sampling)
    for prompt, one, other in zip(
        prompts, all_found, cramped.generate_batch(prompts, sampling), strict=True
    ):
        assert (
            one.token_ids == other.token_ids and one.routes is not None and other.routes is not None
        )
        ids = torch.tensor([[*prompt, *one.token_ids]])
        tensors = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        tensors["position_ids"] = torch.arange(ids.shape[1])[None]
        tensors["response_mask"] = torch.ones(1, len(one.token_ids), dtype=torch.int64)
        expected = infer(engine, DataProto.from_dict(tensors=tensors), WIDE, with_routes=True)[
            ROUTES
        ][0, :-1]
        for routes in (one.routes, other.routes):
            assert torch.equal(torch.from_numpy(routes).sort(-1).values, expected.sort(-1).values)
    assert (
        NativeEngine(engine.model, eos_token_ids=())
        .generate_batch(prompts[:1], sampling[:1])[0]
        .routes
        is None
    )


def test_a_loss_scale_changes_no_bit_in_float32() -> None:
    """It is a power of two, which comes out of every product and sum; the losses of routers have it too."""
    objective = PolicyObjective(ActorConfig(router_aux_loss_coef=0.3, router_z_loss_coef=0.05))
    engines, found = [_engine("qwen3_moe", is_checkpointed=False) for _ in range(2)], []
    for engine, scale in zip(engines, (1.0, 4096.0), strict=True):
        engine.loss_scale[0] = scale
        metrics = update(engine, ragged_batch(), objective, Passes(99, 1, NARROW), lr=1e-3)
        found.append((metrics["actor/grad_norm"].value, metrics["actor/pg_loss"].value))
    assert found[0] == found[1]
    (_, one), (_, other) = (zip(*engine.weights(), strict=True) for engine in engines)
    assert all(map(torch.equal, one, other))


@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_the_losses_of_routers(is_checkpointed: bool) -> None:
    """Their gradients are those of the formulas, row by row through transformers; so are their values and the loads."""
    coefficient, z_coefficient, model, batch = 0.3, 0.05, moe_model("qwen3_moe"), ragged_batch()
    batch.batch["advantages"].zero_()
    engine = _engine("qwen3_moe", is_checkpointed=is_checkpointed)
    objective = PolicyObjective(
        ActorConfig(router_aux_loss_coef=coefficient, router_z_loss_coef=z_coefficient)
    )
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    metrics = update(engine, batch, objective, Passes(99, 1, NARROW), lr=1e-3)
    num_tokens, total = int(batch.batch["response_mask"].sum()), torch.zeros(())
    loads, logits = torch.zeros(3, 4), list[torch.Tensor]()
    for mixture in mixtures(model):
        router_of(mixture).register_forward_hook(
            lambda router, inputs, output: logits.append(output[0].float())
        )
    z_total = torch.zeros(())
    for row in range(len(batch)):
        size = int(batch.batch["response_mask"][row].sum())
        logits.clear()
        _, probs, chosen = _by_transformers(model, batch, row, lambda number, own: own)
        z_total = z_total + sum(one[-1 - size : -1].logsumexp(-1).square().sum() for one in logits)
        for number, (of_all, experts) in enumerate(zip(probs, chosen, strict=True)):
            own, picked = of_all[-1 - size : -1], experts[-1 - size : -1]
            counts = picked.flatten().bincount(minlength=4)
            loads[number] += counts
            total = total + 4 * (counts / (2 * size) * own).sum() / 3
    ((coefficient * total + z_coefficient * z_total) / num_tokens).backward()
    total = total.detach()
    assert metrics["actor/router_z_loss"].value == pytest.approx(
        float(z_total.detach()) / num_tokens / 3, abs=1e-5
    )
    assert metrics["actor/router_aux_loss"].value == pytest.approx(
        float(total) / num_tokens, abs=1e-5
    )
    loads = loads / (num_tokens * 2 / 4)
    assert metrics["actor/router_load_max"].value == pytest.approx(float(loads.max()), abs=1e-5)
    assert metrics["actor/router_load_min"].value == pytest.approx(float(loads.min()), abs=1e-5)
    # One step of AdamW with eps 1 moves a weight by nearly its gradient.
    after = dict(engine.weights())
    for name, parameter in model.named_parameters():
        moved = (before[name] - after[name]) / 1e-3
        gradient = torch.zeros_like(moved) if parameter.grad is None else parameter.grad
        torch.testing.assert_close(
            moved, gradient / (gradient.abs() + 1), atol=2e-4, rtol=0, msg=name
        )
    assert model.model.layers[0].mlp.gate.weight.grad.abs().max() > 1e-3


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda routes: torch.zeros_like(routes), "of which 100% differ"),
        (
            lambda routes: routes[:, :, :2],
            "got routes of 2 x 2 for each token, expected 3 layers with 2 experts each",
        ),
        (lambda routes: routes + 3, "got expert 6 in a route, expected one of 4"),
    ],
)
def test_routes_of_something_else_are_refused(
    change: Callable[[torch.Tensor], torch.Tensor], told: str
) -> None:
    """Before a weight moves."""
    engine, batch = _engine("qwen3_moe"), ragged_batch()
    routes = change(infer(engine, batch, WIDE, with_routes=True)[ROUTES])
    before = {name: tensor.clone() for name, tensor in engine.weights()}
    with pytest.raises(EngineError, match=told):
        update(
            engine,
            _with_routes(batch, routes),
            PolicyObjective(ActorConfig()),
            Passes(99, 1, WIDE),
            lr=1.0,
        )
    assert all(torch.equal(tensor, before[name]) for name, tensor in engine.weights())
