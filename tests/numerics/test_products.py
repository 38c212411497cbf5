# SPDX-License-Identifier: Apache-2.0
"""Products in every form of the weights, against float64: sums are rounded once, factors not at all.

What it does not prove: that the forms are faster, and anything on a processor with tiles beyond the form it takes.
"""

import pytest
import torch

from quadriga.rollout.native.products import (
    FEW_ROWS,
    PackedWeight,
    TwofoldWeight,
    Weight,
    WideWeight,
    can_pack,
    form_for,
    has_mkl,
    has_tiles,
)

needs_packing = pytest.mark.skipif(not can_pack(), reason="this build of torch packs no bfloat16 weights")
FORMS = [
    pytest.param(PackedWeight, torch.bfloat16, marks=needs_packing),
    pytest.param(TwofoldWeight, torch.bfloat16, marks=needs_packing),
    (WideWeight, torch.bfloat16),
    (WideWeight, torch.float32),
]


def factors(num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """States, weight and bias; the weights spread over 30 powers of two."""
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    weight *= 2.0 ** -torch.randint(0, 30, weight.shape, generator=generator)
    states = torch.randn(num_rows, num_inputs, generator=generator)
    return [one.to(dtype) for one in (states, weight, torch.randn(num_outputs, generator=generator))]


@pytest.mark.parametrize(("form", "dtype"), FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, FEW_ROWS, FEW_ROWS + 1, 64, 127, 128, 300])
@pytest.mark.parametrize(("num_inputs", "num_outputs"), [(48, 40), (7, 513), (1, 1)])
def test_products_are_exact(
    form: type[Weight], dtype: torch.dtype, has_bias: bool, num_rows: int, num_inputs: int, num_outputs: int
) -> None:
    """For any number of rows, and not only the one that the order was chosen for."""
    states, weight, bias = factors(num_rows, num_inputs, num_outputs, dtype)
    wanted = states.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
    found = form(weight, bias if has_bias else None).multiply(states[:, None])[:, 0]
    # A bfloat16 result is rounded once, by at most 2**-8 of it.
    torch.testing.assert_close(found.double(), wanted, rtol=0 if found.dtype == torch.float32 else 2**-8, atol=2e-5)


@needs_packing
def test_many_rows_are_summed_in_float32() -> None:
    _, weight, _ = factors(1, 8, 8, torch.bfloat16)
    twofold = TwofoldWeight(weight, None)
    assert twofold.multiply(torch.ones(FEW_ROWS, 8).bfloat16()).dtype == torch.bfloat16
    assert twofold.multiply(torch.ones(FEW_ROWS + 1, 8).bfloat16()).dtype == torch.float32


@pytest.mark.skipif(not has_mkl(), reason="this build of torch has no MKL")
def test_a_packed_weight_does_not_follow_the_parameter() -> None:
    """The engine makes new forms after an update; MKL's operator could otherwise fall back on the weight itself."""
    states, weight, _ = factors(3, 8, 8, torch.float32)
    wide = WideWeight(weight, None)
    before = wide.multiply(states)
    weight.zero_()
    assert torch.equal(wide.multiply(states), before)


@pytest.mark.skipif(not (has_mkl() and can_pack()) or has_tiles(), reason="another kind of processor")
def test_float32_takes_no_more_memory_than_there_is_for_it() -> None:
    assert form_for(torch.bfloat16, 10**9) is TwofoldWeight
    assert form_for(torch.bfloat16, 10**10) is PackedWeight
    assert form_for(torch.float32, 10**9) is WideWeight
    assert form_for(torch.float32, 10**10) is None
    assert form_for(torch.float16, 1) is None
