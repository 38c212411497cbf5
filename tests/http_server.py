# SPDX-License-Identifier: Apache-2.0
"""A small HTTP server in a thread, for tests of what talks to one."""

import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """Base of handlers: reads and writes JSON, and logs nothing. What they share stands in `self.server`."""

    server: Any

    def do_POST(self) -> None:
        """Give the JSON of the request to `answer`."""
        self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

    def do_GET(self) -> None:
        """A request without JSON."""
        self.answer(None)

    def answer(self, body: Any) -> None:
        """Reply to a request."""
        raise NotImplementedError

    def reply(self, status: int, content: Any, headers: Mapping[str, str] | None = None) -> None:
        """Send bytes as they are, anything else as JSON."""
        text = content if isinstance(content, bytes) else json.dumps(content).encode()
        self.send_response(status)
        for name, value in {**(headers or {}), "Content-Length": str(len(text))}.items():
            self.send_header(name, value)
        self.end_headers()
        # A client that is tested on giving up has gone.
        with suppress(ConnectionError):
            self.wfile.write(text)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


@contextmanager
def serving(handler: type[Handler], path: str = "", **state: Any) -> Iterator[Any]:
    """A server on a free port, with its `url` and the state that handlers find as its attributes."""
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    server.daemon_threads, server.block_on_close = True, False
    server.url = f"http://127.0.0.1:{server.server_port}{path}"
    vars(server).update(state)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()
