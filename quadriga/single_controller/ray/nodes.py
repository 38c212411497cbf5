# SPDX-License-Identifier: Apache-2.0
"""The nodes of the cluster: whether they are there, and a function run on one of them.

Whether a node is there is asked of its ports and not of Ray: Ray gives a node that stopped answering 15 s and a head
60 s, and then ends the driver without a word of ours.
"""

import socket
import time
from collections.abc import Callable
from typing import Any

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga.errors import WorkerError

CONNECT_LIMIT_S = 2.0
"""Time for a node to take a connection."""

SECOND_LOOK_S = 1.0
"""Nothing is given up on one look: a second one, this much later, must see the same."""


def answers(address: str, port: int) -> bool:
    """Whether something takes connections there."""
    try:
        socket.create_connection((address, port), timeout=CONNECT_LIMIT_S).close()
    except OSError:
        return False
    return True


def head_address() -> tuple[str, int]:
    """Host and port of the cluster's head (its GCS)."""
    host, _, port = ray.get_runtime_context().gcs_address.rpartition(":")
    return host.strip("[]"), int(port)


def is_lost(address: str, port: int) -> bool:
    """Whether nothing answers there, at two looks."""
    if answers(address, port):
        return False
    time.sleep(SECOND_LOOK_S)
    return not answers(address, port)


def own_node_id() -> str:
    """Ray's id of the node that this process is on."""
    return ray.get_runtime_context().get_node_id()


def own_raylet_port() -> int:
    """The port of this node's raylet, the process of Ray's that starts and watches the workers here."""
    own = own_node_id()
    return next(node["NodeManagerPort"] for node in ray.nodes() if node["NodeID"] == own)


def run_on_node(node_id: str, function: Callable[..., Any], *args: Any, limit_s: float = 60.0) -> Any:
    """The result of a function of ours on a node.

    Args:
        limit_s: time for it, with the start of a process of Ray's there; not on this node, where it is just called.

    Raises:
        ray.exceptions.RayError: the node is not there, or did not answer in time.
    """
    if node_id == own_node_id():
        return function(*args)
    where = NodeAffinitySchedulingStrategy(node_id, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0, scheduling_strategy=where)(function)
    return ray.get(task.remote(*args), timeout=limit_s)


def await_lost_nodes(limit_s: float = 30.0) -> None:
    """Wait until Ray has noticed of every lost node that it is lost: before that it would place processes there.

    To be called before processes are started again after a failure.

    Raises:
        WorkerError: Ray still counts on one after `limit_s`.
    """
    deadline = time.monotonic() + limit_s
    while lost := [node for node in ray.nodes() if node["Alive"] and not _node_answers(node)]:
        if time.monotonic() > deadline:
            raise WorkerError(
                "nodes of the Ray cluster",
                got=f"no answer from {', '.join(node['NodeManagerAddress'] for node in lost)}, which Ray counts on",
                expected="nodes that answer, or that Ray has given up",
                fix="`ray status` shows what Ray counts on; end Ray on that node (`ray stop`).",
            )
        time.sleep(SECOND_LOOK_S)


def _node_answers(node: dict[str, Any]) -> bool:
    return answers(node["NodeManagerAddress"], node["NodeManagerPort"])
