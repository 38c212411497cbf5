# SPDX-License-Identifier: Apache-2.0
"""Where tools and partners run: in an event loop of their own, so that an engine which blocks does not stop them.

    conversations (loop of the engine)        tool thread (its own loop)           a thread for each plain function
      │  await thread.do(coroutine, limit)      │                                      │
      │ ───────────────────────────────────────>│ async function: awaited here         │
      │                                         │ plain function: ────────────────────>│ runs
      │<── answer, or what was raised, or ──────│<───────────── answer ────────────────│
      │    TimeoutError after `limit` seconds   │

do      consumes a coroutine; waits for a free place among `MAX_CALLS`, then at most `limit` seconds; unblocked by its
        end or by the clock. Its time begins when it has a place.
invoke  consumes a function of a user's; waits for its return; unblocked by it.

Python cannot end a thread: a plain function that is over its limit is given up, and its thread goes on alone. With
`MAX_GIVEN_UP` of these alive the run stops. The threads do not keep the process from ending.
"""

import asyncio
import functools
import inspect
import threading
from collections.abc import Callable, Coroutine, Mapping
from concurrent.futures import Future
from typing import Any, TypeVar

from quadriga.errors import RolloutError

MAX_CALLS = 64
MAX_GIVEN_UP = 256
CLOSING_S = 5.0

T = TypeVar("T")


class ToolsStuckError(RolloutError):
    """So many tools hang that the run stops."""


class ToolThread:
    """See the module. Started when first used; `close` ends it."""

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._places: asyncio.Semaphore | None = None
        self._given_up: set[threading.Thread] = set()

    async def do(self, coroutine: Coroutine[Any, Any, T], *, limit_s: float | None) -> T:
        """What the coroutine returns, run in the tool thread.

        Args:
            coroutine: calls tools or partners.
            limit_s: seconds that it may take; None: as many as it needs.

        Raises:
            TimeoutError: it took longer.
        """
        loop = self._started()
        running = asyncio.run_coroutine_threadsafe(self._limited(coroutine, limit_s), loop)
        return await asyncio.wrap_future(running)

    def wait(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """What the coroutine returns, run in the tool thread while this one waits."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._started()).result()

    async def invoke(self, function: Callable[..., Any], kwargs: Mapping[str, Any]) -> Any:
        """The answer of a user's function, plain or async; to be awaited in the tool thread.

        Raises:
            ToolsStuckError: too many calls of plain functions were given up and still run.
        """
        if inspect.iscoroutinefunction(function):
            return await function(**kwargs)
        self._require_room()
        answered: Future[Any] = Future()
        thread = threading.Thread(
            target=_deliver, args=(answered, functools.partial(function, **kwargs)), name="quadriga-tool", daemon=True
        )
        thread.start()
        try:
            answer = await asyncio.wrap_future(answered)
        except asyncio.CancelledError:
            self._given_up.add(thread)
            raise
        return await answer if inspect.isawaitable(answer) else answer

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
        self._loop = self._thread = self._places = None

    def _started(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._places = asyncio.Semaphore(MAX_CALLS)
            self._thread = threading.Thread(target=self._loop.run_forever, name="quadriga-tools", daemon=True)
            self._thread.start()
        return self._loop

    async def _limited(self, coroutine: Coroutine[Any, Any, T], limit_s: float | None) -> T:
        assert self._places is not None
        async with self._places:
            task = asyncio.ensure_future(coroutine)
            try:
                done, _ = await asyncio.wait({task}, timeout=limit_s)
            except asyncio.CancelledError:
                task.cancel()
                raise
            if not done:
                task.cancel()
                raise TimeoutError(f"no answer within {limit_s:g} s")
            return task.result()

    def _require_room(self) -> None:
        if self.num_given_up < MAX_GIVEN_UP:
            return
        raise ToolsStuckError(
            "tools",
            got=f"{self.num_given_up} calls that run on after actor_rollout_ref.rollout.multi_turn.tool_timeout_s",
            expected="tools that end",
            fix="Give the tool a time limit of its own, or let it do its work in a process that it can kill.",
        )


def _deliver(answered: "Future[Any]", function: Callable[[], Any]) -> None:
    with _Delivery(answered):
        answer = function()
        if not answered.done():
            answered.set_result(answer)


class _Delivery:
    """What is raised inside goes to whoever awaits the answer; it is nobody's where the call was given up."""

    def __init__(self, answered: "Future[Any]") -> None:
        self._answered = answered

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> bool:
        if error is not None and not self._answered.done():
            # A tool may call sys.exit; inside a future that would end the loop instead of the call.
            is_plain = isinstance(error, Exception)
            self._answered.set_exception(error if is_plain else RuntimeError(f"{type(error).__name__}: {error}"))
        return True


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    if others:
        await asyncio.wait(others, timeout=CLOSING_S)
