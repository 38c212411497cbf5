# SPDX-License-Identifier: Apache-2.0
"""Samples that are graded one by one, in processes, while the event loop stays free."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.config import Config
from quadriga.errors import RewardError
from quadriga.protocol import DataProto
from quadriga.rewards import Outcome, RewardManager, early_grader, load_reward_manager
from tests.limits import HANGS_S

CODE = """
import os, pathlib, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if solution_str == "raise":
        raise LookupError("nothing to grade")
    if solution_str == "hang":
        time.sleep(3600)
    if solution_str == "die":
        os._exit(3)
    if solution_str == "meet":
        folder = pathlib.Path(__file__).parent
        (folder / f"here-{os.getpid()}").touch()
        while len(list(folder.glob("here-*"))) < 3:
            time.sleep(0.01)
    return {"score": float(solution_str == ground_truth), "length": len(solution_str)}
"""


class Words:
    """A tokenizer of four words."""

    words = ("5", "6", "raise", "meet")

    def batch_decode(self, token_ids: list[list[int]], skip_special_tokens: bool) -> list[str]:
        return [" ".join(self.words[token] for token in row) for row in token_ids]


@pytest.fixture
def config(tmp_path: Path) -> Callable[..., Config]:
    (tmp_path / "reward.py").write_text(CODE)

    def build(
        *, mode: str = "async", path: str | None = str(tmp_path / "reward.py"), **reward_model: Any
    ) -> Config:
        return Config(
            actor_rollout_ref={"rollout": {"mode": mode}},
            custom_reward_function={"path": path},
            reward_model={"num_workers": 3, **reward_model},
        )

    return build


@pytest.fixture
def grader(config: Callable[..., Config]) -> Iterator[Callable[..., RewardManager]]:
    made: list[RewardManager] = []

    def build(**reward_model: Any) -> RewardManager:
        found = early_grader(config(**reward_model), Words())
        assert found is not None
        made.append(found)
        return found

    yield build
    for one in made:
        one.close()


def row(text: str, source: str = "mine") -> dict[str, Any]:
    return {"data_source": source, "solution_str": text, "ground_truth": "5", "extra_info": {}}


def outcomes(grader: RewardManager, *texts: str) -> list[Outcome]:
    async def grade() -> list[Outcome]:
        return await asyncio.gather(*(grader.grade_one(row(text)) for text in texts))

    return asyncio.run(grade())


def test_each_sample_gets_its_own_outcome(grader: Callable[..., RewardManager]) -> None:
    """In order, in several event loops one after the other, and with the reason where there is no score."""
    manager = grader()
    right, wrong, raised = outcomes(manager, "5", "6", "raise")
    assert right == Outcome(1.0, {"length": 1}, "", "graded") and wrong.score == 0.0
    assert raised.kind == "raised" and "nothing to grade" in raised.error
    assert outcomes(manager, "5") == [right]


def test_samples_are_graded_side_by_side_and_the_loop_stays_free(
    grader: Callable[..., RewardManager],
) -> None:
    manager = grader()
    outcomes(manager, "5", "5", "5")

    async def watched() -> tuple[list[Outcome], int]:
        num_turns = 0
        tasks = [asyncio.create_task(manager.grade_one(row("meet"))) for _ in range(3)]
        while not all(task.done() for task in tasks):
            num_turns += 1
            await asyncio.sleep(0)
        return [task.result() for task in tasks], num_turns

    # Each of the three returns when all of them have begun.
    graded, num_turns = asyncio.run(watched())
    assert [outcome.kind for outcome in graded] == ["graded"] * 3
    assert num_turns > 5


def test_a_sample_that_hangs_or_dies_costs_only_itself(
    grader: Callable[..., RewardManager],
) -> None:
    manager = grader(timeout_s=1.0)
    hung, died, *others = outcomes(manager, "hang", "die", "5", "5", "5", "5")
    assert (hung.kind, died.kind) == ("timeout", "died")
    assert [other.score for other in others] == [1.0] * 4


def test_a_conversation_that_is_given_up_ends_its_process(
    grader: Callable[..., RewardManager],
) -> None:
    """Otherwise it would hold the only process for longer than this test may take."""
    manager = grader(timeout_s=HANGS_S, num_workers=1)

    async def watched() -> Outcome:
        hung = asyncio.create_task(manager.grade_one(row("hang")))
        await asyncio.sleep(0.5)
        hung.cancel()
        return await manager.grade_one(row("5"))

    assert asyncio.run(watched()).score == 1.0


def test_rewards_of_a_batch_are_those_of_grading_it_at_once(
    grader: Callable[..., RewardManager], config: Callable[..., Config]
) -> None:
    """Scores, extras and metrics are the same, whoever graded when; and so are the punishments of long answers."""
    kwargs = {"overlong_buffer_cfg": {"enable": True, "len": 2, "log": True}, "max_resp_len": 3}
    settings = {"reward_manager": "dapo", "reward_kwargs": kwargs, "max_error_rate": 0.5}
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 0, 0]])
    data = DataProto.from_dict(
        {"responses": torch.tensor([[0, 0, 0], [1, 1, 0], [2, 0, 0]]), "attention_mask": mask},
        {
            "data_source": np.array(["mine"] * 3, dtype=object),
            "reward_model": np.array([{"ground_truth": "5"}] * 3, dtype=object),
        },
    )
    at_once = load_reward_manager(config(**settings), Words())
    together = at_once(data)
    at_once.close()
    manager = grader(**settings)
    early = manager.begin(data, outcomes(manager, "5", "6 6", "raise")).result()
    assert torch.equal(early.scores, together.scores) and early.scores[0, 0] == 1.0
    assert {
        name: column.tolist() for name, column in early.extra.items() if name != "reward_error"
    } == {
        name: column.tolist() for name, column in together.extra.items() if name != "reward_error"
    }
    assert early.extra["overlong"].tolist() == [False, True, None]
    assert early.metrics == together.metrics


def test_too_many_failures_stop_the_run(grader: Callable[..., RewardManager]) -> None:
    manager = grader(max_error_rate=0.0)
    data = DataProto.from_dict(
        {"responses": torch.tensor([[2]]), "attention_mask": torch.ones(1, 2).long()},
        {
            "data_source": np.array(["mine"], dtype=object),
            "reward_model": np.array([{"ground_truth": "5"}]),
        },
    )
    with pytest.raises(RewardError, match="1 of 1 samples could not be graded"):
        manager.begin(data, outcomes(manager, "raise")).result()


def test_data_source_that_no_grader_knows(config: Callable[..., Config]) -> None:
    """It stops the run at once: no other sample will fare better."""
    manager = early_grader(config(path=None), Words())
    assert manager is not None
    with pytest.raises(RewardError, match="data_source: got 'unheard of'"):
        asyncio.run(manager.grade_one(row("5", source="unheard of")))
    manager.close()


def test_who_is_graded_early(config: Callable[..., Config]) -> None:
    """Processes that generate share the workers."""
    assert early_grader(config(mode="sync"), Words()) is None
    assert early_grader(config(reward_manager="batch"), Words()) is None
    assert early_grader(config(reward_manager="known to the driver"), Words()) is None
    alone = config(path=None, enable=True, model={"path": "x"})
    assert early_grader(alone, Words()) is None
    shared = early_grader(config(num_workers=8), Words(), num_processes=3)
    assert shared is not None and shared.settings.num_workers == 2
    shared.close()
