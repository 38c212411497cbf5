# SPDX-License-Identifier: Apache-2.0
"""What asynchronous training would bring: discrete events around the schedule that real runs have.

Generation and training have ranks of their own. `schedule.py` beside it decides what starts where and when, with
which weights, and which groups a step learns from; here are only the times:

    a worker      decodes all of its sequences together; a decode step takes `decode_s`, and `sequence_s` more for each
                  sequence in it
    a step        `step_s`, and for each token `token_s` over the number of training ranks
    weights       can be loaded `publish_s` after a step, which the trainer does not wait for; a worker makes no token
                  for `load_s` while it takes them
    a reward      is there some seconds after the last response of its group

What it does not know: prompts are computed in no time, groups are all kept, and machines do not fail.
"""

import heapq
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import count
from typing import Any

import numpy as np

from quadriga.config import Config
from quadriga.config.placement import engine_ranks, role_pools, rollout_ranks
from quadriga.trainer.asynchronous.rules import Drop, HandOver, Load, Resume, Rules, Start
from quadriga.trainer.asynchronous.schedule import Schedule

NUM_STEPS = 6
BOUNDS = (0, 1, 2, 4)
NEAR = 1.03
"""Of two choices this near to each other the one with less staleness is taken."""


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
        self.ends: list[
            tuple[float, int, int]
        ] = []  # decode step at which a sample ends, its group, its number
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

    def __init__(
        self, rules: Rules, workload: Workload, costs: Costs, num_workers: int, train_gpus: int
    ) -> None:
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
                    self.pause(worker, True)
                    if version <= self.published:
                        self.after(self.load_s(worker), partial(self.loaded, worker, version))
                    else:
                        self.awaited.setdefault(version, []).append(worker)
                case Resume(worker):
                    for ones in self.awaited.values():
                        ones[:] = [one for one in ones if one != worker]
                    self.pause(worker, False)
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
            length = float(
                self.workload.lengths[
                    start.batch - 1, start.row % self.workload.lengths.shape[1], sample
                ]
            )
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

    def pause(self, number: int, is_paused: bool) -> None:
        """A worker makes no token, or makes them again."""
        self.workers[number].advance(self.now)
        self.workers[number].is_paused = is_paused
        self.await_end(number)

    def loaded(self, number: int, version: int) -> None:
        """A worker has other weights."""
        worker = self.workers[number]
        self.pause(number, False)
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
        self.after(
            seconds,
            partial(self.trained, batch.step) if batch.is_last else self.schedule.wants_batch,
        )

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


def colocated(
    rules: Rules, workload: Workload, costs: Costs, num_workers: int, gpus: int
) -> Outcome:
    """Lockstep on all GPUs in turns, which change over in `switch_s` and have the weights at once."""
    own = replace(costs, step_s=costs.step_s + costs.switch_s, publish_s=0.0, load_s=0.0)
    return Simulation(replace(rules, max_staleness=0), workload, own, num_workers, gpus).run()


def recorded(
    lines: Sequence[Mapping[str, Any]], num_steps: int, costs: Costs, num_workers: int, gpus: int
) -> tuple[Workload, Costs]:
    """Lengths of a lockstep run, again and again, and the costs that fit its seconds best. `lines`, one a step, have
    `lengths` (of each prompt the tokens of its responses), `gen_s`, `train_s`, and `reward_s` where rewards took any.
    """
    lengths = np.array([line["lengths"] for line in lines], dtype=float)
    # Groups go to the worker with the least to do: about an equal share each, the longest response somewhere.
    longest, tokens = lengths.max((1, 2)), lengths.sum((1, 2))
    decode_s, sequence_s = _fit(longest, tokens / num_workers, [line["gen_s"] for line in lines])
    step_s, token_s = _fit(np.ones(len(lines)), tokens / gpus, [line["train_s"] for line in lines])
    again = [step % len(lines) for step in range(num_steps)]
    rewards = np.repeat([[line.get("reward_s", 0.0)] for line in lines], lengths.shape[1], 1)
    fitted = replace(
        costs, decode_s=decode_s, sequence_s=sequence_s, step_s=step_s, token_s=token_s
    )
    return Workload(lengths[again], rewards[again]), fitted


def _fit(first: np.ndarray, second: np.ndarray, seconds: Sequence[float]) -> tuple[float, float]:
    """Two factors, none below 0, that bring first * a + second * b near to the seconds."""
    columns, wanted = np.stack([first, second], 1), np.array(seconds)
    best, *_ = np.linalg.lstsq(columns, wanted, rcond=None)
    if best.min() >= 0:
        return float(best[0]), float(best[1])
    alone = [float(one @ wanted / (one @ one)) for one in (first, second)]
    errors = [
        float(((one * a - wanted) ** 2).sum())
        for one, a in zip((first, second), alone, strict=True)
    ]
    return (alone[0], 0.0) if errors[0] <= errors[1] else (0.0, alone[1])


def advice(
    config: Config, run: tuple[Config, Sequence[Mapping[str, Any]]] | None = None
) -> Iterator[str]:
    """What `max_staleness` and the split of the ranks should be, in lines for people, with the lengths and seconds that
    a run in lockstep has recorded (its configuration, and lines as of `recorded`), or with assumed ones."""
    num_rollout, num_train, size = (
        sum(rollout_ranks(config)),
        _training_ranks(config),
        engine_ranks(config),
    )
    costs, longest = Costs(), config.data.max_response_length
    if run is not None:
        own, lines = run
        num_engines = sum(rollout_ranks(own)) // engine_ranks(own)
        workload, costs = recorded(lines, NUM_STEPS, costs, num_engines, _training_ranks(own))
        yield f"by lengths and seconds of {len(lines)} steps of {own.trainer.directory}"
    else:
        shape, median = (
            (NUM_STEPS, config.data.train_batch_size, config.actor_rollout_ref.rollout.n),
            longest / 8,
        )
        lengths = (
            np.exp(np.random.default_rng(0).normal(np.log(median), 1.0, shape))
            .clip(1, longest)
            .round()
        )
        workload = Workload(lengths, np.ones(shape[:2]))
        yield f"assumed, not measured: log-normal lengths, median {median:g} tokens, sigma 1; rewards of 1 s;"
        yield f"decode steps of {costs.decode_s:g} s + {costs.sequence_s:g} s a sequence; updates of {costs.step_s:g} s"
        yield f"+ {costs.token_s:g} s a token over the training ranks. `--recorded RUN` has those of a run in lockstep"
    if config.trainer.backend == "local":
        yield "as if training and rollout had processors of their own, which they share in one process"
    rules = replace(Rules.of(config, NUM_STEPS), warmup_steps=0, round_size=0)
    rules = replace(
        rules, num_groups=workload.lengths.shape[1], group_size=workload.lengths.shape[2]
    )

    def tried(bound: int, train: int) -> Outcome:
        ways = {} if bound else {"on_stale": "wait", "part_size": 0}
        workers = (num_rollout + num_train - train) // size
        return Simulation(
            replace(rules, max_staleness=bound, **ways), workload, costs, workers, train
        ).run()

    total = num_train + num_rollout
    splits = {min(max(1, round(total * share)), total - 1) for share in (1 / 4, 1 / 2, 3 / 4)}
    splits = {train for train in splits if (total - train) % size == 0} | {num_train}
    found = {(bound, train): tried(bound, train) for bound in BOUNDS for train in splits}
    mine = (rules.max_staleness, num_train)
    found[mine] = tried(*mine)
    fastest = min(one.seconds for one in found.values())
    best = min(
        (bound, one.seconds, train)
        for (bound, train), one in found.items()
        if one.seconds <= NEAR * fastest
    )
    for what, (bound, train) in {"this": mine, "recommended": (best[0], best[2])}.items():
        outcome, lockstep = found[bound, train], found[0, num_train].seconds
        ranks, speed = (
            f"{train} training + {total - train} rollout",
            f"{lockstep / outcome.seconds:.2f}",
        )
        yield (
            f"{what}: max_staleness={bound}, {ranks} ranks: {outcome.seconds / NUM_STEPS:.3g} s a step, {speed} times "
            f"the speed of lockstep on {num_train} + {num_rollout}; training waits {outcome.train_idle:.0%}, rollout"
            f" {outcome.rollout_idle:.0%} of the time"
        )


def _training_ranks(config: Config) -> int:
    roles = role_pools(config.trainer)
    pool = next(
        roles[name] for name in ("actor_rollout_ref", "actor_rollout", "actor") if name in roles
    )
    return sum(config.trainer.processes_of(pool)) if config.trainer.backend == "ray" else 1
