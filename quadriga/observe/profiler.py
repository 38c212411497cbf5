# SPDX-License-Identifier: Apache-2.0
"""Recording of a training step in one process.

`trainer/profiler.py` starts it in all processes and joins their parts.

torch         every operator of every thread, and the blocks that `PhaseTimer.mark` names: phases of
              the loop, calls of workers
torch_memory  the history of a GPU's memory, for https://docs.pytorch.org/memory_viz
nsys          a range that `nsys profile --capture-range=cudaProfilerApi` records, with the same
              blocks
"""

import json
import zlib
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar, Optional

import torch
from torch._C._profiler import _ExperimentalConfig

from quadriga.errors import ConfigError
from quadriga.observe.timing import PhaseTimer

# Allocations in a memory snapshot; a step of a large model makes some ten thousand.
MEMORY_EVENTS = 1_000_000
# Numbers in the joint trace that are reserved for a process: for itself and each of its devices.
NUM_PIDS = 1000


def check_tool(tool: str | None, device: torch.device) -> None:
    """Check that a profiler works in a process on a device.

    Args:
        tool: `global_profiler.tool`. None: no profiler.
        device: the device of the process.

    Raises:
        ConfigError: the tool records CUDA devices, and this is another device.
    """
    if tool in ("torch_memory", "nsys") and device.type != "cuda":
        raise ConfigError(
            "global_profiler.tool",
            got=f"{tool} in a process on {device}",
            expected="a CUDA device, because the tool records only these",
            fix="Use global_profiler.tool=torch; its trace holds the CPU's operators and allocations.",
        )


class Recording:
    """Recording of this process, from construction to `finish`.

    Args:
        tool: `global_profiler.tool`.
        title: name of the process in the trace.
        number: number of the process among those of the run, from 0.
        origin_ns: the time at which the joint trace begins, in nanoseconds since 1970.
    """

    # The recording in progress in this process, which has one even if it has several roles.
    current: ClassVar[Optional["Recording"]] = None

    def __init__(self, tool: str, title: str, number: int, origin_ns: int) -> None:
        self.tool = tool
        self.title = title
        self.number = number
        self.origin_ns = origin_ns
        Recording.current = self
        if tool == "torch_memory":
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        elif tool == "nsys":
            torch.cuda.profiler.start()
            # Set for all timers of the process, so that their phases are named in the profile.
            PhaseTimer.mark = torch.cuda.nvtx.range
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._trace = torch.profiler.profile(
                activities=activities,
                profile_memory=True,
                record_shapes=True,
                # An engine may compute in another thread.
                experimental_config=_ExperimentalConfig(profile_all_threads=True),
            )
            self._trace.start()
            PhaseTimer.mark = torch.profiler.record_function

    def finish(self) -> bytes:
        """End the recording.

        Returns:
            The recording, compressed by zlib: events as JSON, separated by commas, or a memory
            snapshot. It is empty for nsys, which writes a file itself.
        """
        Recording.current = None
        PhaseTimer.mark = nullcontext
        if self.tool == "nsys":
            torch.cuda.profiler.stop()
            return b""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "part.json"
            if self.tool == "torch_memory":
                torch.cuda.memory._dump_snapshot(str(path))
                torch.cuda.memory._record_memory_history(enabled=None)  # ends the recording
                return zlib.compress(path.read_bytes(), 1)
            self._trace.stop()
            self._trace.export_chrome_trace(str(path))
            # Names of operators and threads may have control characters and invalid UTF-8.
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
        lines = map(json.dumps, self._events(trace))
        return zlib.compress(",\n".join(lines).encode(), 1)

    def _events(self, trace: dict[str, Any]) -> list[dict[str, Any]]:
        """Change the events of this process, so that they can be joined with those of others.

        Times count from `origin_ns`, and process numbers and ids are unique among all processes.

        Args:
            trace: a trace in the format of Chrome. Its events are changed in place.

        Returns:
            The events.
        """
        shift_us = (trace["baseTimeNanoseconds"] - self.origin_ns) / 1000
        pids = {}  # numbers in the joint trace, by the numbers that the profiler uses
        events = []
        for event in trace["traceEvents"]:
            # Leave out events of the profiler about itself, whose process number is a text.
            if not isinstance(event["pid"], int):
                continue
            event["pid"] = pids.setdefault(event["pid"], self.number * NUM_PIDS + len(pids))
            event["ts"] = round(event["ts"] + shift_us, 3)
            if "id" in event:
                event["id"] = (self.number << 32) + int(event["id"])
            if event["name"] == "process_name":
                event["args"]["name"] = self.title
            elif event["name"] == "process_sort_index":
                event["args"]["sort_index"] = event["pid"]
            events.append(event)
        return events
