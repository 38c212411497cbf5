# SPDX-License-Identifier: Apache-2.0
"""Routes of the page. Data are for callers that have the token and use a name of this server."""

import asyncio
from collections.abc import Collection

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from quadriga.errors import QuadrigaError
from quadriga.serve.errors import CallError
from quadriga.serve.gate import require_caller
from quadriga.view.data import ViewData
from quadriga.view.page import STATIC_FILES, read_static
from quadriga.view.runs import describe_error

_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": _POLICY,
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
"""Headers of every response. The page runs no script and loads nothing but its own files."""
# Media types by the ending of a file.
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript"}


class ViewApp:
    """The application behind the page.

    Args:
        data: answers to the page.
        token: the token that callers must have.
        hosts: names under which the server is reached.

    Attributes:
        asgi: the application, as uvicorn runs it.
    """

    def __init__(self, data: ViewData, token: str, hosts: Collection[str]) -> None:
        self._data = data
        self._token = token
        self._hosts = hosts
        routes = [
            Route("/", self._file),
            Route("/static/{name}", self._file),
            Route("/api/{name}", self._answer),
        ]
        handlers = {
            CallError: _respond_to_bad_call,
            QuadrigaError: _respond_to_failure,
            OSError: _respond_to_failure,
            404: _respond_to_bad_call,
        }
        self.asgi = Starlette(routes=routes, exception_handlers=handlers)

    async def _file(self, request: Request) -> Response:
        """Answer `/` and `/static/NAME` with a file of the page."""
        # "": no token is required. The files hold no data of runs, and a browser asks for most of them
        # without the token.
        require_caller(request.scope, request.headers, "", self._hosts)
        name = request.path_params.get("name", "index.html")
        if name not in STATIC_FILES:
            raise CallError("address", got=name, expected="a file of the page", status=404)
        media_type = _TYPES[name.rpartition(".")[2]]
        return Response(read_static(name), headers=HEADERS, media_type=media_type)

    async def _answer(self, request: Request) -> Response:
        """Answer `/api/NAME` with JSON, see `ViewData.answer`. Callers must have the token."""
        require_caller(request.scope, request.headers, self._token, self._hosts)
        name = request.path_params["name"]
        # Files are read in a thread, so that a large one does not keep other requests waiting.
        body = await asyncio.to_thread(self._data.answer, name, request.query_params)
        return Response(body, headers=HEADERS, media_type="application/json")


def _respond_to_bad_call(request: Request, error: Exception) -> Response:
    """Response with text to a request that is not allowed, or for an address that does not exist."""
    # A CallError has `status`, Starlette's own error `status_code`.
    status = getattr(error, "status", None) or getattr(error, "status_code", 404)
    return PlainTextResponse(f"{error}\n", status, headers=HEADERS)


def _respond_to_failure(request: Request, error: Exception) -> Response:
    """Response with an error for the page to show, such as a file that cannot be read."""
    return JSONResponse({"error": describe_error(error)}, 404, headers=HEADERS)
