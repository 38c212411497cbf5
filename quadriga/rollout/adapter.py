# SPDX-License-Identifier: Apache-2.0
"""An adapter that an engine of others applies beside its weights: what belongs to it, and the folder that it reads.

stream ── separated ──> weights below, one after the other ──> as without an adapter
                └─────> A and B of every module, kept ── write ──> PEFT's folder ──> the engine
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from quadriga.config.adapter import AdapterShape
from quadriga.models.adapter_files import is_factor, module_of, write_adapter_shape, write_factors
from quadriga.models.lora import adapter_of
from quadriga.rollout.manifest import Manifest


@dataclass(frozen=True)
class Adapter:
    """An adapter without its values.

    Attributes:
        shape: rank, scale and the like.
        manifest: its matrices, A and B of every module.
    """

    shape: AdapterShape
    manifest: Manifest

    @classmethod
    def of(cls, model: nn.Module) -> "Adapter":
        """The adapter in a model, which may be on "meta"."""
        shape, whole = adapter_of(model), Manifest.of(model)
        assert shape is not None, "asked only of a model with one"
        return cls(shape, whole.part(is_factor))

    @property
    def modules(self) -> list[str]:
        """The last part of the names of its modules, such as q_proj."""
        return sorted({module_of(name).rpartition(".")[2] for name in self.manifest.shapes})

    def write(self, folder: Path, factors: Mapping[str, torch.Tensor]) -> None:
        """Write it with these values, as PEFT does."""
        write_adapter_shape(folder, self.shape, self.modules)
        write_factors(folder, factors)


def separated(
    weights: Iterable[tuple[str, torch.Tensor]], factors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a stream without an adapter's matrices.

    Args:
        weights: each is only lent.
        factors: gets copies of the matrices, on the host.
    """
    for name, tensor in weights:
        if is_factor(name):
            factors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        else:
            yield name, tensor
