# SPDX-License-Identifier: Apache-2.0
"""Traits of the engine on vLLM."""

from quadriga.engine_traits.traits import EngineTraits, Package

TRAITS = EngineTraits(
    takes_weights="between_tokens",
    computes_in="own_if_async",
    spans_ranks=True,
    # vLLM's build for CPUs crashes with expert parallelism.
    expert_parallel_devices=("cuda",),
    max_adapter_rank=512,
    reads_keys=("enforce_eager", "gpu_memory_utilization", "request_seeds"),
    # vLLM reports log-probabilities either before temperature and filter, or after both.
    lacks=("unfiltered_log_probs",),
    package=Package(
        module="vllm",
        title="vLLM",
        least_version="0.30",
        share_without_training=0.9,
        install=(
            "pip install 'vllm>=0.30,<0.34'; on a machine without an accelerator: scripts/install-vllm."
        ),
    ),
)
