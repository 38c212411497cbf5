# SPDX-License-Identifier: Apache-2.0
"""Private names of vLLM that Quadriga uses, looked up in the sources of several versions.

    python scripts/vllm_contract.py FILE.whl ... > tests/unit/rollout/vllm/contract.json

Reads wheels, or folders that contain `vllm`, without importing them. vLLM has two model runners:
the first one computes on CPUs, the second one by default on GPUs, so that tests on a CPU never meet
it. A name that only one of them has breaks a run on the other device.

The table has the names that each version lacks. A test compares it with this list, and this list
with the code that uses vLLM.
"""

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

FIRST_RUNNER = "the first model runner"
SECOND_RUNNER = "the second model runner"
_ENGINE = "v1/engine"
_WORKER = "v1/worker"
CONTRACT: dict[str, tuple[tuple[tuple[str, str], ...], tuple[str, ...]]] = {
    FIRST_RUNNER: (
        ((f"{_WORKER}/gpu_model_runner.py", "GPUModelRunner"),),
        ("get_model", "kv_caches", "requests"),
    ),
    SECOND_RUNNER: (
        ((f"{_WORKER}/gpu/model_runner.py", "GPUModelRunner"),),
        ("get_model", "kv_caches", "req_states"),
    ),
    "a request of the first runner": (
        ((f"{_WORKER}/gpu_input_batch.py", "CachedRequestState"),),
        ("output_token_ids",),
    ),
    "requests of the second runner": (
        ((f"{_WORKER}/gpu/states.py", "RequestState"),),
        ("prompt_len", "req_id_to_index", "total_len"),
    ),
    "an array on the device": (
        ((f"{_WORKER}/gpu/buffer_utils.py", "StagedWriteTensor"),),
        ("gpu",),
    ),
    "an array on the host": (((f"{_WORKER}/gpu/buffer_utils.py", "UvaBackedTensor"),), ("np",)),
    "the worker": (
        ((f"{_WORKER}/gpu_worker.py", "Worker"), (f"{_WORKER}/worker_base.py", "WorkerBase")),
        ("device", "model_config", "model_runner", "vllm_config"),
    ),
    "the engine in this process": (
        ((f"{_ENGINE}/llm_engine.py", "LLMEngine"), (f"{_ENGINE}/core_client.py", "InprocClient")),
        (
            *("abort_request", "add_lora", "add_request", "collective_rpc", "engine_core"),
            *("has_unfinished_requests", "list_loras", "output_processor", "remove_lora"),
            *("reset_encoder_cache", "reset_prefix_cache", "shutdown", "sleep", "step", "wake_up"),
        ),
    ),
    "the engine in processes of its own": (
        ((f"{_ENGINE}/async_llm.py", "AsyncLLM"),),
        (
            *("abort", "add_lora", "collective_rpc", "engine_core", "errored", "from_engine_args"),
            *("generate", "is_sleeping", "list_loras", "pause_generation", "remove_lora"),
            *("reset_encoder_cache", "reset_prefix_cache", "resume_generation", "shutdown"),
            *("sleep", "wake_up"),
        ),
    ),
    "processes of the engine": (
        (
            (f"{_ENGINE}/core_client.py", "MPClient"),
            (f"{_ENGINE}/core_client.py", "BackgroundResources"),
            (f"{_ENGINE}/utils.py", "CoreEngineProcManager"),
        ),
        ("engine_manager", "processes", "resources"),
    ),
    "outputs": (
        (
            (f"{_ENGINE}/output_processor.py", "OutputProcessor"),
            (f"{_ENGINE}/output_processor.py", "RequestState"),
        ),
        ("external_req_id", "make_request_output", "request_states"),
    ),
    "finish reasons": (((f"{_ENGINE}/__init__.py", "FinishReason"),), ("ABORT",)),
    "executors": (
        (
            ("v1/executor/uniproc_executor.py", "UniProcExecutor"),
            ("v1/executor/uniproc_executor.py", ""),
        ),
        ("ExecutorWithExternalLauncher", "UniProcExecutor", "_distributed_args"),
    ),
    "loading layer by layer": (
        (("model_executor/model_loader/reload/__init__.py", ""),),
        ("finalize_layerwise_reload", "initialize_layerwise_reload"),
    ),
    "adapters in layers": (
        (("lora/layers/base_linear.py", "BaseLinearLayerWithLoRA"),),
        ("lora_a_stacked", "lora_b_stacked"),
    ),
    "arguments": (
        (("engine/arg_utils.py", "EngineArgs"),),
        (
            *("async_scheduling", "disable_custom_all_reduce", "distributed_executor_backend"),
            *("disable_log_stats", "dtype", "enable_chunked_prefill", "enable_expert_parallel"),
            *("enable_lora", "enable_prefix_caching", "enable_sleep_mode", "enforce_eager"),
            *("generation_config", "gpu_memory_utilization", "hf_overrides"),
            *("kv_cache_memory_bytes", "limit_mm_per_prompt", "load_format", "logprobs_mode"),
            *("lora_target_modules", "max_lora_rank", "max_loras", "max_model_len"),
            *("max_num_batched_tokens", "max_num_seqs", "mm_processor_kwargs", "model"),
            *("tensor_parallel_size", "tokenizer", "trust_remote_code", "worker_extension_cls"),
        ),
    ),
}
"""By what it is: places of the sources (file, class; "": the file itself), and the names."""

Read = Callable[[str], str | None]


def names_of(source: str, class_name: str) -> set[str]:
    """Names that a class has: its methods, class attributes, and attributes that it sets.

    Args:
        source: text of a file.
        class_name: the class; "": what the file itself defines and imports.
    """
    tree: ast.Module | ast.ClassDef = ast.parse(source)
    if class_name:
        classes = [node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        matching = [node for node in classes if node.name == class_name]
        if not matching:
            return set()
        tree = matching[0]
    names = set()
    for node in tree.body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ImportFrom):
            names.update(alias.asname or alias.name for alias in node.names)
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        is_set = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        if is_set and isinstance(node.value, ast.Name) and node.value.id == "self":
            names.add(node.attr)
    return names


def missing_names(read: Read) -> dict[str, list[str]]:
    """Names of the contract that a version lacks, by what they belong to.

    Args:
        read: returns the text of a file below `vllm`, or None.
    """
    missing = {}
    for title, (places, names) in CONTRACT.items():
        known: set[str] = set()
        for file, class_name in places:
            source = read(file)
            if source is not None:
                known |= names_of(source, class_name)
        lacking = sorted(set(names) - known)
        if lacking:
            missing[title] = lacking
    return missing


def reader_of(place: Path) -> Read:
    """Reader of the files of a wheel, or of a folder that contains `vllm`."""
    if place.is_dir():

        def read_file(file: str) -> str | None:
            path = place / "vllm" / file
            return path.read_text(encoding="utf-8") if path.exists() else None

        return read_file

    archive = zipfile.ZipFile(place)
    members = set(archive.namelist())

    def read_member(file: str) -> str | None:
        name = f"vllm/{file}"
        return archive.read(name).decode() if name in members else None

    return read_member


def main(places: Sequence[str]) -> None:
    """Print the table of the versions in these wheels or folders."""
    table = {}
    for place in map(Path, places):
        version = re.search(r"\d+\.\d+\.\d+", place.name)
        if version is None:
            sys.exit(f"{place}: no version in its name")
        table[version[0]] = missing_names(reader_of(place))
    print(json.dumps({"missing": table}, indent=2))


if __name__ == "__main__":
    main(sys.argv[1:])
