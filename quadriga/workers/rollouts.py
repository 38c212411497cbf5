# SPDX-License-Identifier: Apache-2.0
"""Generation engines beside an actor: how each is made, and how the actor's weights reach it."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from quadriga.config import Config, RolloutConfig, problem_of_several_engines
from quadriga.config.rollout import ENGINES
from quadriga.engines.base import TrainEngine
from quadriga.errors import ConfigError
from quadriga.models.attention import ATTENTION_NAME
from quadriga.models.load import load_causal_lm, skeleton_causal_lm, stop_token_ids
from quadriga.models.lora import add_adapter
from quadriga.rollout import HFEngine, NativeEngine, RolloutEngine, ScriptedEngine
from quadriga.rollout.adapter import Adapter
from quadriga.rollout.http import HTTPEngine
from quadriga.rollout.manifest import Manifest
from quadriga.rollout.reported import LogProbsOf
from quadriga.rollout.sglang.core import Limits
from quadriga.rollout.sglang.engine import SGLangEngine, SGLangOptions
from quadriga.rollout.sglang.server import SGLangServer
from quadriga.rollout.vllm.async_engine import AsyncVLLMEngine
from quadriga.rollout.vllm.core import GIB, MIB, VLLMBase, VLLMOptions
from quadriga.rollout.vllm.engine import VLLMEngine
from quadriga.weight_sync import InProcessWeights, SharedWeights, WeightSync
from quadriga.workers.outgoing import route_of
from quadriga.workers.several_engines import as_one, started


@dataclass(frozen=True)
class Rollout:
    """An engine, the way its weights come, and a sentence about both for people to read.

    Attributes:
        engine, weights, description: see above.
        is_shared: whether the engine computes with the actor's own modules, an adapter among them.
    """

    engine: RolloutEngine
    weights: WeightSync
    description: str
    is_shared: bool = False


def native(config: Config, actor: TrainEngine, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """Our engine, on the actor's own parameters where each process has them whole."""
    _no_options(config, "native")
    section, is_whole = config.actor_rollout_ref.rollout, actor.has_whole_weights
    model = actor.model if is_whole else _copy(config, actor, ATTENTION_NAME)
    engine = NativeEngine(
        model,
        tokenizer=tokenizer,
        eos_token_ids=stop_token_ids(model, tokenizer.eos_token_id),
        max_num_seqs=section.max_num_seqs,
        max_num_batched_tokens=section.max_num_batched_tokens,
        max_model_len=section.max_model_len,
        cache_gigabytes=section.cache_gigabytes,
    )
    if is_whole:
        description = f"native, on the actor's own weights, {engine.description}"
        return Rollout(engine, SharedWeights(), description, is_shared=True)
    description = f"native, on a copy of the weights that the actor's processes share, {engine.description}"
    return Rollout(engine, InProcessWeights(), description)


def hf(config: Config, actor: TrainEngine, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """Transformers' generate on a copy of the model."""
    _no_options(config, "hf")
    section, copy = config.actor_rollout_ref.rollout, _copy(config, actor, "sdpa")
    engine = HFEngine(
        copy,
        tokenizer=tokenizer,
        eos_token_ids=stop_token_ids(copy, tokenizer.eos_token_id),
        max_num_seqs=section.max_num_seqs,
        max_model_len=section.max_model_len,
    )
    return Rollout(engine, InProcessWeights(), "hf, transformers' generate on a copy of the weights")


def _copy(config: Config, actor: TrainEngine, attention: str) -> PreTrainedModel:
    """The model that the actor started from, whole."""
    section = config.actor_rollout_ref.model
    return load_causal_lm(
        section.path,
        dtype=actor.dtype,
        device=actor.device,
        attention=attention,
        trust_remote_code=section.trust_remote_code,
        override_config=section.override_config,
    )


def scripted(config: Config, actor: TrainEngine, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """Canned answers from a file."""
    require_possible_engines(config.actor_rollout_ref.rollout)
    options = dict(config.actor_rollout_ref.rollout.engine_kwargs)
    responses = options.pop("responses_file", None)
    if responses is None or options:
        raise ConfigError(
            "actor_rollout_ref.rollout.engine_kwargs",
            got=f"{config.actor_rollout_ref.rollout.engine_kwargs}",
            expected="responses_file and nothing else, with rollout.name=scripted",
            fix="Set +actor_rollout_ref.rollout.engine_kwargs.responses_file=answers.jsonl.",
        )
    engine = ScriptedEngine(responses, tokenizer=tokenizer)
    return Rollout(engine, InProcessWeights(), f"scripted, answers from {responses}")


def vllm(config: Config, actor: TrainEngine, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """vLLM, in this process or, for conversations, beside it; there may be several of it there."""
    section, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    require_possible_engines(rollout)
    skeleton = skeleton_causal_lm(
        section.path, trust_remote_code=section.trust_remote_code, override_config=section.override_config
    )
    manifest = Manifest.of(skeleton)
    is_on_cpu = actor.device.type == "cpu"
    cache_bytes = None if rollout.cache_gigabytes is None else int(rollout.cache_gigabytes * GIB)
    extra = options_of(rollout, "vllm")
    options = VLLMOptions(
        path=str(section.path),
        dtype=actor.dtype,
        max_model_len=rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length,
        manifest=manifest,
        eos_token_ids=stop_token_ids(skeleton, tokenizer.eos_token_id),
        tokenizer=str(config.data.tokenizer or section.path),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        cuts_prompts=not is_on_cpu,
        cache_bytes=GIB if cache_bytes is None and is_on_cpu else cache_bytes,
        gpu_memory_utilization=rollout.gpu_memory_utilization / rollout.data_parallel_size,
        num_processes=rollout.tensor_model_parallel_size,
        is_eager=rollout.enforce_eager or is_on_cpu,
        can_sleep=rollout.free_cache_engine and not is_on_cpu,
        has_weights=False,
        bucket_bytes=_bucket_bytes(rollout),
        log_probs_of=_log_probs_of(rollout),
        adapter=_adapter_alone(config, actor, skeleton),
        trust_remote_code=section.trust_remote_code,
        override_config=section.override_config or {},
        image_options=config.data.mm_processor_kwargs.given if hasattr(skeleton.config, "vision_config") else None,
        extra=extra,
    )
    make: Callable[[], VLLMBase] = partial(AsyncVLLMEngine if rollout.mode == "async" else VLLMEngine, options)
    engines = started([make] * rollout.data_parallel_size)
    description = several(len(engines)) + _describe_vllm(engines[0], actor.device)
    return Rollout(as_one(engines), InProcessWeights(), description)


def _adapter_alone(config: Config, actor: TrainEngine, skeleton: PreTrainedModel) -> Adapter | None:
    """The adapter that comes without the weights below it; the model, which is on "meta", has it then."""
    section = config.actor_rollout_ref.model
    if not section.has_adapter or not route_of(config, actor).is_alone:
        return None
    add_adapter(skeleton, section, seed=0)
    return Adapter.of(skeleton)


def require_possible_engines(rollout: RolloutConfig) -> None:
    """Refuses several engines where there can be one only.

    Raises:
        ConfigError: with what to do.
    """
    if problem := problem_of_several_engines(rollout):
        raise problem


def _bucket_bytes(rollout: RolloutConfig) -> int:
    """Weights travel to all engines at the same time, each with a bucket."""
    return rollout.update_weights_bucket_megabytes * MIB // rollout.data_parallel_size


def several(count: int) -> str:
    """For people to read, before what each of several engines is."""
    return "" if count == 1 else f"requests balanced over {count} engines, each: "


def _log_probs_of(rollout: RolloutConfig) -> LogProbsOf:
    """Training wants the numbers before filters; vLLM says those only at temperature 1, which its checks see to."""
    is_filtered = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    return "raw_logprobs" if is_filtered else "processed_logprobs"


def _describe_vllm(engine: VLLMBase, device: torch.device) -> str:
    """What was chosen, and what of this version of vLLM is not as it was."""
    options = engine.options
    where = "in this process" if engine.takes_tensors else f"in processes of its own ({options.num_processes})"
    eager = "nothing is compiled" + (", for that takes longer than it saves on a CPU" if device.type == "cpu" else "")
    cache = "as much cache as fits" if options.cache_bytes is None else f"{options.cache_bytes / GIB:g} GiB of cache"
    sleep = "" if options.can_sleep else "; memory is kept while training"
    lora = (
        "" if options.adapter is None else f" and the adapter beside them, with room for rank {options.room_for_rank}"
    )
    missing = "".join(f"; without {part.name} ({part.reason})" for part in engine.private_parts if not part.is_there)
    return (
        f"vllm {engine.library.version} {where}, on a copy of the weights{lora}; {cache}; "
        f"{eager if options.is_eager else 'compiled'}{sleep}{missing}"
    )


def sglang(config: Config, actor: TrainEngine, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """SGLang, beside this process or, where a `url` or `urls` are given, at servers."""
    section, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    require_possible_engines(rollout)
    skeleton = skeleton_causal_lm(
        section.path, trust_remote_code=section.trust_remote_code, override_config=section.override_config
    )
    is_on_cpu, extra = actor.device.type == "cpu", options_of(rollout, "sglang")
    limits = Limits(
        max_model_len=rollout.max_model_len or config.data.max_prompt_length + config.data.max_response_length,
        manifest=Manifest.of(skeleton),
        eos_token_ids=stop_token_ids(skeleton, tokenizer.eos_token_id),
        num_processes=rollout.tensor_model_parallel_size,
        bucket_bytes=_bucket_bytes(rollout),
        has_seeds=bool(extra.get("enable_deterministic_inference", not is_on_cpu)),
        can_sleep=rollout.free_cache_engine and not is_on_cpu,
    )
    if extra.keys() & {"url", "urls"}:
        return _sglang_servers(extra, limits, rollout)
    gigabytes = 1.0 if rollout.cache_gigabytes is None and is_on_cpu else rollout.cache_gigabytes
    options = SGLangOptions(
        path=str(section.path),
        dtype=actor.dtype,
        device=actor.device.type,
        limits=limits,
        tokenizer=str(config.data.tokenizer or section.path),
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        cache_tokens=None if gigabytes is None else int(gigabytes * GIB) // _cache_bytes(skeleton, actor.dtype),
        gpu_memory_utilization=rollout.gpu_memory_utilization / rollout.data_parallel_size,
        is_eager=rollout.enforce_eager or is_on_cpu,
        has_weights=False,
        trust_remote_code=section.trust_remote_code,
        override_config=section.override_config or {},
        extra=extra,
    )
    engines = started([partial(SGLangEngine, options)] * rollout.data_parallel_size)
    engine = engines[0]
    cache = "as much cache as fits" if gigabytes is None else f"{gigabytes:g} GiB of cache"
    sleep = "" if limits.can_sleep else "; memory is kept while training"
    what = f"sglang {engine.version} in processes of its own, on a copy of the weights; {cache}{sleep}{_seeds(engine)}"
    return Rollout(as_one(engines), InProcessWeights(), several(len(engines)) + what)


def _sglang_servers(extra: dict[str, Any], limits: Limits, rollout: RolloutConfig) -> Rollout:
    known = ("timeout_s", "headers")
    urls = [extra.pop("url")] if "url" in extra else extra.pop("urls")
    is_list = isinstance(urls, list) and bool(urls) and all(isinstance(url, str) for url in urls)
    if not is_list or len({*urls}) < len(urls) or extra.keys() - set(known):
        raise ConfigError(
            "actor_rollout_ref.rollout.engine_kwargs.sglang",
            got=f"{rollout.engine_kwargs}",
            expected=f"url, or urls (a list, each once), and perhaps {' and '.join(known)}: servers have own settings",
        )
    limits = replace(limits, bucket_bytes=limits.bucket_bytes // len(urls))
    servers = started([partial(SGLangServer, url, limits, max_num_seqs=rollout.max_num_seqs, **extra) for url in urls])
    versions = ", ".join(dict.fromkeys(server.version for server in servers))
    gets = "which gets" if len(servers) == 1 else "balanced, which get"
    what = f"sglang {versions} at {', '.join(urls)}, {gets} the weights over HTTP"
    unseeded = [server for server in servers if not server.limits.has_seeds]
    return Rollout(as_one(servers), InProcessWeights(), what + (_seeds(unseeded[0]) if unseeded else ""))


def _seeds(engine: SGLangEngine | SGLangServer) -> str:
    return "" if engine.limits.has_seeds else "; answers do not follow their seeds: no deterministic inference here"


def _cache_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Bytes of a token's keys and values."""
    config = model.config.get_text_config()
    num_heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    size = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * config.num_hidden_layers * num_heads * size * dtype.itemsize


def http(config: Config, actor: TrainEngine, tokenizer: PreTrainedTokenizerBase) -> Rollout:
    """Servers that others run, with the weights that the model's folder has."""
    section, rollout = config.actor_rollout_ref.model, config.actor_rollout_ref.rollout
    require_possible_engines(rollout)
    skeleton = skeleton_causal_lm(
        section.path, trust_remote_code=section.trust_remote_code, override_config=section.override_config
    )
    options = options_of(rollout, "http")
    urls, model = options.pop("urls", None), options.pop("model", None)
    known = ("logprobs_mode", "timeout_s", "num_tries", "headers")
    unknown = sorted(options.keys() - set(known))
    is_list = isinstance(urls, list) and all(isinstance(url, str) for url in urls)
    if not is_list or not urls or not isinstance(model, str) or unknown:
        raise ConfigError(
            "actor_rollout_ref.rollout.engine_kwargs",
            got=f"{rollout.engine_kwargs}",
            expected=f"urls (a list), model (a name), and perhaps {', '.join(known)}",
            fix="Set +actor_rollout_ref.rollout.engine_kwargs.urls=[http://host:8000] and .model=NAME.",
        )
    mode = options.pop("logprobs_mode", "raw_logprobs")
    engine = HTTPEngine(
        urls,
        model,
        eos_token_ids=stop_token_ids(skeleton, tokenizer.eos_token_id),
        max_num_seqs=rollout.max_num_seqs,
        log_probs_of=mode,
        **options,
    )
    return Rollout(engine, InProcessWeights(), f"http, {model} at {', '.join(urls)}, with weights taken on trust")


def options_of(rollout: RolloutConfig, engine: str) -> dict[str, Any]:
    """`engine_kwargs`: what stands in it directly, and under the engine's name. What is for other engines is left."""
    given = rollout.engine_kwargs
    direct = {name: value for name, value in given.items() if name not in ENGINES}
    return direct | dict(given.get(engine) or {})


def _no_options(config: Config, name: str) -> None:
    require_possible_engines(config.actor_rollout_ref.rollout)
    options: dict[str, Any] = config.actor_rollout_ref.rollout.engine_kwargs
    if options:
        raise ConfigError(
            "actor_rollout_ref.rollout.engine_kwargs",
            got=f"{options}",
            expected=f"nothing: the engine {name} has no options of its own",
            fix="Leave it out.",
        )
