# SPDX-License-Identifier: Apache-2.0
"""Predicted time of each phase of a step.

    generation   prefill, then decode steps: each reads all weights and the KV cache, and computes
                 and samples one token of each sequence
    log-probs    2 operations for each parameter and token, and attention
    update       3 times a forward pass, or 4 with recomputed activations; with an adapter 2 or 3

Products reach a share of the peak of large matrices, memory a share of its bandwidth. These shares,
and the time to launch a decode step, are assumptions, see `Efficiency`. Grading, tools and
environments are not predicted.

Legend: P prompt tokens, R response tokens, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from quadriga.config import Config
from quadriga.config.explain import BatchPlan, needs_old_log_prob_pass, needs_reference
from quadriga.config.placement import ACTOR, CRITIC
from quadriga.planning.devices import Devices
from quadriga.planning.memory import trained_parameters
from quadriga.planning.phases import Lengths, RolePlan, adapter_rank, cached_token_bytes
from quadriga.planning.sizes import ModelSizes

_LONGEST_FACTOR = 2.0  # longest response of a step, relative to the mean
_SAMPLING_PASSES = 4  # how often sampling reads or writes each float32 logit


@dataclass(frozen=True)
class Efficiency:
    """Shares of a device's peak performance that phases reach.

    Attributes:
        products: share of `Devices.flops` in updates and passes for log-probs.
        decoding: share of `Devices.flops` in decode steps.
        memory: share of `Devices.bytes_per_s`.
        decode_step_s: seconds of a decode step besides reading and computing.
        source: where the shares come from.
    """

    products: float
    decoding: float
    memory: float
    decode_step_s: float
    source: str


_ON_GPUS = Efficiency(
    products=0.5,
    decoding=0.5,
    memory=0.7,
    decode_step_s=1.6e-3,
    source="updates and decode steps of a 1.5B model on an H100 (docs/evidence/performance.md)",
)
_ON_CPUS = Efficiency(
    products=0.6,
    decoding=0.5,
    memory=0.7,
    decode_step_s=5e-3,
    source="assumed, not measured on this machine",
)


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step.

    Attributes:
        phases: seconds by name of the phase.
        limit_of_generation: what takes most of the time of generation.
        efficiency: the assumed shares.
    """

    phases: Mapping[str, float]
    limit_of_generation: str
    efficiency: Efficiency

    @property
    def total(self) -> float:
        """Seconds of all phases together."""
        return sum(self.phases.values())


@dataclass(frozen=True)
class _Passes:
    """Times of passes over the sequences of a step that one rank computes."""

    config: Config
    plans: Mapping[str, RolePlan]
    devices: Devices
    lengths: Lengths
    efficiency: Efficiency

    @property
    def num_sequences(self) -> float:
        """Sequences of a rank."""
        return BatchPlan(self.config).num_sequences / self.devices.count

    @property
    def num_tokens(self) -> float:
        """Tokens of a rank's sequences, with shared prompts counted once."""
        num_prompts = self.num_sequences
        if self.config.actor_rollout_ref.actor.use_prefix_sharing:
            num_prompts = BatchPlan(self.config).num_prompts / self.devices.count
        return num_prompts * self.lengths.prompt + self.num_sequences * self.lengths.response

    def forward_s(self, role: str) -> float:
        """Seconds of a pass without gradients."""
        sizes = self.plans[role].sizes
        measured = self.devices.layer_times.get(role)
        if measured is not None:
            return self.num_tokens * measured.seconds("forward_s", sizes.num_layers)
        num_predicted = self.num_sequences * self.lengths.response if role == ACTOR else 0.0
        squares = self.num_sequences * (self.lengths.prompt + self.lengths.response) ** 2
        flops = forward_flops(sizes, self.num_tokens, num_predicted, squares)
        return flops / (self.devices.flops * self.efficiency.products)

    def update_s(self, role: str) -> float:
        """Seconds of the forward and backward passes, and of the exchange between ranks."""
        plan = self.plans[role]
        exchange_s = _exchange_s(plan, self.devices)
        num_passes = update_passes(self.config, role, recomputes=plan.recomputes)
        measured = self.devices.layer_times.get(role)
        if measured is not None:
            section = self.config.critic if role == CRITIC else self.config.actor_rollout_ref.actor
            # Gloo does not send during computation, so each micro-batch waits for it.
            num_batches = -(-self.num_tokens // section.ppo_max_token_len_per_gpu)
            seconds = self.num_tokens * measured.seconds("update_s", plan.sizes.num_layers)
            # The plan may recompute activations or have an adapter where the measured layers
            # did not.
            num_more_passes = num_passes - measured.num_passes
            seconds += num_more_passes * self.forward_s(role)
            return seconds + num_batches * exchange_s
        return num_passes * self.forward_s(role) + exchange_s


def update_passes(config: Config, role: str, *, recomputes: bool) -> int:
    """Cost of an update's forward and backward passes, in forward passes.

    Args:
        config: the configuration.
        role: key of the role's section.
        recomputes: whether the backward pass computes activations again.
    """
    # With an adapter the backward pass computes no gradients of the frozen weights.
    num_passes = 2 if adapter_rank(config, role) else 3
    return num_passes + int(recomputes)


def step_time(
    config: Config, plans: Mapping[str, RolePlan], devices: Devices, lengths: Lengths
) -> StepTime:
    """Predict the time of a step in which all phases run one after the other.

    Args:
        config: the configuration.
        plans: the trained roles, by the keys of their sections.
        devices: the devices, which all roles share.
        lengths: assumed mean lengths.
    """
    efficiency = _ON_CPUS if devices.is_cpu else _ON_GPUS
    passes = _Passes(config, plans, devices, lengths, efficiency)
    actor = plans[ACTOR]
    generation, limit = _predict_generation_s(config, actor, devices, lengths, efficiency)
    phases = {"generation": generation}
    if needs_old_log_prob_pass(config):
        phases["old log-probs"] = passes.forward_s(ACTOR)
    if needs_reference(config):
        phases["reference"] = passes.forward_s(ACTOR)
    for role, plan in plans.items():
        if role not in (ACTOR, CRITIC):
            continue
        section = config.critic if role == CRITIC else config.actor_rollout_ref.actor
        name = "update of the critic" if role == CRITIC else "update"
        if role == CRITIC:
            phases["values"] = passes.forward_s(role)
        phases[name] = passes.update_s(role) * section.ppo_epochs
        if devices.is_cpu:
            phases[name] += _optimizer_s(config, role, plan, devices)
    if not actor.layout.is_whole or config.async_training.enable:
        weight_bytes = actor.sizes.num_parameters * actor.itemsize
        phases["weight sync"] = weight_bytes / devices.link_bytes_per_s
    return StepTime(phases, limit, efficiency)


def forward_flops(
    sizes: ModelSizes, num_tokens: float, num_predicted: float, squares: float
) -> float:
    """Operations of a forward pass; see `quadriga.models.flops.ModelCost`.

    Args:
        sizes: the model.
        num_tokens: number of tokens that the layers compute.
        num_predicted: number of tokens that the vocabulary head computes.
        squares: sum of the squared lengths of the sequences, for attention.
    """
    layers = 2.0 * sizes.matrix_parameters * num_tokens
    head = 2.0 * sizes.table_parameters * num_predicted
    return layers + head + 2.0 * sizes.num_layers * sizes.queries * squares


def _exchange_s(plan: RolePlan, devices: Devices) -> float:
    """Seconds in which ranks sum gradients and gather weights, without overlap."""
    if devices.count == 1:
        return 0.0
    # Gradients are summed in float32.
    num_bytes = plan.sizes.num_parameters * 4.0
    if not plan.layout.is_whole:
        # Weights are gathered before the forward and before the backward pass.
        num_bytes += 2 * plan.sizes.num_parameters * plan.itemsize
    return num_bytes / devices.link_bytes_per_s


def _optimizer_s(config: Config, role: str, plan: RolePlan, devices: Devices) -> float:
    """Seconds in which the optimizer steps of an update read and write memory."""
    # Bytes of a parameter: the norm and the clipping of its gradient, AdamW's reads and writes of
    # master, gradient and moments; in 16 bits the rounded copy, and the sum that is zeroed.
    num_bytes = 4 + 8 + 28
    if plan.itemsize < 4:
        num_bytes += 4 + plan.itemsize + 4
    num_trained = trained_parameters(plan.sizes, adapter_rank(config, role)) / plan.layout.fsdp
    num_steps = BatchPlan(config).num_optimizer_steps
    return num_steps * num_trained * num_bytes / devices.bytes_per_s


def _predict_generation_s(
    config: Config, plan: RolePlan, devices: Devices, lengths: Lengths, efficiency: Efficiency
) -> tuple[float, str]:
    """Predict generation. Return its seconds, and what takes most of them in decode steps."""
    sizes = plan.sizes
    rollout = config.actor_rollout_ref.rollout
    group_size = rollout.tensor_model_parallel_size
    num_engines = max(1, devices.count // group_size)
    batch = BatchPlan(config)
    num_sequences = batch.num_sequences / num_engines
    num_prompts = batch.num_prompts / num_engines
    num_running = min(float(rollout.max_num_seqs), num_sequences)
    # Steps until the longest response has ended, or until all sequences had their turn.
    longest = min(config.data.max_response_length, _LONGEST_FACTOR * lengths.response)
    num_steps = max(longest, num_sequences * lengths.response / num_running)
    num_new_tokens = num_sequences * lengths.response

    bandwidth = devices.bytes_per_s * efficiency.memory * group_size
    rate = devices.flops * efficiency.decoding * group_size
    prompt_tokens = num_prompts * lengths.prompt
    prefill = (
        forward_flops(sizes, prompt_tokens, num_prompts, prompt_tokens * lengths.prompt) / rate
    )
    token_bytes = cached_token_bytes(plan)
    measured = devices.layer_times.get(ACTOR)
    if measured is not None and measured.seconds("decode_step_s", sizes.num_layers):
        start_s = measured.seconds("generation_start_s", sizes.num_layers)
        steps_s = (num_steps - 1) * measured.seconds("decode_step_s", sizes.num_layers)
        # Longer responses than the measured ones read more of the KV cache.
        more_tokens = lengths.response / 2 - measured.num_new_tokens
        cache_s = num_new_tokens * more_tokens * token_bytes / devices.bytes_per_s
        return start_s + steps_s + cache_s, "decode steps"
    # Mean over the tokens of a response of the sequence's length so far.
    mean_length = lengths.prompt + lengths.response / 2
    parts = {
        "weights": num_steps * sizes.num_parameters * plan.itemsize / bandwidth,
        "products": num_new_tokens * forward_flops(sizes, 1, 1, 0) / rate,
        "KV cache": num_new_tokens * mean_length * token_bytes / bandwidth,
        "sampling": num_new_tokens * _SAMPLING_PASSES * 4.0 * sizes.vocabulary / bandwidth,
        "launches": num_steps * efficiency.decode_step_s,
    }
    limit = max(parts, key=lambda name: parts[name])
    return prefill + sum(parts.values()), limit
