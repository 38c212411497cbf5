# SPDX-License-Identifier: Apache-2.0
"""What runs in the processes that hold vLLM's model, called by name from the engine.

begin_weights ─> load_bucket, as often as needed ─> end_weights ─> clear_cache
adapter_marks ─> vLLM's own add_lora ─> missing_factors
"""

from pathlib import Path
from typing import Any

import torch

from quadriga.config.adapter import read_adapter
from quadriga.errors import RolloutError
from quadriga.models.adapter_files import AdapterFiles, is_factor_a
from quadriga.rollout.vllm.library import Reload, adapter_layers, cache_tensors, repack_tied
from quadriga.weight_sync.buckets import open_shared
from quadriga.weight_sync.fingerprint import tensor_fingerprint


class WorkerExtension:
    """Becomes a base class of vLLM's worker (`worker_extension_cls`); `self` is that worker."""

    vllm_config: Any
    model_runner: Any
    model_config: Any

    def begin_weights(self) -> None:
        """Prepare the model's layers to be put together again as their weights come."""
        self.quadriga_reload, self.quadriga_marks = Reload.functions(), {}
        with self.quadriga_reload.within(self.vllm_config):
            self.quadriga_reload.begin(self.model_runner.get_model())

    def load_bucket(self, bucket: dict[str, Any] | list[tuple[str, torch.Tensor]]) -> None:
        """Some weights; vLLM keeps each until its layer is complete. Fingerprints are of the very tensors that it gets.

        Args:
            bucket: names with tensors, or where another process has put them into shared memory (`pack_shared`).
        """
        for name, tensor in open_shared(bucket) if isinstance(bucket, dict) else bucket:
            self.quadriga_marks[name] = tensor_fingerprint(tensor)
            with self.quadriga_reload.within(self.vllm_config), torch.no_grad():
                self.model_runner.get_model().load_weights(iter([(name, tensor)]))

    def end_weights(self) -> dict[str, str]:
        """Put together what is left, also after a stream that broke off. Returns the fingerprint of each weight."""
        with self.quadriga_reload.within(self.vllm_config), torch.no_grad():
            self.quadriga_reload.end(self.model_runner.get_model(), self.model_config)
            repack_tied(self.model_runner.get_model())
        return self.quadriga_marks

    def clear_cache(self) -> None:
        """Zero the KV cache: a NaN in a block outlives the weights that made it."""
        for tensor in cache_tensors(self):
            tensor.zero_()

    def adapter_marks(self, folder: str) -> dict[str, str]:
        """The fingerprint of each matrix of an adapter, as this process reads it."""
        files = AdapterFiles(Path(folder))
        self.quadriga_shape = read_adapter(Path(folder))
        self.quadriga_factors = {name: files.read(name).clone() for name in files.names()}  # the file goes away
        return {name: tensor_fingerprint(tensor) for name, tensor in self.quadriga_factors.items()}

    def missing_factors(self) -> list[str]:
        """Names of the matrices that `adapter_marks` has read and that no layer of this process holds.

        Of layers that are tensor-parallel each rank holds a part of A or of B. Which part of B is not checked.
        """
        shape, factors, self.quadriga_factors = self.quadriga_shape, self.quadriga_factors, {}
        layers = adapter_layers(self)
        if not layers:  # they are not where they were: the probe has said so
            return []
        num_ranks = self.vllm_config.parallel_config.tensor_parallel_size
        sizes = {shape.rank, -(-shape.rank // num_ranks)}
        held = {tensor_fingerprint(part) for a, b in layers for size in sizes for part in (a[:size], b[:, :size])}
        dtype = layers[0][0].dtype
        missing = []
        for name, tensor in factors.items():
            whole = tensor.to(dtype)
            if is_factor_a(name):
                parts = [whole, *whole.chunk(num_ranks, 0), *whole.chunk(num_ranks, 1)]
            elif num_ranks == 1:
                parts = [whole * shape.scale]
            else:
                continue
            if held.isdisjoint(tensor_fingerprint(part) for part in parts):
                missing.append(name)
        return missing

    def private_parts(self) -> list[tuple[str, bool, str]]:
        """What is used of vLLM beyond its public interface: name, whether this version has it, and a reason."""
        cache = cache_tensors(self)
        found = [("KV cache", bool(cache), f"{len(cache)} tensors" if cache else "model_runner.kv_caches")]
        try:
            Reload.functions()
            found.append(("layerwise reload", True, "vllm.model_executor.model_loader.reload"))
        except RolloutError as error:
            found.append(("layerwise reload", False, str(error)))
        if self.vllm_config.lora_config is not None:
            layers = adapter_layers(self)
            found.append(("layers with adapters", bool(layers), f"{len(layers)}" if layers else "lora_a_stacked"))
        return found
