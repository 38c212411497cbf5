# SPDX-License-Identifier: Apache-2.0
"""Four processes that train in one layout after the other, and hold vLLM engines together; each writes what it found to
a file of its number.

    python small_groups.py FOLDER TO SIZE [async]

FOLDER has the models "0" and "1"; SIZE is how many ranks an engine has. With `async` vLLM schedules asynchronously, and
a sleep, with a batch in flight, loses the weights and the KV cache.
"""

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

from losing import lose
from quadriga.config import Layout, load_config
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.models.load import skeleton_causal_lm
from quadriga.models.scorers import PolicyScorer
from quadriga.models.weight_files import open_weights
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights
from scheduling import batches_in_flight, keep_async_scheduling
from small_models import greedy, wide_model

PROMPTS = [
    [5, 6, 7],
    [8],
    [5, 6, 7],
    [9, 10, 11, 12, 13],
    [2 + number * 7 % 250 for number in range(200)],
]
RANKS, CPU = 4, torch.device("cpu")
VERSIONS = (
    (Layout(dp_shard=4), 0),
    (Layout(dp_shard=2, tp=2), 1),
    (Layout(tp=2, pp=2), 0),
)
"""Of each publication the training layout, and the number of the model."""


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
    dropped = asyncio.create_task(
        engine.generate([5], SamplingParams(max_tokens=300, ignore_eos=True))
    )
    await asyncio.sleep(0.05)
    dropped.cancel()
    found = [one.token_ids for one in await asyncio.gather(*tasks)]
    long = [
        asyncio.create_task(
            engine.generate([5, row], SamplingParams(max_tokens=300, ignore_eos=True))
        )
        for row in range(3)
    ]
    await asyncio.sleep(0.1)
    engine.abort()
    assert {one.finish_reason for one in await asyncio.gather(*long)} == {"abort"}
    return found


def trainer(path: Path, layout: Layout, rank: int) -> FSDPEngine:
    """The weights in float32, in the shards of a layout."""
    return FSDPEngine(
        PolicyScorer(skeleton_causal_lm(path)),
        read=open_weights(path).read,
        dtype=torch.float32,
        device=CPU,
        processes=Processes.arrange(ProcessGroup(rank, RANKS, CPU), layout),
    )


def rank_main(rank: int, size: int, folder: str, store: str, is_async: bool) -> None:
    """One rank: what it found stands in the file of its number."""
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    group = RolloutGroup(rank, RANKS, size, CPU)
    sizes = {
        "name": "vllm",
        "max_model_len": 320,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 1024,
    }
    sizes |= {"cache_gigabytes": 1 / 32, "tensor_model_parallel_size": size}
    words = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in sizes.items()]
    config = load_config([*words, f"actor_rollout_ref.model.path={folder}/0"]).config
    tokenizer = AutoTokenizer.from_pretrained(f"{folder}/0")
    options: dict[str, Any] = {"block_size": 32}
    if is_async:
        setattr(*keep_async_scheduling())
        options["async_scheduling"] = True
    setup = EngineSetup(config, tokenizer, options, CPU, torch.float32, group=group)
    engine = VLLMEngine.from_config(setup)
    engine.is_load_stable = True
    in_flight: list[int] = []
    found: dict[str, Any] = {"description": engine.description, "versions": []}
    params = [SamplingParams(max_tokens=24, seed=11 * row) for row in range(len(PROMPTS))]
    likeliest = [SamplingParams(max_tokens=24, temperature=0.0)] * len(PROMPTS)
    for version, (layout, number) in enumerate(VERSIONS, start=1):
        engine.sleep()
        if is_async:
            in_flight.append(len(batches_in_flight(engine)))
            engine.core.ask("collective_rpc", lose)
        CopiedWeights().publish(
            trainer(Path(folder, str(number)), layout, rank).weights(), engine, version
        )
        engine.wake()
        whole = lead(engine, lambda: engine.generate_batch(PROMPTS, likeliest))
        if whole is not None:
            expected = [greedy(wide_model(number), prompt, 24) for prompt in PROMPTS]
            worst = max(
                abs(mine - theirs)
                for one, (_, log_probs) in zip(whole, expected, strict=True)
                for mine, theirs in zip(one.log_probs, log_probs, strict=True)
            )
            found["versions"].append(
                [[one.token_ids for one in whole] == [tokens for tokens, _ in expected], worst]
            )
    sampled = lead(
        engine, lambda: [one.token_ids for one in engine.generate_batch(PROMPTS, params)]
    )
    joined = lead(engine, lambda: asyncio.run(joining(engine)))
    again = lead(engine, lambda: [one.token_ids for one in engine.generate_batch(PROMPTS, params)])
    found |= {"sampled": sampled, "joined": joined, "again": again, "rebuilt": engine.rebuilt}
    found["in flight"] = in_flight
    (Path(store).parent / f"rank{rank}.json").write_text(json.dumps(found))
    dist.barrier()
    engine.close()


if __name__ == "__main__":
    folder, to, size = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    arguments = (size, folder, str(to / "store"), "async" in sys.argv[4:])
    mp.start_processes(rank_main, arguments, RANKS, start_method="spawn")
