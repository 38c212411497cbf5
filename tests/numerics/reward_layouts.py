# SPDX-License-Identifier: Apache-2.0
"""The program that test_reward_layouts.py starts in two processes: a reward model scores a batch under one layout after
the other; the scores that its data-parallel ranks answer with are written for the test to compare.

    python reward_layouts.py RANK FOLDER PORT PORT PORT PORT PORT
"""

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer

from quadriga.config import Config
from quadriga.protocol import DataProto
from quadriga.single_controller import WorkerPlace, placed
from quadriga.workers import RewardModelWorker

LAYOUTS = {
    "fsdp 2": {},
    "replicas 2": {"model": {"fsdp_config": {"fsdp_size": 1}}},
    "sp 2": {"ulysses_sequence_parallel_size": 2},
    "tp 2": {"tensor_model_parallel_size": 2},
    "pp 2": {"pipeline_model_parallel_size": 2},
}


def config_of(folder: Path, changes: dict) -> Config:
    """A reward model in float32 that fits several micro-batches into a batch."""
    fsdp = {"model_dtype": "float32"} | changes.get("model", {}).get("fsdp_config", {})
    model = {"path": str(folder / "judge"), "fsdp_config": fsdp}
    reward = {"enable": True, "forward_max_token_len_per_gpu": 24} | changes | {"model": model}
    return Config(reward_model=reward, trainer={"device": "cpu"})


def scores(
    folder: Path, place: WorkerPlace, batch: DataProto, changes: dict
) -> tuple[int, bool, torch.Tensor]:
    """The data-parallel rank of this process, whether it answers, and its scores of the rank's rows."""
    with placed(place):
        worker = RewardModelWorker(
            config_of(folder, changes), AutoTokenizer.from_pretrained(folder / "judge")
        )
    worker.init_model()
    stands = worker.processes.place
    rows = list(range(len(batch)))[stands.dp_rank :: worker.processes.layout.dp_size]
    # Ragged: the second rank has fewer rows.
    scored = worker.compute_rm_score(batch.select_idxs(rows)).batch["rm_scores"]
    worker.close()
    return stands.dp_rank, stands.is_collected, scored


if __name__ == "__main__":
    rank, folder = int(sys.argv[1]), Path(sys.argv[2])
    # Each layout meets at a port of its own.
    ports = dict(zip(LAYOUTS, map(int, sys.argv[3:]), strict=True))
    batch = DataProto.load_from_disk(folder / "batch")
    results = {
        name: scores(folder, WorkerPlace(rank, 2, rank, 2, master_port=ports[name]), batch, changes)
        for name, changes in LAYOUTS.items()
    }
    if rank == 0:
        results["alone"] = scores(folder, WorkerPlace(), batch, {})
    torch.save(results, folder / f"{rank}.pt")
