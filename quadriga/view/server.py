# SPDX-License-Identifier: Apache-2.0
"""Server of the page, in a thread."""

import secrets

from quadriga.serve.gate import LOOPBACK
from quadriga.serve.listening import ServerThread, host_names, listen, url_of
from quadriga.view.app import ViewApp
from quadriga.view.data import ViewData


class ViewServer:
    """Serves the page from a thread.

    Args:
        data: answers to the page.
        host: address to listen on.
        port: port; 0: a free one.

    Attributes:
        is_local: whether only this machine reaches the server.
        url: address of the page, with the token that callers need.

    Raises:
        ConfigError: the port is in use, or the address is not this machine's.
    """

    def __init__(self, data: ViewData, host: str, port: int) -> None:
        listener = listen(host, port, host_key="--host", port_key="--port")
        token = secrets.token_urlsafe(24)
        self.is_local = host in LOOPBACK
        self.url = f"{url_of(listener, host)}/?token={token}"
        app = ViewApp(data, token, host_names(host))
        self._thread = ServerThread(app.asgi, listener)

    def close(self) -> None:
        """End the server."""
        self._thread.stop(1.0)
        self._thread.close()
