# SPDX-License-Identifier: Apache-2.0
"""Traits of our own engine."""

from quadriga.engine_traits.traits import EngineTraits

TRAITS = EngineTraits(
    takes_weights="between_tokens",
    continues_unfinished=True,
    is_deterministic=True,
    reports_routes=True,
    spans_ranks=True,
    takes_shards=True,
    packs_weights=True,
    ignores_lora_merge=(
        "the actor's own modules compute with the adapter, a copy of them with merged weights"
    ),
    reads_keys=("enforce_eager",),
)
