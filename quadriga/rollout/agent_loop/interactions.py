# SPDX-License-Identifier: Apache-2.0
"""Partners: somebody who answers the model when it has called no tool, and who may score what it said.

class Teacher(Interaction):
    def start_interaction(self, answer: str) -> None:      # interaction_kwargs: {"name": "teacher", "answer": "42"}
        self.answer = answer

    def generate_response(self, messages: list[dict]) -> Reply:
        if self.answer in messages[-1]["content"]:
            return Reply(score=1.0, is_over=True)
        return Reply("That is not right. Try again.", score=0.0)
"""

import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from quadriga.errors import RolloutError
from quadriga.rollout.agent_loop.tool_calls import ToolFailedError, answer_text
from quadriga.rollout.agent_loop.tool_thread import ToolsStuckError, ToolThread


@dataclass(frozen=True)
class Reply:
    """What a partner says to the model's turn.

    Attributes:
        text: that the model reads; not read where the conversation is over.
        score: of the model's turn; None: none.
        is_over: whether the conversation ends here.
    """

    text: str = ""
    score: float | None = None
    is_over: bool = False


class Interaction(ABC):
    """A partner. Each conversation has an object of its own; every method may be `async`."""

    def start_interaction(self, **kwargs: Any) -> Any:
        """Begins a conversation; takes what a sample's `interaction_kwargs` say besides the name."""
        return None

    @abstractmethod
    def generate_response(self, messages: list[dict[str, Any]]) -> Any:
        """A `Reply` to the last of the messages, which is the model's."""

    def finalize_interaction(self) -> Any:
        """Called once, however the conversation ended."""
        return None


@dataclass(frozen=True)
class PartnerSource:
    """A partner of the configuration."""

    name: str
    cls: type[Interaction]
    options: Mapping[str, Any]


class Partner:
    """A partner in one conversation: a context, in which `reply` may be asked.

    Args:
        source: of the configuration.
        kwargs: the sample's `interaction_kwargs` without the name.
        thread: where it runs.
        timeout_s: seconds that one call may take.
    """

    def __init__(self, source: PartnerSource, kwargs: Mapping[str, Any], thread: ToolThread, timeout_s: float) -> None:
        self._source, self._thread, self._timeout_s = source, thread, timeout_s
        self._kwargs = {key: value for key, value in kwargs.items() if value is not None}
        self._object: Interaction | None = None

    async def __aenter__(self) -> "Partner":
        self._object = await self._run(self._source.cls, self._source.options, "made")
        assert self._object is not None
        await self._run(self._object.start_interaction, self._kwargs, "start_interaction")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        if self._object is not None:
            await self._run(self._object.finalize_interaction, {}, "finalize_interaction")

    async def reply(self, messages: list[dict[str, Any]]) -> Reply:
        """What it says to the last message.

        Raises:
            ToolFailedError: it raised, took too long, or returned something else.
        """
        assert self._object is not None, "a partner is entered before it is asked"
        copies = [dict(message) for message in messages]
        reply = await self._run(self._object.generate_response, {"messages": copies}, "generate_response")
        where = self._where("generate_response")
        if not isinstance(reply, Reply):
            got = f"an answer of type {type(reply).__name__}"
            raise ToolFailedError(where, got=got, expected="a Reply(text, score, is_over)")
        score = None if reply.score is None else float(reply.score)
        return Reply(answer_text(reply.text, where), score, bool(reply.is_over))

    def _where(self, method: str) -> str:
        return f"interaction {self._source.name}, {method}"

    async def _run(self, function: Any, kwargs: Mapping[str, Any], method: str) -> Any:
        try:
            return await self._thread.do(self._thread.invoke(function, kwargs), limit_s=self._timeout_s)
        except ToolsStuckError:
            raise
        except TimeoutError as error:
            fix = "Raise actor_rollout_ref.rollout.multi_turn.tool_timeout_s."
            raise ToolFailedError(self._where(method), got=str(error) or "TimeoutError", fix=fix) from error
        except Exception as error:
            failure = ToolFailedError(self._where(method), got=f"{type(error).__name__}: {error}"[:2000])
            failure.details = "".join(traceback.format_exception(error)).rstrip()
            raise failure from error


def open_partner(
    partners: Mapping[str, PartnerSource], kwargs: Mapping[str, Any], thread: ToolThread, timeout_s: float
) -> Partner | None:
    """The partner that a sample's `interaction_kwargs` name; None where they name none.

    Raises:
        RolloutError: there is no partner of that name.
    """
    name = kwargs.get("name")
    if name is None:
        return None
    if name not in partners:
        raise RolloutError(
            "interaction_kwargs.name",
            got=repr(name),
            expected=f"one of {', '.join(partners)}" if partners else "none: no partner is configured",
            fix="Set actor_rollout_ref.rollout.multi_turn.interaction_config_path to a file that has it.",
        )
    return Partner(partners[name], {key: value for key, value in kwargs.items() if key != "name"}, thread, timeout_s)
