# SPDX-License-Identifier: Apache-2.0
"""Mixtures of experts: how often training would choose other experts than the rollout did, and what a small one learns.

    .venv/bin/python benchmarks/experts.py replay
    .venv/bin/python benchmarks/experts.py learn --seeds 0 1 2 [KEY=VALUE ...]

replay: random models of 64 million parameters, 8 experts of which a token goes through 2; 8 prompts with 8 samples each
by `native`; then training's log-probs of these tokens, with its own choices of experts and with the rollout's. A choice
is the set of experts of a token in a layer.

learn: the playground's sums with a Qwen3-MoE of 8 experts in the place of its model: supervised first, then GRPO with
`native`, trained by FSDP2 and by Megatron-core, with and without the replay of the rollout's choices. What is given as
KEY=VALUE goes to all runs of GRPO.
"""

import itertools
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.models.mixtral import MixtralConfig
from transformers.models.qwen3_moe import Qwen3MoeConfig

from playground import run
from playground_report import read_course
from quadriga.engines.batches import MicroBatching
from quadriga.engines.fsdp.engine import FSDPEngine
from quadriga.engines.step import infer
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.experts import ROUTES
from quadriga.models.scorers import PolicyScorer
from quadriga.protocol import DataProto
from quadriga.rollout import NativeEngine, SamplingParams
from quadriga.rollout.sequences import append_responses

NUM_TOKENS, VOCABULARY = 64, 8000
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 512,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 1024,
    "bos_token_id": None,
}
CONFIGS = {
    "qwen3_moe": Qwen3MoeConfig(**SIZES, num_experts=8, moe_intermediate_size=512),
    "mixtral": MixtralConfig(**SIZES, num_local_experts=8, intermediate_size=512),
}


def random_model(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """One of CONFIGS with random weights, ready to be trained and to generate."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=dtype).eval()
    model.set_attn_implementation(ATTENTION_NAME)
    return model


def replay(args: Namespace) -> None:
    """Print the table."""
    for name in CONFIGS:
        for dtype in (torch.float32, torch.bfloat16):
            trainer = FSDPEngine(
                PolicyScorer(random_model(name, dtype)), dtype=dtype, device=torch.device("cpu")
            )
            rollout = NativeEngine(trainer.model, eos_token_ids=(), records_routes=True)
            prompts = [prompt for prompt in torch.randint(2, VOCABULARY, (8, 48)) for _ in range(8)]
            params = [
                SamplingParams(max_tokens=NUM_TOKENS, seed=row) for row in range(len(prompts))
            ]
            found = rollout.generate_batch([prompt.tolist() for prompt in prompts], params)
            ids = torch.stack(prompts)
            before = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
            before["position_ids"] = torch.arange(ids.shape[1]).expand_as(ids)
            rows = [(one.token_ids, [1] * len(one.token_ids), one.log_probs) for one in found]
            told = DataProto.from_dict(
                append_responses(before, rows, NUM_TOKENS, 0, [one.routes for one in found])
            )
            own = told.select([key for key in told.batch.keys() if key != ROUTES])
            micro, theirs = MicroBatching(None, 4096), told.batch["rollout_log_probs"]
            alone, repeated = (
                infer(trainer, own, micro, with_routes=True),
                infer(trainer, told, micro),
            )
            routes = [part[:, :-1].sort(-1).values for part in (alone[ROUTES], told.batch[ROUTES])]
            share = float((routes[0] != routes[1]).any(-1).float().mean())
            means = [float((one["log_probs"] - theirs).abs().mean()) for one in (alone, repeated)]
            print(f"{name:<10} {str(dtype)[6:]:<9} {share:8.3%} of choices differ; log_prob_diff_mean "
                  f"{means[0]:.2e} without replay, {means[1]:.2e} with it", flush=True)  # fmt: skip


def learn(args: Namespace) -> None:
    """Train, and print the accuracy at the start, at the end, and when 0.95 was reached."""
    for seed in args.seeds:
        home = args.output / f"seed{seed}"
        run(
            ["prepare", "playground", "--seed", seed, "--output", home],
            home / "prepare.log",
            args.threads,
        )
        tokenizer = AutoTokenizer.from_pretrained(home / "model")
        torch.manual_seed(seed)
        own = {
            "vocab_size": len(tokenizer),
            "hidden_size": 128,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
        }
        own |= {"head_dim": 32, "max_position_embeddings": 256, "tie_word_embeddings": True}
        tokens = {
            f"{kind}_token_id": getattr(tokenizer, f"{kind}_token_id")
            for kind in ("bos", "eos", "pad")
        }
        own |= {"norm_topk_prob": True, "moe_intermediate_size": 192}
        config = Qwen3MoeConfig(**{**SIZES, **own, **tokens}, num_experts=8)
        AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(
            home / "model"
        )
        seeds = [f"trainer.seed={seed}", f"data.seed={seed}", "trainer.save_freq=-1"]
        run(
            ["sft", "--config", home / "sft.yaml", *seeds, "trainer.total_epochs=2"],
            home / "sft.log",
            args.threads,
        )
        for strategy, mode in itertools.product(args.strategies, args.modes):
            name = f"{strategy}, replay {mode}"
            place = home / "runs" / strategy / mode
            words = [
                "train",
                "--config",
                home / "sums.yaml",
                *seeds,
                f"trainer.total_training_steps={args.steps}",
            ]
            words += [
                f"trainer.default_local_dir={place}",
                f"trainer.validation_data_dir={place / 'answers'}",
            ]
            words += ["trainer.test_freq=10", "trainer.resume_mode=disable"]
            actor = {"router_replay": mode, "strategy": strategy}
            words += [f"actor_rollout_ref.actor.{key}={value}" for key, value in actor.items()]
            others = run([*words, *args.words], home / f"{strategy} {mode}.log", args.threads)
            print(
                f"seed {seed}, {name}: {read_course(name, seed, place, others).in_words()}",
                flush=True,
            )


def main() -> None:
    """Read the command line."""
    parser = ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    kinds = parser.add_subparsers(required=True)
    kinds.add_parser("replay").set_defaults(call=replay)
    learning = kinds.add_parser("learn")
    learning.add_argument("--modes", nargs="+", default=["off", "rollout"], help="of router_replay")
    learning.add_argument("--strategies", nargs="+", default=["fsdp", "megatron"])
    learning.add_argument("--steps", type=int, default=200)
    learning.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    learning.add_argument("--output", type=Path, default=Path("outputs/experts"))
    learning.add_argument("--threads", type=int, default=2)
    learning.add_argument("words", nargs="*", help="overrides of the run of GRPO")
    learning.set_defaults(call=learn)
    args = parser.parse_args()
    args.call(args)


if __name__ == "__main__":
    main()
