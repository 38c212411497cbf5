# SPDX-License-Identifier: Apache-2.0
"""Calls of users' code, tools and user simulators: where it runs, how long it may take, and what the model reads.

    the model's mistake (no JSON, unknown tool, wrong arguments, `ToolError`) -> a text that says so; it may try again
    the tool's own failure (it raised, or took too long)                      -> `ToolFailedError`: the end

The code runs in an event loop of its own, so that an engine which blocks its thread does not stop it:

    conversations (loop of the engine)        tool thread (its own loop)           a thread for each plain function
      │  await thread.call(function, ...)       │                                      │
      │ ───────────────────────────────────────>│ async function: awaited here         │
      │                                         │ plain function: ────────────────────>│ runs
      │<── result, or what was raised, or ──────│<───────────── result ────────────────│
      │    a timeout                            │

call  consumes a function; waits for a free place among `MAX_CALLS`, then at most `limit_s`; unblocked by the function's
      end or by the clock. Its time begins when it has a place.

Python cannot end a thread: a plain function that is over its limit is given up, and its thread runs on. With
`MAX_GIVEN_UP` of these alive the run stops. The threads do not keep the process from ending.
"""

import asyncio
import inspect
import json
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from quadriga.config.multi_turn import MultiTurnConfig
from quadriga.errors import RolloutError, did_you_mean
from quadriga.rollout.agent_loop.parsers import ToolCall
from quadriga.rollout.agent_loop.tools import Tool, ToolError, ToolSpec

MAX_CALLS = 64
MAX_GIVEN_UP = 256
CLOSING_S = 5.0
MARK = "...(truncated)..."

_TIMEOUT_KEY = "actor_rollout_ref.rollout.multi_turn.tool_timeout_s"
_SHOWN = 200

T = TypeVar("T")


class ToolFailedError(RolloutError):
    """A tool or user simulator failed by itself: the conversation that called it ends.

    Attributes:
        details: the traceback, for the trace; "" where there is none.
    """

    details: str = ""


class ToolsStuckError(RolloutError):
    """So many tools hang that the run stops."""


class ToolThread:
    """The thread and event loop in which users' code runs. Started when first used; `close` ends it."""

    _places: asyncio.Semaphore

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._given_up: set[threading.Thread] = set()

    async def call(self, where: str, function: Callable[..., Any], kwargs: Mapping[str, Any], limit_s: float) -> Any:
        """What a user's function returns, plain or async.

        Args:
            where: it is called, for errors.
            function, kwargs: the function and its arguments.
            limit_s: seconds that it may take.

        Raises:
            ToolError: the function raised it.
            ToolFailedError: the function raised something else, or took too long.
            ToolsStuckError: too many calls of plain functions were given up and still run.
        """
        running = asyncio.run_coroutine_threadsafe(self._limited(function, kwargs, limit_s), self._started())
        try:
            return await asyncio.wrap_future(running)
        except (ToolError, ToolsStuckError):
            raise
        except TimeoutError as error:
            fix = f"Raise {_TIMEOUT_KEY}, or make the tool quicker."
            raise ToolFailedError(where, got=str(error) or "TimeoutError", fix=fix) from error
        except Exception as error:
            failure = ToolFailedError(
                where,
                got=f"{type(error).__name__}: {error}"[:2000],
                expected="a result",
                fix="Raise quadriga.rollout.agent_loop.ToolError for what the model should read instead.",
            )
            failure.details = "".join(traceback.format_exception(error)).rstrip()
            raise failure from error

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What a coroutine of ours returns, run in the tool thread while this one waits."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._started()).result()

    @property
    def num_given_up(self) -> int:
        """Calls that were given up and still run."""
        self._given_up = {thread for thread in self._given_up if thread.is_alive()}
        return len(self._given_up)

    def close(self) -> None:
        """Ends what runs in the loop, and the loop."""
        if self._loop is None or self._thread is None:
            return
        asyncio.run_coroutine_threadsafe(_cancel_others(), self._loop).result(CLOSING_S + 1)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(CLOSING_S)
        self._loop.close()
        self._loop = self._thread = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop, self._places = asyncio.new_event_loop(), asyncio.Semaphore(MAX_CALLS)
            self._thread = threading.Thread(target=self._loop.run_forever, name="quadriga-tools", daemon=True)
            self._thread.start()
        return self._loop

    async def _limited(self, function: Callable[..., Any], kwargs: Mapping[str, Any], limit_s: float) -> Any:
        async with self._places:
            task = asyncio.ensure_future(self._run(function, kwargs))
            try:
                # Unlike asyncio.wait_for, this does not wait for a function that refuses to be cancelled.
                done, _ = await asyncio.wait({task}, timeout=limit_s)
                if not done:
                    raise TimeoutError(f"no response within {limit_s:g} s")
                return task.result()
            finally:
                task.cancel()

    async def _run(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**kwargs)
        if self.num_given_up >= MAX_GIVEN_UP:
            raise ToolsStuckError(
                "tools",
                got=f"{self.num_given_up} calls that run on after {_TIMEOUT_KEY}",
                expected="tools that end",
                fix="Give the tool a time limit of its own, or let it do its work in a process that it can kill.",
            )
        returned: Future[Any] = Future()
        target = threading.Thread(target=_deliver, args=(returned, function, kwargs), name="quadriga-tool", daemon=True)
        target.start()
        try:
            result = await asyncio.wrap_future(returned)
        except asyncio.CancelledError:
            self._given_up.add(target)
            raise
        return await result if inspect.isawaitable(result) else result


def _deliver(returned: "Future[Any]", function: Callable[..., Any], kwargs: Mapping[str, Any]) -> None:
    if not returned.set_running_or_notify_cancel():
        return
    try:
        returned.set_result(function(**kwargs))
    except BaseException as error:
        # A tool may call sys.exit; inside a future that would end the loop instead of the call.
        is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
        returned.set_exception(error if is_plain else RuntimeError(f"{type(error).__name__}: {error}"))


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSING_S)


@dataclass(frozen=True)
class ToolResponse:
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


class ToolBox:
    """The tools of one conversation: an async context, in which `call` and `rewards` may be used.

    Args:
        specs: of the configuration, by name.
        tools_kwargs: of the sample, by the name of a tool.
        config: limits.
        thread: where tools run.

    Raises:
        RolloutError: `tools_kwargs` name what there is not.
    """

    def __init__(
        self,
        specs: Mapping[str, ToolSpec],
        tools_kwargs: Mapping[str, Mapping[str, Any] | None],
        config: MultiTurnConfig,
        thread: ToolThread,
    ) -> None:
        self.specs, self.config, self.thread = specs, config, thread
        given = {name: kwargs for name, kwargs in tools_kwargs.items() if kwargs is not None}
        if unknown := [name for name in given if name not in specs]:
            raise RolloutError(
                "tools_kwargs",
                got=", ".join(unknown),
                expected=f"names of tools: {', '.join(specs) or 'none is configured'}",
                fix="Correct extra_info.tools_kwargs of the row, or configure the tool.",
            )
        self._kwargs = {name: spec.method_kwargs(given.get(name, {})) for name, spec in specs.items()}
        self._tools: dict[str, Tool] = {}

    async def __aenter__(self) -> "ToolBox":
        """Makes every tool and calls its `create`.

        Raises:
            ToolFailedError: one failed.
        """
        try:
            for name, spec in self.specs.items():
                # One that is no more than a function is made at once: nothing of a user's runs.
                is_plain = isinstance(spec.make, type)
                self._tools[name] = spec.make() if is_plain else await self._call(f"tool {name}, create", spec.make, {})
                await self._hook(name, "create")
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def call(self, call: ToolCall) -> ToolResponse:
        """The response to a call.

        Raises:
            ToolFailedError: the tool raised, took too long, or returned what cannot be written.
        """
        arguments = json.dumps(call.arguments, ensure_ascii=False, default=str)
        started = time.perf_counter()
        try:
            text = await self._execute(call, arguments)
        except ToolError as error:
            return self._response(call.name, arguments, f"Error: {error}", time.perf_counter() - started, True)
        return self._response(call.name, arguments, text, time.perf_counter() - started)

    def refuse(self, call: ToolCall, why: str) -> ToolResponse:
        """The response to a call that is not made."""
        return self._response(call.name, json.dumps(call.arguments, default=str), f"Error: {why}", is_refused=True)

    async def rewards(self) -> dict[str, float]:
        """What the tools' use earned, by name; tools that give no reward are left out.

        Raises:
            ToolFailedError: `calc_reward` failed, or returned no number.
        """
        earned: dict[str, float] = {}
        for name in self._tools:
            reward = await self._hook(name, "calc_reward")
            try:
                earned |= {} if reward is None else {name: float(reward)}
            except (TypeError, ValueError) as error:
                raise ToolFailedError(
                    f"tool {name}, calc_reward", got=repr(reward)[:_SHOWN], expected="a number"
                ) from error
        return earned

    async def __aexit__(self, *error: object) -> None:
        """Calls `release` of every tool that was made, each whatever became of the others.

        Raises:
            ToolFailedError: the first one that failed.
        """
        failures = []
        for name in reversed(self._tools):
            try:
                await self._hook(name, "release")
            except ToolFailedError as failure:
                failures.append(failure)
        self._tools = {}
        if failures:
            raise failures[0]

    async def _execute(self, call: ToolCall, arguments: str) -> str:
        if call.problem:
            raise ToolError(f"tool call: {call.problem}")
        spec = self.specs.get(call.name)
        if spec is None:
            fix, names = did_you_mean(call.name, self.specs), ", ".join(self.specs)
            raise ToolError("tool call", got=f"the name {call.name!r}", expected=f"one of {names}", fix=fix)
        kwargs = {**spec.check(call.arguments), **self._kwargs[call.name].get("execute_kwargs", {})}
        where = f"{call.name}({shown(arguments)})"
        execute = self._tools[call.name].execute
        return as_text(await self.thread.call(where, execute, kwargs, self.config.tool_timeout_s), where)

    async def _hook(self, name: str, method: str) -> Any:
        """The result of a method that a tool may leave as it is: then it is not called."""
        tool, kwargs = self._tools[name], self._kwargs[name].get(f"{method}_kwargs", {})
        if not kwargs and getattr(type(tool), method) is getattr(Tool, method):
            return None
        return await self._call(f"tool {name}, {method}", getattr(tool, method), kwargs)

    async def _call(self, where: str, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
        try:
            return await self.thread.call(where, function, kwargs, self.config.tool_timeout_s)
        except ToolError as error:  # no model waits for a text here
            raise ToolFailedError(where, got=f"ToolError: {error}".rstrip(".")) from error

    def _response(
        self, name: str, arguments: str, text: str, seconds: float = 0.0, is_refused: bool = False
    ) -> ToolResponse:
        # What is wrong with a call stands at the beginning; behind it stands what would have been right.
        side = "right" if is_refused else self.config.tool_response_truncate_side
        cut = truncate(text, self.config.max_tool_response_length, side)
        return ToolResponse(name, arguments, cut, len(text), seconds, is_refused)


def as_text(result: Any, where: str) -> str:
    """What a tool returned, as text that any tokenizer takes.

    Raises:
        ToolFailedError: it is neither text nor anything that JSON can express.
    """
    if isinstance(result, bytes | bytearray | memoryview):
        return bytes(result).decode("utf-8", errors="replace")
    if isinstance(result, BaseModel):
        result = result.model_dump(mode="json")
    if not isinstance(result, str):
        try:
            result = json.dumps(result, ensure_ascii=False, default=str)
        except (ValueError, TypeError, RecursionError) as error:
            got = f"a response of type {type(result).__name__} ({error})"
            raise ToolFailedError(where, got=got, expected="text, bytes or JSON") from error
    # Half of a surrogate pair is a character that no encoding has.
    return result.encode("utf-8", errors="replace").decode("utf-8")


def truncate(text: str, limit: int, side: Literal["left", "middle", "right"]) -> str:
    """At most `limit` characters, a mark where some were left out included."""
    if len(text) <= limit:
        return text
    mark = MARK if limit >= 2 * len(MARK) else ""
    room = limit - len(mark)
    before = {"left": 0, "middle": room // 2, "right": room}[side]
    return text[:before] + mark + text[len(text) - (room - before) :]


def shown(text: str) -> str:
    """The beginning of a text, for errors."""
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
