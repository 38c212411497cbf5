# SPDX-License-Identifier: Apache-2.0
"""The columns that each call on a worker reads, asked on the driver, so that nothing else travels.

generate_sequences           PROMPT_TENSORS, PROMPT_OBJECTS; with rollout.mode=async CONVERSATION_OBJECTS as well
compute_*                    MODEL_INPUTS, MODEL_OBJECTS
compute_rm_score             MODEL_INPUTS, and the chats where the reward model reads them
update_actor, update_critic  MODEL_INPUTS, MODEL_OBJECTS, the fields of the objective, and the numbers of the rows
"""

from collections.abc import Sequence

from quadriga.config import Config
from quadriga.engines.objectives import Objective, PolicyObjective, ValueObjective
from quadriga.protocol import DataProto

PROMPT_TENSORS = ("input_ids", "attention_mask", "position_ids")
PROMPT_OBJECTS = ("raw_prompt_ids", "uid", "sample_index", "multi_modal_data", "multi_modal_inputs")
CONVERSATION_OBJECTS = (
    "raw_prompt", "agent_name", "tools_kwargs", "interaction_kwargs", "reward_model", "extra_info", "index",
)  # fmt: skip
CHAT_OBJECTS = ("raw_prompt", "uid")
MODEL_INPUTS = (*PROMPT_TENSORS, "response_mask")
MODEL_OBJECTS = ("multi_modal_inputs",)


def prompt_inputs(prompts: DataProto, config: Config) -> DataProto:
    """What the rollout reads of prompts; those of their columns that it asks for and that are there.

    A conversation finds the name of its data set as `data_source`, whatever `data.reward_fn_key` calls that column.
    """
    columns = prompts.non_tensor_batch
    is_async = config.actor_rollout_ref.rollout.mode == "async"
    wanted = (*PROMPT_OBJECTS, *(CONVERSATION_OBJECTS if is_async else ()))
    inputs = prompts.select(PROMPT_TENSORS, [key for key in wanted if key in columns])
    if is_async and config.data.reward_fn_key in columns:
        inputs.non_tensor_batch["data_source"] = columns[config.data.reward_fn_key]
    return inputs


def model_inputs(batch: DataProto) -> DataProto:
    """What a pass without gradients reads."""
    return batch.select(batch_keys=MODEL_INPUTS, non_tensor_batch_keys=_objects(batch))


def reward_model_inputs(batch: DataProto, *, with_chats: bool) -> DataProto:
    """What the reward model reads."""
    chats = [key for key in CHAT_OBJECTS if with_chats and key in batch.non_tensor_batch]
    return batch.select(batch_keys=MODEL_INPUTS, non_tensor_batch_keys=chats)


class UpdateInputs:
    """What the updates read.

    Args:
        config: of the run; chooses the losses.
    """

    def __init__(self, config: Config) -> None:
        self._policy = PolicyObjective(config.actor_rollout_ref.actor, config.algorithm.rollout_correction)
        self._value = ValueObjective(config.critic)

    def of_actor(self, batch: DataProto) -> DataProto:
        """Columns for `update_actor`; those that the loss computes from the whole batch are added to it."""
        self._policy.add_batch_columns(batch)
        return _for_update(batch, self._policy)

    def of_critic(self, batch: DataProto) -> DataProto:
        """Columns for `update_critic`."""
        return _for_update(batch, self._value)


def _for_update(batch: DataProto, objective: Objective) -> DataProto:
    numbers: Sequence[str] = ["row_index"] if "row_index" in batch.batch.keys() else []
    names = dict.fromkeys((*MODEL_INPUTS, *objective.fields(batch), *numbers))
    return batch.select(batch_keys=list(names), non_tensor_batch_keys=_objects(batch))


def _objects(batch: DataProto) -> list[str]:
    return [key for key in MODEL_OBJECTS if key in batch.non_tensor_batch]
