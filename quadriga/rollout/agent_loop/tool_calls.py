# SPDX-License-Identifier: Apache-2.0
"""One call of a tool: from what the model wrote to the text that it reads, whatever the tool does.

the model's mistake (no JSON, unknown tool, wrong arguments, `ToolError`)  -> a text that says so; it may try again
the tool's own failure (it raised, or took too long)                       -> `ToolFailedError`: the conversation ends
"""

import json
import time
import traceback
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import TracebackType
from typing import Any, Literal

from pydantic import BaseModel

from quadriga.config.multi_turn import MultiTurnConfig
from quadriga.errors import RolloutError
from quadriga.rollout.agent_loop.parsers import ToolCall
from quadriga.rollout.agent_loop.tool_schema import ArgumentError, Signature
from quadriga.rollout.agent_loop.tool_thread import ToolsStuckError, ToolThread
from quadriga.rollout.agent_loop.tools import ToolError, ToolSession

MARK = "...(truncated)..."
_SHOWN = 200


class ToolFailedError(RolloutError):
    """A tool failed by itself: the conversation that called it ends.

    Attributes:
        details: the traceback, for the trace; "" where there is none.
    """

    details: str = ""


@dataclass(frozen=True)
class ToolAnswer:
    """What became of a call.

    Attributes:
        name: of the tool that was called.
        arguments: as the model wrote them, JSON.
        text: that the model reads, cut to the limit.
        num_chars: length of the text before it was cut.
        seconds: that the call took; 0 where none was made.
        is_refused: whether the text says that the call was wrong.
    """

    name: str
    arguments: str
    text: str
    num_chars: int
    seconds: float = 0.0
    is_refused: bool = False

    @property
    def is_cut(self) -> bool:
        """Whether the model reads less than the tool said."""
        return len(self.text) < self.num_chars


class ToolBox:
    """The tools of one conversation: a context, in which `call` and `rewards` may be asked.

    Args:
        sessions: by name.
        signatures: by name.
        config: limits.
        thread: where tools run.
    """

    def __init__(
        self,
        sessions: Mapping[str, ToolSession],
        signatures: Mapping[str, Signature],
        config: MultiTurnConfig,
        thread: ToolThread,
    ) -> None:
        self.sessions, self.signatures, self.config, self.thread = sessions, signatures, config, thread
        self._started: list[str] = []

    @property
    def schemas(self) -> list[dict[str, Any]]:
        """What the chat template is given."""
        return [signature.schema for signature in self.signatures.values()]

    async def __aenter__(self) -> "ToolBox":
        """Begins every tool's session.

        Raises:
            ToolFailedError: one could not begin.
        """
        try:
            for name, session in self.sessions.items():
                self._started.append(name)
                await self._do(f"tool {name}, create", session.start())
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def call(self, call: ToolCall) -> ToolAnswer:
        """The answer to a call.

        Raises:
            ToolFailedError: the tool raised, took too long or said what cannot be written.
        """
        arguments = json.dumps(call.arguments, ensure_ascii=False, default=str)
        started = time.perf_counter()
        try:
            text = await self._answer(call, arguments)
        except (ToolError, ArgumentError) as error:
            return self._told(call.name, arguments, f"Error: {error}", time.perf_counter() - started, is_refused=True)
        return self._told(call.name, arguments, text, time.perf_counter() - started)

    def refuse(self, call: ToolCall, why: str) -> ToolAnswer:
        """A call that is not made."""
        return self._told(call.name, json.dumps(call.arguments, default=str), f"Error: {why}", is_refused=True)

    async def rewards(self) -> dict[str, float]:
        """What the tools' use earned, by name; tools that give no reward are left out.

        Raises:
            ToolFailedError: `calc_reward` failed.
        """
        earned = {}
        for name in self._started:
            reward = await self._do(f"tool {name}, calc_reward", self.sessions[name].reward())
            if reward is not None:
                earned[name] = reward
        return earned

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        """Ends every session that has begun, each whatever became of the others.

        Raises:
            ToolFailedError: the first one that failed.
        """
        failures = []
        while self._started:
            name = self._started.pop()
            try:
                await self._do(f"tool {name}, release", self.sessions[name].end())
            except (ToolError, ToolFailedError) as failure:
                failures.append(failure)
        if failures:
            raise failures[0]

    async def _answer(self, call: ToolCall, arguments: str) -> str:
        if call.problem:
            raise ToolError(f"tool call: {call.problem}")
        signature = self.signatures.get(call.name)
        if signature is None:
            close = get_close_matches(call.name, self.signatures, n=1)
            fix = f"Did you mean {close[0]}?" if close else ""
            raise ToolError(
                "tool call", got=f"the name {call.name!r}", expected=f"one of {', '.join(self.signatures)}", fix=fix
            )
        checked = signature.check(call.arguments)
        where = f"{call.name}({_shown(arguments)})"
        answer = await self._do(where, self.sessions[call.name].call(checked))
        return answer_text(answer, where)

    async def _do(self, where: str, coroutine: Any) -> Any:
        limit_s = self.config.tool_timeout_s
        try:
            return await self.thread.do(coroutine, limit_s=limit_s)
        except (ToolError, ToolFailedError, ToolsStuckError):
            raise
        except TimeoutError as error:
            fix = "Raise actor_rollout_ref.rollout.multi_turn.tool_timeout_s, or make the tool quicker."
            raise ToolFailedError(where, got=str(error) or "TimeoutError", fix=fix) from error
        except Exception as error:
            fix = "Raise quadriga.rollout.agent_loop.ToolError for what the model should read instead."
            failure = ToolFailedError(
                where, got=f"{type(error).__name__}: {error}"[:2000], expected="an answer", fix=fix
            )
            failure.details = "".join(traceback.format_exception(error)).rstrip()
            raise failure from error

    def _told(
        self, name: str, arguments: str, text: str, seconds: float = 0.0, *, is_refused: bool = False
    ) -> ToolAnswer:
        config = self.config
        # What is wrong with a call stands at the beginning; behind it stands what would have been right.
        side = "right" if is_refused else config.tool_response_truncate_side
        cut = truncate(text, config.max_tool_response_length, side)
        return ToolAnswer(name, arguments, cut, len(text), seconds, is_refused)


def answer_text(answer: Any, where: str) -> str:
    """What a tool said, as text that any tokenizer takes.

    Raises:
        ToolFailedError: it is neither text nor anything that JSON can express.
    """
    if isinstance(answer, bytes | bytearray | memoryview):
        return bytes(answer).decode("utf-8", errors="replace")
    if isinstance(answer, BaseModel):
        answer = answer.model_dump(mode="json")
    if not isinstance(answer, str):
        try:
            answer = json.dumps(answer, ensure_ascii=False, default=str)
        except (ValueError, TypeError, RecursionError) as error:
            raise ToolFailedError(
                where, got=f"an answer of type {type(answer).__name__} ({error})", expected="text, bytes or JSON"
            ) from error
    # Half of a surrogate pair is a character that no encoding has.
    return answer.encode("utf-8", errors="replace").decode("utf-8")


def truncate(text: str, limit: int, side: Literal["left", "middle", "right"]) -> str:
    """At most `limit` characters, a mark where some were left out included."""
    if len(text) <= limit:
        return text
    mark = MARK if limit >= 2 * len(MARK) else ""
    room = limit - len(mark)
    if side == "left":
        return mark + text[len(text) - room :]
    if side == "right":
        return text[:room] + mark
    before = room // 2
    return text[:before] + mark + text[len(text) - (room - before) :]


def _shown(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
