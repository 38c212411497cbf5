# SPDX-License-Identifier: Apache-2.0
"""From a batch to samples, and from conversations back to a batch, to metrics and to the trace.

Legend: B conversations, P prompt positions (padded left), T response positions (padded right).
"""

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from quadriga.errors import RolloutError
from quadriga.observe.metrics import Metric
from quadriga.protocol import DataProto
from quadriga.protocol.columns import object_array
from quadriga.rewards.outcome import Outcome
from quadriga.rollout.agent_loop.conversation import Conversation, Sample, Turn
from quadriga.rollout.sequences import images_of


def samples_of(prompts: DataProto, default_agent: str) -> list[Sample]:
    """The rows of a batch.

    Args:
        prompts: batch `input_ids`, `attention_mask`, `position_ids` [B, P] or [B, 3, P]; non-tensors as they come.
        default_agent: name of the loop of rows that name none in `agent_name`.
    """
    batch, images = prompts.batch, images_of(prompts)
    num_axes = 1 if batch["position_ids"].dim() == 2 else batch["position_ids"].shape[1]
    samples = []
    for row, (ids, mask) in enumerate(zip(batch["input_ids"], batch["attention_mask"], strict=True)):
        own = {name: column[row] for name, column in prompts.non_tensor_batch.items()}
        messages = own.get("raw_prompt")
        samples.append(
            Sample(
                row=row,
                uid=str(own.get("uid", f"row {row}")),
                prompt_ids=ids[mask.bool()].tolist(),
                messages=None if messages is None else [dict(message) for message in messages],
                columns=own,
                agent=own.get("agent_name") or default_agent,
                images=images[row],
                num_axes=num_axes,
            )
        )
    return samples


def graded_row(chat: Conversation) -> dict[str, Any]:
    """What a score function reads of a conversation that has ended; `extra_info` also says how it went."""
    columns = chat.sample.columns
    return {
        "data_source": columns.get("data_source"),
        "solution_str": chat.encoder.text(chat.token_ids, with_special=False),
        "ground_truth": (columns.get("reward_model") or {}).get("ground_truth"),
        "extra_info": {
            **(columns.get("extra_info") or {}),
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
        log-probabilities are 0 on tokens of tools and users.
    """
    size, num_axes = len(chats), chats[0].sample.num_axes if chats else 1
    tokens = torch.full((size, prompt_length + response_length), pad_token_id, dtype=torch.int64)
    attention_mask = torch.zeros_like(tokens)
    mask = torch.zeros(size, response_length, dtype=torch.int64)
    log_probs = torch.zeros(size, response_length)
    positions = torch.zeros(size, num_axes, prompt_length, dtype=torch.int64)
    for row, chat in enumerate(chats):
        start, end = prompt_length - len(chat.prompt_ids), len(chat.token_ids)
        if start < 0:
            raise RolloutError(
                f"prompt of row {row}", got=f"{len(chat.prompt_ids)} tokens", expected=f"at most {prompt_length}"
            )
        tokens[row, start : prompt_length + end] = torch.tensor(chat.prompt_ids + chat.token_ids)
        attention_mask[row, start : prompt_length + end] = 1
        mask[row, :end] = torch.tensor(chat.mask, dtype=torch.int64)
        log_probs[row, :end] = torch.tensor(chat.log_probs)
        images = chat.sample.images
        positions[row, :, start:] = torch.arange(prompt_length - start) if images is None else images.position_ids.cpu()
    following = positions[..., -1:] + torch.arange(1, response_length + 1)
    position_ids = torch.cat((positions, following), -1)
    tensors = {
        "prompts": tokens[:, :prompt_length].clone(),
        "responses": tokens[:, prompt_length:].clone(),
        "input_ids": tokens,
        "attention_mask": attention_mask,
        "position_ids": position_ids[:, 0].clone() if num_axes == 1 else position_ids,
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


def metrics_of(chats: Sequence[Conversation], seconds: float) -> dict[str, Metric]:
    """Metrics of a batch; the first ones have the names that `generate_sequences` gives them."""
    num_model = sum(sum(chat.mask) for chat in chats)
    num_other = sum(len(chat.mask) for chat in chats) - num_model
    num_rows, rows = len(chats), max(len(chats), 1)
    turns = [turn for chat in chats for turn in (*chat.turns, *chat.unread)]
    responses = [response for turn in turns for response in turn.tool_responses]
    tools_s = [sum(turn.seconds for turn in chat.turns if turn.role != "assistant") for chat in chats]
    return {
        "rollout/num_prompt_tokens": Metric(sum(len(chat.prompt_ids) for chat in chats), "sum"),
        "rollout/num_response_tokens": Metric(num_model, "sum"),
        "rollout/num_tool_tokens": Metric(num_other, "sum"),
        "rollout/log_prob": Metric(sum(sum(chat.log_probs) for chat in chats) / max(num_model, 1), "mean", num_model),
        "rollout/length_share": Metric(sum(chat.finish_reason == "length" for chat in chats) / rows, "mean", num_rows),
        "rollout/num_turns": Metric(sum(len(chat.turns) for chat in chats) / rows, "mean", num_rows),
        "rollout/num_tool_calls": Metric(len(responses), "sum"),
        "rollout/num_refused_calls": Metric(sum(response.is_refused for response in responses), "sum"),
        "rollout/num_failures": Metric(sum(bool(chat.failure) for chat in chats), "sum"),
        "timing_s/tools": Metric(max(tools_s, default=0.0), "max"),
        "timing_s/generate_sequences": Metric(seconds, "max"),
    }


def write_trace(
    directory: str, chats: Sequence[Conversation], outcomes: Sequence[Outcome | None], meta_info: dict[str, Any]
) -> None:
    """Appends a JSON record, one a line, for each conversation that has ended.

    Each process writes files of its own, one for each step: `000012.HOST-PID.jsonl`, in validation
    `000012.validate.HOST-PID.jsonl`.

    Args:
        directory: `rollout.trace_dir`; made where it is missing.
        chats: of the batch.
        outcomes: their grades, None where there is none yet.
        meta_info: of the batch: `global_steps`, `validate`.
    """
    step, is_validation = int(meta_info.get("global_steps", 0)), bool(meta_info.get("validate", False))
    records = [
        {**_record(chat, outcome), "step": step, "is_validation": is_validation}
        for chat, outcome in zip(chats, outcomes, strict=True)
        if chat.finish_reason
    ]
    if not records:
        return
    folder = Path(directory).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    kind = ".validate" if is_validation else ""
    with (folder / f"{step:06d}{kind}.{socket.gethostname()}-{os.getpid()}.jsonl").open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records))


def _record(chat: Conversation, outcome: Outcome | None) -> dict[str, Any]:
    sample = chat.sample.columns.get("sample_index")
    return {
        "uid": chat.sample.uid,
        "sample": None if sample is None else int(sample),
        "agent": chat.sample.agent,
        "finish_reason": chat.finish_reason,
        "failure": chat.failure,
        "num_turns": len(chat.turns),
        "num_prompt_tokens": len(chat.prompt_ids),
        "num_response_tokens": len(chat.token_ids),
        "num_model_tokens": sum(chat.mask),
        "seconds": round(sum(turn.seconds for turn in (*chat.turns, *chat.unread)), 6),
        "prompt": chat.encoder.text(chat.prompt_ids, with_special=True),
        "prompt_token_ids": chat.prompt_ids,
        "turns": [_turn(turn) for turn in chat.turns],
        "unread": [_turn(turn) for turn in chat.unread],
        "tool_rewards": chat.tool_rewards,
        "turn_scores": chat.turn_scores,
        "score": outcome.score if outcome else None,
        "reward_error": outcome.error if outcome else None,
    }


def _turn(turn: Turn) -> dict[str, Any]:
    record = {
        "role": turn.role,
        "text": turn.text,
        "token_ids": turn.token_ids,
        "finish_reason": turn.finish_reason,
        "seconds": round(turn.seconds, 6),
    }
    calls = [
        {
            "name": response.name,
            "arguments": response.arguments,
            "answer": response.text,
            "num_chars": response.num_chars,
            "is_refused": response.is_refused,
            "seconds": round(response.seconds, 6),
        }
        for response in turn.tool_responses
    ]
    return {**record, "calls": calls} if calls else record
