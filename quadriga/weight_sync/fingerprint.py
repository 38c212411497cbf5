# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of parameters: a cheap hash of each tensor, so that an error can name what differs.

The bytes of a tensor form a matrix of 64-bit integers. Its row sums and its column sums, each
multiplied by its own odd number, are added modulo 2^64. Changing one number changes the result, and
so does swapping two numbers, except with a probability of about 2^-64. The hash is not
cryptographic.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

_ROW = 1024  # words in a row of the matrix
_WORD = 8  # bytes


@dataclass(frozen=True)
class Fingerprint:
    """Fingerprints of a set of named tensors.

    Attributes:
        tensors: `tensor_fingerprint` of each tensor, by name.
    """

    tensors: Mapping[str, str]

    def differences(self, other: "Fingerprint") -> list[str]:
        """Names that only one of the two has, or whose tensors differ, in alphabetical order."""
        names = self.tensors.keys() | other.tensors.keys()
        return sorted(name for name in names if self.tensors.get(name) != other.tensors.get(name))


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> Fingerprint:
    """Fingerprints of all tensors of a stream."""
    return Fingerprint({name: tensor_fingerprint(tensor) for name, tensor in weights})


def tensor_fingerprint(tensor: torch.Tensor) -> str:
    """Fingerprint of a tensor: 16 hexadecimal digits that depend on shape, dtype and content."""
    return _digest(tensor, *_weighted_sums(tensor).tolist())


class PendingFingerprints:
    """Fingerprints of a stream of tensors, whose sums stay on the device until all are read.

    Reading each fingerprint at once would make the host wait for the device for every tensor.
    """

    def __init__(self) -> None:
        self._tensors: dict[str, torch.Tensor] = {}  # shapes and dtypes, on the device "meta"
        self._sums: dict[str, torch.Tensor] = {}  # [2] int64

    def add(self, name: str, tensor: torch.Tensor) -> None:
        """Start to compute a fingerprint, without waiting for the device.

        Args:
            name: name of the tensor.
            tensor: the tensor. No reference to it is held afterwards.
        """
        self._tensors[name] = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        self._sums[name] = _weighted_sums(tensor)

    def read(self) -> dict[str, str]:
        """Wait for the fingerprints of all tensors, and return them by name."""
        if not self._sums:
            return {}
        # A CPU and a GPU may both have tensors of one stream.
        by_device = {}
        for name, sums in self._sums.items():
            by_device.setdefault(sums.device, []).append(name)
        digests = {}
        for names in by_device.values():
            rows = torch.stack([self._sums[name] for name in names]).tolist()
            for name, (row_sum, column_sum) in zip(names, rows, strict=True):
                digests[name] = _digest(self._tensors[name], row_sum, column_sum)
        return digests


def _digest(tensor: torch.Tensor, row_sum: int, column_sum: int) -> str:
    """Hash the weighted sums, the shape and the dtype of a tensor.

    Args:
        tensor: gives shape and dtype; it may be on "meta".
        row_sum: first of the tensor's `_weighted_sums`.
        column_sum: second of the tensor's `_weighted_sums`.

    Returns:
        16 hexadecimal digits.
    """
    source = repr((tuple(tensor.shape), str(tensor.dtype), (row_sum, column_sum)))
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()


@torch.no_grad()
def _weighted_sums(tensor: torch.Tensor) -> torch.Tensor:
    """Weighted sums of a tensor's row sums and column sums, modulo 2^64.

    The bytes are a matrix of 64-bit words with `_ROW` columns. Bytes at the end that do not fill a
    row are a second matrix, of one row.

    Args:
        tensor: [...].

    Returns:
        [2] int64 on the tensor's device: the weighted sum of all row sums, and that of all column
        sums.
    """
    content = tensor.detach().contiguous().flatten().view(torch.uint8)
    num_bytes = content.numel()
    full_rows, rest = content.tensor_split([num_bytes - num_bytes % (_ROW * _WORD)])
    # The last word is padded with zeros.
    rest = torch.nn.functional.pad(rest, (0, -num_bytes % _WORD))
    blocks = [block for block in (full_rows, rest) if block.numel()]

    row_sum = torch.zeros((), dtype=torch.int64, device=content.device)
    column_sum = row_sum
    for number, block in enumerate(blocks):
        # A view as int64 needs aligned memory. The offset of a uint8 tensor is in bytes.
        aligned = block.clone() if block.storage_offset() % _WORD else block
        words = aligned.view(torch.int64)
        matrix = words.view(-1, min(_ROW, words.numel()))
        # Rows and columns of both matrices have factors of their own.
        row_factors = _odd_numbers(matrix.shape[0], 2 * number + 1, content.device)
        column_factors = _odd_numbers(matrix.shape[1], 2 * number + 2, content.device)
        # int64 wraps around, which is arithmetic modulo 2^64. The factor 3 makes the order of the
        # two matrices count.
        row_sum = row_sum * 3 + (matrix.sum(1) * row_factors).sum()
        column_sum = column_sum * 3 + (matrix.sum(0) * column_factors).sum()
    return torch.stack([row_sum, column_sum])


def _odd_numbers(count: int, stream: int, device: torch.device) -> torch.Tensor:
    """Odd pseudo-random numbers: a multiplicative hash of each index.

    Args:
        count: number of numbers.
        stream: number of the sequence; different sequences have different numbers.
        device: device of the result.

    Returns:
        [count] int64.
    """
    # Different sequences start 2^40 apart, and so have no index in common.
    indices = torch.arange(1, count + 1, dtype=torch.int64, device=device).add_(stream << 40)
    mixed = indices.mul_(-7046029254386353131)  # 2^64 divided by the golden ratio, as int64
    mixed.bitwise_xor_(mixed >> 29).mul_(-4658895280553007687)  # a factor of splitmix64, as int64
    return mixed.bitwise_xor_(mixed >> 32).bitwise_or_(1)
