# SPDX-License-Identifier: Apache-2.0
"""Errors that a client of the server reads, each with a status of HTTP."""

from typing import Any

from quadriga.errors import QuadrigaError


class CallError(QuadrigaError):
    """A call that gets no completion.

    Args:
        where: the field or header.
        got: what was there.
        expected: what should be there.
        fix: what to do about it, as a sentence.
        status: status of HTTP. Clients repeat calls with 429 and from 500 on.
    """

    def __init__(
        self, where: str, got: str = "", expected: str = "", fix: str = "", *, status: int = 400
    ) -> None:
        super().__init__(where, got=got, expected=expected, fix=fix)
        self.status = status

    @property
    def body(self) -> dict[str, Any]:
        """The error in the form of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.where, "code": self.status}
        return {"error": error}


def shown(value: Any) -> str:
    """A JSON value for a message, cut to a length that can be read."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
