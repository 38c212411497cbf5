# SPDX-License-Identifier: Apache-2.0
"""Times one GRPO step of the quickstart's shape in Quadriga and in TRL, side by side, in one run.

    .venv/bin/python benchmarks/step.py --install      # once: TRL's own environment, .venv-trl
    .venv/bin/python benchmarks/step.py                # the table; every sequence has a gradient
    .venv/bin/python benchmarks/step.py --reward task  # the same with the quickstart's own reward
    python3 benchmarks/step.py --model FOLDER --trl-python python3 --new-tokens 256 --packed-tokens 8192  # on a GPU

Each side is a process of its own that computes one step when it is asked and sleeps otherwise (side.py). The sides
take turns, so that whatever else the machine does falls on both; the first step of each is left out (it allocates).
Both draw 16 prompts x 8 samples x exactly 16 tokens, so tokens per second compare. The table gives medians; `others`
is how many cores other processes used meanwhile, and a run in which it is not near zero is not worth quoting.
"""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import workload
from side import DTYPES

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
MODEL = REPOSITORY / "outputs" / "models" / "smollm2-135m-instruct"
TRL_PYTHON = REPOSITORY / ".venv-trl" / "bin" / "python"
TRL_PACKAGES = ("trl==1.16.0", "transformers<5.20")


@dataclass
class Side:
    """A process that computes steps on demand, and what it has answered."""

    name: str
    process: subprocess.Popen[str]
    log: Path
    facts: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)

    def receive(self, event: str) -> dict[str, Any]:
        """The next answer of that kind; what is not JSON was printed by a library while it loaded."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            answer = json.loads(line) if line.startswith("{") else {}
            if answer.get("event") == event:
                return answer
        tail = "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-15:])
        raise SystemExit(
            f"{tail}\n\nbenchmark: {self.name} ended with status {self.process.wait()} before it answered."
        )

    def order(self, what: str) -> None:
        """Send an order."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": what}) + "\n")
        self.process.stdin.flush()

    def step(self) -> dict[str, Any]:
        """Ask for a step, wait for it, and note how busy the rest of the machine was."""
        busy, start = _busy_seconds(), time.perf_counter()
        self.order("step")
        answer = self.receive("step")
        others = (_busy_seconds() - busy - answer["cpu_s"]) / (time.perf_counter() - start)
        self.steps.append({**answer, "others": max(0.0, others)})
        return self.steps[-1]

    def close(self) -> None:
        """End the process: it leaves by itself when its orders end."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        try:
            self.process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def typical(self, key: str) -> float:
        """The median over the steps after the first."""
        return median(step[key] for step in self.steps[1:])


def _busy_seconds() -> float:
    """Processor seconds that all processes of this machine have used."""
    first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    user, nice, system, _idle, _wait, irq, soft_irq = (int(field) for field in first.split()[1:8])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


def install() -> None:
    """Make TRL's environment: the torch that constraints.txt names first, so that a local CPU build is taken."""
    folder = TRL_PYTHON.parents[1]
    torch = re.search(
        r"^torch==\S+", (REPOSITORY / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert torch is not None
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    for packages in ([torch.group()], TRL_PACKAGES):
        print("installing", *packages, "into", folder, flush=True)
        subprocess.run([TRL_PYTHON, "-m", "pip", "install", "--quiet", *packages], check=True)


def start(name: str, command: list[str], dtype: str, args: Namespace, scratch: Path) -> Side:
    """Start a side and wait until it is ready."""
    log = scratch / f"{name}-{dtype}.log"
    folder = scratch / f"{name}-{dtype}"
    folder.mkdir()
    options = {
        "model": args.model,
        "dtype": dtype,
        "reward": args.reward,
        "steps": args.steps,
        "scratch": folder,
    }
    options["new-tokens"] = args.new_tokens
    words = [word for key, value in options.items() for word in (f"--{key}", str(value))]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w", encoding="utf-8") as errors:
        process = subprocess.Popen(
            [*command, *words],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        )
    side = Side(name, process, log)
    side.facts = side.receive("ready")
    facts = {key: value for key, value in side.facts.items() if key != "event"}
    print(f"  {name} is ready: {json.dumps(facts)}", flush=True)
    return side


def measure(dtype: str, args: Namespace, scratch: Path) -> list[Side]:
    """Both sides in one dtype, taking turns."""
    quadriga = [
        sys.executable,
        str(HERE / "quadriga_side.py"),
        f"--packed-tokens={args.packed_tokens}",
    ]
    trl = [str(args.trl_python), str(HERE / "trl_side.py"), f"--micro-batch={args.trl_micro_batch}"]
    trl += ["--bf16-weights"] if args.trl_bf16_weights else []
    commands = {"quadriga": quadriga, "trl": trl}
    print(f"{dtype}: starting {' and '.join(args.sides)}", flush=True)
    sides: list[Side] = []
    try:
        sides += [start(name, commands[name], dtype, args, scratch) for name in args.sides]
        for number in range(args.steps):
            for side in sides:
                step = side.step()
                check_tokens(side, step, args.new_tokens)
                print(
                    f"  step {number} {side.name:8} {in_words(step)}{' (left out)' if not number else ''}",
                    flush=True,
                )
    finally:
        for side in sides:
            side.close()
    return sides


def check_tokens(side: Side, step: dict[str, Any], new_tokens: int) -> None:
    """Tokens per second compare only over equal numbers of tokens."""
    expected = workload.NUM_SEQUENCES * new_tokens
    if step["response_tokens"] != expected:
        raise SystemExit(
            f"benchmark: {side.name} drew {step['response_tokens']} tokens, expected {expected}."
        )


def in_words(step: dict[str, Any]) -> str:
    """A step on one line."""
    times = f"generation {step['gen_s']:6.2f} s, training {step['train_s']:6.2f} s, total {step['total_s']:6.2f} s"
    return f"{times}, reward {step['reward']:.3f}, others {step['others']:.2f} cores"


def table(dtype: str, sides: list[Side], new_tokens: int) -> list[str]:
    """The rows of one dtype: medians, and how many times the last side's tokens per second."""
    tokens = workload.NUM_SEQUENCES * new_tokens
    base = {key: sides[-1].typical(key) for key in ("gen_s", "train_s", "total_s")}
    rows = []
    for side in sides:
        numbers = {key: side.typical(key) for key in base}
        totals = [step["total_s"] for step in side.steps[1:]]
        cells = [
            dtype,
            side.facts["package"],
            *(
                f"{numbers[key]:.2f} ({base[key] / numbers[key]:.1f}x)"
                for key in ("gen_s", "train_s")
            ),
            f"{numbers['total_s']:.2f} [{min(totals):.2f}, {max(totals):.2f}]",
            f"{tokens / numbers['total_s']:.1f}",
            f"**{base['total_s'] / numbers['total_s']:.2f}x**",
            f"{side.typical('others'):.2f}",
        ]
        rows.append(f"| {' | '.join(cells)} |")
    return rows


def machine() -> str:
    """The processor, its cores and the memory, and the accelerator."""
    facts = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    model = re.search(r"model name\s*: (.*)", facts)
    gibibytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    flags = [
        flag for flag in ("avx512f", "avx512_bf16", "amx_bf16") if re.search(rf"\b{flag}\b", facts)
    ]
    name = model.group(1) if model else platform.processor()
    asked = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
    cards = (
        subprocess.run(asked, capture_output=True, text=True).stdout.split("\n")
        if shutil.which(asked[0])
        else []
    )
    cores = f"{name} ({', '.join(flags) or 'no wide vectors'}), {os.cpu_count()} cores, {gibibytes:.0f} GiB"
    return "; ".join([cores, *filter(None, cards)])


def load_average() -> str:
    """Of the last minute, five and fifteen."""
    return " ".join(f"{value:.2f}" for value in os.getloadavg())


def read_arguments() -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--install", action="store_true", help="make TRL's environment and end")
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        help="a Hugging Face folder (default: the quickstart's)",
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--reward", choices=sorted(workload.SCORES), default="equal")
    parser.add_argument(
        "--steps", type=int, default=5, help="of each side, the first of which is left out"
    )
    parser.add_argument(
        "--new-tokens", type=int, default=workload.NUM_NEW_TOKENS, help="of each completion"
    )
    parser.add_argument(
        "--packed-tokens", type=int, default=384, help="of a micro-batch of Quadriga's"
    )
    parser.add_argument(
        "--sides", nargs="+", choices=("quadriga", "trl"), default=["quadriga", "trl"]
    )
    parser.add_argument("--trl-python", type=Path, default=TRL_PYTHON)
    parser.add_argument(
        "--trl-micro-batch",
        type=int,
        default=64,
        help="sequences; the larger the faster, up to memory",
    )
    parser.add_argument(
        "--trl-bf16-weights",
        action="store_true",
        help="TRL with all weights in bfloat16, not autocast",
    )
    parser.add_argument("--json", type=Path, help="also write every step's numbers here")
    args = parser.parse_args()
    if args.steps < 2:
        parser.error("--steps must be at least 2: the first step of each side is left out")
    if not args.install and not args.model.is_dir():
        parser.error(
            f"no model at {args.model}: run scripts/quickstart once, or name one with --model"
        )
    if not args.install and "trl" in args.sides and not args.trl_python.exists():
        parser.error(f"no TRL at {args.trl_python}: run this with --install once")
    return args


def main() -> None:
    """Measure, and print one table."""
    args = read_arguments()
    if args.install:
        install()
        return
    print(f"{machine()}\nload average before: {load_average()}", flush=True)
    rows, record = [], {}
    with tempfile.TemporaryDirectory(prefix="quadriga-benchmark-") as scratch:
        for dtype in args.dtype:
            sides = measure(dtype, args, Path(scratch))
            rows += table(dtype, sides, args.new_tokens)
            record[dtype] = [
                {"side": side.name, "facts": side.facts, "steps": side.steps} for side in sides
            ]
    shape = f"{workload.NUM_PROMPTS} prompts x {workload.NUM_SAMPLES} samples x {args.new_tokens} new tokens"
    print(
        f"\n{shape}, reward `{args.reward}`, median of {args.steps - 1} steps; {machine()}; ",
        end="",
    )
    print(f"load average after: {load_average()}\n")
    print(
        "| dtype | | generation s | training s | step s [min, max] | tokens/s | tokens/s, ratio | others, cores |"
    )
    print("|---|---|---|---|---|---|---|---|")
    print("\n".join(rows))
    if args.json:
        args.json.write_text(json.dumps(record, indent=1), encoding="utf-8")


if __name__ == "__main__":
    main()
