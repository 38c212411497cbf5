# SPDX-License-Identifier: Apache-2.0
"""A policy without training: answer prompts, and grade the answers where there is something to grade by."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from quadriga.config import Config
from quadriga.data.padding import compute_position_id_with_mask, pad_left
from quadriga.data.pictures import read_picture
from quadriga.data.tokenizing import ChatEncoder
from quadriga.data.vision import VisionProcessor, VisionPrompt, with_parts
from quadriga.errors import DataError
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.trainer.build import (
    build_policy,
    build_processor,
    build_reward,
    build_reward_model,
    build_tokenizer,
    build_val_dataloader,
)
from quadriga.trainer.responses import repeat_prompts
from quadriga.trainer.validate import Validator


def evaluate(config: Config) -> tuple[dict[str, float], list[dict[str, Any]]]:
    """Validation metrics of `actor_rollout_ref.model.path` on `data.val_files`, and the first sample rows.

    Raises:
        DataError: there are no validation files.
    """
    if not config.data.val_files:
        raise DataError("data.val_files", got="nothing", expected="the prompts to answer", fix="Set data.val_files.")
    tokenizer = build_tokenizer(config)
    loader = build_val_dataloader(config, tokenizer)
    policy = build_policy(config, tokenizer)
    reward_model = build_reward_model(config, tokenizer)
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
    """Answers to chats, `rollout.n` for each, with the sampling of `actor_rollout_ref.rollout`.

    Args:
        config: names the model, the sampling and the lengths.
        chats: lists of messages with `role` and `content`.
        images: files for the `<image>`s of each chat, in their order. None: there are none.

    Raises:
        DataError: a prompt is longer than `data.max_prompt_length`, or its images are wrong.
    """
    tokenizer = build_tokenizer(config)
    prompts = _prompts(config, tokenizer, chats, images or [()] * len(chats))
    policy = build_policy(config, tokenizer)
    try:
        answers = policy.generate_sequences(repeat_prompts(prompts, config.actor_rollout_ref.rollout.n))
    finally:
        policy.close()
    masks = answers.batch["response_mask"].bool()
    texts = [
        tokenizer.decode(tokens[mask], skip_special_tokens=True)
        for tokens, mask in zip(answers.batch["responses"], masks, strict=True)
    ]
    size = config.actor_rollout_ref.rollout.n
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def _prompts(
    config: Config, tokenizer: Any, chats: Sequence[list[dict[str, str]]], images: Sequence[Sequence[str]]
) -> DataProto:
    processor, encoder = build_processor(config), ChatEncoder(tokenizer, config.data.apply_chat_template_kwargs)
    rows = [
        _row(f"prompt {number}", chat, own, encoder, processor, config.data.max_prompt_length)
        for number, (chat, own) in enumerate(zip(chats, images, strict=True))
    ]
    width = max(len(seen.ids) for seen in rows)
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, seen in enumerate(rows):
        input_ids[row, width - len(seen.ids) :] = torch.tensor(seen.ids)
        attention_mask[row, width - len(seen.ids) :] = 1
    columns = [] if processor is None else [seen.columns() for seen in rows]
    positions = [pad_left(seen.positions, width, 0) for seen in rows] if columns else []
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": torch.stack(positions) if columns else compute_position_id_with_mask(attention_mask),
        },
        non_tensors={
            "uid": np.array([str(row) for row in range(len(rows))], dtype=object),
            **{name: object_array(own[name] for own in columns) for name in (columns[0] if columns else ())},
        },
        meta_info={"global_steps": 0, "do_sample": config.actor_rollout_ref.rollout.do_sample},
    )


def _row(
    where: str,
    chat: list[dict[str, str]],
    images: Sequence[str],
    encoder: ChatEncoder,
    processor: VisionProcessor | None,
    limit: int,
) -> VisionPrompt:
    """One prompt; without a processor it has no positions of its own."""
    if processor is None and images:
        fix = "Take a vision-language model, or leave out the images."
        raise DataError(where, got="images, for a model that reads text", expected="text", fix=fix)
    pictures = [
        read_picture(file, folder=Path(), where=f"{where}, image {number}") for number, file in enumerate(images)
    ]
    messages = chat if processor is None else with_parts(chat, len(pictures), where=where)
    tokens = encoder.encode([encoder.render(messages, where=where)])[0]
    if len(tokens) > limit:
        raise DataError(
            where,
            got=f"{len(tokens)} tokens",
            expected=f"at most {limit}",
            fix="Raise data.max_prompt_length, or shorten the prompt.",
        )
    if processor is None:
        return VisionPrompt(tokens, tokens, torch.empty(0), (), {})
    return processor.prompt(tokens, pictures, limit, where=where)
