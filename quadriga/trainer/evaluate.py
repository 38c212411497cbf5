# SPDX-License-Identifier: Apache-2.0
"""A policy without training: answer prompts, and grade the answers where there is something to grade by."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from quadriga.config import Config
from quadriga.data.positions import compute_position_id_with_mask
from quadriga.data.tokenizing import ChatEncoder
from quadriga.errors import DataError
from quadriga.observe.progress import Progress
from quadriga.protocol import DataProto
from quadriga.trainer.build import (
    build_policy,
    build_reward,
    build_reward_model,
    build_tokenizer,
    build_val_dataloader,
)
from quadriga.trainer.ranks import with_samples
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
        with Progress(len(loader), description="batch") as progress:
            return Validator(config, tokenizer, policy, reward, loader).run(0, progress)
    finally:
        reward.close()
        policy.close()
        if reward_model is not None:
            reward_model.close()


def answer(config: Config, chats: Sequence[list[dict[str, str]]]) -> list[list[str]]:
    """Answers to chats, `rollout.n` for each, with the sampling of `actor_rollout_ref.rollout`.

    Args:
        config: names the model, the sampling and the lengths.
        chats: lists of messages with `role` and `content`.

    Raises:
        DataError: a prompt is longer than `data.max_prompt_length`.
    """
    tokenizer = build_tokenizer(config)
    prompts = _prompts(config, tokenizer, chats)
    policy = build_policy(config, tokenizer)
    try:
        answers = policy.generate_sequences(with_samples(prompts, config.actor_rollout_ref.rollout.n))
    finally:
        policy.close()
    masks = answers.batch["response_mask"].bool()
    texts = [
        tokenizer.decode(tokens[mask], skip_special_tokens=True)
        for tokens, mask in zip(answers.batch["responses"], masks, strict=True)
    ]
    size = config.actor_rollout_ref.rollout.n
    return [texts[start : start + size] for start in range(0, len(texts), size)]


def _prompts(config: Config, tokenizer: Any, chats: Sequence[list[dict[str, str]]]) -> DataProto:
    limit = config.data.max_prompt_length
    encoder = ChatEncoder(tokenizer, config.data.apply_chat_template_kwargs)
    rows = encoder.encode([encoder.render(chat, where=f"prompt {number}") for number, chat in enumerate(chats)])
    for number, tokens in enumerate(rows):
        if len(tokens) > limit:
            raise DataError(
                f"prompt {number}",
                got=f"{len(tokens)} tokens",
                expected=f"at most {limit}",
                fix="Raise data.max_prompt_length, or shorten the prompt.",
            )
    width = max(len(tokens) for tokens in rows)
    input_ids = torch.full((len(rows), width), tokenizer.pad_token_id)
    attention_mask = torch.zeros_like(input_ids)
    for row, tokens in enumerate(rows):
        input_ids[row, width - len(tokens) :] = torch.tensor(tokens)
        attention_mask[row, width - len(tokens) :] = 1
    return DataProto.from_dict(
        tensors={
            "input_ids": input_ids,
            "attention_mask": attention_mask,
            "position_ids": compute_position_id_with_mask(attention_mask),
        },
        non_tensors={"uid": np.array([str(row) for row in range(len(rows))], dtype=object)},
        meta_info={"global_steps": 0, "do_sample": config.actor_rollout_ref.rollout.do_sample},
    )
