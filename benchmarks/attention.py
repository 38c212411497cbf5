# SPDX-License-Identifier: Apache-2.0
"""Times packed attention, forward and backward, beside that of another checkout, and measures its memory.

    .venv/bin/python benchmarks/attention.py --before ../checkout-of-another-commit
    .venv/bin/python benchmarks/attention.py --memory 16384 32768

Query heads, key-value heads and their size are SmolLM2-135M's. Both sides compute the same tokens in one process, in
turn, the other one first in every second pair; the first pair is left out. Seconds are of the process's own processor
time, so that the rest of the machine disturbs them less; a ratio is before / after, above 1 where this checkout is
faster. Memory is the highest sum of what is allocated between the call and the end of the backward pass, inside of
kernels too, less results and gradients, over the bytes of query, key and value.
"""

import sys
import time
from argparse import ArgumentParser
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from statistics import median
from types import ModuleType

import torch
from torch.profiler import ProfilerActivity, profile

from quadriga.models import attention

HEADS, KEY_HEADS, HEAD_SIZE = 9, 3, 64
# Prompts as (tokens, responses, tokens of each).
WORK = {
    "8 responses of 512 to a prompt of 128": [(128, 8, 512)],
    "4 prompts of 200, 4 responses of 256 to each": [(200, 4, 256)] * 4,
    "16 prompts of 24, 8 responses of 16 to each": [(24, 8, 16)] * 16,
    "8 sequences of 512, nothing shared": [(512, 0, 0)] * 8,
    "64 sequences of 64, nothing shared": [(64, 0, 0)] * 64,
}


def segments_of(module: ModuleType, prompts: list[tuple[int, int, int]]) -> tuple[list, int]:
    """Segments, and the number of their tokens."""
    segments, start = [], 0
    for length, number, answer in prompts:
        prompt = module.Segment(start, length)
        starts = range(start + length, start + length + number * answer, answer) if number else ()
        segments += [prompt, *(module.Segment(at, answer, prompt) for at in starts)]
        start += length + number * answer
    return segments, start


def inputs(num_tokens: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Query, key, value, and the gradient of the result."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(1, num_tokens, heads, HEAD_SIZE) for heads in (HEADS, KEY_HEADS, KEY_HEADS, HEADS)]
    *parts, outer = (torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
    return [*(part.transpose(1, 2).requires_grad_() for part in parts), outer]


def passes(plan: attention.AttentionPlan, parts: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result and the gradients."""
    *parts, outer = parts
    result = plan.attend(0, *parts, scale=HEAD_SIZE**-0.5)
    return [result, *torch.autograd.grad(result, parts, outer)]


def compare(before: Path, pairs: int, dtype: torch.dtype) -> None:
    """Print a row for each kind of work."""
    spec = spec_from_file_location("attention_before", before / "quadriga/models/attention.py")
    assert spec is not None and spec.loader is not None
    other = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(other)
    print("| work | before, s | after, s | before / after [lowest, highest] |\n|---|---|---|---|")
    for name, prompts in WORK.items():
        parts = inputs(segments_of(attention, prompts)[1], dtype)
        plans = [
            side.PackedAttention(segments_of(side, prompts)[0], torch.device("cpu"))
            for side in (other, attention)
        ]
        seconds = []
        for number in range(pairs + 1):
            found = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                start = time.process_time()
                passes(plans[which], parts)
                found[which] = time.process_time() - start
            seconds.append(found)
        early, late = (median(column) for column in zip(*seconds[1:], strict=True))
        ratios = [one / two for one, two in seconds[1:]]
        spread = f"**{median(ratios):.2f}** [{min(ratios):.2f}, {max(ratios):.2f}]"
        print(f"| {name} | {early:.3f} | {late:.3f} | {spread} |", flush=True)


def memory(num_tokens: list[int], dtype: torch.dtype) -> None:
    """Print a row for each number of response tokens, in one response and in eight."""
    print("| response tokens | responses | MiB | of query + key + value |\n|---|---|---|---|")
    for responses in (8, 1):
        for total in num_tokens:
            segments, size = segments_of(attention, [(512, responses, total // responses)])
            parts, plan = (
                inputs(size, dtype),
                attention.PackedAttention(segments, torch.device("cpu")),
            )
            with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
                results = passes(plan, parts)
            events = [
                one for one in profiler.profiler.kineto_results.events() if one.name() == "[memory]"
            ]
            changes = torch.tensor(
                [one.nbytes() for one in sorted(events, key=lambda one: one.start_ns())]
            )
            extra = changes.cumsum(0).max().item() - sum(one.nbytes for one in results)
            given = sum(one.nbytes for one in parts[:3])
            print(
                f"| {total} | {responses} | {extra / 2**20:.1f} | **{extra / given:.3f}** |",
                flush=True,
            )


def main() -> None:
    """Measure what was asked for."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--before", type=Path, help="another checkout, to time beside this one")
    parser.add_argument("--pairs", type=int, default=8, help="that count")
    parser.add_argument(
        "--memory", type=int, nargs="+", default=[], help="response tokens whose memory to measure"
    )
    parser.add_argument("--dtype", default="float32", help="of the computation")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.before:
        compare(args.before, args.pairs, getattr(torch, args.dtype))
    memory(args.memory, getattr(torch, args.dtype))


if __name__ == "__main__":
    main()
