# SPDX-License-Identifier: Apache-2.0
"""vLLM's engine on the ranks of a rollout group, whose executors all make the same steps.

    leader   generate -> broadcast(added, aborted) -> add, abort, step -> responses -> callers
    member               receive() -----------------> add, abort, step

consumes: new requests, before each step. The leader steps in the thread that calls
    `generate_batch`, or in one of its own.
waits for: the other ranks, in each step.
unblocked by: `release`, which tells the members that the batch is over. It sends the checksum of
    the batch's tokens, which must be the same on all ranks.
"""

import asyncio
import threading
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from quadriga.errors import RolloutError
from quadriga.rollout.group import RolloutGroup, require_same_tokens
from quadriga.rollout.third_party import process_environment
from quadriga.rollout.vllm.cores import InProcessCore, Response, VLLMRequest
from quadriga.rollout.vllm.library import VLLMLibrary, partial_outputs


class StepChanges(NamedTuple):
    """Changes of the running requests before a step of all ranks."""

    added: dict[str, VLLMRequest]  # new requests, by our name of the request
    aborted: list[str]  # names of requests to abort


@dataclass(eq=False)
class _PendingRequest:
    """An unfinished request, and its response so far."""

    request: VLLMRequest
    response: Response
    future: Future[Response] = field(default_factory=Future)
    has_begun: bool = False  # whether vLLM has it
    is_aborted: bool = False


def sees_peers(group: RolloutGroup) -> bool:
    """Whether this process sees the devices of all ranks of its group. On Ray it sees its own only.

    A group on CPUs counts as seen.
    """
    return group.device.type != "cuda" or torch.cuda.device_count() >= group.size


def group_arguments(group: RolloutGroup) -> dict[str, Any]:
    """Arguments of vLLM's engine that a rollout group needs.

    Args:
        group: the rollout group.

    Returns:
        Arguments by vLLM's names. They replace the user's.
    """
    arguments: dict[str, Any] = {"distributed_executor_backend": "external_launcher"}
    if not sees_peers(group):
        # Custom all-reduce looks up the devices of all ranks in CUDA_VISIBLE_DEVICES.
        arguments["disable_custom_all_reduce"] = True
    return arguments


class GroupCore(InProcessCore):
    """vLLM's engine with a shard in the process of each rank of a group.

    Args:
        library: the imported vLLM.
        arguments: arguments of vLLM's engine.
        group: the rollout group.
    """

    def __init__(
        self, library: VLLMLibrary, arguments: dict[str, Any], group: RolloutGroup
    ) -> None:
        self.group = group
        self._lock = threading.Lock()
        self._requests: dict[str, _PendingRequest] = {}  # of the leader, by name
        self._is_running = False  # whether a thread makes steps
        self._has_failed = False  # whether a step of this batch has failed
        self._checksum = 0  # of the tokens of this batch, in the order of the steps
        # The pool starts its thread only when `generate` needs one.
        initializer = None
        if group.device.type == "cuda":
            initializer = partial(torch.cuda.set_device, group.device)
        self._worker = ThreadPoolExecutor(1, "vllm", initializer=initializer)
        self._turn: Future[None] | None = None  # the last `_run` in the thread of `_worker`
        # All ranks need the same name of the group, which is unique on the machine: the leader's.
        name = f"quadriga-{uuid4().hex}"
        if group.is_leader:
            group.broadcast(name)
        else:
            name = group.receive()
        arguments = arguments | group_arguments(group)
        # Symmetric memory also needs to see the peers' devices. vLLM would warn and go on without
        # it, so it is switched off.
        variables = {} if sees_peers(group) else {"VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
        with process_environment(0, **variables):
            super().__init__(library, arguments, group.device, (name, group.ranks[group.rank]))

    def generate_batch(
        self, requests: Sequence[VLLMRequest], count_ended: Callable[[int], None] | None
    ) -> list[Response]:
        """Generate responses on all ranks; for the leader.

        This thread makes the steps, unless another one is doing that already.

        Args:
            requests: the requests.
            count_ended: called with 1 whenever a response is complete, to report progress.

        Returns:
            A response for each request, in order.
        """
        calls = [_PendingRequest(request, Response(request.expanded)) for request in requests]
        if count_ended is not None:
            for call in calls:
                call.future.add_done_callback(lambda _: count_ended(1))
        if self._submit(calls):
            self._run()
        return [call.future.result() for call in calls]

    async def generate(self, request: VLLMRequest) -> Response:
        """Generate one response together with others; for the leader.

        The steps are made in a thread of this object. Cancelling the caller aborts the request on
        all ranks.
        """
        call = _PendingRequest(request, Response(request.expanded))
        waiting = asyncio.wrap_future(call.future)
        if self._submit([call]):
            self._turn = self._worker.submit(self._run)
        return await waiting

    def abort(self) -> None:
        """Mark all unfinished responses to end before the next step. Any thread may call this."""
        with self._lock:
            for call in self._requests.values():
                call.is_aborted = True

    def follow(self) -> None:
        """Make the leader's steps until the batch is over; for a member."""
        with torch.compiler.set_stance(self._stance):
            while True:
                message = self.group.receive(is_idle=not self.engine.has_unfinished_requests())
                # At the end of the batch, `release` sends the leader's checksum.
                if isinstance(message, int):
                    break
                # None stands for a step without changes.
                self._make_step(message or StepChanges({}, []))
        checksum = self._checksum
        self._checksum = 0
        require_same_tokens(self.group, "vllm", checksum=checksum, leader_checksum=message)

    def release(self) -> None:
        """Abort unfinished requests and tell the members that the batch is over; for the leader."""
        self.abort()
        if self._turn is not None:
            wait([self._turn])
            self._turn = None
        # A step that fails does so on all ranks, after which the members do not listen any more.
        if not self._has_failed:
            self.group.broadcast(self._checksum)
        self._has_failed = False
        self._checksum = 0

    def close(self) -> None:
        """Abort unfinished responses, and end the engine and its thread."""
        self.abort()
        self._worker.shutdown()
        super().close()

    def _submit(self, calls: list[_PendingRequest]) -> bool:
        """Add requests, which begin with the next step.

        Returns:
            Whether the caller has to make the steps by `_run`. False: another thread does already,
            or there are no requests.
        """
        with self._lock:
            for call in calls:
                self._requests[str(next(self._ids))] = call
            has_to_run = bool(calls) and not self._is_running
            self._is_running |= has_to_run
            return has_to_run

    def _run(self) -> None:
        """Make steps until no request is left."""
        try:
            with torch.compiler.set_stance(self._stance):
                while True:
                    step = self._next_step()
                    if step is None:
                        break
                    self.group.broadcast(step if any(step) else None)
                    # Outputs with the tokens so far, before `_make_step` drops aborted requests.
                    aborted = partial_outputs(self.engine, step.aborted) if step.aborted else []
                    for output in (*aborted, *self._make_step(step)):
                        with self._lock:
                            call = self._requests.pop(output.request_id)
                        self._finish(call, output)
        except BaseException as error:
            with self._lock:
                failed = self._requests
                self._requests = {}
                self._is_running = False
                self._has_failed = True
            # The callers get the error from their futures, whether or not this is their thread.
            for call in failed.values():
                if call.future.set_running_or_notify_cancel():
                    call.future.set_exception(error)
            # Such as a KeyboardInterrupt.
            if not isinstance(error, Exception):
                raise

    def _next_step(self) -> StepChanges | None:
        """Collect the changes of requests since the last step.

        Returns:
            The changes before the next step; None if there is no request, so that the caller must
            stop.
        """
        step = StepChanges({}, [])
        with self._lock:
            for name, call in self._requests.items():
                if not call.has_begun:
                    call.has_begun = True
                    step.added[name] = call.request
                elif call.is_aborted or call.future.cancelled():
                    step.aborted.append(name)
            self._is_running = bool(self._requests)
            return step if self._is_running else None

    def _make_step(self, step: StepChanges) -> list[Any]:
        """Make a step, as every rank does.

        Args:
            step: changes before the step.

        Returns:
            vLLM's outputs of the requests that this step has finished.
        """
        if step.aborted:
            self.engine.abort_request(step.aborted)
        for name, request in step.added.items():
            self.engine.add_request(
                name, request.prompt, request.sampling, lora_request=request.adapter
            )
        if not self.engine.has_unfinished_requests():
            return []
        outputs = self.engine.step()
        # With the checksum, `release` and `follow` compare the tokens of all ranks.
        for output in outputs:
            tokens = (output.request_id, *output.outputs[0].token_ids)
            self._checksum = zlib.crc32(repr(tokens).encode(), self._checksum)
        return outputs

    @staticmethod
    def _finish(call: _PendingRequest, output: Any) -> None:
        """Give a response to its caller, unless the caller has cancelled the request.

        Args:
            call: the request.
            output: vLLM's output, complete or partial.
        """
        if call.future.set_running_or_notify_cancel():
            try:
                call.response.add(output)
            except RolloutError as error:  # only this request fails
                call.future.set_exception(error)
            else:
                call.future.set_result(call.response)
