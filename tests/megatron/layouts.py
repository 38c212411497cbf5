# SPDX-License-Identifier: Apache-2.0
"""The program that test_layouts.py starts in four processes: one layout of Megatron's after the other, with 4 of them,
with 2, and alone; beside the last the other engine. A fifth process is a rollout.

    python layouts.py RANK FOLDER PORT PORT
"""

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from tokenizers import Tokenizer, models
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedTokenizerFast

from quadriga.config import Layout, OptimConfig
from quadriga.engines import process_group
from quadriga.engines.batches import MicroBatching
from quadriga.engines.checkpoint import StateWriter, load_state
from quadriga.engines.fsdp.engine import ALL_KINDS, FSDPEngine, Memory, Training
from quadriga.engines.megatron import engine as megatron_engine
from quadriga.engines.megatron import model as megatron_model
from quadriga.engines.megatron.cpu import megatron_context
from quadriga.engines.megatron.engine import MegatronEngine
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.engines.step import infer
from quadriga.models.experts import ROUTES
from quadriga.models.load import load_causal_lm, skeleton_causal_lm
from quadriga.models.scorers import PolicyScorer, ValueScorer
from quadriga.models.weight_files import open_weights
from quadriga.models.weight_names import ConvertedFiles
from quadriga.protocol import DataProto
from quadriga.rollout.native.engine import NativeEngine
from quadriga.single_controller import WorkerPlace
from quadriga.weight_sync import Address, WeightReceiver, WeightSender
from quadriga.workers.checkpoint import RoleCheckpoint
from tests.megatron.cases import (
    CHAINS,
    GOES_ON,
    NARROW,
    PLAIN_MIXTURES,
    PUBLISHED,
    RUNS,
    SAVED,
    TOLD_MIXTURES,
)
from tests.numerics import expert_layouts
from tests.numerics.conftest import ragged_batch
from tests.numerics.layouts import CPU, TWO_STEPS, ask, ask_and_learn, learn, own_rows, weights_of
from tests.numerics.weight_layouts import tell, told

LAYOUTS: Mapping[int, Mapping[str, tuple[Layout, dict[str, Any]]]] = {
    1: {"one process": (Layout(uses_megatron_modules=True), {})},
    2: {
        "dp 2": (Layout(dp_replicate=2, uses_megatron_modules=True), {}),
        "dp 2, distributed optimizer": (Layout(dp_shard=2, uses_megatron_modules=True), {}),
        "tp 2": (Layout(tp=2, uses_megatron_modules=True), {"sequence_parallel": False}),
        "tp 2, sequence parallel": (Layout(tp=2, uses_megatron_modules=True), {}),
        "sp 2": (Layout(sp=2, uses_megatron_modules=True), {}),
        "pp 2": (Layout(pp=2, uses_megatron_modules=True), {}),
        "pp 2, uneven": (
            Layout(pp=2, uses_megatron_modules=True),
            {
                "settings": {
                    "num_layers_in_first_pipeline_stage": 1,
                    "num_layers_in_last_pipeline_stage": 3,
                }
            },
        ),
        "pp 2, virtual 2": (Layout(pp=2, uses_megatron_modules=True), {"virtual": 2}),
    },
    4: {
        "tp 2 x pp 2": (Layout(tp=2, pp=2, uses_megatron_modules=True), {}),
        "dp 2 x tp 2, distributed optimizer": (
            Layout(dp_shard=2, tp=2, uses_megatron_modules=True),
            {},
        ),
        "sp 2 x tp 2": (Layout(sp=2, tp=2, uses_megatron_modules=True), {}),
        "sp 2 x tp 2, whole tokens": (
            Layout(sp=2, tp=2, uses_megatron_modules=True),
            {"sequence_parallel": False},
        ),
        "sp 2 x pp 2": (Layout(sp=2, pp=2, uses_megatron_modules=True), {}),
        "dp 2 x pp 2": (Layout(dp_replicate=2, pp=2, uses_megatron_modules=True), {}),
    },
}
MIXTURES: Mapping[int, Mapping[str, tuple[Layout, dict[str, Any]]]] = {
    1: {"one process": (Layout(uses_megatron_modules=True), {})},
    2: {
        "dp 2, distributed optimizer": (Layout(dp_shard=2, uses_megatron_modules=True), {}),
        "tp 2, sequence parallel": (Layout(tp=2, uses_megatron_modules=True), {}),
        "ep 2": (Layout(dp_replicate=2, ep=2, uses_megatron_modules=True), {}),
        "ep 2, tp 2": (Layout(tp=2, ep=2, uses_megatron_modules=True), {}),
    },
    4: {
        "dp 4 x ep 2, distributed optimizer": (
            Layout(dp_shard=4, ep=2, uses_megatron_modules=True),
            {},
        ),
        "dp 4 x ep 2": (Layout(dp_replicate=4, ep=2, uses_megatron_modules=True), {}),
        "tp 2 x pp 2, ep 2": (Layout(tp=2, pp=2, ep=2, uses_megatron_modules=True), {}),
        "sp 2 x tp 2, ep 4": (Layout(sp=2, tp=2, ep=4, uses_megatron_modules=True), {}),
    },
}
"""Layouts of a mixture of experts."""
KINDS = {
    "policy": ("qwen2", PolicyScorer, Memory()),
    "critic": ("qwen2", ValueScorer, Memory()),
    "llama": ("llama", PolicyScorer, Memory(gradient_checkpointing=True)),
    "qwen3": ("qwen3", PolicyScorer, Memory()),
    "mixture": ("qwen3_moe", PolicyScorer, Memory()),
}
PARTS = frozenset({"model", "optimizer"})


def make_engine(
    folder: Path,
    layout: Layout,
    world: ProcessGroup,
    kind: str,
    dtype: torch.dtype = torch.float32,
    **own: Any,
) -> FSDPEngine:
    model, scorer, memory = KINDS[kind]
    optimizer = OptimConfig(eps=1.0, weight_decay=0.01)
    options: dict[str, Any] = {
        "dtype": dtype,
        "device": CPU,
        "training": Training(optimizer, grad_clip=0.05, max_nonfinite_steps=2),
        "memory": memory,
        "processes": Processes.arrange(world, layout),
    }
    if layout.is_whole:
        return FSDPEngine(scorer(load_causal_lm(folder / model, dtype=torch.float32)), **options)
    skeleton = scorer(skeleton_causal_lm(folder / model))
    files = ConvertedFiles(open_weights(folder / model), skeleton.model)
    shapes = {name: parameter.shape for name, parameter in skeleton.model.named_parameters()}
    options["read"] = lambda name: (
        files.read(name) if name in files.shapes else torch.zeros(shapes[name])
    )
    if not layout.uses_megatron_modules:
        return FSDPEngine(skeleton, **options)
    if _last != [sizes := (layout, own.get("virtual"))]:
        end_groups()
        _last.append(sizes)
    return MegatronEngine(skeleton, **options, **own)


_last: list[tuple[Layout, int | None]] = []


def end_groups() -> None:
    """End the groups of the last sizes: each has threads of gloo, which never rest."""
    for group in filter(None, parallel_state._global_process_group_list or ()):
        dist.destroy_process_group(group)
    parallel_state.destroy_model_parallel()
    _last.clear()


def run(engine: FSDPEngine, batch: DataProto, kind: str) -> dict[str, Any]:
    """Outputs, then metrics and weights after two optimizer steps."""
    return ask_and_learn(engine, batch, kind, TWO_STEPS)


def run_told(engine: FSDPEngine, batch: DataProto) -> dict[str, Any]:
    """Outputs of a mixture; what its routers choose, which only a last stage returns; steps of which they are told
    some."""
    rows = own_rows(ragged_batch(), engine)
    found: dict[str, Any] = {"asked": ask(engine, batch)}
    if engine.processes.layout.pp == 1:
        chosen = infer(engine, rows, MicroBatching(None, 24), with_routes=True)[ROUTES]
        found["routes"] = rows.batch["row_index"], chosen.sort(-1).values
    found["weights"], found["said"] = expert_layouts.learn(
        engine, expert_layouts.tell(engine, ragged_batch())
    )
    return found


def overflow(engine: FSDPEngine, batch: DataProto) -> list[tuple[bool, list[float]]]:
    """Three steps whose gradient is not finite on one rank alone. Of each rank, whether its weights are what they were,
    and its loss scale."""
    before = weights_of(engine)
    if engine.world.is_first:
        batch = batch.select(deepcopy=True)
        batch.batch["advantages"] *= torch.inf
    learn(engine, batch, "policy")
    is_same = all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())
    return engine.world.gather((is_same, engine.loss_scale.tolist()))


def write(engine: FSDPEngine, folder: Path) -> None:
    writer = StateWriter(engine.world)
    writer.start({folder: engine.state(PARTS)})
    writer.is_written(wait=True)


def go_on(engine: FSDPEngine, batch: DataProto, source: Path) -> dict[str, Any]:
    """Two steps from a checkpoint, in an engine whose tensors rest between its phases."""
    engine.offload_between_phases(ALL_KINDS, source.parent)
    with engine.awake(*ALL_KINDS):
        load_state(source, engine.state(PARTS), engine.world)
        engine.apply_loaded_state(PARTS)
        loaded = weights_of(engine)
    metrics = learn(engine, batch, "policy", TWO_STEPS)
    with engine.awake("weights"):
        return {"loaded": loaded, "metrics": metrics, "weights": weights_of(engine)}


def whole_state(engine: FSDPEngine) -> dict[str, Tensor]:
    """Weights and moments of the whole model, put together from all ranks."""
    own = {
        name: one.full_tensor() if isinstance(one, DTensor) else one
        for name, one in engine.state(PARTS).items()
    }
    return {
        name: one.clone() for of_rank in engine.world.gather(own) for name, one in of_rank.items()
    }


def chain(folder: Path, batch: DataProto, world: ProcessGroup, kind: str) -> dict[str, Any]:
    """Two steps on Megatron and two more; a checkpoint between them goes to FSDP2, from there to two stages of
    Megatron, which go on, and from these to a Hugging Face folder."""
    first, layouts = CHAINS[kind], MIXTURES if kind == "mixture" else LAYOUTS
    engine = make_engine(folder, layouts[2][first][0], world, kind)
    learn(engine, batch, kind, TWO_STEPS)
    states, place = [whole_state(engine)], folder / f"{kind} 0"
    write(engine, place)
    found = {
        "undisturbed": {
            "metrics": learn(engine, batch, kind, TWO_STEPS),
            "weights": weights_of(engine),
        }
    }
    for number, layout in enumerate((Layout(dp_shard=2), LAYOUTS[2]["pp 2"][0]), start=1):
        engine = make_engine(folder, layout, world, kind)
        load_state(place, engine.state(PARTS), world)
        engine.apply_loaded_state(PARTS)
        states.append(whole_state(engine))
        write(engine, place := folder / f"{kind} {number}")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()))
    checkpoint = RoleCheckpoint(engine, tokenizer)
    checkpoint.start(folder / f"{kind} exported", frozenset({"hf_model"}))
    checkpoint.writer.is_written(wait=True)
    found["goes on"] = {
        "metrics": learn(engine, batch, kind, TWO_STEPS),
        "weights": weights_of(engine),
    }
    return found | {"states": states}


def send(engine: FSDPEngine, folder: Path, name: str) -> None:
    """Publish weights to the rollout."""
    sender = WeightSender("localhost", range(1), CPU, 1 << 14) if engine.world.is_first else None
    weights = engine.weights()
    if sender is not None:
        tell(folder / f"{name}.address", asdict(sender.address))
        sender.publish(weights, 1)
    for _ in weights:
        pass


def receive(folder: Path) -> None:
    """An engine `native` with other weights gets those of each layout; the receiver compares fingerprints."""
    for name, kind in PUBLISHED.items():
        model = load_causal_lm(folder / KINDS[kind][0], dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        engine = NativeEngine(model, eos_token_ids=(0,))
        WeightReceiver(Address(**told(folder / f"{name}.address")), 0, CPU).receive(engine, 1)
        torch.save(
            {one: tensor.clone() for one, tensor in engine.named_weights()},
            folder / f"{name}.received.pt",
        )


def outside() -> list[str]:
    """What of torch is another thing after a call into Megatron that failed."""
    before = {name: getattr(torch.cuda, name) for name in dir(torch.cuda)}
    with pytest.raises(KeyError), megatron_context(CPU):
        assert torch.zeros(1, device="cuda").device == CPU == torch.cuda.current_device()
        raise KeyError
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")
    return [name for name, value in before.items() if getattr(torch.cuda, name) is not value]


def meet(folder: Path, place: WorkerPlace) -> None:
    """All layouts of one number of processes."""
    batch = DataProto.load_from_disk(folder / "batch")
    world = process_group.join(place, CPU, also_alone=True)
    results: dict[str, Any] = {}
    for name, (layout, own) in LAYOUTS[world.size].items():
        for kind in RUNS[name]:
            if (name, kind) == (SAVED, "policy"):
                continue  # `of_four` saves it
            results[f"{name}, {kind}"] = run(
                make_engine(folder, layout, world, kind, **own), batch, kind
            )
        for dtype in NARROW.get(name, ()):
            engine = make_engine(folder, layout, world, "policy", dtype, **own)
            results[f"{name}, {dtype}"] = run(engine, batch, "policy")
        if name in GOES_ON:
            engine = make_engine(folder, layout, world, "policy", **own)
            results[f"{name}, goes on"] = go_on(engine, batch, folder / "saved")
    for name, (layout, own) in MIXTURES[world.size].items():
        if name in PLAIN_MIXTURES:
            results[f"{name}, mixture"] = run(
                make_engine(folder, layout, world, "mixture", **own), batch, "mixture"
            )
        if name in TOLD_MIXTURES:
            results[f"{name}, told"] = run_told(
                make_engine(folder, layout, world, "mixture", **own), batch
            )
    results |= {1: of_one, 2: of_two, 4: of_four}[world.size](folder, batch, world)
    if world.is_first:
        torch.save(results, folder / f"{world.size}.pt")
    end_groups()
    process_group.leave(world)


def of_one(folder: Path, batch: DataProto, world: ProcessGroup) -> dict[str, Any]:
    found = {
        f"fsdp, {kind}": run(make_engine(folder, Layout(), world, kind), batch, kind)
        for kind in KINDS
    }
    for dtype in NARROW["one process"]:
        found[f"fsdp, {dtype}"] = run(
            make_engine(folder, Layout(), world, "policy", dtype), batch, "policy"
        )
    found["fsdp, told"] = run_told(make_engine(folder, Layout(), world, "mixture"), batch)
    return found | {"outside": outside()}


def of_two(folder: Path, batch: DataProto, world: ProcessGroup) -> dict[str, Any]:
    """FSDP2 goes on from Megatron's checkpoint; and from engine to engine to engine."""
    fsdp = make_engine(folder, Layout(dp_shard=2), world, "policy")
    found = {"fsdp 2, goes on": go_on(fsdp, batch, folder / "saved")}
    for name, layout in {"fsdp 2": Layout(dp_shard=2), "fsdp, pp 2": Layout(pp=2)}.items():
        engine = make_engine(folder, layout, world, "policy", torch.float16)
        found[f"{name}, {torch.float16}"] = run(engine, batch, "policy")
    of_megatron = "dp 2, distributed optimizer"
    for name, layout in {
        "fsdp 2": Layout(dp_shard=2),
        of_megatron: LAYOUTS[2][of_megatron][0],
    }.items():
        found[f"{name}, overflow"] = overflow(
            make_engine(folder, layout, world, "policy", torch.float16), batch
        )
    found["linear modules"] = with_other_modules(folder, batch, world)
    return found | {f"chain, {kind}": chain(folder, batch, world, kind) for kind in CHAINS}


class Column(ColumnParallelLinear):
    """In the place of Transformer Engine's, which gathers no outputs."""

    def __init__(self, *sizes: int, gather_output: bool, **options: Any) -> None:
        assert not gather_output
        super().__init__(*sizes, gather_output=False, **options)


class Row(RowParallelLinear):
    """In the place of Transformer Engine's, whose inputs are parallel."""

    def __init__(self, *sizes: int, input_is_parallel: bool, **options: Any) -> None:
        assert input_is_parallel
        super().__init__(*sizes, input_is_parallel=True, **options)


def with_other_modules(folder: Path, batch: DataProto, world: ProcessGroup) -> dict[str, Any]:
    """Two steps with what stands in for Transformer Engine, as on CUDA; how many there are, and what is said."""
    parts, chosen = megatron_model.transformer_engine, megatron_model.linear_modules
    on_cuda = {"linear_modules": lambda device: chosen(torch.device("cuda"))}
    with (
        patch.multiple(parts, HAVE_TE=True, TEColumnParallelLinear=Column, TERowParallelLinear=Row),
        patch.multiple(megatron_model, get_te_version=lambda: "2.99", **on_cuda),
        patch.multiple(megatron_engine, **on_cuda),
    ):
        engine = make_engine(folder, LAYOUTS[2]["tp 2, sequence parallel"][0], world, "llama")
        said = engine.describe()["weights"]
    modules = [one for chunk in engine.stage.chunks for one in chunk.modules()]
    counts = [sum(isinstance(one, kind) for one in modules) for kind in (Column, Row)]
    return run(engine, batch, "llama") | {"counts": counts, "said": said}


def of_four(folder: Path, batch: DataProto, world: ProcessGroup) -> dict[str, Any]:
    """Two steps, a checkpoint, and two more."""
    engine = make_engine(folder, LAYOUTS[4][SAVED][0], world, "policy")
    first_steps = run(engine, batch, "policy")
    write(engine, folder / "saved")
    metrics = learn(engine, batch, "policy", TWO_STEPS)
    undisturbed = {
        "saved": first_steps["weights"],
        "metrics": metrics,
        "weights": weights_of(engine),
    }
    for name, kind in PUBLISHED.items():
        layout, own = (MIXTURES if kind == "mixture" else LAYOUTS)[4][name]
        send(make_engine(folder, layout, world, kind, **own), folder, name)
    return {f"{SAVED}, policy": first_steps, "undisturbed": undisturbed}


def main(rank: int, folder: Path, ports: tuple[int, int]) -> None:
    """Ranks that a smaller number of processes does not need are done before the others."""
    if rank == 4:
        receive(folder)
        return
    for size, port in zip((4, 2), ports, strict=True):
        if rank < size:
            meet(folder, WorkerPlace(rank, size, master_port=port))
    if rank == 0:
        meet(folder, WorkerPlace())


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])))
