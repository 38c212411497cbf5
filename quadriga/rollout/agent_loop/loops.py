# SPDX-License-Identifier: Apache-2.0
"""Agent loops, which decide who writes the next turn of a conversation, and their registry.

    single_turn_agent    model
    tool_agent           model -> tools -> model -> ... -> model     a turn that calls no tool ends the loop, or
                         model -> user simulator -> model -> ...     gets a reply from the sample's user simulator

A user's loop, in the file `agent.agent_loop_path`, for rows whose `agent_name` is "second_thought":

    @register("second_thought")
    class SecondThought(AgentLoop):
        async def run(self, chat: Conversation) -> None:
            await chat.generate()
            chat.append([{"role": "user", "content": "Are you sure?"}])
            await chat.generate()
"""

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from quadriga.config.multi_turn import LoopEntry
from quadriga.config.rollout import RolloutConfig
from quadriga.errors import ConfigError, RolloutError
from quadriga.rollout.agent_loop.conversation import Conversation, ConversationOver, Turn
from quadriga.rollout.agent_loop.interactions import Interactions, UserSimulator
from quadriga.rollout.agent_loop.parsers import PARSERS, Parser, ToolCall
from quadriga.rollout.agent_loop.tool_calls import ToolBox, ToolResult, ToolThread
from quadriga.rollout.agent_loop.tools import ToolSpec, load_class, require_methods
from quadriga.rollout.environments.pool import EnvironmentPool
from quadriga.user_file import import_file

LoopClass = TypeVar("LoopClass", bound="type[AgentLoop]")


@dataclass(frozen=True)
class Services:
    """Objects that the agent loops of a process share."""

    config: RolloutConfig  # `actor_rollout_ref.rollout`
    tools: Mapping[str, ToolSpec]  # tools of the configuration, by name
    interactions: Interactions  # user simulators of the configuration, by name
    thread: ToolThread  # the thread in which tools and user simulators run
    environments: EnvironmentPool | None = None  # of `env.name`; None: there is no environment


class AgentLoop(ABC):
    """Base class of agent loops. One object leads many conversations at the same time.

    State of a conversation therefore belongs in variables of `run`, not in the object.
    """

    offers_tools: ClassVar[bool] = False  # whether prompts name the tools of the configuration

    def __init__(self, services: Services) -> None:
        self.services = services

    @abstractmethod
    async def run(self, chat: Conversation) -> None:
        """Lead one conversation to its end.

        Turns after the model's last one are not trained on: `Conversation.finish` removes them.

        Args:
            chat: the conversation, which has only its prompt.

        Raises:
            ConversationOver: `chat` reached a limit. Do not catch it.
            ToolFailedError: a tool failed. The conversation ends, and the reason is recorded.
        """


class AgentLoopRegistry(dict[str, type[AgentLoop]]):
    """Classes of agent loops by name."""

    def register(self, name: str) -> Callable[[LoopClass], LoopClass]:
        """Class decorator that registers an agent loop.

        Args:
            name: name of the loop, as in the column `agent_name`.

        Raises:
            RolloutError: the name is taken, or the class lacks a method that a loop must have.
        """

        def add(cls: LoopClass) -> LoopClass:
            where = f"register({name!r})"
            require_methods(cls, AgentLoop, where, RolloutError)
            class_name = cls.__qualname__
            # A file that is loaded again defines its classes anew, so a class of the same module and
            # name may replace the registered one. For a free name, `registered` is `cls` itself.
            registered = self.get(name, cls)
            owner = f"{registered.__module__}.{registered.__qualname__}"
            if owner != f"{cls.__module__}.{class_name}":
                raise RolloutError(
                    where,
                    got=class_name,
                    expected=f"a free name: {owner} has this one",
                    fix="Register the class under another name.",
                )
            self[name] = cls
            return cls

        return add

    def __missing__(self, name: str) -> type[AgentLoop]:
        """Raise a RolloutError for a name under which no loop is registered."""
        raise RolloutError(
            "agent_name",
            got=repr(name),
            expected=f"one of {', '.join(sorted(self))}",
            fix="Register your loop with @register(name) in the file actor_rollout_ref.rollout.agent.agent_loop_path.",
        )


REGISTRY = AgentLoopRegistry()
register = REGISTRY.register


def load_loops(path: str) -> None:
    """Register the agent loops of a file.

    Args:
        path: a Python file that uses `@register`, or a YAML file that lists names and classes.

    Raises:
        ConfigError: the file cannot be read, an entry lacks its name or class, or a class is not
            an agent loop.
    """
    where = "actor_rollout_ref.rollout.agent.agent_loop_path"
    file = Path(path).expanduser()
    if file.suffix not in (".yaml", ".yml"):
        import_file(path, where)
        return
    try:
        content = yaml.safe_load(file.read_text(encoding="utf-8"))
        entries = TypeAdapter(list[LoopEntry]).validate_python(content)
    except (OSError, yaml.YAMLError, ValidationError) as error:
        expected = "a list, each entry with name and _target_"
        raise ConfigError(f"{where}, {path}", got=str(error), expected=expected) from error
    for entry in entries:
        place = f"{where}, {entry.name}"
        user_class = load_class(entry.target, file.parent, object, place)
        # A class with another contract has this attribute, the `AgentLoop` that wraps the class.
        cls = getattr(user_class, "quadriga_form", user_class)
        if not issubclass(cls, AgentLoop):
            raise ConfigError(place, got=entry.target, expected="a subclass of AgentLoop")
        # Further keys of the entry are arguments of `__init__`. The manager makes loops from
        # `services` alone, so a subclass with the same name binds these arguments.
        members = {
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
            "__init__": partialmethod(cls.__init__, **(entry.model_extra or {})),
        }
        REGISTRY.register(entry.name)(type(cls.__name__, (cls,), members))


@register("single_turn_agent")
class SingleTurnAgent(AgentLoop):
    """Agent loop with a single response to the prompt that the data set rendered."""

    async def run(self, chat: Conversation) -> None:
        """Generate the response."""
        await chat.generate()


@register("tool_agent")
class ToolAgent(AgentLoop):
    """Agent loop that calls the tools that the model names.

    If the model calls no tool, the sample's user simulator replies; without one the loop ends.
    """

    offers_tools = True

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.config = services.config.multi_turn
        if not self.config.enable:
            fix = "Set actor_rollout_ref.rollout.multi_turn.enable=True."
            raise RolloutError("tool_agent", got="multi_turn.enable=false", fix=fix)
        self.parser = parser_of(self.config.format)

    async def run(self, chat: Conversation) -> None:
        """Lead a conversation with the tools and the user simulator of its sample."""
        services = self.services
        columns = chat.sample.columns
        tools_kwargs = columns.get("tools_kwargs") or {}
        tools = ToolBox(services.tools, tools_kwargs, self.config, services.thread)
        user = None
        interaction = columns.get("interaction_kwargs") or {}
        if interaction.get("name") is not None:
            limit_s = self.config.tool_timeout_s
            user = UserSimulator(services.interactions, interaction, services.thread, limit_s)
        if services.tools:
            chat.begin(chat.sample.messages, [spec.schema for spec in services.tools.values()])
        async with tools, user or contextlib.nullcontext():
            try:
                await self._take_turns(chat, tools, user)
            except ConversationOver as over:
                # Caught, so that a conversation that reached a limit gets its tool rewards too.
                chat.finish_reason = over.reason
            chat.tool_rewards = await tools.rewards()

    async def _take_turns(
        self, chat: Conversation, tools: ToolBox, user: UserSimulator | None
    ) -> None:
        """Alternate turns of the model with turns of tools and the user, until neither responds.

        Args:
            chat: the conversation.
            tools: the tools of the conversation.
            user: the user simulator of the conversation; None: there is none.

        Raises:
            ConversationOver: a limit is reached, or the user simulator has ended the conversation.
            ToolFailedError: a tool or the user simulator failed, through no mistake of the model.
        """
        tools_by_name = self.services.tools
        parameters = {name: spec.parameters for name, spec in tools_by_name.items()}
        while True:
            turn = await chat.generate()
            # Without tools, text that looks like a call is only text.
            calls = self.parser(turn.text, parameters) if parameters else []
            if calls:
                await self._call_tools(chat, turn, calls, tools)
            elif user is not None:
                await self._ask_user(chat, user)
            else:
                return

    async def _call_tools(
        self, chat: Conversation, turn: Turn, calls: list[ToolCall], tools: ToolBox
    ) -> None:
        """Make the calls of the model's turn, and append their responses as the next turn.

        Args:
            chat: the conversation.
            turn: the model's turn.
            calls: the calls of tools that the turn contains.
            tools: the tools of the conversation.
        """
        started = time.perf_counter()
        # Score functions read the calls in `solution_messages`. The template does not render them:
        # the model's own tokens stay as they are.
        readable_calls = []
        for call in calls:
            if not call.problem:
                function = {"name": call.name, "arguments": call.arguments}
                readable_calls.append({"type": "function", "function": function})
        turn.messages[0]["tool_calls"] = readable_calls
        # Checked before the calls are made, because calls whose responses cannot be appended might
        # still have effects.
        chat.require_turns_left()
        responses = await tools.call_all(calls)
        chat.append(
            tool_messages(chat, responses),
            tool_responses=responses,
            seconds=time.perf_counter() - started,
        )

    async def _ask_user(self, chat: Conversation, user: UserSimulator) -> None:
        """Append the reply of the user simulator, and record its score of the model's turn.

        Args:
            chat: the conversation.
            user: the user simulator of the conversation.

        Raises:
            ConversationOver: the user simulator ends the conversation, or a limit is reached.
        """
        started = time.perf_counter()
        # Unlike tools, the simulator is asked before `append` checks the limits, because it also
        # scores the last turn.
        reply = await user.reply(chat.messages)
        if reply.score is not None:
            chat.turn_scores.append(reply.score)
        if reply.is_over:
            raise ConversationOver("interaction")
        messages = [{"role": "user", "content": reply.text}]
        chat.append(messages, seconds=time.perf_counter() - started)


def parser_of(name: str) -> Parser:
    """Parser of the format `multi_turn.format`.

    Raises:
        RolloutError: there is no parser of that name.
    """
    if name not in PARSERS:
        raise RolloutError(
            "multi_turn.format",
            got=repr(name),
            expected=f"one of {', '.join(PARSERS)}",
            fix="For another format, add a parser to quadriga.rollout.agent_loop.parsers.PARSERS"
            " in the file agent.agent_loop_path.",
        )
    return PARSERS[name]


def tool_messages(chat: Conversation, responses: Sequence[ToolResult]) -> list[dict[str, Any]]:
    """Messages with the responses of tools.

    Args:
        chat: the conversation to which the messages are to be appended.
        responses: responses to the calls of the model's last turn.

    Returns:
        A message for each response.
    """
    # Some templates need an id for each call. It is the call's number in the conversation.
    first_number = sum(len(earlier.tool_responses) for earlier in chat.turns)
    return [
        {
            "role": "tool",
            "name": response.name or "unknown",
            "tool_call_id": f"call{number:05d}",
            "content": response.content,
        }
        for number, response in enumerate(responses, first_number)
    ]
