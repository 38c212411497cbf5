# SPDX-License-Identifier: Apache-2.0
"""What asynchronous training would bring: discrete events around the scheduler that real runs have.

    .venv/bin/python benchmarks/async_simulation.py                        # 8 to 1,024 GPUs, a long-tailed law
    .venv/bin/python benchmarks/async_simulation.py --gpus 64 --median 2000 --longest 16384 --max-staleness 0 1 2
    .venv/bin/python benchmarks/async_simulation.py --recorded outputs/RUN --gpus 2

Generation and training have GPUs of their own, in every split of a list. quadriga/trainer/async_schedule.py decides
what starts where and when, with which weights, and which groups a step learns from; here are only the times:

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

import heapq
import json
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from quadriga.data import load_tokenizer
from quadriga.observe.tracking.jsonl import METRICS_FILE
from quadriga.trainer.async_schedule import Drop, HandOver, Load, Resume, Rules, Schedule, Start

SPLITS = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4)
"""Shares of the GPUs that train."""
NEAR = 1.03


@dataclass(frozen=True)
class Costs:
    """Seconds of what is done, and the most sequences of a worker; waiting is what the simulation finds. With
    `recomputes` a load takes `sequence_s` more for each token under way, whose cache is computed anew."""

    decode_s: float = 0.02
    sequence_s: float = 1e-4
    step_s: float = 2.0
    token_s: float = 4e-4
    publish_s: float = 2.0
    load_s: float = 1.0
    recomputes: bool = False
    switch_s: float = 10.0
    capacity: int = 256


@dataclass(frozen=True)
class Workload:
    """Tokens of each response [steps, prompts, n], and seconds of each group's reward [steps, prompts]."""

    lengths: np.ndarray
    reward_s: np.ndarray


@dataclass
class Outcome:
    """A simulated run: its seconds, the shares of them in which training and rollout GPUs wait, and tokens by age."""

    seconds: float = 0.0
    train_idle: float = 0.0
    rollout_idle: float = 0.0
    ages: Counter[int] = field(default_factory=Counter)

    @property
    def age_shares(self) -> str:
        """Share of tokens by the versions that they are old."""
        total = sum(self.ages.values())
        return " ".join(f"{age}: {self.ages[age] / total:.2f}" for age in sorted(self.ages))


class Worker:
    """Sequences that are decoded together: all of them are at the same number of decode steps since the beginning."""

    def __init__(self, costs: Costs, version: int) -> None:
        self.costs = costs
        self.position, self.now, self.busy_s = 0.0, 0.0, 0.0
        self.ends: list[tuple[float, int, int]] = []  # decode step at which a sample ends, its group, its number
        self.begins: dict[tuple[int, int], float] = {}
        self.versions = [(0.0, version)]  # from which decode step on which weights
        self.is_paused = False
        self.stamp = 0  # of the event that is valid

    @property
    def seconds_each(self) -> float:
        """Of a decode step."""
        return self.costs.decode_s + self.costs.sequence_s * len(self.begins)

    def advance(self, now: float) -> None:
        """Decode up to this time."""
        if self.begins and not self.is_paused:
            self.position += (now - self.now) / self.seconds_each
            self.busy_s += now - self.now
        self.now = now

    def next_end(self) -> float | None:
        """When the next sample ends, if nothing else happens."""
        while self.ends and self.ends[0][1:] not in self.begins:
            heapq.heappop(self.ends)  # was aborted
        if not self.ends or self.is_paused:
            return None
        return self.now + max(0.0, self.ends[0][0] - self.position) * self.seconds_each

    def tokens_by_version(self, begin: float, end: float) -> Counter[int]:
        """Of a sample that was decoded between two positions."""
        found: Counter[int] = Counter()
        bounds = [*(start for start, _ in self.versions[1:]), float("inf")]
        for (start, version), stop in zip(self.versions, bounds, strict=True):
            if (tokens := min(end, stop) - max(begin, start)) > 0:
                found[version] += tokens
        return found


class Simulation:
    """A run of `rules.num_steps` steps on some workers and training GPUs."""

    def __init__(self, rules: Rules, workload: Workload, costs: Costs, num_workers: int, train_gpus: int) -> None:
        self.rules, self.workload, self.costs, self.train_gpus = rules, workload, costs, train_gpus
        self.schedule = Schedule(rules)
        self.workers = {number: Worker(costs, 0) for number in range(num_workers)}
        self.events: list[tuple[float, int, Any]] = []
        self.order, self.now, self.train_s, self.published = count(), 0.0, 0.0, 0
        self.places: dict[int, tuple[int, int]] = {}  # batch and row of each group
        self.tokens: dict[int, Counter[int]] = {}  # of each group by version
        self.awaited: dict[int, list[int]] = {}  # loads of a version that is not published yet
        self.ages: Counter[int] = Counter()

    def run(self) -> Outcome:
        """Until the last step is done."""
        for number in self.workers:
            self.schedule.joined(number, 0, self.costs.capacity)
        self.schedule.wants_batch()
        self.act()
        while self.events:
            self.now, _, happen = heapq.heappop(self.events)
            happen()
            if not self.events or self.events[0][0] > self.now:
                self.act()
        for worker in self.workers.values():
            worker.advance(self.now)
        busy = sum(worker.busy_s for worker in self.workers.values()) / len(self.workers)
        return Outcome(self.now, 1 - self.train_s / self.now, 1 - busy / self.now, self.ages)

    def after(self, seconds: float, happen: Any) -> None:
        """Let something happen in so many seconds."""
        heapq.heappush(self.events, (self.now + seconds, next(self.order), happen))

    def act(self) -> None:
        """Do what the schedule decides."""
        for decision in self.schedule.decide():
            match decision:
                case Start():
                    self.start(decision)
                case Load(worker, version):
                    self.pause(worker)
                    if version <= self.published:
                        self.after(self.load_s(worker), partial(self.loaded, worker, version))
                    else:
                        self.awaited.setdefault(version, []).append(worker)
                case Resume(worker):
                    self.awaited = {
                        version: [one for one in ones if one != worker] for version, ones in self.awaited.items()
                    }
                    self.go_on(worker)
                case HandOver():
                    self.train(decision)
                case Drop(group, _, running):
                    for number, sample in running:
                        self.workers[number].advance(self.now)
                        del self.workers[number].begins[group, sample]
                        self.await_end(number)

    def start(self, start: Start) -> None:
        """Samples of a group join those that a worker decodes."""
        self.places[start.group] = start.batch - 1, start.row
        worker = self.workers[start.worker]
        worker.advance(self.now)
        for sample in start.samples:
            length = float(self.workload.lengths[start.batch - 1, start.row % self.workload.lengths.shape[1], sample])
            worker.begins[start.group, sample] = worker.position
            heapq.heappush(worker.ends, (worker.position + length, start.group, sample))
        self.await_end(start.worker)

    def await_end(self, number: int) -> None:
        """Wait for the next sample of a worker; what was waited for before does not hold any more."""
        worker = self.workers[number]
        worker.stamp += 1
        if (end := worker.next_end()) is not None:
            self.after(end - self.now, partial(self.ended, number, worker.stamp))

    def ended(self, number: int, stamp: int) -> None:
        """The next sample of a worker is complete."""
        worker = self.workers[number]
        if stamp != worker.stamp:
            return
        worker.advance(self.now)
        end, group, sample = heapq.heappop(worker.ends)
        worker.position = max(worker.position, end)
        by_version = worker.tokens_by_version(worker.begins.pop((group, sample)), end)
        self.tokens.setdefault(group, Counter()).update(by_version)
        self.await_end(number)
        if self.schedule.ended(number, group, sample, min(by_version)):
            batch, row = self.places[group]
            seconds = float(self.workload.reward_s[batch, row % self.workload.reward_s.shape[1]])
            self.after(seconds, partial(self.schedule.graded, group))

    def load_s(self, number: int) -> float:
        """Of a worker that takes weights now."""
        worker = self.workers[number]
        tokens = sum(worker.position - begin for begin in worker.begins.values())
        return self.costs.load_s + self.costs.sequence_s * tokens * self.costs.recomputes

    def pause(self, number: int) -> None:
        """A worker makes no token."""
        self.workers[number].advance(self.now)
        self.workers[number].is_paused = True
        self.await_end(number)

    def go_on(self, number: int) -> None:
        """It makes tokens again."""
        self.workers[number].advance(self.now)
        self.workers[number].is_paused = False
        self.await_end(number)

    def loaded(self, number: int, version: int) -> None:
        """A worker has other weights."""
        worker = self.workers[number]
        self.go_on(number)
        oldest = min(worker.begins.values(), default=worker.position)
        while len(worker.versions) > 1 and worker.versions[1][0] <= oldest:
            worker.versions.pop(0)
        worker.versions.append((worker.position, version))
        self.schedule.loaded(number, version)

    def train(self, batch: HandOver) -> None:
        """A training step on these groups begins, or goes on with them."""
        total, version = 0.0, self.rules.version_at(batch.step)
        for group in batch.groups:
            for own, tokens in self.tokens.pop(group).items():
                self.ages[version - own] += tokens
                total += tokens
        share = len(batch.groups) / self.rules.num_groups
        seconds = self.costs.step_s * share + total * self.costs.token_s / self.train_gpus
        self.train_s += seconds
        self.after(seconds, partial(self.trained, batch.step) if batch.is_last else self.schedule.wants_batch)

    def trained(self, step: int) -> None:
        """A step is done: its weights leave, and the next batch is wanted."""
        if step == self.rules.num_steps:
            self.events.clear()
            return
        if self.rules.publishes(step):
            self.after(self.costs.publish_s, partial(self.publish, self.rules.version_at(step + 1)))
        self.schedule.wants_batch()

    def publish(self, version: int) -> None:
        """Weights can be loaded."""
        self.published = version
        self.schedule.has_published(version)
        for worker in self.awaited.pop(version, []):
            self.after(self.load_s(worker), partial(self.loaded, worker, version))


def colocated(rules: Rules, workload: Workload, costs: Costs, num_workers: int, gpus: int) -> Outcome:
    """Lockstep on all GPUs in turns, which change over in `switch_s` and have the weights at once."""
    own = replace(costs, step_s=costs.step_s + costs.switch_s, publish_s=0.0, load_s=0.0)
    return Simulation(replace(rules, max_staleness=0), workload, own, num_workers, gpus).run()


def long_tailed(steps: int, prompts: int, responses: int, args: Namespace) -> Workload:
    """Log-normal lengths and reward times."""
    dice = np.random.default_rng(args.seed)
    lengths = np.exp(dice.normal(np.log(args.median), args.sigma, (steps, prompts, responses)))
    rewards = np.exp(dice.normal(np.log(max(args.reward_s, 1e-9)), args.sigma, (steps, prompts)))
    return Workload(lengths.clip(1, args.longest).round(), rewards)


def recorded(file: Path, num_steps: int, costs: Costs, num_workers: int, gpus: int) -> tuple[Workload, Costs]:
    """Lengths of a lockstep run, again and again, and the costs that fit its seconds best."""
    lines = lines_of_run(file) if file.is_dir() else read_lines(file)
    lengths = np.array([line["lengths"] for line in lines], dtype=float)
    # Groups go to the worker with the least to do: about an equal share each, the longest response somewhere.
    longest, tokens = lengths.max((1, 2)), lengths.sum((1, 2))
    decode_s, sequence_s = _fit(longest, tokens / num_workers, [line["gen_s"] for line in lines])
    step_s, token_s = _fit(np.ones(len(lines)), tokens / gpus, [line["train_s"] for line in lines])
    again = [step % len(lines) for step in range(num_steps)]
    rewards = np.repeat([[line.get("reward_s", 0.0)] for line in lines], lengths.shape[1], 1)
    fitted = replace(costs, decode_s=decode_s, sequence_s=sequence_s, step_s=step_s, token_s=token_s)
    return Workload(lengths[again], rewards[again]), fitted


def read_lines(file: Path) -> list[dict[str, Any]]:
    """Lines of JSON."""
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]


def lines_of_run(run: Path) -> list[dict[str, Any]]:
    """What a run's metrics and its written responses say, step by step."""
    config = yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8"))
    tokenizer = load_tokenizer(config["data"]["tokenizer"] or config["actor_rollout_ref"]["model"]["path"])
    found = []
    for line in read_lines(run / METRICS_FILE):
        if (gen_s := line.get("timing_s/gen")) is None:
            continue
        lengths: dict[str, list[int]] = {}
        for row in read_lines(Path(config["trainer"]["rollout_data_dir"]) / f"{line['step']}.jsonl"):
            tokens = tokenizer(row["output_with_special_tokens"], add_special_tokens=False)["input_ids"]
            lengths.setdefault(row["uid"], []).append(max(1, len(tokens)))
        reward_s = line.get("timing_s/reward", 0.0)
        train_s = line["timing_s/step"] - gen_s - reward_s
        found.append({"lengths": [*lengths.values()], "gen_s": gen_s, "train_s": train_s, "reward_s": reward_s})
    return found


def _fit(first: np.ndarray, second: np.ndarray, seconds: Sequence[float]) -> tuple[float, float]:
    """Two factors, none below 0, that bring first * a + second * b near to the seconds."""
    columns, wanted = np.stack([first, second], 1), np.array(seconds)
    best, *_ = np.linalg.lstsq(columns, wanted, rcond=None)
    if best.min() >= 0:
        return float(best[0]), float(best[1])
    alone = [float(one @ wanted / (one @ one)) for one in (first, second)]
    errors = [float(((one * a - wanted) ** 2).sum()) for one, a in zip((first, second), alone, strict=True)]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])


@dataclass(frozen=True)
class Choice:
    """A split and a bound, and what came of it; `same_split_s` is that of lockstep on the split."""

    max_staleness: int
    train_gpus: int
    rollout_gpus: int
    outcome: Outcome
    same_split_s: float


def choices(rules: Rules, workload: Workload, costs: Costs, gpus: int, args: Namespace) -> list[Choice]:
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


def table(gpus: int, rules: Rules, workload: Workload, costs: Costs, args: Namespace) -> str:
    """The lines of one number of GPUs."""
    turns = colocated(rules, workload, costs, gpus // args.gpus_per_worker, gpus)
    lines, found = [], choices(rules, workload, costs, gpus, args)
    for one in found:
        lines.append(
            f"| {gpus} | {one.max_staleness} | {one.train_gpus} + {one.rollout_gpus} "
            f"| {one.outcome.seconds / rules.num_steps:.3g} | {turns.seconds / one.outcome.seconds:.2f} "
            f"| {one.same_split_s / one.outcome.seconds:.2f} "
            f"| {one.outcome.train_idle:.2f} / {one.outcome.rollout_idle:.2f} | {one.outcome.age_shares} |"
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
    parser.add_argument("--gpus-per-worker", type=int, default=1, help="that hold one rollout engine")
    parser.add_argument("--max-staleness", nargs="+", type=int, default=[0, 1, 2, 4])
    parser.add_argument("--in-flight", choices=("continue", "finish"), default="continue")
    parser.add_argument("--on-stale", choices=("wait", "drop"), default="wait")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--prompts", type=int, default=256, help="of a step")
    parser.add_argument("--responses", type=int, default=8, help="to a prompt")
    parser.add_argument(
        "--mini-batch", type=int, default=0, help="prompts of an update that begins once it is complete"
    )
    parser.add_argument("--median", type=float, default=1000.0, help="tokens of a response")
    parser.add_argument("--longest", type=int, default=8_000)
    parser.add_argument("--sigma", type=float, default=1.0, help="of the logarithms of lengths and of reward times")
    parser.add_argument("--reward-s", type=float, default=1.0, help="median seconds of a reward")
    parser.add_argument("--recorded", type=Path, help="a lockstep run's steps, in place of the law")
    parser.add_argument("--recorded-workers", type=int, default=1)
    parser.add_argument("--recorded-gpus", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    for name, value in vars(Costs()).items():
        kind = {"action": "store_true"} if value is False else {"type": type(value), "default": value}
        parser.add_argument(f"--{name.replace('_', '-')}", dest=name, **kind)
    args = parser.parse_args()
    costs = Costs(**{name: getattr(args, name) for name in vars(Costs())})
    print("| GPUs | max_staleness | train + rollout | s a step | over colocated | over lockstep, same split ", end="")
    print("| idle, train / rollout | tokens by age |\n|---|---|---|---|---|---|---|---|")
    for gpus in args.gpus:
        if args.recorded:
            sizes = (args.recorded_workers, args.recorded_gpus)
            workload, costs = recorded(args.recorded, args.steps, costs, *sizes)
        else:
            workload = long_tailed(args.steps, args.prompts, args.responses, args)
        _, prompts, responses = workload.lengths.shape
        ways = {"in_flight": args.in_flight, "on_stale": args.on_stale, "part_size": args.mini_batch}
        rules = Rules(num_groups=prompts, group_size=responses, num_steps=args.steps, **ways)
        print(table(gpus, rules, workload, costs, args), flush=True)


if __name__ == "__main__":
    main()
