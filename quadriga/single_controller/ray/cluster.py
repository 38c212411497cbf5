# SPDX-License-Identifier: Apache-2.0
"""The cluster of a run: one that is up already, or one on this machine that begins and ends with the run.

    ray_kwargs.ray_init.address   a cluster that is up; "local": start one
    RAY_ADDRESS                   the same, where the configuration names none
    neither                       start one

A cluster that was joined stays up; what the run had in it goes with the job. One that was started has at least as many
logical CPUs as the pools have processes, whatever the number of cores: a process of a pool without GPUs takes one, and
how many threads it computes with is decided by the cores (`threads.py`). It dies with the process that started it, by
whatever signal; after a SIGKILL two small agents of Ray's try for a minute to report that to the head, and end then.
"""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import ray

from quadriga.errors import WorkerError
from quadriga.observe.probe import release_numbers
from quadriga.single_controller.ray.nodes import answers, is_lost

LEAST_RAY = "2.60"
ADDRESS_KEY = "ray_kwargs.ray_init.address"
# What is let go is freed at once, not once a second: memory that the store uses again costs a tenth of fresh memory.
OWN_CLUSTER = {"free_objects_period_milliseconds": 0}
# Variables that a process of the run reads, wherever it is: a cluster that is up was started with others.
FORWARDED = ("HF_", "TRANSFORMERS_", "TOKENIZERS_", "QUADRIGA_", "NCCL_", "GLOO_", "TORCH_", "WANDB_", "MLFLOW_")
FORWARDED_NAMES = ("PYTHONPATH", "TERM", "COLORTERM", "NO_COLOR", "COLUMNS", "LINES")
# Ray shows the environment of a job to everyone who can see the cluster.
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")


@dataclass(frozen=True)
class Cluster:
    """A cluster that this process is connected to.

    Attributes:
        address: host and port of its head.
        is_own: whether it was started for the run.
    """

    address: str
    is_own: bool

    def is_gone(self) -> bool:
        """Whether its head answers no more."""
        return is_lost(*_host_and_port(self.address))

    def gone(self) -> WorkerError:
        """The error for a head that answers no more."""
        return WorkerError(
            f"Ray cluster at {self.address}",
            got="no answer any more",
            expected="a cluster that stays up until the run ends",
            fix="Start it again (`ray start --head`); the same command goes on from the run's newest checkpoint.",
        )


@contextmanager
def cluster(arguments: Mapping[str, Any], num_processes: int) -> Iterator[Cluster]:
    """Join or start a cluster, and leave or end it with the block.

    A process that is connected to a cluster already stays connected to it, and runs there.

    Args:
        arguments: of `ray.init`: `ray_kwargs.ray_init`.
        num_processes: that the run's pools have together; a cluster that is started gets a logical CPU for each.

    Raises:
        WorkerError: there is no cluster at the address, or one of another version of Ray or Python.
    """
    _check_version()
    given = dict(arguments)
    address = str(given.pop("address", None) or os.environ.get("RAY_ADDRESS") or "local")
    where = ADDRESS_KEY if arguments.get("address") else "RAY_ADDRESS"
    if address == "local":
        started = {"num_cpus": max(num_cores(), num_processes), "include_dashboard": False}
        given = started | {"_system_config": OWN_CLUSTER} | given
    else:
        _check_address(where, address)
        given["runtime_env"] = _runtime_env(given.get("runtime_env"))
    if ray.is_initialized():
        yield Cluster(ray.get_runtime_context().gcs_address, is_own=False)
        return
    try:
        context = _connect(address, given, where)
        yield Cluster(context.address_info["gcs_address"], is_own=address == "local")
    finally:
        ray.shutdown()


def _connect(address: str, arguments: dict[str, Any], where: str) -> Any:
    try:
        # Ray's greeting, and its notice about tokens, are below errors. What workers print comes through all the same.
        return ray.init(address=address, logging_level="error", log_to_driver=True, **arguments)
    except RuntimeError as error:
        if "Version mismatch" not in str(error):
            raise _refused(where, address, error) from error
        theirs, ours = _versions(str(error))
        raise WorkerError(
            f"Ray cluster at {address}",
            got=theirs,
            expected=f"{ours}, as this process has",
            fix="Use one environment for the cluster and the command: in this one, `ray stop` and `ray start --head`.",
        ) from error
    except (ConnectionError, ValueError, TypeError, OSError, ray.exceptions.RayError) as error:
        raise _refused(where, address, error) from error


def _refused(where: str, address: str, error: Exception) -> WorkerError:
    reason = " ".join(str(error.__cause__ or error).split()).rstrip(".")
    if address == "local":
        fix = "ray_kwargs.ray_init has the arguments of ray.init; /tmp/ray/session_latest/logs has what Ray says."
        return WorkerError("ray_kwargs.ray_init", got=reason, expected="a cluster on this machine", fix=fix)
    fix = "num_cpus, num_gpus, resources and the like belong to `ray start`, for a cluster that is up."
    return WorkerError(f"{where}={address}", got=reason, expected="a cluster that can be joined", fix=fix)


def _versions(message: str) -> tuple[str, str]:
    """`Ray 2.54.0 on Python 3.11.7` of the cluster and of this process, out of Ray's message."""
    values = [line.partition(":")[2].strip() for line in message.splitlines() if line.startswith("    ")]
    return f"Ray {values[0]} on Python {values[1]}", f"Ray {values[2]} on Python {values[3]}"


def _check_version() -> None:
    if release_numbers(ray.__version__) < release_numbers(LEAST_RAY):
        raise WorkerError(
            "ray", got=ray.__version__, expected=f"{LEAST_RAY} or later", fix="pip install -U 'quadriga[ray]'"
        )


def _check_address(where: str, address: str) -> None:
    if address == "auto":
        return
    if "://" in address or not address.rpartition(":")[2].isdecimal() or ":" not in address:
        raise WorkerError(
            where,
            got=f"'{address}'",
            expected="HOST:PORT, auto or local",
            fix="`ray start --head` prints the address; run the command on a machine of the cluster, or with "
            "`ray job submit`.",
        )
    # Ray itself has two minutes' patience with an address where nothing is.
    if not answers(*_host_and_port(address)):
        raise WorkerError(
            where,
            got=f"'{address}', where nothing answers",
            expected="the address of a Ray cluster that is up",
            fix="`ray start --head --port=PORT` starts one; without an address one is started for the run.",
        )


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def forwarded_variables(*, with_secrets: bool = True) -> dict[str, str]:
    """Variables of this process that a run reads, and that a cluster which is up does not have from it."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(FORWARDED) or name in FORWARDED_NAMES)
        and (with_secrets or not any(word in name for word in _SECRET))
    }


def _runtime_env(given: Mapping[str, Any] | None) -> dict[str, Any]:
    """That of a job on a cluster that is up: the directory and the variables of this process."""
    theirs = dict(given or {})
    variables = forwarded_variables(with_secrets=False) | theirs.pop("env_vars", {})
    return {"worker_process_setup_hook": _entering(os.getcwd()), **theirs, "env_vars": variables}


def _entering(directory: str) -> Any:
    """A function that enters a directory where there is one; it travels by value, and imports nothing of ours."""

    def enter() -> None:
        if os.path.isdir(directory):
            os.chdir(directory)

    return enter


def num_cores() -> int:
    """Cores that this process may use, as OpenMP counts them: without the quota of a control group."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
