# SPDX-License-Identifier: Apache-2.0
"""Memory on a CPU, term by term: what differs from an accelerator, with sizes worked out by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from quadriga.config import Config, load_config
from quadriga.config.layout import Layout
from quadriga.config.placement import ACTOR
from quadriga.engines.batches import MicroBatching, RowLength, micro_batches
from quadriga.planning.devices import CPU, Devices, LayerTimes, PassTimes
from quadriga.planning.memory import UpdateShape, forward_bytes, layer_bytes, update_memory
from quadriga.planning.phases import (
    GENERATION,
    UPDATE,
    Lengths,
    RolePlan,
    copied_bytes,
    micro_batch_tokens,
    predict_phases,
    predict_update,
)
from quadriga.planning.plan import make_plan
from quadriga.planning.sizes import ModelSizes

# 4 heads of 16, 2 of them for keys and values; queries 64, keys 32.
SIZES = ModelSizes(
    hidden=64,
    mlp=128,
    queries=64,
    keys=32,
    num_heads=4,
    head_size=16,
    num_layers=2,
    vocabulary=50_000,
    num_parameters=2 * 37_000 + 50_000 * 64,
    layer_parameters=37_000,
    is_tied=True,
)
HALF = UpdateShape(num_tokens=1000, num_predicted=1000)
DEVICE_BYTES = 1e9


def config_of(tmp_path: Path, *overrides: str) -> Config:
    """Sixteen prompts of up to 16 tokens, with 4 responses of up to 48 tokens each."""
    keys = [
        f"actor_rollout_ref.model.path={tmp_path}",
        "data.train_files=unused.parquet",
        "data.train_batch_size=16",
        "data.max_prompt_length=16",
        "data.max_response_length=48",
        "actor_rollout_ref.rollout.n=4",
        "actor_rollout_ref.actor.ppo_mini_batch_size=8",
        *overrides,
    ]
    return load_config(keys).config


def parts_of(config: Config, plan: RolePlan, name: str) -> dict[str, Any]:
    predicted = predict_phases(config, {ACTOR: plan}, ACTOR, DEVICE_BYTES)
    return dict(next(phase for phase in predicted if phase.name == name).parts)


def on_cpu(itemsize: int) -> RolePlan:
    return RolePlan(SIZES, Layout(), itemsize, packed_itemsize=itemsize)


def test_results_of_attention_stay_in_float32() -> None:
    beyond = layer_bytes(SIZES, replace(HALF, is_on_cpu=True)) - layer_bytes(SIZES, HALF)
    assert beyond == 1000 * 64 * 4
    for changes in ({"itemsize": 4}, {"num_tokens": 8193}):
        shape = replace(HALF, **changes)
        assert layer_bytes(SIZES, replace(shape, is_on_cpu=True)) == layer_bytes(SIZES, shape)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_the_head_has_float32_logits_of_512_tokens(itemsize: int) -> None:
    logits = 512 * 50_000 * 4
    rows_in_float32 = 4096 * 64 * 4 if itemsize == 2 else 0
    states = 2 * 1000 * 64 * itemsize
    positions = 1000 * (2 * 16 * itemsize + 170)
    shape = replace(HALF, itemsize=itemsize, is_on_cpu=True)
    predicted = forward_bytes(SIZES, shape)
    assert predicted == positions + states + 1000 * 16 + logits + rows_in_float32

    # The backward pass also has the gradient of the head, in the dtype of the head.
    rounded = 512 * 50_000 * itemsize if itemsize == 2 else 0
    gradients = (50_000 + 1000) * 64 * itemsize
    memory = update_memory(SIZES, shape)
    assert memory.moment == "the head's backward pass"
    assert memory.working == 1000 * 16 + logits + rows_in_float32 + rounded + gradients


def test_the_rollout_has_copies_of_weights_and_a_float32_cache(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    matrices = 2 * (2 * 64 * (64 + 32) + 3 * 64 * 128)
    for itemsize in (2, 4):
        parts = parts_of(config, on_cpu(itemsize), GENERATION)
        # Logits are in float32, so the head's copy is.
        assert parts["weights of the rollout"] == 50_000 * 64 * 4 + matrices * itemsize
        # 64 sequences of 64 tokens, keys and values of 2 layers.
        assert parts["KV cache"] == 64 * 64 * 2 * 2 * 32 * 4
    config = config_of(tmp_path, "actor_rollout_ref.model.lora_rank=4")
    parts = parts_of(config, on_cpu(4), GENERATION)
    assert parts["weights of the rollout"] == 50_000 * 64 * 4
    accelerator = RolePlan(SIZES, Layout(), 2)
    assert parts_of(config, accelerator, GENERATION)["weights of the rollout"] == 0


def test_gradients_in_bfloat16_are_kept_between_updates(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    state = 16 * SIZES.num_parameters
    for itemsize, kept_bytes in ((2, state + 2 * SIZES.num_parameters), (4, 0.75 * state)):
        training_state = parts_of(config, on_cpu(itemsize), GENERATION)["training state"]
        assert training_state == kept_bytes


def test_passes_are_no_larger_than_their_batch(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    alone = on_cpu(4)
    # 8 prompts of a mini-batch, once each, and their 32 responses.
    assert micro_batch_tokens(config, ACTOR, alone) == 8 * 16 + 32 * 48
    # Each of two ranks may have responses to all of them.
    shards = replace(alone, layout=Layout.of(2, ACTOR))
    assert micro_batch_tokens(config, ACTOR, shards) == 8 * 16 + 16 * 48
    key = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=1024"
    config = config_of(tmp_path, key)
    assert micro_batch_tokens(config, ACTOR, alone) == 1024
    # A conversation of several turns may have more sequences.
    key = "actor_rollout_ref.rollout.multi_turn.enable=true"
    config = config_of(tmp_path, key)
    assert micro_batch_tokens(config, ACTOR, alone) == 16384


@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("limit", [64, 200, 1024, 3000])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_the_largest_micro_batch_is_that_of_a_run(
    tmp_path: Path, limit: int, num_ranks: int, shares: bool
) -> None:
    """If all responses have their full length, the division into micro-batches is known."""
    section = "actor_rollout_ref.actor"
    budget = f"{section}.ppo_max_token_len_per_gpu={limit}"
    config = config_of(tmp_path, budget, f"{section}.use_prefix_sharing={shares}")
    lengths = Lengths(prompt=16, response=48)
    # 8 prompts of a mini-batch with 4 responses each, of which a rank has its share.
    rows = [RowLength(row // 4, 16, 48) for row in range(32 // num_ranks)]
    micro = MicroBatching(None, limit, shares)
    largest = 0
    for batch in micro_batches(rows, micro):
        prompts = {rows[index].prompt_key for index in batch} if shares else batch
        largest = max(largest, 16 * len(prompts) + 48 * len(batch))
    plan = replace(on_cpu(4), layout=Layout.of(num_ranks, ACTOR))
    predicted = micro_batch_tokens(config, ACTOR, replace(plan, lengths=lengths))
    # With three of four responses together there are two kinds of parts, and an upper bound.
    if shares and limit == 200:
        assert largest <= predicted <= limit
    else:
        assert predicted == largest
    # Shorter responses may fill a micro-batch up to its limit.
    lengths = replace(lengths, response=47)
    worst = micro_batch_tokens(config, ACTOR, replace(plan, lengths=lengths))
    assert worst == micro_batch_tokens(config, ACTOR, plan) >= largest


def test_every_phase_has_python_and_its_libraries(tmp_path: Path) -> None:
    devices = Devices(CPU, 1, DEVICE_BYTES, 1e12, 1e10, 1e10, "test", packed_itemsize=4)
    config = config_of(tmp_path)
    lengths = Lengths(prompt=8, response=48)
    bare = make_plan(config, devices, lengths, {ACTOR: SIZES}, 4)
    devices = replace(devices, process_bytes=4e8)
    plan = make_plan(config, devices, lengths, {ACTOR: SIZES}, 4)
    for phase, bare_phase in zip(plan.phases, bare.phases, strict=True):
        assert phase.total == bare_phase.total + 4e8


def test_an_update_includes_what_the_c_library_keeps(tmp_path: Path) -> None:
    devices = Devices(CPU, 1, DEVICE_BYTES, 1e12, 1e10, 1e10, "test", packed_itemsize=4)
    config = config_of(tmp_path)
    lengths = Lengths(prompt=8, response=48)
    bare = make_plan(config, devices, lengths, {ACTOR: SIZES}, 4)
    times = LayerTimes(PassTimes(), PassTimes(), kept_share=0.5, kept_layers=SIZES.num_layers)
    devices = replace(devices, layer_times={ACTOR: times})
    plan = make_plan(config, devices, lengths, {ACTOR: SIZES}, 4)
    for phase, bare_phase in zip(plan.phases, bare.phases, strict=True):
        expected = bare_phase.total
        if phase.name == UPDATE:
            update = predict_update(config, ACTOR, plan.roles[ACTOR])
            expected += 0.5 * (update.activations + update.working)
        assert phase.total == pytest.approx(expected)


def test_kept_memory_grows_more_slowly_than_the_layers() -> None:
    times = LayerTimes(PassTimes(), PassTimes(), kept_share=0.8, kept_layers=3)
    assert times.resident_factor(3) == pytest.approx(1.8)
    # Eight times the tensors, and four times the kept memory.
    assert times.resident_factor(24) == pytest.approx(1.4)


def test_ranks_of_ray_map_two_copies_of_their_state(tmp_path: Path) -> None:
    plans = {ACTOR: replace(on_cpu(4), layout=Layout.of(2, ACTOR))}
    assert copied_bytes(config_of(tmp_path), plans) == 0
    ray = "trainer.backend=ray"
    # Masters and two moments in float32, twice, of half of the parameters.
    assert copied_bytes(config_of(tmp_path, ray), plans) == 2 * 12 * SIZES.num_parameters / 2
    assert copied_bytes(config_of(tmp_path, ray, "trainer.state_copies=false"), plans) == 0
