# SPDX-License-Identifier: Apache-2.0
"""vLLM as a rollout engine: what of the configuration it is made with, and how weights reach it."""

from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from itertools import chain, zip_longest
from typing import Any

import torch

from quadriga.config.adapter import adapter_route
from quadriga.errors import QuadrigaError, RolloutError, WeightSyncError, first_line
from quadriga.models.adapter_files import is_factor
from quadriga.models.load import stop_token_ids
from quadriga.models.lora import add_adapter
from quadriga.rollout.balancer import Balancer, start_engines
from quadriga.rollout.interface import (
    BatchImages,
    Completion,
    Images,
    Prompt,
    Prompts,
    RolloutEngine,
    Sampling,
    SamplingParams,
)
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.third_party import LogProbsOf, ThirdPartyEngine, died, refused, require_release
from quadriga.rollout.vllm.adapter import Adapter, AdapterSlot, separated
from quadriga.rollout.vllm.cores import Core, InProcessCore, ProcessCore
from quadriga.rollout.vllm.library import LEAST_OF_ADAPTERS, WHERE, load
from quadriga.rollout.vllm.requests import Request, Response, to_sampling
from quadriga.weight_sync.buckets import pack_shared
from quadriga.weight_sync.fingerprint import Fingerprint

WORKER_EXTENSION = "quadriga.rollout.vllm.worker.WorkerExtension"
_GIB = 1 << 30


class VLLMEngine(ThirdPartyEngine):
    """vLLM: with `mode=sync` and no tensor parallelism in this process, otherwise in processes of its own.

    Args:
        setup: the configuration and what belongs to it.
        manifest: the weights that make the model complete, without an adapter.
        eos_token_ids: end-of-text tokens.
        adapter: that is applied beside the weights, and comes with each load; None: there is none, or it comes merged.
        is_vision: whether the model takes images.

    Raises:
        RolloutError: vLLM is missing, too old, or refuses the model or the options.
    """

    name, title = "vllm", "vLLM"
    takes_images = True

    def __init__(
        self,
        setup: EngineSetup,
        manifest: Manifest,
        eos_token_ids: Sequence[int],
        *,
        adapter: Adapter | None = None,
        is_vision: bool = False,
    ) -> None:
        super().__init__(manifest if adapter is None else manifest.joined(adapter.manifest), setup.max_model_len)
        self.setup, self.eos_token_ids, self.adapter, self.is_vision = setup, tuple(eos_token_ids), adapter, is_vision
        rollout = setup.rollout
        self.bucket_bytes = setup.bucket_bytes
        self.can_sleep = rollout.free_cache_engine and setup.device.type != "cpu"
        # Training wants the numbers before filters. vLLM says those only at temperature 1, which the checks see to.
        is_filtered = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
        self.log_probs_of: LogProbsOf = "raw_logprobs" if is_filtered else "processed_logprobs"
        self.library = load()
        if adapter is not None:
            fix = f"pip install 'vllm>={LEAST_OF_ADAPTERS}', or set actor_rollout_ref.model.lora_merge=true."
            where = f"{WHERE}, an adapter by itself"
            require_release(self.title, self.library.version, LEAST_OF_ADAPTERS, where=where, fix=fix)
        self.arguments = self._arguments()
        self.log_probs_of = self.arguments["logprobs_mode"]
        try:
            self.core = self._make_core()
        except QuadrigaError:
            raise
        except Exception as error:  # vLLM's failures have no class in common
            raise refused(self.name, self.title, first_line(error)) from error
        self._slot = None if adapter is None else AdapterSlot(adapter, self.library, self.core)
        self.private_parts: list[tuple[str, bool, str]] = self.core.call("private_parts")[0]
        self.description = self._describe()

    @classmethod
    def from_config(cls, setup: EngineSetup) -> RolloutEngine:
        model, skeleton = setup.config.actor_rollout_ref.model, setup.skeleton()
        manifest, is_vision = Manifest.of(skeleton), hasattr(skeleton.config, "vision_config")
        eos_token_ids = stop_token_ids(skeleton, setup.tokenizer.eos_token_id)
        adapter = None
        is_wide = setup.device.type != "cpu" and setup.dtype == torch.float32
        if model.has_adapter and adapter_route(setup.config, is_wide_on_accelerator=is_wide).is_alone:
            add_adapter(skeleton, model, seed=0)
            adapter = Adapter.of(skeleton)
        make = partial(cls, setup, manifest, eos_token_ids, adapter=adapter, is_vision=is_vision)
        engines = start_engines([make] * setup.rollout.data_parallel_size)
        return engines[0] if len(engines) == 1 else Balancer(engines)

    async def generate(
        self, prompt_token_ids: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        if not isinstance(self.core, ProcessCore):
            return await super().generate(prompt_token_ids, sampling, images)
        [request] = self._requests([prompt_token_ids], [sampling], [images])
        with self._explained():
            response = await self.core.generate(request)
        return response.completion(sampling, self.log_probs_of, self.weight_version)

    def generate_batch(self, prompts: Prompts, sampling: Sampling, images: BatchImages = None) -> list[Completion]:
        requests = self._requests(prompts, sampling, images or [None] * len(prompts))
        with self._explained():
            responses: list[Response] = self.core.generate_batch(requests)
        return [
            response.completion(params, self.log_probs_of, self.weight_version)
            for response, params in zip(responses, sampling, strict=True)
        ]

    def abort(self) -> None:
        """End unfinished responses; from another thread than the one that generates."""
        self.core.abort()

    def sleep(self) -> None:
        """On a CPU vLLM keeps its memory."""
        super().sleep()
        if self.can_sleep:
            self.core.ask("sleep", level=1)

    def wake(self) -> None:
        super().wake()
        if self.can_sleep:
            self.core.ask("wake_up")
            self.core.call("clear_cache")  # its memory is new, and may hold anything

    def close(self) -> None:
        if self._state != "closed":
            super().close()
            self.core.close()

    def _make_core(self) -> Core:
        rollout = self.setup.rollout
        is_in_process = rollout.mode == "sync" and rollout.tensor_model_parallel_size == 1
        return (InProcessCore if is_in_process else ProcessCore)(self.library, self.arguments)

    def _arguments(self) -> dict[str, Any]:
        """The arguments of vLLM's engine: those of the configuration, under vLLM's names; `engine_kwargs.vllm` wins."""
        rollout, model, data = self.setup.rollout, self.setup.config.actor_rollout_ref.model, self.setup.config.data
        is_on_cpu = self.setup.device.type == "cpu"
        # On a CPU vLLM raises where it cuts a prompt of a request with a seed: it cannot put the generator back. So a
        # pass holds at least one token of each sequence there, and a prompt that is not cut.
        smallest_pass = max(rollout.max_num_seqs, self.setup.max_model_len) if is_on_cpu else rollout.max_num_seqs
        own: dict[str, Any] = {
            "model": str(model.path),
            "tokenizer": str(data.tokenizer or model.path),
            "dtype": str(self.setup.dtype).removeprefix("torch."),
            "max_model_len": self.setup.max_model_len,
            "max_num_seqs": rollout.max_num_seqs,
            "max_num_batched_tokens": max(rollout.max_num_batched_tokens, smallest_pass),
            "enable_chunked_prefill": not is_on_cpu,
            "gpu_memory_utilization": rollout.gpu_memory_utilization / rollout.data_parallel_size,
            "tensor_parallel_size": rollout.tensor_model_parallel_size,
            "enforce_eager": rollout.enforce_eager or is_on_cpu,
            "enable_sleep_mode": self.can_sleep,
            # Random weights would also fill what vLLM makes of a processor's files and no weight of the trainer's
            # replaces: how a vision encoder scales its pixels.
            "load_format": "auto" if self.is_vision else "dummy",
            "logprobs_mode": self.log_probs_of,
            "enable_prefix_caching": True,
            "worker_extension_cls": WORKER_EXTENSION,
            "generation_config": "vllm",
            "trust_remote_code": model.trust_remote_code,
            "hf_overrides": model.override_config or {},
            "disable_log_stats": True,
        }
        gigabytes = 1.0 if rollout.cache_gigabytes is None and is_on_cpu else rollout.cache_gigabytes
        if gigabytes is not None:
            own["kv_cache_memory_bytes"] = int(gigabytes * _GIB)
        if self.adapter is not None:
            own |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": self.adapter.room_for_rank,
                "lora_target_modules": self.adapter.modules,
            }
        if self.is_vision:
            own |= {"limit_mm_per_prompt": {"video": 0}, "mm_processor_kwargs": dict(data.mm_processor_kwargs.given)}
        return own | self.setup.options

    def _describe(self) -> str:
        """What was chosen, and what of this version of vLLM is not as it was, for people to read."""
        told, is_on_cpu = self.arguments, self.setup.device.type == "cpu"
        where = "in the worker's process"
        if not self.core.is_in_process:
            where = f"in processes of its own ({told['tensor_parallel_size']})"
        lora = ""
        if self.adapter is not None:
            lora = f" and the adapter beside them, with room for rank {self.adapter.room_for_rank}"
        cache = told.get("kv_cache_memory_bytes")
        eager = "nothing is compiled" + (", for that takes longer than it saves on a CPU" if is_on_cpu else "")
        missing = "".join(f"; without {name} ({why})" for name, is_there, why in self.private_parts if not is_there)
        return (
            f"vllm {self.library.version} {where}, on a copy of the weights{lora}; "
            f"{'as much KV cache as fits' if cache is None else f'{cache / _GIB:g} GiB of KV cache'}; "
            f"{eager if told['enforce_eager'] else 'compiled'}"
            f"{'' if self.can_sleep else '; memory is kept while training'}{missing}"
        )

    def _requests(self, prompts: Prompts, sampling: Sampling, images: Sequence[Images | None]) -> list[Request]:
        self._require_ready(prompts, sampling, images)
        if any(images) and not self.is_vision:
            raise RolloutError(
                "vllm.generate",
                got=f"a prompt with images, for {self.arguments['model']}",
                expected="a vision-language model",
                fix="Leave out the images, or take another actor_rollout_ref.model.path.",
            )
        adapter = None if self._slot is None else self._slot.request
        requests = []
        for prompt, params, one in zip(prompts, sampling, images, strict=True):
            given: dict[str, Any] = {"prompt_token_ids": list(prompt)}
            if one is not None:  # one token for each image, which vLLM repeats by itself
                given = {"prompt_token_ids": list(one.short_prompt), "multi_modal_data": {"image": list(one.pictures)}}
            settings = to_sampling(self.library, params, self.eos_token_ids, streams=self.core.is_in_process)
            requests.append(Request(given, settings, adapter, None if one is None else prompt))
        return requests

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except RolloutError:
            raise
        except Exception as error:  # vLLM's failures have no class in common
            raise died(self.name, self.title, f"failed: {first_line(error)}") from error

    def _receive(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[dict[str, str]]:
        is_asleep = self._state == "asleep" and self.can_sleep
        if is_asleep:
            self.core.ask("wake_up", tags=["weights"])
        factors: dict[str, torch.Tensor] = {}
        below = weights if self._slot is None else separated(weights, factors)
        received: list[dict[str, str]] = []
        for first in below:  # none, where the adapter comes alone
            self._frozen = Fingerprint({})
            received = self._send(chain([first], below))
        self._forget(is_asleep)
        if self._slot is None:
            return received
        return [one | other for one, other in zip_longest(self._slot.replace(factors), received, fillvalue={})]

    def _send(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[dict[str, str]]:
        """Weights to the processes that hold the model. Returns the fingerprints of what each of them got."""
        self.core.call("begin_weights")
        try:
            if self.core.is_in_process:
                for name, tensor in weights:
                    self.core.call("load_bucket", [(name, tensor.detach().clone())])
            else:
                with closing(pack_shared(weights, self.bucket_bytes)) as buckets:
                    for bucket in buckets:
                        self.core.call("load_bucket", bucket)
        finally:
            received = self.core.call("end_weights")
        return received

    def _forget(self, is_asleep: bool) -> None:
        """Drop what earlier weights made: the KV cache of prompts, a NaN in it, embeddings of images."""
        if not self.core.ask("reset_prefix_cache"):
            raise WeightSyncError(
                f"{WHERE}, prefix cache",
                got="a cache that vLLM does not empty, for responses are being generated",
                expected="new weights between responses",
                fix="Wait for the responses, or call abort(), before weights are published.",
            )
        if not is_asleep:
            self.core.call("clear_cache")
        if self.is_vision:
            self.core.ask("reset_encoder_cache")

    def _stays(self, name: str) -> bool:
        return self._slot is not None and not is_factor(name)
