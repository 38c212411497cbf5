# SPDX-License-Identifier: Apache-2.0
"""Generation with our engine, with vLLM and with transformers: useful tokens per second, and what a decode step costs.

    .venv/bin/python benchmarks/rollout.py --model outputs/models/smollm2-135m-instruct

vLLM is taken from the environment that `scripts/install-vllm` makes, or from --vllm-python.

16 prompts with 8 samples each, answers of many lengths with a long tail up to 256 tokens. Every engine lives in a
process of its own and gives the same number of tokens for the same prompts: how long an answer becomes is drawn
beforehand, and end-of-text tokens do not count. Engines take turns, round by round; the first round is left out.

A token is useful up to its answer's length. `native` and `vllm` leave an answer there. Transformers' `generate` knows
one length for a batch: it goes on until the longest answer is done, and what it writes meanwhile is not counted.

The decode step is that of 128 rows: generate 65 tokens and 1 token, take the difference. It is compared with the
matrix products of the model alone, one for each linear module and the head, in the same process and dtype.
"""

import json
import math
import os
import random
import statistics
import subprocess
import sys
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from importlib import import_module
from typing import Any

NUM_PROMPTS, NUM_SAMPLES, LONGEST = 16, 8, 256
NUM_STEPS = 64
Generate = Callable[[list[list[int]], list[int], int], int]


def questions() -> list[str]:
    """Prompts of different length, as a chat template would not make them equal either."""
    rng = random.Random(3)
    texts = []
    for number in range(NUM_PROMPTS):
        amounts = [rng.randint(2, 99) for _ in range(2 + number % 5)]
        listed = ", then ".join(
            f"{amount} coins on day {day}" for day, amount in enumerate(amounts, start=1)
        )
        texts.append(
            f"A merchant earns {listed}. How many coins does the merchant have? Explain each step."
        )
    return texts


def answer_lengths(seed: int) -> list[int]:
    """Tokens of each answer: most are short, a few as long as may be."""
    rng = random.Random(seed)
    return [
        min(LONGEST, max(4, round(math.exp(rng.gauss(3.8, 0.9)))))
        for _ in range(NUM_PROMPTS * NUM_SAMPLES)
    ]


def native(args: Namespace) -> tuple[Generate, Any]:
    """Our engine."""
    torch = import_module("torch")
    load, rollout = import_module("quadriga.models.load"), import_module("quadriga.rollout")
    model = load.load_causal_lm(args.model, dtype=getattr(torch, args.dtype))
    start = time.perf_counter()
    engine = rollout.NativeEngine(model)
    print(
        f"native: start {time.perf_counter() - start:.3f} s after the model was loaded",
        file=sys.stderr,
    )

    def generate(prompts: list[list[int]], lengths: list[int], seed: int) -> int:
        params = [
            rollout.SamplingParams(max_tokens=length, seed=seed * 1000 + row, ignore_eos=True)
            for row, length in enumerate(lengths)
        ]
        return sum(len(one.token_ids) for one in engine.generate_batch(prompts, params))

    return generate, model


def hf(args: Namespace) -> tuple[Generate, Any]:
    """Transformers' own generation and sampling."""
    torch, transformers = import_module("torch"), import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=getattr(torch, args.dtype)
    ).eval()

    def generate(prompts: list[list[int]], lengths: list[int], seed: int) -> int:
        torch.manual_seed(seed)
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        longest = max(lengths)
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=longest,
                min_new_tokens=longest,
                pad_token_id=0,
            )
        assert out.shape == (len(prompts), width + longest)
        return sum(lengths)

    return generate, model


def vllm(args: Namespace) -> tuple[Generate, Any]:
    """vLLM in this process's engine, with its own defaults, but that prompts are not cut: see `VLLMOptions`."""
    package = import_module("vllm")
    options = {"max_model_len": 1024, "enable_chunked_prefill": False} | json.loads(
        args.vllm_options
    )
    engine = package.LLM(model=args.model, dtype=args.dtype, **options)

    def generate(prompts: list[list[int]], lengths: list[int], seed: int) -> int:
        params = [
            package.SamplingParams(
                temperature=1.0,
                max_tokens=length,
                ignore_eos=True,
                seed=seed * 1000 + row,
                detokenize=False,
                logprobs=0,
            )
            for row, length in enumerate(lengths)
        ]
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        return sum(
            len(one.outputs[0].token_ids) for one in engine.generate(asked, params, use_tqdm=False)
        )

    return generate, None


SIDES = {"native": native, "vllm": vllm, "hf": hf}


def bare_products_s(model: Any, num_rows: int) -> float:
    """Seconds of the matrix products of one decode step alone."""
    torch = import_module("torch")
    modules = [module for module in model.modules() if type(module) is torch.nn.Linear]
    inputs = {
        module.in_features: torch.randn(num_rows, module.in_features).to(module.weight.dtype)
        for module in modules
    }
    with torch.inference_mode():
        start = time.perf_counter()
        for module in modules:
            torch.nn.functional.linear(inputs[module.in_features], module.weight)
        return time.perf_counter() - start


def decode_step(
    generate: Generate, model: Any, prompts: list[list[int]], rounds: int
) -> dict[str, float]:
    """Milliseconds of a decode step, of the bare products, and their ratio: the best of some rounds each."""
    steps, products = [], []
    for number in range(rounds):
        seconds = []
        for length in (1, NUM_STEPS + 1):
            start = time.perf_counter()
            generate(prompts, [length] * len(prompts), number)
            seconds.append(time.perf_counter() - start)
        steps.append((seconds[1] - seconds[0]) / NUM_STEPS)
        products.append(min(bare_products_s(model, len(prompts)) for _ in range(10)))
    step, product = min(steps), min(products)
    return {"step_ms": step * 1e3, "products_ms": product * 1e3, "ratio": step / product}


def be_a_side(args: Namespace) -> int:
    """Answers orders on standard input with lines of JSON on what was standard output."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    torch = import_module("torch")
    torch.set_num_threads(args.threads)
    generate, model = SIDES[args.side](args)
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(args.model)
    texts = [
        tokenizer.apply_chat_template([{"role": "user", "content": text}], tokenize=False)
        for text in questions()
    ]
    prompts = [
        tokenizer.encode(text, add_special_tokens=False)
        for text in texts
        for _ in range(NUM_SAMPLES)
    ]
    print(json.dumps({"ready": args.side}), file=out)
    for line in sys.stdin:
        order = json.loads(line)
        if order["do"] == "decode":
            print(json.dumps(decode_step(generate, model, prompts, order["rounds"])), file=out)
            continue
        lengths = answer_lengths(order["seed"])
        start = time.perf_counter()
        num_tokens = generate(prompts, lengths, order["seed"])
        assert num_tokens == sum(lengths), f"{num_tokens} tokens instead of {sum(lengths)}"
        print(json.dumps({"seconds": time.perf_counter() - start, "tokens": num_tokens}), file=out)
    return 0


class Side:
    """One engine's process."""

    def __init__(self, name: str, args: Namespace) -> None:
        python = args.vllm_python if name == "vllm" else sys.executable
        command = [python, __file__, "--side", name, "--model", args.model, "--dtype", args.dtype]
        command += ["--threads", str(args.threads), "--vllm-options", args.vllm_options]
        threads = {"OMP_NUM_THREADS": str(args.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        cache = {"VLLM_CPU_KVCACHE_SPACE": "4"}
        self.process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | threads | cache,
        )
        self._read()

    def ask(self, **order: Any) -> dict[str, float]:
        """An order, and its answer."""
        assert self.process.stdin is not None
        print(json.dumps(order), file=self.process.stdin, flush=True)
        return self._read()

    def end(self) -> None:
        """Lets the process go."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait()

    def _read(self) -> dict[str, float]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(
                f"the process {self.process.args} ended with status {self.process.wait()}"
            )
        return json.loads(line)


def main() -> int:
    """Run the engines in turn and print a table."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--engines", default="native,vllm,hf", help="which, separated by commas")
    parser.add_argument(
        "--vllm-python", default=".venv-vllm/bin/python", help="Python of an environment with vLLM"
    )
    parser.add_argument("--vllm-options", default="{}", help="JSON: more arguments of vllm.LLM")
    parser.add_argument(
        "--rounds",
        type=int,
        default=4,
        help="how often each engine generates; the first does not count",
    )
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument("--dtype", default="bfloat16", help="of the computation")
    parser.add_argument(
        "--decode-rounds", type=int, default=3, help="for the decode step of native; 0: left out"
    )
    parser.add_argument(
        "--side",
        choices=sorted(SIDES),
        help="be the process of this engine; for the program itself",
    )
    args = parser.parse_args()
    if args.side:
        return be_a_side(args)
    sides = {name: Side(name, args) for name in args.engines.split(",")}
    speeds: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(args.rounds):
        for name, side in sides.items():
            result = side.ask(do="generate", seed=number)
            speed = result["tokens"] / result["seconds"]
            print(
                f"round {number}: {name} {result['tokens']} tokens in {result['seconds']:.1f} s, {speed:.0f} tokens/s"
            )
            if number:
                speeds[name].append(speed)
    if "native" in sides and args.decode_rounds:
        step = sides["native"].ask(do="decode", rounds=args.decode_rounds)
        print(
            f"\ndecode step of {NUM_PROMPTS * NUM_SAMPLES} rows: {step['step_ms']:.1f} ms, "
            f"bare products {step['products_ms']:.1f} ms, ratio {step['ratio']:.2f}"
        )
    for side in sides.values():
        side.end()
    first = next(iter(sides))
    print(
        f"\n| engine | useful tokens/s, median of {args.rounds - 1} | range | {first} is faster by |\n|---|---|---|---|"
    )
    for name, found in speeds.items():
        if found:
            middle = statistics.median(found)
            ratio = statistics.median(speeds[first]) / middle
            print(f"| {name} | {middle:.0f} | {min(found):.0f} - {max(found):.0f} | {ratio:.2f} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
