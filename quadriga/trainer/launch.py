# SPDX-License-Identifier: Apache-2.0
"""Where a run runs: in this process, or beside its workers on a cluster. Loads neither until it is known which."""

from importlib import import_module
from typing import Any

from quadriga.config import Config
from quadriga.config.placement import role_pools
from quadriga.errors import ConfigError

# Import strings: this process needs torch only if it trains, and Ray only if it does not.
RUN = "quadriga.trainer.task_runner:run"
RUN_ON_CLUSTER = "quadriga.single_controller.ray.remote:run_on_cluster"


def run_ppo(config: Config) -> None:
    """Train, whatever `task` is, where `trainer.backend` says, and return when the run has ended.

    Raises:
        ConfigError: Ray is asked for and not installed.
        QuadrigaError: what went wrong in the run, wherever that was.
    """
    if config.trainer.backend == "local":
        _load(RUN)(config)
        return
    pools = set(role_pools(config.trainer, has_reward_model=config.reward_model.enable).values())
    _load(RUN_ON_CLUSTER)(
        RUN,
        (config,),
        ray_init=config.ray_kwargs.arguments,
        num_processes=sum(sum(config.trainer.processes_of(pool)) for pool in pools),
        timeline_file=config.ray_kwargs.timeline_json_file,
    )


def _load(target: str) -> Any:
    module, _, name = target.partition(":")
    try:
        return getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError(
            "trainer.backend",
            got="'ray', which is not installed here",
            expected="local, or an environment with Ray",
            fix="pip install -e '.[ray]'",
        ) from error
