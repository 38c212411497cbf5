# SPDX-License-Identifier: Apache-2.0
"""Helpers for chats: places of images, and last messages that are the beginning of a response."""

from collections.abc import Mapping, Sequence
from typing import Any

IMAGE = "<image>"
"""Place of an image in the text of a message."""
CONTINUING = {"add_generation_prompt": False, "continue_final_message": True}
"""Arguments of a chat template for messages whose last one the model continues."""


def ends_with_assistant(messages: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last message is text of the assistant for the model to continue."""
    last = messages[-1]
    # A tool call is complete: its result comes next.
    if last.get("tool_calls"):
        return False
    return last["role"] == "assistant" and bool(last.get("content"))
