# SPDX-License-Identifier: Apache-2.0
"""The rollout cache: responses in files, used again, and refused where they belong to something else."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from quadriga.config import Config
from quadriga.errors import DataError
from quadriga.observe.metrics import Metric, reduce_metrics
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.trainer.prompts import assign_uids
from quadriga.trainer.responses import generate_responses
from quadriga.trainer.rollout_cache import RolloutCache


class Rollout:
    """Responds with the number of its call, and counts its calls."""

    def __init__(self) -> None:
        self.num_calls = 0

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        self.num_calls += 1
        responses = torch.full((len(prompts), 2), self.num_calls)
        attention = torch.cat([prompts.batch["attention_mask"], torch.ones_like(responses)], -1)
        reasons = np.array([f"of {uid}" for uid in prompts.non_tensor_batch["uid"]], dtype=object)
        return DataProto.from_dict(
            {
                "prompts": prompts.batch["input_ids"],
                "responses": responses,
                "attention_mask": attention,
            },
            {"finish_reason": reasons},
            {
                "metrics": {
                    "rollout/x": Metric(3.0, "sum"),
                    "timing_s/generate_sequences": Metric(9.0, "max"),
                }
            },
        )


def prompts(
    step: int, first: int = 0, *, token: int | None = None, truth: str = "t", **meta: Any
) -> DataProto:
    """Two prompts of a step."""
    ids = torch.tensor([[0, 5], [6, 7]]) if token is None else torch.full((2, 2), token)
    batch = DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones(2, 2).long(),
            "position_ids": torch.arange(2).repeat(2, 1),
        },
        {
            "truth": np.array([f"{truth}{row}" for row in range(2)], dtype=object),
            "raw_prompt_ids": [[5], [6, 7]],
        },
        {"global_steps": step, **meta},
    )
    return assign_uids(batch, str(step), first=first)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[RolloutCache, Rollout]]:
    def build(action: str = "cache", **rollout: Any) -> tuple[RolloutCache, Rollout]:
        skip = {"enable": True, "dump_dir": str(tmp_path / "cached"), "action": action}
        config = Config(actor_rollout_ref={"rollout": {"skip": skip, **rollout}})
        generator = Rollout()
        return RolloutCache(partial(generate_responses, generator, config), config), generator

    return build


def test_second_run_gets_the_responses_of_the_first(make: Callable, tmp_path: Path) -> None:
    """All columns are those that the rollout gave; what is known of the prompts is what is known today."""
    keeping, _ = make()
    first = [keeping(prompts(step, token=step), 2) for step in (1, 2)]
    assert sorted(path.name for path in (tmp_path / "cached").iterdir()) == [
        "1_0.answers",
        "2_0.answers",
    ]
    replaying, generator = make()
    second = [replaying(prompts(step, token=step, truth="new"), 2) for step in (1, 2)]
    assert generator.num_calls == 0
    for one, other in zip(first, second, strict=True):
        assert set(one.batch.keys()) == set(other.batch.keys())
        assert all(torch.equal(one.batch[name], other.batch[name]) for name in one.batch.keys())
        assert (
            one.non_tensor_batch["finish_reason"].tolist()
            == other.non_tensor_batch["finish_reason"].tolist()
        )
        assert other.non_tensor_batch["truth"].tolist() == ["new0", "new0", "new1", "new1"]
        assert set(one.non_tensor_batch) == set(other.non_tensor_batch)
        assert reduce_metrics(other.meta_info["metrics"]) == {
            "rollout/x": 3.0,
            "rollout/replayed": 1.0,
        }


def test_images_of_later_turns_are_kept_with_the_responses(make: Callable) -> None:
    """Those that a tool has shown beside those of the prompt; a prompt with another image is another one."""

    def of_prompts(size: int) -> DataProto:
        batch = prompts(1)
        batch.non_tensor_batch["multi_modal_inputs"] = object_array([image(size), {}])
        return batch

    def image(size: int) -> dict[str, torch.Tensor]:
        grid = torch.tensor([[1, size, size]])
        return {"pixel_values": torch.arange(size**2 * 6.0).view(-1, 6), "image_grid_thw": grid}

    asked = of_prompts(2)
    for number in range(2):
        cache, rollout = make()
        answer, later = rollout.generate_sequences, image(4)

        def shows(
            rows: DataProto, answer: Callable = answer, later: dict[str, torch.Tensor] = later
        ) -> DataProto:
            before = rows.non_tensor_batch["multi_modal_inputs"]
            both = [
                {name: torch.cat([*([one[name]] if one else []), later[name]]) for name in later}
                for one in before
            ]
            return answer(rows).union(DataProto.from_dict(non_tensors={"multi_modal_inputs": both}))

        rollout.generate_sequences = shows
        rows = cache(asked, 2)
        grids = [
            one["image_grid_thw"].tolist() for one in rows.non_tensor_batch["multi_modal_inputs"]
        ]
        assert grids == [[[1, 2, 2], [1, 4, 4]]] * 2 + [[[1, 4, 4]]] * 2
        pixels = rows.non_tensor_batch["multi_modal_inputs"][0]["pixel_values"]
        assert torch.equal(pixels, torch.cat([image(2)["pixel_values"], later["pixel_values"]]))
        assert rollout.num_calls == 1 - number
    with pytest.raises(DataError, match="responses to other prompts"):
        cache(of_prompts(4), 2)


def test_a_run_may_go_on_where_files_end(make: Callable) -> None:
    make()[0](prompts(1), 2)
    keeping, generator = make()
    keeping(prompts(1), 2), keeping(prompts(2), 2)
    assert generator.num_calls == 1


def test_repeat_takes_the_first_step_with_its_prompts(make: Callable) -> None:
    """The names are those of the step that asks: they tell the groups of several batches apart."""
    keeping, generator = make("repeat")
    keeping(prompts(3, token=8), 2)
    later = keeping(prompts(12, first=4, token=9, truth="other"), 2)
    assert generator.num_calls == 1
    assert later.batch["prompts"].tolist() == [[8, 8]] * 4
    assert later.non_tensor_batch["truth"].tolist() == ["t0", "t0", "t1", "t1"]
    assert later.non_tensor_batch["uid"].tolist() == ["12-4", "12-4", "12-5", "12-5"]


def test_greedy_responses_and_further_batches_have_files_of_their_own(
    make: Callable, tmp_path: Path
) -> None:
    keeping, generator = make()
    keeping(prompts(1, do_sample=False), 1), keeping(prompts(1), 2), keeping(prompts(1, first=2), 2)
    assert generator.num_calls == 3
    names = sorted(path.name for path in (tmp_path / "cached").iterdir())
    assert names == ["1_0.answers", "1_0_greedy.answers", "1_2.answers"]
    assert len(make()[0](prompts(1, do_sample=False), 1)) == 2


def test_columns_that_the_trainer_adds_are_today_s(make: Callable) -> None:
    """The reward of the greedy response, say, is computed anew."""
    with_baseline = prompts(1)
    with_baseline.batch["reward_baselines"] = torch.tensor([1.0, 2.0])
    make("repeat")[0](with_baseline, 2)
    again = prompts(1)
    again.batch["reward_baselines"] = torch.tensor([3.0, 4.0])
    for action in ("cache", "repeat"):
        assert make(action)[0](again, 2).batch["reward_baselines"].tolist() == [3.0, 3.0, 4.0, 4.0]


def test_responses_to_other_prompts(make: Callable) -> None:
    make()[0](prompts(1), 2)
    with pytest.raises(
        DataError,
        match=r"1_0\.answers: got responses to other prompts, expected responses to those",
    ):
        make()[0](prompts(1, token=3), 2)


def test_another_number_of_responses(make: Callable) -> None:
    make()[0](prompts(1), 2)
    said = r"got responses with actor_rollout_ref\.rollout\.n=2, expected actor_rollout_ref\.rollout\.n=4\. .*dump_dir"
    for action in ("cache", "repeat"):
        with pytest.raises(DataError, match=said):
            make(action)[0](prompts(1), 4)


def test_another_temperature(make: Callable) -> None:
    make(temperature=0.7)[0](prompts(1), 2)
    with pytest.raises(
        DataError, match=r"rollout\.temperature=0\.7, expected .*rollout\.temperature=1\.0"
    ):
        make()[0](prompts(1), 2)


@pytest.mark.parametrize("content", [b"", b"no responses", b"quadriga.DataProto.1\n\x80\x05N."])
def test_file_that_is_something_else(content: bytes, make: Callable, tmp_path: Path) -> None:
    (tmp_path / "cached").mkdir()
    (tmp_path / "cached" / "1_0.answers").write_bytes(content)
    with pytest.raises(
        DataError, match=r"1_0\.answers: got .*expected responses that a run has written"
    ):
        make()[0](prompts(1), 2)


def test_batch_of_another_kind(make: Callable, tmp_path: Path) -> None:
    (tmp_path / "cached").mkdir()
    prompts(1).save_to_disk(tmp_path / "cached" / "1_0.answers")
    with pytest.raises(DataError, match="got a DataProto of another kind"):
        make()[0](prompts(1), 2)


def test_place_that_cannot_be_written(make: Callable, tmp_path: Path) -> None:
    (tmp_path / "cached").write_text("")
    with pytest.raises(DataError, match=r"skip\.dump_dir: got .*cached .*created and written"):
        make()[0](prompts(1), 2)
