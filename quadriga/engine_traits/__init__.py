# SPDX-License-Identifier: Apache-2.0
"""Declared abilities of rollout engines: data that configuration, workers and engines read.

Nobody else compares the names or classes of engines. A user's engine declares its traits in its own
file, which is read without being imported.
"""

from functools import cache

from quadriga.engine_traits import hf, http, native, scripted, sglang, vllm
from quadriga.engine_traits.traits import EngineTraits
from quadriga.engine_traits.user_engine import read_traits
from quadriga.errors import ConfigError, did_you_mean

DEFAULT_ENGINE = "native"
ENGINES: dict[str, EngineTraits] = {
    DEFAULT_ENGINE: native.TRAITS,
    "hf": hf.TRAITS,
    "vllm": vllm.TRAITS,
    "sglang": sglang.TRAITS,
    "http": http.TRAITS,
    "scripted": scripted.TRAITS,
}
"""Traits of our engines by name. `workers/rollout_engines.py` has their classes."""


@cache
def traits_of(name: str) -> EngineTraits:
    """Traits of an engine. A user's file is read once in a process, until `cache_clear`.

    Args:
        name: a name in `ENGINES`, `path/to/file.py:Class` or `pkg://package.module:Class`.

    Raises:
        ConfigError: there is no such engine, or it does not declare its traits.
    """
    if name in ENGINES:
        return ENGINES[name]
    if ":" in name:
        return read_traits(name)
    fix = did_you_mean(name, ENGINES) or f"Leave it out for {DEFAULT_ENGINE}."
    if name.endswith(".py"):
        fix = f"Say which class to take: {name}:MyEngine."
    raise ConfigError(
        "actor_rollout_ref.rollout.name",
        got=repr(name),
        expected=f"one of {', '.join(ENGINES)}, or path/to/engine.py:Class",
        fix=fix,
    )


def engines_with(trait: str) -> str:
    """Names of our engines that have a trait, for messages: "native or vllm".

    Args:
        trait: name of a field or property of `EngineTraits`. An engine has it if the value is
            neither false nor empty.
    """
    return " or ".join(name for name, traits in ENGINES.items() if getattr(traits, trait))
