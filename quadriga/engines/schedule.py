# SPDX-License-Identifier: Apache-2.0
"""Learning rates over the training steps of a run: warm-up, then constant, linear or cosine."""

import math

from quadriga.config import OptimConfig


def num_warmup_steps(config: OptimConfig, total_steps: int) -> int:
    """`lr_warmup_steps` where given, else `lr_warmup_steps_ratio` of the run."""
    if config.lr_warmup_steps >= 0:
        return config.lr_warmup_steps
    return int(config.lr_warmup_steps_ratio * total_steps)


def lr_at(step: int, config: OptimConfig, total_steps: int) -> float:
    """Learning rate of one training step; all its optimizer steps have the same.

    Args:
        step: counted from 1; the first step of a warm-up of w steps has 1/w of the rate.
        config: the schedule.
        total_steps: training steps of the whole run, where cosine and linear end.
    """
    warmup = num_warmup_steps(config, total_steps)
    if step <= warmup:
        return config.lr * step / warmup
    if config.lr_scheduler_type == "constant":
        return config.lr
    progress = min(1.0, (step - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler_type == "linear":
        factor = 1.0 - progress
    else:
        factor = 0.5 * (1.0 + math.cos(2.0 * math.pi * config.num_cycles * progress))
    return config.lr * (config.min_lr_ratio + (1.0 - config.min_lr_ratio) * factor)
