# SPDX-License-Identifier: Apache-2.0
"""The end of worker processes: all of them killed, and seen to be gone."""

import os
import signal
import time
from collections.abc import Sequence
from typing import Any

import ray

from quadriga.errors import WorkerError
from quadriga.single_controller.ray.nodes import answers, head_address, is_lost, own_node_id, run_on_node
from quadriga.single_controller.ray.process import ProcessAddress, start_of

END_LIMIT_S = 10.0
"""Time for killed processes to be gone."""

_RAY_S = 3.0
"""Time for Ray to kill a process; what then still lives is killed without it."""


def end_processes(
    actors: Sequence[Any], addresses: Sequence[ProcessAddress] = (), placement_groups: Sequence[Any] = ()
) -> None:
    """Kill worker processes, give their resources back, and wait until the processes are gone.

    Args:
        actors: Ray's handles of the processes; one that has ended already does no harm.
        addresses: where those of them are whose address is known: these are waited for.
        placement_groups: Ray's reservations that they ran in.

    Raises:
        WorkerError: processes are still there after `END_LIMIT_S`.
    """
    if not ray.is_initialized():
        # The connection is over, and with it what this process started; `ray.kill` would begin a new one.
        return
    # Without its head Ray kills nothing, and waits for a minute before it says so.
    has_head = not is_lost(*head_address())
    if has_head:
        for actor in actors:
            ray.kill(actor, no_restart=True)
        for group in placement_groups:
            ray.util.remove_placement_group(group)
    left: list[str] = []
    for node_id in {address.node_id for address in addresses}:
        there = [address for address in addresses if address.node_id == node_id]
        left += _end_on_node(node_id, there, has_head)
    if left:
        raise WorkerError(
            "closing a worker group",
            got=f"{', '.join(left)} alive {END_LIMIT_S:g} s after SIGKILL",
            expected="no process left",
            fix="Such a process waits for a device or a file system; the node's `dmesg` may say which.",
        )


def _end_on_node(node_id: str, addresses: Sequence[ProcessAddress], has_head: bool) -> list[str]:
    """End processes of one node; returns those that are left."""
    node = addresses[0]
    pids = [(address.pid, address.started) for address in addresses]
    if node_id == own_node_id():
        left = _end_here(pids, _RAY_S if has_head else 0.0)
    elif not has_head or not answers(node.node, node.raylet_port):
        # A process ends itself when its node's raylet does, and a raylet when it has no head for a minute.
        return []
    else:
        left = run_on_node(node_id, _end_here, pids, _RAY_S, limit_s=END_LIMIT_S + 5.0)
    return [f"process {pid} on {node.node}" for pid in left]


def _end_here(pids: Sequence[tuple[int, int]], patience_s: float) -> list[int]:
    """Wait until processes of this node are gone, after `patience_s` with a SIGKILL; returns those that are left."""
    start = time.monotonic()
    is_killed = False
    while alive := [pid for pid, started in pids if start_of(pid) == started]:
        waited_s = time.monotonic() - start
        if waited_s > END_LIMIT_S:
            return alive
        if waited_s >= patience_s and not is_killed:
            for pid in alive:
                _kill(pid)
            is_killed = True
        time.sleep(0.01)
    return []


def _kill(pid: int) -> None:
    """Kill a process, and its process group if it leads one."""
    try:
        if os.getpgid(pid) == pid:
            os.killpg(pid, signal.SIGKILL)
        else:
            os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        # It ended by itself in the meantime.
        return


def addresses_so_far(refs: Sequence[Any]) -> list[ProcessAddress]:
    """The addresses of those processes that have started.

    Args:
        refs: what the `address` methods of all of them will return.
    """
    if not ray.is_initialized():
        return []
    ready, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return [address for ref in ready if (address := _address(ref)) is not None]


def _address(ref: Any) -> ProcessAddress | None:
    try:
        return ray.get(ref)
    except ray.exceptions.RayError:
        # It died while it started: there is nothing to wait for.
        return None
