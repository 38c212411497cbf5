# SPDX-License-Identifier: Apache-2.0
"""Profiles of chosen training steps: all processes of the run in one trace.

    driver     start_profile ──────> step ─────────────────────────────> stop_profile ──> one file
    workers      └ each rank of `<role>.profiler.ranks`: its operators, its calls ┘ parts

`step_N.json.gz` opens in https://ui.perfetto.dev and chrome://tracing. A snapshot of memory (`torch_memory`) is a file
for each rank; Nsight Systems (`nsys`) writes its reports itself.
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
    """Profiles the steps listed in `global_profiler.steps`; with no tool it does nothing and costs nothing.
    `groups`: by role; their processes are profiled beside this one.
    `emit`: is called with a sentence that says where each profile was written."""

    def __init__(
        self,
        config: Config,
        groups: Mapping[str, WorkerGroup[Any]],
        emit: Callable[[str], None] = print,
    ) -> None:
        self._config, self._section, self._groups, self._emit = (
            config,
            config.global_profiler,
            groups,
            emit,
        )
        self._steps = frozenset(self._section.steps) if self._section.tool else frozenset()
        self._open: list[int] = []  # steps of the profile that is going on

    @contextmanager
    def step(self, step: int, *, is_last: bool = False) -> Iterator[None]:
        """Profile the block if `step` is one of the chosen.

        When the block raises, what this process recorded is written: others may never come to an end.
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
        if is_last or not self._section.profile_continuous_steps or step + 1 not in self._steps:
            self._write(self._stop())

    def close(self) -> None:
        """Write what this process has recorded of a profile that is still open."""
        if self._open:
            self._write({})

    def _start(self) -> None:
        tool, origin_ns = str(self._section.tool), time.time_ns()
        if tool == "torch":
            Recording(tool, DRIVER, 0, origin_ns)
        started = []
        for number, (role, group) in enumerate(self._groups.items(), 1):
            wanted = profiled_ranks(self._config, role)
            orders = [
                (
                    tool,
                    f"{role}[{rank}]",
                    number * 1000 + rank,
                    origin_ns,
                    wanted is None or rank in wanted,
                )
                for rank in group.ranks
            ]
            started.append(
                (group, group.start_all("start_profile", [(order, {}) for order in orders]))
            )
        for group, handles in started:
            group.resolve(handles)

    def _stop(self) -> dict[str, bytes]:
        """The parts of the workers, by rank; a rank that is lost has none, and the run is as it was."""
        stopped, parts = [], {}
        for role, group in self._groups.items():
            titles = [f"{role}[{rank}]" for rank in group.ranks]
            handles = group.start_all("stop_profile", [((), {})] * len(titles))
            stopped.append((group, dict(zip(handles, titles, strict=True))))
        for group, titles in stopped:
            while titles:
                for handle, output in group.first_outcomes(list(titles)).items():
                    title = titles.pop(handle)
                    if isinstance(output, BaseException):
                        self._emit(f"no profile of {title}: {output}")
                    elif output:
                        parts[title] = output
        return parts

    def _write(self, parts: dict[str, bytes]) -> None:
        first, last = self._open[0], self._open[-1]
        self._open = []
        if Recording.current is not None:
            parts = {Recording.current.title: Recording.current.finish(), **parts}
        name, tool = (
            f"step_{first}" if first == last else f"steps_{first}-{last}",
            self._section.tool,
        )
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
        with gzip.open(path, "wb", compresslevel=6) as file:
            for number, part in enumerate(map(zlib.decompress, parts.values())):
                file.write(
                    (b",\n" if number else b'{"displayTimeUnit": "ms", "traceEvents": [\n') + part
                )
            file.write(b"\n]}\n")
        self._emit(f"profile written to {path}")
