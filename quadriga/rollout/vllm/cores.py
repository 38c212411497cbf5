# SPDX-License-Identifier: Apache-2.0
"""vLLM's own engine, in this process or in processes of its own; requests to it, and responses out of its outputs.

in this process       the caller's thread steps it; tensors are handed to the model as they are
in its own processes  vLLM's front end runs in a thread here; requests join and leave while others run

    any thread ── respond(a) ──────┐                      ┌──────────────────┐ msgpack ┌─────────────────┐
    any thread ── respond(b) ──────┼─> loop of a thread ──│ vLLM's front end │ <─────> │ its engine core │
    any thread ── ask, renewed ────┘      of our own      └──────────────────┘         └─────────────────┘

consumes: requests from any thread and any event loop; each is a coroutine on the thread's loop.
waits for: the engine core's process; its death ends every call with an error that says so.
unblocked by: the end of a response, `abort`, the caller's cancellation, `close`.

For new weights beside generation (`renewed`) vLLM pauses between two steps. Its worker says how many tokens each
response has there, so that each token has its version whenever it is delivered; what has none yet begins anew.
"""

import asyncio
import inspect
import itertools
import logging
import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist

from quadriga.background import EventLoopThread
from quadriga.errors import RolloutError
from quadriga.rollout.interface import Completion, SamplingParams
from quadriga.rollout.third_party import FINISH_REASONS, LogProbsOf, split_log_probs
from quadriga.rollout.vllm.library import WHERE, Library, executor, started, unfinished_outputs

logger = logging.getLogger(__name__)

_END_S = 30.0
HEALTH_CHECK_EVERY_S = 10.0


class Request(NamedTuple):
    """vLLM's prompt and sampling parameters, and its `LoRARequest` for an adapter.

    `expanded` is the prompt with images as vLLM should expand it; None for text.
    """

    prompt: dict[str, Any]
    sampling: Any
    adapter: Any
    expanded: Sequence[int] | None


def results_of(futures: Sequence[Future[Completion]]) -> list[Completion]:
    """All of them, or the first error, which cancels the rest."""
    try:
        for future in wait(futures, return_when=FIRST_EXCEPTION).done:
            future.result()
        return [future.result() for future in futures]
    finally:
        for future in futures:
            future.cancel()


@dataclass
class Response:
    """What has come of one response so far; for `expanded` see `Request`. `versions`: first token and version of each
    set of weights that drew some. `is_void`: newer weights came before any had drawn one."""

    expanded: Sequence[int] | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    is_void: bool = False
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: str | None = None

    def add(self, output: Any) -> None:
        """Take over what a `RequestOutput` of vLLM brings.
        Raises RolloutError: vLLM has repeated the tokens of images otherwise than the data, so training would see
        another prompt; or log-probabilities are missing."""
        if self.expanded is not None and list(output.prompt_token_ids) != list(self.expanded):
            count = len(output.prompt_token_ids)
            got = f"{count} tokens of a prompt with images, as vLLM's image processor counts them"
            rest = "nothing of the kind under actor_rollout_ref.rollout.engine_kwargs.vllm"
            fix = f"Both read preprocessor_config.json: set image sizes by data.mm_processor_kwargs alone, and {rest}."
            raise RolloutError(
                WHERE, got=got, expected=f"{len(self.expanded)}, as the data's does", fix=fix
            )
        [one] = output.outputs
        if one.token_ids:
            numbers = list(one.logprobs.logprobs)
            if len(numbers) != len(one.token_ids):
                got = f"{len(numbers)} log-probabilities of {len(one.token_ids)} tokens"
                raise RolloutError(WHERE, got=got, expected="one each")
            self.token_ids.extend(one.token_ids)
            self.log_probs.extend(numbers)
        self.reason = one.finish_reason or self.reason

    def completion(
        self, sampling: SamplingParams, log_probs_of: LogProbsOf, weight_version: int
    ) -> Completion:
        """The response as ours; for its log-probabilities see `split_log_probs`.
        Raises RolloutError: its finish reason is not known, or a log-probability is not a number."""
        reason = "abort" if self.reason is None else FINISH_REASONS.get(self.reason)
        if reason is None:
            got = f"a response that ended with {self.reason!r}"
            raise RolloutError(WHERE, got=got, expected=", ".join(FINISH_REASONS))
        if any(math.isnan(number) for number in self.log_probs):
            fix = "The weights hold NaN or infinite values, or overflow: look at actor/grad_norm, or use float32."
            raise RolloutError(
                WHERE,
                got="a log-probability that is not a number",
                expected="finite logits",
                fix=fix,
            )
        before, drawn = split_log_probs(self.log_probs, sampling, log_probs_of)
        ends, versions = (
            [first for first, _ in self.versions[1:]] + [len(self.token_ids)],
            list[int](),
        )
        for end, (_, version) in zip(ends, self.versions, strict=False):
            versions += [version] * (end - len(versions))
        return Completion(self.token_ids, before, reason, weight_version, drawn, versions=versions)


class Core(ABC):
    """vLLM's engine."""

    is_in_process: ClassVar[bool]
    is_lost: bool = False
    """Whether its process has ended."""

    @abstractmethod
    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of vLLM's engine and wait for what it returns."""

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` in each process that holds the model."""
        return self.ask("collective_rpc", method, args=args)


class InProcessCore(Core):
    """vLLM's engine in this process, with these arguments, on this device; for its place see `executor`'s `group`."""

    is_in_process = True
    # Engines of this process share vLLM's process groups, which end with the first engine that is shut down or
    # collected as garbage, and torch's own process group with them, whoever made it. So closed ones are kept until the
    # last one is.
    _open: ClassVar[set[int]] = set()
    _closed: ClassVar[list[Any]] = []
    _has_foreign_group: ClassVar[bool] = False

    def __init__(
        self, library: Library, arguments: dict[str, Any], device: torch.device, place: Any = None
    ) -> None:
        if not (InProcessCore._open or InProcessCore._closed):
            InProcessCore._has_foreign_group = dist.is_available() and dist.is_initialized()
        self._ids, self._aborted = itertools.count(1), threading.Event()
        # The same at the start and later: what is compiled, and captured in CUDA graphs, is what generates.
        self._stance = "force_eager" if arguments["enforce_eager"] else "default"
        with started(), torch.compiler.set_stance(self._stance):
            own = library.module.EngineArgs(**arguments).create_engine_config()
            self.engine: Any = library.module.LLMEngine(
                own, executor(device, place), log_stats=False
            )
        InProcessCore._open.add(id(self))

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        owner = self.engine if hasattr(self.engine, method) else self.engine.engine_core
        return getattr(owner, method)(*args, **options)

    def generate_batch(self, requests: Sequence[Request]) -> list[Response]:
        """The responses, in the order of the requests."""
        self._aborted.clear()
        responses: dict[str, Response] = {}
        try:
            with torch.compiler.set_stance(self._stance):
                for request in requests:
                    request_id = str(next(self._ids))
                    self.engine.add_request(
                        request_id, request.prompt, request.sampling, lora_request=request.adapter
                    )
                    responses[request_id] = Response(request.expanded)
                while self.engine.has_unfinished_requests() and not self._aborted.is_set():
                    for output in self.engine.step():
                        responses[output.request_id].add(output)
            for output in unfinished_outputs(self.engine, responses):
                responses[output.request_id].add(output)
        finally:
            if self.engine.has_unfinished_requests():
                self.engine.abort_request(list(responses))
        return list(responses.values())

    def abort(self) -> None:
        """End every unfinished response; from any thread."""
        self._aborted.set()

    def close(self) -> None:
        """End the engine."""
        InProcessCore._open.discard(id(self))
        InProcessCore._closed.append(self.engine)
        if not (InProcessCore._open or InProcessCore._has_foreign_group):
            for engine in InProcessCore._closed:
                engine.engine_core.shutdown()
            InProcessCore._closed.clear()


class ProcessCore(Core):
    """vLLM's engine in processes of its own, with these arguments.

    One that does not answer a health check, between two of its steps, for `silent_s` seconds is killed: its requests
    fail, and others can serve them.
    """

    is_in_process = False

    def __init__(
        self, library: Library, arguments: dict[str, Any], silent_s: float = 300.0
    ) -> None:
        self._ids, self._silent_s = itertools.count(1), silent_s
        self._running: dict[str, Response] = {}
        self._is_open = asyncio.Event()
        """On the thread's loop: whether responses may begin."""
        self._is_open.set()
        self._thread = EventLoopThread("vllm")
        vllm = library.module
        try:
            with started(arguments["tensor_parallel_size"]):
                start = self._submit(
                    vllm.AsyncLLMEngine.from_engine_args, vllm.AsyncEngineArgs(**arguments)
                )
                self.engine: Any = start.result()
        except BaseException:
            self._thread.close(_END_S)
            raise
        self._thread.submit(self._check_health())

    @property
    def is_lost(self) -> bool:
        return self.engine.errored

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        return self._submit(getattr(self.engine, method), *args, **options).result()

    def start(self, work: Coroutine[Any, Any, Completion]) -> Future[Completion]:
        """Run a coroutine on the thread's loop; to cancel the future cancels it."""
        return self._thread.submit(work)

    async def respond(self, ask: Callable[[], tuple[Request, int]]) -> Response:
        """On the thread's loop, one response; `ask` says to what and by which version of the weights. Where it is
        cancelled, vLLM drops the request."""
        while True:
            await self._is_open.wait()
            (one, version), request_id = ask(), str(next(self._ids))
            response = self._running[request_id] = Response(one.expanded, [(0, version)])
            try:
                async for output in self.engine.generate(
                    one.prompt, one.sampling, request_id, lora_request=one.adapter
                ):
                    response.add(output)
            finally:
                del self._running[request_id]
            if not response.is_void:
                return response

    @contextmanager
    def renewed(self, version: int, *, keeps_cache: bool) -> Iterator[None]:
        """Around a load of weights of a version: vLLM makes no step, and what it is generating goes on afterwards, with
        `keeps_cache` on the KV cache of the older ones. After an error it stays as it is, and generates no more."""

        async def pause() -> dict[str, int]:
            self._is_open.clear()
            await self.engine.pause_generation(mode="keep", clear_cache=not keeps_cache)
            # Of requests by vLLM's names, which are ours with something behind.
            drawn = (await self.engine.collective_rpc("drawn_tokens"))[0] if self._running else {}
            return {name.partition("-")[0]: count for name, count in drawn.items()}

        async def go_on() -> None:
            for request_id, response in self._running.items():
                if drawn.get(request_id):
                    response.versions.append((drawn[request_id], version))
                else:  # not begun, or done and not delivered yet: it is generated anew
                    response.is_void = True
            await self.engine.abort(
                [name for name, response in self._running.items() if response.is_void]
            )
            await self.engine.resume_generation()
            self._is_open.set()

        drawn = self._submit(pause).result()
        yield
        self._submit(go_on).result()

    def abort(self) -> None:
        """End every unfinished response; from any thread."""
        self.ask("abort", sorted(self._running))

    def close(self) -> None:
        """End the engine."""
        self.ask("shutdown", timeout=_END_S)
        # vLLM shuts down once more where its engine is collected as garbage, and fails at that if the interpreter is
        # ending: the last reference goes here.
        del self.engine
        self._thread.close(_END_S)

    async def _check_health(self) -> None:
        while not self.is_lost:
            await asyncio.sleep(HEALTH_CHECK_EVERY_S)
            processes = self.engine.engine_core.resources.engine_manager.processes
            try:
                await asyncio.wait_for(self.engine.is_sleeping(), self._silent_s)
            except TimeoutError:
                pids = [process.pid for process in processes]
                logger.warning(
                    "vLLM's process %s has not answered for %g s, and is killed",
                    pids,
                    self._silent_s,
                )
                for process in processes:
                    process.kill()

    def _submit(self, function: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        """Call a function on the thread's loop; a coroutine that it returns runs there to its end."""

        async def call() -> Any:
            result = function(*args, **options)
            return await result if inspect.isawaitable(result) else result

        return self._thread.submit(call())
