# SPDX-License-Identifier: Apache-2.0
"""Names of environments, and the adapters that they stand for.

textarena:GuessTheNumber-v0    a game of TextArena          gymnasium:FrozenLake-v1    an environment of Gymnasium
gem:GuessTheNumber-v0          a game of GEM                skyrl_gym:gsm8k            an environment of SkyRL Gym
my_env.py:MyEnv                a class of the user          openenv:ws://host:8000     a server of OpenEnv
"""

from collections.abc import Callable
from functools import partial

from quadriga.errors import ConfigError, did_you_mean
from quadriga.rollout.environments import libraries
from quadriga.rollout.environments.interface import EnvironmentSpec, TextEnvironment
from quadriga.rollout.environments.openenv import OpenEnvEnvironment
from quadriga.rollout.environments.user_classes import user_environment
from quadriga.user_file import is_reference, load_reference

LIBRARIES: dict[str, Callable[[EnvironmentSpec, str], TextEnvironment]] = {
    "textarena": libraries.TextArenaEnvironment,
    "gem": libraries.GemEnvironment,
    "gymnasium": libraries.GymnasiumEnvironment,
    "skyrl_gym": libraries.SkyRLEnvironment,
    "openenv": OpenEnvEnvironment,
}
"""Functions that make an adapter from a spec and the id in its name, by library."""
_WHERE = "env.name"


def environment_maker(spec: EnvironmentSpec) -> Callable[[], TextEnvironment]:
    """Return a function that makes the environment of one episode.

    Args:
        spec: the environment.

    Raises:
        ConfigError: the name has an unknown form or library, or a user's class cannot be loaded.
    """
    if is_reference(spec.name):
        user_class = load_reference(spec.name, _WHERE, base=object)
        return partial(user_environment, user_class, spec)
    library, _, identifier = spec.name.partition(":")
    if library not in LIBRARIES or not identifier:
        forms = ", ".join(f"{name}:ID" for name in LIBRARIES)
        raise ConfigError(
            _WHERE,
            got=repr(spec.name),
            expected=f"one of {forms}, or path/to/file.py:Class",
            fix=did_you_mean(library, LIBRARIES),
        )
    return partial(LIBRARIES[library], spec, identifier)
