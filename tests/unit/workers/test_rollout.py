# SPDX-License-Identifier: Apache-2.0
"""The rollout's own worker beside an actor's, both in this process; weights go by broadcast."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from quadriga.config import Config
from quadriga.errors import EngineError, WeightSyncError
from quadriga.protocol import DataProto
from quadriga.rollout.interface import RolloutEngine
from quadriga.workers import ActorRolloutRefWorker, RolloutWorker

LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}


class Apart:
    """An actor and a rollout, and what the driver does between them."""

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.actor = ActorRolloutRefWorker(config, tokenizer, role="actor")
        self.rollout = RolloutWorker(config, tokenizer)
        self.chosen = {**self.actor.init_model(), **self.rollout.init_model()}

    def connect(self) -> None:
        address = self.actor.offer_weights([0])
        assert address is not None
        self.rollout.expect_weights(address)

    def publish(self, version: int, expected: int | None = None) -> None:
        with ThreadPoolExecutor(1) as thread:
            sent = thread.submit(self.actor.send_weights, version)
            self.rollout.receive_weights(version if expected is None else expected)
            sent.result()

    def close(self) -> None:
        self.actor.close()
        self.rollout.close()


@pytest.fixture(params=[{}, LORA], ids=["full", "lora"])
def run(request: pytest.FixtureRequest, config: Config, tmp_path: Path) -> Config:
    """A run that keeps its files below the test's folder; with all weights trained, or an adapter."""
    if request.param:
        pytest.importorskip("peft")
    trainer = config.trainer.model_copy(update={"default_local_dir": str(tmp_path)})
    policy = config.actor_rollout_ref
    policy = policy.model_copy(update={"model": policy.model.model_copy(update=request.param)})
    return config.model_copy(update={"trainer": trainer, "actor_rollout_ref": policy})


def learn(worker: ActorRolloutRefWorker, answers: DataProto) -> None:
    batch = answers.select(deepcopy=True)
    batch.meta_info |= {"global_steps": 1, "total_training_steps": 10}
    batch.batch["advantages"] = (
        torch.tensor([[1.0], [-1.0], [2.0], [-2.0]]) * batch.batch["response_mask"]
    )
    worker.update_actor(batch)


def test_apart_is_as_good_as_together(
    run: Config, tokenizer: Any, prompts: DataProto, tmp_path: Path
) -> None:
    """The same answers, before and after an update, adapter and all; nothing stays on disk."""
    together = ActorRolloutRefWorker(run, tokenizer, role="actor_rollout")
    together.init_model()
    apart = Apart(run, tokenizer)
    apart.connect()
    apart.publish(0)
    seen = []
    for version in (1, 2, 3):
        theirs, ours = (
            together.generate_sequences(prompts),
            apart.rollout.generate_sequences(prompts),
        )
        for name in ("responses", "response_mask"):
            assert torch.equal(theirs.batch[name], ours.batch[name]), (version, name)
        # An adapter that is merged rounds otherwise than one beside its weight.
        tolerance = 1e-5 if run.actor_rollout_ref.model.has_adapter else 0.0
        theirs_told, told = theirs.batch["rollout_log_probs"], ours.batch["rollout_log_probs"]
        torch.testing.assert_close(told, theirs_told, atol=tolerance, rtol=0)
        seen.append(ours.batch["rollout_log_probs"])
        for worker in (together, apart.actor):
            learn(worker, theirs)
        together.publish_weights(version)
        apart.publish(version)
        assert apart.rollout.generation.engine.weight_version == version
    # At first an adapter changes nothing; what came afterwards were other weights each time.
    assert not torch.equal(seen[1], seen[2])
    apart.close()


def test_nothing_is_generated_without_the_actors_weights(
    run: Config, tokenizer: Any, prompts: DataProto
) -> None:
    """Before any came, after some did not arrive, and when they were changed."""
    apart = Apart(run, tokenizer)
    assert apart.chosen["rollout"].endswith("on processes of its own")
    with pytest.raises(WeightSyncError, match="no connection to the actor's weights"):
        apart.rollout.generate_sequences(prompts)
    apart.connect()
    apart.publish(0)
    with pytest.raises(WeightSyncError, match="version 2: got version 1"):
        apart.publish(1, expected=2)
    with pytest.raises(WeightSyncError, match="got version -1, expected version 0"):
        apart.rollout.generate_sequences(prompts)
    apart.publish(3)
    with torch.no_grad():
        apart.rollout.generation.engine.model.model.norm.weight[3] += 1
    with pytest.raises(
        WeightSyncError, match=r"version 3: got 1 of \d+ weights that differ: model\.norm\.weight,"
    ):
        apart.rollout.generate_sequences(prompts)


def test_tokens_outside_the_vocabulary(run: Config, tokenizer: Any, prompts: DataProto) -> None:
    apart = Apart(run, tokenizer)
    apart.connect()
    apart.publish(0)
    prompts.batch["input_ids"][0, -1] = 23
    with pytest.raises(EngineError, match="token id 23, expected ids below 23"):
        apart.rollout.generate_sequences(prompts)


@pytest.mark.parametrize("frees", [True, False])
def test_the_engine_sleeps_while_models_train(
    config: Config, tokenizer: Any, prompts: DataProto, monkeypatch: pytest.MonkeyPatch, frees: bool
) -> None:
    """Colocated with the actor, where it may free its cache; never on processes of its own."""
    calls: list[str] = []
    for name in ("sleep", "wake"):
        real = getattr(RolloutEngine, name)

        def noted(engine: RolloutEngine, name: str = name, real: Any = real) -> None:
            calls.append(name)
            real(engine)

        monkeypatch.setattr(RolloutEngine, name, noted)
    policy = config.actor_rollout_ref
    rollout = policy.rollout.model_copy(update={"free_cache_engine": frees})
    config = config.model_copy(
        update={"actor_rollout_ref": policy.model_copy(update={"rollout": rollout})}
    )
    worker = ActorRolloutRefWorker(config, tokenizer, role="actor_rollout")
    worker.init_model()
    learn(worker, worker.generate_sequences(prompts))
    worker.publish_weights(1)
    worker.generate_sequences(prompts)
    assert calls == (["sleep", "wake", "sleep", "wake", "sleep"] if frees else [])
    calls.clear()
    RolloutWorker(config, tokenizer).init_model()
    assert not calls


def test_weights_that_sleep_has_dropped_come_again(
    config: Config, tokenizer: Any, prompts: DataProto, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing was published since the sleep, as after a validation, before the engine generates."""
    worker = ActorRolloutRefWorker(config, tokenizer, role="actor_rollout")
    worker.init_model()
    published, real = [], worker.publish_weights

    def publish(version: int) -> None:
        published.append(version)
        real(version)

    monkeypatch.setattr(worker, "publish_weights", publish)
    monkeypatch.setattr(
        type(worker.generation.engine),
        "has_dropped_weights",
        property(lambda engine: not published),
    )
    worker.generate_sequences(prompts)
    worker.generate_sequences(prompts)
    assert published == [0]


def test_an_update_that_was_not_published(
    config: Config, tokenizer: Any, prompts: DataProto
) -> None:
    """A rollout on the actor's own weights has them at once; generating under the old version is an error."""
    worker = ActorRolloutRefWorker(config, tokenizer, role="actor_rollout")
    worker.init_model()
    learn(worker, worker.generate_sequences(prompts))
    with pytest.raises(WeightSyncError, match="weights that were written to since"):
        worker.generate_sequences(prompts)
    worker.publish_weights(1)
    worker.generate_sequences(prompts)
