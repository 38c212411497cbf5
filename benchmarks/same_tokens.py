# SPDX-License-Identifier: Apache-2.0
"""Whether engines write the same answers, in float32: greedy ones of each engine, sampled ones of ours in any batch.

    .venv/bin/python benchmarks/same_tokens.py --model outputs/models/smollm2-135m-instruct

vLLM is taken from the environment that `scripts/install-vllm` makes, or from --vllm-python. Each engine answers 64
prompts in a process of its own. Where two answers part, the model itself says how near the two tokens were: their
logits after the same beginning, in float32. A difference of about 1e-4 is a tie: summation in another order decides it.

Sampled answers are compared between batches of 1, of 7, and of all requests in another order: the seed of a request is
all that they may depend on.
"""

import json
import random
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from importlib import import_module
from pathlib import Path
from typing import Any

NUM_PROMPTS = 64
BATCHES = (1, 7)
Answers = list[list[int]]


def prompts(model: str) -> list[list[int]]:
    """Questions of different length, as the model's chat template writes them."""
    tokenizer = import_module("transformers").AutoTokenizer.from_pretrained(model)
    rng = random.Random(5)
    told = []
    for number in range(NUM_PROMPTS):
        amounts = [rng.randint(2, 99) for _ in range(2 + number % 7)]
        listed = ", then ".join(
            f"{amount} coins on day {day}" for day, amount in enumerate(amounts, start=1)
        )
        text = (
            f"A merchant earns {listed}. How many coins does the merchant have? Explain each step."
        )
        message = [{"role": "user", "content": text}]
        rendered = tokenizer.apply_chat_template(
            message, tokenize=False, add_generation_prompt=True
        )
        told.append(tokenizer.encode(rendered, add_special_tokens=False))
    return told


def native_engine(args: Namespace) -> tuple[Any, Any]:
    """Our engine, and the module that it belongs to."""
    load, rollout = import_module("quadriga.models.load"), import_module("quadriga.rollout")
    return rollout.NativeEngine(
        load.load_causal_lm(args.model, dtype=import_module("torch").float32)
    ), rollout


def native(args: Namespace) -> Answers:
    """Greedy answers of our engine."""
    engine, rollout = native_engine(args)
    params = rollout.SamplingParams(max_tokens=args.tokens, temperature=0.0)
    return [
        one.token_ids for one in engine.generate_batch(prompts(args.model), [params] * NUM_PROMPTS)
    ]


def hf(args: Namespace) -> Answers:
    """Greedy answers of transformers, one prompt at a time: without padding nothing is to be masked."""
    torch, transformers = import_module("torch"), import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32
    ).eval()
    answers = []
    with torch.inference_mode():
        for prompt in prompts(args.model):
            ids = torch.tensor([prompt])
            mask = torch.ones_like(ids)
            whole = model.generate(
                ids, attention_mask=mask, do_sample=False, max_new_tokens=args.tokens
            )
            answers.append(whole[0, len(prompt) :].tolist())
    return answers


def vllm(args: Namespace) -> Answers:
    """Greedy answers of vLLM."""
    package = import_module("vllm")
    options = {"max_model_len": 1024, "enforce_eager": True, "gpu_memory_utilization": 0.5}
    engine = package.LLM(model=args.model, dtype="float32", **options)
    params = package.SamplingParams(temperature=0.0, max_tokens=args.tokens, detokenize=False)
    asked = [{"prompt_token_ids": prompt} for prompt in prompts(args.model)]
    return [
        list(one.outputs[0].token_ids) for one in engine.generate(asked, params, use_tqdm=False)
    ]


def sampled(args: Namespace) -> dict[str, int]:
    """How many of our sampled answers differ from those of one batch, by how they were batched."""
    engine, rollout = native_engine(args)
    asked = prompts(args.model)[: args.requests]
    params = [
        rollout.SamplingParams(max_tokens=args.tokens, seed=100 + row, ignore_eos=True)
        for row in range(len(asked))
    ]

    def answers(rows: list[int], size: int) -> dict[int, list[int]]:
        found: dict[int, list[int]] = {}
        for start in range(0, len(rows), size):
            batch = rows[start : start + size]
            done = engine.generate_batch(
                [asked[row] for row in batch], [params[row] for row in batch]
            )
            found |= {row: one.token_ids for row, one in zip(batch, done, strict=True)}
        return found

    rows = list(range(len(asked)))
    whole = answers(rows, len(rows))
    shuffled = random.Random(1).sample(rows, len(rows))
    others = {f"batches of {size}": answers(rows, size) for size in BATCHES} | {
        "another order": answers(shuffled, len(rows))
    }
    return {name: sum(whole[row] != found[row] for row in rows) for name, found in others.items()}


ENGINES = {"native": native, "hf": hf, "vllm": vllm}


def partings(args: Namespace, found: dict[str, Answers]) -> list[str]:
    """A line for each prompt whose answers part, with the logits that the two tokens have."""
    torch, transformers = import_module("torch"), import_module("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(
        args.model, dtype=torch.float32
    ).eval()
    lines = []
    for name in [name for name in found if name != "native"]:
        for number, (prompt, mine, theirs) in enumerate(
            zip(prompts(args.model), found["native"], found[name], strict=True)
        ):
            if mine == theirs:
                continue
            place = next(i for i in range(args.tokens) if mine[i : i + 1] != theirs[i : i + 1])
            with torch.inference_mode():
                logits = model(torch.tensor([prompt + mine[:place]])).logits[0, -1]
            gap = float(logits[mine[place]] - logits[theirs[place]])
            lines.append(
                f"prompt {number}, native and {name}: token {place}, logits apart by {gap:.1e}"
            )
    return lines


def main() -> int:
    """Ask the engines, one after the other, and compare."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument(
        "--engines",
        default="native,hf,vllm",
        help="which, separated by commas; native is one of them",
    )
    parser.add_argument(
        "--vllm-python", default=".venv-vllm/bin/python", help="Python of an environment with vLLM"
    )
    parser.add_argument("--tokens", type=int, default=64, help="of each answer, at most")
    parser.add_argument("--requests", type=int, default=32, help="that are sampled; 0: none")
    parser.add_argument("--threads", type=int, default=2, help="of each process")
    parser.add_argument(
        "--be",
        choices=sorted(ENGINES),
        help="be the process of this engine; for the program itself",
    )
    parser.add_argument("--out", type=Path, help="where its answers go")
    args = parser.parse_args()
    import_module("torch").set_num_threads(args.threads)
    if args.be:
        args.out.write_text(json.dumps(ENGINES[args.be](args)))
        return 0
    found: dict[str, Answers] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in args.engines.split(","):
            python, out = args.vllm_python if name == "vllm" else sys.executable, Path(folder, name)
            subprocess.run(
                [python, __file__, *sys.argv[1:], "--be", name, "--out", out], check=True
            )
            found[name] = json.loads(out.read_text())
    lines = partings(args, found)
    for name in [name for name in found if name != "native"]:
        same = sum(
            mine == theirs for mine, theirs in zip(found["native"], found[name], strict=True)
        )
        print(f"greedy, native and {name}: {same} of {NUM_PROMPTS} answers are equal")
    print("\n".join(lines))
    if args.requests:
        for name, num_different in sampled(args).items():
            print(
                f"sampled, {name}: {num_different} of {args.requests} answers differ from those of one batch"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
