# SPDX-License-Identifier: Apache-2.0
"""Plan of a run from its models' config.json: whether it fits, and how long a step takes."""

import json
import math
from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from quadriga.config import Config
from quadriga.config.explain import needs_old_log_prob_pass, needs_reference
from quadriga.config.placement import ACTOR, CRITIC, arranged_roles
from quadriga.errors import ConfigError
from quadriga.planning.devices import Devices
from quadriga.planning.phases import (
    LOG_PROBS,
    Lengths,
    Phase,
    RolePlan,
    copied_bytes,
    predict_phases,
    predict_separate_generation,
)
from quadriga.planning.sizes import ModelSizes
from quadriga.planning.time import (
    MEMORY_SHARE,
    PRODUCTS_SHARE,
    SOURCE_OF_SHARES,
    StepTime,
    step_time,
)

FITTING_SHARE = 0.95  # largest share of a device's memory that a fitting plan takes
_MAX_PER_NODE = 8  # devices of a machine
_BUDGET_UNIT = 1024  # tokens; budgets are multiples of it
_LARGEST_BUDGET = 1 << 20
_RECOMPUTES = "model.enable_gradient_checkpointing"
_NUM_LAYOUTS = 5  # layouts that are printed
_NUM_DEVICES = (2, 4, 8, 16, 32, 64)  # numbers of devices that are tried if nothing fits


@dataclass(frozen=True)
class Plan:
    """Prediction for a configuration on some devices.

    Attributes:
        config: the configuration, with a rank for each device.
        devices: the devices.
        roles: the trained roles, by the keys of their sections.
        phases: memory of each rank in the phases of the trained roles, and in generation on devices
            of its own.
        time: time of a step.
    """

    config: Config
    devices: Devices
    roles: dict[str, RolePlan]
    phases: list[Phase]
    time: StepTime

    @property
    def largest(self) -> Phase:
        """The phase of a trained role with the highest peak."""
        # Generation on devices of its own is left out: its engine takes the configured share, which
        # always fits.
        trained = [phase for phase in self.phases if phase.role in self.roles]
        return max(trained, key=lambda phase: phase.total)

    @property
    def fits(self) -> bool:
        """Whether the highest peak takes at most `FITTING_SHARE` of a device's memory."""
        return self.largest.total <= FITTING_SHARE * self.devices.memory_bytes

    def changed(self, config: Config, devices: Devices | None = None) -> "Plan":
        """Make the plan of another configuration, for the same models and lengths.

        Args:
            config: the other configuration, with a rank for each device.
            devices: the devices; None: those of this plan.
        """
        sizes = {key: role.sizes for key, role in self.roles.items()}
        actor = self.roles[ACTOR]
        assert actor.lengths is not None, "plans are made for lengths"
        return make_plan(config, devices or self.devices, actor.lengths, sizes, actor.itemsize)

    def with_role_values(self, config: Config, key: str, value: Any) -> Config:
        """Copy a configuration with another value for a key in the section of each trained role.

        Args:
            config: the configuration.
            key: dotted key, relative to the section of a role; or a key of its model, `model.NAME`.
            value: the value.
        """
        for role in self.roles:
            # `model` is beside the section of the actor, but inside that of the critic.
            section = role.removesuffix(".actor") if key.startswith("model.") else role
            config = with_value(config, f"{section}.{key}", value)
        return config


def with_value(section: Any, key: str, value: Any) -> Any:
    """Copy a section of the configuration with another value for a dotted key in it."""
    name, _, rest = key.partition(".")
    if rest:
        inner = getattr(section, name)
        assert isinstance(inner, BaseModel)
        value = with_value(inner, rest, value)
    return section.model_copy(update={name: value})


def on_devices(config: Config, devices: Devices) -> Config:
    """Copy a configuration with a rank for each device, on equal machines of up to `_MAX_PER_NODE`.

    Raises:
        ConfigError: machines of up to `_MAX_PER_NODE` devices cannot share them equally.
    """
    num_nodes = -(-devices.count // _MAX_PER_NODE)
    if devices.count % num_nodes:
        raise ConfigError(
            "--devices",
            got=f"{devices.count} devices",
            expected=f"up to {_MAX_PER_NODE}, or a number that {num_nodes} machines can share",
            fix="Name another number.",
        )
    if devices.count > 1:
        config = with_value(config, "trainer.backend", "ray")
    config = with_value(config, "trainer.nnodes", num_nodes)
    return with_value(config, "trainer.n_gpus_per_node", devices.count // num_nodes)


def read_sizes(file: Path, override: dict[str, Any]) -> ModelSizes:
    """Read the sizes of a model from its config.json.

    Args:
        file: the config.json.
        override: entries that replace those of the file.

    Raises:
        ConfigError: there is no such file, it is no JSON object, or it lacks sizes or the type.
    """
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(
            str(file),
            got=str(error),
            expected="the configuration of a model, as JSON",
            fix="Name the folder of a model in actor_rollout_ref.model.path.",
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(str(file), got=type(raw).__name__, expected="a JSON object")
    values = raw | override
    if not values.get("model_type"):
        raise ConfigError(
            str(file),
            got="no value",
            expected="model_type, such as qwen2",
            fix="Name a folder whose config.json is as transformers writes it.",
        )
    return ModelSizes.from_config(values, str(file))


def make_plan(
    config: Config,
    devices: Devices,
    lengths: Lengths,
    sizes: dict[str, ModelSizes],
    itemsize: int,
) -> Plan:
    """Predict memory and time of a configuration.

    Args:
        config: the configuration, with a rank for each device.
        devices: the devices.
        lengths: assumed mean lengths.
        sizes: models of the trained roles, by the keys of their sections.
        itemsize: bytes of a number of the dtype that computes.

    Raises:
        ConfigError: the formulas do not cover a model or a layout.
    """
    roles = plan_roles(config, devices, lengths, sizes, itemsize)
    predicted = []
    num_copied_bytes = copied_bytes(config, roles)
    has_log_prob_passes = needs_old_log_prob_pass(config) or needs_reference(config)
    for key in roles:
        for phase in predict_phases(config, roles, key, devices.memory_bytes):
            # A critic's pass for values has another name: it is part of every step.
            if not has_log_prob_passes and phase.name == LOG_PROBS:
                continue
            parts = dict(phase.parts)
            if devices.process_bytes:
                parts["Python and libraries"] = devices.process_bytes
            if num_copied_bytes:
                parts["copies to resume from"] = num_copied_bytes
            phase = replace(phase, parts=parts)
            predicted.append(phase)
    predicted += predict_separate_generation(config, devices.memory_bytes)
    return Plan(config, devices, roles, predicted, step_time(config, roles, devices, lengths))


def plan_roles(
    config: Config,
    devices: Devices,
    lengths: Lengths,
    sizes: dict[str, ModelSizes],
    itemsize: int,
) -> dict[str, RolePlan]:
    """Model and layout of each trained role, by the keys of their sections.

    The arguments are those of `make_plan`. Roles without an entry in `sizes` are left out.

    Raises:
        ConfigError: the formulas do not cover a model or a layout.
    """
    roles = {}
    settings = config.actor_rollout_ref.actor.megatron_if_chosen
    for key, section, num_ranks in arranged_roles(config, has_critic=CRITIC in sizes):
        # The role is not trained, or its section came before: the reference has the actor's.
        if key not in sizes:
            continue
        model = config.critic.model if key == CRITIC else config.actor_rollout_ref.model
        resident_factor = 1.0
        if key in devices.layer_times:
            resident_factor = devices.layer_times[key].resident_factor(sizes[key].num_layers)
        role_plan = RolePlan(
            sizes[key],
            section.layout(num_ranks, key, settings),
            itemsize,
            recomputes=model.enable_gradient_checkpointing is True,
            packed_itemsize=devices.packed_itemsize,
            lengths=lengths,
            resident_factor=resident_factor,
        )
        if role_plan.unknown_part:
            raise ConfigError(
                key,
                got=role_plan.unknown_part,
                expected="a dense decoder with gated MLPs, whose weights are replicated or sharded "
                "by fsdp_size",
                fix="There are no formulas for others: read `quadriga config explain`, which gives "
                "their weights and optimizer.",
            )
        roles[key] = role_plan
    return roles


def choose_recomputation(plan: Plan) -> Plan:
    """Decide `enable_gradient_checkpointing=auto` as a run decides it.

    Args:
        plan: the plan of the configuration, without recomputed activations where it says auto.

    Returns:
        The same plan, or one that recomputes activations.
    """
    config = plan.config
    # As in a run: only on an accelerator, and if the peak is above 90 % of its memory.
    if plan.devices.is_cpu or plan.largest.total <= 0.9 * plan.devices.memory_bytes:
        return plan
    if config.actor_rollout_ref.model.enable_gradient_checkpointing == "auto":
        config = with_value(config, f"actor_rollout_ref.{_RECOMPUTES}", True)
    if config.critic.model.enable_gradient_checkpointing == "auto":
        config = with_value(config, f"critic.{_RECOMPUTES}", True)
    return plan.changed(config)


def largest_budget(plan: Plan) -> int | None:
    """Find the largest `ppo_max_token_len_per_gpu` with which a plan fits.

    All trained roles get the same value, a multiple of `_BUDGET_UNIT`.

    Returns:
        The value, at most `_LARGEST_BUDGET`; None if even the longest sequence alone does not fit.
    """

    def fits(num_units: int) -> bool:
        budget = num_units * _BUDGET_UNIT
        config = plan.with_role_values(plan.config, "ppo_max_token_len_per_gpu", budget)
        return plan.changed(config).fits

    low = -(-_longest_sequence(plan) // _BUDGET_UNIT)
    if not fits(low):
        return None
    # Budgets fit up to a largest one. `bisect_left` finds the place of the first that does not fit,
    # which is the number of candidates that fit.
    candidates = range(low, _LARGEST_BUDGET // _BUDGET_UNIT + 1)
    num_fitting = bisect_left(candidates, True, key=lambda num_units: not fits(num_units))
    return (low + num_fitting - 1) * _BUDGET_UNIT


def _longest_sequence(plan: Plan) -> int:
    """Tokens of the longest sequence."""
    return plan.config.data.max_prompt_length + plan.config.data.max_response_length


def plan_layouts(plan: Plan) -> list[tuple[str, Plan]]:
    """Plan all layouts: each possible `fsdp_size`, with activations kept and recomputed.

    On a CPU `fsdp_size` stays, because only the layout of the plan has been measured.

    Args:
        plan: the plan whose other settings stay.

    Returns:
        Description and plan of each layout, the fastest first.
    """
    # Roles may have different numbers of ranks. The number of shards must divide each of them.
    num_ranks = math.gcd(*(role.layout.world_size for role in plan.roles.values()))
    shard_counts = [number for number in range(1, num_ranks + 1) if num_ranks % number == 0]
    if plan.devices.is_cpu:
        shard_counts = [plan.roles[ACTOR].layout.fsdp]
    candidates = []
    for num_shards in shard_counts:
        config = plan.with_role_values(plan.config, "fsdp_config.fsdp_size", num_shards)
        for recomputes in (False, True):
            state = "recomputed" if recomputes else "kept"
            candidate = plan.changed(plan.with_role_values(config, _RECOMPUTES, recomputes))
            candidates.append((f"fsdp_size={num_shards}, activations {state}", candidate))
    return sorted(candidates, key=lambda named_plan: named_plan[1].time.total)


def find_remedies(plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Find single changes with which a layout fits.

    Args:
        plan: a plan of which no layout fits.

    Yields:
        Description and plan of each change with which a layout fits, in the fastest such layout.
    """
    # Name, configuration and devices of each change. First those of single keys, in the order in
    # which they are printed.
    changes = []
    for key, value in (
        ("ppo_max_token_len_per_gpu", _longest_sequence(plan)),
        ("fsdp_config.optimizer_offload", True),
        ("fsdp_config.param_offload", True),
    ):
        config = plan.with_role_values(plan.config, key, value)
        changes.append((f"{key}={value}", config, plan.devices))
    for key, value in (("rollout.name", "vllm"), ("model.lora_rank", 16)):
        config = with_value(plan.config, f"actor_rollout_ref.{key}", value)
        changes.append((f"{key}={value}", config, plan.devices))
    # More devices of the same kind.
    for count in _NUM_DEVICES:
        if count > plan.devices.count and not plan.devices.is_cpu:
            devices = replace(plan.devices, count=count)
            name = f"--devices {count}x{devices.name}"
            changes.append((name, on_devices(plan.config, devices), devices))

    for name, config, devices in changes:
        for layout, candidate in plan_layouts(plan.changed(config, devices)):
            if candidate.fits:
                yield f"{name}, {layout}", candidate
                if devices != plan.devices:
                    # The changes left have even more devices, which fit too.
                    return
                break  # the other layouts of this change are slower


def describe_plan(plan: Plan, lengths: Lengths) -> Iterator[str]:
    """Describe a plan in lines of text.

    Args:
        plan: the plan.
        lengths: the mean lengths that the plan assumes.
    """
    devices = plan.devices
    yield (
        f"{devices.count} x {devices.name}: {devices.memory_bytes / 1e9:.3g} GB, "
        f"{devices.flops / 1e12:.3g} TFLOP/s, {devices.bytes_per_s / 1e9:.3g} GB/s "
        f"({devices.source})"
    )
    for role, role_plan in plan.roles.items():
        name = f"{role_plan.sizes.num_parameters / 1e6:.1f} M parameters"
        state = "recomputed" if role_plan.recomputes else "kept"
        yield f"{role}: {name}, {role_plan.layout.describe()}, activations {state}"
    # The memory of each phase, and the largest micro-batches.
    yield ""
    yield "Memory of each rank, GB"
    for phase in plan.phases:
        yield f"  {phase.role.rpartition('.')[2]}, {phase.describe()}"
    largest = plan.largest
    share = largest.total / devices.memory_bytes
    largest_part = max(largest.parts, key=lambda name: largest.parts[name])
    verdict = "fits" if plan.fits else "does not fit"
    yield f"  {verdict}: {share:.0%} of a device, limited by {largest_part} in {largest.name}"
    budget = largest_budget(plan)
    budget_text = "none fits" if budget is None else str(budget)
    yield f"  largest ppo_max_token_len_per_gpu that fits: {budget_text}"
    # The time of each phase.
    yield ""
    yield (
        f"Time of a step, s (prompts of {lengths.prompt:g} tokens, responses of "
        f"{lengths.response:g})"
    )
    for name, seconds in plan.time.phases.items():
        yield f"  {name:<22}{seconds:10.3g}"
    yield f"  {'all':<22}{plan.time.total:10.3g}, without grading and tools"
    slowest = max(plan.time.phases, key=lambda name: plan.time.phases[name])
    yield f"  limited by {slowest}; generation by {plan.time.limit_of_generation}"
    yield from _sources_of_time(plan)
    # Other layouts or, if none fits, other changes. Each has a name and a plan.
    yield ""
    yield "Layouts that fit, the fastest first"
    candidates = plan_layouts(plan)
    fitting = [(name, layout) for name, layout in candidates if layout.fits][:_NUM_LAYOUTS]
    if not fitting:
        name, smallest = min(candidates, key=lambda named_plan: named_plan[1].largest.total)
        yield f"  none; the smallest, {name}: {smallest.largest.describe()}"
        yield ""
        yield "Changes with which a layout fits"
        fitting = list(find_remedies(plan))
    for name, other in fitting:
        yield f"  {other.time.total:.3g} s, {other.largest.total / 1e9:.3g} GB: {name}"
    if not fitting:
        yield "  none alone of fewer tokens, offloading, vLLM, an adapter and more devices: take a"
        yield "  smaller model, or several of these"


def _sources_of_time(plan: Plan) -> Iterator[str]:
    """Describe where the predicted times come from: measured layers, or assumed efficiencies."""
    for role, times in plan.devices.layer_times.items():
        layer = times.layer
        text = f"an update {1e6 * layer.update_token_s:.3g} us a token"
        if layer.decode_step_s:
            text += f", a decode step {1e3 * layer.decode_step_s:.3g} ms"
        yield f"  measured for a layer of {role}: {text}"
    if not plan.devices.layer_times:
        yield (
            f"  assumed: {PRODUCTS_SHARE:.0%} of the products' peak, {MEMORY_SHARE:.0%} of the "
            f"bandwidth; {SOURCE_OF_SHARES}"
        )
