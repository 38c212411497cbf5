# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster of a run: an existing one, or one on this machine that ends with the run.

    ray_kwargs.ray_init.address   address of an existing cluster; "local": start one
    RAY_ADDRESS                   the same, without the key above (`ray job submit` sets it)
    neither                       start one

The driver is the process that calls `cluster`: the command itself. A joined cluster stays up; only
the run's actors and objects end with the driver.

A started cluster has at least as many logical CPUs as the pools have processes. Without GPUs, each
process takes a logical CPU, and computes with a share of the cores (`resource_pool.py`). The
cluster ends with the process that started it, even if a signal kills that process. Its folder is
deleted, except after a failure, whose reason may be in Ray's logs. If its head or raylet dies, it
is restarted when workers are restarted (`renew_own_cluster`).

Lost nodes are detected by connecting to their ports, without Ray: Ray waits 15 s for a silent node
and 60 s for a silent head, and then ends the driver without an error message of Quadriga.
"""

import gc
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

from quadriga.descendants import end_session, start_beside
from quadriga.errors import ConfigError, WorkerError
from quadriga.observe.probe import release_numbers

LEAST_RAY = "2.60"
ADDRESS_KEY = "ray_kwargs.ray_init.address"
OWN_CLUSTER = {
    # Free objects at once, not once a second: reused memory of the store costs a tenth of new
    # memory.
    "free_objects_period_milliseconds": 0,
    # Start no process per logical CPU: workers have another environment, and cannot use them.
    "prestart_worker_first_driver": False,
    # Send outputs up to this size with the reply. Through the store, three processes spend a
    # millisecond on each.
    "max_direct_call_object_size": 1 << 20,
    # Ray ends a driver a minute after the head is lost. The driver may need longer to restart
    # the cluster: it first finishes reading a checkpoint.
    "gcs_rpc_server_reconnect_timeout_s": 600,
    # By default, Ray's workers run at low priority, and nearly stop if others use the same cores.
    "worker_niceness": 0,
}
# Environment variables that are forwarded to the run's processes. The processes of a joined cluster
# have the environment in which the cluster was started.
FORWARDED = (
    "HF_", "TRANSFORMERS_", "TOKENIZERS_", "QUADRIGA_", "NCCL_", "GLOO_", "TORCH_", "PYTORCH_",
    "TRITON_", "VLLM_", "SGLANG_", "WANDB_", "MLFLOW_",
)  # fmt: skip
FORWARDED_NAMES = ("PYTHONPATH", "TERM", "COLORTERM", "NO_COLOR", "COLUMNS", "LINES")
# Ray shows the environment of a job to everyone who can see the cluster.
_SECRET = ("TOKEN", "KEY", "SECRET", "PASSWORD")
# Lines of Ray's output with these words are dropped: the state of raylets of lost nodes, and
# guesses about dead processes. Quadriga's error names the worker or node, and the cause.
_RAY_NOISE = ("[state-dump]", "A worker died or was killed")
CONNECT_LIMIT_S = 2.0  # time for a node to accept a connection
_HTTP2_GREETING = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4\0\0\0\0\0"
"""Preface of a client with empty settings. The server replies with a settings frame, type 4."""
SECOND_LOOK_S = 1.0  # time until a second attempt to connect, before a node counts as lost
LOST_NODES_LIMIT_S = 30.0  # time for Ray to notice lost nodes

# ---- joining ------------------------------------------------------------------------------------


@contextmanager
def cluster(
    arguments: Mapping[str, Any],
    num_processes: int,
    timeline_file: str | None = None,
    num_nodes: int = 1,
) -> Iterator[str]:
    """Context manager: join or start a cluster, and leave or end it on exit.

    Yields the address of the cluster's head. A process that is already connected to a cluster keeps
    using it: it is neither joined again nor left on exit.

    Args:
        arguments: arguments of `ray.init`, from `ray_kwargs.ray_init`.
        num_processes: number of processes of all pools. A started cluster gets a logical CPU each.
        timeline_file: file for Ray's timeline, written on exit.
        num_nodes: number of nodes of the largest pool. A started cluster has one node.

    Raises:
        ConfigError: several nodes are needed, but there is no address of a cluster.
        WorkerError: Ray is too old; or there is no cluster at the address, or it has another
            version of Ray or Python; or a cluster cannot be started.
    """
    if release_numbers(ray.__version__) < release_numbers(LEAST_RAY):
        raise WorkerError(
            "ray", ray.__version__, f"{LEAST_RAY} or later", "pip install -U -e '.[ray]'"
        )
    init_arguments = dict(arguments)
    address = str(init_arguments.pop("address", None) or os.environ.get("RAY_ADDRESS") or "local")
    where = ADDRESS_KEY if arguments.get("address") else "RAY_ADDRESS"

    if address == "local":
        # Count cores as OpenMP does: those that this process may use, without regard to the quota
        # of a control group.
        num_cores = os.cpu_count() or 1
        if hasattr(os, "sched_getaffinity"):
            num_cores = len(os.sched_getaffinity(0))
        defaults = {
            "num_cpus": max(num_cores, num_processes),
            "include_dashboard": False,
            "_system_config": OWN_CLUSTER,
        }
        init_arguments = defaults | init_arguments
    else:
        init_arguments["runtime_env"] = _joining_env(
            where, address, init_arguments.get("runtime_env")
        )

    if ray.is_initialized():
        yield ray.get_runtime_context().gcs_address
        return
    if address == "local" and num_nodes > 1:
        raise ConfigError(
            "trainer.nnodes",
            got=f"{num_nodes} machines, and no address of a cluster",
            expected="1: the cluster that a run starts for itself is this machine alone",
            fix="Start a cluster of several machines with `ray start`, and join it with "
            f"{ADDRESS_KEY}=auto (or RAY_ADDRESS=auto). On one machine set trainer.nnodes=1.",
        )

    global_worker_stdstream_dispatcher.add_handler("quadriga", _drop_noise)
    with ExitStack() as stack:
        # On exit, the last entry runs first: end the cluster, disconnect, show all lines again.
        stack.callback(global_worker_stdstream_dispatcher.remove_handler, "quadriga")
        stack.callback(_disconnect)
        if address == "local":
            _OWN.append(_OwnCluster(init_arguments, where))
            stack.push(_end_own_cluster)
        else:
            _connect(address, init_arguments, where)
        yield ray.get_runtime_context().gcs_address
        if timeline_file:
            os.makedirs(os.path.dirname(os.path.abspath(timeline_file)), exist_ok=True)
            ray.timeline(filename=timeline_file)


class _OwnCluster:
    """A cluster that this process has started, and a program that ends it if this process dies.

    Args:
        arguments: arguments of `ray.init`.
        where: name of the key or variable with the address, for errors.
        former_sessions: folders of earlier clusters of this process.
    """

    def __init__(
        self, arguments: dict[str, Any], where: str, former_sessions: Sequence[str] = ()
    ) -> None:
        self.arguments = arguments
        self.where = where
        session = str(_connect("local", arguments, where).address_info["session_dir"])
        # Ray may create the folders of earlier clusters again, so delete them as well.
        self.sessions = [*former_sessions, session]
        # The head is the GCS; a cluster of one machine has one raylet.
        processes = ray._private.worker._global_node.all_processes
        self._parts = [processes[name][0].process for name in ("gcs_server", "raylet")]
        # Ends the cluster and deletes its folders once this process is gone.
        self._sweeper = start_beside("_end_sessions_behind", os.getpid(), self.sessions)

    def is_broken(self) -> bool:
        """Whether the head or the raylet of the cluster has ended."""
        return any(part.poll() is not None for part in self._parts)

    def end(self, *, is_failed: bool) -> None:
        """End the cluster, and delete its folders, except after a failure."""
        _disconnect()
        self._sweeper.kill()
        self._sweeper.wait()
        if not is_failed:
            for session in self.sessions:
                end_session(session)


_OWN: list[_OwnCluster] = []  # the cluster of this process; empty if it has started none


def _end_own_cluster(kind: type[BaseException] | None, *_: Any) -> None:
    """Callback of an exit stack: end the cluster of this process.

    Args:
        kind: class of the exception that left the stack; None without one.
        _: not used.
    """
    # Ctrl-C, and a caller that closes the context early, are no failures.
    _OWN.pop().end(is_failed=kind not in (None, KeyboardInterrupt, GeneratorExit))


def is_cluster_lost() -> bool:
    """Whether the connected cluster is lost.

    A joined cluster is lost without its head. A cluster that this process has started is lost
    without its head or its raylet.
    """
    return any(own_cluster.is_broken() for own_cluster in _OWN) or is_lost(*head_address())


def renew_own_cluster() -> None:
    """Restart the cluster of this process if a part of it has ended.

    Raises:
        WorkerError: the cluster was joined, and its head does not respond.
    """
    if _OWN and _OWN[0].is_broken():
        broken = _OWN[0]
        broken.end(is_failed=False)
        _OWN[0] = _OwnCluster(broken.arguments, broken.where, broken.sessions)
    if not _OWN and is_lost(*head_address()):
        raise WorkerError(
            f"Ray cluster at {ray.get_runtime_context().gcs_address}",
            got="no answer from its head",
            expected="a cluster that stays up",
            fix="Restart it (`ray start --head`), then the run: it resumes from its checkpoint.",
        )


def _disconnect() -> None:
    """Leave the cluster, if this process is connected.

    Meanwhile no thread collects garbage: freeing a reference to an object while Ray shuts down can
    end the process, with status 1.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        ray.shutdown()
    finally:
        if was_enabled:
            gc.enable()


def _drop_noise(batch: dict[str, Any]) -> None:
    """Handler of Ray's output: remove lines with words of `_RAY_NOISE` from a batch of lines."""
    lines = batch["lines"]
    batch["lines"] = [line for line in lines if not any(noise in line for noise in _RAY_NOISE)]


@contextmanager
def keeping_sigterm_handler() -> Iterator[None]:
    """Context manager: restore the handler of SIGTERM on exit.

    `ray.init` installs a Python handler, and `ray.shutdown` does not remove it. Forked processes
    inherit the handler, and may then survive SIGTERM: Python runs a handler between two bytecodes,
    so a signal that arrives just before the child blocks in a lock is not handled, and
    `multiprocessing.Pool.terminate` waits forever. When a cluster is restarted, Ray's handler would
    also replace the handler that ends a run after its step (`quadriga.observe.stopping`). Only the
    main thread can set handlers, and Ray sets none in other threads.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # None: the handler was not installed by Python, which therefore cannot set it again.
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _connect(address: str, arguments: dict[str, Any], where: str) -> Any:
    """Call `ray.init`.

    Args:
        address: address of a cluster, or "local" to start one.
        arguments: other arguments of `ray.init`.
        where: name of the key or variable with the address, for errors.

    Returns:
        Ray's context.

    Raises:
        WorkerError: the cluster cannot be joined or started, or has another version of Ray or
            Python.
    """
    try:
        # The logging level hides Ray's greeting, but not the output of workers.
        with keeping_sigterm_handler():
            return ray.init(address=address, logging_level="error", log_to_driver=True, **arguments)
    # Ray raises a bare Exception if a node does not start in time.
    except Exception as error:
        if isinstance(error, RuntimeError) and "Version mismatch" in str(error):
            # Ray's message has four indented lines, such as "    Ray: 2.60.0": Ray and Python of
            # the cluster, then of this process.
            lines = [line for line in str(error).splitlines() if line.startswith("    ")]
            values = [line.partition(":")[2].strip() for line in lines]
            cluster_ray, cluster_python, this_ray, this_python = values[:4]
            raise WorkerError(
                f"Ray cluster at {address}",
                got=f"Ray {cluster_ray} on Python {cluster_python}",
                expected=f"Ray {this_ray} on Python {this_python}, as this process has",
                fix="Restart the cluster from this environment: `ray stop`, `ray start --head`.",
            ) from error
        # The message in one line, without a traceback.
        message = " ".join(str(error.__cause__ or error).split())
        reason = message.partition(" Traceback (most")[0].rstrip(".:")
        key = f"{where}={address}"
        if address == "local":
            key = "ray_kwargs.ray_init"
            expected = "a cluster on this machine"
            fix = "Check ray_kwargs.ray_init, the arguments of ray.init, and Ray's logs in "
            fix += "/tmp/ray/session_latest/logs."
        else:
            expected = "a cluster that can be joined"
            fix = "For an existing cluster, pass num_cpus, num_gpus, resources and the like to "
            fix += "`ray start`."
        raise WorkerError(key, got=reason, expected=expected, fix=fix) from error


def _host_and_port(address: str) -> tuple[str, int]:
    """Split HOST:PORT or [IPV6]:PORT."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def forwarded_variables() -> dict[str, str]:
    """Environment variables to forward to the run's processes, without secrets."""
    variables = {}
    for name, value in os.environ.items():
        is_forwarded = name.startswith(FORWARDED) or name in FORWARDED_NAMES
        if is_forwarded and not any(word in name for word in _SECRET):
            variables[name] = value
    return variables


def _joining_env(where: str, address: str, configured: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check the address of a cluster, and build the runtime environment for processes there.

    Args:
        where: name of the key or variable with the address, for errors.
        address: address of the cluster.
        configured: the user's runtime environment, which takes precedence.

    Returns:
        The runtime environment: variables of this process, and a hook that enters its directory.

    Raises:
        WorkerError: the address has another form, or there is no cluster at it.
    """
    _, colon, port = address.rpartition(":")
    is_address = bool(colon) and port.isdecimal() and "://" not in address
    if address != "auto" and not is_address:
        fix = "Use the address that `ray start --head` prints, and run the command on a machine of "
        fix += "the cluster, or with `ray job submit`."
        if address.startswith("ray://"):
            fix = f"Ray Client (ray://) keeps the driver out of the cluster's shared memory. {fix}"
        raise WorkerError(where, got=f"'{address}'", expected="HOST:PORT, auto or local", fix=fix)
    # Check this before Ray does: it would wait two minutes for a silent address, and ten minutes
    # for the answer of another program.
    if address != "auto" and not is_head(*_host_and_port(address)):
        is_used = responds(*_host_and_port(address))
        answer = "something else answers" if is_used else "nothing answers"
        raise WorkerError(
            where,
            got=f"'{address}', where {answer}",
            expected="the address of a Ray cluster that is up",
            fix="Start a cluster with `ray start --head --port=PORT`, or leave the address out: a "
            "cluster is then started for the run.",
        )
    runtime_env = dict(configured or {})
    variables = forwarded_variables() | runtime_env.pop("env_vars", {})
    directory = os.getcwd()

    # Ray pickles the hook by value, so it must not refer to names of this module.
    def enter_directory() -> None:
        """Change to the directory of the command, if the node has it."""
        if os.path.isdir(directory):
            os.chdir(directory)

    return {"worker_process_setup_hook": enter_directory, **runtime_env, "env_vars": variables}


# ---- nodes --------------------------------------------------------------------------------------


def responds(address: str, port: int) -> bool:
    """Whether a program accepts connections at an address."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_LIMIT_S).close()
    except OSError:
        return False
    return True


def is_head(address: str, port: int) -> bool:
    """Whether a program at an address speaks HTTP/2, like a cluster's head.

    With TLS, any program that accepts connections counts.
    """
    if os.environ.get("RAY_USE_TLS") == "1":
        return responds(address, port)
    try:
        with socket.create_connection((address, port), timeout=CONNECT_LIMIT_S) as connection:
            connection.settimeout(5 * CONNECT_LIMIT_S)  # the head may be busy
            connection.sendall(_HTTP2_GREETING)
            # The header of a frame has 9 bytes. The fourth is the type: 4, a settings frame.
            return connection.recv(9)[3:4] == b"\x04"
    except OSError:
        return False


def is_lost(address: str, port: int) -> bool:
    """Whether two attempts to connect to an address fail, `SECOND_LOOK_S` apart."""
    if responds(address, port):
        return False
    time.sleep(SECOND_LOOK_S)
    return not responds(address, port)


def head_address() -> tuple[str, int]:
    """Host and port of the cluster's head (its GCS)."""
    return _host_and_port(ray.get_runtime_context().gcs_address)


def own_node_id() -> str:
    """Ray's id of the node of this process."""
    return ray.get_runtime_context().get_node_id()


def run_on_node(
    node_id: str, function: Callable[..., Any], *args: Any, limit_s: float = 60.0
) -> Any:
    """Run a function on a node, and return its result.

    Args:
        node_id: Ray's id of the node.
        function: a function of Quadriga.
        args: its arguments.
        limit_s: time limit, including the start of a process on another node.

    Raises:
        RayError: the node is lost, or did not respond in time.
    """
    if node_id == own_node_id():
        return function(*args)
    strategy = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=strategy)(function)
    return ray.get(task.remote(*args), timeout=limit_s)


def wait_until_ray_drops_lost_nodes() -> None:
    """Wait until Ray no longer considers lost nodes alive: it would place processes on them.

    Returns at once if all nodes that Ray considers alive accept connections.

    Raises:
        WorkerError: Ray still considers a lost node alive after `LOST_NODES_LIMIT_S`.
    """
    deadline = time.monotonic() + LOST_NODES_LIMIT_S
    while True:
        # Nodes that Ray considers alive, but whose raylet does not respond.
        lost = []
        for node in ray.nodes():
            address = node["NodeManagerAddress"]
            if node["Alive"] and not responds(address, node["NodeManagerPort"]):
                lost.append(address)
        if not lost:
            return
        if time.monotonic() > deadline:
            raise WorkerError(
                "nodes of the Ray cluster",
                got=f"no answer from {', '.join(lost)}, which Ray still considers alive",
                expected=f"that Ray notices lost nodes within {LOST_NODES_LIMIT_S:.0f} s",
                fix="See the nodes with `ray status`, and end Ray on the lost ones (`ray stop`).",
            )
        time.sleep(SECOND_LOOK_S)
