# SPDX-License-Identifier: Apache-2.0
"""The program that test_layouts.py starts in four processes: one layout after the other, with 4 of them, with 2, and
the first alone; what came out is written for the test to compare.

    python layouts.py RANK FOLDER PORT PORT
"""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from quadriga.config import ActorConfig, CriticConfig, DistillationConfig, Layout, OptimConfig
from quadriga.engines import process_group
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.checkpoint import StateWriter, load_state
from quadriga.engines.fsdp.engine import ALL_KINDS, FSDPEngine, Memory, Training
from quadriga.engines.objectives import PolicyObjective, ValueObjective
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.engines.step import infer, update
from quadriga.models.load import load_causal_lm, skeleton_causal_lm
from quadriga.models.scorers import PolicyScorer, Scorer, ValueScorer
from quadriga.models.weight_files import open_weights
from quadriga.observe.metrics import reduce_metrics
from quadriga.protocol import DataProto
from quadriga.single_controller import WorkerPlace

CPU, MICRO = torch.device("cpu"), MicroBatching(None, 24)
# Two mini-batches of ragged rows, of which the first has two micro-batches; then one mini-batch of all rows.
TWO_STEPS = (Passes(7, 1, MICRO),)
THREE_STEPS = (*TWO_STEPS, Passes(99, 1, MICRO))
PARTS = frozenset({"model", "optimizer"})
LAYOUTS: Mapping[int, Mapping[str, Layout]] = {
    1: {"one process": Layout()},
    2: {
        "replicas 2": Layout(dp_replicate=2),
        "fsdp 2": Layout(dp_shard=2),
        "tp 2": Layout(tp=2),
        "sp 2": Layout(sp=2),
        "pp 2": Layout(pp=2),
    },
    4: {
        "fsdp 4": Layout(dp_shard=4),
        "hsdp 2 x 2": Layout(dp_replicate=2, dp_shard=2),
        "fsdp 2 x tp 2": Layout(dp_shard=2, tp=2),
        "fsdp 2 x sp 2": Layout(dp_shard=2, sp=2),
        "tp 2 x pp 2": Layout(tp=2, pp=2),
        "fsdp 2 x pp 2": Layout(dp_shard=2, pp=2),
        "sp 2 x tp 2": Layout(sp=2, tp=2),
        "sp 2 x pp 2": Layout(sp=2, pp=2),
        "sp 4, more than key-value heads": Layout(sp=4),
        "pp 4": Layout(pp=4),
    },
}
KINDS: Mapping[str, tuple[str, type[Scorer], Memory]] = {
    "policy": ("tied", PolicyScorer, Memory()),
    "policy, untied": (
        "untied",
        PolicyScorer,
        Memory(gradient_checkpointing=True, reshard_after_forward=False),
    ),
    "critic": ("tied", ValueScorer, Memory()),
}
IN_BFLOAT16 = ("one process", "sp 2", "pp 2", "fsdp 2 x tp 2")
"""Layouts that also compute in bfloat16, from the float32 masters of the others."""
GOES_ON = {"fsdp 2 x tp 2": 4, "fsdp 4": 4, "tp 2 x pp 2": 4, "pp 2": 2, "one process": 1}
"""Layouts that go on from a checkpoint of `fsdp 2 x tp 2`, and how many processes they have."""
SAVED = "fsdp 2 x tp 2"


def make_engine(
    folder: Path, layout: Layout, world: ProcessGroup, kind: str, dtype: torch.dtype = torch.float32
) -> FSDPEngine:
    model, scorer, memory = KINDS[kind]
    # With a large eps AdamW moves weights in proportion to the gradient: a rounding error stays one.
    optimizer = OptimConfig(eps=1.0, weight_decay=0.01)
    read = None
    if layout.is_whole:
        loaded = scorer(load_causal_lm(folder / model, dtype=torch.float32))
    else:
        loaded = scorer(skeleton_causal_lm(folder / model))
        files = open_weights(folder / model)
        shapes = {name: parameter.shape for name, parameter in loaded.model.named_parameters()}
        read = lambda name: files.read(name) if name in files.shapes else torch.zeros(shapes[name])  # noqa: E731
    return FSDPEngine(
        loaded,
        read=read,
        dtype=dtype,
        device=CPU,
        training=Training(optimizer, grad_clip=0.05, max_nonfinite_steps=2),
        memory=memory,
        processes=Processes.arrange(world, layout),
    )


def own_rows(batch: DataProto, engine: FSDPEngine) -> DataProto:
    """The rows of this process's data-parallel rank, dealt in a random order."""
    rows = batch.select(deepcopy=True)
    rows.batch["row_index"] = torch.arange(len(rows))
    if engine.replicas.size > 1:
        rows.reorder(torch.randperm(len(rows), generator=torch.Generator().manual_seed(7)))
    return rows.chunk(engine.replicas.size)[engine.replicas.rank]


def learn(
    engine: FSDPEngine, batch: DataProto, kind: str, updates: Sequence[Passes] = THREE_STEPS
) -> list[dict[str, float]]:
    """Run some updates; the metrics of each, in every process."""
    config = ActorConfig(entropy_coeff=0.05)
    # One of the policies learns from a teacher's likeliest tokens as well.
    teacher = (
        DistillationConfig(enable=True, loss_mode="forward_kl_topk") if "untied" in kind else None
    )
    objective = (
        ValueObjective(CriticConfig())
        if kind == "critic"
        else PolicyObjective(config, None, teacher)
    )
    told = []
    for passes in updates:
        part = update(engine, own_rows(batch, engine), objective, passes, lr=0.5, temperature=0.7)
        answers = engine.world.gather(part if engine.processes.place.is_collected else None)
        whole = DataProto.concat(
            [DataProto(meta_info={"metrics": metrics}) for metrics in answers if metrics]
        )
        told.append(reduce_metrics(whole.meta_info["metrics"]))
    return told


def ask(engine: FSDPEngine, batch: DataProto, micro: MicroBatching = MICRO) -> dict[str, Tensor]:
    """What the engine says of all rows, in their order."""
    rows = own_rows(batch, engine)
    scores = infer(
        engine, rows, micro, temperature=0.7, with_entropy=True, with_sum_pi_squared=True, top_k=3
    )
    scores.pop("top_ids", None)  # where two are alike by rounding, either may be the likelier one
    part = DataProto.from_dict({**scores, "row_index": rows.batch["row_index"]})
    answers = engine.world.gather(part if engine.processes.place.is_collected else None)
    whole = DataProto.concat([answer for answer in answers if answer is not None])
    whole.reorder(whole.batch["row_index"].argsort())
    return {name: whole.batch[name].clone() for name in scores}


def run(
    folder: Path,
    batch: DataProto,
    layout: Layout,
    world: ProcessGroup,
    kind: str,
    dtype: torch.dtype = torch.float32,
) -> dict[str, Any]:
    return ask_and_learn(make_engine(folder, layout, world, kind, dtype), batch, kind)


def ask_and_learn(
    engine: FSDPEngine, batch: DataProto, kind: str, updates: Sequence[Passes] = THREE_STEPS
) -> dict[str, Any]:
    """Outputs of a new engine, then metrics and weights after its updates."""
    asked = ask(engine, batch)
    metrics = learn(engine, batch, kind, updates)
    return {"asked": asked, "metrics": metrics, "weights": weights_of(engine)}


def weights_of(engine: FSDPEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.weights()}


def run_and_save(folder: Path, batch: DataProto, world: ProcessGroup) -> dict[str, Any]:
    """Three steps of the policy in the layout `SAVED`, a checkpoint, and three more: results of both."""
    engine = make_engine(folder, LAYOUTS[4][SAVED], world, "policy")
    first_steps = ask_and_learn(engine, batch, "policy")
    writer = StateWriter(world)
    writer.start({folder / "saved": engine.state(PARTS)})
    metrics = learn(engine, batch, "policy")
    writer.is_written(wait=True)
    return {
        f"{SAVED}, policy": first_steps,
        "undisturbed": {"metrics": metrics, "weights": weights_of(engine)},
    }


def go_on(folder: Path, batch: DataProto, layout: Layout, world: ProcessGroup) -> dict[str, Any]:
    """The last three of them, from the checkpoint, in an engine whose tensors rest between its phases."""
    engine = make_engine(folder, layout, world, "policy")
    engine.offload_between_phases(ALL_KINDS, folder)
    with engine.awake(*ALL_KINDS):
        load_state(folder / "saved", engine.state(PARTS), world)
        engine.apply_loaded_state(PARTS)
    metrics = learn(engine, batch, "policy")
    windows = {window.data_ptr() for window in engine.host_memory["weights"].windows}
    are_there = [master.data_ptr() in windows for master in engine.parameters.masters.values()]
    with engine.awake("weights"):
        weights = weights_of(engine)
    return {
        "metrics": metrics,
        "weights": weights,
        "share in the file": sum(are_there) / len(are_there),
    }


def meet(folder: Path, place: WorkerPlace) -> None:
    """All layouts of one number of processes."""
    batch = DataProto.load_from_disk(folder / "batch")
    world = process_group.join(place, CPU)
    wanted = (folder / "wanted").read_text().splitlines()
    results: dict[str, Any] = {
        f"{name}, {kind}": run(folder, batch, layout, world, kind)
        for name, layout in LAYOUTS[world.size].items()
        for kind in KINDS
        if world.size == 1 or (f"{name}, {kind}" in wanted and (name, kind) != (SAVED, "policy"))
    }
    results |= {
        f"{name}, bfloat16": run(folder, batch, layout, world, "policy", torch.bfloat16)
        for name, layout in LAYOUTS[world.size].items()
        if name in IN_BFLOAT16
    }
    if world.size == 4:
        results |= run_and_save(folder, batch, world)
    for name, size in GOES_ON.items():
        if size == world.size:
            results[f"{name}, goes on"] = go_on(folder, batch, LAYOUTS[size][name], world)
    if world.is_first:
        torch.save(results, folder / f"{world.size}.pt")
    process_group.leave(world)


def main(rank: int, folder: Path, ports: tuple[int, int]) -> None:
    """Ranks that a smaller number of processes does not need are done before the others."""
    for size, port in zip((4, 2), ports, strict=True):
        if rank < size:
            meet(folder, WorkerPlace(rank, size, master_port=port))
    if rank == 0:
        meet(folder, WorkerPlace())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])))
