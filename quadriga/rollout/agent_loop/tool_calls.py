# SPDX-License-Identifier: Apache-2.0
"""Calls of tools and user simulators: the thread in which they run, their time limits, and their responses.

    the model's mistake (no JSON, unknown tool, wrong arguments, `ToolError`) -> a text that says so; it may try again
    the tool's own failure (it raised, or took too long)                      -> `ToolFailedError`: the end

Users' code runs in a separate event loop, so that an engine that blocks its thread does not stop it:

    conversations (loop of the engine)        tool thread (its own loop)           a thread for each plain function
      │  await thread.call(function, ...)       │                                      │
      │ ───────────────────────────────────────>│ async function: awaited here         │
      │                                         │ plain function: ────────────────────>│ runs
      │<── result, or what was raised, or ──────│<───────────── result ────────────────│
      │    a timeout                            │

`call` waits until fewer than `MAX_CALLS` calls run, and then at most `limit_s` for the function to end.

Python cannot end a thread: a plain function that exceeds its limit is given up, and its thread runs on. The run stops
when `MAX_GIVEN_UP` of these are alive. They are daemon threads, so the process can end.
"""

import asyncio
import inspect
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AsyncExitStack
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from quadriga.background import EventLoopThread
from quadriga.config.multi_turn import MultiTurnConfig
from quadriga.errors import RolloutError, did_you_mean, traceback_text
from quadriga.observe.watchdog import place_of
from quadriga.rollout.agent_loop.parsers import ToolCall
from quadriga.rollout.agent_loop.tools import Tool, ToolError, ToolSpec, WithImages, without_none

Function: TypeAlias = Callable[..., Any]

MAX_CALLS = 64  # calls at the same time, over all conversations of the process
MAX_GIVEN_UP = 256  # threads of calls that exceeded their limit and still run
MARK = "...(truncated)..."  # where `truncate` cuts a text

_THREAD_NAME = "quadriga-tools"
_TIMEOUT_KEY = "actor_rollout_ref.rollout.multi_turn.tool_timeout_s"
_MAX_SHOWN_CHARACTERS = 200
_MAX_ERROR_CHARACTERS = 2000


class ConversationOver(Exception):  # noqa: N818 - not an error: the way in which a conversation ends
    """A limit is reached, or the user simulator has ended the conversation.

    Loops do not catch it. `reason` becomes the conversation's `finish_reason`.
    """

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class ToolFailedError(RolloutError):
    """A tool or user simulator failed, through no mistake of the model; its conversation ends.

    Attributes:
        reason: first word of the conversation's `finish_reason`.
        details: the traceback, for the trace; "" if there is none.
    """

    reason = "tool_error"
    details: str = ""


class ToolsStuckError(RolloutError):
    """Too many tools hang; the run stops."""


class ToolThread(EventLoopThread):
    """Thread with the event loop in which users' code runs, and from which MCP servers are reached.

    An async function that blocks the loop cannot be stopped. The object then gives up its thread
    and its loop, and starts new ones.

    Attributes:
        servers: the MCP servers, which `close` stops.
    """

    def __init__(self) -> None:
        super().__init__(_THREAD_NAME)
        self.servers: list[Any] = []
        self._call_slots = asyncio.Semaphore(MAX_CALLS)
        self._given_up: set[Thread] = set()
        # Where the thread before this one was blocked, such as ", at FILE:LINE in FUNCTION", for
        # errors; "" if it is not known.
        self._blocking_place = ""

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the MCP servers, then end the thread."""
        while self.servers:
            self.submit(self.servers.pop().close()).result()
        super().close(timeout_s)

    async def call(
        self,
        where: str,
        function: Function,
        kwargs: Mapping[str, Any],
        limit_s: float,
        *,
        is_for_model: bool = False,
    ) -> Any:
        """Call a user's function, plain or async.

        Args:
            where: the call, for error messages.
            function: the function.
            kwargs: keyword arguments of the function.
            limit_s: time limit of the call, in seconds.
            is_for_model: whether the model reads the result, and so the message of a `ToolError`.
                Otherwise a `ToolError` is a failure like any other error.

        Returns:
            The function's result.

        Raises:
            ToolError: the function raised it, for the model.
            ToolFailedError: the function raised another error, or took too long.
            ToolsStuckError: too many calls of plain functions were given up and still run.
        """
        try:
            return await self._run_on_loop(self._run_limited(function, kwargs, limit_s), limit_s)
        except ToolsStuckError:
            raise
        except ToolError as error:
            if is_for_model:
                raise
            # The message of the new error adds a full stop.
            raise ToolFailedError(where, got=f"ToolError: {error}".rstrip(".")) from error
        except TimeoutError as error:
            fix = f"Raise {_TIMEOUT_KEY}, or make the tool quicker."
            raise ToolFailedError(where, got=str(error) or "TimeoutError", fix=fix) from error
        except Exception as error:
            failure = ToolFailedError(
                where,
                got=f"{type(error).__name__}: {error}"[:_MAX_ERROR_CHARACTERS],
                expected="a result",
                fix="Raise quadriga.rollout.agent_loop.ToolError for what the model should read instead.",
            )
            failure.details = traceback_text(error)
            raise failure from error

    async def _run_on_loop(self, work: Coroutine[Any, Any, Any], limit_s: float) -> Any:
        """Run work on the thread's loop, and return its result.

        The work limits its own time. Here only a loop that is blocked is detected: every `limit_s`
        seconds, a coroutine that ends at once shows whether the loop still runs.

        Args:
            work: the coroutine to run.
            limit_s: time after which a loop that does not run counts as blocked, in seconds.

        Returns:
            The result of the work.

        Raises:
            TimeoutError: the loop is blocked, or the work raised this error.
        """
        loop = self._loop
        submitted = self.submit(work)
        result = asyncio.wrap_future(submitted)
        try:
            while True:
                probe = self.submit(asyncio.sleep(0))
                done, _ = await asyncio.wait({result}, timeout=limit_s)
                if done:
                    return result.result()
                # If the thread has another loop by now, another call has replaced a blocked one.
                if loop is self._loop:
                    if probe.done():
                        # The loop runs, so the work only takes its time.
                        continue
                    self._replace_thread()
                raise TimeoutError(
                    f"a call blocked all others for {limit_s:g} s{self._blocking_place}; "
                    "`await` what is slow"
                )
        finally:
            # If the conversation was cancelled, its tools are released next. The work must end
            # before that, but `result.cancel()` would reach it only later.
            submitted.cancel()

    def _replace_thread(self) -> None:
        """Give up the thread, whose loop is blocked, and start a new one with a new loop."""
        self._blocking_place = place_of(sys._current_frames().get(self._thread.ident or 0))
        self._given_up.add(self._thread)
        super().__init__(_THREAD_NAME)  # sets `_thread` and `_loop`
        self._call_slots = asyncio.Semaphore(MAX_CALLS)

    @property
    def num_given_up(self) -> int:
        """Number of threads that were given up and are still alive. Ended ones are forgotten."""
        self._given_up = {thread for thread in self._given_up if thread.is_alive()}
        return len(self._given_up)

    async def _run_limited(
        self, function: Function, kwargs: Mapping[str, Any], limit_s: float
    ) -> Any:
        """Run a function for at most `limit_s` seconds, once fewer than `MAX_CALLS` others run.

        Raises:
            TimeoutError: the function did not end in time.
        """
        async with self._call_slots:
            task = asyncio.ensure_future(self._run(function, kwargs))
            try:
                # asyncio.wait_for would wait for a function that refuses to be cancelled.
                done, _ = await asyncio.wait({task}, timeout=limit_s)
                if not done:
                    raise TimeoutError(f"no response within {limit_s:g} s")
                return task.result()
            finally:
                task.cancel()

    async def _run(self, function: Function, kwargs: Mapping[str, Any]) -> Any:
        """Run a function without a limit: async ones in this loop, plain ones in a new thread."""
        try:
            if inspect.iscoroutinefunction(function):
                return await function(**kwargs)
            return await self._run_in_thread(function, kwargs)
        except (SystemExit, KeyboardInterrupt) as error:
            # They would end the loop instead of the call.
            raise RuntimeError(f"{type(error).__name__}: {error}") from error

    async def _run_in_thread(self, function: Function, kwargs: Mapping[str, Any]) -> Any:
        """Run a plain function in a new thread, and return its result.

        Raises:
            ToolsStuckError: too many functions were given up and still run.
        """
        if self.num_given_up >= MAX_GIVEN_UP:
            raise ToolsStuckError(
                "tools",
                got=f"{self.num_given_up} calls that run on after {_TIMEOUT_KEY}",
                expected="tools that end",
                fix="Give the tool a time limit of its own, or let it do its work in a process that it can kill.",
            )
        future: Future[Any] = Future()
        # The copied context has the counter that limits what a conversation prints.
        thread = Thread(
            target=copy_context().run,
            args=(_run_and_deliver, future, function, kwargs),
            name="quadriga-tool",
            daemon=True,
        )
        thread.start()
        try:
            result = await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            # The limit has passed, or the conversation was cancelled. The thread runs on.
            self._given_up.add(thread)
            raise
        # A plain function may return a coroutine, as `functools.partial` of an async one does.
        return await result if inspect.isawaitable(result) else result


def _run_and_deliver(future: "Future[Any]", function: Function, kwargs: Mapping[str, Any]) -> None:
    """Call a function in this thread, and store its result or its error in a future.

    A child process that the function has forked ends here.

    Args:
        future: gets the result. If it has been cancelled, the function is not called.
        function: the function.
        kwargs: keyword arguments of the function.
    """
    if not future.set_running_or_notify_cancel():  # cancelled before the thread began
        return
    pid = os.getpid()
    try:
        result = function(**kwargs)
        if os.getpid() == pid:
            future.set_result(result)
    except BaseException as error:
        # sys.exit or StopIteration inside a future would end the loop instead of the call.
        if isinstance(error, StopIteration) or not isinstance(error, Exception):
            error = RuntimeError(f"{type(error).__name__}: {error}")
        future.set_exception(error)
    finally:
        if os.getpid() != pid:
            # In the child, which must not lead the parent's conversation as well.
            os._exit(0)


@dataclass(frozen=True)
class ToolResult:
    """The response to a call of a tool."""

    name: str  # name in the call; the tool may not exist
    arguments: str  # arguments of the call, JSON
    text: str  # text that the model reads, cut to the limit
    num_chars: int  # length of the text before it was cut
    seconds: float = 0.0  # time that the call took; 0 if no call was made
    is_refused: bool = False  # whether the text says what was wrong with the call
    images: tuple[Any, ...] = ()  # images that the model sees before the text

    @property
    def content(self) -> str | list[dict[str, Any]]:
        """Content of the message: the text, or a list of parts if there are images."""
        if not self.images:
            return self.text
        parts = [{"type": "image", "image": image} for image in self.images]
        return [*parts, {"type": "text", "text": self.text}]


class ToolBox:
    """The tools of one conversation.

    It is an async context manager, inside which `call_all` and `rewards` may be called.

    Args:
        specs: the tools of the configuration, by name.
        tools_kwargs: the sample's `tools_kwargs`: by tool and method, keyword arguments, as in
            {"account": {"create_kwargs": {"balance": 5}}}.
        config: `actor_rollout_ref.rollout.multi_turn`.
        thread: the thread in which tools run.

    Raises:
        RolloutError: `tools_kwargs` name a tool or an argument that does not exist.
    """

    def __init__(
        self,
        specs: Mapping[str, ToolSpec],
        tools_kwargs: dict[str, Any],
        config: MultiTurnConfig,
        thread: ToolThread,
    ) -> None:
        self.specs = specs
        self.config = config
        self.thread = thread
        kwargs_by_tool = without_none(tools_kwargs)
        unknown = [name for name in kwargs_by_tool if name not in specs]
        if unknown:
            raise RolloutError(
                "tools_kwargs",
                got=", ".join(unknown),
                expected=f"names of tools: {', '.join(specs) or 'none is configured'}",
                fix="Correct extra_info.tools_kwargs of the row, or configure the tool.",
            )
        # The same after a check, with an entry for each tool.
        self._kwargs = {
            name: spec.method_kwargs(kwargs_by_tool.get(name, {})) for name, spec in specs.items()
        }
        self._tools: dict[str, Tool] = {}  # the objects of this conversation, by name
        self._releases = AsyncExitStack()  # calls `release` of each of them

    async def __aenter__(self) -> "ToolBox":
        """Make an object of every tool and call its `create`. `__aexit__` calls their `release`.

        A tool is released even if its `create`, or another tool, failed. If a `release` fails after
        that, the earlier error is raised, with the failure of `release` in its details.

        Raises:
            ToolFailedError: a tool failed.
        """
        limit_s = self.config.tool_timeout_s
        async with AsyncExitStack() as releases:
            for name, spec in self.specs.items():
                if isinstance(spec.make, type):
                    # `as_tool` made this class. Its constructor runs no users' code, so it needs no
                    # time limit.
                    self._tools[name] = spec.make()
                else:
                    where = f"tool {name}, create"
                    self._tools[name] = await self.thread.call(where, spec.make, {}, limit_s)
                releases.push_async_exit(
                    partial(end_use, partial(self._call_optional, name, "release"))
                )
                await self._call_optional(name, "create")
            # Without an error the releases wait for `__aexit__`.
            self._releases = releases.pop_all()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._releases.__aexit__(*error)

    async def call_all(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Make the calls of one turn at the same time, at most `max_parallel_calls` of them.

        Returns:
            The responses, in the order of the calls. Calls over the limit are refused.

        Raises:
            ToolFailedError: a tool raised, took too long, or returned what `as_text` refuses.
        """
        limit = self.config.max_parallel_calls
        # The error of a tool ends the conversation, whose tools are then released. So it is raised
        # only after all calls have ended.
        outcomes = await asyncio.gather(*map(self._call, calls[:limit]), return_exceptions=True)
        responses = []
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                raise outcome
            responses.append(outcome)
        for call in calls[limit:]:
            text = f"Error: only {limit} calls of a turn are made; call again"
            responses.append(self._result_of(call, text, is_refused=True))
        return responses

    async def rewards(self) -> dict[str, float]:
        """Rewards for the use of the tools, by name; tools without a reward are left out.

        Raises:
            ToolFailedError: `calc_reward` failed, or did not return a number.
        """
        rewards = {}
        for name in self._tools:
            reward = await self._call_optional(name, "calc_reward")
            if reward is None:
                continue
            try:
                rewards[name] = float(reward)
            except (TypeError, ValueError) as error:
                where = f"tool {name}, calc_reward"
                got = repr(reward)[:_MAX_SHOWN_CHARACTERS]
                raise ToolFailedError(where, got, expected="a number") from error
        return rewards

    async def _call(self, call: ToolCall) -> ToolResult:
        """Make one call. The response to a mistake of the model says what is wrong.

        Raises:
            ToolFailedError: the tool failed, through no mistake of the model.
        """
        # Errors name the call, with its arguments cut short.
        shown_arguments = call.arguments_text
        if len(shown_arguments) > _MAX_SHOWN_CHARACTERS:
            shown_arguments = f"{shown_arguments[:_MAX_SHOWN_CHARACTERS]}..."
        where = f"{call.name}({shown_arguments})"
        started = time.perf_counter()
        images: Sequence[Any] = ()
        is_refused = False
        try:
            kwargs = self._execute_kwargs(call)
            execute = self._tools[call.name].execute
            limit_s = self.config.tool_timeout_s
            result = await self.thread.call(where, execute, kwargs, limit_s, is_for_model=True)
            if isinstance(result, WithImages):
                images = result.images
                result = result.text
            text = as_text(result, where)
        except ToolError as error:
            text = f"Error: {error}"
            is_refused = True
        response = self._result_of(call, text, is_refused=is_refused)
        return replace(response, seconds=time.perf_counter() - started, images=tuple(images))

    def _execute_kwargs(self, call: ToolCall) -> dict[str, Any]:
        """Keyword arguments of `execute`: the call's, replaced and completed by the sample's.

        Raises:
            ToolError: the call cannot be read, names no tool, or has wrong arguments.
        """
        if call.problem:
            raise ToolError(f"tool call: {call.problem}")
        if call.name not in self.specs:
            raise ToolError(
                "tool call",
                got=f"the name {call.name!r}",
                expected=f"one of {', '.join(self.specs)}",
                fix=did_you_mean(call.name, self.specs),
            )
        arguments = self.specs[call.name].check(call.arguments)
        return arguments | self._kwargs[call.name].get("execute_kwargs", {})

    async def _call_optional(self, name: str, method: str) -> Any:
        """Call an optional method of a tool, such as `create`, with the sample's arguments for it.

        Args:
            name: name of the tool.
            method: name of the method.

        Returns:
            The result of the method. None if the tool does not define the method, and the sample
            has no arguments for it: the method of `Tool`, which does nothing, is then not called.
        """
        tool = self._tools[name]
        kwargs = self._kwargs[name].get(f"{method}_kwargs", {})
        if not kwargs and getattr(type(tool), method) is getattr(Tool, method):
            return None
        where = f"tool {name}, {method}"
        limit_s = self.config.tool_timeout_s
        return await self.thread.call(where, getattr(tool, method), kwargs, limit_s)

    def _result_of(self, call: ToolCall, text: str, *, is_refused: bool) -> ToolResult:
        """Make the result of a call for the model. The text is cut to the configured length.

        Args:
            call: the call.
            text: the tool's text, or what is wrong with the call.
            is_refused: whether the call was wrong.
        """
        # A refusal says at its beginning what is wrong, so only its end may be cut.
        side = "right" if is_refused else self.config.tool_response_truncate_side
        return ToolResult(
            name=call.name,
            arguments=call.arguments_text,
            text=truncate(text, self.config.max_tool_response_length, side),
            num_chars=len(text),
            is_refused=is_refused,
        )


async def end_use(
    end: Callable[[], Awaitable[Any]], _: Any, error: BaseException | None, *__: Any
) -> None:
    """Call the last method of a user's object. The parameters after `end` are those of `__aexit__`.

    If the call fails after an earlier error, its failure is only added to that error.

    Args:
        end: calls the method, such as `release`.
        _: type of the earlier error.
        error: the error that ended the use of the object. None: there was none. A
            `ConversationOver`, the end of a conversation at a limit, counts as none.
        __: traceback of the earlier error.

    Raises:
        ToolFailedError: the call failed, and there was no error before.
    """
    try:
        await end()
    except ToolFailedError as failure:
        if error is None or isinstance(error, ConversationOver):
            raise
        later_failure = f"then {failure}\n{failure.details}".rstrip()
        if isinstance(error, ToolFailedError):
            # The trace of a conversation shows the details of its failure, but not notes.
            error.details = f"{error.details or error}\n{later_failure}"
        else:
            error.add_note(later_failure)


def as_text(result: Any, where: str) -> str:
    """Convert the result of a tool to text that every tokenizer can encode.

    Args:
        result: the result: text, bytes, a pydantic model, or a value that JSON can express.
        where: the call, for the error message.

    Returns:
        The text; bytes are decoded, other values are written as JSON.

    Raises:
        ToolFailedError: the result is none of these.
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
            raise ToolFailedError(where, got, expected="text, bytes or JSON") from error
    # Half of a surrogate pair cannot be encoded in UTF-8, so it becomes a question mark.
    return result.encode("utf-8", errors="replace").decode("utf-8")


def truncate(text: str, limit: int, side: Literal["left", "middle", "right"]) -> str:
    """Cut a text to a number of characters.

    Args:
        text: the text.
        limit: the number of characters, including `MARK`, which shows where the text is cut.
        side: the side on which the text is cut.

    Returns:
        The text, with at most `limit` characters. If `limit` is shorter than two marks, there is
        no mark.
    """
    if len(text) <= limit:
        return text
    mark = MARK if limit >= 2 * len(MARK) else ""
    num_shown = limit - len(mark)
    num_before = {"left": 0, "middle": num_shown // 2, "right": num_shown}[side]
    num_behind = num_shown - num_before
    return text[:num_before] + mark + text[len(text) - num_behind :]
