# SPDX-License-Identifier: Apache-2.0
"""SGLang as a rollout engine, in its own processes or at running servers.

responses   request -> SGLang -> reply -> Completion
weights     begin_weight_update -> update_weights_from_tensor (for each bucket)
            -> end_weight_update -> flush_cache
"""

import asyncio
import json
import math
import pickle
import threading
import uuid
from collections.abc import Callable, Sequence
from concurrent.futures import Future, wait
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch

from quadriga.config.placement import devices_problem, rollout_share
from quadriga.engine_traits.sglang import TRAITS
from quadriga.errors import ConfigError, RolloutError
from quadriga.models.load import stop_token_ids
from quadriga.observe.gpu_machine import require_plain_segments
from quadriga.partition import buckets
from quadriga.rollout.balancer import Balancer, start_balanced, start_engines
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
    has_filters,
    image_data_urls,
    require_known_experts,
)
from quadriga.weight_sync.buckets import num_bytes
from quadriga.weight_sync.publish import NamedWeights

_GIB = 1 << 30
_ABORT_AGAIN_S = 0.2  # time after which `abort` asks SGLang again
# Copies of a bucket that exist at once: tensors and bytes, each here and in SGLang's process.
_COPIES = 4
# On a CPU, share of the host's memory that SGLang may take. The KV cache has its own size, so this
# is only an upper bound.
_SHARE_OF_HOST = 0.9
# SGLang reserves a few positions of its limit, and cuts responses short that come near it.
_SPARE_TOKENS = 8
_UNSEEDED = "responses do not follow their seeds: no deterministic inference here"


class SGLangEngine(ThirdPartyEngine):
    """Rollout engine on SGLang. It generates only with weights that were sent to it.

    Args:
        connection: SGLang in its own processes, or a server.
        manifest: the weights of the complete model.
        max_model_len: longest prompt and response together, in tokens.
        eos_token_ids: end-of-text tokens of the model.
        bucket_bytes: memory for weights on their way.
        can_sleep: whether `sleep` releases memory; accelerators only.
        description: summary of the choices made at the start, for people to read.
    """

    name = "sglang"
    title = "SGLang"
    traits = TRAITS
    takes_images = True

    def __init__(
        self,
        connection: SGLangProcess | SGLangServer,
        manifest: Manifest,
        max_model_len: int,
        eos_token_ids: Sequence[int],
        *,
        bucket_bytes: int,
        can_sleep: bool = False,
        description: str = "sglang",
    ) -> None:
        super().__init__(manifest, max_model_len)
        self.connection = connection
        self.eos_token_ids = tuple(eos_token_ids)
        self.bucket_bytes = bucket_bytes
        self.can_sleep = can_sleep
        self.description = description
        if not connection.has_seeds:
            self.description += f"; {_UNSEEDED}"
        # Guards the next three. Held while a batch is sent, so that `abort` sees all of it or none.
        self._lock = threading.Lock()
        self._running: dict[str, Future[Any]] = {}  # pending replies by name of the request
        self._aborted: set[str] = set()  # names of requests that `abort` may have ended
        self._num_aborting = 0  # calls of `abort` that have not returned
        # In a sleep: whether a load has mapped the memory of the weights again.
        self._has_resumed_weights = False

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "SGLangEngine | Balancer":
        """Make engines in their own processes, or at the servers of `engine_kwargs.sglang`."""
        skeleton = setup.skeleton()
        require_known_experts(cls.name, skeleton)
        is_on_cpu = setup.device.type == "cpu"
        problem = None if is_on_cpu else devices_problem(setup.config)
        if problem:
            raise problem
        # Called with an `SGLangProcess` or an `SGLangServer`, to make the engine on it.
        make = partial(
            cls,
            manifest=Manifest.of(skeleton),
            max_model_len=setup.max_model_len,
            eos_token_ids=stop_token_ids(skeleton, setup.tokenizer.eos_token_id),
            can_sleep=setup.can_sleep,
        )
        # A server has its own memory and command line; only its weights come from here.
        if setup.options.keys() & {"url", "urls"}:
            return _connect_engines(setup, make)
        if not is_on_cpu:
            require_plain_segments(cls.title)

        # SGLang takes the size of its cache in tokens.
        cache_tokens = None
        cache = "as much KV cache as fits"
        if setup.cache_gigabytes is not None:
            cache_bytes = int(setup.cache_gigabytes * _GIB)
            cache_tokens = cache_bytes // cache_bytes_per_token(skeleton.config, setup.dtype)
            cache = f"{setup.cache_gigabytes:g} GiB of KV cache"
        arguments = sglang_arguments(setup, cache_tokens)

        def start() -> SGLangEngine:
            """Start SGLang in its own processes, and make the engine on it."""
            process = SGLangProcess(arguments, setup.config.trainer.stall_timeout_s)
            description = f"sglang {process.version} in processes of its own"
            description += f", on a copy of the weights; {cache}"
            if not setup.can_sleep:
                description += "; memory is kept while training"
            return make(process, bucket_bytes=setup.bucket_bytes, description=description)

        return start_balanced([start] * setup.rollout.data_parallel_size)

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """Generate one response. Cancelling the caller aborts the request.

        Args:
            prompt: token ids.
            sampling: how the response is sampled.
            images: images of the prompt.
        """
        self._require_ready([prompt], [sampling], [images])
        with self._lock:
            request_id, future = self._start_request(prompt, sampling, images)
        try:
            reply = await asyncio.wrap_future(future)
            return self._completion(request_id, reply, prompt, sampling)
        except asyncio.CancelledError:
            self.connection.ask("abort_request", rid=request_id)
            raise
        finally:
            self._forget(request_id)

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """Generate a response for each prompt. An error aborts the unfinished requests.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt; None if no prompt has any.

        Returns:
            The responses, in order.

        Raises:
            RolloutError: a request cannot be served, or a response is unusable.
        """
        self._require_ready(prompts, sampling, images)
        futures: dict[str, Future[Any]] = {}
        rows = zip(prompts, sampling, images or [None] * len(prompts), strict=True)
        try:
            with self._lock:
                for row in rows:
                    request_id, future = self._start_request(*row)
                    futures[request_id] = future
            self._count_when_done([*futures.values()])
            replies = zip(futures.items(), prompts, sampling, strict=True)
            return [
                self._completion(request_id, future.result(), prompt, params)
                for (request_id, future), prompt, params in replies
            ]
        finally:
            # After an error nobody waits for the other requests, which would still take memory and
            # time.
            for request_id, future in futures.items():
                if not future.done():
                    self.connection.ask("abort_request", rid=request_id)
                self._forget(request_id)

    def abort(self) -> None:
        """End unfinished responses, and those that begin before this returns.

        Any thread may call this.
        """
        with self._lock:
            pending = list(self._running.values())
            self._aborted.update(self._running)
            self._num_aborting += 1
        try:
            while pending:
                # SGLang ends the requests that it knows. Others may still be on their way, so this
                # is repeated.
                self._call("abort_request", abort_all=True)
                pending = list(wait(pending, _ABORT_AGAIN_S).not_done)
        finally:
            with self._lock:
                self._num_aborting -= 1

    def sleep(self) -> None:
        """Release memory, on accelerators. The weights are dropped, so a load must bring them."""
        super().sleep()
        self._has_resumed_weights = False
        if self.can_sleep:
            self.has_dropped_weights = True
            self._call("release_memory_occupation", tags=["kv_cache", "weights"])

    def wake(self) -> None:
        """End the sleep, and map the released memory again, unless a load has mapped it."""
        has_released = self._state == "asleep" and self.can_sleep
        super().wake()
        if has_released:
            tags = ["kv_cache"] if self._has_resumed_weights else ["kv_cache", "weights"]
            self._call("resume_memory_occupation", tags=tags)

    def close(self) -> None:
        """End the engine, and SGLang unless it is a running server."""
        if self._state != "closed":
            super().close()
            self.connection.close()

    def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load a complete set of weights in buckets, and drop the KV cache of the old ones.

        Args:
            weights: names and tensors.
            version: version of the weights.

        Raises:
            WeightSyncError: the set is incomplete, or SGLang cannot load it.
        """
        # A handle gives another process access to memory of this process's GPU, so tensors from the
        # host are copied there first.
        takes_handles = self.connection.takes_handles
        device = "cuda" if takes_handles else "cpu"
        # `ForkingPickler` pickles tensors as handles, `pickle` with their content.
        dump = ForkingPickler.dumps if takes_handles else pickle.dumps

        def copy(weight: tuple[str, torch.Tensor], _: int) -> tuple[str, torch.Tensor]:
            # A view would be sent together with all of the memory behind it.
            name, tensor = weight
            return name, tensor.detach().to(device, copy=True).contiguous()

        with self._loading(version) as received:
            if self._state == "asleep" and self.can_sleep:
                self._call("resume_memory_occupation", tags=["weights"])
                self._has_resumed_weights = True
            self._call("begin_weight_update")
            num_sent = 0
            checked = self._manifest.check_stream(weights)
            try:
                for bucket in buckets(checked, num_bytes, self.bucket_bytes // _COPIES, copy):
                    # Pickled once for each process, because a handle has one reader.
                    processes = range(self.connection.num_processes)
                    self._call(
                        "update_weights_from_tensor",
                        serialized_named_tensors=[bytes(dump(bucket)) for _ in processes],
                        load_format=LOADER,
                        flush_cache=False,
                    )
                    num_sent += 1
            finally:
                # Even after an error in the stream, so that the next load and its fingerprints
                # start from nothing.
                self._call("end_weight_update")
                # Compared by `_loading`: all processes must have received the same weights.
                if num_sent:
                    received += self._call("get_weights_by_name", name=FINGERPRINTS)
            self._call("flush_cache")
        self.has_dropped_weights = False
        if takes_handles:
            # Free memory whose handles the other processes have closed.
            torch.cuda.ipc_collect()

    def _call(self, method: str, **arguments: Any) -> Any:
        """Send a request and wait for its result."""
        return self.connection.ask(method, **arguments).result()

    def _forget(self, request_id: str) -> None:
        """Drop the state of a request that is over."""
        with self._lock:
            self._running.pop(request_id, None)
            self._aborted.discard(request_id)

    def _start_request(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None
    ) -> tuple[str, Future[Any]]:
        """Send a request for a response. The caller must hold the lock.

        Args:
            prompt: token ids.
            sampling: how the response is sampled.
            images: images of the prompt.

        Returns:
            SGLang's name of the request, and the future of the reply.
        """
        request_id = uuid.uuid4().hex
        sampling_params = {
            "max_new_tokens": sampling.max_tokens,
            **sampling.drawing,  # temperature, top_p, top_k, min_p
            "stop_token_ids": sorted(sampling.stops(self.eos_token_ids)),
            "ignore_eos": sampling.ignore_eos,
            "stop": list(sampling.stop) or None,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if self.connection.has_seeds:
            sampling_params["sampling_seed"] = sampling.seed % (1 << SEED_BITS)
        request: dict[str, Any] = {"input_ids": list(prompt)}
        if images is not None:
            # SGLang expands the one token of each image by itself.
            request["input_ids"] = list(images.short_prompt)
            request["image_data"] = image_data_urls(images, self.name)
        future = self.connection.ask(
            "generate",
            **request,
            sampling_params=sampling_params,
            return_logprob=True,
            rid=request_id,
        )
        self._running[request_id] = future
        if self._num_aborting:
            # SGLang may get this request before the request of `abort`, which then ends it.
            self._aborted.add(request_id)
        return request_id, future

    def _require_ready(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> None:
        """Check the engine and the arguments of a batch, and refuse what SGLang cannot sample.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt; None if no prompt has any.

        Raises:
            RolloutError: the engine is not ready, or cannot serve a request.
        """
        super()._require_ready(prompts, sampling, images)
        for row, params in enumerate(sampling):
            where = f"{self.name}.generate, prompt {row}"
            if params.ignore_eos and params.stop_token_ids:
                got = "stop_token_ids together with ignore_eos"
                expected = "one of them: with ignore_eos SGLang ignores stop_token_ids, too"
                raise RolloutError(where, got, expected)
            if params.min_p > 0 and self.connection.has_seeds and not params.is_greedy:
                expected = "0: SGLang's sampling with seeds does not support it"
                raise RolloutError(where, got="min_p", expected=expected)

    def _completion(
        self, request_id: str, reply: dict[str, Any], prompt: Prompt, sampling: SamplingParams
    ) -> Completion:
        """Make the completion of a reply.

        SGLang reports log-probabilities after the temperature and before filters.

        Args:
            request_id: SGLang's name of the request.
            reply: SGLang's reply.
            prompt: token ids, with one for each embedding of an image.
            sampling: how the response was sampled.

        Raises:
            RolloutError: the reply cannot be used.
        """
        meta = reply["meta_info"]
        num_prompt_tokens = meta.get("prompt_tokens", len(prompt))
        if num_prompt_tokens != len(prompt):
            raise RolloutError(
                f"{self.name}.generate",
                got=f"a prompt of {num_prompt_tokens} tokens",
                expected=f"{len(prompt)}, as the data expanded it",
                fix="Give SGLang's image processor the sizes of data.mm_processor_kwargs.",
            )

        tokens = list(reply.get("output_ids") or ())
        log_probs = [entry[0] for entry in meta.get("output_token_logprobs") or ()]
        finish = meta.get("finish_reason") or {}
        reason = FINISH_REASONS.get(finish.get("type", ""))
        if reason == "abort":
            # The last token of an aborted response may lack its log-probability, or the reverse.
            length = min(len(tokens), len(log_probs))
            tokens = tokens[:length]
            log_probs = log_probs[:length]
        # An abort that nobody here has asked for is a failure: SGLang lacked memory.
        if reason is None or (reason == "abort" and request_id not in self._aborted):
            problem = f"a response that ended with {finish.get('message') or finish}"
        elif len(log_probs) != len(tokens):
            problem = f"{len(log_probs)} log-probabilities of {len(tokens)} tokens"
        elif reason == "length" and len(tokens) < sampling.max_tokens:
            problem = f"a response that was cut at {len(tokens)} of {sampling.max_tokens} tokens"
            problem += ", for want of KV cache"
        elif any(log_prob is None or math.isnan(log_prob) for log_prob in log_probs):
            problem = "a log-probability that is not a number"
            problem += ": the weights hold NaN or infinite values, or overflow"
        else:
            # With filters, the log-probabilities after them are unknown.
            sampling_log_probs = [] if has_filters(sampling) else list(log_probs)
            return Completion(tokens, log_probs, reason, self.weight_version, sampling_log_probs)
        raise RolloutError(
            f"{self.name}.generate",
            got=problem,
            expected="a response",
            fix="Try a larger actor_rollout_ref.rollout.cache_gigabytes, a smaller max_num_seqs,"
            " or float32.",
        )


def _connect_engines(
    setup: EngineSetup, make: Callable[..., SGLangEngine]
) -> SGLangEngine | Balancer:
    """Connect to the servers that `engine_kwargs.sglang` names.

    Args:
        setup: the configuration, tokenizer and device of the rollout.
        make: makes the engine of a connected server.

    Raises:
        ConfigError: an option is wrong.
        RolloutError: a server does not answer, or cannot take weights.
    """
    options = dict(setup.options)
    urls = [options.pop("url")] if "url" in options else options.pop("urls")
    are_urls = isinstance(urls, list) and urls and all(isinstance(url, str) for url in urls)
    unknown = options.keys() - {"timeout_s", "headers"}
    if not are_urls or len({*urls}) < len(urls) or unknown:
        raise ConfigError(
            "actor_rollout_ref.rollout.engine_kwargs.sglang",
            got=f"{setup.rollout.engine_kwargs}",
            expected="url, or urls (a list, each once), and perhaps timeout_s and headers",
            fix="Set all other options on the command line of the servers.",
        )

    def connect(url: str) -> SGLangEngine:
        """Connect to a server, and make the engine on it."""
        server = SGLangServer(
            url,
            max_model_len=setup.max_model_len,
            max_num_seqs=setup.rollout.max_num_seqs,
            **options,
        )
        return make(
            server,
            bucket_bytes=setup.bucket_bytes // len(urls),
            description=f"sglang {server.version} at {url}, which gets the weights over HTTP",
        )

    makers = [partial(connect, url) for url in urls]
    engines = start_engines(makers)
    if len(engines) == 1:
        return engines[0]
    versions = ", ".join(dict.fromkeys(engine.connection.version for engine in engines))
    description = (
        f"sglang {versions} at {', '.join(urls)}, balanced, which get the weights over HTTP"
    )
    if not all(engine.connection.has_seeds for engine in engines):
        description += f"; {_UNSEEDED}"
    return Balancer(engines, description, makers)


def sglang_arguments(setup: EngineSetup, cache_tokens: int | None) -> dict[str, Any]:
    """The configuration as arguments of SGLang's engine.

    Args:
        setup: the configuration, tokenizer and device of the rollout.
        cache_tokens: number of tokens that the KV cache holds. None: SGLang decides, within
            `gpu_memory_utilization`.

    Returns:
        Arguments by SGLang's names. Those of `engine_kwargs.sglang` replace ours.
    """
    rollout = setup.rollout
    model = setup.config.actor_rollout_ref.model
    is_on_cpu = setup.device.type == "cpu"
    arguments: dict[str, Any] = {
        "model_path": str(model.path),
        "tokenizer_path": str(setup.config.data.tokenizer or model.path),
        "dtype": str(setup.dtype).removeprefix("torch."),
        "device": setup.device.type,
        "context_length": setup.max_model_len + _SPARE_TOKENS,
        "max_running_requests": rollout.max_num_seqs,
        "chunked_prefill_size": rollout.max_num_batched_tokens,
        "mem_fraction_static": rollout_share(setup.config) / rollout.data_parallel_size,
        "tp_size": rollout.tensor_model_parallel_size,
        "load_format": "dummy",  # random weights, which the first load replaces
        "custom_weight_loader": [LOADER],
        "enable_deterministic_inference": not is_on_cpu,
        "enable_memory_saver": setup.can_sleep,
        "disable_cuda_graph": rollout.enforce_eager or is_on_cpu,
        "trust_remote_code": model.trust_remote_code,
        "json_model_override_args": json.dumps(setup.config_overrides),
        "log_level": "error",
    }
    if cache_tokens is not None:
        arguments["max_total_tokens"] = cache_tokens
    if is_on_cpu:
        # SGLang's own kernels have no build for most CPUs. These backends work without them.
        arguments["attention_backend"] = "torch_native"
        arguments["sampling_backend"] = "pytorch"
        arguments["grammar_backend"] = "none"
        arguments["disable_overlap_schedule"] = True
        arguments["mem_fraction_static"] = _SHARE_OF_HOST
    return arguments | setup.options
