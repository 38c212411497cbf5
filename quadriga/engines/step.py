# SPDX-License-Identifier: Apache-2.0
"""The two things that are done with every model, whatever engine holds it: ask it, and teach it.

Legend: B rows, T response positions.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import itemgetter

import torch

from quadriga.algorithms.aggregate import LossCounts
from quadriga.config import BatchingConfig
from quadriga.engines.base import Outputs, TrainEngine
from quadriga.engines.micro_batches import MicroBatching, RowLength, micro_batches
from quadriga.engines.mini_batches import HeldRows, mini_batches
from quadriga.engines.objectives import Objective
from quadriga.engines.packing import PackedBatch, RowTokens, pack, row_tokens
from quadriga.models.scorers import Question
from quadriga.models.vision import ImageTokens
from quadriga.observe.metrics import Metric, merge_metrics
from quadriga.protocol import DataProto


@dataclass(frozen=True)
class Passes:
    """How often and in what pieces a batch is learned from.

    Attributes:
        mini_batch_size: rows that one optimizer step takes, of all processes together; the last may be smaller.
        num_epochs: passes over the batch.
        micro: how a mini-batch is cut to fit in memory.
        shuffle_seed: rows are shuffled from this seed before each pass, or None to keep their order.
    """

    mini_batch_size: int
    num_epochs: int
    micro: MicroBatching
    shuffle_seed: int | None = None

    @classmethod
    def of(cls, config: BatchingConfig, rows_per_prompt: int, step: int, *, share_prompts: bool) -> "Passes":
        """As a role's section says.

        Args:
            config: of the role.
            rows_per_prompt: of the batch, for each prompt that `ppo_mini_batch_size` counts.
            step: of the run; each has shuffles of its own.
            share_prompts: whether a prompt is computed once for all rows that have it.
        """
        num_sequences = None if config.use_dynamic_bsz else config.ppo_micro_batch_size_per_gpu
        return cls(
            mini_batch_size=config.ppo_mini_batch_size * rows_per_prompt,
            num_epochs=config.ppo_epochs,
            micro=MicroBatching(num_sequences, config.ppo_max_token_len_per_gpu, share_prompts),
            shuffle_seed=config.data_loader_seed + step * config.ppo_epochs if config.shuffle else None,
        )


def infer(
    engine: TrainEngine,
    data: DataProto,
    micro: MicroBatching,
    *,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
) -> dict[str, torch.Tensor]:
    """Ask a model about every response token of a batch.

    Args:
        engine: holds the model.
        data: input_ids, attention_mask, position_ids [B, P + T] and response_mask [B, T]; for a model that sees
            position_ids [B, 3, P + T] and the non-tensor multi_modal_inputs.
        micro: how the batch is cut.
        temperature: of the distribution asked about.
        with_entropy: whether its entropy is wanted too.
        with_sum_pi_squared: whether its sum of squared probabilities is wanted too.

    Returns:
        Float32 [B, T] by name, on the CPU, zero where the response mask is.
    """
    question = Question(temperature, with_entropy, with_sum_pi_squared)
    shape = data.batch["response_mask"].shape
    results = {name: torch.zeros(shape, dtype=torch.float32) for name in engine.output_names(question)}
    pieces = list(_packed(engine, data, micro))
    outputs = engine.forward([packed for _, packed in pieces], question)
    # A process that others answer for has no outputs: nobody reads its results.
    for (indices, packed), scores in zip(pieces, outputs, strict=False):
        for name, values in scores.items():
            results[name][indices] = packed.unpack(values).cpu()
    return results


def update(
    engine: TrainEngine, data: DataProto, objective: Objective, passes: Passes, *, lr: float, temperature: float = 1.0
) -> dict[str, Metric]:
    """Teach a model one batch: `num_epochs` passes of one optimizer step per mini-batch.

    Every process of the engine calls it with its own rows, which may be none.

    Args:
        engine: holds the model and its optimizer.
        data: the columns that `infer` reads, those that the objective reads, and `row_index` [B] where the rows of the
            processes, one below the other, are not in the order of the whole batch.
        objective: the loss.
        passes: how often, and in what pieces.
        lr: learning rate.
        temperature: of the sampling.

    Returns:
        Metrics, averaged over optimizer steps; those of all processes are yet to be combined.
    """
    held = HeldRows.of(data, engine.replicas)
    steps = []
    for epoch in range(passes.num_epochs):
        seed = None if passes.shuffle_seed is None else passes.shuffle_seed + epoch
        for rows, places in mini_batches(held, passes.mini_batch_size, seed):
            is_all = torch.equal(rows, torch.arange(len(data)))
            mini = MiniBatch(data if is_all else data.select_idxs(rows), places)
            steps.append(_optimizer_step(engine, mini, objective, passes.micro, lr, temperature))
    return _over_steps(steps) | _imbalance(engine, objective.name, [step.flops for step in steps])


@dataclass(frozen=True)
class MiniBatch:
    """The rows of a mini-batch that this process has, and their places [b] in the order of the whole batch."""

    rows: DataProto
    places: torch.Tensor


@dataclass(frozen=True)
class _StepOutcome:
    """What one optimizer step says: shares of sums over the mini-batch, other metrics, and what it cost here."""

    shares: dict[str, Metric]
    others: dict[str, Metric]
    flops: float


def _optimizer_step(
    engine: TrainEngine, mini: MiniBatch, objective: Objective, micro: MicroBatching, lr: float, temperature: float
) -> _StepOutcome:
    here = LossCounts.of(mini.rows.batch["response_mask"])
    computed = objective.rows_with_gradient(mini.rows)
    num_tokens, num_sequences, num_computed = engine.replicas.totals(
        here.batch_num_tokens, here.global_batch_size, int(computed.sum())
    )
    counts = LossCounts(num_tokens, num_sequences)
    rows = mini.rows if bool(computed.all()) else mini.rows.select_idxs(computed)
    losses = list(_losses(engine, rows, objective, micro, counts))
    engine.backward([loss.packed for loss in losses], losses, temperature=temperature)
    parts = [loss.metrics for loss in losses]
    num_packed = sum(loss.packed.num_tokens for loss in losses)
    # Processes with the same rows share them.
    sharers = engine.world.size / engine.replicas.size
    flops = math.fsum(_update_flops(engine, loss.packed) for loss in losses) / sharers
    if num_computed == 0:
        parts = _look_at_some(engine, mini, objective, micro, counts, temperature)
    # After the look: momentum moves the weights even where no row does.
    result = engine.optimizer_step(lr)
    prefix, merged = objective.name, merge_metrics(parts)
    told_once = {
        f"{prefix}/grad_norm": Metric(result.grad_norm),
        f"{prefix}/lr": Metric(lr, "last"),
        f"{prefix}/nonfinite_steps": Metric(float(not result.is_applied), "sum"),
    }
    return _StepOutcome(
        shares={name: Metric(metric.value) for name, metric in merged.items() if metric.reduction == "sum"},
        others={name: metric for name, metric in merged.items() if metric.reduction != "sum"}
        | (told_once if engine.replicas.is_first else {})
        | {
            f"{prefix}/packed_tokens": Metric(num_packed, "sum"),
            f"{prefix}/computed_sequences": Metric(len(rows), "sum"),
            f"perf/flops/{prefix}": Metric(flops, "sum"),
        },
        flops=flops,
    )


def _update_flops(engine: TrainEngine, packed: PackedBatch) -> float:
    flops = engine.cost.update_flops(packed.num_tokens, len(packed.targets), packed.sum_of_squared_lengths)
    if packed.images is None or engine.cost.tower is None:
        return flops
    return flops + engine.cost.tower.update_flops(packed.images.grids)


def _over_steps(steps: Sequence[_StepOutcome]) -> dict[str, Metric]:
    """Metrics of all optimizer steps. Shares are averaged over steps and stay sums for the processes to add up; one
    that computed nothing in some step has a share of nothing there."""
    names = dict.fromkeys(name for step in steps for name in step.shares)
    complete = [{name: step.shares.get(name, Metric(0.0)) for name in names} for step in steps]
    shares = {name: Metric(metric.value, "sum") for name, metric in merge_metrics(complete).items()}
    return shares | merge_metrics(step.others for step in steps)


def _imbalance(engine: TrainEngine, prefix: str, flops: list[float]) -> dict[str, Metric]:
    """How much longer the steps take than if all processes had the same work: the largest share over the mean one."""
    if engine.replicas.size == 1:
        return {}
    of_ranks = engine.replicas.gather(flops)
    total = math.fsum(map(math.fsum, of_ranks))
    if total == 0 or not engine.replicas.is_first:
        return {}
    return {
        f"perf/imbalance/{prefix}": Metric(math.fsum(map(max, zip(*of_ranks, strict=True))) * len(of_ranks) / total)
    }


def _look_at_some(
    engine: TrainEngine,
    mini: MiniBatch,
    objective: Objective,
    micro: MicroBatching,
    counts: LossCounts,
    temperature: float,
) -> list[dict[str, Metric]]:
    """The metrics of the rows that would be the first micro-batch of one process alone, without gradients: where no
    row has one, entropy and mismatch are still told, and are the same however the rows are spread."""
    lengths = [_length(row) if len(row.trained) else None for row in _row_tokens(engine, mini.rows)]
    places = mini.places.tolist()
    here = [(place, length) for place, length in zip(places, lengths, strict=True) if length]
    everywhere = sorted(chain.from_iterable(engine.replicas.gather(here)), key=itemgetter(0))
    first, *_ = micro_batches([length for _, length in everywhere], micro) or [[]]
    row_at = {place: row for row, place in enumerate(places)}
    looked_at = [row_at[everywhere[index][0]] for index in first if everywhere[index][0] in row_at]
    losses = list(_losses(engine, mini.rows.select_idxs(looked_at), objective, micro, counts))
    outputs = engine.forward([loss.packed for loss in losses], Question(temperature, with_entropy=True))
    for loss, scores in zip(losses, outputs, strict=False):
        loss(scores)
    return [loss.metrics for loss in losses]


def _losses(
    engine: TrainEngine, rows: DataProto, objective: Objective, micro: MicroBatching, counts: LossCounts
) -> Iterator["_LossOnRows"]:
    """The objective on each micro-batch of some rows."""
    fields = objective.fields(rows)
    for indices, packed in _packed(engine, rows, micro):
        yield _LossOnRows(objective, rows.select_idxs(indices).select(fields).to(engine.device), packed, counts)


class _LossOnRows:
    """An objective seen from the engine: packed outputs in, a scalar out; keeps the metrics."""

    def __init__(self, objective: Objective, rows: DataProto, packed: PackedBatch, counts: LossCounts) -> None:
        self.objective, self.rows, self.packed, self.counts = objective, rows, packed, counts
        self.metrics: dict[str, Metric] = {}

    def __call__(self, outputs: Outputs) -> torch.Tensor:
        padded = {name: self.packed.unpack(values) for name, values in outputs.items()}
        loss, self.metrics = self.objective(self.rows, padded, self.counts)
        return loss


def _packed(engine: TrainEngine, data: DataProto, micro: MicroBatching) -> Iterator[tuple[list[int], PackedBatch]]:
    """The micro-batches of a batch, packed; rows with nothing to predict are in none."""
    tokens = _row_tokens(engine, data)
    wanted = [number for number, row in enumerate(tokens) if len(row.trained)]
    num_columns = data.batch["response_mask"].shape[1]
    lengths = [_length(tokens[number]) for number in wanted]
    for batch in _cut(engine, lengths, micro):
        indices = [wanted[position] for position in batch]
        rows = [tokens[index] for index in indices]
        yield indices, pack(rows, num_columns, share_prompts=micro.share_prompts, device=engine.device)


def _row_tokens(engine: TrainEngine, data: DataProto) -> list[RowTokens]:
    return row_tokens(data, ImageTokens.of(engine.model.config))


def _cut(engine: TrainEngine, lengths: Sequence[RowLength], micro: MicroBatching) -> list[list[int]]:
    """The micro-batches of this process; where weights are shared, as many as any other has, if there are the rows:
    the processes wait for each other at each of them."""
    attention_tokens = engine.cost.relative()[0]
    batches = micro_batches(lengths, micro, attention_tokens=attention_tokens)
    if engine.has_whole_weights:
        return batches
    most = max(engine.replicas.gather(len(batches)))
    if most == len(batches):
        return batches
    return micro_batches(lengths, micro, num_at_least=most, attention_tokens=attention_tokens)


def _length(row: RowTokens) -> RowLength:
    return RowLength(row.prompt_key, len(row.prompt), row.num_inputs)
