# SPDX-License-Identifier: Apache-2.0
"""What a schedule of asynchronous training holds to (`Rules`), and what it decides (`schedule.py` beside it)."""

from dataclasses import dataclass
from typing import Literal

from quadriga.config import Config

Reason = Literal["stale", "equal", "surplus", "failed", "end"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """What a schedule holds to.

    Attributes:
        num_groups: that a step learns from, `data.train_batch_size`.
        group_size: samples of a group, `rollout.n`.
        num_steps: the last training step.
        max_staleness, in_flight, on_stale, sync_every, deterministic: as in `async_training`.
        warmup_steps: first steps, in which the policy does not learn and nothing is published.
        round_size: with dynamic sampling, prompts of a round; 0: all groups are kept.
        part_size: groups of each part of a batch, the last may have fewer; 0: it is handed over as a whole.
        saves_running: whether samples under way are saved with the schedule; else a save waits until they have ended.
    """

    num_groups: int
    group_size: int
    num_steps: int
    max_staleness: int = 0
    in_flight: Literal["continue", "finish"] = "continue"
    on_stale: Literal["wait", "drop"] = "wait"
    sync_every: int = 1
    deterministic: bool = False
    warmup_steps: int = 0
    round_size: int = 0
    part_size: int = 0
    saves_running: bool = False

    @classmethod
    def of(cls, config: Config, num_steps: int) -> "Rules":
        """Those of a run."""
        settings, data, policy = config.async_training, config.data, config.actor_rollout_ref
        filters = config.algorithm.filter_groups.enable
        return cls(
            num_groups=data.train_batch_size,
            group_size=policy.rollout.n,
            num_steps=num_steps,
            max_staleness=settings.max_staleness,
            in_flight=settings.in_flight,
            on_stale=settings.on_stale,
            sync_every=settings.sync_every,
            deterministic=settings.deterministic,
            warmup_steps=config.trainer.critic_warmup,
            round_size=(data.gen_batch_size or data.train_batch_size) if filters else 0,
            part_size=policy.actor.ppo_mini_batch_size if settings.by_mini_batch else 0,
            saves_running=settings.in_flight == "continue" and policy.rollout.has_unfinished,
        )

    def version_at(self, step: int) -> int:
        """V(step): publications before this step."""
        return max(0, (step - 1) // self.sync_every - self.warmup_steps // self.sync_every)

    def publishes(self, step: int) -> bool:
        """Whether weights are published after this step."""
        return self.version_at(step + 1) > self.version_at(step)

    @property
    def pauses_to_save(self) -> bool:
        """Whether a save finds each worker at a place that does not depend on the time."""
        return self.saves_running and self.deterministic

    def last_step_with(self, version: int) -> int:
        """The last step that begins with this version."""
        return (version + 1 + self.warmup_steps // self.sync_every) * self.sync_every


@dataclass(frozen=True)
class Start:
    """Generate these samples of a group for a batch, in which the group's prompt has the number `row`."""

    worker: int
    group: int
    batch: int
    row: int
    samples: tuple[int, ...]
    version: int


@dataclass(frozen=True)
class Load:
    """Take newer weights: nothing starts on the worker until it has them. Where they are not published yet, the worker
    makes no token until they are."""

    worker: int
    version: int


@dataclass(frozen=True)
class Resume:
    """Go on without the weights that the worker pauses for."""

    worker: int


@dataclass(frozen=True)
class Save:
    """What the worker has under way goes into the checkpoint of a step, and goes on as if it had begun there."""

    worker: int
    step: int


@dataclass(frozen=True)
class HandOver:
    """The groups that a step learns from, in the order of their prompts; whether they are the last of its batch."""

    step: int
    groups: tuple[int, ...]
    is_last: bool = True


@dataclass(frozen=True)
class Drop:
    """A group that no step learns from. `running` are its samples under way by worker, to be aborted."""

    group: int
    reason: Reason
    running: tuple[tuple[int, int], ...] = ()


Decision = Start | Load | Resume | Save | HandOver | Drop
