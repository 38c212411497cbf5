# SPDX-License-Identifier: Apache-2.0
"""Checks before a call reaches its route: the caller, and the size and encoding of the body."""

import hmac
import zlib
from collections.abc import Awaitable, Callable, Collection, Mapping
from typing import Any, TypeAlias

from quadriga.serve.errors import CallError, format_value

MAX_BODY_BYTES = 8 << 20
"""Largest body, also after decompression."""
MAX_HEADER_BYTES = 16 << 10
"""Largest headers of a call."""
# A body above `MAX_BODY_BYTES` is read and dropped up to this size. See `read_body`.
_DRAINED_BYTES = 256 << 20
OPEN_PATH = "/health"
"""Path that needs no key."""
LOOPBACK = ("127.0.0.1", "localhost", "::1")
"""Names of this machine that other machines cannot reach."""

Receive: TypeAlias = Callable[[], Awaitable[dict[str, Any]]]


def require_caller(
    scope: Mapping[str, Any], headers: Mapping[str, str], key: str, hosts: Collection[str]
) -> None:
    """Raise an error if the headers of a call do not allow it.

    Args:
        scope: the call's scope in ASGI.
        headers: headers, by names in lower case.
        key: the key that callers must send; "": none.
        hosts: names under which the server can be reached.

    Raises:
        CallError: the headers are too large, name another host, or do not have the key; or the body of
            a POST has another type than JSON. For `OPEN_PATH`, key and type are not checked.
    """
    header_bytes = sum(len(name) + len(value) for name, value in scope["headers"])
    if header_bytes > MAX_HEADER_BYTES:
        raise CallError(
            "headers",
            got=f"{header_bytes} bytes",
            expected=f"at most {MAX_HEADER_BYTES}",
            status=431,
        )
    # A web page in a browser on this machine can reach a server on loopback by a DNS name of its own
    # ("DNS rebinding"), which is then in this header.
    host = headers.get("host", "").lower()
    # A port may follow. An IPv6 address is in brackets.
    host_name = host.partition(":")[0]
    if host.startswith("["):
        host_name = host[1:].partition("]")[0]
    if host_name not in {*hosts, scope["server"][0]}:
        raise CallError(
            "Host",
            got=format_value(host),
            expected=f"one of {', '.join(sorted(hosts))}",
            status=403,
        )
    if scope["path"] == OPEN_PATH:
        return
    if key:
        scheme, _, token = headers.get("authorization", "").partition(" ")
        bearer_token = token if scheme.lower() == "bearer" else ""
        sent_key = headers.get("x-api-key") or bearer_token
        # `compare_digest` takes the same time wherever the keys differ, so that it reveals nothing.
        if not hmac.compare_digest(sent_key.encode(), key.encode()):
            raise CallError(
                "key",
                got="a wrong key" if sent_key else "no key",
                expected="the server's, as Authorization: Bearer or x-api-key",
                status=401,
            )
    if scope["method"] == "POST":
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json":
            raise CallError(
                "Content-Type", got=format_value(kind), expected="application/json", status=415
            )


async def read_body(receive: Receive, headers: Mapping[str, str]) -> bytes:
    """Receive and decompress the body of a call.

    Args:
        receive: receives the next message of ASGI.
        headers: headers, by names in lower case.

    Returns:
        The body, decompressed.

    Raises:
        CallError: the body is too large or cannot be decompressed, or the client has disconnected.
    """
    chunks = []
    size = 0
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise CallError("body", got="a client that is gone", status=499)
        chunk = message.get("body", b"")
        size += len(chunk)
        # A client that is still sending would not see the refusal. So a body that is too large is read
        # to its end, or to `_DRAINED_BYTES`, and dropped.
        if size <= MAX_BODY_BYTES:
            chunks.append(chunk)
        else:
            chunks.clear()
        if not message.get("more_body", False) or size > _DRAINED_BYTES:
            break
    if size > MAX_BODY_BYTES:
        raise _too_large(f"{size} bytes")

    body = b"".join(chunks)
    encoding = headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return body
    if encoding not in ("gzip", "deflate"):
        raise CallError(
            "Content-Encoding",
            got=format_value(encoding),
            expected="gzip, deflate or nothing",
            status=415,
        )
    try:
        # Adding 32 to `wbits` makes zlib detect the format: gzip, or zlib ("deflate"). Decompressing
        # stops one byte above the limit, which shows that the body is too large.
        decompressor = zlib.decompressobj(wbits=zlib.MAX_WBITS | 32)
        body = decompressor.decompress(body, MAX_BODY_BYTES + 1)
    except zlib.error as error:
        raise CallError("body", got=str(error), expected=encoding) from error
    if len(body) > MAX_BODY_BYTES:
        raise _too_large(f"more than {MAX_BODY_BYTES} bytes after decompression")
    if not decompressor.eof or decompressor.unused_data:
        raise CallError(
            "body",
            got="an incomplete stream, or several",
            expected=f"one complete {encoding} stream",
        )
    return body


def _too_large(got: str) -> CallError:
    """Make the error about a body that is too large."""
    return CallError("body", got=got, expected=f"at most {MAX_BODY_BYTES} bytes", status=413)
