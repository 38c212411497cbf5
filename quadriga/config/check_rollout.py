# SPDX-License-Identifier: Apache-2.0
"""Checks of the generation engine's settings, before a process starts."""

from importlib.util import find_spec

from quadriga.config.findings import Findings
from quadriga.config.rollout import RolloutConfig, SamplingConfig
from quadriga.config.root import Config
from quadriga.errors import ConfigError

_ROLLOUT = "actor_rollout_ref.rollout"
_OF_LIBRARIES = ("gpu_memory_utilization", "enforce_eager")
_NOT_OF_SERVERS = ("max_num_batched_tokens", "cache_gigabytes", "max_model_len", "tensor_model_parallel_size")
_MORE_PROCESSES = (
    "Set it to 1. More engines: more processes that generate, by trainer.n_gpus_per_node, or with trainer.backend=ray "
    "by a pool of their own in trainer.placement; or generate with vllm and mode=async."
)


def check_rollout(config: Config, found: Findings) -> None:
    """Refuses what the engine named cannot do in training, and names what it does not read."""
    rollout = config.actor_rollout_ref.rollout
    _check_length(config, found)
    if rollout.name == "http":
        found.refuse(
            f"{_ROLLOUT}.name",
            got="http, whose servers keep the weights they were started with",
            expected="an engine that takes new weights after each step",
            fix=f"Train with {_ROLLOUT}.name=native or vllm; http is for generate and eval.",
        )
    if rollout.name == "vllm":
        _check_vllm(rollout, found)
    if rollout.name == "sglang":
        _check_sglang(rollout, found)
    is_library = rollout.name in ("vllm", "sglang")
    given = rollout.model_fields_set
    unused = [name for name in _OF_LIBRARIES if name in given and not is_library]
    unused += [name for name in _NOT_OF_SERVERS if name in given and rollout.name == "http"]
    if unused:
        named = ", ".join(f"{_ROLLOUT}.{name}" for name in unused)
        found.notice(f"{named}: not used, for {_ROLLOUT}.name is {rollout.name}.")
    if problem := problem_of_several_engines(rollout):
        found.problems.append(problem)
    if rollout.tensor_model_parallel_size > 1 and not is_library and rollout.name != "http":
        found.refuse(
            f"{_ROLLOUT}.tensor_model_parallel_size",
            got=f"{rollout.tensor_model_parallel_size}, with {_ROLLOUT}.name={rollout.name}",
            expected="1: each process generates with the whole model",
            fix="Set it to 1, or generate with vllm.",
        )


def problem_of_several_engines(rollout: RolloutConfig) -> ConfigError | None:
    """What is wrong with `data_parallel_size`: several engines are balanced where they compute in other processes."""
    count = rollout.data_parallel_size
    if count == 1:
        return None
    servers = (rollout.engine_kwargs | dict(rollout.engine_kwargs.get("sglang") or {})).keys() & {"url", "urls"}
    match rollout.name:
        case "sglang" if servers:
            expected = f"1: {_ROLLOUT}.engine_kwargs.sglang says which servers there are"
            fix = "Name one server as url, several as urls: requests are balanced over them."
        case "sglang":
            return None
        case "vllm" if rollout.mode == "async":
            return None
        case "vllm":
            expected = f"1, or {_ROLLOUT}.mode=async"
            fix = "With mode=sync vLLM computes in the actor's process, where two would take turns: set mode=async."
        case "http":
            expected = "1: a request goes to the server with the fewest in flight anyway"
            fix = f"Name all servers in {_ROLLOUT}.engine_kwargs.urls."
        case _:
            expected = "1: the engine computes in the process that asks it, one call after the other"
            fix = _MORE_PROCESSES
    got = f"{count}, with {_ROLLOUT}.name={rollout.name}" + (", mode=sync" if rollout.name == "vllm" else "")
    return ConfigError(f"{_ROLLOUT}.data_parallel_size", got=got, expected=expected, fix=fix)


def _check_length(config: Config, found: Findings) -> None:
    rollout, longest = config.actor_rollout_ref.rollout, config.data.max_prompt_length + config.data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        found.refuse(
            f"{_ROLLOUT}.max_model_len",
            got=f"{rollout.max_model_len} tokens",
            expected=f"at least {longest}, data.max_prompt_length and data.max_response_length together",
            fix="Leave it out, or lower those.",
        )


def _check_vllm(rollout: RolloutConfig, found: Findings) -> None:
    if find_spec("vllm") is None:
        found.refuse(
            f"{_ROLLOUT}.name",
            got="vllm, which this environment does not have",
            expected="vLLM 0.30 or newer",
            fix="pip install 'vllm>=0.30'; on a machine without an accelerator: scripts/install-vllm.",
        )
    if _filters(rollout) and rollout.temperature != 1:
        found.refuse(
            f"{_ROLLOUT}.temperature",
            got=f"{rollout.temperature:g}, with {_filters(rollout)}",
            expected="1, or no filter",
            fix="vLLM reports log-probabilities before both or after both, and training needs those after the "
            "temperature and before the filter: change one of them, or generate with native.",
        )
    val = rollout.val_kwargs
    is_sampled = val.do_sample and val.temperature > 0
    if is_sampled and (_filters(val) or (_filters(rollout) and val.temperature != 1)):
        found.notice(
            f"{_ROLLOUT}.val_kwargs: vLLM does not report what these log-probabilities would be without the filter: "
            "rollout/log_prob of validation is nan; its answers and scores are not concerned."
        )


def _check_sglang(rollout: RolloutConfig, found: Findings) -> None:
    own = rollout.engine_kwargs | dict(rollout.engine_kwargs.get("sglang") or {})
    if not own.keys() & {"url", "urls"} and find_spec("sglang") is None:
        found.refuse(
            f"{_ROLLOUT}.name",
            got="sglang, which this environment does not have",
            expected="SGLang 0.5.23 or newer",
            fix="pip install 'sglang>=0.5.23'; on a machine without an accelerator: scripts/install-sglang.",
        )
    for key, sampling in ((_ROLLOUT, rollout), (f"{_ROLLOUT}.val_kwargs", rollout.val_kwargs)):
        if sampling.min_p > 0:
            found.refuse(
                f"{key}.min_p",
                got=f"{sampling.min_p:g}, with {_ROLLOUT}.name=sglang",
                expected="0: SGLang cannot draw by a seed with it",
                fix="Use top_p or top_k, or generate with native or vllm.",
            )
    if rollout.ignore_eos and rollout.stop_token_ids:
        found.refuse(
            f"{_ROLLOUT}.stop_token_ids",
            got=f"{rollout.stop_token_ids}, with ignore_eos=true",
            expected="one of the two: SGLang leaves out both or neither",
            fix="Leave one out, or generate with native or vllm.",
        )


def _filters(sampling: RolloutConfig | SamplingConfig) -> str:
    """The filters that are on, for people to read; empty if there are none."""
    on = {"top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0, "min_p": sampling.min_p > 0}
    return ", ".join(f"{name}={getattr(sampling, name)}" for name, is_on in on.items() if is_on)
