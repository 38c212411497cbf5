# SPDX-License-Identifier: Apache-2.0
"""A service that is busy, down, or talks nonsense."""

import asyncio
import gzip
import socket
import sys
import time
from contextlib import suppress
from functools import partial

import pytest

from quadriga import http_client
from quadriga.errors import RewardError
from quadriga.http_client import HTTPClient, ServerLostError, document, is_loopback
from tests.http_server import Handler, serving
from tests.limits import HANGS_S

GOOD = (200, {}, b'{"ok": true}')


class Scripted(Handler):
    """Answers what its server's script says, one entry a request; None: it hangs up."""

    def answer(self, body):
        self.server.bodies.append(body)
        entry = self.server.script.pop(0)
        if entry is None:
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        if isinstance(entry, float):
            time.sleep(entry)
            entry = GOOD
        status, headers, text = entry
        self.reply(status, text, headers)


@pytest.fixture
def server():
    with serving(Scripted, "/v1", script=[], bodies=[]) as server:
        yield server


def client(url, **options):
    return HTTPClient(url, RewardError, setting="reward_model.reward_kwargs.url", **options)


@pytest.mark.parametrize(
    "trouble",
    [
        (429, {}, b"slow down"),
        (500, {}, b""),
        (503, {}, b"x"),
        None,
        (200, {}, b"<html>"),
        (200, {}, b"[1]"),
    ],
)
def test_a_passing_trouble_is_waited_out(server, trouble):
    pauses = []
    server.script = [trouble, trouble, GOOD]
    answer = client(server.url).call_until({"a": 1}, timeout_s=30, sleep=pauses.append)
    assert answer == {"ok": True}
    assert server.bodies == [{"a": 1}] * 3
    assert 0.75 <= pauses[0] <= 1.25 and 1.5 <= pauses[1] <= 2.5


def test_the_server_says_how_long_to_wait(server):
    pauses = []
    server.script = [
        (429, {"Retry-After": "7"}, b""),
        (429, {"Retry-After": "Fri, 1 Jan 2100"}, b""),
        GOOD,
    ]
    client(server.url).call_until({}, timeout_s=30, backoff_s=0.1, sleep=pauses.append)
    assert pauses[0] == 7.0 and pauses[1] < 1


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ((500, {}, b"out of order"), "status 500: out of order"),
        (None, "no reply"),
        ((200, {}, b"<html>"), "not JSON: '<html>'"),
    ],
)
def test_trouble_that_stays_is_an_error(server, entry, message):
    server.script = [entry] * 3
    with pytest.raises(RewardError, match=rf"{message}.*the last of 3 attempts"):
        client(server.url).call_until({}, timeout_s=30, max_attempts=3, sleep=lambda _: None)
    assert not server.script


def test_a_refusal_is_not_repeated(server):
    server.script = [(401, {}, b"who are you"), GOOD]
    with pytest.raises(RewardError, match="status 401: who are you"):
        client(server.url).call_until({}, timeout_s=30)
    assert len(server.script) == 1


def test_the_time_limit_holds_over_attempts_and_pauses(server):
    server.script = [HANGS_S]
    with pytest.raises(TimeoutError, match=r"within 0.5 s"):
        client(server.url).call_until({}, timeout_s=0.5, backoff_s=HANGS_S)


def test_nobody_is_there():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/"
        with pytest.raises(RewardError, match="no reply"):
            client(url).call_until({}, timeout_s=30, max_attempts=2, sleep=lambda _: None)


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://"])
def test_an_address_that_is_none_is_refused(url):
    with pytest.raises(
        RewardError, match=r"reward_model.reward_kwargs.url: got .*expected an address"
    ):
        client(url)


def test_an_event_loop_makes_the_same_requests(server):
    server.script = [GOOD, (503, {"Retry-After": "3"}, b"busy"), (400, {}, b"too long")]

    async def calls():
        asked = client(server.url, where="judge", fix="Shorten it.")
        assert await asked.call_async(body={"a": 1}) == {"ok": True}
        with pytest.raises(ServerLostError, match="status 503: busy") as lost:
            await asked.call_async(body={})
        assert lost.value.retry_after_s == 3.0
        with pytest.raises(
            RewardError, match=r"judge, http://.*/chat: got status 400: too long.* Shorten it\."
        ):
            await asked.call_async("chat", {})

    asyncio.run(calls())


def test_a_reply_need_not_be_an_object(server):
    server.script = [(200, {}, b"[1]"), (200, {}, b"done")]
    assert client(server.url).call(body={}, needs_object=False) == [1]
    assert client(server.url).call(body={}, needs_object=False) is None


def test_a_cancelled_request_ends_its_connection(server):
    server.script = [HANGS_S]

    async def call():
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(client(server.url).call_async(body={}), 0.2)

    asyncio.run(call())


def test_a_server_that_stays_silent_is_lost(server):
    server.script = [HANGS_S]
    with pytest.raises(ServerLostError, match=r"no reply within 0\.2 s"):
        client(server.url, timeout_s=0.2).call(body={})


class Trickling(Handler):
    """Sends a byte at a time: of its headers, or of its body."""

    def answer(self, body):
        head, rest = (
            (b"HTTP/1.1 200 OK\r\n", b"x" * 1000)
            if self.server.is_body
            else (b"", b"HTTP/1.1 200 OK\r\n" * 99)
        )
        with suppress(ConnectionError):
            self.connection.sendall(
                head + (b"Content-Length: 1000\r\n\r\n" if self.server.is_body else b"")
            )
            for number in range(len(rest)):
                self.connection.sendall(rest[number : number + 1])
                time.sleep(0.05)


@pytest.mark.parametrize("is_body", [False, True])
def test_a_deadline_holds_for_a_server_that_trickles(is_body):
    with (
        serving(Trickling, is_body=is_body) as server,
        pytest.raises(ServerLostError, match=r"no reply within 0\.4 s"),
    ):
        client(server.url).call(body={}, timeout_s=0.4)


def test_a_reply_that_is_too_large_after_decompression_is_refused(server, monkeypatch):
    monkeypatch.setattr(http_client, "MAX_BYTES", 1 << 20)
    server.script = [
        (200, {"Content-Encoding": "gzip"}, gzip.compress(b" " * (2 << 20))),
        (200, {}, b" " * (2 << 20)),
    ]
    for _ in range(2):
        with pytest.raises(RewardError, match="more than 1 MB"):
            client(server.url).call(body={})
    server.script = [(200, {"Content-Encoding": "gzip, gzip"}, b"")]
    with pytest.raises(RewardError, match="in the encoding 'gzip, gzip'"):
        client(server.url).call(body={})


@pytest.fixture
def proxy(monkeypatch):
    for name in (
        "NO_PROXY",
        "no_proxy",
        "ALL_PROXY",
        "all_proxy",
        "http_proxy",
        "https_proxy",
        "HTTPS_PROXY",
    ):
        monkeypatch.delenv(name, raising=False)
    return partial(monkeypatch.setenv, "HTTP_PROXY")


def test_this_machine_is_never_asked_through_a_proxy(server, proxy):
    proxy("http://127.0.0.1:9")
    server.script = [GOOD, GOOD]
    assert client(server.url, use_proxies=True).call(body={}) == {"ok": True}
    with document(server.url, 5) as (_, chunks):
        assert b"".join(chunks) == GOOD[2]


@pytest.mark.parametrize(
    ("url", "is_here"),
    [
        ("http://127.0.0.1:8000/v1", True),
        ("http://127.1.2.3", True),
        ("http://[::1]:80", True),
        ("http://localhost", True),
        ("http://localhost.example.com", False),
        ("http://10.0.0.1", False),
    ],
)
def test_loopback_addresses(url, is_here):
    assert is_loopback(url) == is_here


def test_an_error_behind_a_proxy_names_it_without_its_user(proxy):
    proxy("http://me:secret@127.0.0.1:9")
    with pytest.raises(RewardError, match=r"through HTTP_PROXY \(127\.0\.0\.1:9\)") as caught:
        client("http://judge.invalid", use_proxies=True).call_until(
            {}, timeout_s=30, max_attempts=1
        )
    assert "secret" not in str(caught.value) and "me:" not in str(caught.value)
    with (
        pytest.raises(ServerLostError, match=r"through HTTP_PROXY \(127"),
        document("http://data.invalid", 5),
    ):
        pass


@pytest.mark.parametrize(
    "address", ["socks5://u:secret@127.0.0.1:9", "gopher://u:secret@127.0.0.1:9"]
)
def test_a_proxy_that_cannot_be_used_is_an_error_at_the_start(proxy, address, monkeypatch):
    monkeypatch.setitem(sys.modules, "socksio", None)
    proxy(address)
    with pytest.raises(
        RewardError, match=r"HTTP_PROXY \(127\.0\.0\.1:9\).*expected a proxy that can be used"
    ) as caught:
        client("http://judge.invalid", use_proxies=True)
    assert "secret" not in str(caught.value)
    with pytest.raises(ServerLostError, match="HTTP_PROXY"), document("http://data.invalid", 5):
        pass
