# SPDX-License-Identifier: Apache-2.0
"""vLLM as a rollout engine: what of the configuration it is made with, and both ends of its weight sync.

load_weights ── tensors, or buckets of shared memory ──> WorkerExtension.load_bucket, as often as needed
             <──────── fingerprints of what came ─────── WorkerExtension.end_weights
"""

import asyncio
import logging
import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from quadriga.config.adapter import adapter_route, read_adapter
from quadriga.config.placement import experts_problem
from quadriga.engine_traits.vllm import TRAITS
from quadriga.errors import QuadrigaError, RolloutError, WeightSyncError, first_line
from quadriga.models.adapter_files import AdapterFiles, is_factor
from quadriga.models.load import stop_token_ids
from quadriga.models.lora import adapter_of, add_adapter
from quadriga.rollout.balancer import Balancer, start_engines
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
    died,
    refused,
    require_known_experts,
    require_release,
)
from quadriga.rollout.vllm.adapter import Adapter, AdapterSlot, separated
from quadriga.rollout.vllm.arguments import arguments_of, sampling_of
from quadriga.rollout.vllm.cores import InProcessCore, ProcessCore, Request, Response, results_of
from quadriga.rollout.vllm.group import GroupCore
from quadriga.rollout.vllm.library import (
    LEAST_OF_ADAPTERS,
    MIXTURES,
    WHERE,
    adapter_layers,
    cache_tensors,
    forget_packed_experts,
    layerwise_reload,
    load,
    one_by_one,
    repack_tied,
)
from quadriga.weight_sync.buckets import pack, unpack
from quadriga.weight_sync.fingerprint import tensor_fingerprint
from quadriga.weight_sync.reshard import Wanted

logger = logging.getLogger(__name__)

_GIB = 1 << 30
_MEMORY = ("weights", "kv_cache")
"""The parts of its memory that vLLM wakes one by one."""


class VLLMEngine(ThirdPartyEngine):
    """vLLM: with `mode=sync` and no tensor parallelism in this process, otherwise in processes of its own.

    Args:
        manifest: the weights that make the model complete, without an adapter.
        adapter: applied beside the weights, and part of each load; None: there is none, or it comes merged.

    Raises RolloutError: vLLM is missing, too old, or refuses the model or the options."""

    name, title = "vllm", "vLLM"
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
        super().__init__(
            manifest if adapter is None else manifest.joined(adapter.manifest), setup.max_model_len
        )
        self.setup, self.eos_token_ids, self.adapter, self.is_vision = (
            setup,
            tuple(eos_token_ids),
            adapter,
            is_vision,
        )
        self.bucket_bytes = setup.bucket_bytes
        self.can_sleep = setup.rollout.free_cache_engine and setup.device.type != "cpu"
        self.library = load()
        if adapter is not None:
            fix = f"pip install 'vllm>={LEAST_OF_ADAPTERS}', or set actor_rollout_ref.model.lora_merge=true."
            where = f"{WHERE}, an adapter by itself"
            require_release(
                self.title, self.library.version, LEAST_OF_ADAPTERS, where=where, fix=fix
            )
        self.arguments = arguments_of(setup, adapter, is_vision=is_vision, can_sleep=self.can_sleep)
        self.log_probs_of: LogProbsOf = self.arguments["logprobs_mode"]
        self.core = self._make_core()
        self._slot = None if adapter is None else AdapterSlot(adapter, self.library, self.core)
        self._loader = ThreadPoolExecutor(1, "new weights")
        self._keeps_cache: bool | None = None  # between two steps: whether the KV cache stays
        self._resting: set[str] = set()  # the parts of vLLM's memory that it has given back
        self.rebuilt: tuple[int, str] = (0, "")
        """Most bytes of whole tensors that a process of vLLM held at a time, and the module that it rebuilt of them."""
        self._is_empty = False
        """Whether its weights went with them."""
        self._frozen: dict[str, str] = {}
        """Fingerprints of the weights below an adapter, which later loads may leave out."""
        self.missing_parts: list[str] = self.core.call("missing_parts")[0]
        self.description = self._describe()

    @classmethod
    def from_config(cls, setup: EngineSetup) -> "VLLMEngine | Balancer":
        if setup.device.type == "cpu" and (problem := experts_problem(setup.config)):
            raise problem
        model, skeleton = setup.config.actor_rollout_ref.model, setup.skeleton()
        require_known_experts(cls.name, skeleton, MIXTURES)
        manifest, is_vision = Manifest.of(skeleton), hasattr(skeleton.config, "vision_config")
        eos_token_ids = stop_token_ids(skeleton, setup.tokenizer.eos_token_id)
        adapter = None
        is_wide = setup.device.type != "cpu" and setup.dtype == torch.float32
        if (
            model.has_adapter
            and adapter_route(setup.config, is_wide_on_accelerator=is_wide).is_alone
        ):
            add_adapter(skeleton, model, seed=0)
            shape = adapter_of(skeleton)
            assert shape is not None, "it was just added"
            adapter = Adapter(shape, Manifest.of(skeleton).part(is_factor))
        make = partial(cls, setup, manifest, eos_token_ids, adapter=adapter, is_vision=is_vision)
        makers = [make] * setup.rollout.data_parallel_size
        engines = start_engines(makers)
        return engines[0] if len(engines) == 1 else Balancer(engines, makers=makers)

    @property
    def has_frozen_weights(self) -> bool:
        """Whether a load may bring the adapter alone."""
        return bool(self._frozen)

    @property
    def has_dropped_weights(self) -> bool:
        return self._is_empty

    async def generate(
        self, prompt: Prompt, sampling: SamplingParams, images: Images | None = None
    ) -> Completion:
        if isinstance(self.core, ProcessCore):
            return await asyncio.wrap_future(
                self.core.start(self._complete(self.core, prompt, sampling, images))
            )
        if not isinstance(self.core, GroupCore):
            return await super().generate(prompt, sampling, images)
        [request] = self._requests([prompt], [sampling], [images])
        with self._explained():
            response = await self.core.generate(request)
        return response.completion(sampling, self.log_probs_of, self.weight_version)

    async def _complete(
        self, core: ProcessCore, prompt: Prompt, sampling: SamplingParams, images: Images | None
    ) -> Completion:
        """One response, on the loop of the core's thread."""
        with self._explained():
            response = await core.respond(
                lambda: (self._requests([prompt], [sampling], [images])[0], self.weight_version)
            )
        return response.completion(sampling, self.log_probs_of, response.versions[-1][1])

    def begin(
        self,
        prompts: Prompts,
        sampling: Sampling,
        images: BatchImages = None,
        joined: Callable[[int], None] | None = None,
        earlier: Sequence[Completion] = (),
    ) -> list[Future[Completion]]:
        """As `generate_batch`, without waiting; `joined` is not called, and nothing is `earlier`."""
        assert isinstance(self.core, ProcessCore), "beside training vLLM has a process of its own"
        every = zip(prompts, sampling, images or [None] * len(prompts), strict=True)
        return [self.core.start(self._complete(self.core, *one)) for one in every]

    def between_steps(
        self, work: Callable[[], None], *, keeps_cache: bool, recomputes: bool = False
    ) -> Future[int]:
        """As of `NativeEngine`, for `work` that loads weights."""

        def load() -> int:
            self._keeps_cache = keeps_cache
            try:
                work()
            finally:
                self._keeps_cache = None
            return self.num_steps

        return self._loader.submit(load)

    def generate_batch(
        self, prompts: Prompts, sampling: Sampling, images: BatchImages = None
    ) -> list[Completion]:
        if isinstance(self.core, ProcessCore):
            return results_of(self.begin(prompts, sampling, images))
        requests = self._requests(prompts, sampling, images or [None] * len(prompts))
        # vLLM draws without seeds from torch's generator, which is the trainer's too where vLLM is in its process.
        draws_together = (
            self.core.is_in_process and not self.setup.rollout.request_seeds and bool(sampling)
        )
        index = self.setup.device.index
        with (
            self._explained(),
            torch.random.fork_rng([] if index is None else [index], enabled=draws_together),
        ):
            if draws_together:
                torch.manual_seed(sampling[0].seed)
            responses: list[Response] = self.core.generate_batch(requests)
        return [
            response.completion(params, self.log_probs_of, self.weight_version)
            for response, params in zip(responses, sampling, strict=True)
        ]

    def wanted_shards(self) -> Wanted:
        """What `load_weights` takes of a trainer that does not gather it: whole tensors, by their first names."""
        return self._manifest.whole(self.setup.dtype)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        """Load a complete set of weights, and drop what earlier ones made: KV cache, embeddings of images. Between two
        steps the KV cache may stay: then each request finds there what weights of its own version computed."""
        if self._keeps_cache is None or not isinstance(self.core, ProcessCore):
            self._load(weights, version, keeps_cache=False)
            return
        with self.core.renewed(version, keeps_cache=self._keeps_cache):
            self._load(weights, version, keeps_cache=self._keeps_cache)

    def _load(
        self, weights: Iterable[tuple[str, torch.Tensor]], version: int, *, keeps_cache: bool
    ) -> None:
        with self._loading(version) as received:
            self._wake("weights")
            factors: dict[str, torch.Tensor] = {}
            below = self._manifest.checked(weights, self._frozen)
            if self._slot is not None:
                below = separated(below, factors)
            try:
                with closing(self._buckets(below)) as buckets:
                    for bucket in buckets:  # none, where the adapter comes alone
                        self._frozen = {}
                        self.core.call("load_bucket", bucket)
            finally:
                marks = self.core.call("end_weights")
            num_bytes, name = max(self.core.call("rebuilt_module"))
            if num_bytes > self.rebuilt[0]:
                self.rebuilt = (num_bytes, name)
                told = "vLLM rebuilds a module at a time: at most %.1f MiB of tensors beside its weights (%s)"
                logger.info(told, num_bytes / (1 << 20), name)
            if not keeps_cache and not self.core.ask("reset_prefix_cache"):
                where = f"{WHERE}, prefix cache"
                got = "a cache that vLLM does not empty, for responses are being generated"
                fix = "Wait for the responses, or call abort(), before weights are published."
                raise WeightSyncError(
                    where, got=got, expected="new weights between responses", fix=fix
                )
            if not keeps_cache and "kv_cache" not in self._resting:
                self.core.call("clear_cache")
            if self.is_vision:
                self.core.ask("reset_encoder_cache")
            adapters = [{} for _ in marks] if self._slot is None else self._slot.replace(factors)
            received += [
                self._frozen | mine | adapter for mine, adapter in zip(marks, adapters, strict=True)
            ]
        self._is_empty = False
        if self._slot is not None:
            self._frozen = {
                name: mark for name, mark in self._arrived.tensors.items() if not is_factor(name)
            }

    def _buckets(self, weights: Iterator[tuple[str, torch.Tensor]]) -> Generator[Any, None, None]:
        """What `load_bucket` gets: tensors, copied where they do not stay; for other processes where they are until the
        next bucket: on a GPU that vLLM uses too, or in shared memory."""
        if self.core.is_in_process:
            for name, tensor in weights:
                # Without a copy too it is a storage of its own, by which `load_bucket` counts what vLLM keeps.
                yield [
                    (
                        name,
                        torch.from_dlpack(tensor.detach())
                        if self.is_load_stable
                        else tensor.detach().clone(),
                    )
                ]
            return
        if self.setup.device.type == "cuda":
            for entries, content in pack(weights, self.bucket_bytes):
                torch.cuda.current_stream(
                    content.device
                ).synchronize()  # the other process has streams of its own
                handle = content.untyped_storage()._share_cuda_()
                place = [content.storage_offset(), content.numel()]
                yield {"handle": handle, "place": place, "entries": entries}
            return
        file = os.memfd_create("quadriga-weights")  # ends with this process, however that ends
        path = f"/proc/{os.getpid()}/fd/{file}"
        allocate = partial(torch.from_file, path, True, dtype=torch.uint8)
        try:
            for entries, content in pack(weights, self.bucket_bytes, allocate):
                yield {"path": path, "num_bytes": content.numel(), "entries": entries}
        finally:
            os.close(file)

    def follow(self) -> None:
        assert isinstance(self.core, GroupCore), "only members of a group follow"
        with self._explained():
            self.core.follow()

    def release(self) -> None:
        if isinstance(self.core, GroupCore):
            self.core.release()

    def abort(self) -> None:
        """End unfinished responses; from another thread than the one that generates."""
        self.core.abort()

    def sleep(self) -> None:
        """On a CPU vLLM keeps its memory. Elsewhere weights move to the host where an adapter will come without them;
        others are dropped, for a load brings all of them."""
        super().sleep()
        if self.can_sleep and not self._resting:
            is_kept = self.has_frozen_weights
            self.core.ask("sleep", level=1 if is_kept else 2)
            self._resting = set(_MEMORY)
            self._is_empty = not is_kept

    def wake(self) -> None:
        super().wake()
        if "kv_cache" in self._resting:
            self._wake(*_MEMORY)
            self.core.call("clear_cache")  # its memory is new, and may hold anything

    def _wake(self, *tags: str) -> None:
        """Map these parts of vLLM's memory as far as they rest: what is mapped may not be mapped again."""
        if resting := [tag for tag in tags if tag in self._resting]:
            self.core.ask("wake_up", tags=resting)
            self._resting -= set(resting)

    def close(self) -> None:
        if self._state != "closed":
            super().close()
            self.core.close()
            self._loader.shutdown()

    def _make_core(self) -> InProcessCore | ProcessCore:
        rollout = self.setup.rollout
        is_beside = rollout.mode == "async" or self.setup.config.async_training.enable
        try:
            if self.setup.group is not None:
                return GroupCore(self.library, self.arguments, self.setup.group)
            if not is_beside and rollout.tensor_model_parallel_size == 1:
                return InProcessCore(self.library, self.arguments, self.setup.device)
            return ProcessCore(
                self.library, self.arguments, self.setup.config.trainer.stall_timeout_s
            )
        except QuadrigaError:
            raise
        except Exception as error:  # vLLM's failures have no class in common
            raise refused(self.name, self.title, first_line(error)) from error

    def _describe(self) -> str:
        """What was chosen, and what of this version of vLLM is not as it was, for people to read."""
        told, is_on_cpu = self.arguments, self.setup.device.type == "cpu"
        where = "in the worker's process"
        if self.setup.group is not None:
            where = (
                f"in the processes of {told['tensor_parallel_size']} ranks, which hold it together"
            )
        if not self.core.is_in_process:
            where = f"in processes of its own ({told['tensor_parallel_size']})"
        lora = (
            f" and the adapter beside them, with room for rank {self.adapter.room_for_rank}"
            if self.adapter
            else ""
        )
        cache = told.get("kv_cache_memory_bytes")
        eager = "nothing is compiled" + (
            ", for that takes longer than it saves on a CPU" if is_on_cpu else ""
        )
        missing = "".join(f"; without {part}" for part in self.missing_parts)
        return (
            f"vllm {self.library.version} {where}, on a copy of the weights{lora}; "
            f"{'as much KV cache as fits' if cache is None else f'{cache / _GIB:g} GiB of KV cache'}; "
            f"{eager if told['enforce_eager'] else 'compiled'}"
            f"{'' if self.can_sleep else '; memory is kept while training'}{missing}"
        )

    def _requests(
        self, prompts: Prompts, sampling: Sampling, images: Sequence[Images | None]
    ) -> list[Request]:
        self._require_ready(prompts, sampling, images)
        if any(images) and not self.is_vision:
            got = f"a prompt with images, for {self.arguments['model']}"
            fix = "Leave out the images, or take another actor_rollout_ref.model.path."
            raise RolloutError(
                "vllm.generate", got=got, expected="a vision-language model", fix=fix
            )
        adapter = None if self._slot is None else self._slot.request
        beside = self.setup.config.async_training
        # What older weights have left in the KV cache serves none that begins with newer ones.
        salt = (
            {"cache_salt": str(self.weight_version)}
            if beside.enable and beside.kv_on_update == "keep"
            else {}
        )
        requests = []
        for prompt, params, one in zip(prompts, sampling, images, strict=True):
            given: dict[str, Any] = {"prompt_token_ids": list(prompt)} | salt
            if one is not None:  # one token for each image and video, which vLLM repeats by itself
                media = {"image": list(one.pictures), "video": list(one.videos)}
                media = {name: values for name, values in media.items() if values}
                given |= {"prompt_token_ids": list(one.short_prompt), "multi_modal_data": media}
            told = sampling_of(
                params, self.library, self.eos_token_ids, has_seed=self.setup.rollout.request_seeds
            )
            requests.append(Request(given, told, adapter, None if one is None else prompt))
        return requests

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except QuadrigaError:
            raise
        except Exception as error:  # vLLM's failures have no class in common
            if self.core.is_lost:
                raise died(self.name, self.title, f"has ended: {first_line(error)}") from error
            got, fix = (
                f"{self.title}, which failed: {first_line(error)}",
                "Its own message stands in the log above.",
            )
            where = f"{self.name}.generate" + (
                f", {self.setup.group}" if self.setup.group is not None else ""
            )
            raise RolloutError(where, got=got, expected="responses", fix=fix) from error


class WorkerExtension:
    """In the processes that hold vLLM's model: a base class of its worker (`worker_extension_cls`), called by name.

    load_bucket, as often as needed ─> end_weights ─> clear_cache
    adapter_marks ─> vLLM's own add_lora ─> missing_factors
    """

    vllm_config: Any
    model_runner: Any
    model_config: Any
    quadriga_marks: dict[str, str] | None = None
    """Fingerprints of the weights that have come; None: no load is under way."""
    quadriga_rebuilt: tuple[int, str] = (0, "")
    quadriga_held: list[tuple[StorageWeakRef, int]]

    def load_bucket(self, bucket: dict[str, Any] | list[tuple[str, torch.Tensor]]) -> None:
        """Some weights; vLLM keeps each until its layer is complete. Fingerprints are of the tensors that it gets."""
        if isinstance(bucket, dict):
            if "handle" in bucket:
                storage = torch.UntypedStorage._new_shared_cuda(*bucket["handle"])
                offset, size = bucket["place"]
                content = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(
                    storage, offset, (size,), (1,)
                )
            else:
                content = torch.from_file(
                    bucket["path"], True, bucket["num_bytes"], dtype=torch.uint8
                )
            weights = (
                (name, tensor.clone()) for name, tensor in unpack(bucket["entries"], content)
            )
        else:
            weights = iter(bucket)
        begin, _, configured = layerwise_reload()
        model, model_type = (
            self.model_runner.get_model(),
            self.model_config.hf_text_config.model_type,
        )
        with configured(self.vllm_config):
            if self.quadriga_marks is None:
                forget_packed_experts(model, model_type)
                begin(model)
                self.quadriga_marks = {}
                self.quadriga_rebuilt, self.quadriga_held = (0, ""), []
            for name, tensor in weights:
                self.quadriga_marks[name] = tensor_fingerprint(tensor)
                # What vLLM keeps of a module that is not complete, and this tensor.
                self.quadriga_held = [one for one in self.quadriga_held if not one[0].expired()]
                num_bytes = sum(size for _, size in self.quadriga_held) + tensor.nbytes
                self.quadriga_rebuilt = max(
                    self.quadriga_rebuilt, (num_bytes, name.rpartition(".")[0])
                )
                self.quadriga_held.append((StorageWeakRef(tensor.untyped_storage()), tensor.nbytes))
                with torch.no_grad():
                    model.load_weights(one_by_one(name, tensor, model_type))

    def rebuilt_module(self) -> tuple[int, str]:
        """Of the last load: most bytes of whole tensors that were here at a time, and the module that they were of."""
        return self.quadriga_rebuilt

    def end_weights(self) -> dict[str, str]:
        """Put together what is left, also after a stream that broke off. Returns the fingerprint of each weight."""
        marks, self.quadriga_marks = self.quadriga_marks, None
        if marks is not None:
            _, end, configured = layerwise_reload()
            model = self.model_runner.get_model()
            with configured(self.vllm_config), torch.no_grad():
                end(model, self.model_config)
                repack_tied(model)
        return marks or {}

    def drawn_tokens(self) -> dict[str, int]:
        """Of each request that has begun, by vLLM's name for it. Raises WeightSyncError: this version does not say."""
        states = getattr(self.model_runner, "requests", None)
        if not isinstance(states, dict):
            got = "a vLLM whose model runner does not say what it has drawn (model_runner.requests)"
            fix = "Set async_training.in_flight=finish, or generate with native."
            raise WeightSyncError(
                f"{WHERE}, beside training", got=got, expected="0.32, or one like it", fix=fix
            )
        return {name: len(state.output_token_ids) for name, state in states.items()}

    def clear_cache(self) -> None:
        """Zero the KV cache: a NaN in a block outlives the weights that made it."""
        for tensor in cache_tensors(self):
            tensor.zero_()

    def adapter_marks(self, folder: str) -> dict[str, str]:
        """The fingerprint of each matrix of an adapter, as this process reads it."""
        files = AdapterFiles(Path(folder))
        self.quadriga_shape = read_adapter(Path(folder))
        self.quadriga_factors = {
            name: files.read(name).clone() for name in files.shapes
        }  # the file goes away
        return {name: tensor_fingerprint(tensor) for name, tensor in self.quadriga_factors.items()}

    def missing_factors(self) -> list[str]:
        """Names of the matrices that `adapter_marks` has read and that no layer of this process holds.

        Of layers that are tensor-parallel each rank holds a part of A or of B. Which part of B is not checked.
        """
        shape, factors, self.quadriga_factors = self.quadriga_shape, self.quadriga_factors, {}
        layers = adapter_layers(self)
        if not layers:  # they are not where they were: the probe has said so
            return []
        num_ranks = self.vllm_config.parallel_config.tensor_parallel_size
        sizes = {shape.rank, -(-shape.rank // num_ranks)}
        held = {
            tensor_fingerprint(part)
            for a, b in layers
            for size in sizes
            for part in (a[:size], b[:, :size])
        }
        dtype = layers[0][0].dtype
        missing = []
        for name, tensor in factors.items():
            whole = tensor.to(dtype)
            if ".lora_A." in name:
                parts = [whole, *whole.chunk(num_ranks, 0), *whole.chunk(num_ranks, 1)]
            elif num_ranks == 1:
                parts = [whole * shape.scale]
            else:
                continue
            if held.isdisjoint(tensor_fingerprint(part) for part in parts):
                missing.append(name)
        return missing

    def missing_parts(self) -> list[str]:
        """What is used of vLLM beyond its public interface and this version does not have."""
        missing = [] if cache_tensors(self) else ["KV cache (model_runner.kv_caches)"]
        try:
            layerwise_reload()
        except RolloutError as error:
            missing.append(f"layerwise reload ({error})")
        if self.vllm_config.lora_config is not None and not adapter_layers(self):
            missing.append("layers with adapters (lora_a_stacked)")
        return missing
