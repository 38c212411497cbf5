# SPDX-License-Identifier: Apache-2.0
"""JSON over HTTP to a server that may be busy or down for a while, from threads or from an event loop.

the server's reply                            what follows
status 200 with a JSON object                 it is returned
408, 425, 429, 5xx; 200 without an object     ServerLostError: another attempt, or another server, may do better
no reply, a broken connection, a time limit   ServerLostError
any other status                              the caller's own error at once: the same request would be refused again

Each request has a connection of its own: none goes stale between two requests, and there is nothing to close. Its time
limit is a deadline for all of it, and a reply may have `MAX_BYTES`. This machine is never asked through a proxy.
"""

import asyncio
import ipaddress
import json
import os
import random
import ssl
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit
from urllib.request import proxy_bypass

from quadriga.background import run_coroutine
from quadriga.errors import QuadrigaError

if TYPE_CHECKING:
    import httpx2

MAX_BYTES = 64 << 20  # of a reply, after decompression
PROXY_FIX = "Correct the variable, unset it, or name the server's host in NO_PROXY."
# Their ratio is bounded, so that one chunk from the network is never much larger than `MAX_BYTES`.
_ENCODINGS = ("", "identity", "gzip", "deflate")
_RETRIED = frozenset({408, 425, 429})
_LONGEST_PAUSE_S = 60.0
_LONGEST_QUOTE = 500


class ServerLostError(Exception):
    """A server did not answer a request that another attempt, or another server, may answer."""

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        # How long the server asks to wait; None where it does not say.
        self.retry_after_s = retry_after_s


@dataclass(eq=False, repr=False)  # its headers may hold a key
class HTTPClient:
    """One server that takes and gives JSON. Threads and event loops may share it."""

    url: str
    error: type[QuadrigaError]  # class of the errors that users see, such as RewardError
    _: KW_ONLY
    setting: str  # configuration key that holds the address
    where: str = ""  # what the server is for; in errors its address follows
    fix: str = ""  # what to do where a request is refused
    headers: Mapping[str, str] | None = None  # of every request, beside the content type
    timeout_s: float = 600.0  # seconds for one request, after which the server counts as lost
    use_proxies: bool = False  # whether the environment's proxies (HTTP_PROXY ...) are used

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise self.error(
                self.setting, got=repr(self.url), expected="an address such as http://host:8000"
            )
        self.url, self.where = (
            self.url.rstrip("/"),
            f"{self.where}, {self.url}" if self.where else self.url,
        )
        common = {"Content-Type": "application/json", "Accept-Encoding": "gzip, deflate"}
        self.headers = {**common, **(self.headers or {})}
        # The machine's certificates, a private authority's among them, not those of a package.
        verify = ssl.create_default_context() if parts.scheme == "https" else False
        trusts_env = self.use_proxies and not is_loopback(self.url)
        self._options: dict[str, Any] = {"verify": verify, "trust_env": trusts_env, "timeout": None}
        if trusts_env and (route := proxy_route(self.url)):
            self.where += f", through {route}"
            if trouble := proxy_trouble():
                raise self.error(
                    self.where, got=trouble, expected="a proxy that can be used", fix=PROXY_FIX
                )

    def call(
        self,
        path: str = "",
        body: Mapping[str, Any] | None = None,
        *,
        method: str = "POST",
        timeout_s: float | None = None,
        needs_object: bool = True,
    ) -> Any:
        """The server's reply to one request.
        `path`: added to the address, without a slash at its beginning.
        `body`: sent as JSON.
        `needs_object`: whether the reply must be a JSON object. False: JSON of any kind, None where it is no JSON.
        Raises ServerLostError: see the table of the module.
        Raises self.error: the server refuses the request."""
        options = {"method": method, "timeout_s": timeout_s, "needs_object": needs_object}
        return run_coroutine(self.call_async(path, body, **options))

    async def call_async(
        self,
        path: str = "",
        body: Mapping[str, Any] | None = None,
        *,
        method: str = "POST",
        timeout_s: float | None = None,
        needs_object: bool = True,
    ) -> Any:
        """As `call`. A task that is cancelled closes its connection, by which the server learns of it."""
        import httpx2

        limit_s = self.timeout_s if timeout_s is None else timeout_s
        url = f"{self.url}/{path}" if path else self.url
        content = None if body is None else json.dumps(body).encode()
        try:
            async with (
                asyncio.timeout(limit_s),
                httpx2.AsyncClient(**self._options) as client,
                client.stream(method, url, content=content, headers=self.headers) as reply,
            ):
                text = await self._text(reply)
        except TimeoutError as error:
            raise ServerLostError(f"no reply within {limit_s:g} s") from error
        except httpx2.HTTPError as error:
            raise ServerLostError(_no_reply(error)) from error
        return self._content(reply, text, path, needs_object)

    def call_until(
        self,
        body: Mapping[str, Any],
        *,
        timeout_s: float,
        max_attempts: int = 5,
        backoff_s: float = 1.0,
        before_attempt: Callable[[], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> dict[str, Any]:
        """As `call`, with further attempts where the server is lost, and one deadline for all of them.
        `timeout_s`: for all attempts and the pauses between them.
        `max_attempts`: requests for one reply.
        `backoff_s`: pause after the first failure; it doubles with each, up to a minute, and varies by a quarter. The
        server's Retry-After takes its place.
        `before_attempt`: called before each; a rate limit waits here, and its wait counts as well.
        Raises TimeoutError: no reply in time; it says what the last attempt met.
        Raises self.error: the server refuses the request, or no attempt brought a reply."""
        deadline = time.monotonic() + timeout_s
        trouble = "no attempt has ended"
        for attempt in range(1, max_attempts + 1):
            if before_attempt is not None:
                before_attempt()
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            try:
                return self.call(body=body, timeout_s=left_s)
            except ServerLostError as lost:
                trouble, pause_s = str(lost), lost.retry_after_s
            if attempt == max_attempts:
                got = f"{trouble} (the last of {max_attempts} attempts)"
                fix = "See whether the service is up, and lower the rate of requests if it is busy."
                raise self.error(self.where, got=got, expected="a reply in JSON", fix=fix)
            if pause_s is None:
                # Many callers that failed together must not come back together.
                pause_s = min(_LONGEST_PAUSE_S, backoff_s * 2 ** (attempt - 1)) * random.uniform(
                    0.75, 1.25
                )
            if time.monotonic() + pause_s >= deadline:
                break
            sleep(pause_s)
        raise TimeoutError(f"{self.where}: no reply within {timeout_s:g} s; {trouble}")

    async def _text(self, reply: "httpx2.Response") -> str:
        """The body of a reply."""
        encoding = reply.headers.get("Content-Encoding", "")
        if encoding.lower() not in _ENCODINGS:
            raise self.error(
                self.where,
                got=f"a reply in the encoding {encoding[:80]!r}",
                expected="gzip, or none",
            )
        text = bytearray()
        async for chunk in reply.aiter_bytes():
            text += chunk
            if len(text) > MAX_BYTES:
                raise self.error(
                    self.where,
                    got=f"a reply of more than {MAX_BYTES >> 20} MB",
                    expected="a smaller one",
                )
        return text.decode("utf-8", "replace")

    def _content(self, reply: "httpx2.Response", text: str, path: str, needs_object: bool) -> Any:
        status = reply.status_code
        if status in _RETRIED or status >= 500:
            wait = reply.headers.get("Retry-After", "").strip()
            # It may also be a date; the caller's own pause serves as well.
            retry_after_s = min(_LONGEST_PAUSE_S, float(wait)) if wait.isdecimal() else None
            raise ServerLostError(f"status {status}: {text[:_LONGEST_QUOTE]}", retry_after_s)
        if status != 200:
            where, got = (
                f"{self.where}/{path}" if path else self.where,
                f"status {status}: {text[:_LONGEST_QUOTE]}",
            )
            raise self.error(where, got=got, expected="status 200", fix=self.fix)
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            if not needs_object:
                return None
            raise ServerLostError(f"a reply that is not JSON: {text[:_LONGEST_QUOTE]!r}") from error
        if needs_object and not isinstance(content, dict):
            raise ServerLostError(f"JSON that is no object: {text[:_LONGEST_QUOTE]!r}")
        return content


@contextmanager
def document(url: str, timeout_s: float) -> Iterator[tuple[Mapping[str, str], Iterator[bytes]]]:
    """What is at a web address: headers, and bytes, some at a time; redirections are followed.
    Raises ServerLostError: no answer, another status than 200, or `timeout_s` seconds without a byte."""
    import httpx2

    route = proxy_route(url)
    through = f", through {route}" if route else ""
    if route and (trouble := proxy_trouble()):
        raise ServerLostError(f"{trouble}{through}")
    try:
        with (
            httpx2.Client(
                timeout=timeout_s, follow_redirects=True, trust_env=not is_loopback(url)
            ) as client,
            client.stream("GET", url) as reply,
        ):
            if reply.status_code != 200:
                raise ServerLostError(f"status {reply.status_code}{through}")
            yield reply.headers, reply.iter_bytes()
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ServerLostError(f"{_no_reply(error)}{through}") from error


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine: 127.0.0.0/8, ::1, localhost."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def proxy_route(url: str) -> str:
    """The environment variable that names a proxy for an address, with the proxy's host and port; "" without one."""
    parts = urlsplit(url)
    if is_loopback(url) or proxy_bypass(parts.hostname or ""):
        return ""
    names = (f"{parts.scheme}_proxy", f"{parts.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    variable = next((name for name in names if os.environ.get(name)), "")
    if not variable:
        return ""
    # Never the whole value: it may hold a user and a password.
    _, _, place = os.environ[variable].rpartition("@")
    return f"{variable} ({place.rpartition('//')[2].partition('/')[0]})"


def proxy_trouble() -> str:
    """Why the proxies of the environment cannot be used at all; "" where they can."""
    import httpx2

    # Not the library's words: they may quote the variable, with a user and a password.
    try:
        httpx2.Client().close()
    except ImportError:
        return "a SOCKS proxy without the package socksio (pip install socksio)"
    except (ValueError, httpx2.InvalidURL):
        return "no address of a proxy, such as http://host:port"
    return ""


def direct_client(timeout_s: float, read_timeout_s: float) -> "httpx2.AsyncClient":
    """A client that uses no proxy."""
    import httpx2

    return httpx2.AsyncClient(
        trust_env=False, timeout=httpx2.Timeout(timeout_s, read=read_timeout_s)
    )


def _no_reply(error: Exception) -> str:
    return f"no reply ({type(error).__name__}{f': {error}' if str(error) else ''})"
