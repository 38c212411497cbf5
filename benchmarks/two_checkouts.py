# SPDX-License-Identifier: Apache-2.0
"""Times the same work in two checkouts, in turn, in one run: how much slower or faster a change made it.

    .venv/bin/python benchmarks/two_checkouts.py step --before ../checkout-of-another-commit      # 8 pairs
    .venv/bin/python benchmarks/two_checkouts.py rollout train code quick --before ../other --pairs 9

    step      a GRPO step of the quickstart's shape (quadriga_side.py)
    rollout   the engine `native`, responses of many lengths (rollout.py)
    train     forward and backward passes of an update, 2 prompts x 8 (train_engine.py, path `shared`)
    code      60 programs graded (code_grader.py)
    quick     1,024 short answers graded (the same, --quick)

Each pair is one measurement of either checkout, the other one first in every second pair; the first pair is left out.
Printed: medians in seconds, and the median, lowest and highest ratio of a pair, after over before. Run it on an idle
machine. Both run in the environment of this Python; the model is the quickstart's.
"""

import json
import os
import re
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from pathlib import Path
from statistics import median

REPOSITORY = Path(__file__).resolve().parents[1]
MODEL = REPOSITORY / "outputs" / "models" / "smollm2-135m-instruct"
Measure = Callable[[], float]


class Side:
    """A benchmark's process in a checkout that answers orders, lines of JSON, with lines of JSON."""

    def __init__(self, checkout: Path, words: list[str]) -> None:
        command = [sys.executable, f"{checkout}/benchmarks/{words[0]}", *words[1:]]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
        self.process = subprocess.Popen(
            command, text=True, env=environment(checkout), cwd=checkout, **pipes
        )
        self.answer()

    def answer(self) -> dict[str, float]:
        """The next line that is JSON."""
        for line in self.process.stdout or ():
            if line.startswith("{"):
                return json.loads(line)
        raise SystemExit(
            f"two_checkouts: {self.process.args} ended with status {self.process.wait()}"
        )

    def ask(self, **order: object) -> dict[str, float]:
        """An order and its answer."""
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return self.answer()


def environment(checkout: Path) -> dict[str, str]:
    """The variables of a process that imports the checkout's package."""
    return os.environ | {
        "PYTHONPATH": str(checkout),
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }


def step(checkout: Path, args: Namespace) -> Measure:
    """Seconds of a training step."""
    scratch = tempfile.mkdtemp(prefix="two-checkouts-")
    words = ["--model", str(args.model), "--scratch", scratch, "--steps", str(args.pairs + 1)]
    side = Side(checkout, ["quadriga_side.py", *words, "--dtype", args.dtype, "--reward", "equal"])
    return lambda: side.ask(do="step")["total_s"]


def rollout(checkout: Path, args: Namespace) -> Measure:
    """Seconds of generating responses to 128 prompts; the same lengths and seeds in both checkouts."""
    side = Side(
        checkout,
        ["rollout.py", "--side", "native", "--model", str(args.model), "--dtype", args.dtype],
    )
    seeds = iter(range(args.pairs + 1))
    return lambda: side.ask(do="generate", seed=next(seeds))["seconds"]


def train(checkout: Path, args: Namespace) -> Measure:
    """Seconds of the passes of one update, in a process of its own each time."""
    words = ["--child=shared", f"--model={args.model}", "--prompts=2", f"--dtype={args.dtype}"]
    return lambda: json.loads(once(checkout, ["train_engine.py", *words]).splitlines()[-1])[
        "seconds"
    ]


def code(checkout: Path, args: Namespace) -> Measure:
    """Seconds of grading programs."""
    return lambda: graded(checkout, "--problems=60")


def quick(checkout: Path, args: Namespace) -> Measure:
    """Seconds of grading short answers."""
    return lambda: graded(checkout, "--quick=1024")


def graded(checkout: Path, words: str) -> float:
    """The seconds that code_grader.py prints; this checkout's file, with the other one's package."""
    command = [sys.executable, f"{REPOSITORY}/benchmarks/code_grader.py", words]
    printed = subprocess.run(
        command, check=True, text=True, stdout=subprocess.PIPE, env=environment(checkout)
    ).stdout
    return float(re.findall(r"\(([\d.]+) s\)", printed)[-1])


def once(checkout: Path, words: list[str]) -> str:
    """What a benchmark prints."""
    command = [sys.executable, f"{checkout}/benchmarks/{words[0]}", *words[1:]]
    return subprocess.run(
        command,
        check=True,
        text=True,
        stdout=subprocess.PIPE,
        env=environment(checkout),
        cwd=checkout,
    ).stdout


WORK = {"step": step, "rollout": rollout, "train": train, "code": code, "quick": quick}


def main() -> None:
    """Measure, and print a row for each kind of work."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("work", nargs="+", choices=WORK)
    parser.add_argument("--before", type=Path, required=True, help="another checkout")
    parser.add_argument("--pairs", type=int, default=8, help="that count")
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        help="a Hugging Face folder (default: the quickstart's)",
    )
    parser.add_argument("--dtype", default="bfloat16", help="of the computation")
    args = parser.parse_args()
    args.model = args.model.absolute()
    print(
        "| work | pairs | before, s | after, s | after / before [lowest, highest] |\n|---|---|---|---|---|"
    )
    for name in args.work:
        measures = [WORK[name](checkout, args) for checkout in (args.before.absolute(), REPOSITORY)]
        pairs = []
        for number in range(args.pairs + 1):
            found = [0.0, 0.0]
            for which in (0, 1) if number % 2 else (1, 0):
                found[which] = measures[which]()
            pairs.append(found)
        before, after = (median(column) for column in zip(*pairs[1:], strict=True))
        ratios = [late / early for early, late in pairs[1:]]
        spread = f"**{median(ratios):.3f}** [{min(ratios):.3f}, {max(ratios):.3f}]"
        print(f"| {name} | {args.pairs} | {before:.2f} | {after:.2f} | {spread} |", flush=True)


if __name__ == "__main__":
    main()
