# SPDX-License-Identifier: Apache-2.0
"""Starts a run where its workers are: in this process, or on a Ray cluster that this one drives."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pkgutil import resolve_name
from typing import Any

from quadriga import __version__
from quadriga.background import in_background
from quadriga.config import Config
from quadriga.config.placement import enabled_roles, role_pools
from quadriga.errors import ConfigError
from quadriga.lazy import collector_paused
from quadriga.observe.gpu_machine import check_machine
from quadriga.observe.timing import Timeline
from quadriga.observe.watchdog import NOTICE_S, waiting
from quadriga.openmp import notice, sleeping_threads, threads_for_load
from quadriga.streams import log_to
from quadriga.trainer.keep_alive import step_reporter

# Import strings: Ray, and torch with it, are loaded only if they are needed.
RUNNER = "quadriga.trainer.task_runner:TaskRunner"
CLUSTER = "quadriga.single_controller.ray.cluster:cluster"


def run_ppo(config: Config, begun_s: float | None = None) -> None:
    """Train to the last step, whatever the `task` and the backend.

    Args:
        config: the resolved configuration.
        begun_s: when the start-up began, in seconds since 1970; None: now.
    """
    # Tells the parent process the number of each step, if the run was started by `--keep-alive`.
    report = step_reporter()
    for step in steps(config, begun_s=begun_s):
        report(step.number)


def steps(
    config: Config,
    build: Callable[..., Any] | None = None,
    begun_s: float | None = None,
    *,
    in_python: bool = False,
) -> Iterator[Any]:
    """Train step by step. Closing the iterator ends the run.

    Args:
        config: the resolved configuration; `trainer.backend` says where the workers are.
        build: builds the run; by default `build_run`.
        begun_s: when the start-up began, in seconds since 1970; None: now.
        in_python: whether `quadriga.Trainer` started the run, rather than a command.

    Yields:
        The items of `TaskRunner.steps`.

    Raises:
        ConfigError: Ray is configured but not installed, or limits of this machine are too low for
            processes with GPUs.
        QuadrigaError: the run has failed, in this process or in a worker.
    """
    is_local = config.trainer.backend == "local"
    log_to(config.trainer.directory)
    where = "in this process" if is_local else "in worker processes, on Ray"
    print(f"quadriga {__version__}: {config.trainer.directory}, {where}")
    timeline = Timeline(begun_s=begun_s)
    timeline.report()
    try:
        with cluster_of(config, timeline, beside=RUNNER):
            # On Ray, `cluster_of` has already imported the runner and timed it.
            imports = timeline.part("imports", since_origin=True) if is_local else nullcontext()
            with imports:
                runner = _load(RUNNER)()
            # Loading the runner may have chosen that waiting threads sleep.
            if is_local and notice():
                print(notice())
            runner.in_python = in_python
            yield from runner.steps(config, timeline, build)
    finally:
        timeline.close()


@contextmanager
def cluster_of(
    config: Config, timeline: Timeline | None = None, beside: str | None = None
) -> Iterator[None]:
    """Context manager: connect to the Ray cluster of a run, or do nothing with the local backend.

    Args:
        config: the resolved configuration; `trainer.backend` says where the workers are.
        timeline: records the parts of the start-up; None: they are not recorded.
        beside: import string of an object that is imported while the cluster starts, because the
            start mostly waits for other processes.

    Raises:
        ConfigError: Ray is configured but not installed, or limits of this machine are too low for
            processes with GPUs.
    """
    if config.trainer.backend == "local":
        yield
        return
    pools = set(role_pools(config.trainer, enabled_roles(config)).values())
    # For each pool, the number of processes on each of its nodes; the first node is this one.
    counts_of_pools = [config.trainer.processes_of(pool) for pool in pools]
    num_processes = sum(map(sum, counts_of_pools))
    num_nodes = max(map(len, counts_of_pools))
    timeline = timeline or Timeline()
    # The limits of this process are checked, such as that of open files: the processes of a cluster
    # that is started here inherit them.
    num_processes_here = sum(counts[0] for counts in counts_of_pools)
    check_machine(config.trainer.device, num_processes_here, num_nodes)
    # This process computes little; spinning threads would take the workers' cores.
    with timeline.part("imports", since_origin=True), sleeping_threads():
        cluster = _load(CLUSTER)
        _load("torch")
    with ExitStack() as last_wait, ExitStack() as stack:
        loading = None
        if beside:
            loading = in_background(partial(_load, beside), "imports")
        with timeline.part("cluster"):
            settings = config.ray_kwargs
            stack.enter_context(
                cluster(settings.ray_init, num_processes, settings.timeline_json_file, num_nodes)
            )
        # `stack` unwinds in reverse: this callback starts the notices before the cluster shuts
        # down. `last_wait`, the outer stack, stops them afterwards.
        ending = waiting("the Ray cluster to end", every_s=NOTICE_S)
        stack.callback(lambda: last_wait.enter_context(ending))
        if loading is not None:
            with timeline.part("modules"):
                loading.result()
        yield


def _load(target: str) -> Any:
    """Import the object that an import string names.

    Raises:
        ConfigError: the object needs Ray, which is not installed.
    """
    try:
        with collector_paused(), threads_for_load():
            return resolve_name(target)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "ray":
            raise
        raise ConfigError(
            "trainer.backend",
            got="'ray', which is not installed here",
            expected="local, or an environment with Ray",
            fix="pip install -e '.[ray]'",
        ) from error
