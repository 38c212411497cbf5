# SPDX-License-Identifier: Apache-2.0
"""What the engines on vLLM share: how they are made, their limits, and how weights reach them."""

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain, zip_longest
from typing import Any

import torch

from quadriga.errors import QuadrigaError, RolloutError, WeightSyncError, first_line
from quadriga.models.adapter_files import is_factor
from quadriga.rollout.adapter import Adapter, separated
from quadriga.rollout.base import Images
from quadriga.rollout.loaded import LoadedEngine
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.reported import LogProbsOf
from quadriga.rollout.vllm.adapter import AdapterSlot
from quadriga.rollout.vllm.library import WHERE, Capability, load, require_adapters
from quadriga.rollout.vllm.parcels import ParcelWriter
from quadriga.weight_sync.fingerprint import Fingerprint

RECEIVER = "quadriga.rollout.vllm.receiver.WeightReceiver"
MIB, GIB = 1 << 20, 1 << 30
_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Room that vLLM can make for an adapter; the last one is `MAX_RANK` of the configuration."""


@dataclass(frozen=True)
class VLLMOptions:
    """How an engine on vLLM is made.

    Attributes:
        path: folder or name of the model.
        dtype: of its weights and of the computation.
        max_model_len: longest prompt and answer together, in tokens.
        manifest: the weights that make the model complete.
        eos_token_ids: end-of-text tokens.
        tokenizer: folder or name, for stop texts; "": the model's.
        max_num_seqs, max_num_batched_tokens: answers, and tokens, of one forward pass at most.
        cuts_prompts: whether a prompt may be computed in several passes. On a CPU vLLM raises where it does that for a
            request with a seed: it cannot put the generator back.
        cache_bytes: memory for keys and values; None: vLLM decides by `gpu_memory_utilization`.
        gpu_memory_utilization: share of the accelerator's memory, weights included.
        num_processes: tensor parallelism: processes, besides this one, that hold the model together. 1: none is added.
        is_eager: whether nothing is compiled and no graph is captured.
        can_sleep: whether `sleep` gives back memory; accelerators only.
        has_weights: whether it generates with those of `path`; False: it refuses to until the first load.
        bucket_bytes: memory in which weights travel to other processes.
        log_probs_of: see `LogProbsOf`.
        adapter: that is applied beside the weights, and comes with each load; None: there is none, or it comes merged.
        image_options: of the model's image processor, empty for its own; None: the model reads text alone.
        extra: further options, in vLLM's own words; they win.
    """

    path: str
    dtype: torch.dtype
    max_model_len: int
    manifest: Manifest
    eos_token_ids: tuple[int, ...]
    tokenizer: str = ""
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    cuts_prompts: bool = False
    cache_bytes: int | None = GIB
    gpu_memory_utilization: float = 0.5
    num_processes: int = 1
    is_eager: bool = True
    can_sleep: bool = False
    has_weights: bool = True
    bucket_bytes: int = 512 * MIB
    log_probs_of: LogProbsOf = "processed_logprobs"
    adapter: Adapter | None = None
    trust_remote_code: bool = False
    override_config: dict[str, Any] = field(default_factory=dict)
    image_options: dict[str, Any] | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    @property
    def room_for_rank(self) -> int:
        """Of the adapter: vLLM makes room for certain ranks only."""
        return next(rank for rank in _RANKS if self.adapter is not None and rank >= self.adapter.shape.rank)

    def in_vllms_words(self) -> dict[str, Any]:
        """The arguments of vLLM's engine."""
        # A pass holds at least one token of each sequence, and a prompt that is not cut.
        smallest_pass = self.max_num_seqs if self.cuts_prompts else max(self.max_num_seqs, self.max_model_len)
        # Random weights would also fill what vLLM makes of a processor's files and no weight of the trainer's replaces:
        # how a vision tower scales its pixels.
        is_read = self.has_weights or self.image_options is not None
        own = {
            "model": self.path,
            "tokenizer": self.tokenizer or self.path,
            "dtype": str(self.dtype).removeprefix("torch."),
            "max_model_len": self.max_model_len,
            "max_num_seqs": self.max_num_seqs,
            "max_num_batched_tokens": max(self.max_num_batched_tokens, smallest_pass),
            "enable_chunked_prefill": self.cuts_prompts,
            "gpu_memory_utilization": self.gpu_memory_utilization,
            "tensor_parallel_size": self.num_processes,
            "enforce_eager": self.is_eager,
            "enable_sleep_mode": self.can_sleep,
            "load_format": "auto" if is_read else "dummy",
            "logprobs_mode": self.log_probs_of,
            "enable_prefix_caching": True,
            "worker_extension_cls": RECEIVER,
            "generation_config": "vllm",
            "trust_remote_code": self.trust_remote_code,
            "hf_overrides": self.override_config,
            "disable_log_stats": True,
        }
        if self.cache_bytes is not None:
            own["kv_cache_memory_bytes"] = self.cache_bytes
        if self.adapter is not None:
            own |= {
                "enable_lora": True,
                "max_loras": 1,
                "max_lora_rank": self.room_for_rank,
                "lora_target_modules": self.adapter.modules,
            }
        if self.image_options is not None:
            own |= {"limit_mm_per_prompt": {"video": 0}, "mm_processor_kwargs": dict(self.image_options)}
        return own | self.extra


class VLLMBase(LoadedEngine):
    """An engine on vLLM; a subclass says where vLLM computes. See `RolloutEngine` for its methods.

    Raises:
        RolloutError: vLLM is missing, too old, or refuses the model or the options.
    """

    name, title = "vllm", "vLLM"

    def __init__(self, options: VLLMOptions) -> None:
        adapter = options.adapter
        manifest = options.manifest if adapter is None else options.manifest.joined(adapter.manifest)
        super().__init__(manifest, options.max_model_len, has_weights=options.has_weights and adapter is None)
        self.options = options
        self.library = load()
        self._num_requests = 0
        self._slot: AdapterSlot | None = None
        if adapter is not None:
            require_adapters(self.library.version)
            self._slot = AdapterSlot(adapter, self.library, self._ask, self._call)
        try:
            self._start()
        except QuadrigaError:
            raise
        except Exception as error:  # whatever vLLM raises says what it did not like
            raise self._refused(first_line(error)) from error
        self.private_parts = self._probe()

    @abstractmethod
    def _start(self) -> None:
        """Makes vLLM's engine."""

    @abstractmethod
    def _ask(self, method: str, *args: Any, **options: Any) -> Any:
        """Calls a method of vLLM's engine and waits for what it returns."""

    @property
    def takes_tensors(self) -> bool:
        """Whether a tensor can be handed to the model as it is: it is in this process."""
        return False

    def sleep(self) -> None:
        """See `RolloutEngine.sleep`. On a CPU vLLM keeps its memory."""
        super().sleep()
        if self.options.can_sleep:
            self._ask("sleep", level=1)

    def wake(self) -> None:
        """See `RolloutEngine.wake`."""
        super().wake()
        if self.options.can_sleep:
            self._ask("wake_up")
            self._call("clear_pages")  # their memory is new, and may hold anything

    def _receive(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[dict[str, str]]:
        """See `LoadedEngine._receive`."""
        if self._has_given_memory_back:
            self._ask("wake_up", tags=["weights"])
        if self._slot is None:
            return self._receive_whole(weights)
        factors: dict[str, torch.Tensor] = {}
        below = separated(weights, factors)
        marks: list[dict[str, str]] = []
        for first in below:  # none, where the adapter comes alone
            self._frozen = Fingerprint({})
            marks = self._receive_whole(chain([first], below))
        self._forget()
        own = self._slot.replace(factors)
        return [one | other for one, other in zip_longest(own, marks, fillvalue={})]

    def _receive_whole(self, weights: Iterator[tuple[str, torch.Tensor]]) -> list[dict[str, str]]:
        self._call("begin_weights")
        try:
            self._send(weights)
        finally:
            marks = self._call("end_weights")
        self._forget()
        return marks

    def _send(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        if self.takes_tensors:
            for name, tensor in weights:
                self._call("load_tensor", name, tensor)
            return
        with ParcelWriter(self.options.bucket_bytes) as writer:
            for label in writer.pack(weights):
                self._call("load_parcel", label)

    def _stays(self, name: str) -> bool:
        """See `LoadedEngine._stays`."""
        return self._slot is not None and not is_factor(name)

    @property
    def _lora_request(self) -> Any:
        """What vLLM is told of the adapter with each request."""
        return None if self._slot is None else self._slot.request

    def _forget(self) -> None:
        """What earlier weights made: no prompt finds their keys and values again, no NaN stays behind in a page, and no
        image has the embeddings that they gave it."""
        if not self._ask("reset_prefix_cache"):
            raise WeightSyncError(
                f"{WHERE}, prefix cache",
                got="a cache that vLLM does not empty, for answers are being generated",
                expected="new weights between answers",
                fix="Wait for the answers, or call abort(), before weights are published.",
            )
        if not self._has_given_memory_back:
            self._call("clear_pages")
        if self.options.image_options is not None:
            self._ask("reset_encoder_cache")

    def _require_sight(self, images: Sequence[Images | None]) -> None:
        """Refuses images for a model that reads text."""
        if any(images) and self.options.image_options is None:
            raise RolloutError(
                "vllm.generate",
                got=f"a prompt with images, for {self.options.path}",
                expected="a model that sees",
                fix="Leave out the images, or take another actor_rollout_ref.model.path.",
            )

    @property
    def _has_given_memory_back(self) -> bool:
        return self._state == "asleep" and self.options.can_sleep

    def _call(self, method: str, *args: Any) -> list[Any]:
        """Calls a method of `WeightReceiver` in each process that holds the model."""
        return self._ask("collective_rpc", method, args=args)

    def _probe(self) -> list[Capability]:
        return [Capability(*part) for part in self._call("private_parts")[0]]

    def _new_id(self) -> str:
        self._num_requests += 1
        return str(self._num_requests)
