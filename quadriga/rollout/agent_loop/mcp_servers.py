# SPDX-License-Identifier: Apache-2.0
"""Tools of servers that speak the Model Context Protocol, over standard input and output or over HTTP.

    tool thread:   _serve() ── connects ── lists the tools ── waits ─────────────────────── closes
                                               │                  ▲ call_tool, from any conversation
    caller:        connect() waits for the list, at most START_S  └ session, shared by all of them

_serve  consumes an entry of the file; waits to be closed; unblocked by `close`, or by the end of the server.

What a server writes to its standard error goes to a file, whose last lines are part of each error of the server.
This is the one file that imports the package `mcp` (an extra), and only once a server is configured.
"""

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quadriga.config.multi_turn import ServerEntry, read_tool_file
from quadriga.errors import RolloutError
from quadriga.http_client import PROXY_FIX, direct_client, is_loopback, proxy_route, proxy_trouble
from quadriga.rollout.agent_loop.tool_calls import ToolThread
from quadriga.rollout.agent_loop.tools import ToolError, ToolSpec, as_tool, validator_of

START_S = 60.0
CONNECT_TIMEOUT_S, READ_TIMEOUT_S = 30.0, 300.0  # of the package itself
LEAST_VERSION = 2

_SHOWN_BYTES = 1500  # of a server's standard error, in an error


class Server:
    """An MCP server. Its methods run in the tool thread.
    `folder`: working directory of a program whose entry names none.
    `log`: takes the standard error of a program that is started."""

    def __init__(
        self, name: str, entry: ServerEntry, folder: Path, log: Path, package: Any
    ) -> None:
        self.name, self.entry, self.folder, self.log, self._package = (
            name,
            entry,
            folder,
            log,
            package,
        )
        self._session: Any = None
        self._task: asyncio.Task[None] | None = None
        self._closing = asyncio.Event()

    async def connect(self) -> list[ToolSpec]:
        """Starts or reaches the server and returns its tools.
        Raises RolloutError: it does not respond, or has no tool that the file names."""
        if (
            self.entry.url is not None
            and (route := proxy_route(self.entry.url))
            and (trouble := proxy_trouble())
        ):
            raise self._error(f"{trouble}, through {route}", "a proxy that can be used", PROXY_FIX)
        listed: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._serve(listed))
        await asyncio.wait(
            {self._task, listed}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not listed.done():
            cause = (
                self._task.exception() if self._task.done() and not self._task.cancelled() else None
            )
            while isinstance(cause, BaseExceptionGroup):
                cause = cause.exceptions[0]
            self._task.cancel()
            got = (
                f"{type(cause).__name__}: {cause}" if cause else f"no response within {START_S:g} s"
            )
            how = self.entry.url or " ".join([self.entry.command or "", *self.entry.args])
            raise self._error(got, "a server of tools", f"Try it alone: {how}.")
        names = [tool.name for tool in listed.result()]
        wanted = names if self.entry.tools is None else self.entry.tools
        missing = [name for name in wanted if name not in names]
        if missing or not wanted:
            expected = f"some of {', '.join(names) or 'none: it has no tools'}"
            raise RolloutError(
                f"MCP server {self.name}, tools",
                got=", ".join(missing) or "none",
                expected=expected,
            )
        specs = []
        for tool in listed.result():
            if tool.name in wanted:
                parameters = {
                    key: one
                    for key, one in tool.input_schema.items()
                    if key not in ("title", "$schema")
                }
                said = tool.description or tool.title or tool.name
                function = {"name": tool.name, "description": said, "parameters": parameters}
                # One object serves every conversation: the server keeps what state there is.
                make, schema = (
                    as_tool(partial(self._call, tool.name)),
                    {"type": "function", "function": function},
                )
                specs.append(ToolSpec(make, schema, validator_of(parameters), options={}))
        return specs

    async def close(self) -> None:
        """Ends the connection, and the program if it was started."""
        if self._task is not None:
            self._closing.set()
            await asyncio.wait({self._task}, timeout=START_S)

    async def _call(self, tool: str, /, **arguments: Any) -> str:
        """The response of a tool, as text; ToolError: the tool says that the call was wrong."""
        if self._task is None or self._task.done():
            raise self._error("a server that has ended", "one that runs")
        call = asyncio.ensure_future(self._session.call_tool(tool, arguments))
        try:
            await asyncio.wait({call, self._task}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._error(f"its end during a call of {tool}", "a response")
            if error := call.exception():
                raise self._error(f"{type(error).__name__}: {error}", "a response") from error
            result = call.result()
        finally:
            call.cancel()
        blocks = [(getattr(block, "text", None), block.type) for block in result.content]
        text = "\n".join(
            text if isinstance(text, str) else f"[{kind}, which is not text]"
            for text, kind in blocks
        )
        if result.is_error:
            raise ToolError(f"{tool}: {text}")
        return text

    async def _serve(self, listed: "asyncio.Future[list[Any]]") -> None:
        """Opens and closes the connection in one task, as the package demands."""
        entry, package = self.entry, self._package
        async with contextlib.AsyncExitStack() as stack:
            if entry.url is not None:
                client = None  # the package's own, which asks through the environment's proxies
                if is_loopback(entry.url):
                    client = await stack.enter_async_context(
                        direct_client(CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
                    )
                connect = import_module("mcp.client.streamable_http").streamable_http_client
                transport = connect(entry.url, http_client=client)
            else:
                own = {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH")}
                parameters = package.StdioServerParameters(
                    # "python" is the interpreter that runs us, wherever it lies.
                    command=sys.executable if entry.command == "python" else entry.command,
                    args=entry.args,
                    env={**own, **entry.env},
                    cwd=entry.cwd or str(self.folder),
                )
                self.log.parent.mkdir(parents=True, exist_ok=True)
                self.log.touch(0o600)  # a server may print what it was started with
                log = stack.enter_context(self.log.open("a", encoding="utf-8"))
                transport = import_module("mcp.client.stdio").stdio_client(parameters, errlog=log)
            streams = await stack.enter_async_context(transport)
            self._session = await stack.enter_async_context(
                package.ClientSession(streams[0], streams[1])
            )
            await self._session.initialize()
            listed.set_result(list((await self._session.list_tools()).tools))
            await self._closing.wait()

    def _error(self, got: str, expected: str, fix: str = "") -> RolloutError:
        if self.log.is_file():
            said = (
                self.log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").strip() or "nothing"
            )
            fix = f"{fix} Its standard error ({self.log}) ends with:\n{said}\n"
        return RolloutError(f"MCP server {self.name}", got=got, expected=expected, fix=fix)


def server_tools(
    path: str, thread: ToolThread, servers: list[Server], log_dir: Path | None
) -> list[ToolSpec]:
    """The tools of the servers in a YAML file; each server that is started or reached is added to `servers`.
    `log_dir`: takes the standard error of each program: `mcp-NAME.HOST-PID.log`. None: a temporary folder.
    Raises ConfigError: the file is not as it must be.
    Raises RolloutError: a server cannot be reached."""
    entries, tools = read_tool_file(path).mcp_servers, list[ToolSpec]()
    if not entries:
        return tools
    try:
        package = import_module("mcp")
    except ImportError as error:
        fix = "Install it: pip install -e '.[mcp]', or leave the servers out."
        raise RolloutError(
            "mcp_servers", got=str(error), expected="the package mcp", fix=fix
        ) from error
    installed = version("mcp")
    if int(installed.partition(".")[0]) < LEAST_VERSION:
        raise RolloutError(
            "mcp_servers", got=f"mcp {installed}", expected=f"mcp {LEAST_VERSION} or later"
        )
    folder, log_dir = (
        Path(path).expanduser().resolve().parent,
        log_dir or Path(tempfile.mkdtemp(prefix="quadriga-")),
    )
    for name, entry in entries.items():
        log = log_dir / f"mcp-{name.replace(os.sep, '_')}.{socket.gethostname()}-{os.getpid()}.log"
        servers.append(Server(name, entry, folder, log, package))
        tools += thread.submit(servers[-1].connect()).result()
    return tools
