# SPDX-License-Identifier: Apache-2.0
"""What the engines on SGLang share: their requests and answers, their limits, and how weights reach them.

generate ── request ──> SGLang ── answer ──> Completion
begin_weight_update ─> update_weights_from_tensor, bucket after bucket ─> end_weight_update ─> flush_cache
"""

import asyncio
import itertools
import math
import pickle
import uuid
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any

import torch

from quadriga.errors import RolloutError
from quadriga.rollout.base import Completion, FinishReason, SamplingParams
from quadriga.rollout.loaded import LoadedEngine
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.reported import has_filters
from quadriga.rollout.sglang.receiver import FINGERPRINTS, LOADER

MIB = 1 << 20
_REASONS: dict[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "abort"}
_SEED_BITS = 63
_ABORT_AGAIN_S = 0.2
# A bucket exists this many times at once on its way: as tensors, as bytes here, as bytes there, as tensors there.
_COPIES = 4


@dataclass(frozen=True)
class Limits:
    """What an engine on SGLang has been made for.

    Attributes:
        max_model_len: longest prompt and answer together, in tokens.
        manifest: the weights that make the model complete.
        eos_token_ids: end-of-text tokens.
        num_processes: that hold the model together.
        bucket_bytes: memory in which weights travel.
        has_seeds: whether an answer's seed decides it: SGLang's "deterministic inference".
        can_sleep: whether `sleep` gives back memory; accelerators only.
    """

    max_model_len: int
    manifest: Manifest
    eos_token_ids: tuple[int, ...]
    num_processes: int = 1
    bucket_bytes: int = 512 * MIB
    has_seeds: bool = False
    can_sleep: bool = False


class SGLangBase(LoadedEngine):
    """An engine on SGLang; a subclass says where SGLang is. See `RolloutEngine` for its methods.

    Args:
        limits: see there.
        has_weights: whether SGLang starts with the model's weights; without, the first load brings them.
    """

    name, title = "sglang", "SGLang"

    def __init__(self, limits: Limits, *, has_weights: bool) -> None:
        super().__init__(limits.manifest, limits.max_model_len, has_weights=has_weights)
        self.limits = limits
        self._ids = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
        self._running: dict[str, Future[Any]] = {}
        self._aborted: set[str] = set()

    @abstractmethod
    def _ask(self, method: str, **arguments: Any) -> "Future[Any]":
        """Sends a request in SGLang's words. Its result is SGLang's; a refusal is a `RolloutError`."""

    async def generate(self, prompt_token_ids: Sequence[int], sampling: SamplingParams) -> Completion:
        """See `RolloutEngine.generate`."""
        self._require_ready([prompt_token_ids], [sampling])
        request_id, future = self._start(prompt_token_ids, sampling)
        try:
            return self._completion(request_id, await asyncio.wrap_future(future), sampling)
        except asyncio.CancelledError:
            self._ask("abort_request", rid=request_id)
            raise
        finally:
            self._forget_request(request_id)

    def generate_batch(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> list[Completion]:
        """See `RolloutEngine.generate_batch`. The first request that fails ends those that are not answered."""
        self._require_ready(prompts, sampling)
        started = [self._start(*one) for one in zip(prompts, sampling, strict=True)]
        try:
            return [
                self._completion(request_id, future.result(), params)
                for (request_id, future), params in zip(started, sampling, strict=True)
            ]
        finally:
            for request_id, future in started:
                if not future.done():
                    self._ask("abort_request", rid=request_id)
                self._forget_request(request_id)

    def abort(self) -> None:
        """See `RolloutEngine.abort`; from any thread. A request that comes meanwhile is ended as well."""
        pending = list(self._running.values())
        while pending:
            # A request may be on its way still: SGLang ends those that it knows.
            self._aborted.update(self._running)
            self._call("abort_request", abort_all=True)
            pending = list(wait(pending, _ABORT_AGAIN_S).not_done)

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`. On a CPU SGLang keeps its memory."""
        super().sleep()
        self._resumed = False
        if self.limits.can_sleep:
            self._call("release_memory_occupation", tags=["kv_cache", "weights"])

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        was_asleep = self._has_given_memory_back
        super().wake()
        if was_asleep:
            self._call("resume_memory_occupation", tags=["kv_cache"] if self._resumed else ["kv_cache", "weights"])

    @property
    def _has_given_memory_back(self) -> bool:
        return self._state == "asleep" and self.limits.can_sleep

    def _receive(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[dict[str, str]]:
        """See `LoadedEngine._receive`."""
        if self._has_given_memory_back:
            self._call("resume_memory_occupation", tags=["weights"])
            self._resumed = True
        self._call("begin_weight_update")
        marks: list[dict[str, str]] = []
        num_sent = 0
        try:
            for bucket in _buckets(weights, self.limits.bucket_bytes // _COPIES):
                self._call(
                    "update_weights_from_tensor",
                    serialized_named_tensors=[pickle.dumps(bucket)] * self.limits.num_processes,
                    load_format=LOADER,
                    flush_cache=False,
                )
                num_sent += 1
        finally:
            # Also after a stream that broke off: the next one begins anew, and with it what is vouched for.
            self._call("end_weight_update")
            if num_sent:
                marks = self._call("get_weights_by_name", name=FINGERPRINTS)
        self._call("flush_cache")
        return marks

    def _call(self, method: str, **arguments: Any) -> Any:
        """A request whose end is waited for."""
        return self._ask(method, **arguments).result()

    def _start(self, prompt: Sequence[int], sampling: SamplingParams) -> tuple[str, "Future[Any]"]:
        request_id = next(self._ids)
        future = self._ask(
            "generate",
            input_ids=list(prompt),
            sampling_params=self._in_sglangs_words(sampling),
            return_logprob=True,
            rid=request_id,
        )
        self._running[request_id] = future
        return request_id, future

    def _forget_request(self, request_id: str) -> None:
        self._running.pop(request_id, None)
        self._aborted.discard(request_id)

    def _require_ready(self, prompts: Sequence[Sequence[int]], sampling: Sequence[SamplingParams]) -> None:
        """See `LoadedEngine._require_ready`; and that SGLang knows what is asked for."""
        super()._require_ready(prompts, sampling)
        for row, params in enumerate(sampling):
            where = f"{self.name}.generate, prompt {row}"
            if params.ignore_eos and params.stop_token_ids:
                raise RolloutError(
                    where,
                    got="stop_token_ids together with ignore_eos",
                    expected="one of them: SGLang leaves out both or neither",
                )
            if params.min_p > 0 and self.limits.has_seeds and not params.is_greedy:
                raise RolloutError(where, got="min_p", expected="0: SGLang cannot draw by a seed with it")

    def _in_sglangs_words(self, sampling: SamplingParams) -> dict[str, Any]:
        greedy = sampling.is_greedy
        seed = {"sampling_seed": sampling.seed % (1 << _SEED_BITS)} if self.limits.has_seeds else {}
        return seed | {
            "max_new_tokens": sampling.max_tokens,
            "temperature": 0.0 if greedy else sampling.temperature,
            "top_p": 1.0 if greedy else sampling.top_p,
            "top_k": -1 if greedy else (sampling.top_k or -1),
            "min_p": 0.0 if greedy else sampling.min_p,
            "stop_token_ids": sorted(sampling.stops(self.limits.eos_token_ids)),
            "ignore_eos": sampling.ignore_eos,
            "stop": list(sampling.stop) or None,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }

    def _completion(self, request_id: str, answer: dict[str, Any], sampling: SamplingParams) -> Completion:
        """An answer in our words. SGLang's log-probabilities are those before filters, at the temperature.

        Raises:
            RolloutError: it ended for a reason that is not ours, or a log-probability is missing or no number.
        """
        meta = answer["meta_info"]
        tokens, ended = list(answer.get("output_ids") or ()), meta["finish_reason"] or {}
        numbers = [one[0] for one in meta.get("output_token_logprobs") or ()]
        reason = _REASONS.get(ended.get("type", ""))
        if reason == "abort":  # the last token of one that was given up may lack its number
            tokens, numbers = tokens[: len(numbers)], numbers[: len(tokens)]
        problem = ""
        if reason is None or (reason == "abort" and request_id not in self._aborted):
            problem = f"an answer that ended with {ended.get('message') or ended}"
        elif len(numbers) != len(tokens):
            problem = f"{len(numbers)} log-probabilities of {len(tokens)} tokens"
        elif reason == "length" and len(tokens) < sampling.max_tokens:
            problem = f"an answer that was cut at {len(tokens)} of {sampling.max_tokens} tokens, for want of cache"
        elif any(number is None or math.isnan(number) for number in numbers):
            problem = "a log-probability that is not a number: the weights hold NaN or infinite values, or overflow"
        if problem or reason is None:
            raise RolloutError(
                f"{self.name}.generate",
                got=problem,
                expected="an answer",
                fix="A larger actor_rollout_ref.rollout.cache_gigabytes, fewer max_num_seqs, or float32 may help.",
            )
        return Completion(tokens, numbers, reason, self.weight_version, [] if has_filters(sampling) else list(numbers))


def _buckets(weights: Iterable[tuple[str, torch.Tensor]], num_bytes: int) -> Iterator[list[tuple[str, torch.Tensor]]]:
    """Copies on the host, of up to `num_bytes` together, or one weight that is larger."""
    bucket: list[tuple[str, torch.Tensor]] = []
    used = 0
    for name, tensor in weights:
        if bucket and used + tensor.nbytes > num_bytes:
            yield bucket
            bucket, used = [], 0
        # A memory of its own, or all that it is a part of would travel; and no gradient, which would as well.
        bucket.append((name, tensor.detach().to("cpu", copy=True).contiguous()))
        used += tensor.nbytes
    if bucket:
        yield bucket
