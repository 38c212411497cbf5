# SPDX-License-Identifier: Apache-2.0
"""What of a policy with an adapter travels to a rollout that applies adapters, which stands in for vLLM here."""

from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedTokenizerBase

from quadriga.background import in_background
from quadriga.config import Config
from quadriga.errors import WeightSyncError
from quadriga.models.adapter_files import is_factor
from quadriga.protocol import DataProto
from quadriga.single_controller import LocalWorkerGroup, WorkerGroup
from quadriga.single_controller.dispatch import Arguments
from quadriga.trainer.rollout_pool import RolloutPool
from quadriga.workers import ActorRolloutRefWorker, RolloutWorker, rollout_engines
from tests.unit.rollout.vllm.stand_in import StandIn, stand_in_for_vllm

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs peft")

LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"]}
NUM_FACTORS, NUM_FROZEN = 12, 21


@pytest.fixture
def run(config: Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Config:
    """With an adapter, and vLLM as the engine."""
    stand_in_for_vllm(monkeypatch)
    monkeypatch.setitem(rollout_engines.ENGINES, "vllm", StandIn)
    return changed(config, LORA, {"name": "vllm"}, str(tmp_path))


def changed(config: Config, model: dict[str, Any], rollout: dict[str, Any], folder: str) -> Config:
    policy = config.actor_rollout_ref
    policy = policy.model_copy(
        update={
            "model": policy.model.model_copy(update=model),
            "rollout": policy.rollout.model_copy(update=rollout),
        }
    )
    trainer = config.trainer.model_copy(update={"default_local_dir": folder})
    return config.model_copy(update={"actor_rollout_ref": policy, "trainer": trainer})


def together(
    run: Config, tokenizer: PreTrainedTokenizerBase
) -> tuple[Any, StandIn, dict[str, str]]:
    worker = ActorRolloutRefWorker(run, tokenizer, role="actor_rollout")
    chosen = worker.init_model()
    engine = worker.generation.engine
    assert isinstance(engine, StandIn)
    return worker, engine, chosen


def counts(engine: StandIn) -> list[tuple[int, int]]:
    """Of each load, how many matrices of the adapter it had, and how many other weights."""
    return [
        (sum(map(is_factor, names)), sum(not is_factor(name) for name in names))
        for names in engine.loads
    ]


def test_frozen_weights_travel_once_and_after_a_resume(
    run: Config, tokenizer: Any, tmp_path: Path
) -> None:
    """What arrives are the actor's own matrices, under names of a model without an adapter."""
    worker, engine, chosen = together(run, tokenizer)
    assert (
        "goes alone, after the weights below it (vLLM applies it beside the weights)"
        in chosen["adapter"]
    )
    assert "and the adapter beside them, with room for rank 8" in chosen["rollout"]
    worker.publish_weights(1)
    worker.save_checkpoint(tmp_path)
    worker.checkpoint_written(wait=True)
    worker.load_checkpoint(tmp_path)
    worker.publish_weights(2)
    worker.publish_weights(3)
    assert counts(engine) == [(12, NUM_FROZEN), (12, 0), (12, NUM_FROZEN), (12, 0)]
    own = dict(worker.engine.model.named_parameters())
    frozen = engine.core.processes[0].weights
    assert torch.equal(
        frozen["model.layers.1.mlp.up_proj.weight"], own["model.layers.1.mlp.up_proj.weight"]
    )
    name = "model.layers.1.mlp.down_proj"
    assert torch.equal(frozen[f"{name}.weight"], own[f"{name}.base_layer.weight"])
    assert torch.equal(
        engine.core.processes[0].layers[name].lora_a_stacked[0][0, 0, :4],
        own[f"{name}.lora_A.default.weight"],
    )
    assert len(engine.fingerprint().tensors) == NUM_FACTORS + NUM_FROZEN


def test_frozen_weights_that_an_engine_lost(run: Config, tokenizer: Any) -> None:
    """After a load that broke off among them, they are sent again."""
    worker, engine, _ = together(run, tokenizer)
    engine.bucket_bytes = 1  # so that a weight is written before the stream breaks off
    broken_stream = [
        ("model.norm.weight", torch.ones(16)),
        ("model.embed_tokens.weight", torch.ones(23, 16)),
    ]
    with pytest.raises(WeightSyncError, match="a stream without 31 of 33"):
        engine.load_weights(broken_stream, 1)
    worker.publish_weights(2)
    assert counts(engine)[-1] == (NUM_FACTORS, NUM_FROZEN) and engine.weight_version == 2


@pytest.mark.parametrize("has_adapter", [True, False], ids=["merged", "none"])
def test_an_engine_that_gets_whole_weights(
    run: Config, tokenizer: Any, prompts: DataProto, tmp_path: Path, has_adapter: bool
) -> None:
    """All of them each time, and no place for an adapter."""
    model = {"lora_merge": True} if has_adapter else {"lora_rank": 0}
    worker, engine, chosen = together(changed(run, model, {}, str(tmp_path)), tokenizer)
    worker.publish_weights(1)
    assert counts(engine) == [(0, NUM_FROZEN)] * 2
    assert engine.adapter is None and not engine.has_frozen_weights
    assert ("goes merged (lora_merge=true)" in chosen.get("adapter", "")) == has_adapter


class Group(LocalWorkerGroup[Any]):
    """A worker that is there already, as a group of one; its methods run in threads, so that two groups can meet."""

    def __init__(self, worker: Any) -> None:
        WorkerGroup.__init__(self, type(worker), 1)
        self.workers = [worker]

    def start_all(self, method_name: str, per_rank: Sequence[Arguments]) -> list[Future[Any]]:
        [(args, kwargs)] = per_rank
        return [
            in_background(partial(getattr(self.workers[0], method_name), *args, **kwargs), "worker")
        ]


def test_to_a_rollout_elsewhere(run: Config, tokenizer: Any) -> None:
    """In the same buckets: once with the frozen weights, then without; and with them where a publication failed."""
    actor, rollout = (
        ActorRolloutRefWorker(run, tokenizer, role="actor"),
        RolloutWorker(run, tokenizer),
    )
    assert "goes alone" in actor.init_model()["adapter"]
    rollout.init_model()
    engine = rollout.generation.engine
    assert isinstance(engine, StandIn)
    weights = RolloutPool(Group(actor), Group(rollout))
    weights.publish(1)
    engine.core.is_busy = True
    with pytest.raises(WeightSyncError, match="responses are being generated"):
        weights.publish(2)
    engine.core.is_busy = False
    weights.publish(3)
    weights.publish(4)
    assert counts(engine) == [(12, NUM_FROZEN), (12, 0), (12, 0), (12, NUM_FROZEN), (12, 0)]
    rollout.receiver.verify(engine, 4)  # pyrefly: ignore[missing-attribute]
    actor.close()
    rollout.close()


def test_on_the_actors_own_modules_the_adapter_is_where_it_is(
    config: Config, tokenizer: Any
) -> None:
    worker = ActorRolloutRefWorker(
        changed(config, LORA, {}, "run"), tokenizer, role="actor_rollout"
    )
    assert worker.init_model()["adapter"].endswith(
        "learn; the rollout computes in the same modules"
    )
