# SPDX-License-Identifier: Apache-2.0
"""Products in every form of the weights, against float64: sums are rounded once, factors not at all.

What it does not prove: that the forms are faster, and anything on a processor with tiles beyond the form it takes.
"""

import pytest
import torch

from quadriga.models.experts import mixtures
from quadriga.rollout.native.kernels import about_kernels, kernels
from quadriga.rollout.native.network import Network, description_of
from quadriga.rollout.native.products import (
    Forms,
    OwnWeight,
    PackedWeight,
    Weight,
    WideWeight,
    can_pack,
    has_fast_bfloat16,
    has_mkl,
)
from tests.moe import CONFIGS, moe_model

IS_FAST = has_fast_bfloat16()
needs_packing = pytest.mark.skipif(
    not can_pack(), reason="this build of torch packs no bfloat16 weights"
)
needs_loops = pytest.mark.skipif(kernels() is None, reason=about_kernels())
FORMS = [
    pytest.param(OwnWeight, torch.bfloat16, marks=needs_loops),
    pytest.param(PackedWeight, torch.bfloat16, marks=needs_packing),
    (WideWeight, torch.bfloat16),
    (WideWeight, torch.float16),
    (WideWeight, torch.float32),
]
SIZES = [(96, 40), (7, 513), (1, 1)]  # D and O; the loop takes the first ones alone
ROWS = [1, 2, 6, 7, 16, 17, 24, 25, 64, 127, 128, 300]


def factors(
    num_rows: int, num_inputs: int, num_outputs: int, dtype: torch.dtype
) -> list[torch.Tensor]:
    """States, weight and bias; the weights spread over 30 powers of two."""
    generator = torch.Generator().manual_seed(num_rows)
    weight = torch.randn(num_outputs, num_inputs, generator=generator)
    weight *= 2.0 ** -torch.randint(0, 30, weight.shape, generator=generator)
    states = torch.randn(num_rows, num_inputs, generator=generator)
    return [
        one.to(dtype) for one in (states, weight, torch.randn(num_outputs, generator=generator))
    ]


@pytest.mark.parametrize(("form", "dtype"), FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("num_rows", ROWS)
def test_products_are_exact(
    form: type[OwnWeight | PackedWeight | WideWeight],
    dtype: torch.dtype,
    has_bias: bool,
    num_rows: int,
) -> None:
    """For any number of rows, and not only the one that the order was chosen for; of two weights side by side."""
    for num_inputs, num_outputs in SIZES[:1] if form is OwnWeight else SIZES:
        states, weight, bias = factors(num_rows, num_inputs, num_outputs, dtype)
        cut = num_outputs // 10 * 4
        weights, biases = [weight[:cut], weight[cut:]], [bias[:cut], bias[cut:]]
        wanted = states.double() @ weight.double().t() + (bias.double() if has_bias else 0.0)
        found = form(weights, biases if has_bias else None).multiply(states[:, None])[:, 0]
        # A bfloat16 result is rounded once, by at most 2**-8 of it.
        rtol = 0 if found.dtype == torch.float32 else 2**-8
        torch.testing.assert_close(found.double(), wanted, rtol=rtol, atol=2e-5)


@needs_packing
def test_the_number_of_rows_chooses_the_form() -> None:
    _, weight, _ = factors(1, 8, 8, torch.bfloat16)
    few = PackedWeight([weight], None)
    twofold = Weight(few, WideWeight([weight], None))
    assert twofold.multiply(torch.ones(few.max_rows, 8).bfloat16()).dtype == torch.bfloat16
    assert twofold.multiply(torch.ones(few.max_rows + 1, 8).bfloat16()).dtype == torch.float32


@needs_loops
def test_the_own_loop_follows_the_parameter() -> None:
    """It reads the parameter itself, and gives a head's logits without rounding them."""
    states, weight, _ = factors(3, 32, 8, torch.bfloat16)
    own = OwnWeight([weight], None, torch.float32)
    assert own.multiply(states).dtype == torch.float32
    weight.zero_()
    assert torch.equal(own.multiply(states), torch.zeros(3, 8))


@pytest.mark.skipif(not has_mkl(), reason="this build of torch has no MKL")
def test_a_packed_weight_does_not_follow_the_parameter() -> None:
    """The engine makes new forms after an update; MKL's operator could otherwise fall back on the weight itself."""
    states, weight, _ = factors(3, 8, 8, torch.float32)
    wide = WideWeight([weight], None)
    before = wide.multiply(states)
    weight.zero_()
    assert torch.equal(wide.multiply(states), before)


@pytest.mark.skipif(not (has_mkl() and can_pack()) or IS_FAST, reason="another kind of processor")
def test_float32_takes_no_more_memory_than_there_is_for_it() -> None:
    few = PackedWeight if kernels() is None else OwnWeight
    expected = {
        (torch.bfloat16, 10**9): (few, WideWeight),
        (torch.bfloat16, 10**10): (few, PackedWeight),
        (torch.float32, 10**9): (None, WideWeight),
        (torch.float32, 10**10): (None, None),
        (torch.float16, 1): (None, None),
    }
    for (dtype, num_weights), pair in expected.items():
        forms = Forms(dtype, num_weights)
        assert (forms.few, forms.many) == pair
        assert ("MKL" in forms.description) == (WideWeight in pair)


@needs_loops
@pytest.mark.skipif(not has_mkl() or IS_FAST, reason="another kind of processor")
def test_weights_that_the_loop_does_not_take_have_one_form() -> None:
    """Of a layer and of the head, one by one; the head's results are never rounded."""
    forms = Forms(torch.bfloat16, 1000)
    for num_outputs, few in ((8, OwnWeight), (7, type(None))):
        _, weight, bias = factors(1, 32, num_outputs, torch.bfloat16)
        layer, head = forms.make([weight], [bias]), forms.make([weight], [bias], is_head=True)
        assert layer is not None and head is not None
        assert type(layer.few) is type(head.few) is few
        assert type(layer.many) is type(head.many) is WideWeight
        assert head.multiply(torch.ones(1, 32).bfloat16()).dtype == torch.float32


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_experts_by_their_own_tokens(family: str, dtype: torch.dtype) -> None:
    """What the family's module computes, whatever its gate, its biases and the order of its weights; an expert that no
    token chose, too."""
    model = moe_model(family).to(dtype)
    if Forms(dtype, 0).many is None:
        pytest.skip("no form of the weights is faster here")
    assert "experts in a loop" in description_of(model)
    products = Network(model).products
    generator = torch.Generator().manual_seed(0)
    for mixture in mixtures(model):
        for num_rows in (1, 40):
            rows = torch.randn(num_rows, model.config.hidden_size, generator=generator).to(dtype)
            scores = torch.rand(num_rows, 2, generator=generator).to(dtype)
            chosen = torch.rand(num_rows, 3, generator=generator).topk(2).indices
            with torch.no_grad():
                expected, found = (
                    one(rows, chosen, scores)
                    for one in (mixture.experts, products[mixture.experts])
                )
            near = 0.02 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(
                found, expected, atol=near * float(expected.abs().max()), rtol=near
            )
