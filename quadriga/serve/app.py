# SPDX-License-Identifier: Apache-2.0
"""Routes of the server: chat and generation, tokens, the model, health, metrics.

A call waits for its body, and then for the engine until the completion is there, the client has
disconnected, or the time limit has passed. In the last two cases the engine drops the call.
"""

import asyncio
import json
import math
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route

from quadriga.errors import EngineLostError, QuadrigaError, WorkerLostError
from quadriga.rollout.interface import Completion
from quadriga.serve.answers import chat_body, chat_events, generate_body, sampled_log_probs
from quadriga.serve.engines import Engines
from quadriga.serve.errors import CallError, JsonObject, format_value
from quadriga.serve.fields import read_json
from quadriga.serve.gate import read_body, require_caller
from quadriga.serve.policy import ServedPolicy
from quadriga.serve.requests import Call, chat_call, generate_call, tokenize_call
from quadriga.serve.seeds import Ask, Seeds

MAX_CALLS = 256
"""Most calls in flight. Further ones are refused, and clients send them again."""
KEEP_ALIVE_S = 10.0
"""Interval of comments in a stream that waits for its answer, in seconds. They keep proxies from closing it."""
_INLINE_BYTES = 64 << 10
"""Texts below this size are tokenized in the event loop, see `_run_tokenizer`."""
_BYTES_PER_TOKEN = 4  # about, of text
_MAX_SESSION_CHARACTERS = 256
_NUM_TIMED = 10_000
"""Number of the latest calls whose times `/metrics` shows."""

Reader: TypeAlias = Callable[[Any, ServedPolicy], Call]
"""Reads the body of a call, which is decoded JSON."""
LogProbs: TypeAlias = list[float] | None
"""Log-probability of each token of a completion, by `sampled_log_probs`. None: not known."""
Writer: TypeAlias = Callable[[Call, Completion, LogProbs], JsonObject]
"""Makes the body of an answer."""
Result = TypeVar("Result")


class PolicyApp:
    """The server's application.

    Args:
        policy: the served policy.
        engines: engines that generate its responses.
        seed: `trainer.seed`.
        key: the key that callers must send; "": none.
        hosts: names under which the server can be reached.
        timeout_s: time limit of a call, in seconds.
        record_file: file to which each answered call is appended. None: none.

    Attributes:
        asgi: the ASGI application.
        is_closing: whether the server is shutting down, so that it refuses calls.
        timeout_s: time limit of a call, in seconds.
    """

    def __init__(
        self,
        policy: ServedPolicy,
        engines: Engines,
        *,
        seed: int,
        key: str,
        hosts: Collection[str],
        timeout_s: float,
        record_file: str | None = None,
    ) -> None:
        self.policy = policy
        self.engines = engines
        self.is_closing = False
        self._seeds = Seeds(seed)
        self._key = key
        self._hosts = hosts
        self.timeout_s = timeout_s
        self._record_file = None if record_file is None else Path(record_file)
        self._started = int(time.time())
        self._calls: set[asyncio.Task[Completion]] = set()
        self._num_calls = 0
        self._counts = Counter[str]()
        # Seconds of each of the latest calls in the server itself, without those in the engine.
        self._overheads_s: deque[float] = deque(maxlen=_NUM_TIMED)
        generate = partial(self._generate, read=generate_call, write=generate_body)
        write_chat = partial(chat_body, policy=policy)
        chat = partial(self._generate, read=chat_call, write=write_chat)
        # The method of a route is GET unless it names others.
        routes = [
            Route("/health", self._wrap_handler(self._health)),
            Route("/metrics", self._wrap_handler(self._metrics)),
            Route("/v1/models", self._wrap_handler(self._models)),
            Route("/tokenize", self._wrap_handler(self._tokenize), methods=["POST"]),
            Route("/inference/v1/generate", self._wrap_handler(generate), methods=["POST"]),
            Route("/v1/chat/completions", self._wrap_handler(chat), methods=["POST"]),
        ]
        self._paths = ", ".join(route.path for route in routes)
        handlers: Any = {
            HTTPException: self._answer_unknown_route,
            Exception: self._answer_unexpected_error,
        }
        self.asgi = Starlette(routes=routes, exception_handlers=handlers)

    def cancel_all(self) -> None:
        """Refuse new calls, and cancel those that wait for the engine. Any thread may call this."""
        self.is_closing = True
        for task in list(self._calls):
            task.get_loop().call_soon_threadsafe(task.cancel)

    def _wrap_handler(
        self, handle: Callable[[Request], Awaitable[Response]]
    ) -> Callable[[Request], Awaitable[Response]]:
        """Wrap the handler of a route: check the caller, and answer errors."""

        async def answer(request: Request) -> Response:
            try:
                require_caller(request.scope, request.headers, self._key, self._hosts)
                return await handle(request)
            except QuadrigaError as error:
                return self._error_response(error)

        return answer

    def _error_response(self, error: QuadrigaError) -> Response:
        """Make the answer of a call that raised an error, and count it by its status."""
        # Errors of the engine are not the client's fault: the status tells it to send the call again.
        refusal = error
        if not isinstance(refusal, CallError):
            is_lost = isinstance(error, EngineLostError | WorkerLostError)
            status = 503 if is_lost else 500
            refusal = CallError(error.where, error.got, error.expected, error.fix, status=status)
        self._counts[f'quadriga_serve_refused_total{{status="{refusal.status}"}}'] += 1
        headers = {"Retry-After": "1"} if refusal.status in (429, 503) else {}
        return JSONResponse(refusal.body, refusal.status, headers)

    async def _answer_unknown_route(self, request: Request, error: HTTPException) -> Response:
        """Answer a call of an unknown path or method."""
        got = f"{request.method} {format_value(request.url.path)}"
        expected = f"a method of one of {self._paths}"
        status = error.status_code
        return self._error_response(CallError("path", got=got, expected=expected, status=status))

    async def _answer_unexpected_error(self, request: Request, error: Exception) -> Response:
        """Answer a call that raised an unexpected error, which Starlette also logs."""
        got = f"{type(error).__name__}, which the server's log shows"
        return self._error_response(CallError("server", got=got, status=500))

    # Routes without completions

    async def _health(self, request: Request) -> Response:
        """Answer `/health`."""
        return JSONResponse({"status": "closing" if self.is_closing else "ok"})

    async def _models(self, request: Request) -> Response:
        """Answer `/v1/models`: the only model is the policy."""
        model = {
            "id": self.policy.name,
            "object": "model",
            "created": self._started,
            "owned_by": "quadriga",
            "max_model_len": self.policy.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [model]})

    async def _metrics(self, request: Request) -> Response:
        """Answer `/metrics` in the text format of Prometheus.

        `quadriga_serve_own_seconds` are quantiles of the latest calls' times without the engine.
        """
        lines = [f"{name} {count}" for name, count in sorted(self._counts.items())]
        lines.append(f"quadriga_serve_calls_in_flight {self._num_calls}")
        times = sorted(self._overheads_s)
        for quantile in (0.5, 0.99):
            if times:
                value = times[int(quantile * (len(times) - 1))]
                lines.append(f'quadriga_serve_own_seconds{{quantile="{quantile}"}} {value:.6f}')
        return PlainTextResponse("\n".join(lines) + "\n")

    async def _tokenize(self, request: Request) -> Response:
        """Answer `/tokenize`."""
        body = await self._receive_body(request)
        ids = await self._run_tokenizer(
            len(body), lambda: tokenize_call(read_json(body), self.policy)
        )
        content = {"count": len(ids), "max_model_len": self.policy.max_model_len, "tokens": ids}
        return JSONResponse(content)

    # Routes with completions

    async def _generate(self, request: Request, read: Reader, write: Writer) -> Response:
        """Answer a call that needs a completion.

        Args:
            request: the call.
            read: reads the body.
            write: makes the body of the answer.

        Raises:
            QuadrigaError: the call is refused, or there is no completion. Errors of a streamed answer
                are sent as an event instead.
        """
        started = time.perf_counter()
        session = request.headers.get("x-session-id", "")
        if len(session) > _MAX_SESSION_CHARACTERS:
            raise CallError(
                "x-session-id",
                got=f"{len(session)} characters",
                expected=f"at most {_MAX_SESSION_CHARACTERS}",
            )
        if self.is_closing:
            raise _shutdown_error()
        if self._num_calls >= MAX_CALLS:
            raise CallError(
                "server",
                got=f"{self._num_calls} calls in flight",
                expected=f"fewer than {MAX_CALLS}",
                status=429,
            )
        with self._count_in_flight():
            body = await self._receive_body(request)
            call = await self._run_tokenizer(len(body), lambda: read(read_json(body), self.policy))
            if not call.is_streamed:
                return JSONResponse(await self._answer(request, call, write, started))
        # The generator starts the call only when the response is sent. If the response is never
        # sent, nothing has to be cleaned up.
        events = self._stream_events(call, lambda: self._answer(request, call, write, started))
        return StreamingResponse(events, media_type="text/event-stream")

    async def _receive_body(self, request: Request) -> bytes:
        """Receive the body of a call.

        Raises:
            CallError: the body is refused (see `read_body`), or does not arrive in time.
        """
        try:
            body = read_body(request.receive, request.headers)
            return await asyncio.wait_for(body, self.timeout_s)
        except TimeoutError as error:
            raise CallError(
                "body", got=f"no complete body within {self.timeout_s:g} s", status=408
            ) from error

    async def _run_tokenizer(self, num_bytes: int, work: Callable[[], Result]) -> Result:
        """Run work with the tokenizer: in a thread, unless it is too short to delay other calls.

        Args:
            num_bytes: size of the text, in bytes.
            work: function to run.

        Returns:
            The result of the function.
        """
        # A long conversation takes seconds. So may a small body, if its image has many pixels.
        is_short = num_bytes < _INLINE_BYTES and self.policy.processor is None
        if is_short and not self.policy.lock.locked():
            return work()
        return await asyncio.to_thread(work)

    async def _answer(
        self, request: Request, call: Call, write: Writer, started: float
    ) -> JsonObject:
        """Generate the answer to a call.

        If this fails, the number of the call is given back (`Ask.give_back`), so that a repetition of the
        call has the same seed.

        Args:
            request: the call.
            call: the checked body of the call.
            write: makes the body of the answer.
            started: when the call arrived, by `time.perf_counter`.

        Returns:
            The body of the answer.

        Raises:
            QuadrigaError: there is no completion, or it cannot be recorded.
        """
        session = request.headers.get("x-session-id", "")
        is_retry = request.headers.get("x-stainless-retry-count", "0") != "0"
        images_key = "" if call.images is None else call.images.key
        ask = self._seeds.ask(session, call.prompt, images_key, is_retry=is_retry)
        try:
            # Measure the time in the engine, which is subtracted below.
            before = time.perf_counter()
            completion = await self._completion(request, call, ask)
            engine_s = time.perf_counter() - before
            log_probs = sampled_log_probs(call, completion)
            num_bytes = _BYTES_PER_TOKEN * len(completion.token_ids)
            body = await self._run_tokenizer(num_bytes, lambda: write(call, completion, log_probs))
            self._write_record(request, call, ask, completion, log_probs)
            self._counts["quadriga_serve_answered_total"] += 1
            self._counts["quadriga_serve_prompt_tokens_total"] += len(call.prompt)
            self._counts["quadriga_serve_generated_tokens_total"] += len(completion.token_ids)
            self._overheads_s.append(time.perf_counter() - started - engine_s)
            return body
        except BaseException:
            ask.give_back()
            raise

    @contextmanager
    def _count_in_flight(self) -> Iterator[None]:
        """Context manager that counts a call as in flight."""
        self._num_calls += 1
        try:
            yield
        finally:
            self._num_calls -= 1

    async def _completion(self, request: Request, call: Call, ask: Ask) -> Completion:
        """Complete the prompt of a call.

        Args:
            request: the call.
            call: the checked body of the call.
            ask: number and seed of the call. The seed is used unless the client has set one.

        Raises:
            CallError: the client has disconnected, the time limit has passed, the server is
                shutting down, or the engine aborted the response.
            QuadrigaError: the engine failed.
        """
        sampling = call.sampling
        if not call.has_seed:
            sampling = replace(sampling, seed=ask.seed)
        work = asyncio.ensure_future(self.engines.generate(call.prompt, sampling, call.images))
        self._calls.add(work)
        # `cancel_all` may have run before this call was in the set.
        if self.is_closing:
            work.cancel()
        # If the answer is streamed, Starlette itself watches the connection.
        waiting: set[asyncio.Future[Any]] = {work}
        if not call.is_streamed:
            waiting.add(asyncio.ensure_future(_wait_for_disconnect(request)))
        try:
            await asyncio.wait(waiting, timeout=self.timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if work.cancelled():
                raise _shutdown_error()
            if not work.done():
                # The other task has ended: the client has disconnected. Else the time has passed.
                if any(task.done() for task in waiting):
                    self._counts["quadriga_serve_clients_gone_total"] += 1
                    raise CallError("call", got="a client that is gone", status=499)
                raise CallError(
                    "call",
                    got=f"no answer within {self.timeout_s:g} s",
                    fix="Raise actor_rollout_ref.rollout.serve.timeout_s, or lower max_tokens.",
                    status=504,
                )
            completion = work.result()
        finally:
            self._calls.discard(work)
            for task in waiting:
                task.cancel()
        completion.require_fit(sampling.max_tokens, "engine, a served call")
        if completion.finish_reason == "abort":
            raise CallError("engine", got="an aborted response", fix="Try again.", status=503)
        return completion

    async def _stream_events(
        self, call: Call, answer: Callable[[], Awaitable[JsonObject]]
    ) -> AsyncIterator[str]:
        """Yield the events of a streamed answer: comments while it is generated, then the whole answer.

        Args:
            call: the checked body of the call.
            answer: generates the body of the answer. An error that it raises becomes an event.
        """
        task = asyncio.ensure_future(answer())
        try:
            with self._count_in_flight():
                while True:
                    await asyncio.wait({task}, timeout=KEEP_ALIVE_S)
                    if task.done():
                        break
                    yield ": waiting\n\n"
                body = task.result()
        except QuadrigaError as error:
            # The status 200 has been sent already, so the error is an event.
            refusal = self._error_response(error)
            yield f"data: {bytes(refusal.body).decode()}\n\n"
            return
        finally:
            task.cancel()
        for event in chat_events(body, has_usage=call.has_usage):
            yield event

    def _write_record(
        self, request: Request, call: Call, ask: Ask, completion: Completion, log_probs: LogProbs
    ) -> None:
        """Append an answered call to the record, if there is one.

        Args:
            request: the call.
            call: the checked body of the call.
            ask: number and seed of the call.
            completion: completion of the call.
            log_probs: log-probability of each token after temperature and filters. None: not known.

        Raises:
            CallError: the file cannot be written.
        """
        if self._record_file is None:
            return
        # An engine that reports no log-probabilities before the filters returns NaN for them.
        has_log_probs = all(map(math.isfinite, completion.log_probs))
        line = {
            "time": time.time(),
            "path": request.url.path,
            "session": request.headers.get("x-session-id", ""),
            "number": ask.number,
            "seed": call.sampling.seed if call.has_seed else ask.seed,
            "prompt_ids": call.prompt,
            "token_ids": completion.token_ids,
            # Log-probabilities after temperature and filters (top-k, top-p, min-p); null: not known.
            "sampled_log_probs": log_probs,
            # Log-probabilities after the temperature alone, as training uses them; null: not known.
            "log_probs": completion.log_probs if has_log_probs else None,
            "versions": completion.token_versions,
            "finish_reason": completion.finish_reason,
        }
        try:
            with self._record_file.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise CallError(
                "record of calls", got=f"{self._record_file} ({error.strerror})", status=500
            ) from error


def _shutdown_error() -> CallError:
    """Make the error of a call that the server no longer answers."""
    return CallError("server", got="its shutdown", fix="Send the call again later.", status=503)


async def _wait_for_disconnect(request: Request) -> None:
    """Wait until the client has closed the connection."""
    while (await request.receive())["type"] != "http.disconnect":
        pass
