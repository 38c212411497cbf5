# SPDX-License-Identifier: Apache-2.0
"""The program that test_lora.py starts in two processes: an adapter in weights that both share, then the same by the
first alone; what came out is written for the test to compare.

    python lora_shards.py RANK FOLDER PORT PORT
"""

import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from quadriga.config import Config
from quadriga.observe.metrics import reduce_metrics
from quadriga.protocol import DataProto
from quadriga.single_controller import WorkerPlace, placed
from quadriga.workers import ActorRolloutRefWorker


def make_config(folder: Path, dtype: str, use_checkpointing: bool) -> Config:
    """Two updates a batch; with a large eps AdamW moves weights in proportion to the gradient: a rounding error stays
    one."""
    return Config(
        data={"train_batch_size": 4, "max_prompt_length": 9, "max_response_length": 7},
        actor_rollout_ref={
            "model": {
                "path": str(folder / "model"),
                "lora_rank": 3,
                "lora_alpha": 12,
                "enable_gradient_checkpointing": use_checkpointing,
            },
            "actor": {
                "ppo_mini_batch_size": 2,
                "use_kl_loss": True,
                "kl_loss_coef": 0.1,
                "fsdp_config": {"model_dtype": dtype},
                "optim": {"lr": 3.0, "eps": 1.0},
                "grad_clip": 0.05,
                "checkpoint": {"save_contents": ["model", "optimizer", "hf_model"]},
            },
            "rollout": {"n": 3},
        },
        trainer={"device": "cpu"},
    )


def make_worker(
    folder: Path, place: WorkerPlace, dtype: str = "float32", *, use_checkpointing: bool = False
) -> tuple[ActorRolloutRefWorker, dict[str, str]]:
    backend = Tokenizer(
        models.WordLevel({f"w{number}": number for number in range(97)}, unk_token="w2")
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="w0", eos_token="w1", unk_token="w2"
    )
    with placed(place):
        worker = ActorRolloutRefWorker(make_config(folder, dtype, use_checkpointing), tokenizer)
    return worker, worker.init_model()


def weights(worker: ActorRolloutRefWorker, *, is_merged: bool) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in worker.engine.weights(is_merged=is_merged)}


def whole(worker: ActorRolloutRefWorker, answer: DataProto) -> DataProto:
    """The rows, or the metrics, of all processes."""
    return DataProto.concat(worker.engine.world.gather(answer))


def learn(worker: ActorRolloutRefWorker, rows: DataProto, num_steps: int) -> list[dict[str, float]]:
    told = []
    for _ in range(num_steps):
        part = worker.update_actor(rows)
        told.append(reduce_metrics(whole(worker, part).meta_info["metrics"]))
    return told


def run(folder: Path, place: WorkerPlace) -> dict[str, Any]:
    """Two batches, a checkpoint, one more; and that one again from the checkpoint."""
    batch = DataProto.load_from_disk(folder / "batch")
    batch.batch["row_index"] = torch.arange(len(batch))
    batch.meta_info |= {"global_steps": 1, "total_training_steps": 10}
    worker, choices = make_worker(folder, place)
    rows = batch.chunk(place.world_size)[place.rank]
    rows.batch["ref_log_prob"] = worker.compute_ref_log_prob(rows).batch["ref_log_prob"]
    results: dict[str, Any] = {"choices": choices, "begin": weights(worker, is_merged=False)}
    results["metrics"] = learn(worker, rows, 2)
    results["held"], results["merged"] = (
        weights(worker, is_merged=False),
        weights(worker, is_merged=True),
    )
    results["reference again"] = whole(worker, worker.compute_ref_log_prob(rows)).batch[
        "ref_log_prob"
    ]
    results["log_probs"] = whole(worker, worker.compute_log_prob(rows)).batch["old_log_probs"]
    worker.publish_weights(1)
    prompts = rows.select(["input_ids", "attention_mask", "position_ids"])
    for name in ("input_ids", "attention_mask", "position_ids"):
        prompts.batch[name] = prompts.batch[name][:, :9]
    prompts.meta_info["do_sample"] = True
    prompts.non_tensor_batch["uid"] = rows.batch["row_index"].numpy().astype(str).astype(object)
    answers = worker.generate_sequences(prompts)
    results["rollout"] = whole(
        worker, DataProto.from_dict({"told": answers.batch["rollout_log_probs"]})
    ).batch["told"]
    results["trainer"] = whole(worker, worker.compute_log_prob(answers)).batch["old_log_probs"]
    results["mask"] = whole(
        worker, DataProto.from_dict({"mask": answers.batch["response_mask"]})
    ).batch["mask"]
    saved = folder / f"saved by {place.world_size}"
    worker.save_checkpoint(saved)
    results["third step"] = learn(worker, rows, 1)
    worker.checkpoint_written(wait=True)
    results["end"] = weights(worker, is_merged=False)
    for writer in (1, 2):
        if (folder / f"saved by {writer}").exists():
            worker.load_checkpoint(folder / f"saved by {writer}")
            worker.publish_weights(2)
            results[f"third step, from {writer}"] = learn(worker, rows, 1)
            results[f"end, from {writer}"] = weights(worker, is_merged=False)
    worker.close()
    return results


def run_in_bfloat16(folder: Path, place: WorkerPlace) -> dict[str, Any]:
    """One batch, layers computed twice: what computes is bfloat16, and of the masters the adapter's are not."""
    batch = DataProto.load_from_disk(folder / "batch")
    batch.batch["row_index"] = torch.arange(len(batch))
    batch.meta_info |= {"global_steps": 1, "total_training_steps": 10}
    worker, _ = make_worker(folder, place, "bfloat16", use_checkpointing=True)
    rows = batch.chunk(place.world_size)[place.rank]
    metrics = learn(worker, rows, 1)
    masters = worker.engine.parameters.masters
    results = {
        "metrics": metrics,
        "held": weights(worker, is_merged=False),
        "masters": {name: master.dtype for name, master in masters.items()},
    }
    worker.close()
    return results


def main(rank: int, folder: Path, ports: tuple[int, int]) -> None:
    """Both together, then the first alone."""
    results = run(folder, WorkerPlace(rank, 2, master_port=ports[0]))
    narrow = run_in_bfloat16(folder, WorkerPlace(rank, 2, master_port=ports[1]))
    if rank == 0:
        alone = run(folder, WorkerPlace()) | {"bfloat16": run_in_bfloat16(folder, WorkerPlace())}
        torch.save({2: results | {"bfloat16": narrow}, 1: alone}, folder / "results.pt")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]), (int(sys.argv[3]), int(sys.argv[4])))
