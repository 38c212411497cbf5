# SPDX-License-Identifier: Apache-2.0
"""Traits of the engine that asks running servers over HTTP."""

from quadriga.engine_traits.traits import EngineTraits

TRAITS = EngineTraits(
    takes_weights="never",
    computes_in="servers",
    ignores_lora_merge="its servers keep their weights",
    server_options=("urls",),
)
