# SPDX-License-Identifier: Apache-2.0
"""Tools of MCP servers (Model Context Protocol), over standard input and output or over HTTP.

    tool thread:   _serve() ── connects ── lists the tools ── waits ─────────────────────── closes
                                               │                  ▲ call_tool, from any conversation
    caller:        connect() waits for the list, at most START_S  └ session, shared by all of them

The task of `_serve` runs until `close` is called or the server ends.

The standard error of a server goes to a file. Errors about the server show its last lines.
Only this file imports the package `mcp` (an extra), and only if a server is configured.
"""

import asyncio
import contextlib
import os
import socket
import sys
import tempfile
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

from quadriga.config.multi_turn import ServerEntry, read_tool_file
from quadriga.errors import RolloutError
from quadriga.http_client import PROXY_FIX, direct_client, is_loopback, proxy_route, proxy_trouble
from quadriga.rollout.agent_loop.tool_calls import ToolThread
from quadriga.rollout.agent_loop.tools import (
    ToolError,
    ToolSpec,
    as_tool,
    function_schema,
    validator_of,
)

START_S = 60.0  # time limit for the start of a server, and for its end
# Time limits of requests over HTTP, the same as those of the package `mcp`.
CONNECT_TIMEOUT_S = 30.0
READ_TIMEOUT_S = 300.0
LEAST_VERSION = 2  # of the package `mcp`

_SHOWN_BYTES = 1500  # of a server's standard error, in an error


@dataclass
class Server:
    """An MCP server. Its methods run in the tool thread."""

    name: str  # name in the file of tools
    entry: ServerEntry  # entry in the file of tools: a program to start, or a URL to reach
    folder: Path  # working directory of the program, if the entry has none
    log: Path  # file for the standard error of the program
    package: Any  # the module `mcp`
    session: Any = None  # `mcp.ClientSession`, once connected
    task: asyncio.Task[None] | None = None  # runs `_serve`, which holds the connection open
    closing: asyncio.Event = field(default_factory=asyncio.Event)  # ends `task` when it is set

    async def connect(self) -> list[ToolSpec]:
        """Start or reach the server, and return its tools.

        Raises:
            RolloutError: the server does not respond, or lacks a tool that the file names.
        """
        # Both are texts for the error: the proxy through which the URL is reached, "" without one;
        # and why this process cannot use proxies, "" if it can.
        route = proxy_route(self.entry.url) if self.entry.url else ""
        trouble = proxy_trouble() if route else ""
        if trouble:
            raise self._error(f"{trouble}, through {route}", "a proxy that can be used", PROXY_FIX)
        # `_serve` sets the result to the server's tools.
        tools_future: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()
        self.task = asyncio.ensure_future(self._serve(tools_future))
        await asyncio.wait(
            {self.task, tools_future}, timeout=START_S, return_when=asyncio.FIRST_COMPLETED
        )
        if not tools_future.done():
            got = self._start_failure(self.task)
            self.task.cancel()
            command = self.entry.url or " ".join([self.entry.command or "", *self.entry.args])
            raise self._error(got, "a server of tools", f"Try it alone: {command}.")

        # The file of tools may select some of the server's tools.
        tools = tools_future.result()
        server_names = [tool.name for tool in tools]
        selected_names = server_names if self.entry.tools is None else self.entry.tools
        missing = [name for name in selected_names if name not in server_names]
        if missing or not selected_names:
            raise RolloutError(
                f"MCP server {self.name}, tools",
                got=", ".join(missing) or "none",
                expected=f"some of {', '.join(server_names) or 'none: it has no tools'}",
                fix="Correct `tools` of this server in the file of tools.",
            )
        return [self._spec_of(tool) for tool in tools if tool.name in selected_names]

    async def close(self) -> None:
        """End the connection, and the program if it was started."""
        if self.task is not None:
            self.closing.set()
            await asyncio.wait({self.task}, timeout=START_S)

    @staticmethod
    def _start_failure(task: "asyncio.Task[None]") -> str:
        """Say why a server has not listed its tools: the error of its task, or the time limit."""
        cause = task.exception() if task.done() and not task.cancelled() else None
        # anyio wraps the error in groups, one for each task group of the package.
        while isinstance(cause, BaseExceptionGroup):
            cause = cause.exceptions[0]
        return f"{type(cause).__name__}: {cause}" if cause else f"no response within {START_S:g} s"

    def _spec_of(self, tool: Any) -> ToolSpec:
        """Describe a tool of the server as a tool of the configuration."""
        parameters = dict(tool.input_schema)
        parameters.pop("title", None)
        parameters.pop("$schema", None)
        description = tool.description or tool.title or tool.name
        schema = function_schema(tool.name, description, parameters)
        # The objects of conversations have no state, since they share the session of the server.
        make = as_tool(partial(self._call_tool, tool.name))
        return ToolSpec(make, schema, validator_of(parameters), options={})

    async def _call_tool(self, tool: str, /, **arguments: Any) -> str:
        """Call a tool of the server, and return its response as text.

        Raises:
            ToolError: the tool refused the call.
            RolloutError: the server ended, or the call failed.
        """
        if self.task is None or self.task.done():
            raise self._error("a server that has ended", "one that runs")
        call = asyncio.ensure_future(self.session.call_tool(tool, arguments))
        try:
            # If the server ends, the call would wait forever. `self.task` then ends, too.
            await asyncio.wait({call, self.task}, return_when=asyncio.FIRST_COMPLETED)
            if not call.done():
                raise self._error(f"the end of the server during a call of {tool}", "a response")
            error = call.exception()
            if error:
                raise self._error(f"{type(error).__name__}: {error}", "a response") from error
            result = call.result()
        finally:
            call.cancel()
        texts = []
        for block in result.content:
            text = getattr(block, "text", None)
            texts.append(text if isinstance(text, str) else f"[{block.type}, which is not text]")
        response = "\n".join(texts)
        if result.is_error:
            raise ToolError(f"{tool}: {response}")
        return response

    async def _serve(self, tools_future: "asyncio.Future[list[Any]]") -> None:
        """Keep the connection open until `close` is called.

        The package requires that the same task opens and closes it.

        Args:
            tools_future: future that gets the server's tools.
        """
        async with contextlib.AsyncExitStack() as stack:
            if self.entry.url is None:
                transport = self._start_program(stack)
            else:
                # None: the package makes a client, which uses the proxies of the environment. A
                # server on this machine is reached without them.
                client = None
                if is_loopback(self.entry.url):
                    client = await stack.enter_async_context(
                        direct_client(CONNECT_TIMEOUT_S, READ_TIMEOUT_S)
                    )
                connect = import_module("mcp.client.streamable_http").streamable_http_client
                transport = connect(self.entry.url, http_client=client)
            streams = await stack.enter_async_context(transport)
            session = self.package.ClientSession(streams[0], streams[1])
            self.session = await stack.enter_async_context(session)
            await self.session.initialize()
            response = await self.session.list_tools()
            tools_future.set_result(list(response.tools))
            await self.closing.wait()

    def _start_program(self, stack: contextlib.AsyncExitStack) -> Any:
        """Return a transport to the program, which starts when the transport is entered."""
        entry = self.entry
        environment = {name: os.environ.get(name, "") for name in ("PATH", "PYTHONPATH")}
        parameters = self.package.StdioServerParameters(
            # "python" means the interpreter of this process, which has the same packages.
            command=sys.executable if entry.command == "python" else entry.command,
            args=entry.args,
            env=environment | entry.env,
            cwd=entry.cwd or str(self.folder),
        )
        self.log.parent.mkdir(parents=True, exist_ok=True)
        # Only readable for the user, because a server may print secrets of its environment.
        self.log.touch(0o600)
        log = stack.enter_context(self.log.open("a", encoding="utf-8"))
        return import_module("mcp.client.stdio").stdio_client(parameters, errlog=log)

    def _error(self, got: str, expected: str, fix: str = "") -> RolloutError:
        """Make an error about the server, with the end of the program's standard error as advice.

        Args:
            got: what happened.
            expected: what was expected instead.
            fix: advice, which the lines of standard error follow. "": only these lines.
        """
        if self.log.is_file():
            tail = self.log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace").strip()
            fix = f"{fix} Its standard error ({self.log}) ends with:\n{tail or 'nothing'}\n"
        return RolloutError(f"MCP server {self.name}", got, expected, fix)


def server_tools(path: str, thread: ToolThread, log_dir: Path | None) -> list[ToolSpec]:
    """Start or reach the MCP servers of a YAML file, and return their tools.

    Args:
        path: the file of tools.
        thread: the thread in which the servers are reached, and which stops them when it is closed.
        log_dir: folder for the standard error of each program, `mcp-NAME.HOST-PID.log`. None: a
            temporary folder.

    Returns:
        The tools, in the order of the servers.

    Raises:
        ConfigError: the file is invalid.
        RolloutError: the package `mcp` is missing or too old, or a server cannot be reached.
    """
    entries = read_tool_file(path).mcp_servers
    tools = []
    if not entries:
        return tools
    where = "mcp_servers"
    try:
        package = import_module("mcp")
    except ImportError as error:
        fix = "Install it: pip install -e '.[mcp]', or leave the servers out."
        raise RolloutError(where, got=str(error), expected="the package mcp", fix=fix) from error
    installed = version("mcp")
    if int(installed.partition(".")[0]) < LEAST_VERSION:
        raise RolloutError(where, f"mcp {installed}", expected=f"mcp {LEAST_VERSION} or later")
    folder = Path(path).expanduser().resolve().parent
    if log_dir is None:
        log_dir = Path(tempfile.mkdtemp(prefix="quadriga-"))
    for name, entry in entries.items():
        # Each process starts its own servers, and all of them may write to the same folder.
        process = f"{socket.gethostname()}-{os.getpid()}"
        log = log_dir / f"mcp-{name.replace(os.sep, '_')}.{process}.log"
        server = Server(name, entry, folder, log, package)
        thread.servers.append(server)
        tools += thread.submit(server.connect()).result()
    return tools
