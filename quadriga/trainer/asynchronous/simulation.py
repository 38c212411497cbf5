# SPDX-License-Identifier: Apache-2.0
"""Simulates asynchronous training: the schedule of real runs, driven by discrete events.

Generation and training run on different ranks. The decisions are those of `schedule.py`; only the
times are simulated:

    a worker      decodes all of its sequences together; a decode step takes `decode_s`, plus
                  `sequence_s` for each sequence in it
    a step        takes `step_s`, plus `token_s` for each token, divided by the number of training
                  ranks
    weights       can be loaded `publish_s` after a step, for which the trainer does not wait; a
                  worker generates nothing for `load_s` while it loads them
    a reward      is ready some seconds after the last response of its group

Not simulated: prompts take no time, all groups are kept, and machines do not fail.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import numpy as np

from quadriga.config import Config
from quadriga.config.placement import POLICIES, engine_ranks, role_pools, rollout_ranks
from quadriga.trainer.asynchronous.rules import Drop, HandOver, Load, Resume, Rules, Start
from quadriga.trainer.asynchronous.schedule import Schedule

NUM_STEPS = 6
BOUNDS = (0, 1, 2, 4)
"""Values of `max_staleness` that are compared."""
NEAR = 1.03
"""Runs within this factor of the fastest count as equally fast: the least staleness wins."""


@dataclass(frozen=True)
class Costs:
    """Times that operations take. The simulation adds the waits.

    Attributes:
        decode_s: seconds of a decode step.
        sequence_s: seconds of a decode step for each sequence in it.
        step_s: seconds of a training step.
        token_s: seconds of a training step for each token, on one rank.
        publish_s: seconds from the end of a step until its weights can be loaded.
        load_s: seconds that a worker needs to load weights.
        recomputes: whether a load also takes `sequence_s` for each token of unfinished samples,
            whose KV cache is recomputed.
        switch_s: seconds that colocated ranks need in each step to switch between generation and
            training.
        capacity: largest number of sequences of a worker.
    """

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
    """Responses and rewards of a run.

    Attributes:
        lengths: tokens of each response [steps, prompts, n].
        reward_s: seconds of each group's reward [steps, prompts].
    """

    lengths: np.ndarray
    reward_s: np.ndarray


@dataclass
class SimulationResult:
    """Times of a simulated run.

    Attributes:
        seconds: duration.
        train_idle: share of the time in which training ranks wait.
        rollout_idle: share of the time in which rollout ranks wait.
        ages: number of tokens by their staleness.
    """

    seconds: float
    train_idle: float
    rollout_idle: float
    ages: Counter[int]


class SimulatedWorker:
    """A rollout engine that decodes all of its samples together.

    Each decode step makes a token of each sample, so the position of a worker, its number of decode
    steps, is the clock of its samples.

    Attributes:
        position: decode steps so far, with a fraction within a step.
        now: time up to which the worker is simulated, in seconds.
        busy_s: seconds in which it has decoded.
        ends: heap of samples: the position at which the sample ends, its group and its number.
        begins: position at which each sample began, by group and number.
        versions: pairs of a position and the version that was used from there on.
        is_paused: whether it generates nothing.
        stamp: number of the last event that was planned for it; earlier ones are no longer valid.
    """

    def __init__(self, costs: Costs, version: int) -> None:
        self.costs = costs
        self.position = 0.0
        self.now = 0.0
        self.busy_s = 0.0
        self.ends: list[tuple[float, int, int]] = []
        self.begins: dict[tuple[int, int], float] = {}
        self.versions = [(0.0, version)]
        self.is_paused = False
        self.stamp = 0

    @property
    def decode_step_s(self) -> float:
        """Seconds of a decode step."""
        return self.costs.decode_s + self.costs.sequence_s * len(self.begins)

    def advance(self, now: float) -> None:
        """Decode up to a time."""
        if self.begins and not self.is_paused:
            self.position += (now - self.now) / self.decode_step_s
            self.busy_s += now - self.now
        self.now = now

    def next_end(self) -> float | None:
        """Time at which the next sample ends, if nothing else happens. None: none will end."""
        # Aborted samples are left in the heap until here.
        while self.ends and self.ends[0][1:] not in self.begins:
            heapq.heappop(self.ends)
        if not self.ends or self.is_paused:
            return None
        return self.now + max(0.0, self.ends[0][0] - self.position) * self.decode_step_s

    def tokens_by_version(self, begin: float, end: float) -> Counter[int]:
        """Tokens of each version in a sample that was decoded between two positions."""
        tokens = Counter()
        # Each version is used up to the position at which the next one was loaded, the last version
        # without end.
        for (start, version), (stop, _) in pairwise([*self.versions, (float("inf"), 0)]):
            overlap = min(end, stop) - max(begin, start)
            if overlap > 0:
                tokens[version] += overlap
        return tokens


class Simulation:
    """Simulates a run of `rules.num_steps` steps.

    Args:
        rules: rules of the schedule.
        workload: responses and rewards.
        costs: times.
        num_workers: number of rollout engines.
        train_gpus: number of training ranks.
    """

    def __init__(
        self, rules: Rules, workload: Workload, costs: Costs, num_workers: int, train_gpus: int
    ) -> None:
        self.rules = rules
        self.workload = workload
        self.costs = costs
        self.train_gpus = train_gpus
        self.schedule = Schedule(rules)
        self.workers = {number: SimulatedWorker(costs, 0) for number in range(num_workers)}
        # Heap of time, order among events at the same time, and the function to call.
        self.events: list[tuple[float, int, Callable[[], Any]]] = []
        self.order = count()
        self.now = 0.0  # seconds
        self.train_s = 0.0  # seconds of training so far
        self.published = 0  # newest version that can be loaded
        self.places: dict[int, tuple[int, int]] = {}  # batch and row of each group, both from 0
        self.tokens: dict[int, Counter[int]] = {}  # tokens of each group by version
        self.awaited: dict[int, int] = {}  # version that each waiting worker waits for
        self.ages: Counter[int] = Counter()

    def run(self) -> SimulationResult:
        """Simulate up to the end of the last step."""
        for number in self.workers:
            self.schedule.joined(number, 0, self.costs.capacity)
        self.schedule.wants_batch()
        self.act()
        while self.events:
            self.now, _, event = heapq.heappop(self.events)
            event()
            # Decide only after all events at the same time.
            if not self.events or self.events[0][0] > self.now:
                self.act()
        for worker in self.workers.values():
            worker.advance(self.now)
        busy_s = sum(worker.busy_s for worker in self.workers.values()) / len(self.workers)
        return SimulationResult(
            self.now, 1 - self.train_s / self.now, 1 - busy_s / self.now, self.ages
        )

    def after(self, seconds: float, event: Callable[[], Any]) -> None:
        """Plan an event some seconds from now."""
        heapq.heappush(self.events, (self.now + seconds, next(self.order), event))

    def act(self) -> None:
        """Carry out the decisions of the schedule."""
        for decision in self.schedule.decide():
            match decision:
                case Start():
                    self.start(decision)
                case Load(worker, version):
                    # The worker generates nothing until it has loaded the weights.
                    self.pause(worker, True)
                    if version <= self.published:
                        self.after(self.load_s(worker), partial(self.loaded, worker, version))
                    else:
                        self.awaited[worker] = version
                case Resume(worker):
                    # It no longer waits for weights.
                    self.awaited.pop(worker, None)
                    self.pause(worker, False)
                case HandOver():
                    self.train(decision)
                case Drop(group, _, running):
                    # Its unfinished samples are aborted, which takes no time.
                    for number, sample in running:
                        self.workers[number].advance(self.now)
                        del self.workers[number].begins[group, sample]
                        self.plan_next_end(number)

    def start(self, start: Start) -> None:
        """Start samples of a group on a worker."""
        batch = start.batch - 1
        self.places[start.group] = (batch, start.row)
        worker = self.workers[start.worker]
        worker.advance(self.now)
        # If a batch has more prompts than the workload, they are repeated.
        lengths = self.workload.lengths[batch, start.row % self.workload.lengths.shape[1]]
        for sample in start.samples:
            worker.begins[start.group, sample] = worker.position
            end = worker.position + float(lengths[sample])
            heapq.heappush(worker.ends, (end, start.group, sample))
        self.plan_next_end(start.worker)

    def plan_next_end(self, number: int) -> None:
        """Plan the end of a worker's next sample; this replaces the event that was planned."""
        # With a new stamp, `ended` ignores the earlier event.
        worker = self.workers[number]
        worker.stamp += 1
        end = worker.next_end()
        if end is not None:
            self.after(end - self.now, partial(self.ended, number, worker.stamp))

    def ended(self, number: int, stamp: int) -> None:
        """Event: the next sample of a worker ends, unless `stamp` is no longer its last one."""
        worker = self.workers[number]
        if stamp != worker.stamp:
            return
        worker.advance(self.now)
        end, group, sample = heapq.heappop(worker.ends)
        # Rounding may leave the worker just before the end of the sample.
        worker.position = max(worker.position, end)
        tokens = worker.tokens_by_version(worker.begins.pop((group, sample)), end)
        self.tokens.setdefault(group, Counter()).update(tokens)
        self.plan_next_end(number)
        # `min(tokens)` is the oldest version in the sample. True: the sample completes its group.
        if self.schedule.ended(number, group, sample, min(tokens)):
            batch, row = self.places[group]
            rewards_s = self.workload.reward_s[batch]
            seconds = float(rewards_s[row % len(rewards_s)])
            self.after(seconds, partial(self.schedule.graded, group))

    def load_s(self, number: int) -> float:
        """Seconds that a worker would need to load weights now."""
        worker = self.workers[number]
        num_tokens = sum(worker.position - begin for begin in worker.begins.values())
        recompute_s = self.costs.sequence_s * num_tokens if self.costs.recomputes else 0.0
        return self.costs.load_s + recompute_s

    def pause(self, number: int, is_paused: bool) -> None:
        """Begin or end the pause of a worker."""
        self.workers[number].advance(self.now)
        self.workers[number].is_paused = is_paused
        self.plan_next_end(number)

    def loaded(self, number: int, version: int) -> None:
        """Event: a worker has loaded weights."""
        worker = self.workers[number]
        self.pause(number, False)
        worker.versions.append((worker.position, version))
        self.schedule.loaded(number, version)

    def train(self, batch: HandOver) -> None:
        """Train on the groups that are handed over: a whole batch, or a part of it."""
        num_tokens = 0.0
        current_version = self.rules.version_at(batch.step)
        for group in batch.groups:
            for version, tokens in self.tokens.pop(group).items():
                self.ages[current_version - version] += tokens
                num_tokens += tokens
        # A part of a batch takes its share of the time of a step.
        share = len(batch.groups) / self.rules.num_groups
        seconds = self.costs.step_s * share + num_tokens * self.costs.token_s / self.train_gpus
        self.train_s += seconds
        if batch.is_last:
            self.after(seconds, partial(self.trained, batch.step))
        else:
            self.after(seconds, self.schedule.wants_batch)

    def trained(self, step: int) -> None:
        """Event: a step is done. Publish its weights, and ask for the next batch."""
        if step == self.rules.num_steps:
            # The run is over: without events, `run` returns.
            self.events.clear()
            return
        if self.rules.publishes(step):
            self.after(self.costs.publish_s, partial(self.publish, self.rules.version_at(step + 1)))
        self.schedule.wants_batch()

    def publish(self, version: int) -> None:
        """Event: weights can be loaded from now on."""
        self.published = version
        self.schedule.has_published(version)
        for worker, awaited_version in tuple(self.awaited.items()):
            if awaited_version == version:
                del self.awaited[worker]
                self.after(self.load_s(worker), partial(self.loaded, worker, version))


def fit_recorded_run(
    lines: Sequence[Mapping[str, Any]], num_steps: int, costs: Costs, num_workers: int, gpus: int
) -> tuple[Workload, Costs]:
    """Compute workload and costs from a recorded run in lockstep.

    Args:
        lines: for each step `lengths` (tokens of the responses to each prompt), `gen_s`, `train_s`,
            and `reward_s` if rewards took any time. All steps have the same number of prompts, and
            all prompts the same number of responses.
        num_steps: number of steps of the workload, for which the recorded ones are repeated.
        costs: times that do not follow from the lines, such as that of a load.
        num_workers: number of rollout engines that the run had.
        gpus: number of training ranks that the run had.

    Returns:
        The workload, and `costs` with the times that fit the recorded seconds best.
    """
    lengths = np.array([line["lengths"] for line in lines], dtype=float)
    longest = lengths.max((1, 2))
    num_tokens = lengths.sum((1, 2))
    gen_s = [line["gen_s"] for line in lines]
    train_s = [line["train_s"] for line in lines]
    # Generation ends with the longest response: one decode step for each of its tokens. In these
    # steps its worker decodes about an equal share of all tokens.
    decode_s, sequence_s = _fit(longest, num_tokens / num_workers, gen_s)
    step_s, token_s = _fit(np.ones(len(lines)), num_tokens / gpus, train_s)
    fitted = replace(
        costs, decode_s=decode_s, sequence_s=sequence_s, step_s=step_s, token_s=token_s
    )
    # For each simulated step, the recorded one that it repeats.
    repeated = [step % len(lines) for step in range(num_steps)]
    rewards_s = np.repeat([[line.get("reward_s", 0.0)] for line in lines], lengths.shape[1], 1)
    return Workload(lengths[repeated], rewards_s[repeated]), fitted


def _fit(first: np.ndarray, second: np.ndarray, seconds: Sequence[float]) -> tuple[float, float]:
    """Find the factors a, b >= 0 for which `first * a + second * b` is closest to `seconds`."""
    target = np.array(seconds)
    best, *_ = np.linalg.lstsq(np.stack([first, second], 1), target, rcond=None)
    if best.min() >= 0:
        return float(best[0]), float(best[1])
    # The constrained optimum is on the boundary, where one of the factors is 0.
    first_alone = float(first @ target / (first @ first))
    second_alone = float(second @ target / (second @ second))
    first_error = float(((first * first_alone - target) ** 2).sum())
    second_error = float(((second * second_alone - target) ** 2).sum())
    if first_error <= second_error:
        return first_alone, 0.0
    return 0.0, second_alone


def advice(
    config: Config, run: tuple[Config, Sequence[Mapping[str, Any]]] | None = None
) -> Iterator[str]:
    """Recommend `max_staleness` and a split of the ranks, as lines of text.

    Args:
        config: the configuration for which advice is wanted.
        run: configuration and recorded lines (see `fit_recorded_run`) of a run in lockstep. None:
            lengths and seconds are assumed.
    """
    num_rollout = sum(rollout_ranks(config))
    num_train = training_ranks(config)
    total = num_rollout + num_train
    size = engine_ranks(config)
    costs = Costs()
    if run is not None:
        recorded_config, lines = run
        num_engines = sum(rollout_ranks(recorded_config)) // engine_ranks(recorded_config)
        workload, costs = fit_recorded_run(
            lines, NUM_STEPS, costs, num_engines, training_ranks(recorded_config)
        )
        directory = recorded_config.trainer.directory
        yield f"by lengths and seconds of {len(lines)} steps of {directory}"
    else:
        median = config.data.max_response_length / 8
        workload = _assumed_workload(config, median)
        yield f"assumed, not measured: log-normal lengths, median {median:g} tokens, sigma 1; rewards of 1 s;"
        yield f"decode steps of {costs.decode_s:g} s + {costs.sequence_s:g} s a sequence; updates of {costs.step_s:g} s"
        yield f"+ {costs.token_s:g} s a token over the training ranks. `--recorded RUN` has those of a run in lockstep"
    if config.trainer.backend == "local":
        yield "as if training and rollout had processors of their own, which they share in one process"

    _, num_groups, group_size = workload.lengths.shape
    rules = replace(
        Rules.of(config, NUM_STEPS),
        num_groups=num_groups,
        group_size=group_size,
        warmup_steps=0,
        round_size=0,
    )
    # Pairs of `max_staleness` and the number of training ranks.
    configured = (rules.max_staleness, num_train)
    choices = [(bound, train) for bound in BOUNDS for train in _splits(num_train, total, size)]
    choices.append(configured)
    outcomes = {}
    for bound, train in choices:
        variant = replace(rules, max_staleness=bound)
        # In lockstep, a step waits for its own whole batch.
        if bound == 0:
            variant = replace(variant, on_stale="wait", part_size=0)
        num_workers = (total - train) // size
        outcomes[bound, train] = Simulation(variant, workload, costs, num_workers, train).run()

    lockstep_s = outcomes[0, num_train].seconds
    for name, choice in {"this": configured, "recommended": _recommended_choice(outcomes)}.items():
        bound, train = choice
        outcome = outcomes[choice]
        yield (
            f"{name}: max_staleness={bound}, {train} training + {total - train} rollout ranks: "
            f"{outcome.seconds / NUM_STEPS:.3g} s a step, {lockstep_s / outcome.seconds:.2f} times "
            f"the speed of lockstep on {num_train} + {num_rollout}; training waits {outcome.train_idle:.0%}, rollout"
            f" {outcome.rollout_idle:.0%} of the time"
        )


def _assumed_workload(config: Config, median: float) -> Workload:
    """Responses of log-normal lengths with sigma 1, and rewards of 1 s.

    Args:
        config: has the number and the largest length of responses.
        median: median length of the responses, in tokens.
    """
    shape = (NUM_STEPS, config.data.train_batch_size, config.actor_rollout_ref.rollout.n)
    logarithms = np.random.default_rng(0).normal(np.log(median), 1.0, shape)
    lengths = np.exp(logarithms).clip(1, config.data.max_response_length).round()
    return Workload(lengths, reward_s=np.ones(shape[:2]))


def _splits(num_train: int, total: int, size: int) -> set[int]:
    """Numbers of training ranks to compare.

    These are the configured number; and a quarter, a half and three quarters of all ranks, each only
    if the remaining ranks can be divided into engines.

    Args:
        num_train: configured number of training ranks.
        total: number of training and rollout ranks together.
        size: ranks of a rollout engine.
    """
    splits = {num_train}
    for share in (1 / 4, 1 / 2, 3 / 4):
        train = min(max(1, round(total * share)), total - 1)
        if (total - train) % size == 0:
            splits.add(train)
    return splits


def _recommended_choice(outcomes: Mapping[tuple[int, int], SimulationResult]) -> tuple[int, int]:
    """Choose the least staleness with which a run is about as fast as the fastest one (`NEAR`).

    Of the splits of the ranks with this staleness, the fastest is chosen.

    Args:
        outcomes: results by `max_staleness` and number of training ranks.

    Returns:
        `max_staleness` and the number of training ranks.
    """
    fastest_s = min(outcome.seconds for outcome in outcomes.values())
    candidates = []
    for (bound, train), outcome in outcomes.items():
        if outcome.seconds <= NEAR * fastest_s:
            candidates.append((bound, outcome.seconds, train))
    bound, _, train = min(candidates)
    return bound, train


def training_ranks(config: Config) -> int:
    """Number of ranks that train the policy."""
    if config.trainer.backend == "local":
        return 1
    pools = role_pools(config.trainer)
    # The name of the policy's role depends on what else it contains.
    pool = next(pools[role] for role in POLICIES if role in pools)
    return sum(config.trainer.processes_of(pool))
