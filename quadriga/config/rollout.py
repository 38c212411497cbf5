# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout`: the rollout engine, its sampling, and the limits of each engine."""

from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, NonNegativeFloat, PositiveFloat

from quadriga.config.actor import LogProbConfig
from quadriga.config.base import Findings, ReadIf, Section, notice_unused, refuse
from quadriga.config.multi_turn import AgentConfig, MultiTurnConfig
from quadriga.config.serve import ServeConfig
from quadriga.config.types import Count, Meaning, MinusOneOrCount, Name, PathText, Share, TopShare
from quadriga.engine_traits import (
    DEFAULT_ENGINE,
    ENGINES,
    EngineTraits,
    engines_with,
    traits_of,
)
from quadriga.errors import ConfigError, MachineError

ROLLOUT = "actor_rollout_ref.rollout"
_MORE_PROCESSES = (
    "Set it to 1. For more engines, use more processes that generate, by trainer.n_gpus_per_node, "
    "or with trainer.backend=ray by a pool of their own in trainer.placement; or generate with "
    f"{engines_with('package')}, and mode=async."
)

# Keys that only some engines read, as their traits say, and keys that servers do not read.
_OPTIONAL_KEYS = ("gpu_memory_utilization", "request_seeds", "enforce_eager")
_UNREAD_BY_SERVERS = (
    "max_model_len",
    "max_num_batched_tokens",
    "cache_gigabytes",
    "tensor_model_parallel_size",
)


def _check_engine_name(name: str) -> str:
    """Validate the name of an engine, so that `traits_of` cannot fail for it later."""
    # Read again: a user's file may have changed since an earlier configuration named it.
    traits_of.cache_clear()
    try:
        traits_of(name)
    except ConfigError as error:
        raise refuse(error.expected, error.fix) from error
    return name


class SamplingConfig(Section):
    """Sampling of responses in validation."""

    n: Count = 1
    """Responses for each prompt."""
    temperature: Annotated[NonNegativeFloat, ReadIf("do_sample", (True,))] = 0.0
    """Divides the logits; 0 takes the most likely token."""
    top_p: TopShare = 1.0
    """Keeps the likeliest tokens up to this much probability, in (0, 1]. 1: all."""
    top_k: MinusOneOrCount = -1
    """Keeps this many of the likeliest tokens. -1: all."""
    min_p: Share = 0.0
    """Drops tokens below this share of the likeliest token's probability, in [0, 1]. 0: none."""
    do_sample: bool = False
    """Whether tokens are sampled; false takes the most likely one at any temperature."""

    def findings(self, at: str) -> Findings:
        if self.do_sample and self.temperature == 0:
            yield f"{at}.do_sample: at temperature 0 validation still takes the most likely token."
        if self.n > 1 and (not self.do_sample or self.temperature == 0):
            yield (
                f"{at}.n: validation takes the most likely token, "
                f"so the {self.n} responses to a prompt are equal."
            )


class SkipConfig(Section):
    """The rollout cache: stored generations, to work on later parts of a step without generating."""

    enable: bool = False
    """Whether a step reads its generations from `dump_dir` if they are there, and else writes them to it."""
    dump_dir: PathText = "outputs/rollout_dump"
    """Folder of the rollout cache, a file for each step."""
    action: Literal["cache", "repeat"] = "cache"
    """cache: each step has its own file; repeat: all steps use the first file."""

    def findings(self, at: str) -> Findings:
        if self.enable:
            yield (
                f"{at}: steps whose responses are in {self.dump_dir} do not generate, even if the "
                "weights have changed; other steps write theirs to it."
            )
        if self.enable and self.action == "repeat":
            yield f"{at}.action: repeat: every step learns from the same responses."


class RolloutConfig(LogProbConfig):
    """Generation in training."""

    name: Annotated[
        str,
        Meaning(f"one of {', '.join(ENGINES)}, or path/to/engine.py:Class"),
        AfterValidator(_check_engine_name),
    ] = DEFAULT_ENGINE
    """Rollout engine: `native` is ours and fast, `hf` is transformers' generate, `vllm` and `sglang` are those, `http`
    a server that runs already, `scripted` gives canned responses; `path/to/engine.py:Class` is your own."""
    mode: Literal["sync", "async"] = "sync"
    """`sync` generates the batch as one; `async` makes each sequence a task of its own, which may take several turns
    and is graded while others are still being generated."""
    n: Count = 1
    """Responses for each training prompt; they form the group that some estimators compare. For these, `quadriga train`
    and Python use 8 if it is not given."""
    temperature: NonNegativeFloat = 1.0
    """Divides the logits, in generation and in every log-probability of training alike."""
    top_p: TopShare = 1.0
    """Keeps the likeliest tokens up to this much probability, in (0, 1]. 1: all."""
    top_k: MinusOneOrCount = -1
    """Keeps this many of the likeliest tokens. -1: all."""
    min_p: Share = 0.0
    """Drops tokens below this share of the likeliest token's probability, in [0, 1]. 0: none."""
    do_sample: bool = True
    """Whether tokens are sampled; training needs it."""
    max_num_seqs: Count = 256
    """Sequences that are generated at the same time (continuous batching); others wait for a free slot. If it is not
    given, `vllm` on a GPU takes up to 1024, as far as its KV cache reaches."""
    ignore_eos: bool = False
    """Whether generation continues after the end-of-text token, up to `data.max_response_length`."""
    stop_token_ids: list[int] = []
    """Token ids that end a response, besides the model's own."""
    stop: list[Name] = []
    """Stop strings: texts that end a response; the token that completes one is kept."""
    max_model_len: Count | None = None
    """Longest sequence of the engine, in tokens. null: `data.max_prompt_length + data.max_response_length`."""
    max_num_batched_tokens: Count = 8192
    """Largest number of tokens in one forward pass of the engine."""
    cache_gigabytes: PositiveFloat | None = None
    """Memory of the KV cache, in GiB, of each engine. null: `native` takes what the running sequences need, on a GPU at
    most 70 % of what is free; `vllm` and `sglang` what `gpu_memory_utilization` leaves on a GPU, 1 GiB on a CPU."""
    gpu_memory_utilization: TopShare = 0.5
    """Share of an accelerator's memory for all engines of a process, weights included; `vllm` and `sglang`. If it is
    not given, they take 0.9 in a pool that does not train."""
    tensor_model_parallel_size: Count = 1
    """Tensor parallelism of generation: ranks that hold one engine together, a rollout group, each a shard of it; of n
    ranks there are n/k groups. `sglang`, and `vllm` without Ray or beside training, start k processes instead."""
    expert_parallel_size: Count = 1
    """Expert parallelism of generation: with `tensor_model_parallel_size` here too each rank of an engine has some of
    the experts of every layer, whole; with 1 a part of each. Above 1 for `vllm` on GPUs."""
    data_parallel_size: Count = 1
    """Data parallelism of generation: engine replicas of each process that generates; a request goes to the one with
    the fewest tokens in flight. Above 1 for `sglang`, and for `vllm` with mode=async."""
    request_seeds: bool = True
    """Whether each response is sampled with its own seed, independent of its batch. false: `vllm` samples all from one
    generator, which is faster on an accelerator; responses then depend on what they are generated with.
    Rollout groups need true."""
    enforce_eager: bool = False
    """Whether `native`, `vllm` and `sglang` capture no CUDA graph on a GPU, and `vllm` compiles nothing: a faster
    start, slower steps."""
    free_cache_engine: bool = True
    """Whether the engine frees its memory (weights, KV cache) while the models train."""
    update_weights_bucket_megabytes: Count = 512
    """Bucket size of weight sync to an engine that does not share the actor's weights, in MiB."""
    log_prob_diff_warn: NonNegativeFloat = 0.1
    """Mean absolute difference of the rollout's and trainer's log-probs (mismatch), in nats, above which it warns."""
    log_prob_diff_stop: NonNegativeFloat | None = None
    """Mean absolute difference, in nats, above which the run stops. null: 1.0 in the first two steps of `vllm` and
    `sglang` after a start, else never."""
    trace_dir: PathText | None = None
    """Folder for one JSONL record of each trajectory: turns, tokens, times, tool calls. null: none is written."""
    skip: SkipConfig = SkipConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    agent: AgentConfig = AgentConfig()
    serve: ServeConfig = ServeConfig()
    val_kwargs: SamplingConfig = SamplingConfig()
    engine_kwargs: dict[str, Any] = {}
    """Open dictionary: options of the named engine, for `vllm` and `sglang` under that name as well; for `scripted` the
    `responses_file`, for `http` the `urls` and the `model`, for servers of SGLang the `url` or the `urls`."""

    @property
    def traits(self) -> EngineTraits:
        """Traits of the engine."""
        return traits_of(self.name)

    @property
    def engine_title(self) -> str:
        """Name of the engine in messages: that of its library (vLLM), or else `name`."""
        package = self.traits.package
        return self.name if package is None else package.title

    @property
    def has_unfinished(self) -> bool:
        """Whether the engine can hand over sequences in flight for another engine to continue."""
        return self.traits.continues_unfinished and self.mode == "sync"

    @property
    def has_servers(self) -> bool:
        """Whether the engine uses running servers that the configuration names."""
        traits = self.traits
        # Options of an engine may also be in a dictionary below its name.
        options = self.engine_kwargs | dict(self.engine_kwargs.get(self.name) or {})
        has_option = not options.keys().isdisjoint(traits.server_options)
        return traits.computes_in == "servers" or has_option

    def findings(self, at: str) -> Findings:
        yield from self._unread_keys(at)
        yield from self._sampling_findings(at)
        # Limits of the difference between the log-probs of trainer and rollout.
        stop = self.log_prob_diff_stop
        warn = self.log_prob_diff_warn
        if stop is not None and stop < warn:
            yield (
                f"{at}.log_prob_diff_warn: the run stops at {stop:g} "
                f"before it would warn at {warn:g}."
            )
        if self.traits.takes_weights == "never":
            yield ConfigError(
                f"{at}.name",
                f"{self.name}, which keeps its weights",
                "an engine that takes new weights after each step",
                f"Train with {engines_with('streams')}; {self.name} is for generate and eval.",
            )
        yield from self._library_findings(at)
        problem = problem_of_several_engines(self)
        if problem:
            yield problem
        yield from self._size_findings(at)

    def _unread_keys(self, at: str) -> Findings:
        """Yield notices about keys, and options of other engines, that the engine does not read."""
        unread_keys = [key for key in _OPTIONAL_KEYS if key not in self.traits.reads_keys]
        if self.traits.computes_in == "servers":
            unread_keys += _UNREAD_BY_SERVERS
        changed_keys = self.changed_keys(at)
        keys = [f"{at}.{key}" for key in unread_keys if f"{at}.{key}" in changed_keys]
        keys += [
            f"{at}.engine_kwargs.{engine}"
            for engine in ENGINES
            if engine != self.name and isinstance(self.engine_kwargs.get(engine), dict)
        ]
        yield from notice_unused(keys, f"{at}.name is '{self.name}'")

    def _sampling_findings(self, at: str) -> Findings:
        """Yield sampling settings that training cannot learn from, or only inexactly."""
        fix = "Training learns from the differences between responses: let it sample."
        if not self.do_sample:
            yield ConfigError(f"{at}.do_sample", "false", "true", fix)
        if self.temperature == 0:
            if self.n > 1:
                fix += f" All {self.n} responses to a prompt would be the same: no gradient."
            yield ConfigError(f"{at}.temperature", "0", "a number above 0", fix)
        if _list_filters(self):
            yield (
                f"{at}.top_p, top_k, min_p: generation leaves out unlikely tokens, but the "
                "log-probabilities of training do not: training is slightly off-policy."
            )

    def _size_findings(self, at: str) -> Findings:
        """Yield problems with tensor and expert parallelism of the engine."""
        size = self.tensor_model_parallel_size
        if size > 1 and not self.traits.supports_tensor_parallel:
            # The fix does not name two engines that pass this check: SGLang, which gets no devices
            # on Ray, and http, whose servers have settings of their own.
            yield ConfigError(
                f"{at}.tensor_model_parallel_size",
                f"{size}, with {at}.name={self.name}",
                "1: each process generates with the full model",
                f"Set it to 1, or generate with {engines_with('spans_ranks')}.",
            )
        # Experts are divided over all ranks of an engine, or not at all.
        num_expert_ranks = self.expert_parallel_size
        can_divide = bool(self.traits.expert_parallel_devices)
        if num_expert_ranks > 1 and not (can_divide and num_expert_ranks == size):
            engine = f"{at}.name={self.name} and tensor_model_parallel_size={size}"
            engines = engines_with("expert_parallel_devices")
            yield ConfigError(
                f"{at}.expert_parallel_size",
                f"{num_expert_ranks}, with {engine}",
                (
                    f"1; or, with {engines}, the value of tensor_model_parallel_size, "
                    "since all ranks of an engine divide its experts"
                ),
                "Set it to 1: the results are the same.",
            )

    def _library_findings(self, at: str) -> Findings:
        """Yield a missing package of the engine, and sampling that the engine does not support."""
        package = self.traits.package
        # A server has its package on another machine.
        if package and not self.has_servers and find_spec(package.module) is None:
            yield MachineError(
                f"{at}.name",
                f"{self.name}, which is not installed",
                f"{package.title} {package.least_version} or newer",
                package.install,
            )
        lacks = self.traits.lacks
        if "unfiltered_log_probs" in lacks:
            yield from self._filter_findings(at)
        if "min_p" in lacks:
            for key, sampling in ((at, self), (f"{at}.val_kwargs", self.val_kwargs)):
                if sampling.min_p > 0:
                    yield ConfigError(
                        f"{key}.min_p",
                        f"{sampling.min_p:g}, with {at}.name={self.name}",
                        f"0: {self.engine_title} cannot sample with it and a seed",
                        f"Use top_p or top_k, or {engines_with('streams')}.",
                    )
        if "stop_token_ids" in lacks and self.ignore_eos and self.stop_token_ids:
            yield ConfigError(
                f"{at}.stop_token_ids",
                f"{self.stop_token_ids}, with ignore_eos=true",
                "one of the two",
                (
                    f"{self.engine_title} ignores either both or none of them: leave one out, "
                    f"or generate with {engines_with('streams')}."
                ),
            )

    def _filter_findings(self, at: str) -> Findings:
        """Yield filters for which the engine cannot report the log-probabilities for training.

        Training needs them after the temperature and before the filter. At temperature 1 these are
        the model's own, which the engine does report.
        """
        if _list_filters(self) and self.temperature != 1:
            yield ConfigError(
                f"{at}.temperature",
                f"{self.temperature:g}, with {_list_filters(self)}",
                "1, or no filter",
                (
                    f"{self.engine_title} cannot report log-probabilities after the temperature and "
                    "before the filter, which training needs: change one of them, "
                    f"or generate with {DEFAULT_ENGINE}."
                ),
            )
        # Nothing is learned from validation, so there only a metric is missing. With filters in
        # training the engine reports the model's own log-probabilities, in validation as well.
        # Without, it reports those after the temperature and the filter.
        validation = self.val_kwargs
        lacks_log_probs = bool(_list_filters(validation))
        if _list_filters(self):
            lacks_log_probs = validation.temperature != 1
        if validation.do_sample and validation.temperature > 0 and lacks_log_probs:
            yield (
                f"{at}.val_kwargs: {self.engine_title} does not report log-probabilities without "
                "the filter: rollout/log_prob of validation is nan; "
                "its responses and scores are not affected."
            )


def problem_of_several_engines(rollout: RolloutConfig) -> ConfigError | None:
    """Error about several engines per process (`data_parallel_size`) that the engine cannot have.

    None: there is one engine per process, or a process can have several.
    """
    count = rollout.data_parallel_size
    if count == 1:
        return None
    traits = rollout.traits
    got = f"{count}, with {ROLLOUT}.name={rollout.name}"
    if rollout.has_servers:
        key = f"{ROLLOUT}.engine_kwargs"
        # Of the options, the last one takes several addresses.
        if traits.server_options:
            key += f".{traits.server_options[-1]}"
        expected = "1: a request goes to the server with the fewest in flight"
        fix = f"Name all servers in {key}."
    elif traits.computes_in == "caller":
        expected = "1: the engine computes in the calling process, one call after the other"
        fix = _MORE_PROCESSES
    elif traits.computes_in == "own_if_async" and rollout.mode == "sync":
        got += ", mode=sync"
        expected = f"1, or {ROLLOUT}.mode=async"
        fix = (
            f"With mode=sync {rollout.engine_title} computes in the actor's process, "
            "where two engines would take turns: set mode=async."
        )
    else:
        return None
    return ConfigError(f"{ROLLOUT}.data_parallel_size", got, expected, fix)


def _list_filters(sampling: RolloutConfig | SamplingConfig) -> str:
    """List the enabled filters of unlikely tokens, as "top_p=0.9, top_k=20"; "" without any."""
    filters = []
    if sampling.top_p < 1:
        filters.append(f"top_p={sampling.top_p}")
    if sampling.top_k > 0:
        filters.append(f"top_k={sampling.top_k}")
    if sampling.min_p > 0:
        filters.append(f"min_p={sampling.min_p}")
    return ", ".join(filters)
