# SPDX-License-Identifier: Apache-2.0
"""Memory of a weight sync from sharded training ranks to a rollout group of the same ranks, by torch's allocations.

    .venv/bin/python benchmarks/weight_sync.py
    .venv-vllm/bin/python benchmarks/weight_sync.py --engine vllm

The quickstart's model in float32, FSDP over the ranks, and a rollout group of all of them (its nine query heads are
divided by three). Beyond the shards of both layouts a rank may take a bucket of 1/16 of the model, and with vLLM its
largest module, within 5 %; the program fails where it takes more.
"""

import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.profiler import ProfilerActivity, profile
from transformers import AutoTokenizer

from quadriga.config import Layout, load_config
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.models.load import skeleton_causal_lm
from quadriga.models.scorers import PolicyScorer
from quadriga.models.weight_files import open_weights
from quadriga.rollout import NativeEngine
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import Box, CopiedWeights, ReshardedWeights
from step import MODEL

CPU, MB = torch.device("cpu"), 1e6


def peak_bytes(work: Callable[[], object]) -> int:
    """Memory of tensors that was alive at the same time, beyond that at the start; by torch's own allocator."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [
        event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"
    ]
    alive = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        alive += event.nbytes()
        peak = max(peak, alive)
    return peak


def sync(rank: int, args: Namespace, store: str) -> None:
    """One rank: publish twice, and say what that took. Ends with status 1 where it is too much."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=args.ranks)
    world, group = (
        ProcessGroup(rank, args.ranks, CPU),
        RolloutGroup(rank, args.ranks, args.ranks, CPU),
    )
    trainer = FSDPEngine(
        PolicyScorer(skeleton_causal_lm(args.model)),
        read=open_weights(args.model).read,
        dtype=torch.float32,
        device=CPU,
        processes=Processes.arrange(world, Layout(dp_shard=args.ranks)),
    )
    held = {
        name: (Box(start, tuple(tensor.shape)), tensor.detach())
        for name, start, tensor in trainer.parameters.shards()
    }
    whole = 4 * sum(one.numel() for one in skeleton_causal_lm(args.model).parameters())
    bucket = whole // 16
    if args.engine == "native":
        native = NativeEngine(
            skeleton_causal_lm(args.model), group=group, dtype=torch.float32, eos_token_ids=(0,)
        )
        resharded = ReshardedWeights(rank, args.ranks, CPU, bucket)
        first, again = (
            peak_bytes(partial(resharded.publish, held, native, version)) for version in (1, 2)
        )
        shards = sum(one.nbytes for one in native.model.parameters())
        peak, module, told = max(first - shards, again), 0, resharded.describe()
    else:
        words = [
            f"actor_rollout_ref.model.path={args.model}",
            "actor_rollout_ref.rollout.name=vllm",
        ]
        words += [
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={args.ranks}",
            "data.max_prompt_length=64",
        ]
        words += ["actor_rollout_ref.rollout.cache_gigabytes=0.1", "data.max_response_length=64"]
        config, tokenizer = load_config(words).config, AutoTokenizer.from_pretrained(args.model)
        vllm = VLLMEngine.from_config(
            EngineSetup(config, tokenizer, {}, CPU, torch.float32, group=group)
        )
        assert isinstance(vllm, VLLMEngine)
        copied, vllm.is_load_stable = CopiedWeights(), True
        peak = max(
            peak_bytes(partial(copied.publish, trainer.weights(), vllm, version))
            for version in (1, 2)
        )
        shards = whole // args.ranks
        module, told = vllm.rebuilt[0], f"its largest module is {vllm.rebuilt[1]}"
    both = sum(tensor.nbytes for _, tensor in held.values()) + shards
    share = (both + peak) / (both + bucket + module)
    print(
        f"rank {rank}: shards {both / MB:.1f} MB, bucket {bucket / MB:.1f}, module {module / MB:.1f}; the sync took "
        f"{peak / MB:.1f} beside the shards: {share:.3f} of all that; {told}",
        flush=True,
    )
    dist.barrier()
    sys.exit(share > 1.05)


def main() -> None:
    """Start the ranks, and wait for them."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        help="a Hugging Face folder (default: the quickstart's)",
    )
    parser.add_argument("--engine", choices=("native", "vllm"), default="native")
    parser.add_argument("--ranks", type=int, default=3, help="as many divide the model's heads")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="quadriga-benchmark-") as folder:
        mp.start_processes(sync, (args, f"{folder}/store"), args.ranks, start_method="spawn")


if __name__ == "__main__":
    main()
