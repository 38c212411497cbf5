# SPDX-License-Identifier: Apache-2.0
"""What is packed into buckets comes out of them, and a bucket keeps its size."""

import json

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from quadriga.errors import WeightSyncError
from quadriga.weight_sync.buckets import pack, unpack

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int64,
    torch.bool,
]
SHAPES = st.lists(st.integers(0, 7), min_size=0, max_size=3).map(tuple)


@given(st.lists(st.tuples(SHAPES, st.sampled_from(DTYPES)), max_size=12), st.integers(1, 3000))
def test_what_goes_in_comes_out(
    kinds: list[tuple[tuple[int, ...], torch.dtype]], bucket_bytes: int
) -> None:
    """Any shapes and dtypes, scalars and empty tensors, whatever a bucket holds; headers as they travel."""
    generator = torch.Generator().manual_seed(3)
    given_weights = [
        (f"w{number}", torch.randint(0, 2, shape, generator=generator).to(dtype))
        for number, (shape, dtype) in enumerate(kinds)
    ]
    taken = []
    for entries, content in pack(iter(given_weights), bucket_bytes):
        alone = len(entries) == 1
        assert content.numel() <= max(bucket_bytes, 64) or alone
        taken += [
            (name, tensor.clone())
            for name, tensor in unpack(json.loads(json.dumps(entries)), content)
        ]
    assert [name for name, _ in taken] == [name for name, _ in given_weights]
    for (_, left), (_, right) in zip(given_weights, taken, strict=True):
        assert left.shape == right.shape and left.dtype == right.dtype
        assert torch.equal(left, right)


def test_tensors_are_lent_one_after_the_other() -> None:
    """Whoever overwrites a tensor before giving the next one spoils nothing: it has been copied."""
    memory = torch.empty(8)

    def stream():
        for number in range(4):
            yield f"w{number}", memory.fill_(number)

    ((entries, content),) = list(pack(stream(), 1 << 10))
    assert [float(tensor[0]) for _, tensor in unpack(entries, content)] == [0, 1, 2, 3]


def test_small_tensors_share_a_bucket_and_a_large_one_is_not_copied() -> None:
    small, large = torch.ones(4), torch.ones(1000)
    packed = list(pack([("a", small), ("b", small), ("large", large), ("c", small)], 1024))
    assert [[entry[0] for entry in entries] for entries, _ in packed] == [
        ["a", "b"],
        ["large"],
        ["c"],
    ]
    assert packed[1][1].data_ptr() == large.data_ptr()


def test_a_bucket_that_was_cut_short() -> None:
    ((entries, content),) = list(pack([("a", torch.ones(4)), ("b", torch.ones(4))], 1024))
    with pytest.raises(
        WeightSyncError, match=r"weight b: got 4 bytes, expected 16, for float32 \(4,\)"
    ):
        list(unpack(entries, content[:-12]))
    with pytest.raises(WeightSyncError, match="dtype 'nn'"):
        list(unpack([["a", [1], "nn", 0]], content))
