# SPDX-License-Identifier: Apache-2.0
"""vLLM beside this process: requests join and leave while others are being answered.

    caller's loop ── generate(a) ──┐                      ┌──────────────┐ msgpack ┌─────────────────┐
    caller's loop ── generate(b) ──┼─> loop of a thread ──│ vLLM's front │ <─────> │ its engine core │
    any thread ──── load_weights ──┘      of our own      └──────────────┘         └─────────────────┘

consumes: requests from any thread and any event loop; each call is a coroutine on the thread's loop.
waits for: the engine core's process; its death ends every call with an error that says so.
unblocked by: an answer's end, `abort`, the caller's cancellation, `close`.
"""

import asyncio
import threading
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from quadriga.errors import RolloutError, first_line
from quadriga.rollout.base import Completion, Images, SamplingParams
from quadriga.rollout.vllm.core import VLLMBase, VLLMOptions
from quadriga.rollout.vllm.library import started
from quadriga.rollout.vllm.requests import Answer, to_prompt, to_vllm

T = TypeVar("T")
_END_S = 30.0


class AsyncVLLMEngine(VLLMBase):
    """See `VLLMBase`. The processes that hold the model are vLLM's own; weights travel through shared memory."""

    def __init__(self, options: VLLMOptions) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm", daemon=True)
        self._thread.start()
        self._running: set[str] = set()
        try:
            super().__init__(options)
        except BaseException:
            self._end_loop()
            raise

    async def generate(
        self, prompt_token_ids: Sequence[int], sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """See `RolloutEngine.generate`."""
        self._require_ready([prompt_token_ids], [sampling])
        self._require_sight([images])
        future = asyncio.run_coroutine_threadsafe(self._answer(prompt_token_ids, sampling, images), self._loop)
        return await asyncio.wrap_future(future)  # cancelled here, it is cancelled there, and vLLM gives it up

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        images: Sequence[Images | None] | None = None,
    ) -> list[Completion]:
        """See `RolloutEngine.generate_batch`."""
        self._require_ready(prompts, sampling)
        given = [None] * len(prompts) if images is None else images
        self._require_sight(given)
        return self._do(self._answer_all(prompts, sampling, given))

    def abort(self) -> None:
        """See `RolloutEngine.abort`; from any thread."""
        self._do(self._abort_all())

    def close(self) -> None:
        """See `RolloutEngine.close`."""
        if self._state != "closed":
            self._do(self._shut_down())
            self._end_loop()
        super().close()

    def _start(self) -> None:
        with started(is_beside=True):
            self.engine: Any = self._do(self._make())

    async def _make(self) -> Any:
        return self.library.async_engine(self.options.in_vllms_words())

    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        return self._do(getattr(self.engine, method)(*args, **options))

    async def _answer(self, prompt: Sequence[int], sampling: SamplingParams, images: Images | None) -> Completion:
        answer, request_id = Answer(None if images is None else prompt), self._new_id()
        own = to_vllm(self.library, sampling, self.options.eos_token_ids, streams=False)
        self._running.add(request_id)
        try:
            given = to_prompt(prompt, images)
            stream = self.engine.generate(given, own, request_id, lora_request=self._lora_request)
            async for output in stream:
                answer.add(output)
        except RolloutError:
            raise
        except Exception as error:  # vLLM's failures have no class in common
            raise self._died(f"failed: {first_line(error)}") from error
        finally:
            self._running.discard(request_id)
        return answer.completion(sampling, self.options.log_probs_of, self.weight_version)

    async def _answer_all(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: Sequence[SamplingParams],
        images: Sequence[Images | None],
    ) -> list[Completion]:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(self._answer(*one)) for one in zip(prompts, sampling, images, strict=True)]
        return [task.result() for task in tasks]

    async def _abort_all(self) -> None:
        await self.engine.abort(sorted(self._running))

    async def _shut_down(self) -> None:
        self.engine.shutdown(timeout=_END_S)

    def _do(self, work: Coroutine[Any, Any, T]) -> T:
        """Runs it on the engine's loop, from a thread that is not the loop's own."""
        try:
            return asyncio.run_coroutine_threadsafe(work, self._loop).result()
        except* RolloutError as several:
            raise several.exceptions[0] from several

    def _end_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_END_S)
