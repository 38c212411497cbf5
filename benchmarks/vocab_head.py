# SPDX-License-Identifier: Apache-2.0
"""Times log-probs and entropies of 4096 tokens over a vocabulary of 49152, forward and backward, against all logits.

    .venv/bin/python benchmarks/vocab_head.py                 # the head of SmolLM2-135M, bfloat16 and float32
    .venv/bin/python benchmarks/vocab_head.py --dtype float32 --threads 2

Ways, which take turns in one process; the first turn of each is left out (it allocates):

    chunked   quadriga.models.heads.token_scores
    naive     the model's own projection, all logits in float32, log_softmax, gather, entropy, autograd

Both end with the gradients of the hidden states and of the weight, from random weights of each log-prob and each
entropy. Before anything is timed, their results are compared. On a CPU, memory is the process's resident set: its
highest value during the turn (VmHWM, reset through /proc/self/clear_refs) less the value before it, so inputs do not
count and gradients do. On a GPU it is the same difference of the allocator's bytes. `cpu` is the ratio of processor
seconds, which other processes disturb less than the clock.
"""

import ctypes
import gc
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch

from quadriga.models.heads import CHUNK_TOKENS, token_scores

DTYPES = ("bfloat16", "float32")
Scores = tuple[torch.Tensor, torch.Tensor]


@dataclass
class Problem:
    """A head and its tokens.

    Attributes:
        hidden: [M, D]
        weight: [V, D]
        targets: [M]
        outer: [2, M] weights of log-probs and entropies in the loss.
    """

    hidden: torch.Tensor
    weight: torch.Tensor
    targets: torch.Tensor
    outer: torch.Tensor

    @classmethod
    def make(cls, args: Namespace, dtype: torch.dtype) -> "Problem":
        """Logits with a standard deviation of about 3: as confident as a small model."""
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(args.tokens, args.hidden, generator=generator)
        weight = torch.randn(args.vocabulary, args.hidden, generator=generator) * (
            3 / args.hidden**0.5
        )
        targets = torch.randint(0, args.vocabulary, (args.tokens,), generator=generator)
        outer = torch.randn(2, args.tokens, generator=generator)
        hidden, weight = (part.to(args.device, dtype).requires_grad_() for part in (hidden, weight))
        return cls(hidden, weight, targets.to(args.device), outer.to(args.device))


def chunked(problem: Problem, args: Namespace) -> Scores:
    """By the head under test."""
    scores = token_scores(
        problem.hidden,
        problem.weight,
        None,
        problem.targets,
        with_entropy=True,
        chunk_tokens=args.chunk,
    )
    assert scores.entropy is not None
    return scores.log_probs, scores.entropy


def naive(problem: Problem, args: Namespace) -> Scores:
    """By all logits."""
    log_probs = (problem.hidden @ problem.weight.t()).float().log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    return log_probs.gather(-1, problem.targets[:, None])[:, 0], entropy


def resident_bytes(field_name: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"benchmark: /proc/self/status has no {field_name}: this needs Linux.")


def start_of_memory(device: str) -> int:
    """Forget the peak so far; the bytes held."""
    gc.collect()
    if device == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    return resident_bytes("VmRSS")


@dataclass
class Way:
    """One way, and what its turns took.

    Attributes:
        run: the forward pass.
        forward_s, backward_s, cpu_s, peak_bytes: of each turn.
    """

    name: str
    run: Callable[[Problem, Namespace], Scores]
    forward_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    peak_bytes: list[int] = field(default_factory=list)

    def take_turn(self, problem: Problem, args: Namespace) -> list[torch.Tensor]:
        """Log-probs, entropies and the two gradients."""
        problem.hidden.grad = problem.weight.grad = None
        before = start_of_memory(args.device)
        cpu, start = time.process_time(), time.perf_counter()
        log_probs, entropy = self.run(problem, args)
        _wait(args.device)
        middle = time.perf_counter()
        (log_probs @ problem.outer[0] + entropy @ problem.outer[1]).backward()
        _wait(args.device)
        end = time.perf_counter()
        peak = (
            torch.cuda.max_memory_allocated() if args.device == "cuda" else resident_bytes("VmHWM")
        )
        self.peak_bytes.append(peak - before)
        self.cpu_s.append(time.process_time() - cpu)
        self.forward_s.append(middle - start)
        self.backward_s.append(end - middle)
        return [log_probs.detach(), entropy.detach(), problem.hidden.grad, problem.weight.grad]

    def seconds(self) -> list[float]:
        """Of the turns after the first, forward and backward together."""
        return [sum(turn) for turn in zip(self.forward_s[1:], self.backward_s[1:], strict=True)]

    def peak_mib(self) -> float:
        """The highest of the turns after the first."""
        return max(self.peak_bytes[1:]) / 2**20


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def check_agreement(
    found: list[torch.Tensor], expected: list[torch.Tensor], dtype: torch.dtype
) -> str:
    """The largest differences, relative to the largest number; ends the run where they are not the same function."""
    bound = 1e-3 if dtype == torch.float32 else 3e-2
    names = ("log-probs", "entropies", "gradient of hidden", "gradient of weight")
    words = []
    for name, ours, theirs in zip(names, found, expected, strict=True):
        error = ((ours.float() - theirs.float()).abs().max() / theirs.float().abs().max()).item()
        words.append(f"{name} {error:.1e}")
        if not error < bound:
            raise SystemExit(
                f"benchmark: {name} differ by {error:.1e} of the largest, expected less than {bound:.0e}."
            )
    return ", ".join(words)


def measure(name: str, args: Namespace) -> list[Way]:
    """Both ways in one dtype, taking turns."""
    dtype = getattr(torch, name)
    problem = Problem.make(args, dtype)
    ways = [Way("chunked", chunked), Way("naive", naive)]
    for number in range(args.rounds):
        results = [way.take_turn(problem, args) for way in ways] if not number else None
        if results is not None:
            print(
                f"{name}: differences of chunked to naive: {check_agreement(*results, dtype)}",
                flush=True,
            )
            continue
        for way in ways:
            way.take_turn(problem, args)
        words = ", ".join(
            f"{way.name} {way.forward_s[-1]:.3f} + {way.backward_s[-1]:.3f} s, {way.peak_bytes[-1] / 2**20:.0f} MiB"
            for way in ways
        )
        print(f"  round {number}: {words}", flush=True)
    return ways


def rows(name: str, ways: list[Way]) -> list[str]:
    """The table's rows of one dtype; time and memory are medians and maxima, ratios are those to the naive way."""
    lines = []
    for way in ways:
        seconds, base = way.seconds(), ways[-1].seconds()
        ratio = median(ours / theirs for ours, theirs in zip(seconds, base, strict=True))
        cpu = median(
            ours / theirs for ours, theirs in zip(way.cpu_s[1:], ways[-1].cpu_s[1:], strict=True)
        )
        typical = f"{median(way.forward_s[1:]):.2f} + {median(way.backward_s[1:]):.2f}"
        cells = [
            name,
            way.name,
            f"{typical} [{min(seconds):.2f}, {max(seconds):.2f}]",
            f"{ratio:.2f}",
            f"{cpu:.2f}",
            f"{way.peak_mib():.0f}",
            f"1/{ways[-1].peak_mib() / way.peak_mib():.1f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def read_arguments() -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--vocabulary", type=int, default=49152)
    parser.add_argument("--hidden", type=int, default=576)
    parser.add_argument(
        "--chunk", type=int, default=CHUNK_TOKENS, help="tokens whose logits exist at a time"
    )
    parser.add_argument("--dtype", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu"
    )
    parser.add_argument("--rounds", type=int, default=6, help="the first is left out")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2: the first is left out")
    return args


def main() -> None:
    """Measure, and print one table."""
    args = read_arguments()
    torch.set_num_threads(args.threads)
    tables = {name: measure(name, args) for name in args.dtype}
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{args.threads} threads"
    print(
        f"\n{args.tokens} tokens x vocabulary {args.vocabulary} x hidden size {args.hidden}, {where}, ",
        end="",
    )
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}\n")
    print(
        "| dtype | way | s, forward + backward [min, max of the sum] | time | cpu | peak MiB | memory |"
    )
    print("|---|---|---|---|---|---|---|")
    for name, ways in tables.items():
        print("\n".join(rows(name, ways)))
    print(
        "\nWanted of chunked: at most 1/8 of the naive way's memory, and a time of at most 1.00 of it."
    )


if __name__ == "__main__":
    main()
