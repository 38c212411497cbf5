# SPDX-License-Identifier: Apache-2.0
"""Times steps of the quickstart's shape on Ray with 2 ranks, every second of them with a copy of the state before it.

    .venv/bin/python benchmarks/state_copies.py --steps 14

All in one run, so that whatever else the machine does falls on both: the copy that is made after step 2 is paid for by
step 3, and none by step 4. From the end of one step to the end of the next, so with what the driver does between them.
The first pair is left out (memory is taken for the first time).
"""

import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from statistics import median
from typing import Any

import quadriga_side
import workload
from quadriga.cli.main import main as quadriga
from quadriga.single_controller.ray.copies import StateCopies
from quadriga.trainer import build
from side import DTYPES
from step import MODEL

ends: dict[int, float] = {}
"""When each step was over, by its number."""


class EverySecond(StateCopies):
    """Copies after steps of even number."""

    def copy(self, step: int, driver: dict[str, Any]) -> None:
        ends[step] = time.perf_counter()
        if step > 1:
            print(
                f"step {step}: {ends[step] - ends[step - 1]:.2f} s, {'with' if step % 2 else 'without'} a copy",
                flush=True,
            )
        if step % 2 == 0:
            super().copy(step, driver)


def main() -> None:
    """Run, and print the pairs and the ratio."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", type=Path, default=MODEL, help="a Hugging Face folder (default: the quickstart's)")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--steps", type=int, default=14)
    args = parser.parse_args()
    args.reward = "equal"
    build.STATE_COPIES = f"{EverySecond.__module__}:{EverySecond.__name__}"
    with tempfile.TemporaryDirectory(prefix="quadriga-benchmark-") as scratch:
        args.scratch, rows = scratch, Path(scratch) / "train.parquet"
        quadriga_side.write_rows(rows, args.steps)
        on_ray = ["trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.total_epochs=1"]
        quadriga(["train", *quadriga_side.overrides(args, rows), *on_ray])
    seconds = {step: ends[step] - ends[step - 1] for step in sorted(ends)[4:]}
    pairs = [(seconds[step], seconds[step + 1]) for step in seconds if step % 2 and step + 1 in seconds]
    print(f"\n{workload.NUM_SEQUENCES} sequences of {workload.NUM_NEW_TOKENS} tokens, {args.dtype}, seconds of a step:")
    for copied, plain in pairs:
        print(f"  with a copy {copied:6.2f}   without {plain:6.2f}   ratio {copied / plain:.4f}")
    print(
        f"  medians     {median(one for one, _ in pairs):6.2f}           {median(one for _, one in pairs):6.2f}   ",
        end="",
    )
    print(f"median of ratios {median(one / other for one, other in pairs):.4f}")


if __name__ == "__main__":
    main()
