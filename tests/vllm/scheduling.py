# SPDX-License-Identifier: Apache-2.0
"""vLLM's asynchronous scheduling, its default on GPUs, on a CPU, whose platform switches it off."""

from typing import Any


def keep_async_scheduling() -> tuple[Any, str, Any]:
    """The platform for CPUs, and its method that leaves the scheduling as CUDA's does.

    Returns:
        Arguments of `setattr`.
    """
    from vllm.platforms.cpu import CpuPlatform

    check = CpuPlatform.check_and_update_config

    def check_and_keep(config: Any) -> None:
        wanted = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = wanted is None or wanted

    return CpuPlatform, "check_and_update_config", staticmethod(check_and_keep)


def batches_in_flight(engine: Any) -> Any:
    """Batches that an engine of this process computes; None without asynchronous scheduling."""
    return engine.core.engine.engine_core.engine_core.batch_queue
