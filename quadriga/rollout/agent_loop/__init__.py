# SPDX-License-Identifier: Apache-2.0
"""Conversations of several turns above an engine: tools, partners, loops.

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
    "AgentLoop": "loops",
    "AgentLoopManager": "manager",
    "Conversation": "conversation",
    "ConversationOver": "conversation",
    "Interaction": "interactions",
    "Reply": "interactions",
    "Sample": "conversation",
    "Tool": "tools",
    "ToolError": "tools",
    "Turn": "conversation",
    "function_tool": "tools",
    "generate_conversations": "manager",
    "register": "loops",
}

__all__ = [
    "AgentLoop",
    "AgentLoopManager",
    "Conversation",
    "ConversationOver",
    "Interaction",
    "Reply",
    "Sample",
    "Tool",
    "ToolError",
    "Turn",
    "function_tool",
    "generate_conversations",
    "register",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
