# SPDX-License-Identifier: Apache-2.0
"""Writes a large run, and measures how long `quadriga view` takes for its first view and for a step.

    python benchmarks/view.py FOLDER --steps 2000 --rollouts 512 --tokens 400

Every hundredth step is written; the others are links to it, so that the folder stays small.
"""

import argparse
import json
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pyarrow as pa

from quadriga.observe.records import SCHEMA, STEP, RecordFolder, TokenTable
from quadriga.view.data import ViewData

NUM_METRICS = 120
GROUP = 8
VOCABULARY = 32_000


def main() -> None:
    """Write the run unless it exists, and print what each answer takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rollouts", type=int, default=512)
    parser.add_argument("--tokens", type=int, default=400)
    options = parser.parse_args()
    if not options.folder.exists():
        write_run(options.folder, options.steps, options.rollouts, options.tokens)
    with TemporaryDirectory() as cache:
        print("cold")
        measure(options.folder, Path(cache), options.steps)
        print("again, from the index")
        measure(options.folder, Path(cache), options.steps)


def measure(folder: Path, cache: Path, num_steps: int) -> None:
    """Print the seconds of each answer, in the order in which a page asks."""
    begin = time.perf_counter()
    data = ViewData([folder], cache)
    index = data.index(data.run(folder.name))
    run = {"run": folder.name}
    step = {**run, "step": str(num_steps // 2)}
    questions = [("runs", {}), ("summary", run), ("metrics", run), ("steps", run)]
    questions += [("rollouts", step), ("rollouts", step), ("rollout", {**step, "place": "7"})]
    for name, query in questions:
        print_times(data, name, query)
    index.wait()
    print(f"index      {time.perf_counter() - begin:6.1f} s  {len(index.steps)} files")
    for name in ("steps", "prompts", "health"):
        print_times(data, name, run)


def print_times(data: ViewData, name: str, query: dict[str, str]) -> None:
    """Ask once, and print wall time, processor time of this thread, and the size of the answer."""
    start = time.perf_counter()
    start_cpu = time.thread_time()
    size = len(data.answer(name, query))
    wall_s = time.perf_counter() - start
    cpu_s = time.thread_time() - start_cpu
    print(f"{name:10} {wall_s:6.3f} s  {cpu_s:6.3f} s of processor time  {size / 1e6:6.2f} MB")


def write_run(folder: Path, num_steps: int, num_rollouts: int, num_tokens: int) -> None:
    """Write a run with random tokens."""
    random = np.random.default_rng(0)
    record = RecordFolder(folder)
    record.folder.mkdir(parents=True)
    texts = [f" token{number}".encode() for number in range(VOCABULARY)]
    TokenTable(texts, {0, 1}).write(record.folder / "tokens.parquet")
    lines = []
    for step in range(1, num_steps + 1):
        values = {f"metric/{number}": random.random() for number in range(NUM_METRICS)}
        lines.append(json.dumps({"step": step, "critic/score/mean": random.random(), **values}))
        if step % 100 == 1:
            rows = random_rows(random, num_rollouts, num_tokens)
            record.write(step, STEP, pa.Table.from_pylist(rows, schema=SCHEMA), {})
        else:
            os.link(record.path(step - (step - 1) % 100), record.path(step))
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "config.yaml").write_text(f"trainer: {{}}\n# steps 1 to {num_steps}\n")


def random_rows(random: np.random.Generator, num_rows: int, mean: int) -> list[dict[str, Any]]:
    """Rows of a step with responses of different lengths."""
    rows = []
    for number in range(num_rows):
        length = int(random.integers(mean // 2, mean * 3 // 2))
        prompt = number // GROUP + int(random.integers(20)) * num_rows
        score = float(random.integers(2))
        row = {
            "rollout_id": f"{prompt}/{number}",
            "uid": str(number // GROUP),
            "source_row": f"data/train.parquet row {prompt}",
            "data_source": "math",
            "score": score,
            "reward": score,
            "prompt_ids": random.integers(VOCABULARY, size=150),
            "response_ids": random.integers(VOCABULARY, size=length),
            "response_mask": np.ones(length, bool),
            "token_versions": np.ones(length, np.int32),
            "reward_parts": json.dumps({"format": score}),
            "row": json.dumps({"level": 3, "reward_model": {"ground_truth": "7"}}),
        }
        for name in ("rollout_log_probs", "log_probs", "entropies", "advantages"):
            row[name] = random.random(length, np.float32)
        row |= {"row_index": number, "position": number}
        rows.append(row)
    return rows


if __name__ == "__main__":
    main()
