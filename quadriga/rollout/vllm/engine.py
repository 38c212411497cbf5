# SPDX-License-Identifier: Apache-2.0
"""vLLM as a rollout engine, and both ends of its weight sync.

load_weights -- tensors, or buckets in shared memory --> WorkerExtension.load_bucket (repeated)
             <------- fingerprints of the weights ------ WorkerExtension.end_weights
"""

import asyncio
import logging
import os
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from functools import cached_property, partial
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from quadriga.config.adapter import adapter_route, read_adapter
from quadriga.config.placement import experts_problem
from quadriga.engine_traits.vllm import TRAITS
from quadriga.errors import QuadrigaError, RolloutError, WeightSyncError, first_line
from quadriga.models.adapter_files import AdapterFiles, is_factor
from quadriga.models.load import stop_token_ids
from quadriga.models.lora import adapter_of, add_adapter
from quadriga.observe.gpu_machine import require_plain_segments
from quadriga.partition import buckets
from quadriga.rollout.balancer import Balancer, start_balanced
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
from quadriga.rollout.third_party import (
    LogProbsOf,
    ThirdPartyEngine,
    engine_lost_error,
    require_known_experts,
    require_release,
    results_of,
    start_error,
)
from quadriga.rollout.vllm.adapter import Adapter, AdapterSlot, split_off_adapter
from quadriga.rollout.vllm.arguments import arguments_of, sampling_of
from quadriga.rollout.vllm.cores import (
    InProcessCore,
    ProcessCore,
    Response,
    VLLMMemory,
    VLLMRequest,
)
from quadriga.rollout.vllm.group import GroupCore, sees_peers
from quadriga.rollout.vllm.library import (
    LEAST_OF_ADAPTERS,
    MIXTURES,
    WHERE,
    adapter_layers,
    cache_tensors,
    checkpoint_weights,
    drawn_tokens,
    drop_packed_experts,
    layerwise_reload,
    load,
    repack_tied,
    tensor_parallel_place,
)
from quadriga.weight_sync.buckets import num_bytes, pack, unpack
from quadriga.weight_sync.fingerprint import PendingFingerprints, tensor_fingerprint
from quadriga.weight_sync.publish import NamedWeights
from quadriga.weight_sync.reshard import Wanted

logger = logging.getLogger(__name__)

_GIB = 1 << 30


class VLLMEngine(ThirdPartyEngine):
    """Rollout engine on vLLM.

    vLLM is in this process with `mode=sync` and without tensor parallelism, on the ranks of a
    rollout group, or in its own processes.

    Args:
        setup: the configuration, tokenizer and device of the rollout.
        manifest: the weights of the complete model, without an adapter.
        eos_token_ids: end-of-text tokens of the model.
        adapter: adapter that vLLM applies to the weights, and that is part of each load. None:
            there is none, or it arrives merged.
        is_vision: whether the model takes images.

    Attributes:
        rebuilt: the most bytes of full tensors that a process of vLLM has held beside its weights
            at any time of a load, and the name of the module whose tensor came last then.

    Raises:
        RolloutError: vLLM is missing, too old, or refuses the model or the options.
    """

    name = "vllm"
    title = "vLLM"
    traits = TRAITS
    takes_images = cuts_images = True

    def __init__(
        self,
        setup: EngineSetup,
        manifest: Manifest,
        eos_token_ids: Sequence[int],
        *,
        adapter: Adapter | None = None,
        is_vision: bool = False,
    ) -> None:
        if adapter is not None:
            manifest = manifest.union(adapter.manifest)
        super().__init__(manifest, setup.max_model_len)
        self.setup = setup
        self.eos_token_ids = tuple(eos_token_ids)
        self.adapter = adapter
        self.is_vision = is_vision
        self.bucket_bytes = setup.bucket_bytes
        self.library = load()
        if adapter is not None:
            require_release(
                self.title,
                self.library.version,
                LEAST_OF_ADAPTERS,
                where=f"{WHERE}, an adapter by itself",
                fix=f"pip install 'vllm>={LEAST_OF_ADAPTERS}',"
                " or set actor_rollout_ref.model.lora_merge=true.",
            )
        self.arguments = arguments_of(setup, adapter, is_vision=is_vision)
        self.core = self._make_core()
        self.memory = VLLMMemory(self.core, setup.can_sleep)
        self._slot = None if adapter is None else AdapterSlot(adapter, self.library, self.core)
        # Thread of loads between two steps, which run one after the other.
        self._loader = ThreadPoolExecutor(1, "new weights")
        # During a load between two steps: whether the KV cache of older weights stays. None: there
        # is no such load.
        self._keeps_cache: bool | None = None
        # Fingerprints of the weights below an adapter, which later loads may omit, by name.
        self._frozen: dict[str, str] = {}
        self.rebuilt: tuple[int, str] = (0, "")
        self.description = self._describe()

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "VLLMEngine | Balancer":
        """Make the engine of a configuration, or several behind a balancer.

        Raises:
            ConfigError: the configuration asks for something that vLLM does not support.
            RolloutError: vLLM is missing, too old, or refuses the model or the options.
        """
        if setup.device.type == "cpu":
            # With trainer.device=auto, only this process knows that the engine is on a CPU.
            problem = experts_problem(setup.config)
            if problem:
                raise problem
        skeleton = setup.skeleton()
        require_known_experts(cls.name, skeleton, MIXTURES)
        model = setup.config.actor_rollout_ref.model
        manifest = Manifest.of(skeleton)
        is_vision = hasattr(skeleton.config, "vision_config")
        eos_token_ids = stop_token_ids(skeleton, setup.tokenizer.eos_token_id)
        adapter = None
        if model.has_adapter:
            is_wide = setup.device.type != "cpu" and setup.dtype == torch.float32
            route = adapter_route(setup.config, is_wide_on_accelerator=is_wide)
            # Otherwise the trainer merges the adapter into the weights, so vLLM need not know it.
            if route.is_alone:
                # Only names and shapes are needed, so any seed will do.
                add_adapter(skeleton, model, seed=0)
                shape = adapter_of(skeleton)
                assert shape is not None, "it was just added"
                adapter = Adapter(shape, Manifest.of(skeleton).select(is_factor))
        make = partial(cls, setup, manifest, eos_token_ids, adapter=adapter, is_vision=is_vision)
        return start_balanced([make] * setup.rollout.data_parallel_size)

    @property
    def can_sleep(self) -> bool:
        """Whether `sleep` releases memory."""
        return self.memory.can_sleep

    @cached_property
    def missing_parts(self) -> list[str]:
        """Private parts of vLLM that are used here, but that this version of vLLM lacks."""
        return self.core.call("missing_parts")[0]

    @property
    def log_probs_of(self) -> LogProbsOf:
        """Distribution of the log-probabilities that vLLM reports; see `split_log_probs`."""
        return self.arguments["logprobs_mode"]

    @property
    def has_frozen_weights(self) -> bool:
        """Whether vLLM has the weights below an adapter, so that a load may omit them."""
        return bool(self._frozen)

    @property
    def has_dropped_weights(self) -> bool:
        return self.memory.has_dropped_weights

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        """Generate one response. Cancelling the caller aborts the request.

        Args:
            prompt: token ids.
            sampling: how the response is sampled.
            images: images of the prompt.
        """
        if isinstance(self.core, ProcessCore):
            [future] = self.begin([prompt], [sampling], [images])
            return await asyncio.wrap_future(future)
        if not isinstance(self.core, GroupCore):
            # An engine in this process blocks, so the base class collects requests into batches.
            return await super().generate(prompt, sampling, images)
        [request] = self._make_requests([prompt], [sampling], [images])
        with self._translated_errors():
            response = await self.core.generate(request)
        return response.completion(sampling, self.log_probs_of, self.weight_version)

    async def _complete(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None
    ) -> Completion:
        """Generate one response in vLLM's own processes, on the loop of the core's thread.

        Args:
            prompt: token ids.
            sampling: how the response is sampled.
            images: images of the prompt.
        """

        # A function, because a response that begins anew needs the latest version and adapter.
        def make_request() -> tuple[VLLMRequest, int]:
            [request] = self._make_requests([prompt], [sampling], [images])
            return request, self.weight_version

        with self._translated_errors():
            response = await self.core.respond(make_request)
        _, last_version = response.versions[-1]
        return response.completion(sampling, self.log_probs_of, last_version)

    def begin(
        self,
        prompts: Prompts,
        sampling: Sampling,
        images: BatchImages = None,
        joined: Callable[[int], None] | None = None,
        earlier: Sequence[Completion] = (),
    ) -> list[Future[Completion]]:
        """Start requests without waiting for them. vLLM must be in its own processes.

        Args:
            prompts: token ids of each request.
            sampling: how each response is sampled.
            images: images of each prompt.
            joined: never called, because vLLM does not count its steps.
            earlier: must be empty, because vLLM does not continue responses.

        Returns:
            The completion of each request.
        """
        assert isinstance(self.core, ProcessCore), "beside training vLLM has a process of its own"
        rows = zip(prompts, sampling, images or [None] * len(prompts), strict=True)
        return [self.core.start(self._complete(*row)) for row in rows]

    def between_steps(
        self, work: Callable[[], None], *, keeps_cache: bool, recomputes: bool = False
    ) -> Future[int]:
        """Run a function that loads weights between two steps.

        Args:
            work: the function, which calls `load_weights`.
            keeps_cache: whether unfinished responses go on with the KV cache of the older weights.
            recomputes: ignored, because `work` loads weights.

        Returns:
            Future of `num_steps`, or of the error of `work`.
        """

        def load_between_steps() -> int:
            # An attribute, because `load_weights` has no argument for it.
            self._keeps_cache = keeps_cache
            try:
                work()
            finally:
                self._keeps_cache = None
            return self.num_steps

        return self._loader.submit(load_between_steps)

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        """Generate a response for each prompt.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt; None if no prompt has any.

        Returns:
            The responses, in order.

        Raises:
            RolloutError: a request cannot be served.
        """
        if isinstance(self.core, ProcessCore):
            futures = self.begin(prompts, sampling, images)
            self._count_when_done(futures)
            return results_of(futures)
        requests = self._make_requests(prompts, sampling, images or [None] * len(prompts))
        # Without seeds of requests vLLM draws from torch's generator, which in this process is the
        # trainer's. The generator gets the first request's seed for this batch, and then its former
        # state again.
        shares_generator = self.core.is_in_process and not self.setup.rollout.request_seeds
        needs_seed = shares_generator and bool(sampling)
        index = self.setup.device.index
        devices = [] if index is None else [index]
        with self._translated_errors(), torch.random.fork_rng(devices, enabled=needs_seed):
            if needs_seed:
                torch.manual_seed(sampling[0].seed)
            responses: list[Response] = self.core.generate_batch(requests, self.count_ended)
        return [
            response.completion(params, self.log_probs_of, self.weight_version)
            for response, params in zip(responses, sampling, strict=True)
        ]

    def wanted_shards(self) -> Wanted:
        """Weights that `load_weights` needs: full tensors, even if the trainer has shards."""
        return self._manifest.full_weights(self.setup.dtype)

    def load_weights(self, weights: NamedWeights, version: int) -> None:
        """Load a complete set of weights, and drop KV cache and image embeddings of the old ones.

        In `between_steps` the KV cache may stay for unfinished responses. New requests do not read
        what older weights have computed.

        Args:
            weights: names and tensors.
            version: version of the weights.

        Raises:
            WeightSyncError: the set is incomplete, or vLLM cannot load it.
        """
        keeps_cache = self._keeps_cache or False
        # Without a pause, all responses must have ended.
        pause: AbstractContextManager[None] = nullcontext()
        if self._keeps_cache is not None and isinstance(self.core, ProcessCore):
            pause = self.core.paused_for_weights(version, keeps_cache=keeps_cache)
        with pause, self._loading(version) as received:
            self.memory.wake("weights")
            factors = {}  # matrices of the adapter, filled while the stream is read
            model_weights = self._manifest.check_stream(weights, self._frozen)
            if self._slot is not None:
                model_weights = split_off_adapter(model_weights, factors)
            try:
                with closing(self._buckets(model_weights)) as stream:
                    # A bucket means that the stream brings all weights, so the fingerprints of an
                    # earlier load do not count any more. If the adapter arrives alone, there is no
                    # bucket, and they stay.
                    for bucket in stream:
                        self._frozen = {}
                        self.core.call("load_bucket", bucket)
            finally:
                loaded_fingerprints = self.core.call("end_weights")
            self._log_rebuilt()
            self._drop_caches(keeps_cache=keeps_cache)
            # For each process of vLLM, fingerprints of the weights that it holds: those that the
            # stream omitted, those that were loaded, and those of the adapter.
            received += [self._frozen | fingerprints for fingerprints in loaded_fingerprints]
            if self._slot is not None:
                for process, fingerprints in enumerate(self._slot.replace(factors)):
                    received[process] |= fingerprints
        self.memory.has_dropped_weights = False
        # Later loads may omit the weights below the adapter.
        if self._slot is not None:
            for name, fingerprint in self._arrived.tensors.items():
                if not is_factor(name):
                    self._frozen[name] = fingerprint

    def _log_rebuilt(self) -> None:
        """Log the most memory that a load has taken beside the weights, if it is a new maximum."""
        # A pair for each process. vLLM's messages turn tuples into lists, so it is unpacked first.
        num_bytes, name = max(self.core.call("rebuilt_module"))
        if num_bytes > self.rebuilt[0]:
            self.rebuilt = (num_bytes, name)
            logger.info(
                "vLLM rebuilds a module at a time:"
                " at most %.1f MiB of tensors beside its weights (%s)",
                num_bytes / (1 << 20),
                name,
            )

    def _drop_caches(self, *, keeps_cache: bool) -> None:
        """Drop what vLLM computed with the old weights: embeddings of images, and its KV cache.

        Args:
            keeps_cache: whether the KV cache is kept.

        Raises:
            WeightSyncError: responses are being generated, so vLLM does not drop the KV cache.
        """
        if not keeps_cache:
            if not self.core.ask("reset_prefix_cache"):
                raise WeightSyncError(
                    f"{WHERE}, prefix cache",
                    got="a cache that vLLM does not empty, because responses are being generated",
                    expected="new weights between responses",
                    fix="Wait for the responses, or call abort(), before weights are published.",
                )
            # Memory that is released now will be zeroed in `wake`.
            if "kv_cache" not in self.memory.released:
                self.core.call("clear_cache")
        if self.is_vision:
            self.core.ask("reset_encoder_cache")

    def _buckets(self, weights: Iterator[tuple[str, Tensor]]) -> Generator[Any, None, None]:
        """Pack weights into buckets, in the form in which vLLM's workers can read them.

        Args:
            weights: names and tensors.

        Yields:
            Arguments of `WorkerExtension.load_bucket`. For vLLM in this process: a list of names
            and tensors, copied unless they stay unchanged during the load. For vLLM's own
            processes: a dictionary that says where the content of the bucket is, in GPU memory
            ("handle") or in shared memory ("path"), and which weights it has ("entries"). The
            content is valid until the next bucket.
        """
        if self.core.is_in_process:
            # `from_dlpack` shares memory, `clone` copies it. Either way the storage is a new
            # object, by which `_update_rebuilt` sees when vLLM frees the tensor.
            copy = torch.from_dlpack if self.is_load_stable else torch.clone

            # A bucket is a list here, so the offset in the bucket is not used.
            def put(weight: tuple[str, Tensor], _: int) -> tuple[str, Tensor]:
                name, tensor = weight
                return name, copy(tensor.detach())

            yield from buckets(weights, num_bytes, self.bucket_bytes, put)
            return
        if self.setup.device.type == "cuda":
            # Only memory of a GPU has a handle, but tensors from another process are on the host.
            on_device = ((name, tensor.to(self.setup.device)) for name, tensor in weights)
            for entries, content in pack(on_device, self.bucket_bytes):
                # The other process reads in a stream of its own, so the content must be complete.
                torch.cuda.current_stream(content.device).synchronize()
                handle = content.untyped_storage()._share_cuda_()
                place = [content.storage_offset(), content.numel()]
                yield {"handle": handle, "place": place, "entries": entries}
            return
        # Shared memory without a name, which is freed with this process, however the process ends.
        file = os.memfd_create("quadriga-weights")
        path = f"/proc/{os.getpid()}/fd/{file}"
        allocate = partial(torch.from_file, path, True, dtype=torch.uint8)
        try:
            for entries, content in pack(weights, self.bucket_bytes, allocate):
                yield {"path": path, "num_bytes": content.numel(), "entries": entries}
        finally:
            os.close(file)

    def follow(self) -> None:
        """Make the leader's steps until the batch is over; for a member of a rollout group."""
        assert isinstance(self.core, GroupCore), "only members of a group follow"
        with self._translated_errors():
            self.core.follow()

    def release(self) -> None:
        """End the batch on all ranks of a rollout group; does nothing except on the leader."""
        if isinstance(self.core, GroupCore):
            self.core.release()

    def abort(self) -> None:
        """End unfinished responses. Any thread may call this."""
        self.core.abort()

    def sleep(self) -> None:
        """Release memory, on accelerators.

        Weights below an adapter move to the host, because the next load may omit them. Other
        weights are dropped.
        """
        super().sleep()
        self.memory.sleep(keeps_weights=self.has_frozen_weights)

    def wake(self) -> None:
        """End the sleep. Memory that a load has not mapped yet is mapped again."""
        super().wake()
        if "kv_cache" in self.memory.released:
            self.memory.wake("weights", "kv_cache")
            # The memory of the cache is new, and may contain NaN.
            self.core.call("clear_cache")

    def close(self) -> None:
        """End the engine, its processes and its thread."""
        if self._state != "closed":
            super().close()
            self.core.close()
            self._loader.shutdown()

    def _make_core(self) -> InProcessCore | ProcessCore:
        """Start vLLM on the ranks of a group, in this process, or in its own processes.

        Raises:
            RolloutError: vLLM refuses the model or the options.
        """
        rollout = self.setup.rollout
        # In these modes, requests and weights arrive while others are generated. In this process,
        # generation would block them.
        needs_process = rollout.mode == "async" or self.setup.config.async_training.enable
        try:
            if self.setup.group is not None:
                return GroupCore(self.library, self.arguments, self.setup.group)
            if not needs_process and rollout.tensor_model_parallel_size == 1:
                return InProcessCore(self.library, self.arguments, self.setup.device)
            if self.setup.device.type == "cuda":
                require_plain_segments(self.title)
            return ProcessCore(
                self.library, self.arguments, self.setup.config.trainer.stall_timeout_s
            )
        except QuadrigaError:
            raise
        except Exception as error:  # vLLM's failures have no class in common
            raise start_error(self.name, self.title, first_line(error)) from error

    def _describe(self) -> str:
        """Describe what was chosen, and name the parts that this version of vLLM lacks."""
        num_ranks = self.arguments["tensor_parallel_size"]
        if not self.core.is_in_process:
            where = f"in processes of its own ({num_ranks})"
        elif self.setup.group is not None:
            where = f"in the processes of {num_ranks} ranks, which hold it together"
        else:
            where = "in the worker's process"

        weights = "on a copy of the weights"
        if self.adapter is not None:
            room = self.adapter.room_for_rank
            weights += f" and the adapter beside them, with room for rank {room}"

        cache_bytes = self.arguments.get("kv_cache_memory_bytes")
        cache = "as much KV cache as fits"
        if cache_bytes is not None:
            cache = f"{cache_bytes / _GIB:g} GiB of KV cache"
        cache += f" for at most {self.arguments['max_num_seqs']} sequences at a time"
        if self.setup.device.type != "cpu":
            cache += f", of {self.arguments['gpu_memory_utilization']:.2g} of the GPU"

        compiled = "compiled"
        if self.arguments["enforce_eager"]:
            compiled = "nothing is compiled"
            if self.setup.device.type == "cpu":
                compiled += ", because that takes longer than it saves on a CPU"

        parts = [f"vllm {self.library.version} {where}, {weights}", cache, compiled]
        if not self.can_sleep:
            parts.append("memory is kept while training")
        if self.setup.group is not None and not sees_peers(self.setup.group):
            parts.append("all-reduce by NCCL, because each process sees its own GPU only")
        parts += [f"without {part}" for part in self.missing_parts]
        return "; ".join(parts)

    def _make_requests(
        self, prompts: Prompts, sampling: Sampling, images: Sequence[Images | None]
    ) -> list[VLLMRequest]:
        """Convert requests to vLLM's form, after checking them.

        Args:
            prompts: token ids of each prompt.
            sampling: how each response is sampled.
            images: images of each prompt.

        Raises:
            RolloutError: the engine is not ready, or cannot serve a request.
        """
        self._require_ready(prompts, sampling, images)
        if any(images) and not self.is_vision:
            raise RolloutError(
                "vllm.generate",
                got=f"a prompt with images, for {self.arguments['model']}",
                expected="a vision-language model",
                fix="Leave out the images, or take another actor_rollout_ref.model.path.",
            )
        adapter = None if self._slot is None else self._slot.request
        settings = self.setup.config.async_training
        keeps_cache = settings.enable and settings.kv_on_update == "keep"
        requests = []
        for prompt, params, prompt_images in zip(prompts, sampling, images, strict=True):
            vllm_prompt: dict[str, Any] = {"prompt_token_ids": list(prompt)}
            if keeps_cache:
                # vLLM shares cached prefixes only between requests with the same salt. So no
                # request reads what older weights have computed.
                vllm_prompt["cache_salt"] = str(self.weight_version)
            expanded = None
            if prompt_images is not None:
                # vLLM expands the one token of each image and video by itself. The result is then
                # compared with our own expanded prompt.
                expanded = prompt
                vllm_prompt["prompt_token_ids"] = list(prompt_images.short_prompt)
                media = {"image": prompt_images.pictures, "video": prompt_images.videos}
                vllm_prompt["multi_modal_data"] = {
                    kind: list(items) for kind, items in media.items() if items
                }
            vllm_params = sampling_of(
                params, self.library, self.eos_token_ids, has_seed=self.setup.rollout.request_seeds
            )
            requests.append(VLLMRequest(vllm_prompt, vllm_params, adapter, expanded))
        return requests

    @contextmanager
    def _translated_errors(self) -> Iterator[None]:
        """Context manager: raise vLLM's errors as RolloutError or EngineLostError."""
        try:
            yield
        except QuadrigaError:
            raise
        except Exception as error:  # vLLM's failures have no class in common
            reason = first_line(error)
            if self.core.is_lost:
                raise engine_lost_error(self.name, self.title, f"has ended: {reason}") from error
            where = f"{self.name}.generate"
            if self.setup.group is not None:
                where += f", {self.setup.group}"
            raise RolloutError(
                where,
                got=f"{self.title}, which failed: {reason}",
                expected="responses",
                fix="See its own message in the log above.",
            ) from error


def row_parts(matrix: Tensor, num_ranks: int, rank: int) -> list[Tensor]:
    """List the parts of a matrix, split by rows, that a tensor-parallel rank may hold.

    Args:
        matrix: [rows, ...].
        num_ranks: number of ranks.
        rank: the rank.

    Returns:
        All rows, and the rank's part for each number of parts, from 2 to `num_ranks`, that divides
        the ranks and the rows. With fewer parts than ranks, as with few KV heads, several ranks
        hold the same part.
    """
    parts = [matrix]
    for num_parts in range(2, num_ranks + 1):
        if num_ranks % num_parts == 0 and matrix.shape[0] % num_parts == 0:
            parts.append(matrix.chunk(num_parts)[rank * num_parts // num_ranks])
    return parts


class WorkerExtension:
    """Methods that vLLM's workers, the processes that hold the model, get from us.

    vLLM adds this class to the bases of its worker (`worker_extension_cls`), so that `self` is the
    worker. `Core.call` calls the methods in every worker.

        load_bucket (repeated) -> end_weights -> clear_cache
        adapter_fingerprints -> vLLM's own add_lora -> missing_factors

    Attributes:
        quadriga_fingerprints: fingerprints of the weights of the load under way. None: there is no
            load.
        quadriga_rebuilt: see `rebuilt_module`.
        quadriga_held: pairs of storage and size in bytes, for tensors of the last load that vLLM
            has perhaps not freed. The reference to a storage expires when vLLM frees it.
    """

    vllm_config: Any
    model_runner: Any
    model_config: Any
    device: torch.device
    quadriga_fingerprints: PendingFingerprints | None = None
    quadriga_rebuilt: tuple[int, str] = (0, "")
    quadriga_held: list[tuple[StorageWeakRef, int]]

    def load_bucket(self, bucket: dict[str, Any] | list[tuple[str, Tensor]]) -> None:
        """Load a bucket of weights.

        vLLM holds each tensor until the weights of its layer are complete, perhaps in a later
        bucket. Fingerprints are taken of the tensors that vLLM gets.

        Args:
            bucket: from `VLLMEngine._buckets`: names and tensors, or the place of a bucket in the
                memory of another process.
        """
        is_on_gpu = "handle" in bucket  # False for a list
        if isinstance(bucket, list):
            # The list is emptied, so that a tensor is freed once vLLM has copied it to its layer.
            weights = (bucket.pop(0) for _ in range(len(bucket)))
        else:
            device = self.device if is_on_gpu else torch.device("cpu")
            if is_on_gpu:
                storage = torch.UntypedStorage._new_shared_cuda(*bucket["handle"])
                offset, size = bucket["place"]
                content = torch.empty(0, dtype=torch.uint8, device=storage.device)
                content.set_(storage, offset, (size,), (1,))
            else:
                content = torch.from_file(
                    bucket["path"], True, bucket["num_bytes"], dtype=torch.uint8
                )
            # Copies, because the sender reuses the memory of the bucket. They go to this process's
            # device, because the sender's memory may be on another one.
            weights = (
                (name, tensor.to(device, copy=True))
                for name, tensor in unpack(bucket["entries"], content)
            )
        begin, _, configured = layerwise_reload()
        model = self.model_runner.get_model()
        model_type = self.model_config.hf_text_config.model_type
        with configured(self.vllm_config):
            # The first bucket begins the load.
            if self.quadriga_fingerprints is None:
                drop_packed_experts(model, model_type)
                begin(model)
                self.quadriga_fingerprints = PendingFingerprints()
                self.quadriga_rebuilt = (0, "")
                self.quadriga_held = []
            fingerprints = self.quadriga_fingerprints

            def watched_weights() -> Iterator[tuple[str, Tensor]]:
                """Yield the weights in vLLM's form, after noting their fingerprints."""
                for name, tensor in weights:
                    fingerprints.add(name, tensor)
                    self._update_rebuilt(name, tensor)
                    yield from checkpoint_weights(name, tensor, model_type)

            with torch.no_grad():
                model.load_weights(watched_weights())
        if is_on_gpu:
            # The copies must be complete before the sender writes the next bucket.
            torch.cuda.current_stream(self.device).synchronize()

    def _update_rebuilt(self, name: str, tensor: Tensor) -> None:
        """Update `quadriga_rebuilt` by the bytes of a new tensor and of all that vLLM still holds.

        Args:
            name: name of the weight.
            tensor: the weight.
        """
        self.quadriga_held = [
            (storage, size) for storage, size in self.quadriga_held if not storage.expired()
        ]
        num_bytes = sum(size for _, size in self.quadriga_held) + tensor.nbytes
        module = name.rpartition(".")[0]
        self.quadriga_rebuilt = max(self.quadriga_rebuilt, (num_bytes, module))
        self.quadriga_held.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))

    def rebuilt_module(self) -> tuple[int, str]:
        """Most bytes of full tensors that this process held at any time of the last load.

        Returns:
            The number of bytes, and the name of the module whose tensor came last then.
        """
        return self.quadriga_rebuilt

    def end_weights(self) -> dict[str, str]:
        """Complete the remaining layers, also after a stream that ended early.

        Returns:
            The fingerprint of each weight of the load.
        """
        fingerprints = self.quadriga_fingerprints
        self.quadriga_fingerprints = None
        # No bucket has arrived, as when an adapter arrives alone.
        if fingerprints is None:
            return {}
        _, end, configured = layerwise_reload()
        model = self.model_runner.get_model()
        with configured(self.vllm_config), torch.no_grad():
            end(model, self.model_config)
            repack_tied(model)
        return fingerprints.read()

    def drawn_tokens(self) -> dict[str, int]:
        """Number of tokens that each request has drawn, by vLLM's name of the request.

        Requests may be missing; see `library.drawn_tokens`.

        Raises:
            WeightSyncError: this version of vLLM does not report it.
        """
        num_tokens = drawn_tokens(self.model_runner)
        if num_tokens is None:
            raise WeightSyncError(
                f"{WHERE}, beside training",
                got="a vLLM whose model runner does not say what it has drawn"
                " (model_runner.requests or req_states)",
                expected="0.30 to 0.33",
                fix="Set async_training.in_flight=finish, or generate with native.",
            )
        return num_tokens

    def clear_cache(self) -> None:
        """Zero the KV cache, because a NaN in it would outlive the weights that computed it."""
        for tensor in cache_tensors(self):
            tensor.zero_()

    def adapter_fingerprints(self, folder: str) -> dict[str, str]:
        """Read an adapter, and return the fingerprint of each matrix, by name.

        The matrices are kept for `missing_factors`.

        Args:
            folder: folder of the adapter, in PEFT's format.
        """
        files = AdapterFiles(Path(folder))
        self.quadriga_shape = read_adapter(Path(folder))
        # Copies, because the file will be deleted.
        self.quadriga_factors = {name: files.read(name).clone() for name in files.shapes}
        return {name: tensor_fingerprint(tensor) for name, tensor in self.quadriga_factors.items()}

    def missing_factors(self) -> list[str]:
        """Names of the matrices that `adapter_fingerprints` has read and no layer here holds.

        A matrix counts as held if a layer has a tensor with the fingerprint of the matrix, or of a
        part of it that this rank may hold: with tensor parallelism A may be split by rows or by
        columns, and B by rows as in `row_parts`.
        """
        shape = self.quadriga_shape
        factors = self.quadriga_factors
        self.quadriga_factors = {}
        layers = adapter_layers(self)
        if not layers:
            # This version of vLLM keeps its matrices elsewhere, so nothing can be checked.
            # `missing_parts` has reported that.
            return []
        rank, num_ranks = tensor_parallel_place(self)
        held_fingerprints = set()
        for a, b in layers:
            # vLLM's tensors are padded to `max_lora_rank`. Without the padding they have the
            # adapter's rank, or a part of it, rounded up, if A is split by rows.
            for adapter_rank in {shape.rank, ceil(shape.rank / num_ranks)}:
                held_fingerprints.add(tensor_fingerprint(a[:adapter_rank]))
                held_fingerprints.add(tensor_fingerprint(b[:, :adapter_rank]))
        dtype = layers[0][0].dtype
        missing = []
        for name, tensor in factors.items():
            matrix = tensor.to(dtype)
            if ".lora_A." in name:
                parts = [matrix, *matrix.chunk(num_ranks, 0), *matrix.chunk(num_ranks, 1)]
            else:
                # vLLM multiplies B by the adapter's scale when it loads it.
                parts = row_parts(matrix * shape.scale, num_ranks, rank)
            if held_fingerprints.isdisjoint(tensor_fingerprint(part) for part in parts):
                missing.append(name)
        return missing

    def missing_parts(self) -> list[str]:
        """Private parts of vLLM that are used here, but that this version of vLLM lacks."""
        missing = []
        if not cache_tensors(self):
            missing.append("KV cache (model_runner.kv_caches)")
        try:
            layerwise_reload()
        except RolloutError as error:
            missing.append(f"layerwise reload ({error})")
        if self.vllm_config.lora_config is not None and not adapter_layers(self):
            missing.append("layers with adapters (lora_a_stacked)")
        return missing
