# SPDX-License-Identifier: Apache-2.0
"""HTTP client for JSON services that may be busy or down for a while. Works in threads and in event loops.

Reply of the server                           Result
200 with a JSON object                        the object
408, 425, 429, 5xx; 200 without an object     ServerLostError: another attempt, or another server, may succeed
no reply, a broken connection, a timeout      ServerLostError
any other status                              the caller's error class: the server would refuse a second attempt, too

Every request opens its own connection, so no connection goes stale and none has to be closed. The time limit of a
request is a deadline for the whole request; a reply has at most `MAX_BYTES`. Addresses of this machine are never
requested through a proxy.
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

MAX_BYTES = 64 << 20  # limit of a reply after decompression
PROXY_FIX = "Correct the variable, unset it, or name the server's host in NO_PROXY."
# These encodings have a bounded compression ratio, so one chunk is never much larger than `MAX_BYTES`.
_ENCODINGS = ("", "identity", "gzip", "deflate")
_RETRIED_STATUSES = frozenset({408, 425, 429})
_MAX_PAUSE_S = 60.0
_MAX_QUOTE_CHARS = 500


class ServerLostError(Exception):
    """A request has failed, but another attempt, or another server, may succeed.

    Args:
        message: description of the failure.
        retry_after_s: seconds to wait before the next attempt, if the server has asked for that.
    """

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


@dataclass(eq=False, repr=False)  # its headers may hold a key
class HTTPClient:
    """A client of one server that receives and sends JSON. Threads and event loops may share it.

    Args:
        url: address of the server.
        error: class of the errors that users see, such as RewardError.
        setting: configuration key that holds the address.
        where: purpose of the server. Errors show it before the address.
        fix: advice in the error for a refused request.
        headers: headers of every request, in addition to the content type.
        timeout_s: time limit of one request in seconds. A server that exceeds it counts as lost.
        use_proxies: whether to use the proxies of the environment, such as HTTP_PROXY.
    """

    url: str
    error: type[QuadrigaError]
    _: KW_ONLY
    setting: str
    where: str = ""
    fix: str = ""
    headers: Mapping[str, str] | None = None
    timeout_s: float = 600.0
    use_proxies: bool = False

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise self.error(
                self.setting, got=repr(self.url), expected="an address such as http://host:8000"
            )
        self.where = f"{self.where}, {self.url}" if self.where else self.url
        self.url = self.url.rstrip("/")
        common = {"Content-Type": "application/json", "Accept-Encoding": "gzip, deflate"}
        self.headers = {**common, **(self.headers or {})}
        # Use the certificates of the machine, which may include a private authority. By default,
        # httpx2 uses those of a package. Without https, none are needed.
        verify = ssl.create_default_context() if parts.scheme == "https" else False
        # With `trust_env` httpx2 reads the proxies from environment variables.
        trusts_env = self.use_proxies and not is_loopback(self.url)
        self._options: dict[str, Any] = {"verify": verify, "trust_env": trusts_env, "timeout": None}
        # A proxy that cannot be used is reported now, and not by every request.
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
        """Send one request and return the server's reply.

        Args:
            path: path below the address, without a leading slash.
            body: content of the request, sent as JSON.
            method: HTTP method.
            timeout_s: time limit in seconds, instead of that of the client.
            needs_object: whether the reply must be a JSON object. If False, any JSON is returned, and None for
                a reply that is not JSON.

        Raises:
            ServerLostError: another attempt may succeed; see the table at the top of the module.
            QuadrigaError: the server refuses the request. Its class is `error` of the client.
        """
        reply = self.call_async(
            path, body, method=method, timeout_s=timeout_s, needs_object=needs_object
        )
        return run_coroutine(reply)

    async def call_async(
        self,
        path: str = "",
        body: Mapping[str, Any] | None = None,
        *,
        method: str = "POST",
        timeout_s: float | None = None,
        needs_object: bool = True,
    ) -> Any:
        """Send one request, as `call` does.

        If the task is cancelled, the connection is closed, by which the server knows that nobody
        waits for its reply.

        Raises:
            ServerLostError, QuadrigaError: as for `call`.
        """
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
                text = await self._read_text(reply)
        except TimeoutError as error:
            raise ServerLostError(f"no reply within {limit_s:g} s") from error
        except httpx2.HTTPError as error:
            raise ServerLostError(_describe_no_reply(error)) from error
        return self._parse(reply, text, path, needs_object)

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
        """Send a request until the server replies, with one deadline for all attempts.

        Args:
            body: content of the request, sent as JSON.
            timeout_s: time limit in seconds for all attempts and the pauses between them.
            max_attempts: most requests.
            backoff_s: pause in seconds after the first failure. It doubles with each failure, up to a minute, and
                varies by a quarter. The server's Retry-After replaces it.
            before_attempt: called before each attempt, for example to wait for a rate limit. The deadline includes it.
            sleep: waits for a number of seconds.

        Raises:
            TimeoutError: no reply in time. The message has the failure of the last attempt.
            QuadrigaError: the server refuses the request, or all attempts failed. Its class is `error` of the client.
        """
        deadline = time.monotonic() + timeout_s
        # The message of a timeout has the failure of the last attempt.
        failure = "no attempt has ended"
        for attempt in range(1, max_attempts + 1):
            if before_attempt is not None:
                before_attempt()
            remaining_s = deadline - time.monotonic()
            if remaining_s <= 0:
                break
            try:
                return self.call(body=body, timeout_s=remaining_s)
            except ServerLostError as lost:
                failure = str(lost)
                pause_s = lost.retry_after_s
            if attempt == max_attempts:
                raise self.error(
                    self.where,
                    got=f"{failure} (the last of {max_attempts} attempts)",
                    expected="a reply in JSON",
                    fix="Check that the service is up, and lower the rate of requests if it is busy.",
                )
            if pause_s is None:
                pause_s = min(_MAX_PAUSE_S, backoff_s * 2 ** (attempt - 1))
                # Callers that failed together must not retry together.
                pause_s *= random.uniform(0.75, 1.25)
            if time.monotonic() + pause_s >= deadline:
                break
            sleep(pause_s)
        raise TimeoutError(f"{self.where}: no reply within {timeout_s:g} s; {failure}")

    async def _read_text(self, reply: "httpx2.Response") -> str:
        """Read the body of a reply, and refuse one that is too large or has another encoding.

        Raises:
            QuadrigaError: the reply is refused. Its class is `error` of the client.
        """
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

    def _parse(self, reply: "httpx2.Response", text: str, path: str, needs_object: bool) -> Any:
        """Parse the body of a reply.

        Args:
            reply: the reply, for its status and headers.
            text: its body.
            path: path of the request, for errors.
            needs_object: as for `call`.

        Raises:
            ServerLostError: another attempt may succeed.
            QuadrigaError: the server refuses the request.
        """
        status = reply.status_code
        if status in _RETRIED_STATUSES or status >= 500:
            wait = reply.headers.get("Retry-After", "").strip()
            # Retry-After may also be a date, which is not read: the caller then chooses the pause.
            retry_after_s = min(_MAX_PAUSE_S, float(wait)) if wait.isdecimal() else None
            raise ServerLostError(f"status {status}: {text[:_MAX_QUOTE_CHARS]}", retry_after_s)
        if status != 200:
            where = f"{self.where}/{path}" if path else self.where
            raise self.error(
                where,
                got=f"status {status}: {text[:_MAX_QUOTE_CHARS]}",
                expected="status 200",
                fix=self.fix,
            )
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            if not needs_object:
                return None
            raise ServerLostError(
                f"a reply that is not JSON: {text[:_MAX_QUOTE_CHARS]!r}"
            ) from error
        if needs_object and not isinstance(content, dict):
            raise ServerLostError(f"JSON that is no object: {text[:_MAX_QUOTE_CHARS]!r}")
        return content


@contextmanager
def document(url: str, timeout_s: float) -> Iterator[tuple[Mapping[str, str], Iterator[bytes]]]:
    """Context manager: download the document at a web address, following redirections.

    Args:
        url: address of the document.
        timeout_s: longest wait in seconds for the next bytes.

    Yields:
        Headers of the reply, and an iterator over chunks of its bytes.

    Raises:
        ServerLostError: there was no reply, a status other than 200, or a timeout; or the proxy of
            the environment cannot be used.
    """
    import httpx2

    route = proxy_route(url)
    through = f", through {route}" if route else ""
    if route and (trouble := proxy_trouble()):
        raise ServerLostError(f"{trouble}{through}")
    try:
        client = httpx2.Client(
            timeout=timeout_s, follow_redirects=True, trust_env=not is_loopback(url)
        )
        with client, client.stream("GET", url) as reply:
            if reply.status_code != 200:
                raise ServerLostError(f"status {reply.status_code}{through}")
            yield reply.headers, reply.iter_bytes()
    except (httpx2.HTTPError, httpx2.InvalidURL) as error:
        raise ServerLostError(f"{_describe_no_reply(error)}{through}") from error


def is_loopback(url: str) -> bool:
    """Whether an address is on this machine: in 127.0.0.0/8, ::1 or localhost."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def proxy_route(url: str) -> str:
    """Describe the proxy for an address: environment variable, host and port; "" if there is none."""
    parts = urlsplit(url)
    if is_loopback(url) or proxy_bypass(parts.hostname or ""):
        return ""
    names = (f"{parts.scheme}_proxy", f"{parts.scheme}_proxy".upper(), "all_proxy", "ALL_PROXY")
    variable = next((name for name in names if os.environ.get(name)), "")
    if not variable:
        return ""
    # The value may have a user and a password, which must not be shown:
    # "http://user:password@proxy:3128/" becomes "proxy:3128".
    _, _, without_password = os.environ[variable].rpartition("@")
    host_and_port = without_password.rpartition("//")[2].partition("/")[0]
    return f"{variable} ({host_and_port})"


def proxy_trouble() -> str:
    """Say why the proxies of the environment cannot be used; "" if they can."""
    import httpx2

    # A client reads the variables when it is made. Its own message is not used, because it may
    # quote a variable with user and password.
    try:
        httpx2.Client().close()
    except ImportError:
        return "a SOCKS proxy without the package socksio (pip install socksio)"
    except (ValueError, httpx2.InvalidURL):
        return "no address of a proxy, such as http://host:port"
    return ""


def direct_client(timeout_s: float, read_timeout_s: float) -> "httpx2.AsyncClient":
    """Make a client that uses no proxy.

    Args:
        timeout_s: limit in seconds to connect and to send.
        read_timeout_s: longest wait in seconds for the next bytes.
    """
    import httpx2

    return httpx2.AsyncClient(
        trust_env=False, timeout=httpx2.Timeout(timeout_s, read=read_timeout_s)
    )


def _describe_no_reply(error: Exception) -> str:
    """Describe an error of httpx2 by its type, and by its message if it has one."""
    return f"no reply ({type(error).__name__}{f': {error}' if str(error) else ''})"
