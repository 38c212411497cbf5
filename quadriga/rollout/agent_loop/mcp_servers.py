# SPDX-License-Identifier: Apache-2.0
"""Tools of servers that speak the Model Context Protocol, over standard input and output or over HTTP.

    tool thread:   serve() ── connects ── lists the tools ── waits ─────────────────────── closes
                                              │                  ▲ call_tool, from any conversation
    opener:        waits for the list, at most START_S            └ session, shared by all of them

serve  consumes an entry of the file; waits to be closed; unblocked by `close`, or by the end of the server.

This is the one file that imports the package `mcp` (an extra), and only once a server is configured.
"""

import asyncio
import contextlib
import os
import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quadriga.config.tool_files import ServerEntry, read_tool_file
from quadriga.errors import RolloutError
from quadriga.rollout.agent_loop.tool_schema import Signature
from quadriga.rollout.agent_loop.tool_thread import ToolThread
from quadriga.rollout.agent_loop.tools import ToolError

START_S = 60.0
LEAST_VERSION = 2


class Server:
    """A server of tools that is connected.

    Args:
        name: of the server in its file.
        entry: how it is reached.
        folder: where a program is started that names no other.
    """

    def __init__(self, name: str, entry: ServerEntry, folder: Path) -> None:
        self.name, self.entry, self.folder = name, entry, folder
        self.where = f"MCP server {name}"
        self._session: Any = None
        self._task: asyncio.Task[None] | None = None
        self._closing: asyncio.Event | None = None

    async def connect(self) -> "list[ServerTool]":
        """Starts or reaches the server and returns its tools; runs in the tool thread.

        Raises:
            RolloutError: it does not answer, or has no tool that the file names.
        """
        self._closing = asyncio.Event()
        listed: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._serve(listed))
        await asyncio.wait({self._task, listed}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED)
        if not listed.done():
            raise self._not_reached()
        return self._chosen(listed.result())

    async def call(self, tool: str, arguments: dict[str, Any]) -> str:
        """The answer of a tool, as text.

        Raises:
            ToolError: the tool says that the call was wrong.
            RolloutError: the server has ended.
        """
        if self._task is None or self._task.done():
            raise RolloutError(self.where, got="a server that has ended", expected="one that runs")
        call = asyncio.ensure_future(self._session.call_tool(tool, arguments))
        try:
            await asyncio.wait({call, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise RolloutError(self.where, got=f"its end while it answered a call of {tool}")
            result = call.result()
        finally:
            call.cancel()
        text = "\n".join(_block_text(block) for block in result.content)
        if result.is_error:
            raise ToolError(f"{tool}: {text}")
        return text

    async def close(self) -> None:
        """Ends the connection, and the program if it was started."""
        if self._task is not None and self._closing is not None:
            self._closing.set()
            await asyncio.wait({self._task}, timeout=START_S)

    async def _serve(self, listed: "asyncio.Future[list[Any]]") -> None:
        """Opens and closes the connection in one task, as the package demands."""
        assert self._closing is not None
        async with contextlib.AsyncExitStack() as stack:
            streams = await stack.enter_async_context(self._transport())
            session = await stack.enter_async_context(_package().ClientSession(streams[0], streams[1]))
            await session.initialize()
            self._session = session
            listed.set_result(list((await session.list_tools()).tools))
            await self._closing.wait()

    def _transport(self) -> Any:
        entry = self.entry
        if entry.url is not None:
            return import_module("mcp.client.streamable_http").streamable_http_client(entry.url)
        # "python" is the interpreter that runs us, wherever it lies.
        command = sys.executable if entry.command == "python" else entry.command
        environment = {"PATH": os.environ.get("PATH", ""), "PYTHONPATH": os.environ.get("PYTHONPATH", ""), **entry.env}
        parameters = _package().StdioServerParameters(
            command=command, args=entry.args, env=environment, cwd=entry.cwd or str(self.folder)
        )
        return import_module("mcp.client.stdio").stdio_client(parameters)

    def _chosen(self, tools: list[Any]) -> "list[ServerTool]":
        names = [tool.name for tool in tools]
        wanted = names if self.entry.tools is None else self.entry.tools
        missing = [name for name in wanted if name not in names]
        if missing or not wanted:
            raise RolloutError(
                f"{self.where}, tools",
                got=", ".join(missing) or "none",
                expected=f"some of {', '.join(names) or 'none: it has no tools'}",
            )
        return [ServerTool(self, _signature(tool)) for tool in tools if tool.name in wanted]

    def _not_reached(self) -> RolloutError:
        assert self._task is not None
        cause = self._task.exception() if self._task.done() and not self._task.cancelled() else None
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        got = f"{type(cause).__name__}: {cause}" if cause else f"no answer within {START_S:g} s"
        self._task.cancel()
        how = self.entry.url or " ".join([self.entry.command or "", *self.entry.args])
        return RolloutError(self.where, got=got, expected="a server of tools", fix=f"Try it alone: {how}")


class ServerTool:
    """One tool of a server, for every conversation: the server keeps what state there is.

    Args:
        server: that has it.
        signature: as the server describes it.
    """

    def __init__(self, server: Server, signature: Signature) -> None:
        self.server, self.signature = server, signature

    def open(self, kwargs: Mapping[str, Any]) -> "ServerTool":
        """See `ToolSource.open`."""
        given = {key: value for key, value in kwargs.items() if value is not None}
        if given:
            raise RolloutError(
                f"tools_kwargs.{self.signature.name}",
                got=", ".join(given),
                expected="nothing: a server's tool has none",
            )
        return self

    async def start(self) -> None:
        """See `ToolSession.start`."""

    async def call(self, arguments: dict[str, Any]) -> str:
        """See `ToolSession.call`."""
        return await self.server.call(self.signature.name, arguments)

    async def reward(self) -> float | None:
        """See `ToolSession.reward`."""
        return None

    async def end(self) -> None:
        """See `ToolSession.end`."""


def server_tools(path: str, thread: ToolThread, servers: list[Server]) -> list[ServerTool]:
    """The tools of the servers in a YAML file. Each server that was reached is added to `servers`.

    Raises:
        ConfigError: the file is not as it must be.
        RolloutError: a server cannot be reached.
    """
    folder = Path(path).expanduser().resolve().parent
    tools: list[ServerTool] = []
    for name, entry in read_tool_file(path).mcp_servers.items():
        _package()
        server = Server(name, entry, folder)
        servers.append(server)
        tools += thread.wait(server.connect())
    return tools


def _package() -> Any:
    try:
        package = import_module("mcp")
    except ImportError as error:
        raise RolloutError(
            "mcp_servers", got=str(error), expected="the package mcp", fix="Install quadriga[mcp], or leave them out."
        ) from error
    installed = version("mcp")
    if int(installed.partition(".")[0]) < LEAST_VERSION:
        raise RolloutError("mcp_servers", got=f"mcp {installed}", expected=f"mcp {LEAST_VERSION} or later")
    return package


def _signature(tool: Any) -> Signature:
    parameters = {key: value for key, value in tool.input_schema.items() if key not in ("title", "$schema")}
    described = {
        "name": tool.name,
        "description": tool.description or tool.title or tool.name,
        "parameters": parameters,
    }
    return Signature({"type": "function", "function": described})


def _block_text(block: Any) -> str:
    text = getattr(block, "text", None)
    return text if isinstance(text, str) else f"[{block.type}, which is not text]"
