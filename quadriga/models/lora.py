# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters in the modules of a model, by PEFT. arXiv:2106.09685

The model stays the transformers model that it is: some of its linear modules get a neighbour, and only the neighbours
learn. With their neighbours off, they are the model that training started from, bit for bit.

Legend: r rank of the adapter, in and out the sizes of a linear module.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from quadriga.config import ModelConfig
from quadriga.config.adapter import ADAPTER_CONFIG, ALL_LINEAR, AdapterShape, adapter_shape
from quadriga.errors import ConfigError, EngineError
from quadriga.models.adapter_files import ADAPTER_NAME, AdapterFiles, is_factor

_TARGETS = "actor_rollout_ref.model.target_modules"
_NUM_NAMED = 12


def add_adapter(
    model: PreTrainedModel, section: ModelConfig, seed: int
) -> Callable[[str], torch.Tensor]:
    """Put the adapter of a configuration into a model; the model's own parameters are frozen.

    Args:
        model: changed in place. Its parameters may be on "meta"; the adapter's are then, too.
        seed: of a new adapter, whose values depend on this and on the parameter's name alone.

    Returns the adapter's values by the parameter's name, A [r, in] and B [out, r] in float32.
    Raises EngineError: it reaches no module, or one that cannot have it. ConfigError: PEFT is missing, or the adapter
    to start from is of another kind."""
    device = next(model.parameters()).device
    _inject(model, adapter_shape(section))
    factors = {
        name: parameter.shape for name, parameter in model.named_parameters() if is_factor(name)
    }
    read: Callable[[str], torch.Tensor] = partial(_new_value, factors, seed)
    if section.lora_adapter_path is not None:
        folder = Path(section.lora_adapter_path).expanduser()
        files = AdapterFiles(folder)
        read, found = files.read, files.shapes
        if unlike := sorted(
            name for name in found.keys() | factors.keys() if found.get(name) != factors.get(name)
        ):
            sizes = [shapes.get(unlike[0]) for shapes in (found, factors)]
            got, expected = ("none" if size is None else f"shape {tuple(size)}" for size in sizes)
            got = f"{len(unlike)} tensors unlike this model's, first {unlike[0]}: {got}"
            fix = "Start from the model that the adapter was trained on."
            raise EngineError(f"adapter {folder}", got=got, expected=expected, fix=fix)
    for name, size in factors.items():
        value = (
            torch.empty(size, device="meta")
            if device.type == "meta"
            else read(name).to(device, torch.float32)
        )
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, nn.Parameter(value))
    return read


def adapter_of(model: nn.Module) -> AdapterShape | None:
    """The adapter in a model, if there is one."""
    if (own := getattr(model, "peft_config", {}).get(ADAPTER_NAME)) is None:
        return None
    modules = (own.target_modules, own.exclude_modules)
    return AdapterShape(
        own.r, own.lora_alpha, *modules, own.use_rslora, own.base_model_name_or_path
    )


def describe_adapter(model: PreTrainedModel) -> str:
    """The adapter of a model in words."""
    shape = adapter_of(model)
    assert shape is not None, "only a model with an adapter is described"
    num_learned = sum(
        parameter.numel() for name, parameter in model.named_parameters() if is_factor(name)
    )
    return (
        f"LoRA of rank {shape.rank}, alpha {shape.alpha:g}, in {len(_layers(model))} modules: "
        f"{num_learned / 1e6:.2f} M parameters learn"
    )


@contextmanager
def adapter_off(model: PreTrainedModel) -> Iterator[None]:
    """Let the model compute without its adapter for a while. Gradients of a pass inside are none of the adapter's."""
    # PEFT's own switch also takes requires_grad away, which weights that were gathered meanwhile would never get back.
    layers = _layers(model)
    for layer in layers:
        layer._disable_adapters = True
    assert all(layer.disable_adapters for layer in layers), "PEFT reads another switch"
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def write_adapter_config(model: PreTrainedModel, folder: Path) -> None:
    """Write PEFT's `adapter_config.json` of the adapter in a model."""
    facts = model.peft_config[ADAPTER_NAME].to_dict() | {"inference_mode": True}
    (folder / ADAPTER_CONFIG).write_text(
        json.dumps(facts, indent=2, sort_keys=True) + "\n", encoding="utf-8"
    )


def _inject(model: PreTrainedModel, shape: AdapterShape) -> None:
    """Let PEFT add empty factors, on "meta": it would draw other values in each rank."""
    try:
        peft = import_module("peft")
    except ImportError as error:
        where, got = (
            "actor_rollout_ref.model.lora_rank",
            f"an adapter, without a working peft ({error})",
        )
        raise ConfigError(
            where, got=got, expected="peft 0.17 or newer", fix="pip install -e '.[peft]'"
        ) from error
    head = model.get_output_embeddings()
    linear = [
        name
        for name, module in model.named_modules()
        if type(module) is nn.Linear and module is not head
    ]
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=shape.rank,
        lora_alpha=shape.alpha,
        target_modules=shape.target_modules,
        exclude_modules=shape.exclude_modules,
        use_rslora=shape.use_rslora,
        base_model_name_or_path=shape.base,
    )
    try:
        _require_known_modules(model, shape.target_modules)
        peft.inject_adapter_in_model(config, model, ADAPTER_NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        ends = list(dict.fromkeys(name.rpartition(".")[2] for name in linear))
        more = f" and {len(ends) - _NUM_NAMED} more" if len(ends) > _NUM_NAMED else ""
        got = f"{shape.target_modules!r}: {str(error).partition(chr(10))[0].rstrip('( ')}"
        expected = f"linear modules of this model: {', '.join(ends[:_NUM_NAMED])}{more}"
        fix = f"Name some of them in a list, or set {ALL_LINEAR}. A whole name is like {next(iter(linear), 'none')}."
        raise EngineError(_TARGETS, got=got, expected=expected, fix=fix) from error
    for key in ("target_modules", "exclude_modules"):
        if isinstance(modules := getattr(config, key), set):
            setattr(config, key, sorted(modules))
    for base in (layer.get_base_layer() for layer in _layers(model)):
        if type(base) is not nn.Linear or base is head:
            what = (
                "the head" if base is head else f"a module {str(base).splitlines()[0].rstrip('(')}"
            )
            fix = "The embedding, the head and experts are computed in other ways: name other modules in a list."
            got = f"{shape.target_modules!r}, which takes in {what}"
            raise EngineError(_TARGETS, got=got, expected="linear modules below the head", fix=fix)


def _require_known_modules(model: PreTrainedModel, targets: str | list[str]) -> None:
    """Raise a ValueError unless each entry of a list fits a module: PEFT takes those that do, and ignores the rest."""
    if targets == ALL_LINEAR:
        return
    names = [name for name, _ in model.named_modules()]
    if isinstance(targets, str):
        try:
            is_known = any(re.fullmatch(targets, name) for name in names)
        except re.error as error:
            raise ValueError(f"no regular expression ({error})") from error
        if not is_known:
            raise ValueError("a regular expression that fits no module's whole name")
        return
    unknown = [
        one for one in targets if not any(name == one or name.endswith(f".{one}") for name in names)
    ]
    if unknown:
        raise ValueError(f"no module named {', '.join(unknown)}")


def _layers(model: nn.Module) -> list[Any]:
    kind = import_module("peft.tuners.lora").LoraLayer
    return [module for module in model.modules() if isinstance(module, kind)]


def _new_value(factors: Mapping[str, torch.Size], seed: int, name: str) -> torch.Tensor:
    """A uniform in +- 1 / sqrt(in), B zero: PEFT's own distribution, drawn for each parameter by itself."""
    size = factors[name]
    if ".lora_B." in name:
        return torch.zeros(size)
    number = int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest())
    bound = 1 / math.sqrt(size[1])
    return torch.empty(size).uniform_(
        -bound, bound, generator=torch.Generator().manual_seed(number)
    )
