# SPDX-License-Identifier: Apache-2.0
"""The adapter that vLLM applies beside its weights: one at a time, under a new name and number with each publication.

matrices ─> a folder in PEFT's form ─> each process: fingerprints of what it reads ─> add_lora ─> do layers hold it?

vLLM takes an adapter from a folder, and tells keys and values of one from those of another by its name.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from quadriga.errors import WeightSyncError
from quadriga.rollout.adapter import Adapter
from quadriga.rollout.vllm.library import WHERE, Library
from quadriga.weight_sync.base import name_some

_MERGE = "With actor_rollout_ref.model.lora_merge=true the adapter travels merged."


class AdapterSlot:
    """The place for it.

    Args:
        adapter: what belongs to it.
        library: vLLM.
        ask: calls a method of vLLM's engine.
        call: calls a method of `WeightReceiver` in each process that holds the model.
    """

    def __init__(
        self, adapter: Adapter, library: Library, ask: Callable[..., Any], call: Callable[..., list[Any]]
    ) -> None:
        self._adapter, self._library, self._ask, self._call = adapter, library, ask, call
        self._number = 0
        self.request: Any = None
        """What each request for an answer has with it; None while there is no adapter."""

    def replace(self, factors: Mapping[str, torch.Tensor]) -> list[dict[str, str]]:
        """Have vLLM apply these matrices, and forget those before.

        Args:
            factors: all matrices of the adapter, under their names in the model.

        Returns:
            The fingerprint of each, from each process.

        Raises:
            WeightSyncError: vLLM holds another adapter afterwards, or not all of this one.
        """
        if self.request is not None:
            self.request = None
            self._ask("remove_lora", self._number)
        self._number += 1
        with TemporaryDirectory(prefix="quadriga-adapter-") as folder:
            self._adapter.write(Path(folder), factors)
            marks = self._call("adapter_marks", folder)
            request = self._library.lora.LoRARequest(f"quadriga-{self._number}", self._number, folder)
            self._ask("add_lora", request)
            self._require_held()
        self.request = request
        return marks

    def _require_held(self) -> None:
        held = set(self._ask("list_loras"))
        if held != {self._number}:
            raise WeightSyncError(
                f"{WHERE}, adapter",
                got=f"adapters {sorted(held)} in vLLM",
                expected=f"only number {self._number}, which was just given to it",
                fix=f"vLLM must not be given adapters by others. {_MERGE}",
            )
        for rank, missing in enumerate(self._call("missing_factors")):
            if missing:
                raise WeightSyncError(
                    f"{WHERE}, adapter in process {rank}",
                    got=f"{len(missing)} matrices that no layer of vLLM's holds: {name_some(missing)}",
                    expected="each in the layer that it belongs to",
                    fix=f"vLLM has other modules for this model than transformers. {_MERGE}",
                )
