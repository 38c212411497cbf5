# SPDX-License-Identifier: Apache-2.0
"""A service that is busy, down, or talks nonsense."""

import json
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from quadriga.errors import RewardError
from quadriga.rewards.endpoint import Endpoint

GOOD = (200, {}, b'{"ok": true}')


class Scripted(BaseHTTPRequestHandler):
    """Answers what its server's script says, one entry a request; None: it hangs up."""

    def do_POST(self):
        self.server.bodies.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        entry = self.server.script.pop(0)
        if entry is None:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(entry, float):
            time.sleep(entry)
            entry = GOOD
        status, headers, text = entry
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Scripted)
    server.daemon_threads = True
    server.script, server.bodies = [], []
    server.url = f"http://127.0.0.1:{server.server_port}/v1"
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.mark.parametrize(
    "trouble",
    [(429, {}, b"slow down"), (500, {}, b""), (503, {}, b"x"), None, (200, {}, b"<html>"), (200, {}, b"[1]")],
)
def test_a_passing_trouble_is_waited_out(server, trouble):
    pauses = []
    server.script = [trouble, trouble, GOOD]
    answer = Endpoint(server.url, backoff_s=1.0, sleep=pauses.append).post({"a": 1}, timeout_s=30)
    assert answer == {"ok": True}
    assert server.bodies == [{"a": 1}] * 3
    assert 0.75 <= pauses[0] <= 1.25 and 1.5 <= pauses[1] <= 2.5


def test_the_server_says_how_long_to_wait(server):
    pauses = []
    server.script = [(429, {"Retry-After": "7"}, b""), (429, {"Retry-After": "Fri, 1 Jan 2100"}, b""), GOOD]
    Endpoint(server.url, backoff_s=0.1, sleep=pauses.append).post({}, timeout_s=30)
    assert pauses[0] == 7.0 and pauses[1] < 1


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((500, {}, b"out of order"), "HTTP 500: out of order"),
        (None, "no answer"),
        ((200, {}, b"<html>"), "not JSON: '<html>'"),
    ],
)
def test_trouble_that_stays_is_an_error(server, entry, message):
    server.script = [entry] * 3
    with pytest.raises(RewardError, match=rf"{message}.*the last of 3 attempts"):
        Endpoint(server.url, max_attempts=3, sleep=lambda _: None).post({}, timeout_s=30)
    assert not server.script


def test_a_refusal_is_not_repeated(server):
    server.script = [(401, {}, b"who are you"), GOOD]
    with pytest.raises(RewardError, match="HTTP 401: who are you"):
        Endpoint(server.url).post({}, timeout_s=30)
    assert len(server.script) == 1


def test_the_time_limit_holds_over_attempts_and_pauses(server):
    begun = time.monotonic()
    server.script = [30.0]
    with pytest.raises(TimeoutError, match=r"within 0.5 s"):
        Endpoint(server.url, backoff_s=60).post({}, timeout_s=0.5)
    assert time.monotonic() - begun < 10


def test_nobody_is_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        with pytest.raises(RewardError, match="no answer"):
            Endpoint(url, max_attempts=2, sleep=lambda _: None).post({}, timeout_s=30)
