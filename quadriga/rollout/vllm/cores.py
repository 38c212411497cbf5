# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine in this process or in its own processes, with our requests and responses.

`InProcessCore`  The caller's thread makes the steps. Tensors are passed to the model as they are.
`ProcessCore`    vLLM's front end runs in a thread here. Requests join and leave while others run.

    any thread -- respond(a) ---------------+                     +------------------+  msgpack  +-------------+
    any thread -- respond(b) ---------------+-> event loop of --> | vLLM's front end | <-------> | engine core |
    any thread -- ask, paused_for_weights --+   a thread          +------------------+           +-------------+

consumes: requests from any thread and event loop; each is a coroutine on the thread's loop.
waits for: the process of the engine core; if it dies, every call ends with an error.
unblocked by: the end of a response, `abort`, the caller's cancellation, `close`.

While requests run, new weights are loaded between two steps (`paused_for_weights`). vLLM's worker
then reports how many tokens each response has drawn, so that each token gets the version that drew
it, even if it is delivered after the load. A response that has drawn no token begins anew.
"""

import asyncio
import inspect
import itertools
import logging
import math
import random
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
import torch.distributed as dist

from quadriga.background import EventLoopThread
from quadriga.errors import RolloutError
from quadriga.rollout.interface import Completion, SamplingParams
from quadriga.rollout.third_party import FINISH_REASONS, LogProbsOf, split_log_probs
from quadriga.rollout.vllm.library import (
    WHERE,
    VLLMLibrary,
    engine_environment,
    executor,
    partial_outputs,
)

logger = logging.getLogger(__name__)

_END_S = 30.0  # time limit for the end of vLLM and of the thread
HEALTH_CHECK_EVERY_S = 10.0


class VLLMRequest(NamedTuple):
    """A request in vLLM's terms.

    Attributes:
        prompt: vLLM's prompt.
        sampling: `vllm.SamplingParams`.
        adapter: vLLM's `LoRARequest`; None without an adapter.
        expanded: token ids of a prompt with images, as the data expanded it and vLLM should; None
            for text.
    """

    prompt: dict[str, Any]
    sampling: Any
    adapter: Any
    expanded: Sequence[int] | None


@dataclass
class Response:
    """A response so far.

    Attributes:
        expanded: token ids of a prompt with images, as the data expanded it; None for text.
        versions: for each version of the weights that drew tokens, a pair: the number of the first
            token that it drew, counted from 0, and the version. Empty: not recorded.
        is_void: whether newer weights were loaded before the response's first token, so that it is
            generated anew.
        token_ids: generated tokens.
        log_probs: log-probability of each token, as vLLM reports it.
        reason: vLLM's finish reason; None if unfinished.
        begin_s: time of the request, in seconds since 1970.
        end_s: time of the last output, in seconds since 1970.
    """

    expanded: Sequence[int] | None = None
    versions: list[tuple[int, int]] = field(default_factory=list)
    is_void: bool = False
    token_ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    reason: str | None = None
    begin_s: float = field(default_factory=time.time)
    end_s: float = math.nan

    def add(self, output: Any) -> None:
        """Append the tokens of an output.

        Args:
            output: vLLM's `RequestOutput`.

        Raises:
            RolloutError: vLLM has expanded images into other tokens than the data, so that training
                would see another prompt; or log-probabilities are missing.
        """
        if self.expanded is not None and list(output.prompt_token_ids) != list(self.expanded):
            num_tokens = len(output.prompt_token_ids)
            raise RolloutError(
                WHERE,
                got=f"{num_tokens} tokens of a prompt with images,"
                " as vLLM's image processor expanded it",
                expected=f"the {len(self.expanded)} tokens of the data",
                fix="Set sizes of images only by data.mm_processor_kwargs, and leave them out of"
                " actor_rollout_ref.rollout.engine_kwargs.vllm. Both image processors read"
                " preprocessor_config.json.",
            )
        [sequence] = output.outputs
        if sequence.token_ids:
            # In vLLM's flat form there is one number for each token.
            log_probs = list(sequence.logprobs.logprobs)
            if len(log_probs) != len(sequence.token_ids):
                got = f"{len(log_probs)} log-probabilities of {len(sequence.token_ids)} tokens"
                raise RolloutError(WHERE, got, expected="one each")
            self.token_ids.extend(sequence.token_ids)
            self.log_probs.extend(log_probs)
        self.reason = sequence.finish_reason or self.reason
        self.end_s = time.time()

    def completion(
        self, sampling: SamplingParams, log_probs_of: LogProbsOf, weight_version: int
    ) -> Completion:
        """Make the completion of a response.

        Args:
            sampling: how the response was sampled.
            log_probs_of: distribution of vLLM's log-probabilities, see `split_log_probs`.
            weight_version: version of the weights at the end of the response.

        Returns:
            The completion, with finish reason "abort" if the response is unfinished.

        Raises:
            RolloutError: the finish reason is unknown, or a log-probability is not a number.
        """
        reason = "abort" if self.reason is None else FINISH_REASONS.get(self.reason)
        if reason is None:
            got = f"a response that ended with {self.reason!r}"
            raise RolloutError(WHERE, got, expected=", ".join(FINISH_REASONS))
        if any(math.isnan(number) for number in self.log_probs):
            raise RolloutError(
                WHERE,
                got="a log-probability that is not a number",
                expected="finite logits",
                fix="Look at actor/grad_norm, or use float32: the weights hold NaN or infinite"
                " values, or overflow.",
            )
        log_probs, sampling_log_probs = split_log_probs(self.log_probs, sampling, log_probs_of)
        # Each version drew the tokens up to the first token of the next version.
        num_tokens = len(self.token_ids)
        ends = [*(first for first, _ in self.versions[1:]), num_tokens]
        versions = []
        # An engine in this process leaves `self.versions` empty, and then `versions` stays empty.
        for end, (_, version) in zip(ends, self.versions, strict=False):
            # With asynchronous scheduling vLLM may draw one token beyond the end of a response.
            versions += [version] * (min(end, num_tokens) - len(versions))
        return Completion(
            self.token_ids,
            log_probs,
            reason,
            weight_version,
            sampling_log_probs,
            versions=versions,
            times=(self.begin_s, math.nan, self.end_s),  # the time of admission is unknown
        )


class Core(ABC):
    """vLLM's engine.

    Attributes:
        is_in_process: whether the engine is in this process.
        is_lost: whether the engine's own processes have ended.
    """

    is_in_process: ClassVar[bool]
    is_lost: bool = False

    @abstractmethod
    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of vLLM's engine and wait for its result.

        Args:
            method: name of the method.
            args: positional arguments.
            options: keyword arguments.

        Returns:
            The result.
        """

    def call(self, method: str, *args: Any) -> list[Any]:
        """Call a method of `WorkerExtension` in each process that holds the model.

        Args:
            method: name of the method.
            args: arguments.

        Returns:
            The results of the processes, by rank.
        """
        return self.ask("collective_rpc", method, args=args)


@contextmanager
def restored_process_state(device: torch.device) -> Iterator[None]:
    """Context manager: restore random states and the number of threads of this process on exit.

    A start of vLLM sets seeds and, on a GPU, the number of torch's threads to 1. In this process
    both belong to the trainer.

    Args:
        device: device of vLLM.
    """
    python_state = random.getstate()
    numpy_state = np.random.get_state()
    num_threads = torch.get_num_threads()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        try:
            yield
        finally:
            random.setstate(python_state)
            np.random.set_state(numpy_state)
            if device.type == "cuda":
                torch.set_num_threads(num_threads)


class InProcessCore(Core):
    """vLLM's engine in this process.

    Args:
        library: the imported vLLM.
        arguments: arguments of vLLM's engine.
        device: device of the model.
        place: name of the rollout group, and this rank in torch's default group; see `executor`.
            None: there is no group.
    """

    is_in_process = True
    # Engines of this process share vLLM's process groups. The first engine that is shut down or
    # collected as garbage ends them, and torch's process group as well, whoever made that.
    # Therefore closed engines are kept until the last one is closed.
    _open: ClassVar[set[int]] = set()  # identities of the objects whose engine is not closed
    _closed: ClassVar[list[Any]] = []  # vLLM's engines that are closed, but not shut down
    # Whether torch's process group existed before vLLM. Then no engine is shut down by `close`.
    _has_foreign_group: ClassVar[bool] = False

    def __init__(
        self,
        library: VLLMLibrary,
        arguments: dict[str, Any],
        device: torch.device,
        place: Any = None,
    ) -> None:
        if not (InProcessCore._open or InProcessCore._closed):
            InProcessCore._has_foreign_group = dist.is_available() and dist.is_initialized()
        self._ids = itertools.count(1)
        self._aborted = threading.Event()
        # torch's setting for compilation. Steps need the same one as the start, when vLLM compiles
        # and captures CUDA graphs.
        self._stance = "force_eager" if arguments["enforce_eager"] else "default"
        # With asynchronous scheduling, a step might still be in flight when vLLM is put to sleep.
        arguments = {"async_scheduling": False} | arguments
        with (
            engine_environment(),
            torch.compiler.set_stance(self._stance),
            restored_process_state(device),
        ):
            engine_config = library.module.EngineArgs(**arguments).create_engine_config()
            self.engine: Any = library.module.LLMEngine(
                engine_config, executor(device, place), log_stats=False
            )
        InProcessCore._open.add(id(self))

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of vLLM's engine, or of its engine core if the engine does not have it.

        Args:
            method: name of the method.
            args: positional arguments.
            options: keyword arguments.

        Returns:
            The result.
        """
        owner = self.engine if hasattr(self.engine, method) else self.engine.engine_core
        return getattr(owner, method)(*args, **options)

    def generate_batch(
        self, requests: Sequence[VLLMRequest], count_ended: Callable[[int], None] | None
    ) -> list[Response]:
        """Generate responses, all in the same steps of vLLM.

        Args:
            requests: the requests.
            count_ended: called with 1 whenever a response is complete, to report progress.

        Returns:
            A response for each request, in order. After `abort`, unfinished ones end early.
        """
        self._aborted.clear()
        responses = {}
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
                        if count_ended is not None and output.finished:
                            count_ended(1)
            # After `abort` some responses are unfinished. They get their tokens so far.
            for output in partial_outputs(self.engine, responses):
                responses[output.request_id].add(output)
        finally:
            if self.engine.has_unfinished_requests():
                self.engine.abort_request(list(responses))
        return list(responses.values())

    def abort(self) -> None:
        """End all unfinished responses. Any thread may call this."""
        self._aborted.set()

    def close(self) -> None:
        """End the engine. It is shut down with the last engine of this process; see `_open`."""
        InProcessCore._open.discard(id(self))
        InProcessCore._closed.append(self.engine)
        if not (InProcessCore._open or InProcessCore._has_foreign_group):
            for engine in InProcessCore._closed:
                engine.engine_core.shutdown()
            InProcessCore._closed.clear()


class ProcessCore(Core):
    """vLLM's engine in its own processes.

    An engine that does not answer a health check is killed. Its requests fail, so that other
    engines can serve them.

    Args:
        library: the imported vLLM.
        arguments: arguments of vLLM's engine.
        silent_s: time limit for the answer to a health check, in seconds. vLLM answers between two
            steps.
    """

    is_in_process = False

    def __init__(self, library: VLLMLibrary, arguments: dict[str, Any], silent_s: float) -> None:
        self._ids = itertools.count(1)
        self._silent_s = silent_s
        # The next two attributes are only used on the thread's loop.
        self._running: dict[str, Response] = {}  # unfinished responses by our name of the request
        self._is_open = asyncio.Event()  # set while responses may begin
        self._is_open.set()
        self._thread = EventLoopThread("vllm")
        vllm = library.module
        try:
            with engine_environment(arguments["tensor_parallel_size"]):
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
        """Whether vLLM's processes have ended."""
        return self.engine.errored

    def ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Call a method of vLLM's front end on the thread's loop, and wait for its result.

        Args:
            method: name of the method.
            args: positional arguments.
            options: keyword arguments.

        Returns:
            The result.
        """
        return self._submit(getattr(self.engine, method), *args, **options).result()

    def start(self, work: Coroutine[Any, Any, Completion]) -> Future[Completion]:
        """Run a coroutine on the thread's loop. Cancelling the future cancels it."""
        return self._thread.submit(work)

    async def respond(self, make_request: Callable[[], tuple[VLLMRequest, int]]) -> Response:
        """Generate one response. This coroutine runs on the thread's loop.

        When it is cancelled, vLLM drops the request.

        Args:
            make_request: returns the request and the version of the current weights. It is called
                again if newer weights are loaded before the first token.

        Returns:
            The finished response.
        """
        while True:
            await self._is_open.wait()
            request, version = make_request()
            request_id = str(next(self._ids))
            response = Response(request.expanded, [(0, version)])
            self._running[request_id] = response
            try:
                # The generator is not held by a variable, so that after an error it is collected at
                # once, which ends the request.
                async for output in self.engine.generate(
                    request.prompt, request.sampling, request_id, lora_request=request.adapter
                ):
                    response.add(output)
            finally:
                del self._running[request_id]
            if not response.is_void:
                return response

    @contextmanager
    def paused_for_weights(self, version: int, *, keeps_cache: bool) -> Iterator[None]:
        """Context manager in which new weights are loaded, while vLLM makes no steps.

        On exit unfinished responses go on. After an error vLLM remains paused, because its weights
        may be incomplete.

        Args:
            version: version of the new weights.
            keeps_cache: whether responses go on with the KV cache of the older weights.
        """

        async def pause() -> dict[str, int]:
            """Pause vLLM; return how many tokens each unfinished response has drawn."""
            self._is_open.clear()
            await self.engine.pause_generation(mode="keep", clear_cache=not keeps_cache)
            if not self._running:
                return {}
            # All ranks draw the same tokens, so the first one's numbers suffice.
            num_tokens, *_ = await self.engine.collective_rpc("drawn_tokens")
            # vLLM appends a suffix to our names of requests, after a hyphen.
            return {name.partition("-")[0]: number for name, number in num_tokens.items()}

        num_tokens = self._submit(pause).result()
        yield

        async def resume() -> None:
            """Note the new version in the responses, drop those without a token, and go on."""
            void_ids = []
            for request_id, response in self._running.items():
                num_drawn = num_tokens.get(request_id)
                if num_drawn:
                    # The next tokens are drawn by the new weights.
                    response.versions.append((num_drawn, version))
                else:
                    # Without a token, preempted, or finished but not delivered. In all these cases
                    # it is generated anew.
                    response.is_void = True
                # It may also be void from an earlier load.
                if response.is_void:
                    void_ids.append(request_id)
            await self.engine.abort(void_ids)
            await self.engine.resume_generation()
            self._is_open.set()

        self._submit(resume).result()

    def abort(self) -> None:
        """End all unfinished responses. Any thread may call this."""
        # On the loop, because `_running` changes only there.
        self._submit(lambda: self.engine.abort(sorted(self._running))).result()

    def close(self) -> None:
        """End the engine."""
        self.ask("shutdown", timeout=_END_S)
        # vLLM shuts down once more when its engine is collected as garbage, which fails while the
        # interpreter is ending. So the last reference goes here.
        del self.engine
        self._thread.close(_END_S)

    async def _check_health(self) -> None:
        """Kill vLLM's processes when they do not answer in time, so that their requests fail."""
        while not self.is_lost:
            await asyncio.sleep(HEALTH_CHECK_EVERY_S)
            processes = self.engine.engine_core.resources.engine_manager.processes
            try:
                # Any call would do, because vLLM answers each of them between two steps.
                await asyncio.wait_for(self.engine.is_sleeping(), self._silent_s)
            except TimeoutError:
                pids = [process.pid for process in processes]
                message = "vLLM's process %s has not answered for %g s, and is killed"
                logger.warning(message, pids, self._silent_s)
                for process in processes:
                    process.kill()

    def _submit(self, function: Callable[..., Any], *args: Any, **options: Any) -> Future[Any]:
        """Call a function on the thread's loop, and await its result there if it is a coroutine."""

        async def call() -> Any:
            result = function(*args, **options)
            return await result if inspect.isawaitable(result) else result

        return self._thread.submit(call())


@dataclass
class VLLMMemory:
    """The parts of vLLM's memory, "weights" and "kv_cache", and whether they are released."""

    core: Core  # vLLM's engine
    can_sleep: bool  # whether vLLM can release memory; on a CPU it cannot
    has_dropped_weights: bool = False  # released without a copy on the host
    released: set[str] = field(default_factory=set)  # the released parts

    def sleep(self, *, keeps_weights: bool) -> None:
        """Release both parts.

        Args:
            keeps_weights: whether the weights move to the host; otherwise they are dropped.
        """
        if self.can_sleep and not self.released:
            # vLLM's level 1 copies the weights to the host, level 2 drops them.
            self.core.ask("sleep", level=1 if keeps_weights else 2)
            self.released = {"weights", "kv_cache"}
            self.has_dropped_weights = not keeps_weights

    def wake(self, *tags: str) -> None:
        """Map released parts again.

        Args:
            tags: parts that are needed. Parts that are mapped already stay as they are.
        """
        released_tags = [tag for tag in tags if tag in self.released]
        if released_tags:
            self.core.ask("wake_up", tags=released_tags)
            self.released.difference_update(released_tags)
