# SPDX-License-Identifier: Apache-2.0
"""LoRA adapters as named tensors: in a model, in PEFT's files, and merged into the base weights.

    in a model                              in PEFT's file
    L.q_proj.base_layer.weight       W
    L.q_proj.lora_A.default.weight   A      base_model.model.L.q_proj.lora_A.weight
    L.q_proj.lora_B.default.weight   B      base_model.model.L.q_proj.lora_B.weight

    merged: L.q_proj.weight = W + scale B A

Adapters are read and merged here without PEFT.

Legend: r rank of the adapter; in, out sizes of a linear module; W [out, in], A [r, in], B [out, r].
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from pathlib import Path

from safetensors.torch import save_file
from torch import Tensor

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
    set_readable,
)

ADAPTER_NAME = "default"
# Name of a factor in PEFT's files, which do not contain the adapter's name.
_IN_PEFT = re.compile(r"^(?:base_model\.model\.)?(.+)\.weight$")
_FACTOR = re.compile(rf"(?P<module>.+)\.lora_(?P<factor>[AB])\.{ADAPTER_NAME}\.weight")
_BASE = ".base_layer."


def is_factor(name: str) -> bool:
    """Whether a model's parameter is a factor of an adapter: A [r, in] or B [out, r]."""
    return _FACTOR.fullmatch(name) is not None


def base_name(name: str) -> str:
    """Name of a parameter in the model without an adapter."""
    return name.replace(_BASE, ".")


def factor_names(weight: str) -> tuple[str, str]:
    """Names of the factors A [r, in] and B [out, r] of a weight [out, in], given its base name."""
    module = weight.removesuffix(".weight")
    return f"{module}.lora_A.{ADAPTER_NAME}.weight", f"{module}.lora_B.{ADAPTER_NAME}.weight"


def merge(weight: Tensor, factor_a: Tensor, factor_b: Tensor, scale: float) -> Tensor:
    """Merge one adapted weight: W + scale B A, computed in float32.

    Args:
        weight: W [out, in].
        factor_a: A [r, in].
        factor_b: B [out, r].
        scale: factor of B A.

    Returns:
        The sum [out, in] in the dtype of `weight`.
    """
    product = factor_b.float() @ factor_a.float()
    return weight.float().add(product, alpha=scale).to(weight.dtype)


def merge_adapter(
    weights: Iterable[tuple[str, Tensor]], scale: float
) -> Iterator[tuple[str, Tensor]]:
    """Stream the parameters of a model, with its adapter merged into them.

    In a model, an adapted weight is followed by its factors A and B, so only one weight and its
    factors are in memory at a time.

    Args:
        weights: names and parameters of a model with an adapter, in the model's order.
        scale: factor of B A.

    Returns:
        Iterator over the base model's names and tensors.
    """
    pending = {}
    for name, tensor in weights:
        factor = _FACTOR.fullmatch(name)
        is_adapted_weight = name.endswith(f"{_BASE}weight")
        if factor is None and not is_adapted_weight:
            yield base_name(name), tensor
        elif factor is not None and factor["factor"] == "B":
            # B comes last and completes the weight.
            weight_name = f"{factor['module']}.weight"
            name_a, _ = factor_names(weight_name)
            weight = pending.pop(weight_name)
            factor_a = pending.pop(name_a)
            yield weight_name, merge(weight, factor_a, tensor, scale)
        else:
            pending[base_name(name)] = tensor
    assert not pending, f"{next(iter(pending))} came without its other factors"


class AdapterFiles(RenamedFiles):
    """Factors in a folder's `adapter_model.safetensors`, under the names that a model uses."""

    def __init__(self, folder: Path) -> None:
        super().__init__(
            SafetensorFiles([folder / ADAPTER_WEIGHTS]),
            partial(_IN_PEFT.sub, rf"\1.{ADAPTER_NAME}.weight"),
        )


class MergedFiles:
    """Weights of a model with an adapter merged into them; merged weights are float32.

    Args:
        base: weights of the base model.
        adapter: factors of the adapter, under the names that a model uses.
        scale: factor of B A.
        where: folder of the adapter, for error messages.

    Raises:
        CheckpointError: the adapter has factors for modules that the base model lacks.
    """

    def __init__(self, base: WeightFiles, adapter: WeightFiles, scale: float, where: Path) -> None:
        self.base = base
        self.adapter = adapter
        self.scale = scale
        self.shapes = base.shapes
        # Factors that fit no weight, such as those for another model, must not be ignored silently.
        pairs = map(factor_names, base.shapes)
        complete_pairs = [pair for pair in pairs if adapter.shapes.keys() >= set(pair)]
        unused_names = adapter.shapes.keys() - set(chain(*complete_pairs))
        if unused_names:
            raise CheckpointError(
                str(where),
                got=f"{len(unused_names)} tensors for modules that the base model does not have, "
                f"first {min(unused_names)}",
                expected="an adapter of this model",
                fix=f"Name the adapter's own model as base_model_name_or_path in {ADAPTER_CONFIG}.",
            )

    def read(self, name: str) -> Tensor:
        """Read one weight [out, in], with its adapter merged if it has one."""
        weight = self.base.read(name)
        name_a, name_b = factor_names(name)
        if name_a not in self.adapter.shapes:
            return weight
        return merge(
            weight.float(), self.adapter.read(name_a), self.adapter.read(name_b), self.scale
        )


def open_model(folder: str | Path) -> WeightFiles:
    """Open the weights of a folder. An adapter is merged into the weights of its base model.

    Raises:
        CheckpointError: the folder has no weights, or the adapter's base model is missing.
        ConfigError: the adapter is of another kind than LoRA.
    """
    if not is_adapter(folder):
        return open_weights(folder)
    folder = Path(folder)
    shape = read_adapter(folder)
    if not Path(shape.base).is_dir():
        raise CheckpointError(
            str(folder / ADAPTER_CONFIG),
            got=f"the base model {shape.base!r}, which is not a folder on this machine",
            expected="the folder of the model that the adapter was trained on",
            fix="Set base_model_name_or_path in this file; "
            "`quadriga prepare model NAME --output DIR` fetches a model.",
        )
    # The base model may itself be a folder with an adapter.
    return MergedFiles(open_model(shape.base), AdapterFiles(folder), shape.scale, folder)


def write_factors(folder: Path, factors: Mapping[str, Tensor]) -> None:
    """Write PEFT's `adapter_model.safetensors`.

    Args:
        folder: an existing folder.
        factors: A [r, in] and B [out, r] by their names in a model.
    """
    tensors = {}
    for name, factor in factors.items():
        peft_name = name.replace(f".{ADAPTER_NAME}.weight", ".weight")
        tensors[f"base_model.model.{peft_name}"] = factor.contiguous()
    save_file(tensors, folder / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    set_readable(folder)


def write_adapter_shape(folder: Path, shape: AdapterShape, modules: Sequence[str]) -> None:
    """Write PEFT's `adapter_config.json`.

    Args:
        folder: an existing folder.
        shape: rank, scale and base model of the adapter.
        modules: names of the adapted modules, or suffixes of their names.
    """
    entries = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": shape.rank,
        "lora_alpha": shape.alpha,
        "use_rslora": shape.use_rslora,
        "target_modules": list(modules),
        "bias": "none",
        "base_model_name_or_path": shape.base,
    }
    text = json.dumps(entries, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")
