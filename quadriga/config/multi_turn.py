# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout.multi_turn` and `.agent`: turns with tools or a user simulator."""

from typing import Literal

from quadriga.config.base import Count, Name, PathText, PositiveFloat, Section


class MultiTurnConfig(Section):
    """Turns, tools and user simulators of a conversation."""

    enable: bool = False
    """Whether responses may take several turns; `rollout.mode` is then `async`."""
    max_assistant_turns: Count | None = None
    """Turns that the model writes, at most. None: as many as fit into `data.max_response_length`."""
    max_user_turns: Count | None = None
    """Turns of tools or user simulators, at most. None: as many as fit."""
    max_parallel_calls: Count = 1
    """Tool calls of one turn that are made, side by side; later ones of the turn are answered with a refusal."""
    max_tool_response_length: Count = 256
    """Longest answer of a tool, in characters; the rest is cut off."""
    tool_response_truncate_side: Literal["left", "middle", "right"] = "middle"
    """Where a longer answer loses characters."""
    tool_timeout_s: PositiveFloat = 30.0
    """Seconds that one tool call may take."""
    function_tool_path: PathText | None = None
    """Python file whose `@function_tool` functions are offered to the model."""
    tool_config_path: PathText | None = None
    """YAML file with tools that are classes, and with servers of tools (MCP)."""
    interaction_config_path: PathText | None = None
    """YAML file with the user simulators that `interaction_kwargs` of a sample may name."""
    format: Name = "hermes"
    """How the model writes tool calls: `hermes`, `qwen3_coder`, `glm`, `gpt-oss`."""


class AgentConfig(Section):
    """Which loop leads a conversation."""

    default_agent_loop: Name = "single_turn_agent"
    """Loop of samples that name none in the column `agent_name`: `single_turn_agent`, `tool_agent`, or one's own."""
    agent_loop_path: PathText | None = None
    """Python file that registers loops of one's own."""
