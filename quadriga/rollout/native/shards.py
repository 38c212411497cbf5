# SPDX-License-Identifier: Apache-2.0
"""The shards of a model's weights that one rank of a rollout group computes with."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor
from transformers import PreTrainedModel

from quadriga.models.adapter_files import factor_names, is_factor, merge
from quadriga.models.lora import adapter_of
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.native.network import shard_boxes
from quadriga.weight_sync.reshard import Box, Wanted


class GroupShards:
    """The shards of one rank, and the adapter that is merged into them.

    Args:
        model: a plain decoder on "meta".
        group: the rank's group.
        dtype: dtype of the shards.
        adapted: the same model with the trainer's adapter, or `model` if there is none.

    Attributes:
        merged: names of the shards that the adapter is merged into after they have arrived.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        group: RolloutGroup,
        dtype: torch.dtype,
        adapted: PreTrainedModel,
    ) -> None:
        self._model = model
        self._device = group.device
        self._dtype = dtype
        self._manifest = Manifest.of(model)
        self._boxes = shard_boxes(model, group)  # by name, the place of each shard
        self._adapter = adapter_of(adapted)  # rank and scale; None without an adapter
        # Shapes of the adapter's matrices, by name; {} without an adapter.
        self._factors = Manifest.of(adapted).select(is_factor).shapes
        # A weight has an adapter if there is a matrix A for it.
        self.merged = {name for name in self._boxes if factor_names(name)[0] in self._factors}

    def wanted_shards(self) -> Wanted:
        """The shards that this rank needs, by the trainer's names: box and dtype.

        The matrices of an adapter are wanted, too, and in full.
        """
        factors = {name: Box((0, 0), shape) for name, shape in self._factors.items()}
        return {name: (box, self._dtype) for name, box in (self._boxes | factors).items()}

    def hold_shards(self, shards: Mapping[str, Tensor]) -> None:
        """Replace the model's parameters, which are on "meta", by tensors with the shards.

        Args:
            shards: tensors by the trainer's names.
        """
        # Buffers are not sharded. They are not on "meta", but they may be on another device.
        tensors = {}
        for name, buffer in self._model.named_buffers():
            tensors[name] = buffer.to(self._device)
        # A tied weight gets the same parameter under both names.
        for name in self._boxes:
            parameter = torch.nn.Parameter(shards[name], requires_grad=False)
            tensors |= dict.fromkeys(self._manifest.same[name], parameter)
        for name, tensor in tensors.items():
            module, _, attribute = name.rpartition(".")
            setattr(self._model.get_submodule(module), attribute, tensor)

    def merge_adapter(self, shards: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Merge the adapter into the shards, in their own memory.

        Args:
            shards: by name the shards, and the adapter's matrices A [r, in] and B [out, r].

        Yields:
            The name of each shard, and the shard.
        """
        for name, box in self._boxes.items():
            shard = shards[name]
            if self._adapter is not None and name in self.merged:
                name_a, name_b = factor_names(name)
                # The rows of B and the columns of A that belong to the shard.
                row, column = box.start
                height, width = box.shape
                factor_a = shards[name_a].narrow(1, column, width)
                factor_b = shards[name_b].narrow(0, row, height)
                shard.copy_(merge(shard, factor_a, factor_b, self._adapter.scale))
            yield name, shard
