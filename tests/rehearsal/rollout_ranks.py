# SPDX-License-Identifier: Apache-2.0
"""Two ranks that train and generate with `native` on the stand-in; started by test_rollout_ranks.py.

    python rollout_ranks.py RANK FOLDER PORT PORT

Each rank writes to rankN.json what it found.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quadriga.config import Config
from quadriga.engines import process_group
from quadriga.models.load import load_causal_lm, skeleton_causal_lm
from quadriga.protocol import DataProto
from quadriga.rollout import NativeEngine, SamplingParams
from quadriga.rollout.group import RolloutGroup
from quadriga.single_controller import WorkerPlace
from quadriga.single_controller.worker import placed
from quadriga.weight_sync import Box, ReshardedWeights
from quadriga.workers.actor_rollout_ref import ActorRolloutRefWorker
from quadriga.workers.base import choose_device
from tests.gpu.test_cuda import VOCABULARY
from tests.rehearsal.lines import LINES, LineCoverage
from tests.rehearsal.stand_in import StandIn

RANKS = 2
NUM_NEW_TOKENS = 6
PROMPTS = [[1, 2, 3, 4, 5]] * 4 + [[6, 7]] * 2 + [[8, 9, 10]]


def sampling() -> list[SamplingParams]:
    """Rows that end at different steps."""
    return [
        SamplingParams(max_tokens=6 + 9 * row, temperature=1.0, seed=row, ignore_eos=True)
        for row in range(len(PROMPTS))
    ]


def generate_in_a_group(owner: StandIn, folder: Path, place: WorkerPlace) -> dict[str, Any]:
    """Tokens of a group of two, by whether decode steps are graphs, and the counts of graphs."""
    device = choose_device("cuda", place.rank)
    world = process_group.join(place, device)
    group = RolloutGroup(place.rank, RANKS, RANKS, device)
    trained = load_causal_lm(folder / "model", dtype=torch.float32, device=device)
    held = {}
    for name, tensor in trained.named_parameters():
        held[name] = (Box((0,) * tensor.dim(), tuple(tensor.shape)), tensor.detach())
    found: dict[str, Any] = {}
    for uses_graphs in (True, False):
        engine = NativeEngine(
            skeleton_causal_lm(folder / "model"),
            group=group,
            dtype=torch.float32,
            eos_token_ids=(),
            uses_graphs=uses_graphs,
            max_num_seqs=5,
        )
        ReshardedWeights(place.rank, RANKS, device, 1 << 20).publish(held, engine, 1)
        owner.counts.clear()
        if group.is_leader:
            completions = engine.generate_batch(PROMPTS, sampling())
            engine.release()
            found[f"tokens, {uses_graphs}"] = [one.token_ids for one in completions]
        else:
            # Raises an error if this rank has other tokens than the leader.
            engine.follow()
        for name in ("captured", "replayed"):
            found[f"{name}, {uses_graphs}"] = owner.counts[f"graphs {name}"]
        engine.close()
    process_group.leave(world)
    return found


def prompts() -> DataProto:
    """Two prompts of four tokens, each twice."""
    input_ids = torch.tensor([[5, 6, 7, 8], [7, 8, 9, 3]]).repeat_interleave(2, 0)
    attention = torch.ones_like(input_ids)
    tensors = {
        "input_ids": input_ids,
        "attention_mask": attention,
        "position_ids": attention.cumsum(-1) - 1,
    }
    uids = {"uid": np.array([*"ppqq"], dtype=object)}
    return DataProto.from_dict(tensors=tensors, non_tensors=uids, meta_info={"global_steps": 1})


def generate_beside_training(folder: Path, place: WorkerPlace, size: int) -> dict[str, Any]:
    """Memory of a rank of a sharded actor while it could train, and what it generates.

    Args:
        folder: has the model.
        place: of the rank.
        size: ranks of a rollout group.
    """
    config = Config.model_validate(
        {
            "data": {"max_prompt_length": 4, "max_response_length": NUM_NEW_TOKENS},
            "actor_rollout_ref": {
                "model": {"path": str(folder / "model")},
                "actor": {"fsdp_config": {"fsdp_size": -1, "model_dtype": "bfloat16"}},
                "rollout": {
                    "name": "native",
                    "tensor_model_parallel_size": size,
                    "ignore_eos": True,
                },
            },
            "trainer": {"device": "cuda", "backend": "ray", "n_gpus_per_node": RANKS},
        }
    )
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w2")),
        pad_token="w0",
        eos_token="w1",
    )
    before = torch.cuda.memory_allocated()
    with placed(place):
        worker = ActorRolloutRefWorker(config, tokenizer)
    choices = worker.init_model()
    responses = worker.generate_sequences(prompts())
    while_training = torch.cuda.memory_allocated() - before
    # The actor publishes the same weights again, because the engine has freed them.
    again = worker.generate_sequences(prompts())
    worker.publish_weights(1)
    with_weights = torch.cuda.memory_allocated() - before
    share = worker.copy_weights()
    found = {
        "copied": list(share.weights),
        "fingerprints": list(share.fingerprints),
        "while training": while_training,
        "with weights": with_weights,
        "rollout": choices["rollout"],
        "responses": [one.batch["responses"].tolist() for one in (responses, again) if len(one)],
    }
    worker.close()
    return found


def main(rank: int, folder: Path, ports: list[str]) -> None:
    """Install the stand-in, and run both parts."""
    coverage = LineCoverage()
    coverage.start()
    with StandIn(num_devices=RANKS).installed() as owner:
        places = [WorkerPlace(rank, RANKS, rank, RANKS, master_port=int(port)) for port in ports]
        found = {
            "group": generate_in_a_group(owner, folder, places[0]),
            "sharded": generate_beside_training(folder, places[1], 1),
            "sharded group": generate_beside_training(folder, places[2], RANKS),
        }
    coverage.stop()
    coverage.write(Path(os.environ[LINES]))
    assert not owner.findings, owner.findings[:5]
    (folder / f"rank{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:])
