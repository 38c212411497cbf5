# SPDX-License-Identifier: Apache-2.0
"""Agent loops: who writes the next turn of a conversation, by name.

    single_turn_agent    model
    tool_agent           model -> tools -> model -> ... -> model          without a call: the end,
                         model -> user simulator -> model -> ...          or the user's turn where there is one

A loop of one's own, in the file `agent.agent_loop_path`, for samples whose column `agent_name` says "second_thought":

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
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partialmethod
from pathlib import Path
from typing import ClassVar, TypeVar

import yaml
from pydantic import TypeAdapter, ValidationError

from quadriga.config.multi_turn import LoopEntry
from quadriga.config.rollout import RolloutConfig
from quadriga.errors import ConfigError, RolloutError
from quadriga.rollout.agent_loop.conversation import Conversation, ConversationOver
from quadriga.rollout.agent_loop.interactions import Interactions, UserSimulator
from quadriga.rollout.agent_loop.parsers import PARSERS
from quadriga.rollout.agent_loop.tool_calls import ToolBox, ToolThread
from quadriga.rollout.agent_loop.tools import ToolSpec, class_named
from quadriga.user_file import import_file

LoopClass = TypeVar("LoopClass", bound="type[AgentLoop]")


@dataclass(frozen=True)
class Services:
    """What loops have at hand."""

    config: RolloutConfig  # of the rollout
    tools: Mapping[str, ToolSpec]  # of the configuration, by name
    interactions: Interactions  # of the configuration
    thread: ToolThread  # where tools and user simulators run


class AgentLoop(ABC):
    """Leads conversations, many at the same time: what belongs to one is kept in `run`."""

    offers_tools: ClassVar[bool] = False  # whether prompts name the tools of the configuration

    def __init__(self, services: Services) -> None:
        self.services = services

    @abstractmethod
    async def run(self, chat: Conversation) -> None:
        """Leads one conversation to its end: where it returns, the last turn is the model's.
        `chat`: ends itself by `ConversationOver`, which passes through here.
        Raises ConversationOver: a limit was reached.
        Raises ToolFailedError: a tool failed; the conversation ends, and its reason is recorded."""


class AgentLoopRegistry(dict[str, type[AgentLoop]]):
    """The classes of loops by name."""

    def register(self, name: str) -> Callable[[LoopClass], LoopClass]:
        """Class decorator: makes a loop known by a name.
        Raises RolloutError: the name is taken, or the class lacks a method that a loop must have."""

        def add(cls: LoopClass) -> LoopClass:
            where = f"register({name!r})"
            if missing := sorted(cls.__abstractmethods__):
                got = f"{cls.__qualname__}, a class without {', '.join(missing)}"
                fix = f"Write {cls.__qualname__}.{missing[0]}; see the docstring of AgentLoop.{missing[0]}."
                raise RolloutError(
                    where, got=got, expected="each method that AgentLoop leaves open", fix=fix
                )
            taken = self.get(name, cls)
            # A file that is loaded again makes its classes anew.
            if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
                owner = f"{taken.__module__}.{taken.__qualname__}"
                raise RolloutError(
                    where, got=cls.__qualname__, expected=f"a free name, it is {owner}'s"
                )
            self[name] = cls
            return cls

        return add

    def __missing__(self, name: str) -> type[AgentLoop]:
        fix = "A loop of one's own needs @register(name), in actor_rollout_ref.rollout.agent.agent_loop_path."
        raise RolloutError(
            "agent_name", got=repr(name), expected=f"one of {', '.join(sorted(self))}", fix=fix
        )


REGISTRY = AgentLoopRegistry()
register = REGISTRY.register


def load_loops(path: str) -> None:
    """Registers the loops of a Python file, or those that a YAML file lists as it lists tools.
    Raises ConfigError: the file cannot be read, an entry lacks its name or class, or a class is no agent loop."""
    file, where = Path(path).expanduser(), "actor_rollout_ref.rollout.agent.agent_loop_path"
    if file.suffix not in (".yaml", ".yml"):
        import_file(path, where)
        return
    try:
        entries = TypeAdapter(list[LoopEntry]).validate_python(
            yaml.safe_load(file.read_text(encoding="utf-8"))
        )
    except (OSError, yaml.YAMLError, ValidationError) as error:
        expected = "a list, each entry with name and _target_"
        raise ConfigError(f"{where}, {path}", got=str(error), expected=expected) from error
    for entry in entries:
        found = class_named(entry.target, file.parent, object, f"{where}, {entry.name}")
        # A loop of verl's contract has the form in which it is called here beside it.
        cls = getattr(found, "quadriga_form", found)
        if not issubclass(cls, AgentLoop):
            raise ConfigError(
                f"{where}, {entry.name}", got=entry.target, expected="a subclass of AgentLoop"
            )
        home = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        made = {"__init__": partialmethod(cls.__init__, **(entry.model_extra or {}))}
        REGISTRY.register(entry.name)(type(cls.__name__, (cls,), home | made))


@register("single_turn_agent")
class SingleTurnAgent(AgentLoop):
    """One response to the prompt as the data set rendered it."""

    async def run(self, chat: Conversation) -> None:
        await chat.generate()


@register("tool_agent")
class ToolAgent(AgentLoop):
    """Calls the tools that the model names; where it names none, the user simulator of the sample replies."""

    offers_tools = True

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.config = services.config.multi_turn
        if not self.config.enable:
            fix = "Set actor_rollout_ref.rollout.multi_turn.enable=True."
            raise RolloutError("tool_agent", got="multi_turn.enable=false", fix=fix)
        if self.config.format not in PARSERS:
            fix = "The file of agent.agent_loop_path adds its own to quadriga.rollout.agent_loop.parsers.PARSERS."
            expected, got = f"one of {', '.join(PARSERS)}", repr(self.config.format)
            raise RolloutError("multi_turn.format", got=got, expected=expected, fix=fix)
        self.parser = PARSERS[self.config.format]

    async def run(self, chat: Conversation) -> None:
        columns, services, user = chat.sample.columns, self.services, None
        tools = ToolBox(
            services.tools, columns.get("tools_kwargs") or {}, self.config, services.thread
        )
        interaction = columns.get("interaction_kwargs") or {}
        if interaction.get("name") is not None:
            user = UserSimulator(
                services.interactions, interaction, services.thread, self.config.tool_timeout_s
            )
        if services.tools:
            chat.begin(chat.sample.messages, [spec.schema for spec in services.tools.values()])
        async with tools, user or contextlib.nullcontext():
            try:
                await self._take_turns(chat, tools, user)
            except ConversationOver as over:
                chat.finish_reason = over.reason
            chat.tool_rewards = await tools.rewards()

    async def _take_turns(
        self, chat: Conversation, tools: ToolBox, user: UserSimulator | None
    ) -> None:
        parameters = {
            name: spec.schema["function"]["parameters"]
            for name, spec in self.services.tools.items()
        }
        while True:
            turn = await chat.generate()
            calls = self.parser(turn.text, parameters) if parameters else []
            started = time.perf_counter()
            if calls:
                functions = [
                    {"name": call.name, "arguments": call.arguments}
                    for call in calls
                    if not call.problem
                ]
                turn.messages[0]["tool_calls"] = [
                    {"type": "function", "function": one} for one in functions
                ]
                chat.require_another()
                responses = await tools.call_all(calls)
                first = sum(len(turn.tool_responses) for turn in chat.turns)
                messages = [
                    {
                        "role": "tool",
                        "name": one.name or "unknown",
                        "tool_call_id": f"call{number:05d}",
                        "content": one.content,
                    }
                    for number, one in enumerate(responses, start=first)
                ]
                chat.append(
                    messages, tool_responses=responses, seconds=time.perf_counter() - started
                )
            elif user is not None:
                # It scores the model's last turn too, so it replies before the limits are checked.
                reply = await user.reply(chat.messages)
                if reply.score is not None:
                    chat.turn_scores.append(reply.score)
                if reply.is_over:
                    raise ConversationOver("interaction")
                chat.append(
                    [{"role": "user", "content": reply.text}], seconds=time.perf_counter() - started
                )
            else:
                return
