# SPDX-License-Identifier: Apache-2.0
"""Profiles chosen training steps, with all processes of the run in one trace.

    driver     start_profile ─────> step ───────────────────────> stop_profile ──> one file
    workers      └ each rank of `<role>.profiler.ranks` records its operators ┘ parts

`step_N.json.gz` opens in https://ui.perfetto.dev and chrome://tracing. A memory snapshot
(`torch_memory`) is one file per rank; Nsight Systems (`nsys`) writes its reports itself.
"""

import gzip
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from quadriga.config import Config, profiled_ranks
from quadriga.observe.profiler import Recording
from quadriga.single_controller import WorkerGroup

DRIVER = "driver"


class Profiler:
    """Profiles the steps listed in `global_profiler.steps`; without a tool it does nothing.

    Args:
        config: the resolved configuration.
        groups: worker groups by role, whose processes are profiled along with this one.
        emit: called with a sentence that says where a profile was written.
    """

    def __init__(
        self,
        config: Config,
        groups: Mapping[str, WorkerGroup[Any]],
        emit: Callable[[str], None] = print,
    ) -> None:
        self._config = config
        self._section = config.global_profiler
        self._groups = groups
        self._emit = emit
        self._steps = frozenset(self._section.steps if self._section.tool else ())
        self._open: list[int] = []  # steps of the profile that is being recorded

    @contextmanager
    def step(self, step: int, *, is_last: bool = False) -> Iterator[None]:
        """Context manager: profile the block if `step` is one of the chosen steps.

        If the block raises, only this process's recording is written, because the others may hang.

        Args:
            step: number of the step.
            is_last: whether it is the last step of the run, which ends a profile of several steps.
        """
        if step not in self._steps:
            yield
            return
        self._open.append(step)
        try:
            if len(self._open) == 1:
                self._start()
            yield
        except BaseException:
            self.close()
            raise
        # With `profile_continuous_steps`, the profile goes on if the next step is chosen, too.
        if is_last or not self._section.profile_continuous_steps or step + 1 not in self._steps:
            self._write(self._stop())

    def close(self) -> None:
        """Write this process's recording of a profile that has not ended."""
        if self._open:
            self._write({})

    def _start(self) -> None:
        """Start to record in this process and in the chosen ranks of all groups."""
        tool = str(self._section.tool)
        origin_ns = time.time_ns()
        # Only `torch` records this process. The constructor registers the recording as
        # `Recording.current`, which `_write` finishes.
        if tool == "torch":
            Recording(tool, DRIVER, 0, origin_ns)
        # Worker groups, and the handles of their calls.
        pending_calls = []
        for number, (role, group) in enumerate(self._groups.items(), 1):
            ranks = profiled_ranks(self._config, role)
            calls = []
            for rank in group.ranks:
                is_profiled = ranks is None or rank in ranks
                # A number that is different for each process of the trace.
                process = number * 1000 + rank
                arguments = (tool, f"{role}[{rank}]", process, origin_ns, is_profiled)
                calls.append((arguments, {}))
            pending_calls.append((group, group.start_all("start_profile", calls)))
        # All groups have started before any is awaited.
        for group, handles in pending_calls:
            group.resolve(handles)

    def _stop(self) -> dict[str, bytes]:
        """Stop recording in all workers.

        Returns:
            Their compressed recordings by title, such as `actor[0]`; a lost rank has none.
        """
        # Worker groups, and for each handle of a call the title of the recording that it returns.
        pending_calls = []
        for role, group in self._groups.items():
            titles = [f"{role}[{rank}]" for rank in group.ranks]
            handles = group.start_all("stop_profile", [((), {})] * len(titles))
            pending_calls.append((group, dict(zip(handles, titles, strict=True))))
        parts = {}
        for group, title_of_handle in pending_calls:
            # Outcomes are taken one by one, because the error of a lost rank must not prevent the
            # recordings of the others.
            while title_of_handle:
                for handle, output in group.first_outcomes(list(title_of_handle)).items():
                    title = title_of_handle.pop(handle)
                    if isinstance(output, BaseException):
                        self._emit(f"no profile of {title}: {output}")
                    elif output:
                        parts[title] = output
        return parts

    def _write(self, parts: dict[str, bytes]) -> None:
        """Write the profile of the open steps.

        Args:
            parts: compressed recordings of the workers by title. The recording of this process is
                added.
        """
        first = self._open[0]
        last = self._open[-1]
        self._open = []
        # The recording that `_start` has made in this process.
        recording = Recording.current
        if recording is not None:
            parts = {recording.title: recording.finish(), **parts}

        name = f"step_{first}" if first == last else f"steps_{first}-{last}"
        tool = self._section.tool
        if tool == "nsys":
            self._emit(f"profile {name}: Nsight Systems has its range, and writes its reports")
            return

        folder = Path(self._section.save_path).expanduser()
        folder.mkdir(parents=True, exist_ok=True)
        if tool == "torch_memory":
            for title, part in parts.items():
                path = folder / f"{name}.{title}.memory.pickle"
                path.write_bytes(zlib.decompress(part))
                self._emit(f"profile written to {path}")
            return

        path = folder / f"{name}.json.gz"
        # Each part is a comma-separated list of events; together they are one JSON document.
        with gzip.open(path, "wb", compresslevel=6) as file:
            separator = b'{"displayTimeUnit": "ms", "traceEvents": [\n'
            for part in parts.values():
                file.write(separator + zlib.decompress(part))
                separator = b",\n"
            file.write(b"\n]}\n")
        self._emit(f"profile written to {path}")
