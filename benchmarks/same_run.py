# SPDX-License-Identifier: Apache-2.0
"""Runs the quickstart's training in one process and on Ray, one after the other, and compares all metrics of all steps.

    .venv/bin/python benchmarks/same_run.py --steps 3          # after scripts/quickstart, which makes model and data

Three runs, each from the start:

    alone        in one process
    ray, 1       on Ray with one worker: equal to `alone` bit for bit
    ray, 2       on Ray with two data-parallel workers that share the weights: equal to 1e-4 relative, so --dtype is
                 float32 by default

Every process computes with --threads threads. How a matrix product is split over threads shows in the last bits of the
logits, and with them a draw may change, now and then.

Left out are the clock and the machine's load (timing_s/, timing_per_token_ms/, perf/). With two workers also what says
how rows were spread over them (balance/, packed_tokens), and what measures rounding itself (the differences of
log-probs between rollout and trainer). A metric near zero is compared with the largest value that it takes in the run.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

AGREEMENT = 1e-4
CLOCK = ("timing_s/", "timing_per_token_ms/", "perf/")
LAYOUT = ("balance/", "actor/packed_tokens", "rollout/log_prob_diff", "rollout/prob_diff")
RUNS = {"alone": [], "ray, 1": ["--ray"], "ray, 2": ["--ray", "trainer.n_gpus_per_node=2"]}

Steps = list[dict[str, float]]


def run(name: str, directory: Path, args: Namespace) -> tuple[Steps, float]:
    """Metrics of each step of a run, and the seconds that it took in all."""
    command = [
        *(
            sys.executable,
            "-m",
            "quadriga.cli.main",
            "train",
            "--config",
            "configs/quickstart.yaml",
            *RUNS[name],
        ),
        f"trainer.total_training_steps={args.steps}",
        "trainer.val_before_train=false",
        "trainer.test_freq=-1",
        "trainer.save_freq=-1",
        "trainer.logger=[jsonl]",
        f"trainer.default_local_dir={directory}",
        f"actor_rollout_ref.actor.fsdp_config.model_dtype={args.dtype}",
        *args.overrides,
    ]
    start = time.perf_counter()
    subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": str(args.threads)})
    seconds = time.perf_counter() - start
    lines = (directory / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines], seconds


def largest_difference(alone: Steps, other: Steps, left_out: tuple[str, ...]) -> tuple[float, str]:
    """The largest relative difference of a metric that both runs tell, and which it is; infinite if steps differ."""
    if len(alone) != len(other):
        return float("inf"), f"{len(other)} steps instead of {len(alone)}"
    names = {name for step in alone for name in step if not name.startswith(left_out)}
    worst = (0.0, "no metric differs")
    for name in sorted(names):
        scale = max(abs(step.get(name, 0.0)) for step in alone) or 1.0
        for number, (ours, theirs) in enumerate(zip(alone, other, strict=True), start=1):
            if ours.get(name) != theirs.get(name):
                difference = (
                    abs(ours.get(name, float("inf")) - theirs.get(name, float("inf"))) / scale
                )
                worst = max(worst, (difference, f"{name} of step {number}"))
    return worst


def main() -> int:
    """Run, compare, and print a table; the status is 1 if the runs do not agree."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=3, help="training steps of each run")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--dtype", default="float32", help="of the compute weights")
    parser.add_argument("overrides", nargs="*", help="configuration keys for all runs")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-run-") as folder:
        results = {
            name: run(name, Path(folder) / str(number), args) for number, name in enumerate(RUNS)
        }
    alone, seconds_alone = results["alone"]
    print(
        f"\n{args.steps} steps, {args.dtype}\n\n| run | s | largest relative difference | of | |\n|---|---|---|---|---|"
    )
    print(f"| alone | {seconds_alone:.0f} | | | |")
    has_failed = False
    for name, limit, left_out in (("ray, 1", 0.0, CLOCK), ("ray, 2", AGREEMENT, CLOCK + LAYOUT)):
        steps, seconds = results[name]
        difference, where = largest_difference(alone, steps, left_out)
        has_failed |= difference > limit
        goal = "bit for bit" if limit == 0 else f"{limit:g}"
        verdict = "within" if difference <= limit else "ABOVE"
        print(f"| {name} | {seconds:.0f} | {difference:.2g} | {where} | {verdict} {goal} |")
    return int(has_failed)


if __name__ == "__main__":
    sys.exit(main())
