# SPDX-License-Identifier: Apache-2.0
"""Adapters as names and tensors: in a stream of weights, in PEFT's files, and merged into the weights of a folder.

    in the model                                   in PEFT's file                                   merged
    L.q_proj.base_layer.weight   W                                                                  L.q_proj.weight
    L.q_proj.lora_A.default.weight   A [r, in]     base_model.model.L.q_proj.lora_A.weight            W + scale B A
    L.q_proj.lora_B.default.weight   B [out, r]    base_model.model.L.q_proj.lora_B.weight

Legend: r rank of the adapter, in and out the sizes of a linear module.

Nothing here needs PEFT: what has an adapter is read and merged without it.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

from quadriga.config.adapter import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    AdapterShape,
    is_adapter,
    read_adapter,
)
from quadriga.errors import CheckpointError
from quadriga.models.weight_files import (
    RenamedFiles,
    SafetensorFiles,
    WeightFiles,
    open_weights,
    share_with_readers,
)

ADAPTER_NAME = "default"
_IN_PEFT = re.compile(r"^(?:base_model\.model\.)?(.+)\.weight$")
_FACTOR = re.compile(rf"(?P<module>.+)\.lora_(?P<factor>[AB])\.{ADAPTER_NAME}\.weight")
_BASE = ".base_layer."


def is_factor(name: str) -> bool:
    """Whether a parameter of a model is an adapter's: A [r, in] or B [out, r]."""
    return _FACTOR.fullmatch(name) is not None


def base_name(name: str) -> str:
    """The name of a parameter in the model without an adapter."""
    return name.replace(_BASE, ".")


def factor_names(weight: str) -> tuple[str, str]:
    """The names of A [r, in] and B [out, r] for a weight [out, in] without an adapter."""
    module = weight.removesuffix(".weight")
    return f"{module}.lora_A.{ADAPTER_NAME}.weight", f"{module}.lora_B.{ADAPTER_NAME}.weight"


def merge(
    weight: torch.Tensor, factor_a: torch.Tensor, factor_b: torch.Tensor, scale: float
) -> torch.Tensor:
    """W + scale B A of a weight [out, in], A [r, in] and B [out, r], computed in float32; in the weight's dtype."""
    return weight.float().add(factor_b.float() @ factor_a.float(), alpha=scale).to(weight.dtype)


def merged(
    weights: Iterable[tuple[str, torch.Tensor]], scale: float
) -> Iterator[tuple[str, torch.Tensor]]:
    """A model's parameters, with the adapter merged: one weight [out, in] of W [out, in], A [r, in] and B [out, r]. One
    weight and its adapter are held at a time: a model has them side by side."""
    held: dict[str, torch.Tensor] = {}
    for name, tensor in weights:
        factor = _FACTOR.fullmatch(name)
        if name.endswith(f"{_BASE}weight") or (factor and factor["factor"] == "A"):
            held[base_name(name)] = tensor
        elif factor is None:
            yield base_name(name), tensor
        else:
            weight = f"{factor['module']}.weight"
            yield weight, merge(held.pop(weight), held.pop(factor_names(weight)[0]), tensor, scale)
    assert not held, f"{next(iter(held))} came without the rest of its adapter"


class AdapterFiles(RenamedFiles):
    """PEFT's `adapter_model.safetensors` of a folder, under the names that its tensors have in a model."""

    def __init__(self, folder: Path) -> None:
        rename = partial(_IN_PEFT.sub, rf"\1.{ADAPTER_NAME}.weight")
        super().__init__(SafetensorFiles([folder / ADAPTER_WEIGHTS]), rename)


class MergedFiles:
    """The weights of a model with an adapter merged into them, the merged ones in float32.
    Raises CheckpointError: the adapter is that of another model; names the folder `where`."""

    def __init__(self, base: WeightFiles, adapter: WeightFiles, scale: float, where: Path) -> None:
        self.base, self.adapter, self.scale = base, adapter, scale
        self.shapes, factors = base.shapes, set(adapter.shapes)
        self._merged = {name for name in self.shapes if set(factor_names(name)) <= factors}
        known = {factor for name in self._merged for factor in factor_names(name)}
        if unknown := sorted(factors - known):
            got = f"{len(unknown)} tensors for modules that the base model has not, first {unknown[0]}"
            fix = f"Name its own model as base_model_name_or_path in {ADAPTER_CONFIG}."
            raise CheckpointError(str(where), got=got, expected="an adapter of this model", fix=fix)

    def read(self, name: str) -> torch.Tensor:
        weight = self.base.read(name)
        if name not in self._merged:
            return weight
        factor_a, factor_b = (self.adapter.read(factor) for factor in factor_names(name))
        return merge(weight.float(), factor_a, factor_b, self.scale)


def open_model(folder: str | Path) -> WeightFiles:
    """The weights of a folder as `open_weights` finds them; of one with an adapter, those of its base model, merged.
    CheckpointError: there are none, or the base model is not where the adapter says. ConfigError: an adapter of another
    kind."""
    if not is_adapter(folder):
        return open_weights(folder)
    folder = Path(folder)
    shape = read_adapter(folder)
    if not Path(shape.base).is_dir():
        got = f"the base model {shape.base!r}, which is no folder here"
        fix = "Set base_model_name_or_path in this file; `quadriga prepare model NAME --output DIR` fetches a model."
        raise CheckpointError(
            str(folder / ADAPTER_CONFIG), got, "the folder of the model it was trained on", fix
        )
    return MergedFiles(open_model(shape.base), AdapterFiles(folder), shape.scale, folder)


def write_factors(folder: Path, factors: Mapping[str, torch.Tensor]) -> None:
    """Write `adapter_model.safetensors` of A [r, in] and B [out, r], given under their names in a model."""
    own = f".{ADAPTER_NAME}.weight"
    tensors = {
        f"base_model.model.{name.replace(own, '.weight')}": one.contiguous()
        for name, one in factors.items()
    }
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    share_with_readers(folder)


def write_adapter_shape(folder: Path, shape: AdapterShape, modules: Sequence[str]) -> None:
    """Write `adapter_config.json` of an adapter in these modules, given by names or ends of names."""
    facts = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "use_rslora": shape.use_rslora,
        "target_modules": list(modules),
        "bias": "none",
        "base_model_name_or_path": shape.base,
    }
    (folder / ADAPTER_CONFIG).write_text(
        json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )
