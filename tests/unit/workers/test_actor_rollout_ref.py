# SPDX-License-Identifier: Apache-2.0
"""The policy's worker, called directly."""

from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.config import Config, RolloutConfig
from quadriga.engines.batches import MicroBatching
from quadriga.errors import CheckpointError, EngineError, WeightSyncError
from quadriga.protocol import DataProto
from quadriga.workers import ActorRolloutRefWorker, actor_rollout_ref


@pytest.fixture
def worker(config: Config, tokenizer: Any) -> ActorRolloutRefWorker:
    worker = ActorRolloutRefWorker(config, tokenizer)
    worker.init_model()
    return worker


def answered(worker: ActorRolloutRefWorker, prompts: DataProto) -> DataProto:
    """Prompts with answers and advantages that differ within each group."""
    batch = worker.generate_sequences(prompts)
    batch.meta_info |= {
        "global_steps": prompts.meta_info["global_steps"],
        "total_training_steps": 10,
    }
    mask = batch.batch["response_mask"]
    batch.batch["advantages"] = torch.tensor([[1.0], [-1.0], [2.0], [-2.0]]) * mask
    return batch


def test_choices_have_reasons(config: Config, tokenizer: Any) -> None:
    chosen = ActorRolloutRefWorker(config, tokenizer).init_model()
    assert set(chosen) == {"actor", "weights", "rollout", "reference"}
    assert "float32" in chosen["weights"]
    assert chosen["reference"] == "a frozen copy"


def test_generated_log_probs_are_those_of_the_actor(
    worker: ActorRolloutRefWorker, prompts: DataProto
) -> None:
    batch = worker.generate_sequences(prompts)
    scores = worker.compute_log_prob(batch)
    mask = batch.batch["response_mask"].bool()
    own, told = scores.batch["old_log_probs"], batch.batch["rollout_log_probs"]
    torch.testing.assert_close(own[mask], told[mask], atol=1e-5, rtol=0)
    assert bool((scores.batch["entropys"][mask] > 0).all())
    assert bool((own[~mask] == 0).all())


def test_squares_of_probabilities_are_computed_where_asked_for(
    worker: ActorRolloutRefWorker, prompts: DataProto
) -> None:
    """They add up to at most 1 and, by Jensen's inequality, to at least exp(-entropy). Asking changes nothing else."""
    batch = worker.generate_sequences(prompts)
    plain, scores = (
        worker.compute_log_prob(batch),
        worker.compute_log_prob(batch, with_sum_pi_squared=True),
    )
    assert "sum_pi_squared" not in plain.batch.keys()
    assert torch.equal(plain.batch["old_log_probs"], scores.batch["old_log_probs"])
    mask, squares = batch.batch["response_mask"].bool(), scores.batch["sum_pi_squared"]
    assert squares.dtype == torch.float32 and bool((squares[~mask] == 0).all())
    assert bool((squares[mask] <= 1).all()) and bool(
        (squares >= (-scores.batch["entropys"]).exp() - 1e-6)[mask].all()
    )


def test_update_raises_what_was_rewarded_and_leaves_the_reference(
    worker: ActorRolloutRefWorker, prompts: DataProto
) -> None:
    batch = answered(worker, prompts)
    reference = worker.compute_ref_log_prob(batch).batch["ref_log_prob"]
    before = worker.compute_log_prob(batch).batch["old_log_probs"]
    metrics = worker.update_actor(batch).meta_info["metrics"]
    after = worker.compute_log_prob(batch).batch["old_log_probs"]
    assert metrics["actor/grad_norm"].value > 0
    assert metrics["actor/lr"].value == 1e-2
    assert float(((after - before) * batch.batch["advantages"]).sum()) > 0
    assert torch.equal(worker.compute_ref_log_prob(batch).batch["ref_log_prob"], reference)


def test_rollout_refuses_weights_that_were_not_published(
    worker: ActorRolloutRefWorker, prompts: DataProto
) -> None:
    worker.update_actor(answered(worker, prompts))
    worker.weight_version = 1
    with pytest.raises(WeightSyncError, match="version 0"):
        worker.generate_sequences(prompts)
    worker.publish_weights(1)
    assert worker.generate_sequences(prompts).meta_info["weight_version"] == 1


def test_checkpoint_brings_weights_and_optimizer_back(
    worker: ActorRolloutRefWorker,
    config: Config,
    tokenizer: Any,
    prompts: DataProto,
    tmp_path: Path,
) -> None:
    """Two workers that go on from the same checkpoint stay equal, in weights and in what they sample."""
    batch = answered(worker, prompts)
    worker.update_actor(batch)
    worker.publish_weights(1)
    worker.save_checkpoint(tmp_path)
    assert worker.checkpoint_written(wait=True)
    other = ActorRolloutRefWorker(config, tokenizer)
    other.init_model()
    other.load_checkpoint(tmp_path)
    other.publish_weights(1)
    for one in (worker, other):
        one.update_actor(batch)
        one.publish_weights(2)
    left, right = (
        worker.generate_sequences(prompts).batch,
        other.generate_sequences(prompts).batch,
    )
    assert torch.equal(left["responses"], right["responses"])
    assert torch.equal(left["rollout_log_probs"], right["rollout_log_probs"])


def test_tokens_outside_the_vocabulary(worker: ActorRolloutRefWorker, prompts: DataProto) -> None:
    prompts.batch["input_ids"][0, -1] = 23
    with pytest.raises(EngineError, match=r"token id 23, expected ids below 23.*data\.tokenizer"):
        worker.generate_sequences(prompts)


def test_policy_that_only_answers_has_no_optimizer(
    config: Config, tokenizer: Any, prompts: DataProto
) -> None:
    worker = ActorRolloutRefWorker(config, tokenizer, role="actor_rollout", is_trained=False)
    assert "reference" not in worker.init_model()
    assert worker.engine.training is None
    assert not worker.engine.parameters.trained
    assert len(worker.generate_sequences(prompts)) == 4


def test_checkpoint_into_a_place_that_cannot_be_written(
    worker: ActorRolloutRefWorker, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(CheckpointError, match="NotADirectoryError"):
        worker.save_checkpoint(tmp_path / "file")


@pytest.mark.parametrize(
    ("settings", "num_sequences"),
    [
        ({}, None),
        ({"log_prob_micro_batch_size_per_gpu": 3}, 3),
        ({"log_prob_micro_batch_size_per_gpu": 3, "log_prob_use_dynamic_bsz": True}, None),
    ],
)
def test_micro_batches_without_gradients(
    config: Config,
    tokenizer: Any,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict,
    num_sequences: int | None,
) -> None:
    """Log-probs are computed in micro-batches as their own section says."""
    worker = ActorRolloutRefWorker(config, tokenizer)
    monkeypatch.setattr(actor_rollout_ref, "infer", lambda engine, data, micro, **_: micro)
    section = RolloutConfig(log_prob_max_token_len_per_gpu=99, **settings)
    assert worker._infer(None, None, section) == MicroBatching(
        num_sequences, 99, worker.share_prompts
    )
