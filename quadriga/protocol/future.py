# SPDX-License-Identifier: Apache-2.0
"""The result of a call that has not been waited for.

group.method(data)  with blocking=False
  returns a DataProtoFuture      the workers compute
  .get()                         waits for every worker, collects their outputs
  passed on to another group     each rank gets a future of its chunk and resolves it where it runs,
                                 so the rows never pass through the driver
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from quadriga.protocol.proto import DataProto

Resolve = Callable[[Sequence[Any]], list[Any]]


def resolve_results(futures: Sequence[Any]) -> list[Any]:
    """Wait for `concurrent.futures.Future`-like objects (those with a `result` method), in order."""
    return [future.result() for future in futures]


@dataclass(frozen=True)
class DataProtoFuture:
    """Outputs to come, and what is to be done with them when they are there.

    Attributes:
        collect_fn: makes one value of the list of outputs.
        futures: one handle per worker that was called.
        dispatch_fn: applied to what was collected.
        resolve: waits for the handles and returns their values; each backend has its own.
        rows_of: numbers of the outputs whose rows `collect_fn` joins, in order: a part of the rows is then taken
            without copying the others. None: `collect_fn` does something else.
        chunks: the part that is taken: chunk `number` of `count`, of that chunk the next, and so on.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: Sequence[Any]
    dispatch_fn: Callable[[Any], Any] | None = None
    resolve: Resolve = resolve_results
    rows_of: Sequence[int] | None = None
    chunks: tuple[tuple[int, int], ...] = ()

    @staticmethod
    def concat(data: Sequence[Any], resolve: Resolve = resolve_results) -> "DataProtoFuture":
        """A future of all rows of the outputs behind the handles `data`."""
        return DataProtoFuture(DataProto.concat, list(data), resolve=resolve, rows_of=range(len(data)))

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """Futures of the parts that `get().chunk(chunks)` would give; waits for nothing."""
        return [replace(self, chunks=(*self.chunks, (number, chunks))) for number in range(chunks)]

    def get(self) -> Any:
        """Wait, collect and return; a worker's error is raised here."""
        outputs = self.resolve(self.futures)
        parts = [outputs[number] for number in self.rows_of or ()] if self.chunks and self.dispatch_fn is None else []
        if not parts or not all(isinstance(part, DataProto) for part in parts):
            output = self.collect_fn(outputs)
            output = output if self.dispatch_fn is None else self.dispatch_fn(output)
            for number, count in self.chunks:
                output = output.chunk(count)[number]
            return output
        wanted = np.arange(sum(map(len, parts)))
        for number, count in self.chunks:
            wanted = np.array_split(wanted, count)[number]
        start, end = (int(wanted[0]), int(wanted[-1]) + 1) if len(wanted) else (0, 0)
        views, first = [], 0
        # No part is left out: `meta_info` counts in a concatenation even where there are no rows.
        for part in parts:
            views.append(part.slice(max(0, start - first), max(0, end - first)))
            first += len(part)
        return DataProto.concat(views)
