# SPDX-License-Identifier: Apache-2.0
"""Times policy updates and decode steps on a GPU, at the shape of Qwen2.5-1.5B with random weights, in bfloat16.

    python3 benchmarks/gpu.py
    python3 benchmarks/gpu.py --small      # on whatever device there is, to see that it runs

Updates: 16 prompts of 384 tokens with 8 responses each, log-normal around 200 tokens and up to 1024, micro-batches of
16,384 packed tokens, float32 masters and AdamW; the first round compiles and is left out. A token counts for each
sequence that it is in. MFU is the operations of the tokens that were computed (a shared prompt's once), three times
those of a forward pass, over the rate of a large bfloat16 matrix product in the same process.

Decode steps: of 1, 128 and 512 responses of 256 tokens to prompts of 256, eight to a prompt; the time of all steps
behind the first 16, over their number, sampling included.
"""

import gc
import time
from argparse import ArgumentParser

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from quadriga.config import ActorConfig, OptimConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Memory, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import infer, update
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.flops import peak_flops
from quadriga.models.fused import fuse
from quadriga.models.scorers import PolicyScorer
from quadriga.observe.machine import describe_machine
from quadriga.protocol import DataProto
from quadriga.rollout import NativeEngine, SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = {
    "hidden_size": 1536, "intermediate_size": 8960, "num_hidden_layers": 28, "num_attention_heads": 12,
    "num_key_value_heads": 2, "vocab_size": 151_936,
}  # fmt: skip
SMALL = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 512,
}  # fmt: skip
GROUP, ROUNDS, FIRST_STEPS = 8, 3, 16
MICRO_TOKENS = 16_384


def make_model(sizes: dict[str, int], dtype: torch.dtype) -> Qwen2ForCausalLM:
    """Random weights, as the engines have a model."""
    torch.manual_seed(0)
    config = Qwen2Config(**sizes, tie_word_embeddings=True, max_position_embeddings=32_768)
    config._attn_implementation = ATTENTION_NAME
    with DEVICE:
        model = Qwen2ForCausalLM(config).to(dtype).eval()
    fuse(model)
    return model


def seconds_since(start: float) -> float:
    """Once the device has done what it was given."""
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def draw_batch(vocabulary: int, num_prompts: int, prompt: int, longest: int) -> DataProto:
    """Prompts with `GROUP` responses each, all of which have a gradient."""
    draw, rows = torch.Generator().manual_seed(1), num_prompts * GROUP
    tokens = torch.randint(0, vocabulary, (rows, prompt + longest), generator=draw)
    tokens[:, :prompt] = tokens[::GROUP, :prompt].repeat_interleave(GROUP, 0)
    lengths = (
        (200 * (torch.randn(rows, generator=draw) * 0.8).exp()).round().clamp(1, longest).long()
    )
    attention = (torch.arange(prompt + longest) < prompt + lengths[:, None]).long()
    return DataProto.from_dict(
        {
            "input_ids": tokens,
            "attention_mask": attention,
            "position_ids": (attention.cumsum(-1) - 1).clamp(min=0),
            "responses": tokens[:, prompt:],
            "response_mask": attention[:, prompt:],
            "advantages": torch.randn(rows, 1, generator=draw).expand(rows, longest).contiguous(),
        }
    )


def time_updates(sizes: dict[str, int], batch: DataProto) -> None:
    """A line for each way to pass the batch."""
    peak = peak_flops(DEVICE, torch.bfloat16)
    num_tokens = int(batch.batch["attention_mask"].sum())
    print(
        f"{len(batch)} sequences, {num_tokens} tokens; a matrix product reaches {peak / 1e12:.0f} Tflop/s"
    )
    for share_prompts, is_checkpointed in ((True, False), (False, False), (True, True)):
        training = Training(OptimConfig(), grad_clip=1.0, max_nonfinite_steps=3)
        memory, scorer = (
            Memory(gradient_checkpointing=is_checkpointed),
            PolicyScorer(make_model(sizes, torch.float32)),
        )
        engine = FSDPEngine(
            scorer, dtype=torch.bfloat16, device=DEVICE, training=training, memory=memory
        )
        micro, objective = (
            MicroBatching(None, MICRO_TOKENS, share_prompts),
            PolicyObjective(ActorConfig()),
        )
        if DEVICE.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        found = []
        for _ in range(ROUNDS):
            start = time.perf_counter()
            metrics = update(engine, batch, objective, Passes(len(batch), 1, micro), lr=1e-6)
            found.append(seconds_since(start))
        seconds, start = sum(found[1:]) / (ROUNDS - 1), time.perf_counter()
        infer(engine, batch, micro)
        scored, mfu = (
            seconds_since(start),
            float(metrics["perf/flops/actor"].value) / seconds / peak,
        )
        gigabytes = torch.cuda.max_memory_allocated() / 2**30 if DEVICE.type == "cuda" else 0.0
        print(
            f"prompts {'shared' if share_prompts else 'alone'}, activations "
            f"{'recomputed' if is_checkpointed else 'kept'}: {seconds:.2f} s, {num_tokens / seconds:.0f} tokens/s, "
            f"MFU {mfu:.3f}, peak {gigabytes:.1f} GiB; log-probs {num_tokens / scored:.0f} tokens/s",
            flush=True,
        )
        # The model's modules refer to themselves, and would stay beside the next engine.
        del engine, scorer
        gc.collect()


def time_decoding(sizes: dict[str, int], num_tokens: int, batches: tuple[int, ...]) -> None:
    """A line for each number of responses."""
    engine = NativeEngine(make_model(sizes, torch.bfloat16), eos_token_ids=())
    draw = torch.Generator().manual_seed(0)
    for rows in batches:
        shape = (-(-rows // GROUP), num_tokens)
        prompts = torch.randint(0, sizes["vocab_size"], shape, generator=draw).repeat_interleave(
            GROUP, 0
        )[:rows]
        found = {}
        for length in (FIRST_STEPS, FIRST_STEPS, num_tokens):
            asked = [
                SamplingParams(max_tokens=length, temperature=1.0, ignore_eos=True, seed=row)
                for row in range(rows)
            ]
            start = time.perf_counter()
            engine.generate_batch(prompts.tolist(), asked)
            found[length] = seconds_since(start)
        later = (found[num_tokens] - found[FIRST_STEPS]) / (num_tokens - FIRST_STEPS)
        rate = rows * num_tokens / found[num_tokens]
        print(
            f"{rows} responses: {later * 1e3:.2f} ms a step, {rate:.0f} tokens/s with their prompts",
            flush=True,
        )


def main() -> None:
    """Print the lines."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--small", action="store_true", help="a tiny model and batch")
    is_small = parser.parse_args().small
    sizes = SMALL if is_small else SIZES
    print(describe_machine())
    time_updates(
        sizes, draw_batch(sizes["vocab_size"], *((2, 8, 32) if is_small else (16, 384, 1024)))
    )
    time_decoding(sizes, *((32, (1, 16)) if is_small else (256, (1, 128, 512))))


if __name__ == "__main__":
    main()
