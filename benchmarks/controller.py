# SPDX-License-Identifier: Apache-2.0
"""Times what the controller itself costs: the calls of a PPO step on workers that do nothing.

    .venv/bin/python benchmarks/controller.py               # local, and 4 Ray workers
    .venv/bin/python benchmarks/controller.py --workers 2   # fewer processes

A step is eight calls: seven that split a batch of 8 rows of one column over the ranks, of which five bring rows back
and two bring metrics, and one to all ranks without arguments. The ways take turns, step by step, so that whatever else
the machine does falls on all of them; the first steps are left out. The table gives medians:

    local        LocalWorkerGroup, one worker
    ray          RayWorkerGroup
    bare ray     the same number of calls to as many plain Ray actors, without arguments, each call waited for with one
                 ray.get: what Ray costs before the controller does anything

The second table is the driver's work alone, for 1 to 64 ranks: a group whose backend starts nothing and has its outputs
ready. Its last row over its first, divided by 64, is how the cost of one worker grows: at most 1 is linear or better.
The skew is the time from the first rank's start of a call to the last rank's, by the clock of this machine.
"""

import os
import tempfile
import time
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import ray
import torch

from quadriga.protocol import DataProto
from quadriga.single_controller import (
    ClassWithInitArgs,
    Dispatch,
    LocalWorkerGroup,
    Worker,
    WorkerGroup,
    register,
)
from quadriga.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup

NUM_CALLS = 8
LOCAL_LIMIT_MS, RAY_LIMIT_MS = 1.0, 25.0
RANKS = (1, 2, 4, 8, 16, 32, 64)
ROWS_BACK = (
    "generate_sequences",
    "compute_log_prob",
    "compute_ref_log_prob",
    "compute_values",
    "compute_rm_score",
)
METRICS_BACK = ("update_critic", "update_actor")


class IdleWorker(Worker):
    """Has the methods of a PPO step, and nothing in them."""

    def _rows(self, data: DataProto) -> DataProto:
        return data

    def _metrics(self, data: DataProto) -> DataProto:
        return DataProto(meta_info={"metrics": {"loss": 0.0}})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def publish_weights(self) -> None:
        """Nothing."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def clock(self) -> float:
        """When this rank started, in seconds of a clock that all processes of the machine share."""
        return time.monotonic()


for _name in ROWS_BACK:
    setattr(IdleWorker, _name, register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)(IdleWorker._rows))
for _name in METRICS_BACK:
    setattr(
        IdleWorker, _name, register(dispatch_mode=Dispatch.DP_COMPUTE_PROTO)(IdleWorker._metrics)
    )


class BareActor:
    """What a Ray actor costs that has no controller above it."""

    def call(self) -> None:
        """Nothing."""


class NoBackendGroup(WorkerGroup[IdleWorker]):
    """Starts nothing: a rank's output is there at once."""

    def start_all(
        self, method_name: str, per_rank: Sequence[tuple[Sequence[Any], Mapping[str, Any]]]
    ) -> list[Any]:
        """Rows come back as they went, metrics are made up."""
        if method_name in ROWS_BACK:
            return [args[0] for args, _ in per_rank]
        is_update = method_name in METRICS_BACK
        return [
            DataProto(meta_info={"metrics": {"loss": 0.0}}) if is_update else None for _ in per_rank
        ]

    @staticmethod
    def resolve(handles: Sequence[Any], borrow: bool = False) -> list[Any]:
        """The outputs."""
        return list(handles)

    @staticmethod
    def first_outcomes(handles: Sequence[Any]) -> dict[Any, Any]:
        """No step waits for single calls."""
        raise NotImplementedError

    def restart(self, rank: int) -> None:
        """No worker is ever lost."""
        raise NotImplementedError


def make_batch(rows: int) -> DataProto:
    """One column, so that a rank has something to take and to give."""
    return DataProto.from_dict({"row": torch.arange(rows)}, meta_info={"global_steps": 1})


def step(group: WorkerGroup[IdleWorker], batch: DataProto) -> None:
    """The eight calls."""
    for name in (*ROWS_BACK, *METRICS_BACK):
        group.method(name)(batch)
    group.publish_weights()


def bare_step(actors: Sequence[Any]) -> None:
    """As many calls of bare actors."""
    for _ in range(NUM_CALLS):
        ray.get([actor.call.remote() for actor in actors])


def timed_ms(work: Callable[[], None]) -> float:
    """Wall milliseconds of one call of a function."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e3


def in_turns(ways: Mapping[str, Callable[[], None]], args: Namespace) -> dict[str, list[float]]:
    """Milliseconds of each way's steps, the first ones left out."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(args.warm_up + args.steps):
        for name, way in ways.items():
            taken[name].append(timed_ms(way))
    return {name: times[args.warm_up :] for name, times in taken.items()}


def skews_ms(group: WorkerGroup[IdleWorker], calls: int) -> list[float]:
    """Milliseconds between the first and the last rank's start, of some calls."""
    starts = [group.clock() for _ in range(calls)]
    return [(max(times) - min(times)) * 1e3 for times in starts]


def verdict(milliseconds: float, limit: float) -> str:
    """Whether a goal is met."""
    return f"{'within' if milliseconds < limit else 'ABOVE'} {limit:g} ms"


def measure(args: Namespace) -> None:
    """Local, Ray and bare Ray, in turns; then the skew."""
    batch = make_batch(8)
    local = LocalWorkerGroup(ClassWithInitArgs(IdleWorker))
    pool = RayResourcePool([args.workers])
    group = RayWorkerGroup(pool, RayClassWithInitArgs(IdleWorker), name="idle")
    group.clock()
    actors = [ray.remote(num_cpus=0)(BareActor).remote() for _ in range(args.workers)]
    taken = in_turns(
        {
            "local": lambda: step(local, batch),
            "ray": lambda: step(group, batch),
            "bare ray": lambda: bare_step(actors),
        },
        args,
    )
    typical = {name: median(times) for name, times in taken.items()}
    limits = {"local": LOCAL_LIMIT_MS, "ray": RAY_LIMIT_MS}
    print(f"\n{NUM_CALLS} calls, {args.workers} Ray workers, median of {args.steps} steps\n")
    print("| | step ms | fastest | a call ms | over bare ray | |\n|---|---|---|---|---|---|")
    for name, value in typical.items():
        goal = verdict(value, limits[name]) if name in limits else ""
        ratio = value / typical["bare ray"]
        print(
            f"| {name} | {value:.2f} | {min(taken[name]):.2f} | {value / NUM_CALLS:.2f} | {ratio:.2f} | {goal} |"
        )
    skews = skews_ms(group, args.steps)
    print(
        f"\ndispatch skew of {args.workers} ranks: median {median(skews):.2f} ms, worst {max(skews):.2f} ms"
    )
    group.shutdown()
    pool.close()


def measure_growth(args: Namespace) -> None:
    """The driver's work for more and more ranks."""
    groups = {size: NoBackendGroup(IdleWorker, size) for size in RANKS}
    batches = {size: make_batch(8 * size) for size in RANKS}
    ways = {str(size): (lambda size=size: step(groups[size], batches[size])) for size in RANKS}
    taken = {int(name): median(times) for name, times in in_turns(ways, args).items()}
    print("\n| ranks | driver's work, ms a step | ms a rank |\n|---|---|---|")
    for size, value in taken.items():
        print(f"| {size} | {value:.2f} | {value / size:.3f} |")
    growth = taken[RANKS[-1]] / taken[1] / RANKS[-1]
    print(
        f"\na worker's cost, {RANKS[-1]} ranks over 1: {growth:.2f} ({'linear or better' if growth <= 1 else 'GROWS'})"
    )


def main() -> None:
    """Measure, and print two tables."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=4, help="Ray workers")
    parser.add_argument("--steps", type=int, default=50, help="of each way")
    parser.add_argument(
        "--warm-up", type=int, default=10, help="steps before them that are left out"
    )
    args = parser.parse_args()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f}")
    measure_growth(args)
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")
    with tempfile.TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True) as folder:
        ray.init(
            address="local",
            num_cpus=max(args.workers, os.cpu_count() or 1),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="ERROR",
            object_store_memory=100 * 2**20,
            _temp_dir=folder,
        )
        measure(args)
        ray.shutdown()


if __name__ == "__main__":
    main()
