# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter that vLLM applies beside its weights: one at a time, with each publication under a new name.

    stream ── separated ──> weights below, one after the other ──> as without an adapter
                    └─────> A and B of every module, kept ──> a folder in PEFT's form
    folder ──> each process of vLLM: fingerprints of what it reads ──> add_lora ──> do its layers hold it?

vLLM reads an adapter from a folder, and tells the KV cache of one from that of another by its name.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quadriga.config.adapter import AdapterShape
from quadriga.descendants import own_folder
from quadriga.errors import WeightSyncError
from quadriga.models.adapter_files import is_factor, write_adapter_shape, write_factors
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.vllm.cores import Core
from quadriga.rollout.vllm.library import WHERE, Library
from quadriga.weight_sync.publish import name_some

_MERGE = "With actor_rollout_ref.model.lora_merge=true the adapter travels merged."
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Room that vLLM can make for an adapter; the last one is vLLM's trait `max_adapter_rank`."""


@dataclass(frozen=True)
class Adapter:
    """An adapter without its values: its rank, scale and the like, and the matrices A and B of every module."""

    shape: AdapterShape
    manifest: Manifest

    @property
    def modules(self) -> list[str]:
        """The last part of the names of its modules, such as q_proj."""
        return sorted(
            {name.partition(".lora_")[0].rpartition(".")[2] for name in self.manifest.shapes}
        )

    @property
    def room_for_rank(self) -> int:
        """The least rank that vLLM makes room for and that holds this one."""
        return next(rank for rank in _RANKS if rank >= self.shape.rank)


class AdapterSlot:
    """The place for an adapter in an engine of vLLM."""

    def __init__(self, adapter: Adapter, library: Library, core: Core) -> None:
        self._adapter, self._library, self._core = adapter, library, core
        self._number = 0
        self.request: Any = None
        """What goes with each request for a response; None while there is no adapter."""

    def replace(self, factors: Mapping[str, torch.Tensor]) -> list[dict[str, str]]:
        """Have vLLM apply these matrices instead of those before. Returns their fingerprints from each process.
        Raises WeightSyncError: vLLM holds another adapter afterwards, or not all of this one."""
        if self.request is not None:
            self.request = None
            self._core.ask("remove_lora", self._number)
        self._number += 1
        with own_folder() as folder:
            write_adapter_shape(Path(folder), self._adapter.shape, self._adapter.modules)
            write_factors(Path(folder), factors)
            marks = self._core.call("adapter_marks", folder)
            request = self._library.lora.LoRARequest(
                f"quadriga-{self._number}", self._number, folder
            )
            self._core.ask("add_lora", request)
            held = set(self._core.ask("list_loras"))
            missing = self._core.call("missing_factors") if held == {self._number} else []
        if held != {self._number}:
            where, expected = (
                f"{WHERE}, adapter",
                f"only number {self._number}, which was just given to it",
            )
            fix = f"Nothing else may give adapters to this vLLM. {_MERGE}"
            raise WeightSyncError(
                where, got=f"adapters {sorted(held)} in vLLM", expected=expected, fix=fix
            )
        for rank, names in enumerate(missing):
            if names:
                where = f"{WHERE}, adapter in process {rank}"
                got = f"{len(names)} matrices that no layer of vLLM's holds: {name_some(names)}"
                fix = f"vLLM has other modules for this model than transformers. {_MERGE}"
                raise WeightSyncError(
                    where, got=got, expected="each in the layer that it belongs to", fix=fix
                )
        self.request = request
        return marks


def separated(
    weights: Iterable[tuple[str, torch.Tensor]], factors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """The weights of a stream without an adapter's matrices; `factors` gets copies of those, on the host."""
    for name, tensor in weights:
        if is_factor(name):
            factors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        else:
            yield name, tensor
