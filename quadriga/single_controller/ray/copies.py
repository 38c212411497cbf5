# SPDX-License-Identifier: Apache-2.0
"""Copies of the training state in the memory of the nodes, after each step.

    driver                         a rank (engines/checkpoint.py)     keepers, one per node
      attach -- plan, open ------> maps its memory <----------------- make anonymous memory
      copy   -- copy_state ------> | thread: copies into it
             -- mirror ---------------------------------------------> | fetch from the node before
      step ...
      newest -- complete_steps --------------------------------------> steps with right checksums
      load   -- load_copy -------> reads its chunks, on its node or from another keeper

After it has lost a process, a run resumes from such a copy instead of an older checkpoint on disk.
If the cluster has one node, the driver itself is the keeper, and nothing is mirrored; else an actor
on each node is a keeper. The memory is in no file system, and is freed when the processes that map
it have ended, even if they were killed. Nothing waits for a copy: a step that ends while the
previous copy is still being mirrored is not copied. The driver's part of the state stays in the
driver.

The memory of a rank has two slots, one for even steps and one for odd steps, so that the previous
copy is still complete while the next one is written (`quadriga.protocol.memory`).
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from mmap import mmap
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga.observe.machine import GIB, available_bytes
from quadriga.protocol.memory import slot_of, whole_steps
from quadriga.single_controller.ray.cluster import own_node_id

MIRROR_BYTES = 64 << 20  # size of the pieces in which slots are fetched
MIRROR_LIMIT_S = 600.0  # time for a source to complete its slots
# Name of the only node of a cluster. Unlike Ray's id, it stays valid when the cluster is restarted.
HERE = "here"
Owner = tuple[str, int]
"""A rank whose state is copied: part of the checkpoint, such as "actor", and number of the rank."""


class Keeper:
    """Holds the memory of one node, for the copies of several ranks (owners).

    The memory is freed when this process and all others that map it have ended.
    """

    def __init__(self) -> None:
        self._files: dict[Owner, int] = {}  # file descriptor of the memory of each owner

    def make(self, sizes: Mapping[Owner, int]) -> tuple[dict[Owner, str], str]:
        """Release earlier memory, and allocate memory for copies.

        Args:
            sizes: size in bytes for each owner.

        Returns:
            By owner the path with which processes of the node open the memory, and "". If more than
            half of the free memory would be needed: {} and the reason.
        """
        while self._files:
            _, file = self._files.popitem()
            os.close(file)

        needed = sum(sizes.values())
        free = available_bytes()
        if needed > free / 2:
            reason = f"they need {needed / GIB:.2f} GiB and may have half of the "
            reason += f"{free / GIB:.2f} GiB that are free"
            return {}, reason

        # Files without a name, which other processes open through this process's descriptors.
        paths = {}
        for owner, size in sizes.items():
            file = os.memfd_create("quadriga-state-copy")
            os.truncate(file, size)
            self._files[owner] = file
            paths[owner] = f"/proc/{os.getpid()}/fd/{file}"
        return paths, ""

    def complete_steps(self) -> dict[Owner, list[int]]:
        """Find the steps of which each owner has a complete copy on this node."""
        return {owner: whole_steps(self._content(owner)) for owner in self._files}

    def read(self, owner: Owner, step: int, start: int, size: int) -> np.ndarray | None:
        """Read bytes of a step's slot.

        Args:
            owner: the rank that was copied.
            step: number of the step.
            start: first byte in the slot.
            size: number of bytes.

        Returns:
            A copy of the bytes [size], or of fewer at the slot's end. None while the slot is
            incomplete, or has another step.
        """
        slot = slot_of(self._content(owner), step)
        # The first number of a slot is its step, or 0 while it is written.
        header = slot[:8].view(np.int64)
        if header[0] != step:
            return None
        content = slot[start : start + size].copy()
        # The slot may have been overwritten during the copy.
        return content if header[0] == step else None

    def mirror(self, source: Any, owners: Sequence[Owner], step: int) -> None:
        """Fetch the slots of a step from the keeper of another node, once they are complete.

        Gives up after `MIRROR_LIMIT_S`; a slot that was not fetched stays marked as incomplete.

        Args:
            source: handle of the other keeper.
            owners: the ranks whose slots are fetched.
            step: number of the step.
        """
        deadline = time.monotonic() + MIRROR_LIMIT_S
        for owner in owners:
            slot = slot_of(self._content(owner), step)
            slot[:8] = 0  # incomplete
            # Backwards, so that the header, which marks the slot as complete, comes last.
            for start in reversed(range(0, len(slot), MIRROR_BYTES)):
                fetch = partial(source.read.remote, owner, step, start, MIRROR_BYTES)
                content = ray.get(fetch())
                while content is None:
                    if time.monotonic() > deadline:
                        return
                    time.sleep(0.02)
                    content = ray.get(fetch())
                slot[start : start + len(content)] = content

    def _content(self, owner: Owner) -> np.ndarray:
        """Map the memory of an owner, with both slots, as bytes."""
        return np.frombuffer(mmap(self._files[owner], 0), np.uint8)


@dataclass(frozen=True)
class _CopyLocations:
    """Locations of the copies of each rank."""

    nodes: dict[Owner, list[str]]  # the nodes that have copies of a rank
    paths: dict[str, dict[Owner, str]]  # by node: where its processes open the memory
    keepers: dict[str, Any]  # by node: handle of its keeper, unless the driver is the keeper

    def read(self, step: int, part: str, rank: int, start: int, size: int) -> Any:
        """Read bytes of a slot, in a worker: from memory of this node, or else from a keeper.

        Args:
            step: number of the step.
            part: part of the checkpoint.
            rank: rank that was copied.
            start: first byte in the slot.
            size: number of bytes.
        """
        nodes = self.nodes[part, rank]
        this_node = own_node_id() if self.keepers else HERE
        if this_node not in nodes:
            keeper = self.keepers[nodes[0]]
            return bytearray(ray.get(keeper.read.remote((part, rank), step, start, size)))
        with open(self.paths[this_node][part, rank], "r+b") as file:
            slot = slot_of(memoryview(mmap(file.fileno(), 0)), step)
            return slot[start : start + size]


@dataclass(frozen=True)
class NewestState:
    """The newest state of which complete copies of all ranks exist."""

    step: int  # the step after which it was copied
    driver: dict[str, Any]  # the driver's part of the state
    plans: dict[str, Any]  # the `CopyPlan` of each part of the checkpoint
    memory: _CopyLocations

    def load(self, workers: Mapping[str, Any]) -> None:
        """Load the state into workers, whose layout may differ from that of the copied ones.

        Args:
            workers: group of workers of each part of the checkpoint.
        """
        for part, worker in workers.items():
            worker.load_copy(self.plans[part], partial(self.memory.read, self.step, part))


class StateCopies:
    """The copies of a run's state. They outlive the run's workers, and end with the driver."""

    def __init__(self) -> None:
        self._keepers: dict[str, Any] = {}  # a `Keeper` or its actor, by node
        self._workers: Mapping[str, Any] = {}  # groups of workers, by part of the checkpoint
        self._plans: dict[str, Any] = {}  # the `CopyPlan` of each part
        self._memory: _CopyLocations | None = None  # None: there are no copies
        # The driver's part of the state after each of the last two copied steps.
        self._driver: dict[int, dict[str, Any]] = {}
        # References of calls of `Keeper.mirror` that may still be in progress.
        self._mirrors: list[Any] = []

    @property
    def steps(self) -> str:
        """The last steps whose copy was started, as text such as `7 or 8`."""
        return " or ".join(map(str, self._driver))

    def attach(self, workers: Mapping[str, Any]) -> str:
        """Prepare copies of the states of workers. Discards earlier copies: load them first.

        Without enough memory, later calls of `copy` do nothing.

        Args:
            workers: group of workers of each part of the checkpoint.

        Returns:
            The choice and its reason, to be printed.
        """
        self._workers = workers
        self._memory = None
        self._mirrors = []
        self._driver.clear()
        self._plans = {part: worker.plan_copies()[0] for part, worker in workers.items()}

        homes = {}  # the node on which each owner runs
        sizes = {}  # bytes of each owner's memory
        for part, worker in workers.items():
            for rank, address in enumerate(worker.processes.addresses):
                homes[part, rank] = HERE if _is_one_node() else address.node_id
                # Two slots, for even and odd steps.
                sizes[part, rank] = 2 * self._plans[part].slot_bytes[rank]

        # Each node mirrors the copies of the node before it in this cycle.
        cycle = sorted(set(homes.values()))
        self._drop(set(self._keepers) - set(cycle))
        mirror_of = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
        # For each owner: its node and then its mirror. In a cycle of one node, these are the same.
        nodes = {
            owner: list(dict.fromkeys((home, mirror_of[home]))) for owner, home in homes.items()
        }

        # The keepers make the memory, and the ranks open it. If one of them refuses, there are no
        # copies at all.
        paths = {}
        refusal = ""  # reason of the first refusal
        largest = 0  # bytes on the node with the most memory
        for node in cycle:
            node_sizes = {owner: sizes[owner] for owner in nodes if node in nodes[owner]}
            paths[node], reason = self._call(node, "make", node_sizes)
            refusal = refusal or reason
            largest = max(largest, sum(node_sizes.values()))
        for part, worker in workers.items():
            if refusal:
                break
            rank_paths = [paths[home][owner] for owner, home in homes.items() if owner[0] == part]
            # The reasons of all ranks; "" from a rank that has opened its memory.
            refusal = next(filter(None, worker.open_copies(rank_paths)), "")
        if refusal:
            return f"none ({refusal}): a lost process costs the steps since the last checkpoint"

        remote_keepers = {node: keeper for node, keeper in self._keepers.items() if node != HERE}
        self._memory = _CopyLocations(nodes, paths, remote_keepers)
        ranks = "its ranks and of those of the node before" if len(cycle) > 1 else "its ranks"
        size = f"{largest / GIB:.2f} GiB a node"
        return f"{size}, the last two steps of {ranks}: a lost process costs one step"

    def copy(self, step: int, driver: dict[str, Any]) -> None:
        """Start to copy the state after a step.

        Does nothing while the previous copy is still being mirrored, without memory for copies, and
        once a keeper was lost, until `attach`.

        Args:
            step: number of the step.
            driver: the driver's part of the state.
        """
        memory = self._memory
        mirrors = self._mirrors
        if memory is None or not self._workers:
            return
        # The second list of `ray.wait` has the calls that have not ended. Leave out this step
        # instead of waiting for them.
        if mirrors and ray.wait(mirrors, num_returns=len(mirrors), timeout=0)[1]:
            return
        try:
            ray.get(mirrors)  # they have ended: with an error if a keeper was lost
        except ray.exceptions.RayError as error:
            print(f"state copies: none from step {step} on, because a keeper was lost: {error}")
            self._workers = {}
            return

        for worker in self._workers.values():
            worker.copy_state(step)
        # A process may be lost before all ranks have copied this step, so keep the previous one.
        history = [*self._driver.items(), (step, deepcopy(driver))]
        self._driver = dict(history[-2:])

        # Each node fetches the copies of which it is the mirror, as soon as they are complete.
        self._mirrors = []
        for source, keeper in memory.keepers.items():
            for node in memory.paths:
                # The ranks that run on `source` and are mirrored on `node`.
                owners = [owner for owner in memory.nodes if memory.nodes[owner] == [source, node]]
                if owners:
                    mirror = self._keepers[node].mirror.remote(keeper, owners, step)
                    self._mirrors.append(mirror)

    def newest(self) -> NewestState | None:
        """Find the newest state of which each rank has a complete copy on a living node.

        Forgets the keepers of lost nodes.

        Returns:
            The state; None if there is none.
        """
        # By node: for each owner the steps of complete copies.
        complete = {}
        for node in list(self._keepers):
            try:
                complete[node] = self._call(node, "complete_steps")
            except ray.exceptions.RayError:
                print(f"state copies: those on node {node} are lost with it")
                del self._keepers[node]
        # Workers on other nodes cannot read the driver's memory, and the cluster may have got more
        # nodes since the copy.
        if self._memory is None or (HERE in complete and not _is_one_node()):
            return None
        # The newest step is incomplete if a rank was lost while it was copied.
        for step, driver in reversed(self._driver.items()):
            # The nodes that have a complete copy of this step, for each owner.
            nodes = {}
            for owner, owner_nodes in self._memory.nodes.items():
                nodes[owner] = [
                    node for node in owner_nodes if step in complete.get(node, {}).get(owner, [])
                ]
            if all(nodes.values()):
                memory = replace(self._memory, nodes=nodes)
                return NewestState(step, driver, self._plans, memory)
        return None

    def close(self) -> None:
        """Free all memory."""
        self._drop(set(self._keepers))

    def _drop(self, nodes: Iterable[str]) -> None:
        """Free the memory of some nodes, and end their keepers."""
        for node in nodes:
            keeper = self._keepers.pop(node)
            if node == HERE:
                keeper.make({})  # replaces the memory of this process by none
            else:
                ray.kill(keeper)  # the process takes its memory along

    def _call(self, node: str, method: str, *args: Any) -> Any:
        """Call a method of a node's keeper, and wait for the result. Starts a missing keeper.

        Raises:
            RayError: the node is lost.
        """
        if node == HERE:
            keeper = self._keepers.setdefault(node, Keeper())
            return getattr(keeper, method)(*args)
        if node not in self._keepers:
            keeper_class = ray.remote(num_cpus=0)(Keeper).options(
                max_concurrency=4,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
            )
            self._keepers[node] = keeper_class.remote()
        return ray.get(getattr(self._keepers[node], method).remote(*args))


def _is_one_node() -> bool:
    """Whether the cluster has a single living node."""
    return sum(node["Alive"] for node in ray.nodes()) == 1
