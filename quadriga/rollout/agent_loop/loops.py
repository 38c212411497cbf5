# SPDX-License-Identifier: Apache-2.0
"""Who speaks when: the loops that lead a conversation, by name.

    single_turn_agent    model
    tool_agent           model -> tools -> model -> ... -> model          without a call: the end,
                         model -> partner -> model -> ...                 or the partner's turn where there is one

One's own, in the file `agent.agent_loop_path`, for samples whose column `agent_name` says "second_thought":

    @register("second_thought")
    class SecondThought(AgentLoop):
        async def run(self, chat: Conversation) -> None:
            await chat.generate()
            chat.append([{"role": "user", "content": "Are you sure?"}])
            await chat.generate()
"""

import asyncio
import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from quadriga.config.rollout import RolloutConfig
from quadriga.errors import RolloutError
from quadriga.rollout.agent_loop.conversation import Conversation, ConversationOver
from quadriga.rollout.agent_loop.interactions import Partner, PartnerSource, open_partner
from quadriga.rollout.agent_loop.parsers import ToolCall, parser_named
from quadriga.rollout.agent_loop.tool_calls import ToolAnswer, ToolBox
from quadriga.rollout.agent_loop.tool_thread import ToolThread
from quadriga.rollout.agent_loop.tools import ToolSource

LoopClass = TypeVar("LoopClass", bound="type[AgentLoop]")


@dataclass(frozen=True)
class Services:
    """What loops have at hand.

    Attributes:
        config: of the rollout.
        tools: of the configuration, by name.
        partners: of the configuration, by name.
        thread: where tools and partners run.
    """

    config: RolloutConfig
    tools: Mapping[str, ToolSource]
    partners: Mapping[str, PartnerSource]
    thread: ToolThread


class AgentLoop(ABC):
    """Leads conversations, many at the same time: what belongs to one is kept in `run`.

    Args:
        services: see there.
    """

    def __init__(self, services: Services) -> None:
        self.services = services

    @abstractmethod
    async def run(self, chat: Conversation) -> None:
        """Leads one conversation to its end: where it returns, the model has had the last word.

        Args:
            chat: ends itself by `ConversationOver`, which passes through here.

        Raises:
            ConversationOver: a limit was reached.
            ToolFailedError: a tool failed; the conversation ends, and its reason is recorded.
        """


class AgentLoopRegistry:
    """A name for each class of loops."""

    def __init__(self) -> None:
        self._classes: dict[str, type[AgentLoop]] = {}

    def register(self, name: str) -> Callable[[LoopClass], LoopClass]:
        """Class decorator: makes a loop known by a name.

        Raises:
            RolloutError: the name is taken, or the class lacks a method that a loop must have.
        """

        def add(cls: LoopClass) -> LoopClass:
            if missing := sorted(cls.__abstractmethods__):
                raise RolloutError(
                    f"register({name!r})",
                    got=f"{cls.__qualname__}, a class without {', '.join(missing)}",
                    expected="each method that AgentLoop leaves open",
                    fix=f"Write {cls.__qualname__}.{missing[0]}; see the docstring of AgentLoop.{missing[0]}.",
                )
            taken = self._classes.get(name, cls)
            # A file that is loaded again makes its classes anew.
            if (taken.__module__, taken.__qualname__) != (cls.__module__, cls.__qualname__):
                owner = f"{taken.__module__}.{taken.__qualname__}"
                raise RolloutError(
                    f"register({name!r})", got=cls.__qualname__, expected=f"a free name, it is {owner}'s"
                )
            self._classes[name] = cls
            return cls

        return add

    def get(self, name: str) -> type[AgentLoop]:
        """The class registered as `name`.

        Raises:
            RolloutError: there is none.
        """
        if name not in self._classes:
            raise RolloutError(
                "agent_name",
                got=repr(name),
                expected=f"one of {', '.join(sorted(self._classes))}",
                fix="A loop of one's own needs @register(name), in actor_rollout_ref.rollout.agent.agent_loop_path.",
            )
        return self._classes[name]


REGISTRY = AgentLoopRegistry()
register = REGISTRY.register


@register("single_turn_agent")
class SingleTurnAgent(AgentLoop):
    """One answer to the prompt as the data set rendered it."""

    async def run(self, chat: Conversation) -> None:
        """See `AgentLoop.run`."""
        await chat.generate()


@register("tool_agent")
class ToolAgent(AgentLoop):
    """Calls the tools that the model asks for, and lets a partner answer where it asks for none."""

    def __init__(self, services: Services) -> None:
        super().__init__(services)
        self.config = services.config.multi_turn
        if not self.config.enable:
            raise RolloutError(
                "tool_agent", got="multi_turn.enable=false", fix="Set actor_rollout_ref.rollout.multi_turn.enable=True."
            )
        self.parser = parser_named(self.config.format)

    async def run(self, chat: Conversation) -> None:
        """See `AgentLoop.run`."""
        columns = chat.sample.columns
        box = self._open_tools(columns.get("tools_kwargs") or {})
        partner = open_partner(
            self.services.partners,
            columns.get("interaction_kwargs") or {},
            self.services.thread,
            self.config.tool_timeout_s,
        )
        if box.schemas:
            chat.begin(chat.sample.require_messages(), box.schemas)
        async with box, partner or contextlib.nullcontext():
            try:
                await self._take_turns(chat, box, partner)
            except ConversationOver as over:
                chat.finish_reason = over.reason
            chat.tool_rewards = await box.rewards()

    def _open_tools(self, tools_kwargs: Mapping[str, Any]) -> ToolBox:
        tools = self.services.tools
        given = {name: kwargs for name, kwargs in tools_kwargs.items() if kwargs is not None}
        unknown = [name for name in given if name not in tools]
        if unknown:
            raise RolloutError(
                "tools_kwargs",
                got=", ".join(unknown),
                expected=f"names of tools: {', '.join(tools) or 'none is configured'}",
                fix="Correct extra_info.tools_kwargs of the row, or configure the tool.",
            )
        sessions = {name: source.open(given.get(name, {})) for name, source in tools.items()}
        signatures = {name: source.signature for name, source in tools.items()}
        return ToolBox(sessions, signatures, self.config, self.services.thread)

    async def _take_turns(self, chat: Conversation, box: ToolBox, partner: Partner | None) -> None:
        parameters = {name: signature.parameters for name, signature in box.signatures.items()}
        while True:
            turn = await chat.generate()
            calls = self.parser(turn.text, parameters) if parameters else []
            if calls:
                chat.require_another()
                await self._call_tools(chat, box, calls)
            elif partner is not None:
                await self._ask_partner(chat, partner)
            else:
                return

    async def _call_tools(self, chat: Conversation, box: ToolBox, calls: list[ToolCall]) -> None:
        started = time.perf_counter()
        limit = self.config.max_parallel_calls
        answers: list[ToolAnswer] = await _all_of([box.call(call) for call in calls[:limit]])
        answers += [box.refuse(call, f"only {limit} calls of a turn are made; call again") for call in calls[limit:]]
        numbered = enumerate(answers, start=sum(len(turn.answers) for turn in chat.turns))
        messages = [
            {
                "role": "tool",
                "name": answer.name or "unknown",
                "tool_call_id": f"call{number:05d}",
                "content": answer.text,
            }
            for number, answer in numbered
        ]
        chat.append(messages, answers=answers, seconds=time.perf_counter() - started)

    async def _ask_partner(self, chat: Conversation, partner: Partner) -> None:
        started = time.perf_counter()
        # It scores the model's last turn too, so it is asked before the limits are.
        reply = await partner.reply(chat.messages)
        if reply.score is not None:
            chat.turn_scores.append(reply.score)
        if reply.is_over:
            raise ConversationOver("interaction")
        chat.append([{"role": "user", "content": reply.text}], seconds=time.perf_counter() - started)


async def _all_of(coroutines: list[Any]) -> list[Any]:
    """What all return, side by side; the first that failed is raised once all have ended."""
    results = await asyncio.gather(*coroutines, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return list(results)
