# SPDX-License-Identifier: Apache-2.0
"""Predicted time of each phase of a step.

    generation   prefill, then decode steps: each reads all weights and the KV cache, and computes
                 and samples one token of each sequence
    log-probs    2 operations for each parameter and token, and attention
    update       3 times a forward pass, or 4 with recomputed activations; with an adapter 2 or 3

Products reach a share of the peak of large matrices, memory a share of its bandwidth. These shares,
and the time to launch a decode step, are assumptions. On a CPU the layers of the models have been
measured instead, with the exchange between ranks (`Devices.layer_times`). Grading, tools and
environments are not predicted.

Legend: P prompt tokens, R response tokens, V vocabulary.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from quadriga.config import Config
from quadriga.config.explain import BatchPlan, needs_old_log_prob_pass, needs_reference
from quadriga.config.placement import ACTOR, CRITIC
from quadriga.planning.devices import Devices
from quadriga.planning.phases import (
    Lengths,
    RolePlan,
    adapter_rank,
    cached_token_bytes,
    inference_tokens,
    micro_batch_tokens,
    predict_update,
    trained_section,
)
from quadriga.planning.sizes import ModelSizes

_LONGEST_FACTOR = 2.0  # longest response of a step, relative to the mean
_SAMPLING_PASSES = 4  # how often sampling reads or writes each float32 logit


# Shares of a device's peak performance that phases reach, where they are not measured.
PRODUCTS_SHARE = 0.5  # of products, in all phases
MEMORY_SHARE = 0.7  # of the memory's bandwidth, in decode steps
_DECODE_STEP_S = 1.6e-3  # seconds of a decode step besides reading and computing
SOURCE_OF_SHARES = (
    "updates and decode steps of a 1.5B model on an H100 (docs/evidence/performance.md)"
)


@dataclass(frozen=True)
class StepTime:
    """Predicted time of a step.

    Attributes:
        phases: seconds by name of the phase.
        limit_of_generation: what takes most of the time of generation.
    """

    phases: Mapping[str, float]
    limit_of_generation: str

    @property
    def total(self) -> float:
        """Seconds of all phases together."""
        return sum(self.phases.values())


@dataclass(frozen=True)
class _Passes:
    """Times of passes over the sequences of a step that one rank computes.

    Attributes:
        config: the configuration.
        plans: the trained roles, by the keys of their sections.
        devices: the devices, which all roles share.
        lengths: assumed mean lengths.
    """

    config: Config
    plans: Mapping[str, RolePlan]
    devices: Devices
    lengths: Lengths

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
        """Seconds of a role's pass without gradients, over all sequences of the rank."""
        plan = self.plans[role]
        if role in self.devices.layer_times:
            most_tokens = inference_tokens(self.config, role, plan)
            return self._measured_s(role, "forward", 1, most_tokens)
        # A critic has no vocabulary head.
        num_predicted = self.num_sequences * self.lengths.response if role == ACTOR else 0.0
        # Sum of the squared lengths of sequences.
        squares = self.num_sequences * (self.lengths.prompt + self.lengths.response) ** 2
        flops = forward_flops(plan.sizes, self.num_tokens, num_predicted, squares)
        return flops / (self.devices.flops * PRODUCTS_SHARE)

    def update_s(self, role: str) -> float:
        """Seconds of all epochs of a role's update, with the exchange between ranks."""
        plan = self.plans[role]
        section = trained_section(self.config, role)
        num_passes = update_passes(self.config, role, recomputes=plan.recomputes)
        measured = self.devices.layer_times.get(role)
        if measured is None:
            epoch_s = num_passes * self.forward_s(role) + _exchange_s(plan, self.devices)
            return epoch_s * section.ppo_epochs
        # The plan may recompute activations or have an adapter where the measured layers did not:
        # the difference is counted in forward passes.
        epoch_s = (num_passes - measured.num_passes) * self.forward_s(role)
        num_steps = BatchPlan(self.config).num_mini_batches
        most_tokens = micro_batch_tokens(self.config, role, plan)
        epoch_s += self._measured_s(role, "update", num_steps, most_tokens)
        epoch_s += num_steps * measured.seconds("optimizer_s", plan.sizes.num_layers)
        # Between phases freed memory is returned to the system, so an update has to map new memory.
        memory = predict_update(self.config, role, plan)
        new_bytes = (memory.activations + memory.working) * plan.resident_factor
        return epoch_s * section.ppo_epochs + new_bytes / self.devices.new_bytes_per_s

    def _measured_s(self, role: str, name: str, num_parts: int, most_tokens: int) -> float:
        """Seconds of measured passes over all tokens.

        Args:
            role: key of the role's section.
            name: "forward" or "update".
            num_parts: number of equal parts of the tokens, such as mini-batches, each of which is
                divided into micro-batches of its own.
            most_tokens: tokens of the largest micro-batch.
        """
        times = self.devices.layer_times[role]
        num_layers = self.plans[role].sizes.num_layers
        num_batches = num_parts * math.ceil(self.num_tokens / num_parts / most_tokens)
        calls_s = num_batches * times.seconds(f"{name}_call_s", num_layers)
        return calls_s + self.num_tokens * times.seconds(f"{name}_token_s", num_layers)


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
    passes = _Passes(config, plans, devices, lengths)
    actor = plans[ACTOR]
    generation_s, limit = _predict_generation_s(config, actor, devices, lengths)
    phases = {"generation": generation_s}
    if needs_old_log_prob_pass(config):
        phases["old log-probs"] = passes.forward_s(ACTOR)
    if needs_reference(config):
        phases["reference"] = passes.forward_s(ACTOR)
    phases["update"] = passes.update_s(ACTOR)
    if CRITIC in plans:
        phases["values"] = passes.forward_s(CRITIC)
        phases["update of the critic"] = passes.update_s(CRITIC)
    # A rollout that computes with the actor's own weights needs no weight sync.
    if not actor.layout.is_whole or config.async_training.enable:
        weight_bytes = actor.sizes.num_parameters * actor.itemsize
        phases["weight sync"] = weight_bytes / devices.link_bytes_per_s
        if ACTOR in devices.layer_times:
            publish_s = devices.layer_times[ACTOR].seconds("publish_s", actor.sizes.num_layers)
            phases["weight sync"] = publish_s
    return StepTime(phases, limit)


def forward_flops(
    sizes: ModelSizes, num_tokens: float, num_predicted: float, squares: float
) -> float:
    """Floating-point operations of a forward pass; see `quadriga.models.flops.ModelCost`.

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
    """Seconds in which ranks sum gradients and gather weights, as if nothing overlapped with it."""
    if devices.count == 1:
        return 0.0
    # Gradients are summed in float32.
    num_bytes = plan.sizes.num_parameters * 4.0
    if not plan.layout.is_whole:
        # Weights are gathered before the forward and before the backward pass.
        num_bytes += 2 * plan.sizes.num_parameters * plan.itemsize
    return num_bytes / devices.link_bytes_per_s


def _predict_generation_s(
    config: Config, plan: RolePlan, devices: Devices, lengths: Lengths
) -> tuple[float, str]:
    """Predict the time of generation.

    Args:
        config: the configuration.
        plan: model and ranks of the actor.
        devices: the devices.
        lengths: assumed mean lengths.

    Returns:
        Seconds, and the part of the decode steps that takes most of them, such as "KV cache". Of
        measured decode steps the parts are not known: "decode steps".
    """
    sizes = plan.sizes
    rollout = config.actor_rollout_ref.rollout
    group_size = rollout.tensor_model_parallel_size
    num_engines = max(1, devices.count // group_size)
    batch = BatchPlan(config)
    # The numbers below are those of one engine.
    num_sequences = batch.num_sequences / num_engines
    num_prompts = batch.num_prompts / num_engines
    num_running = min(float(rollout.max_num_seqs), num_sequences)
    num_new_tokens = num_sequences * lengths.response
    # Decode steps until the longest response has ended, or if not all sequences run at once, until
    # all had their turn.
    longest = min(config.data.max_response_length, _LONGEST_FACTOR * lengths.response)
    num_steps = max(longest, num_new_tokens / num_running)
    # Tokens of a sequence that a decode step reads from the KV cache, in the mean over a response.
    mean_length = lengths.prompt + lengths.response / 2
    token_bytes = cached_token_bytes(plan)

    measured = devices.layer_times.get(ACTOR)
    if measured is not None and measured.seconds("decode_step_s", sizes.num_layers):
        start_s = measured.seconds("generation_start_s", sizes.num_layers)
        steps_s = (num_steps - 1) * measured.seconds("decode_step_s", sizes.num_layers)
        # Longer sequences than the measured ones read more of the KV cache, shorter ones less.
        more_tokens = mean_length - measured.num_context_tokens
        cache_s = num_new_tokens * more_tokens * token_bytes / devices.bytes_per_s
        return start_s + steps_s + cache_s, "decode steps"

    bandwidth = devices.bytes_per_s * MEMORY_SHARE * group_size
    rate = devices.flops * PRODUCTS_SHARE * group_size
    prompt_tokens = num_prompts * lengths.prompt
    prefill_flops = forward_flops(sizes, prompt_tokens, num_prompts, prompt_tokens * lengths.prompt)
    parts = {
        "weights": num_steps * sizes.num_parameters * plan.itemsize / bandwidth,
        "products": num_new_tokens * forward_flops(sizes, 1, 1, 0) / rate,
        "KV cache": num_new_tokens * mean_length * token_bytes / bandwidth,
        "sampling": num_new_tokens * _SAMPLING_PASSES * 4.0 * sizes.vocabulary / bandwidth,
        "launches": num_steps * _DECODE_STEP_S,
    }
    limit = max(parts, key=lambda name: parts[name])
    return prefill_flops / rate + sum(parts.values()), limit
