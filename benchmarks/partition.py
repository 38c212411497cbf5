# SPDX-License-Identifier: Apache-2.0
"""Times the dealing of rows to data-parallel ranks, and says how even it is.

    .venv/bin/python benchmarks/partition.py                # 1024 rows, 8 ranks
    .venv/bin/python benchmarks/partition.py --ranks 64     # the same, more ranks

Response lengths are log-normal (median 400 tokens, sigma 1, up to 8192), prompts have 100 to 512 tokens. Every rank
gets equally many rows. In every round each case deals a batch of its own; the first round is left out. Cases:

    alone       no two rows share a prompt
    groups      8 rows share a prompt, which a rank computes once
    micro       rows of `groups` on one rank cut into micro-batches of 16384 tokens, as few as they may be

Imbalance is the cost of the longest share over that of the mean one; `in order` is that of the batch as it came.
`whole groups` is the cost of all ranks over what it would be if no prompt were computed on two of them. Micro-batches
are compared as shares are; `fewest` is how many there are over how many the tokens fill.
"""

import os
import time
from argparse import ArgumentParser
from collections.abc import Sequence
from statistics import median

import numpy as np

from quadriga.engines.batches import MicroBatching, RowLength, micro_batches
from quadriga.trainer.balance import Row, SequenceCost, balance, cost_of_share

GROUP_SIZE = 8
MAX_TOKENS = 16_384
GOAL_IMBALANCE, GOAL_MS = 1.01, 50


def draw_rows(num_rows: int, group_size: int, seed: int) -> list[Row]:
    """Rows in the order in which prompts come."""
    draw = np.random.default_rng(seed)
    prompts = draw.integers(100, 513, -(-num_rows // group_size)).tolist()
    responses = np.clip(draw.lognormal(np.log(400), 1.0, num_rows), 1, 8192).astype(int).tolist()
    row = SequenceCost().row
    return [
        row(number // group_size, prompts[number // group_size], response)
        for number, response in enumerate(responses)
    ]


def deal(rows: Sequence[Row], num_ranks: int) -> dict[str, float]:
    """One batch, dealt."""
    start = time.perf_counter()
    dealt = balance(rows, num_ranks, len(rows))
    milliseconds = 1e3 * (time.perf_counter() - start)
    # Counted from the order itself, as `DataProto.chunk` cuts it, and not taken from what `balance` says.
    parts = [part.tolist() for part in np.array_split(dealt.order, num_ranks)]
    if sorted(dealt.order) != list(range(len(rows))):
        raise SystemExit("benchmark: a row is lost, or on two ranks.")
    costs = [cost_of_share(rows, part) for part in parts]
    return {
        "imbalance": max(costs) * num_ranks / sum(costs),
        "in order": dealt.imbalance_before,
        "whole groups": sum(costs) / cost_of_share(rows, range(len(rows))),
        "ms": milliseconds,
    }


def cut(rows: Sequence[Row], num_ranks: int) -> dict[str, float]:
    """The rows of the first rank, cut into micro-batches."""
    cost = SequenceCost()
    own = [
        rows[number]
        for number in balance(rows, num_ranks, len(rows)).order[: len(rows) // num_ranks]
    ]
    lengths = [RowLength(row.prompt, row.num_prompt_tokens, row.num_response_tokens) for row in own]
    start = time.perf_counter()
    batches = micro_batches(
        lengths, MicroBatching(None, MAX_TOKENS), attention_tokens=cost.attention_tokens
    )
    milliseconds = 1e3 * (time.perf_counter() - start)
    costs = [cost_of_share(own, batch) for batch in batches]
    tokens = sum({row.prompt: row.num_prompt_tokens for row in own}.values())
    tokens += sum(row.num_response_tokens for row in own)
    return {
        "imbalance": max(costs) * len(costs) / sum(costs),
        "fewest": len(batches) / -(-tokens // MAX_TOKENS),
        "ms": milliseconds,
    }


def main() -> None:
    """Measure, and print one table."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=51, help="the first is left out")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2: the first is left out")
    cases = {"alone": (deal, 1), "groups": (deal, GROUP_SIZE), "micro": (cut, GROUP_SIZE)}
    results: dict[str, list[dict[str, float]]] = {name: [] for name in cases}
    for number in range(args.rounds):
        for name, (case, group_size) in cases.items():
            results[name].append(case(draw_rows(args.rows, group_size, seed=number), args.ranks))
    load = " ".join(f"{value:.2f}" for value in os.getloadavg())
    print(
        f"{args.rows} rows, {args.ranks} ranks, {args.rounds - 1} rounds, {os.cpu_count()} cores, load average {load}\n"
    )
    print("| case | imbalance, median | highest | ms, median | highest | besides, median |")
    print("|---|---|---|---|---|---|")
    for name, rounds in results.items():
        columns = {key: [round_[key] for round_ in rounds[1:]] for key in rounds[0]}
        cells = [
            f"{typical(columns[key]):.{digits}f}"
            for key, digits in (("imbalance", 4), ("ms", 1))
            for typical in (median, max)
        ]
        others = ", ".join(
            f"{key} {median(values):.3f}"
            for key, values in columns.items()
            if key not in ("imbalance", "ms")
        )
        print(f"| {name} | {' | '.join(cells)} | {others} |")
    print(
        f"\nWanted of `alone` and `groups`: imbalance below {GOAL_IMBALANCE}, in under {GOAL_MS} ms."
    )


if __name__ == "__main__":
    main()
