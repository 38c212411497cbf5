# SPDX-License-Identifier: Apache-2.0
"""What happened in each conversation, for people to read: `rollout.trace_dir`, one JSON record a line.

Each process writes files of its own, one for each step: `000012.HOST-PID.jsonl`, in validation `000012.validate...`.
"""

import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from quadriga.rewards.outcome import Outcome
from quadriga.rollout.agent_loop.conversation import Conversation, Turn


def write_trace(
    directory: str, chats: Sequence[Conversation], outcomes: Sequence[Outcome | None], meta_info: dict[str, Any]
) -> Path:
    """Appends a record for each conversation.

    Args:
        directory: made where it is missing.
        chats: that have ended.
        outcomes: their grades, None where there is none yet.
        meta_info: of the batch: `global_steps`, `validate`.

    Returns:
        The file.
    """
    folder = Path(directory).expanduser()
    folder.mkdir(parents=True, exist_ok=True)
    step = int(meta_info.get("global_steps", 0))
    kind = ".validate" if meta_info.get("validate", False) else ""
    path = folder / f"{step:06d}{kind}.{socket.gethostname()}-{os.getpid()}.jsonl"
    records = [
        _record(chat, outcome) | {"step": step, "is_validation": bool(kind)}
        for chat, outcome in zip(chats, outcomes, strict=True)
    ]
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(json.dumps(record, ensure_ascii=False, default=str) + "\n" for record in records))
    return path


def _record(chat: Conversation, outcome: Outcome | None) -> dict[str, Any]:
    sample = chat.sample.columns.get("sample_index")
    return {
        "uid": chat.sample.uid,
        "sample": None if sample is None else int(sample),
        "agent": chat.sample.columns.get("agent_name"),
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
    calls = [
        {
            "name": answer.name,
            "arguments": answer.arguments,
            "answer": answer.text,
            "num_chars": answer.num_chars,
            "is_refused": answer.is_refused,
            "seconds": round(answer.seconds, 6),
        }
        for answer in turn.answers
    ]
    return {
        "role": turn.role,
        "text": turn.text,
        "token_ids": turn.token_ids,
        "finish_reason": turn.finish_reason,
        "seconds": round(turn.seconds, 6),
        **({"calls": calls} if calls else {}),
    }
