# SPDX-License-Identifier: Apache-2.0
"""What Megatron-core asks of CUDA, answered on a CPU, while a call into it lasts.

    torch.cuda.current_device()              the CPU, where Megatron makes its buffers
    device="cuda" in calls of torch          the CPU
    numbers of tokens for experts            lists, where they are copied from a device elsewhere
    Megatron's tracker of random states      none: there is no dropout here
    CUDA's random state, in recomputation    none

Nothing of Megatron's files is changed, and what is replaced is put back when the call ends: other roles of the process
see torch as it is. On CUDA nothing is replaced.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.overrides import TorchFunctionMode

REPLACED = (
    "torch.cuda.current_device, device='cuda', CUDA's random states"  # what is, for people to read
)


class _OnCPU(TorchFunctionMode):
    """Calls of torch with `device="cuda"`, or a number, go to the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


class _NoRandomStates:
    """In place of the tracker: nothing here is drawn."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        pass


def _splits(dispatcher: Any, point: str, tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """In place of copies from a device: collectives take numbers of tokens as lists."""
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        if isinstance(found := getattr(dispatcher, name, None), torch.Tensor):
            setattr(dispatcher, name, found.tolist())
    return tokens_per_expert


@contextmanager
def _stand_ins() -> Iterator[None]:
    with (
        _OnCPU(),
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        patch.object(MoEAlltoAllTokenDispatcher, "cuda_dtoh_stream", "none"),
        patch.object(MoEAlltoAllTokenDispatcher, "_maybe_dtoh_and_synchronize", _splits),
        patch.object(random, "_CUDA_RNG_STATE_TRACKER", _NoRandomStates()),
        patch.object(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        patch.object(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.empty(0)),
        patch.object(random, "_set_cuda_rng_state", lambda *args, **kwargs: None),
    ):
        yield


def around_megatron(device: torch.device) -> AbstractContextManager[None]:
    """Context around a call into Megatron, for models on `device`."""
    return nullcontext() if device.type == "cuda" else _stand_ins()
