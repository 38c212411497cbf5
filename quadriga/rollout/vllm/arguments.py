# SPDX-License-Identifier: Apache-2.0
"""What vLLM is told: the arguments of its engine, and how a response is sampled."""

from collections.abc import Iterable
from typing import Any

from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.third_party import SEED_BITS
from quadriga.rollout.vllm.adapter import Adapter
from quadriga.rollout.vllm.library import Library

_GIB = 1 << 30


def arguments_of(
    setup: EngineSetup, adapter: Adapter | None, *, is_vision: bool, can_sleep: bool
) -> dict[str, Any]:
    """The arguments of vLLM's engine: those of the configuration, under vLLM's names; `engine_kwargs.vllm` wins."""
    rollout, model, data = setup.rollout, setup.config.actor_rollout_ref.model, setup.config.data
    is_on_cpu = setup.device.type == "cpu"
    # On a CPU vLLM raises where it cuts a prompt of a request with a seed: it cannot put the generator back. So a
    # pass holds at least one token of each sequence there, and a prompt that is not cut.
    smallest_pass = (
        max(rollout.max_num_seqs, setup.max_model_len) if is_on_cpu else rollout.max_num_seqs
    )
    # Training wants the numbers before filters. vLLM says those only at temperature 1, which the checks see to.
    is_filtered = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    # Beside training one engine generates and another validates.
    num_engines = rollout.data_parallel_size * (1 + setup.config.async_training.enable)
    own: dict[str, Any] = {
        "model": str(model.path),
        "tokenizer": str(data.tokenizer or model.path),
        "dtype": str(setup.dtype).removeprefix("torch."),
        "max_model_len": setup.max_model_len,
        "max_num_seqs": rollout.max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, smallest_pass),
        "enable_chunked_prefill": not is_on_cpu,
        "gpu_memory_utilization": rollout.gpu_memory_utilization / num_engines,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "enable_expert_parallel": rollout.expert_parallel_size > 1,
        "enforce_eager": rollout.enforce_eager or is_on_cpu,
        "enable_sleep_mode": can_sleep,
        # Random weights would also fill what vLLM makes of a processor's files and no weight of the trainer's
        # replaces: how a vision encoder scales its pixels.
        "load_format": "auto" if is_vision else "dummy",
        "logprobs_mode": "raw_logprobs" if is_filtered else "processed_logprobs",
        "enable_prefix_caching": True,
        "worker_extension_cls": "quadriga.rollout.vllm.engine.WorkerExtension",
        "generation_config": "vllm",
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": setup.config_overrides,
        "disable_log_stats": True,
    }
    gigabytes = 1.0 if rollout.cache_gigabytes is None and is_on_cpu else rollout.cache_gigabytes
    if gigabytes is not None:
        own["kv_cache_memory_bytes"] = int(gigabytes * _GIB)
    if (
        rollout.tensor_model_parallel_size > 1
    ):  # in a process of Ray's vLLM would have Ray start its own
        own["distributed_executor_backend"] = "mp"
    if adapter is not None:
        own |= {
            "enable_lora": True,
            "max_loras": 1,
            "max_lora_rank": adapter.room_for_rank,
            "lora_target_modules": adapter.modules,
        }
    if is_vision:
        # Frames come to vLLM chosen and resized; only images are cut by what the configuration says.
        sizes = data.mm_processor_kwargs.model_dump(
            include={"min_pixels", "max_pixels"}, exclude_none=True
        )
        own["mm_processor_kwargs"] = sizes
        if data.video_key is None:
            own["limit_mm_per_prompt"] = {"video": 0}
    return own | setup.options


def sampling_of(
    params: SamplingParams, library: Library, eos_token_ids: Iterable[int], *, has_seed: bool
) -> Any:
    """vLLM's own sampling parameters."""
    return library.sampling.SamplingParams(
        max_tokens=params.max_tokens,
        **params.drawing,
        seed=params.seed % (1 << SEED_BITS) if has_seed else None,
        # The model's end-of-text tokens are among them, so that vLLM adds none of its own.
        stop_token_ids=sorted(params.stops(eos_token_ids)),
        ignore_eos=True,
        stop=list(params.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        detokenize=bool(params.stop),  # its text decides only where stop strings are looked for
        logprobs=0,
        flat_logprobs=True,
        output_kind=library.sampling.RequestOutputKind.FINAL_ONLY,
    )
