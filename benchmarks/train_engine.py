# SPDX-License-Identifier: Apache-2.0
"""Times the forward and backward passes of one policy update: ours, and those of transformers on padded rows.

    .venv/bin/python benchmarks/train_engine.py                          # after scripts/quickstart has made the model
    .venv/bin/python benchmarks/train_engine.py --prompts 2 --rounds 1   # smaller

The batch: prompts of 256 to 512 tokens with 8 responses each, whose lengths are log-normal (mean 200, up to 1024);
every sequence has a gradient; the tokens are the text of docs/. Both sides pass 8 sequences at a time, the responses
to one prompt. Paths:

    shared      our engine: packed, fused vocabulary head, a prompt computed once for its responses
    alone       the same, each sequence computing its prompt
    padded      AutoModelForCausalLM with sdpa attention, padded to the longest sequence of the eight; logits of all
                positions, log-softmax in float32
    responses   the same, logits of the response positions only (`logits_to_keep`)

Ours computes entropies too, as each update does; transformers' side does not. All have bfloat16 weights; ours adds
gradients up in float32. Neither recomputes activations, and the optimizer's step is not timed.

Each path is a process of its own, and the processes run one after the other, in another order in each round. A process
passes eight sequences that do not count, which allocates, and then the whole batch. Memory is the highest resident set
less what it was once the model was loaded, gradients included. The gradient norms of all paths must agree. A token
counts for each sequence that it is in, so a prompt's eight times; padding never counts. MFU is the operations of the
tokens that were computed, three times those of a forward pass, over the rate that a large bfloat16 matrix product
reaches in the same process. `others` is how many cores other processes used meanwhile: a run where it is not near zero
is not worth quoting.
"""

import json
import os
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.logging import disable_progress_bar

from quadriga.config import ActorConfig, OptimConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, OptimizerStep, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import update
from quadriga.models.flops import peak_flops
from quadriga.models.load import load_causal_lm
from quadriga.models.scorers import PolicyScorer
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from step import MODEL, load_average, machine

GROUP_SIZE = 8
PROMPT_TOKENS = (256, 512)
MEAN_RESPONSE_TOKENS, SIGMA, MAX_RESPONSE_TOKENS = 200, 0.8, 1024
# Rounding to bfloat16 in another order moves the gradient norm of thirty layers by some hundredths.
AGREEMENT = 0.1
CPU = torch.device("cpu")
DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


def text_tokens(model: Path) -> torch.Tensor:
    """The project's documentation as the model's tokens. On tokens drawn at random the gradient of thirty bfloat16
    layers is rounding, whoever computes it: nothing could be compared."""
    pages = sorted((Path(__file__).parents[1] / "docs").glob("*.md"))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    return torch.tensor(AutoTokenizer.from_pretrained(model)(text, verbose=False).input_ids)


def draw_batch(args: Namespace) -> DataProto:
    """Prompts padded on the left, responses on the right, and an advantage for each sequence."""
    draw = torch.Generator().manual_seed(0)
    num_prompts = args.prompts
    rows = num_prompts * GROUP_SIZE
    low, high = PROMPT_TOKENS
    prompts = torch.randint(low, high + 1, (num_prompts,), generator=draw).repeat_interleave(
        GROUP_SIZE
    )
    spread = torch.randn(rows, generator=draw) * SIGMA - SIGMA**2 / 2
    responses = (MEAN_RESPONSE_TOKENS * spread.exp()).round().clamp(1, MAX_RESPONSE_TOKENS)
    columns = torch.arange(high + MAX_RESPONSE_TOKENS)
    attention = (columns >= high - prompts[:, None]) & (columns < high + responses[:, None])
    text = text_tokens(args.model)

    def pieces(count: int, length: int) -> torch.Tensor:
        starts = torch.randint(0, len(text) - length, (count,), generator=draw)
        return text[starts[:, None] + torch.arange(length)]

    prompt_ids = pieces(num_prompts, high).repeat_interleave(GROUP_SIZE, 0)
    response_ids = pieces(rows, MAX_RESPONSE_TOKENS)
    mask = attention[:, high:].long()
    return DataProto.from_dict(
        {
            "input_ids": torch.cat([prompt_ids, response_ids], 1) * attention,
            "attention_mask": attention.long(),
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": response_ids * mask,
            "response_mask": mask,
            "advantages": torch.randn(rows, 1, generator=draw) * mask,
        }
    )


@dataclass(frozen=True)
class Reading:
    """What a pass over the batch took.

    Attributes:
        seconds: of all micro-batches, forward and backward.
        cpu_s: the same on the clocks of this process's threads.
        memory_bytes: highest resident set since the model was loaded, less that then.
        others: cores that other processes used.
        flops: operations of the tokens computed, or 0 where that was not counted.
        grad_norm: of the whole gradient.
    """

    seconds: float
    cpu_s: float
    memory_bytes: int
    others: float
    flops: float = 0.0
    grad_norm: float = 0.0


class Meter:
    """Reads clock, memory and load; made once the model is loaded."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        self.resident = _resident_bytes("VmRSS")

    def start(self) -> None:
        """From here on seconds count."""
        self.busy, self.own, self.clock = _busy_seconds(), time.process_time(), time.perf_counter()

    def read(self) -> Reading:
        """What it took since the start; operations and gradient are for the caller to add."""
        seconds, cpu_s = time.perf_counter() - self.clock, time.process_time() - self.own
        others = max(0.0, (_busy_seconds() - self.busy - cpu_s) / seconds)
        return Reading(seconds, cpu_s, _resident_bytes("VmHWM") - self.resident, others)


def _resident_bytes(field: str) -> int:
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"benchmark: /proc/self/status has no {field}: this needs Linux.")


def _busy_seconds() -> float:
    """Processor seconds that all processes of this machine have used."""
    first = Path("/proc/stat").read_text(encoding="utf-8").splitlines()[0]
    user, nice, system, _idle, _wait, irq, soft_irq = (int(word) for word in first.split()[1:8])
    return (user + nice + system + irq + soft_irq) / os.sysconf("SC_CLK_TCK")


class MeteredEngine(FSDPEngine):
    """Reads the meter when all gradients are there, before the optimizer's step."""

    meter: Meter
    is_warm = False
    reading: Reading

    def optimizer_step(self, lr: float) -> OptimizerStep:
        """As ever; but none in a pass that does not count, because it makes the optimizer's state."""
        if not self.is_warm:
            return OptimizerStep(0.0, is_applied=False)
        self.reading = self.meter.read()
        return super().optimizer_step(lr)


def make_engine(model: Path, dtype: torch.dtype) -> MeteredEngine:
    """Our engine, as an actor has it."""
    scorer = PolicyScorer(load_causal_lm(model, dtype=torch.float32))
    training = Training(OptimConfig(), grad_clip=1.0, max_nonfinite_steps=1)
    return MeteredEngine(scorer, dtype=dtype, device=CPU, training=training)


def our_pass(args: Namespace, *, share_prompts: bool) -> Callable[[DataProto], Reading]:
    """The update of the trainer, whose learning rate is zero."""
    engine = make_engine(args.model, DTYPES[args.dtype])
    engine.meter = Meter()
    objective = PolicyObjective(ActorConfig())
    micro = MicroBatching(args.micro_batch, max_tokens=1, share_prompts=share_prompts)

    def learn(batch: DataProto) -> dict[str, Metric]:
        return update(engine, batch, objective, Passes(len(batch), 1, micro), lr=0.0)

    def run(batch: DataProto) -> Reading:
        learn(batch[: args.micro_batch])
        engine.parameters.clear_gradients()
        engine.parameters.sums.clear()
        engine.is_warm = True
        engine.meter.start()
        metrics = learn(batch)
        flops, norm = (
            float(metrics[name].value) for name in ("perf/flops/actor", "actor/grad_norm")
        )
        return replace(engine.reading, flops=flops, grad_norm=norm)

    return run


def padded_pass(args: Namespace, *, is_all_logits: bool) -> Callable[[DataProto], Reading]:
    """A policy-gradient loss as it is written with transformers alone."""
    model = AutoModelForCausalLM.from_pretrained(
        args.model, dtype=DTYPES[args.dtype], attn_implementation="sdpa"
    )
    model.eval()
    meter = Meter()

    def learn(batch: DataProto) -> None:
        num_tokens = int(batch.batch["response_mask"].sum())
        for part in batch.split(args.micro_batch):
            columns = trimmed(part)
            width = columns["responses"].shape[1]
            # The logits before each response token; the last ones predict nothing.
            keep = {} if is_all_logits else {"logits_to_keep": width + 1}
            inputs = {
                name: columns[name] for name in ("input_ids", "attention_mask", "position_ids")
            }
            logits = model(**inputs, use_cache=False, **keep).logits[:, -width - 1 : -1]
            chosen = columns["responses"][..., None]
            log_prob = torch.log_softmax(logits, -1, dtype=torch.float32).gather(-1, chosen)[..., 0]
            ratio = (log_prob - log_prob.detach()).exp()
            loss = -(columns["advantages"] * ratio * columns["response_mask"]).sum() / num_tokens
            loss.backward()

    def run(batch: DataProto) -> Reading:
        learn(batch[: args.micro_batch])
        model.zero_grad(set_to_none=True)
        meter.start()
        learn(batch)
        reading = meter.read()
        norm = torch.nn.utils.get_total_norm(
            [parameter.grad.float() for parameter in model.parameters()]
        )
        return replace(reading, grad_norm=float(norm))

    return run


def trimmed(part: DataProto) -> dict[str, torch.Tensor]:
    """Columns of some rows without those that are padding in all of them."""
    used = part.batch["attention_mask"].any(0).nonzero()[:, 0]
    first, last = int(used[0]), int(used[-1]) + 1
    width = part.batch["responses"].shape[1]
    prompt_width = part.batch["input_ids"].shape[1] - width
    columns = {
        name: part.batch[name][:, first:last]
        for name in ("input_ids", "attention_mask", "position_ids")
    }
    responses = ("responses", "response_mask", "advantages")
    return columns | {name: part.batch[name][:, : last - prompt_width] for name in responses}


PATHS: dict[str, Callable[[Namespace], Callable[[DataProto], Reading]]] = {
    "shared": lambda args: our_pass(args, share_prompts=True),
    "alone": lambda args: our_pass(args, share_prompts=False),
    "padded": lambda args: padded_pass(args, is_all_logits=True),
    "responses": lambda args: padded_pass(args, is_all_logits=False),
}


def run_child(args: Namespace) -> None:
    """One path, and a line of JSON."""
    disable_progress_bar()
    run = PATHS[args.child](args)
    peak = peak_flops(CPU, DTYPES[args.dtype])
    reading = run(draw_batch(args))
    peak = max(peak, peak_flops(CPU, DTYPES[args.dtype]))
    print(json.dumps(asdict(reading) | {"peak_flops": peak}))


def start_child(path: str, args: Namespace) -> dict[str, Any]:
    """Run a path in a process of its own."""
    words = [f"--child={path}", f"--model={args.model}", f"--prompts={args.prompts}"]
    words += [f"--micro-batch={args.micro_batch}", f"--dtype={args.dtype}"]
    command = [sys.executable, __file__, *words]
    done = subprocess.run(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    if done.returncode:
        raise SystemExit(f"benchmark: {path} ended with status {done.returncode}.")
    return json.loads(done.stdout.splitlines()[-1])


def measure(args: Namespace) -> dict[str, list[dict[str, Any]]]:
    """All paths in turn, in each round from another one on."""
    results: dict[str, list[dict[str, Any]]] = {path: [] for path in args.paths}
    for number in range(args.rounds):
        turn = number % len(args.paths)
        for path in args.paths[turn:] + args.paths[:turn]:
            answer = start_child(path, args)
            results[path].append(answer)
            words = f"{answer['seconds']:.1f} s, {answer['cpu_s']:.1f} CPU s, {answer['memory_bytes'] / 2**30:.2f} GiB"
            print(f"  round {number}: {path} {words}, others {answer['others']:.2f}", flush=True)
    return results


def require_equal_gradients(results: dict[str, list[dict[str, Any]]]) -> None:
    """All paths compute one gradient, up to rounding."""
    norms = {path: rounds[0]["grad_norm"] for path, rounds in results.items()}
    if max(norms.values()) > (1 + AGREEMENT) * min(norms.values()):
        raise SystemExit(
            f"benchmark: the gradients differ, so the paths do not compare: norms {norms}."
        )
    print(f"\ngradient norms: {', '.join(f'{path} {norm:.4f}' for path, norm in norms.items())}")


def report(results: dict[str, list[dict[str, Any]]], args: Namespace) -> None:
    """One table, and the goals beside what was reached."""
    batch = draw_batch(args)
    tokens = int(batch.batch["attention_mask"].sum())
    lengths = batch.batch["response_mask"].sum(-1)
    print(
        f"{args.prompts} prompts x {GROUP_SIZE}, {tokens} tokens, responses {int(lengths.min())} to "
        f"{int(lengths.max())}, mean {float(lengths.float().mean()):.0f}; {args.micro_batch} sequences at a time; "
        f"median of {args.rounds} rounds\n{machine()}; {torch.get_num_threads()} threads; torch {torch.__version__}; "
        f"load average after: {load_average()}\n"
    )
    rates = {
        path: tokens / median(one["seconds"] for one in rounds) for path, rounds in results.items()
    }
    memory = {
        path: median(one["memory_bytes"] for one in rounds) for path, rounds in results.items()
    }
    against = "padded" if "padded" in results else args.paths[-1]
    print(
        f"| path | s [min, max] | CPU s | tokens/s | over {against} | memory, GiB | over {against} | MFU | others |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    for path, rounds in results.items():
        seconds = [one["seconds"] for one in rounds]
        mfu = median(one["flops"] / one["seconds"] / one["peak_flops"] for one in rounds)
        cells = [
            f"{median(seconds):.1f} [{min(seconds):.1f}, {max(seconds):.1f}]",
            f"{median(one['cpu_s'] for one in rounds):.1f}",
            f"{rates[path]:.0f}",
            f"**{rates[path] / rates[against]:.2f}**",
            f"{memory[path] / 2**30:.2f}",
            f"**{memory[path] / memory[against]:.2f}**",
            f"{mfu:.2f}" if mfu else "",
            f"{median(one['others'] for one in rounds):.2f}",
        ]
        print(f"| {path} | {' | '.join(cells)} |")
    peak = max(one["peak_flops"] for rounds in results.values() for one in rounds)
    print(f"\nThe machine's {args.dtype} matrix product reached {peak / 1e12:.2f} Tflop/s at best.")
    print(
        "Wanted over padded: of shared 2 times the tokens/s and 0.5 of the memory, of alone 1.3 times; MFU 0.5."
    )


def read_arguments() -> Namespace:
    """The command line."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--model",
        type=Path,
        default=MODEL,
        help="a Hugging Face folder (default: the quickstart's)",
    )
    parser.add_argument("--prompts", type=int, default=8, help=f"with {GROUP_SIZE} responses each")
    parser.add_argument(
        "--micro-batch", type=int, default=GROUP_SIZE, help="sequences passed at a time"
    )
    parser.add_argument("--rounds", type=int, default=3, help="of all paths")
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=list(PATHS))
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of the weights that compute"
    )
    parser.add_argument("--child", choices=PATHS, help="run this path here and answer with JSON")
    args = parser.parse_args()
    if not args.model.is_dir():
        parser.error(
            f"no model at {args.model}: run scripts/quickstart once, or name one with --model"
        )
    return args


def main() -> None:
    """Measure, and print one table."""
    args = read_arguments()
    if args.child:
        run_child(args)
        return
    print(f"{machine()}\nload average before: {load_average()}", flush=True)
    results = measure(args)
    report(results, args)
    require_equal_gradients(results)


if __name__ == "__main__":
    main()
