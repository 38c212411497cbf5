# SPDX-License-Identifier: Apache-2.0
"""Conversion between a module's weights and the layout in which transformers stores them.

    in files                                           in the module
    layers.0.mlp.experts.7.gate_proj.weight [F, D] ┐
    layers.0.mlp.experts.7.up_proj.weight   [F, D] ├─> layers.0.mlp.experts.gate_up_proj [E, 2 F, D]
    ... of all experts                             ┘
    visual.patch_embed.proj.weight                 ──> model.visual.patch_embed.proj.weight

Transformers has a conversion table for each model family, with the operations of both directions.
Weights that the table does not mention keep their names.

Legend: E experts of a layer, F width of each, D hidden size; [...] is the shape of a weight.
"""

from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

from quadriga.models.weight_files import WeightFiles


@dataclass
class _ConversionGroup:
    """Source tensors that are converted together."""

    converter: WeightConverter | None  # None: a single tensor, which is only renamed
    # Names of the sources, and the pattern of the converter that each name matches.
    sources: list[tuple[str, str]] = field(default_factory=list)


class ConvertedFiles:
    """Weights of other files, converted to the names and shapes of a model's module, or back.

    Args:
        files: weights as `save_pretrained` writes them; with `to_files`, as the module has them.
        model: model whose family defines the conversion. It may be on "meta".
        to_files: whether to convert from the module's layout to that of `save_pretrained`.
    """

    def __init__(
        self, files: WeightFiles, model: PreTrainedModel, *, to_files: bool = False
    ) -> None:
        self._files = files
        self._model = model
        self._groups = _group_sources(files, model, to_files)
        self._group_of = {}
        self.shapes: dict[str, torch.Size] = {}
        for group_name, group in self._groups.items():
            # Convert empty tensors to find out the names and shapes of the results.
            with torch.device("meta"):
                empty = {name: torch.empty(files.shapes[name]) for name, _ in group.sources}
            for target, tensor in self._convert_group(group_name, empty).items():
                self.shapes[target] = tensor.shape
                self._group_of[target] = group_name
        self._last_group_name = ""  # "": nothing has been read
        self._last_tensors: dict[str, Tensor] = {}

    def read(self, name: str) -> Tensor:
        """Read a full weight [...].

        A conversion may have several results. They stay in memory until a weight of another
        conversion is read.
        """
        group_name = self._group_of[name]
        if self._last_group_name != group_name:
            # Free the previous results before the next sources are read.
            self._last_group_name = ""
            self._last_tensors = {}
            sources = self._groups[group_name].sources
            tensors = {source: self._files.read(source) for source, _ in sources}
            self._last_tensors = self._convert_group(group_name, tensors)
            self._last_group_name = group_name
        return self._last_tensors[name]

    def _convert_group(self, group_name: str, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        """Convert the source tensors of a group.

        Args:
            group_name: name of the group, which is the target name of its first result.
            tensors: the group's source tensors, by name. A converter removes them.

        Returns:
            The converted tensors, by name.
        """
        group = self._groups[group_name]
        if group.converter is None:
            source, _ = group.sources[0]
            return {group_name: tensors[source]}
        # A converter collects tensors, so each conversion needs a copy of it. Remove tensors from
        # the dictionary, so that the converter can free each one as soon as possible.
        converter = deepcopy(group.converter)
        add_tensor: Any = converter.add_tensor
        for name, pattern in group.sources:
            add_tensor(group_name, name, pattern, tensors.pop(name))
        results = converter.convert(group_name, model=self._model, config=self._model.config)
        # A converter may return a single tensor as a list.
        converted = {}
        for name, result in results.items():
            converted[name] = result[0] if isinstance(result, list) else result
        return converted


def _group_sources(
    files: WeightFiles, model: PreTrainedModel, to_files: bool
) -> dict[str, _ConversionGroup]:
    """Group source tensors by the target name that transformers derives from their names.

    Args:
        files: the source tensors.
        model: model whose family defines the conversion.
        to_files: whether to convert from the module's layout to that of `save_pretrained`.

    Returns:
        The groups, by target name: the name of the first result of the conversion.
    """
    transforms = get_model_conversion_mapping(model, add_legacy=not to_files)
    prefix = None
    module_weights = None
    if to_files:
        # `save_pretrained` does not restore the prefixes that loading removes.
        transforms = [item for item in reversed(transforms) if not isinstance(item, PrefixChange)]
        transforms = [item.reverse_transform() for item in transforms]
    else:
        prefix = model.base_model_prefix
        module_weights = model.state_dict()
    renamings = [item for item in transforms if isinstance(item, WeightRenaming)]
    converters = [item for item in transforms if isinstance(item, WeightConverter)]

    # In natural order (2 before 10): the experts of a layer are stacked in the order of sources.
    groups = {}
    for name in sorted(files.shapes, key=dot_natural_key):
        # The pattern is that of a converter; None if no converter takes this name.
        target, pattern = rename_source_key(
            name, renamings, converters, prefix, module_weights, reverse=to_files
        )
        if target not in groups:
            matching = (item for item in converters if pattern in item.source_patterns)
            groups[target] = _ConversionGroup(next(matching, None))
        groups[target].sources.append((name, pattern or name))
    return groups


def weight_buffers(model: nn.Module) -> dict[str, Tensor]:
    """Find the buffers [...] that are saved with a model, such as a router's score correction."""
    buffers = {}
    for module_name, module in model.named_modules():
        for name, buffer in module.named_buffers(recurse=False):
            if name not in module._non_persistent_buffers_set:
                buffers[f"{module_name}.{name}" if module_name else name] = buffer
    return buffers
