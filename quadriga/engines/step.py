# SPDX-License-Identifier: Apache-2.0
"""The two things that are done with every model, whatever engine holds it: ask it, and teach it.

Legend: B rows, T response positions.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quadriga.algorithms.aggregate import LossCounts
from quadriga.engines.base import Outputs, TrainEngine
from quadriga.engines.micro_batches import MicroBatching, RowLength, micro_batches
from quadriga.engines.objectives import Objective
from quadriga.engines.packing import PackedBatch, RowTokens, pack, row_tokens
from quadriga.observe.metrics import Metric, merge_metrics
from quadriga.protocol import DataProto


@dataclass(frozen=True)
class Passes:
    """How often and in what pieces a batch is learned from.

    Attributes:
        mini_batch_size: rows that one optimizer step takes; the last mini-batch may be smaller.
        num_epochs: passes over the batch.
        micro: how a mini-batch is cut to fit in memory.
        shuffle_seed: rows are shuffled from this seed before each pass, or None to keep their order.
    """

    mini_batch_size: int
    num_epochs: int
    micro: MicroBatching
    shuffle_seed: int | None = None


def infer(
    engine: TrainEngine, data: DataProto, micro: MicroBatching, *, temperature: float = 1.0, with_entropy: bool = False
) -> dict[str, torch.Tensor]:
    """Ask a model about every response token of a batch.

    Args:
        engine: holds the model.
        data: input_ids, attention_mask, position_ids [B, P + T] and response_mask [B, T].
        micro: how the batch is cut.
        temperature: of the distribution asked about.
        with_entropy: whether its entropy is wanted too.

    Returns:
        Float32 [B, T] by name, on the CPU, zero where the response mask is.
    """
    shape = data.batch["response_mask"].shape
    results: dict[str, torch.Tensor] = {}
    for indices, packed in _packed(engine, data, micro):
        for name, values in engine.forward(packed, temperature=temperature, with_entropy=with_entropy).items():
            target = results.setdefault(name, torch.zeros(shape, dtype=torch.float32))
            target[indices] = packed.unpack(values).cpu()
    return results


def update(
    engine: TrainEngine, data: DataProto, objective: Objective, passes: Passes, *, lr: float, temperature: float = 1.0
) -> dict[str, Metric]:
    """Teach a model one batch: `num_epochs` passes of one optimizer step per mini-batch.

    Args:
        engine: holds the model and its optimizer.
        data: the columns that `infer` reads, and those that the objective reads.
        objective: the loss.
        passes: how often, and in what pieces.
        lr: learning rate.
        temperature: of the sampling.

    Returns:
        Metrics, averaged over optimizer steps.
    """
    steps = []
    for epoch in range(passes.num_epochs):
        for indices in _mini_batches(len(data), passes, epoch):
            mini = data if len(indices) == len(data) and passes.shuffle_seed is None else data.select_idxs(indices)
            steps.append(_optimizer_step(engine, mini, objective, passes.micro, lr, temperature))
    return merge_metrics(steps)


def _optimizer_step(
    engine: TrainEngine, mini: DataProto, objective: Objective, micro: MicroBatching, lr: float, temperature: float
) -> dict[str, Metric]:
    counts = LossCounts.of(mini.batch["response_mask"])
    computed = objective.rows_with_gradient(mini)
    rows = mini if bool(computed.all()) else mini.select_idxs(computed)
    fields = objective.fields(rows)
    parts: list[dict[str, Metric]] = []
    num_tokens, flops = 0, 0.0
    for indices, packed in _packed(engine, rows, micro):
        loss = _LossOnRows(objective, rows.select_idxs(indices).select(fields).to(engine.device), packed, counts)
        engine.backward(packed, loss, temperature=temperature)
        parts.append(loss.metrics)
        num_tokens += packed.num_tokens
        # A backward pass costs two forward passes.
        flops += 3 * engine.cost.forward_flops(packed.num_tokens, len(packed.targets), packed.sum_of_squared_lengths)
    result = engine.optimizer_step(lr)
    prefix = objective.name
    if not parts:
        parts = _look_at_some(engine, mini, objective, micro, counts, temperature)
    metrics = {name: _per_step(metric) for name, metric in merge_metrics(parts).items()}
    return metrics | {
        f"{prefix}/grad_norm": Metric(result.grad_norm),
        f"{prefix}/lr": Metric(lr, "last"),
        f"{prefix}/nonfinite_steps": Metric(float(not result.is_applied), "sum"),
        f"{prefix}/packed_tokens": Metric(num_tokens, "sum"),
        f"{prefix}/computed_sequences": Metric(len(rows), "sum"),
        f"perf/flops/{prefix}": Metric(flops, "sum"),
    }


def _look_at_some(
    engine: TrainEngine,
    mini: DataProto,
    objective: Objective,
    micro: MicroBatching,
    counts: LossCounts,
    temperature: float,
) -> list[dict[str, Metric]]:
    """The metrics of one micro-batch, without gradients: where no row has one, entropy and mismatch are still told."""
    for indices, packed in _packed(engine, mini, micro):
        rows = mini.select_idxs(indices).select(objective.fields(mini)).to(engine.device)
        loss = _LossOnRows(objective, rows, packed, counts)
        loss(engine.forward(packed, temperature=temperature, with_entropy=True))
        return [loss.metrics]
    return []


class _LossOnRows:
    """An objective seen from the engine: packed outputs in, a scalar out; keeps the metrics."""

    def __init__(self, objective: Objective, rows: DataProto, packed: PackedBatch, counts: LossCounts) -> None:
        self.objective, self.rows, self.packed, self.counts = objective, rows, packed, counts
        self.metrics: dict[str, Metric] = {}

    def __call__(self, outputs: Outputs) -> torch.Tensor:
        padded = {name: self.packed.unpack(values) for name, values in outputs.items()}
        loss, self.metrics = self.objective(self.rows, padded, self.counts)
        return loss


def _per_step(metric: Metric) -> Metric:
    """Shares of a mini-batch's loss add up within an optimizer step, and are averaged over steps."""
    return Metric(metric.value) if metric.reduction == "sum" else metric


def _mini_batches(num_rows: int, passes: Passes, epoch: int) -> Iterator[torch.Tensor]:
    order = torch.arange(num_rows)
    if passes.shuffle_seed is not None:
        generator = torch.Generator().manual_seed(passes.shuffle_seed + epoch)
        order = torch.randperm(num_rows, generator=generator)
    yield from order.split(passes.mini_batch_size)


def _packed(engine: TrainEngine, data: DataProto, micro: MicroBatching) -> Iterator[tuple[list[int], PackedBatch]]:
    """The micro-batches of a batch, packed; rows with nothing to predict are in none."""
    tokens = row_tokens(data)
    wanted = [number for number, row in enumerate(tokens) if len(row.trained)]
    num_columns = data.batch["response_mask"].shape[1]
    for batch in micro_batches([_length(tokens[number]) for number in wanted], micro):
        indices = [wanted[position] for position in batch]
        rows = [tokens[index] for index in indices]
        yield indices, pack(rows, num_columns, share_prompts=micro.share_prompts, device=engine.device)


def _length(row: RowTokens) -> RowLength:
    return RowLength(row.prompt_key, len(row.prompt), row.num_inputs)
