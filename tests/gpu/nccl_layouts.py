# SPDX-License-Identifier: Apache-2.0
"""The program that test_layouts.py starts in two processes, each with a GPU, or in the rehearsal with the stand-in for
CUDA: an optimizer step in several layouts, what it has learnt, which the test compares, and a checkpoint that is read
back.

    python nccl_layouts.py RANK FOLDER PORT ...
"""

import os
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import torch

from quadriga.config import ActorConfig, OptimConfig
from quadriga.config.layout import Layout
from quadriga.engines import process_group
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Memory, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.step import infer, update
from quadriga.models.load import load_causal_lm, skeleton_causal_lm
from quadriga.models.scorers import PolicyScorer
from quadriga.models.weight_files import open_weights
from quadriga.rollout.group import RolloutGroup
from quadriga.single_controller import WorkerPlace
from quadriga.workers.base import choose_device
from tests.gpu.test_cuda import make_batch
from tests.gpu.test_real_sizes import require_it_comes_back
from tests.rehearsal.lines import LINES, LineCoverage
from tests.rehearsal.stand_in import StandIn

HAS_MEGATRON = find_spec("megatron") is not None
LAYOUTS: dict[str, tuple[Layout, Memory]] = {
    "replicas": (Layout(dp_replicate=2), Memory()),
    "fsdp": (Layout(dp_shard=2), Memory()),
    "fsdp, offloaded": (Layout(dp_shard=2), Memory(offload_weights=True)),
    "tp": (Layout(tp=2), Memory()),
    "sp": (Layout(sp=2), Memory()),
}
if HAS_MEGATRON:
    from quadriga.engines.megatron.engine import MegatronEngine

    LAYOUTS |= {
        f"megatron, tp{of}": (
            Layout(tp=2, uses_megatron_modules=True),
            Memory(offload_weights=bool(of)),
        )
        for of in ("", ", offloaded")
    }


def learn(engine: FSDPEngine) -> torch.Tensor:
    """[6, T] log-probs after one optimizer step on the batch, of which each replica has its rows."""
    batch = make_batch()
    own = batch.chunk(engine.replicas.size)[engine.replicas.rank]
    passes = Passes(6, 1, MicroBatching(None, 20))
    update(engine, own, PolicyObjective(ActorConfig()), passes, lr=1e-3)
    return infer(engine, batch, MicroBatching(6, 1000))["log_probs"]


def learnt(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    """The log-probs after a step, and all weights."""
    return {
        "log-probs": learn(engine).cpu(),
        **{name: weight.cpu() for name, weight in engine.weights()},
    }


def run(
    folder: Path, rank: int, port: int, layout: Layout, memory: Memory, size: int = 2
) -> dict[str, torch.Tensor]:
    """What one layout has learnt, the same on all ranks."""
    device = choose_device("cuda", rank)
    world = process_group.join(
        WorkerPlace(rank, size, rank, size, master_port=port), device, also_alone=True
    )
    if layout.is_whole:
        scorer, read = (
            PolicyScorer(load_causal_lm(folder / "model", dtype=torch.float32, device=device)),
            None,
        )
    else:
        scorer, read = (
            PolicyScorer(skeleton_causal_lm(folder / "model")),
            open_weights(folder / "model").read,
        )
    engine = (MegatronEngine if layout.uses_megatron_modules else FSDPEngine)(
        scorer,
        read=read,
        dtype=torch.float32,
        device=device,
        training=Training(OptimConfig(eps=1e-3), grad_clip=1.0, max_nonfinite_steps=3),
        memory=memory,
        processes=Processes.arrange(world, layout),
    )
    assert "on a CPU" not in engine.describe()["weights"]
    result = learnt(engine)
    require_it_comes_back(engine, folder / str(port), lambda: learn(engine))
    ones = RolloutGroup(rank, size, size, device).all_reduce(torch.ones(2, device=device))
    assert ones.tolist() == [size] * 2
    process_group.leave(world)
    return result


def main(number: int, folder: Path, ports: Sequence[str]) -> None:
    """All layouts, one after the other."""
    results = {
        name: run(folder, number, int(port), *LAYOUTS[name])
        for name, port in zip(LAYOUTS, ports, strict=True)
    }
    torch.save(results, folder / f"{number}.pt")


def rehearse(number: int, folder: Path, ports: Sequence[str]) -> None:
    """The same on the stand-in, where nothing may be found."""
    coverage = LineCoverage()
    coverage.start()
    with StandIn(num_devices=2).installed() as owner:
        main(number, folder, ports)
    coverage.stop()
    coverage.write(Path(os.environ[LINES]))
    assert not owner.findings, owner.findings[:5]


if __name__ == "__main__":
    (rehearse if LINES in os.environ else main)(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
