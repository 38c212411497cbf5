# SPDX-License-Identifier: Apache-2.0
"""The `external_lib` of a run that takes vLLM's build for CPUs for one on a GPU.

Each process has the stand-in for CUDA. vLLM computes behind it: its tensors and groups are those of
a CPU, and its arguments those of a GPU as far as a CPU takes them. Its sleep is rehearsed by what it
loses: weights and KV cache become NaN, except weights that it keeps on the host.

QUADRIGA_REHEARSAL_FINDINGS names a file that gets a line for each process, sleep, wake-up and mistake.
"""

import ctypes
import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partialmethod, wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import _pop_mode, _push_mode
from torch.utils._python_dispatch import _disable_current_modes

from quadriga.models import heads
from quadriga.rollout.vllm import cores
from quadriga.rollout.vllm.engine import WorkerExtension
from tests.rehearsal.stand_in import StandIn

FINDINGS = "QUADRIGA_REHEARSAL_FINDINGS"
EVENT = "event: "


def note(text: str) -> None:
    """Append a line to the file of the run, which all of its processes write."""
    with Path(os.environ[FINDINGS]).open("a") as file:
        file.write(f"{EVENT}{text}\n")


# vLLM replaces functions of torch.accelerator by ones that do nothing; they are its own alone.
VLLM_ACCELERATOR: dict[str, Any] = {}


@contextmanager
def on_the_host() -> Iterator[None]:
    """Context manager: torch has no GPU in this thread, but for what is asked of `torch.cuda`."""
    function_modes = []
    while torch._C._len_torch_function_stack():
        function_modes.append(_pop_mode())
    accelerator = vars(torch.accelerator)
    before = dict(accelerator)
    accelerator.update(VLLM_ACCELERATOR)
    try:
        with _disable_current_modes():
            yield
    finally:
        VLLM_ACCELERATOR.update(accelerator)
        accelerator.update(before)
        for mode in reversed(function_modes):
            _push_mode(mode)


def hosted(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, on the host."""

    @wraps(function)
    def call(*args: Any, **options: Any) -> Any:
        with on_the_host():
            return function(*args, **options)

    return call


class Extension(WorkerExtension):
    """The methods of vLLM's workers, which lose memory asleep and open handles of the stand-in."""

    def load_bucket(self, bucket: Any) -> None:
        if "handle" in bucket:
            torch.UntypedStorage._new_shared_cuda = staticmethod(opened)
            torch.cuda.current_stream = lambda device: SimpleNamespace(synchronize=lambda: None)
        super().load_bucket(bucket)

    def lose(self, keeps_weights: bool) -> None:
        """Fill what a sleeping vLLM releases with NaN."""
        if not keeps_weights:
            for parameter in self.model_runner.get_model().parameters():
                if parameter.is_floating_point():
                    parameter.data.fill_(torch.nan)
        for tensor in self.model_runner.kv_caches:
            tensor.fill_(torch.nan)


def opened(device: int, file: str, num_bytes: int, *_: Any) -> torch.UntypedStorage:
    """The memory of another process, by the handle that `shared` made."""
    return torch.UntypedStorage.from_file(file, False, num_bytes)


def shared(storage: torch.UntypedStorage, share: Callable[..., Any]) -> tuple[Any, ...]:
    """A handle of memory on the stand-in that another process can open: its content in a file."""
    device, number, num_bytes, *more = share(storage)
    file = Path(os.environ[FINDINGS]).with_name(f"memory-{os.getpid()}-{number % 2}")
    file.write_bytes(ctypes.string_at(storage.data_ptr(), num_bytes))
    return device, str(file), num_bytes, *more


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


def replaced(kind: type[cores.Core]) -> None:
    """Let a kind of core start and ask vLLM's build for CPUs, with a sleep that it does not have."""
    begin = kind.__init__
    ask = kind.ask

    def begin_hosted(core: Any, library: Any, arguments: dict[str, Any], *more: Any) -> None:
        with on_the_host():
            begin(core, library, on_a_cpu(arguments), *more)
        if core.is_in_process:
            for name in ("step", "add_request", "abort_request"):
                setattr(core.engine, name, hosted(getattr(core.engine, name)))

    def ask_hosted(core: Any, method: str, *args: Any, **options: Any) -> Any:
        if method in ("sleep", "wake_up"):
            note(f"{method} {options}")
            if method == "sleep":
                core.call("lose", options["level"] == 1)
            return None
        with on_the_host():
            return ask(core, method, *args, **options)

    kind.__init__ = begin_hosted
    kind.ask = ask_hosted


def install() -> AbstractContextManager[StandIn]:
    """Put the stand-in into this process, for as long as the result lives."""
    note(f"gpu {os.environ['CUDA_VISIBLE_DEVICES']}")
    installed = StandIn(num_devices=1, file=Path(os.environ[FINDINGS])).installed()
    installed.__enter__()
    torch.UntypedStorage._share_cuda_ = partialmethod(shared, torch.UntypedStorage._share_cuda_)
    replaced(cores.InProcessCore)
    replaced(cores.ProcessCore)
    # vLLM brings Triton, which needs a driver.
    heads.HAS_TRITON = False
    return installed


# As the `external_lib` of a run it has another name than as a module of vLLM's workers. The driver
# of a run on Ray has no GPU.
if __name__.startswith("quadriga_user") and "CUDA_VISIBLE_DEVICES" in os.environ:
    installed = install()
