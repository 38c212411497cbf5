# SPDX-License-Identifier: Apache-2.0
"""The `external_lib` of a run that takes vLLM's build for CPUs for one on a GPU.

Each process has the stand-in for CUDA. vLLM computes behind it: its tensors and groups are those of
a CPU, and its arguments those of a GPU as far as a CPU takes them. Its sleep is rehearsed by what it
loses: weights and KV cache become NaN, except weights that it keeps on the host.

QUADRIGA_REHEARSAL_FINDINGS names a file that gets a line for each process, sleep, wake-up and mistake.
"""

import json
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import wraps
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock, patch

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from quadriga.models import heads
from quadriga.rollout.vllm.cores import InProcessCore, ProcessCore
from quadriga.rollout.vllm.engine import WorkerExtension
from tests.rehearsal.stand_in import StandIn
from tests.vllm.losing import lose
from tests.vllm.scheduling import keep_async_scheduling

FINDINGS = "QUADRIGA_REHEARSAL_FINDINGS"
EVENT = "event: "
SHARED_FILES: list[int] = []


def note(text: str) -> None:
    """Append a line to the file of the run, which all of its processes write."""
    with Path(os.environ[FINDINGS]).open("a") as file:
        file.write(f"{EVENT}{text}\n")


# On a CPU vLLM replaces functions of these modules by ones that do nothing; they are for it alone.
REPLACED: dict[Any, dict[str, Any]] = {torch.cuda: {}, torch.accelerator: {}}


@contextmanager
def on_the_host() -> Iterator[None]:
    """Context manager: tensors are on the host in this thread, and vLLM has what it replaced."""
    function_modes = []
    while torch._C._len_torch_function_stack():
        function_modes.append(_pop_mode())
    before = {module: dict(vars(module)) for module in REPLACED}
    for module, names in REPLACED.items():
        vars(module).update(names)
    try:
        with _disable_current_modes():
            yield
    finally:
        for module, names in before.items():
            for name, value in vars(module).items():
                if value is not names.get(name):
                    REPLACED[module][name] = value
            vars(module).update(names)
        for mode in reversed(function_modes):
            _push_mode(mode)


def hosted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, on the host."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with on_the_host():
            return function(*args, **options)

    return call


def share(storage: torch.UntypedStorage) -> tuple[Any, ...]:
    """Make a handle of a GPU's memory: the name of a file with its bytes, until the next one."""
    if storage.device.type != "cuda":
        raise RuntimeError(f"_share_cuda_: only available on CUDA, got {storage.device}")
    while SHARED_FILES:
        os.close(SHARED_FILES.pop())
    file = os.memfd_create("handle")
    SHARED_FILES.append(file)
    name = f"/proc/{os.getpid()}/fd/{file}"
    num_bytes = storage.nbytes()
    with on_the_host():
        torch.from_file(name, True, num_bytes, dtype=torch.uint8).untyped_storage().copy_(storage)
    return storage.device.index, name.encode(), num_bytes, 0, b"", 0, b"", False


def open_shared(device: int, name: bytes, num_bytes: int, *rest: Any) -> torch.UntypedStorage:
    """The memory of a handle."""
    note(f"handle {device}")
    return torch.from_file(name.decode(), True, num_bytes, dtype=torch.uint8).untyped_storage()


class Extension(WorkerExtension):
    """The methods of vLLM's workers, which lose memory asleep, and open the handles of `share`."""

    def load_bucket(self, bucket: dict[str, Any] | list[tuple[str, torch.Tensor]]) -> None:
        """Load a bucket; from a handle where vLLM has a process of its own."""
        if isinstance(bucket, list):
            super().load_bucket(bucket)
            return
        with (
            patch.object(torch.UntypedStorage, "_new_shared_cuda", open_shared, create=True),
            patch.object(torch.cuda, "current_stream", MagicMock()),
        ):
            super().load_bucket(bucket)

    def lose(self, keeps_weights: bool) -> None:
        """Lose what a sleeping vLLM releases."""
        lose(self, keeps_weights)


def on_a_cpu(arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments of an engine on a GPU for vLLM's build for CPUs."""
    note(f"engine {json.dumps(arguments)}")
    return arguments | {
        "enforce_eager": True,
        "enable_sleep_mode": False,
        "kv_cache_memory_bytes": 32 << 20,
        "block_size": 32,
        "worker_extension_cls": "tests.vllm.gpu_line_worker.Extension",
    }


def replace_core() -> None:
    """Let cores start and ask vLLM's build for CPUs, with a sleep that it does not have."""
    begin = InProcessCore.__init__
    ask = InProcessCore.ask

    def begin_hosted(
        core: InProcessCore, library: Any, arguments: dict[str, Any], *more: Any
    ) -> None:
        with on_the_host():
            begin(core, library, on_a_cpu(arguments), *more)
        for name in ("step", "add_request", "abort_request"):
            setattr(core.engine, name, hosted(getattr(core.engine, name)))

    def ask_hosted(core: InProcessCore, method: str, *args: Any, **options: Any) -> Any:
        if method in ("sleep", "wake_up"):
            note(f"{method} {options}")
            if method == "sleep":
                core.call("lose", options["level"] == 1)
            return None
        with on_the_host():
            return ask(core, method, *args, **options)

    InProcessCore.__init__ = begin_hosted
    InProcessCore.ask = ask_hosted


def replace_process_core() -> None:
    """Let cores start vLLM's build for CPUs in a process of its own, with a sleep."""
    begin = ProcessCore.__init__
    ask = ProcessCore.ask

    def begin_hosted(
        core: ProcessCore, library: Any, arguments: dict[str, Any], *more: Any
    ) -> None:
        # Its default on a GPU. In the trainer's process it is off.
        setattr(*keep_async_scheduling())
        begin(core, library, on_a_cpu(arguments), *more)
        note(f"asynchronous {core.engine.vllm_config.scheduler_config.async_scheduling}")

    def ask_hosted(core: ProcessCore, method: str, *args: Any, **options: Any) -> Any:
        if method not in ("sleep", "wake_up"):
            return ask(core, method, *args, **options)
        note(f"{method} {options}")
        if method == "sleep":
            core.call("lose", options["level"] == 1)
        return None

    ProcessCore.__init__ = begin_hosted
    ProcessCore.ask = ask_hosted


def install() -> AbstractContextManager[StandIn]:
    """Put the stand-in into this process, for as long as the result lives."""
    note(f"gpu {os.environ['CUDA_VISIBLE_DEVICES']}")
    run_on_host = threading.Thread.run
    installed = StandIn(num_devices=1, file=Path(os.environ[FINDINGS])).installed()
    installed.__enter__()
    run_on_gpu = threading.Thread.run

    def run(thread: threading.Thread) -> None:
        # vLLM's front end is for it alone.
        if thread.name == "vllm":
            run_on_host(thread)
        else:
            run_on_gpu(thread)

    threading.Thread.run = run
    torch.UntypedStorage._share_cuda_ = share
    replace_core()
    replace_process_core()
    # All but what NCCL and contexts take is free, where the stand-in says half.
    torch.cuda.mem_get_info = lambda device=None: (78 << 30, 80 << 30)
    # vLLM brings Triton, which needs a driver.
    heads.HAS_TRITON = False
    return installed


# As the `external_lib` of a run it has another name than as a module of vLLM's workers. The driver
# of a run on Ray has no GPU.
if __name__.startswith("quadriga_user") and "CUDA_VISIBLE_DEVICES" in os.environ:
    installed = install()
