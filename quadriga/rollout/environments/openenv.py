# SPDX-License-Identifier: Apache-2.0
"""Environments behind a server of OpenEnv, over its WebSocket.

    GET /schema                                     JSON schema of an action
    {"type": "reset", "data": {"seed": 7}}    ──>   {"type": "observation", "data": {observation, reward, done}}
    {"type": "step", "data": ACTION}          ──>   the same, or {"type": "error", "data": {message, code}}

A server of MCP tools lists them in reply to the action `list_tools`, and the model calls them as tools. With any other
server the model replies with JSON, which the server checks against the schema.
"""

import inspect
import json
import os
import random
import time
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from typing import Any

from quadriga.errors import RolloutError
from quadriga.http_client import HTTPClient, ServerLostError
from quadriga.rollout.agent_loop.tools import function_schema
from quadriga.rollout.environments.interface import (
    Action,
    EnvironmentSpec,
    Step,
    TextEnvironment,
    random_value,
)
from quadriga.rollout.environments.libraries import import_library, read_json
from quadriga.rollout.environments.user_classes import as_observation

_MAX_MESSAGE_BYTES = 64 << 20
_CONNECT_S = 20.0
# A server may hold the session of an ended episode for a moment, and refuse new sessions meanwhile.
_FULL = "CAPACITY_REACHED"  # code of this refusal
_MAX_WAIT_S = 10.0  # time during which a refused request is sent again
_PAUSE_S = 0.1  # pause before it is sent again
# Codes of errors that say what is wrong with an action. All other errors are the server's own.
_REFUSALS = frozenset({"VALIDATION_ERROR", "INVALID_JSON"})
# Fields of an observation that the model does not read.
_HIDDEN = frozenset({"reward", "done", "metadata"})


class OpenEnvEnvironment(TextEnvironment):
    """Adapter of a server of OpenEnv. Each object has its own session on the server.

    Args:
        spec: the environment; its options are arguments of every reset.
        url: address of the server, `ws://HOST:PORT` or `wss://HOST:PORT`.

    Raises:
        RolloutError: the server cannot be reached, or redirects.
        MachineError: the package websockets is not installed.
    """

    def __init__(self, spec: EnvironmentSpec, url: str) -> None:
        self._where = f"environment {spec.name}"
        self._url = url.rstrip("/").removesuffix("/ws")
        self._options = dict(spec.options)
        if not self._url.startswith(("ws://", "wss://")):
            raise RolloutError("env.name", got=repr(url), expected="openenv:ws://HOST:PORT")
        self._action_schema: Mapping[str, Any] = {}
        # The schema comes over HTTP from the same address: ws:// becomes http://, wss:// https://.
        client = HTTPClient(
            f"http{self._url.removeprefix('ws')}",
            RolloutError,
            setting="env.name",
            where=self._where,
            fix="Redirects are not followed: name the server's own address in env.name.",
            timeout_s=_CONNECT_S,
        )
        try:
            schema = client.call("schema", method="GET")["action"]
        except ServerLostError as error:
            raise self._failure(f"no answer ({error})") from error
        self._session = ExitStack()
        self._socket = self._connect()
        # An action with these fields is a call of a tool.
        if schema.get("properties", {}).keys() >= {"tool_name", "arguments"}:
            self.schemas = self._list_tools()
        else:
            self._action_schema = _shorten_schema(schema)

    def reset(self, seed: int, row: Mapping[str, Any]) -> Step:
        """Begin an episode. The first observation also shows the schema of actions, if any.

        Args:
            seed: seed of the episode.
            row: columns of the data row; empty if the row is only a seed.
        """
        # A server refuses arguments that its environment does not know, and not all know seeds.
        reply = self._ask("reset", {"seed": seed, **self._options})
        if reply["type"] == "error":
            reply = self._ask("reset", self._options)
        step = self._step_of(reply, is_first=True)
        if not self._action_schema:
            return step
        # Without tools, the prompt must say how an action is written.
        schema = json.dumps(self._action_schema)
        text = f"{step.text}\nReply with JSON that fits the schema {schema}, and nothing else."
        return Step(text.strip(), info=step.info)

    def step(self, action: Action) -> Step:
        """Send an action. If the server refuses it, the model reads the reason."""
        # The action is a call of a tool, or else the model's text, which should be JSON.
        if isinstance(action, dict):
            call = {"tool_name": action["name"], "arguments": action["arguments"]}
            data = {"type": "call_tool", **call}
        else:
            try:
                data = read_json(action)
                if not isinstance(data, dict):
                    raise ValueError("expected a JSON object")
            except ValueError as error:
                return Step(f"Error: {error}", info={"is_invalid": True})
        reply = self._ask("step", data)
        if reply["type"] == "error" and reply["data"].get("code") in _REFUSALS:
            reasons = [str(reply["data"].get("message", ""))]
            for problem in reply["data"].get("errors", ()):
                if isinstance(problem, dict):
                    reasons.append(f"{problem.get('loc')}: {problem.get('msg')}")
            return Step(f"Error: {'; '.join(reasons)}", info={"is_invalid": True})
        return self._step_of(reply)

    def sample_action(self, text: str, generator: random.Random) -> Action:
        if self._action_schema:
            return json.dumps(random_value(self._action_schema, generator))
        return super().sample_action(text, generator)

    def finish(self) -> Step:
        self.discard()
        return Step()

    def discard(self) -> None:
        self._session.close()

    def _connect(self) -> Any:
        """Open the WebSocket of the session, which `discard` closes."""
        # websockets would follow redirects to other hosts. Its limit counts the first connection,
        # too, so that 1 allows no redirect.
        os.environ["WEBSOCKETS_MAX_REDIRECTS"] = "1"
        # First by itself, so that the error of a missing package names the package.
        import_library("websockets")
        client = import_library("websockets.sync.client")
        options: dict[str, Any] = {"max_size": _MAX_MESSAGE_BYTES, "open_timeout": _CONNECT_S}
        # websockets 15 and later would use the proxy of the environment.
        if "proxy" in inspect.signature(client.connect).parameters:
            options["proxy"] = None
        try:
            return self._session.enter_context(client.connect(f"{self._url}/ws", **options))
        except Exception as error:
            # A failed handshake raises errors of websockets, of TLS or of the system.
            raise self._failure(f"no WebSocket ({type(error).__name__}: {error})") from error

    def _list_tools(self) -> list[Mapping[str, Any]]:
        """Ask the server for its tools, and return their schemas.

        Raises:
            RolloutError: the server refused, or the reply has another form.
        """
        reply = self._ask("step", {"type": "list_tools"})
        if reply["type"] == "error":
            raise self._failure(str(reply["data"]))
        try:
            return [
                function_schema(
                    tool["name"],
                    tool.get("description") or tool["name"],
                    tool.get("input_schema") or {"type": "object", "properties": {}},
                )
                for tool in reply["data"]["observation"]["tools"]
            ]
        except (AttributeError, LookupError, TypeError) as error:
            raise self._failure(f"the tools {json.dumps(reply)[:200]}") from error

    def _ask(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request and return the reply, which may be of the type "error".

        While the server has no free session, connect and send again.

        Args:
            kind: type of the request, "reset" or "step".
            data: content of the request.

        Raises:
            RolloutError: there is no free session in time, or no reply.
        """
        deadline = time.monotonic() + _MAX_WAIT_S
        while True:
            reply = self._ask_once(kind, data)
            if reply["type"] != "error" or reply["data"].get("code") != _FULL:
                return reply
            if time.monotonic() > deadline:
                raise self._failure(
                    f"the error {_FULL}: {reply['data'].get('message')}",
                    "Set env.max_concurrent_episodes to the number of the server's sessions, or "
                    "start the server with more of them (max_concurrent_envs).",
                )
            time.sleep(_PAUSE_S)
            self.discard()
            self._socket = self._connect()

    def _ask_once(self, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
        """Send a request, and return the reply after checking its form.

        Args:
            kind: type of the request, "reset" or "step".
            data: content of the request.

        Returns:
            An object with the type "observation" or "error", and an object `data`.

        Raises:
            RolloutError: the session was closed, or the reply has another form.
        """
        exceptions = import_library("websockets.exceptions")
        try:
            # If the server has closed the session, `recv` may still return the error that it sent
            # before.
            with suppress(exceptions.ConnectionClosed):
                self._socket.send(json.dumps({"type": kind, "data": data}))
            message = self._socket.recv()
        except exceptions.ConnectionClosed as error:
            raise self._failure(f"a session that the server closed ({error})") from error
        try:
            reply = json.loads(message)
        except ValueError as error:
            raise self._failure(f"the reply {message[:200]!r}, which is no JSON") from error
        has_type = isinstance(reply, dict) and reply.get("type") in ("observation", "error")
        if not has_type or not isinstance(reply.get("data"), dict):
            raise self._failure(f"the reply {json.dumps(reply)[:200]}")
        return reply

    def _step_of(self, reply: Mapping[str, Any], *, is_first: bool = False) -> Step:
        """Convert an observation of the server to a step.

        Args:
            reply: the server's reply.
            is_first: whether the reply answers `reset`, so that its reward and end are ignored.

        Raises:
            RolloutError: the reply is an error, or has no observation.
        """
        data = reply["data"]
        if reply["type"] == "error":
            raise self._failure(f"the error {data.get('code')}: {data.get('message')}")
        observation = data.get("observation")
        if not isinstance(observation, dict):
            raise self._failure(f"the reply {json.dumps(reply)[:200]}, without an observation")
        is_invalid = bool(observation.get("error"))
        shown: Any = {name: value for name, value in observation.items() if name not in _HIDDEN}
        # An observation after a call of a tool: the model reads only its error or its result.
        if "tool_name" in shown:
            result = shown.get("result")
            # FastMCP wraps results in such a dictionary.
            if isinstance(result, dict) and "structured_content" in result:
                is_invalid = is_invalid or bool(result.get("is_error"))
                result = result.get("data", result.get("content"))
            shown = shown.get("error") or result
        # An observation without fields is "" and not "{}", which would tell the model nothing.
        text = as_observation(shown) if shown else ""
        info = {"is_invalid": True} if is_invalid else {}
        if is_first:
            return Step(text, info=info)
        return Step(text, 0, {0: data.get("reward")}, bool(data.get("done")), info)

    def _failure(self, got: str, fix: str = "") -> RolloutError:
        """Make an error about the server.

        Args:
            got: what the server did.
            fix: advice. "": the advice to start the server, and to name the server's own address.
        """
        return RolloutError(
            self._where,
            got,
            expected="a server of OpenEnv",
            fix=fix or "Start it, and name its own address: redirects are not followed.",
        )


def _shorten_schema(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Shorten the schema of an action for the model: leave out titles and the field `metadata`."""
    shown_keys = ("$defs", "type", "properties", "required")
    short = {key: schema[key] for key in shown_keys if key in schema}
    properties = dict(short.get("properties", {}))
    properties.pop("metadata", None)
    return {**short, "properties": properties}
