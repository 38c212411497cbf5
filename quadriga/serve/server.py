# SPDX-License-Identifier: Apache-2.0
"""The HTTP server, in its own thread.

A server listens as soon as it is constructed. `close` answers the calls in flight with an error that makes clients
send them again, and waits up to `CLOSE_S` for the server to end.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path

from quadriga.config import Config
from quadriga.config.rollout import ROLLOUT
from quadriga.config.serve import KEY_VARIABLE
from quadriga.errors import ConfigError
from quadriga.serve.app import MAX_CALLS, PolicyApp
from quadriga.serve.engines import Engines, Exchange
from quadriga.serve.gate import LOOPBACK, MAX_BODY_BYTES, MAX_HEADER_BYTES
from quadriga.serve.listening import ServerThread, host_names, listen, url_of
from quadriga.serve.policy import ServedPolicy

CLOSE_S = 1.0
"""Seconds to wait for the server to end."""
_SERVE = f"{ROLLOUT}.serve"
# Arguments of `listen` that name the keys of the configuration in errors.
_KEYS = {"host_key": f"{_SERVE}.host", "port_key": f"{_SERVE}.port"}


class PolicyServer:
    """Serves a policy from a thread.

    Args:
        config: the resolved configuration.
        policy: the served policy.
        exchanges: `CallQueue.exchange` of each engine.
        key: the key that callers must send; "": none.

    Attributes:
        url: URL of the server.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """

    def __init__(
        self, config: Config, policy: ServedPolicy, exchanges: Sequence[Exchange], key: str
    ) -> None:
        settings = config.actor_rollout_ref.rollout.serve
        listener = listen(settings.host, settings.port, **_KEYS)
        self.url = url_of(listener, settings.host)
        self._engines = Engines(exchanges)
        self.app = PolicyApp(
            policy,
            self._engines,
            seed=config.trainer.seed,
            key=key,
            hosts=host_names(settings.host),
            timeout_s=settings.timeout_s,
            record_file=settings.record_file,
        )
        self._thread = ServerThread(self.app.asgi, listener)

    @property
    def limits(self) -> str:
        """The server's limits, in words."""
        return (
            f"a body of {MAX_BODY_BYTES >> 20} MiB, headers of {MAX_HEADER_BYTES >> 10} KiB, "
            f"{MAX_CALLS} calls in flight, {self.app.timeout_s:g} s for each; "
            f"{self.app.policy.max_model_len} tokens of prompt and response"
        )

    def close(self) -> None:
        """Cancel the calls in flight, and end the server and the engines' threads."""
        self.app.cancel_all()
        self._thread.stop(CLOSE_S)
        self._engines.close()
        self._thread.close()


def require_address(config: Config) -> None:
    """Raise an error if the configured server could not start. Called before models are loaded.

    Args:
        config: the resolved configuration.

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
    # Raises an error if the port is in use.
    listen(settings.host, settings.port, **_KEYS).close()
    if settings.record_file is not None:
        try:
            Path(settings.record_file).open("a", encoding="utf-8").close()
        except OSError as error:
            raise ConfigError(
                f"{_SERVE}.record_file",
                got=f"{settings.record_file} ({error.strerror})",
                expected="a file that can be written",
            ) from error


def write_address(server: PolicyServer, key: str, path: Path) -> None:
    """Write the URL, model and key of a server to a file that only its owner can read.

    Args:
        server: the server.
        key: the key that callers must send.
        path: the file.
    """
    content = {"url": server.url, "model": server.app.policy.name, "key": key}
    path.parent.mkdir(parents=True, exist_ok=True)
    # Write a new file, because an old one might be readable for others, or a link to another file.
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(content, file)
