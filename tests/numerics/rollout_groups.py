# SPDX-License-Identifier: Apache-2.0
"""The program that test_rollout_groups.py starts in four processes: one training layout after the other gives its
weights to rollout groups, which generate; what came out, and the memory that it took, is written for the test.

    python rollout_groups.py RANK FOLDER PORT PORT
"""

import asyncio
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch

from quadriga.config import Layout, OptimConfig
from quadriga.engines import process_group
from quadriga.engines.fsdp.engine import FSDPEngine, Training
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import PeerLostError, WeightSyncError
from quadriga.models.load import load_causal_lm, skeleton_causal_lm
from quadriga.models.scorers import PolicyScorer
from quadriga.models.weight_files import open_weights
from quadriga.rollout import Completion, NativeEngine, SamplingParams
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.manifest import Manifest
from quadriga.single_controller import WorkerPlace
from quadriga.weight_sync import (
    Box,
    Fingerprint,
    Held,
    ReshardedWeights,
    StreamedWeights,
    tensor_fingerprint,
)
from tests.numerics.weight_layouts import peak_bytes

CPU = torch.device("cpu")
CASES: Mapping[str, tuple[Layout, int, str]] = {
    "fsdp 4 -> tp 4": (Layout(dp_shard=4), 4, "untied"),
    "fsdp 2 x tp 2 -> tp 2": (Layout(dp_shard=2, tp=2), 2, "tied"),
    "tp 2 x pp 2 -> tp 4": (Layout(tp=2, pp=2), 4, "tied"),
    "hsdp 2 x 2 -> tp 2": (Layout(dp_replicate=2, dp_shard=2), 2, "untied"),
    "replicas 4 -> tp 2": (Layout(dp_replicate=4), 2, "tied"),
    "tp 2 -> tp 2": (Layout(tp=2), 2, "untied"),
}
"""Training layout, ranks of a rollout group, and model."""
PROMPTS = [
    [5, 9, 11, 2, 7],
    [3, 3, 8],
    [5, 9, 11, 2, 7],
    [60, 61, 62, 63, 64, 65, 66],
    [1],
    [90, 4],
]


def sampling() -> list[SamplingParams]:
    """Greedy and sampled ones, with and without filters."""
    drawn = [
        SamplingParams(6, seed=7, ignore_eos=True),
        SamplingParams(10, temperature=0.7, top_p=0.9, seed=8),
    ]
    return [
        SamplingParams(13, temperature=0, ignore_eos=True),
        *drawn,
        *drawn,
        SamplingParams(5, seed=1, top_k=5),
    ]


def plain(completions: list[Completion]) -> list[tuple[list[int], list[float], str]]:
    return [(one.token_ids, one.log_probs, one.finish_reason) for one in completions]


def make_trainer(path: Path, layout: Layout, world: ProcessGroup) -> FSDPEngine:
    """In float32."""
    if layout.is_whole:
        scorer, read = PolicyScorer(load_causal_lm(path, dtype=torch.float32)), None
    else:
        scorer, read = PolicyScorer(skeleton_causal_lm(path)), open_weights(path).read
    return FSDPEngine(
        scorer,
        read=read,
        dtype=torch.float32,
        device=CPU,
        processes=Processes.arrange(world, layout),
        training=Training(OptimConfig(), 1.0, 1),
    )


def held_shards(engine: FSDPEngine) -> Held:
    return {
        name: (Box(start, tuple(tensor.shape)), tensor.detach())
        for name, start, tensor in engine.parameters.shards()
    }


def num_bytes(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


async def conversations(engine: NativeEngine) -> list[Completion]:
    """Requests that come one after the other, of which one is given up on the way."""
    params = sampling()
    first = [asyncio.create_task(engine.generate(PROMPTS[row], params[row])) for row in range(3)]
    lost = asyncio.create_task(engine.generate([7, 7], SamplingParams(64, seed=3, ignore_eos=True)))
    await first[0]
    lost.cancel()
    later = [asyncio.create_task(engine.generate(PROMPTS[row], params[row])) for row in range(3, 6)]
    done = [await task for task in (*first, *later)]
    await asyncio.sleep(0.01)  # the group has nothing to do, as while a tool works
    return [*done, await engine.generate(PROMPTS[0], params[0])]


class CutsItself:
    """In the place of an engine that takes whole tensors; it keeps their fingerprints alone."""

    def __init__(self, path: Path, fails: bool) -> None:
        self.manifest, self.fails, self.weight_version = (
            Manifest.of(skeleton_causal_lm(path)),
            fails,
            -1,
        )
        self.marks: dict[str, str] = {}

    def wanted_shards(self) -> Any:
        return self.manifest.full_weights(torch.float32)

    def named_weights(self) -> Any:
        return iter(())

    def load_weights(self, weights: Any, version: int) -> None:
        self.marks = {}
        for name, tensor in self.manifest.check_stream(weights):
            self.marks[name] = tensor_fingerprint(tensor)
            if self.fails:
                raise WeightSyncError("the engine", got="weights that it does not like")
        self.weight_version = version

    def fingerprint(self) -> Fingerprint:
        return Fingerprint(self.marks)


def streamed(
    path: Path, trainer: FSDPEngine, world: ProcessGroup, bucket_bytes: int
) -> dict[str, Any]:
    """Whole tensors, a bucket at a time; in the third publication one of the engines raises."""
    sync = StreamedWeights(world.rank, world.size, CPU, bucket_bytes)
    engine, held = CutsItself(path, fails=False), held_shards(trainer)
    sync.publish(held, engine, 1)
    peak = peak_bytes(lambda: sync.publish(held, engine, 2))
    sync.verify(engine, 2)
    expected = {name: tensor_fingerprint(tensor) for name, tensor in trainer.weights()}
    found = {"peak": peak, "is_equal": engine.marks == expected}
    engine.fails = world.rank == world.size - 1
    try:
        sync.publish(held, engine, 3)
    except WeightSyncError as error:
        found["refused"] = str(error)
    return found | {"version": engine.weight_version}


def run(folder: Path, case: str, world: ProcessGroup) -> dict[str, Any]:
    layout, size, model = CASES[case]
    trainer = make_trainer(folder / model, layout, world)
    held = held_shards(trainer)
    group = RolloutGroup(world.rank, world.size, size, CPU)
    engine = NativeEngine(
        skeleton_causal_lm(folder / model),
        group=group,
        dtype=torch.float32,
        eos_token_ids=(0,),
        max_num_seqs=4,
    )
    whole = sum(one.numel() for one in engine.model.parameters()) * 4
    bucket_bytes = whole // 16
    sync = ReshardedWeights(world.rank, world.size, CPU, bucket_bytes)
    first = peak_bytes(lambda: sync.publish(held, engine, 1))
    again = peak_bytes(lambda: sync.publish(held, engine, 2))
    sync.verify(engine, 2)
    found: dict[str, Any] = {"bucket": bucket_bytes, "whole": whole, "first": first, "again": again}
    found["held"] = num_bytes(tensor for _, tensor in held.values())
    found["shards"] = num_bytes(dict(engine.model.named_parameters()).values())
    found["token"] = engine.cache_memory.token_bytes
    found["streamed"] = streamed(folder / model, trainer, world, bucket_bytes)
    found |= {"sliced": sync.num_sliced, "shared": sync.num_shared}
    if group.is_leader:
        found["sync"] = plain(engine.generate_batch(PROMPTS, sampling()))
        engine.release()
        found["async"] = plain(asyncio.run(conversations(engine)))
        engine.release()
    else:
        for _ in range(2):
            engine.follow()
    engine.close()
    return found


def lose(folder: Path, world: ProcessGroup) -> None:
    """A group without one of its members: what the other one says."""
    group = RolloutGroup(world.rank, world.size, world.size, CPU)
    if not group.is_leader:
        os._exit(0)
    told = []
    for work in (partial(group.broadcast, "a step"), partial(group.all_reduce, torch.ones(3))):
        try:
            for _ in range(100):
                work()
        except PeerLostError as error:
            told.append(str(error))
    torch.save(told, folder / "lost.pt")
    os._exit(0)


def main(rank: int, folder: Path, ports: tuple[int, int]) -> None:
    """All cases of four ranks, then those of two."""
    for size, port in zip((4, 2), ports, strict=True):
        if rank < size:
            world = process_group.join(WorkerPlace(rank, size, master_port=port), CPU)
            for case in (case for case, (layout, *_) in CASES.items() if layout.world_size == size):
                torch.save(run(folder, case, world), folder / f"{case}.{rank}.pt")
            if size == 2:
                lose(folder, world)
            process_group.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])))
