# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout`: the rollout engine, its sampling, and the limits of each engine."""

from difflib import get_close_matches
from importlib.util import find_spec
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeFloat, PositiveFloat

from quadriga.config.actor import LogProbConfig
from quadriga.config.base import Findings, ReadIf, Section, absent, refuse, unused, wrong
from quadriga.config.multi_turn import AgentConfig, MultiTurnConfig
from quadriga.config.types import Count, Meaning, MinusOneOrCount, Name, PathText, Share, TopShare
from quadriga.errors import ConfigError

ROLLOUT = "actor_rollout_ref.rollout"
ENGINES = ["native", "hf", "vllm", "sglang", "http", "scripted"]
"""Names of rollout engines. `workers/rollout_engines.py` has their classes."""
SPANNING = ("native", "vllm")
"""Engines that span the ranks of a rollout group on Ray. Others start their own processes."""
_OF_LIBRARIES = ReadIf("name", ("vllm", "sglang"))
_OF_GRAPHS = ReadIf("name", ("native", "vllm", "sglang"))
_NOT_OF_SERVERS = ReadIf("name", ("http",), is_one=False)
_WITHOUT_GPU = "on a machine without an accelerator: "
_MORE_PROCESSES = (
    "Set it to 1. For more engines, use more processes that generate, by trainer.n_gpus_per_node, "
    "or with trainer.backend=ray by a pool of their own in trainer.placement; or generate with vllm "
    "and mode=async."
)


def _known_engine(name: str) -> str:
    if name in ENGINES:
        return name
    close_names = get_close_matches(name, ENGINES, 1, cutoff=0.7)
    suggestion = close_names[0] if close_names else "native"
    reason = "the nearest name"
    if suggestion == "native":
        reason = "it generates in the trainer's process and shares its weights"
    raise refuse(f"one of {', '.join(ENGINES)}", f"Set {ROLLOUT}.name={suggestion}: {reason}.")


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
            equal = f"the {self.n} responses to a prompt are equal"
            yield f"{at}.n: validation takes the most likely token, so {equal}."


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

    name: Annotated[str, Meaning(f"one of {', '.join(ENGINES)}"), AfterValidator(_known_engine)] = (
        "native"
    )
    """Rollout engine: `native` is ours and fast, `hf` is transformers' generate, `vllm` and `sglang` are those, `http`
    a server that runs already, `scripted` gives canned responses."""
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
    """Sequences that are generated at the same time (continuous batching); others wait for a free slot."""
    ignore_eos: bool = False
    """Whether generation continues after the end-of-text token, up to `data.max_response_length`."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Token ids that end a response, besides the model's own."""
    stop: list[Name] = Field(default_factory=list)
    """Stop strings: texts that end a response; the token that completes one is kept."""
    max_model_len: Annotated[Count | None, _NOT_OF_SERVERS] = None
    """Longest sequence of the engine, in tokens. null: `data.max_prompt_length + data.max_response_length`."""
    max_num_batched_tokens: Annotated[Count, _NOT_OF_SERVERS] = 8192
    """Largest number of tokens in one forward pass of the engine."""
    cache_gigabytes: Annotated[PositiveFloat | None, _NOT_OF_SERVERS] = None
    """Memory of the KV cache, in GiB, of each engine. null: `native` takes what the running sequences need, on a GPU at
    most 70 % of what is free; `vllm` and `sglang` what `gpu_memory_utilization` leaves on a GPU, 1 GiB on a CPU."""
    gpu_memory_utilization: Annotated[TopShare, _OF_LIBRARIES] = 0.5
    """Share of an accelerator's memory for all engines of a process, weights included; `vllm` and `sglang`."""
    tensor_model_parallel_size: Annotated[Count, _NOT_OF_SERVERS] = 1
    """Tensor parallelism of generation: ranks that hold one engine together, a rollout group, each a shard of it; of n
    ranks there are n/k groups. `sglang`, and `vllm` without Ray or beside training, start k processes instead."""
    expert_parallel_size: Count = 1
    """Expert parallelism of generation: with `tensor_model_parallel_size` here too each rank of an engine has some of
    the experts of every layer, whole; with 1 a part of each. Above 1 for `vllm` on GPUs."""
    data_parallel_size: Count = 1
    """Data parallelism of generation: engine replicas of each process that generates; a request goes to the one with
    the fewest tokens in flight. Above 1 for `sglang`, and for `vllm` with mode=async."""
    request_seeds: Annotated[bool, ReadIf("name", ("vllm",))] = True
    """Whether each response is sampled with its own seed, independent of its batch. false: `vllm` samples all from one
    generator, which is faster on an accelerator; responses then depend on what they are generated with.
    Rollout groups need true."""
    enforce_eager: Annotated[bool, _OF_GRAPHS] = False
    """Whether `native`, `vllm` and `sglang` capture no CUDA graph on a GPU, and `vllm` compiles nothing: a faster
    start, slower steps."""
    free_cache_engine: bool = True
    """Whether the engine frees its memory (weights, KV cache) while the models train."""
    update_weights_bucket_megabytes: Count = 512
    """Bucket size of weight sync to an engine that does not share the actor's weights, in MiB."""
    log_prob_diff_warn: NonNegativeFloat = 0.1
    """Mean absolute difference of the rollout's and trainer's log-probs (mismatch), in nats, above which it warns."""
    log_prob_diff_stop: NonNegativeFloat | None = None
    """Mean absolute difference, in nats, above which the run stops. null: never."""
    trace_dir: PathText | None = None
    """Folder for one JSONL record of each trajectory: turns, tokens, times, tool calls. null: none is written."""
    skip: SkipConfig = Field(default_factory=SkipConfig)
    multi_turn: MultiTurnConfig = Field(default_factory=MultiTurnConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    val_kwargs: SamplingConfig = Field(default_factory=SamplingConfig)
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: options of the named engine, for `vllm` and `sglang` under that name as well; for `scripted` the
    `responses_file`, for `http` the `urls` and the `model`, for servers of SGLang the `url` or the `urls`."""

    @property
    def has_unfinished(self) -> bool:
        """Whether the engine can hand over sequences in flight, which another engine can continue."""
        return self.name == "native" and self.mode == "sync"

    def findings(self, at: str) -> Findings:
        yield from self._sampling_findings(at)
        stop = self.log_prob_diff_stop
        warn = self.log_prob_diff_warn
        if stop is not None and stop < warn:
            end = f"the run stops at {stop:g} before it would warn at {warn:g}"
            yield f"{at}.log_prob_diff_warn: {end}."
        if self.name == "http":
            got = "http, whose servers keep their weights"
            fix = f"Train with {at}.name=native or vllm; http is for generate and eval."
            yield wrong(f"{at}.name", got, "an engine that takes new weights after each step", fix)
        if self.name == "vllm":
            yield from self._vllm_findings(at)
        if self.name == "sglang":
            yield from self._sglang_findings(at)
        for engine in ENGINES:
            if engine != self.name and isinstance(self.engine_kwargs.get(engine), dict):
                yield from unused([f"{at}.engine_kwargs.{engine}"], f"{at}.name is '{self.name}'")
        problem = problem_of_several_engines(self)
        if problem:
            yield problem
        yield from self._size_findings(at)

    def _sampling_findings(self, at: str) -> Findings:
        greedy = "Training learns from the differences between responses: let it sample."
        if not self.do_sample:
            yield wrong(f"{at}.do_sample", "false", "true", greedy)
        if self.temperature == 0:
            fix = greedy
            if self.n > 1:
                fix += f" All {self.n} responses to a prompt would be the same: no gradient."
            yield wrong(f"{at}.temperature", "0", "a number above 0", fix)
        if _filters(self):
            yield (
                f"{at}.top_p, top_k, min_p: generation leaves out unlikely tokens, but the "
                "log-probabilities of training do not: training is slightly off-policy."
            )

    def _size_findings(self, at: str) -> Findings:
        """Problems with tensor and expert parallelism of the engine."""
        size = self.tensor_model_parallel_size
        if size > 1 and self.name not in ("native", "vllm", "sglang", "http"):
            got = f"{size}, with {at}.name={self.name}"
            expected = "1: each process generates with the full model"
            fix = "Set it to 1, or generate with native or vllm."
            yield wrong(f"{at}.tensor_model_parallel_size", got, expected, fix)
        num_expert_ranks = self.expert_parallel_size
        if num_expert_ranks > 1 and (self.name != "vllm" or num_expert_ranks != size):
            engine = f"{at}.name={self.name} and tensor_model_parallel_size={size}"
            expected = (
                "1, or with vllm tensor_model_parallel_size: "
                "the ranks of an engine divide its experts"
            )
            fix = "Set it to 1: the results are the same."
            got = f"{num_expert_ranks}, with {engine}"
            yield wrong(f"{at}.expert_parallel_size", got, expected, fix)

    def _vllm_findings(self, at: str) -> Findings:
        """Problems with vLLM in training."""
        if find_spec("vllm") is None:
            fix = f"pip install 'vllm>=0.30'; {_WITHOUT_GPU}scripts/install-vllm."
            yield absent(f"{at}.name", "vllm, which is not installed", "vLLM 0.30 or newer", fix)
        # vLLM reports log-probabilities either before temperature and filter, or after both.
        needs_division = _filters(self) and self.temperature != 1
        if needs_division:
            got = f"{self.temperature:g}, with {_filters(self)}"
            fix = (
                "vLLM cannot report log-probabilities after the temperature and before the filter, "
                "which training needs: change one of them, or generate with native."
            )
            yield wrong(f"{at}.temperature", got, "1, or no filter", fix)
        validation = self.val_kwargs
        is_filtered = _filters(validation) or (_filters(self) and validation.temperature != 1)
        if validation.do_sample and validation.temperature > 0 and is_filtered:
            yield (
                f"{at}.val_kwargs: vLLM does not report log-probabilities without the filter: "
                "rollout/log_prob of validation is nan; its responses and scores are not affected."
            )

    def _sglang_findings(self, at: str) -> Findings:
        """Problems with SGLang in training."""
        if not has_servers(self) and find_spec("sglang") is None:
            got = "sglang, which is not installed"
            fix = f"pip install 'sglang>=0.5.23'; {_WITHOUT_GPU}scripts/install-sglang."
            yield absent(f"{at}.name", got, "SGLang 0.5.23 or newer", fix)
        for key, sampling in ((at, self), (f"{at}.val_kwargs", self.val_kwargs)):
            if sampling.min_p > 0:
                got = f"{sampling.min_p:g}, with {at}.name=sglang"
                expected = "0: SGLang cannot sample with it and a seed"
                yield wrong(f"{key}.min_p", got, expected, "Use top_p or top_k, or native or vllm.")
        if self.ignore_eos and self.stop_token_ids:
            got = f"{self.stop_token_ids}, with ignore_eos=true"
            fix = (
                "SGLang ignores either both or none of them: leave one out, "
                "or generate with native or vllm."
            )
            yield wrong(f"{at}.stop_token_ids", got, "one of the two", fix)


def problem_of_several_engines(rollout: RolloutConfig) -> ConfigError | None:
    """Error about replicas of an engine that does not compute in its own processes, else None."""
    count = rollout.data_parallel_size
    if count == 1:
        return None
    match rollout.name:
        case "sglang" if has_servers(rollout):
            expected = f"1: {ROLLOUT}.engine_kwargs.sglang names the servers"
            fix = "Name one server as url, several as urls: requests are balanced over them."
        case "sglang":
            return None
        case "vllm" if rollout.mode == "async":
            return None
        case "vllm":
            expected = f"1, or {ROLLOUT}.mode=async"
            fix = (
                "With mode=sync vLLM computes in the actor's process, "
                "where two engines would take turns: set mode=async."
            )
        case "http":
            expected = "1: a request goes to the server with the fewest in flight anyway"
            fix = f"Name all servers in {ROLLOUT}.engine_kwargs.urls."
        case _:
            expected = "1: the engine computes in the calling process, one call after the other"
            fix = _MORE_PROCESSES
    got = f"{count}, with {ROLLOUT}.name={rollout.name}"
    if rollout.name == "vllm":
        got += ", mode=sync"
    return wrong(f"{ROLLOUT}.data_parallel_size", got, expected, fix)


def has_servers(rollout: RolloutConfig) -> bool:
    """Whether the configuration names running servers of SGLang."""
    options = rollout.engine_kwargs | dict(rollout.engine_kwargs.get("sglang") or {})
    return not options.keys().isdisjoint({"url", "urls"})


def _filters(sampling: RolloutConfig | SamplingConfig) -> str:
    """Description of the enabled filters; empty without filters."""
    filters = []
    if sampling.top_p < 1:
        filters.append(f"top_p={sampling.top_p}")
    if sampling.top_k > 0:
        filters.append(f"top_k={sampling.top_k}")
    if sampling.min_p > 0:
        filters.append(f"min_p={sampling.min_p}")
    return ", ".join(filters)
