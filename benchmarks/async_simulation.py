# SPDX-License-Identifier: Apache-2.0
"""What asynchronous training would bring: discrete events around the scheduler that real runs have.

    .venv/bin/python benchmarks/async_simulation.py                        # 8 to 1,024 GPUs, a long-tailed law
    .venv/bin/python benchmarks/async_simulation.py --gpus 64 --median 2000 --longest 16384 --max-staleness 0 1 2
    .venv/bin/python benchmarks/async_simulation.py --recorded outputs/RUN --gpus 2

Generation and training have GPUs of their own, in every split of a list.
quadriga/trainer/asynchronous/schedule.py decides what starts where and when, with which weights, and which
groups a step learns from; here are only the times:

    a worker      `gpus_per_worker` GPUs that decode all of their sequences together; a decode step takes `decode_s`,
                  and `sequence_s` more for each sequence in it
    a step        `step_s`, and for each token `token_s` over the number of training GPUs
    weights       can be loaded `publish_s` after a step, which the trainer does not wait for; a worker makes no token
                  for `load_s` while it takes them
    a reward      is there some seconds after the last response of its group

Response lengths are log-normal, cut at the longest, or those of a recorded run; each side has the same ones. The table
has, for each number of GPUs and each `max_staleness`, the best split: seconds a step, the speed-up over lockstep on all
GPUs in turns (`colocated`, which changes over in `switch_s`) and over lockstep on the same split, shares of time in
which GPUs wait, and which share of tokens is how many versions old when it is learned from. What is recommended is the
smallest `max_staleness` within 3 % of the fastest.

`--recorded FILE` has a line of JSON for each step of a lockstep run: {"lengths": [[tokens of each response], one list a
prompt], "gen_s": ..., "train_s": ..., "reward_s": ...}; or FILE is the directory of such a run, which had
trainer.rollout_data_dir. Then `decode_s`, `sequence_s`, `step_s` and `token_s` are those that fit these seconds best;
the run had `--recorded-workers` workers and `--recorded-gpus` training GPUs.

What it does not know: prompts are computed in no time, groups are all kept, and machines do not fail.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from quadriga.trainer.asynchronous.schedule import Rules
from quadriga.trainer.asynchronous.simulation import (
    Costs,
    Simulation,
    SimulationResult,
    Workload,
    fit_recorded_run,
)
from quadriga.trainer.preflight import read_recorded_run

SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of the GPUs that train."""
NEAR = 1.03


def colocated(
    rules: Rules, workload: Workload, costs: Costs, num_workers: int, gpus: int
) -> SimulationResult:
    """Simulate lockstep, where generation and training take turns on the same ranks.

    Args:
        rules: rules of a schedule; their `max_staleness` is not used.
        workload: responses and rewards.
        costs: times. Publishing and loading take none, but each step takes `switch_s` more.
        num_workers: number of rollout engines on all ranks.
        gpus: number of ranks.
    """
    step_s = costs.step_s + costs.switch_s
    in_turns = replace(costs, step_s=step_s, publish_s=0.0, load_s=0.0)
    return Simulation(replace(rules, max_staleness=0), workload, in_turns, num_workers, gpus).run()


def long_tailed(steps: int, prompts: int, responses: int, args: Namespace) -> Workload:
    """Log-normal lengths and reward times."""
    dice = np.random.default_rng(args.seed)
    lengths = np.exp(dice.normal(np.log(args.median), args.sigma, (steps, prompts, responses)))
    rewards = np.exp(dice.normal(np.log(max(args.reward_s, 1e-9)), args.sigma, (steps, prompts)))
    return Workload(lengths.clip(1, args.longest).round(), rewards)


@dataclass(frozen=True)
class Choice:
    """A split and a bound, and what came of it; `same_split_s` is that of lockstep on the split."""

    max_staleness: int
    train_gpus: int
    rollout_gpus: int
    outcome: SimulationResult
    same_split_s: float


def choices(
    rules: Rules, workload: Workload, costs: Costs, gpus: int, args: Namespace
) -> list[Choice]:
    """For each bound the split in which it is fastest."""
    units = gpus // args.gpus_per_worker
    splits = dict.fromkeys(min(max(1, round(units * share)), units - 1) for share in SPLITS)
    lockstep, found = {}, []
    for bound in args.max_staleness:
        tried = []
        for train in splits:
            sizes = (units - train, train * args.gpus_per_worker)
            own = replace(rules, max_staleness=bound)
            outcome = Simulation(own, workload, costs, *sizes).run()
            if train not in lockstep:
                still = replace(rules, max_staleness=0)
                lockstep[train] = Simulation(still, workload, costs, *sizes).run().seconds
            tried.append(Choice(bound, sizes[1], gpus - sizes[1], outcome, lockstep[train]))
        found.append(min(tried, key=lambda one: one.outcome.seconds))
    return found


def shares(ages: Mapping[int, float]) -> str:
    """Share of the tokens of each staleness."""
    total = sum(ages.values())
    return " ".join(f"{age}: {ages[age] / total:.2f}" for age in sorted(ages))


def table(gpus: int, rules: Rules, workload: Workload, costs: Costs, args: Namespace) -> str:
    """The lines of one number of GPUs."""
    turns = colocated(rules, workload, costs, gpus // args.gpus_per_worker, gpus)
    lines, found = [], choices(rules, workload, costs, gpus, args)
    for one in found:
        lines.append(
            f"| {gpus} | {one.max_staleness} | {one.train_gpus} + {one.rollout_gpus} "
            f"| {one.outcome.seconds / rules.num_steps:.3g} | {turns.seconds / one.outcome.seconds:.2f} "
            f"| {one.same_split_s / one.outcome.seconds:.2f} "
            f"| {one.outcome.train_idle:.2f} / {one.outcome.rollout_idle:.2f} | {shares(one.outcome.ages)} |"
        )
    fastest = min(one.outcome.seconds for one in found)
    best = next(one for one in found if one.outcome.seconds <= NEAR * fastest)
    lines.append(
        f"| {gpus} | colocated | {gpus} | {turns.seconds / rules.num_steps:.3g} | 1.00 |  |  | recommended: "
        f"max_staleness={best.max_staleness}, {best.train_gpus} GPUs train |"
    )
    return "\n".join(lines)


def main() -> None:
    """Print a table."""
    parser = ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 256, 1024])
    parser.add_argument(
        "--gpus-per-worker", type=int, default=1, help="that hold one rollout engine"
    )
    parser.add_argument("--max-staleness", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--in-flight", choices=("continue", "finish"), default="continue")
    parser.add_argument("--on-stale", choices=("wait", "drop"), default="wait")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=256, help="of a step")
    parser.add_argument("--responses", type=int, default=8, help="to a prompt")
    parser.add_argument(
        "--mini-batch",
        type=int,
        default=0,
        help="prompts of an update that begins once it is complete",
    )
    parser.add_argument("--median", type=float, default=1000.0, help="tokens of a response")
    parser.add_argument("--longest", type=int, default=8_000)
    parser.add_argument(
        "--sigma", type=float, default=1.0, help="of the logarithms of lengths and of reward times"
    )
    parser.add_argument("--reward-s", type=float, default=1.0, help="median seconds of a reward")
    parser.add_argument("--recorded", type=Path, help="a lockstep run's steps, in place of the law")
    parser.add_argument("--recorded-workers", type=int, default=1)
    parser.add_argument("--recorded-gpus", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    for name, value in vars(Costs()).items():
        kind = (
            {"action": "store_true"} if value is False else {"type": type(value), "default": value}
        )
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, **kind)
    args = parser.parse_args()
    costs = Costs(**{name: getattr(args, name) for name in vars(Costs())})
    print(
        "| GPUs | max_staleness | train + rollout | s a step | over colocated | over lockstep, same split ",
        end="",
    )
    print("| idle, train / rollout | tokens by age |\n|---|---|---|---|---|---|---|---|")
    for gpus in args.gpus:
        if args.recorded:
            sizes = (args.recorded_workers, args.recorded_gpus)
            file = args.recorded
            lines = (
                read_recorded_run(file)[1]
                if file.is_dir()
                else list(map(json.loads, file.read_text().splitlines()))
            )
            workload, costs = fit_recorded_run(lines, args.steps, costs, *sizes)
        else:
            workload = long_tailed(args.steps, args.prompts, args.responses, args)
        _, prompts, responses = workload.lengths.shape
        ways = {
            "in_flight": args.in_flight,
            "on_stale": args.on_stale,
            "part_size": args.mini_batch,
        }
        rules = Rules(num_groups=prompts, group_size=responses, num_steps=args.steps, **ways)
        print(table(gpus, rules, workload, costs, args), flush=True)


if __name__ == "__main__":
    main()
