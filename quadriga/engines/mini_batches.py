# SPDX-License-Identifier: Apache-2.0
"""Which rows one optimizer step learns from: a set of rows of the whole batch, whichever processes hold them.

The order of the whole batch decides, shuffled or not; each process takes those of the set that it has. So the
mini-batches, and with them the gradients, do not depend on how the rows were spread.

Legend: B rows here, b of them in a mini-batch.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quadriga.engines.process_group import ProcessGroup
from quadriga.errors import EngineError
from quadriga.protocol import DataProto


@dataclass(frozen=True)
class HeldRows:
    """The rows of a batch that this process has.

    Attributes:
        numbers: [B] int64: the number of each in the whole batch.
        num_all: rows of the whole batch.
    """

    numbers: torch.Tensor
    num_all: int

    @classmethod
    def of(cls, data: DataProto, replicas: ProcessGroup) -> "HeldRows":
        """Rows are numbered by `row_index` where there is such a column, else rank after rank.

        Raises:
            EngineError: the numbers are not those of a whole batch.
        """
        counts = replicas.gather(len(data))
        num_all = sum(counts)
        if "row_index" not in data.batch.keys():
            return cls(torch.arange(len(data)) + sum(counts[: replicas.rank]), num_all)
        numbers = data.batch["row_index"].cpu()
        if len(numbers) and not 0 <= int(numbers.min()) <= int(numbers.max()) < num_all:
            raise EngineError(
                "column row_index",
                got=f"numbers from {int(numbers.min())} to {int(numbers.max())} in a batch of {num_all} rows",
                expected=f"each number from 0 to {num_all - 1} once",
                fix="Number the rows after the last one was added or removed.",
            )
        return cls(numbers, num_all)


def mini_batches(rows: HeldRows, size: int, shuffle_seed: int | None) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The mini-batches of one pass, as many on every process.

    Args:
        rows: held here.
        size: rows of a mini-batch over all processes; the last may be smaller.
        shuffle_seed: of the order of the whole batch; None keeps it.

    Yields:
        The rows that are here, in order, and their places in the order of the whole batch: [b] int64 each.
    """
    places = rows.numbers
    if shuffle_seed is not None:
        order = torch.randperm(rows.num_all, generator=torch.Generator().manual_seed(shuffle_seed))
        places = torch.empty_like(order).scatter_(0, order, torch.arange(rows.num_all))[rows.numbers]
    sorted_places, sorted_rows = places.sort()
    for start in range(0, rows.num_all, size):
        first, last = torch.searchsorted(sorted_places, torch.tensor([start, start + size])).tolist()
        yield sorted_rows[first:last], sorted_places[first:last]
