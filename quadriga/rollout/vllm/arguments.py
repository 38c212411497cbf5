# SPDX-License-Identifier: Apache-2.0
"""Arguments of vLLM's engine, and its sampling parameters."""

from collections.abc import Iterable
from typing import Any

from quadriga.config.placement import rollout_share
from quadriga.rollout.interface import SamplingParams
from quadriga.rollout.setup import EngineSetup
from quadriga.rollout.third_party import SEED_BITS
from quadriga.rollout.vllm.adapter import Adapter
from quadriga.rollout.vllm.library import VLLMLibrary

_GIB = 1 << 30
SEQUENCES_ON_GPU = 1024
"""Sequences at a time on a GPU, unless `max_num_seqs` is given."""


def arguments_of(setup: EngineSetup, adapter: Adapter | None, *, is_vision: bool) -> dict[str, Any]:
    """The configuration as arguments of vLLM's engine.

    Args:
        setup: the configuration, tokenizer and device of the rollout.
        adapter: adapter that vLLM applies to the weights; None: there is none, or it arrives merged
            into the weights.
        is_vision: whether the model takes images.

    Returns:
        Arguments by vLLM's names. Those of `engine_kwargs.vllm` replace ours.
    """
    rollout = setup.rollout
    model = setup.config.actor_rollout_ref.model
    data = setup.config.data
    is_on_cpu = setup.device.type == "cpu"
    max_num_seqs = rollout.max_num_seqs
    if not is_on_cpu and "max_num_seqs" not in rollout.model_fields_set:
        # A GPU decodes more sequences in about the same time. vLLM starts what its cache holds.
        max_num_seqs = SEQUENCES_ON_GPU
    # A pass of the model has at least one token of each sequence. On a CPU it must also take a
    # whole prompt: vLLM cannot divide the prompt of a request with a seed there, because it cannot
    # reset the generator.
    smallest_pass = max(max_num_seqs, setup.max_model_len) if is_on_cpu else max_num_seqs
    # Training needs log-probabilities before filters. With filters, vLLM reports these only for
    # temperature 1 ("raw_logprobs"), which the checks of the configuration require.
    is_filtered = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    # In asynchronous training one engine generates and, if there is validation data, another one
    # validates. All engines share the memory of the GPU.
    has_validation_engine = setup.config.async_training.enable and bool(data.val_files)
    num_engines = rollout.data_parallel_size * (1 + has_validation_engine)
    arguments: dict[str, Any] = {
        "model": str(model.path),
        "tokenizer": str(data.tokenizer or model.path),
        "dtype": str(setup.dtype).removeprefix("torch."),
        "max_model_len": setup.max_model_len,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": max(rollout.max_num_batched_tokens, smallest_pass),
        "enable_chunked_prefill": not is_on_cpu,
        "gpu_memory_utilization": rollout_share(setup.config) / num_engines,
        "tensor_parallel_size": rollout.tensor_model_parallel_size,
        "enable_expert_parallel": rollout.expert_parallel_size > 1,
        "enforce_eager": rollout.enforce_eager or is_on_cpu,
        "enable_sleep_mode": setup.can_sleep,
        # Random weights would also fill buffers that vLLM reads from the processor's files and that
        # no weight of the trainer replaces, such as the scale of a vision encoder's pixels.
        "load_format": "auto" if is_vision else "dummy",
        "logprobs_mode": "raw_logprobs" if is_filtered else "processed_logprobs",
        "enable_prefix_caching": True,
        "worker_extension_cls": "quadriga.rollout.vllm.engine.WorkerExtension",
        "generation_config": "vllm",
        "trust_remote_code": model.trust_remote_code,
        "hf_overrides": setup.config_overrides,
        "disable_log_stats": True,
    }
    if setup.cache_gigabytes is not None:
        arguments["kv_cache_memory_bytes"] = int(setup.cache_gigabytes * _GIB)
    if rollout.tensor_model_parallel_size > 1:
        # In a process of Ray, vLLM would by default start its processes by Ray.
        arguments["distributed_executor_backend"] = "mp"
    if adapter is not None:
        arguments["enable_lora"] = True
        arguments["max_loras"] = 1
        arguments["max_lora_rank"] = adapter.room_for_rank
        arguments["lora_target_modules"] = adapter.modules
    if is_vision:
        # Only images are resized by vLLM. Frames of videos arrive selected and resized.
        arguments["mm_processor_kwargs"] = data.mm_processor_kwargs.model_dump(
            include={"min_pixels", "max_pixels"}, exclude_none=True
        )
        if data.video_key is None:
            arguments["limit_mm_per_prompt"] = {"video": 0}
    return arguments | setup.options


def sampling_of(
    params: SamplingParams, library: VLLMLibrary, eos_token_ids: Iterable[int], *, has_seed: bool
) -> Any:
    """vLLM's form of the sampling parameters of a response.

    Args:
        params: sampling parameters.
        library: the imported vLLM.
        eos_token_ids: end-of-text tokens of the model.
        has_seed: whether the response has its own seed. If not, vLLM draws from torch's generator.

    Returns:
        `vllm.SamplingParams`.
    """
    return library.sampling.SamplingParams(
        max_tokens=params.max_tokens,
        **params.drawing,
        seed=params.seed % (1 << SEED_BITS) if has_seed else None,
        # vLLM's own rule is off: `stops` has the end-of-text tokens, unless they are ignored.
        stop_token_ids=sorted(params.stops(eos_token_ids)),
        ignore_eos=True,
        stop=list(params.stop),
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        detokenize=bool(params.stop),  # text is only needed to find stop strings
        logprobs=0,  # of the drawn token, and of no other ones
        flat_logprobs=True,
        output_kind=library.sampling.RequestOutputKind.FINAL_ONLY,
    )
