# SPDX-License-Identifier: Apache-2.0
"""The program that test_model_layouts.py starts in two processes: each architecture in each layout of two ranks, some
with an adapter; what came out is written for the test to compare.

    python model_layouts.py RANK FOLDER PORT
"""

import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

from quadriga.config import Layout, ModelConfig, OptimConfig
from quadriga.engines import process_group
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Training
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.models.adapter_files import base_name, is_factor
from quadriga.models.experts import mixtures
from quadriga.models.load import load_causal_lm, skeleton_causal_lm
from quadriga.models.lora import add_adapter
from quadriga.models.scorers import PolicyScorer
from quadriga.protocol import DataProto
from quadriga.single_controller import WorkerPlace
from quadriga.workers.models import LoadedModel, _read_by_shard
from tests.models_page import LAYOUTS
from tests.numerics.layouts import ask, learn

CPU = torch.device("cpu")
# Two mini-batches of one micro-batch each: sums of gradients over several depend on no architecture (test_layouts.py).
MICRO = MicroBatching(None, 96)
TWO_STEPS = (Passes(7, 1, MICRO),)


def give_adapter(loaded: LoadedModel) -> LoadedModel:
    """The model with an adapter whose B is not zero, so that A learns too: in all linear modules or, where PEFT takes
    others in with them, in those of attention."""
    model, read = loaded.scorer.model, loaded.read
    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    in_attention = [name for name in linear if "attn" in name]
    has_others = any(mixtures(model)) or model.config.model_type == "falcon_h1"
    section = ModelConfig(
        path=".", lora_rank=3, target_modules=in_attention if has_others else "all-linear"
    )
    read_a = add_adapter(model, section, seed=5)
    factors = {name: one for name, one in model.named_parameters() if is_factor(name)}

    def value(name: str) -> torch.Tensor:
        generator = torch.Generator().manual_seed(sorted(factors).index(name))
        return (
            torch.randn(factors[name].shape, generator=generator) * 0.2
            if ".lora_B." in name
            else read_a(name)
        )

    if read is not None:
        return LoadedModel(
            loaded.scorer, lambda name: value(name) if name in factors else read(base_name(name))
        )
    for name, one in factors.items():
        one.data.copy_(value(name))
    return loaded


def make_engine(
    folder: Path, layout: Layout, world: ProcessGroup, *, has_adapter: bool = False
) -> FSDPEngine:
    if layout.is_whole:
        loaded = LoadedModel(PolicyScorer(load_causal_lm(folder, dtype=torch.float32)), None)
    else:
        loaded, missing = _read_by_shard(PolicyScorer(skeleton_causal_lm(folder)), folder)
        assert not missing
    loaded = give_adapter(loaded) if has_adapter else loaded
    # With a large eps AdamW moves weights in proportion to the gradient: a rounding error stays one.
    training = Training(
        OptimConfig(eps=1.0, weight_decay=0.01), grad_clip=0.05, max_nonfinite_steps=2
    )
    processes = Processes.arrange(world, layout)
    how = {"dtype": torch.float32, "device": CPU, "training": training, "processes": processes}
    return FSDPEngine(loaded.scorer, read=loaded.read, **how)


def main(rank: int, folder: Path, port: int) -> None:
    batch = DataProto.load_from_disk(folder / "batch")
    world = process_group.join(WorkerPlace(rank, 2, master_port=port), CPU)
    results: dict[str, Any] = {}
    for case in (folder / "cases").read_text().splitlines():
        name, layout, *adapter = case.split(" | ")
        engine = make_engine(
            folder / name.replace(" ", "_"), LAYOUTS[layout], world, has_adapter=bool(adapter)
        )
        asked = ask(engine, batch, MICRO)
        learn(engine, batch, "policy", TWO_STEPS)
        weights = {key: weight.clone() for key, weight in engine.weights()}
        results[case] = {"asked": asked, "weights": weights}
    if world.is_first:
        torch.save(results, folder / "2.pt")
    process_group.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
