# SPDX-License-Identifier: Apache-2.0
"""Checks of the adapter, before a process starts."""

from importlib.util import find_spec
from pathlib import Path

from quadriga.config.adapter import read_adapter
from quadriga.config.findings import Findings
from quadriga.config.root import Config
from quadriga.errors import ConfigError

_MODEL = "actor_rollout_ref.model"
_ACTOR = "actor_rollout_ref.actor"
_DETAILS = ("lora_alpha", "target_modules", "exclude_modules")
_UNUSED = (*_DETAILS, "lora_merge")


def check_lora(config: Config, found: Findings) -> None:
    """Refuses an adapter that cannot be trained."""
    model = config.actor_rollout_ref.model
    given = [name for name in _DETAILS if name in model.model_fields_set]
    if not model.has_adapter:
        if unused := [f"{_MODEL}.{name}" for name in _UNUSED if name in model.model_fields_set]:
            found.notice(f"{', '.join(unused)}: not used, for {_MODEL}.lora_rank is 0.")
        return
    if find_spec("peft") is None:
        found.refuse(
            f"{_MODEL}.lora_rank",
            got="an adapter, without the package peft",
            expected="peft 0.17 or newer",
            fix="pip install 'quadriga[peft]'",
        )
    for name in ("tensor_model_parallel_size", "pipeline_model_parallel_size"):
        if (size := getattr(config.actor_rollout_ref.actor, name)) > 1:
            found.refuse(
                f"{_ACTOR}.{name}",
                got=f"{size}, with an adapter",
                expected="1",
                fix="Share weights with fsdp_config.fsdp_size, sequences with ulysses_sequence_parallel_size.",
            )
    for name in ("target_modules", "exclude_modules"):
        if getattr(model, name) in ([], ""):
            found.refuse(f"{_MODEL}.{name}", got="nothing", expected="names of modules", fix="Leave the key out.")
    if model.lora_adapter_path is not None:
        _check_adapter(config, found, given)


def _check_adapter(config: Config, found: Findings, given: list[str]) -> None:
    """The adapter to start from says itself what it is."""
    model = config.actor_rollout_ref.model
    key = f"{_MODEL}.lora_adapter_path"
    try:
        shape = read_adapter(Path(model.lora_adapter_path or "").expanduser())
    except ConfigError as error:
        found.refuse(key, got=f"{error.where}: {error.got}", expected=error.expected, fix=error.fix)
        return
    if model.lora_rank not in (0, shape.rank):
        found.refuse(
            f"{_MODEL}.lora_rank",
            got=f"{model.lora_rank}, with an adapter of rank {shape.rank} in lora_adapter_path",
            expected=f"0 or {shape.rank}",
            fix="Leave lora_rank out.",
        )
    for name in given:
        own = {"lora_alpha": shape.alpha}.get(name, getattr(shape, name, None))
        if getattr(model, name) != own:
            found.refuse(
                f"{_MODEL}.{name}",
                got=f"{getattr(model, name)}, with {own} in the adapter of lora_adapter_path",
                expected="one of the two",
                fix=f"Leave {name} out.",
            )
