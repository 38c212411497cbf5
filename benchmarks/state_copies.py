# SPDX-License-Identifier: Apache-2.0
"""Times steps of the quickstart's shape on Ray with 2 ranks, every second of them with a copy of the state before it.

    .venv/bin/python benchmarks/state_copies.py --steps 14

All in one run, so that whatever else the machine does falls on both: the copy that is made after step 2 is paid for by
step 3, and none by step 4. From the end of one step to the end of the next, so with what the driver does between them;
by the clock, and in CPU seconds of the ranks, which others on the machine disturb less.
"""

import os
import tempfile
import time
from argparse import ArgumentParser
from pathlib import Path
from statistics import median
from typing import Any

import torch

import quadriga_side
import workload
from quadriga.cli.main import main as quadriga
from quadriga.engines.checkpoint import StateCopier
from quadriga.engines.process_group import ALONE
from quadriga.models.weight_files import open_weights
from quadriga.single_controller.ray.copies import Keeper, StateCopies
from quadriga.trainer import build
from side import DTYPES
from step import MODEL

ends: dict[int, tuple[float, float]] = {}
"""When each step was over by the clock, and by the CPU seconds of the ranks, by its number."""


class EverySecond(StateCopies):
    """Copies after steps of even number."""

    def copy(self, step: int, driver: dict[str, Any]) -> None:
        pids = [address.pid for address in self._workers["actor"].processes.addresses]
        stats = [Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids]
        ticks = sum(int(fields[11]) + int(fields[12]) for fields in stats)
        ends[step] = time.perf_counter(), ticks / os.sysconf("SC_CLK_TCK")
        if step > 1:
            what = "with a copy" if step % 2 else "without a copy"
            print(
                f"step {step}, {what}: {taken(step, 0):.2f} s, {taken(step, 1):.2f} CPU seconds",
                flush=True,
            )
        if step % 2 == 0:
            super().copy(step, driver)


def taken(step: int, clock: int) -> float:
    """Seconds of a step, by the clock (0) or of the ranks' CPUs (1)."""
    return ends[step][clock] - ends[step - 1][clock]


def cpu_seconds_of_copies(model: Path, num_copies: int = 9) -> float:
    """Median CPU seconds of a copy of all ranks' parts together, in this process; the first two take the memory."""
    kinds = ("model", "optimizer.exp_avg", "optimizer.exp_avg_sq")
    shapes = open_weights(model).shapes
    copier = StateCopier(
        {f"{kind}.{name}": torch.ones(shapes[name]) for kind in kinds for name in shapes}, ALONE
    )
    paths, refusal = (keeper := Keeper()).make({("actor", 0): 2 * copier.plan.slot_bytes[0]})
    assert not refusal, refusal
    copier.open(paths["actor", 0])
    taken_s = []
    for step in range(1, num_copies + 1):
        start = time.process_time()
        copier.start(step).result()
        taken_s.append(time.process_time() - start)
    keeper.make({})
    return median(taken_s[2:])


def main() -> None:
    """Run, and print the pairs and the ratio."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        help="a Hugging Face folder (default: the quickstart's)",
    )
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--steps", type=int, default=14)
    args = parser.parse_args()
    print(f"CPU seconds of a copy by itself: {cpu_seconds_of_copies(args.model):.3f}", flush=True)
    args.reward = "equal"
    build.STATE_COPIES = f"{EverySecond.__module__}:{EverySecond.__name__}"
    with tempfile.TemporaryDirectory(prefix="quadriga-benchmark-") as scratch:
        args.scratch, rows = scratch, Path(scratch) / "train.parquet"
        quadriga_side.write_rows(rows, args.steps)
        on_ray = ["trainer.backend=ray", "trainer.n_gpus_per_node=2", "trainer.total_epochs=1"]
        quadriga(["train", *quadriga_side.overrides(args, rows), *on_ray])
    print(
        f"\n{workload.NUM_SEQUENCES} sequences of {workload.NUM_NEW_TOKENS} tokens, {args.dtype}, first pair left out:"
    )
    pairs = [(step, step + 1) for step in range(5, len(ends), 2)]
    for clock, unit in enumerate(("seconds", "CPU seconds")):
        ratios = [taken(copied, clock) / taken(plain, clock) for copied, plain in pairs]
        middle = (
            median(taken(step, clock) for step in steps) for steps in zip(*pairs, strict=True)
        )
        print(
            f"{unit}: {' '.join(f'{one:.2f}' for one in middle)}, median of {len(ratios)} ratios {median(ratios):.4f}"
        )


if __name__ == "__main__":
    main()
