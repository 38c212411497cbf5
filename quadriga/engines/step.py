# SPDX-License-Identifier: Apache-2.0
"""Inference and the optimizer update, shared by all training engines.

    update          epochs x mini-batches
      optimizer step    counts of the whole mini-batch, micro-batches packed
        engine.backward     each micro-batch: packed outputs -> MicroBatchLoss -> gradients
        engine.optimizer_step

Legend: B rows, b of them in a micro-batch, P prompt and T response positions, N packed tokens, M
predicted tokens, L layers with experts, k experts per token.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from quadriga.algorithms.aggregate import LossCounts
from quadriga.algorithms.masked import zero_outside
from quadriga.config import OptimConfig
from quadriga.engines.batches import MicroBatching, Passes, RowLength, micro_batches, mini_batches
from quadriga.engines.fsdp.engine import ALL_KINDS, FSDPEngine, OptimizerStep
from quadriga.engines.objectives import ROLLOUT_NUM_TOKENS, Objective
from quadriga.engines.packing import Outputs, echo_tokens, pack, row_tokens
from quadriga.errors import EngineError
from quadriga.models.attention import PackedBatch
from quadriga.models.experts import ROUTES, Routing, dtype_of_routes
from quadriga.models.scorers import ScoreQuestion
from quadriga.observe.call_times import count_waits
from quadriga.observe.metrics import Metric, merge_metrics
from quadriga.protocol import DataProto

# Largest share of replayed routes that may differ from this model's choices in the first
# mini-batch. In bfloat16, a few per cent differ.
_MAX_DIFFERING_ROUTES = 0.5


def lr_at(step: int, config: OptimConfig, total_steps: float) -> float:
    """Learning rate of a training step, the same for all optimizer steps of this training step.

    Warm-up is linear: the first of w steps has 1/w of the rate, or 0 with `zero_indexed_step`. Then
    the rate is constant, or decays linearly or as a cosine to `min_lr_ratio` of the rate.

    Args:
        step: training step, starting at 1.
        config: the section `optim`.
        total_steps: training steps of the run, at which the decay ends unless
            `optim.total_training_steps` is set.

    Returns:
        The learning rate.
    """
    total_steps = config.total_training_steps or total_steps
    warmup = config.lr_warmup_steps
    if warmup < 0:
        # Not set: a share of the steps.
        warmup = int(config.lr_warmup_steps_ratio * total_steps)
    if config.zero_indexed_step:
        step -= 1
    if warmup > 0 and step <= warmup:
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
) -> dict[str, Tensor]:
    """Compute the model's outputs for every response token of a batch, without gradients.

    Args:
        engine: the model.
        data: input_ids, attention_mask, position_ids [B, P + T] and response_mask [B, T]; for a
            vision-language model, position_ids [B, 3, P + T] and multi_modal_inputs. Routers replay
            routed_experts [B, P + T, L, k] if the batch has it.
        micro: division into micro-batches.
        temperature: sampling temperature, which divides the logits.
        with_entropy: return `entropy`, in nats.
        with_sum_pi_squared: return `sum_pi_squared`, the sum of squared probabilities over the
            vocabulary.
        with_routes: return `routed_experts`, the experts of each token.
        top_k: return the likeliest k tokens at each position, `top_ids` int32 [B, T, k], and their
            `top_log_probs` [B, T, k].

    Returns:
        Outputs by name, float32 [B, T] unless said above, on the CPU, zero outside of the response
        mask. `routed_experts` are [B, P + T, L, k], -1 at tokens that were not computed.
    """
    # Rows that are not computed, and tokens outside of the response mask, keep the initial values.
    question = ScoreQuestion(temperature, with_entropy, with_sum_pi_squared, top_k)
    results = {}
    for name in engine.scorer.output_names(question):
        shape = data.batch["response_mask"].shape
        # Only with `top_k`.
        if name.startswith("top_"):
            shape = (*shape, top_k or 0)
        dtype = torch.int32 if name == "top_ids" else torch.float32
        results[name] = torch.zeros(shape, dtype=dtype)
    if with_routes:
        routers = engine.scorer.routers
        shape = (*data.batch["input_ids"].shape, routers.count, routers.top_k)
        results[ROUTES] = torch.full(shape, -1, dtype=dtype_of_routes(routers.num_experts))
    routing = None
    if with_routes or ROUTES in data.batch.keys():
        routing = Routing(records_choice=with_routes)

    packed_batches = list(_pack_micro_batches(engine, data, micro, routing))
    world = engine.processes.world
    with engine.awake("weights"), count_waits(world.size, world.device.type):
        outputs = engine.forward([packed for _, packed in packed_batches], question)

    # Not strict: a pipeline stage without the head has no outputs. Its results are not collected.
    for (rows, packed), scores in zip(packed_batches, outputs, strict=False):
        for name, values in scores.items():
            results[name][rows] = packed.unpack(values).cpu().to(results[name].dtype)
    if with_routes:
        is_valid = data.batch["attention_mask"].bool().cpu()
        for rows, packed in packed_batches:
            chosen = packed.routing.chosen.cpu()
            for number, token_indices in packed.token_indices.items():
                row = rows[number]
                # A row's last tokens are not packed, so only its first valid tokens have indices.
                columns = is_valid[row].nonzero()[: len(token_indices), 0]
                results[ROUTES][row, columns] = chosen[token_indices].to(results[ROUTES].dtype)
    return results


class FirstOutputs:
    """Outputs of the first forward pass of each row in an update.

    Args:
        num_rows: B, rows of this rank.
        num_columns: T, response positions.

    Attributes:
        columns: float32 [B, T] on the CPU by name, 0 outside of the response mask.
        is_computed: [B] bool, whether the row was computed.
    """

    NAMES = ("log_probs", "entropy")

    def __init__(self, num_rows: int, num_columns: int) -> None:
        self.columns: dict[str, Tensor] = {}
        for name in self.NAMES:
            self.columns[name] = torch.zeros(num_rows, num_columns)
        self.is_computed = torch.zeros(num_rows, dtype=torch.bool)

    def add(self, rows: Tensor, packed: PackedBatch, outputs: Outputs) -> None:
        """Add the outputs of a micro-batch. Rows that have outputs already keep them.

        Args:
            rows: [b], indices of the rows among all rows of this rank.
            packed: the packed rows.
            outputs: outputs of the packed rows by name, [M] each.
        """
        # Later passes of an update compute the same rows again, with changed weights.
        is_new = ~self.is_computed[rows]
        for name, column in self.columns.items():
            values = packed.unpack(outputs[name].float()).cpu()
            column[rows[is_new]] = values[is_new]
        self.is_computed[rows] = True


def update(
    engine: FSDPEngine,
    data: DataProto,
    objective: Objective,
    passes: Passes,
    *,
    lr: float,
    temperature: float = 1.0,
    first_outputs: FirstOutputs | None = None,
) -> dict[str, Metric]:
    """Train the model on a batch, with one optimizer step per mini-batch of each epoch.

    Args:
        engine: the model and its optimizer. All its ranks call this, even without rows.
        data: rows of this rank, with the columns that `infer` and the objective read; and
            `row_index` [B] if the ranks' rows, concatenated, are not in the order of the batch.
        objective: the loss.
        passes: epochs, mini-batches and micro-batches.
        lr: learning rate.
        temperature: sampling temperature.
        first_outputs: gets the outputs of each row's first forward pass.

    Returns:
        Metrics of this rank, averaged over optimizer steps. The caller combines the ranks' metrics.
    """
    updater = _Updater(engine, objective, passes.micro, temperature, first_outputs)
    steps = []  # of each optimizer step, shares and other metrics; see `_Updater.step`
    world = engine.processes.world
    with engine.awake(*ALL_KINDS), count_waits(world.size, world.device.type):
        for rows, positions in mini_batches(data, engine.processes.replicas, passes):
            # Selecting rows copies them: use the batch itself if it has all rows in order.
            has_all_rows = torch.equal(rows, torch.arange(len(data)))
            mini_batch = data if has_all_rows else data.select_idxs(rows)
            steps.append(updater.step(mini_batch, rows, positions, lr))

    # Shares are this rank's parts of sums over all ranks, such as the loss. Average each over all
    # steps, with 0 for steps in which this rank computed nothing. The caller then adds up the
    # averages of all ranks, because of the reduction "sum".
    zeros = {name: Metric(0.0) for shares, _ in steps for name in shares}
    metrics = {}
    for name, metric in merge_metrics(zeros | shares for shares, _ in steps).items():
        metrics[name] = Metric(metric.value, "sum")
    metrics |= merge_metrics(other_metrics for _, other_metrics in steps)

    if engine.processes.replicas.size > 1:
        # Largest work of a rank over mean work: how much longer steps take than with equal work.
        name = f"perf/flops/{objective.name}"
        flops_by_rank = engine.processes.replicas.gather(
            [other_metrics[name].value for _, other_metrics in steps]
        )
        total = math.fsum(map(math.fsum, flops_by_rank))
        largest = math.fsum(map(max, zip(*flops_by_rank, strict=True)))
        if total and engine.processes.replicas.is_first:
            imbalance = largest * len(flops_by_rank) / total
            metrics[f"perf/imbalance/{objective.name}"] = Metric(imbalance)
    return metrics


@dataclass
class MicroBatchLoss:
    """The loss of a micro-batch, as a function of packed outputs [M], which an engine calls."""

    objective: Objective
    rows: DataProto  # b rows, on the engine's device
    packed: PackedBatch
    counts: LossCounts  # of the whole mini-batch, which normalise the loss
    row_numbers: list[int]  # indices of the rows among the computed rows of the mini-batch
    keeps_outputs: bool = False
    metrics: dict[str, Metric] = field(default_factory=dict)  # of the last call
    outputs: Outputs | None = None  # of the last call, if they are kept

    def __call__(self, outputs: Outputs) -> Tensor:
        """Compute the loss [], and store metrics and, on request, outputs."""
        if self.keeps_outputs:
            is_response = self.rows.batch["response_mask"][self.packed.rows, self.packed.columns]
            self.outputs = {}
            for name in FirstOutputs.NAMES:
                self.outputs[name] = zero_outside(outputs[name].detach(), is_response)
        padded = {name: self.packed.unpack(values) for name, values in outputs.items()}
        loss, self.metrics = self.objective(self.rows, padded, self.counts)
        return loss


@dataclass(frozen=True)
class _Updater:
    """Makes the optimizer steps of an update."""

    engine: FSDPEngine
    objective: Objective
    micro: MicroBatching
    temperature: float
    first_outputs: FirstOutputs | None

    def step(
        self, mini_batch: DataProto, indices: Tensor, positions: Tensor, lr: float
    ) -> tuple[dict[str, Metric], dict[str, Metric]]:
        """Make one optimizer step.

        Args:
            mini_batch: rows [b] of the mini-batch on this rank.
            indices: [b], indices of these rows among all rows of this rank.
            positions: [b], positions of these rows in the order of the whole batch.
            lr: learning rate.

        Returns:
            Metrics that are this rank's shares of sums over the mini-batch, and other metrics.
        """
        engine = self.engine
        replicas = engine.processes.replicas
        # Losses are normalised by the whole mini-batch, so all ranks count it before the first
        # backward pass. Rows without a gradient count too, but need not be computed.
        rollout_num_tokens = mini_batch.batch.get(ROLLOUT_NUM_TOKENS)
        local_counts = LossCounts.of(mini_batch.batch["response_mask"], rollout_num_tokens)
        has_gradient = self.objective.rows_with_gradient(mini_batch)
        num_tokens, num_sequences, num_computed, num_echo_tokens = replicas.totals(
            local_counts.batch_num_tokens,
            local_counts.global_batch_size,
            int(has_gradient.sum()),
            int(echo_tokens(mini_batch).sum()),
        )
        num_rollouts = num_sequences
        if rollout_num_tokens is not None:
            # A rollout may have rows on several ranks, each of which counts a fraction of it. The
            # fractions add up to whole numbers, apart from rounding errors.
            num_rollouts = round(math.fsum(replicas.gather(local_counts.num_rollouts)))
        counts = LossCounts(num_tokens, num_sequences, num_rollouts, num_echo_tokens)

        rows = mini_batch if bool(has_gradient.all()) else mini_batch.select_idxs(has_gradient)
        routing = self._create_routing(counts) if engine.scorer.routers.count else None
        losses = list(self._make_losses(rows, counts, routing))
        packed_batches = [loss.packed for loss in losses]
        engine.backward(packed_batches, losses, temperature=self.temperature)
        if self.first_outputs is not None:
            computed_indices = indices[has_gradient.cpu()]
            for loss in losses:
                # A pipeline stage without the head has no outputs.
                if loss.outputs is not None:
                    self.first_outputs.add(
                        computed_indices[loss.row_numbers], loss.packed, loss.outputs
                    )
        micro_metrics = [loss.metrics for loss in losses]
        # Without a row to compute on any rank, entropy and mismatch come from a sample.
        if num_computed == 0:
            micro_metrics = self._sample_metrics(mini_batch, positions, counts, routing)
        router_metrics = {} if routing is None else _router_metrics(engine, routing)
        # After the sample is computed, because momentum changes the weights even without a
        # gradient.
        result = engine.optimizer_step(lr)

        shares = {}
        metrics = {}
        for name, metric in merge_metrics(_tensors_to_numbers(micro_metrics)).items():
            if metric.reduction == "sum":
                shares[name] = Metric(metric.value)
            else:
                metrics[name] = metric
        # These metrics are the same on all ranks, so only one rank reports them.
        if replicas.is_first:
            metrics |= self._step_metrics(result, lr, router_metrics)
        metrics |= self._cost_metrics(packed_batches, len(rows))
        return shares, metrics

    def _create_routing(self, counts: LossCounts) -> Routing:
        """Routing of a mini-batch, with counters of statistics and weights of router losses."""
        routers = self.engine.scorer.routers
        # Routers sum their losses over tokens, so a token's weight is one over the number of tokens
        # in the whole mini-batch. In float16 it includes the loss scale, as in other losses.
        num_tokens = max(counts.batch_num_tokens + counts.num_echo_tokens, 1)
        token_weight = float(self.engine.optimizer.loss_scale[0]) / num_tokens
        # The load-balancing loss is averaged over layers, the z-loss is summed over them.
        return Routing(
            loss_weight=self.objective.router_aux_loss_coef / routers.count * token_weight,
            z_weight=self.objective.router_z_loss_coef * token_weight,
            sums=routers.new_sums(self.engine.device),
        )

    def _step_metrics(
        self, result: OptimizerStep, lr: float, router_metrics: Mapping[str, float]
    ) -> dict[str, Metric]:
        """Metrics of an optimizer step, which are the same on all ranks."""
        prefix = self.objective.name
        metrics = {
            f"{prefix}/grad_norm": Metric(result.grad_norm),
            f"{prefix}/lr": Metric(lr, "last"),
            f"{prefix}/nonfinite_steps": Metric(float(not result.is_applied), "sum"),
        }
        if self.engine.dtype == torch.float16:
            loss_scale = float(self.engine.optimizer.loss_scale[0])
            metrics[f"{prefix}/loss_scale"] = Metric(loss_scale, "last")
        for name, value in router_metrics.items():
            metrics[f"{prefix}/router_{name}"] = Metric(value)
        return metrics

    def _cost_metrics(
        self, packed_batches: Sequence[PackedBatch], num_rows: int
    ) -> dict[str, Metric]:
        """Tokens, sequences and floating-point operations that this rank has computed."""
        engine = self.engine
        prefix = self.objective.name
        num_packed = sum(packed.num_tokens for packed in packed_batches)
        # Several ranks compute these rows together. Each reports all of their tokens and rows, but
        # only an equal part of the operations.
        num_sharers = engine.processes.world.size / engine.processes.replicas.size
        flops = math.fsum(engine.cost.update_flops_of(packed) for packed in packed_batches)
        return {
            f"{prefix}/packed_tokens": Metric(num_packed, "sum"),
            f"{prefix}/computed_sequences": Metric(num_rows, "sum"),
            f"perf/flops/{prefix}": Metric(flops / num_sharers, "sum"),
        }

    def _sample_metrics(
        self,
        mini_batch: DataProto,
        positions: Tensor,
        counts: LossCounts,
        routing: Routing | None,
    ) -> list[dict[str, Metric]]:
        """Compute metrics of a sample of rows, for a mini-batch in which no row has a gradient.

        The sample is the first micro-batch that a single rank would make of all rows. Thus entropy
        and mismatch are always reported, and do not depend on how rows are spread over ranks.

        Args:
            mini_batch: rows [b] of the mini-batch on this rank.
            positions: [b], positions of these rows in the order of the whole batch.
            counts: counts of the whole mini-batch.
            routing: counters of the routers.

        Returns:
            Metrics of this rank's rows in the sample, one dictionary per micro-batch.
        """
        # Exchange the lengths of all ranks' rows, in the order of the batch, so that every rank
        # finds the same first micro-batch.
        lengths = []
        tokens = row_tokens(mini_batch, self.engine.packing.image_tokens)
        for position, row in zip(positions.tolist(), tokens, strict=True):
            if len(row.loss_indices):
                length = RowLength(row.prompt_key, row.num_prompt_tokens, row.num_response_tokens)
                lengths.append((position, length))
        lengths_by_rank = self.engine.processes.replicas.gather(lengths)
        all_lengths = sorted(chain.from_iterable(lengths_by_rank), key=itemgetter(0))
        batches = micro_batches([length for _, length in all_lengths], self.micro)

        # Compute the rows of this micro-batch that are on this rank.
        row_at_position = {position: row for row, position in enumerate(positions.tolist())}
        sampled_rows = []
        for index in batches[0] if batches else []:
            position, _ = all_lengths[index]
            if position in row_at_position:
                sampled_rows.append(row_at_position[position])
        sample = mini_batch.select_idxs(sampled_rows)
        losses = list(self._make_losses(sample, counts, routing))
        question = ScoreQuestion(self.temperature, with_entropy=True)
        outputs = self.engine.forward([loss.packed for loss in losses], question)
        # Calling a loss stores its metrics. A pipeline stage without the head has no outputs.
        for loss, scores in zip(losses, outputs, strict=False):
            loss(scores)
        return [loss.metrics for loss in losses]

    def _make_losses(
        self, rows: DataProto, counts: LossCounts, routing: Routing | None
    ) -> Iterator[MicroBatchLoss]:
        """Divide rows into micro-batches, and yield the loss of each."""
        objective = self.objective
        fields = objective.fields(rows)
        for indices, packed in _pack_micro_batches(self.engine, rows, self.micro, routing):
            micro_rows = rows.select_idxs(indices).select(fields).to(self.engine.device)
            if objective.other_targets:
                # At each position, also score the further tokens: targets [M, 1 + k].
                column = micro_rows.batch[objective.other_targets]
                other_ids = column[packed.rows, packed.columns].long()
                targets = torch.cat([packed.targets[:, None], other_ids], 1)
                packed = replace(packed, targets=targets)
            yield MicroBatchLoss(
                objective,
                micro_rows,
                packed,
                counts,
                indices,
                keeps_outputs=self.first_outputs is not None,
            )


def _router_metrics(engine: FSDPEngine, routing: Routing) -> dict[str, float]:
    """Statistics of the routers for the predicted tokens of a mini-batch, over all ranks.

    Args:
        engine: the model.
        routing: counters of this rank; changed in place to the sums over all ranks.

    Returns:
        Largest and smallest load of an expert in any layer, as a multiple of the mean load; the
        mean entropy of a router in nats; the router losses that are used; the share of replayed
        routes that differ from the model's own choices. `dropped` is always 0, since experts have
        no capacity limit. Empty if no token was predicted.

    Raises:
        EngineError: most routes of the first replayed mini-batch differ from this model's.
    """
    engine.processes.world.add_up([routing.sums])
    routers = engine.scorer.routers
    num_experts = routers.num_experts
    # By layer: tokens of each expert [L, E], and the six sums below [L, 6].
    loads, other_sums = routing.sums.cpu().tensor_split([num_experts], 1)
    num_tokens, entropy, loss, z_loss, num_replayed, num_differing = other_sums.sum(0).tolist()
    if not num_tokens:
        return {}
    # A load of 1 is an equal share of the layer's tokens.
    loads = loads / (other_sums[:, :1] * routers.top_k / num_experts)
    metrics = {
        "load_max": float(loads.max()),
        "load_min": float(loads.min()),
        "entropy": entropy / num_tokens,
        "dropped": 0.0,
    }
    if routing.loss_weight:
        metrics["aux_loss"] = loss / num_tokens
    if routing.z_weight:
        metrics["z_loss"] = z_loss / num_tokens
    if num_replayed:
        share = num_differing / num_replayed
        metrics["replay_differs"] = share
        if not routers.is_checked and share > _MAX_DIFFERING_ROUTES:
            raise EngineError(
                "actor_rollout_ref.actor.router_replay",
                got=f"routes of which {share:.0%} differ from what training's own routers choose",
                expected=f"at most {_MAX_DIFFERING_ROUTES:.0%} in the first mini-batch",
                fix="The rollout engine does not report its choices, or generates with other "
                "weights: set router_replay=off.",
            )
        routers.is_checked = True
    return metrics


def _tensors_to_numbers(micro_metrics: list[dict[str, Metric]]) -> list[dict[str, Metric]]:
    """Convert tensors in the metrics of micro-batches to numbers, with one transfer for all."""
    tensors = []
    for metrics in micro_metrics:
        for metric in metrics.values():
            for number in (metric.value, metric.weight):
                if isinstance(number, Tensor):
                    tensors.append(number.double())
    if not tensors:
        return micro_metrics
    numbers = iter(torch.stack(tensors).tolist())

    def to_number(value: Any) -> Any:
        """Replace a tensor by the next number of the transfer."""
        return next(numbers) if isinstance(value, Tensor) else value

    converted = []
    for metrics in micro_metrics:
        plain_metrics = {}
        for name, metric in metrics.items():
            # The value before the weight: the order in which tensors were collected.
            value = to_number(metric.value)
            plain_metrics[name] = Metric(value, metric.reduction, to_number(metric.weight))
        converted.append(plain_metrics)
    return converted


def _pack_micro_batches(
    engine: FSDPEngine, data: DataProto, micro: MicroBatching, routing: Routing | None
) -> Iterator[tuple[list[int], PackedBatch]]:
    """Divide rows into micro-batches and pack them. Rows without a predicted token are left out.

    Args:
        engine: the model.
        data: the rows.
        micro: division into micro-batches.
        routing: routing that all micro-batches share; each gets the replayed routes of its tokens.
            None: the routers of the model, if any, are not observed.

    Returns:
        Indices of the rows, and the packed rows, of each micro-batch.
    """
    routes = None
    if routing is not None and ROUTES in data.batch.keys():
        routes = data.batch[ROUTES]
        engine.scorer.routers.require_compatible(routes)
    tokens = row_tokens(data, engine.packing.image_tokens)
    num_columns = data.batch["response_mask"].shape[1]
    predicted_rows = [number for number, row in enumerate(tokens) if len(row.loss_indices)]
    # Tokens of a row are also its lengths: `RowTokens` is a subclass.
    lengths = [tokens[number] for number in predicted_rows]
    longest = max((row.num_prompt_tokens + row.num_response_tokens for row in lengths), default=0)
    if longest > engine.packing.packs_up_to:
        # Such a row must be alone in its micro-batch. The limit of rows is one for all micro-batches,
        # so then all rows are alone.
        micro = replace(micro, num_sequences=1, share_prompts=False)

    divide = partial(micro_batches, lengths, micro, attention_tokens=engine.cost.attention_tokens)
    batches = divide()
    if engine.processes.storage is not None:
        # The weights are sharded, so ranks with other rows (`replicas`) wait for each other at each
        # micro-batch. All make as many as the rank that needs most.
        batches = divide(min_batches=max(engine.processes.replicas.gather(len(batches))))

    for batch in batches:
        indices = [predicted_rows[position] for position in batch]
        packed = pack(
            [tokens[index] for index in indices],
            num_columns,
            share_prompts=micro.share_prompts,
            device=engine.device,
        )
        if routing is not None:
            replayed = None
            if routes is not None:
                masks = data.batch["attention_mask"][indices] != 0
                replayed = _pack_routes(routes[indices], masks, packed).to(engine.device)
            packed = replace(packed, routing=replace(routing, replayed=replayed))
        yield indices, packed


def _pack_routes(routes: Tensor, attention_mask: Tensor, packed: PackedBatch) -> Tensor:
    """Arrange the replayed routes of padded rows in the order of a packed micro-batch's tokens.

    Args:
        routes: [b, P + T, L, k], the experts of each token in each layer.
        attention_mask: [b, P + T] bool, False where a row has padding.
        packed: the packed rows.

    Returns:
        [N, L, k]. Tokens of rows without a predicted token have -1, which lets routers choose.
    """
    packed_routes = routes.new_full((packed.num_tokens, *routes.shape[2:]), -1)
    for row, token_indices in packed.token_indices.items():
        row_routes = routes[row][attention_mask[row]]
        packed_routes[torch.from_numpy(token_indices)] = row_routes[: len(token_indices)]
    return packed_routes
