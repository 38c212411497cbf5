# SPDX-License-Identifier: Apache-2.0
"""The value function's worker, called directly."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.config import Config
from quadriga.config.actor import HF_FOLDER, CheckpointConfig
from quadriga.config.layout import Layout
from quadriga.engines.parallel.processes import Processes
from quadriga.engines.process_group import ProcessGroup
from quadriga.models.scorers import ValueScorer
from quadriga.protocol import DataProto
from quadriga.workers import CriticWorker
from quadriga.workers.models import load_model


@pytest.fixture
def make(config: Config, tokenizer: Any):
    def build() -> CriticWorker:
        worker = CriticWorker(config, tokenizer)
        worker.init_model()
        return worker

    return build


@pytest.fixture
def batch(prompts: DataProto) -> DataProto:
    """Prompts with answers of 1 to 3 tokens whose return is 1 for the first prompt and -1 for the second."""
    mask = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [1, 1, 1]])
    columns = dict(prompts.batch.items())
    responses = torch.tensor([[4, 5, 6], [7, 0, 0], [8, 9, 0], [3, 4, 1]])
    position_ids = columns["position_ids"]
    returns = torch.tensor([[1.0], [1.0], [-1.0], [-1.0]]) * mask
    return DataProto.from_dict(
        tensors={
            "input_ids": torch.cat([columns["input_ids"], responses], -1),
            "attention_mask": torch.cat([columns["attention_mask"], mask], -1),
            "position_ids": torch.cat(
                [position_ids, position_ids[:, -1:] + torch.arange(1, 4)], -1
            ),
            "response_mask": mask,
            "returns": returns,
        },
        meta_info={"global_steps": 1, "total_training_steps": 100},
    )


def test_values_come_near_the_returns(make: Any, batch: DataProto) -> None:
    worker = make()
    mask = batch.batch["response_mask"].bool()

    def error() -> float:
        values = worker.compute_values(batch).batch["values"]
        assert bool((values[~mask] == 0).all())
        return float((values - batch.batch["returns"])[mask].abs().mean())

    before = error()
    for _ in range(25):
        batch.batch["values"] = worker.compute_values(batch).batch["values"]
        metrics = worker.update_critic(batch).meta_info["metrics"]
    assert error() < before / 4
    assert metrics["critic/lr"].value == 1e-2


@pytest.mark.parametrize("contents", [["model"], ["hf_model"]])
def test_a_critic_starts_from_a_saved_one(
    contents: list[str], make: Any, batch: DataProto, config: Config, tokenizer: Any, tmp_path: Path
) -> None:
    """With the value head that was learned, from the files of a run and from those of transformers."""
    worker = make()
    worker.section = worker.section.model_copy(
        update={"checkpoint": CheckpointConfig(save_contents=contents)}
    )
    batch.batch["values"] = worker.compute_values(batch).batch["values"]
    worker.update_critic(batch)
    worker.save_checkpoint(tmp_path)
    assert worker.checkpoint_written(wait=True)
    path = tmp_path / "critic" / (HF_FOLDER if contents == ["hf_model"] else "")
    critic = config.critic.model_copy(
        update={"model": config.critic.model.model_copy(update={"path": str(path)})}
    )
    other = CriticWorker(config.model_copy(update={"critic": critic}), tokenizer)
    other.init_model()
    values = worker.compute_values(batch).batch["values"]
    assert values.any() and torch.equal(other.compute_values(batch).batch["values"], values)
    layout = Layout(dp_shard=2)
    sharded = Processes(layout, layout.place(0), ProcessGroup(0, 2), ProcessGroup(0, 2))
    read = load_model(config, str(path), ValueScorer, torch.float32, sharded).read
    head = worker.engine.scorer.model.value_head["linear"].weight
    assert read is not None and torch.equal(read("value_head.linear.weight"), head.float())


def test_checkpoint_brings_the_head_back(make: Any, batch: DataProto, tmp_path: Path) -> None:
    worker, other = make(), make()
    batch.batch["values"] = worker.compute_values(batch).batch["values"]
    worker.update_critic(batch)
    worker.save_checkpoint(tmp_path)
    assert worker.checkpoint_written(wait=True)
    values = worker.compute_values(batch).batch["values"]
    assert not torch.equal(other.compute_values(batch).batch["values"], values)
    other.load_checkpoint(tmp_path)
    assert torch.equal(other.compute_values(batch).batch["values"], values)
