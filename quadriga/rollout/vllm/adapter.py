# SPDX-License-Identifier: Apache-2.0
"""A LoRA adapter that vLLM applies to its weights. Each weight sync replaces it under a new name.

    stream of weights -- split_off_adapter --> frozen weights, loaded as without an adapter
                                 +---> matrices A and B of all modules -> folder in PEFT's format
    folder -> fingerprints of what each process of vLLM reads -> add_lora -> check of its layers

vLLM reads adapters from folders. Its KV cache tells adapters apart by name.
"""

from collections.abc import Iterator, Mapping
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
from quadriga.rollout.vllm.library import WHERE, VLLMLibrary
from quadriga.weight_sync.publish import NamedWeights, name_some

_MERGE = "Or set actor_rollout_ref.model.lora_merge=true, so that the adapter arrives merged."
# Ranks that vLLM can make room for. The last one is the trait `max_adapter_rank` of this engine.
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True)
class Adapter:
    """Description of an adapter: rank, scale, and the names and shapes of its matrices."""

    shape: AdapterShape  # rank and scale
    manifest: Manifest  # names and shapes of the matrices A and B

    @property
    def modules(self) -> list[str]:
        """Names of the kinds of modules that have matrices, such as q_proj, sorted."""
        modules = set()
        for name in self.manifest.shapes:
            module, _, _ = name.partition(".lora_")
            modules.add(module.rpartition(".")[2])
        return sorted(modules)

    @property
    def room_for_rank(self) -> int:
        """Smallest rank that vLLM can make room for and that is enough for this adapter."""
        return next(rank for rank in _RANKS if rank >= self.shape.rank)


@dataclass
class AdapterSlot:
    """The place of an adapter in an engine of vLLM."""

    adapter: Adapter
    library: VLLMLibrary
    core: Core  # vLLM's engine
    number: int = 0  # number of loads so far, by which vLLM tells adapters apart
    request: Any = None  # `LoRARequest` to send with each prompt; None while there is no adapter

    def replace(self, factors: Mapping[str, torch.Tensor]) -> list[dict[str, str]]:
        """Replace the matrices of the adapter.

        Args:
            factors: the matrices A and B by name.

        Returns:
            For each process of vLLM, the fingerprints of the matrices that it read.

        Raises:
            WeightSyncError: after the load, vLLM holds another adapter, or not all of this one.
        """
        # No new prompt may use a half-loaded adapter, so `request` is only set at the end.
        if self.request is not None:
            self.request = None
            self.core.ask("remove_lora", self.number)
        self.number += 1
        with own_folder() as folder:
            write_adapter_shape(Path(folder), self.adapter.shape, self.adapter.modules)
            write_factors(Path(folder), factors)
            fingerprints = self.core.call("adapter_fingerprints", folder)
            request = self.library.lora.LoRARequest(f"quadriga-{self.number}", self.number, folder)
            self.core.ask("add_lora", request)
            numbers = set(self.core.ask("list_loras"))
            if numbers != {self.number}:
                raise WeightSyncError(
                    f"{WHERE}, adapter",
                    got=f"adapters {sorted(numbers)} in vLLM",
                    expected=f"only number {self.number}, which was just loaded",
                    fix=f"Give no other adapters to this vLLM. {_MERGE}",
                )
            missing = self.core.call("missing_factors")
        for rank, names in enumerate(missing):
            if names:
                raise WeightSyncError(
                    f"{WHERE}, adapter in process {rank}",
                    got=f"{len(names)} matrices that no layer of vLLM's holds: {name_some(names)}",
                    expected="each in the layer that it belongs to",
                    fix="vLLM has other modules for this model than transformers: train others"
                    f" (actor_rollout_ref.model.target_modules). {_MERGE}",
                )
        self.request = request
        return fingerprints


def split_off_adapter(
    weights: NamedWeights, factors: dict[str, torch.Tensor]
) -> Iterator[tuple[str, torch.Tensor]]:
    """Take the matrices of an adapter out of a stream of weights.

    Args:
        weights: names and tensors.
        factors: empty. While the stream is read, it gets copies of the adapter's matrices, on the
            host, by name.

    Yields:
        The other weights.
    """
    for name, tensor in weights:
        if is_factor(name):
            factors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        else:
            yield name, tensor
