# SPDX-License-Identifier: Apache-2.0
"""The path to compare with: a batch that serializes itself by `torch.save` of each consolidated chunk."""

import copyreg
import io
from typing import Any

import torch

from quadriga.protocol import DataProto


class DescribedProto(DataProto):
    """A DataProto whose state is the bytes that `torch.save` wrote, the arrays and the facts."""

    def __getstate__(self) -> tuple[Any, ...]:
        buffer = io.BytesIO()
        torch.save(self.batch.contiguous().consolidate(), buffer)
        return buffer.getvalue(), self.non_tensor_batch, self.meta_info

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        stream, self.non_tensor_batch, self.meta_info = state
        self.batch = torch.load(io.BytesIO(stream), map_location="cpu", weights_only=False)

    def __reduce_ex__(self, protocol: int) -> tuple[Any, ...]:
        # DataProto's own would be the wire format.
        return copyreg.__newobj__, (type(self),), self.__getstate__()


def described_chunks(data: DataProto, ranks: int) -> list[DescribedProto]:
    """The chunks of the ranks."""
    return [
        DescribedProto(part.batch, part.non_tensor_batch, part.meta_info)
        for part in data.chunk(ranks)
    ]
