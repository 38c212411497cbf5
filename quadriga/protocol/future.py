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

from quadriga.protocol.columns import chunk_bounds
from quadriga.protocol.proto import DataProto

Resolve = Callable[[Sequence[Any]], list[Any]]


def resolve_results(futures: Sequence[Any]) -> list[Any]:
    """Wait for `concurrent.futures.Future`-like objects (those with a `result` method), in order."""
    return [future.result() for future in futures]


@dataclass(frozen=True)
class ChunkOf:
    """Part `number` of `chunks` parts of what `before` makes of an output; of the output itself if that is None."""

    number: int
    chunks: int
    before: Callable[[Any], Any] | None = None

    def __call__(self, output: Any) -> Any:
        output = output if self.before is None else self.before(output)
        return output.chunk(self.chunks)[self.number]

    def bounds(self, rows: int) -> tuple[int, int] | None:
        """First row and the one after the last, of an output of `rows` rows; None: it takes the output to know."""
        whole: tuple[int, int] | None = (0, rows)
        if self.before is not None:
            whole = self.before.bounds(rows) if isinstance(self.before, ChunkOf) else None
        if whole is None:
            return None
        start, end = chunk_bounds(whole[1] - whole[0], self.chunks)[self.number]
        return whole[0] + start, whole[0] + end


@dataclass(frozen=True)
class DataProtoFuture:
    """Outputs to come, and what is to be done with them when they are there.

    Attributes:
        collect_fn: makes one value out of the list of outputs.
        futures: one handle per worker that was called.
        dispatch_fn: applied to what was collected; used to pick one rank's part.
        resolve: waits for the handles and returns their values; a backend with handles of its own
            passes its own.
        rows_of: of the outputs, those whose rows `collect_fn` puts one below the other, in that order;
            a part of the rows is then taken without copying the others. None: `collect_fn` does something else.
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: Sequence[Any]
    dispatch_fn: Callable[[Any], Any] | None = None
    resolve: Resolve = resolve_results
    rows_of: Callable[[list[Any]], list[Any]] | None = None

    @staticmethod
    def concat(data: Sequence[Any], resolve: Resolve = resolve_results) -> "DataProtoFuture":
        """A future of all rows of the outputs behind the handles `data`."""
        return DataProtoFuture(DataProto.concat, list(data), resolve=resolve, rows_of=list)

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """Futures of the parts that `get().chunk(chunks)` would give; waits for nothing."""
        return [replace(self, dispatch_fn=ChunkOf(number, chunks, self.dispatch_fn)) for number in range(chunks)]

    def get(self) -> Any:
        """Wait, collect and return; a worker's error is raised here."""
        outputs = self.resolve(self.futures)
        if isinstance(self.dispatch_fn, ChunkOf) and self.rows_of is not None:
            parts = self.rows_of(outputs)
            has_rows = all(isinstance(part, DataProto) for part in parts)
            bounds = self.dispatch_fn.bounds(sum(map(len, parts))) if has_rows else None
            if bounds is not None:
                views, first = [], 0
                # No part is left out: `meta_info` counts in a concatenation even where there are no rows.
                for part in parts:
                    views.append(part.slice(max(0, bounds[0] - first), max(0, bounds[1] - first)))
                    first += len(part)
                return DataProto.concat(views)
        output = self.collect_fn(outputs)
        return output if self.dispatch_fn is None else self.dispatch_fn(output)
