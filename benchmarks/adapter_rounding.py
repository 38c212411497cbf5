# SPDX-License-Identifier: Apache-2.0
"""How far vLLM's log-probabilities are from the trainer's where an adapter travels merged, and where it travels alone.

    python benchmarks/adapter_rounding.py MODEL [--dtype bfloat16] [--rank 16] [--sizes 0.003 0.01]

Tokens are sampled by vLLM, and asked of the actor's own modules: the numbers are `rollout/log_prob_diff_mean`, in nats,
and its maximum. MODEL is a folder. Runs where vLLM is installed (scripts/install-vllm).
"""

import argparse
import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, PreTrainedModel

from quadriga.config import ModelConfig, load_config
from quadriga.models.adapter_files import base_name, is_factor, merge_adapter
from quadriga.models.load import load_causal_lm
from quadriga.models.lora import adapter_of, add_adapter
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights

NUM_PROMPTS, PROMPT_TOKENS = 8, 12
PROMPTS = [
    [40 + (row * 17 + number * 7) % 150 for number in range(PROMPT_TOKENS)]
    for row in range(NUM_PROMPTS)
]


def actor(arguments: argparse.Namespace, size: float) -> PreTrainedModel:
    """The model with an adapter in its dtype, whose B is normal with this standard deviation."""
    one = load_causal_lm(arguments.model, dtype=arguments.dtype, attention="sdpa")
    add_adapter(one, ModelConfig(path=str(arguments.model), lora_rank=arguments.rank), seed=1)
    noise = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in one.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(torch.randn(parameter.shape, generator=noise) * size)
            if is_factor(name):
                parameter.data = parameter.data.to(arguments.dtype)
    return one


def differences(arguments: argparse.Namespace, size: float, *, is_merged: bool) -> torch.Tensor:
    """|log p by vLLM - log p by the actor|, of each sampled token."""
    one = actor(arguments, size)
    rollout = {
        "name": "vllm",
        "max_model_len": PROMPT_TOKENS + arguments.tokens,
        "max_num_seqs": NUM_PROMPTS,
    }
    words = [f"actor_rollout_ref.rollout.{key}={value}" for key, value in rollout.items()]
    words += [
        f"actor_rollout_ref.model.path={arguments.model}",
        "actor_rollout_ref.rollout.cache_gigabytes=0.0625",
    ]
    words += [] if is_merged else [f"actor_rollout_ref.model.lora_rank={arguments.rank}"]
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    options = {"block_size": 32}
    setup = EngineSetup(
        load_config(words).config, tokenizer, options, torch.device("cpu"), arguments.dtype
    )
    engine = VLLMEngine.from_config(setup)
    shape = adapter_of(one)
    assert shape is not None, "it has just been added"
    own = ((base_name(name), parameter.detach()) for name, parameter in one.named_parameters())
    CopiedWeights().publish(
        merge_adapter(one.named_parameters(), shape.scale) if is_merged else own, engine, 1
    )
    sampling = [
        SamplingParams(arguments.tokens, seed=row, ignore_eos=True) for row in range(NUM_PROMPTS)
    ]
    found = []
    for prompt, answer in zip(PROMPTS, engine.generate_batch(PROMPTS, sampling), strict=True):
        row = torch.tensor([prompt + answer.token_ids])
        with torch.no_grad():
            log_probs = one(row).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        theirs = log_probs.gather(1, row[0, len(prompt) :, None])[:, 0]
        found.append((theirs - torch.tensor(answer.log_probs)).abs())
    engine.close()
    return torch.cat(found)


def main() -> int:
    """Print a row for each size of B."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument(
        "--tokens", type=int, default=32, help=f"of each of the {NUM_PROMPTS} answers"
    )
    parser.add_argument(
        "--sizes", type=float, nargs="+", default=[0.003, 0.01], help="standard deviations of B"
    )
    arguments = parser.parse_args()
    print("size of B   merged: mean    max    alone: mean    max")
    for size in arguments.sizes:
        rows = [differences(arguments, size, is_merged=way) for way in (True, False)]
        told = [f"{float(row.mean()):12.5f} {float(row.max()):6.3f}" for row in rows]
        print(f"{size:<9g}   {told[0]}  {told[1]}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
