# SPDX-License-Identifier: Apache-2.0
"""How long the rows of a data set take to be filtered by length, and to be opened.

    python benchmarks/data.py filter [--rows 100000] [--processes 1] [--rounds 1] [--medians 1 4]
    python benchmarks/data.py open [--rows 1000000]

`filter` compares `data.filter_overlong_prompts` with a filter that renders and tokenizes row by row, in one run, with
the same number of processes: prompts of 20 to 2,000 tokens (log-uniform), slices of the documentation of the installed
packages, with limits that are so many times the median length. Both must keep the same rows. Of
several rounds, in each of which one follows the other, the first is left out. Beside seconds it prints those of the
CPU, of all processes, which other programs on the machine change less.
`open` makes a file of short prompts, opens it twice, each time in a process of its own, and prints seconds and memory.
"""

import argparse
import inspect
import json
import math
import os
import random
import re
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from quadriga.config import DataConfig
from quadriga.data.rl_dataset import RLHFDataset

PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% if messages[0].role != 'system' %}<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHORTEST, LONGEST = 20, 2000


def corpus(num_chars: int) -> str:
    """Documentation of the installed packages: its files, and what stands between triple quotes in their sources."""
    folder, parts, total = Path(sysconfig.get_path("purelib")), [], 0
    files = sorted(
        file for name in ("*.md", "*.rst", "METADATA", "*.py") for file in folder.rglob(name)
    )
    for file in random.Random(0).sample(files, len(files)):
        text = file.read_text(encoding="utf-8", errors="ignore")
        found = re.findall(r'"{3}(.*?)"{3}', text, re.DOTALL) if file.suffix == ".py" else [text]
        found = [inspect.cleandoc(one) for one in found if len(one) >= 200]
        parts += found
        total += sum(map(len, found))
        if total >= num_chars:
            break
    return "\n".join(parts)


def build_tokenizer(text: str, folder: Path) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer with 32,000 tokens, which are learned from the text, and a chat template."""
    backend = Tokenizer(models.BPE())
    backend.normalizer = normalizers.NFC()
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(PATTERN), "isolated"), level]
    )
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=32_000, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(
        (text[i : i + 10_000] for i in range(0, min(len(text), 8_000_000), 10_000)), trainer
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|endoftext|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    return tokenizer


def write_prompts(path: Path, text: str, num_rows: int, chars: tuple[float, float]) -> None:
    """Write rows whose prompts have so many characters, log-uniform, cut out of the text."""
    rng, low, high = random.Random(1), *map(math.log, chars)
    schema = pa.schema(
        [
            ("data_source", pa.string()),
            ("prompt", pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))),
            ("reward_model", pa.struct([("style", pa.string()), ("ground_truth", pa.string())])),
            ("extra_info", pa.struct([("index", pa.int64())])),
        ]
    )
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, num_rows, 10_000):
            rows = []
            for index in range(first, min(first + 10_000, num_rows)):
                size = int(math.exp(rng.uniform(low, high)))
                start = rng.randrange(len(text) - size)
                prompt = [{"role": "user", "content": text[start : start + size]}]
                truth = {"style": "rule", "ground_truth": str(index)}
                rows.append(
                    {
                        "data_source": "x",
                        "prompt": prompt,
                        "reward_model": truth,
                        "extra_info": {"index": index},
                    }
                )
            writer.write_table(pa.Table.from_pylist(rows, schema=schema))


ROW_BY_ROW = """
import json, os, sys, time
os.environ["TOKENIZERS_PARALLELISM"] = "false"
import pyarrow.parquet as pq
from transformers import PreTrainedTokenizerFast

folder, path, *numbers = sys.argv[1:]
limit, part, num_parts = map(int, numbers)
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
table = pq.read_table(path, columns=["prompt"])
size = -(-len(table) // num_parts)
kept = []
print("ready", flush=True)
sys.stdin.readline()
used = time.process_time()
for row in range(part * size, min((part + 1) * size, len(table))):
    [prompt] = table.column("prompt").slice(row, 1).to_pylist()
    ids = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=True, return_dict=False)
    if len(ids) <= limit:
        kept.append(row)
print(json.dumps([kept, time.process_time() - used]))
"""
"""The rows of a part of a file that a filter of single rows keeps: each is rendered, tokenized and counted. It
begins at a line of its input, and what comes before is not measured."""


def compare_filters(
    num_rows: int, num_processes: int, num_rounds: int, medians: list[int], folder: Path
) -> None:
    """Print how long both filters take."""
    text = corpus(40_000_000)
    tokenizer = build_tokenizer(text, folder)
    sample = text[: 1 << 20]
    chars_a_token = len(sample) / len(tokenizer(sample)["input_ids"])
    path = folder / "prompts.parquet"
    write_prompts(path, text, num_rows, (SHORTEST * chars_a_token, LONGEST * chars_a_token))
    print(
        f"{num_rows} prompts, {chars_a_token:.2f} characters a token, {num_processes} processes",
        flush=True,
    )
    values = {"filter_overlong_prompts": True, "filter_overlong_prompts_workers": num_processes}
    values |= {"image_key": None, "video_key": None}  # tags in the documentation are text

    def row_by_row(limit: int) -> tuple[tuple[float, float], list[int]]:
        command = [sys.executable, "-c", ROW_BY_ROW, str(folder), str(path), str(limit)]
        with ExitStack() as stack:
            processes = []
            for part in range(num_processes):
                pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
                process = subprocess.Popen(
                    [*command, str(part), str(num_processes)], text=True, **pipes
                )
                processes.append(stack.enter_context(process))
            for process in processes:
                process.stdout.readline()
            start = time.perf_counter()
            for process in processes:
                process.stdin.write("\n")
                process.stdin.flush()
            parts = [json.loads(process.communicate()[0]) for process in processes]
            seconds = time.perf_counter() - start
        return (seconds, sum(used for _, used in parts)), [row for kept, _ in parts for row in kept]

    def ours(limit: int, cache: str) -> list[int]:
        config = DataConfig(max_prompt_length=limit, cache_dir=str(folder / cache), **values)
        # As at the start of a run: what an earlier data set has counted is not there.
        return RLHFDataset(
            path, PreTrainedTokenizerFast.from_pretrained(folder), config
        )._rows.tolist()

    prompts = pq.read_table(path, columns=["prompt"]).slice(0, 5000).column("prompt").to_pylist()
    lengths = sorted(
        len(ids) for ids in tokenizer([prompt[0]["content"] for prompt in prompts])["input_ids"]
    )
    median = lengths[len(lengths) // 2]
    for times_median in medians:
        limit = times_median * median
        times = []
        for number in range(num_rounds):
            before, expected = row_by_row(limit)
            after, kept = measured(ours, limit, f"{limit}-{number}")
            again, kept_again = measured(ours, limit, f"{limit}-{number}")
            if not kept == kept_again == expected:
                raise SystemExit(
                    f"limit {limit}: {len(kept)} rows are kept, row by row {len(expected)}"
                )
            times.append((before, after, again))
        (before, its_cpu), (after, our_cpu), (again, _) = np.mean(times[1:] or times, axis=0)
        print(
            f"limit {limit}, {times_median} times the median: {len(expected)} rows kept by both; row by row "
            f"{before:.1f} s ({its_cpu:.1f} s of the CPU), here {after:.1f} s ({our_cpu:.1f} s): "
            f"{before / after:.1f} times faster ({its_cpu / our_cpu:.1f}), second start {again:.2f} s",
            flush=True,
        )


def measured(
    function: Callable[..., list[int]], *arguments: Any
) -> tuple[tuple[float, float], list[int]]:
    """Seconds, those of the CPU in this process and those that it has started, and what the function returns."""
    start, used = time.perf_counter(), sum(os.times()[:4])
    found = function(*arguments)
    return (time.perf_counter() - start, sum(os.times()[:4]) - used), found


OPEN = """
import json, resource, sys, time
from pathlib import Path
from transformers import PreTrainedTokenizerFast
from quadriga.config import DataConfig
from quadriga.data.rl_dataset import RLHFDataset

def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize() / 2**20

def private():
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return sum(int(line.split()[1]) for line in lines if line.startswith("Private_Dirty")) / 1024

folder, files, processes = sys.argv[1:]
tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
before, before_private, start = resident(), private(), time.perf_counter()
config = DataConfig(max_prompt_length=1024, cache_dir=f"{folder}/cache", filter_overlong_prompts_workers=int(processes),
                    image_key=None, video_key=None)
rows = RLHFDataset(files, tokenizer, config)
seconds = time.perf_counter() - start
grown, grown_private = resident() - before, private() - before_private
[rows[item] for item in range(0, len(rows), max(1, len(rows) // 1000))]
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
print(json.dumps([len(rows), seconds, grown, grown_private, peak]))
"""


def open_twice(num_rows: int, num_processes: int, folder: Path) -> None:
    """Print seconds and memory of the first and of the second open of a large file."""
    text = corpus(10_000_000)
    build_tokenizer(text, folder)
    path = folder / "rows.parquet"
    write_prompts(path, text, num_rows, (100, 1000))
    print(
        f"{num_rows} rows, {path.stat().st_size / 2**20:.0f} MB of Parquet, {num_processes} processes"
    )
    for name in ("first", "second"):
        command = [sys.executable, "-c", OPEN, str(folder), str(path), str(num_processes)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        *told, last = done.stdout.splitlines()
        found, seconds, grown, private, peak = json.loads(last)
        print(
            f"{name} open: {found} rows in {seconds:.1f} s; resident memory {grown:+.0f} MB, of which {private:.0f} MB "
            f"are not the file's pages; at most {peak:.0f} MB, libraries and 1,000 fetched rows included",
            *told,
            sep="\n  ",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("filter", "open"))
    parser.add_argument("--rows", type=int)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--medians", type=int, nargs="+", default=[1, 4])
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.what == "filter":
            compare_filters(
                options.rows or 100_000,
                options.processes,
                options.rounds,
                options.medians,
                Path(folder),
            )
        else:
            open_twice(options.rows or 1_000_000, options.processes, Path(folder))


if __name__ == "__main__":
    main()
