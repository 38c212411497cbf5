# SPDX-License-Identifier: Apache-2.0
"""Times on a CPU: measured layers, added up by hand, and the measurement itself."""

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from transformers import Qwen2Config

from quadriga.config import Config, load_config
from quadriga.config.layout import Layout
from quadriga.config.placement import ACTOR, CRITIC
from quadriga.planning.devices import CPU, Devices, LayerTimes, PassTimes
from quadriga.planning.phases import Lengths, RolePlan, predict_update
from quadriga.planning.plan import read_sizes
from quadriga.planning.time import step_time
from quadriga.workers import layer_times
from quadriga.workers.layer_times import Measurement, measure_cpu

LENGTHS = Lengths(prompt=8, response=32)
NUM_LAYERS = 6
ACTOR_TIMES = LayerTimes(
    PassTimes(
        forward_token_s=1e-4,
        update_call_s=1e-3,
        update_token_s=3e-4,
        optimizer_s=1e-2,
        publish_s=2e-3,
        generation_start_s=0.01,
        decode_step_s=1e-3,
    ),
    PassTimes(
        forward_token_s=2e-4,
        update_token_s=5e-4,
        generation_start_s=0.02,
        decode_step_s=2e-3,
    ),
    num_context_tokens=24,
)
CRITIC_TIMES = LayerTimes(
    PassTimes(forward_call_s=1e-2, forward_token_s=2e-4, update_token_s=4e-4), PassTimes()
)


def write_model(folder: Path, **changes: int | bool) -> Path:
    shape = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "num_hidden_layers": NUM_LAYERS,
        "vocab_size": 100,
    }
    Qwen2Config(**{**shape, **changes}).save_pretrained(folder)
    return folder


def config_of(folder: Path, *overrides: str) -> Config:
    """Four prompts of 8 tokens with 4 responses of 32 tokens each."""
    keys = [
        f"actor_rollout_ref.model.path={write_model(folder)}",
        "data.train_files=unused.parquet",
        "data.train_batch_size=4",
        "data.max_prompt_length=8",
        "data.max_response_length=32",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=4",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
        *overrides,
    ]
    return load_config(keys).config


def test_a_step_is_the_sum_of_measured_layers(tmp_path: Path) -> None:
    config = config_of(tmp_path, "algorithm.adv_estimator=gae")
    sizes = read_sizes(tmp_path / "config.json", {})
    times = {ACTOR: ACTOR_TIMES, CRITIC: CRITIC_TIMES}
    devices = Devices(CPU, 1, 1e9, 1e12, 1e9, 1e8, "test", packed_itemsize=4, layer_times=times)
    critic_sizes = sizes.with_value_head()
    plans = {}
    for role, role_sizes in ((ACTOR, sizes), (CRITIC, critic_sizes)):
        plans[role] = RolePlan(role_sizes, Layout(), 4, packed_itemsize=4, lengths=LENGTHS)
    phases = step_time(config, plans, devices, LENGTHS).phases

    # 4 prompts, computed once, and 16 responses.
    num_tokens = 4 * 8 + 16 * 32
    assert phases["generation"] == pytest.approx(0.08 + 31 * 8e-3)
    # The critic has one micro-batch, the actor one for each prompt with its responses.
    assert phases["values"] == pytest.approx(num_tokens * 1.2e-3 + 6e-2)
    update_s = num_tokens * 2.3e-3 + 4 * 6e-3 + 6e-2
    assert phases["update"] == pytest.approx(update_s)
    assert phases["update of the critic"] == pytest.approx(num_tokens * 2.4e-3)
    assert "weight sync" not in phases

    # Recomputed activations cost another forward pass, an adapter saves one.
    recomputed = {**plans, ACTOR: replace(plans[ACTOR], recomputes=True)}
    phases = step_time(config, recomputed, devices, LENGTHS).phases
    assert phases["update"] == pytest.approx(update_s + num_tokens * 8e-4)

    # Memory that the update has freed is returned to the system, which maps it again.
    memory = predict_update(config, ACTOR, plans[ACTOR])
    new_s = 1.5 * (memory.activations + memory.working) / 1e8
    slow = replace(devices, new_bytes_per_s=1e8)
    plans[ACTOR] = replace(plans[ACTOR], resident_factor=1.5)
    assert step_time(config, plans, slow, LENGTHS).phases["update"] == pytest.approx(
        update_s + new_s
    )

    # Half of the tokens on each of two ranks, in two micro-batches.
    shards = Layout.of(2, ACTOR)
    plans[ACTOR] = replace(plans[ACTOR], layout=shards)
    phases = step_time(config, plans, replace(devices, count=2), LENGTHS).phases
    assert phases["update"] == pytest.approx(num_tokens / 2 * 2.3e-3 + 2 * 6e-3 + 6e-2)
    assert phases["weight sync"] == pytest.approx(6 * 2e-3)


def seconds_of_update(times: LayerTimes) -> float:
    return times.seconds("update_call_s", 1) + times.seconds("update_token_s", 1)


@pytest.fixture
def few_repetitions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measure a time twice, for tests that ask whether there is one."""
    monkeypatch.setattr(layer_times, "_REPEATED_S", 0.0)


def measurement_of(config: Config, dtype: torch.dtype) -> Measurement:
    return Measurement(config, LENGTHS, dtype, flops=1e10)


@pytest.mark.usefixtures("few_repetitions")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("overrides", [(), ("actor_rollout_ref.model.lora_rank=4",)])
def test_layers_are_measured(
    tmp_path: Path, dtype: torch.dtype, overrides: tuple[str, ...]
) -> None:
    config = config_of(tmp_path, *overrides)
    sizes = read_sizes(tmp_path / "config.json", {})
    for role, role_sizes in ((ACTOR, sizes), (CRITIC, sizes.with_value_head())):
        plan = RolePlan(role_sizes, Layout(), dtype.itemsize, packed_itemsize=4, lengths=LENGTHS)
        times = measurement_of(config, dtype).layer_times(role, plan)
        assert seconds_of_update(times) > 0
        # A critic does not generate, and a single process has no weight sync.
        assert (times.seconds("generation_start_s", 1) > 0) == (role == ACTOR)
        assert times.layer.publish_s == times.ends.publish_s == 0
        for field in fields(PassTimes):
            assert getattr(times.layer, field.name) >= 0
            assert getattr(times.ends, field.name) >= 0
        assert times.resident_factor(1) >= times.resident_factor(4) >= 1


@pytest.mark.usefixtures("few_repetitions")
def test_models_with_fewer_layers_than_are_measured(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    sizes = read_sizes(write_model(tmp_path, num_hidden_layers=2) / "config.json", {})
    plan = RolePlan(sizes, Layout(), 4, packed_itemsize=4, lengths=LENGTHS)
    times = measurement_of(config, torch.float32).layer_times(ACTOR, plan)
    assert seconds_of_update(times) > 0


def test_ranks_are_measured_together(tmp_path: Path) -> None:
    """Each in a process of its own, with shards that they gather from each other."""
    config = config_of(tmp_path, "trainer.backend=ray", "trainer.n_gpus_per_node=2")
    sizes = read_sizes(tmp_path / "config.json", {})
    shards = Layout.of(2, ACTOR)
    roles = {ACTOR: RolePlan(sizes, shards, 4, packed_itemsize=4, lengths=LENGTHS)}
    devices = Devices(CPU, 2, 4e9, 0, 0, 0, "not measured", packed_itemsize=4)
    measured = measure_cpu(config, devices, roles, LENGTHS, dtype="float32", imported="json")
    assert measured.memory_bytes == 4e9
    assert measured.flops > 0
    assert measured.bytes_per_s > 0
    assert measured.process_bytes > 0
    times = measured.layer_times[ACTOR]
    assert times.seconds("publish_s", 1) > 0
    assert seconds_of_update(times) > 0
