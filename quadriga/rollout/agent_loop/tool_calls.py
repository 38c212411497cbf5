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
import os
import sys
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from contextvars import copy_context
from dataclasses import dataclass, replace
from threading import Thread
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from quadriga.background import EventLoopThread
from quadriga.config.multi_turn import MultiTurnConfig
from quadriga.errors import RolloutError, did_you_mean, traceback_text
from quadriga.observe.watchdog import place_of
from quadriga.rollout.agent_loop.parsers import ToolCall
from quadriga.rollout.agent_loop.tools import Tool, ToolError, ToolSpec, WithImages

Function: TypeAlias = Callable[..., Any]

MAX_CALLS = 64
MAX_GIVEN_UP = 256
MARK = "...(truncated)..."

_TIMEOUT_KEY = "actor_rollout_ref.rollout.multi_turn.tool_timeout_s"
_SHOWN = 200


class ToolFailedError(RolloutError):
    """A tool or user simulator failed by itself: the conversation that called it ends.
    `details`: the traceback, for the trace; "" where there is none."""

    details: str = ""


class ToolsStuckError(RolloutError):
    """So many tools hang that the run stops."""


class ToolThread(EventLoopThread):
    """The thread and event loop in which users' code runs."""

    def __init__(self) -> None:
        super().__init__("quadriga-tools")
        self._places = asyncio.Semaphore(MAX_CALLS)
        self._given_up: set[Thread] = set()
        self._place = ""

    async def call(
        self,
        where: str,
        function: Function,
        kwargs: Mapping[str, Any],
        limit_s: float,
        *,
        is_for_model: bool = False,
    ) -> Any:
        """What a user's function returns, plain or async.
        `limit_s`: the time that it may take, in seconds.
        `is_for_model`: whether the model reads the result, and so a `ToolError`; else that is a failure like others.
        Raises ToolError: the function raised it, for the model.
        Raises ToolFailedError: the function raised something else, or took too long.
        Raises ToolsStuckError: too many calls of plain functions were given up and still run."""
        try:
            return await self._respond(self._limited(function, kwargs, limit_s), limit_s)
        except ToolsStuckError:
            raise
        except ToolError as error:
            if is_for_model:
                raise
            raise ToolFailedError(where, got=f"ToolError: {error}".rstrip(".")) from error
        except TimeoutError as error:
            fix = f"Raise {_TIMEOUT_KEY}, or make the tool quicker."
            raise ToolFailedError(where, got=str(error) or "TimeoutError", fix=fix) from error
        except Exception as error:
            fix = "Raise quadriga.rollout.agent_loop.ToolError for what the model should read instead."
            failure = ToolFailedError(
                where, f"{type(error).__name__}: {error}"[:2000], "a result", fix
            )
            failure.details = traceback_text(error)
            raise failure from error

    async def _respond(self, work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        """The result of work on the thread's loop. Where an async function blocks that loop, the thread is given up."""
        loop, result = self._loop, asyncio.wrap_future(self.submit(work))
        while True:
            responds = self.submit(asyncio.sleep(0))
            done, _ = await asyncio.wait({result}, timeout=limit_s)
            if done:
                return result.result()
            if loop is self._loop and responds.done():
                continue
            if loop is self._loop:
                self._place = place_of(sys._current_frames().get(self._thread.ident or 0))
                self._given_up.add(self._thread)
                super().__init__("quadriga-tools")
                self._places = asyncio.Semaphore(MAX_CALLS)
            raise TimeoutError(
                f"a call blocked all others for {limit_s:g} s{self._place}; it should `await`"
            )

    @property
    def num_given_up(self) -> int:
        """Calls that were given up and still run."""
        self._given_up = {thread for thread in self._given_up if thread.is_alive()}
        return len(self._given_up)

    async def _limited(self, function: Function, kwargs: Mapping[str, Any], limit_s: float) -> Any:
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

    async def _run(self, function: Function, kwargs: Mapping[str, Any]) -> Any:
        try:
            return await self._returned(function, kwargs)
        except (SystemExit, KeyboardInterrupt) as error:
            # They would end the loop instead of the call.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async def _returned(self, function: Function, kwargs: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(function):
            return await function(**kwargs)
        if self.num_given_up >= MAX_GIVEN_UP:
            got = f"{self.num_given_up} calls that run on after {_TIMEOUT_KEY}"
            fix = "Give the tool a time limit of its own, or let it do its work in a process that it can kill."
            raise ToolsStuckError("tools", got=got, expected="tools that end", fix=fix)
        returned: Future[Any] = Future()
        # The conversation's context goes along: what it prints is counted there.
        arguments = (_deliver, returned, function, kwargs)
        thread = Thread(
            target=copy_context().run, args=arguments, name="quadriga-tool", daemon=True
        )
        thread.start()
        try:
            result = await asyncio.wrap_future(returned)
        except asyncio.CancelledError:
            self._given_up.add(thread)
            raise
        return await result if inspect.isawaitable(result) else result


def _deliver(returned: "Future[Any]", function: Function, kwargs: Mapping[str, Any]) -> None:
    if not returned.set_running_or_notify_cancel():
        return
    pid = os.getpid()
    try:
        result = function(**kwargs)
        if os.getpid() == pid:
            returned.set_result(result)
    except BaseException as error:
        # A tool may call sys.exit; inside a future that would end the loop instead of the call.
        is_plain = isinstance(error, Exception) and not isinstance(error, StopIteration)
        returned.set_exception(
            error if is_plain else RuntimeError(f"{type(error).__name__}: {error}")
        )
    finally:
        if os.getpid() != pid:
            # A forked copy that came back: the conversation is its parent's.
            os._exit(0)


@dataclass(frozen=True)
class ToolResponse:
    """What became of a call."""

    name: str  # of the tool that was called
    arguments: str  # as the model wrote them, JSON
    text: str  # that the model reads, cut to the limit
    num_chars: int  # length of the text before it was cut
    seconds: float = 0.0  # that the call took; 0 where none was made
    is_refused: bool = False  # whether the text says that the call was wrong
    images: tuple[Any, ...] = ()  # that the model is shown before the text

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """Of a message: the text, or parts where there are images."""
        shown = [{"type": "image", "image": one} for one in self.images]
        return [*shown, {"type": "text", "text": self.text}] if shown else self.text


class ToolBox:
    """The tools of one conversation: an async context, in which `call_all` and `rewards` may be used.
    Raises RolloutError: the sample's `tools_kwargs` name a tool or an argument that there is not."""

    def __init__(
        self,
        specs: Mapping[str, ToolSpec],
        tools_kwargs: dict[str, Any],
        config: MultiTurnConfig,
        thread: ToolThread,
    ) -> None:
        self.specs, self.config, self.thread = specs, config, thread
        given = {name: kwargs for name, kwargs in tools_kwargs.items() if kwargs is not None}
        if unknown := [name for name in given if name not in specs]:
            expected = f"names of tools: {', '.join(specs) or 'none is configured'}"
            fix = "Correct extra_info.tools_kwargs of the row, or configure the tool."
            raise RolloutError("tools_kwargs", got=", ".join(unknown), expected=expected, fix=fix)
        self._kwargs = {
            name: spec.method_kwargs(given.get(name, {})) for name, spec in specs.items()
        }
        self._tools: dict[str, Tool] = {}
        self._releases = AsyncExitStack()

    async def __aenter__(self) -> "ToolBox":
        """Makes every tool and calls its `create`; on the way out `release` of each, whatever became of the others.
        Raises ToolFailedError: one failed."""
        async with AsyncExitStack() as releases:
            for name, spec in self.specs.items():
                if isinstance(spec.make, type):  # no more than a function: nothing of a user's runs
                    self._tools[name] = spec.make()
                else:
                    made = self.thread.call(
                        f"tool {name}, create", spec.make, {}, self.config.tool_timeout_s
                    )
                    self._tools[name] = await made
                releases.push_async_callback(self._hook, name, "release")
                await self._hook(name, "create")
            self._releases = releases.pop_all()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._releases.aclose()

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResponse]:
        """The responses to the calls of one turn in their order: `max_parallel_calls` are made at the same time.
        Raises ToolFailedError: a tool raised, took too long, or returned what cannot be written."""
        limit = self.config.max_parallel_calls
        responses: list[ToolResponse] = []
        # All have ended before one is raised: none runs on in a conversation that ends.
        for response in await asyncio.gather(
            *map(self._call, calls[:limit]), return_exceptions=True
        ):
            if isinstance(response, BaseException):
                raise response
            responses.append(response)
        why = f"Error: only {limit} calls of a turn are made; call again"
        return responses + [self._response(call, why, is_refused=True) for call in calls[limit:]]

    async def rewards(self) -> dict[str, float]:
        """What the tools' use earned, by name; tools that give no reward are left out.
        Raises ToolFailedError: `calc_reward` failed, or returned no number."""
        earned: dict[str, float] = {}
        for name in self._tools:
            reward = await self._hook(name, "calc_reward")
            try:
                earned |= {} if reward is None else {name: float(reward)}
            except (TypeError, ValueError) as error:
                where = f"tool {name}, calc_reward"
                raise ToolFailedError(
                    where, got=repr(reward)[:_SHOWN], expected="a number"
                ) from error
        return earned

    async def _call(self, call: ToolCall) -> ToolResponse:
        arguments = json.dumps(call.arguments, ensure_ascii=False, default=str)
        where = (
            f"{call.name}({arguments if len(arguments) <= _SHOWN else f'{arguments[:_SHOWN]}...'})"
        )
        started = time.perf_counter()
        try:
            if call.problem:
                raise ToolError(f"tool call: {call.problem}")
            if (spec := self.specs.get(call.name)) is None:
                fix, names = did_you_mean(call.name, self.specs), ", ".join(self.specs)
                raise ToolError(
                    "tool call", got=f"the name {call.name!r}", expected=f"one of {names}", fix=fix
                )
            kwargs = {
                **spec.check(call.arguments),
                **self._kwargs[call.name].get("execute_kwargs", {}),
            }
            execute = self._tools[call.name].execute
            result = await self.thread.call(
                where, execute, kwargs, self.config.tool_timeout_s, is_for_model=True
            )
        except ToolError as error:
            return self._response(
                call, f"Error: {error}", time.perf_counter() - started, is_refused=True
            )
        shown = result if isinstance(result, WithImages) else WithImages((), result)
        response = self._response(call, as_text(shown.text, where), time.perf_counter() - started)
        return replace(response, images=tuple(shown.images))

    async def _hook(self, name: str, method: str) -> Any:
        """The result of a method that a tool may leave as it is: then it is not called."""
        tool, kwargs = self._tools[name], self._kwargs[name].get(f"{method}_kwargs", {})
        function = getattr(tool, method)
        if not kwargs and getattr(type(tool), method) is getattr(Tool, method):
            return None
        return await self.thread.call(
            f"tool {name}, {method}", function, kwargs, self.config.tool_timeout_s
        )

    def _response(
        self, call: ToolCall, text: str, seconds: float = 0.0, is_refused: bool = False
    ) -> ToolResponse:
        # What is wrong with a call stands at the beginning; behind it stands what would have been right.
        side = "right" if is_refused else self.config.tool_response_truncate_side
        arguments = json.dumps(call.arguments, ensure_ascii=False, default=str)
        cut = truncate(text, self.config.max_tool_response_length, side)
        return ToolResponse(call.name, arguments, cut, len(text), seconds, is_refused)


def as_text(result: Any, where: str) -> str:
    """What a tool returned, as text that any tokenizer takes.
    Raises ToolFailedError: it is neither text nor anything that JSON can express."""
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
