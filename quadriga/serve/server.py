# SPDX-License-Identifier: Apache-2.0
"""The HTTP server, in a thread of its own.

start     returns when the server listens.
close     calls in flight get an error, which tells clients to try again; waits up to `CLOSE_S`.
"""

import errno
import json
import os
import socket
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import uvicorn

from quadriga.config import Config
from quadriga.config.rollout import ROLLOUT
from quadriga.config.serve import KEY_VARIABLE
from quadriga.errors import ConfigError
from quadriga.serve.app import MAX_CALLS, PolicyApp
from quadriga.serve.engines import Engines, Exchange
from quadriga.serve.gate import LOOPBACK, MAX_BODY_BYTES, MAX_HEADER_BYTES
from quadriga.serve.policy import ServedPolicy

CLOSE_S = 1.0
# Longer than the idle connections of clients last, which would otherwise use a closed one.
_KEEP_ALIVE_S = 75
_SERVE = f"{ROLLOUT}.serve"


class PolicyServer:
    """Serves a policy from a thread.

    Args:
        config: the resolved configuration.
        policy: the served policy.
        exchanges: `CallQueue.exchange` of each engine.
        key: the key that callers must have; "" for none.

    Attributes:
        url: address of the server.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """

    def __init__(
        self, config: Config, policy: ServedPolicy, exchanges: Sequence[Exchange], key: str
    ) -> None:
        settings = config.actor_rollout_ref.rollout.serve
        self._socket = _listen(settings.host, settings.port)
        port = self._socket.getsockname()[1]
        name = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.url = f"http://{name}:{port}"
        self._engines = Engines(exchanges)
        self.app = PolicyApp(
            policy,
            self._engines,
            seed=config.trainer.seed,
            key=key,
            hosts=_host_names(settings.host),
            timeout_s=settings.timeout_s,
            record_file=settings.record_file,
        )
        options = uvicorn.Config(
            self.app.asgi,
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
            target=self._server.run, args=([self._socket],), name="server", daemon=True
        )
        self._thread.start()

    @property
    def limits(self) -> str:
        """Limits of the server, to be printed."""
        return (
            f"a body of {MAX_BODY_BYTES >> 20} MB, headers of {MAX_HEADER_BYTES >> 10} KB, "
            f"{MAX_CALLS} calls in flight, {self.app.timeout_s:g} s for each; "
            f"{self.app.policy.max_model_len} tokens of prompt and response"
        )

    def close(self) -> None:
        """End the calls in flight, and the server."""
        self.app.cancel_all()
        self._server.should_exit = True
        self._thread.join(CLOSE_S)
        self._engines.close()
        self._socket.close()


def require_address(config: Config) -> None:
    """Check address and record of the configured server, before models are loaded.

    Raises:
        ConfigError: the port is in use, the address is not this machine's, callers from other
            machines would need no key, or the record cannot be written.
    """
    settings = config.actor_rollout_ref.rollout.serve
    if settings.host not in LOOPBACK and not os.environ.get(KEY_VARIABLE):
        raise ConfigError(
            f"{_SERVE}.host",
            got=f"{settings.host}, without a key",
            expected="127.0.0.1, or a key",
            fix=f"Set the environment variable {KEY_VARIABLE}.",
        )
    _listen(settings.host, settings.port).close()
    if settings.record_file is not None:
        try:
            Path(settings.record_file).open("a", encoding="utf-8").close()
        except OSError as error:
            got = f"{settings.record_file} ({error.strerror})"
            expected = "a file that can be written"
            raise ConfigError(f"{_SERVE}.record_file", got=got, expected=expected) from error


def write_address(server: PolicyServer, key: str, path: Path) -> None:
    """Write address, model and key of a server to a file that only its owner can read.

    Args:
        server: the server.
        key: its key.
        path: the file.
    """
    content = {"url": server.url, "model": server.app.policy.name, "key": key}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file)


def _host_names(host: str) -> set[str]:
    """Names under which callers reach a server that listens on an address."""
    names = set(LOOPBACK)
    if host not in LOOPBACK:
        names |= {host.lower(), socket.gethostname().lower(), socket.getfqdn().lower()}
    return names


def _listen(host: str, port: int) -> socket.socket:
    """A socket that listens on an address.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
        # Two sockets may be bound to a port, but only one may listen.
        listener.listen(4 * MAX_CALLS)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            expected = "a free port"
            fix = (
                f"Another program, perhaps another run, has it. Set {_SERVE}.port=0 for a free one."
            )
            raise ConfigError(
                f"{_SERVE}.port", got=str(port), expected=expected, fix=fix
            ) from error
        raise ConfigError(f"{_SERVE}.host", got=f"{host} ({error.strerror})") from error
    return listener
