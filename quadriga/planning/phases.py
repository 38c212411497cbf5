# SPDX-License-Identifier: Apache-2.0
"""Predicted memory of each phase of a step, on one rank.

    generation    training state that stays, weights of the rollout, KV cache, one pass of prefill
    log-probs     weights, moments unless they are offloaded, one pass without gradients
    update        see planning/memory.py
    weight sync   state as in log-probs, weights of the rollout, buckets, the largest tensor

Each phase also includes the tensors that other roles on the same device hold between their phases,
and on a CPU the memory of Python and its libraries (`Devices.process_bytes`).

Legend: N packed tokens, D hidden size, F width of the MLP, Q and K numbers of a token's queries and
keys, V vocabulary.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from quadriga.config import Config
from quadriga.config.actor import ActorConfig, CriticConfig
from quadriga.config.adapter import adapter_shape
from quadriga.config.explain import BatchPlan, needs_reference
from quadriga.config.layout import Layout
from quadriga.config.placement import (
    ACTOR,
    CRITIC,
    DISTILLATION,
    enabled_roles,
    has_shards,
    role_pools,
    rollout_group_size,
    rollout_share,
)
from quadriga.config.rollout import ROLLOUT
from quadriga.planning.memory import (
    UpdateMemory,
    UpdateShape,
    forward_bytes,
    trained_parameters,
    update_memory,
)
from quadriga.planning.sizes import ModelSizes

GENERATION = "generation"
LOG_PROBS = "log-probs"
UPDATE = "update"
WEIGHT_SYNC = "weight sync"

_NUM_COPIES = 2  # copies of the training state, of which one is complete while the other is made
_CACHE_SHARE = 0.7  # largest share of the free memory that the KV cache of `native` takes


@dataclass(frozen=True)
class Lengths:
    """Assumed mean lengths, in tokens.

    Attributes:
        prompt: P.
        response: R.
    """

    prompt: float
    response: float


@dataclass(frozen=True)
class RolePlan:
    """Model and ranks of a role.

    Attributes:
        sizes: the model.
        layout: arrangement of the ranks.
        itemsize: bytes of a number of the dtype that computes.
        recomputes: whether activations are recomputed.
        packed_itemsize: bytes of a number in the copy of the layers' weights that the rollout packs
            for products on a CPU; 0 on an accelerator.
        lengths: mean lengths. A mean response of the largest length means that all have it, so the
            division into micro-batches is known. None: any lengths within the limits.
        resident_factor: see `quadriga.planning.devices.LayerTimes.resident_factor`.
    """

    sizes: ModelSizes
    layout: Layout
    itemsize: int = 2
    recomputes: bool = False
    packed_itemsize: int = 0
    lengths: Lengths | None = None
    resident_factor: float = 1.0

    @property
    def is_on_cpu(self) -> bool:
        """Whether a CPU computes."""
        return self.packed_itemsize > 0

    @property
    def unknown_part(self) -> str:
        """A part of the model or layout that the formulas do not cover; "" if they cover all."""
        layout = self.layout
        if layout.uses_megatron_modules or (layout.pp, layout.tp, layout.sp) != (1, 1, 1):
            return layout.describe()
        return self.sizes.unknown_part


@dataclass(frozen=True)
class Phase:
    """Predicted memory of a phase on one rank.

    Attributes:
        role: key of the role's section.
        name: name of the phase.
        parts: bytes by purpose, at the peak.
        moment: moment of the peak in an update; else "".
    """

    role: str
    name: str
    parts: Mapping[str, float]
    moment: str = ""

    @property
    def total(self) -> float:
        """All bytes at the peak."""
        return sum(self.parts.values())

    def describe(self) -> str:
        """Format name, size, and the parts of at least a hundredth of the size, largest first."""
        sorted_parts = sorted(self.parts.items(), key=lambda part: -part[1])
        large_parts = []
        for name, num_bytes in sorted_parts:
            if num_bytes >= self.total / 100:
                large_parts.append(f"{name} {num_bytes / 1e9:.3g}")
        name = f"{self.name}, {self.moment}" if self.moment else self.name
        return f"{name}: {self.total / 1e9:.3g} GB ({', '.join(large_parts)})"


def micro_batch_tokens(config: Config, role: str, plan: RolePlan) -> int:
    """Number of tokens in the largest possible micro-batch of an update.

    Args:
        config: the configuration.
        role: key of the role's section.
        plan: model and ranks of the role.
    """
    section = trained_section(config, role)
    if section.ppo_micro_batch_size_per_gpu and not section.use_dynamic_bsz:
        longest = config.data.max_prompt_length + config.data.max_response_length
        return section.ppo_micro_batch_size_per_gpu * longest
    num_prompts = min(section.ppo_mini_batch_size, config.data.train_batch_size)
    return _pass_tokens(config, plan, section.ppo_max_token_len_per_gpu, num_prompts)


def inference_tokens(config: Config, role: str, plan: RolePlan) -> int:
    """Number of tokens in the largest micro-batch of a pass for log-probs or values.

    Args:
        config: the configuration.
        role: key of the role's section.
        plan: model and ranks of the role.
    """
    # The critic has one limit for both kinds of passes.
    limit = config.critic.ppo_max_token_len_per_gpu
    if role == ACTOR:
        limit = config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu
    return _pass_tokens(config, plan, limit, config.data.train_batch_size)


def _pass_tokens(config: Config, plan: RolePlan, limit: int, num_prompts: int) -> int:
    """Number of tokens in the largest micro-batch, where micro-batches are cut by tokens.

    It is below the limit if a rank does not have as many tokens, or if equal sequences do not fill
    it.

    Args:
        config: the configuration.
        plan: model and ranks of the role.
        limit: most tokens of a micro-batch.
        num_prompts: prompts whose responses all ranks divide into micro-batches.
    """
    response = config.data.max_response_length
    # A sequence that is longer than the limit is alone in its micro-batch.
    limit = max(limit, config.data.max_prompt_length + response)
    if not _is_single_turn(config):
        # A rollout may have any number of sequences, so there is no other limit.
        return limit
    # Sequences of one rank, and prompts that it computes for them.
    num_sharing = config.actor_rollout_ref.rollout.n  # responses that may share a prompt
    num_sequences = -(-num_prompts * num_sharing // plan.layout.world_size)
    if config.actor_rollout_ref.actor.use_prefix_sharing:
        # In the worst case the sequences of the rank are of different prompts.
        num_prompts = min(num_sequences, num_prompts)
    else:
        num_sharing = 1
        num_prompts = num_sequences
    most_tokens = num_prompts * config.data.max_prompt_length + num_sequences * response
    if plan.lengths is None or plan.lengths.response < response:
        return min(limit, most_tokens)

    # All sequences have the same length, so the division by `quadriga.engines.batches` is known.
    # The responses to a prompt stay together if they fit, else they are divided into units of
    # `num_together` and a rest. Micro-batches are as few and as even as possible.
    prompt = round(plan.lengths.prompt)
    num_together = min(num_sharing, (limit - prompt) // response)
    unit = prompt + num_together * response
    num_left = num_sharing % num_together
    if num_left:
        # A micro-batch may have both kinds. For each number of units (the largest first), `rooms` has
        # the tokens that they leave of the limit. As many rests as fit fill a room, so `room % rest`
        # tokens stay free. The largest micro-batch has the fewest free tokens.
        rest = prompt + num_left * response
        rooms = range(limit % unit, limit + 1, unit)
        return min(limit - min(room % rest for room in rooms), most_tokens)
    num_units = -(-num_sequences // num_together)
    num_batches = -(-num_units // (limit // unit))
    return -(-num_units // num_batches) * unit


def _is_single_turn(config: Config) -> bool:
    """Whether every rollout is one prompt with one response."""
    rollout = config.actor_rollout_ref.rollout
    may_take_turns = rollout.agent.agent_loop_path is not None or rollout.multi_turn.enable
    return config.task == "rl" and config.env.name is None and not may_take_turns


def predict_update(
    config: Config, role: str, plan: RolePlan, num_tokens: int | None = None
) -> UpdateMemory:
    """Predict the peak of an update of a role.

    Args:
        config: the configuration.
        role: key of the role's section.
        plan: model and ranks of the role.
        num_tokens: tokens of the largest micro-batch; None: as many as the configuration allows.
    """
    if num_tokens is None:
        num_tokens = micro_batch_tokens(config, role, plan)
    return update_memory(plan.sizes, _shape(config, role, plan, num_tokens))


def _shape(config: Config, role: str, plan: RolePlan, num_tokens: int) -> UpdateShape:
    """Conditions of a role's update, or pass without gradients, with so many tokens at a time."""
    # Prompts may be short, so that nearly all tokens are predicted ones: M = N.
    return UpdateShape(
        num_tokens=num_tokens,
        num_predicted=num_tokens,
        itemsize=plan.itemsize,
        recomputes=plan.recomputes,
        num_shards=plan.layout.fsdp,
        adapter_rank=adapter_rank(config, role),
        has_head=role == ACTOR,
        is_on_cpu=plan.is_on_cpu,
    )


def describe_update(config: Config, role: str, plan: RolePlan) -> str:
    """Describe the predicted peaks of an update on an accelerator in bfloat16.

    Args:
        config: the configuration.
        role: key of the role's section.
        plan: model and ranks of the role.
    """
    if plan.unknown_part:
        return f"the memory of an update is not predicted for {plan.unknown_part}"
    num_tokens = micro_batch_tokens(config, role, plan)
    totals = []
    for recomputes in (False, True):
        totals.append(predict_update(config, role, replace(plan, recomputes=recomputes)).total)
    return (
        f"on an accelerator in bfloat16 an update of {num_tokens} tokens takes up to "
        f"{totals[0] / 1e9:.3g} GB, with enable_gradient_checkpointing {totals[1] / 1e9:.3g} GB"
    )


def describe_rollout(config: Config, plan: RolePlan) -> str:
    """Describe the memory of a rollout beside training on accelerators.

    "" if it takes none, or has devices of its own.

    Args:
        config: the configuration.
        plan: model and ranks of the actor.
    """
    pools = role_pools(config.trainer, enabled_roles(config))
    num_bytes = _rollout_weights(config, plan)
    if config.task != "rl" or pools.get("rollout") != pools.get("actor") or not num_bytes:
        return ""
    memory = f"its own copy of the weights takes {num_bytes / 1e9:.3g} GB"
    if _reserves_memory(config):
        memory = f"the rollout takes {rollout_share(config):g} of the device"
    memory_in_training = "as much while the models train (free_cache_engine=false)"
    if config.actor_rollout_ref.rollout.free_cache_engine:
        memory_in_training = "none while the models train"
    return f"on an accelerator {memory} while it generates, and {memory_in_training}"


def predict_phases(
    config: Config, plans: Mapping[str, RolePlan], role: str, device_bytes: float
) -> list[Phase]:
    """Predict the phases of a trained role.

    For the actor these are generation and weight sync, if the rollout takes memory of the same
    devices, log-probs and the update; for a critic values and the update.

    Args:
        config: the configuration.
        plans: all roles that share the devices, by the keys of their sections.
        role: key of the section of the trained role.
        device_bytes: memory of the device.

    Returns:
        The phases, in the order in which a step has them.
    """
    plan = plans[role]
    update = predict_update(config, role, plan)
    has_policy = ACTOR in plans and config.task == "rl"

    # Bytes of tensors that other roles have on the device at any time, by purpose.
    other_bytes = {}
    for other_role, other_plan in plans.items():
        if other_role != role:
            name = other_role.rpartition(".")[2]
            other_bytes[f"{name} at rest"] = _bytes_between_phases(config, other_role, other_plan)
    if has_policy:
        other_bytes["reference"] = _reference_bytes(config, plans[ACTOR])
    # The same in passes and updates, in which the rollout may keep memory on the device, too.
    other_bytes_in_training = dict(other_bytes)
    pools = role_pools(config.trainer, enabled_roles(config))
    # In a pool of its own the rollout takes no memory of the actor's devices.
    shares_devices = has_policy and pools.get("rollout") == pools.get("actor")
    if shares_devices:
        rollout_bytes = _rollout_bytes_while_training(config, plans[ACTOR], device_bytes)
        other_bytes_in_training["rollout"] = rollout_bytes

    predicted = []
    if role == ACTOR and shares_devices:
        predicted.append(_predict_generation(config, plan, other_bytes, device_bytes))

    # The pass for log-probs or values.
    section = trained_section(config, role)
    shape = _shape(config, role, plan, inference_tokens(config, role, plan))
    activations = forward_bytes(plan.sizes, shape)
    # Offloaded moments are on the device during updates only.
    optimizer = 0.0 if section.fsdp_config.optimizer_offload else update.optimizer
    parts = {
        "weights": update.weights,
        "optimizer": optimizer,
        "activations": activations,
        **other_bytes_in_training,
    }
    if plan.is_on_cpu:
        parts["gradients"] = _kept_gradients(config, role, plan)
    predicted.append(Phase(role, LOG_PROBS if role == ACTOR else "values", parts))

    parts = {
        "weights": update.weights,
        "optimizer": update.optimizer,
        "gradients": update.gradients,
        "activations": update.activations,
        update.working_name: update.working,
        **other_bytes_in_training,
    }
    # On a CPU the memory of the process grows by more than the tensors that exist at once.
    kept_bytes = (plan.resident_factor - 1.0) * (update.activations + update.working)
    if kept_bytes:
        parts["freed tensors that the C library keeps"] = kept_bytes
    predicted.append(Phase(role, UPDATE, parts, update.moment))

    if role == ACTOR and shares_devices and _rollout_weights(config, plan):
        state_bytes = update.weights + optimizer
        # An engine in the same process copies weights tensor by tensor, without buckets.
        bucket = 0.0
        rollout = config.actor_rollout_ref.rollout
        if rollout.traits.computes_in != "caller" or has_shards(config):
            bucket = float(rollout.update_weights_bucket_megabytes << 20)
        parts = {
            "training state": max(_bytes_between_phases(config, role, plan), state_bytes),
            "weights of the rollout": _rollout_weights(config, plan),
            # One bucket is filled while the other is sent.
            "buckets": 2 * bucket,
            "largest tensor": float(plan.sizes.table_parameters * plan.itemsize),
            **other_bytes,
        }
        predicted.append(Phase(role, WEIGHT_SYNC, parts))
    return predicted


def predict_separate_generation(config: Config, device_bytes: float) -> list[Phase]:
    """Predict the phases of devices on which no role trains.

    Args:
        config: the configuration.
        device_bytes: memory of the device.

    Returns:
        The phase of generation, if the rollout has devices of its own and reserves a share of their
        memory at its start; otherwise no phase.
    """
    pools = role_pools(config.trainer, enabled_roles(config))
    has_own_devices = config.task == "rl" and pools.get("rollout") != pools.get("actor")
    if not has_own_devices or not _reserves_memory(config):
        return []
    parts = {"rollout": rollout_share(config) * device_bytes}
    return [Phase(ROLLOUT, GENERATION, parts)]


def copied_bytes(config: Config, plans: Mapping[str, RolePlan]) -> float:
    """Bytes of the copies of the training state that a rank maps on a CPU (`trainer.state_copies`).

    0 if the run makes none, or if an accelerator trains: its copies are not on the device.

    Args:
        config: the configuration.
        plans: all roles that share the devices, by the keys of their sections.
    """
    trainer = config.trainer
    if trainer.backend != "ray" or not trainer.state_copies or config.async_training.enable:
        return 0.0
    num_bytes = 0.0
    for role, plan in plans.items():
        if plan.is_on_cpu and role in (ACTOR, CRITIC):
            num_trained = trained_parameters(plan.sizes, adapter_rank(config, role))
            # Masters and moments in float32. The ranks divide them.
            num_bytes += _NUM_COPIES * 12.0 * num_trained / plan.layout.world_size
    return num_bytes


def trained_section(config: Config, role: str) -> ActorConfig | CriticConfig:
    """Section of a trained role, by its key: `ACTOR` or `CRITIC`."""
    return config.critic if role == CRITIC else config.actor_rollout_ref.actor


def adapter_rank(config: Config, role: str) -> int:
    """Rank of the adapter of a role; 0 if all weights are trained."""
    model = config.actor_rollout_ref.model
    return adapter_shape(model).rank if role == ACTOR and model.has_adapter else 0


def _bytes_between_phases(config: Config, role: str, plan: RolePlan) -> float:
    """Bytes that a role keeps on the device between its phases."""
    # Roles that are not trained have only weights.
    frozen_roles = {
        "reward_model": config.reward_model.fsdp_config,
        DISTILLATION: config.distillation.fsdp_config,
    }
    if role in frozen_roles:
        weights = plan.sizes.num_parameters * plan.itemsize / plan.layout.fsdp
        return 0.0 if frozen_roles[role].param_offload else weights
    update = predict_update(config, role, plan)
    fsdp = trained_section(config, role).fsdp_config
    num_bytes = 0.0
    if not fsdp.param_offload:
        num_bytes += update.weights
    elif role == ACTOR and config.task == "rl" and not _rollout_weights(config, plan):
        # The masters are offloaded. The rollout computes with the actor's own weights, which stay.
        num_bytes += plan.sizes.num_parameters * plan.itemsize
    if not fsdp.optimizer_offload:
        num_bytes += update.optimizer
    return num_bytes + _kept_gradients(config, role, plan)


def _kept_gradients(config: Config, role: str, plan: RolePlan) -> float:
    """Bytes of the float32 buffers of gradient sums that a role keeps between updates."""
    if plan.is_on_cpu and plan.itemsize == 4:
        # There are no such buffers: the parameters are the masters, whose gradients are dropped.
        return 0.0
    # `grad_offload` frees the buffers instead of moving them.
    frees_gradients = trained_section(config, role).fsdp_config.grad_offload
    if frees_gradients is None:  # the default of `grad_offload`
        frees_gradients = not plan.is_on_cpu
    return 0.0 if frees_gradients else predict_update(config, role, plan).gradients


def _reference_bytes(config: Config, plan: RolePlan) -> float:
    """Bytes that the reference keeps on the device."""
    # With an adapter the reference is the actor with the adapter switched off.
    if not needs_reference(config) or config.actor_rollout_ref.model.has_adapter:
        return 0.0
    # null stands for offloading here: the reference shares the actor's devices.
    if config.actor_rollout_ref.ref.fsdp_config.param_offload is not False:
        return 0.0
    return plan.sizes.num_parameters * plan.itemsize / plan.layout.fsdp


def _rollout_weights(config: Config, plan: RolePlan) -> float:
    """Bytes of the rollout's own weights on the device; 0 if it computes with the actor's."""
    rollout = config.actor_rollout_ref.rollout
    computes_in = rollout.traits.computes_in
    if computes_in == "servers" or (computes_in == "caller" and plan.layout.is_whole):
        return 0.0
    return plan.sizes.num_parameters * plan.itemsize / rollout_group_size(config)


def _rollout_bytes_while_training(config: Config, plan: RolePlan, device_bytes: float) -> float:
    """Bytes that the rollout keeps on the device while the models train."""
    rollout = config.actor_rollout_ref.rollout
    if rollout.traits.computes_in == "caller":
        weights = _rollout_weights(config, plan)
        if not rollout.free_cache_engine:
            return weights + _packed_bytes(config, plan)
        # With `free_cache_engine` the engine frees its copy, but only on an accelerator.
        return weights if plan.is_on_cpu else 0.0
    if rollout.free_cache_engine or not _reserves_memory(config):
        return 0.0
    return rollout_share(config) * device_bytes


def _reserves_memory(config: Config) -> bool:
    """Whether the rollout reserves a share of the device's memory at its start."""
    rollout = config.actor_rollout_ref.rollout
    reads_keys = rollout.traits.reads_keys
    return "gpu_memory_utilization" in reads_keys and rollout.traits.computes_in != "servers"


def _predict_generation(
    config: Config, plan: RolePlan, other_bytes: Mapping[str, float], device_bytes: float
) -> Phase:
    """Predict the phase in which the rollout generates on the actor's devices.

    Args:
        config: the configuration.
        plan: model and ranks of the actor.
        other_bytes: bytes of other roles on the device.
        device_bytes: memory of the device.
    """
    rollout = config.actor_rollout_ref.rollout
    parts = {"training state": _bytes_between_phases(config, ACTOR, plan), **other_bytes}
    if rollout.traits.computes_in != "caller":
        if _reserves_memory(config):
            parts["rollout"] = rollout_share(config) * device_bytes
        return Phase(ACTOR, GENERATION, parts)
    parts["weights of the rollout"] = _rollout_weights(config, plan) + _packed_bytes(config, plan)
    batch = BatchPlan(config)
    # Tokens of a pass of prefill.
    num_tokens = rollout.max_num_batched_tokens
    if _is_single_turn(config):
        num_tokens = min(num_tokens, batch.num_prompts * config.data.max_prompt_length)
    shape = UpdateShape(num_tokens, num_predicted=0, itemsize=plan.itemsize, has_head=False)
    parts["working memory"] = forward_bytes(plan.sizes, shape)
    # Logits of one token of each sequence, in float32.
    num_running = min(rollout.max_num_seqs, batch.num_sequences)
    parts["working memory"] += 4.0 * num_running * plan.sizes.vocabulary
    parts["KV cache"] = cache_bytes(config, plan)
    # Without a given size the engine takes at most a share of what everything else leaves.
    if rollout.cache_gigabytes is None and not plan.is_on_cpu:
        free_bytes = max(0.0, device_bytes - sum(parts.values()) + parts["KV cache"])
        parts["KV cache"] = min(parts["KV cache"], _CACHE_SHARE * free_bytes)
    return Phase(ACTOR, GENERATION, parts)


def _packed_bytes(config: Config, plan: RolePlan) -> float:
    """Bytes of the copies of weights that the rollout makes on a CPU while it generates."""
    if not plan.is_on_cpu or not config.actor_rollout_ref.rollout.traits.packs_weights:
        return 0.0
    # The head computes in float32. Layers with an adapter are not packed.
    num_bytes = 4.0 * plan.sizes.table_parameters
    if not adapter_rank(config, ACTOR):
        num_bytes += float(plan.packed_itemsize) * plan.sizes.matrix_parameters
    return num_bytes / rollout_group_size(config)


def cached_token_bytes(plan: RolePlan) -> float:
    """Bytes of a token in the KV cache."""
    # A key and a value in each layer, on a CPU in float32.
    itemsize = 4 if plan.is_on_cpu else plan.itemsize
    return 2.0 * plan.sizes.num_layers * plan.sizes.keys * itemsize


def cache_bytes(config: Config, plan: RolePlan) -> float:
    """Bytes of one rank's KV cache in which all concurrent sequences have their full length.

    If `rollout.cache_gigabytes` is given, it is that size.
    """
    rollout = config.actor_rollout_ref.rollout
    if rollout.cache_gigabytes is not None:
        return rollout.cache_gigabytes * (1 << 30)
    batch = BatchPlan(config)
    num_ranks = plan.layout.world_size
    num_engines = max(1, num_ranks // rollout_group_size(config))
    num_sequences = min(rollout.max_num_seqs, -(-batch.num_sequences // num_engines))
    token_bytes = cached_token_bytes(plan)
    # The ranks of a group divide the key-value heads; at least one remains for each rank.
    token_bytes /= min(rollout_group_size(config), plan.sizes.keys // plan.sizes.head_size)
    return num_sequences * batch.max_sequence_tokens * token_bytes
