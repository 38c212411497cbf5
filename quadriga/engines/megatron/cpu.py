# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the parts of CUDA that Megatron-core calls, to run it on a CPU.

    torch.cuda.current_device()              the CPU, where Megatron allocates its buffers
    device="cuda" in calls of torch          the CPU
    numbers of tokens for experts            lists, which Megatron otherwise copies from the device
    Megatron's tracker of random states      empty: there is no dropout here
    CUDA's random state, in recomputation    empty

They are in place only during a call into Megatron, so that other roles of the process see torch
unchanged. Megatron's files are not changed. On CUDA nothing is replaced.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from megatron.core.tensor_parallel import random
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from torch.overrides import TorchFunctionMode

REPLACED = "torch.cuda.current_device, device='cuda', CUDA's random states"
"""The parts that are replaced, for people to read."""


class _OnCPU(TorchFunctionMode):
    """Redirect calls of torch with a CUDA device to the CPU."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        device = kwargs.get("device")
        # torch takes a number for the index of a CUDA device.
        if device is not None and torch.device(device).type == "cuda":
            kwargs = {**kwargs, "device": torch.device("cpu")}
        return func(*args, **kwargs)


class _EmptyStateTracker:
    """Replaces Megatron's tracker of random states: there is no dropout."""

    def fork(self, name: str = "") -> AbstractContextManager[None]:
        return nullcontext()

    def get_states(self) -> dict[str, torch.Tensor]:
        return {}

    def set_states(self, states: dict[str, torch.Tensor]) -> None:
        pass


def _convert_splits(dispatcher: Any, point: str, tokens_per_expert: torch.Tensor) -> torch.Tensor:
    """Replace Megatron's copies from the device: convert numbers of tokens to lists.

    Args:
        dispatcher: Megatron's dispatcher of tokens to experts, whose attributes are converted.
        point: not used.
        tokens_per_expert: returned unchanged.
    """
    for name in ("input_splits", "output_splits", "output_splits_tp"):
        splits = getattr(dispatcher, name, None)
        if isinstance(splits, torch.Tensor):
            setattr(dispatcher, name, splits.tolist())
    return tokens_per_expert


@contextmanager
def _replace_cuda() -> Iterator[None]:
    """Context manager: replace the parts of CUDA that Megatron calls."""
    dispatcher = MoEAlltoAllTokenDispatcher
    with (
        _OnCPU(),
        patch.object(torch.cuda, "current_device", lambda: torch.device("cpu")),
        # For None, Megatron would create a CUDA stream. Nothing uses this text.
        patch.object(dispatcher, "cuda_dtoh_stream", "none"),
        patch.object(dispatcher, "_maybe_dtoh_and_synchronize", _convert_splits),
        patch.object(random, "_CUDA_RNG_STATE_TRACKER", _EmptyStateTracker()),
        patch.object(random, "_CUDA_RNG_STATE_TRACKER_INITIALIZED", True),
        patch.object(random, "_get_cuda_rng_state", lambda *args, **kwargs: torch.empty(0)),
        patch.object(random, "_set_cuda_rng_state", lambda *args, **kwargs: None),
    ):
        yield


def megatron_context(device: torch.device) -> AbstractContextManager[None]:
    """Context manager for a call into Megatron: on a CPU, replace what it calls of CUDA."""
    return nullcontext() if device.type == "cuda" else _replace_cuda()
