# SPDX-License-Identifier: Apache-2.0
"""What one process records of a training step; `trainer/profiler.py` begins it in all processes, and joins the parts.

torch         every operator of every thread, and the blocks that `PhaseTimer.mark` names: phases of the loop, calls
              of workers
torch_memory  the history of a GPU's memory, for https://docs.pytorch.org/memory_viz
nsys          a range that `nsys profile --capture-range=cudaProfilerApi` records, with the same blocks
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

# Allocations remembered for a memory snapshot; a step of a large model makes some ten thousand.
MEMORY_EVENTS = 1_000_000
NUM_PIDS = 1000  # of a process in the trace: its own, and one for each of its devices


def check_tool(tool: str | None, device: torch.device) -> None:
    """Raises ConfigError: `global_profiler.tool` cannot work in a process on this device."""
    if tool in ("torch_memory", "nsys") and device.type != "cuda":
        got = f"{tool} in a process on {device}"
        fix = "Use global_profiler.tool=torch; its trace holds the CPU's operators and allocations."
        raise ConfigError(
            "global_profiler.tool", got=got, expected="a CUDA device, which it records", fix=fix
        )


class Recording:
    """What this process does, from construction to `finish`.
    `title`: of the process in the trace.
    `number`: of the process among all of them.
    `origin_ns`: the moment, in nanoseconds since 1970, from which the trace counts."""

    current: ClassVar[Optional["Recording"]] = None
    """The one that is going on: a process has one profiler, whatever its roles."""

    def __init__(self, tool: str, title: str, number: int, origin_ns: int) -> None:
        self.tool, self.title, self.number, self.origin_ns = tool, title, number, origin_ns
        Recording.current = self
        if tool == "torch_memory":
            torch.cuda.memory._record_memory_history(max_entries=MEMORY_EVENTS)
        elif tool == "nsys":
            torch.cuda.profiler.start()
            PhaseTimer.mark = torch.cuda.nvtx.range
        else:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if torch.cuda.is_available():
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            recorded: dict[str, Any] = {"profile_memory": True, "record_shapes": True}
            # An engine may compute in a thread of its own.
            recorded["experimental_config"] = _ExperimentalConfig(profile_all_threads=True)
            self._trace = torch.profiler.profile(activities=activities, **recorded)
            self._trace.start()
            PhaseTimer.mark = torch.profiler.record_function

    def finish(self) -> bytes:
        """End it. Returns, compressed by zlib, events as JSON, separated by commas, or a snapshot; nothing for nsys."""
        Recording.current, PhaseTimer.mark = None, nullcontext
        if self.tool == "nsys":
            torch.cuda.profiler.stop()
            return b""
        with TemporaryDirectory() as folder:
            path = Path(folder) / "part.json"
            if self.tool == "torch_memory":
                torch.cuda.memory._dump_snapshot(str(path))
                torch.cuda.memory._record_memory_history(enabled=None)
                return zlib.compress(path.read_bytes(), 1)
            self._trace.stop()
            self._trace.export_chrome_trace(str(path))
            trace = json.loads(path.read_text(encoding="utf-8", errors="replace"), strict=False)
        return zlib.compress(",\n".join(map(json.dumps, self._events(trace))).encode(), 1)

    def _events(self, trace: dict[str, Any]) -> list[dict[str, Any]]:
        """Those of a trace, such that they can stand beside those of other processes."""
        shift_us, pids, events = (trace["baseTimeNanoseconds"] - self.origin_ns) / 1000, {}, []
        for event in trace["traceEvents"]:
            # Others are about the profiler itself.
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
