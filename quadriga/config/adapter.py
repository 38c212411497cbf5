# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters, as the configuration or PEFT's adapter_config.json describes them. arXiv:2106.09685

A module that computes W x computes W x + scale B A x with it: A is [rank, in], B [out, rank], and scale is alpha / rank
or, with rslora, alpha / sqrt(rank).
"""

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from quadriga.config.actor import ADAPTER_DETAILS, ModelConfig
from quadriga.config.base import Finding, absent, wrong
from quadriga.config.root import Config
from quadriga.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"
MAX_RANK = 512  # the largest rank that vLLM applies without merging

# Other ways to begin (pissa and the like) also change the weights that the adapter is added to.
_PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian")}
# What PEFT knows beyond the plain form above. Each would be lost in silence where weights are merged.
_NOT_PLAIN = (
    "use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern",
    "layers_to_transform", "layer_replication", "target_parameters", "trainable_token_indices", "megatron_config",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "exclude_parameters",
)  # fmt: skip
_MODEL = "actor_rollout_ref.model"
_DECIDES = {
    "native": "on the actor's own modules it computes with the adapter beside the weights, on a copy with merged ones",
    "http": "its servers keep the weights that they have",
    "scripted": "it has no weights",
}
"""Engines for which `lora_merge` decides nothing, and why."""


@dataclass(frozen=True)
class AdapterShape:
    """An adapter without its values: r and alpha of the paper, which modules have one, and how it is scaled."""

    rank: int
    alpha: float
    target_modules: str | list[str]  # names or ends of names, a regular expression, or `all-linear`
    exclude_modules: str | list[str] | None  # those of them that get none
    use_rslora: bool  # whether the scale is alpha / sqrt(rank)
    base: str  # folder or hub name of the model that it belongs to

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def adapter_shape(model: ModelConfig) -> AdapterShape:
    """The adapter that a configuration asks for: a new one, or the one that it starts from (read as `read_adapter`)."""
    folder = Path(model.path).expanduser()
    base = str(folder.resolve()) if folder.is_dir() else model.path
    if model.lora_adapter_path is not None:
        return replace(read_adapter(Path(model.lora_adapter_path).expanduser()), base=base)
    return AdapterShape(
        model.lora_rank, model.lora_alpha, model.target_modules, model.exclude_modules, False, base
    )


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder has an adapter in PEFT's form."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def read_adapter(folder: Path) -> AdapterShape:
    """The adapter of a folder; raises ConfigError where there is none, or one of another kind."""
    fix = "Name a folder that PEFT's save_pretrained wrote, or a checkpoint's `actor` of a run with an adapter."
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(str(folder), got=f"no {name}", expected="an adapter", fix=fix)
    file = folder / ADAPTER_CONFIG
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(file), got=f"no JSON ({error})", expected="JSON", fix=fix) from error
    unlike = [
        f"{name}={facts[name]}"
        for name, values in _PLAIN.items()
        if facts.get(name, values[0]) not in values
    ]
    unlike += [
        f"no {name}" for name in ("r", "lora_alpha", "target_modules") if not facts.get(name)
    ]
    unlike += [f"{name}={facts[name]}" for name in _NOT_PLAIN if facts.get(name)]
    if unlike:
        expected = "plain LoRA: one rank and scale for all of its modules, and nothing beside it"
        fix = "Merge it into its base model with PEFT, and name the result in actor_rollout_ref.model.path."
        raise ConfigError(str(file), got=", ".join(unlike), expected=expected, fix=fix)
    modules, without = facts["target_modules"], facts.get("exclude_modules")
    base, use_rslora = facts.get("base_model_name_or_path") or "", bool(facts.get("use_rslora"))
    return AdapterShape(facts["r"], facts["lora_alpha"], modules, without, use_rslora, base)


@dataclass(frozen=True)
class AdapterRoute:
    """Whether weight sync sends the adapter alone once the base weights are there, and the reason."""

    is_alone: bool
    reason: str


def adapter_route(config: Config, *, is_wide_on_accelerator: bool = False) -> AdapterRoute:
    """How an adapter gets to a rollout engine with a copy of the weights: merged into them, or alone.

    Whether the models compute in float32 on an accelerator is known once a process has started. Raises ConfigError: the
    engine cannot do what `lora_merge` says, or the adapter to start from cannot be read."""
    model, engine = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout.name
    got = f"{str(model.lora_merge).lower()}, with actor_rollout_ref.rollout.name={engine}"
    key = f"{_MODEL}.lora_merge"
    if model.lora_merge is not None and engine in _DECIDES:
        raise wrong(
            key, got, f"null: {_DECIDES[engine]}", "Leave the key out, or generate with vllm."
        )
    if model.lora_merge:
        return AdapterRoute(False, "lora_merge=true")
    reason, fix = "", "Leave the key out, and the adapter is merged before weight sync"
    if engine != "vllm":
        reason, fix = (
            f"{engine} takes merged weights only",
            f"{fix}; vllm applies it beside the weights",
        )
    elif config.async_training.enable:
        reason = "beside training new weights come to sequences under way with the adapter merged"
    elif (rank := adapter_shape(model).rank) > MAX_RANK:
        reason = f"vLLM applies ranks up to {MAX_RANK} beside the weights, and this one is {rank}"
    elif is_wide_on_accelerator:
        reason = (
            "on an accelerator vLLM applies adapters of 16 bits only, and these weights are float32"
        )
    if reason and model.lora_merge is not None:
        raise wrong(key, got, f"null or true: {reason}", f"{fix}.")
    return AdapterRoute(not reason, reason or "vLLM applies it beside the weights")


def check_adapter(config: Config) -> Iterator[Finding]:
    """Yields what keeps an adapter from being trained, or from reaching the rollout engine."""
    model = config.actor_rollout_ref.model
    if not model.has_adapter:
        return
    if find_spec("peft") is None:
        expected, fix = "peft 0.17 or newer", "pip install -e '.[peft]'"
        yield absent(f"{_MODEL}.lora_rank", "an adapter, without the package peft", expected, fix)
    if model.lora_adapter_path is not None:
        try:
            shape = read_adapter(Path(model.lora_adapter_path).expanduser())
        except ConfigError as error:
            yield absent(
                f"{_MODEL}.lora_adapter_path",
                f"{error.where}: {error.got}",
                error.expected,
                error.fix,
            )
            return
        # The adapter to start from says itself what it is.
        if model.lora_rank not in (0, shape.rank):
            got = f"{model.lora_rank}, with an adapter of rank {shape.rank} in lora_adapter_path"
            yield wrong(f"{_MODEL}.lora_rank", got, f"0 or {shape.rank}", "Leave lora_rank out.")
        for name in ADAPTER_DETAILS:
            value, own = getattr(model, name), getattr(shape, name.removeprefix("lora_"))
            if name in model.model_fields_set and value != own:
                got = f"{value}, with {own} in the adapter of lora_adapter_path"
                yield wrong(f"{_MODEL}.{name}", got, "one of the two", f"Leave {name} out.")
    try:
        if config.task == "rl":
            adapter_route(config)
    except ConfigError as error:
        yield error
