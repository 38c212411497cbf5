# SPDX-License-Identifier: Apache-2.0
"""Products in every form of the weights, against float64: sums are rounded once, factors not at all.

What it does not prove: that the forms are faster, and anything on a processor with tiles beyond the form it takes.
"""

import pytest
import torch

from quadriga.rollout.native.products import MANY_ROWS, HalfWeight, Product, can_pack, can_settle

needs_packing = pytest.mark.skipif(not can_pack(), reason="this build of torch packs no bfloat16 weights")
needs_fbgemm = pytest.mark.skipif(not can_settle(), reason="this build of torch has no FBGEMM")
NUM_INPUTS, NUM_OUTPUTS = 48, 40


def factors(seed: int, num_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """States, weight and bias in bfloat16; the weights spread over 30 powers of two."""
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(NUM_OUTPUTS, NUM_INPUTS, generator=generator)
    weight *= 2.0 ** -torch.randint(0, 30, weight.shape, generator=generator)
    states = torch.randn(num_rows, NUM_INPUTS, generator=generator)
    return states.bfloat16(), weight.bfloat16(), torch.randn(NUM_OUTPUTS, generator=generator).bfloat16()


@needs_packing
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("is_settled", [False, pytest.param(True, marks=needs_fbgemm)])
@pytest.mark.parametrize("num_rows", [1, 30, MANY_ROWS])
def test_products_are_exact(num_rows: int, is_settled: bool, has_bias: bool) -> None:
    states, weight, bias = factors(num_rows, num_rows)
    wanted = states.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
    for is_exact in (True, False):
        product = Product(weight, bias if has_bias else None, is_exact=is_exact, widens=True)
        if is_settled:
            product.settle()
        found = product(states)
        # A bfloat16 result is rounded once, by at most 2**-8 of it.
        torch.testing.assert_close(found.double(), wanted, rtol=0 if found.dtype == torch.float32 else 2**-8, atol=2e-5)
        assert found.dtype == torch.float32 or not is_exact


@needs_packing
@needs_fbgemm
def test_float16_takes_over_where_it_is_faster() -> None:
    _, weight, _ = factors(0, 1)
    product = Product(weight, None, widens=True)
    product.settle()
    assert product(torch.ones(MANY_ROWS - 1, NUM_INPUTS).bfloat16()).dtype == torch.float32
    assert product.half is not None and product.packed is None


@needs_fbgemm
@pytest.mark.parametrize("largest", [0.0, 1e-30, 1.0, 3e30])
def test_float16_holds_weights_of_any_size(largest: float) -> None:
    """One number an output: what comes back for a unit vector is the weight itself, bit for bit."""
    weight = (torch.tensor([1.0, -0.5, 2**-20 * 1.0078125, 0.0]) * largest).bfloat16().float()[:, None]
    half = HalfWeight(weight, None, float(weight.abs().max()))
    assert torch.equal(half.multiply(torch.ones(1, 1))[0], weight[:, 0])


@needs_packing
@needs_fbgemm
def test_a_weight_that_is_no_number_stays_one() -> None:
    """FBGEMM would make the largest float16 number of an infinite weight."""
    states, weight, _ = factors(0, 2)
    weight[3, 4] = float("inf")
    product = Product(weight, None, widens=True)
    product.settle()
    assert not product(states)[:, 3].isfinite().any()
