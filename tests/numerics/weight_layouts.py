# SPDX-License-Identifier: Apache-2.0
"""The program that test_weight_sync.py starts in six processes: trainers of one layout after the other send their
weights to two rollouts; what arrived, and the memory that it took, is written for the test to compare.

    python weight_layouts.py RANK FOLDER PORT PORT      ranks 0 to 3: trainers, 4 and 5: rollouts
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path

import torch
from torch import Tensor
from torch._C._autograd import _disable_profiler, _enable_profiler, _prepare_profiler
from torch._C._profiler import RecordScope, _ExperimentalConfig
from torch.autograd import ProfilerConfig, ProfilerState
from torch.profiler import ProfilerActivity

from quadriga.config import Layout, ModelConfig
from quadriga.engines import process_group
from quadriga.engines.fsdp import sharded
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.models.load import load_causal_lm, skeleton_causal_lm
from quadriga.models.lora import add_adapter
from quadriga.models.scorers import PolicyScorer
from quadriga.models.weight_files import open_weights
from quadriga.single_controller import WorkerPlace
from quadriga.weight_sync import Address, Fingerprint, WeightReceiver, WeightSender, fingerprint
from tests.limits import PEER_S

CPU = torch.device("cpu")
BUCKET_BYTES = 720 << 10
ROLLOUTS = (4, 5)
CASES = {
    "fsdp 4": (Layout(dp_shard=4), "untied"),
    "fsdp 2 x tp 2": (Layout(dp_shard=2, tp=2), "tied"),
    "tp 2 x pp 2": (Layout(tp=2, pp=2), "untied"),
    "replicas 2": (Layout(dp_replicate=2), "tied"),
    "pp 2": (Layout(pp=2), "tied"),
    "fsdp 2, lora": (Layout(dp_shard=2), "lora"),
    "fsdp 2, lora beside": (Layout(dp_shard=2), "lora beside"),
    "fsdp 2, lora alone": (Layout(dp_shard=2), "lora alone"),
}
SECTION = ModelConfig(
    path="untied", lora_rank=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "down_proj"]
)


class Rollout:
    """Holds a copy of what comes."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.weights: dict[str, Tensor] = {}
        self.dtype, self.weight_version = dtype, 0

    def prepare(self, shapes: dict[str, list[int]]) -> None:
        self.weights = {
            name: torch.zeros(shape, dtype=self.dtype) for name, shape in shapes.items()
        }

    def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        missing = set(self.weights)
        for name, tensor in weights:
            self.weights[name].copy_(tensor)
            missing.remove(name)
        assert not missing, missing
        self.weight_version = version

    def named_weights(self) -> Iterable[tuple[str, Tensor]]:
        return self.weights.items()

    def fingerprint(self) -> Fingerprint:
        return fingerprint(self.weights.items())


def make_engine(folder: Path, model: str, layout: Layout, world: ProcessGroup) -> FSDPEngine:
    """In bfloat16; the adapter of `lora` has a B that is not zero."""
    model = model.partition(" ")[0]
    path = folder / ("untied" if model == "lora" else model)
    files = open_weights(path)
    if layout.is_whole:
        scorer, read = PolicyScorer(load_causal_lm(path, dtype=torch.bfloat16)), None
    else:
        scorer, read = PolicyScorer(skeleton_causal_lm(path)), files.read
    if model == "lora":
        factors = add_adapter(scorer.model, SECTION, seed=3)
        with torch.no_grad():
            for name, parameter in scorer.model.named_parameters():
                if ".lora_B." in name and not parameter.is_meta:
                    parameter.copy_(stirred(name, factors))
        read = lambda name: stirred(name, factors) if ".lora_" in name else files.read(plain(name))  # noqa: E731
    return FSDPEngine(
        scorer,
        read=read,
        dtype=torch.bfloat16,
        device=CPU,
        processes=Processes.arrange(world, layout),
    )


def published(engine: FSDPEngine, model: str) -> Iterator[tuple[str, Tensor]]:
    """What is sent of a model: its weights, an adapter merged into them; the adapter beside them, or alone."""
    if model.startswith("lora "):
        return engine.adapter_weights(with_frozen=model == "lora beside")
    return engine.weights()


def plain(name: str) -> str:
    return name.replace(".base_layer", "")


def stirred(name: str, factors: Callable[[str], Tensor]) -> Tensor:
    """A factor's value; of B random ones instead of zeros."""
    value = factors(name)
    if ".lora_B." in name:
        value = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1
    return value


def peak_bytes(work: Callable[[], object]) -> int:
    """Memory of tensors that was alive at the same time, beyond that at the start; by torch's own allocator."""
    # As torch.profiler.profile(profile_memory=True), but without operators, whose events take more time than the work.
    # The scope is one in which nothing is recorded.
    config = ProfilerConfig(
        ProfilerState.KINETO, False, True, False, False, False, _ExperimentalConfig()
    )
    activities = {ProfilerActivity.CPU}
    _prepare_profiler(config, activities)
    _enable_profiler(config, activities, {RecordScope.STATIC_RUNTIME_OP})
    try:
        work()
    finally:
        results = _disable_profiler()
    events = [event for event in results.events() if event.name() == "[memory]"]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def tell(path: Path, value: object) -> None:
    unfinished = path.with_suffix(".part")
    unfinished.write_text(json.dumps(value))
    unfinished.rename(path)


def told(path: Path) -> dict:
    deadline = time.monotonic() + PEER_S
    while not path.exists():
        assert time.monotonic() < deadline, (
            f"{path}: not written within {PEER_S} s by the rank that sends weights"
        )
        time.sleep(0.01)
    return json.loads(path.read_text())


def train(folder: Path, name: str, world: ProcessGroup) -> None:
    """Send the weights of one case, and write what it took."""
    layout, model = CASES[name]
    engine = make_engine(folder, model, layout, world)
    shapes = {name: list(tensor.shape) for name, tensor in published(engine, model)}
    sender = None
    if world.is_first:
        sender = WeightSender("localhost", range(len(ROLLOUTS)), CPU, BUCKET_BYTES)
        tell(folder / f"{name}.address", {"address": asdict(sender.address), "shapes": shapes})

    def work() -> None:
        weights = published(engine, model)
        if sender is not None:
            sender.publish(weights, 1)
        for _ in weights:
            pass

    peak = peak_bytes(work)
    naive = peak_bytes(lambda: dict(published(engine, model)))
    tell(folder / f"{name}.{world.rank}.memory", {"peak": peak, "whole copy": naive})


def roll_out(folder: Path, name: str, rank: int) -> None:
    """Receive them."""
    facts = told(folder / f"{name}.address")
    target = Rollout(torch.bfloat16 if rank == ROLLOUTS[0] else torch.float32)
    target.prepare(facts["shapes"])
    receiver = WeightReceiver(Address(**facts["address"]), rank - ROLLOUTS[0], CPU)
    peak = peak_bytes(lambda: receiver.receive(target, 1))
    torch.save(target.weights, folder / f"{name}.{rank}.pt")
    tell(folder / f"{name}.{rank}.memory", {"peak": peak})


def main(rank: int, folder: Path, ports: tuple[int, int]) -> None:
    """All cases of four trainers, then those of two."""
    for size, port in zip((4, 2), ports, strict=True):
        names = [name for name, (layout, _) in CASES.items() if layout.world_size == size]
        if rank in ROLLOUTS:
            for name in names:
                roll_out(folder, name, rank)
        elif rank < size:
            world = process_group.join(WorkerPlace(rank, size, master_port=port), CPU)
            for name in names:
                train(folder, name, world)
            process_group.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    sharded._MAX_GLOO_BYTES = (
        1 << 16
    )  # larger tensors, of which the models have some, go by broadcasts
    main(int(sys.argv[1]), Path(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])))
