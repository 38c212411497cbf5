# SPDX-License-Identifier: Apache-2.0
"""Traits of the engine on SGLang."""

from quadriga.engine_traits.traits import EngineTraits, Package

TRAITS = EngineTraits(
    computes_in="own",
    server_options=("url", "urls"),
    reads_keys=("enforce_eager", "gpu_memory_utilization"),
    # With a seed SGLang does not sample by min_p. With `ignore_eos` it also ignores the stop tokens
    # of the request.
    lacks=("min_p", "stop_token_ids"),
    package=Package(
        module="sglang",
        title="SGLang",
        least_version="0.5.23",
        share_without_training=0.9,
        install=(
            "pip install 'sglang>=0.5.23'; "
            "on a machine without an accelerator: scripts/install-sglang."
        ),
    ),
)
