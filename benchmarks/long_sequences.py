# SPDX-License-Identifier: Apache-2.0
"""Memory of a policy update on long sequences: by their number in a mini-batch, and by the length of the longest.

    .venv/bin/python benchmarks/long_sequences.py                              # up to 32,768 tokens, some 5 minutes
    .venv/bin/python benchmarks/long_sequences.py --lengths 1024 2048 4096     # smaller

A small random Llama in float32 with gradient checkpointing, whose weights and optimizer rest between phases; one
mini-batch, one sequence a micro-batch. The first series has 1, 2 and 4 sequences of the longest length, the second two
sequences of each length. Each case is a process of its own, and passes one short sequence first, which allocates what
does not depend on lengths. Memory is the highest resident set during the update less that before it; the batch is made
before.
"""

import tempfile
from argparse import ArgumentParser
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from quadriga.config import ActorConfig, OptimConfig
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.engines.fsdp.engine import FSDPEngine, Memory, Training
from quadriga.engines.objectives import PolicyObjective
from quadriga.engines.step import update
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.scorers import PolicyScorer
from quadriga.protocol import DataProto
from train_engine import CPU, Meter

VOCABULARY, PROMPT = 512, 64


def make_batch(num_sequences: int, length: int) -> DataProto:
    """Prompts of `PROMPT` tokens, and responses up to `length` tokens in all."""
    tokens = torch.randint(
        1, VOCABULARY, (num_sequences, length), generator=torch.Generator().manual_seed(0)
    )
    mask = torch.ones(num_sequences, length - PROMPT)
    columns = {
        "input_ids": tokens,
        "attention_mask": torch.ones_like(tokens),
        "position_ids": torch.arange(length).expand_as(tokens).clone(),
        "responses": tokens[:, PROMPT:].clone(),
        "response_mask": mask,
        "advantages": torch.linspace(0.5, 1, num_sequences)[:, None]
        * mask,  # a row of zeros would be left out
    }
    return DataProto.from_dict(columns)


def measure(pipe: Connection, num_sequences: int, length: int, folder: Path) -> None:
    """One case; answers with the bytes of the update, and its seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=length,
    )  # fmt: skip
    model = LlamaForCausalLM._from_config(config, attn_implementation=ATTENTION_NAME).eval()
    training = Training(OptimConfig(), grad_clip=1.0, max_nonfinite_steps=1)
    memory = Memory(gradient_checkpointing=True)
    engine = FSDPEngine(
        PolicyScorer(model), dtype=torch.float32, device=CPU, training=training, memory=memory
    )
    engine.offload_between_phases(("weights", "masters", "optimizer"), folder, frees_gradients=True)
    objective, micro = PolicyObjective(ActorConfig()), MicroBatching(None, length)

    def step(batch: DataProto) -> None:
        with engine.awake("weights", "masters", "optimizer"):
            update(engine, batch, objective, Passes(len(batch), 1, micro), lr=1e-4, temperature=1.0)

    step(make_batch(1, 2 * PROMPT))
    batch = make_batch(num_sequences, length)
    meter = Meter()
    meter.start()
    step(batch)
    reading = meter.read()
    pipe.send((reading.memory_bytes, reading.seconds))


def main() -> None:
    """Run the cases, and print a row for each."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--lengths", type=int, nargs="+", default=[8192, 16384, 32768])
    parser.add_argument("--numbers", type=int, nargs="+", default=[1, 2, 4])
    args = parser.parse_args()
    longest, context = max(args.lengths), get_context("spawn")
    cases = dict.fromkeys(
        [(number, longest) for number in args.numbers] + [(2, length) for length in args.lengths]
    )
    print(
        "| sequences | tokens of each | MiB of the update | bytes a token of the longest | seconds |"
    )
    print("|---|---|---|---|---|")
    with tempfile.TemporaryDirectory(prefix="quadriga-benchmark-") as folder:
        for number, length in cases:
            pipe, other = context.Pipe()
            process = context.Process(
                target=measure, args=(other, number, length, Path(folder)), daemon=True
            )
            process.start()
            other.close()  # so that the end of the process is heard
            taken, seconds = pipe.recv()
            process.join()
            print(
                f"| {number} | {length} | {taken / 2**20:.1f} | {taken / length:.0f} | {seconds:.1f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
