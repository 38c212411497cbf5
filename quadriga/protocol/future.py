# SPDX-License-Identifier: Apache-2.0
"""The result of a call that has not been waited for.

group.method(data)  with blocking=False
  returns a DataProtoFuture      the workers compute
  .get()                         waits for every worker, collects their outputs
  passed on to another group     each rank gets a future of its chunk and resolves it where it runs,
                                 so the rows never pass through the driver
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from quadriga.protocol.proto import DataProto

Resolve = Callable[[Sequence[Any]], list[Any]]


def resolve_results(futures: Sequence[Any]) -> list[Any]:
    """Wait for `concurrent.futures.Future`-like objects (those with a `result` method), in order."""
    return [future.result() for future in futures]


def _chunk_of(output: DataProto, number: int, chunks: int, before: Callable[[Any], Any] | None) -> DataProto:
    output = output if before is None else before(output)
    return output.chunk(chunks)[number]


@dataclass(frozen=True)
class DataProtoFuture:
    """Outputs to come, and what is to be done with them when they are there.

    Attributes:
        collect_fn: makes one value out of the list of outputs.
        futures: one handle per worker that was called.
        dispatch_fn: applied to what was collected; used to pick one rank's part.
        resolve: waits for the handles and returns their values; a backend with handles of its own
            passes its own (Ray: `ray.get`).
    """

    collect_fn: Callable[[list[Any]], Any]
    futures: Sequence[Any]
    dispatch_fn: Callable[[Any], Any] | None = None
    resolve: Resolve = resolve_results

    @staticmethod
    def concat(data: Sequence[Any], resolve: Resolve = resolve_results) -> "DataProtoFuture":
        """A future of all rows of the outputs behind the handles `data`."""
        return DataProtoFuture(collect_fn=DataProto.concat, futures=list(data), resolve=resolve)

    def chunk(self, chunks: int) -> "list[DataProtoFuture]":
        """Futures of the parts that `get().chunk(chunks)` would give; waits for nothing."""
        return [
            DataProtoFuture(
                self.collect_fn,
                self.futures,
                partial(_chunk_of, number=number, chunks=chunks, before=self.dispatch_fn),
                self.resolve,
            )
            for number in range(chunks)
        ]

    def get(self) -> Any:
        """Wait, collect and return; a worker's error is raised here."""
        output = self.collect_fn(self.resolve(self.futures))
        return output if self.dispatch_fn is None else self.dispatch_fn(output)
