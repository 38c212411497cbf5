# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine on the ranks of a rollout group: each has an executor in its own process, and all of them step alike.

    leader   generate ──> inbox ──> tell(added, given up) ──> add, abort, step ──> responses ──> callers
    member                          hear() ─────────────────> add, abort, step

consumes: requests from the inbox, before each step; of the leader, in the thread of `generate_batch` or one of its own.
waits for: the other ranks, in each step. unblocked by: `release`, which tells the members that the batch is over, with
the checksum of its tokens, which are theirs too.
"""

import asyncio
import threading
import zlib
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from quadriga.errors import EngineError, RolloutError
from quadriga.rollout.group import RolloutGroup
from quadriga.rollout.vllm.cores import InProcessCore, Request, Response
from quadriga.rollout.vllm.library import Library, unfinished_outputs


class Step(NamedTuple):
    """What all ranks do before their engines step: requests by name, and names of those that are given up."""

    added: dict[str, Request]
    given_up: list[str]


@dataclass(eq=False)
class _Call:
    """A request that is not done, with what has come of it."""

    request: Request
    response: Response
    future: Future[Response] = field(default_factory=Future)
    is_given_up: bool = False


class GroupCore(InProcessCore):
    """vLLM's engine with these arguments, a shard of it in the process of each rank of a group."""

    def __init__(self, library: Library, arguments: dict[str, Any], group: RolloutGroup) -> None:
        self.group, self._lock = group, threading.Lock()
        self._inbox: dict[str, _Call] = {}
        self._open: dict[str, _Call] = {}
        self._is_running = self._has_failed = False
        self._checksum = 0
        self._worker: ThreadPoolExecutor | None = None
        self._turn: Future[None] | None = None
        name = f"quadriga-{uuid4().hex}"
        if group.is_leader:
            group.tell(name)
        else:
            name = group.hear()
        arguments = arguments | {"distributed_executor_backend": "external_launcher"}
        super().__init__(library, arguments, group.device, (name, group.ranks[group.rank]))

    def generate_batch(self, requests: Sequence[Request]) -> list[Response]:
        calls = [_Call(request, Response(request.expanded)) for request in requests]
        if self._submit(calls):
            self._run()
        return [call.future.result() for call in calls]

    async def generate(self, request: Request) -> Response:
        """One response; the request joins those that run. Cancelled here, it is given up by all ranks."""
        call = _Call(request, Response(request.expanded))
        waiting = asyncio.wrap_future(call.future)
        if self._submit([call]):
            if self._worker is None:
                device = self.group.device
                on_device = (
                    partial(torch.cuda.set_device, device) if device.type == "cuda" else None
                )
                self._worker = ThreadPoolExecutor(1, "vllm", initializer=on_device)
            self._turn = self._worker.submit(self._run)
        return await waiting

    def abort(self) -> None:
        with self._lock:
            for call in (*self._open.values(), *self._inbox.values()):
                call.is_given_up = True

    def follow(self) -> None:
        """Of a member: what the leader says, until the batch is over."""
        with torch.compiler.set_stance(self._stance):
            while not isinstance(
                told := self.group.hear(is_idle=not self.engine.has_unfinished_requests()), int
            ):
                self._take(told or Step({}, []))
        checksum, self._checksum = self._checksum, 0
        if told != checksum:
            got, fix = (
                "other tokens than the leader's",
                "The ranks compute with other weights, or on other devices.",
            )
            raise EngineError(
                f"vllm, {self.group}", got=got, expected="the same on all ranks", fix=fix
            )

    def release(self) -> None:
        """Of the leader: abort what is not finished, and tell the members that the batch is over."""
        self.abort()
        if self._turn is not None:
            wait([self._turn])
            self._turn = None
        # A step that fails does so on all ranks, whose members then do not listen any more.
        if not self._has_failed:
            self.group.tell(self._checksum)
        self._has_failed, self._checksum = False, 0

    def close(self) -> None:
        self.abort()
        if self._worker is not None:
            self._worker.shutdown()
        super().close()

    def _submit(self, calls: list[_Call]) -> bool:
        """Put requests into the inbox; whether the caller must run them."""
        with self._lock:
            self._inbox |= {str(next(self._ids)): call for call in calls}
            starts = bool(calls) and not self._is_running
            self._is_running |= starts
            return starts

    def _run(self) -> None:
        """Step until no request is left."""
        try:
            with torch.compiler.set_stance(self._stance):
                while step := self._next_step():
                    self.group.tell(step if any(step) else None)
                    outputs = (
                        unfinished_outputs(self.engine, step.given_up) if step.given_up else []
                    )
                    for output in outputs + self._take(step):
                        with self._lock:
                            call = self._open.pop(output.request_id)
                        self._end(call, output)
        except BaseException as error:
            with self._lock:
                failed, self._open, self._inbox = (
                    [*self._open.values(), *self._inbox.values()],
                    {},
                    {},
                )
                self._is_running, self._has_failed = False, True
            for call in failed:  # every caller gets the error, raised where it waits
                if call.future.set_running_or_notify_cancel():
                    call.future.set_exception(error)
            if not isinstance(error, Exception):
                raise

    def _next_step(self) -> Step | None:
        with self._lock:
            given_up = [
                name
                for name, call in self._open.items()
                if call.is_given_up or call.future.cancelled()
            ]
            added, self._inbox = self._inbox, {}
            self._open |= added
            self._is_running = bool(self._open)
        return (
            Step({name: call.request for name, call in added.items()}, given_up)
            if self._is_running
            else None
        )

    def _take(self, step: Step) -> list[Any]:
        """Add, give up and step, as each rank does. Returns vLLM's outputs of the requests that are done."""
        if step.given_up:
            self.engine.abort_request(step.given_up)
        for name, request in step.added.items():
            self.engine.add_request(
                name, request.prompt, request.sampling, lora_request=request.adapter
            )
        outputs = self.engine.step() if self.engine.has_unfinished_requests() else []
        for output in outputs:
            self._checksum = zlib.crc32(
                repr((output.request_id, *output.outputs[0].token_ids)).encode(), self._checksum
            )
        return outputs

    @staticmethod
    def _end(call: _Call, output: Any) -> None:
        if call.future.set_running_or_notify_cancel():
            try:
                call.response.add(output)
            except RolloutError as error:  # it concerns this request alone
                call.future.set_exception(error)
            else:
                call.future.set_result(call.response)
