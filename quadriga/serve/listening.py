# SPDX-License-Identifier: Apache-2.0
"""An ASGI application behind a socket of this machine, in a thread."""

import errno
import socket
from threading import Thread
from typing import Any

import uvicorn

from quadriga.errors import ConfigError
from quadriga.serve.gate import LOOPBACK, MAX_HEADER_BYTES

_BACKLOG = 1024
_MAX_PORT = 65535
# Longer than the idle connections of clients last, which would otherwise use a closed one.
_KEEP_ALIVE_S = 75


class ServerThread:
    """Serves an application from a thread.

    Args:
        app: the application.
        listener: the socket that it is served from.
    """

    def __init__(self, app: Any, listener: socket.socket) -> None:
        self._socket = listener
        options = uvicorn.Config(
            app,
            http="h11",
            h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=1,
        )
        self._server = uvicorn.Server(options)
        self._thread = Thread(
            target=self._server.run, args=([listener],), name="server", daemon=True
        )
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        """End the server; calls in flight have a time limit."""
        self._server.should_exit = True
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()


def url_of(listener: socket.socket, host: str) -> str:
    """Address of a server."""
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


def host_names(host: str) -> set[str]:
    """Names under which callers reach a server that listens on an address."""
    names = set(LOOPBACK)
    if host not in LOOPBACK:
        names |= {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    return names


def listen(host: str, port: int, *, host_key: str, port_key: str) -> socket.socket:
    """A socket that listens on an address.

    Args:
        host: the address.
        port: the port; 0: a free one.
        host_key: key or option that names the address, for errors.
        port_key: key or option that names the port, for errors.

    Raises:
        ConfigError: the port is in use or not a port, or the address is not this machine's.
    """
    if not 0 <= port <= _MAX_PORT:
        raise ConfigError(port_key, got=str(port), expected=f"a port from 0 to {_MAX_PORT}")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Two sockets may be bound to a port, but only one may listen.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            expected = "a free port"
            fix = f"Another program, perhaps another run, has it. Set {port_key}=0 for a free one."
            raise ConfigError(port_key, got=str(port), expected=expected, fix=fix) from error
        raise ConfigError(host_key, got=f"{host} ({error.strerror})") from error
    return listener
