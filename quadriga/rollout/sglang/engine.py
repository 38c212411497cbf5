# SPDX-License-Identifier: Apache-2.0
"""SGLang as a rollout engine: requests, responses and weights, wherever SGLang is.

generate ── request ──> SGLang ── reply ──> Completion
begin_weight_update ─> update_weights_from_tensor, bucket after bucket ─> end_weight_update ─> flush_cache
"""

import asyncio
import itertools
import json
import math
import pickle
import uuid
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from quadriga.config.placement import devices_problem
from quadriga.engine_traits.sglang import TRAITS
from quadriga.errors import ConfigError, RolloutError
from quadriga.models.load import stop_token_ids
from quadriga.partition import buckets
from quadriga.rollout.balancer import Balancer, start_engines
from quadriga.rollout.causal_model import cache_bytes_per_token
from quadriga.rollout.interface import (
    BatchImages,
    Completion,
    Images,
    Prompt,
    Prompts,
    Sampling,
    SamplingParams,
)
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.sglang.connections import SGLangProcess, SGLangServer
from quadriga.rollout.sglang.receiver import FINGERPRINTS, LOADER
from quadriga.rollout.third_party import (
    FINISH_REASONS,
    SEED_BITS,
    ThirdPartyEngine,
    data_urls,
    has_filters,
    require_known_experts,
)
from quadriga.weight_sync.buckets import num_bytes

_GIB = 1 << 30
_ABORT_AGAIN_S = 0.2
# A bucket exists this many times at once on its way: as tensors, as bytes here, as bytes there, as tensors there.
_COPIES = 4
# Of the host's memory: no more than a bound there, for the KV cache has a size of its own.
_SHARE_OF_HOST = 0.9
# SGLang keeps a few positions of its limit for itself, and cuts responses short that come near it.
_SPARE_TOKENS = 8


class SGLangEngine(ThirdPartyEngine):
    """An engine on SGLang. It generates with weights that were sent to it, whatever a server was started with.

    Args:
        manifest: the weights that make the model complete.
        max_model_len: longest prompt and response together, in tokens.
        bucket_bytes: memory for weights on their way.
        can_sleep: whether `sleep` frees memory; accelerators only.
    """

    name, title = "sglang", "SGLang"
    traits = TRAITS
    takes_images = True

    def __init__(
        self,
        connection: SGLangProcess | SGLangServer,
        manifest: Manifest,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        *,
        bucket_bytes: int = 512 << 20,
        can_sleep: bool = False,
        description: str = "sglang",
    ) -> None:
        super().__init__(manifest, max_model_len)
        self.connection, self.eos_token_ids = connection, tuple(eos_token_ids)
        self.bucket_bytes, self.can_sleep, self.description = bucket_bytes, can_sleep, description
        if not connection.has_seeds:
            self.description += (
                "; responses do not follow their seeds: no deterministic inference here"
            )
        self._ids = (f"{uuid.uuid4().hex}-{number}" for number in itertools.count())
        self._running: dict[str, Future[Any]] = {}
        self._aborted: set[str] = set()
        self._is_empty = False
        """Whether it has given its weights back."""

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "SGLangEngine | Balancer":
        """Engines in processes of their own, or at the servers that `engine_kwargs.sglang` names."""
        skeleton, rollout = setup.skeleton(), setup.rollout
        require_known_experts(cls.name, skeleton)
        is_on_cpu, options = setup.device.type == "cpu", dict(setup.options)
        can_sleep = rollout.free_cache_engine and not is_on_cpu
        engine = partial(
            cls,
            manifest=Manifest.of(skeleton),
            max_model_len=setup.max_model_len,
            eos_token_ids=stop_token_ids(skeleton, setup.tokenizer.eos_token_id),
            can_sleep=can_sleep,
        )
        if not is_on_cpu and (problem := devices_problem(setup.config)):
            raise problem
        if not options.keys() & {"url", "urls"}:
            gigabytes = (
                1.0 if rollout.cache_gigabytes is None and is_on_cpu else rollout.cache_gigabytes
            )
            cache_tokens = None
            if gigabytes is not None:
                cache_tokens = int(gigabytes * _GIB) // cache_bytes_per_token(
                    skeleton.config, setup.dtype
                )
            arguments = sglang_arguments(setup, cache_tokens)
            cache = (
                "as much KV cache as fits"
                if gigabytes is None
                else f"{gigabytes:g} GiB of KV cache"
            )
            sleep = "" if can_sleep else "; memory is kept while training"

            def start() -> "SGLangEngine":
                process = SGLangProcess(arguments, setup.config.trainer.stall_timeout_s)
                what = f"sglang {process.version} in processes of its own, on a copy of the weights; {cache}{sleep}"
                return engine(process, bucket_bytes=setup.bucket_bytes, description=what)

            makers = [start] * rollout.data_parallel_size
            engines = start_engines(makers)
            return engines[0] if len(engines) == 1 else Balancer(engines, makers=makers)
        urls = [options.pop("url")] if "url" in options else options.pop("urls")
        is_list = (
            isinstance(urls, list) and bool(urls) and all(isinstance(url, str) for url in urls)
        )
        if not is_list or len({*urls}) < len(urls) or options.keys() - {"timeout_s", "headers"}:
            where = "actor_rollout_ref.rollout.engine_kwargs.sglang"
            expected = "url, or urls (a list, each once), perhaps timeout_s and headers: servers have own settings"
            raise ConfigError(where, got=f"{rollout.engine_kwargs}", expected=expected)

        def connect(url: str) -> "SGLangEngine":
            server = SGLangServer(
                url, max_model_len=setup.max_model_len, max_num_seqs=rollout.max_num_seqs, **options
            )
            what = f"sglang {server.version} at {url}, which gets the weights over HTTP"
            return engine(server, bucket_bytes=setup.bucket_bytes // len(urls), description=what)

        connects = [partial(connect, url) for url in urls]
        engines = start_engines(connects)
        if len(engines) == 1:
            return engines[0]
        versions = ", ".join(dict.fromkeys(engine.connection.version for engine in engines))
        unseeded = next(
            (engine.description for engine in engines if not engine.connection.has_seeds), ""
        )
        what = f"sglang {versions} at {', '.join(urls)}, balanced, which get the weights over HTTP"
        return Balancer(engines, what + "".join(unseeded.partition("; ")[1:]), connects)

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        self._require_ready([prompt], [sampling], [images])
        request_id, future = self._start(prompt, sampling, images)
        try:
            return self._completion(request_id, await asyncio.wrap_future(future), prompt, sampling)
        except asyncio.CancelledError:
            self.connection.ask("abort_request", rid=request_id)
            raise
        finally:
            self._running.pop(request_id, None)
            self._aborted.discard(request_id)

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """The first request that fails ends those that are under way."""
        self._require_ready(prompts, sampling, images)
        images = [None] * len(prompts) if images is None else images
        started = [self._start(*one) for one in zip(prompts, sampling, images, strict=True)]
        try:
            return [
                self._completion(request_id, future.result(), prompt, params)
                for (request_id, future), prompt, params in zip(
                    started, prompts, sampling, strict=True
                )
            ]
        finally:
            for request_id, future in started:
                if not future.done():
                    self.connection.ask("abort_request", rid=request_id)
                self._running.pop(request_id, None)
                self._aborted.discard(request_id)

    def abort(self) -> None:
        """End unfinished responses, from any thread; those of requests that come meanwhile, too."""
        pending = list(self._running.values())
        while pending:
            # A request may be on its way still: SGLang ends those that it knows.
            self._aborted.update(self._running)
            self._call("abort_request", abort_all=True)
            pending = list(wait(pending, _ABORT_AGAIN_S).not_done)

    @property
    def has_dropped_weights(self) -> bool:
        return self._is_empty

    def sleep(self) -> None:
        """On a CPU SGLang keeps its memory. Elsewhere weights are dropped: a load brings all of them."""
        super().sleep()
        self._resumed = False
        if self.can_sleep:
            self._is_empty = True
            self._call("release_memory_occupation", tags=["kv_cache", "weights"])

    def wake(self) -> None:
        has_given_back = self._state == "asleep" and self.can_sleep
        super().wake()
        if has_given_back:
            self._call(
                "resume_memory_occupation",
                tags=["kv_cache"] if self._resumed else ["kv_cache", "weights"],
            )

    def close(self) -> None:
        if self._state != "closed":
            super().close()
            self.connection.close()

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load a complete set of weights in buckets, and drop the KV cache that earlier ones made."""
        with self._loading(version) as received:
            if self._state == "asleep" and self.can_sleep:
                self._call("resume_memory_occupation", tags=["weights"])
                self._resumed = True
            self._call("begin_weight_update")
            num_sent, checked, takes_handles = (
                0,
                self._manifest.checked(weights),
                self.connection.takes_handles,
            )
            copy, dump = (
                (_copy, ForkingPickler.dumps)
                if takes_handles
                else (partial(_copy, device="cpu"), pickle.dumps)
            )
            try:
                for bucket in buckets(checked, num_bytes, self.bucket_bytes // _COPIES, copy):
                    # A handle is for one process: each counts as a reader of the memory.
                    self._call(
                        "update_weights_from_tensor",
                        serialized_named_tensors=[
                            bytes(dump(bucket)) for _ in range(self.connection.num_processes)
                        ],
                        load_format=LOADER,
                        flush_cache=False,
                    )
                    num_sent += 1
            finally:
                # Also after a stream that broke off: the next one begins anew, and with it the fingerprints.
                self._call("end_weight_update")
                if num_sent:
                    received += self._call("get_weights_by_name", name=FINGERPRINTS)
            self._call("flush_cache")
        self._is_empty = False
        if takes_handles:
            torch.cuda.ipc_collect()  # what the other processes have let go of

    def _call(self, method: str, **arguments: Any) -> Any:
        """A request whose end is waited for."""
        return self.connection.ask(method, **arguments).result()

    def _start(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None
    ) -> tuple[str, "Future[Any]"]:
        """Send a request for a response. Returns its name and SGLang's reply."""
        request_id = next(self._ids)
        seed = (
            {"sampling_seed": sampling.seed % (1 << SEED_BITS)} if self.connection.has_seeds else {}
        )
        told = seed | {
            "max_new_tokens": sampling.max_tokens,
            **sampling.drawing,
            "stop_token_ids": sorted(sampling.stops(self.eos_token_ids)),
            "ignore_eos": sampling.ignore_eos,
            "stop": list(sampling.stop) or None,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        given: dict[str, Any] = {"input_ids": list(prompt)}
        if images is not None:  # one token for each image, which SGLang repeats by itself
            given = {
                "input_ids": list(images.short_prompt),
                "image_data": data_urls(images, self.name),
            }
        future = self.connection.ask(
            "generate", **given, sampling_params=told, return_logprob=True, rid=request_id
        )
        self._running[request_id] = future
        return request_id, future

    def _require_ready(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> None:
        super()._require_ready(prompts, sampling, images)
        for row, params in enumerate(sampling):
            where = f"{self.name}.generate, prompt {row}"
            if params.ignore_eos and params.stop_token_ids:
                got = "stop_token_ids together with ignore_eos"
                raise RolloutError(
                    where, got=got, expected="one of them: SGLang leaves out both or neither"
                )
            if params.min_p > 0 and self.connection.has_seeds and not params.is_greedy:
                raise RolloutError(
                    where, got="min_p", expected="0: SGLang cannot draw by a seed with it"
                )

    def _completion(
        self, request_id: str, reply: dict[str, Any], prompt: Prompt, sampling: SamplingParams
    ) -> Completion:
        """A reply as our completion. SGLang's log-probabilities are those before filters, at the temperature."""
        meta = reply["meta_info"]
        if (count := meta.get("prompt_tokens", len(prompt))) != len(prompt):
            got, expected = f"a prompt of {count} tokens", f"{len(prompt)}, as the data expanded it"
            fix = "SGLang's image processor must have the sizes of data.mm_processor_kwargs."
            raise RolloutError(f"{self.name}.generate", got=got, expected=expected, fix=fix)
        tokens, ended = list(reply.get("output_ids") or ()), meta["finish_reason"] or {}
        numbers = [one[0] for one in meta.get("output_token_logprobs") or ()]
        reason = FINISH_REASONS.get(ended.get("type", ""))
        if reason == "abort":  # the last token of an aborted response may lack its number
            tokens, numbers = tokens[: len(numbers)], numbers[: len(tokens)]
        if reason is None or (reason == "abort" and request_id not in self._aborted):
            problem = f"a response that ended with {ended.get('message') or ended}"
        elif len(numbers) != len(tokens):
            problem = f"{len(numbers)} log-probabilities of {len(tokens)} tokens"
        elif reason == "length" and len(tokens) < sampling.max_tokens:
            problem = f"a response that was cut at {len(tokens)} of {sampling.max_tokens} tokens, for want of KV cache"
        elif any(number is None or math.isnan(number) for number in numbers):
            problem = "a log-probability that is not a number: the weights hold NaN or infinite values, or overflow"
        else:
            drawn = [] if has_filters(sampling) else list(numbers)
            return Completion(tokens, numbers, reason, self.weight_version, drawn)
        fix = "A larger actor_rollout_ref.rollout.cache_gigabytes, fewer max_num_seqs, or float32 may help."
        raise RolloutError(f"{self.name}.generate", got=problem, expected="a response", fix=fix)


def _copy(
    weight: tuple[str, torch.Tensor], offset: int, device: str | None = None
) -> tuple[str, torch.Tensor]:
    """On a device, or its own, in a memory of its own, or all that it is a part of would travel; without a gradient."""
    name, tensor = weight
    return name, tensor.detach().to(device or tensor.device, copy=True).contiguous()


def sglang_arguments(setup: EngineSetup, cache_tokens: int | None) -> dict[str, Any]:
    """The arguments of SGLang's engine: those of the configuration, under SGLang's names; `engine_kwargs.sglang` wins.

    The KV cache holds `cache_tokens`; None: SGLang decides by `gpu_memory_utilization`.
    """
    rollout, model = setup.rollout, setup.config.actor_rollout_ref.model
    is_on_cpu = setup.device.type == "cpu"
    can_sleep = rollout.free_cache_engine and not is_on_cpu
    own: dict[str, Any] = {
        "model_path": str(model.path),
        "tokenizer_path": str(setup.config.data.tokenizer or model.path),
        "dtype": str(setup.dtype).removeprefix("torch."),
        "device": setup.device.type,
        "context_length": setup.max_model_len + _SPARE_TOKENS,
        "max_running_requests": rollout.max_num_seqs,
        "chunked_prefill_size": rollout.max_num_batched_tokens,
        "mem_fraction_static": rollout.gpu_memory_utilization / rollout.data_parallel_size,
        "tp_size": rollout.tensor_model_parallel_size,
        "load_format": "dummy",
        "custom_weight_loader": [LOADER],
        "enable_deterministic_inference": not is_on_cpu,
        "enable_memory_saver": can_sleep,
        "disable_cuda_graph": rollout.enforce_eager or is_on_cpu,
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": json.dumps(setup.config_overrides),
        "log_level": "error",
    }
    if cache_tokens is not None:
        own["max_total_tokens"] = cache_tokens
    if is_on_cpu:
        # What runs without SGLang's own kernels, which have no build for CPUs in general.
        own |= {
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "grammar_backend": "none",
        }
        own |= {"disable_overlap_schedule": True, "mem_fraction_static": _SHARE_OF_HOST}
    return own | setup.options
