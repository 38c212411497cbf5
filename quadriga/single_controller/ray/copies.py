# SPDX-License-Identifier: Apache-2.0
"""Copies of the state after each step in the nodes' memory: nearer than a checkpoint on disk.

    driver                         a rank (engines/checkpoint.py)     keepers, one for each node
      attach -- plan, open ------> maps its memory <----------------- make memory without a name
      copy   -- copy_state ------> | thread: copies into it
             -- mirror ---------------------------------------------> | fetch what the node before has
      step ...
      newest -- whole? ---------------------------------------------> the steps whose sums are right
      load   -- load_copy -------> reads its chunks, of its own node or from another one's keeper

A keeper is the driver itself where the cluster has one node, else an actor on each. Its memory is in no file system and
ends with the processes that have it, whatever kills them. Nothing waits for a copy: a step that ends while the one
before is still being mirrored has none. The driver's own part of the state stays in the driver.
"""

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from mmap import mmap
from typing import Any

import numpy as np
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from quadriga.observe.machine import GIB, available_bytes
from quadriga.protocol.memory import slot_of, whole_steps
from quadriga.single_controller.ray.cluster import own_node_id

MIRROR_BYTES, MIRROR_LIMIT_S = 64 << 20, 600.0
HERE = "here"  # the driver's node where the cluster has no other, also when that cluster is started again
Owner = tuple[str, int]  # a part of the checkpoint and a rank of its workers


class Keeper:
    """Memory of one node, which ends with this process and the others that have opened it."""

    def __init__(self) -> None:
        self._files: dict[Owner, int] = {}

    def make(self, sizes: Mapping[Owner, int]) -> tuple[dict[Owner, str], str]:
        """Memory of these sizes, in place of what there was. Returns the paths by which processes of the node open it;
        or why there is none: it would be more than half of what is free."""
        while self._files:
            os.close(self._files.popitem()[1])
        needed, free = sum(sizes.values()), available_bytes()
        if needed > free / 2:
            return (
                {},
                f"they need {needed / GIB:.2f} GiB and may have half of the {free / GIB:.2f} GiB that are free",
            )
        for owner, size in sizes.items():
            self._files[owner] = os.memfd_create("quadriga-state-copy")
            os.truncate(self._files[owner], size)
        return {owner: f"/proc/{os.getpid()}/fd/{file}" for owner, file in self._files.items()}, ""

    def whole(self) -> dict[Owner, list[int]]:
        """The steps of which there are whole copies."""
        return {
            owner: whole_steps(np.frombuffer(mmap(file, 0), np.uint8))
            for owner, file in self._files.items()
        }

    def read(self, owner: Owner, step: int, start: int, size: int) -> np.ndarray | None:
        """Bytes [size] of a step's slot; None while it has another step, or half of one."""
        slot = slot_of(np.frombuffer(mmap(self._files[owner], 0), np.uint8), step)
        header, content = slot[:8].view(np.int64), None
        if header[0] == step:
            content = slot[start : start + size].copy()
        return content if header[0] == step else None

    def mirror(self, source: Any, owners: Sequence[Owner], step: int) -> None:
        """Fetch the slots of a step from another node's keeper, as soon as they are whole there."""
        deadline = time.monotonic() + MIRROR_LIMIT_S
        for owner in owners:
            slot = slot_of(np.frombuffer(mmap(self._files[owner], 0), np.uint8), step)
            slot[:8] = 0
            # Backwards: what says that it is whole comes last.
            for start in reversed(range(0, len(slot), MIRROR_BYTES)):
                while (
                    content := ray.get(source.read.remote(owner, step, start, MIRROR_BYTES))
                ) is None:
                    if time.monotonic() > deadline:
                        return
                    time.sleep(0.02)
                slot[start : start + len(content)] = content


@dataclass(frozen=True)
class _Memory:
    """Where the memory of each rank is: nodes, paths on them, and their keepers, where these are other processes."""

    nodes: dict[Owner, list[str]]
    paths: dict[str, dict[Owner, str]]
    keepers: dict[str, Any]

    def read(self, step: int, part: str, rank: int, start: int, size: int) -> Any:
        """Bytes [size] of a slot, in a worker."""
        nodes, own = self.nodes[part, rank], own_node_id() if self.keepers else HERE
        if own not in nodes:
            return bytearray(
                ray.get(self.keepers[nodes[0]].read.remote((part, rank), step, start, size))
            )
        with open(self.paths[own][part, rank], "r+b") as file:
            return slot_of(memoryview(mmap(file.fileno(), 0)), step)[start : start + size]


@dataclass(frozen=True)
class NewestState:
    """The newest state of which all ranks have whole copies: that after `step`; `driver` is the driver's part of it."""

    step: int
    driver: dict[str, Any]
    plans: dict[str, Any]
    memory: _Memory

    def load(self, workers: Mapping[str, Any]) -> None:
        """Have the workers of each part read theirs, whatever their layout."""
        for part, worker in workers.items():
            worker.load_copy(self.plans[part], partial(self.memory.read, self.step, part))


class StateCopies:
    """The copies of a run: they and this object outlive its workers, and end with the driver."""

    def __init__(self) -> None:
        self._keepers: dict[str, Any] = {}
        self._workers: Mapping[str, Any] = {}
        self._memory: _Memory | None = None
        self._driver: dict[int, dict[str, Any]] = {}
        self._mirrors: list[Any] = []

    @property
    def steps(self) -> str:
        """The steps after which the last copies were begun, to be printed."""
        return " or ".join(map(str, self._driver))

    def attach(self, workers: Mapping[str, Any]) -> str:
        """Prepare copies of the states of these workers, by part. Returns what was chosen, with the reason.

        The copies that there were are gone: what was loaded from them is to be copied first.
        """
        self._workers, self._memory, self._mirrors = workers, None, []
        self._driver.clear()
        self._plans = {part: worker.plan_copies()[0] for part, worker in workers.items()}
        homes = {
            (part, rank): HERE if _is_one_node() else address.node_id
            for part, worker in workers.items()
            for rank, address in enumerate(worker.processes.addresses)
        }
        cycle = sorted(set(homes.values()))
        self._drop(set(self._keepers) - set(cycle))
        after = dict(zip(cycle, cycle[1:] + cycle[:1], strict=True))
        nodes = {owner: list(dict.fromkeys((node, after[node]))) for owner, node in homes.items()}
        size = {(part, rank): 2 * self._plans[part].slot_bytes[rank] for part, rank in homes}
        paths, refusal, largest = {}, "", 0
        for node in cycle:
            sizes = {owner: size[owner] for owner, on in nodes.items() if node in on}
            paths[node], why = self._call(node, "make", sizes)
            refusal, largest = refusal or why, max(largest, sum(sizes.values()))
        for part, worker in workers.items():
            own = [paths[node].get(owner, "") for owner, node in homes.items() if owner[0] == part]
            refusal = refusal or next(filter(None, worker.open_copies(own)), "")
        if refusal:
            return f"none ({refusal}): a lost process costs the steps since the last checkpoint"
        apart = {node: keeper for node, keeper in self._keepers.items() if node != HERE}
        self._memory = _Memory(nodes, paths, apart)
        what = "its ranks and of those of the node before" if len(cycle) > 1 else "its ranks"
        return f"{largest / GIB:.2f} GiB a node, the last two steps of {what}: a lost process costs one step"

    def copy(self, step: int, driver: dict[str, Any]) -> None:
        """Begin to copy the state as it is after this step; `driver` is the driver's own part of it."""
        memory, mirrors = self._memory, self._mirrors
        if memory is None or not self._workers:
            return
        if mirrors and ray.wait(mirrors, num_returns=len(mirrors), timeout=0)[1]:
            return
        try:
            ray.get(mirrors)
        except ray.exceptions.RayError as error:
            print(f"state copies: none from step {step} on, for a keeper was lost: {error}")
            self._workers = {}
            return
        for worker in self._workers.values():
            worker.copy_state(step)
        self._driver = dict([*self._driver.items(), (step, deepcopy(driver))][-2:])
        self._mirrors = []
        for source, keeper in memory.keepers.items():
            for node in memory.paths:
                if owners := [owner for owner, on in memory.nodes.items() if on == [source, node]]:
                    self._mirrors.append(self._keepers[node].mirror.remote(keeper, owners, step))

    def newest(self) -> NewestState | None:
        """The newest state of which each rank's copy is whole on a node that is there."""
        whole: dict[str, dict[Owner, list[int]]] = {}
        for node in list(self._keepers):
            try:
                whole[node] = self._call(node, "whole")
            except ray.exceptions.RayError:
                print(f"state copies: those on node {node} are lost with it")
                del self._keepers[node]
        if self._memory is None or (HERE in whole and not _is_one_node()):
            return None
        for step, driver in reversed(self._driver.items()):
            nodes = {
                owner: [node for node in on if step in whole.get(node, {}).get(owner, [])]
                for owner, on in self._memory.nodes.items()
            }
            if all(nodes.values()):
                memory = _Memory(nodes, self._memory.paths, self._memory.keepers)
                return NewestState(step, driver, self._plans, memory)
        return None

    def close(self) -> None:
        """Give all memory back."""
        self._drop(set(self._keepers))

    def _drop(self, nodes: Iterable[str]) -> None:
        for node in nodes:
            keeper = self._keepers.pop(node)
            if node == HERE:
                keeper.make({})
            else:
                ray.kill(keeper)

    def _call(self, node: str, method: str, *args: Any) -> Any:
        """Call the keeper of a node, which is started where there is none yet."""
        if node == HERE:
            return getattr(self._keepers.setdefault(node, Keeper()), method)(*args)
        if node not in self._keepers:
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            process = ray.remote(num_cpus=0)(Keeper).options(
                max_concurrency=4, scheduling_strategy=where
            )
            self._keepers[node] = process.remote()
        return ray.get(getattr(self._keepers[node], method).remote(*args))


def _is_one_node() -> bool:
    return sum(node["Alive"] for node in ray.nodes()) == 1
