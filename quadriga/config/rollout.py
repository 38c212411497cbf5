# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout`: the generation engine and how it samples."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from quadriga.config.actor import LogProbConfig
from quadriga.config.base import (
    Count,
    MinusOneOrCount,
    NonNegativeFloat,
    PathText,
    PositiveFloat,
    Section,
    Share,
    refuse,
)
from quadriga.config.multi_turn import AgentConfig, MultiTurnConfig

ENGINES = ("native", "hf", "vllm", "sglang", "http", "scripted")


def _known_engine(value: Any) -> Any:
    if value == "trtllm":
        raise refuse(
            f"one of {', '.join(ENGINES)}",
            "Set actor_rollout_ref.rollout.name=native: it generates in the trainer's process and shares its weights.",
        )
    return value


class SamplingConfig(Section):
    """How answers are sampled in validation."""

    n: Count = 1
    """Answers for each prompt."""
    temperature: NonNegativeFloat = 0.0
    """Divides the logits; 0 takes the likeliest token."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keeps the likeliest tokens up to this much probability, in (0, 1]. 1: all."""
    top_k: MinusOneOrCount = -1
    """Keeps this many of the likeliest tokens. -1: all."""
    min_p: Share = 0.0
    """Drops tokens below this share of the likeliest token's probability, in [0, 1]. 0: none."""
    do_sample: bool = False
    """Whether tokens are drawn; false takes the likeliest one, whatever the temperature."""


class SkipConfig(Section):
    """Generations that are kept and used again, to work on what comes after them."""

    enable: bool = False
    """Whether a step whose generations are in `dump_dir` takes them from there, and others are written to it."""
    dump_dir: PathText = "outputs/rollout_dump"
    """Folder of the kept generations, a file for each step."""
    action: Literal["cache", "repeat"] = "cache"
    """`cache` keeps each step's own; `repeat` uses the first that was kept in every step."""


class RolloutConfig(LogProbConfig):
    """Generation in training."""

    name: Annotated[Literal["native", "hf", "vllm", "sglang", "http", "scripted"], BeforeValidator(_known_engine)] = (
        "native"
    )
    """Engine: `native` is ours and fast, `hf` is transformers' generate, `vllm` and `sglang` are those, `http` a server
    that others run, `scripted` gives canned answers."""
    mode: Literal["sync", "async"] = "sync"
    """`sync` answers the batch as one; `async` makes each sample a task of its own, which may take several turns and is
    graded while others are still being written."""
    n: Count = 1
    """Answers for each training prompt; they form the group that some estimators compare."""
    temperature: NonNegativeFloat = 1.0
    """Divides the logits, in generation and in every log-probability of training alike."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Keeps the likeliest tokens up to this much probability, in (0, 1]. 1: all."""
    top_k: MinusOneOrCount = -1
    """Keeps this many of the likeliest tokens. -1: all."""
    min_p: Share = 0.0
    """Drops tokens below this share of the likeliest token's probability, in [0, 1]. 0: none."""
    do_sample: bool = True
    """Whether tokens are drawn; training needs it."""
    max_num_seqs: Count = 256
    """Sequences that are generated at the same time; more wait for a free place."""
    ignore_eos: bool = False
    """Whether generation goes on after the end-of-text token, up to `data.max_response_length`."""
    stop_token_ids: list[int] = Field(default_factory=list)
    """Token ids that end a response, besides the model's own."""
    stop: list[str] = Field(default_factory=list)
    """Texts that end a response; the token that completes one is kept."""
    max_model_len: Count | None = None
    """Longest prompt and response together, in tokens, that the engine takes. None: `data.max_prompt_length` and
    `data.max_response_length`, added."""
    max_num_batched_tokens: Count = 8192
    """Tokens that the engine computes in one forward pass, at most."""
    cache_gigabytes: PositiveFloat | None = None
    """Memory for keys and values. None: `native` takes what the running sequences need; `vllm` and `sglang` what
    `gpu_memory_utilization` leaves on an accelerator, 1 GiB on a CPU. Each engine has as much."""
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.5
    """Share of the accelerator's memory that `vllm` or `sglang` may use, weights included; several engines of a process
    divide it."""
    tensor_model_parallel_size: Count = 1
    """Processes that hold one engine of `vllm` or `sglang` together."""
    data_parallel_size: Count = 1
    """Engines of each process that generates, every one with all weights: a request goes to the one with the fewest
    tokens in flight. Above 1 for `sglang`, and for `vllm` with mode=async."""
    enforce_eager: bool = False
    """`vllm`, `sglang`: whether no graph is captured, and by `vllm` nothing compiled: a faster start, slower steps."""
    free_cache_engine: bool = True
    """Whether the engine gives back its memory while the models train."""
    update_weights_bucket_megabytes: Count = 512
    """Memory in which weights travel to an engine that does not share the actor's, in MiB."""
    log_prob_diff_warn: NonNegativeFloat = 0.1
    """Mean absolute difference between the rollout's and the trainer's log-probabilities, in nats, above which a step
    warns."""
    log_prob_diff_stop: NonNegativeFloat | None = None
    """The same, above which the run stops. None: never."""
    trace_dir: PathText | None = None
    """Folder for one JSONL record of each trajectory: turns, tokens, times, tools. None: none is written."""
    skip: SkipConfig = Field(default_factory=SkipConfig)
    multi_turn: MultiTurnConfig = Field(default_factory=MultiTurnConfig)
    agent: AgentConfig = Field(default_factory=AgentConfig)
    val_kwargs: SamplingConfig = Field(default_factory=SamplingConfig)
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: options of the named engine, for `vllm` and `sglang` under that name as well; for `scripted` the
    `responses_file`, for `http` the `urls` and the `model`, for servers of SGLang the `url` or the `urls`."""
