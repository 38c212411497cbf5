# SPDX-License-Identifier: Apache-2.0
"""The schedule of asynchronous training under random events: the bound on staleness holds, every group is accounted for
once, nothing waits for ever. What is expected is computed here from the decisions alone."""

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.errors import RolloutError
from quadriga.trainer.asynchronous.schedule import (
    Drop,
    HandOver,
    Load,
    Resume,
    Rules,
    Save,
    Schedule,
    Start,
)


class Ungated(Schedule):
    """Starts whatever a worker has room for."""

    def may_start(self, version: int, batch: int) -> bool:
        return True

    def _check_bound(self, step: int, numbers: Any) -> None:
        pass


class World:
    """Workers, graders and a trainer that take as long as the dice say, and may be lost; it checks each decision."""

    def __init__(self, rules: Rules, dice: random.Random, kind: type[Schedule] = Schedule) -> None:
        self.rules, self.dice, self.schedule = rules, dice, kind(rules)
        self.capacity = dice.choice([None, rules.group_size, 2 * rules.group_size + 1])
        self.versions: dict[int, int] = {}  # of the workers' weights
        self.loading: dict[int, int] = {}
        self.running: dict[tuple[int, int], int] = {}  # worker of each sample
        self.first: dict[tuple[int, int], int] = {}  # version of its first token
        self.done: dict[int, set[int]] = {}
        self.grading: set[int] = set()
        self.batch_of: dict[int, int] = {}
        self.over: dict[int, str] = {}  # what became of each group
        self.step, self.num_events, self.num_workers, self.num_handed = 0, 0, 0, 0
        self.is_training, self.is_saving, self.on_the_way = False, False, list[int]()
        for _ in range(dice.randint(1, 3)):
            self.join()
        self.schedule.wants_batch()
        self.act()

    def join(self) -> None:
        self.num_workers += 1
        self.versions[self.num_workers] = self.schedule.published
        self.schedule.joined(self.num_workers, self.schedule.published, self.capacity)

    def run(self) -> int:
        """To the last step. Returns how many events there were."""
        while not (self.schedule.is_over and not self.is_training):
            self.event()
            self.act()
        assert not self.running and sorted(self.over) == sorted(self.batch_of), (
            "each group is over, and once"
        )
        assert (
            list(self.over.values()).count("handed over")
            == self.rules.num_steps * self.rules.num_groups
        )
        return self.num_events

    def event(self) -> None:
        dice, choices = self.dice, []
        choices += [self.end_sample] * 4 * bool(self.ending()) + [self.grade] * 2 * bool(
            self.grading
        )
        choices += [self.train] * self.is_training
        is_due = not (self.is_saving and self.rules.pauses_to_save)
        choices += [self.deliver] * any(
            is_due or own <= self.rules.version_at(self.step) for own in self.on_the_way[:1]
        )
        choices += [self.load] * bool(self.loadable())
        assert choices, f"nothing can happen any more after step {self.step}: a deadlock"
        if dice.random() < 0.03:
            choices = [self.join] if len(self.versions) < 2 else [self.lose]
        self.num_events += 1
        dice.choice(choices)()

    def ending(self) -> list[tuple[int, int]]:
        """Samples under way; one on a worker that pauses cannot end."""
        paused = self.loading if self.rules.deterministic else ()
        return sorted(key for key, worker in self.running.items() if worker not in paused)

    def loadable(self) -> list[int]:
        return sorted(
            worker for worker, version in self.loading.items() if version <= self.schedule.published
        )

    def end_sample(self) -> None:
        key = self.dice.choice(self.ending())
        worker = self.running.pop(key)
        self.done[key[0]].add(key[1])
        if self.schedule.ended(worker, *key, oldest=self.first[key]):
            assert self.done[key[0]] == set(range(self.rules.group_size))
            self.grading.add(key[0])

    def grade(self) -> None:
        group = self.dice.choice(sorted(self.grading))
        self.grading.remove(group)
        is_equal = self.rules.round_size and self.dice.random() < 0.4
        self.schedule.graded(group, "equal" if is_equal else "kept")

    def train(self) -> None:
        self.is_training = False
        if self.num_handed < self.rules.num_groups:
            self.schedule.wants_batch()
            return
        if self.rules.publishes(self.step):
            self.on_the_way.append(self.rules.version_at(self.step + 1))
        if self.step < self.rules.num_steps and self.dice.random() < 0.2:
            self.is_saving = True
            self.schedule.hold()
        elif self.step < self.rules.num_steps:
            self.schedule.wants_batch()

    def deliver(self) -> None:
        self.schedule.has_published(self.on_the_way.pop(0))

    def load(self) -> None:
        worker = self.dice.choice(self.loadable())
        self.versions[worker] = self.loading.pop(worker)
        self.schedule.loaded(worker, self.versions[worker])

    def lose(self) -> None:
        worker = self.dice.choice(sorted(self.versions))
        self.versions.pop(worker)
        self.loading.pop(worker, None)
        self.first = {
            key: first for key, first in self.first.items() if self.running.get(key) != worker
        }
        self.running = {key: other for key, other in self.running.items() if other != worker}
        self.schedule.lost(worker)

    def act(self) -> None:
        saved = []
        for decision in self.schedule.decide():
            match decision:
                case Save(worker):
                    saved.append(worker)
                    assert self.rules.saves_running or not self.running
                case Start(worker, group, batch, _, samples, version):
                    self.start(worker, group, batch, samples, version)
                case Load(worker, version):
                    assert worker not in self.loading and version > self.versions[worker]
                    if self.rules.in_flight == "finish":
                        assert worker not in self.running.values(), "weights change under a sample"
                    self.loading[worker] = version
                case Resume(worker):
                    assert self.loading.pop(worker) > self.schedule.published
                case HandOver(step, groups, is_last):
                    self.hand_over(step, groups)
                    assert is_last == (self.num_handed == self.rules.num_groups)
                case Drop(group, reason, running):
                    assert reason != "stale" or self.rules.on_stale == "drop"
                    self.finish(group, reason)
                    found = {
                        (worker, key[1]) for key, worker in self.running.items() if key[0] == group
                    }
                    assert found == set(running), "what is under way is aborted"
                    self.running = {
                        key: worker for key, worker in self.running.items() if key[0] != group
                    }
                    self.grading.discard(group)
        assert not self.running or not self.schedule.is_over
        if saved:
            assert self.is_saving and saved == sorted(self.versions)
            assert all(version <= self.schedule.published for version in self.loading.values()), (
                "it waits for nothing"
            )
            self.is_saving = False
            if self.dice.random() < 0.5:
                self.resume()
            self.schedule.release()
            self.schedule.wants_batch()
            self.act()

    def resume(self) -> None:
        """Another schedule goes on from the state; what was under way starts anew, with its first tokens."""
        state = json.loads(json.dumps(self.schedule.state()), object_hook=numbered)
        self.schedule = type(self.schedule)(self.rules, step=self.step)
        self.schedule.restore(state)
        self.running.clear(), self.loading.clear(), self.versions.clear(), self.on_the_way.clear()
        for _ in range(self.dice.randint(1, 2)):
            self.join()

    def start(
        self, worker: int, group: int, batch: int, samples: tuple[int, ...], version: int
    ) -> None:
        assert (
            worker not in self.loading
            and version == self.versions[worker]
            and group not in self.over
        )
        assert self.batch_of.setdefault(group, batch) == batch <= self.rules.num_steps
        for sample in samples:
            assert (group, sample) not in self.running and sample not in self.done.setdefault(
                group, set()
            )
            self.running[group, sample] = worker
            self.first.setdefault((group, sample), version)

    def hand_over(self, step: int, groups: tuple[int, ...]) -> None:
        rules = self.rules
        self.num_handed %= rules.num_groups
        part = min(rules.part_size or rules.num_groups, rules.num_groups - self.num_handed)
        assert (
            not self.is_training
            and step == self.step + (not self.num_handed)
            and len(set(groups)) == part
        )
        self.num_handed += part
        for group in groups:
            assert self.done[group] == set(range(rules.group_size)) and group not in self.grading
            ages = [
                rules.version_at(step) - self.first[group, sample]
                for sample in range(rules.group_size)
            ]
            assert min(ages) >= 0 and max(ages) <= rules.max_staleness, f"step {step}: ages {ages}"
            self.finish(group, "handed over")
            assert rules.on_stale == "drop" or self.batch_of[group] == step, "it is for this step"
        # No starvation: nothing that is too old for the next step is left.
        oldest = min(
            (self.first[key] for key in self.first if key[0] not in self.over), default=10**9
        )
        assert rules.on_stale == "wait" or rules.version_at(step) - oldest <= rules.max_staleness
        self.check_batches()
        self.step, self.is_training = step, True

    def check_batches(self) -> None:
        """A batch of a step that is over goes with its last group, and open groups are those that live."""
        open_groups, alive = Counter[int](), set[int]()
        for group in self.schedule.groups.values():
            alive.add(group.batch)
            open_groups[group.batch] += not group.is_kept
        for number, batch in self.schedule._batches.items():
            assert number > self.schedule.step or number in alive
            assert batch.num_open == open_groups[number]

    def finish(self, group: int, what: str) -> None:
        assert group not in self.over, "a group is handed over or dropped once"
        self.over[group] = what
        for sample in range(self.rules.group_size):
            if what != "handed over":
                self.first.pop((group, sample), None)


def numbered(found: dict[str, Any]) -> dict[Any, Any]:
    """JSON has texts for the numbers of batches."""
    return {int(key) if key.isdigit() else key: value for key, value in found.items()}


def some_rules(dice: random.Random) -> Rules:
    staleness = dice.randint(0, 3)
    drops = staleness > 0 and dice.random() < 0.4
    return Rules(
        num_groups=dice.randint(1, 4),
        group_size=dice.randint(1, 3),
        num_steps=dice.randint(1, 12),
        max_staleness=staleness,
        in_flight=dice.choice(["continue", "finish"]),
        on_stale="drop" if drops else "wait",
        sync_every=dice.randint(1, 3),
        deterministic=not drops and dice.random() < 0.3,
        warmup_steps=dice.choice([0, 0, 2]),
        round_size=0
        if (part_size := 0 if drops else dice.choice([0, 0, 1, 2]))
        else dice.choice([0, 0, 3]),
        part_size=part_size,
        saves_running=dice.random() < 0.5,
    )


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32))
def test_the_bound_holds_and_every_group_is_counted_once(seed: int) -> None:
    dice = random.Random(seed)
    World(some_rules(dice), dice).run()


@pytest.mark.slow
def test_the_bound_holds_over_a_million_events() -> None:
    """Slow and lost workers, failing rewards, weights that arrive late, in any order; whatever the rules."""
    dice, count = random.Random(5), 0
    while count < 1_000_000:
        count += World(some_rules(dice), dice).run()


def test_without_its_gate_the_schedule_breaks_the_bound() -> None:
    """The check that the others rest on finds it."""
    rules = Rules(num_groups=2, group_size=2, num_steps=8, max_staleness=1)
    broken = 0
    for seed in range(20):
        try:
            World(rules, random.Random(seed), Ungated).run()
        except AssertionError as error:
            broken += "ages" in str(error)
    assert broken > 10


@pytest.mark.parametrize("in_flight", ["continue", "finish"])
def test_a_deterministic_schedule_does_not_depend_on_time(in_flight: Any) -> None:
    rules = Rules(
        num_groups=2,
        group_size=2,
        num_steps=9,
        max_staleness=2,
        in_flight=in_flight,
        sync_every=2,
        deterministic=True,
    )
    assert len({tuple(starts_of(rules, seed)) for seed in range(12)}) == 1


def starts_of(rules: Rules, seed: int) -> list[tuple[int, int, int]]:
    """The starts of a run with one worker that is never lost, and no failing grader, in random time."""

    found: list[tuple[int, int, int]] = []

    class Calm(World):
        def start(
            self, worker: int, group: int, batch: int, samples: tuple[int, ...], version: int
        ) -> None:
            found.append((group, batch, version))
            super().start(worker, group, batch, samples, version)

        def grade(self) -> None:
            self.schedule.graded(self.grading.pop())

        def join(self) -> None:
            if not self.versions:
                self.capacity = None
                super().join()

        def lose(self) -> None:
            pass

    Calm(rules, random.Random(seed)).run()
    return found


def test_one_step_off_generates_a_batch_while_the_one_before_is_learned_from() -> None:
    rules = Rules(num_groups=1, group_size=1, num_steps=3, max_staleness=1, in_flight="finish")
    schedule = Schedule(rules)
    schedule.joined(0, 0)
    schedule.wants_batch()
    first = schedule.decide()
    assert [(one.batch, one.version) for one in first if isinstance(one, Start)] == [(1, 0), (2, 0)]
    assert schedule.ended(0, 0, 0, oldest=0)
    schedule.graded(0)
    assert schedule.decide() == [HandOver(1, (0,))]
    schedule.has_published(1)
    # The second batch has begun with version 0, and ends with it.
    assert schedule.decide() == []
    assert schedule.ended(0, 1, 0, oldest=0)
    schedule.graded(1)
    assert schedule.decide() == [Load(0, 1)]
    schedule.loaded(0, 1)
    assert schedule.decide() == [Start(0, 2, 3, 0, (0,), 1)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_a_part_of_a_batch_is_handed_over_once_it_is_complete(deterministic: bool) -> None:
    """The first that are there; in the order of the prompts where time must not matter."""
    rules = Rules(
        num_groups=3,
        group_size=1,
        num_steps=2,
        max_staleness=1,
        part_size=2,
        deterministic=deterministic,
    )
    schedule, handed = Schedule(rules), []
    schedule.joined(0, 0)
    schedule.wants_batch()
    schedule.decide()
    for group in (2, 1, 3, 0):
        assert schedule.ended(0, group, 0, oldest=0)
        schedule.graded(group)
        handed.append([one for one in schedule.decide() if isinstance(one, HandOver)])
    early, late = HandOver(1, (1, 2), is_last=False), HandOver(1, (0, 1), is_last=False)
    assert handed == ([[], [], [], [late]] if deterministic else [[], [early], [], []])
    schedule.wants_batch()
    assert HandOver(1, (2,) if deterministic else (0,)) in schedule.decide()
    assert schedule.step == 1


def test_a_hold_waits_for_what_is_under_way() -> None:
    schedule = Schedule(Rules(num_groups=1, group_size=1, num_steps=9, max_staleness=3))
    schedule.joined(0, 0)
    assert len(schedule.decide()) == 4
    schedule.hold()
    assert not schedule.is_quiet
    for group in range(4):
        assert schedule.ended(0, group, 0)
        schedule.graded(group)
    assert schedule.is_quiet and schedule.decide() == [Save(0, 0)]
    schedule.wants_batch()
    assert schedule.decide() == [HandOver(1, (0,))]
    schedule.has_published(1)
    assert schedule.decide() == [Load(0, 1)]
    schedule.loaded(0, 1)
    assert schedule.decide() == []
    schedule.release()
    assert [type(one) for one in schedule.decide()] == [Start]


def test_a_save_takes_what_is_under_way_with_it() -> None:
    """It waits for the newest weights alone. In the schedule that goes on from it samples start first, as old as they
    were."""
    rules = Rules(num_groups=1, group_size=1, num_steps=9, max_staleness=3, saves_running=True)
    schedule = Schedule(rules)
    schedule.joined(0, 0)
    assert len(schedule.decide()) == 4
    assert schedule.ended(0, 0, 0)
    schedule.graded(0)
    schedule.wants_batch()
    assert schedule.decide() == [HandOver(1, (0,))]
    schedule.hold(1)
    assert schedule.decide() == [Load(0, 1)]
    schedule.loaded(0, 1)
    assert schedule.decide() == [Save(0, 1)]
    resumed = Schedule(rules, step=1)
    resumed.restore(schedule.state())
    resumed.joined(0, 1)
    schedule.release()
    new = [Start(0, 4, 5, 0, (0,), 1)]
    assert schedule.decide() == new
    assert resumed.decide() == [Start(0, group, group + 1, 0, (0,), 1) for group in (1, 2, 3)] + new
    assert [group.oldest for group in resumed.groups.values()] == [0, 0, 0, 1]


def test_an_engine_that_used_older_weights_than_it_said_is_an_error() -> None:
    schedule = Schedule(Rules(num_groups=1, group_size=1, num_steps=9, warmup_steps=0), step=2)
    schedule.joined(0, 2)
    schedule.decide()
    with pytest.raises(RolloutError, match="version 1 from worker 0"):
        schedule.ended(0, 0, 0, oldest=1)


def test_a_worker_that_takes_weights_gets_its_share() -> None:
    """The one that has them first does not begin all groups; one that is lost meanwhile is not waited for."""
    schedule = Schedule(Rules(num_groups=4, group_size=1, num_steps=3))
    for worker in (0, 1):
        schedule.joined(worker, 0)
    assert [one.worker for one in schedule.decide() if isinstance(one, Start)] == [0, 1, 0, 1]
    for group in range(4):
        schedule.ended(group % 2, group, 0)
        schedule.graded(group)
    schedule.wants_batch()
    schedule.decide()
    schedule.wants_batch()
    schedule.has_published(1)
    assert schedule.decide() == [Load(0, 1), Load(1, 1)]
    schedule.loaded(0, 1)
    assert [(one.worker, one.row) for one in schedule.decide() if isinstance(one, Start)] == [
        (0, 0)
    ]
    schedule.lost(1)
    assert [(one.worker, one.row) for one in schedule.decide() if isinstance(one, Start)] == [
        (0, 1),
        (0, 2),
        (0, 3),
    ]
