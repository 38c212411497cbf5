# SPDX-License-Identifier: Apache-2.0
"""The program that test_expert_layouts.py starts in four processes: mixtures of experts, loaded, saved and learning in
all of them, in two, and in the first alone; what came out is written for the test to compare.

    python expert_layouts.py RANK FOLDER PORT PORT
"""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from quadriga.config import ActorConfig, Config, Layout
from quadriga.engines import process_group
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.engines.step import infer, update
from quadriga.models.experts import ROUTES
from quadriga.models.weight_names import weight_buffers
from quadriga.protocol import DataProto
from quadriga.single_controller import WorkerPlace
from quadriga.workers.checkpoint import RoleCheckpoint
from quadriga.workers.models import load_policy
from tests.moe import CONFIGS
from tests.numerics.conftest import ragged_batch
from tests.numerics.layouts import own_rows

CPU = torch.device("cpu")
LAYOUTS: Mapping[int, Mapping[str, Layout]] = {
    1: {"one process": Layout()},
    2: {"fsdp 2": Layout(dp_shard=2), "pp 2": Layout(pp=2), "ep 2": Layout(dp_shard=2, ep=2)},
    4: {
        "ep 4": Layout(dp_shard=4, ep=4),
        "fsdp 4, ep 2": Layout(dp_shard=4, ep=2),
        "hsdp 2 x 2, ep 2": Layout(dp_replicate=2, dp_shard=2, ep=2),
        "sp 2, ep 2": Layout(dp_shard=2, sp=2, ep=2),
        "pp 2, ep 2": Layout(dp_shard=2, pp=2, ep=2),
    },
}
LEARNING = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")
"""Families whose attention is plain; the others are loaded and saved."""
OF_FOUR = {"qwen3_moe": tuple(LAYOUTS[4]), "gpt_oss": ("ep 4", "pp 2, ep 2")}
"""Families with layouts of four processes; the others have those of two."""
OF_TWO = {
    "mixtral": ("fsdp 2", "ep 2"),
    "qwen2_moe": ("fsdp 2", "ep 2", "pp 2"),
    "glm4_moe": ("fsdp 2", "ep 2"),
    "deepseek_v3": ("fsdp 2", "ep 2", "pp 2"),
}
"""Two families with layers of both kinds, of which one has a buffer in its routers, are also cut into stages."""
CASES = {
    4: [(family, name) for family, names in OF_FOUR.items() for name in names],
    2: [(family, name) for family, names in OF_TWO.items() for name in names],
    1: [(family, "one process") for family in CONFIGS],
}
"""Families and layouts by number of processes: what is loaded, saved and loaded again."""
LEARNED = [
    (family, name)
    for cases in CASES.values()
    for family, name in cases
    if family in LEARNING and name not in ("fsdp 2", "pp 2")
]
"""Families and layouts that learn. Without expert parallelism test_model_layouts.py has mixtures that do."""
CONTENTS = frozenset({"model", "hf_model"})


def engine_of(folder: Path, layout: Layout, world: ProcessGroup) -> FSDPEngine:
    # With a large eps AdamW moves weights in proportion to the gradient: a rounding error stays one.
    actor = {"optim": {"eps": 1.0, "weight_decay": 0.01}, "grad_clip": 0.05}
    config = Config(actor_rollout_ref={"model": {"path": str(folder)}, "actor": actor})
    processes, section = Processes.arrange(world, layout), config.actor_rollout_ref
    loaded = load_policy(config, torch.float32, processes)
    training = Training(
        section.actor.optim, section.actor.grad_clip, section.actor.max_nonfinite_steps
    )
    options = {"training": training, "processes": processes, "read": loaded.read}
    return FSDPEngine(loaded.scorer, dtype=torch.float32, device=CPU, **options)


def learn(engine: FSDPEngine, batch: DataProto) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    """The weights after some steps, and what was said of the routers; with a load-balancing loss."""
    objective, said = (
        PolicyObjective(
            ActorConfig(entropy_coeff=0.05, router_aux_loss_coef=0.3, router_z_loss_coef=0.02)
        ),
        {},
    )
    for passes in (Passes(7, 1, MicroBatching(None, 24)), Passes(99, 1, MicroBatching(None, 24))):
        told = update(engine, own_rows(batch, engine), objective, passes, lr=0.5, temperature=0.7)
        said |= {
            name: metric.value for name, metric in told.items() if name.startswith("actor/router_")
        }
    return weights_of(engine), said


def tell(engine: FSDPEngine, batch: DataProto) -> DataProto:
    """The batch with experts for some tokens, so few that they pass for the routers' own."""
    generator, routers = torch.Generator().manual_seed(5), engine.scorer.routers
    shape = (*batch.batch["input_ids"].shape, routers.count, routers.num_experts)
    routes = torch.rand(shape, generator=generator).argsort(-1)[..., : routers.top_k].to(torch.int8)
    routes[:, ::2] = -1
    batch.batch[ROUTES], routers.is_checked = routes, True
    return batch


def weights_of(engine: FSDPEngine) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in engine.weights()}


def source_of(family: str, name: str) -> str:
    """The layout whose checkpoint a layout reads: one with other experts on each rank, but for the first."""
    return "ep 4" if family in OF_FOUR else "fsdp 2" if name != "one process" else "ep 2"


def run(
    folder: Path, family: str, name: str, layout: Layout, world: ProcessGroup
) -> dict[str, Any]:
    """What was loaded, what a checkpoint of it brings back into zeros, and what was learned."""
    engine = engine_of(folder / family, layout, world)
    found: dict[str, Any] = {"loaded": weights_of(engine)}
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / family)
    checkpoint = RoleCheckpoint(engine, tokenizer)
    checkpoint.start(folder / f"{family}, {name}", CONTENTS)
    checkpoint.writer.is_written(wait=True)
    for tensor in (*engine.parameters.masters.values(), *weight_buffers(engine.model).values()):
        tensor.detach().zero_()
    checkpoint.load(folder / f"{family}, {source_of(family, name)}", CONTENTS)
    found["resumed"] = weights_of(engine)
    if (family, name) in LEARNED and layout.pp == 1:
        rows, micro = own_rows(ragged_batch(), engine), MicroBatching(None, 24)
        found["routes"] = (
            rows.batch["row_index"],
            infer(engine, rows, micro, with_routes=True)[ROUTES],
        )
    if (family, name) in LEARNED:
        batch = tell(engine, ragged_batch()) if family == "qwen3_moe" else ragged_batch()
        found["learned"], found["said"] = learn(engine, batch)
    return found


def meet(folder: Path, place: WorkerPlace) -> None:
    """All layouts of one number of processes."""
    world = process_group.join(place, CPU)
    results = {
        f"{family}, {name}": run(folder, family, name, LAYOUTS[world.size][name], world)
        for family, name in CASES[world.size]
    }
    if world.is_first:
        torch.save(results, folder / f"{world.size}.pt")
    process_group.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    here, target = int(sys.argv[1]), Path(sys.argv[2])
    for num_ranks, port in zip((4, 2, 1), (*sys.argv[3:], 0), strict=True):
        if here < num_ranks:
            meet(target, WorkerPlace(here, num_ranks, master_port=int(port)))
