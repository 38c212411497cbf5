# SPDX-License-Identifier: Apache-2.0
"""Validation: what is asked, how often, and what becomes of the answers."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.config import Config
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.rewards import RewardManager, RewardOutput
from quadriga.trainer.validate import Validator


class Actor:
    """Answers every prompt with its number of call and row; remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[DataProto] = []

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        self.asked.append(prompts)
        answers = torch.arange(len(prompts))[:, None] % 2 + torch.tensor([[1, 1]])
        attention = torch.cat([prompts.batch["attention_mask"], torch.ones_like(answers)], -1)
        tensors = {"prompts": prompts.batch["input_ids"], "responses": answers, "attention_mask": attention}
        return DataProto.from_dict(
            tensors={**tensors, "response_mask": torch.ones_like(answers)}, meta_info={"metrics": {"x": 1}}
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
        return RewardOutput(scores, extra, {"reward/errors": Metric(1.0, "sum"), "reward/other": Metric(3.0)})


def batch(num_rows: int, source: str) -> dict[str, Any]:
    """What the loader yields."""
    objects = {"data_source": [source] * num_rows, "reward_model": [{"ground_truth": "bb"}] * num_rows}
    return {
        "input_ids": torch.ones(num_rows, 2).long(),
        "attention_mask": torch.ones(num_rows, 2).long(),
        "position_ids": torch.arange(2).repeat(num_rows, 1),
        **{name: np.array(values, dtype=object) for name, values in objects.items()},
    }


@pytest.fixture
def make(tokenizer: object) -> Callable[..., tuple[Validator, Actor]]:
    def build(loader: Any, grader: Any = None, trainer: dict | None = None, **sampling: Any) -> tuple[Validator, Actor]:
        actor = Actor()
        config = Config(actor_rollout_ref={"rollout": {"val_kwargs": sampling}}, trainer=trainer or {})
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
        assert {"global_steps": 5, "validate": True, "do_sample": True}.items() <= asked.meta_info.items()
    uids = [uid for asked in actor.asked for uid in asked.non_tensor_batch["uid"]]
    assert len(set(uids)) == 5 and uids[:4] == [uids[0]] * 4
    for source in ("x", "y"):
        assert metrics[f"val-core/{source}/reward/mean@4"] == 0.5
        assert metrics[f"val-core/{source}/reward/best@4/mean"] == 1.0
    # Of 2 drawn from 4, of which 2 are right: 1 - C(2,2)/C(4,2)
    assert metrics["val-aux/x/reward/best@2/mean"] == pytest.approx(5 / 6)
    assert metrics["val-aux/reward/errors"] == 2.0
    assert rows == []


def test_same_step_asks_the_same(make: Callable) -> None:
    """Names of prompts do not depend on what ran before, so that a resumed run samples the same answers."""
    loader = [batch(2, "x")]
    (first, one), (second, other) = make(loader), make(loader)
    first.run(1), first.run(2), second.run(2)
    assert list(one.asked[1].non_tensor_batch["uid"]) == list(other.asked[0].non_tensor_batch["uid"])


def test_answers_are_kept_and_shown(make: Callable, tmp_path: Path) -> None:
    trainer = {"validation_data_dir": str(tmp_path), "log_val_generations": 1}
    validator, _ = make([batch(2, "x")], trainer=trainer, n=2)
    _, shown = validator.run(4)
    assert shown == [{"input": "aa", "output": "aa", "ground_truth": "bb", "score": 0.0}]
    rows = [json.loads(line) for line in (tmp_path / "4.jsonl").read_text().splitlines()]
    assert [row["score"] for row in rows] == [0.0, 1.0, 0.0, 1.0]


def test_graders_numbers_are_measured_and_texts_are_not(make: Callable) -> None:
    grader = Grader(acc=lambda good: good, comment=lambda good: "fine" if good else "poor")
    metrics, _ = make([batch(2, "x")], grader, n=2)[0].run(1)
    assert metrics["val-core/x/acc/mean@2"] == 0.5
    assert not [name for name in metrics if "comment" in name]


@pytest.mark.parametrize("pred", [lambda good: "b" if good else None, lambda good: ["b"] if good else ["a"]])
def test_majority_of_predictions(pred: Callable[[bool], Any], make: Callable) -> None:
    """Also of predictions that cannot be hashed, such as a list of answers."""
    metrics, _ = make([batch(1, "x")], Grader(pred=pred), n=2)[0].run(1)
    assert metrics["val-core/x/reward/maj@2/mean"] == 0.5
