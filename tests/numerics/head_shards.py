# SPDX-License-Identifier: Apache-2.0
"""A rank of three that hold parts of one vocabulary, for test_head_shards.py; the first two meet alone too.

Every rank also computes the whole head, and writes how much that differs to a file.
"""

import sys
from datetime import timedelta
from itertools import product
from pathlib import Path

import torch
import torch.distributed as dist

from quadriga.models.heads import VocabularyShard, token_scores
from tests.limits import PEER_S

TOKENS, ROWS, HIDDEN, TOP, TARGETS = 23, 61, 16, 5, 3
# Rows of each rank: uneven, a rank without any, and ranks with fewer rows than the likeliest tokens asked for.
SPLITS = ((31, 30), (61, 0), (2, 59), (21, 20, 20), (0, 58, 3), (30, 0, 31))


def scores(hidden, weight, bias, targets, outer, **options) -> dict[str, torch.Tensor]:
    """All outputs, and the gradients of states, weight and bias."""
    leaves = [part.detach().clone().requires_grad_() for part in (hidden, weight, bias)]
    wanted = {"with_entropy": True, "with_sum_pi_squared": True, "top_k": TOP}
    found = token_scores(*leaves, targets, chunk_tokens=7, **wanted, **options)
    ((found.log_probs * outer[1:]).sum() + found.entropy @ outer[0, :, 0]).backward()
    tensors = dict(vars(found)) | dict(
        zip(("hidden", "weight", "bias"), (leaf.grad for leaf in leaves), strict=True)
    )
    return {name: tensor.detach() for name, tensor in tensors.items()}


def difference(found: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference relative to the largest number."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if not found.numel():
        return 0.0
    return ((found.double() - expected.double()).abs().max() / expected.double().abs().max()).item()


def compare(
    group: dist.ProcessGroup, sizes: tuple[int, ...], temperature: float, dtype: torch.dtype
):
    """Differences by name; those of outputs between ranks are under "ranks"."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(size, HIDDEN, generator=generator) for size in (TOKENS, ROWS))
    weight /= (
        HIDDEN**0.5
    )  # logits near 1: those of 30 are rounded by 1e-6 themselves, and so are their probabilities
    bias, outer = (
        torch.randn(ROWS, generator=generator),
        torch.randn(2, TOKENS, TARGETS, generator=generator),
    )
    targets = torch.randint(0, ROWS, (TOKENS, TARGETS), generator=generator)
    hidden, weight, bias = (part.to(dtype) for part in (hidden, weight, bias))
    start = sum(sizes[: group.rank()])
    mine = slice(start, start + sizes[group.rank()])
    options = {"temperature": temperature}
    alone = scores(hidden, weight, bias, targets, outer, **options)
    shard = VocabularyShard(group, start)
    found = scores(hidden, weight[mine], bias[mine], targets, outer, shard=shard, **options)
    everyone: list[dict[str, torch.Tensor]] = [{} for _ in sizes]
    dist.all_gather_object(everyone, found, group=group)
    outputs = ("log_probs", "entropy", "sum_pi_squared", "top_log_probs", "top_ids")
    differences = {name: difference(found[name], alone[name]) for name in outputs}
    differences["ranks"] = float(
        any(not torch.equal(one[name], found[name]) for one in everyone for name in outputs)
    )
    total = sum(one["hidden"].float() for one in everyone)
    differences["hidden"] = difference(total, alone["hidden"].float())
    # A rank may hold rows with no gradient to speak of: what counts is the largest of the whole vocabulary.
    for name in ("weight", "bias"):
        whole = torch.cat([one[name] for one in everyone])
        differences[name] = difference(whole, alone[name])
    return differences


def main(rank: int, folder: Path) -> None:
    """Every case, in one meeting."""
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder / 'store'}",
        rank=rank,
        world_size=3,
        timeout=timedelta(seconds=PEER_S),
    )
    groups = {3: dist.group.WORLD, 2: dist.new_group([0, 1])}
    results = {}
    for sizes, temperature, dtype in product(SPLITS, (1.0, 0.7), (torch.float32, torch.bfloat16)):
        if rank < len(sizes):
            results[sizes, temperature, str(dtype)] = compare(
                groups[len(sizes)], sizes, temperature, dtype
            )
    shard = VocabularyShard(dist.group.WORLD, 4 * rank)
    weight = torch.ones(4, 2)
    few = token_scores(torch.ones(2, 2), weight, None, torch.tensor([3, 12]), top_k=14, shard=shard)
    wanted = {"with_entropy": True, "with_sum_pi_squared": True, "top_k": 2}
    none = token_scores(
        torch.ones(0, 2), weight, None, torch.zeros(0).long(), shard=shard, **wanted
    )
    torch.save((results, few, none), folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(int(sys.argv[1]), Path(sys.argv[2]))
