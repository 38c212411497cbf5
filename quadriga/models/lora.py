# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA, arXiv:2106.09685) in a model's linear modules, by PEFT.

The model is changed in place. Some of its linear modules get two factors beside their weight, and
only the factors are trained. With the adapter off, the model computes bit for bit what it computed
before training.

Legend: r rank of the adapter; in, out sizes of a linear module; A [r, in], B [out, r].
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
from torch import Tensor, nn
from transformers import PreTrainedModel

from quadriga.config import ModelConfig
from quadriga.config.adapter import ADAPTER_CONFIG, ALL_LINEAR, AdapterShape, adapter_shape
from quadriga.errors import ConfigError, EngineError
from quadriga.models.adapter_files import ADAPTER_NAME, AdapterFiles, is_factor

_TARGETS = "actor_rollout_ref.model.target_modules"
_MAX_NAMES = 12  # module names in an error message


def add_adapter(model: PreTrainedModel, section: ModelConfig, seed: int) -> Callable[[str], Tensor]:
    """Add the configured adapter to a model, and freeze the model's own parameters.

    Args:
        model: model to change in place. If its parameters are on "meta", so are the adapter's.
        section: configuration of the adapter.
        seed: seed of a new adapter. A parameter's values depend only on the seed and its name.

    Returns:
        Function that returns the initial value of a factor by name: A [r, in] or B [out, r], in
        float32, newly drawn or from the files of the adapter.

    Raises:
        EngineError: the adapter matches no module, or a module that cannot have an adapter.
        ConfigError: PEFT is missing, or the adapter to start from is of another kind than LoRA.
    """
    # Ask before PEFT adds factors, which are on "meta" until the loop below.
    device = next(model.parameters()).device
    _inject_factors(model, adapter_shape(section))
    parameters = model.named_parameters()
    factor_shapes = {name: value.shape for name, value in parameters if is_factor(name)}

    read: Callable[[str], Tensor] = partial(_draw_factor, factor_shapes, seed)
    if section.lora_adapter_path is not None:
        folder = Path(section.lora_adapter_path).expanduser()
        files = AdapterFiles(folder)
        _require_same_shapes(folder, files.shapes, factor_shapes)
        read = files.read

    for name, shape in factor_shapes.items():
        value = torch.empty(shape, device="meta")
        if device.type != "meta":
            value = read(name).to(device, torch.float32)
        parent, _, attribute = name.rpartition(".")
        setattr(model.get_submodule(parent), attribute, nn.Parameter(value))
    return read


def _require_same_shapes(
    folder: Path, file_shapes: Mapping[str, torch.Size], model_shapes: Mapping[str, torch.Size]
) -> None:
    """Check that the files of an adapter have the factors of this model.

    Args:
        folder: folder of the adapter, for the message.
        file_shapes: shapes of the factors in the files, by their names in a model.
        model_shapes: shapes of the factors in the model.

    Raises:
        EngineError: factors are missing or unknown, or have other shapes.
    """
    names = file_shapes.keys() | model_shapes.keys()
    differing = [name for name in names if file_shapes.get(name) != model_shapes.get(name)]
    if not differing:
        return
    first = min(differing)
    got = f"{len(differing)} tensors that do not match this model, first {first}: "
    got += f"shape {tuple(file_shapes[first])}" if first in file_shapes else "none"
    raise EngineError(
        f"adapter {folder}",
        got=got,
        expected=f"shape {tuple(model_shapes[first])}" if first in model_shapes else "none",
        fix="Start from the model that the adapter was trained on.",
    )


def adapter_of(model: nn.Module) -> AdapterShape | None:
    """Describe the adapter of a model; None if it has none."""
    config = getattr(model, "peft_config", {}).get(ADAPTER_NAME)
    if config is None:
        return None
    return AdapterShape(
        rank=config.r,
        alpha=config.lora_alpha,
        target_modules=config.target_modules,
        exclude_modules=config.exclude_modules,
        use_rslora=config.use_rslora,
        base=config.base_model_name_or_path,
    )


def describe_adapter(model: PreTrainedModel) -> str:
    """Rank, scale and size of a model's adapter, for people to read."""
    shape = adapter_of(model)
    assert shape is not None, "only a model with an adapter is described"
    parameters = model.named_parameters()
    num_trained = sum(value.numel() for name, value in parameters if is_factor(name))
    return (
        f"LoRA of rank {shape.rank}, alpha {shape.alpha:g}, in {len(_adapted_modules(model))} modules: "
        f"{num_trained / 1e6:.2f} M parameters learn"
    )


@contextmanager
def disable_adapter(model: PreTrainedModel) -> Iterator[None]:
    """Context manager: compute without the adapter, and without gradients for it."""
    # Not with PEFT's own switch, which also clears requires_grad: weights that FSDP gathers inside
    # the context would never get it back.
    layers = _adapted_modules(model)
    for layer in layers:
        layer._disable_adapters = True
    # The public property reads the attribute that was set above.
    assert all(layer.disable_adapters for layer in layers), "PEFT reads another switch"
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def write_adapter_config(model: PreTrainedModel, folder: Path) -> None:
    """Write PEFT's `adapter_config.json` of a model's adapter.

    Args:
        model: model with an adapter.
        folder: an existing folder.
    """
    entries = model.peft_config[ADAPTER_NAME].to_dict()
    entries["inference_mode"] = True
    text = json.dumps(entries, indent=2, sort_keys=True)
    (folder / ADAPTER_CONFIG).write_text(text + "\n", encoding="utf-8")


def _inject_factors(model: PreTrainedModel, shape: AdapterShape) -> None:
    """Add factors on "meta" with PEFT. Values come later: PEFT's would differ between ranks.

    Args:
        model: model to change in place.
        shape: shape of the adapter.

    Raises:
        EngineError: the adapter matches no module, or a module that cannot have an adapter.
        ConfigError: PEFT is missing.
    """
    try:
        peft = import_module("peft")
    except ImportError as error:
        raise ConfigError(
            "actor_rollout_ref.model.lora_rank",
            got=f"an adapter, without a working peft ({error})",
            expected="peft 0.17 or newer",
            fix="pip install -e '.[peft]'",
        ) from error
    config = peft.LoraConfig(
        task_type="CAUSAL_LM",
        r=shape.rank,
        lora_alpha=shape.alpha,
        target_modules=shape.target_modules,
        exclude_modules=shape.exclude_modules,
        use_rslora=shape.use_rslora,
        base_model_name_or_path=shape.base,
    )
    head = model.get_output_embeddings()
    linear_names = []
    for name, module in model.named_modules():
        if type(module) is nn.Linear and module is not head:
            linear_names.append(name)
    # Check first: PEFT ignores entries without a match if any other entry matches.
    try:
        _require_existing_modules(model, shape.target_modules)
        peft.inject_adapter_in_model(config, model, ADAPTER_NAME, low_cpu_mem_usage=True)
    except ValueError as error:
        raise _unknown_modules_error(shape, linear_names, error) from error
    # A set would be written to adapter_config.json in a different order each time.
    for key in ("target_modules", "exclude_modules"):
        modules = getattr(config, key)
        if isinstance(modules, set):
            setattr(config, key, sorted(modules))
    # Refuse modules that PEFT adapts if they are named, but that are not computed as linear ones.
    for layer in _adapted_modules(model):
        base = layer.get_base_layer()
        if type(base) is nn.Linear and base is not head:
            continue
        # The first line of a module's text has its class, such as `Embedding(96, 64)`.
        class_text = f"a module {str(base).splitlines()[0].rstrip('(')}"
        description = "the head" if base is head else class_text
        raise EngineError(
            _TARGETS,
            got=f"{shape.target_modules!r}, which includes {description}",
            expected="linear modules below the head",
            fix="The embedding, the head and experts are not computed as plain linear modules: "
            "name other modules in a list.",
        )


def _unknown_modules_error(
    shape: AdapterShape, linear_names: list[str], error: ValueError
) -> EngineError:
    """Error for target modules that match nothing, which names modules that could match.

    Args:
        shape: shape of the adapter, with the target modules.
        linear_names: names of the model's linear modules.
        error: why nothing matches.
    """
    suffixes = list(dict.fromkeys(name.rpartition(".")[2] for name in linear_names))
    listed = ", ".join(suffixes[:_MAX_NAMES])
    if len(suffixes) > _MAX_NAMES:
        listed += f" and {len(suffixes) - _MAX_NAMES} more"
    # The first line of the error, without a bracket that the line leaves open.
    reason = str(error).partition("\n")[0].rstrip("( ")
    example = next(iter(linear_names), "none")
    return EngineError(
        _TARGETS,
        got=f"{shape.target_modules!r}: {reason}",
        expected=f"linear modules of this model: {listed}",
        fix=f"Name some of them in a list, or set {ALL_LINEAR}. A full name looks like {example}.",
    )


def _require_existing_modules(model: PreTrainedModel, targets: str | list[str]) -> None:
    """Check that target modules exist in a model.

    Args:
        model: the model.
        targets: names of modules, a regular expression, or `ALL_LINEAR`.

    Raises:
        ValueError: a name or the regular expression matches no module.
    """
    if targets == ALL_LINEAR:
        return
    names = [name for name, _ in model.named_modules()]
    if isinstance(targets, str):
        try:
            is_known = any(re.fullmatch(targets, name) for name in names)
        except re.error as error:
            raise ValueError(f"not a regular expression ({error})") from error
        if not is_known:
            raise ValueError("a regular expression that matches no module's full name")
        return
    # As in PEFT, a target names a module by its full name or by the last parts of the name.
    unknown = []
    for target in targets:
        if not any(f".{name}".endswith(f".{target}") for name in names):
            unknown.append(target)
    if unknown:
        raise ValueError(f"no module named {', '.join(unknown)}")


def _adapted_modules(model: nn.Module) -> list[Any]:
    """Modules with an adapter."""
    layer_class = import_module("peft.tuners.lora").LoraLayer
    return [module for module in model.modules() if isinstance(module, layer_class)]


def _draw_factor(factor_shapes: Mapping[str, torch.Size], seed: int, name: str) -> Tensor:
    """Draw a new factor from PEFT's distribution: A uniform in ±1 / sqrt(in), B zero.

    Args:
        factor_shapes: shape of each factor, by name.
        seed: seed of the adapter.
        name: name of the factor.
    """
    shape = factor_shapes[name]
    if ".lora_B." in name:
        return torch.zeros(shape)
    # Each factor has its own seed, so its values depend neither on the rank nor on other factors.
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest))
    bound = 1 / math.sqrt(shape[1])
    return torch.empty(shape).uniform_(-bound, bound, generator=generator)
