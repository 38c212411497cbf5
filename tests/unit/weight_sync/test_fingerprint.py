# SPDX-License-Identifier: Apache-2.0
"""Fingerprints change with every change, and with nothing else."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quadriga.weight_sync import fingerprint, tensor_fingerprint


@settings(deadline=None, max_examples=30)
@given(
    st.integers(1, 40000),
    st.sampled_from([torch.float32, torch.bfloat16, torch.int8]),
    st.integers(0, 10**6),
    st.integers(0, 10**6),
)
def test_one_number_more_or_less(count: int, dtype: torch.dtype, first: int, second: int) -> None:
    """Changing one number, or exchanging two different ones, changes the fingerprint."""
    tensor = (torch.arange(count) % 100).to(dtype)
    mark = tensor_fingerprint(tensor)
    assert tensor_fingerprint(tensor.clone()) == mark
    changed = tensor.clone()
    changed[first % count] += 1
    assert tensor_fingerprint(changed) != mark
    here, there = first % count, second % count
    exchanged = tensor.clone()
    exchanged[[here, there]] = tensor[[there, here]]
    assert (tensor_fingerprint(exchanged) == mark) == (tensor[here] == tensor[there]).item()


def test_shape_and_dtype_count_and_strides_do_not() -> None:
    """The same bytes in another shape or dtype are other weights; the same matrix stored otherwise is not."""
    tensor = torch.arange(12.0).view(3, 4)
    assert tensor_fingerprint(tensor) != tensor_fingerprint(tensor.view(4, 3))
    assert tensor_fingerprint(torch.zeros(2)) != tensor_fingerprint(
        torch.zeros(2, dtype=torch.int32)
    )
    assert tensor_fingerprint(tensor.t().contiguous().t()) == tensor_fingerprint(tensor)
    assert tensor_fingerprint(torch.arange(9.0)[1:]) == tensor_fingerprint(torch.arange(1.0, 9.0))
    assert tensor_fingerprint(torch.zeros(0)) != tensor_fingerprint(torch.zeros(0, 2))
    assert tensor_fingerprint(torch.tensor(1.0)) != tensor_fingerprint(torch.tensor(2.0))


def test_a_set_of_weights() -> None:
    """Order does not matter; differences are named."""
    one = {"a": torch.ones(3), "b": torch.zeros(5), "c": torch.arange(4.0)}
    other = {"c": torch.arange(4.0), "b": torch.full((5,), 1e-6), "a": torch.ones(3)}
    same = fingerprint(reversed(one.items()))
    assert fingerprint(one.items()) == same
    assert fingerprint(one.items()).differences(fingerprint(other.items())) == ["b"]
    del other["a"]
    assert fingerprint(one.items()).differences(fingerprint(other.items())) == ["a", "b"]
