# SPDX-License-Identifier: Apache-2.0
"""What a low-rank adapter is, as the configuration or PEFT's adapter_config.json says it. arXiv:2106.09685

A module that computes W x computes W x + scale B A x with it: A is [rank, in], B [out, rank], and scale is alpha / rank
or, with rslora, alpha / sqrt(rank).
"""

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from quadriga.config.model import ModelConfig
from quadriga.errors import ConfigError

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ALL_LINEAR = "all-linear"

# Other ways to begin (pissa and the like) also change the weights that the adapter stands beside.
_PLAIN = {"peft_type": ("LORA",), "bias": ("none",), "init_lora_weights": (True, False, "gaussian")}
# What PEFT knows beyond the plain form above. Each would be lost in silence where weights are merged.
_NOT_PLAIN = (
    "use_dora", "lora_bias", "fan_in_fan_out", "modules_to_save", "rank_pattern", "alpha_pattern",
    "layers_to_transform", "layer_replication", "target_parameters", "trainable_token_indices", "megatron_config",
    "alora_invocation_tokens", "use_qalora", "use_bdlora", "exclude_parameters",
)  # fmt: skip


@dataclass(frozen=True)
class AdapterShape:
    """An adapter without its values.

    Attributes:
        rank, alpha: see the module.
        target_modules: names or ends of names, a regular expression, or `all-linear`.
        exclude_modules: those of them that get none.
        use_rslora: see the module.
        base: folder or hub name of the model that it belongs to.
    """

    rank: int
    alpha: float
    target_modules: str | list[str]
    exclude_modules: str | list[str] | None
    use_rslora: bool
    base: str

    @property
    def scale(self) -> float:
        """What B A is multiplied by."""
        return self.alpha / (math.sqrt(self.rank) if self.use_rslora else self.rank)


def adapter_shape(model: ModelConfig) -> AdapterShape:
    """The adapter that a configuration asks for: the one that it starts from, or a new one.

    Raises:
        ConfigError: see `read_adapter`.
    """
    base = str(Path(model.path).expanduser().resolve()) if Path(model.path).expanduser().is_dir() else model.path
    if model.lora_adapter_path is None:
        return AdapterShape(model.lora_rank, model.lora_alpha, model.target_modules, model.exclude_modules, False, base)
    found = read_adapter(Path(model.lora_adapter_path).expanduser())
    return AdapterShape(found.rank, found.alpha, found.target_modules, found.exclude_modules, found.use_rslora, base)


def is_adapter(folder: str | Path) -> bool:
    """Whether a folder has an adapter in PEFT's form."""
    return (Path(folder) / ADAPTER_CONFIG).is_file()


def read_adapter(folder: Path) -> AdapterShape:
    """The adapter of a folder.

    Raises:
        ConfigError: there is none, or one of another kind.
    """
    fix = "Name a folder that PEFT's save_pretrained wrote, or a checkpoint's `actor` of a run with an adapter."
    for name in (ADAPTER_CONFIG, ADAPTER_WEIGHTS):
        if not (folder / name).is_file():
            raise ConfigError(str(folder), got=f"no {name}", expected="an adapter", fix=fix)
    try:
        facts = json.loads((folder / ADAPTER_CONFIG).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(str(folder / ADAPTER_CONFIG), got=f"no JSON ({error})", expected="JSON", fix=fix) from error
    if unlike := list(_unlike(facts)):
        raise ConfigError(
            str(folder / ADAPTER_CONFIG),
            got=", ".join(unlike),
            expected="plain LoRA: one rank and scale for all of its modules, and nothing beside it",
            fix="Merge it into its base model with PEFT, and name the result in actor_rollout_ref.model.path.",
        )
    return AdapterShape(
        rank=facts["r"],
        alpha=facts["lora_alpha"],
        target_modules=facts["target_modules"],
        exclude_modules=facts.get("exclude_modules"),
        use_rslora=bool(facts.get("use_rslora")),
        base=facts.get("base_model_name_or_path") or "",
    )


def _unlike(facts: Mapping[str, Any]) -> Iterator[str]:
    """What is not plain about an adapter."""
    for name, values in _PLAIN.items():
        if facts.get(name, values[0]) not in values:
            yield f"{name}={facts[name]}"
    for name in ("r", "lora_alpha", "target_modules"):
        if not facts.get(name):
            yield f"no {name}"
    for name in _NOT_PLAIN:
        if facts.get(name):
            yield f"{name}={facts[name]}"
