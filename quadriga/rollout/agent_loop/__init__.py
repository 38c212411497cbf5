# SPDX-License-Identifier: Apache-2.0
"""Conversations of several turns above an engine: tools, user simulators, agent loops.

Names load on first use, so that a file of tools can be tried without loading torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from quadriga.rollout.agent_loop.conversation import Conversation, ConversationOver, Sample, Turn
    from quadriga.rollout.agent_loop.interactions import Interaction, Reply
    from quadriga.rollout.agent_loop.loops import AgentLoop, register
    from quadriga.rollout.agent_loop.manager import AgentLoopManager, generate_conversations
    from quadriga.rollout.agent_loop.tools import Tool, ToolError, function_tool

_HOMES = {
    **dict.fromkeys(("Conversation", "ConversationOver", "Sample", "Turn"), "conversation"),
    **dict.fromkeys(("Interaction", "Reply"), "interactions"),
    **dict.fromkeys(("AgentLoop", "register"), "loops"),
    **dict.fromkeys(("AgentLoopManager", "generate_conversations"), "manager"),
    **dict.fromkeys(("Tool", "ToolError", "function_tool"), "tools"),
}

__all__ = [
    "AgentLoop", "AgentLoopManager", "Conversation", "ConversationOver", "Interaction", "Reply", "Sample", "Tool",
    "ToolError", "Turn", "function_tool", "generate_conversations", "register",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
