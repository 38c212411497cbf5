# SPDX-License-Identifier: Apache-2.0
"""Where the workers of a run are: in this process, or on a Ray cluster, of which it is the driver."""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from typing import Any

from quadriga.config import Config
from quadriga.config.placement import asked_roles, role_pools
from quadriga.errors import ConfigError

# Import strings: Ray, and torch with it, are loaded only where they are needed.
RUNNER = "quadriga.trainer.task_runner:TaskRunner"
CLUSTER = "quadriga.single_controller.ray.cluster:cluster"
WAIT_POLICY = "OMP_WAIT_POLICY"


def run_ppo(config: Config) -> None:
    """Train, whatever `task` is, where `trainer.backend` says, and return when the run has ended; see `steps`."""
    for _ in steps(config):
        pass


def steps(config: Config, build: Callable[..., Any] | None = None) -> Iterator[Any]:
    """The same, step by step: gives what `TaskRunner.steps` gives. To close the iterator ends the run.

    `build` makes a run of the configuration, where `build_run` does not.

    Raises ConfigError: Ray is asked for and not installed.
    Raises QuadrigaError: what went wrong in the run, wherever that was."""
    with cluster_of(config) as start_up:
        yield from _load(RUNNER)().steps(config, start_up, build)


@contextmanager
def cluster_of(config: Config) -> Iterator[list[tuple[str, float]]]:
    """The Ray cluster of a run, where its workers are on one. Gives the parts of the start-up so far, each with its
    begin in seconds since 1970. Raises ConfigError: Ray is asked for and not installed."""
    if config.trainer.backend == "local":
        yield []
        return
    pools = set(role_pools(config.trainer, asked_roles(config)).values())
    shapes = [config.trainer.processes_of(pool) for pool in pools]
    # Threads of this process that wait leave their cores to the workers. OpenMP reads it as torch is loaded, with Ray.
    is_chosen = WAIT_POLICY in os.environ
    os.environ.setdefault(WAIT_POLICY, "PASSIVE")
    try:
        cluster = _load(CLUSTER)
    finally:
        if not is_chosen:
            del os.environ[WAIT_POLICY]  # each worker has its own
    start_up = [("cluster", time.time())]
    num_processes, num_nodes = sum(map(sum, shapes)), max(map(len, shapes))
    with cluster(config.ray_kwargs.ray_init, num_processes, config.ray_kwargs.timeline_json_file, num_nodes):
        yield [*start_up, ("modules", time.time())]


def _load(target: str) -> Any:
    try:
        return resolve_name(target)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        found = "trainer.backend: got 'ray', which is not installed here, expected local, or an environment with Ray"
        raise ConfigError(found, fix="pip install -e '.[ray]'") from error
