# SPDX-License-Identifier: Apache-2.0
"""`async_training`: generation and training at the same time, with a bound on staleness."""

from typing import Any, Literal

from pydantic import NonNegativeInt, model_validator

from quadriga.config.base import Findings, Section, fill_preset, notice_unused, refuse
from quadriga.config.types import Count, PathText
from quadriga.errors import ConfigError

PRESETS: dict[str, dict[str, Any]] = {
    "one_step_off": {"max_staleness": 1, "in_flight": "finish"},
    "bounded": {"max_staleness": 1, "in_flight": "continue"},
    "streaming": {"max_staleness": 1, "in_flight": "continue", "by_mini_batch": True},
}
CORRECTION = "decoupled_token_is"
"""Default off-policy correction of a run on stale samples."""


class AsyncTrainingConfig(Section):
    """Generation during training, on samples of bounded staleness."""

    enable: bool = False
    """Whether generation and training run at the same time, with separate weights."""
    preset: Literal["one_step_off", "bounded", "streaming"] | None = None
    """Named choice of the keys below, of which any may be set as well: one_step_off (1, finish), bounded (1, continue),
    streaming (1, continue, by_mini_batch)."""
    max_staleness: NonNegativeInt = 1
    """Versions by which a sample's oldest token may be behind the weights at the beginning of a step. 0: lockstep."""
    in_flight: Literal["continue", "finish"] = "continue"
    """Sequences in flight when weights change: `continue` with new weights; or `finish` first, while none starts."""
    on_stale: Literal["wait", "drop"] = "wait"
    """wait: a step waits for the samples started for it; drop: it uses finished samples, and drops stale ones."""
    by_mini_batch: bool = False
    """Whether updates start with each complete mini-batch, instead of the complete batch."""
    sync_every: Count = 1
    """Training steps between two publications of weights; each publication is a version."""
    deterministic: bool = False
    """Whether the rollout waits for weights at fixed points, so that the same configuration gives the same numbers."""
    replay: PathText | None = None
    """Record of an earlier run, `async_schedule.jsonl` in its directory, whose schedule is repeated. null: none."""
    kv_on_update: Literal["recompute", "keep"] = "recompute"
    """With `continue`: recompute the KV cache of sequences in flight with new weights, or keep the old one."""

    @model_validator(mode="before")
    @classmethod
    def _fill_in_preset(cls, values: Any) -> Any:
        """Set the keys of the preset that are not set themselves."""
        return fill_preset(values, PRESETS)

    @model_validator(mode="after")
    def _refuse_conflicts(self) -> "AsyncTrainingConfig":
        """Refuse combinations of these keys that cannot work."""
        if self.on_stale == "drop" and self.deterministic:
            raise refuse(
                "on_stale=wait with deterministic=True",
                "Which samples are dropped depends on timing.",
            )
        if self.by_mini_batch and (self.on_stale == "drop" or not self.max_staleness):
            raise refuse("on_stale=wait and max_staleness of at least 1 with by_mini_batch=True")
        return self

    @property
    def is_stale(self) -> bool:
        """Whether a step may learn from samples that older weights have generated."""
        return self.enable and self.max_staleness > 0

    def findings(self, at: str) -> Findings:
        if not self.enable:
            yield from notice_unused(self.changed_keys(at), f"{at}.enable is false")
        elif self.max_staleness == 0 and self.on_stale == "drop":
            yield ConfigError(
                f"{at}.on_stale",
                "drop, with max_staleness=0",
                "wait",
                "Leave it out: with max_staleness=0 no sample becomes stale.",
            )
