# SPDX-License-Identifier: Apache-2.0
"""Predicts the memory of a trained role at its start.

The prediction chooses gradient checkpointing, and refuses a role that does not fit.
"""

import logging
from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from quadriga.config import Config, Layout
from quadriga.config.placement import (
    ACTOR,
    CRITIC,
    DISTILLATION,
    POLICIES,
    arranged_roles,
    enabled_roles,
    role_pools,
)
from quadriga.errors import ConfigError
from quadriga.models.load import load_config
from quadriga.planning.module_sizes import module_sizes
from quadriga.planning.phases import Phase, RolePlan, predict_phases
from quadriga.planning.sizes import ModelSizes

logger = logging.getLogger(__name__)
KEY = "trainer.check_memory"

# Shares of the device's memory. A predicted peak above the first one lets the role recompute
# activations, because holes of the allocator and CUDA's context need the rest. A peak above the
# second one is warned about. Only a peak above the third one is refused: predictions may be off.
_RECOMPUTE_SHARE = 0.9
_WARN_SHARE = 0.95
_REFUSE_SHARE = 1.15


@dataclass(frozen=True)
class MemoryChoice:
    """Choice of how a role saves memory, and its reason.

    Attributes:
        recomputes: whether activations are recomputed (gradient checkpointing).
        description: predicted peaks and the reason of the choice, to be printed; "" on a CPU.
    """

    recomputes: bool
    description: str = ""


def choose_memory(
    config: Config,
    role: str,
    model: PreTrainedModel,
    layout: Layout,
    dtype: torch.dtype,
    device: torch.device,
) -> MemoryChoice:
    """Choose whether a trained role recomputes activations, and check that its phases fit.

    Args:
        config: the configuration.
        role: key of the role's section.
        model: model of the role, which may be on "meta".
        layout: arrangement of the role's ranks.
        dtype: compute dtype.
        device: device of this rank.

    Returns:
        The choice. On a CPU nothing is predicted, and `auto` does not recompute.

    Raises:
        ConfigError: the phases do not fit, and `trainer.check_memory` is `refuse`.
    """
    section = config.critic.model if role == CRITIC else config.actor_rollout_ref.model
    setting = section.enable_gradient_checkpointing  # True, False or "auto"
    if device.type != "cuda":
        return MemoryChoice(setting is True)

    device_bytes = float(torch.cuda.mem_get_info(device)[1])
    # Predict `auto` without recomputation first.
    plan = RolePlan(module_sizes(model), layout, dtype.itemsize, recomputes=setting is True)
    if plan.unknown_part:
        return _choose_unpredicted(config, role, setting, plan, device_bytes)

    plans = {role: plan, **_plan_other_roles(config, role, dtype.itemsize)}
    predicted = predict_phases(config, plans, role, device_bytes)
    reason = "as configured"
    recomputes = plan.recomputes
    if setting == "auto":
        # Recomputing costs time, so it is chosen only if the activations would not fit.
        peak = max(phase.total for phase in predicted)
        recomputes = peak > _RECOMPUTE_SHARE * device_bytes
        reason = f"activations kept, the peak is {peak / 1e9:.3g} GB"
        plans[role] = replace(plan, recomputes=recomputes)
        predicted = predict_phases(config, plans, role, device_bytes)
    largest = max(predicted, key=lambda phase: phase.total)
    _check_peak(config, role, largest, device_bytes)

    state = "on" if recomputes else "off"
    texts = [phase.describe() for phase in predicted]
    texts.append(f"gradient checkpointing {state} ({reason}, of {device_bytes / 1e9:.3g} GB)")
    return MemoryChoice(recomputes, "; ".join(texts))


def _choose_unpredicted(
    config: Config, role: str, setting: bool | str, plan: RolePlan, device_bytes: float
) -> MemoryChoice:
    """Choose for a model or layout whose activations the formulas cannot predict.

    `auto` then recomputes activations, which is safe. Weights and optimizer alone are compared with
    the device's memory, for a warning.

    Args:
        config: the configuration.
        role: key of the role's section.
        setting: `enable_gradient_checkpointing` of the role.
        plan: plan of the role.
        device_bytes: memory of the device.
    """
    is_adapted = role == ACTOR and config.actor_rollout_ref.model.has_adapter
    # Unlike activations, the state of weights and optimizer has a known size for any model. 0: all
    # parameters count as outside of experts.
    state_bytes = plan.layout.state_bytes(
        0, plan.sizes.num_parameters, plan.itemsize, is_trained=not is_adapted
    )
    if not plan.layout.uses_megatron_modules and state_bytes >= _WARN_SHARE * device_bytes:
        _warn(config, f"weights and optimizer of {role} alone", state_bytes, device_bytes)
    recomputes = setting is not False
    state = "on" if recomputes else "off"
    reason = "as configured"
    if setting == "auto":
        reason = f"the memory of an update is not predicted for {plan.unknown_part}"
    return MemoryChoice(recomputes, f"gradient checkpointing {state} ({reason})")


def _plan_other_roles(config: Config, role: str, itemsize: int) -> dict[str, RolePlan]:
    """Plan the other roles on the devices of a role, because their state takes memory there, too.

    Args:
        config: the configuration.
        role: key of the role's section.
        itemsize: bytes per number of the compute dtype, assumed for all roles.

    Returns:
        The plans by the keys of the roles' sections. Roles whose sizes do not follow from their
        config.json are left out, with a warning.
    """
    # Roles in one pool share the devices of the pool.
    pools = role_pools(config.trainer, enabled_roles(config))
    pool_of_role = {
        ACTOR: next((pools[name] for name in POLICIES if name in pools), None),
        CRITIC: pools.get("critic"),
        "reward_model": pools.get("reward_model"),
        DISTILLATION: pools.get("teacher"),
    }
    has_critic = role == CRITIC or config.algorithm.adv_estimator == "gae"
    model = config.actor_rollout_ref.model
    paths = {
        ACTOR: model.path,
        CRITIC: config.critic.model.path or model.path,
        "reward_model": config.reward_model.model.path,
    }
    if config.distillation.enable:
        # Only the first teacher is counted.
        paths[DISTILLATION] = next(iter(config.distillation.loaded_teachers.values()), None)

    plans = {}
    for where, section, size in arranged_roles(config, has_critic=has_critic):
        path = paths.get(where)
        if where == role or not path or pool_of_role[where] != pool_of_role[role]:
            continue
        settings = config.actor_rollout_ref.actor.megatron_if_chosen
        # Do not load the model: its sizes follow from its config.json.
        text = load_config(path, trust_remote_code=model.trust_remote_code).to_dict()
        try:
            sizes = ModelSizes.from_config(text, path)
        except ConfigError as error:
            logger.warning("The memory of %s is not predicted, and counts as 0: %s", where, error)
            continue
        if where in (CRITIC, "reward_model"):
            sizes = sizes.with_value_head()
        plans[where] = RolePlan(sizes, section.layout(size, where, settings), itemsize)
    return plans


def _check_peak(config: Config, role: str, phase: Phase, device_bytes: float) -> None:
    """Warn about a phase that may not fit, and refuse a phase that cannot fit.

    Args:
        config: the configuration.
        role: key of the role's section.
        phase: the phase with the largest peak.
        device_bytes: memory of the device.

    Raises:
        ConfigError: the phase cannot fit, and `trainer.check_memory` is `refuse`.
    """
    share = phase.total / device_bytes
    if share < _WARN_SHARE or config.trainer.check_memory == "off":
        return
    if share <= _REFUSE_SHARE or config.trainer.check_memory == "warn":
        _warn(config, f"{role}, {phase.name}", phase.total, device_bytes)
        return
    raise ConfigError(
        role,
        got=f"{phase.describe()}, predicted on a device with {device_bytes / 1e9:.3g} GB",
        expected=f"at most {_REFUSE_SHARE:g} times the device's memory",
        fix="Lower ppo_max_token_len_per_gpu, train an adapter (lora_rank), let more ranks share "
        f"the weights (fsdp_size), or offload (param_offload, optimizer_offload). {KEY}=warn starts"
        " the run all the same.",
    )


def _warn(config: Config, where: str, num_bytes: float, device_bytes: float) -> None:
    """Log a warning about a predicted peak, unless `trainer.check_memory` is `off`.

    Args:
        config: the configuration.
        where: role and phase of the peak, for the message.
        num_bytes: the peak.
        device_bytes: memory of the device.
    """
    if config.trainer.check_memory == "off":
        return
    logger.warning(
        "%s: got a predicted peak of %.3g GB on a device with %.3g GB, expected at most %.3g GB. "
        "The run may end for lack of memory; docs/troubleshooting.md lists what lowers it.",
        where,
        num_bytes / 1e9,
        device_bytes / 1e9,
        _WARN_SHARE * device_bytes / 1e9,
    )
