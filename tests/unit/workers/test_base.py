# SPDX-License-Identifier: Apache-2.0
"""What the workers of all roles do alike, and that what travels to them is what they read."""

import numpy as np
import pytest
import torch

from quadriga.config import ActorConfig, Config
from quadriga.engines.batches import MicroBatching, Passes
from quadriga.errors import ConfigError, EngineError
from quadriga.protocol import DataProto
from quadriga.workers.base import MODEL_INPUTS, UpdateInputs, choose_device, model_inputs

ALL = (
    *MODEL_INPUTS,
    "prompts",
    "responses",
    "advantages",
    "returns",
    "values",
    "old_log_probs",
    "ref_log_prob",
)


def test_device_by_name() -> None:
    assert choose_device("cpu") == torch.device("cpu")
    assert choose_device("auto").type in ("cpu", "cuda")
    with pytest.raises(ConfigError, match=r"trainer\.device: got 'cuda:99'.*trainer\.device=auto"):
        choose_device("cuda:99")


def test_passes_count_prompts_times_answers() -> None:
    """Every step has shuffles of its own, and each of its epochs another one."""
    config = ActorConfig(
        ppo_mini_batch_size=4, ppo_epochs=3, ppo_micro_batch_size_per_gpu=2, shuffle=True
    )
    how = [Passes.of(config, 5, step, share_prompts=True) for step in (1, 2)]
    assert (how[0].mini_batch_size, how[0].num_epochs) == (20, 3)
    assert how[0].micro == MicroBatching(2, config.ppo_max_token_len_per_gpu, True)
    seeds = [one.shuffle_seed + epoch for one in how for epoch in range(3)]
    assert len(set(seeds)) == 6


def test_no_shuffle_has_no_seed() -> None:
    assert Passes.of(ActorConfig(), 1, 1, share_prompts=True).shuffle_seed is None


def columns(data: DataProto) -> set[str]:
    assert data.non_tensor_batch == {} and data.meta_info == {"global_steps": 3}
    return set(data.batch.keys())


def batch(*names: str) -> DataProto:
    return DataProto.from_dict(
        {name: torch.ones(2, 3) for name in names}, {"uid": ["a", "b"]}, {"global_steps": 3}
    )


def test_a_pass_without_gradients_reads_the_tokens() -> None:
    assert columns(model_inputs(batch(*ALL))) == set(MODEL_INPUTS)


def test_an_update_reads_what_its_loss_reads() -> None:
    inputs = UpdateInputs(Config())
    assert columns(inputs.select(batch(*ALL), "actor")) == {
        *MODEL_INPUTS,
        "advantages",
        "old_log_probs",
    }
    assert columns(inputs.select(batch(*ALL), "critic")) == {*MODEL_INPUTS, "returns", "values"}


def test_options_of_the_loss_bring_their_columns() -> None:
    with_divergence = UpdateInputs(Config(actor_rollout_ref={"actor": {"use_kl_loss": True}}))
    expected = {*MODEL_INPUTS, "advantages", "old_log_probs", "ref_log_prob"}
    assert columns(with_divergence.select(batch(*ALL), "actor")) == expected


def test_tokens_of_rollouts_travel_for_a_mean_per_rollout() -> None:
    """Rows 0 and 2 are one rollout: each gets the six tokens of both. Another mode does not read them."""
    data = batch(*ALL)
    rows = DataProto.concat([data, data])
    rows.batch["rollout_index"] = torch.tensor([0, 1, 0, 2])
    mode = {"loss_agg_mode": "rollout-mean-token-mean"}
    inputs = UpdateInputs(Config(critic=mode))
    assert "rollout_num_tokens" not in inputs.select(rows, "actor").batch.keys()
    assert inputs.select(rows, "critic").batch["rollout_num_tokens"].tolist() == [6, 3, 6, 3]
    inputs = UpdateInputs(Config(actor_rollout_ref={"actor": mode}))
    assert inputs.select(rows, "actor").batch["rollout_num_tokens"].tolist() == [6, 3, 6, 3]


def test_routes_travel_to_the_policy_alone() -> None:
    inputs, data = UpdateInputs(Config()), batch(*ALL, "routed_experts")
    assert "routed_experts" in columns(inputs.select(data, "actor"))
    assert "routed_experts" not in columns(inputs.select(data, "critic")) | columns(
        model_inputs(data)
    )
    assert columns(model_inputs(data, with_routes=True)) == {*MODEL_INPUTS, "routed_experts"}
    replayed = UpdateInputs(Config(actor_rollout_ref={"actor": {"router_replay": "rollout"}}))
    with pytest.raises(EngineError, match="router_replay: got a batch without routed_experts"):
        replayed.select(batch(*ALL), "actor")


def test_numbers_of_rows_travel_where_there_are_any() -> None:
    assert "row_index" in columns(UpdateInputs(Config()).select(batch(*ALL, "row_index"), "critic"))


def test_images_travel_as_the_model_takes_them() -> None:
    """To every pass over the model, and as the very objects that the samples of a prompt share; nothing else does."""
    data, images = batch(*ALL), {"pixel_values": torch.ones(4, 2)}
    data.non_tensor_batch["multi_modal_inputs"] = np.array([images, images], dtype=object)
    inputs = UpdateInputs(Config())
    for part in (model_inputs(data), inputs.select(data, "actor"), inputs.select(data, "critic")):
        assert set(part.non_tensor_batch) == {"multi_modal_inputs"}
        assert all(one is images for one in part.non_tensor_batch["multi_modal_inputs"])
