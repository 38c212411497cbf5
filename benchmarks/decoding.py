# SPDX-License-Identifier: Apache-2.0
"""Generation of mixtures of experts and of models with sliding windows: `native` beside transformers' `generate`.

    .venv/bin/python benchmarks/decoding.py
    .venv/bin/python benchmarks/decoding.py --models Mistral --dtype float32

Random models of 50 M parameters and more, each in one process with both sides in turn; the first round is left out.
8 prompts of 48 to 96 tokens with 8 samples each, then one prompt with one sample: 64 tokens for each, by sampling at
temperature 1, so that no side waits for the longest. Windows are 64 tokens, so they act from the first token on.
"""

import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable
from statistics import median
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM

from quadriga.models.load import load_causal_lm
from quadriga.rollout import NativeEngine, SamplingParams

NEW_TOKENS, VOCABULARY = 64, 8192
PLAIN = {
    "vocab_size": VOCABULARY, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12,
    "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64, "pad_token_id": None, "bos_token_id": None,
    "eos_token_id": None,
}  # fmt: skip
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 512, "num_hidden_layers": 8}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"] * 6, "sliding_window": 64}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "Qwen3-MoE": ("Qwen3Moe", {**EXPERTS, "num_experts": 8}),
    "Mixtral": ("Mixtral", {**EXPERTS, "num_local_experts": 8, "intermediate_size": 512, "sliding_window": 64}),
    "Mistral": ("Mistral", {"sliding_window": 64}),
    "Gemma 3": ("Gemma3Text", WINDOWS),
    "gpt-oss": ("GptOss", {
        **EXPERTS, "num_local_experts": 8, "intermediate_size": 512, "sliding_window": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 4}),
}  # fmt: skip


def native(folder: str, dtype: torch.dtype) -> Callable[[list[list[int]]], None]:
    """Our engine."""
    engine = NativeEngine(load_causal_lm(folder, dtype=dtype))

    def generate(prompts: list[list[int]]) -> None:
        params = [
            SamplingParams(max_tokens=NEW_TOKENS, seed=row, ignore_eos=True)
            for row in range(len(prompts))
        ]
        found = engine.generate_batch(prompts, params)
        assert all(len(one.token_ids) == NEW_TOKENS for one in found)

    return generate


def hf(folder: str, dtype: torch.dtype) -> Callable[[list[list[int]]], None]:
    """Transformers' own generation and sampling, its cache and attention as it chooses them."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()
    length = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS}

    def generate(prompts: list[list[int]]) -> None:
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            found = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                pad_token_id=0,
                **length,
            )
        assert found.shape == (len(prompts), width + NEW_TOKENS)

    return generate


def speeds(
    sides: list[Callable[[list[list[int]]], None]], prompts: list[list[int]], rounds: int
) -> list[float]:
    """Tokens per second of each side, the median of the rounds but the first."""
    seconds: list[list[float]] = [[] for _ in sides]
    for _ in range(rounds):
        for generate, own in zip(sides, seconds, strict=True):
            start = time.perf_counter()
            generate(prompts)
            own.append(time.perf_counter() - start)
    return [len(prompts) * NEW_TOKENS / median(own[1:]) for own in seconds]


def main() -> None:
    """Print a row for each model."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="bfloat16")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=4)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    dtype, draw = getattr(torch, args.dtype), torch.Generator().manual_seed(0)
    sizes = torch.randint(48, 97, (8,), generator=draw).tolist()
    texts = [torch.randint(1, VOCABULARY, (size,), generator=draw).tolist() for size in sizes]
    print(
        "| model | M parameters | 8 x 8: native | transformers | ratio | one prompt: native | transformers | ratio |"
    )
    print("|---" * 8 + "|", flush=True)
    for name in args.models:
        prefix, own = MODELS[name]
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(
            getattr(transformers, f"{prefix}Config")(**{**PLAIN, **own})
        )
        size = sum(one.numel() for one in model.parameters()) / 1e6
        with tempfile.TemporaryDirectory(prefix="quadriga-benchmark-") as folder:
            model.save_pretrained(folder)
            del model
            sides = [native(folder, dtype), hf(folder, dtype)]
            cells = [name, f"{size:.0f}"]
            for prompts in ([text for text in texts for _ in range(8)], texts[:1]):
                ours, theirs = speeds(sides, prompts, args.rounds)
                cells += [f"{ours:.0f}", f"{theirs:.0f}", f"{ours / theirs:.2f}"]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
