# SPDX-License-Identifier: Apache-2.0
"""The program that test_vision_layouts.py starts in two processes: vision-language models, learning in both of them
and in the first alone; what came out is written for the test to compare.

    python vision_layouts.py RANK FOLDER PORT
"""

import sys
from collections.abc import Mapping
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from quadriga.config import ActorConfig, Config, CriticConfig, Layout
from quadriga.engines import process_group
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Memory, Training
from quadriga.engines.objectives import PolicyObjective, ValueObjective
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.engines.step import infer, update
from quadriga.models.scorers import ValueScorer
from quadriga.observe.metrics import reduce_metrics
from quadriga.protocol import DataProto
from quadriga.single_controller import WorkerPlace
from quadriga.workers.checkpoint import RoleCheckpoint
from quadriga.workers.models import load_model, load_policy
from tests.numerics.model_layouts import give_adapter
from tests.vision_folder import FAMILIES, MIXTURE

CPU, MICRO = torch.device("cpu"), MicroBatching(None, 40)
LAYOUTS: Mapping[int, Mapping[str, Layout]] = {
    1: {"one process": Layout()},
    2: {
        "replicas 2": Layout(dp_replicate=2),
        "sequence 2": Layout(sp=2),
        "tensor 2": Layout(tp=2),
        "pipeline 2": Layout(pp=2),
        "fsdp 2": Layout(dp_shard=2),
    },
}
KINDS = ("policy", "frozen", "critic", "policy, bfloat16", "frozen, bfloat16")
FAMILY = "qwen2_5_vl"
"""The one that learns in all of these ways; the others as a policy, with all weights and with an adapter."""
CASES = [*product([FAMILY], KINDS), *product([*FAMILIES, MIXTURE], ["policy", "LoRA"])]
CASES = list(dict.fromkeys(CASES))
ROWS = {
    "all": list(range(15)),
    # In chunks of two processes the second has text alone.
    "images on one rank": [0, 1, 2, 6, 7, 8],
    "no images": [6, 7, 8],
}


def engine_of(
    folder: Path, layout: Layout, world: ProcessGroup, family: str, kind: str
) -> FSDPEngine:
    # With a large eps AdamW moves weights in proportion to the gradient: a rounding error stays one.
    role = {"optim": {"eps": 1.0, "weight_decay": 0.01}, "grad_clip": 0.05}
    config = Config(
        actor_rollout_ref={
            "model": {
                "path": str(folder / family),
                "enable_gradient_checkpointing": kind == "frozen",
            },
            "actor": role | {"freeze_vision_tower": kind.startswith("frozen")},
        },
        critic=role,
    )
    processes = Processes.arrange(world, layout)
    is_critic = kind == "critic"
    if is_critic:
        loaded = load_model(config, str(folder / family), ValueScorer, torch.float32, processes)
    else:
        loaded = load_policy(config, torch.float32, processes)
    loaded = give_adapter(loaded) if kind == "LoRA" else loaded
    section = config.critic if is_critic else config.actor_rollout_ref.actor
    dtype = torch.bfloat16 if kind.endswith("bfloat16") else torch.float32
    model = config.critic.model if is_critic else config.actor_rollout_ref.model
    return FSDPEngine(
        loaded.scorer,
        read=loaded.read,
        dtype=dtype,
        device=CPU,
        processes=processes,
        training=Training(section.optim, section.grad_clip, section.max_nonfinite_steps),
        memory=Memory(gradient_checkpointing=model.enable_gradient_checkpointing is True),
        name=kind,
    )


def own_rows(batch: DataProto, engine: FSDPEngine, rows: list[int], *, is_dealt: bool) -> DataProto:
    """The rows of this process, dealt in a random order or in chunks."""
    chosen = batch.select_idxs(rows)
    chosen.batch["row_index"] = torch.arange(len(chosen))
    if is_dealt and engine.replicas.size > 1:
        chosen.reorder(torch.randperm(len(chosen), generator=torch.Generator().manual_seed(7)))
    return chosen.chunk(engine.replicas.size)[engine.replicas.rank]


def of_replicas(engine: FSDPEngine, value: Any) -> list[Any]:
    """One of each replica: ranks of a model-parallel group say the same, of a pipeline the last alone says it."""
    size = engine.world.size // engine.replicas.size
    return engine.world.gather(value)[size - 1 :: size]


def learn(engine: FSDPEngine, batch: DataProto, kind: str) -> list[dict[str, float]]:
    """Updates from each choice of rows; the metrics of all processes together."""
    policy = PolicyObjective(ActorConfig(entropy_coeff=0.05))
    objective = ValueObjective(CriticConfig()) if kind == "critic" else policy
    told = []
    for name, numbers in ROWS.items():
        rows = own_rows(batch, engine, numbers, is_dealt=name == "all")
        if kind.endswith("bfloat16"):
            # The policy's own then: else a ratio that is rounded across a threshold takes a token's gradient with it.
            rows.batch.pop("old_log_probs")
        part = update(engine, rows, objective, Passes(7, 1, MICRO), lr=0.5, temperature=0.7)
        parts = [DataProto(meta_info={"metrics": metrics}) for metrics in of_replicas(engine, part)]
        told.append(reduce_metrics(DataProto.concat(parts).meta_info["metrics"]))
    return told


def ask(engine: FSDPEngine, batch: DataProto) -> dict[str, Tensor]:
    """What the engine says of all rows, in their order."""
    rows = own_rows(batch, engine, ROWS["all"], is_dealt=True)
    scores = infer(engine, rows, MICRO, temperature=0.7, with_entropy=True)
    whole = DataProto.concat(
        of_replicas(engine, DataProto.from_dict({**scores, "row": rows.batch["row_index"]}))
    )
    whole.reorder(whole.batch["row"].argsort())
    return {name: whole.batch[name].clone() for name in scores}


def batch_of(folder: Path, family: str) -> DataProto:
    return torch.load(folder / f"{family}.pt", weights_only=False)


def weights_of(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.weights()}


def run(
    folder: Path, layout: Layout, world: ProcessGroup, family: str, kind: str
) -> dict[str, Any]:
    engine, batch = engine_of(folder, layout, world, family, kind), batch_of(folder, family)
    asked = ask(engine, batch)
    return {"asked": asked, "metrics": learn(engine, batch, kind), "weights": weights_of(engine)}


def go_on(folder: Path, layout: Layout, world: ProcessGroup, kind: str) -> dict[str, Any]:
    """A checkpoint in the middle, and the second half from it by another engine."""
    batch = batch_of(folder, FAMILY)
    place, contents = (
        folder / f"saved {world.size} {kind}",
        frozenset({"model", "optimizer", "hf_model"}),
    )
    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder / FAMILY)
    engine, again = (engine_of(folder, layout, world, FAMILY, kind) for _ in range(2))
    learn(engine, batch, kind)
    checkpoint = RoleCheckpoint(engine, tokenizer)
    checkpoint.start(place, contents)
    checkpoint.writer.is_written(wait=True)
    saved = weights_of(engine)
    learn(engine, batch, kind)
    RoleCheckpoint(again, tokenizer).load(place, contents)
    learn(again, batch, kind)
    return {"saved": saved, "weights": weights_of(engine), "resumed": weights_of(again)}


def meet(folder: Path, place: WorkerPlace) -> None:
    """All layouts of one number of processes."""
    world = process_group.join(place, CPU)
    results: dict[str, Any] = {}
    for name, layout in LAYOUTS[world.size].items():
        results |= {(name, *case): run(folder, layout, world, *case) for case in CASES}
    last = list(LAYOUTS[world.size].values())[-1]
    results |= {
        f"{world.size} goes on, {kind}": go_on(folder, last, world, kind)
        for kind in ("policy", "frozen")
    }
    if world.is_first:
        torch.save(results, folder / f"{world.size}.pt")
    process_group.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    here, target = int(sys.argv[1]), Path(sys.argv[2])
    meet(target, WorkerPlace(here, 2, master_port=int(sys.argv[3])))
    if here == 0:
        meet(target, WorkerPlace())
