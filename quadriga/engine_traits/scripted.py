# SPDX-License-Identifier: Apache-2.0
"""Traits of the engine that gives canned responses."""

from quadriga.engine_traits.traits import EngineTraits

TRAITS = EngineTraits(
    ignores_lora_merge="it has no weights",
    file_options=("responses_file",),
)
