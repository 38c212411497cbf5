# SPDX-License-Identifier: Apache-2.0
"""A policy without training: responses to prompts, and their grades where there is something to grade by."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quadriga.config import Config
from quadriga.data import collate_fn
from quadriga.data.pictures import read_picture
from quadriga.data.rl_dataset import prompt_columns
from quadriga.data.tokenizing import ChatEncoder
from quadriga.data.vision import with_parts
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.trainer.build import build_frozen, build_processor, build_reward, build_tokenizer, build_val_loader
from quadriga.trainer.responses import repeat_prompts
from quadriga.trainer.roles import Role
from quadriga.trainer.validate import Validator


def evaluate(config: Config) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Validation metrics of `actor_rollout_ref.model.path` on `data.val_files`, and the first sample rows.

    Raises:
        DataError: there are no validation files.
    """
    if not config.data.val_files:
        raise DataError("data.val_files", got="nothing", expected="the prompts to answer", fix="Set data.val_files.")
    tokenizer = build_tokenizer(config)
    loader = build_val_loader(config, tokenizer)
    policy = build_frozen(Role.ActorRollout, config, tokenizer)
    reward_model = build_frozen(Role.RewardModel, config, tokenizer) if config.reward_model.enable else None
    reward = build_reward(config, tokenizer, reward_model)
    try:
        return Validator(config, tokenizer, policy, reward, loader).run(0)
    finally:
        reward.close()
        policy.close()
        if reward_model is not None:
            reward_model.close()


def answer(
    config: Config, chats: Sequence[list[dict[str, str]]], images: Sequence[Sequence[str]] | None = None
) -> list[list[str]]:
    """Responses to chats, `rollout.n` for each, with the sampling of `actor_rollout_ref.rollout`.

    Args:
        config: the resolved configuration.
        chats: lists of messages with `role` and `content`.
        images: files for the `<image>`s of each chat, in their order. None: there are none.

    Raises:
        DataError: a prompt is longer than `data.max_prompt_length`, or its images are wrong.
    """
    rows, tokenizer, processor = [], build_tokenizer(config), build_processor(config)
    encoder = ChatEncoder(tokenizer, config.data.apply_chat_template_kwargs)
    for number, (chat, files) in enumerate(zip(chats, images or [()] * len(chats), strict=True)):
        where = f"prompt {number}"
        if processor is None and files:
            fix = "Take a vision-language model, or leave out the images."
            raise DataError(where, got="images, for a model that reads text", expected="text", fix=fix)
        pictures = [read_picture(one, folder=Path(), where=f"{where}, image {i}") for i, one in enumerate(files)]
        messages = chat if processor is None else with_parts(chat, len(pictures), where=where)
        text = encoder.render(messages, where=where)
        rows.append(prompt_columns(text, pictures, encoder, processor, config.data, where=where))
    prompts, num_samples = DataProto.from_single_dict(collate_fn(rows)), config.actor_rollout_ref.rollout.n
    prompts.non_tensor_batch["uid"] = object_array(str(row) for row in range(len(rows)))
    prompts.meta_info |= {"global_steps": 0, "do_sample": config.actor_rollout_ref.rollout.do_sample}
    policy = build_frozen(Role.ActorRollout, config, tokenizer)
    try:
        responses = policy.generate_sequences(repeat_prompts(prompts, num_samples))
    finally:
        policy.close()
    masks = responses.batch["response_mask"].bool()
    texts = [
        tokenizer.decode(tokens[mask], skip_special_tokens=True)
        for tokens, mask in zip(responses.batch["responses"], masks, strict=True)
    ]
    return [texts[start : start + num_samples] for start in range(0, len(texts), num_samples)]
