# SPDX-License-Identifier: Apache-2.0
"""Matrix products with weights that stay for a while, for a model in bfloat16 on a CPU: fast for few rows and for many.

A decode step multiplies a few rows with every weight of the model. What that costs is above all to read the weights, so
they are kept a second time, in the forms in which libraries read them:

    this CPU has             few rows               many rows
    tiles (AMX)              oneDNN, bfloat16       the same
    FBGEMM, no tiles         FBGEMM, float16        float32
    neither                  oneDNN, bfloat16       float32

Float16 takes the longest to make, about as long as 30 steps, and after an update all is made anew. So a product begins
as if there was no FBGEMM, and `settle` makes its float16 weights once it is known that generation goes on.

The factors are those of training, sums are float32, and a result is rounded once, to what the caller asks for; only the
order of summation differs. That float16 holds bfloat16 weights needs a word: it has more digits and fewer exponents.
The weights are scaled by a power of two, so that the largest is near float16's largest. Then every weight is the same
number down to 2**-31 of the largest one, and below that off by at most 2**-39 of it, far less than a float32 sum is.

Legend: D inputs, O outputs.
"""

import math

import torch
from torch.nn.functional import linear

MANY_ROWS = 48  # from here on float32 is as fast as float16
_MANY_ROWS_OF_BFLOAT16 = 24
_MAX_WIDE_BYTES = 4 * 2**30
_PACKED_ROWS = 16  # for which oneDNN chooses the order of a weight; other numbers of rows are right, too
_HALF_EXPONENT = 15  # scaled weights lie below 2 to this power, half of float16's largest number


class HalfWeight:
    """FBGEMM: float16, widened on the way into float32 sums.

    Args:
        weight: [O, D] float32, in bfloat16's numbers
        bias: [O] float32, or None
        largest: of the weights, without their signs
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, largest: float) -> None:
        _, exponent = math.frexp(largest)
        self.scale = 2.0 ** (exponent - _HALF_EXPONENT)
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight / self.scale, bias)

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., O] float32"""
        return torch.ops.quantized.linear_dynamic_fp16(states.float() * self.scale, self.packed)


class PackedWeight:
    """oneDNN: bfloat16, in an order of its own.

    Args:
        weight: [O, D] bfloat16
        bias: [O] bfloat16, or None
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed, self.bias = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_ROWS), bias

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] bfloat16 -> [..., O] bfloat16"""
        return torch.ops.mkldnn._linear_pointwise(states, self.packed, self.bias, "none", [], "")


class WideWeight:
    """Float32. Arguments: see `PackedWeight`."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight.float(), None if bias is None else bias.float()

    def multiply(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] -> [..., O] float32"""
        if not has_tiles():
            return linear(states.float(), self.weight, self.bias)
        settings = torch.backends.mkldnn.matmul
        before = settings.fp32_precision
        settings.fp32_precision = "bf16"  # in tiles. Both factors are, so nothing is rounded; sums stay float32
        try:
            return linear(states.float(), self.weight, self.bias)
        finally:
            settings.fp32_precision = before


class Product:
    """`states @ weight.t() + bias`, by the form of the weight that is fastest for as many rows.

    Args:
        weight: [O, D] bfloat16
        bias: [O] bfloat16, or None
        is_exact: whether the sums are returned as they are, float32.
        widens: whether there is memory, and a use, for float32 weights; `is_exact` has them anyway.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, is_exact: bool = False, widens: bool = False
    ) -> None:
        self.packed = None if is_exact else PackedWeight(weight, bias)
        self.wide = WideWeight(weight, bias) if is_exact or widens else None
        self.half: HalfWeight | None = None

    def settle(self) -> None:
        """Takes its time once, so that products with few rows are faster from here on."""
        if self.wide is None:
            return
        largest = float(self.wide.weight.abs().max())
        if math.isfinite(largest):  # FBGEMM would make a number of an infinite one
            self.half, self.packed = HalfWeight(self.wide.weight, self.wide.bias, largest), None

    def __call__(self, states: torch.Tensor) -> torch.Tensor:
        """[..., D] bfloat16 -> [..., O], float32 or, unless `is_exact`, bfloat16."""
        num_rows = states.shape[:-1].numel()
        if self.half is not None and num_rows < MANY_ROWS:
            return self.half.multiply(states)
        if self.packed is not None and (self.wide is None or num_rows < _MANY_ROWS_OF_BFLOAT16):
            return self.packed.multiply(states)
        assert self.wide is not None
        return self.wide.multiply(states)


def can_pack() -> bool:
    """Whether this build of torch packs bfloat16 weights for oneDNN, on a processor that multiplies them."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )


def can_widen(num_weights: int) -> bool:
    """Whether float32 weights are the faster ones for many rows, and not too large."""
    return not has_tiles() and 4 * num_weights <= _MAX_WIDE_BYTES


def has_tiles() -> bool:
    """Whether this processor multiplies bfloat16 in tiles."""
    return torch.cpu._is_amx_tile_supported()


def can_settle() -> bool:
    """Whether products with float16 weights are FBGEMM's."""
    is_fbgemm = torch.backends.quantized.engine in ("x86", "fbgemm")
    return is_fbgemm and hasattr(torch.ops.quantized, "linear_dynamic_fp16")
