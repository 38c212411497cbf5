# SPDX-License-Identifier: Apache-2.0
"""One call, whatever the tool does: an answer, a refusal that the model reads, or a failure with its reason."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from quadriga.config.multi_turn import MultiTurnConfig
from quadriga.errors import RolloutError
from quadriga.rollout.agent_loop import Interaction, Reply, ToolError, tool_calls
from quadriga.rollout.agent_loop.interactions import UserSimulator
from quadriga.rollout.agent_loop.parsers import ToolCall
from quadriga.rollout.agent_loop.tool_calls import (
    MARK,
    ConversationOver,
    ToolBox,
    ToolFailedError,
    ToolResult,
    ToolsStuckError,
    ToolThread,
    truncate,
)
from quadriga.rollout.agent_loop.tools import Tool, ToolSpec, describe, function_spec
from tests.limits import HANGS_S, SOON_S

Answer = Callable[..., ToolResult]


@pytest.fixture
def thread() -> Iterator[ToolThread]:
    """A tool thread of the test."""
    thread = ToolThread()
    yield thread
    thread.close()


@pytest.fixture
def answer(thread: ToolThread) -> Answer:
    """`answer(function, **arguments)`: what the model reads when it calls the function."""

    def ask(
        function: Callable[..., Any], config: dict[str, Any] | None = None, **arguments: Any
    ) -> ToolResult:
        spec = function_spec(function, name="act", description="Acts.")
        settings = MultiTurnConfig.model_validate(config or {})

        async def call() -> ToolResult:
            async with ToolBox({"act": spec}, {}, settings, thread) as box:
                return (await box.call_all([ToolCall("act", arguments)]))[0]

        return asyncio.run(call())

    return ask


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("grün", "grün"),
        (None, "null"),
        (3.5, "3.5"),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        (b"gr\xc3\xbcn", "grün"),
        (b"\xff\xfe!", "\ufffd\ufffd!"),
        ("half a pair \ud83d", "half a pair ?"),
        ("", ""),
        (complex(1, 2), '"(1+2j)"'),
    ],
)
def test_answers_become_text(answer: Answer, value: Any, text: str) -> None:
    """Text as it is, bytes decoded, anything else as JSON."""
    assert answer(lambda: value).text == text


def test_async_functions_are_awaited(answer: Answer) -> None:
    """An async function is a tool like any other."""

    async def act(word: str) -> str:
        await asyncio.sleep(0)
        return word * 2

    assert answer(act, word="ha").text == "haha"


def test_ten_megabytes_are_cut(answer: Answer) -> None:
    """The model reads the beginning and the end; the record says how much there was."""
    told = answer(lambda: "a" * 5_000_000 + "b" * 5_000_000, {"max_tool_response_length": 100})
    assert len(told.text) == 100
    assert told.text.startswith("aaa") and told.text.endswith("bbb") and MARK in told.text
    assert told.num_chars == 10_000_000


@given(st.text(max_size=60), st.integers(1, 60), st.sampled_from(["left", "middle", "right"]))
def test_truncation(text: str, limit: int, side: Any) -> None:
    """Never longer than the limit; what fits stays; what is kept stands at the right end."""
    cut = truncate(text, limit, side)
    assert len(cut) == min(len(text), limit)
    if len(text) <= limit:
        assert cut == text
    elif limit < 2 * len(MARK):
        kept = {"left": text[-limit:], "right": text[:limit]}
        assert side == "middle" or cut == kept[side]


def test_a_tool_that_raises(answer: Answer) -> None:
    """The failure says which tool, which arguments, what it raised, and keeps the traceback."""

    def act(a: int) -> float:
        return a / 0

    with pytest.raises(ToolFailedError) as raised:
        answer(act, a=7)
    assert str(raised.value).startswith('act({"a": 7}): got ZeroDivisionError: division by zero')
    assert "return a / 0" in raised.value.details


def test_a_tool_that_exits(answer: Answer) -> None:
    """sys.exit in a tool ends the call, not the program."""

    def act() -> None:
        raise SystemExit(3)

    with pytest.raises(ToolFailedError, match="SystemExit: 3"):
        answer(act)


def test_a_tool_error_is_for_the_model(answer: Answer) -> None:
    """ToolError is an answer."""

    def act() -> None:
        raise ToolError("there is no such city")

    told = answer(act)
    assert told.is_refused and told.text == "Error: there is no such city."


@pytest.mark.parametrize("is_async", [True, False])
def test_a_tool_that_hangs(answer: Answer, is_async: bool) -> None:
    """It is given up in time, whether it can be stopped or not, and the failure names the limit."""
    release = threading.Event()

    async def act_async() -> None:
        await asyncio.sleep(HANGS_S)

    def act() -> None:
        release.wait(HANGS_S)

    with pytest.raises(ToolFailedError, match=r"act.*no response within 0.2 s.*tool_timeout_s"):
        answer(act_async if is_async else act, {"tool_timeout_s": 0.2})
    release.set()


def test_too_many_hanging_tools_stop_the_run(
    answer: Answer, thread: ToolThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Threads that nobody can end do not pile up for ever; those that end in time are forgotten."""
    monkeypatch.setattr(tool_calls, "MAX_GIVEN_UP", 2)
    release = threading.Event()
    for _ in range(2):
        with pytest.raises(ToolFailedError):
            answer(lambda: release.wait(HANGS_S), {"tool_timeout_s": 0.1})
    assert thread.num_given_up == 2
    with pytest.raises(ToolsStuckError, match="2 calls that run on"):
        answer(lambda: 1)
    release.set()
    for _ in range(100):
        if thread.num_given_up == 0:
            break
        time.sleep(0.05)
    assert answer(lambda: 1).text == "1"


def test_the_limit_is_not_charged_for_a_blocked_loop(thread: ToolThread) -> None:
    """An engine that blocks the loop of the conversations does not make a quick tool late."""

    async def quick() -> int:
        await asyncio.sleep(0.01)
        return 1

    async def main() -> int:
        asking = asyncio.ensure_future(thread.call("quick", quick, {}, limit_s=0.3))
        await asyncio.sleep(0)
        time.sleep(0.6)  # the engine
        return await asking

    assert asyncio.run(main()) == 1


@pytest.mark.parametrize(
    ("call", "expected"),
    [
        (ToolCall("", problem="the tool call is not JSON"), "the tool call is not JSON"),
        (ToolCall("acts"), "got the name 'acts', expected one of act. Did you mean 'act'?"),
        (ToolCall("zzz"), "got the name 'zzz', expected one of act."),
        (ToolCall("act", {"b": 1}), "b: Extra inputs are not permitted"),
    ],
)
def test_mistakes_of_the_model(thread: ToolThread, call: ToolCall, expected: str) -> None:
    """A call that cannot be made is answered with what is wrong; the tool is not called."""

    def act() -> None:
        """Acts."""
        raise AssertionError

    settings = MultiTurnConfig(max_tool_response_length=1000)
    box = ToolBox({"act": function_spec(act)}, {}, settings, thread)
    (told,) = asyncio.run(box.call_all([call]))
    assert told.is_refused and expected in told.text


def test_options_that_a_function_does_not_have(thread: ToolThread) -> None:
    """tools_kwargs may set what stands after the star, and nothing else."""

    def act(a: int, *, scale: int = 1) -> int:
        """Acts."""
        return a * scale

    def box(**kwargs: Any) -> ToolBox:
        return ToolBox({"act": function_spec(act)}, {"act": kwargs}, MultiTurnConfig(), thread)

    async def call() -> list[ToolResult]:
        async with box(execute_kwargs={"scale": 3, "absent": None}) as tools:
            return await tools.call_all([ToolCall("act", {"a": 2})])

    assert [told.text for told in asyncio.run(call())] == ["6"]
    with pytest.raises(
        RolloutError, match=r"tools_kwargs\.act\.execute_kwargs: got a, expected one of scale"
    ):
        box(execute_kwargs={"a": 3})
    with pytest.raises(RolloutError, match=r"tools_kwargs\.act: got scale=3"):
        box(scale=3)


class Grudging(Tool):
    """Refuses to begin, or to say what it earned."""

    def __init__(self, method: str, result: Any) -> None:
        self.method, self.result = method, result

    def create(self) -> None:
        """Fails if it is the one."""
        if self.method == "create":
            raise ToolError("no room")

    def execute(self) -> str:
        """Acts."""
        return "done"

    def calc_reward(self) -> Any:
        """What was given, whatever it is."""
        return self.result


@pytest.mark.parametrize(
    ("method", "result", "expected"),
    [
        ("create", None, "tool act, create: got ToolError: no room"),
        ("calc_reward", "much", "tool act, calc_reward: got 'much', expected a number"),
    ],
)
def test_what_fails_besides_a_call(
    thread: ToolThread, method: str, result: Any, expected: str
) -> None:
    """No model reads it: it ends the conversation, never the run."""
    spec = ToolSpec(partial(Grudging, method, result), *describe(Grudging.execute, name="act"))

    async def use() -> dict[str, float]:
        async with ToolBox({"act": spec}, {}, MultiTurnConfig(), thread) as box:
            return await box.rewards()

    with pytest.raises(ToolFailedError, match=expected):
        asyncio.run(use())


class Unreleasable(Grudging):
    """Also fails when it is released."""

    def release(self) -> None:
        """Fails."""
        raise OSError("no account")


@pytest.mark.parametrize(
    ("method", "result", "expected"),
    [
        ("create", None, "tool act, create: got ToolError: no room"),
        ("calc_reward", "much", "tool act, calc_reward: got 'much'"),
    ],
)
def test_a_failing_release_does_not_hide_the_failure_before_it(
    thread: ToolThread, method: str, result: Any, expected: str
) -> None:
    """The first failure is what is to be mended; its details have the second one, too."""
    description = describe(Grudging.execute, name="act")
    spec = ToolSpec(partial(Unreleasable, method, result), *description)

    async def use() -> None:
        async with ToolBox({"act": spec}, {}, MultiTurnConfig(), thread) as box:
            await box.rewards()

    with pytest.raises(ToolFailedError, match=expected) as caught:
        asyncio.run(use())
    assert "tool act, release: got OSError: no account" in caught.value.details
    assert method in caught.value.details


def test_a_failing_release_alone_is_the_failure(thread: ToolThread) -> None:
    """With two tools the first to be released, which is the last to be made, is named."""
    description = describe(Grudging.execute, name="act")
    spec = ToolSpec(partial(Unreleasable, "", 1), *description)

    async def use() -> None:
        async with ToolBox({"act": spec, "more": spec}, {}, MultiTurnConfig(), thread) as box:
            await box.rewards()

    with pytest.raises(ToolFailedError, match="tool more, release: got OSError") as caught:
        asyncio.run(use())
    assert "then tool act, release: got OSError" in caught.value.details


def test_a_failing_release_after_a_limit_is_the_failure(thread: ToolThread) -> None:
    """A conversation that reaches a limit has not failed."""
    spec = ToolSpec(partial(Unreleasable, "", 1), *describe(Grudging.execute, name="act"))

    async def use() -> None:
        async with ToolBox({"act": spec}, {}, MultiTurnConfig(), thread):
            raise ConversationOver("length")

    with pytest.raises(ToolFailedError, match="tool act, release: got OSError"):
        asyncio.run(use())


class Impolite(Interaction):
    """A user who cannot say goodbye."""

    async def generate_response(self, messages: list[dict[str, Any]]) -> Reply:
        raise ValueError(f"no answer to {len(messages)} messages")

    async def finalize_interaction(self) -> None:
        raise OSError("gone")


def test_a_failing_end_of_a_user_does_not_hide_the_failure_before_it(thread: ToolThread) -> None:
    async def use() -> None:
        async with UserSimulator({"user": Impolite}, {"name": "user"}, thread, SOON_S) as user:
            await user.reply([{"role": "user", "content": "hello"}])

    with pytest.raises(ToolFailedError, match="ValueError: no answer to 1 messages") as caught:
        asyncio.run(use())
    assert "finalize_interaction: got OSError: gone" in caught.value.details


async def _blocks() -> None:
    time.sleep(3)


async def _exits() -> None:
    raise SystemExit(3)


async def _responds() -> str:
    await asyncio.sleep(0)
    return "fine"


def test_an_async_function_that_blocks_or_exits_costs_its_own_call() -> None:
    """The thread that it blocks is given up, and named by where it hangs; the next call has another one."""
    thread = ToolThread()

    async def run() -> None:
        with pytest.raises(
            ToolFailedError,
            match=r"blocked all others for 0.2 s, at .*test_tool_calls.py:\d+ in _blocks",
        ):
            await thread.call("tool", _blocks, {}, 0.2)
        with pytest.raises(ToolFailedError, match="RuntimeError: SystemExit: 3"):
            await thread.call("tool", _exits, {}, 5)
        assert await thread.call("tool", _responds, {}, 5) == "fine"
        assert thread.num_given_up == 1

    asyncio.run(run())
    thread.close()


def test_a_tool_is_cancelled_before_it_is_released(thread: ToolThread) -> None:
    events: list[str] = []
    started = threading.Event()

    async def wait_long() -> None:
        started.set()
        try:
            await asyncio.sleep(HANGS_S)
        finally:
            events.append("cancelled")

    async def release() -> None:
        events.append("released")

    async def converse() -> None:
        try:
            await thread.call("tool", wait_long, {}, HANGS_S)
        finally:
            await thread.call("release", release, {}, SOON_S)

    async def cancel() -> None:
        conversation = asyncio.ensure_future(converse())
        await asyncio.to_thread(started.wait)
        conversation.cancel()
        await asyncio.wait({conversation})

    asyncio.run(cancel())
    assert events == ["cancelled", "released"]
