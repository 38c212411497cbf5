# SPDX-License-Identifier: Apache-2.0
"""`global_profiler`: which steps are profiled, and how."""

from typing import Literal

from pydantic import Field

from quadriga.config.base import Count, PathText, Section


class ProfilerConfig(Section):
    """The profiler."""

    tool: Literal["torch", "torch_memory"] | None = None
    """`torch` writes a timeline, `torch_memory` a memory snapshot (CUDA). null: no profile."""
    steps: list[Count] = Field(default_factory=list)
    """Training steps to profile, counted from 1."""
    save_path: PathText = "outputs/profile"
    """Directory for profiles."""
    profile_continuous_steps: bool = False
    """Whether neighbouring steps share one profile instead of having one each."""
