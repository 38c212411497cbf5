# SPDX-License-Identifier: Apache-2.0
"""What travels to a worker is what it reads."""

import numpy as np
import torch

from quadriga.config import Config
from quadriga.protocol import DataProto
from quadriga.workers.columns import MODEL_INPUTS, UpdateInputs, model_inputs

ALL = (*MODEL_INPUTS, "prompts", "responses", "advantages", "returns", "values", "old_log_probs", "ref_log_prob")


def columns(data: DataProto) -> set[str]:
    assert data.non_tensor_batch == {} and data.meta_info == {"global_steps": 3}
    return set(data.batch.keys())


def batch(*names: str) -> DataProto:
    return DataProto.from_dict({name: torch.ones(2, 3) for name in names}, {"uid": ["a", "b"]}, {"global_steps": 3})


def test_a_pass_without_gradients_reads_the_tokens() -> None:
    assert columns(model_inputs(batch(*ALL))) == set(MODEL_INPUTS)


def test_an_update_reads_what_its_loss_reads() -> None:
    inputs = UpdateInputs(Config())
    assert columns(inputs.of_actor(batch(*ALL))) == {*MODEL_INPUTS, "advantages", "old_log_probs"}
    assert columns(inputs.of_critic(batch(*ALL))) == {*MODEL_INPUTS, "returns", "values"}


def test_options_of_the_loss_bring_their_columns() -> None:
    with_divergence = UpdateInputs(Config(actor_rollout_ref={"actor": {"use_kl_loss": True}}))
    expected = {*MODEL_INPUTS, "advantages", "old_log_probs", "ref_log_prob"}
    assert columns(with_divergence.of_actor(batch(*ALL))) == expected


def test_numbers_of_rows_travel_where_there_are_any() -> None:
    assert "row_index" in columns(UpdateInputs(Config()).of_critic(batch(*ALL, "row_index")))


def test_images_travel_as_the_model_takes_them() -> None:
    """To every pass over the model, and as the very objects that the samples of a prompt share; nothing else does."""
    data, images = batch(*ALL), {"pixel_values": torch.ones(4, 2)}
    data.non_tensor_batch["multi_modal_inputs"] = np.array([images, images], dtype=object)
    inputs = UpdateInputs(Config())
    for part in (model_inputs(data), inputs.of_actor(data), inputs.of_critic(data)):
        assert set(part.non_tensor_batch) == {"multi_modal_inputs"}
        assert all(one is images for one in part.non_tensor_batch["multi_modal_inputs"])
