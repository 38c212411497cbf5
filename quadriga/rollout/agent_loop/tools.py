# SPDX-License-Identifier: Apache-2.0
"""Tools that a model may call: functions, and classes whose objects live as long as a conversation.

    @function_tool                                  class Account(Tool):
    def add(a: int, b: int) -> int:                     '''A bank account of one's own.'''
        '''Add two numbers.'''
        return a + b                                    def create(self, balance: int = 0) -> None:
                                                            self.balance = balance

                                                        def execute(self, amount: int) -> str:
                                                            '''Pay in.

                                                            Args:
                                                                amount: how much.
                                                            '''
                                                            self.balance += amount
                                                            return f"You have {self.balance}."

Either may be `async`. An answer that is text is taken as it is, bytes are decoded, anything else is written as JSON.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, TypeVar, overload

from quadriga.errors import RolloutError
from quadriga.rollout.agent_loop.tool_schema import Signature, options_of, signature_of

Function = TypeVar("Function", bound=Callable[..., Any])
SIGNATURE = "quadriga_tool"


class ToolError(RolloutError):
    """Raised by a tool whose caller is to read why: the message is the tool's answer, and the conversation goes on.

    Anything else that a tool raises ends the conversation.
    """


@overload
def function_tool(function: Function) -> Function: ...
@overload
def function_tool(*, name: str = "", description: str = "") -> Callable[[Function], Function]: ...
def function_tool(function: Function | None = None, *, name: str = "", description: str = "") -> Any:
    """Decorator: offers a function to the model; it can still be called as before.

    Args:
        function: with a type hint for each argument, and a docstring. What follows a `*` is hidden from the model and
            comes from `tools_kwargs[NAME]["execute_kwargs"]` of a sample.
        name: by which the model calls it; "": the function's.
        description: what the model reads; "": the docstring up to its first section.

    Raises:
        RolloutError: the function cannot be a tool; the error says why.
    """
    if function is None:
        return lambda decorated: _mark(decorated, name, description)
    return _mark(function, name, description)


def _mark(function: Function, name: str, description: str) -> Function:
    setattr(function, SIGNATURE, signature_of(function, name=name, description=description))
    return function


class Tool(ABC):
    """A tool with state. A conversation that may call it gets an object of its own.

    Its name is the class's, in small letters, unless `name` says otherwise; what the model reads is made of `execute`'s
    type hints and docstring. `options` of the configuration file are arguments of `__init__`. Every method may be
    `async`; the `*_kwargs` of a sample's `tools_kwargs` add keyword arguments to the method of that name.
    """

    name: ClassVar[str] = ""

    def create(self) -> Any:
        """Begins a conversation."""
        return None

    @abstractmethod
    def execute(self, *args: Any, **kwargs: Any) -> Any:
        """The answer to one call; its parameters are what the model writes."""

    def calc_reward(self) -> Any:
        """What the use of the tool earned, a number or None; asked once, at the end."""
        return None

    def release(self) -> Any:
        """Gives back what `create` took; called once, however the conversation ended."""
        return None


class ToolSession(Protocol):
    """A tool in one conversation: functions, objects and servers all look like this to a loop."""

    async def start(self) -> None:
        """Called before the first turn."""
        ...

    async def call(self, arguments: dict[str, Any]) -> Any:
        """The answer to checked arguments."""
        ...

    async def reward(self) -> float | None:
        """See `Tool.calc_reward`."""
        ...

    async def end(self) -> None:
        """Called once, if it was started."""
        ...


class ToolSource(Protocol):
    """A tool of the configuration, from which each conversation takes a session.

    Attributes:
        signature: what the model reads and may write.
    """

    @property
    def signature(self) -> Signature:
        """See the class."""
        ...

    def open(self, kwargs: Mapping[str, Any]) -> ToolSession:
        """A session for a sample.

        Args:
            kwargs: what its `tools_kwargs` say of this tool.

        Raises:
            RolloutError: they name what the tool does not have.
        """
        ...


@dataclass(frozen=True)
class FunctionSource:
    """A function as a tool."""

    function: Callable[..., Any]
    signature: Signature
    invoke: Callable[..., Any]
    """Calls user code: `await invoke(function, kwargs)`; see `ToolThread.invoke`."""

    def open(self, kwargs: Mapping[str, Any]) -> "FunctionSession":
        """See `ToolSource.open`."""
        given = methods_kwargs(self.signature.name, kwargs, ("execute_kwargs",))["execute_kwargs"]
        options = options_of(self.function)
        unknown = [] if "**" in options else sorted(set(given) - options)
        if unknown:
            raise RolloutError(
                f"tools_kwargs.{self.signature.name}.execute_kwargs",
                got=", ".join(unknown),
                expected=f"one of {', '.join(sorted(options))}" if options else "nothing",
                fix="What tools_kwargs may set stands after a `*` in the function's parameters.",
            )
        return FunctionSession(self, given)


@dataclass(frozen=True)
class FunctionSession:
    """A function in one conversation: it keeps nothing."""

    source: FunctionSource
    options: Mapping[str, Any]

    async def start(self) -> None:
        """See `ToolSession.start`."""

    async def call(self, arguments: dict[str, Any]) -> Any:
        """See `ToolSession.call`."""
        return await self.source.invoke(self.source.function, {**arguments, **self.options})

    async def reward(self) -> float | None:
        """See `ToolSession.reward`."""
        return None

    async def end(self) -> None:
        """See `ToolSession.end`."""


@dataclass(frozen=True)
class ClassSource:
    """A class as a tool."""

    cls: type[Tool]
    options: Mapping[str, Any]
    signature: Signature
    invoke: Callable[..., Any]

    def open(self, kwargs: Mapping[str, Any]) -> "ObjectSession":
        """See `ToolSource.open`."""
        methods = ("create_kwargs", "execute_kwargs", "calc_reward_kwargs", "release_kwargs")
        return ObjectSession(self, methods_kwargs(self.signature.name, kwargs, methods))


class ObjectSession:
    """An object of a tool's class in one conversation."""

    def __init__(self, source: ClassSource, kwargs: Mapping[str, Mapping[str, Any]]) -> None:
        self._source, self._kwargs = source, kwargs
        self._tool: Tool | None = None

    async def start(self) -> None:
        """See `ToolSession.start`."""
        self._tool = await self._source.invoke(self._source.cls, dict(self._source.options))
        await self._run("create")

    async def call(self, arguments: dict[str, Any]) -> Any:
        """See `ToolSession.call`."""
        return await self._run("execute", arguments)

    async def reward(self) -> float | None:
        """See `ToolSession.reward`."""
        earned = await self._run("calc_reward")
        return None if earned is None else float(earned)

    async def end(self) -> None:
        """See `ToolSession.end`."""
        if self._tool is not None:
            await self._run("release")

    async def _run(self, method: str, arguments: Mapping[str, Any] | None = None) -> Any:
        kwargs = {**(arguments or {}), **self._kwargs[f"{method}_kwargs"]}
        return await self._source.invoke(getattr(self._tool, method), kwargs)


def methods_kwargs(name: str, kwargs: Mapping[str, Any], methods: tuple[str, ...]) -> dict[str, dict[str, Any]]:
    """What a sample's `tools_kwargs` say of a tool, by method; "METHOD_kwargs" -> keyword arguments.

    A column of a parquet file gives each row the keys of all; those without a value were never meant.

    Raises:
        RolloutError: a key that is not in `methods`, or a value that is no mapping.
    """
    given = {key: value for key, value in kwargs.items() if value is not None}
    for key, value in given.items():
        if key not in methods or not isinstance(value, Mapping):
            raise RolloutError(
                f"tools_kwargs.{name}",
                got=f"{key}={value!r}"[:200],
                expected=f"{' or '.join(methods)} with keyword arguments",
                fix="Correct extra_info.tools_kwargs of the row.",
            )
    return {key: {k: v for k, v in given.get(key, {}).items() if v is not None} for key in methods}
