# SPDX-License-Identifier: Apache-2.0
"""Times the way of a batch to Ray workers and back, against `torch.save` and against copying in memory.

    .venv/bin/python benchmarks/transport.py             # 406 rows x 8192 tokens x 3 columns, 4 workers
    .venv/bin/python benchmarks/transport.py --rows 64   # the same, smaller

The workers return the rows they get. In every round each way takes one turn, with a batch of its own that
no store has seen; the first round is left out (it allocates). Ways:

    ours         quadriga.single_controller.ray.transport, results lent and concatenated
    described    each rank's chunk consolidated and serialized with torch.save (described_proto.py)
    copy         the batch copied twice, once for each hop, into memory that is there already
    again        ours, with a batch that another role has got just before: its columns are in the store

Memory is the driver's resident set, shared memory that it maps included: the highest value of the round
(VmHWM, reset through /proc/self/clear_refs) less the value before the batch was made, over the size of the
batch. The batch itself is one of that, the collected result another.
"""

import ctypes
import gc
import os
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import ray
import torch

from described_proto import described_chunks
from quadriga.protocol import DataProto
from quadriga.single_controller.ray.transport import (
    OUTBOX,
    pack_result,
    release_pages,
    unpack,
    unpack_result,
)

TENSORS = ("input_ids", "attention_mask", "position_ids")
PROMPT_TOKENS = 512


class EchoWorker:
    """Returns what it gets."""

    def ours(self, header: Any, *values: Any) -> Any:
        """A message of ours, opened and packed again."""
        (data,), _ = unpack(header, values)
        return pack_result(data)

    def plain(self, data: Any) -> Any:
        """Whatever Ray has unpickled."""
        return data


def make_batch(rows: int, tokens: int) -> DataProto:
    """Three int64 columns and the object arrays of a batch of prompts."""
    return DataProto.from_dict(
        {key: torch.randint(0, 150_000, (rows, tokens)) for key in TENSORS},
        {
            "uid": [f"{row:032x}" for row in range(rows)],
            "data_source": ["openai/gsm8k"] * rows,
            "raw_prompt_ids": [list(range(row, row + PROMPT_TOKENS)) for row in range(rows)],
            "reward_model": [{"style": "rule", "ground_truth": str(row)} for row in range(rows)],
            "extra_info": [
                {"index": row, "split": "train", "question": "How many? " * 20}
                for row in range(rows)
            ],
        },
        {"global_steps": 1},
    )


def by_ours(workers: list[Any], data: DataProto) -> DataProto:
    """There and back through the transport."""
    messages = OUTBOX.pack([((part,), {}) for part in data.chunk(len(workers))])
    refs = [
        worker.ours.remote(message.body, *message.refs)
        for worker, message in zip(workers, messages, strict=True)
    ]
    return DataProto.concat([unpack_result(value, borrow=True) for value in ray.get(refs)])


def by_description(workers: list[Any], data: DataProto) -> DataProto:
    """There and back by torch.save."""
    chunks = described_chunks(data, len(workers))
    return DataProto.concat(
        ray.get([worker.plain.remote(chunk) for worker, chunk in zip(workers, chunks, strict=True)])
    )


def resident_bytes(field_name: str) -> int:
    """VmRSS or VmHWM of this process."""
    for line in Path("/proc/self/status").read_text(encoding="utf-8").splitlines():
        if line.startswith(f"{field_name}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"benchmark: /proc/self/status has no {field_name}: this needs Linux.")


@dataclass
class Way:
    """One way, and what its rounds took.

    Attributes:
        prepare: what is not timed, given the batch.
        run: the way, given the batch.
        seconds, memory: of each round; memory in sizes of the batch.
    """

    name: str
    run: Callable[[DataProto], DataProto | None]
    prepare: Callable[[DataProto], Any] = lambda data: None
    seconds: list[float] = field(default_factory=list)
    memory: list[float] = field(default_factory=list)

    def take_turn(self, args: Namespace) -> None:
        """One round with a fresh batch."""
        gc.collect()
        # What malloc kept of earlier rounds, and what they mapped, would hide what this one needs.
        ctypes.CDLL(None).malloc_trim(0)
        release_pages()
        before = resident_bytes("VmRSS")
        data = make_batch(args.rows, args.tokens)
        self.prepare(data)
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
        start = time.perf_counter()
        result = self.run(data)
        self.seconds.append(time.perf_counter() - start)
        self.memory.append(
            (resident_bytes("VmHWM") - before) / sum(data.batch[key].nbytes for key in TENSORS)
        )
        if result is not None and not all(
            torch.equal(result.batch[key], data.batch[key]) for key in TENSORS
        ):
            raise SystemExit(f"benchmark: {self.name} returned another batch than it got.")

    def typical_ms(self) -> float:
        """The median of the rounds after the first."""
        return 1e3 * median(self.seconds[1:])

    def typical_memory(self) -> float:
        """The highest of the rounds after the first."""
        return max(self.memory[1:])


def copy_way(args: Namespace) -> Way:
    """The batch copied once per hop, there and back."""
    targets = {key: torch.zeros(args.rows, args.tokens, dtype=torch.int64) for key in TENSORS}

    def run(data: DataProto) -> None:
        for _hop in ("there", "back"):
            for key, target in targets.items():
                target.copy_(data.batch[key])

    return Way("copy", run)


def measure(args: Namespace) -> list[Way]:
    """All ways, taking turns."""
    environment = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
    ray.init(
        address="local",
        num_cpus=args.workers,
        include_dashboard=False,
        object_store_memory=2 << 30,
        runtime_env={"env_vars": environment},
        _temp_dir=args.ray_dir,
        _system_config={"free_objects_period_milliseconds": 0},
    )
    actor = ray.remote(num_cpus=1)(EchoWorker)
    workers = [actor.remote() for _ in range(args.workers)]
    ways = [
        Way("ours", lambda data: by_ours(workers, data)),
        Way("described", lambda data: by_description(workers, data)),
        copy_way(args),
        Way(
            "again",
            lambda data: by_ours(workers, data),
            prepare=lambda data: by_ours(workers, data),
        ),
    ]
    for number in range(args.rounds):
        for way in ways:
            way.take_turn(args)
        words = ", ".join(f"{way.name} {way.seconds[-1] * 1e3:.0f} ms" for way in ways)
        print(f"  round {number}: {words}{' (left out)' if not number else ''}", flush=True)
    ray.shutdown()
    return ways


def main() -> None:
    """Measure, and print one table."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", type=int, default=406)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=8, help="the first is left out")
    parser.add_argument("--ray-dir", help="where Ray keeps its files (default: Ray's own)")
    args = parser.parse_args()
    if args.rounds < 2:
        parser.error("--rounds must be at least 2: the first is left out")
    ways = {way.name: way for way in measure(args)}
    ours, copy = ways["ours"].typical_ms(), ways["copy"].typical_ms()
    megabytes = 3 * args.rows * args.tokens * 8 / 1e6
    print(
        f"\n{args.rows} rows x {args.tokens} tokens x 3 int64 columns ({megabytes:.0f} MB) and 5 object arrays, ",
        end="",
    )
    print(
        f"{args.workers} workers, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}\n"
    )
    print("| way | ms, median [min, max] | times copying | peak memory, batches |")
    print("|---|---|---|---|")
    for way in ways.values():
        low, high = 1e3 * min(way.seconds[1:]), 1e3 * max(way.seconds[1:])
        cells = f"{way.typical_ms():.1f} [{low:.1f}, {high:.1f}] | {way.typical_ms() / copy:.2f} "
        print(f"| {way.name} | {cells}| {way.typical_memory():.2f} |")
    print(
        f"\nours is {ways['described'].typical_ms() / ours:.2f} times faster than described (at least 2.5 wanted),"
    )
    print(f"takes {ours / copy:.2f} times as long as copying (at most 6 wanted),")
    print(
        f"and its driver holds {ways['ours'].typical_memory():.2f} batches at its peak (below 2.2 wanted)."
    )


if __name__ == "__main__":
    main()
