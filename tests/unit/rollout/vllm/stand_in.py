# SPDX-License-Identifier: Apache-2.0
"""An engine on a library that stands where vLLM does: it takes weights, and an adapter out of a folder, and answers
with what it was told of them. Its processes have the real end of the weights' way.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from quadriga.config.adapter import read_adapter
from quadriga.models.adapter_files import AdapterFiles, factor_names
from quadriga.rollout.interface import Completion, SamplingParams
from quadriga.rollout.vllm import engine
from quadriga.rollout.vllm.adapter import Adapter
from quadriga.rollout.vllm.cores import InProcessCore
from quadriga.rollout.vllm.engine import VLLMEngine, WorkerExtension
from quadriga.rollout.vllm.library import VLLMLibrary

ROOM = 8


class LoRARequest(NamedTuple):
    """vLLM's."""

    lora_name: str
    lora_int_id: int
    lora_path: str


class Layer(nn.Module):
    """A module of vLLM's with room for an adapter."""

    def __init__(self, out_size: int, in_size: int) -> None:
        super().__init__()
        self.lora_a_stacked = (torch.zeros(1, 1, ROOM, in_size),)
        self.lora_b_stacked = (torch.zeros(1, 1, out_size, ROOM),)


class Process(WorkerExtension):
    """One that holds vLLM's model: weights by name, and a layer for each module with an adapter."""

    def __init__(self, adapter: Adapter | None) -> None:
        self.weights: dict[str, torch.Tensor] = {}
        sizes = {} if adapter is None else adapter.manifest.shapes
        modules = [name.partition(".lora_A.")[0] for name in sizes if ".lora_A." in name]
        self.layers = {
            module: Layer(
                sizes[factor_names(f"{module}.weight")[1]][0],
                sizes[factor_names(f"{module}.weight")[0]][1],
            )
            for module in modules
        }
        model = nn.ModuleList(self.layers.values())
        model.load_weights = self.take
        self.model_runner = SimpleNamespace(get_model=lambda: model)
        self.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(model_type="llama"))
        self.vllm_config = SimpleNamespace(
            parallel_config=SimpleNamespace(tensor_parallel_size=1), lora_config=None
        )

    def take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """The model's `load_weights`."""
        self.weights |= {name: tensor.clone() for name, tensor in weights}

    def clear_cache(self) -> None:
        pass

    def missing_parts(self) -> list[str]:
        return []

    def apply(self, folder: Path) -> None:
        """Take an adapter as vLLM does."""
        files, shape = AdapterFiles(folder), read_adapter(folder)
        for module, layer in self.layers.items():
            name_a, name_b = factor_names(f"{module}.weight")
            layer.lora_a_stacked[0][0, 0, : shape.rank] = files.read(name_a)
            layer.lora_b_stacked[0][0, 0, :, : shape.rank] = files.read(name_b) * shape.scale


class StandInCore(InProcessCore):
    """In the place of vLLM's engine.

    Attributes:
        asked: every call.
        adapters: numbers of those that it holds.
        meddle: gets the folder of each adapter on its way, by the name of the call that reads it next.
    """

    def __init__(self, adapter: Adapter | None) -> None:
        self.processes = [Process(adapter)]
        self.asked: list[str] = []
        self.adapters: set[int] = set()
        self.meddle: Callable[[str, Path], None] = lambda method, folder: None
        self.is_busy = False

    def generate_batch(self, requests: Any, count_ended: Any = None) -> Any:
        raise NotImplementedError

    def abort(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        self.asked.append(args[0] if method == "collective_rpc" else method)
        match method:
            case "collective_rpc":
                if args[0] == "adapter_fingerprints":
                    self.meddle(args[0], Path(options["args"][0]))
                return [getattr(process, args[0])(*options["args"]) for process in self.processes]
            case "reset_prefix_cache":
                return not self.is_busy
            case "add_lora":
                self.meddle(method, Path(args[0].lora_path))
                self.adapters = {args[0].lora_int_id}  # the place for one
                for process in self.processes:
                    process.apply(Path(args[0].lora_path))
            case "remove_lora":
                self.adapters -= {args[0]}
            case "list_loras":
                return self.adapters


class StandIn(VLLMEngine):
    """An engine on `StandInCore`; `loads` has the names that came, for each load."""

    core: StandInCore

    def __init__(self, *args: Any, **more: Any) -> None:
        self.loads: list[list[str]] = []
        super().__init__(*args, **more)

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        images: Any = None,
    ) -> list[Completion]:
        self._require_ready(prompts, sampling, images)
        # The token says which adapter it is.
        request = None if self._slot is None else self._slot.request
        number = 0 if request is None else request.lora_int_id
        return [Completion([number], [0.0], "stop", self.weight_version) for _ in prompts]

    def load_weights(self, weights: Any, version: int) -> None:
        names: list[str] = []
        self.loads.append(names)
        super().load_weights(
            ((names.append(name), (name, tensor))[1] for name, tensor in weights), version
        )

    def _make_core(self) -> StandInCore:
        return StandInCore(self.adapter)


def stand_in_for_vllm(monkeypatch: pytest.MonkeyPatch, version: str = "0.32.0") -> None:
    """Let engines find the library that stands there."""
    lora = SimpleNamespace(LoRARequest=LoRARequest)
    monkeypatch.setattr(engine, "load", lambda: VLLMLibrary(version, None, None, lora))
    reload = (lambda model: None, lambda model, config: None, nullcontext)
    monkeypatch.setattr(engine, "layerwise_reload", lambda: reload)
