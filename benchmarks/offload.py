# SPDX-License-Identifier: Apache-2.0
"""Resident memory in generation and time of a step, with and without what rests between phases, in one run.

    .venv/bin/python benchmarks/offload.py --steps 7

The quickstart's shape in bfloat16. Two runs in processes of their own take turns, a step each while the other waits, so
that whatever else the machine does falls on both; the first step of each is left out. Memory is anonymous, file and
shared resident memory of the process, read from the kernel inside of `Generation.generate`, once the rollout is awake.
"""

import sys
import tempfile
import time
from argparse import ArgumentParser
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import quadriga_side
from quadriga.config import load_config
from quadriga.observe.timing import Timeline
from quadriga.trainer.build import build_run
from quadriga.workers import generation
from side import DTYPES
from step import MODEL

FSDP = "actor_rollout_ref.actor.fsdp_config"
OFFLOAD = [f"{FSDP}.{name}_offload=True" for name in ("param", "optimizer", "grad")]
MB = 1e6


def resident_mb() -> dict[str, float]:
    """Resident memory of this process by its kind, MB."""
    fields = (
        line.split()
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("Rss")
    )
    return {
        name.removeprefix("Rss").rstrip(":"): int(number) * 1024 / MB for name, number, _ in fields
    }


def take_steps(pipe: Connection, args: Any, extra: list[str]) -> None:
    """Build a run; for each message take a step, and answer with its seconds, memory in generation, and numbers."""
    seen: list[dict[str, float]] = []
    original = generation.generate_sequences

    def generate(*given: Any, **named: Any) -> Any:
        seen.append(resident_mb())
        return original(*given, **named)

    generation.generate_sequences = generate
    rows = Path(args.scratch) / "train.parquet"
    quadriga_side.write_rows(rows, args.steps)
    run = build_run(load_config([*quadriga_side.overrides(args, rows), *extra]).config, Timeline())
    pipe.send("ready")
    while pipe.recv():
        start = time.perf_counter()
        run.trainer.train_step()
        seconds, metrics = time.perf_counter() - start, run.trainer.metrics
        numbers = {
            name: one for name, one in metrics.items() if not name.startswith(("timing", "perf"))
        }
        pipe.send((seconds, seen[-1], numbers))
    run.close()


def main() -> None:
    """Run, and print the memory of both, what should have left, and the ratio of the times."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        help="a Hugging Face folder (default: the quickstart's)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument(
        "--num-weights", type=float, default=134.515008e6, help="trained weights of the model"
    )
    args = parser.parse_args()
    context, told = get_context("spawn"), ([], [])
    with tempfile.TemporaryDirectory(prefix="quadriga-benchmark-") as scratch:
        sides = []
        for number, extra in enumerate(([], OFFLOAD)):
            own = Path(scratch) / str(number)
            own.mkdir()
            pipe, other = context.Pipe()
            given = SimpleNamespace(**vars(args), scratch=str(own), reward="equal")
            process = context.Process(target=take_steps, args=(other, given, extra), daemon=True)
            process.start()
            other.close()  # so that the end of the process is heard
            sides.append((pipe, process))
            assert pipe.recv() == "ready"
        for step in range(args.steps):
            for (pipe, _), of_side in zip(sides, told, strict=True):
                pipe.send(True)
                of_side.append(pipe.recv())
            (plain_s, plain, numbers), (resting_s, resting, others) = told[0][-1], told[1][-1]
            print(
                f"step {step + 1}: {plain_s:.2f} s, {resting_s:.2f} s; numbers equal: {numbers == others}"
            )
            print(f"  MB without: {plain}\n  MB with:    {resting}", flush=True)
        for pipe, process in sides:
            pipe.send(False)
            process.join()
    # Moments, and in bfloat16 the masters: generation computes with the weights that are left.
    should = (12 if args.dtype == "bfloat16" else 8) * args.num_weights / MB
    fell = sum(told[0][-1][1].values()) - sum(told[1][-1][1].values())
    ratios = [
        with_[0] / without[0] for without, with_ in zip(*(side[1:] for side in told), strict=True)
    ]
    print(
        f"resident in generation: {fell:.0f} MB less, {fell / should:.3f} of the {should:.0f} MB that rest"
    )
    print(
        f"step: {median(ratios):.3f} times as long, median of {len(ratios)}: {min(ratios):.3f} to {max(ratios):.3f}"
    )
    sys.exit(not all(one[2] == other[2] for one, other in zip(*told, strict=True)))


if __name__ == "__main__":
    main()
