# SPDX-License-Identifier: Apache-2.0
"""How an adapter gets to a rollout with a copy of the weights: merged into them, or alone and applied beside them."""

from dataclasses import dataclass

from quadriga.config.adapter import adapter_shape
from quadriga.config.findings import Findings
from quadriga.config.root import Config
from quadriga.errors import ConfigError

MAX_RANK = 512
"""The largest rank that vLLM applies beside the weights."""

_KEY = "actor_rollout_ref.model.lora_merge"
_NAME = "actor_rollout_ref.rollout.name"
_DECIDES = {
    "native": "on the actor's own modules it computes with the adapter beside the weights, on a copy with merged ones",
    "http": "its servers keep the weights that they have",
    "scripted": "it has no weights",
}
"""Engines for which the key decides nothing, and why."""


@dataclass(frozen=True)
class AdapterRoute:
    """Whether the adapter travels alone once the weights below it are there, and why, fit to be printed."""

    is_alone: bool
    reason: str


def adapter_route(config: Config, *, is_wide_on_accelerator: bool = False) -> AdapterRoute:
    """What holds for a run with an adapter.

    Args:
        config: of the run.
        is_wide_on_accelerator: whether the models compute in float32 there, which is known once a process has started.

    Raises:
        ConfigError: the engine cannot do what `lora_merge` asks for, or the adapter to start from cannot be read.
    """
    model, engine = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.name
    if model.lora_merge is not None and engine in _DECIDES:
        raise _refused(config, f"null: {_DECIDES[engine]}", "Leave the key out, or generate with vllm.")
    if model.lora_merge:
        return AdapterRoute(False, "lora_merge=true")
    if engine != "vllm":
        if model.lora_merge is not None:
            fix = "Leave the key out, and the adapter travels merged; vllm applies it beside the weights."
            raise _refused(config, "null or true: this engine takes whole weights only", fix)
        return AdapterRoute(False, f"{engine} takes whole weights only")
    reason = ""
    if (rank := adapter_shape(model).rank) > MAX_RANK:
        reason = f"vLLM applies ranks up to {MAX_RANK} beside the weights, and this one is {rank}"
    elif is_wide_on_accelerator:
        reason = "on an accelerator vLLM applies adapters of 16 bits only, and these weights are float32"
    if reason:
        if model.lora_merge is not None:
            raise _refused(config, f"null or true: {reason}", "Leave the key out, and the adapter travels merged.")
        return AdapterRoute(False, reason)
    return AdapterRoute(True, "vLLM applies it beside the weights")


def check_adapter_route(config: Config, found: Findings) -> None:
    """Refuses what the engine cannot do with the adapter."""
    is_told = any(problem.where == "actor_rollout_ref.model.lora_adapter_path" for problem in found.problems)
    if not config.actor_rollout_ref.model.has_adapter or is_told:
        return
    try:
        adapter_route(config)
    except ConfigError as problem:
        found.problems.append(problem)


def _refused(config: Config, expected: str, fix: str) -> ConfigError:
    merge, engine = config.actor_rollout_ref.model.lora_merge, config.actor_rollout_ref.rollout.name
    return ConfigError(_KEY, got=f"{str(merge).lower()}, with {_NAME}={engine}", expected=expected, fix=fix)
