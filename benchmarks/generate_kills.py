# SPDX-License-Identifier: Apache-2.0
"""Kill `quadriga generate` at random moments: its file must be that of a call that was left alone, row for row.

    .venv/bin/python benchmarks/generate_kills.py outputs/generate_kills --prompts 10000 --n 8 --kills 10 --seed 7

A tiny model, float32, engine `native`. The same command is started again after each SIGKILL, and the last one is left
to its end. Prints the seconds of the call that was left alone, after which batch each kill came, and the verdict. The
status is 1 if the files differ. A folder that has the file of the call left alone is not asked for it again.
"""

import os
import random
import subprocess
import sys
import time
from argparse import ArgumentParser
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

REPOSITORY = Path(__file__).resolve().parents[1]
TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
}


def write_model(folder: Path) -> None:
    """A model of random weights over a vocabulary of words."""
    words = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(61))]
    backend = Tokenizer(
        models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>")
    )
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokens = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, chat_template=TEMPLATE, **tokens)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words), **SIZES, pad_token_id=0, eos_token_id=1, bos_token_id=None
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main() -> int:
    parser = ArgumentParser(description="Kill `quadriga generate` at random moments.")
    parser.add_argument("folder", type=Path)
    for name, value in {"prompts": 10_000, "n": 8, "kills": 10, "seed": 7}.items():
        parser.add_argument(f"--{name}", type=int, default=value)
    args = parser.parse_args()
    folder, drawn = args.folder.absolute(), random.Random(args.seed)
    folder.mkdir(parents=True, exist_ok=True)
    write_model(folder / "model")
    texts = [
        " ".join(f"w{number}" for number in range(row % 61 % 7 + 1)) for row in range(args.prompts)
    ]
    rows = [
        {"prompt": [{"role": "user", "content": text}], "row": row}
        for row, text in enumerate(texts)
    ]
    pq.write_table(pa.Table.from_pylist(rows), folder / "prompts.parquet")
    words = [
        sys.executable,
        "-m",
        "quadriga",
        "generate",
        str(folder / "model"),
        "--n",
        str(args.n),
    ]
    words += [
        "--data",
        str(folder / "prompts.parquet"),
        "data.max_prompt_length=32",
        "data.max_response_length=8",
    ]
    words += ["actor_rollout_ref.actor.fsdp_config.model_dtype=float32", "--output"]
    own = {"PYTHONPATH": str(REPOSITORY), "CUDA_VISIBLE_DEVICES": ""}
    options = {"env": os.environ | own, "stdout": subprocess.DEVNULL}
    alone, killed = folder / "alone.parquet", folder / f"killed_{args.seed}.parquet"
    if not alone.exists():
        begun = time.monotonic()
        subprocess.run([*words, str(alone)], check=True, **options)
        print(f"left alone: {time.monotonic() - begun:.0f} s", flush=True)
    journal, seen = folder / f"{killed.name}.part" / "responses.jsonl", []

    def num_batches() -> int:
        return journal.read_bytes().count(b"\n") if journal.exists() else 0

    most = 2 * -(-args.prompts // 256) // (args.kills + 1)
    for _ in range(args.kills):
        wanted = num_batches() + drawn.randint(0, most)
        with subprocess.Popen([*words, str(killed)], **options) as process:
            while process.poll() is None and num_batches() < wanted:
                time.sleep(0.005)
            # Within the batch, or while it is written.
            time.sleep(drawn.uniform(0, 1))
            process.kill()
        seen.append(num_batches())
        print(f"killed after batch {seen[-1]}", flush=True)
    subprocess.run([*words, str(killed)], check=True, **options)
    table = pq.read_table(killed)
    count, is_same = (
        sum(map(len, table.column("responses").to_pylist())),
        table == pq.read_table(alone),
    )
    print(
        f"{args.kills} kills, {table.num_rows} rows, {count} responses: {'the same file' if is_same else 'DIFFERENT'}"
    )
    return 0 if is_same else 1


if __name__ == "__main__":
    sys.exit(main())
