# SPDX-License-Identifier: Apache-2.0
"""The program that test_few_rows.py starts in two processes: each writes its shards of a model and what it gathers.

python few_rows.py RANK FOLDER PORT
"""

import sys
from pathlib import Path

import torch

from quadriga.config import Layout
from quadriga.engines import process_group
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.parallel.processes import Processes
from quadriga.models.load import skeleton_causal_lm
from quadriga.models.scorers import PolicyScorer
from quadriga.models.weight_files import open_weights
from quadriga.single_controller import WorkerPlace

CPU = torch.device("cpu")
RANKS = 2


def main(rank: int, folder: Path, port: int) -> None:
    world = process_group.join(WorkerPlace(rank, RANKS, master_port=port), CPU)
    engine = FSDPEngine(
        PolicyScorer(skeleton_causal_lm(folder / "model")),
        read=open_weights(folder / "model").read,
        dtype=torch.float32,
        device=CPU,
        processes=Processes.arrange(world, Layout(dp_shard=RANKS)),
    )
    gathered = {name: tensor.clone() for name, tensor in engine.weights()}
    torch.save((gathered, list(engine.parameters.shards())), folder / f"{rank}.pt")
    process_group.leave(world)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
