# SPDX-License-Identifier: Apache-2.0
"""`actor_rollout_ref.rollout`: the generation engine and how it samples."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from quadriga.config.actor import LogProbConfig
from quadriga.config.base import Count, MinusOneOrCount, NonNegativeFloat, Section, Share, refuse


def _known_engine(value: Any) -> Any:
    if value in ("vllm", "sglang", "trtllm"):
        raise refuse(
            "native, hf or scripted",
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


class RolloutConfig(LogProbConfig):
    """Generation in training."""

    name: Annotated[Literal["native", "hf", "scripted"], BeforeValidator(_known_engine)] = "native"
    """Engine: `native` is ours and fast, `hf` is transformers' generate, `scripted` gives canned answers."""
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
    val_kwargs: SamplingConfig = Field(default_factory=SamplingConfig)
    engine_kwargs: dict[str, Any] = Field(default_factory=dict)
    """Open dictionary: options of the named engine; for `scripted` the `responses_file`."""
