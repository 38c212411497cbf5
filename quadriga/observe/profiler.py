# SPDX-License-Identifier: Apache-2.0
"""Profiles of chosen training steps: a timeline for a trace viewer, or a snapshot of the GPU's memory.

`global_profiler.tool=torch` writes a trace that https://ui.perfetto.dev or chrome://tracing opens;
`torch_memory` writes a snapshot for https://docs.pytorch.org/memory_viz.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from quadriga.config import ProfilerConfig
from quadriga.errors import ConfigError

# Allocations remembered for a memory snapshot; a step of a large model makes some ten thousand.
MEMORY_EVENTS = 1_000_000


class Profiler:
    """Profiles the steps listed in `global_profiler.steps`; with no tool it does nothing and costs nothing.

    Args:
        emit: is called with a sentence that says where each profile was written.

    Raises:
        ConfigError: the tool cannot work on this machine.
    """

    def __init__(self, config: ProfilerConfig, emit: Callable[[str], None] = print) -> None:
        if config.tool == "torch_memory" and not torch.cuda.is_available():
            raise ConfigError(
                "global_profiler.tool: got torch_memory on a machine without CUDA, expected a CUDA device, whose "
                "allocator keeps the history",
                fix="Use global_profiler.tool=torch; its trace holds the CPU's allocations.",
            )
        self._steps = frozenset(config.steps) if config.tool else frozenset()
        self._is_of_memory = config.tool == "torch_memory"
        self._has_shared_profiles = config.profile_continuous_steps
        self._directory = Path(config.save_path)
        self._emit = emit
        self._trace: Any = None
        self._first: int | None = None
        self._last = 0

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Profile the block if `step` is one of the chosen. What was recorded is also written when the block raises."""
        if step not in self._steps:
            yield
            return
        if self._first is None:
            self._first = step
            if self._is_of_memory:
                torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
            else:
                activities = [torch.profiler.ProfilerActivity.CPU]
                if torch.cuda.is_available():
                    activities.append(torch.profiler.ProfilerActivity.CUDA)
                self._trace = torch.profiler.profile(activities=activities, profile_memory=True, record_shapes=True)
                self._trace.start()
        self._last = step
        goes_on = False
        try:
            yield
            goes_on = self._has_shared_profiles and step + 1 in self._steps
        finally:
            if not goes_on:
                self.close()

    def close(self) -> None:
        """Write a profile that is still open (a run that ended between two neighbouring steps)."""
        if self._first is None:
            return
        name = f"step_{self._first}" if self._first == self._last else f"steps_{self._first}-{self._last}"
        self._first = None
        self._directory.mkdir(parents=True, exist_ok=True)
        if self._is_of_memory:
            path = self._directory / f"{name}.memory.pickle"
            torch.cuda.memory._dump_snapshot(str(path))
            torch.cuda.memory._record_memory_history(enabled=None)
        else:
            path = self._directory / f"{name}.json.gz"
            self._trace.stop()
            self._trace.export_chrome_trace(str(path))
            self._trace = None
        self._emit(f"profile written to {path}")
