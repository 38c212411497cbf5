# SPDX-License-Identifier: Apache-2.0
"""The cluster of a run: one that is up already, or one on this machine that begins and ends with the run.

    ray_kwargs.ray_init.address   a cluster that is up; "local": start one
    RAY_ADDRESS                   the same, where the configuration names none (`ray job submit` sets it)
    neither                       start one

The driver is the process that calls `cluster`: the command's own. A cluster that was joined stays up; what the run had
in it ends with the driver. One that was started has at least as many logical CPUs as the pools have processes: one for
each without a GPU, which computes with threads by the number of cores (`resource_pool.py`). It ends with the process
that started it, by whatever signal, and its folder goes with it, unless the run failed: Ray's logs may say why. Where
its head or its raylet ends before, it is started again when workers are (`renew_own_cluster`).

Whether a node is there is seen at its ports, without Ray: Ray gives a node that stopped responding 15 s and a head
60 s, and then ends the driver without a message of ours.
"""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import ray
from ray._private.ray_logging import global_worker_stdstream_dispatcher
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga.descendants import beside, end_session
from quadriga.errors import ConfigError, WorkerError
from quadriga.observe.probe import release_numbers

LEAST_RAY = "2.60"
ADDRESS_KEY = "ray_kwargs.ray_init.address"
# What is let go is freed at once, not once a second: memory that the store uses again costs a tenth of fresh memory.
# No process is started beforehand for each logical CPU: workers have an environment of their own, and take none.
# Outputs up to this size come with the answer: through the store each costs three processes a millisecond.
# A driver whose cluster has lost its head may need more than Ray's minute before it starts the
# cluster again: a checkpoint that is being read back is completed first.
OWN_CLUSTER = {
    "free_objects_period_milliseconds": 0,
    "prestart_worker_first_driver": False,
    "max_direct_call_object_size": 1 << 20,
    "gcs_rpc_server_reconnect_timeout_s": 600,
}
# Variables that a process of the run reads, wherever it is: a cluster that is up was started with others.
FORWARDED = (
    "HF_", "TRANSFORMERS_", "TOKENIZERS_", "QUADRIGA_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "TRITON_", "VLLM_",
    "SGLANG_", "WANDB_", "MLFLOW_",
)  # fmt: skip
FORWARDED_NAMES = ("PYTHONPATH", "TERM", "COLORTERM", "NO_COLOR", "COLUMNS", "LINES")
# Ray shows the environment of a job to everyone who can see the cluster.
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
# Lines of Ray's own processes: guesses about a process that died, and a raylet's state when its node is lost. Our
# error says which worker or node it was, and what ended it.
_RAYS_NOISE = ("[state-dump]", "A worker died or was killed")
CONNECT_LIMIT_S = 2.0  # time for a node to take a connection
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""The preface of a client, and its settings, none; the server's first frame has its own, of type 4."""
SECOND_LOOK_S = (
    1.0  # nothing is given up on one look: a second one, this much later, must see the same
)

# ---- joining ------------------------------------------------------------------------------------


@contextmanager
def cluster(
    arguments: Mapping[str, Any],
    num_processes: int,
    timeline_file: str | None = None,
    num_nodes: int = 1,
) -> Iterator[str]:
    """Join or start a cluster, and leave or end it with the block. Gives the address of its head. A process that is
    connected to a cluster already stays connected to it, and runs there.

    Args:
        arguments: of `ray.init`: `ray_kwargs.ray_init`.
        num_processes: of all pools together; a cluster that is started gets a logical CPU for each.
        timeline_file: where Ray's timeline is written after the block.
        num_nodes: that the largest pool spans; a cluster that is started has one.

    Raises ConfigError: several nodes are asked for, and no cluster to be joined. WorkerError: there is no cluster at
    the address, or one of another version of Ray or Python.
    """
    if release_numbers(ray.__version__) < release_numbers(LEAST_RAY):
        raise WorkerError(
            "ray", ray.__version__, f"{LEAST_RAY} or later", "pip install -U -e '.[ray]'"
        )
    given = dict(arguments)
    address = str(given.pop("address", None) or os.environ.get("RAY_ADDRESS") or "local")
    where = ADDRESS_KEY if arguments.get("address") else "RAY_ADDRESS"
    if address == "local":
        # Cores as OpenMP counts them: without the quota of a control group.
        cores = (
            len(os.sched_getaffinity(0))
            if hasattr(os, "sched_getaffinity")
            else os.cpu_count() or 1
        )
        started = {"num_cpus": max(cores, num_processes), "include_dashboard": False}
        given = started | {"_system_config": OWN_CLUSTER} | given
    else:
        given["runtime_env"] = _joining_env(where, address, given.get("runtime_env"))
    if ray.is_initialized():
        yield ray.get_runtime_context().gcs_address
        return
    if address == "local" and num_nodes > 1:
        expected = "1: the cluster that a run starts for itself is this machine alone"
        fix = f"`ray start` makes one of several machines, and {ADDRESS_KEY}=auto (or RAY_ADDRESS=auto) joins it; on "
        fix += "this machine alone set trainer.nnodes=1."
        raise ConfigError(
            "trainer.nnodes", f"{num_nodes} machines, and no address of a cluster", expected, fix
        )
    global_worker_stdstream_dispatcher.add_handler("quadriga", _drop_noise)
    with ExitStack() as stack:
        stack.callback(global_worker_stdstream_dispatcher.remove_handler, "quadriga")
        stack.callback(ray.shutdown)
        if address == "local":
            _OWN.append(_OwnCluster(given, where))
            stack.push(
                lambda kind, *_: _OWN.pop().end(
                    is_failed=kind not in (None, KeyboardInterrupt, GeneratorExit)
                )
            )
        else:
            _connect(address, given, where)
        yield ray.get_runtime_context().gcs_address
        if timeline_file:
            os.makedirs(os.path.dirname(os.path.abspath(timeline_file)), exist_ok=True)
            ray.timeline(filename=timeline_file)


class _OwnCluster:
    """The cluster that this process has started, and the program that sweeps behind both."""

    def __init__(self, arguments: dict[str, Any], where: str, former: Sequence[str] = ()) -> None:
        self.arguments, self.where = arguments, where
        # Ray makes the folder of a session before this one again.
        self.sessions = [
            *former,
            str(_connect("local", arguments, where).address_info["session_dir"]),
        ]
        started = ray._private.worker._global_node.all_processes
        self._parts = [started[name][0].process for name in ("gcs_server", "raylet")]
        self._sweeper = beside("_end_sessions_behind", os.getpid(), self.sessions)

    def is_broken(self) -> bool:
        return any(part.poll() is not None for part in self._parts)

    def end(self, *, is_failed: bool) -> None:
        """End all of it; after a failure Ray's logs stay."""
        ray.shutdown()
        self._sweeper.kill()
        self._sweeper.wait()
        if not is_failed:
            for session in self.sessions:
                end_session(session)


_OWN: list[_OwnCluster] = []  # at most one


def is_cluster_lost() -> bool:
    """Whether the cluster that this process is connected to has lost its head, or its own one a part."""
    return any(own.is_broken() for own in _OWN) or is_lost(*head_address())


def renew_own_cluster() -> None:
    """Start the cluster of this process again if a part of it has ended.
    Raises WorkerError: it is one that was joined, and its head does not respond."""
    for own in [own for own in _OWN if own.is_broken()]:
        own.end(is_failed=False)
        _OWN[:] = [_OwnCluster(own.arguments, own.where, own.sessions)]
    if not _OWN and is_lost(*head_address()):
        where = f"Ray cluster at {ray.get_runtime_context().gcs_address}"
        fix = "Start it again (`ray start --head`), then the run: it resumes from its checkpoint."
        expected = "a cluster that stays up"
        raise WorkerError(where, got="no answer from its head", expected=expected, fix=fix)


def _drop_noise(batch: dict[str, Any]) -> None:
    batch["lines"] = [
        line for line in batch["lines"] if not any(words in line for words in _RAYS_NOISE)
    ]


@contextmanager
def keeping_sigterm_handler() -> Iterator[None]:
    """Put the handler of SIGTERM back that was there before the block.

    `ray.init` installs one in Python, and `ray.shutdown` leaves it there. Every process that is forked afterwards
    inherits it, and may then survive SIGTERM: Python runs a handler between two bytecodes, so a signal that arrives
    just before the child blocks in a lock stays unnoticed, and `multiprocessing.Pool.terminate` waits forever. It also
    replaces the handler that lets a run end after its step (`quadriga.observe.stopping`) when a cluster is renewed.
    Only the main thread can set handlers, and Ray sets none in another one."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        if handler is not None:  # None: it was not installed by Python, which cannot set it again
            signal.signal(signal.SIGTERM, handler)


def _connect(address: str, arguments: dict[str, Any], where: str) -> Any:
    try:
        # Ray's greeting, and its notice about tokens, are below errors. What workers print comes through all the same.
        with keeping_sigterm_handler():
            return ray.init(address=address, logging_level="error", log_to_driver=True, **arguments)
    except Exception as error:  # Ray raises a bare Exception where a node does not start in time
        if isinstance(error, RuntimeError) and "Version mismatch" in str(error):
            # Ray's message has both, a line each for Ray and Python: the cluster's, then ours.
            values = [
                line.partition(":")[2].strip()
                for line in str(error).splitlines()
                if line.startswith("    ")
            ]
            theirs, ours = (
                f"Ray {of_ray} on Python {of_python}"
                for of_ray, of_python in (values[:2], values[2:4])
            )
            fix = "Use one environment for the cluster and the command: in this one, `ray stop` and `ray start --head`."
            raise WorkerError(
                f"Ray cluster at {address}", theirs, f"{ours}, as this process has", fix
            ) from error
        reason = (
            " ".join(str(error.__cause__ or error).split())
            .partition(" Traceback (most")[0]
            .rstrip(".:")
        )
        if address == "local":
            fix = "ray_kwargs.ray_init has the arguments of ray.init; /tmp/ray/session_latest/logs has what Ray says."
            where, expected = "ray_kwargs.ray_init", "a cluster on this machine"
        else:
            fix = "num_cpus, num_gpus, resources and the like belong to `ray start`, for a cluster that is up."
            where, expected = f"{where}={address}", "a cluster that can be joined"
        raise WorkerError(where, got=reason, expected=expected, fix=fix) from error


def _host_and_port(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def forwarded_variables() -> dict[str, str]:
    """Variables of this process that a run's processes read, but for secrets, which Ray would show."""
    return {
        name: value
        for name, value in os.environ.items()
        if (name.startswith(FORWARDED) or name in FORWARDED_NAMES)
        and not any(word in name for word in _SECRET)
    }


def _joining_env(where: str, address: str, given: Mapping[str, Any] | None) -> dict[str, Any]:
    is_address = ":" in address and "://" not in address and address.rpartition(":")[2].isdecimal()
    if address != "auto" and not is_address:
        fix = "`ray start --head` prints the address; run the command on a machine of the cluster, or with "
        fix += "`ray job submit`."
        raise WorkerError(where, got=f"'{address}'", expected="HOST:PORT, auto or local", fix=fix)
    # Ray itself has two minutes' patience with an address where nothing is, and ten with another program's.
    if address != "auto" and not is_head(*_host_and_port(address)):
        found = (
            "something else answers" if responds(*_host_and_port(address)) else "nothing answers"
        )
        fix = "`ray start --head --port=PORT` starts one; without an address one is started for the run."
        raise WorkerError(
            where, f"'{address}', where {found}", "the address of a Ray cluster that is up", fix
        )
    theirs = dict(given or {})
    variables = forwarded_variables() | theirs.pop("env_vars", {})
    directory = os.getcwd()

    # It travels by value, and imports nothing of ours.
    def enter_directory() -> None:
        if os.path.isdir(directory):
            os.chdir(directory)

    return {"worker_process_setup_hook": enter_directory, **theirs, "env_vars": variables}


# ---- nodes --------------------------------------------------------------------------------------


def responds(address: str, port: int) -> bool:
    """Whether something takes connections there."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_LIMIT_S).close()
    except OSError:
        return False
    return True


def is_head(address: str, port: int) -> bool:
    """Whether what takes connections there speaks HTTP/2, as the head of a cluster does; TLS is taken on trust."""
    if os.environ.get("RAY_USE_TLS") == "1":
        return responds(address, port)
    try:
        with socket.create_connection((address, port), timeout=CONNECT_LIMIT_S) as connection:
            connection.settimeout(5 * CONNECT_LIMIT_S)  # of a busy head
            connection.sendall(_HTTP2_GREETING)
            return connection.recv(9)[3:4] == b"\x04"
    except OSError:
        return False


def is_lost(address: str, port: int) -> bool:
    """Whether nothing responds there, at two looks."""
    if responds(address, port):
        return False
    time.sleep(SECOND_LOOK_S)
    return not responds(address, port)


def head_address() -> tuple[str, int]:
    """Host and port of the cluster's head (its GCS)."""
    return _host_and_port(ray.get_runtime_context().gcs_address)


def own_node_id() -> str:
    """Ray's id of the node that this process is on."""
    return ray.get_runtime_context().get_node_id()


def run_on_node(
    node_id: str, function: Callable[..., Any], *args: Any, limit_s: float = 60.0
) -> Any:
    """The result of a function of ours on a node; `limit_s` counts the start of a process there, if it is another one.
    Raises ray.exceptions.RayError: the node is not there, or did not respond in time."""
    if node_id == own_node_id():
        return function(*args)
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=where)(function)
    return ray.get(task.remote(*args), timeout=limit_s)


def await_lost_nodes(limit_s: float = 30.0) -> None:
    """Wait until Ray has noticed of every lost node that it is lost: before that it would place processes there.
    Raises WorkerError: Ray still counts on one after `limit_s`."""
    deadline = time.monotonic() + limit_s
    while True:
        alive = [
            (node["NodeManagerAddress"], node["NodeManagerPort"])
            for node in ray.nodes()
            if node["Alive"]
        ]
        lost = [address for address, port in alive if not responds(address, port)]
        if not lost:
            return
        if time.monotonic() > deadline:
            where, got = (
                "nodes of the Ray cluster",
                f"no answer from {', '.join(lost)}, which Ray counts on",
            )
            fix = "`ray status` shows what Ray counts on; end Ray on that node (`ray stop`)."
            raise WorkerError(
                where, got=got, expected="nodes that answer, or that Ray has given up", fix=fix
            )
        time.sleep(SECOND_LOOK_S)
