# SPDX-License-Identifier: Apache-2.0
"""An adapter that vLLM applies beside its weights, without vLLM: what is sent, what is seen of it, and what is refused.

What it does not prove: that vLLM computes with it. tests/vllm/test_lora.py does.
"""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from quadriga.config import load_config
from quadriga.config.adapter import ADAPTER_WEIGHTS, AdapterShape
from quadriga.errors import ConfigError, RolloutError, WeightSyncError
from quadriga.models.adapter_files import AdapterFiles, is_factor, write_factors
from quadriga.rollout import Balancer
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.vllm.adapter import Adapter
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import CopiedWeights, Fingerprint
from tests.unit.rollout.vllm.stand_in import StandIn, stand_in_for_vllm

A, B = "layer.q_proj.lora_A.default.weight", "layer.q_proj.lora_B.default.weight"
FROZEN = {"embed.weight": (7, 4), "layer.q_proj.weight": (6, 4), "norm.weight": (4,)}
FACTORS = {
    A: (3, 4),
    B: (6, 3),
    "layer.o_proj.lora_A.default.weight": (3, 6),
    "layer.o_proj.lora_B.default.weight": (4, 3),
}
SHAPE = AdapterShape(3, 6, "all-linear", None, False, "base")


def manifest(shapes: dict[str, tuple[int, ...]]) -> Manifest:
    return Manifest(dict(shapes), {name: frozenset({name}) for name in shapes})


def weights(seed: int, *, with_frozen: bool) -> list[tuple[str, torch.Tensor]]:
    """In the order of a model: an adapter's matrices stand among the others."""
    noise = torch.Generator().manual_seed(seed)
    drawn = [
        (name, torch.randn(shape, generator=noise))
        for name, shape in sorted((FROZEN | FACTORS).items())
    ]
    return [one for one in drawn if with_frozen or is_factor(one[0])]


ADAPTER = Adapter(SHAPE, manifest(FACTORS))


def stand_in(adapter: Adapter | None = ADAPTER, *keys: str) -> StandIn:
    rollout = "actor_rollout_ref.rollout"
    config = load_config([f"{rollout}.name=vllm", f"{rollout}.max_model_len=20", "data.max_prompt_length=10",
                          "data.max_response_length=10", *keys]).config  # fmt: skip
    setup = EngineSetup(config, None, {}, torch.device("cpu"), torch.float32)  # pyrefly: ignore[bad-argument-type]
    return StandIn(setup, manifest(FROZEN), (1,), adapter=adapter)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    stand_in_for_vllm(monkeypatch)
    return stand_in()


def answers(engine: StandIn) -> list[int]:
    return engine.generate_batch([[3]], [SamplingParams(1)])[0].token_ids


def test_frozen_weights_come_once(engine: StandIn) -> None:
    """Then the adapter alone; all that is there is vouched for each time, and each adapter has a number of its own."""
    sync = CopiedWeights()
    with pytest.raises(RolloutError, match="not loaded completely"):
        answers(engine)
    for version in (1, 2, 3):
        assert engine.has_frozen_weights == (version > 1)
        sync.publish(weights(version, with_frozen=version == 1), engine, version)
        sync.verify(engine, version)
        assert engine.fingerprint().tensors.keys() == FROZEN.keys() | FACTORS.keys()
        assert answers(engine) == [version] and engine.core.adapters == {version}
    assert [len(names) for names in engine.loads] == [7, 4, 4]
    assert engine.core.asked.count("load_bucket") == 1
    held = engine.core.processes[0].layers["layer.q_proj"]
    sent = dict(weights(3, with_frozen=False))
    assert torch.equal(held.lora_a_stacked[0][0, 0, :3], sent[A])
    assert torch.equal(held.lora_b_stacked[0][0, 0, :, :3], sent[B] * 2)
    assert not Path(engine._slot.request.lora_path).exists()


@pytest.mark.parametrize("bucket_bytes", [1, 100, 1 << 20])
def test_weights_in_shared_memory(
    engine: StandIn, bucket_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As processes of its own get them: in one bucket or many, bit by bit, of any dtype, in one piece or not."""
    monkeypatch.setattr(engine.core, "is_in_process", False)
    engine.bucket_bytes = bucket_bytes
    sent = dict(weights(1, with_frozen=True))
    sent["embed.weight"] = sent["embed.weight"].T.contiguous().T
    sent["norm.weight"] = sent["norm.weight"].to(torch.bfloat16)
    CopiedWeights().publish(sent.items(), engine, 1)
    held = engine.core.processes[0].weights
    assert held.keys() == FROZEN.keys()
    assert all(
        torch.equal(tensor, sent[name]) and tensor.dtype == sent[name].dtype
        for name, tensor in held.items()
    )
    assert engine.core.asked.count("load_bucket") == {1: 3, 100: 3, 1 << 20: 1}[bucket_bytes]
    assert not [
        link
        for link in Path("/proc/self/fd").iterdir()
        if "quadriga-weights" in str(link.resolve())
    ]


def test_a_stream_that_breaks_off(engine: StandIn) -> None:
    """The load is ended, and the next one has fingerprints of its own."""
    with pytest.raises(WeightSyncError, match="a stream without 6 of 7 weights"):
        engine.load_weights(list(weights(1, with_frozen=True))[:1], 1)
    assert engine.core.processes[0].quadriga_fingerprints is None and not engine.has_frozen_weights
    CopiedWeights().publish(weights(2, with_frozen=True), engine, 2)
    assert engine.weight_version == 2 and engine.has_frozen_weights


def test_what_was_published_earlier_is_still_looked_at(engine: StandIn) -> None:
    """Also after the adapter alone has come."""
    sync = CopiedWeights()
    sync.publish(weights(1, with_frozen=True), engine, 1)
    sync.publish(weights(2, with_frozen=False), engine, 2)
    engine._arrived = Fingerprint({**engine._arrived.tensors, "norm.weight": "another"})
    with pytest.raises(WeightSyncError, match=r"1 of 7 weights that differ: norm\.weight"):
        sync.verify(engine, 2)


@pytest.mark.parametrize(
    ("method", "message"),
    [
        ("adapter_fingerprints", rf"1 of 7 weights that differ: {B}"),
        ("add_lora", rf"process 0: got 1 matrices that no layer of vLLM's holds: {B}"),
    ],
)
def test_a_number_that_changed_on_the_way(engine: StandIn, method: str, message: str) -> None:
    """Before the process reads it, and after: nothing is generated until another adapter has come."""

    def meddle(before: str, folder: Path) -> None:
        files = AdapterFiles(folder)
        factors = {name: files.read(name).clone() for name in files.shapes}
        if before == method:
            factors[B][5, 2] += 1e-3
        (folder / ADAPTER_WEIGHTS).unlink()
        write_factors(folder, factors)

    sync = CopiedWeights()
    sync.publish(weights(1, with_frozen=True), engine, 1)
    engine.core.meddle = meddle
    with pytest.raises(WeightSyncError, match=message):
        sync.publish(weights(2, with_frozen=False), engine, 2)
    with pytest.raises(RolloutError, match="not loaded completely"):
        answers(engine)
    engine.core.meddle = lambda method, folder: None
    sync.publish(weights(2, with_frozen=False), engine, 3)
    assert answers(engine) == [3]


def stream(kind: str) -> Iterator[tuple[str, torch.Tensor]]:
    for name, tensor in weights(2, with_frozen=False):
        if kind != "incomplete" or name != A:
            yield name, tensor
    if kind == "with frozen weights":
        yield "norm.weight", torch.ones(4)
        yield "embed.weight", torch.ones(7, 4)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("incomplete", rf"a stream without 1 of 7 weights: {A}"),
        ("with frozen weights", r"a stream without 1 of 7 weights: layer\.q_proj\.weight"),
    ],
)
def test_sets_that_are_not_complete(engine: StandIn, kind: str, message: str) -> None:
    """Frozen weights come all, or not at all; those that some of were written to are gone."""
    engine.bucket_bytes = 1  # so that a weight is written before the stream breaks off
    engine.load_weights(weights(1, with_frozen=True), 1)
    with pytest.raises(WeightSyncError, match=message):
        engine.load_weights(stream(kind), 2)
    assert engine.weight_version == -1
    assert engine.has_frozen_weights == (kind == "incomplete")
    if not engine.has_frozen_weights:
        with pytest.raises(WeightSyncError, match="a stream without 3 of 7 weights"):
            engine.load_weights(weights(2, with_frozen=False), 3)
    engine.load_weights(weights(2, with_frozen=not engine.has_frozen_weights), 4)
    assert engine.weight_version == 4


def test_answers_that_are_under_way(engine: StandIn) -> None:
    """They have the adapter before: it is not taken from them."""
    engine.load_weights(weights(1, with_frozen=True), 1)
    engine.core.is_busy = True
    with pytest.raises(WeightSyncError, match="responses are being generated"):
        engine.load_weights(weights(2, with_frozen=False), 2)
    assert engine.core.adapters == {1}


def test_what_vllm_is_told(engine: StandIn) -> None:
    """Room for a rank that it knows, and the ends of the modules' names; nothing of it without an adapter."""
    told = {
        name: engine.arguments[name]
        for name in ("enable_lora", "max_loras", "max_lora_rank", "lora_target_modules")
    }
    assert told == {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": 8,
        "lora_target_modules": ["o_proj", "q_proj"],
    }
    for rank, room in ((8, 8), (9, 16), (257, 320), (512, 512)):
        assert replace(ADAPTER, shape=replace(SHAPE, rank=rank)).room_for_rank == room
    assert not any("lora" in name for name in stand_in(None).arguments)


def test_expert_parallelism(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is vLLM's own, asked for where the key says so; on a CPU the engine is refused before there is one."""
    stand_in_for_vllm(monkeypatch)
    keys = [
        f"actor_rollout_ref.rollout.{name}_parallel_size=2" for name in ("tensor_model", "expert")
    ]
    engine = stand_in(None, *keys)
    assert (
        engine.arguments["enable_expert_parallel"] and engine.arguments["tensor_parallel_size"] == 2
    )
    assert not stand_in(None, keys[0]).arguments["enable_expert_parallel"]
    with pytest.raises(ConfigError, match="expert_parallel_size: got 2, on a CPU"):
        VLLMEngine.from_config(engine.setup)


def test_a_vllm_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_vllm(monkeypatch, "0.31.2")
    with pytest.raises(
        RolloutError, match=r"vLLM 0\.31\.2, expected 0\.32 or newer.*lora_merge=true"
    ):
        stand_in()
    stand_in(None)


def test_several_engines_have_frozen_weights_if_all_have(monkeypatch: pytest.MonkeyPatch) -> None:
    """And an adapter reaches all of them."""
    stand_in_for_vllm(monkeypatch)
    engines = [stand_in(), stand_in()]
    balancer, sync = Balancer(engines), CopiedWeights()
    engines[0].load_weights(weights(1, with_frozen=True), 1)
    assert not balancer.has_frozen_weights
    sync.publish(weights(1, with_frozen=True), balancer, 1)
    assert balancer.has_frozen_weights
    sync.publish(weights(2, with_frozen=False), balancer, 2)
    sync.verify(balancer, 2)
    assert [answers(one) for one in engines] == [[3], [2]]


def test_a_tied_frozen_weight_stays_under_either_name() -> None:
    embed, head = nn.Embedding(5, 3), nn.Linear(3, 5, bias=False)
    head.weight = embed.weight
    both = Manifest.of(nn.ModuleDict({"embed": embed, "head": head})).union(manifest(FACTORS))
    alone = [(name, torch.zeros(shape)) for name, shape in FACTORS.items()]
    assert len(list(both.check_stream(alone, {"embed.weight": "its mark"}))) == 4
    with pytest.raises(WeightSyncError, match="without 2 of 6 weights"):
        list(both.check_stream(alone))
