# SPDX-License-Identifier: Apache-2.0
"""Validation: the loop, and its metrics against every draw enumerated."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from statistics import mean, pstdev
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.config import Config
from quadriga.observe.metrics import Metric
from quadriga.observe.timing import Tally
from quadriga.protocol import DataProto
from quadriga.rewards import RewardManager, RewardOutput
from quadriga.trainer.validate import (
    Validator,
    interval,
    majority_chances,
    majority_values,
    means,
    score_values,
    validation_values,
)


def means_of_rows(*columns: Any, **named: Any) -> dict[str, float]:
    return means(validation_values(*columns, **named))


def means_of_scores(scores: list[np.ndarray]) -> dict[str, float]:
    return means(score_values(scores))


def means_of_majority(scores: list[np.ndarray], answers: Any) -> dict[str, float]:
    return means(majority_values(scores, answers))


class Actor:
    """Answers every prompt with its number of call and row; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[DataProto] = []

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        self.asked.append(prompts)
        answers = torch.arange(len(prompts))[:, None] % 2 + torch.tensor([[1, 1]])
        attention = torch.cat([prompts.batch["attention_mask"], torch.ones_like(answers)], -1)
        tensors = {
            "prompts": prompts.batch["input_ids"],
            "responses": answers,
            "attention_mask": attention,
        }
        return DataProto.from_dict(
            tensors={**tensors, "response_mask": torch.ones_like(answers)},
            meta_info={"metrics": {"x": 1}},
        )


class Grader(RewardManager):
    """Score 1 for the answer "bb"; `extra` is added to what it returns."""

    def __init__(self, **extra: Any) -> None:
        self.extra = extra

    def __call__(self, data: DataProto) -> RewardOutput:
        good = (data.batch["responses"] == 2).all(-1).float()
        extra = {}
        for name, value in self.extra.items():
            extra[name] = np.empty(len(data), dtype=object)
            extra[name][:] = [value(bool(one)) for one in good]
        scores = good[:, None] * torch.tensor([[0.0, 1.0]])
        return RewardOutput(
            scores, extra, {"reward/errors": Metric(1.0, "sum"), "reward/other": Metric(3.0)}
        )


def batch(num_rows: int, source: str) -> dict[str, Any]:
    """What the loader yields."""
    objects = {
        "data_source": [source] * num_rows,
        "reward_model": [{"ground_truth": "bb"}] * num_rows,
    }
    return {
        "input_ids": torch.ones(num_rows, 2).long(),
        "attention_mask": torch.ones(num_rows, 2).long(),
        "position_ids": torch.arange(2).repeat(num_rows, 1),
        **{name: np.array(values, dtype=object) for name, values in objects.items()},
    }


@pytest.fixture
def make(tokenizer: object) -> Callable[..., tuple[Validator, Actor]]:
    def build(
        loader: Any, grader: Any = None, trainer: dict | None = None, **sampling: Any
    ) -> tuple[Validator, Actor]:
        actor = Actor()
        config = Config(
            actor_rollout_ref={"rollout": {"val_kwargs": sampling}}, trainer=trainer or {}
        )
        return Validator(config, tokenizer, actor, grader or Grader(), loader), actor

    return build


def test_nothing_to_validate(make: Callable) -> None:
    validator, actor = make(None)
    assert validator.run(3) == ({}, [])
    assert actor.asked == []


def test_all_batches_and_sources_count(make: Callable) -> None:
    """Two batches of two sources with 4 answers a prompt, of which every other one is right."""
    validator, actor = make([batch(2, "x"), batch(3, "y")], n=4, do_sample=True, temperature=0.7)
    metrics, rows = validator.run(5)
    assert [len(asked) for asked in actor.asked] == [8, 12]
    for asked in actor.asked:
        assert {
            "global_steps": 5,
            "validate": True,
            "do_sample": True,
        }.items() <= asked.meta_info.items()
    uids = [uid for asked in actor.asked for uid in asked.non_tensor_batch["uid"]]
    assert len(set(uids)) == 5 and uids[:4] == [uids[0]] * 4
    for source in ("x", "y"):
        assert metrics[f"val-core/{source}/reward/mean@4"] == 0.5
        assert metrics[f"val-core/{source}/reward/best@4/mean"] == 1.0
    # Of 2 drawn from 4, of which 2 are right: 1 - C(2,2)/C(4,2)
    assert metrics["val-aux/x/reward/best@2/mean"] == pytest.approx(5 / 6)
    assert metrics["val-aux/reward/errors"] == 2.0
    assert rows == []


class Batches(list[dict[str, Any]]):
    """A loader with a data set of 5 rows."""

    dataset = range(5)


def test_the_live_line_counts_the_responses_of_all_batches(make: Callable) -> None:
    """Also where the engines do not count them, as in other processes."""
    validator, actor = make(Batches([batch(2, "x"), batch(3, "y")]), n=4, do_sample=True)
    generate = actor.generate_sequences
    shown: list[str] = []

    def generate_and_look(prompts: DataProto) -> DataProto:
        shown.append(str(Tally.current))
        return generate(prompts)

    actor.generate_sequences = generate_and_look
    validator.run(5)
    assert shown == ["", " 8/20"]
    assert Tally.current is None


def test_same_step_asks_the_same(make: Callable) -> None:
    """Names of prompts do not depend on what ran before, so that a resumed run samples the same answers."""
    loader = [batch(2, "x")]
    (first, one), (second, other) = make(loader), make(loader)
    first.run(1), first.run(2), second.run(2)
    assert list(one.asked[1].non_tensor_batch["uid"]) == list(
        other.asked[0].non_tensor_batch["uid"]
    )


@pytest.mark.parametrize(("count", "num_shown"), [(0, 0), (1, 1), (2, 2), (9, 2)])
def test_responses_are_written_and_the_first_of_each_prompt_is_shown(
    count: int, num_shown: int, make: Callable, tmp_path: Path
) -> None:
    trainer = {"validation_data_dir": str(tmp_path), "log_val_generations": count}
    validator, _ = make([batch(2, "x")], trainer=trainer, n=2)
    _, shown = validator.run(4)
    assert (
        shown == [{"input": "aa", "output": "aa", "ground_truth": "bb", "score": 0.0}] * num_shown
    )
    rows = [json.loads(line) for line in (tmp_path / "4.jsonl").read_text().splitlines()]
    assert [row["score"] for row in rows] == [0.0, 1.0, 0.0, 1.0]


def test_graders_numbers_are_measured_and_texts_are_not(make: Callable) -> None:
    grader = Grader(acc=lambda good: good, comment=lambda good: "fine" if good else "poor")
    metrics, _ = make([batch(2, "x")], grader, n=2)[0].run(1)
    assert metrics["val-core/x/acc/mean@2"] == 0.5
    assert not [name for name in metrics if "comment" in name]


def test_a_graders_number_called_reward_does_not_replace_the_score(make: Callable) -> None:
    metrics, _ = make([batch(2, "x")], Grader(reward=lambda good: 7.0), n=2)[0].run(1)
    assert metrics["val-core/x/reward/mean@2"] == 0.5


@pytest.mark.parametrize(
    "pred", [lambda good: "b" if good else None, lambda good: ["b"] if good else ["a"]]
)
def test_majority_of_predictions(pred: Callable[[bool], Any], make: Callable) -> None:
    """Also of predictions that cannot be hashed, such as a list of answers."""
    metrics, _ = make([batch(1, "x")], Grader(pred=pred), n=2)[0].run(1)
    assert metrics["val-core/x/reward/maj@2/mean"] == 0.5


SCORES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.25, -1.0]), min_size=1, max_size=7)


def majority_score(draw: tuple[int, ...], answers: str, scores: list[float]) -> float:
    """The score of the most frequent answer of a draw; of several, the mean, since ties are broken evenly."""
    counts = Counter(answers[i] for i in draw)
    winners = [answer for answer, count in counts.items() if count == max(counts.values())]
    return mean(
        mean(s for s, a in zip(scores, answers, strict=True) if a == winner) for winner in winners
    )


@settings(deadline=None, max_examples=40)
@given(SCORES)
def test_best_and_worst_equal_enumeration(scores: list[float]) -> None:
    """Mean and deviation of the maximum and the minimum over all subsets."""
    found = means_of_scores([np.array(scores)])
    n = len(scores)
    assert found[f"mean@{n}"] == pytest.approx(mean(scores))
    sizes = {k for k in (2, 4) if k < n} | ({n} if n > 1 else set())
    assert {name for name in found if name.startswith("best")} == {
        f"best@{k}/{kind}" for k in sizes for kind in (("mean", "std") if k < n else ("mean",))
    }
    for k in sizes:
        for kind, pick in (("best", max), ("worst", min)):
            values = [pick(draw) for draw in combinations(scores, k)]
            assert found[f"{kind}@{k}/mean"] == pytest.approx(mean(values), abs=1e-12)
            if k < n:
                assert found[f"{kind}@{k}/std"] == pytest.approx(pstdev(values), abs=1e-7)


@settings(deadline=None, max_examples=40)
@given(st.data())
def test_majority_equals_enumeration(data: st.DataObject) -> None:
    """Over all subsets, ties broken evenly, answers with differing scores."""
    scores = data.draw(SCORES.filter(lambda values: len(values) > 1))
    n = len(scores)
    answers = data.draw(st.text("abcd", min_size=n, max_size=n))
    found = means_of_majority([np.array(scores)], [answers])
    for k in {2, 4, n}:
        if k <= n:
            values = [majority_score(draw, answers, scores) for draw in combinations(range(n), k)]
            assert found[f"maj@{k}/mean"] == pytest.approx(mean(values), abs=1e-12)


@pytest.mark.parametrize(
    "counts", [(1,), (3, 3), (1, 2, 5), (1, 1, 1, 1), (2, 30, 32), (1,) * 20 + (44,)]
)
def test_majority_chances_sum_to_one(counts: tuple[int, ...]) -> None:
    """Somebody wins every draw, also of 64; all of the answers drawn, the most frequent one wins."""
    chances = majority_chances(counts)
    np.testing.assert_allclose(chances[1:].sum(1), 1.0, rtol=1e-10)
    winners = np.array(counts) == max(counts)
    np.testing.assert_allclose(chances[-1], winners / winners.sum(), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(chances[1], np.array(counts) / sum(counts), rtol=1e-10)


def test_names_and_values() -> None:
    """Two data sources: 4 answers to 2 prompts, and 1 answer to 1; `acc` is the core where there is one."""
    metrics = means_of_rows(
        data_sources=["sums"] * 8 + ["songs"],
        uids=["p", "q"] * 4 + ["r"],
        variables={
            "reward": [1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 3.0],
            "acc": [True, False, False, False, False, False, True, True, None],
            "language": ["en"] * 9,
        },
        predictions=["7", "1", "8", None, "8", None, "7", "2", None],
    )
    assert {name for name in metrics if name.startswith("val-core")} == {
        "val-core/sums/acc/mean@4",
        "val-core/sums/acc/best@4/mean",
        "val-core/sums/acc/maj@4/mean",
        "val-core/songs/reward/mean@1",
    }
    assert (
        metrics["val-core/sums/acc/mean@4"] == 0.375
        and metrics["val-core/songs/reward/mean@1"] == 3.0
    )
    assert metrics["val-aux/sums/reward/best@2/mean"] == pytest.approx((5 / 6 + 3 / 6) / 2)
    assert metrics["val-aux/sums/reward/worst@2/mean"] == pytest.approx((1 / 6 + 0) / 2)
    assert metrics["val-core/sums/acc/maj@4/mean"] == pytest.approx((0.5 + 0.0) / 2)
    assert metrics["val-aux/sums/acc/std@4"] == pytest.approx((0.5 + 0.1875**0.5) / 2)
    assert not any(
        "language" in name or "songs/acc" in name or "songs/reward/maj" in name for name in metrics
    )
    assert "val-aux/sums/acc/best@2/std" in metrics and "val-aux/sums/acc/best@4/std" not in metrics


def test_prompts_of_unequal_size() -> None:
    """3, 2 and 1 answers: N is 3; all count in the mean, the first two in k = 2 and std, the first in k = 3."""
    found = means_of_scores([np.array([0.0, 0.0, 1.0]), np.array([0.0, 1.0]), np.array([1.0])])
    assert found["mean@3"] == pytest.approx((1 / 3 + 1 / 2 + 1) / 3)
    assert found["std@3"] == pytest.approx(((2 / 9) ** 0.5 + 0.5) / 2)
    assert found["best@2/mean"] == pytest.approx((2 / 3 + 1) / 2)
    assert found["best@3/mean"] == 1.0 and found["worst@3/mean"] == 0.0
    majority = means_of_majority([np.array([0.0, 0.0, 1.0]), np.array([0.0, 1.0])], ["aab", "ab"])
    assert majority["maj@3/mean"] == 0.0
    assert majority["maj@2/mean"] == pytest.approx(((1 / 3 * 0 + 2 / 3 * 0.5) + 0.5) / 2)


def test_missing_numbers_are_left_out() -> None:
    """An answer without a number of that name is no answer, and NaN does not spread."""
    metrics = means_of_rows(["s"] * 3, ["p"] * 3, {"reward": [1.0, None, float("nan")]})
    assert metrics == {"val-core/s/reward/mean@1": 1.0}


def test_no_random_state_is_touched() -> None:
    """The same call gives the same numbers, and the global generator goes on as if there had been none."""
    np.random.seed(3)
    expected = np.random.rand()
    np.random.seed(3)
    arguments = (
        ["s"] * 6,
        [1, 1, 1, 2, 2, 2],
        {"reward": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]},
        list("abbccc"),
    )
    assert means_of_rows(*arguments) == means_of_rows(*arguments)
    assert np.random.rand() == expected


@pytest.mark.parametrize("share", [0.0, 0.02, 0.5, 0.97])
@pytest.mark.parametrize("num_responses", [1, 8])
def test_intervals_hold_the_mean_as_often_as_they_say(share: float, num_responses: int) -> None:
    """At least 9 of 10 of 400 draws of 60 prompts, also where all are wrong; and they are not wide for nothing."""
    generator = np.random.default_rng(0)
    chances = generator.beta(2 * share, 2 * (1 - share), 100_000) if share else np.zeros(100_000)
    hits, widths = 0, []
    for _ in range(400):
        drawn = generator.choice(chances, 60)
        values = generator.binomial(num_responses, drawn) / num_responses
        low, high = interval(values)
        hits += low <= chances.mean() <= high
        widths.append(high - low)
    assert hits >= 360
    assert 0 < np.mean(widths) < 0.27


def test_intervals_of_other_scores() -> None:
    """1.96 standard errors; of one prompt nothing is known."""
    low, high = interval(np.array([-1.0, 3.0, 1.0, 5.0]))
    error = np.std([-1.0, 3.0, 1.0, 5.0], ddof=1) / 2
    assert (low, high) == (pytest.approx(2 - 1.96 * error), pytest.approx(2 + 1.96 * error))
    assert interval(np.array([7.0])) == (-np.inf, np.inf)
