# SPDX-License-Identifier: Apache-2.0
"""Inference and the optimizer update, shared by all training engines.

    update          epochs x mini-batches
      optimizer step    counts of the whole mini-batch, micro-batches packed
        engine.backward     each micro-batch: packed outputs -> MicroBatchLoss -> gradients
        engine.optimizer_step

Legend: B rows, b of them in a micro-batch, T response positions, M predicted tokens.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain
from operator import itemgetter
from typing import Any

import torch

from quadriga.algorithms.aggregate import LossCounts
from quadriga.config import OptimConfig
from quadriga.engines.batches import MicroBatching, Passes, RowLength, micro_batches, mini_batches
from quadriga.engines.fsdp.engine import ALL_KINDS, FSDPEngine
from quadriga.engines.objectives import Objective
from quadriga.engines.packing import Outputs, pack, row_tokens
from quadriga.errors import EngineError
from quadriga.models.attention import PackedBatch
from quadriga.models.experts import ROUTES, Routing, dtype_of_routes
from quadriga.models.scorers import Question
from quadriga.observe.metrics import Metric, merge_metrics
from quadriga.protocol import DataProto

_MOST_DIFFERING = (
    0.5  # of the routes of the first mini-batch that is replayed; in bfloat16 some per cent differ
)


def lr_at(step: int, config: OptimConfig, total_steps: float) -> float:
    """Learning rate of one training step: warm-up, then constant, linear or cosine; all its optimizer steps have it.

    Args:
        step: counted from 1; the first step of a warm-up of w steps has 1/w of the rate, or with `zero_indexed_step`
            none of it.
        total_steps: training steps of the run, where cosine and linear end without `optim.total_training_steps`.
    """
    total_steps = config.total_training_steps or total_steps
    warmup = (
        config.lr_warmup_steps
        if config.lr_warmup_steps >= 0
        else int(config.lr_warmup_steps_ratio * total_steps)
    )
    step -= config.zero_indexed_step
    if 0 < warmup >= step:
        return config.lr * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler_type == "linear":
        factor = 1.0 - progress
    else:
        factor = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)


def infer(
    engine: FSDPEngine,
    data: DataProto,
    micro: MicroBatching,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    with_routes: bool = False,
    top_k: int | None = None,
) -> dict[str, torch.Tensor]:
    """The model's outputs for every response token of a batch, without gradients.

    Args:
        data: input_ids, attention_mask, position_ids [B, P + T] and response_mask [B, T]; for a vision-language model
            position_ids [B, 3, P + T] and the non-tensor multi_modal_inputs. Routers go where routed_experts
            [B, P + T, L, k] tells, if it is there.
        with_routes: return the experts that each token went through, as routed_experts.
        top_k: return the likeliest tokens of each place, top_ids int32 [B, T, k], and their top_log_probs [B, T, k].

    Returns float32 [B, T] by name, on the CPU, zero where the response mask is."""
    question = Question(temperature, with_entropy, with_sum_pi_squared, top_k)
    shape, results = data.batch["response_mask"].shape, {}
    for name in engine.output_names(question):
        size = (*shape, top_k or 0) if name.startswith("top_") else shape
        results[name] = torch.zeros(size, dtype=torch.int32 if name == "top_ids" else torch.float32)
    routers, has_routes = engine.scorer.routers, with_routes or ROUTES in data.batch.keys()
    if with_routes:
        shape = (*data.batch["input_ids"].shape, routers.count, routers.top_k)
        results[ROUTES] = torch.full(shape, -1, dtype=dtype_of_routes(routers.num_experts))
    pieces = list(_packed(engine, data, micro, Routing(keeps=with_routes) if has_routes else None))
    with engine.awake("weights"):
        outputs = engine.forward([packed for _, packed in pieces], question)
    # A pipeline stage without the head has no outputs: its results are not collected.
    for (indices, packed), scores in zip(pieces, outputs, strict=False):
        for name, values in scores.items():
            results[name][indices] = packed.unpack(values).cpu().to(results[name].dtype)
    for indices, packed in pieces if with_routes else ():
        chosen, valid = packed.routing.chosen.cpu(), data.batch["attention_mask"].bool().cpu()
        for number, places in packed.places.items():
            row = indices[number]
            here = valid[row].nonzero()[: len(places), 0]
            results[ROUTES][row, here] = chosen[places].to(results[ROUTES].dtype)
    return results


def update(
    engine: FSDPEngine,
    data: DataProto,
    objective: Objective,
    passes: Passes,
    *,
    lr: float,
    temperature: float = 1.0,
) -> dict[str, Metric]:
    """Train the model on one batch: `num_epochs` passes of one optimizer step per mini-batch. Every rank of the engine
    calls it with its own rows, which may be none.
    `data`: the columns that `infer` reads, those that the objective reads, and `row_index` [B] where the rows of the
    ranks, one below the other, are not in the order of the whole batch.
    Returns metrics, averaged over optimizer steps; those of all ranks are yet to be combined."""
    steps, updater = [], _Updater(engine, objective, passes.micro, temperature)
    with engine.awake(*ALL_KINDS):
        for rows, places in mini_batches(data, engine.replicas, passes):
            is_all = torch.equal(rows, torch.arange(len(data)))
            mini = data if is_all else data.select_idxs(rows)
            steps.append(updater.step(mini, places, lr))
    # Shares are averaged over steps and stay sums for the ranks to add up; a rank that computed nothing in some step
    # has a share of nothing there.
    names = dict.fromkeys(name for shares, _ in steps for name in shares)
    complete = [{name: shares.get(name, Metric(0.0)) for name in names} for shares, _ in steps]
    averages = {
        name: Metric(metric.value, "sum") for name, metric in merge_metrics(complete).items()
    }
    metrics = averages | merge_metrics(others for _, others in steps)
    if engine.replicas.size > 1:
        # How much longer the steps take than if all ranks had the same work: the largest share over the mean one.
        of_ranks = engine.replicas.gather(
            [others[f"perf/flops/{objective.name}"].value for _, others in steps]
        )
        total, longest = (
            math.fsum(map(math.fsum, of_ranks)),
            math.fsum(map(max, zip(*of_ranks, strict=True))),
        )
        if total and engine.replicas.is_first:
            metrics[f"perf/imbalance/{objective.name}"] = Metric(longest * len(of_ranks) / total)
    return metrics


@dataclass
class MicroBatchLoss:
    """An objective on a micro-batch, as an engine calls it: packed outputs [M] in, a scalar out; keeps the metrics."""

    objective: Objective
    rows: DataProto  # b of them, on the engine's device
    packed: PackedBatch
    counts: LossCounts  # of the whole mini-batch, by which the loss is normalised
    metrics: dict[str, Metric] = field(default_factory=dict)  # of the last call

    def __call__(self, outputs: Outputs) -> torch.Tensor:
        padded = {name: self.packed.unpack(values) for name, values in outputs.items()}
        loss, self.metrics = self.objective(self.rows, padded, self.counts)
        return loss


@dataclass(frozen=True)
class _Updater:
    engine: FSDPEngine
    objective: Objective
    micro: MicroBatching
    temperature: float

    def step(
        self, mini: DataProto, places: torch.Tensor, lr: float
    ) -> tuple[dict[str, Metric], dict[str, Metric]]:
        """One optimizer step on the rows [b] of a mini-batch that this rank has, at `places` of the order of the whole
        batch. Returns metrics that are shares of sums over the mini-batch, and the others."""
        engine, objective = self.engine, self.objective
        here = LossCounts.of(mini.batch["response_mask"])
        computed = objective.rows_with_gradient(mini)
        num_tokens, num_sequences, num_computed = engine.replicas.totals(
            here.batch_num_tokens, here.global_batch_size, int(computed.sum())
        )
        counts, routers = LossCounts(num_tokens, num_sequences), engine.scorer.routers
        rows = mini if bool(computed.all()) else mini.select_idxs(computed)
        routing = None
        if routers.count:
            weight, z_weight = (
                objective.router_aux_loss_coef / routers.count,
                objective.router_z_loss_coef,
            )
            share = float(engine.loss_scale[0]) / max(num_tokens, 1)
            weights = {"loss_weight": weight * share, "z_weight": z_weight * share}
            routing = Routing(**weights, sums=routers.new_sums(engine.device))
        losses = list(self._losses(rows, counts, routing))
        engine.backward([loss.packed for loss in losses], losses, temperature=self.temperature)
        parts = _read([loss.metrics for loss in losses])
        # Ranks with the same rows share their cost.
        sharers = engine.world.size / engine.replicas.size
        flops = math.fsum(engine.cost.update_flops_of(loss.packed) for loss in losses) / sharers
        if num_computed == 0:
            parts = _read(self._look_at_some(mini, places, counts, routing))
        of_routers = {} if routing is None else _router_metrics(engine, routing)
        # After the look: momentum moves the weights even where no row does.
        result = engine.optimizer_step(lr)
        prefix, merged, is_scaled = (
            objective.name,
            merge_metrics(parts),
            engine.dtype == torch.float16,
        )
        of_first_rank = {
            f"{prefix}/grad_norm": Metric(result.grad_norm),
            f"{prefix}/lr": Metric(lr, "last"),
            f"{prefix}/nonfinite_steps": Metric(float(not result.is_applied), "sum"),
            **(
                {f"{prefix}/loss_scale": Metric(float(engine.loss_scale[0]), "last")}
                if is_scaled
                else {}
            ),
            **{f"{prefix}/router_{name}": Metric(value) for name, value in of_routers.items()},
        }
        of_this_rank = {
            f"{prefix}/packed_tokens": Metric(
                sum(loss.packed.num_tokens for loss in losses), "sum"
            ),
            f"{prefix}/computed_sequences": Metric(len(rows), "sum"),
            f"perf/flops/{prefix}": Metric(flops, "sum"),
        }
        shares = {
            name: Metric(metric.value)
            for name, metric in merged.items()
            if metric.reduction == "sum"
        }
        others = {name: metric for name, metric in merged.items() if metric.reduction != "sum"}
        return shares, others | (of_first_rank if engine.replicas.is_first else {}) | of_this_rank

    def _look_at_some(
        self, mini: DataProto, places: torch.Tensor, counts: LossCounts, routing: Routing | None
    ) -> list[dict[str, Metric]]:
        """The metrics of the rows that would be the first micro-batch of one rank alone, without gradients: where no
        row has one, entropy and mismatch are still reported, and are the same however the rows are spread."""
        rows = [
            (place, RowLength(row.prompt_key, row.num_prompt_tokens, row.num_response_tokens))
            for place, row in zip(
                places.tolist(), row_tokens(mini, self.engine.image_tokens), strict=True
            )
            if len(row.trained)
        ]
        everywhere = sorted(
            chain.from_iterable(self.engine.replicas.gather(rows)), key=itemgetter(0)
        )
        first, *_ = micro_batches([length for _, length in everywhere], self.micro) or [[]]
        row_at = {place: row for row, place in enumerate(places.tolist())}
        looked_at = [
            row_at[everywhere[index][0]] for index in first if everywhere[index][0] in row_at
        ]
        losses = list(self._losses(mini.select_idxs(looked_at), counts, routing))
        outputs = self.engine.forward(
            [loss.packed for loss in losses], Question(self.temperature, with_entropy=True)
        )
        for loss, scores in zip(losses, outputs, strict=False):
            loss(scores)
        return [loss.metrics for loss in losses]

    def _losses(
        self, rows: DataProto, counts: LossCounts, routing: Routing | None
    ) -> Iterator[MicroBatchLoss]:
        objective = self.objective
        fields = objective.fields(rows)
        for indices, packed in _packed(self.engine, rows, self.micro, routing):
            own = rows.select_idxs(indices).select(fields).to(self.engine.device)
            if objective.other_targets:
                others = own.batch[objective.other_targets][packed.rows, packed.columns].long()
                packed = replace(packed, targets=torch.cat([packed.targets[:, None], others], 1))
            yield MicroBatchLoss(objective, own, packed, counts)


def _router_metrics(engine: FSDPEngine, routing: Routing) -> dict[str, float]:
    """What the routers chose for the predicted tokens of a mini-batch, by all ranks: the largest and the smallest load
    of an expert in any layer, as a multiple of the mean one; the entropy of a router in nats. Experts have no capacity
    that a token could exceed: none is dropped.
    Raises EngineError: in the first mini-batch that is replayed, routes that have little to do with this model."""
    engine.world.add_up([routing.sums])
    sums, routers = routing.sums.cpu(), engine.scorer.routers
    loads, facts = sums.split((routers.num_experts, sums.shape[1] - routers.num_experts), 1)
    tokens, entropy, loss, z_loss, told, differing = facts.sum(0).tolist()
    if not tokens:
        return {}
    loads = loads / (facts[:, :1] * routers.top_k / routers.num_experts)
    metrics = {"load_max": float(loads.max()), "load_min": float(loads.min())}
    metrics |= {"entropy": entropy / tokens, "dropped": 0.0}
    if routing.loss_weight:
        metrics["aux_loss"] = loss / tokens
    if routing.z_weight:
        metrics["z_loss"] = z_loss / tokens
    if told:
        share = metrics["replay_differs"] = differing / told
        if not routers.is_checked and share > _MOST_DIFFERING:
            got = f"routes of which {share:.0%} differ from what training's own routers choose"
            expected = f"at most {_MOST_DIFFERING:.0%} in the first mini-batch"
            fix = "The engine does not report what it chooses, or generates with other weights: set router_replay=off."
            raise EngineError(
                "actor_rollout_ref.actor.router_replay", got=got, expected=expected, fix=fix
            )
        routers.is_checked = True
    return metrics


def _read(parts: list[dict[str, Metric]]) -> list[dict[str, Metric]]:
    """The metrics of micro-batches in plain numbers; those that an accelerator has are read at once."""
    metrics = [metric for part in parts for metric in part.values()]
    numbers: list[Any] = [number for metric in metrics for number in (metric.value, metric.weight)]
    waiting = [number.double() for number in numbers if isinstance(number, torch.Tensor)]
    if not waiting:
        return parts
    read = iter(torch.stack(waiting).tolist())
    plain = iter([next(read) if isinstance(number, torch.Tensor) else number for number in numbers])
    return [
        {name: Metric(next(plain), one.reduction, next(plain)) for name, one in part.items()}
        for part in parts
    ]


def _packed(
    engine: FSDPEngine, data: DataProto, micro: MicroBatching, routing: Routing | None
) -> Iterator[tuple[list[int], PackedBatch]]:
    """The micro-batches of some rows, packed; rows with nothing to predict are in none. `routing`: of each of them, but
    for what its routers are told."""
    routes = data.batch[ROUTES] if routing is not None and ROUTES in data.batch.keys() else None
    if routes is not None:
        engine.scorer.routers.require(routes)
    tokens = row_tokens(data, engine.image_tokens)
    wanted = [number for number, row in enumerate(tokens) if len(row.trained)]
    num_columns = data.batch["response_mask"].shape[1]
    lengths = [tokens[number] for number in wanted]
    cost = engine.cost.attention_tokens
    if any(one.num_prompt_tokens + one.num_response_tokens > engine.packs_up_to for one in lengths):
        micro = replace(micro, num_sequences=1, share_prompts=False)
    batches = micro_batches(lengths, micro, attention_tokens=cost)
    if not engine.has_replicated_weights:
        # Ranks that share weights wait for each other at each micro-batch: all make as many, if there are the rows.
        most = max(engine.replicas.gather(len(batches)))
        if most > len(batches):
            batches = micro_batches(lengths, micro, num_at_least=most, attention_tokens=cost)
    for batch in batches:
        indices = [wanted[position] for position in batch]
        rows = [tokens[index] for index in indices]
        packed = pack(rows, num_columns, share_prompts=micro.share_prompts, device=engine.device)
        if routing is not None:
            told = None
            if routes is not None:
                told = routes.new_full((packed.num_tokens, *routes.shape[2:]), -1)
                for number, places in packed.places.items():
                    own = routes[indices[number]][
                        data.batch["attention_mask"][indices[number]] != 0
                    ]
                    told[torch.from_numpy(places)] = own[: len(places)]
                told = told.to(engine.device)
            packed = replace(packed, routing=replace(routing, replayed=told))
        yield indices, packed
