# SPDX-License-Identifier: Apache-2.0
"""How transformers stores the weights of a family in files, where that is not how its module has them.

    in files                                                    in the module
    layers.0.mlp.experts.7.gate_proj.weight [F, D]    ┐
    layers.0.mlp.experts.7.up_proj.weight   [F, D]    ├──>      layers.0.mlp.experts.gate_up_proj [E, 2 F, D]
    ... of all experts                                ┘
    visual.patch_embed.proj.weight                     ──>      model.visual.patch_embed.proj.weight

The tables are transformers' own, one for a family, with the operations of both directions. Names that no table has,
and those that are the module's already, stay as they are.

Legend: E experts of a layer, F width of each, D hidden size; [...] is the shape of a weight.
"""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
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


class ConvertedFiles:
    """The weights of other files with the names and shapes that a model's module has; the model may be on "meta". With
    `to_files` from the module's names to those that `save_pretrained` of transformers writes."""

    def __init__(
        self, files: WeightFiles, model: PreTrainedModel, *, to_files: bool = False
    ) -> None:
        self._files, self._model = files, model
        transforms = get_model_conversion_mapping(model, add_legacy=not to_files)
        if to_files:
            # Transformers writes without the prefixes that it takes away, too.
            kept = [one for one in reversed(transforms) if not isinstance(one, PrefixChange)]
            transforms = [one.reverse_transform() for one in kept]
        renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
        converters = [one for one in transforms if isinstance(one, WeightConverter)]
        prefix, own = (None, None) if to_files else (model.base_model_prefix, model.state_dict())
        groups: dict[str, tuple[WeightConverter | None, list[tuple[str, str]]]] = {}
        for name in sorted(files.shapes, key=dot_natural_key):
            target, pattern = rename_source_key(
                name, renamings, converters, prefix, own, reverse=to_files
            )
            converter = next((one for one in converters if pattern in one.source_patterns), None)
            groups.setdefault(target, (converter, []))[1].append((name, pattern or name))
        self._groups = groups
        self._group_of: dict[str, str] = {}
        self.shapes: dict[str, torch.Size] = {}
        for group, (_, sources) in groups.items():
            empty = {name: torch.empty(files.shapes[name], device="meta") for name, _ in sources}
            for target, tensor in self._converted(group, empty).items():
                self.shapes[target], self._group_of[target] = tensor.shape, group
        self._last: tuple[str, dict[str, torch.Tensor]] = "", {}

    def read(self, name: str) -> torch.Tensor:
        """A whole weight [...]. What else was made of the same tensors is kept until another one is read."""
        group = self._group_of[name]
        if self._last[0] != group:
            self._last = "", {}
            tensors = {source: self._files.read(source) for source, _ in self._groups[group][1]}
            self._last = group, self._converted(group, tensors)
        return self._last[1][name]

    def _converted(self, group: str, tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        converter, sources = self._groups[group]
        if converter is None:
            return {group: tensors[sources[0][0]]}
        converter = deepcopy(converter)
        collect: Any = converter.add_tensor
        for name, pattern in sources:
            collect(group, name, pattern, tensors.pop(name))
        made = converter.convert(group, model=self._model, config=self._model.config)
        return {name: one[0] if isinstance(one, list) else one for name, one in made.items()}


def weight_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """The buffers [...] of a model that files have: what a router adds to its scores, for one. They do not learn."""
    return {
        f"{place}.{name}" if place else name: buffer
        for place, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False)
        if name not in module._non_persistent_buffers_set
    }
