# SPDX-License-Identifier: Apache-2.0
"""From a batch to samples, and from conversations back to a batch.

Legend: B conversations, P prompt positions (padded left), T response positions (padded right).
"""

from collections.abc import Sequence
from typing import Any

import torch

from quadriga.errors import RolloutError
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards.outcome import Outcome
from quadriga.rollout.agent_loop.conversation import Conversation, Sample
from quadriga.rollout.images import images_of


def samples_of(prompts: DataProto) -> list[Sample]:
    """The rows of a batch.

    Args:
        prompts: batch `input_ids`, `attention_mask`, `position_ids` [B, P] or [B, 3, P]; non-tensors as they come.
    """
    images = images_of(prompts)
    num_axes = 1 if prompts.batch["position_ids"].dim() == 2 else prompts.batch["position_ids"].shape[1]
    columns = prompts.non_tensor_batch
    samples = []
    rows = zip(prompts.batch["input_ids"], prompts.batch["attention_mask"], strict=True)
    for row, (ids, mask) in enumerate(rows):
        own = {name: column[row] for name, column in columns.items()}
        messages = own.get("raw_prompt")
        samples.append(
            Sample(
                row=row,
                uid=str(own.get("uid", f"row {row}")),
                prompt_ids=ids[mask.bool()].tolist(),
                messages=None if messages is None else [dict(message) for message in messages],
                columns=own,
                images=images[row],
                num_axes=num_axes,
            )
        )
    return samples


def graded_row(chat: Conversation) -> dict[str, Any]:
    """What a score function reads of a conversation that has ended; `extra_info` also tells how it went."""
    columns = chat.sample.columns
    extra = columns.get("extra_info") or {}
    return {
        "data_source": columns.get("data_source"),
        "solution_str": chat.encoder.text(chat.token_ids, with_special=False),
        "ground_truth": (columns.get("reward_model") or {}).get("ground_truth"),
        "extra_info": {
            **extra,
            "num_turns": len(chat.turns),
            "finish_reason": chat.finish_reason,
            "tool_rewards": chat.tool_rewards,
            "turn_scores": chat.turn_scores,
        },
    }


def to_batch(
    chats: Sequence[Conversation],
    outcomes: Sequence[Outcome] | None,
    *,
    prompt_length: int,
    response_length: int,
    pad_token_id: int,
) -> DataProto:
    """The columns of `generate_sequences`, and what became of each conversation.

    Args:
        chats: B conversations that have ended.
        outcomes: their grades; None: they are graded later.
        prompt_length: P.
        response_length: T.
        pad_token_id: fills both sides.

    Returns:
        batch `prompts` [B, P], `responses`, `response_mask`, `rollout_log_probs` [B, T], `input_ids`,
        `attention_mask` [B, P + T], `position_ids` [B, P + T] or [B, 3, P + T]; non-tensors `num_turns`,
        `finish_reason`, `tool_rewards`, `turn_scores` and, if graded, `reward_outcome`. `response_mask` and
        log-probabilities are 0 where a tool or a partner speaks.
    """
    size = len(chats)
    prompts = torch.full((size, prompt_length), pad_token_id, dtype=torch.int64)
    responses = torch.full((size, response_length), pad_token_id, dtype=torch.int64)
    before, after = torch.zeros_like(prompts), torch.zeros_like(responses)
    mask, log_probs = torch.zeros_like(responses), torch.zeros(size, response_length)
    for row, chat in enumerate(chats):
        start, end = prompt_length - len(chat.prompt_ids), len(chat.token_ids)
        if start < 0:
            raise RolloutError(
                f"prompt of row {row}", got=f"{len(chat.prompt_ids)} tokens", expected=f"at most {prompt_length}"
            )
        prompts[row, start:] = torch.tensor(chat.prompt_ids)
        before[row, start:] = 1
        responses[row, :end] = torch.tensor(chat.token_ids, dtype=torch.int64)
        after[row, :end] = 1
        mask[row, :end] = torch.tensor(chat.mask, dtype=torch.int64)
        log_probs[row, :end] = torch.tensor(chat.log_probs)
    positions = _positions(chats, before)
    following = positions[..., -1:] + torch.arange(1, response_length + 1)
    tensors = {
        "prompts": prompts,
        "responses": responses,
        "input_ids": torch.cat((prompts, responses), -1),
        "attention_mask": torch.cat((before, after), -1),
        "position_ids": torch.cat((positions, following), -1),
        "response_mask": mask,
        "rollout_log_probs": log_probs,
    }
    non_tensors = {
        "num_turns": object_array(len(chat.turns) for chat in chats),
        "finish_reason": object_array(chat.finish_reason for chat in chats),
        "tool_rewards": object_array(chat.tool_rewards for chat in chats),
        "turn_scores": object_array(chat.turn_scores for chat in chats),
    }
    if outcomes is not None:
        non_tensors["reward_outcome"] = object_array(outcomes)
    return DataProto.from_dict(tensors=tensors, non_tensors=non_tensors)


def _positions(chats: Sequence[Conversation], mask: torch.Tensor) -> torch.Tensor:
    """Of the prompts, [B, P], or [B, axes, P] of a model that sees. `mask` is [B, P]."""
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    num_axes = chats[0].sample.num_axes if chats else 1
    if num_axes == 1:
        return positions
    positions = positions[:, None].repeat(1, num_axes, 1)
    for row, chat in enumerate(chats):
        if chat.sample.images is not None:
            positions[row, :, mask[row].bool()] = chat.sample.images.position_ids.cpu()
    return positions


def metrics_of(chats: Sequence[Conversation], seconds: float) -> dict[str, Metric]:
    """Metrics of a batch; the first ones have the names that `generate_sequences` gives them."""
    num_model = sum(sum(chat.mask) for chat in chats)
    num_other = sum(len(chat.mask) for chat in chats) - num_model
    num_rows, rows = len(chats), max(len(chats), 1)
    turns = [turn for chat in chats for turn in (*chat.turns, *chat.unread)]
    answers = [answer for turn in turns for answer in turn.answers]
    tools_s = [sum(turn.seconds for turn in chat.turns if turn.role != "assistant") for chat in chats]
    return {
        "rollout/num_prompt_tokens": Metric(sum(len(chat.prompt_ids) for chat in chats), "sum"),
        "rollout/num_response_tokens": Metric(num_model, "sum"),
        "rollout/num_tool_tokens": Metric(num_other, "sum"),
        "rollout/log_prob": Metric(sum(sum(chat.log_probs) for chat in chats) / max(num_model, 1), "mean", num_model),
        "rollout/length_share": Metric(sum(chat.finish_reason == "length" for chat in chats) / rows, "mean", num_rows),
        "rollout/num_turns": Metric(sum(len(chat.turns) for chat in chats) / rows, "mean", num_rows),
        "rollout/num_tool_calls": Metric(len(answers), "sum"),
        "rollout/num_refused_calls": Metric(sum(answer.is_refused for answer in answers), "sum"),
        "rollout/num_failures": Metric(sum(bool(chat.failure) for chat in chats), "sum"),
        "timing_s/tools": Metric(max(tools_s, default=0.0), "max"),
        "timing_s/generate_sequences": Metric(seconds, "max"),
    }
