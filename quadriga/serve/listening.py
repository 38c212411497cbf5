# SPDX-License-Identifier: Apache-2.0
"""Serve an ASGI application from a thread, and open the socket on which it listens."""

import errno
import socket
from threading import Thread
from typing import Any

import uvicorn

from quadriga.errors import ConfigError
from quadriga.serve.gate import LOOPBACK, MAX_HEADER_BYTES

_BACKLOG = 1024  # connections that wait to be accepted
_MAX_PORT = 65535
# Time after which an idle connection is closed. It is longer than clients keep one: otherwise a client
# might send a call just when the server closes the connection.
_KEEP_ALIVE_S = 75


class ServerThread:
    """Serves an application from a thread.

    Args:
        app: the application.
        listener: the socket that accepts connections.
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
        """End the server.

        Args:
            timeout_s: how long to wait for the server's thread, in seconds.
        """
        self._server.should_exit = True
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Close the socket, after `stop`."""
        self._socket.close()


def url_of(listener: socket.socket, host: str) -> str:
    """URL of a server.

    Args:
        listener: the server's socket, which has the port.
        host: the address on which the server listens.
    """
    name = f"[{host}]" if ":" in host else host
    return f"http://{name}:{listener.getsockname()[1]}"


def host_names(host: str) -> set[str]:
    """Names under which callers can reach a server, in lower case.

    Args:
        host: the address on which the server listens.
    """
    # A server that listens on all addresses is also reached on loopback.
    names = set(LOOPBACK)
    if host not in LOOPBACK:
        names |= {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    return names


def listen(host: str, port: int, *, host_key: str, port_key: str) -> socket.socket:
    """Open a socket that listens on an address.

    Args:
        host: the address.
        port: the port; 0: any free port.
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
        # With SO_REUSEADDR, two sockets may bind the same port, but only one may listen on it.
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            raise ConfigError(
                port_key,
                got=str(port),
                expected="a free port",
                fix=f"Set {port_key}=0 for a free one: another program, perhaps a run, has this port.",
            ) from error
        raise ConfigError(host_key, got=f"{host} ({error.strerror})") from error
    return listener
