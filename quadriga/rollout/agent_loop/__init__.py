# SPDX-License-Identifier: Apache-2.0
"""Conversations of several turns above an engine: tools, user simulators, agent loops.

Names load on first use, so that a file of tools can be tried without loading torch.
"""

from typing import TYPE_CHECKING

from quadriga.lazy import lazy_names

if TYPE_CHECKING:
    from quadriga.rollout.agent_loop.conversation import (
        Conversation,
        ConversationOver,
        Sample,
        Turn,
    )
    from quadriga.rollout.agent_loop.interactions import Interaction, Reply
    from quadriga.rollout.agent_loop.loops import AgentLoop, register
    from quadriga.rollout.agent_loop.manager import AgentLoopManager
    from quadriga.rollout.agent_loop.tools import Tool, ToolError, WithImages, function_tool

__all__, __getattr__ = lazy_names(__name__)
