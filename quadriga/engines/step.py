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
from dataclasses import dataclass, field
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
from quadriga.models.attention import PackedBatch
from quadriga.models.scorers import Question
from quadriga.observe.metrics import Metric, merge_metrics
from quadriga.protocol import DataProto


def lr_at(step: int, config: OptimConfig, total_steps: int) -> float:
    """Learning rate of one training step: warm-up, then constant, linear or cosine.

    Args:
        step: counted from 1; the first step of a warm-up of w steps has 1/w of the rate, or with `zero_indexed_step`
            none of it. All optimizer steps of a training step have the same.
        total_steps: training steps of the run, where cosine and linear end.
    """
    warmup = config.lr_warmup_steps if config.lr_warmup_steps >= 0 else int(config.lr_warmup_steps_ratio * total_steps)
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
) -> dict[str, torch.Tensor]:
    """The model's outputs for every response token of a batch, without gradients.

    Args:
        data: input_ids, attention_mask, position_ids [B, P + T] and response_mask [B, T]; for a vision-language model
            position_ids [B, 3, P + T] and the non-tensor multi_modal_inputs.

    Returns:
        Float32 [B, T] by name, on the CPU, zero where the response mask is.
    """
    question = Question(temperature, with_entropy, with_sum_pi_squared)
    shape = data.batch["response_mask"].shape
    results = {name: torch.zeros(shape, dtype=torch.float32) for name in engine.output_names(question)}
    pieces = list(_packed(engine, data, micro))
    with engine.awake("weights"):
        outputs = engine.forward([packed for _, packed in pieces], question)
    # A pipeline stage without the head has no outputs: its results are not collected.
    for (indices, packed), scores in zip(pieces, outputs, strict=False):
        for name, values in scores.items():
            results[name][indices] = packed.unpack(values).cpu()
    return results


def update(
    engine: FSDPEngine, data: DataProto, objective: Objective, passes: Passes, *, lr: float, temperature: float = 1.0
) -> dict[str, Metric]:
    """Train the model on one batch: `num_epochs` passes of one optimizer step per mini-batch.

    Every rank of the engine calls it with its own rows, which may be none.

    Args:
        data: the columns that `infer` reads, those that the objective reads, and `row_index` [B] where the rows of the
            ranks, one below the other, are not in the order of the whole batch.

    Returns:
        Metrics, averaged over optimizer steps; those of all ranks are yet to be combined.
    """
    steps = []
    with engine.awake(*ALL_KINDS):
        for rows, places in mini_batches(data, engine.replicas, passes):
            is_all = torch.equal(rows, torch.arange(len(data)))
            mini = data if is_all else data.select_idxs(rows)
            steps.append(_optimizer_step(engine, mini, places, objective, passes.micro, lr, temperature))
    # Shares are averaged over steps and stay sums for the ranks to add up; a rank that computed nothing in some step
    # has a share of nothing there.
    names = dict.fromkeys(name for shares, _ in steps for name in shares)
    complete = [{name: shares.get(name, Metric(0.0)) for name in names} for shares, _ in steps]
    averages = {name: Metric(metric.value, "sum") for name, metric in merge_metrics(complete).items()}
    metrics = averages | merge_metrics(others for _, others in steps)
    if engine.replicas.size > 1:
        # How much longer the steps take than if all ranks had the same work: the largest share over the mean one.
        of_ranks = engine.replicas.gather([others[f"perf/flops/{objective.name}"].value for _, others in steps])
        total, longest = math.fsum(map(math.fsum, of_ranks)), math.fsum(map(max, zip(*of_ranks, strict=True)))
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


def _optimizer_step(
    engine: FSDPEngine,
    mini: DataProto,
    places: torch.Tensor,
    objective: Objective,
    micro: MicroBatching,
    lr: float,
    temperature: float,
) -> tuple[dict[str, Metric], dict[str, Metric]]:
    """One optimizer step on the rows [b] of a mini-batch that this rank has, at `places` of the whole batch's order.
    Returns metrics that are shares of sums over the mini-batch, and the others."""
    here = LossCounts.of(mini.batch["response_mask"])
    computed = objective.rows_with_gradient(mini)
    num_tokens, num_sequences, num_computed = engine.replicas.totals(
        here.batch_num_tokens, here.global_batch_size, int(computed.sum())
    )
    counts = LossCounts(num_tokens, num_sequences)
    rows = mini if bool(computed.all()) else mini.select_idxs(computed)
    losses = list(_losses(engine, rows, objective, micro, counts))
    engine.backward([loss.packed for loss in losses], losses, temperature=temperature)
    parts = _read([loss.metrics for loss in losses])
    # Ranks with the same rows share their cost.
    sharers = engine.world.size / engine.replicas.size
    flops = math.fsum(engine.cost.update_flops_of(loss.packed) for loss in losses) / sharers
    if num_computed == 0:
        parts = _read(_look_at_some(engine, mini, places, objective, micro, counts, temperature))
    # After the look: momentum moves the weights even where no row does.
    result = engine.optimizer_step(lr)
    prefix, merged = objective.name, merge_metrics(parts)
    of_first_rank = {
        f"{prefix}/grad_norm": Metric(result.grad_norm),
        f"{prefix}/lr": Metric(lr, "last"),
        f"{prefix}/nonfinite_steps": Metric(float(not result.is_applied), "sum"),
    }
    of_this_rank = {
        f"{prefix}/packed_tokens": Metric(sum(loss.packed.num_tokens for loss in losses), "sum"),
        f"{prefix}/computed_sequences": Metric(len(rows), "sum"),
        f"perf/flops/{prefix}": Metric(flops, "sum"),
    }
    shares = {name: Metric(metric.value) for name, metric in merged.items() if metric.reduction == "sum"}
    others = {name: metric for name, metric in merged.items() if metric.reduction != "sum"}
    return shares, others | (of_first_rank if engine.replicas.is_first else {}) | of_this_rank


def _read(parts: list[dict[str, Metric]]) -> list[dict[str, Metric]]:
    """The metrics of micro-batches in plain numbers; those that an accelerator has are read at once."""
    metrics = [metric for part in parts for metric in part.values()]
    numbers: list[Any] = [number for metric in metrics for number in (metric.value, metric.weight)]
    waiting = [number.double() for number in numbers if isinstance(number, torch.Tensor)]
    if not waiting:
        return parts
    read = iter(torch.stack(waiting).tolist())
    plain = iter([next(read) if isinstance(number, torch.Tensor) else number for number in numbers])
    return [{name: Metric(next(plain), one.reduction, next(plain)) for name, one in part.items()} for part in parts]


def _look_at_some(
    engine: FSDPEngine,
    mini: DataProto,
    places: torch.Tensor,
    objective: Objective,
    micro: MicroBatching,
    counts: LossCounts,
    temperature: float,
) -> list[dict[str, Metric]]:
    """The metrics of the rows that would be the first micro-batch of one rank alone, without gradients: where no
    row has one, entropy and mismatch are still reported, and are the same however the rows are spread."""
    rows = [
        (place, RowLength(row.prompt_key, row.num_prompt_tokens, row.num_response_tokens))
        for place, row in zip(places.tolist(), row_tokens(mini, engine.image_tokens), strict=True)
        if len(row.trained)
    ]
    everywhere = sorted(chain.from_iterable(engine.replicas.gather(rows)), key=itemgetter(0))
    first, *_ = micro_batches([length for _, length in everywhere], micro) or [[]]
    row_at = {place: row for row, place in enumerate(places.tolist())}
    looked_at = [row_at[everywhere[index][0]] for index in first if everywhere[index][0] in row_at]
    losses = list(_losses(engine, mini.select_idxs(looked_at), objective, micro, counts))
    outputs = engine.forward([loss.packed for loss in losses], Question(temperature, with_entropy=True))
    for loss, scores in zip(losses, outputs, strict=False):
        loss(scores)
    return [loss.metrics for loss in losses]


def _losses(
    engine: FSDPEngine, rows: DataProto, objective: Objective, micro: MicroBatching, counts: LossCounts
) -> Iterator[MicroBatchLoss]:
    """The objective on each micro-batch of some rows."""
    fields = objective.fields(rows)
    for indices, packed in _packed(engine, rows, micro):
        yield MicroBatchLoss(objective, rows.select_idxs(indices).select(fields).to(engine.device), packed, counts)


def _packed(engine: FSDPEngine, data: DataProto, micro: MicroBatching) -> Iterator[tuple[list[int], PackedBatch]]:
    """The micro-batches of some rows, packed; rows with nothing to predict are in none."""
    tokens = row_tokens(data, engine.image_tokens)
    wanted = [number for number, row in enumerate(tokens) if len(row.trained)]
    num_columns = data.batch["response_mask"].shape[1]
    lengths = [tokens[number] for number in wanted]
    cost = engine.cost.attention_tokens
    batches = micro_batches(lengths, micro, attention_tokens=cost)
    if not engine.has_replicated_weights:
        # Ranks that share weights wait for each other at each micro-batch: all make as many, if there are the rows.
        most = max(engine.replicas.gather(len(batches)))
        if most > len(batches):
            batches = micro_batches(lengths, micro, num_at_least=most, attention_tokens=cost)
    for batch in batches:
        indices = [wanted[position] for position in batch]
        rows = [tokens[index] for index in indices]
        yield indices, pack(rows, num_columns, share_prompts=micro.share_prompts, device=engine.device)
