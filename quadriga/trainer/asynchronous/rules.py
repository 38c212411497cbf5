# SPDX-License-Identifier: Apache-2.0
"""Rules of a schedule of asynchronous training, and the kinds of decisions that it makes.

`schedule.py` turns events into these decisions.
"""

from dataclasses import dataclass
from typing import Literal

from quadriga.config import Config

Reason = Literal["stale", "equal", "surplus", "end"]


@dataclass(frozen=True, kw_only=True)
class Rules:
    """Settings of a schedule, and the versions of the weights that follow from them.

    The version of weights is the number of publications so far. Weights are published after every
    `sync_every` steps.

    Attributes:
        num_groups: groups that a step learns from (`data.train_batch_size`).
        group_size: samples of a group (`rollout.n`).
        num_steps: number of the last training step.
        max_staleness: how many versions old the oldest token of a sample may be.
        in_flight: whether unfinished samples continue with newer weights, or finish first.
        on_stale: whether a step waits for its own groups, or takes any and drops those that are too
            old.
        sync_every: steps from one publication to the next.
        deterministic: whether batches, rather than time, determine when weights are loaded.
        warmup_steps: number of first steps in which only the critic learns, and nothing is
            published.
        round_size: prompts in a round of dynamic sampling. 0: all groups are kept.
        part_size: groups in each part of a batch; the last part may have fewer. 0: a batch is
            handed over as a whole.
        saves_running: whether unfinished samples are saved. Otherwise a save waits for them.
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
        """Rules of a configuration for a run of `num_steps` steps."""
        settings = config.async_training
        policy = config.actor_rollout_ref
        round_size = 0
        if config.algorithm.filter_groups.enable:
            round_size = config.data.gen_batch_size or config.data.train_batch_size
        return cls(
            num_groups=config.data.train_batch_size,
            group_size=policy.rollout.n,
            num_steps=num_steps,
            max_staleness=settings.max_staleness,
            in_flight=settings.in_flight,
            on_stale=settings.on_stale,
            sync_every=settings.sync_every,
            deterministic=settings.deterministic,
            warmup_steps=config.trainer.critic_warmup,
            round_size=round_size,
            part_size=policy.actor.ppo_mini_batch_size if settings.by_mini_batch else 0,
            saves_running=settings.in_flight == "continue" and policy.rollout.has_unfinished,
        )

    def version_at(self, step: int) -> int:
        """Version of the weights that a step begins with, the number of publications before it."""
        # One publication for every `sync_every` earlier steps, except those in the warm-up.
        return max(0, (step - 1) // self.sync_every - self.warmup_steps // self.sync_every)

    def publishes(self, step: int) -> bool:
        """Whether weights are published after this step."""
        return self.version_at(step + 1) > self.version_at(step)

    @property
    def pauses_to_save(self) -> bool:
        """Whether workers are saved while they pause for weights, a place independent of time."""
        return self.saves_running and self.deterministic

    def last_step_with(self, version: int) -> int:
        """The last step that begins with this version."""
        # The largest step for which `version_at` returns this version.
        return (version + 1 + self.warmup_steps // self.sync_every) * self.sync_every


@dataclass(frozen=True)
class Start:
    """Decision to generate samples of a group on a worker.

    Attributes:
        worker: number of the worker.
        group: number of the group.
        batch: step that the group is generated for.
        row: number of the group's prompt in this batch.
        samples: numbers of the samples in the group.
        version: version of the worker's weights.
    """

    worker: int
    group: int
    batch: int
    row: int
    samples: tuple[int, ...]
    version: int


@dataclass(frozen=True)
class Load:
    """Decision to load newer weights on a worker. Nothing starts on it until it has them.

    If the version is not published yet, the worker pauses until it is.
    """

    worker: int
    version: int


@dataclass(frozen=True)
class Resume:
    """Decision to end a worker's pause without the weights that it is waiting for."""

    worker: int


@dataclass(frozen=True)
class Save:
    """Decision to save the unfinished samples of a worker in the checkpoint of a step.

    They then continue just as they would in a run that resumes from the checkpoint.
    """

    worker: int
    step: int


@dataclass(frozen=True)
class HandOver:
    """Decision to hand groups over to a step, in the order of their prompts.

    Attributes:
        step: the training step.
        groups: numbers of the groups.
        is_last: whether these groups complete the batch of the step.
    """

    step: int
    groups: tuple[int, ...]
    is_last: bool = True


@dataclass(frozen=True)
class Drop:
    """Decision to discard a group.

    Attributes:
        group: number of the group.
        reason: why no step learns from it.
        running: worker and number of each unfinished sample, which is aborted.
    """

    group: int
    reason: Reason
    running: tuple[tuple[int, int], ...] = ()


Decision = Start | Load | Resume | Save | HandOver | Drop
