# SPDX-License-Identifier: Apache-2.0
"""Fingerprints of weights: cheap, and one for each tensor, so that a difference can be named.

The bytes of a tensor are a matrix of 64-bit integers. Its row sums and its column sums, each times an odd number of its
own, are added modulo 2^64. Any change of one number changes the result, and so does an exchange of two numbers, but for
a chance of about 2^-64. It is not cryptographic.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch

_ROW = 1024
_WORD = 8  # bytes


@dataclass(frozen=True)
class Fingerprint:
    """Of a set of named tensors."""

    tensors: Mapping[str, str]

    def differences(self, other: "Fingerprint") -> list[str]:
        """Names that are in only one of the two, or differ, in alphabetical order."""
        names = self.tensors.keys() | other.tensors.keys()
        return sorted(name for name in names if self.tensors.get(name) != other.tensors.get(name))


def fingerprint(weights: Iterable[tuple[str, torch.Tensor]]) -> Fingerprint:
    """Of every tensor of a stream."""
    return Fingerprint({name: tensor_fingerprint(tensor) for name, tensor in weights})


@torch.no_grad()
def tensor_fingerprint(tensor: torch.Tensor) -> str:
    """16 hexadecimal digits from shape, dtype and content; where the tensor lives does not matter."""
    sums = _sums(tensor.detach().contiguous().flatten().view(torch.uint8))
    source = repr((tuple(tensor.shape), str(tensor.dtype), sums))
    return hashlib.blake2b(source.encode(), digest_size=8).hexdigest()


def _sums(content: torch.Tensor) -> tuple[int, int]:
    """Weighted sums of [bytes] over rows and over columns, modulo 2^64."""
    whole = content.numel() - content.numel() % (_ROW * _WORD)
    parts = [content[:whole]] if whole else []
    if whole < content.numel():
        rest = content[whole:]
        padded = rest.new_zeros(-(-rest.numel() // _WORD) * _WORD)
        padded[: rest.numel()] = rest
        parts.append(padded)
    by_row = by_column = torch.zeros((), dtype=torch.int64, device=content.device)
    for number, part in enumerate(parts):
        words = part.clone() if part.storage_offset() % _WORD else part
        matrix = words.view(torch.int64).view(
            -1, _ROW if words.numel() >= _ROW * _WORD else words.numel() // _WORD
        )
        by_row = (
            by_row * 3
            + (matrix.sum(1) * _odd_numbers(matrix.shape[0], 2 * number + 1, content.device)).sum()
        )
        by_column = (
            by_column * 3
            + (matrix.sum(0) * _odd_numbers(matrix.shape[1], 2 * number + 2, content.device)).sum()
        )
    return int(by_row), int(by_column)


def _odd_numbers(count: int, stream: int, device: torch.device) -> torch.Tensor:
    """[count] int64, each odd and like random: a multiplicative hash of its place."""
    places = torch.arange(1, count + 1, dtype=torch.int64, device=device).add_(stream << 40)
    mixed = places.mul_(-7046029254386353131)  # 2^64 over the golden ratio, as a signed number
    mixed.bitwise_xor_(mixed >> 29).mul_(-4658895280553007687)
    return mixed.bitwise_xor_(mixed >> 32).bitwise_or_(1)
