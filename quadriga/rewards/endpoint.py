# SPDX-License-Identifier: Apache-2.0
"""JSON over HTTP to a service that may be busy or down for a while: retries with back-off, and one deadline for all.

answer                            what follows
200 with a JSON object            it is returned
408, 425, 429, 5xx                another attempt, after the server's Retry-After or the back-off
nothing, a broken connection      another attempt
200 without a JSON object         another attempt
any other status                  an error at once: asking again does not help
"""

import json
import random
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from http.client import HTTPException
from typing import Any

from quadriga.errors import RewardError

_RETRIED = frozenset({408, 425, 429})
_LONGEST_PAUSE_S = 60.0
_LONGEST_QUOTE = 300


class Endpoint:
    """One address that takes and gives JSON.

    Args:
        url: of the service, with the path.
        headers: of every request, beside the content type.
        max_attempts: requests for one answer.
        backoff_s: pause after the first failure; it doubles with each, up to a minute, and varies by a quarter.
        sleep: waits for so many seconds.
    """

    def __init__(
        self,
        url: str,
        *,
        headers: Mapping[str, str] | None = None,
        max_attempts: int = 5,
        backoff_s: float = 1.0,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.url = url
        self._headers = {"Content-Type": "application/json", **(headers or {})}
        self._max_attempts = max_attempts
        self._backoff_s = backoff_s
        self._sleep = sleep

    def post(
        self, body: Mapping[str, Any], *, timeout_s: float, before_attempt: Callable[[], None] | None = None
    ) -> dict[str, Any]:
        """The answer to one request.

        Args:
            body: sent as JSON.
            timeout_s: for all attempts and the pauses between them.
            before_attempt: called before each; a rate limit waits here, and its wait counts as well.

        Raises:
            TimeoutError: no answer in time; it says what the last attempt met.
            RewardError: the service refuses the request, or no attempt brought an answer.
        """
        deadline = time.monotonic() + timeout_s
        trouble = "no attempt has ended"
        for attempt in range(1, self._max_attempts + 1):
            if before_attempt is not None:
                before_attempt()
            left = deadline - time.monotonic()
            if left <= 0:
                raise TimeoutError(f"{self.url}: no answer within {timeout_s:g} s; {trouble}")
            answer, trouble, pause_s = self._attempt(body, left)
            if answer is not None:
                return answer
            if attempt < self._max_attempts:
                pause_s = pause_s if pause_s is not None else self._pause_s(attempt)
                if time.monotonic() + pause_s >= deadline:
                    raise TimeoutError(f"{self.url}: no answer within {timeout_s:g} s; {trouble}")
                self._sleep(pause_s)
        raise RewardError(
            self.url,
            got=f"{trouble} (the last of {self._max_attempts} attempts)",
            expected="an answer in JSON",
            fix="See whether the service is up, and lower the rate of requests if it is busy.",
        )

    def _attempt(self, body: Mapping[str, Any], left_s: float) -> tuple[dict[str, Any] | None, str, float | None]:
        """The answer, or what went wrong and how long the server asks to wait."""
        request = urllib.request.Request(self.url, json.dumps(body).encode(), self._headers, method="POST")
        try:
            with urllib.request.urlopen(request, timeout=left_s) as response:
                text = response.read().decode("utf-8", "replace")
        except urllib.error.HTTPError as error:
            with error:
                said = error.read().decode("utf-8", "replace")[:_LONGEST_QUOTE]
            if error.code not in _RETRIED and error.code < 500:
                raise RewardError(self.url, got=f"HTTP {error.code}: {said}", expected="HTTP 200") from error
            return None, f"HTTP {error.code}: {said}", _seconds(error.headers.get("Retry-After"))
        except (OSError, HTTPException) as error:
            return None, f"no answer ({type(error).__name__}: {error})", None
        try:
            answer = json.loads(text)
        except json.JSONDecodeError:
            return None, f"an answer that is not JSON: {text[:_LONGEST_QUOTE]!r}", None
        if not isinstance(answer, dict):
            return None, f"JSON that is no object: {text[:_LONGEST_QUOTE]!r}", None
        return answer, "", None

    def _pause_s(self, attempt: int) -> float:
        # Many callers that failed together must not come back together.
        return min(_LONGEST_PAUSE_S, self._backoff_s * 2 ** (attempt - 1)) * random.uniform(0.75, 1.25)


def _seconds(retry_after: str | None) -> float | None:
    if retry_after is None or not retry_after.strip().isdigit():
        # It may also be a date; the back-off serves as well.
        return None
    return min(_LONGEST_PAUSE_S, float(retry_after))
