# SPDX-License-Identifier: Apache-2.0
"""The end of the weights' way: what runs in the process that holds vLLM's model, called by name from the engine.

begin_weights ─> load_tensor / load_parcel, as often as needed ─> end_weights ─> clear_pages
adapter_marks ─> vLLM's own add_lora ─> missing_factors
"""

from pathlib import Path
from typing import Any

import torch

from quadriga.config.adapter import read_adapter
from quadriga.models.adapter_files import AdapterFiles, is_factor_a
from quadriga.rollout.vllm.library import adapter_layers, cache_pages, probe_private, reload_functions, repack_tied
from quadriga.rollout.vllm.parcels import ParcelReader
from quadriga.weight_sync.fingerprint import tensor_fingerprint


class WeightReceiver:
    """Becomes a base class of vLLM's worker (`worker_extension_cls`); `self` is that worker."""

    vllm_config: Any
    model_runner: Any
    model_config: Any

    def begin_weights(self) -> None:
        """Takes the model's layers apart, to be put together again as their weights come."""
        reload = reload_functions()
        self.quadriga_marks: dict[str, str] = {}
        self.quadriga_parcels = ParcelReader()
        with reload.within(self.vllm_config):
            reload.begin(self.model_runner.get_model())

    def load_tensor(self, name: str, tensor: torch.Tensor) -> None:
        """One weight, which is only lent: vLLM keeps it until its layer is complete."""
        self.load_owned(name, tensor.detach().clone())

    def load_parcel(self, label: dict[str, Any]) -> None:
        """Weights that another process has put into shared memory."""
        for name, tensor in self.quadriga_parcels.open(label):
            self.load_owned(name, tensor)

    def load_owned(self, name: str, tensor: torch.Tensor) -> None:
        """One weight whose memory is ours. Its fingerprint is that of the very tensor that vLLM gets."""
        self.quadriga_marks[name] = tensor_fingerprint(tensor)
        with reload_functions().within(self.vllm_config), torch.no_grad():
            self.model_runner.get_model().load_weights(iter([(name, tensor)]))

    def end_weights(self) -> dict[str, str]:
        """Puts together what is left, also after a stream that broke off. Returns the fingerprint of each weight."""
        reload = reload_functions()
        self.quadriga_parcels.close()
        with reload.within(self.vllm_config), torch.no_grad():
            reload.end(self.model_runner.get_model(), self.model_config)
            repack_tied(self.model_runner.get_model())
        return self.quadriga_marks

    def clear_pages(self) -> int:
        """Zeroes keys and values: a NaN in a page outlives the weights that made it. Returns how many tensors."""
        pages = cache_pages(self)
        for page in pages:
            page.zero_()
        return len(pages)

    def adapter_marks(self, folder: str) -> dict[str, str]:
        """The fingerprint of each matrix of an adapter, as this process reads it."""
        files = AdapterFiles(Path(folder))
        self.quadriga_shape = read_adapter(Path(folder))
        self.quadriga_factors = {name: files.read(name).clone() for name in files.names()}  # the file goes away
        return {name: tensor_fingerprint(tensor) for name, tensor in self.quadriga_factors.items()}

    def missing_factors(self) -> list[str]:
        """Names of the matrices that `adapter_marks` has read and that no layer of this process holds.

        Of layers that several processes share each holds a part of A or of B. Which part of B is not looked at.
        """
        shape, factors, self.quadriga_factors = self.quadriga_shape, self.quadriga_factors, {}
        layers = adapter_layers(self)
        if not layers:  # they cannot be looked at: the probe has said so
            return []
        num_processes = self.vllm_config.parallel_config.tensor_parallel_size
        ranks = {shape.rank, -(-shape.rank // num_processes)}
        held = {tensor_fingerprint(part) for a, b in layers for rank in ranks for part in (a[:rank], b[:, :rank])}
        dtype = layers[0][0].dtype
        missing = []
        for name, tensor in factors.items():
            whole = tensor.to(dtype)
            if is_factor_a(name):
                parts = [whole, *whole.chunk(num_processes, 0), *whole.chunk(num_processes, 1)]
            elif num_processes == 1:
                parts = [whole * shape.scale]
            else:
                continue
            if held.isdisjoint(tensor_fingerprint(part) for part in parts):
                missing.append(name)
        return missing

    def private_parts(self) -> list[tuple[str, bool, str]]:
        """See `probe_private`, as plain tuples."""
        return [(one.name, one.is_there, one.reason) for one in probe_private(self)]
