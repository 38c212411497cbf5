# SPDX-License-Identifier: Apache-2.0
"""Descriptions of LoRA adapters, from the configuration or from PEFT's adapter_config.json.

Hu et al., arXiv:2106.09685. With an adapter, a module that computes W x computes W x + scale B A x:
A is [rank, in], B is [out, rank], and scale is alpha / rank or, with rslora, alpha / sqrt(rank).
"""

import json
import math
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from quadriga.config.actor import ADAPTER_DETAILS, ModelConfig
from quadriga.config.base import Findings
from quadriga.config.root import Config
from quadriga.engine_traits import engines_with
from quadriga.errors import ConfigError, MachineError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"

# Accepted values of PEFT's fields, the default first. Other initializations (such as pissa) also
# change the weights that the adapter is added to.
_PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian")}
# Features of PEFT that are not supported: merging would silently ignore them.
_NOT_PLAIN = (
    "use_dora",
    "lora_bias",
    "fan_in_fan_out",
    "modules_to_save",
    "rank_pattern",
    "alpha_pattern",
    "layers_to_transform",
    "layer_replication",
    "target_parameters",
    "trainable_token_indices",
    "megatron_config",
    "alora_invocation_tokens",
    "use_qalora",
    "use_bdlora",
    "exclude_parameters",
)
_MODEL = "actor_rollout_ref.model"


@dataclass(frozen=True)
class AdapterShape:
    """An adapter without its values.

    Attributes:
        rank: the rank r of the paper.
        alpha: the scale alpha of the paper.
        target_modules: modules with an adapter: names or ends of names, a regular expression, or
            `all-linear`.
        exclude_modules: modules of `target_modules` without an adapter.
        use_rslora: whether the scale is alpha / sqrt(rank).
        base: folder or hub name of the model that the adapter belongs to.
    """

    rank: int
    alpha: float
    target_modules: str | list[str]
    exclude_modules: str | list[str] | None
    use_rslora: bool
    base: str

    @property
    def scale(self) -> float:
        """Factor that B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def adapter_shape(model: ModelConfig) -> AdapterShape:
    """Describe the adapter of a configuration: a new one, or the one in `lora_adapter_path`.

    Raises:
        ConfigError: the adapter in `lora_adapter_path` cannot be read.
    """
    folder = Path(model.path).expanduser()
    base = str(folder.resolve()) if folder.is_dir() else model.path
    if model.lora_adapter_path is not None:
        return replace(read_adapter(Path(model.lora_adapter_path).expanduser()), base=base)
    return AdapterShape(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        target_modules=model.target_modules,
        exclude_modules=model.exclude_modules,
        use_rslora=False,
        base=base,
    )


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder has an adapter in PEFT's form."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def read_adapter(folder: Path) -> AdapterShape:
    """Read the adapter of a folder.

    Raises:
        ConfigError: there is no adapter, or one that is not plain LoRA.
    """
    # Both files are needed: the description alone has no weights.
    fix = "Name a folder that PEFT's save_pretrained wrote, or `actor` in a checkpoint with an adapter."
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(str(folder), got=f"no {name}", expected="an adapter", fix=fix)
    file = folder / ADAPTER_CONFIG
    try:
        facts = json.loads(file.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ConfigError(str(file), got=f"no JSON ({error})", expected="JSON", fix=fix) from error

    # List everything that is not plain LoRA, for a single error. A missing field has its default.
    unsupported = [
        f"{name}={facts[name]}"
        for name, values in _PLAIN.items()
        if facts.get(name, values[0]) not in values
    ]
    unsupported += [
        f"no {name}" for name in ("r", "lora_alpha", "target_modules") if not facts.get(name)
    ]
    unsupported += [f"{name}={facts[name]}" for name in _NOT_PLAIN if facts.get(name)]
    if unsupported:
        fix = (
            "Merge it into its base model with PEFT, "
            "and name the result in actor_rollout_ref.model.path."
        )
        raise ConfigError(
            str(file),
            got=", ".join(unsupported),
            expected="plain LoRA: one rank and scale for all of its modules, and nothing else",
            fix=fix,
        )
    return AdapterShape(
        rank=facts["r"],
        alpha=facts["lora_alpha"],
        target_modules=facts["target_modules"],
        exclude_modules=facts.get("exclude_modules"),
        use_rslora=bool(facts.get("use_rslora")),
        base=facts.get("base_model_name_or_path") or "",
    )


@dataclass(frozen=True)
class AdapterRoute:
    """Way in which an adapter reaches a rollout engine.

    Attributes:
        is_alone: whether weight sync sends only the adapter, once the engine has the base weights.
            Otherwise the adapter is merged into the weights that are sent.
        reason: why this way is taken, for messages.
    """

    is_alone: bool
    reason: str


def adapter_route(config: Config, *, is_wide_on_accelerator: bool = False) -> AdapterRoute:
    """Decide how an adapter reaches the rollout engine.

    Args:
        config: the run.
        is_wide_on_accelerator: whether the models compute in float32 on an accelerator. That is
            known only once a process has started; checks before that leave it False.

    Raises:
        ConfigError: the engine does not support the value of `lora_merge`, or the adapter to start
            from cannot be read.
    """
    model = config.actor_rollout_ref.model
    rollout = config.actor_rollout_ref.rollout
    key = f"{_MODEL}.lora_merge"
    got = f"{str(model.lora_merge).lower()}, with actor_rollout_ref.rollout.name={rollout.name}"
    engines = engines_with("max_adapter_rank")
    # The trait is the reason why the engine ignores `lora_merge`; "" if it reads the key.
    if model.lora_merge is not None and rollout.traits.ignores_lora_merge:
        raise ConfigError(
            key,
            got,
            f"null: {rollout.traits.ignores_lora_merge}",
            f"Leave the key out, or generate with {engines}.",
        )
    if model.lora_merge:
        return AdapterRoute(False, "lora_merge=true")

    reason = _reason_to_merge(config, is_wide_on_accelerator)
    if not reason:
        return AdapterRoute(True, f"{rollout.engine_title} applies it beside the weights")
    # Here `lora_merge` is false, which asks for what the engine cannot do, or null.
    if model.lora_merge is not None:
        fix = "Leave the key out, and the adapter is merged before weight sync"
        if not rollout.traits.max_adapter_rank:
            fix += f"; {engines} applies it beside the weights"
        raise ConfigError(key, got, f"null or true: {reason}", f"{fix}.")
    return AdapterRoute(False, reason)


def _reason_to_merge(config: Config, is_wide_on_accelerator: bool) -> str:
    """Reason why the engine needs merged weights; "" if it can apply the adapter itself.

    The arguments are those of `adapter_route`.
    """
    rollout = config.actor_rollout_ref.rollout
    max_rank = rollout.traits.max_adapter_rank
    if not max_rank:
        return f"{rollout.name} needs merged weights"
    if config.async_training.enable:
        return "in asynchronous training sequences in flight get weights with the adapter merged"
    # The rank is in the configuration, or in the adapter to start from.
    rank = adapter_shape(config.actor_rollout_ref.model).rank
    title = rollout.engine_title
    if rank > max_rank:
        return f"{title} applies ranks up to {max_rank} beside the weights, and this one is {rank}"
    if is_wide_on_accelerator:
        return (
            f"on an accelerator {title} applies 16-bit adapters only, and these weights are float32"
        )
    return ""


def check_adapter(config: Config) -> Findings:
    """Yield reasons why an adapter cannot be trained, or cannot reach the rollout engine."""
    model = config.actor_rollout_ref.model
    if not model.has_adapter:
        return
    if find_spec("peft") is None:
        yield MachineError(
            f"{_MODEL}.lora_rank",
            "an adapter, without the package peft",
            "peft 0.17 or newer",
            "pip install -e '.[peft]'",
        )
    if model.lora_adapter_path is not None:
        try:
            shape = read_adapter(Path(model.lora_adapter_path).expanduser())
        except ConfigError as error:
            # The error about the file, as one about the key that names it.
            yield MachineError(
                f"{_MODEL}.lora_adapter_path",
                f"{error.where}: {error.got}",
                error.expected,
                error.fix,
            )
            return
        yield from _check_details(model, shape)
    # Supervised tasks have no rollout engine.
    if config.task != "rl":
        return
    try:
        adapter_route(config)
    except ConfigError as error:
        yield error


def _check_details(model: ModelConfig, shape: AdapterShape) -> Findings:
    """Yield keys that contradict the adapter to start from, which has its own rank and modules."""
    if model.lora_rank not in (0, shape.rank):
        yield ConfigError(
            f"{_MODEL}.lora_rank",
            f"{model.lora_rank}, with an adapter of rank {shape.rank} in lora_adapter_path",
            f"0 or {shape.rank}",
            "Leave lora_rank out.",
        )
    for name in ADAPTER_DETAILS:
        value = getattr(model, name)
        adapter_value = getattr(shape, name.removeprefix("lora_"))  # `lora_alpha` is `alpha` there
        if name in model.model_fields_set and value != adapter_value:
            yield ConfigError(
                f"{_MODEL}.{name}",
                f"{value}, with {adapter_value} in the adapter of lora_adapter_path",
                f"{adapter_value}, the value of the adapter",
                f"Leave {name} out.",
            )
