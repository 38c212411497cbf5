# SPDX-License-Identifier: Apache-2.0
"""Processes that hold vLLM engines together; each writes what it found to a file of its number."""

import asyncio
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from transformers import AutoTokenizer

from quadriga.config import load_config
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights
from small_models import greedy, model

PROMPTS = [[5, 6, 7], [8], [5, 6, 7], [9, 10, 11, 12, 13], [2 + number * 7 % 250 for number in range(200)]]
SIZE = 2


def lead(engine: VLLMEngine, work: Callable[[], Any]) -> Any:
    """What the leader finds; its members follow meanwhile."""
    group = engine.setup.group
    assert group is not None
    if not group.is_leader:
        return engine.follow()
    try:
        return work()
    finally:
        engine.release()


async def joining(engine: VLLMEngine) -> list[list[int]]:
    """Requests that join those that run; one is cancelled, and the last ones are aborted."""
    params = [SamplingParams(max_tokens=24, seed=11 * row) for row in range(len(PROMPTS))]
    tasks = []
    for prompt, one in zip(PROMPTS, params, strict=True):
        tasks.append(asyncio.create_task(engine.generate(prompt, one)))
        await asyncio.sleep(0.01)
    dropped = asyncio.create_task(engine.generate([5], SamplingParams(max_tokens=300, ignore_eos=True)))
    await asyncio.sleep(0.05)
    dropped.cancel()
    found = [one.token_ids for one in await asyncio.gather(*tasks)]
    long = [
        asyncio.create_task(engine.generate([5, row], SamplingParams(max_tokens=300, ignore_eos=True)))
        for row in range(3)
    ]
    await asyncio.sleep(0.1)
    engine.abort()
    assert {one.finish_reason for one in await asyncio.gather(*long)} == {"abort"}
    return found


def rank_main(rank: int, size: int, folder: str, store: str) -> None:
    """One rank: what it found stands in the file of its number."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    group = RolloutGroup(rank, size, SIZE, torch.device("cpu"))
    sizes = {"name": "vllm", "max_model_len": 320, "max_num_seqs": 32, "max_num_batched_tokens": 1024}
    sizes |= {"cache_gigabytes": 1 / 32, "tensor_model_parallel_size": SIZE}
    words = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in sizes.items()]
    config = load_config([*words, f"actor_rollout_ref.model.path={folder}"]).config
    tokenizer = AutoTokenizer.from_pretrained(folder)
    setup = EngineSetup(config, tokenizer, {"block_size": 32}, torch.device("cpu"), torch.float32, group=group)
    engine = VLLMEngine.from_config(setup)
    found: dict[str, Any] = {"description": engine.description, "versions": []}
    params = [SamplingParams(max_tokens=24, seed=11 * row) for row in range(len(PROMPTS))]
    likeliest = [SamplingParams(max_tokens=24, temperature=0.0)] * len(PROMPTS)
    for version, seed in enumerate((0, 1, 0), start=1):
        engine.sleep()
        CopiedWeights().publish(model(seed).named_parameters(), engine, version)
        engine.wake()
        whole = lead(engine, lambda: engine.generate_batch(PROMPTS, likeliest))
        if whole is not None:
            expected = [greedy(model(seed), prompt, 24) for prompt in PROMPTS]
            worst = max(
                abs(mine - theirs)
                for one, (_, log_probs) in zip(whole, expected, strict=True)
                for mine, theirs in zip(one.log_probs, log_probs, strict=True)
            )
            found["versions"].append([[one.token_ids for one in whole] == [tokens for tokens, _ in expected], worst])
    sampled = lead(engine, lambda: [one.token_ids for one in engine.generate_batch(PROMPTS, params)])
    joined = lead(engine, lambda: asyncio.run(joining(engine)))
    again = lead(engine, lambda: [one.token_ids for one in engine.generate_batch(PROMPTS, params)])
    found |= {"sampled": sampled, "joined": joined, "again": again, "rebuilt": engine.rebuilt}
    (Path(store).parent / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    engine.close()


if __name__ == "__main__":
    folder, to, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    mp.start_processes(rank_main, (size, folder, str(to / "store")), size, start_method="spawn")
