# SPDX-License-Identifier: Apache-2.0
"""Errors that clients of the server receive, with their HTTP status."""

from typing import Any, TypeAlias

from quadriga.errors import QuadrigaError

JsonObject: TypeAlias = dict[str, Any]
"""An object of the JSON in calls and answers."""


class CallError(QuadrigaError):
    """Error that answers a call instead of a completion.

    Args:
        where: the field or header that is wrong, or the part of the server that failed.
        got: value of the field or header, or what happened.
        expected: what was expected instead.
        fix: advice, as a sentence.
        status: HTTP status. Clients repeat calls that were answered by 429, or 500 and above.
    """

    def __init__(
        self, where: str, got: str = "", expected: str = "", fix: str = "", *, status: int = 400
    ) -> None:
        super().__init__(where, got=got, expected=expected, fix=fix)
        self.status = status

    @property
    def body(self) -> JsonObject:
        """The error in the form of OpenAI's API."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        error = {"message": str(self), "type": kind, "param": self.where, "code": self.status}
        return {"error": error}


def format_value(value: Any) -> str:
    """Format a JSON value for an error message, in at most 80 characters."""
    text = "null" if value is None else repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."
